"""Recorded runs of the claims (`docs/claims.md`), for the lessons' figures of the papers.

The runs are in `benchmarks/results` of a clone of the repository. Without them `table` and the
figures say so and show nothing else.
"""

import json
import lzma
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import flowrl_bench
import matplotlib.pyplot as plt
import numpy as np
from flowrl_bench.catalogue import CLAIMS
from flowrl_bench.evidence import AXES, MEASURES, column, spent
from flowrl_bench.results_file import SamplesFile, joined
from flowrl_bench.tables import Judged, compared
from flowrl_compare.statistics import mean
from matplotlib.axes import Axes

from flowrl_course.figures import ACCENT, COLOURS, NOISE, clean, panels

RESULTS = Path(flowrl_bench.__file__).parents[2] / "results"
ABSENT = "The recorded runs are in benchmarks/results of a clone; they are not installed here."
SHADES = (COLOURS["flow-grpo"], ACCENT, COLOURS["noise-weighted"], COLOURS["tp-grpo"], NOISE)


@cache
def lines() -> Mapping[str, Mapping[str, Any]]:
    """The runs by id, with what was measured on samples; empty without the files."""
    path = RESULTS / "claims.jsonl.xz"
    if not path.exists():
        return {}
    with lzma.open(path, "rt") as file:
        runs = {line["id"]: line for line in map(json.loads, file)}
    return joined(runs, SamplesFile(RESULTS / "claims-samples.json").read())


@cache
def case(claim: str, world: str = "mixture") -> Judged | None:
    """A claim's runs and comparisons in a world; None without the files."""
    return compared(CLAIMS[claim], world, lines()) if lines() else None


def measured(claim: str, rule: int = 0, world: str = "mixture") -> str:
    """The estimate of a claim's comparison (0: the primary one) with its 95% interval."""
    judged = case(claim, world)
    if judged is None or (one := judged.comparisons[rule]) is None:
        return "to be run" if judged else "not here"
    sign = "+" if one.difference else ""
    return f"{one.estimate.value:{sign}.3f} [{one.estimate.low:.3f}, {one.estimate.high:.3f}]"


def cosine(rule: str) -> str:
    """The cosine of a rule's expected gradient with the exact one in two dimensions, and its 95%
    interval (`docs/reference/bias.md`).
    """
    if not lines():
        return "not here"
    row = json.loads((RESULTS / "bias.json").read_text())["results"][rule]
    low, high = row["cosine_interval"]
    return f"{row['cosine']:.3f} [{low:.3f}, {high:.3f}]"


def table(*rows: tuple[str, str, str, str]) -> None:
    """Print rows of item, published value, value here, and verdict."""
    if not lines():
        print(ABSENT)
    for item, published, here, verdict in (("item", "published", "here", "verdict"), *rows):
        print(f"{item:<42}{published:<30}{here:<26}{verdict}")


def curves(claims: Mapping[str, tuple[str, str]], world: str = "mixture") -> None:
    """A panel per title: the learning curves of a claim's arms over a budget
    (`flowrl_bench.evidence.AXES`), with 95% intervals over seeds.
    """
    for cell, axis, arms in _panels(claims, world, 2.8):
        for shade, (arm, runs) in zip(SHADES, arms.items(), strict=False):
            budget, rewards = (
                np.array([[of(line) for line in task] for task in runs.values()]).mean(axis=0)
                for of in (partial(spent, axis=axis), partial(column, name="soft"))
            )
            estimates = [mean(values) for values in rewards.T]
            low, high = ([getattr(e, end) for e in estimates] for end in ("low", "high"))
            cell.plot(budget.mean(axis=0), rewards.mean(axis=0), color=shade, label=arm)
            cell.fill_between(budget.mean(axis=0), low, high, color=shade, alpha=0.2, linewidth=0)
        cell.set(xlabel=AXES[axis], ylabel="held-out reward")
        cell.ticklabel_format(axis="x", scilimits=(-3, 4))
        cell.legend(frameon=False, fontsize=8)
    plt.show()


def dots(claims: Mapping[str, tuple[str, str]], world: str = "mixture") -> None:
    """A panel per title: a measure (`flowrl_bench.evidence.MEASURES`) of a claim's arms, with 95%
    intervals over seeds.
    """
    for cell, measure, arms in _panels(claims, world, 2.1):
        for row, runs in enumerate(arms.values()):
            of = MEASURES[measure].of
            assert of is not None, measure
            values = [[of(line) for line in task] for task in runs.values()]
            estimate = mean(np.mean(values, axis=0))
            cell.plot([estimate.low, estimate.high], [row, row], color=NOISE, linewidth=2.4)
            cell.plot([estimate.value], [row], "o", color=ACCENT, markersize=5)
        cell.set_yticks(range(len(arms)), list(arms), fontsize=8)
        cell.set(xlabel=MEASURES[measure].label)
        cell.invert_yaxis()
    plt.show()


def search(arm: str) -> None:
    """Rewards of all runs of the search for an arm's settings over their noise levels, by world."""
    if not lines():
        return print(ABSENT)
    with lzma.open(RESULTS / "tuning.jsonl.xz", "rt") as file:
        runs = [run for run in map(json.loads, file) if run["arm"] == arm]
    _, cells = panels(2, width=3.4, height=2.1)
    for cell, world, title in zip(cells, ("mixture", "shapes"), ("2-D", "images"), strict=True):
        chosen = [run for run in runs if run["world"] == world]
        levels = [run["values"]["noise_level"] for run in chosen]
        cell.plot(levels, [run["score"] for run in chosen], "o", color=SHADES[0], markersize=4)
        cell.set(xlabel="noise level", ylabel="reward", title=f"Search, {title}")
        clean(cell)
    plt.show()


def _panels(
    claims: Mapping[str, tuple[str, str]], world: str, height: float
) -> Iterator[tuple[Axes, str, Mapping[str, Any]]]:
    """The axes of each title, its budget or measure, and the claim's runs by arm."""
    if not lines():
        return print(ABSENT)
    _, cells = panels(len(claims), width=3.4, height=height, squeeze=False)
    for cell, (title, (claim, shown)) in zip(cells[0], claims.items(), strict=True):
        judged = case(claim, world)
        cell.set_title(title, fontsize=10)
        clean(cell)
        yield cell, shown, judged.evidence.runs if judged and judged.evidence else {}
