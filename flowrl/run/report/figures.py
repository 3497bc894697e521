"""Figures of runs: curves over iterations, and grids of samples."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from torch import Tensor

from flowrl.core.prompt import Prompt
from flowrl.run.images import references_of
from flowrl.run.records import RunRecord, mean_curve
from flowrl.run.report.style import INK, PALE, SOFT, clean, colour, marker
from flowrl.run.results import changes_of, short

X_LABELS = {
    "iteration": "updates (iterations)",
    "forwards": "network evaluations (forward equivalents)",
    "seconds_total": "training time (seconds)",
}
MOST_TOGETHER = 4
"""Arms that share an axis; if there are more, each has a row of panels of its own."""
PANELS = 5
"""Panels of points per row."""
Runs = Mapping[str, Sequence[RunRecord]]
Targets = Mapping[str, tuple[float, float]]
"""Points by the prompt that asks for them."""
NO_TARGETS: Targets = MappingProxyType({})


@dataclass(frozen=True)
class Panel:
    """The axes of a panel: the metric at path `y` within an evaluation, against a counter of
    `X_LABELS`.
    """

    x: str
    y: tuple[str, ...]
    label: str


def measured(runs: Runs, path: tuple[str, ...]) -> bool:
    """Whether an evaluation of a run contains the metric at `path`."""
    return any(run.curve("iteration", *path)[1] for seeds in runs.values() for run in seeds)


def proxy_and_heldout(runs: Runs) -> Figure | None:
    """The proxy, every held-out reward and the diversity over iterations; `runs` by arm. None if no
    run contains a held-out reward or a diversity.
    """
    names = dict.fromkeys(
        name for seeds in runs.values() for run in seeds for name in run.heldout_rewards
    )
    paths = {f"held out: {short(name)}": ("heldout", name) for name in names}
    paths |= {"diversity": ("diversity",)}
    metrics = {label: path for label, path in paths.items() if measured(runs, path)}
    if not metrics:
        return None
    proxy = ("proxy",) if names else ("reward",)
    shown = {"proxy (trained on)": proxy, **metrics}
    panels = [Panel("iteration", path, label) for label, path in shown.items()]
    return line_figure(runs, panels)


def line_figure(
    runs: Runs,
    panels: Sequence[Panel],
    baseline: str = "",
    bound: tuple[str, Sequence[float], Sequence[float]] | None = None,
    narrow: bool = False,
) -> Figure:
    """A row of panels, or with many arms one per arm, in which the other arms are grey. `baseline`:
    the arm whose final value and cost are dashed lines, if any. `bound`: label, iterations and
    rewards of a curve that is dotted over iterations, and elsewhere its final value, because its
    cost has no counterpart. `narrow`: a column of panels. Of a single run, changes of settings
    (`changes_of`) are lines.
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
                axes.plot(*bound[1:], ":", color=INK, label=bound[0])
            elif bound:
                axes.axhline(bound[2][-1], color=INK, linestyle=":", linewidth=1)
            if len(single := [run for seeds in runs.values() for run in seeds]) == 1:
                _draw_changes(axes, single[0], panel.x)
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


def _draw_changes(axes: Axes, run: RunRecord, x: str) -> None:
    """A line with a label between the last iteration before a change of settings and the first one
    with it.
    """
    spent, height = run.spent(x), axes.get_xaxis_transform()
    for iteration, text in changes_of(run.rows):
        place = (spent.get(iteration - 1, spent[iteration]) + spent[iteration]) / 2
        axes.axvline(place, color=SOFT, linestyle="-.", linewidth=1)
        label = textwrap.shorten(text, 48, placeholder=" ...")
        given: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 7}
        given |= {"xycoords": height, "xytext": (-2, -2), "textcoords": "offset points"}
        axes.annotate(label, (place, 1), color=SOFT, parse_math=False, **given)


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


REFERENCE = "reference"
"""The label of the images to which prompts refer."""


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


def sample_figure(
    rows: Sequence[Row], titles: Sequence[str] = (), targets: Targets = NO_TARGETS
) -> Figure:
    """Images in rows below the `titles` of the columns; if the samples are points, a panel per row.

    Args:
        rows: the rows, with as many samples each.
        titles: texts above the columns of images.
        targets: points that the prompts of a 2-D world ask for.

    Returns:
        The figure.
    """
    first = drawable(rows[0].samples)
    if are_points(first):
        columns = min(PANELS, len(rows))
        lines = -(-len(rows) // columns)
        figure = Figure(figsize=(2.8 * columns, 3.0 * lines), layout="compressed")
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, row in zip(panels, rows, strict=False):
            _draw_points(axes, row, targets)
        for axes in panels[len(rows) :]:
            axes.set_visible(False)
        return figure
    # `stills` of a video are wide
    width = 1.5 * max(1.0, first.shape[-1] / first.shape[-2]) * len(first)
    figure = Figure(figsize=(width, 1.75 * len(rows) + 0.3), layout="constrained")
    grid = figure.subplots(len(rows), len(first), squeeze=False)
    for cells, row in zip(grid, rows, strict=True):
        for axes, image, caption in zip(cells, drawable(row.samples), row.captions, strict=True):
            show_image(axes, image)
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
    if are_points(samples) or samples.shape[-3] == 3:
        return samples
    if samples.shape[-2:] == (1, 1):
        samples = samples.transpose(-3, -1)
    return samples.mean(-3, keepdim=True).expand(*samples.shape[:-3], 3, *samples.shape[-2:])


def are_points(samples: Tensor) -> bool:
    """Whether samples are points of the plane instead of images."""
    return samples.shape[-3:] == (2, 1, 1)


def show_image(axes: Axes, image: Tensor) -> None:
    """Draw one image [channel, height, width] without ticks."""
    axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def _draw_points(axes: Axes, row: Row, targets: Targets) -> None:
    """Points, a line from each to the target of its prompt if there is one, and the directions
    outside.
    """
    points = row.samples[:, :, 0, 0].tolist()
    aims = {text: targets[text] for text in row.prompts if text in targets}
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


def image_grid(
    images: Tensor, scores: Tensor | None, prompts: Sequence[Prompt], targets: Targets = NO_TARGETS
) -> Figure:
    """Images with their scores, one row (2-D world: one scatter plot) per prompt, which begins with
    the prompt's reference image if there is one.

    Args:
        images: images [prompt, count, channel, height, width].
        scores: scores [prompt, count]; None: without.
        prompts: the prompts.
        targets: see `sample_figure`.

    Returns:
        The figure.
    """
    captions = [[""] * images.shape[1] for _ in prompts]
    if scores is not None:
        captions = [[f"{score:.2f}" for score in values] for values in scores.tolist()]
    references = references_of(prompts, (images.shape[-2], images.shape[-1]))
    if references is not None:
        images = torch.cat([references[:, None], images], 1)
        captions = [[REFERENCE, *own] for own in captions]
    rows = [
        Row(prompt.text, cells, own, [prompt.text] * len(cells))
        for prompt, cells, own in zip(prompts, images, captions, strict=True)
    ]
    return sample_figure(rows, targets=targets)
