"""The main comparison: every arm against uniform credit, per update, per network evaluation and per
second.
"""

from flowrl_bench.arms import ARMS, TASKS
from flowrl_bench.claims import Claim, question
from flowrl_bench.verdicts import Compare, Parts

UNIFORM, LARGER = "uniform", "uniform, larger groups"


def _lead(name: str) -> Claim:
    """One arm against uniform credit; also, if it has more evaluations, against uniform credit with
    groups as expensive.
    """
    arms = {arm: {"arm": arm} for arm in dict.fromkeys((UNIFORM, LARGER, name))}
    budgets = ("area", "reward at equal forwards", "reward at equal seconds")
    larger = (
        ()
        if name == LARGER
        else (Compare(name, LARGER), Compare(name, LARGER, "reward at equal forwards"))
    )
    return question(
        f"lead-{name.replace(',', '').replace(' ', '-')}",
        f"Does {name} lead over uniform credit: per update, per network evaluation and per second?",
        arms,
        Parts(
            (
                *(Compare(name, UNIFORM, measure) for measure in budgets),
                *larger,
                Compare(name, UNIFORM, "collapse"),
            )
        ),
        tasks=TASKS["shapes"] if "shapes" in ARMS[name].worlds else (),
    )


LEADS: tuple[Claim, ...] = tuple(_lead(name) for name in ARMS if name != UNIFORM)
"""One question per arm; they are a family of their own."""
