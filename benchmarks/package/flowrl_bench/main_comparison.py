"""The main comparison (`flowrl_bench.leads`): every arm's level and lead over uniform credit, and
the answers in words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl_compare.costs import STATED_NAME
from flowrl_compare.statistics import Estimate, Values, mean

from flowrl_bench.arms import ARMS, WORLDS
from flowrl_bench.claims import MADE
from flowrl_bench.evidence import Evidence
from flowrl_bench.leads import LARGER, LEADS, UNIFORM
from flowrl_bench.page import Table
from flowrl_bench.tables import BRIEF, MISSING, SYMBOLS, WORLD_NAMES, Judged
from flowrl_bench.verdicts import (
    BETTER,
    SECONDARY,
    VERDICTS,
    Comparison,
    by_seed,
)

BUDGETS = {
    "per update": "area",
    "per evaluation": "reward at equal forwards",
    "per second": "reward at equal world seconds",
}
"""The measure of the lead at equal budgets."""
SECONDS = {"mixture": "processor second", "shapes": f"{STATED_NAME} second"}
"""The seconds of the third budget by world."""
STEPWISE = ("stepwise gains", "turning points")
"""The per-step credit of the papers, which the answers name first."""
_SPACE = "\N{NO-BREAK SPACE}"
POSITION = "random-points"
"""The question about the position of a turning point."""


@dataclass(frozen=True)
class Arm:
    """One arm in a world: its runs (of the seeds that uniform credit has too) and its
    comparisons.
    """

    name: str
    evidence: Evidence
    comparisons: Sequence[Comparison] = ()

    @property
    def control(self) -> bool:
        """Whether it is a control, not a method of its own."""
        return MADE[self.name].control

    def lead(self, measure: str, than: str = UNIFORM) -> Comparison | None:
        """Its comparison with another arm; None if there is none."""
        text = f"{self.name} minus {than}"
        return next((c for c in self.comparisons if c.arms == text and c.measure == measure), None)

    def values(self, measure: str) -> Values:
        """A measure per seed."""
        return by_seed(self.evidence.values(self.name, measure))

    @property
    def level(self) -> Estimate:
        """Mean reward over training."""
        return mean(self.values("area"))

    @property
    def collapses(self) -> tuple[int, int]:
        """Collapsed runs, and all runs."""
        collapsed = self.evidence.values(self.name, "collapse")
        return int(collapsed.sum()), collapsed.size


def arms_of(judged: Sequence[Judged], world: str) -> dict[str, Arm]:
    """The arms with runs in a world: uniform credit (of the claim with most seeds), then the others
    by lead per update.
    """
    names = dict(
        zip((claim.id for claim in LEADS), (name for name in ARMS if name != UNIFORM), strict=True)
    )
    arms: list[Arm] = []
    base: Evidence | None = None
    for case in judged:
        if case.claim.id in names and case.world == world and case.evidence is not None:
            comparisons = [comparison for comparison in case.comparisons if comparison]
            if (name := names[case.claim.id]) in case.evidence.runs:
                arms.append(Arm(name, case.evidence, comparisons))
            more = base is None or len(case.evidence.seeds) > len(base.seeds)
            base = case.evidence if more else base
    if base is None:
        return {}
    arms.sort(key=lambda arm: -_size(arm.lead("area")))
    return {arm.name: arm for arm in (Arm(UNIFORM, base), *arms)}


def _size(comparison: Comparison | None) -> float:
    return comparison.estimate.value if comparison else 0.0


def number(comparison: Comparison | None) -> str:
    """'▲ +0.012 [0.003, 0.021]', without a symbol if it is secondary, or a dash. Line breaks are
    possible before the interval only.
    """
    if comparison is None:
        return "-"
    estimate = comparison.estimate
    interval = (
        f"[{estimate.low:.3f},{_SPACE}{estimate.high:.3f}]"
        if abs(estimate.high) < 1e9
        else f"(one{_SPACE}seed)"
    )
    symbol = "" if comparison.verdict == SECONDARY else f"{SYMBOLS[comparison.verdict]}{_SPACE}"
    return f"{symbol}{estimate.value:+.3f} {interval}"


def lead_table(arms: Mapping[str, Arm], world: str) -> Table:
    """A row per arm: level, leads over uniform credit at equal budgets, collapsed and worst seeds,
    and the lead over larger groups if these have runs.
    """
    budgets = (words.replace("second", SECONDS[world]) for words in BUDGETS)
    leads = (f"minus uniform, {words}" for words in budgets)
    larger = ("minus larger groups, per evaluation",) if LARGER in arms else ()
    head = ("arm", "seeds", "mean reward over training", *leads, "collapsed", "worst seed", *larger)
    rows = []
    for name, arm in arms.items():
        label, seeds = MADE[name].label, str(len(arm.evidence.seeds))
        lead_cells = [number(arm.lead(measure)) for measure in BUDGETS.values()]
        lost, runs = arm.collapses
        seed_cells = (f"{lost}{_SPACE}of{_SPACE}{runs}", f"{arm.values('area').min():.3f}")
        larger_cells = [number(arm.lead(BUDGETS["per evaluation"], LARGER)) for _ in larger]
        level = arm.level.text().replace(", ", f",{_SPACE}")
        rows.append((label, seeds, level, *lead_cells, *seed_cells, *larger_cells))
    return Table(head, rows, ("arm",))


def answers(judged: Sequence[Judged]) -> list[str]:
    """Four lines in words: the lead per evaluation and per update, the position of a turning point,
    and the rule to use.
    """
    worlds = {world: arms_of(judged, world) for world in WORLDS}

    def line(question: str, answer_by_world: Mapping[str, str]) -> str:
        return f"**{question}** " + " ".join(
            f"{_capital(WORLD_NAMES[world])}: {words}." for world, words in answer_by_world.items()
        )

    lines = [
        line(
            f"Does per-step credit lead uniform credit {words}?",
            {w: _leads(arms, BUDGETS[words]) for w, arms in worlds.items()},
        )
        for words in ("per evaluation", "per update")
    ]
    lines.append(
        line(
            "Does the position of a turning point matter?",
            {world: _place(judged, world) for world in WORLDS},
        )
    )
    lines.append(
        line("Which rule would you take?", {world: _choice(arms) for world, arms in worlds.items()})
    )
    return lines


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _leads(arms: Mapping[str, Arm], measure: str) -> str:
    """The leads of the papers' rules, and the count of all methods that have a verdict."""
    leads = {name: arm.lead(measure) for name, arm in arms.items() if not arm.control}
    valid = {
        name: comparison
        for name, comparison in leads.items()
        if comparison and comparison.verdict != SECONDARY
    }
    if not valid:
        return MISSING
    papers = [f"{name}: {_said(valid[name].verdict)}" for name in STEPWISE if name in valid]
    verdicts = [comparison.verdict for comparison in valid.values()]
    counts = [f"{verdicts.count(v)} {_said(v)}" for v in VERDICTS if v in verdicts]
    totals = f". Of {len(valid)} methods: {', '.join(counts)}" if len(valid) > len(papers) else ""
    return f"{'; '.join(papers)}{totals}"


def _said(verdict: str) -> str:
    """A verdict in few words."""
    return BRIEF.get(verdict, verdict)


def _place(judged: Sequence[Judged], world: str) -> str:
    question = next((j for j in judged if j.claim.id == POSITION and j.world == world), None)
    if question is None or question.primary is None:
        return MISSING
    control = "turning points at random steps, which change the credit less, minus real ones"
    return f"{control}: {_said(question.primary.verdict)}"


def choice(arms: Mapping[str, Arm]) -> Arm | None:
    """The method with the largest lead per evaluation, of those that are better by verdict, and
    whose secondary intervals show no loss: per second, in collapses, and to larger groups per
    evaluation. None if there is none.
    """
    measure = BUDGETS["per evaluation"]

    def allowed(arm: Arm) -> bool:
        lead, collapse = arm.lead(measure), arm.lead("collapse")
        secondary = arm.lead(BUDGETS["per second"]), arm.lead(measure, LARGER)
        loses = any(c is not None and c.estimate.high < 0 for c in secondary)
        collapses = collapse is not None and collapse.estimate.low > 0
        better = lead is not None and lead.verdict == BETTER
        return better and not (arm.control or loses or collapses)

    return max(
        filter(allowed, arms.values()), key=lambda arm: _size(arm.lead(measure)), default=None
    )


def _choice(arms: Mapping[str, Arm]) -> str:
    if not arms:
        return MISSING
    best = choice(arms)
    uniform = arms[UNIFORM].collapses
    if best is None:
        return "uniform credit, because no method leads it per evaluation without a loss elsewhere"
    lost = best.collapses
    return (
        f"{best.name}, which is better per evaluation and collapsed in {lost[0]} of {lost[1]} runs,"
        f" uniform credit in {uniform[0]} of {uniform[1]}"
    )
