"""The papers' headlines at the worlds' default settings, next to the tuned comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.training.config import RunConfig, preset
from flowrl_bench.arms import TASKS
from flowrl_bench.digest import config_id
from flowrl_bench.evidence import Evidence
from flowrl_bench.main_comparison import BUDGETS, number
from flowrl_bench.page import Table
from flowrl_bench.results_file import Lines
from flowrl_bench.tables import MISSING, WORLD_NAMES, Judged
from flowrl_bench.verdicts import Compare, Comparison

FILE = "claims-default-settings.jsonl"
"""The results file of the runs at default settings, next to that of the tuned ones."""
_HELD_OUT = {"eval_samples": 192, "eval_steps": 20, "eval_solver": "euler"}
WORLDS: dict[str, dict[str, Any]] = {
    "mixture": {"world": "mixture", "eval_every": 2, **_HELD_OUT},
    "shapes": {"world": "shapes", "iterations": 36, "eval_every": 4, **_HELD_OUT},
}
SEEDS: dict[str, tuple[int, ...]] = {"mixture": tuple(range(10)), "shapes": (0, 1, 2)}
"""Settings and seeds of that file."""
_SHOWN = ("per update", "per evaluation")
_METHODS = {"uniform": "flow-grpo", "stepwise": "stepwise-flow-grpo", "turning points": "tp-grpo"}
_SHORT = {"window": ":-1", "eval_steps": 40}
ARMS: dict[str, dict[str, Any]] = {
    **{name: {"method": method} for name, method in _METHODS.items()},
    **{
        f"{steps} steps": {"method": "flow-grpo", "num_steps": steps, **_SHORT}
        for steps in (10, 40)
    },
}


@dataclass(frozen=True)
class Headline:
    """A paper's headline: `arm` leads over `than`. `claim`: the claim or question with the tuned
    arms; `budgets` that apply.
    """

    says: str
    arm: str
    than: str
    claim: str
    tuned: tuple[str, str]
    worlds: tuple[str, ...] = ("mixture", "shapes")
    budgets: tuple[str, ...] = ("per update", "per evaluation")


HEADLINES = (
    Headline(
        "Stepwise-Flow-GRPO: stepwise gains beat uniform credit",
        "stepwise",
        "uniform",
        "lead-stepwise-gains",
        ("stepwise gains", "uniform"),
    ),
    Headline(
        "TP-GRPO: turning points beat uniform credit",
        "turning points",
        "uniform",
        "lead-turning-points",
        ("turning points", "uniform"),
    ),
    Headline(
        "Flow-GRPO: training with 10 steps beats training with 40",
        "10 steps",
        "40 steps",
        "train-short",
        ("10 steps", "40 steps"),
        ("mixture",),
        ("per evaluation",),
    ),
)


def _run(world: str, task: str, seed: int, arm: str) -> RunConfig:
    return preset("default").apply(**{**WORLDS[world], "task": task, "seed": seed, **ARMS[arm]})


def _evidence(lines: Lines, world: str, arms: tuple[str, str]) -> Evidence | None:
    """The runs of two arms at default settings, of the seeds that both have."""
    ids = {
        (arm, task, seed): config_id(_run(world, task, seed, arm))
        for arm in arms
        for task in TASKS[world]
        for seed in SEEDS[world]
    }
    seeds = tuple(
        seed
        for seed in SEEDS[world]
        if all(ids[arm, task, seed] in lines for arm in arms for task in TASKS[world])
    )
    if not seeds:
        return None
    runs = {
        arm: {task: [lines[ids[arm, task, seed]] for seed in seeds] for task in TASKS[world]}
        for arm in arms
    }
    return Evidence(runs, seeds)


def _at_defaults(
    headline: Headline, world: str, judged: Sequence[Judged], lines: Lines
) -> tuple[Evidence, str, str] | None:
    """Runs at default settings, and the names of their arms; the runs of the question `tuning` if
    it has any.
    """
    for outcome in judged:
        arm, than = f"{headline.arm}, defaults", f"{headline.than}, defaults"
        if (
            outcome.claim.id == "tuning"
            and outcome.world == world
            and outcome.evidence
            and {arm, than} <= outcome.evidence.runs.keys()
        ):
            return outcome.evidence, arm, than
    evidence = _evidence(lines, world, (headline.arm, headline.than))
    return (evidence, headline.arm, headline.than) if evidence else None


def survival_table(judged: Sequence[Judged], lines: Lines) -> Table:
    """A row per headline and world: its lead at default and at tuned settings. `lines`: the lines
    of the file at default settings. Leads at default settings are secondary.
    """
    rows = []
    for headline in HEADLINES:
        for world in headline.worlds:
            runs = _at_defaults(headline, world, judged, lines)
            tuned = next(
                (j for j in judged if j.claim.id == headline.claim and j.world == world), None
            )
            seeds = f"{len(runs[0].seeds) if runs else 0} / {tuned.seeds[0] if tuned else 0}"
            at_defaults = [
                _cell(headline, budget, _compared(runs, budget) if runs else None)
                for budget in _SHOWN
            ]
            at_tuned = [
                _cell(headline, budget, _tuned(headline, tuned, budget)) for budget in _SHOWN
            ]
            rows.append((headline.says, WORLD_NAMES[world], seeds, *at_defaults, *at_tuned))
    columns = (f"{kind}, {budget}" for kind in ("default", "tuned") for budget in _SHOWN)
    head = ("headline", "world", "seeds, default / tuned", *columns)
    return Table(head, rows, ("headline",))


def _compared(runs: tuple[Evidence, str, str], budget: str) -> Comparison:
    return Compare(runs[1], runs[2], BUDGETS[budget]).compare(runs[0], 0.0)


def _tuned(headline: Headline, judged: Judged | None, budget: str) -> Comparison | None:
    text = " minus ".join(headline.tuned)
    comparisons = {(c.arms, c.measure): c for c in (judged.comparisons if judged else ()) if c}
    return comparisons.get((text, BUDGETS[budget]))


def _cell(headline: Headline, budget: str, comparison: Comparison | None) -> str:
    if budget not in headline.budgets:
        return "-"
    if comparison is None:
        return MISSING
    return number(comparison)
