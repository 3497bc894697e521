"""Figures of metrics: learning curves, proxy against held-out rewards, and seconds by phase."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from flowrl.plots.style import clean, colour, spread_labels
from flowrl.training.results import Comparison, RunRecord, mean_curve, short, summarise

X_LABELS = {"iteration": "iteration", "nfe_total": "network evaluations while sampling", "seconds_total": "training seconds"}
PHASES = {"rollout": "#35618f", "reward": "#e0a33a", "update": "#8fb3d1"}
Runs = Mapping[str, Sequence[RunRecord]]


def curves(comparison: Comparison, metric: str = "reward") -> Figure | None:
    """An evaluation metric against iterations, NFE and seconds, one colour per method. None if no run contains the metric."""
    runs = {method: comparison.of(method) for method in comparison.methods}
    values = [y for some in runs.values() for run in some for y in run.curve("iteration", metric)[1]]
    if not values:
        return None
    figure = Figure(figsize=(12.5, 3.9), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    pad = max(0.06 * (max(values) - min(values)), 0.01)
    panels[0].set_ylim(min(values) - pad, max(values) + pad)
    baseline = mean_curve(comparison.of(comparison.baseline), "iteration", metric)[1]
    for axes, (x, label) in zip(panels, X_LABELS.items(), strict=True):
        _over_seeds(axes, runs, x, (metric,), comparison.config["methods"])
        if baseline:
            axes.axhline(baseline[-1], color="#8a8f98", linestyle="--", linewidth=1)
        axes.set_xlabel(label)
    _label_ends(panels[0], runs, metric, comparison.config["methods"])
    panels[0].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
    form = comparison.config["run"]["environment"]["reward_form"]
    panels[0].set_ylabel(f"held-out reward ({form})" if metric == "reward" else f"held-out {metric} success")
    panels[1].set_title("dashed: final value of the baseline", fontsize=9, color="#555b66")
    return figure


def _over_seeds(axes: Axes, runs: Runs, x: str, path: Sequence[str], methods: Sequence[str]) -> None:
    """Thin lines for the seeds if there are several, a thick line for their mean."""
    for method, some in runs.items():
        shade = colour(method, methods)
        for run in some if len(some) > 1 else ():
            axes.plot(*run.curve(x, *path), color=shade, alpha=0.3, linewidth=1)
        axes.plot(*mean_curve(some, x, *path), color=shade, linewidth=2.4, marker="o", markersize=3.5)
    clean(axes)


def _label_ends(axes: Axes, runs: Runs, metric: str, methods: Sequence[str]) -> None:
    """The methods' names at the right ends of their curves, without overlap."""
    ends = {method: mean_curve(some, "iteration", metric) for method, some in runs.items()}
    ends = {method: curve for method, curve in ends.items() if curve[0]}
    right = max([1.0, *(xs[-1] for xs, _ in ends.values())])
    low, high = axes.get_ylim()
    heights = spread_labels([ys[-1] for _, ys in ends.values()], low + 0.02 * (high - low), high, (high - low) * 0.075)
    for method, height in zip(ends, heights, strict=True):
        axes.annotate(method, (right * 1.03, height), color=colour(method, methods), va="center", fontsize=9, fontweight="bold")
    axes.set_xlim(-0.02 * right, right * 1.62)


def phases(comparison: Comparison) -> Figure:
    """Mean seconds of an iteration by phase, one bar per method."""
    summaries = summarise(comparison)
    figure = Figure(figsize=(9, 0.7 + 0.55 * len(summaries)), layout="constrained")
    axes = figure.subplots()
    for row, summary in enumerate(summaries):
        left = 0.0
        for phase, shade in PHASES.items():
            width = getattr(summary, f"seconds_{phase}")
            axes.barh(row, width, left=left, color=shade, label=phase if row == 0 else None)
            left += width
        axes.annotate(f"{left:.3g} s", (left, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(summaries)), [s.method for s in summaries])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds per iteration")
    axes.margins(x=0.1)
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    return figure


def proxy_and_heldout(runs: Runs) -> Figure | None:
    """The proxy, every held-out reward and the diversity over iterations, and below each of them against the proxy.

    `runs` by method. In the lower row the untrained model is a hollow point and the last evaluation a filled one. None if no
    run contains a held-out reward or a diversity.
    """
    every = [run for some in runs.values() for run in some]
    names = list(dict.fromkeys(name for run in every for name in run.heldout_rewards))
    columns = {short(name): ("heldout", name) for name in names} | {"diversity": ("diversity",)}
    columns = {label: path for label, path in columns.items() if any(run.curve("iteration", *path)[1] for run in every)}
    if not columns:
        return None
    proxy = ("proxy",) if names else ("reward",)
    figure = Figure(figsize=(3.3 * (1 + len(columns)), 6.4), layout="constrained")
    grid = figure.subplots(2, 1 + len(columns), squeeze=False)
    grid[0, 0].set_title("proxy (trained on)", fontweight="bold")
    for axes, path in zip(grid[0], (proxy, *columns.values()), strict=True):
        _over_seeds(axes, runs, "iteration", path, list(runs))
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for place, (label, path) in enumerate(columns.items(), 1):
        grid[0, place].set_title(label if path == ("diversity",) else f"held out: {label}")
        _against(grid[1, place], runs, proxy, path)
        grid[1, place].set(xlabel="proxy", ylabel=label)
    key = grid[1, 0]
    key.set_axis_off()
    for method in runs:
        key.plot([], [], color=colour(method, list(runs)), linewidth=2.4, label=method)
    for name, face in (("untrained", "white"), ("last evaluation", "#555b66")):
        key.plot([], [], marker="o", markersize=8, markerfacecolor=face, markeredgecolor="#555b66", linestyle="none", label=name)
    key.legend(loc="center", frameon=False, fontsize=9)
    return figure


def _against(axes: Axes, runs: Runs, proxy: Sequence[str], path: Sequence[str]) -> None:
    """Means over seeds of the metric at `path` against those of the proxy, at the iterations that contain both."""
    for method, some in runs.items():
        shade = colour(method, list(runs))
        x_at, y_at = (dict(zip(*mean_curve(some, "iteration", *metric), strict=True)) for metric in (proxy, path))
        shared = [at for at in x_at if at in y_at]
        xs, ys = [x_at[at] for at in shared], [y_at[at] for at in shared]
        axes.plot(xs, ys, color=shade, linewidth=1.6, marker=".", markersize=5)
        axes.plot(xs[:1], ys[:1], marker="o", markersize=9, markerfacecolor="white", markeredgecolor=shade, linestyle="none")
        axes.plot(xs[-1:], ys[-1:], marker="o", markersize=9, color=shade, linestyle="none")
    axes.margins(0.12)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    clean(axes)
