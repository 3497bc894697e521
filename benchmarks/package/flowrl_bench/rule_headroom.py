"""What a world can tell about a rule: how far exact credit leads uniform credit there, or without
exact credit the best baseline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl_compare.bounds import Bound, shipped_bound
from flowrl_compare.statistics import Estimate, mean

from flowrl.training.config import RunConfig
from flowrl_bench.digest import config_id
from flowrl_bench.evidence import Evidence, column
from flowrl_bench.headroom import CANNOT, TELLS, UNCLEAR, verdict
from flowrl_bench.page import Table
from flowrl_bench.results_file import Lines
from flowrl_bench.statistics import Curve, mean_until
from flowrl_bench.verdicts import by_seed

UNIFORM, EXACT = "uniform", "exact credit"


def bound_among(runs: Sequence[RunConfig], lines: Lines, command: str) -> Bound | None:
    """The curves of exact credit: those of `runs` that `lines` has, else shipped ones for exactly
    these settings.
    """
    found = [line for run in runs if (line := lines.get(config_id(run))) is not None]
    if len(found) >= 2:
        curves, seeds = ([column(one, "soft") for one in found], [one["seed"] for one in found])
        return Bound(column(found[0], "iteration"), curves, seeds, command)
    return shipped_bound(runs[0].flat()) if runs else None


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
        """The verdict on the world, that of `flowrl bench headroom`; neither a best baseline
        without a lead nor exact credit that collapsed shows that no rule has one.
        """
        return verdict(self.lead, self.margin, self.bound is not None and not self.bound.collapsed)


def headroom(evidence: Evidence, margin: float, bound: Bound | None) -> Headroom | None:
    """The headroom by exact credit, over the seeds that it shares with uniform credit; else by the
    best of the other arms of `evidence`; None if there is none.
    """
    if UNIFORM not in evidence.runs:
        return None
    if bound is not None:
        uniform = dict(zip(evidence.seeds, by_seed(evidence.values(UNIFORM, "area")), strict=True))
        exact = {
            seed: mean_until(Curve(bound.iterations, curve), bound.iterations[-1])
            for seed, curve in zip(bound.seeds, bound.curves, strict=True)
        }
        if len(both := sorted(uniform.keys() & exact.keys())) >= 2:
            lead = mean([exact[seed] - uniform[seed] for seed in both])
            return Headroom(EXACT, lead, margin, len(both), bound)
    leads = {
        arm: mean(by_seed(evidence.differences(arm, UNIFORM, "area")))
        for arm in evidence.runs
        if arm != UNIFORM
    }
    if not leads:
        return None
    arm = max(leads, key=lambda name: leads[name].value)
    return Headroom(arm, leads[arm], margin, len(evidence.seeds))


def sentence(where: str, found: Headroom | None, has_exact: bool) -> str:
    """What a world can tell, in words; `has_exact`: whether exact credit exists there."""
    missing = (
        "No curve of exact credit was computed for these settings (`--bound` does)."
        if has_exact
        else "Exact credit exists in the 2-D world only."
    )
    if found is None:
        return (
            f"It is not known whether the {where} can tell rules apart: uniform credit is the"
            f" only baseline. {missing}"
        )
    begin = {
        TELLS: f"The {where} can tell rules apart",
        CANNOT: f"A rule CANNOT be judged in the {where}",
        UNCLEAR: f"It is unclear whether the {where} can tell rules apart",
    }[found.label]
    matters = {
        TELLS: f", at least twice the smallest difference that matters ({found.margin:.3f})",
        CANNOT: f", all of it below the smallest difference that matters ({found.margin:.3f})",
        UNCLEAR: f"; the smallest difference that matters is {found.margin:.3f}",
    }[found.label]
    lead = f"minus uniform credit is {found.lead.text(sign=True)} over {found.seeds} seeds{matters}"
    if found.bound is None:
        return (
            f"{begin}: {found.arm}, the best baseline, {lead}. Another rule may lead by more."
            f" {missing}"
        )
    lost, count = found.bound.collapsed, len(found.bound.curves)
    collapsed = f" Exact credit collapsed in {lost} of {count} seeds." if lost else ""
    return f"{begin}: exact credit {lead}.{collapsed}"


def worlds_table(worlds: Mapping[str, Headroom | None]) -> Table:
    """Worlds by name with their headroom as numbers."""
    head = ("world", "verdict", "lead over uniform of", "lead", "low", "high", "margin", "seeds")
    rows = [
        (
            where,
            found.label,
            found.arm if found.bound else f"{found.arm} (best known, at least)",
            *(f"{getattr(found.lead, end):.4f}" for end in ("value", "low", "high")),
            f"{found.margin:.4f}",
            str(found.seeds),
            f"{found.bound.collapsed} of {len(found.bound.curves)}" if found.bound else "",
        )
        if found
        else (where, "not known", *[""] * (len(head) - 1))
        for where, found in worlds.items()
    ]
    return Table((*head, "collapsed"), rows)
