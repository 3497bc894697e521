"""Tables and the recommendation of the study of merit, as JSON and Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from flowrl_compare.statistics import Estimate

from flowrl_bench.merit import STAGES, Costs, mean_costs, merit
from flowrl_bench.merit_rows import REFERENCE, ROWS, WORLDS
from flowrl_bench.merit_train import Key, Learned, learned
from flowrl_bench.statistics import interquartile_mean
from flowrl_bench.true_advantage import CreditReport, correlation_difference, credit_report

MARGIN = 0.02
"""A probe reaches the reference's correlation if the interval of the difference is above minus
this.
"""
HALF = 0.5
"""Of the reference's network evaluations for sampling and probe, at most, for a recommendation."""
NAMES = {"mixture": "2-D world", "shapes": "shapes world"}
Cell = tuple[str, str]


@dataclass(frozen=True)
class Judged:
    """A row in a cell. `difference`: its correlation minus the reference's, on the same
    trajectories.
    """

    row: str
    report: CreditReport
    looks: tuple[float, ...]
    costs: Costs
    difference: Estimate | None

    @property
    def merit(self) -> float:
        """rho^2 per network evaluation."""
        return merit(self.report.overall.correlation.value, self.costs.nfe)

    @property
    def merit_of_decisions(self) -> float:
        """The same times the distinct decisions of a trajectory: a tree has fewer of them per
        trajectory, so its gradient averages over fewer.
        """
        return self.merit * self.costs.decisions

    @property
    def slopes(self) -> list[float | None]:
        """By step, over the slope of all steps together; None at a step where nothing was
        decided.
        """
        overall = self.report.overall.slope.value
        return [
            step.slope.value / overall if step.count and overall else None
            for step in self.report.per_step
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        overall = self.report.overall
        return {
            "row": self.row,
            "kind": ROWS[self.row].kind,
            "settings": dict(ROWS[self.row].settings),
            "correlation": asdict(overall.correlation),
            "correlation_by_look": list(self.looks),
            "difference": self.difference and asdict(self.difference),
            "raw_correlation": overall.raw_correlation,
            "reliability": overall.reliability,
            "slope": asdict(overall.slope),
            "relative_slopes": self.slopes,
            "correlation_by_step": [step.correlation.value for step in self.report.per_step],
            "sign": asdict(overall.sign),
            "resolved": overall.resolved,
            "bias": asdict(overall.bias),
            "count": overall.count,
            **asdict(self.costs),
            "nfe": self.costs.nfe,
            "merit": self.merit,
            "merit_of_decisions": self.merit_of_decisions,
        }


def judged(
    cells: Mapping[Cell, Mapping[str, Mapping[str, Any]]], draws: int = 1000
) -> dict[Cell, list[Judged]]:
    """Agreement and costs of every row of every cell, in the order of `ROWS`."""
    result: dict[Cell, list[Judged]] = {}
    for cell in ((world, stage) for world in WORLDS for stage in STAGES):
        rows = cells.get(cell, {})
        reference = rows.get(REFERENCE)
        for name in (name for name in ROWS if name in rows and rows[name]["sums"]):
            row = rows[name]
            sums = torch.cat(row["sums"])
            looks = tuple(
                credit_report(part, row["steps"], 2).overall.correlation.value
                for part in row["sums"]
            )
            paired = (
                ROWS[name].kind in ("probe", "ceiling")
                and reference
                and len(reference["sums"]) == len(looks)
            )
            difference = (
                correlation_difference(sums, torch.cat(reference["sums"]), draws)
                if paired and reference
                else None
            )
            report = credit_report(sums, row["steps"], draws)
            result.setdefault(cell, []).append(
                Judged(name, report, looks, mean_costs(row["costs"]), difference)
            )
    return result


def not_applicable(
    cells: Mapping[Cell, Mapping[str, Mapping[str, Any]]],
) -> dict[tuple[str, str], str]:
    """Reasons by world and row."""
    return {
        (world, name): row["not_applicable"]
        for (world, _), rows in cells.items()
        for name, row in rows.items()
        if "not_applicable" in row
    }


@dataclass(frozen=True)
class Verdict:
    """Whether a probe can replace the reference.

    `share` of the reference's evaluations (sampling and probe) by world, whether it reaches the
    reference's correlation in every cell (`reaches`) and its result of training (None: not run in
    both worlds). `why`: the failed criteria.
    """

    row: str
    share: Mapping[str, float]
    reaches: bool
    trained: bool | None
    why: tuple[str, ...]

    @property
    def recommended(self) -> bool:
        """Half of the evaluations at most, the reference's correlation, and its result of
        training.
        """
        return bool(not self.why and self.reaches and self.trained)


def final_difference(
    lines: Mapping[Key, Mapping[str, Any]], world: str, row: str
) -> Estimate | None:
    """Final reward minus the reference's, paired by seed; None without common seeds."""
    finals = [
        line["final"] - other["final"]
        for (place, name, seed), line in sorted(lines.items())
        if (place, name) == (world, row)
        and "final" in line
        and (other := lines.get((world, REFERENCE, seed)))
    ]
    return interquartile_mean(finals) if finals else None


def verdicts(
    cells: Mapping[Cell, Sequence[Judged]],
    lines: Mapping[Key, Mapping[str, Any]],
    applicable: Iterable[str] = WORLDS,
) -> list[Verdict]:
    """Of every probe that was measured in all worlds."""
    runs = {(result.world, result.row): result for result in learned(lines)[0]}
    by_cell = {cell: {result.row: result for result in rows} for cell, rows in cells.items()}
    judgements = []
    for name in (row.name for row in ROWS.values() if row.kind == "probe"):
        if not by_cell or any(
            name not in rows or REFERENCE not in rows for rows in by_cell.values()
        ):
            continue
        why, share = list[str](), dict[str, float]()
        for (world, stage), rows in by_cell.items():
            result, other = rows[name], rows[REFERENCE]
            share[world] = (result.costs.sampling + result.costs.probe) / (
                other.costs.sampling + other.costs.probe
            )
            if result.difference is None or result.difference.low <= -MARGIN:
                why.append(f"lower correlation, {NAMES[world]} {stage} training")
        reaches = not why
        why += [
            f"{100 * part:.0f}% of the evaluations, {NAMES[world]}"
            for world, part in share.items()
            if part > HALF
        ]
        trained: bool | None = True
        for world in applicable:
            run, difference = runs.get((world, name)), final_difference(lines, world, name)
            if run is None or difference is None or run.seeds < 2:
                trained = trained and None
            elif not run.learns or difference.high < 0:
                trained = False
                why.append(f"{'ends lower' if run.learns else 'does not learn'}, {NAMES[world]}")
        judgements.append(Verdict(name, share, reaches, trained, tuple(why)))
    return judgements


def _interval(estimate: Estimate | None, digits: int = 2, sign: bool = False) -> str:
    return "" if estimate is None else estimate.text(digits, sign)


def _number(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}"


def credit_table(
    rows: Sequence[Judged], left_out: Mapping[str, str], kinds: Sequence[str]
) -> list[str]:
    """Markdown of one cell."""
    lines = [
        (
            "| row | correlation | minus Substeps(5) | right sign | relative slope by step |"
            " sampling | probe | update | decisions | merit x 1000 | x decisions | ms |"
        ),
        "|---|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    by_name = {result.row: result for result in rows}
    for row in (row for row in ROWS.values() if row.kind in kinds):
        if row.name in left_out:
            lines.append(f"| {row.name} | not applicable | | | | | | | | | | |")
        elif row.name in by_name:
            result = by_name[row.name]
            overall, costs = result.report.overall, result.costs
            slopes = " ".join("-" if slope is None else f"{slope:.1f}" for slope in result.slopes)
            gap = _interval(result.difference, 2, True)
            lines.append(
                f"| {row.name} | {_interval(overall.correlation)} | {gap} |"
                f" {overall.sign.value:.2f} | {slopes} | {_number(costs.sampling)} |"
                f" {_number(costs.probe)} | {_number(costs.update, 2)} |"
                f" {_number(costs.decisions, 2)} | {1000 * result.merit:.1f} |"
                f" {1000 * result.merit_of_decisions:.1f} | {1000 * costs.seconds:.2g} |"
            )
    return lines


def compact_table(
    cells: Mapping[Cell, Sequence[Judged]],
    left_out: Mapping[tuple[str, str], str],
    kinds: Sequence[str],
    world: str = "shapes",
) -> list[str]:
    """Markdown: the correlation in every cell, and costs and merit in one world after training.
    "-": not measured.
    """
    columns = [f"{NAMES[place]}, {stage}" for place, stage in cells]
    lines = [
        (
            f"| row | {' | '.join(columns)} | NFE: sampling + probe + update | merit x 1000 | x"
            " decisions |"
        ),
        f"|---|{'---|' * len(columns)}---|---:|---:|",
    ]
    by_cell = {cell: {result.row: result for result in rows} for cell, rows in cells.items()}
    for name in (row.name for row in ROWS.values() if row.kind in kinds):
        texts = []
        for (place, _), rows in by_cell.items():
            missing = "not applicable" if (place, name) in left_out else "-"
            texts.append(
                _interval(rows[name].report.overall.correlation) if name in rows else missing
            )
        result = by_cell.get((world, STAGES[-1]), {}).get(name)
        spent, merits = "", ("", "")
        if result is not None:
            costs = result.costs
            spent = f"{costs.sampling:.1f} + {costs.probe:.1f} + {costs.update:.2f}"
            merits = f"{1000 * result.merit:.1f}", f"{1000 * result.merit_of_decisions:.1f}"
        lines.append(f"| {name} | {' | '.join(texts)} | {spent} | {merits[0]} | {merits[1]} |")
    return lines


def train_table(lines: Mapping[Key, Mapping[str, Any]]) -> list[str]:
    """Markdown of the training runs of both worlds."""
    trained, left_out = learned(lines)
    table = [
        (
            "| world | row | seeds | base | final minus base | worst seed | minus Substeps(5) |"
            " sampling | probe | update | seconds of a run | learns |"
        ),
        "|---|---|---:|---:|---|---:|---|---:|---:|---:|---:|---|",
    ]
    runs = {(run.world, run.row): run for run in trained}
    for world in WORLDS:
        for row in (row.name for row in ROWS.values() if row.trained):
            if (world, row) in left_out:
                table.append(f"| {NAMES[world]} | {row} | | | not applicable | | | | | | | |")
            elif (world, row) in runs:
                table.append(_train_line(runs[world, row], final_difference(lines, world, row)))
    return table


def _train_line(run: Learned, difference: Estimate | None) -> str:
    gap = "" if run.row == REFERENCE else _interval(difference, 3, True)
    answer = "yes" if run.learns else "one seed only" if run.seeds < 2 else "**no**"
    return (
        f"| {NAMES[run.world]} | {run.row} | {run.seeds} | {run.base:.3f} |"
        f" {_interval(run.gain, 3, True)} | {run.worst:+.3f} | {gap} | {run.sampling:.1f} |"
        f" {run.probe:.1f} | {run.update:.2f} | {run.seconds:.0f} | {answer} |"
    )


def recommendation(judgements: Sequence[Verdict]) -> str:
    """One paragraph."""
    chosen = [verdict for verdict in judgements if verdict.recommended]
    if chosen:
        best = min(chosen, key=lambda verdict: max(verdict.share.values()))
        share = " and ".join(
            f"{100 * part:.0f}% in the {NAMES[world]}" for world, part in best.share.items()
        )
        others = ", ".join(f"*{verdict.row}*" for verdict in chosen if verdict is not best)
        also = (
            f" {others} fulfil{'s' if len(chosen) == 2 else ''} the criteria too." if others else ""
        )
        spec = ROWS[best.row].settings["credit"]
        return (
            f'**Use *{best.row}*** in place of Substeps(5): `--credit "{spec}"`. It takes {share}'
            " of the evaluations for sampling and probe. Its correlation minus that of Substeps(5)"
            f" is above -{MARGIN} (lower end of the interval) before and after training in both"
            f" worlds, and it holds in training.{also}"
        )
    return "No cheaper probe can replace Substeps(5) by the criteria below."


def verdict_table(judgements: Sequence[Verdict]) -> list[str]:
    """Markdown: why a probe is recommended or not."""
    table = [
        (
            "| probe | evaluations / Substeps(5), 2-D and shapes | reaches its correlation | holds"
            " in training | where it fails |"
        ),
        "|---|---|---|---|---|",
    ]
    for verdict in judgements:
        share = ", ".join(f"{100 * part:.0f}%" for part in verdict.share.values())
        holds = {True: "yes", False: "no", None: "not run yet"}[verdict.trained]
        places: dict[str, list[str]] = {}
        for reason in verdict.why:
            what, _, where = reason.partition(", ")
            if not what.endswith("of the evaluations"):  # the second column has these
                places.setdefault(what, []).append(where.removesuffix(" training"))
        fails = "; ".join(f"{what}: {', '.join(where)}" for what, where in places.items())
        table.append(
            f"| {verdict.row} | {share} | {'yes' if verdict.reaches else 'no'} | {holds}"
            f" | {fails} |"
        )
    return table
