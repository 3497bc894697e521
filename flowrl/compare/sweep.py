"""Results of a sweep: a table with a row per run, a figure, and the best settings of every arm."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from flowrl.compare.paper import csv_text
from flowrl.compare.results import Comparison, Mean, evaluation_rows, mean_of
from flowrl.run.io import write_bytes
from flowrl.run.parts.settings import settings_text
from flowrl.run.records import RunRecord
from flowrl.run.report.style import INK, SOFT, clean, colour, marker
from flowrl.run.results import short

COLOURS = colormaps["viridis"]
LIGHT = 0.6
"""Share of the range of rewards from which on a cell of the heat map has dark text."""


@dataclass(frozen=True)
class Point:
    """A point of the grid: its `values` by setting, and the evaluated `runs` of all seeds with
    their `finals`, the rewards of the last evaluation.
    """

    values: Mapping[str, Any]
    runs: Sequence[RunRecord]
    finals: Sequence[float]

    @property
    def reward(self) -> Mean:
        """The final reward over seeds."""
        return mean_of(self.finals)

    @property
    def label(self) -> str:
        """The values as text."""
        return ", ".join(f"{name}={text_of(value)}" for name, value in self.values.items())


def text_of(value: Any) -> str:
    """A value of the grid in figures."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Sweep:
    """The results of the `comparison` of all points of a grid."""

    comparison: Comparison

    @cached_property
    def points(self) -> dict[str, list[Point]]:
        """The points with an evaluated run, by arm."""
        by_arm: dict[str, list[Point]] = {}
        for name, point in self.comparison.config["points"].items():
            values = {key: value for key, value in point.items() if key != "arm"}
            runs = self.comparison.of(name)
            finals = [run.curve("iteration", *self.comparison.metric)[1][-1] for run in runs]
            if runs:
                by_arm.setdefault(point["arm"], []).append(Point(values, runs, finals))
        return by_arm

    @property
    def metric(self) -> str:
        """What is compared."""
        return f"final held-out {short(self.comparison.metric[-1])}"

    def rows(self) -> list[dict[str, Any]]:
        """A row per run: arm, the values of the grid, seed, whether it has finished, the metric
        before and after training and its mean over the evaluations during training, and all of the
        last evaluation (`evaluation_rows`).
        """
        last = {(row["arm"], row["seed"]): row for row in evaluation_rows(self.comparison)}
        rows = []
        for arm, points in self.points.items():
            for point in points:
                for run in point.runs:
                    curve = run.curve("iteration", *self.comparison.metric)[1]
                    head = {"arm": arm, **point.values, "seed": run.seed, "finished": run.finished}
                    head |= {"before": curve[0], "after": curve[-1]}
                    head |= {"mean": float(np.mean(curve[1:])) if curve[1:] else None}
                    end = last[run.arm, run.seed]
                    rows.append(head | {k: v for k, v in end.items() if k not in head})
        return rows

    def ranking(self, arm: str) -> list[Point]:
        """The points of an arm with most seeds, by descending mean of the final reward."""
        points = self.points[arm]
        most = max(len(point.runs) for point in points)
        complete = [point for point in points if len(point.runs) == most]
        return sorted(complete, key=lambda point: -point.reward.mean)

    def best_texts(self) -> list[str]:
        """The best point of every arm in words."""
        texts = []
        for arm in self.points:
            first, *others = self.ranking(arm)
            seeds = f"{len(first.runs)} seed{'s' * (len(first.runs) > 1)}"
            spread = f"lowest {min(first.finals):.3f}, highest {max(first.finals):.3f}"
            text = f"Best of {arm}: {first.label}; {self.metric} {first.reward.text()}"
            text += f" ({seeds}: {spread})"
            if others:
                text += f"; next {others[0].label}: {others[0].reward.text()}"
            texts.append(text)
        return texts

    def write(self, folder: Path) -> list[Path]:
        """Write sweep.csv and, for every arm, best-ARM.yaml with the settings of its best point,
        which `flowrl train --preset` reads.
        """
        contents = {"sweep.csv": csv_text(self.rows())}
        for arm, text in zip(self.points, self.best_texts(), strict=True):
            name = re.sub(r"[^\w.-]+", "_", arm)
            best = self.ranking(arm)[0].runs[0]
            note = "Chosen by this mean, which is therefore too high: run it with new seeds."
            contents[f"best-{name}.yaml"] = settings_text(best.config, f"{text}\n{note}")
        for name, content in contents.items():
            write_bytes(folder / name, content.encode())
        return [folder / name for name in contents]

    def figure(self) -> Figure | None:
        """The metric over one setting as curves, over two as heat maps, over more as parallel
        coordinates; None without a result. A panel per arm, except for curves.
        """
        if not self.points:
            return None
        arms = list(self.points)
        names = list(self.points[arms[0]][0].values)
        grid = {name: self._values(name) for name in names}
        if len(names) == 1:
            figure = Figure(figsize=(5.2, 3.6), layout="constrained")
            self._draw_curves(figure.subplots(), names[0], grid[names[0]])
            return figure
        means = [point.reward.mean for points in self.points.values() for point in points]
        low, high = min(means), max(max(means), min(means) + 1e-6)
        shares = {mean: (mean - low) / (high - low) for mean in means}
        columns = min(len(arms), 3)
        rows = -(-len(arms) // columns)
        widths, heights = (len(grid[name]) for name in names[:2])
        size = (max(3.4, 0.95 * heights + 1.6), max(2.4, 0.6 * widths + 1.3))
        if len(names) > 2:
            size = (1.5 * len(names) + 1.2, 3.4)
        figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
        cells = figure.subplots(rows, columns, squeeze=False).flat
        for axes, arm in zip(cells, arms, strict=False):
            axes.set_title(arm)
            if len(names) == 2:
                self._draw_heat(axes, arm, grid, shares)
            else:
                self._draw_parallel(axes, arm, grid, shares)
        for axes in list(figure.axes)[len(arms) :]:
            axes.set_visible(False)
        scale = ScalarMappable(Normalize(low, high), COLOURS)
        bar = figure.colorbar(scale, ax=figure.axes, label=self.metric)
        bar.outline.set_visible(False)  # pyright: ignore
        return figure

    def _values(self, name: str) -> list[Any]:
        points = (point for points in self.points.values() for point in points)
        return list({repr(point.values[name]): point.values[name] for point in points}.values())

    def _draw_curves(self, axes: Axes, name: str, values: Sequence[Any]) -> None:
        arms = list(self.points)
        for number, arm in enumerate(arms):
            points = {repr(point.values[name]): point for point in self.points[arm]}
            places = [place for place, value in enumerate(values) if repr(value) in points]
            chosen = [points[repr(values[place])] for place in places]
            tint, shift = colour(arm, arms), 0.06 * (number - (len(arms) - 1) / 2)
            for place, point in zip(places, chosen, strict=True):
                dots = [place + shift] * len(point.finals)
                axes.plot(dots, point.finals, ".", color=tint, alpha=0.45, markersize=5)
            means = [point.reward.mean for point in chosen]
            x = [place + shift for place in places]
            axes.plot(x, means, color=tint, marker=marker(arm, arms), label=arm)
        axes.set_xticks(range(len(values)), [text_of(value) for value in values])
        axes.set_xlabel(name)
        axes.set_ylabel(f"{self.metric}\n(dots: seeds; lines: means)")
        axes.legend(frameon=False)
        clean(axes)

    def _draw_heat(
        self,
        axes: Axes,
        arm: str,
        grid: Mapping[str, Sequence[Any]],
        shares: Mapping[float, float],
    ) -> None:
        (y, ys), (x, xs) = grid.items()
        best = self.ranking(arm)[0]
        for point in self.points[arm]:
            row, column = (
                [repr(value) for value in values].index(repr(point.values[name]))
                for name, values in grid.items()
            )
            edge = {"edgecolor": INK, "linewidth": 2, "zorder": 2} if point is best else {}
            share = shares[point.reward.mean]
            axes.bar(column, 0.96, 0.96, row - 0.48, color=COLOURS(share), **edge)
            text = point.reward.text().replace(" ±", "\n±")
            ink = INK if share > LIGHT else "white"
            axes.text(column, row, text, ha="center", va="center", fontsize=9, color=ink)
        axes.set_xticks(range(len(xs)), [text_of(value) for value in xs])
        axes.set_yticks(range(len(ys)), [text_of(value) for value in ys])
        axes.set(xlabel=x, ylabel=y, xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    def _draw_parallel(
        self,
        axes: Axes,
        arm: str,
        grid: Mapping[str, Sequence[Any]],
        shares: Mapping[float, float],
    ) -> None:
        """A line per point across the settings, the values of each evenly spaced."""
        best = self.ranking(arm)[0]
        heights = {
            name: {repr(v): (place + 1) / (len(values) + 1) for place, v in enumerate(values)}
            for name, values in grid.items()
        }
        for point in sorted(self.points[arm], key=lambda point: point.reward.mean):
            y = [*(heights[name][repr(value)] for name, value in point.values.items())]
            y.append(share := shares[point.reward.mean])
            axes.plot(y, color=COLOURS(share), linewidth=3 if point is best else 1.4)
        for place, (name, values) in enumerate(grid.items()):
            axes.axvline(place, color=SOFT, linewidth=0.8)
            for value in values:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
                at = (place, heights[name][repr(value)])
                axes.text(*at, text_of(value), ha="center", va="center", fontsize=9, bbox=box)
        axes.axvline(len(grid), color=SOFT, linewidth=0.8)
        axes.set_xticks(range(len(grid) + 1), [*(n.replace("_", "\n") for n in grid), "reward"])
        axes.set_yticks([])
        axes.set_ylim(-0.03, 1.03)
        axes.spines[:].set_visible(False)
