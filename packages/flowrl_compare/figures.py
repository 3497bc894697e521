"""Figures of reports and commands: learning curves, proxy and held-out rewards, grids of samples,
and rewards along one trajectory.
"""

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from torch import Tensor

from flowrl.core.types import Prompt
from flowrl.credit import turning_points
from flowrl.reading import read_json, read_tensors, reading
from flowrl.training.results import short
from flowrl.worlds.mixture import target
from flowrl_compare.bounds import ARM, Bound, bound_of
from flowrl_compare.comparison import run_label
from flowrl_compare.results import Comparison, RunRecord, mean_curve
from flowrl_compare.style import INK, PALE, SOFT, clean, colour, marker
from flowrl_compare.weight_comparison import WeightComparison

X_LABELS = {
    "iteration": "updates (iterations)",
    "forwards": "network evaluations (forward equivalents)",
    "seconds_total": "training time (seconds)",
}
MOST_TOGETHER = 4
"""Arms that share an axis; if there are more, each has a row of panels of its own."""
PANELS = 5
"""Panels of points per row."""
NOTICEABLE = 0.02
"""Smallest change of a sample's reward that is marked by a symbol: ▲ for an increase, ▼ for a
decrease.
"""
LEAST_RANGE = 0.1
"""Smallest range of rewards on an axis, so that rounding does not look like a change."""

Runs = Mapping[str, Sequence[RunRecord]]


@dataclass(frozen=True)
class Panel:
    """The axes of a panel: the metric at path `y` within an evaluation, against a counter of
    `X_LABELS`.
    """

    x: str
    y: tuple[str, ...]
    label: str


def _measured(runs: Runs, path: tuple[str, ...]) -> bool:
    return any(run.curve("iteration", *path)[1] for seeds in runs.values() for run in seeds)


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
    if not _measured(runs, path) or (narrow and len(runs) > MOST_TOGETHER):
        return None
    panels = [Panel(x, path, f"held-out {short(path[-1])}") for x in X_LABELS]
    bound = bound_of(comparison) if metric == "reward" else None
    return _line_figure(runs, panels, comparison.baseline, bound, narrow)


def proxy_and_heldout(runs: Runs) -> Figure | None:
    """The proxy, every held-out reward and the diversity over iterations; `runs` by arm. None if no
    run contains a held-out reward or a diversity.
    """
    names = dict.fromkeys(
        name for seeds in runs.values() for run in seeds for name in run.heldout_rewards
    )
    paths = {f"held out: {short(name)}": ("heldout", name) for name in names}
    paths |= {"diversity": ("diversity",)}
    metrics = {label: path for label, path in paths.items() if _measured(runs, path)}
    if not metrics:
        return None
    proxy = ("proxy",) if names else ("reward",)
    shown = {"proxy (trained on)": proxy, **metrics}
    panels = [Panel("iteration", path, label) for label, path in shown.items()]
    return _line_figure(runs, panels)


def _line_figure(
    runs: Runs,
    panels: Sequence[Panel],
    baseline: str = "",
    bound: Bound | None = None,
    narrow: bool = False,
) -> Figure:
    """A row of panels, or with many arms one per arm, in which the other arms are grey. `baseline`:
    the arm whose final value and cost are dashed lines, if any. `bound`: dotted over iterations,
    elsewhere its final value, because its cost has no counterpart. `narrow`: a column of panels.
    """
    arms = list(runs)
    together = len(arms) <= MOST_TOGETHER
    rows = [arms] if together else [[arm] for arm in arms]
    size = 4.1 * len(panels), (3.3 if together else 2.4) * len(rows) + 0.5
    figure = Figure(figsize=(4.1, 8.5) if narrow else size, layout="constrained")
    grid = figure.subplots(*(len(panels), 1) if narrow else (len(rows), len(panels)), squeeze=False)
    grid = grid.T if narrow else grid
    for cells, shown in zip(grid, rows, strict=True):
        for axes, panel in zip(cells, panels, strict=True):
            for arm in sorted(arms, key=shown.__contains__):  # grey curves lie below
                _draw(axes, runs, arm, panel, arm in shown)
            spent, level = mean_curve(runs.get(baseline, ()), panel.x, *panel.y)
            for line, end in ((axes.axvline, spent[-1:]), (axes.axhline, level[-1:])):
                if end and (line, panel.x) != (axes.axvline, "iteration"):
                    line(*end, color="#8a8f98", linestyle="--", linewidth=1)
            if bound and panel.x == "iteration":
                axes.plot(bound.iterations, bound.rewards, ":", color=INK, label=ARM)
            elif bound:
                axes.axhline(bound.rewards[-1], color=INK, linestyle=":", linewidth=1)
            axes.set(xlabel=X_LABELS[panel.x], ylabel=panel.label)
            axes.set_title("" if together else shown[0], fontweight="bold", fontsize=9.5)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=panel.x == "iteration"))
            if panel.x == "forwards":
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            clean(axes)
    if together:
        handles = grid[0, 0].get_legend_handles_labels()
        columns = 1 if narrow else 5
        figure.legend(*handles, loc="outside upper left", ncols=columns, frameon=False)
    return figure


def _draw(axes: Axes, runs: Runs, arm: str, panel: Panel, coloured: bool) -> None:
    """A thick line for the mean over seeds and thin ones for the seeds; only the mean if grey."""
    x, y = mean_curve(runs[arm], panel.x, *panel.y)
    if not coloured:
        axes.plot(x, y, color=PALE, linewidth=1)
        return
    shade = colour(arm, list(runs))
    for run in runs[arm] if len(runs[arm]) > 1 else ():
        axes.plot(*run.curve(panel.x, *panel.y), color=shade, alpha=0.3, linewidth=1)
    style = {"linewidth": 2.2, "markersize": 4, "markevery": max(1, len(x) // 10), "zorder": 3}
    axes.plot(x, y, color=shade, marker=marker(arm, list(runs)), label=arm, **style)


@dataclass(frozen=True)
class Row:
    """Samples of one model: a row of images with a caption each, or a panel of points.

    Args:
        name: label of the row.
        samples: samples [sample, channel, height, width].
        captions: texts below the images.
        prompts: the prompts of the samples, whose targets are drawn in the 2-D world.
        shade: colour of the label and of the points.
    """

    name: str
    samples: Tensor
    captions: Sequence[str]
    prompts: Sequence[str]
    shade: str = INK


def sample_figure(rows: Sequence[Row], titles: Sequence[str] = ()) -> Figure:
    """Images in rows below the `titles` of the columns; if the samples are points, a panel per row.

    Args:
        rows: the rows, with as many samples each.
        titles: texts above the columns of images.

    Returns:
        The figure.
    """
    first = drawable(rows[0].samples)
    if _are_points(first):
        columns = min(PANELS, len(rows))
        lines = -(-len(rows) // columns)
        figure = Figure(figsize=(2.8 * columns, 3.0 * lines), layout="compressed")
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, row in zip(panels, rows, strict=False):
            _draw_points(axes, row)
        for axes in panels[len(rows) :]:
            axes.set_visible(False)
        return figure
    # `stills` of a video are wide
    width = 1.5 * max(1.0, first.shape[-1] / first.shape[-2]) * len(first)
    figure = Figure(figsize=(width, 1.75 * len(rows) + 0.3), layout="constrained")
    grid = figure.subplots(len(rows), len(first), squeeze=False)
    for cells, row in zip(grid, rows, strict=True):
        for axes, image, caption in zip(cells, drawable(row.samples), row.captions, strict=True):
            _show(axes, image)
            axes.set_xlabel(caption, fontsize=9)
        label = textwrap.fill(row.name, 22)
        cells[0].set_ylabel(label, color=row.shade, fontweight="bold", fontsize=9)
    for axes, text in zip(grid[0], titles, strict=False):
        title = textwrap.fill(text, 22, max_lines=4, placeholder=" ...")
        axes.set_title(title, fontsize=8.5)
    return figure


def drawable(samples: Tensor) -> Tensor:
    """Samples [sample, channel, height, width] as they are drawn: points [sample, 2, 1, 1] and
    images of three channels as they are, the mean over other channels in grey, and a vector
    [sample, channel, 1, 1] as a row of pixels.
    """
    if _are_points(samples) or samples.shape[-3] == 3:
        return samples
    if samples.shape[-2:] == (1, 1):
        samples = samples.transpose(-3, -1)
    return samples.mean(-3, keepdim=True).expand(*samples.shape[:-3], 3, *samples.shape[-2:])


def _are_points(samples: Tensor) -> bool:
    return samples.shape[-3:] == (2, 1, 1)


def _show(axes: Axes, image: Tensor) -> None:
    axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def _draw_points(axes: Axes, row: Row) -> None:
    """Points; in the 2-D world a line from each to its target, and the directions outside."""
    points, aims = row.samples[:, :, 0, 0].tolist(), dict[str, tuple[float, float]]()
    for text in row.prompts:
        with suppress(ValueError):  # prompts of other worlds have no target
            aims[text] = target(Prompt(text))
    for (x, y), text in zip(points, row.prompts, strict=True):
        if text in aims:
            axes.plot((x, aims[text][0]), (y, aims[text][1]), color=PALE, linewidth=1, zorder=1)
    for text, (x, y) in aims.items():
        axes.scatter(x, y, s=30, color=SOFT, marker="+", zorder=2)
        label, place = f"{text.split()[1]}°", (1.4 * x, 1.4 * y)
        axes.annotate(label, place, color=SOFT, fontsize=8, ha="center", va="center")
    axes.scatter(*zip(*points, strict=True), s=16, color=row.shade, zorder=3)
    if aims:
        axes.set(xlim=(-3.3, 3.3), ylim=(-3.3, 3.3), xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    axes.set(aspect="equal")
    axes.set_title(row.name, fontsize=10, fontweight="bold")
    clean(axes)


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
    return any(_are_points(_read_samples(file, "after", None)) for file in files)


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
    return sample_figure(rows, prompts) if rows else None


def base_and_trained(comparison: WeightComparison) -> Figure:
    """The first prompts' images from base and trained weights with their scores."""
    prompts = comparison.prompts[: len(comparison.base.shown)]
    rows = []
    for name, side in (("base", comparison.base), ("trained", comparison.trained)):
        scores = torch.stack([table[: len(prompts), 0] for table in side.scores.values()], 1)
        captions = [", ".join(f"{score:.3g}" for score in image) for image in scores.tolist()]
        rows.append(Row(name, side.shown, captions, prompts))
    return sample_figure(rows, prompts)


def image_grid(images: Tensor, scores: Tensor, prompts: Sequence[str]) -> Figure:
    """Images with their scores, one row (2-D world: one scatter plot) per prompt.

    Args:
        images: images [prompt, count, channel, height, width].
        scores: scores [prompt, count].
        prompts: texts of the prompts.

    Returns:
        The figure.
    """
    rows = [
        Row(text, cells, [f"{score:.2f}" for score in values.tolist()], [text] * len(cells))
        for text, cells, values in zip(prompts, images, scores, strict=True)
    ]
    return sample_figure(rows)


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
        for node, image in enumerate(() if _are_points(images) else drawable(images)):
            axes = figure.add_subplot(layout[0, node])
            _show(axes, image)
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
