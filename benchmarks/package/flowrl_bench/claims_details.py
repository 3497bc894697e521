"""The details behind the page of the claims: spread over seeds, curves, settings of arms, rules,
comparisons, costs.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl_bench.arms import WORLDS, claims_values, is_tuned
from flowrl_bench.catalogue import RETIRED
from flowrl_bench.claims import KL_WEIGHTS, MADE, Claim, made_values
from flowrl_bench.claims import Arm as Changes
from flowrl_bench.claims_figures import curves, frontier, survival_levels, survivals
from flowrl_bench.claims_page import Inputs
from flowrl_bench.main_comparison import POSITION, Arm, arms_of
from flowrl_bench.page import Document, Image, Table
from flowrl_bench.statistics import interquartile_mean, median, rate
from flowrl_bench.tables import (
    MISSING,
    WORLD_NAMES,
    Judged,
    compared,
    comparison_table,
    cost_table,
    levels,
    marked,
)

TITLE = "Details of the tests of the papers' claims"
INTRODUCTION = (
    "The numbers behind [the claims](../claims.md): every rule and comparison, the spread over"
    " seeds, and costs. [The verdict rules](../verdicts.md) define the terms."
)
SPREAD = (
    "Mean reward over training, and collapses. The median and the interquartile mean have widened"
    " bootstrap intervals; no verdict depends on them. Collapse rates have Wilson intervals."
)
COSTS = (
    "Measured per rule: evaluations and reward calls of a trajectory, sequential network calls and"
    " seconds of an iteration, and the reward gained per million evaluations over the whole run."
    " Peak memory is that of a process that makes two iterations."
)
FRONTIERS = {
    "uniform": "kl-frontier-uniform",
    "stepwise gains": "kl-frontier-stepwise",
    "turning points": "kl-frontier-points",
}
"""The questions of the frontier, by the arm whose KL they vary."""
NOTES = {
    POSITION: "The random steps change the credit less than turning points do ([by how"
    " much](../verdict.md#the-questions))."
}
"""What a claim's section says besides, by claim."""
FRONTIER_TEXT = (
    "Each line joins the runs of one method without KL (smallest marker) and with the weights"
    f" {', '.join(f'{weight:g}' for weight in KL_WEIGHTS)} of the KL to the base model. Higher and"
    " further right is better."
)


def details_page(inputs: Inputs, memory: Sequence[Mapping[str, Any]] = ()) -> Document:
    """Spread and curves per world, the frontier, the claims one by one, and costs."""
    page, judged = Document(TITLE), inputs.judged
    page.text(INTRODUCTION)
    for world in WORLDS:
        _world(page, world, arms_of(judged, world))
    page.heading("Reward, closeness to the data and diversity by weight of the KL")
    ids = {key: name for name, key in FRONTIERS.items()}
    drawn = frontier({ids[case.claim.id]: case for case in judged if case.claim.id in ids})
    if drawn is None:
        page.text(f"{_capital(MISSING)}.")
    else:
        page.text(FRONTIER_TEXT)
        page.blocks.append(
            Image(
                "frontier",
                drawn,
                _frontier_words({ids[j.claim.id]: j for j in judged if j.claim.id in ids}),
            )
        )
    page.heading("Costs")
    if inputs.lines:
        page.text(COSTS)
        page.blocks.append(cost_table(inputs.lines, memory=memory))
    else:
        page.text(f"{_capital(MISSING)}.")
    page.heading("Settings of the arms")
    page.text(
        "Arms of the claims name these. A search with the same number of short runs found the"
        " numbers in each world; those that are not searched are the starts of the search."
    )
    page.blocks.append(_settings())
    page.heading("Claims and questions")
    for key in dict.fromkeys(case.claim.id for case in judged):
        _claim(page, [case for case in judged if case.claim.id == key])
    page.heading("Earlier definitions")
    page.text(
        "Questions that are no longer asked in this form. Their runs are kept, without verdict."
    )
    for claim in RETIRED.values():
        _claim(page, [compared(claim, world, inputs.lines) for world in claim.worlds])
    return page


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _world(page: Document, world: str, arms: Mapping[str, Arm]) -> None:
    """Spread over seeds, learning curves and survival curves."""
    name = WORLD_NAMES[world]
    page.heading(f"Spread over seeds, {name}")
    if not arms:
        page.text(f"{_capital(MISSING)}.")
        return
    page.text(SPREAD)
    page.blocks.append(_spread(arms))
    if len(arms) < 2:
        return
    page.heading(f"Learning curves, {name}")
    page.text(
        "Means over seeds with 95% intervals at every evaluation, uniform credit of the same seeds"
        " dashed."
    )
    page.blocks.append(Image(f"curves-{world}", curves(arms), _final_words(name, arms)))
    page.heading(f"Survival curves, {name}")
    page.text(
        "Fraction of runs that have reached a reward by an update; a run that never reaches it"
        " keeps the curve below 1."
    )
    words = ", ".join(f"{level:.2f}" for level in survival_levels(arms))
    alt = (
        f"Fraction of runs that reached rewards of {words} by each update, {name}, a panel per arm"
        " with uniform credit"
    )
    page.blocks.append(Image(f"survival-{world}", survivals(arms), alt))


def _spread(arms: Mapping[str, Arm]) -> Table:
    head = (
        "arm",
        "seeds",
        "mean",
        "median",
        "interquartile mean",
        "worst",
        "final reward",
        "worst final",
        "collapse rate",
    )
    rows = []
    for name, arm in arms.items():
        area, final = arm.values("area"), arm.values("final")
        several = len(area) > 1
        middle = [
            estimate.text() if several else f"{estimate.value:.3f}"
            for estimate in (arm.level, median(area), interquartile_mean(area))
        ]
        ends = (f"{area.min():.3f}", f"{final.mean():.3f}", f"{final.min():.3f}")
        rows.append(
            (
                name,
                str(len(area)),
                *middle,
                *ends,
                rate(arm.evidence.values(name, "collapse")).text(2),
            )
        )
    return Table(head, rows)


def _final_words(world: str, arms: Mapping[str, Arm]) -> str:
    parts = [f"{name} {arm.values('final').mean():.2f}" for name, arm in arms.items()]
    return (
        f"Learning curves, {world}, a panel per arm with uniform credit. Mean final rewards:"
        f" {'; '.join(parts)}"
    )


def _frontier_words(judged: Mapping[str, Judged]) -> str:
    parts = []
    for name, one in judged.items():
        if one.evidence is None:
            continue
        for arm in one.evidence.runs:
            final = float(one.evidence.values(arm, "final").mean())
            near = float(one.evidence.values(arm, "quality").mean())
            parts.append(f"{name}, {arm}: reward {final:.2f}, log-density {near:.2f}")
    return f"Final reward against log-density and diversity. {'; '.join(parts)}"


def _settings() -> Table:
    """Every arm's fixed settings, and the numbers found per world."""
    rows = []
    for name, arm in MADE.items():
        numbers = [_values(world, name) if world in arm.worlds else "-" for world in WORLDS]
        fixed = "; ".join(f"`{key}` = `{_setting(value)}`" for key, value in arm.settings.items())
        rows.append((name, fixed, *numbers))
    head = ("arm", "settings", *(WORLD_NAMES[world] for world in WORLDS))
    return Table(head, rows, head)


def _values(world: str, name: str) -> str:
    text = ", ".join(f"{knob} {value:g}" for knob, value in made_values(world, name).items())
    searched = claims_values(world, name) or is_tuned(world, name)
    return text if searched else f"{text} (not searched)"


def _setting(value: Any) -> str:
    return (
        ", ".join(f"{world} {one}" for world, one in value.items())
        if isinstance(value, Mapping)
        else str(value)
    )


def _claim(page: Document, judged: Sequence[Judged]) -> None:
    """A claim's words, source, rule and arms; its values and comparisons per world."""
    claim = judged[0].claim
    page.heading(claim.id, 3)
    source = "" if claim.asks else f" ({claim.source}: {claim.number})"
    expects = f" Agrees if: {claim.expects}." if claim.expects else ""
    secondary = "; ".join(rule.words() for rule in claim.secondary)
    more = f" Secondary: {secondary}." if secondary else ""
    page.text(
        f"{claim.says}{source}{expects} Primary: {claim.primary.words()}.{more} {_arms(claim)}"
    )
    if claim.id in NOTES:
        page.text(NOTES[claim.id])
    for case in judged:
        world = _capital(WORLD_NAMES[case.world])
        if case.primary is None:
            page.text(f"{world}: {MISSING}.")
            continue
        page.text(f"{world}: {marked(case.label)}. {levels(case)}".rstrip())
        page.blocks.append(comparison_table(case))


def _arms(claim: Claim) -> str:
    def options(changes: Changes) -> str:
        more = " ".join(
            f"--{name.replace('_', '-')} {_quoted(str(value))}"
            for name, value in changes.items()
            if name != "arm"
        )
        named = f"*{changes['arm']}*" if "arm" in changes else ""
        return f"{named}{' with ' if named and more else ''}{f'`{more}`' if more else ''}"

    base = f" All: {options(claim.base)}." if claim.base else ""
    return (
        "Arms: "
        + "; ".join(f"{arm} = {options(changes)}" for arm, changes in claim.arms.items())
        + "."
        + base
    )


def _quoted(value: str) -> str:
    """A text quoted for a shell; double quotes if it contains single ones, which is easier to read
    than escapes.
    """
    return f'"{value}"' if "'" in value and not set(value) & set('"$`\\!') else shlex.quote(value)
