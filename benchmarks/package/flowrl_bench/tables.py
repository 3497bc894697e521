"""Verdicts as tables: a line per claim, and the comparisons and levels behind it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.diagnostics.statistics import interquartile_mean, level
from flowrl_bench.claims import SEEDS, Claim
from flowrl_bench.document import Table
from flowrl_bench.evidence import MEASURES, Evidence, column
from flowrl_bench.runner import evidence
from flowrl_bench.verdicts import ALIKE, BETTER, FAILS, HOLDS, UNDECIDED, WORSE, Comparison, Verdict

TONES = {HOLDS: "good", BETTER: "good", FAILS: "bad", WORSE: "bad", ALIKE: "open", UNDECIDED: "open"}
ANSWERS = {HOLDS: "yes", FAILS: "no", UNDECIDED: UNDECIDED, BETTER: BETTER, WORSE: WORSE, ALIKE: ALIKE}
DEPENDS = "depends on the arm"
PILLS = {DEPENDS: "open"} | {label: tone for verdict, tone in TONES.items() for label in (verdict, ANSWERS[verdict])}
MISSING = "no runs yet"
WORLD_WORDS = {"mixture": "2-D world", "shapes": "image world"}
STARTS = {
    "area": "soft", "early": "soft", "final": "soft", "strict area": "strict", "final strict": "strict", "quality": "quality",
    "quality at equal reward": "quality", "diversity": "diversity",
}  # fmt: skip
"""The column of the curve that says what a measure was before training."""
Lines = Mapping[str, Mapping[str, Any]]


class Judged:
    """A claim in a world: its evidence and verdict (None where no seed is complete)."""

    def __init__(self, claim: Claim, world: str, lines: Lines, seeds: tuple[int, ...] = ()) -> None:
        self.claim, self.world = claim, world
        self.evidence: Evidence | None = evidence(claim, world, lines, seeds or SEEDS[world])
        self.verdict: Verdict | None = claim.rule.judge(self.evidence) if self.evidence else None

    @property
    def label(self) -> str:
        """The verdict in words; for an open question, the answer that all its arms have."""
        if self.verdict is None:
            return MISSING
        if not self.claim.asks:
            return self.verdict.verdict
        answers = {ANSWERS[comparison.verdict] for comparison in self.verdict.comparisons}
        return answers.pop() if len(answers) == 1 else DEPENDS

    @property
    def seeds(self) -> int:
        """How many seeds all arms have."""
        return len(self.evidence.seeds) if self.evidence else 0


def judge_all(claims: Mapping[str, Claim], lines: Lines) -> list[Judged]:
    """Every claim in every world it is tried in."""
    return [Judged(claim, world, lines) for claim in claims.values() for world in claim.worlds]


def judged_table(claims: Mapping[str, Claim], lines: Lines, seeds: tuple[int, ...]) -> Table:
    """Verdicts of other claims than the catalogue's, on the 2-D world with `seeds`."""
    return summary([Judged(claim, "mixture", lines, seeds) for claim in claims.values()], "verdict")


def summary(judged: Sequence[Judged], last: str) -> Table:
    """A line per claim and world: its id and words, the verdict, and every comparison."""
    asks = bool(judged) and judged[0].claim.asks
    rows = []
    for one in judged:
        here = _measured(one.verdict.comparisons, one.claim.asks) if one.verdict else "-"
        source = () if asks else (f"{one.claim.source}: {one.claim.number}",)
        says = f"`{one.claim.id}` {one.claim.says}"
        rows.append((says, one.label, here, *source, WORLD_WORDS[one.world], str(one.seeds)))
    source = () if asks else ("source and its number",)
    head = ("question" if asks else "claim", last, "measured here", *source, "world", "seeds")
    return Table(head, rows, ("claim", "question", "source and its number", "measured here", last), PILLS)


def count(judged: Sequence[Judged]) -> str:
    """How many lines have which verdict; the self-test is no claim."""
    chosen = [j for j in judged if j.claim.source != "self-test"]
    labels = [j.label for j in chosen]
    totals = [f"{labels.count(name)} {name}" for name in (HOLDS, FAILS, UNDECIDED, MISSING) if name in labels]
    claims = len({j.claim.id for j in chosen})
    return (
        f"{claims} claims, some in two worlds ({len(chosen)} lines): {'; '.join(totals)}. The last line tests the suite itself."
    )


def _measured(found: Sequence[Comparison], asks: bool) -> str:
    """All comparisons in a cell: the measure's name once, then arm by arm, each with what it says alone if there are several."""
    parts: dict[str, list[str]] = {}
    for comparison in found:
        arms, _, label = comparison.text.partition(": ")
        alone = f" ({_alone(comparison, asks)})" if len(found) > 1 or comparison.verdict == FAILS else ""
        parts.setdefault(label, []).append(f"{arms} {shown(comparison)}{alone}")
    return ". ".join(f"{_capital(label)}: {'; '.join(rows)}" for label, rows in parts.items())


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _alone(comparison: Comparison, asks: bool) -> str:
    """What a comparison says by itself, in a word or two; why, where a claim fails."""
    if asks:
        return {UNDECIDED: "undecided", ALIKE: "no difference"}.get(comparison.verdict, ANSWERS[comparison.verdict])
    if comparison.verdict != FAILS:
        return {HOLDS: "holds", UNDECIDED: "undecided"}[comparison.verdict]
    straddles = comparison.estimate.low <= 0 <= comparison.estimate.high and " minus " in comparison.text
    return "does not hold: too small to count" if straddles else "does not hold"


def shown(comparison: Comparison) -> str:
    """The number with its interval, which a single seed does not have; a share stays a share."""
    signed, found = " minus " in comparison.text, comparison.estimate
    if math.isfinite(found.high):
        return found.text(3, signed)
    return f"{found.value:{'+' if signed else ''}.3f} (one seed: no interval)"


def comparison_table(found: Sequence[Comparison], asks: bool) -> Table:
    """The comparisons behind a verdict; one without a verdict is beside the rule."""
    rows = [(c.text, shown(c), _chance(c), (ANSWERS[c.verdict] if asks else c.verdict) if c.verdict else "-") for c in found]
    return Table(("measured", "here", "P(first beats second)", "alone"), rows, ("measured", "alone"), PILLS)


def _chance(comparison: Comparison) -> str:
    if comparison.probability is None or not math.isfinite(comparison.estimate.high):
        return "-"
    return comparison.probability.text(2)


def by_task(judged: Judged) -> list[Comparison]:
    """The claim's comparisons on every task by itself, where several were pooled: without verdicts, no rule asks for them."""
    if judged.evidence is None:
        return []
    tasks = list(next(iter(judged.evidence.runs.values())))
    found = []
    for task in tasks if len(tasks) > 1 else ():
        alone = Evidence({arm: {task: lines[task]} for arm, lines in judged.evidence.runs.items()}, judged.evidence.seeds)
        for c in judged.claim.rule.judge(alone).comparisons:
            found.append(Comparison(f"{c.text}, {task} alone", c.estimate, c.probability, ""))
    return found


def levels(judged: Judged) -> str:
    """Where the arms stand by the measures that the rule compares, and where the untrained policy stands."""
    if judged.evidence is None:
        return ""
    sentences = []
    for name, than in dict.fromkeys(_measures(judged.claim.rule)):
        if name == "turning points over null":
            sentences.append(_density(judged.evidence))
        elif name != "early gains":
            chosen = [arm for arm in judged.evidence.runs if not name.startswith("sampler") or arm in judged.claim.samples]
            arms = [f"{arm} {_middle(judged.evidence.values(arm, name, than)):.3f}" for arm in chosen]
            start = f"; before training {_start(judged.evidence, STARTS[name]):.3f}" if name in STARTS else ""
            sentences.append(f"{_capital(MEASURES[name].label)}: {', '.join(arms)}{start}.")
    return " ".join(sentences)


def _middle(values: Sequence[Any]) -> float:
    return float(interquartile_mean(np.concatenate(list(values))))


def _start(found: Evidence, name: str) -> float:
    return _middle([np.array([column(line, name)[0] for line in lines]) for lines in next(iter(found.runs.values())).values()])


def _density(found: Evidence) -> str:
    """Turning points per trajectory and what random signs give, before and after training."""
    told = []
    for when, words in (("before", "before training"), ("after", "after it")):
        rows = [[line["samples"][when] for line in lines] for lines in next(iter(found.runs.values())).values()]
        points, null = ([np.array([row[key] for row in task]) for task in rows] for key in ("points", "null"))
        beyond = level([p - n for p, n in zip(points, null, strict=True)])
        told.append(f"{words} {_middle(points):.2f}, random signs give {_middle(null):.2f} ({beyond.text(3, True)})")
    return f"Turning points per trajectory: {'; '.join(told)}."


def _measures(rule: Any) -> Iterator[tuple[str, str]]:
    """(measure, the arm that others are compared with, if there is one) of a rule and its parts."""
    for part in getattr(rule, "rules", ()):
        yield from _measures(part)
    if hasattr(rule, "measure"):
        yield rule.measure, getattr(rule, "than", "") if MEASURES[rule.measure].against else ""
