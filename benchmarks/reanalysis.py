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
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from reanalysis_page import WORLDS, Part, Row, page_arms, page_parts, table
from reanalysis_robustness import lines as robustness
from reanalysis_statistics import (
    AXES,
    Comparison,
    Results,
    by_seed,
    compare,
    holm,
    read_runs,
    t_test,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/claims.jsonl"
DOCS = ROOT / "docs"


def family(claim: str, page: str) -> str:
    if claim == "self-test" or claim.startswith("lead-"):
        return claim.split("-")[0]
    papers = page.split("## Claims of the papers")[1].split("## Open questions")[0]
    return "papers" if f"[{claim}]" in papers else "questions"


def interval(ends: Sequence[float]) -> str:
    mean, low, high = list(ends)[:3]
    return f"{mean:+.6f} [{low:.6f}, {high:.6f}]"


Leads = dict[tuple[str, str], str]
"""The cell of the first page, by world and rule in words."""


def claim_rows(details: str, page: str, results: Results) -> tuple[list[Row], Leads]:
    """Every row of the claims' tables, with Holm's correction over the family's rows; and leads as
    the first page prints them.
    """
    families: dict[str, list[tuple[Part, Comparison | None]]] = defaultdict(list)
    for part in page_parts(details):
        runs = {name: results.find(part.world, settings) for name, settings in part.arms.items()}
        families[family(part.claim, page)].append((part, compare(part.rule, runs)))
    rows, leads = list[Row](), Leads()
    for members in families.values():
        complete = all(compared for _, compared in members)
        corrected = iter(holm([compared.test.p for _, compared in members if compared]))
        for part, compared in members:
            what, numbers, wins, alone = part.page.split(" | ")
            if compared is None:  # its p-value is missing from the family's correction
                continue
            p = next(corrected)
            symbol = compared.verdict(p, part.rule)
            second = interval(np.exp(compared.test[:3]).tolist() if compared.log else compared.test)
            if complete:
                second += f"{', p < .001' if p < 0.001 else f', p {p:.6f}'} {symbol}"
                rows.append(Row(part.claim, what, f"{numbers} {alone[-1]}", second))
            else:
                rows.append(
                    Row(
                        part.claim,
                        f"{what} (the p-value is not compared)",
                        numbers.split(", p")[0],
                        second,
                    )
                )
            counts = (
                f"{part.seeds} seeds, {wins}",
                f"{compared.seeds} seeds, {100 * compared.won:.0f}%",
            )
            rows.append(Row(part.claim, f"{what}: seeds won", *counts))
            if part.claim == "train-short" or part.claim.startswith("lead-"):
                leads[part.world, part.rule] = f"{symbol} {interval(compared.test)}"
    return rows, leads


def main_rows(page: str, details: str, results: Results, leads: Leads) -> Iterator[Row]:
    """The main comparison."""
    settings, budgets = page_arms(details), list(AXES)[:3]
    for label, world in WORLDS.items():
        title = f"{label[0].upper()}{label[1:]}"
        for cells in table(page.split(f"### {title}\n")[1].split("\n##")[0]):
            name = cells[0].removesuffix(" (control)").split(" = ")[0]
            claim = {"uniform", "uniform, larger groups", name}
            keys = set.intersection(
                *(set(results.find(world, settings[world][arm])) for arm in claim)
            )
            runs = {
                key: run
                for key, run in results.find(world, settings[world][name]).items()
                if key in keys
            }
            areas = by_seed({key: run.area() for key, run in runs.items()})
            asks = [
                f"asks: {name} against uniform (mean reward over {budget})" for budget in budgets
            ]
            asked = [leads.get((world, rule), "-") for rule in asks]
            larger = leads.get(
                (
                    world,
                    f"asks: {name} against uniform, larger groups (mean reward over equal NFE)",
                ),
                "-",
            )
            lost = f"{sum(run.collapsed for run in runs.values())} of {len(runs)}"
            mine = (
                cells[0],
                str(len(areas)),
                interval(t_test(areas)),
                *asked,
                lost,
                f"{areas.min():.6f}",
                larger,
            )
            yield from cell_rows(f"main comparison, {label}", cells, mine)


def cell_rows(place: str, cells: Sequence[str], mine: Sequence[str]) -> Iterator[Row]:
    """A row per cell of a table."""
    for number, (page, second) in enumerate(zip(cells, mine, strict=True)):
        yield Row(place, f"{cells[0]}, cell {number}", page, second)


def all_rows(results: Path, docs: Path) -> list[Row]:
    """Every number that is compared."""
    page, details = (
        (docs / name).read_text("utf-8").replace("\xa0", " ")
        for name in ("claims.md", "claims/details.md")
    )
    runs = Results(read_runs(results))
    rows, leads = claim_rows(details, page, runs)
    return [*rows, *main_rows(page, details, runs, leads)]


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
    given = parser.parse_args()
    if given.robustness:
        arms = page_arms((DOCS / "claims/details.md").read_text("utf-8"))["mixture"]
        print("\n".join(robustness(arms, Results(read_runs(RESULTS)))))
        return 0
    rows = all_rows(RESULTS, DOCS)
    differing = [row for row in rows if not row.agrees]
    for row in rows if given.all else differing:
        print(
            f"{' ' if row.agrees else '!'} {row.place:<34} {row.what}\n      page {row.page}\n     "
            f" own  {row.own}"
        )
    print(f"{len(rows)} entries of the pages compared, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
