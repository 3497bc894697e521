"""The main comparison: every arm against uniform credit, per forward equivalent; per update and per
second of the stated model are secondary.
"""

from flowrl_bench.arms import ARMS, TASKS
from flowrl_bench.claims import Claim, question
from flowrl_bench.verdicts import Compare

UNIFORM, LARGER = "uniform", "uniform, larger groups"


def _lead(name: str) -> Claim:
    """One arm against uniform credit, and against uniform credit with larger groups."""
    arms = {arm: {"arm": arm} for arm in dict.fromkeys((UNIFORM, LARGER, name))}
    others = ("area", "reward at equal world seconds", "collapse")
    larger = (
        ()
        if name == LARGER
        else (Compare(name, LARGER), Compare(name, LARGER, "reward at equal forwards"))
    )
    return question(
        f"lead-{name.replace(',', '').replace(' ', '-')}",
        f"Does {name} lead uniform credit per forward equivalent?",
        arms,
        Compare(name, UNIFORM, "reward at equal forwards"),
        *(Compare(name, UNIFORM, measure) for measure in others),
        *larger,
        tasks=TASKS["shapes"] if "shapes" in ARMS[name].worlds else (),
    )


LEADS: tuple[Claim, ...] = tuple(_lead(name) for name in ARMS if name != UNIFORM)
"""One question per arm."""
