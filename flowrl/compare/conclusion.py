"""The conclusion of a comparison in two sentences: what it shows, and what it cannot show."""

import math
from collections.abc import Sequence
from statistics import fmean

from flowrl.compare.bounds import ARM, settings_that_count
from flowrl.compare.results import ArmSummary, Comparison, Mean
from flowrl.run.config import preset
from flowrl.run.presets import method_overrides, of_method
from flowrl.run.results import short

VERDICTS = {
    "▲": "above the baseline",
    "▼": "below it",
    "○": "undecided: the 95% interval contains 0",
}
"""Symbols of a lead: of its interval, not of its mean."""
MOST_NAMED = 3
"""Arms that a sentence names; it counts the others."""
ALIKE = 1.05
"""Largest ratio of budgets that count as equal."""


def verdict(lead: Mean) -> str:
    """The symbol of `VERDICTS` for a difference from the baseline, "" without an interval or for
    the baseline itself.
    """
    if math.isnan(lead.half) or lead == Mean(0, 0):
        return ""
    return "▲" if lead.mean > lead.half else "▼" if lead.mean < -lead.half else "○"


def shows(comparison: Comparison, summaries: Sequence[ArmSummary]) -> str:
    """A sentence with the arms whose difference from the baseline in final reward is decided, those
    whose difference is not, the baseline's reward and the collapsed runs.

    Args:
        comparison: the comparison.
        summaries: the arms' results.

    Returns:
        The sentence.
    """
    if not summaries:
        return "No run has been evaluated yet."
    base, *others = arms = _compared(comparison, summaries)
    undecided, than, clauses = _undecided(others), base.arm, list[str]()
    for other in sorted(others, key=lambda s: -abs(s.lead.mean)):
        if other.arm not in undecided:
            clauses.append(_lead(other.arm, other.lead, than))
            than = "it"
    parts = [_listed(clauses)]
    parts += [f"{_listed(undecided)} cannot be told apart from {than}"] if undecided else []
    ends = f"{base.arm} goes from {base.base.mean:.3f} to {base.final.text()}"
    fallen = (f"{s.arm} collapsed in {s.collapsed} of {s.seeds} seeds" for s in arms if s.collapsed)
    name = short(comparison.metric[-1])
    why = "" if name == "reward" else " (the arms are trained on different rewards)"
    text = "; ".join(filter(None, [*parts, joined([ends, *fallen])]))
    return f"In held-out {name}{why}, {text}."


def cannot_show(comparison: Comparison, summaries: Sequence[ArmSummary]) -> str:
    """A sentence with the questions that the seeds, the budgets and the settings leave open.

    Args:
        comparison: the comparison.
        summaries: the arms' results.

    Returns:
        The sentence; "" without results.
    """
    if not summaries:
        return ""
    base, *others = arms = _compared(comparison, summaries)
    seeds, undecided = min(s.seeds for s in arms), _undecided(others)
    texts = ["whether a difference is chance (one seed)"] if seeds == 1 else []
    if undecided:
        most = max(abs(s.lead.mean) + s.lead.half for s in others if s.arm in undecided)
        which = f"which of {_listed([base.arm, *undecided])} is ahead"
        texts.append(f"{which} ({seeds} seeds leave differences of up to {most:.3f} possible)")
    if fallen := sum(s.collapsed for s in arms):
        texts.append(f"how often runs collapse ({fallen} of {sum(s.seeds for s in arms)} did)")
    texts += _unequal(comparison, [s.arm for s in arms])
    if names := untuned(comparison):
        which = "the arms" if len(names) == len(arms) else _listed(names)
        texts.append(f"how far {which} would get at tuned settings")
    return f"The comparison cannot show {joined(texts or ['what holds in other tasks'], 'or')}."


def untuned(comparison: Comparison) -> list[str]:
    """The arms without the settings that were tuned for their method in this world, or with a part
    or a setting of their own.
    """
    return [arm for arm in comparison.arms if arm != ARM and not _is_tuned(comparison, arm)]


def _is_tuned(comparison: Comparison, arm: str) -> bool:
    mine = comparison.of(arm)[0].settings
    world, method = mine.get("world", ""), mine.get("method", "")
    if not (known := of_method(world, method)):
        return False
    needed = {**method_overrides("default", world, method), **known}
    usual = settings_that_count(preset("default").apply(world=world).typed() | needed)
    names = {*known, "credit", "sampler", "loss", *comparison.differences[arm]}
    names &= usual.keys() - {"iterations", "method"}
    return all(mine.get(name) == usual[name] for name in names)


def _compared(comparison: Comparison, summaries: Sequence[ArmSummary]) -> list[ArmSummary]:
    """The baseline, or the first arm before it has been evaluated, and the arms compared with it
    except for the oracle.
    """
    base = next((s for s in summaries if s.arm == comparison.baseline), summaries[0])
    others = (s for s in summaries if s is not base and s.arm != ARM)
    return [base, *(s for s in others if not math.isnan(s.lead.mean))]


def _undecided(others: Sequence[ArmSummary]) -> list[str]:
    return [s.arm for s in others if verdict(s.lead) == "○"]


def _lead(arm: str, lead: Mean, than: str) -> str:
    """'fast ends 0.390 above base (95% interval +0.263 to +0.517)'."""
    side = "above" if lead.mean >= 0 else "below"
    low, high = lead.mean - lead.half, lead.mean + lead.half
    interval = "" if math.isnan(lead.half) else f" (95% interval {low:+.3f} to {high:+.3f})"
    return f"{arm} ends {abs(lead.mean):.3f} {side} {than}{interval}"


def _unequal(comparison: Comparison, arms: Sequence[str]) -> list[str]:
    """The budget that the arms have not in common: network evaluations, or else updates."""
    for x, done, what in (
        ("forwards", "network evaluations", "the order at equal cost"),
        ("iteration", "updates", "the order after equal updates"),
    ):
        spent = {a: fmean(max(run.spent(x).values()) for run in comparison.of(a)) for a in arms}
        least, *_, most = sorted([*arms, *arms], key=spent.__getitem__)
        if spent[most] > ALIKE * spent[least] > 0:
            ratio = spent[most] / spent[least]
            return [f"{what} ({most} has {ratio:.1f} times the {done} of {least})"]
    return []


def _listed(names: Sequence[str]) -> str:
    """'a, b and c', of more names 'a, b, c and 2 more'."""
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return joined([*names[:MOST_NAMED], *more])


def joined(texts: Sequence[str], word: str = "and") -> str:
    """'a, b and c', without empty texts at the end."""
    return f" {word} ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
