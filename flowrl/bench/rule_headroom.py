"""What a world can tell about a rule: how far exact credit, or else the best baseline, leads
uniform credit there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.bench.digest import config_id
from flowrl.bench.evidence import Evidence, column
from flowrl.bench.page import Table
from flowrl.bench.results_file import Lines
from flowrl.bench.statistics import Curve, mean_until
from flowrl.compare.bounds import Bound, shipped_bound
from flowrl.run.config import RunConfig
from flowrl.run.statistics import Estimate, mean

UNIFORM, EXACT = "uniform", "exact credit"
TELLS, CANNOT, UNCLEAR = "can tell", "cannot tell", "unclear"


def verdict(headroom: Estimate, margin: float, is_bound: bool) -> str:
    """Whether a task can tell rules of credit apart: not if the headroom is a bound of what a rule
    can gain and its upper confidence limit is below the margin; yes if the headroom is at least
    twice the margin and its interval excludes 0.
    """
    if is_bound and headroom.high < margin:
        return CANNOT
    return TELLS if headroom.value >= 2 * margin and headroom.low > 0 else UNCLEAR


def bound_among(runs: Sequence[RunConfig], lines: Lines, command: str) -> Bound | None:
    """The curves of exact credit: those of `runs` that `lines` has, else shipped ones for exactly
    these settings.
    """
    exact = [line for run in runs if (line := lines.get(config_id(run))) is not None]
    if len(exact) >= 2:
        curves, seeds = ([column(line, "soft") for line in exact], [line["seed"] for line in exact])
        return Bound(column(exact[0], "iteration"), curves, seeds, command)
    return shipped_bound(runs[0].typed()) if runs else None


@dataclass(frozen=True)
class Headroom:
    """The lead of `arm` over uniform credit in mean reward over training, paired by seed.

    `margin`: the smallest difference that matters. `bound`: the curves, if the arm is exact credit;
    else the lead is the best known, and headroom at least that.
    """

    arm: str
    lead: Estimate
    margin: float
    seeds: int
    bound: Bound | None = None

    @property
    def label(self) -> str:
        """The verdict on the world. A best baseline without a lead,
        or exact credit that collapsed, does not show that no rule leads.
        """
        return verdict(self.lead, self.margin, self.bound is not None and not self.bound.collapsed)


def headroom(evidence: Evidence, margin: float, bound: Bound | None) -> Headroom | None:
    """The headroom by exact credit, over the seeds that it shares with uniform credit; else by the
    best of the other arms of `evidence`; None if there is none.
    """
    if UNIFORM not in evidence.runs:
        return None
    if bound is not None:
        uniform = dict(zip(evidence.seeds, evidence.values(UNIFORM, "area"), strict=True))
        exact = {
            seed: mean_until(Curve(bound.iterations, curve), bound.iterations[-1])
            for seed, curve in zip(bound.seeds, bound.curves, strict=True)
        }
        if len(shared := sorted(uniform.keys() & exact.keys())) >= 2:
            lead = mean([exact[seed] - uniform[seed] for seed in shared])
            return Headroom(EXACT, lead, margin, len(shared), bound)
    leads = {
        arm: mean(evidence.differences(arm, UNIFORM, "area"))
        for arm in evidence.runs
        if arm != UNIFORM
    }
    if not leads:
        return None
    arm = max(leads, key=lambda name: leads[name].value)
    return Headroom(arm, leads[arm], margin, len(evidence.seeds))


def sentence(world: str, result: Headroom | None, has_exact: bool) -> str:
    """Whether a world can tell rules apart, in words; `has_exact`: whether exact credit exists
    there.
    """
    missing = (
        "No curve of exact credit was computed for these settings (`--bound` does)."
        if has_exact
        else "Exact credit exists in the 2-D world only."
    )
    if result is None:
        return (
            f"It is not known whether the {world} can tell rules apart: uniform credit is the"
            f" only baseline. {missing}"
        )
    begin = {
        TELLS: f"The {world} can tell rules apart",
        CANNOT: f"A rule CANNOT be judged in the {world}",
        UNCLEAR: f"It is unclear whether the {world} can tell rules apart",
    }[result.label]
    limit = {
        TELLS: f", at least twice the smallest difference that matters ({result.margin:.3f})",
        CANNOT: f", all of it below the smallest difference that matters ({result.margin:.3f})",
        UNCLEAR: f"; the smallest difference that matters is {result.margin:.3f}",
    }[result.label]
    lead = f"minus uniform credit is {result.lead.text(sign=True)} over {result.seeds} seeds{limit}"
    if result.bound is None:
        return (
            f"{begin}: {result.arm}, the best baseline, {lead}. Another rule may lead by more."
            f" {missing}"
        )
    lost, count = result.bound.collapsed, len(result.bound.curves)
    collapsed = f" Exact credit collapsed in {lost} of {count} seeds." if lost else ""
    return f"{begin}: exact credit {lead}.{collapsed}"


def worlds_table(worlds: Mapping[str, Headroom | None]) -> Table:
    """Worlds by name with their headroom as numbers."""
    head = ("world", "verdict", "lead over uniform of", "lead", "low", "high", "margin", "seeds")
    rows = [
        (
            world,
            result.label,
            result.arm if result.bound else f"{result.arm} (best known, at least)",
            *(f"{getattr(result.lead, end):.4f}" for end in ("value", "low", "high")),
            f"{result.margin:.4f}",
            str(result.seeds),
            f"{result.bound.collapsed} of {len(result.bound.curves)}" if result.bound else "",
        )
        if result
        else (world, "not known", *[""] * (len(head) - 1))
        for world, result in worlds.items()
    ]
    return Table((*head, "collapsed"), rows)
