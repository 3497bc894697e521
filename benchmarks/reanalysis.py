"""An analysis of the credit-rule comparison that shares no code with `flowrl_bench`.

It finds the runs of every arm in the published lines by the settings that the details print,
computes every comparison by the definitions of ``docs/verdicts.md`` (``reanalysis_statistics.py``),
and compares the results with the published pages to the printed precision. The exit status is 1 if
a number differs. A second; no network evaluations.

    python benchmarks/reanalysis.py --all
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from reanalysis_page import WORLDS, Part, Row, page_arms, page_parts, table
from reanalysis_robustness import lines as robustness
from reanalysis_statistics import (
    AXES,
    FORWARDS,
    SMALLEST,
    Comparison,
    Results,
    asked,
    by_seed,
    compare,
    holm,
    read_runs,
    t_test,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/claims.jsonl"
DOCS = ROOT / "docs"


def interval(ends: Sequence[float]) -> str:
    mean, low, high = list(ends)[:3]
    return f"{mean:+.6f} [{low:.6f}, {high:.6f}]"


Leads = dict[tuple[str, str], str]
"""The cell of the first page, by world and rule in words."""


def claim_rows(details: str, results: Results) -> tuple[list[Row], Leads]:
    """Every row of the claims' tables, with Holm's correction over the different outcomes that have
    a verdict in a world; and leads as the first page prints them.
    """
    gains, parts = results.gains(), list[tuple[Part, str, Comparison]]()
    families: dict[str, dict[str, Comparison]] = defaultdict(dict)
    for part in page_parts(details):
        rule = asked(part.rule)
        gained = [
            best - start for (world, _), (start, best) in gains.items() if world == part.world
        ]
        runs = {name: results.find(part.world, settings) for name, settings in part.arms.items()}
        comparison = compare(rule, runs, float(np.mean(gained))) if rule else None
        if rule is None or comparison is None:
            assert part.verdict == "secondary", f"{part.claim}: a verdict by {part.rule!r}"
            continue
        outcome = str((rule.measure, [part.arms[arm] for arm in rule.arms]))
        group = part.claim if part.claim.startswith("self-test") else part.world
        parts.append((part, outcome, comparison))
        if part.verdict != "secondary":
            families[group][outcome] = comparison
    rows, leads = list[Row](), Leads()
    corrected = {group: corrected_pairs(members) for group, members in families.items()}
    for part, outcome, comparison in parts:
        group = part.claim if part.claim.startswith("self-test") else part.world
        numbers = interval(
            np.exp(comparison.test[:3]).tolist() if comparison.log else comparison.test
        )
        pair = corrected.get(group, {}).get(outcome)
        symbol = ""
        if pair:
            numbers += ", p < .001" if pair[0] < 0.001 else f", p {pair[0]:.6f}"
            symbol = comparison.symbol(*pair)
        rows.append(
            Row(
                part.claim,
                part.what,
                f"{part.numbers} {symbol and part.verdict[-1]}",
                f"{numbers} {symbol}",
            )
        )
        rows.append(
            Row(
                part.claim,
                f"{part.what}: seeds won",
                f"{part.seeds} seeds, {part.won}",
                f"{comparison.seeds} seeds, {100 * comparison.won:.0f}%",
            )
        )
        if part.claim.startswith("lead-"):
            leads[part.world, part.rule] = f"{symbol} {interval(comparison.test)}".strip()
    return rows, leads


def corrected_pairs(members: Mapping[str, Comparison]) -> dict[str, tuple[float, float]]:
    """Both corrected p-values by outcome."""
    comparisons = list(members.values())
    p = holm(
        [comparison.test.p for comparison in comparisons]
        + [comparison.outside for comparison in comparisons]
    )
    return dict(
        zip(members, zip(p[: len(comparisons)], p[len(comparisons) :], strict=True), strict=True)
    )


def margin_rows(page: str, results: Results) -> Iterator[Row]:
    """The possible gain, and the smallest difference that matters."""
    gains = results.gains()
    for world, task, *cells in table(page.split("## Smallest difference")[1].split("\n## ")[0]):
        start, best = gains[WORLDS[world], task]
        recomputed = f"{start:.6f} {best:.6f} {SMALLEST * (best - start):.6f}"
        yield Row(f"margin, {world}", task, " ".join((*cells[:2], cells[3])), recomputed)


def main_rows(page: str, details: str, results: Results, leads: Leads) -> Iterator[Row]:
    """The main comparison."""
    settings, budgets = page_arms(details), list(AXES)[:3]
    for label, world in WORLDS.items():
        title = f"{label[0].upper()}{label[1:]}"
        for cells in table(page.split(f"### {title}\n")[1].split("\n##")[0]):
            name = cells[0].removesuffix(" (control)").split(" = ")[0]
            claim = {"uniform", name}
            keys = set.intersection(
                *(set(results.find(world, settings[world][arm])) for arm in claim)
            )
            runs = {
                key: run
                for key, run in results.find(world, settings[world][name]).items()
                if key in keys
            }
            areas = by_seed({key: run.area() for key, run in runs.items()})
            asks = [f"{name} against uniform (mean reward over {budget})" for budget in budgets]
            printed = [leads.get((world, rule), "-") for rule in asks]
            rule = f"{name} against uniform, larger groups (mean reward over equal {FORWARDS})"
            larger = [leads.get((world, rule), "-")] * (len(cells) > 8)  # without runs no column
            lost = f"{sum(run.collapsed for run in runs.values())} of {len(runs)}"
            recomputed = (
                cells[0],
                str(len(areas)),
                interval(t_test(areas)),
                *printed,
                lost,
                f"{areas.min():.6f}",
                *larger,
            )
            yield from cell_rows(f"main comparison, {label}", cells, recomputed)


def cell_rows(place: str, cells: Sequence[str], recomputed: Sequence[str]) -> Iterator[Row]:
    """A row per cell of a table."""
    for number, (page, second) in enumerate(zip(cells, recomputed, strict=True)):
        yield Row(place, f"{cells[0]}, cell {number}", page, second)


def all_rows(results: Path, docs: Path) -> list[Row]:
    """Every number that is compared."""
    page, details = (
        (docs / name).read_text("utf-8").replace("\xa0", " ")
        for name in ("claims.md", "claims/details.md")
    )
    runs = Results(read_runs(results))
    rows, leads = claim_rows(details, runs)
    return [*rows, *margin_rows(page, runs), *main_rows(page, details, runs, leads)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="print every number, not only those that differ"
    )
    parser.add_argument(
        "--robustness",
        action="store_true",
        help="print other tests of the 2-D main comparison instead",
    )
    options = parser.parse_args()
    if options.robustness:
        arms = page_arms((DOCS / "claims/details.md").read_text("utf-8"))["mixture"]
        print("\n".join(robustness(arms, Results(read_runs(RESULTS)))))
        return 0
    rows = all_rows(RESULTS, DOCS)
    differing = [row for row in rows if not row.agrees]
    for row in rows if options.all else differing:
        print(
            f"{' ' if row.agrees else '!'} {row.place:<34} {row.what}\n      page {row.page}\n     "
            f" own  {row.own}"
        )
    print(f"{len(rows)} entries of the pages compared, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
