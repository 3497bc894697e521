"""Figures of reports and commands: learning curves, proxy and held-out rewards, grids of samples,
and rewards along one trajectory.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from flowrl.compare.bounds import ARM, bound_of
from flowrl.compare.comparison import run_label
from flowrl.compare.results import Comparison
from flowrl.credit import turning_points
from flowrl.run.reading import read_json, read_tensors, reading
from flowrl.run.records import RunRecord
from flowrl.run.report.figures import (
    MOST_TOGETHER,
    REFERENCE,
    X_LABELS,
    Panel,
    Row,
    are_points,
    drawable,
    line_figure,
    measured,
    sample_figure,
    show_image,
)
from flowrl.run.report.style import INK, PALE, SOFT, clean, colour
from flowrl.run.results import short
from flowrl.worlds.mixture import targets

NOTICEABLE = 0.02
"""Smallest change of a sample's reward that is marked by a symbol: ▲ for an increase, ▼ for a
decrease.
"""
LEAST_RANGE = 0.1
"""Smallest range of rewards on an axis, so that rounding does not look like a change."""


def curves(comparison: Comparison, metric: str = "reward", narrow: bool = False) -> Figure | None:
    """An evaluation metric against iterations, forward equivalents and seconds; None if no run
    contains it.

    Args:
        comparison: the comparison.
        metric: name of the metric.
        narrow: one panel below the other. None, too, if there are many arms.

    Returns:
        The figure.
    """
    runs = {arm: comparison.of(arm) for arm in comparison.arms if arm != ARM}
    path = comparison.metric if metric == "reward" else (metric,)
    if not measured(runs, path) or (narrow and len(runs) > MOST_TOGETHER):
        return None
    panels = [Panel(x, path, f"held-out {short(path[-1])}") for x in X_LABELS]
    bound = bound_of(comparison) if metric == "reward" else None
    line = bound and (ARM, bound.iterations, bound.rewards)
    return line_figure(runs, panels, comparison.baseline, line, narrow)


def _read_samples(path: Path, name: str, count: int | None) -> Tensor:
    """`count` samples from a safetensors file. Raises `CheckpointError`."""
    return read_tensors(path, {name: (count, None, None, None)})[name]


def _finished(comparison: Comparison) -> list[RunRecord]:
    """The first finished run of each arm."""
    runs = {run.arm: run for run in reversed(comparison.runs) if run.finished}
    return [runs[arm] for arm in comparison.arms if arm in runs]


def shows_points(comparison: Comparison) -> bool:
    """Whether the samples of the finished runs are points."""
    files = [run.folder / "samples.safetensors" for run in _finished(comparison)[:1]]
    return any(are_points(_read_samples(file, "after", None)) for file in files)


def samples(comparison: Comparison) -> Figure | None:
    """The same prompts and noise before training and after each arm (first seed). None if no run
    has finished.

    Args:
        comparison: the comparison.

    Returns:
        The figure.

    Raises:
        ConfigError: the files of a run are damaged, or have other samples than the first.
    """
    rows, before, prompts = list[Row](), list[float](), list[str]()
    for run in _finished(comparison):
        path = run.folder / "samples.json"
        record, tensors = read_json(path), path.with_suffix(".safetensors")
        with reading(path):
            if not rows:
                before, prompts = record["reward_before"], record["prompts"]
                if record.get("references"):
                    shown = _read_samples(tensors, "references", len(prompts))
                    rows.append(Row(REFERENCE, shown, [""] * len(prompts), prompts))
                images = _read_samples(tensors, "before", len(prompts))
                rows.append(Row("base model", images, [f"{r:.2f}" for r in before], prompts))
            if record["prompts"] != prompts:
                raise ValueError(f"other prompts than those of {rows[-1].name}")
            captions = [
                f"{r:.2f}{' ▲' if r > b + NOTICEABLE else ' ▼' if r < b - NOTICEABLE else ''}"
                for r, b in zip(record["reward_after"], before, strict=True)
            ]
            shade = colour(run.arm, list(comparison.config["arms"]))
            images = _read_samples(tensors, "after", len(prompts))
            rows.append(Row(run.arm, images.view_as(rows[0].samples), captions, prompts, shade))
    return sample_figure(rows, prompts, targets(prompts)) if rows else None


def value_quality(comparison: Comparison) -> Figure | None:
    """r2 of the final reward on the values, within groups, by decision and iteration: one panel per
    arm whose rule reads values, with the mean over its seeds. None if there is no such arm.
    """
    tables = {}
    for arm in comparison.arms:
        seeds = [
            [row["value_r2"] for row in run.rows if row.get("value_r2")]
            for run in comparison.of(arm)
        ]
        length = min(map(len, seeds), default=0)
        shapes = {len(r2) for rows in seeds for r2 in rows[:length]}
        if len(shapes) == 1:
            tables[arm] = np.mean([np.array(rows[:length], float) for rows in seeds], 0)
    if not tables:
        return None
    figure = Figure(figsize=(1.2 + 3.9 * len(tables), 3.1), layout="constrained")
    (panels,) = figure.subplots(1, len(tables), squeeze=False)
    for axes, (arm, table) in zip(panels, tables.items(), strict=True):
        ends = 0.5, len(table) + 0.5, table.shape[1] + 0.5, 0.5
        image = axes.imshow(table.T, aspect="auto", vmin=0, vmax=1, cmap="Blues", extent=ends)
        axes.set_title(arm, fontsize=9.5, fontweight="bold")
        axes.set(xlabel="iteration", ylabel="decision")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    figure.colorbar(image, ax=panels, label="r² of the final reward")  # pyright: ignore
    return figure


def _gains(record: Mapping[str, list[float]]) -> list[float]:
    """The gains of a trajectory's decisions."""
    return [after - before for before, after in pairwise(record["rewards"])]


def trajectory(comparison: Comparison) -> Figure | None:
    """Rewards along one trajectory (ODE completions and one-step estimates), its gains and its
    turning points.

    The trajectory is the one with the largest changes among the finished runs. If none of its gains
    reaches `NOTICEABLE`, no turning point is marked.

    Args:
        comparison: the comparison.

    Returns:
        The figure; None if no run has finished.

    Raises:
        ConfigError: the files of a run are damaged.
    """
    runs = [run for run in comparison.runs if run.finished]
    if not runs:
        return None
    with reading("trajectory.json"):
        records = [(run, read_json(run.folder / "trajectory.json")) for run in runs]
        run, record = max(records, key=lambda pair: sum(map(abs, _gains(pair[1]))))
        rewards, gains = record["rewards"], _gains(record)
        images = _read_samples(run.folder / "trajectory.safetensors", "images", len(rewards))
        figure = Figure(figsize=(11, 6.4), layout="constrained")
        layout = figure.add_gridspec(3, len(rewards), height_ratios=(1.0, 2.2, 1.3))
        for node, image in enumerate(() if are_points(images) else drawable(images)):
            axes = figure.add_subplot(layout[0, node])
            show_image(axes, image)
            axes.set_title(f"{rewards[node]:.2f}", fontsize=9)
        values = figure.add_subplot(layout[1, :])
        _draw_values(values, record)
        bars = figure.add_subplot(layout[2, :], sharex=values)
        shades = [SOFT if gain >= 0 else "white" for gain in gains]
        bars.bar(range(len(gains)), gains, align="edge", color=shades, edgecolor=SOFT)
        bars.set(xlabel="decision", ylabel="gain of the decision", xticks=range(len(rewards)))
        for axes in (values, bars):
            clean(axes)
            low, high = axes.get_ylim()
            spare = max(0.0, LEAST_RANGE - (high - low)) / 2
            axes.set_ylim(low - spare, high + spare)
        title = (
            f'Trajectory of {run_label(run.arm, run.seed)}, after training: "{record["prompt"]}"'
        )
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        figure.legend(loc="outside lower left", ncols=5, frameon=False, fontsize=9)
    return figure


def _draw_values(axes: Axes, record: Mapping[str, list]) -> None:
    """Estimated rewards of a trajectory's states and of the others in its group, and a ring at
    every turning point.
    """
    rewards, members = record["rewards"], torch.tensor(record["members"])
    lines = axes.plot(members.T, color=PALE, linewidth=0.8)
    lines[0].set_label("rest of the group")
    axes.plot(rewards, color=INK, marker="o", linewidth=2.5, label="ODE completion")
    axes.set_ylabel("estimated final reward")
    turns = turning_points(members[None], consistent=False)[0, record["chosen"]].nonzero().flatten()
    if len(turns) and max(map(abs, _gains(record))) >= NOTICEABLE:
        heights = [rewards[step] for step in turns.tolist()]
        style = {"facecolors": "none", "edgecolors": INK, "linewidths": 2, "zorder": 5}
        axes.scatter(turns, heights, 200, label="turning point", **style)
