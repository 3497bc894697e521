"""Figures of samples: before and after training, along one trajectory, base against trained
weights, and plain grids.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge, Len
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowrl.cli.style import INK, PALE, SOFT, clean, colour
from flowrl.core.errors import CheckpointError, ConfigError, require
from flowrl.core.types import Prompt
from flowrl.credit import turning_points
from flowrl.reading import read_json, read_tensors
from flowrl.training.compare import run_label
from flowrl.training.results import Comparison, RunRecord
from flowrl.training.weight_comparison import WeightComparison
from flowrl.worlds.mixture import RADIUS, angle_of, target

COLUMNS = 2
"""Prompts per row of `base_and_trained`."""
PANELS = 5
"""Panels of points per row."""
NOTICEABLE = 0.02
"""Smallest change of a sample's reward that is marked by a symbol: ▲ for an increase, ▼ for a
decrease.
"""
LEAST_RANGE = 0.1
"""Smallest range of rewards on an axis, so that rounding does not look like a change."""
RIM, REACH = 2.75, 3.3
"""Radius at which the directions of prompts are written in the 2-D world, and half the width of its
panels; those of other points are as wide as the points need.
"""


@dataclass(frozen=True)
class SamplesRecord:
    """samples.json: the prompts of samples.safetensors, and the rewards before and after training.

    Args:
        prompts: one or more prompts.
        reward_before: rewards before training, one per prompt.
        reward_after: rewards after training, one per prompt.

    Raises:
        ConfigError: the lists differ in length or are empty.
    """

    prompts: list[str]
    reward_before: list[float]
    reward_after: list[float]

    def __post_init__(self) -> None:
        counts = {len(self.prompts), len(self.reward_before), len(self.reward_after)}
        require(
            len(counts) == 1 and self.prompts != [],
            "prompts",
            len(self.prompts),
            "one or more, with as many rewards",
        )


@dataclass(frozen=True)
class TrajectoryRecord:
    """trajectory.json, as written by `flowrl.training.evaluation.write_trajectory`.

    Args:
        prompt: text of the prompt.
        chosen: index of the member that is drawn.
        rewards: the member's values by ODE completion [decision+1].
        members: these values of all members [member, decision+1].
        tweedie: the member's values by one-step estimates [decision+1].

    Raises:
        ConfigError: the lists differ in length, or `chosen` is out of range.
    """

    prompt: str
    chosen: Annotated[int, Ge(0)]
    rewards: Annotated[list[float], Len(2)]
    members: list[list[float]]
    tweedie: list[float]

    def __post_init__(self) -> None:
        counts = {len(self.rewards), len(self.tweedie), *map(len, self.members)}
        require(len(counts) == 1, "rewards", sorted(counts), "as many in every list")
        require(self.chosen < len(self.members), "chosen", self.chosen, "the number of a member")


def _images(path: Path, name: str, count: int) -> Tensor:
    """`drawable` samples from a safetensors file. Raises `CheckpointError`."""
    found = read_tensors(path, {name: (count, None, None, None)})[name]
    if 0 in found.shape:
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(found.shape)}: neither images nor points"
        )
    return drawable(found)


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


def _aspect(images: Tensor) -> float:
    """Width over height of the images, 1 or more: `stills` of a video are wide."""
    return max(1.0, images.shape[-1] / images.shape[-2])


def _show(axes: Axes, image: Tensor) -> None:
    axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def _points(
    axes: Axes, points: Tensor, title: str, shade: str = INK, prompts: Sequence[str] = ()
) -> None:
    """Samples that are points; with `prompts` of the 2-D world, a line from each to its target, the
    directions outside.
    """
    aims = {text: target(Prompt(text)) for text in dict.fromkeys(prompts) if _is_direction(text)}
    for point, text in zip(points[:, :, 0, 0].tolist(), prompts, strict=True) if prompts else ():
        if text in aims:
            axes.plot(
                (point[0], aims[text][0]),
                (point[1], aims[text][1]),
                color=PALE,
                linewidth=1,
                zorder=1,
            )
    for text, aim in aims.items():
        axes.scatter(*aim, marker="+", color=SOFT, s=30, linewidths=1, zorder=2)
        place = (RIM / RADIUS * aim[0], RIM / RADIUS * aim[1])
        axes.annotate(
            f"{angle_of(text):g}°", place, color=SOFT, fontsize=8, ha="center", va="center"
        )
    axes.scatter(points[:, 0, 0, 0], points[:, 1, 0, 0], color=shade, s=16, zorder=3)
    if aims or not prompts:
        axes.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    axes.set(aspect="equal")
    axes.set_title(title, color=INK, fontsize=10, fontweight="bold")
    clean(axes)


def _is_direction(text: str) -> bool:
    """Whether a prompt is one of the 2-D world's."""
    try:
        return math.isfinite(angle_of(text))
    except ConfigError:
        return False


def _point_panels(
    panels: Sequence[tuple[str, Tensor, str]], prompts: Sequence[str], columns: int
) -> Figure:
    """Points in a panel per (title, points, colour)."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.6 * columns, 3.0 * rows), layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, (name, points, shade) in zip(grid, panels, strict=False):
        _points(axes, points, name, shade, prompts)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def _finished(comparison: Comparison) -> list[RunRecord]:
    """The first finished run of each arm."""
    found = [
        next((run for run in comparison.of(arm) if run.finished), None) for arm in comparison.arms
    ]
    return [run for run in found if run is not None]


def shows_points(comparison: Comparison) -> bool:
    """Whether the samples of the finished runs are points."""
    runs = _finished(comparison)[:1]
    return any(
        _are_points(
            read_tensors(run.folder / "samples.safetensors", {"after": (None,) * 4})["after"]
        )
        for run in runs
    )


def samples(comparison: Comparison, narrow: bool = False) -> Figure | None:
    """The same prompts and noise before training and after each arm (first seed). None if no run
    has finished.

    Args:
        comparison: the comparison.
        narrow: points in two panels per row instead of five.

    Returns:
        The figure.
    """
    runs = _finished(comparison)
    if not runs:
        return None
    first: SamplesRecord = read_json(runs[0].folder / "samples.json", SamplesRecord)
    prompts, rows = first.prompts, list[tuple[str, Tensor, list[float], str]]()
    for run in runs:
        record: SamplesRecord = read_json(run.folder / "samples.json", SamplesRecord)
        images = {
            name: _images(run.folder / "samples.safetensors", name, len(prompts))
            for name in ("before", "after")
        }
        if (
            record.prompts != prompts
            or images["after"].shape != (rows[0][1] if rows else images["before"]).shape
        ):
            raise ConfigError(
                f"{run.folder / 'samples.json'}: other samples than those of {runs[0].folder}"
            )
        rows = rows or [("base model", images["before"], record.reward_before, INK)]
        rows.append(
            (
                run.arm,
                images["after"],
                record.reward_after,
                colour(run.arm, list(comparison.config["arms"])),
            )
        )
    if _are_points(rows[0][1]):
        panels = [(name, points, shade) for name, points, _, shade in rows]
        return _point_panels(panels, prompts, 2 if narrow else PANELS)
    figure = Figure(
        figsize=(1.5 * _aspect(rows[0][1]) * len(prompts), 1.75 * len(rows) + 0.3),
        layout="constrained",
    )
    grid = figure.subplots(len(rows), len(prompts), squeeze=False)
    for axes_row, (name, images, scores, shade) in zip(grid, rows, strict=True):
        for axes, image, value, before in zip(axes_row, images, scores, rows[0][2], strict=True):
            _show(axes, image)
            symbol = (
                " ▲" if value > before + NOTICEABLE else " ▼" if value < before - NOTICEABLE else ""
            )
            axes.set_xlabel(
                f"{value:.2f}{symbol}",
                fontsize=9,
                color=INK,
                fontweight="bold" if symbol else "normal",
            )
        axes_row[0].set_ylabel(name, color=shade, fontweight="bold", fontsize=9)
    for axes, text in zip(grid[0], prompts, strict=True):
        words = text.split()
        half = (len(words) + 1) // 2
        axes.set_title(" ".join(words[:half]) + "\n" + " ".join(words[half:]), fontsize=8.5)
    return figure


def _liveliest(comparison: Comparison) -> tuple[RunRecord, TrajectoryRecord] | None:
    """The finished run whose trajectory has the largest sum of absolute gains."""
    runs = [run for run in comparison.runs if run.finished and run.evaluations]
    found = [(run, read_json(run.folder / "trajectory.json", TrajectoryRecord)) for run in runs]
    return max(found, key=lambda pair: sum(map(abs, _steps(pair[1]))), default=None)


def _steps(record: TrajectoryRecord) -> list[float]:
    """The gains of the trajectory's decisions."""
    return [after - before for before, after in pairwise(record.rewards)]


def trajectory(comparison: Comparison, narrow: bool = False) -> Figure | None:
    """Rewards along one trajectory (ODE completions and one-step estimates), its gains and its
    turning points.

    The trajectory is the one with the largest changes among the finished runs. If none of its gains
    reaches `NOTICEABLE`, no turning point is marked.

    Args:
        comparison: the comparison.
        narrow: for a page of half the width, without images.

    Returns:
        The figure; None if no run has finished.
    """
    found = _liveliest(comparison)
    if found is None:
        return None
    run, record = found
    completions = _images(run.folder / "trajectory.safetensors", "images", len(record.rewards))
    table, rewards, steps = torch.tensor(record.members)[None], record.rewards, _steps(record)
    has_images, nodes = not _are_points(completions), len(rewards)
    shown = has_images and not narrow
    figure = Figure(
        figsize=(4.4, 5.2) if narrow else (11, 6.4 if shown else 4.9), layout="constrained"
    )
    ratios = [1.0, 2.2, 1.3] if shown else [2.2, 1.3]
    layout = figure.add_gridspec(len(ratios), nodes, height_ratios=ratios)
    for node in range(nodes) if shown else ():
        axes = figure.add_subplot(layout[0, node])
        _show(axes, completions[node])
        axes.set_title(f"{rewards[node]:.2f}", fontsize=9)
    curve = figure.add_subplot(layout[-2, :])
    for place, values in enumerate(table[0]):
        curve.plot(
            range(nodes),
            values,
            color=PALE,
            linewidth=0.8,
            label="rest of the group" if place == 0 else None,
        )
    curve.plot(range(nodes), rewards, color=INK, marker="o", linewidth=2.5, label="ODE completion")
    curve.plot(
        range(nodes),
        record.tweedie,
        color=SOFT,
        linestyle=":",
        linewidth=2,
        label="one-step estimate",
    )
    rings = {
        "turning point": (False, SOFT, 130, 1.2),
        "consistent turning point": (True, INK, 260, 2.6),
    }
    for name, (consistent, shade, size, width) in (
        rings.items() if max(map(abs, steps)) >= NOTICEABLE else ()
    ):
        turns = (
            turning_points(table, consistent=consistent, first_step=True)[0, record.chosen]
            .nonzero()
            .flatten()
            .tolist()
        )
        heights = [rewards[step] for step in turns]
        label = name if turns else None
        curve.scatter(
            turns,
            heights,
            s=size,
            facecolors="none",
            edgecolors=shade,
            linewidths=width,
            zorder=5,
            label=label,
        )
    curve.set_ylabel("estimated final reward")
    title = f'Trajectory of {run_label(run.arm, run.seed)}, after training: "{record.prompt}"'
    figure.suptitle(textwrap.fill(title, 50) if narrow else title, fontsize=10, x=0.01, ha="left")
    figure.legend(
        loc="outside lower left",
        ncols=2 if narrow else 5,
        frameon=False,
        fontsize=9,
        markerscale=0.6,
    )
    bars = figure.add_subplot(layout[-1, :], sharex=curve)
    faces = [SOFT if gain >= 0 else "white" for gain in steps]
    bars.bar(
        [i + 0.5 for i in range(nodes - 1)],
        steps,
        width=0.8,
        color=faces,
        edgecolor=SOFT,
        linewidth=1,
    )
    bars.axhline(0, color=INK, linewidth=0.8)
    end = "image" if has_images else "sample"
    bars.set(
        xlabel=f"state before decision 0 to {nodes - 2}, and the {end}",
        ylabel="gain of the decision",
        xticks=range(nodes),
    )
    for axes in (curve, bars):
        clean(axes)
        axes.set_xlim(-0.3, nodes - 0.7)
        low, high = axes.get_ylim()
        spare = max(0.0, LEAST_RANGE - (high - low)) / 2
        axes.set_ylim(low - spare, high + spare)
    return figure


def base_and_trained(found: WeightComparison) -> Figure:
    """The first prompts' images from base and trained weights with their scores; two scatter plots
    in the 2-D world.
    """
    sides = {"base": found.base, "trained": found.trained}
    shown = len(found.base.shown)
    if _are_points(found.base.shown):
        figure = Figure(figsize=(6.6, 3.4), layout="constrained")
        for axes, (name, side) in zip(figure.subplots(1, 2), sides.items(), strict=True):
            _points(axes, side.shown, name, prompts=found.prompts[:shown])
        return figure
    rows = -(-shown // COLUMNS)
    figure = Figure(figsize=(3.7 * COLUMNS, 2.5 * rows), layout="constrained")
    for i, part in enumerate(figure.subfigures(rows, COLUMNS, squeeze=False).flatten()[:shown]):
        part.suptitle(
            textwrap.fill(found.prompts[i], 52, max_lines=2, placeholder=" ..."), fontsize=8.5
        )
        for axes, (name, side) in zip(part.subplots(1, 2), sides.items(), strict=True):
            _show(axes, drawable(side.shown[i]))
            axes.set_xlabel(
                f"{name}: "
                + ", ".join(f"{float(scores[i, 0]):.3g}" for scores in side.scores.values()),
                fontsize=8,
            )
    return figure


def image_grid(images: Tensor, scores: Tensor, prompts: Sequence[str]) -> Figure:
    """Images with their scores, one row (2-D world: one scatter plot) per prompt.

    Args:
        images: images [prompt, count, channel, height, width].
        scores: scores [prompt, count].
        prompts: texts of the prompts.

    Returns:
        The figure.
    """
    rows, columns = images.shape[:2]
    images = drawable(images)
    if _are_points(images):
        figure = Figure(figsize=(2.8 * rows, 3.0), layout="constrained")
        for axes, points, text in zip(
            figure.subplots(1, rows, squeeze=False)[0], images, prompts, strict=True
        ):
            _points(axes, points, text, prompts=[text] * len(points))
        return figure
    figure = Figure(figsize=(1.25 * _aspect(images) * columns, 1.62 * rows), layout="constrained")
    for row, (cells, text) in enumerate(
        zip(figure.subplots(rows, columns, squeeze=False), prompts, strict=True)
    ):
        for axes, image, value in zip(cells, images[row], scores[row], strict=True):
            _show(axes, image)
            axes.set_xlabel(f"{float(value):.2f}", fontsize=8)
        cells[0].set_title(text, loc="left", fontsize=10)
    return figure
