"""Numbers and figures of recorded runs, for the lessons' sections on the figures of the papers.

`recorded.json` has estimates with 95% intervals and the points of each curve. docs/studies.md names
the commit and the command that made them.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from flowrl_course.figures import ACCENT, COLOURS, NOISE, clean, panels

SHADES = (COLOURS["flow-grpo"], ACCENT, COLOURS["noise-weighted"], COLOURS["tp-grpo"], NOISE)


@cache
def _numbers(kind: str) -> Mapping[str, Any]:
    return json.loads(Path(__file__).with_suffix(".json").read_text())[kind]


def measured(claim: str, rule: int = 0, world: str = "mixture") -> str:
    """The estimate of a study's comparison (0: the primary one) with its 95% interval."""
    one = _numbers("measured")[f"{claim} {rule} {world}"]
    value, low, high = one["estimate"]
    return f"{value:{'+' if one['difference'] else ''}.3f} [{low:.3f}, {high:.3f}]"


def cosine(rule: str) -> str:
    """The cosine of a rule's expected gradient with the exact one in two dimensions, and its 95%
    interval.
    """
    value, low, high = _numbers("cosine")[rule]
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def table(*rows: tuple[str, str, str, str]) -> None:
    """Print rows of item, published value, value here, and verdict."""
    for item, published, here, verdict in (("item", "published", "here", "verdict"), *rows):
        print(f"{item:<42}{published:<30}{here:<26}{verdict}")


def curves(studies: Mapping[str, tuple[str, str]], world: str = "mixture") -> None:
    """A panel per title: the learning curves of a study's arms over a budget, with 95% intervals
    over seeds.
    """
    for cell, key in _panels(studies, 2.8):
        shown = _numbers("curves")[f"{key} {world}"]
        for place, (arm, points) in enumerate(shown["arms"].items()):
            shade = COLOURS["tp-grpo"] if arm == "turning points" else SHADES[place]
            budget, reward, low, high = points
            cell.plot(budget, reward, color=shade, label=arm)
            cell.fill_between(budget, low, high, color=shade, alpha=0.2, linewidth=0)
        cell.set(xlabel=shown["budget"], ylabel="held-out reward")
        cell.ticklabel_format(axis="x", scilimits=(-3, 4))
        cell.legend(frameon=False, fontsize=8)
    plt.show()


def dots(studies: Mapping[str, tuple[str, str]], world: str = "mixture") -> None:
    """A panel per title: a measure of a study's arms, with 95% intervals over seeds."""
    for cell, key in _panels(studies, 2.1):
        shown = _numbers("dots")[f"{key} {world}"]
        for row, (value, low, high) in enumerate(shown["arms"].values()):
            cell.plot([low, high], [row, row], color=NOISE, linewidth=2.4)
            cell.plot([value], [row], "o", color=ACCENT, markersize=5)
        cell.set_yticks(range(len(shown["arms"])), list(shown["arms"]), fontsize=8)
        cell.set(xlabel=shown["measure"])
        cell.invert_yaxis()
    plt.show()


def search(arm: str) -> None:
    """Rewards of all runs of the search for an arm's settings over their noise levels, by world."""
    _, cells = panels(2, width=3.4, height=2.1)
    for cell, (world, runs) in zip(cells, _numbers("search")[arm].items(), strict=True):
        cell.plot(*zip(*runs, strict=True), "o", color=SHADES[0], markersize=4)
        title = {"mixture": "Search, 2-D", "shapes": "Search, images"}[world]
        cell.set(xlabel="noise level", ylabel="reward", title=title)
        clean(cell)
    plt.show()


def _panels(studies: Mapping[str, tuple[str, str]], height: float) -> Iterator[tuple[Axes, str]]:
    """The axes of each title, and its study and budget or measure."""
    _, cells = panels(len(studies), width=3.4, height=height, squeeze=False)
    for cell, (title, shown) in zip(cells[0], studies.items(), strict=True):
        cell.set_title(title, fontsize=10)
        clean(cell)
        yield cell, " ".join(shown)
