"""The curves of runs as small panels in SVG, which have the colours and the width of their page."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.run.records import RunRecord
from flowrl.run.results import changes_of, short
from flowrl.run.table import scalars

HELD_OUT = "held-out reward"
GROUPS = {
    "Rewards": {
        "training reward": "reward_mean",
        HELD_OUT: "evaluation/reward",
        "source: ": "sources/",
        "held-out source: ": "evaluation/sources/",
        "held out: ": "evaluation/heldout/",
        "": "evaluation/",
        "part: ": "parts/",
    },
    "Update": {
        "KL to the base model": "kl",
        "KL to the sampling policy": "approx_kl",
        "clipped share": "clip_fraction",
        "std of rewards within a group": "group_std",
        "equal rewards in groups: ": "zero_spread_sources/",
        "gradient norm": "grad_norm",
        "seconds of an iteration": "seconds",
    },
    "Training images": {"": "images/"},
}
"""Panels by group, then by label: the metric as `flowrl.run.table.scalars` names it; of a metric
that ends in "/", all that begin with it, whose names follow the label.
"""
HIDDEN = (
    *("evaluation/seconds", "evaluation/skipped", "evaluation/reward_errors/"),
    "evaluation/spread/",
)
"""Of evaluations, what is among the costs, and standard deviations: names, and beginnings of names.
"""
MOST_POINTS = 300
"""Largest number of points of a line; of more iterations, each point is a mean."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 330, 150, 50, 10, 10, 20
"""A panel and its margins."""
Values = Mapping[int, float]


@dataclass(frozen=True)
class Line:
    """A run in a panel: its number among the runs, its path (the points of an SVG polyline), its
    points with their texts if they are few, and its best point.
    """

    number: int
    path: str
    points: list[tuple[float, float, str]]
    best: tuple[float, float] | None


@dataclass(frozen=True)
class Panel:
    """One metric: its label and last value (of a single run), the lines, the ticks with positions,
    and the positions of changes of settings.
    """

    label: str
    metric: str
    last: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    changes: list[float]


def curves_of(run: RunRecord) -> dict[str, dict[int, float]]:
    """Every finite number in a run's rows by its name, then by iteration."""
    curves: dict[str, dict[int, float]] = {}
    for row in run.rows:
        for name, value in scalars(row).items():
            if math.isfinite(value):
                curves.setdefault(name, {})[row["iteration"]] = value
    return curves


def panels_of(runs: Sequence[RunRecord]) -> dict[str, list[Panel]]:
    """The panels of `GROUPS` that one of the `runs` has values for, by group."""
    curves = [curves_of(run) for run in runs]
    known = dict.fromkeys(name for found in curves for name in found)
    changes = [i for run in runs for i, _ in changes_of(run.rows)]
    iterations = [row["iteration"] for run in runs for row in run.rows]
    first, last = min(iterations), max(iterations)
    shown, groups = set[str](), dict[str, list[Panel]]()
    for group, metrics in GROUPS.items():
        chosen = dict[str, str]()
        for label, metric in metrics.items():
            names = [
                n for n in known if n == metric or (metric[-1] == "/" and n.startswith(metric))
            ]
            for name in names:
                if name not in shown and not name.startswith(HIDDEN):
                    shown.add(name)
                    chosen[label + short(name.removeprefix(metric)).replace("_", " ")] = name
        panels = [
            _panel(
                *item,
                [found.get(item[1], {}) for found in curves],
                changes,
                (first, max(last, first + 1)),
            )
            for item in chosen.items()
        ]
        if panels:
            groups[group] = panels
    return groups


def _panel(
    label: str,
    metric: str,
    curves: Sequence[Values],
    changes: Sequence[int],
    across_all: tuple[int, int],
) -> Panel:
    """The panel of `metric`, of which `curves` has the values of each run, perhaps none;
    `across_all` is the range of the iterations of all panels.
    """
    thin = [_thinned(values) for values in curves]
    x_low, x_high = across_all
    y_low, y_high = _range([y for values in thin for y in values.values()])

    def across(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def down(y: float) -> float:
        return round(TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    def line(number: int, values: Values) -> Line:
        sparse = len(values) <= 60
        at = {x: (across(x), down(y)) for x, y in values.items()}
        points = [(*at[x], f"iteration {x}: {y:.5g}") for x, y in values.items()] if sparse else []
        best = max(values, key=values.__getitem__) if metric == "evaluation/reward" else None
        text = " ".join(f"{a},{b}" for a, b in at.values())
        return Line(number, text, points, None if best is None else at[best])

    last = [*curves[0].values()][-1] if len(curves) == 1 else math.nan
    y_ticks, x_ticks = _ticks(y_low, y_high, 5), _ticks(x_low, x_high, 5, whole=True)
    return Panel(
        label,
        metric,
        f"{last:.4g}" if math.isfinite(last) else "",
        [line(number, values) for number, values in enumerate(thin) if values],
        [(across(x), text) for x, text in x_ticks],
        [(down(y), text) for y, text in y_ticks],
        [across(x - 0.5) for x in changes if x_low <= x - 0.5 <= x_high],
    )


def _thinned(values: Values) -> Values:
    """At most `MOST_POINTS` points; each is the mean of as many neighbours, at the last of them."""
    size = -(-len(values) // MOST_POINTS)
    if size <= 1:
        return values
    items = [*values.items()]
    pieces = [items[i : i + size] for i in range(0, len(items), size)]
    return {piece[-1][0]: statistics.fmean(y for _, y in piece) for piece in pieces}


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The vertical range of a panel with these values."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) if low < high else abs(low) * 0.05
    return (low - margin, high + margin) if margin else (0.0, 1.0)


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[tuple[float, str]]:
    """About `count` round numbers in a range, with their texts."""
    least = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * 0.999)
    step = max(1.0, round(step)) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    numbers = [step * i for i in range(first, last + 1)]
    largest = max(map(abs, numbers), default=0.0)
    if largest >= 1e5 or 0 < largest < 1e-3:
        return [(number, f"{number:.2g}") for number in numbers]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(number, f"{number:,.{digits}f}") for number in numbers]
