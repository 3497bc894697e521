"""The proxy that is trained on against rewards that are not, over time: where they part, the proxy is being hacked."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowrl.plots.style import clean, colour
from flowrl.training.results import RunRecord, short

Runs = Mapping[str, Sequence[RunRecord]]


def proxy_and_heldout(runs: Runs) -> Figure | None:
    """Over iterations the proxy, every held-out reward and the diversity; below, each against the proxy. `runs` by method.

    Thin lines are seeds where there are several, thick ones their mean at the evaluations that all of them have. In the lower row
    the untrained model is a hollow point, the last evaluation a full one. None where no run has a held-out reward or a diversity.
    """
    every = [run for some in runs.values() for run in some]
    names = list(dict.fromkeys(name for run in every for name in run.heldout))
    columns: dict[str, tuple[str, ...]] = {short(name): ("heldout", name) for name in names}
    if any(run.beside("iteration", "diversity")[1] for run in every):
        columns["diversity"] = ("diversity",)
    columns = {label: path for label, path in columns.items() if any(run.beside("iteration", *path)[1] for run in every)}
    if not columns:
        return None
    proxy = ("proxy",) if names else ("reward",)
    figure = Figure(figsize=(3.3 * (1 + len(columns)), 6.4), layout="constrained")
    grid = figure.subplots(2, 1 + len(columns), squeeze=False)
    _over_time(grid[0, 0], runs, proxy)
    grid[0, 0].set_title("proxy (trained on)", fontweight="bold")
    for place, (label, path) in enumerate(columns.items(), 1):
        _over_time(grid[0, place], runs, path)
        grid[0, place].set_title(label if path == ("diversity",) else f"held out: {label}")
        _against(grid[1, place], runs, proxy, path)
        grid[1, place].set_xlabel("proxy")
        grid[1, place].set_ylabel(label)
    _key(grid[1, 0], runs)
    return figure


def _over_time(axes: Axes, runs: Runs, path: Sequence[str]) -> None:
    for method, some in runs.items():
        shade = colour(method, list(runs))
        for run in some if len(some) > 1 else ():
            axes.plot(*run.beside("iteration", *path), color=shade, alpha=0.3, linewidth=1)
        points = _mean(some, [path])
        axes.plot([at for at, _ in points], [y for _, (y,) in points], color=shade, linewidth=2.4, marker="o", markersize=3.5)
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    clean(axes)


def _against(axes: Axes, runs: Runs, proxy: Sequence[str], path: Sequence[str]) -> None:
    for method, some in runs.items():
        shade = colour(method, list(runs))
        points = [pair for _, pair in _mean(some, [proxy, path])]
        if not points:
            continue
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, color=shade, linewidth=1.6, marker=".", markersize=5)
        axes.plot(xs[:1], ys[:1], marker="o", markersize=9, markerfacecolor="white", markeredgecolor=shade, linestyle="none")
        axes.plot(xs[-1:], ys[-1:], marker="o", markersize=9, color=shade, linestyle="none")
    axes.margins(0.12)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    clean(axes)


def _mean(runs: Sequence[RunRecord], paths: Sequence[Sequence[str]]) -> list[tuple[float, tuple[float, ...]]]:
    """(iteration, means over runs of the numbers at `paths`) where every run has all of them."""
    tables = [dict(zip(*run.beside("iteration", *path), strict=True)) for run in runs for path in paths]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    width = len(paths)
    return [(at, tuple(sum(table[at] for table in tables[i::width]) / len(runs) for i in range(width))) for at in shared]


def _key(axes: Axes, runs: Runs) -> None:
    """Which colour is which method, and which point is which time."""
    axes.set_axis_off()
    for method in runs:
        axes.plot([], [], color=colour(method, list(runs)), linewidth=2.4, label=method)
    for name, face in (("untrained", "white"), ("last evaluation", "#555b66")):
        axes.plot([], [], marker="o", markersize=8, markerfacecolor=face, markeredgecolor="#555b66", linestyle="none", label=name)
    axes.legend(loc="center", frameon=False, fontsize=9)
