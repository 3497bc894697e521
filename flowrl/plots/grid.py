"""A PNG grid of pictures, one row per prompt."""

from pathlib import Path

from matplotlib.figure import Figure

from flowrl.errors import ConfigError
from flowrl.training.evaluation import Grid


def grid_figure(grid: Grid) -> Figure:
    """One row per prompt, the score under each picture; points of the 2-D world become one scatter per prompt."""
    rows, columns = grid.images.shape[:2]
    if grid.images.shape[-1] == 1:
        figure = Figure(figsize=(3 * rows, 3.2), layout="constrained")
        for axes, points, text in zip(figure.subplots(1, rows, squeeze=False)[0], grid.images, grid.prompts, strict=True):
            axes.scatter(points[:, 0, 0, 0], points[:, 1, 0, 0], s=12)
            axes.set(title=text, xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
        return figure
    figure = Figure(figsize=(1.25 * columns, 1.62 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, text in enumerate(grid.prompts):
        for column in range(columns):
            cell = axes[row, column]
            cell.imshow(grid.images[row, column].permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
            cell.set_xlabel(f"{float(grid.scores[row, column]):.2f}", fontsize=8)
            cell.set_xticks([])
            cell.set_yticks([])
        axes[row, 0].set_title(text, loc="left", fontsize=10)
    return figure


def save_grid(grid: Grid, path: Path) -> None:
    """Write the grid as a picture; `ConfigError` where the folder cannot be written or the ending is unknown."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        grid_figure(grid).savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"out: {path} cannot be written: {error}") from error
