"""Figures of samples: before and after training, along one trajectory, base against trained weights, and plain grids."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge, Len
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowrl.credit import gains, turning_points
from flowrl.diagnostics.weight_comparison import WeightComparison
from flowrl.errors import CheckpointError, ConfigError, require
from flowrl.plots.style import INK, clean, colour
from flowrl.reading import read_json, read_tensors
from flowrl.training.results import Comparison, RunRecord

GOOD, BAD, NEUTRAL = "#00734f", "#b3261e", "#555b66"
COLUMNS = 2
"""Prompts per row of `base_and_trained`."""


@dataclass(frozen=True)
class SamplesRecord:
    """samples.json: the prompts of samples.safetensors, and the rewards before and after training."""

    prompts: list[str]
    reward_before: list[float]
    reward_after: list[float]

    def __post_init__(self) -> None:
        counts = {len(self.prompts), len(self.reward_before), len(self.reward_after)}
        require(len(counts) == 1 and self.prompts != [], "prompts", len(self.prompts), "one or more, with as many rewards")


@dataclass(frozen=True)
class TrajectoryRecord:
    """trajectory.json, as `flowrl.training.evaluation.write_trajectory` describes it."""

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
    """Images [count, 3, height, width] or points [count, 2, 1, 1] from a safetensors file. Raises `CheckpointError`."""
    found = read_tensors(path, {name: (count, None, None, None)})[name]
    if found.shape[1:] != (2, 1, 1) and (found.shape[1] != 3 or 0 in found.shape):
        raise CheckpointError(f"{path}: tensor {name!r} has shape {list(found.shape)}: neither images nor points")
    return found


def _aspect(images: Tensor) -> float:
    """Width over height of the images, 1 or more: `stills` of a video are wide."""
    return max(1.0, images.shape[-1] / images.shape[-2])


def _show(axes: Axes, image: Tensor) -> None:
    axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def _points(axes: Axes, points: Tensor, title: str, shade: str = INK) -> None:
    """Samples of the 2-D world."""
    axes.scatter(points[:, 0, 0, 0], points[:, 1, 0, 0], color=shade, s=14)
    axes.set(xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), aspect="equal")
    axes.set_title(title, color=shade)
    clean(axes)


def _finished(comparison: Comparison, methods: Sequence[str]) -> list[RunRecord]:
    """The first finished run of each method."""
    found = [next((run for run in comparison.of(method) if run.finished), None) for method in methods]
    return [run for run in found if run is not None]


def samples(comparison: Comparison) -> Figure | None:
    """The same prompts and noise before training and after each method (first seed). None if no run has finished."""
    runs = _finished(comparison, comparison.methods)
    if not runs:
        return None
    first: SamplesRecord = read_json(runs[0].folder / "samples.json", SamplesRecord)
    prompts, rows = first.prompts, list[tuple[str, Tensor, list[float], str]]()
    for run in runs:
        record: SamplesRecord = read_json(run.folder / "samples.json", SamplesRecord)
        images = {name: _images(run.folder / "samples.safetensors", name, len(prompts)) for name in ("before", "after")}
        if record.prompts != prompts or images["after"].shape != (rows[0][1] if rows else images["before"]).shape:
            raise ConfigError(f"{run.folder / 'samples.json'}: other samples than those of {runs[0].folder}")
        rows = rows or [("base model", images["before"], record.reward_before, INK)]
        rows.append((run.method, images["after"], record.reward_after, colour(run.method, comparison.config["methods"])))
    if rows[0][1].shape[-1] == 1:
        figure = Figure(figsize=(3 * len(rows), 3.2), layout="constrained")
        for axes, (name, points, _, shade) in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
            _points(axes, points, name, shade)
            for point, text in zip(points, prompts, strict=True):
                axes.annotate(text.partition(" ")[2], (float(point[0]), float(point[1])), fontsize=7)
        return figure
    figure = Figure(figsize=(1.5 * _aspect(rows[0][1]) * len(prompts), 1.75 * len(rows) + 0.3), layout="constrained")
    grid = figure.subplots(len(rows), len(prompts), squeeze=False)
    for axes_row, (name, images, scores, shade) in zip(grid, rows, strict=True):
        for axes, image, value, before in zip(axes_row, images, scores, rows[0][2], strict=True):
            _show(axes, image)
            change = GOOD if value > before + 0.02 else BAD if value < before - 0.02 else NEUTRAL
            axes.set_xlabel(f"{value:.2f}", fontsize=9, color=change, fontweight="bold")
        axes_row[0].set_ylabel(name, color=shade, fontweight="bold", fontsize=9)
    for axes, text in zip(grid[0], prompts, strict=True):
        words = text.split()
        half = (len(words) + 1) // 2
        axes.set_title(" ".join(words[:half]) + "\n" + " ".join(words[half:]), fontsize=8.5)
    return figure


def trajectory(comparison: Comparison) -> Figure | None:
    """Rewards along one trajectory (ODE completions and one-step estimates), its gains and its turning points."""
    runs = _finished(comparison, sorted(comparison.methods, key=lambda method: "tp" not in method))
    if not runs:
        return None
    record: TrajectoryRecord = read_json(runs[0].folder / "trajectory.json", TrajectoryRecord)
    completions = _images(runs[0].folder / "trajectory.safetensors", "images", len(record.rewards))
    table, rewards = torch.tensor(record.members)[None], record.rewards
    has_images, nodes = completions.shape[-1] > 1, len(rewards)
    figure = Figure(figsize=(11, 6.2 if has_images else 4.6), layout="constrained")
    ratios = [1.0, 2.2, 1.3] if has_images else [2.2, 1.3]
    layout = figure.add_gridspec(len(ratios), nodes, height_ratios=ratios)
    for node in range(nodes) if has_images else ():
        axes = figure.add_subplot(layout[0, node])
        _show(axes, completions[node])
        axes.set_title(f"{rewards[node]:.2f}", fontsize=9)
    curve = figure.add_subplot(layout[-2, :])
    curve.plot(range(nodes), table[0].T, color="#c9ccd3", linewidth=0.8)
    for name, values, shade, ink, style, at, shift in (
        ("one-step estimate", record.tweedie, "#D55E00", "#a84600", {"linestyle": ":", "linewidth": 2}, 1, (12, -9)),
        ("ODE completion", rewards, "#009E73", GOOD, {"marker": "o", "linewidth": 2.5}, 0, (3, 8)),
    ):
        curve.plot(range(nodes), values, color=shade, **style)
        curve.annotate(name, (at, values[at]), color=ink, fontsize=9, xytext=shift, textcoords="offset points")
    for consistent, shade in ((False, "#8a8f98"), (True, BAD)):
        turns = turning_points(table, consistent=consistent, first_step=True)[0, record.chosen].nonzero().flatten().tolist()
        heights = [rewards[step] for step in turns]
        curve.scatter(turns, heights, s=190, facecolors="none", edgecolors=shade, linewidths=2, zorder=5 + consistent)
    curve.set_ylabel("estimated final reward")
    title = f'"{record.prompt}": red rings are consistent turning points, grey rings plain ones; thin lines: rest of the group'
    curve.set_title(title, fontsize=10)
    bars, steps = figure.add_subplot(layout[-1, :], sharex=curve), gains(table)[0, record.chosen].tolist()
    bars.bar([i + 0.5 for i in range(nodes - 1)], steps, width=0.8, color=["#009E73" if g >= 0 else BAD for g in steps])
    bars.axhline(0, color=INK, linewidth=0.8)
    bars.set(xlabel="node (0 = noise, last = image)", ylabel="gain of the step", xticks=range(nodes))
    for axes in (curve, bars):
        clean(axes)
        axes.set_xlim(-0.5, nodes - 0.5)
    return figure


def base_and_trained(found: WeightComparison) -> Figure:
    """The first prompts' images from base and trained weights with their scores; two scatter plots in the 2-D world."""
    sides = {"base": found.base, "trained": found.trained}
    shown = len(found.base.shown)
    if found.base.shown.shape[-1] == 1:
        figure = Figure(figsize=(6.6, 3.4), layout="constrained")
        for axes, (name, side) in zip(figure.subplots(1, 2), sides.items(), strict=True):
            _points(axes, side.shown, name)
        return figure
    rows = -(-shown // COLUMNS)
    figure = Figure(figsize=(3.7 * COLUMNS, 2.5 * rows), layout="constrained")
    for i, part in enumerate(figure.subfigures(rows, COLUMNS, squeeze=False).flatten()[:shown]):
        part.suptitle(textwrap.fill(found.prompts[i], 52, max_lines=2, placeholder=" ..."), fontsize=8.5)
        for axes, (name, side) in zip(part.subplots(1, 2), sides.items(), strict=True):
            _show(axes, side.shown[i])
            axes.set_xlabel(f"{name}: " + ", ".join(f"{float(scores[i, 0]):.3g}" for scores in side.scores.values()), fontsize=8)
    return figure


def image_grid(images: Tensor, scores: Tensor, prompts: Sequence[str]) -> Figure:
    """`images` [prompt, count, channel, height, width] with their `scores`, one row (2-D world: one scatter plot) per prompt."""
    rows, columns = images.shape[:2]
    if images.shape[-1] == 1:
        figure = Figure(figsize=(3 * rows, 3.2), layout="constrained")
        for axes, points, text in zip(figure.subplots(1, rows, squeeze=False)[0], images, prompts, strict=True):
            _points(axes, points, text)
        return figure
    figure = Figure(figsize=(1.25 * _aspect(images) * columns, 1.62 * rows), layout="constrained")
    for row, (cells, text) in enumerate(zip(figure.subplots(rows, columns, squeeze=False), prompts, strict=True)):
        for axes, image, value in zip(cells, images[row], scores[row], strict=True):
            _show(axes, image)
            axes.set_xlabel(f"{float(value):.2f}", fontsize=8)
        cells[0].set_title(text, loc="left", fontsize=10)
    return figure
