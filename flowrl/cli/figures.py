"""Figures of metrics: learning curves, proxy against held-out rewards, and seconds by phase."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from flowrl.cli.style import MOST_TOGETHER, PALE, SOFT, clean, colour, marker, multiples
from flowrl.training.results import Comparison, RunRecord, mean_curve, short, summarise

X_LABELS = {
    "iteration": "iteration",
    "nfe_total": "network evaluations while sampling",
    "seconds_total": "training seconds",
}
PHASES = {"rollout": "#3f444d", "reward": "#8a8f98", "update": "#d5d8de"}
"""Greys: colours belong to arms."""
NARROW = 4.4
"""Inches of a narrow figure's width."""
Runs = Mapping[str, Sequence[RunRecord]]


def curves(comparison: Comparison, metric: str = "reward", narrow: bool = False) -> Figure | None:
    """An evaluation metric against iterations, network evaluations and seconds.

    Up to `MOST_TOGETHER` arms share three axes. With more, each arm has an axis, with the other
    arms in grey, against iterations and network evaluations.

    Args:
        comparison: the comparison.
        metric: name of the metric.
        narrow: panels below each other, for a page of a third of the width.

    Returns:
        The figure; None if no run contains the metric.
    """
    runs = {arm: comparison.of(arm) for arm in comparison.arms}
    path = comparison.metric if metric == "reward" else (metric,)
    if not any(run.curve("iteration", *path)[1] for some in runs.values() for run in some):
        return None
    form = comparison.config["run"]["environment"]["reward_form"]
    label = f"held-out reward ({form})" if metric == "reward" else f"held-out {metric} success"
    label = label if len(path) == 1 else f"held out: {short(path[-1])}"
    baseline = mean_curve(comparison.of(comparison.baseline), "iteration", *path)[1]
    level = baseline[-1] if baseline else None
    if len(runs) > MOST_TOGETHER:
        return _curve_panels(runs, path, label, level, 2 if narrow else 4)
    figure = Figure(figsize=(NARROW, 8.5) if narrow else (12.5, 4.3), layout="constrained")
    panels = figure.subplots(3, 1, sharey=True) if narrow else figure.subplots(1, 3, sharey=True)
    for axes, x in zip(panels, X_LABELS, strict=True):
        for arm in runs:
            _draw(axes, runs, arm, x, path)
        _finish(axes, x, level)
        clean(axes)
    for axes in panels if narrow else panels[:1]:
        axes.set_ylabel(label)
    _key(figure, list(runs), comparison.baseline if level is not None else "", 1 if narrow else 5)
    return figure


def _curve_panels(
    runs: Runs, path: Sequence[str], label: str, level: float | None, columns: int
) -> Figure:
    """A block of panels for each horizontal axis, one panel per arm."""
    rows, blocks = -(-len(runs) // columns), list(X_LABELS)[:2]
    size = (
        3.125 * columns if columns > 2 else NARROW,
        2.1 * rows * len(blocks) + 0.5 * len(blocks),
    )
    figure = Figure(figsize=size, layout="constrained")
    parts = figure.subfigures(len(blocks), 1, squeeze=False).flatten()
    for part, x in zip(parts, blocks, strict=True):
        panels = multiples(
            part,
            list(runs),
            lambda axes, name, own, x=x: _draw(axes, runs, name, x, path, own),
            columns,
        )
        for axes in panels:
            _finish(axes, x, level, label=False)
        part.supxlabel(X_LABELS[x], fontsize=10)
        part.supylabel(label, fontsize=10)
    return figure


def _draw(axes: Axes, runs: Runs, arm: str, x: str, path: Sequence[str], own: bool = True) -> None:
    """Thin lines for the seeds if there are several, and a thick line for their mean; only the mean
    if grey.
    """
    some, shade = runs[arm], colour(arm, list(runs))
    for run in some if own and len(some) > 1 else ():
        axes.plot(*run.curve(x, *path), color=shade, alpha=0.3, linewidth=1)
    if own:
        style = {
            "color": shade,
            "linewidth": 2.2,
            "marker": marker(arm, list(runs)),
            "markersize": 4,
            "zorder": 3,
        }
        xs, ys = mean_curve(some, x, *path)
        axes.plot(xs, ys, markevery=max(1, len(xs) // 10), **style)
    else:
        axes.plot(*mean_curve(some, x, *path), color=PALE, linewidth=1)


def _finish(axes: Axes, x: str, level: float | None, label: bool = True) -> None:
    """Draw the final value of the baseline, and end the axis at the last data point."""
    right = axes.dataLim.x1 if axes.dataLim.x1 > 0 else 1.0
    axes.set_xlim(-0.02 * right, 1.02 * right)
    if level is not None:
        axes.axhline(level, color="#8a8f98", linestyle="--", linewidth=1, zorder=1)
    if x == "iteration":
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    elif x == "nfe_total":
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if label:
        axes.set_xlabel(X_LABELS[x])


def _key(figure: Figure, arms: Sequence[str], baseline: str, columns: int) -> None:
    """Lines and markers of the arms above the panels."""
    handles = [
        figure.axes[0].plot(
            [], [], color=colour(m, arms), linewidth=2.2, marker=marker(m, arms), label=m
        )[0]
        for m in arms
    ]
    if baseline:
        text = f"final value of {baseline}"
        handles += figure.axes[0].plot(
            [], [], color="#8a8f98", linestyle="--", linewidth=1, label=text
        )
    figure.legend(
        handles=handles, loc="outside upper left", ncols=min(len(handles), columns), frameon=False
    )


def phases(comparison: Comparison, narrow: bool = False) -> Figure:
    """Mean seconds of an iteration by phase, one bar per arm.

    Args:
        comparison: the comparison.
        narrow: for a page of half the width.

    Returns:
        The figure.
    """
    summaries = summarise(comparison)
    figure = Figure(
        figsize=(NARROW if narrow else 9, 0.9 + 0.45 * len(summaries)), layout="constrained"
    )
    axes = figure.subplots()
    for row, summary in enumerate(summaries):
        left = 0.0
        for phase, shade in PHASES.items():
            width = getattr(summary, f"seconds_{phase}")
            axes.barh(
                row, width, left=left, height=0.7, color=shade, label=phase if row == 0 else None
            )
            left += width
        axes.annotate(
            f"{left:.3g} s",
            (left, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(summaries)), [s.arm for s in summaries])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds per iteration")
    axes.margins(x=0.1)
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    return figure


def proxy_and_heldout(runs: Runs) -> Figure | None:
    """The proxy, every held-out reward and the diversity over iterations, and each held-out metric
    against the proxy.

    `runs` by arm. In the plots against the proxy, a hollow point marks the untrained model and a
    filled one the last evaluation. With more than `MOST_TOGETHER` arms, each has a panel with the
    others in grey. None if no run contains a held-out reward or a diversity.
    """
    every = [run for some in runs.values() for run in some]
    names = list(dict.fromkeys(name for run in every for name in run.heldout_rewards))
    columns = {short(name): ("heldout", name) for name in names} | {"diversity": ("diversity",)}
    columns = {
        label: path
        for label, path in columns.items()
        if any(run.curve("iteration", *path)[1] for run in every)
    }
    if not columns:
        return None
    proxy = ("proxy",) if names else ("reward",)
    if len(runs) > MOST_TOGETHER:
        return _proxy_panels(runs, proxy, columns)
    figure = Figure(figsize=(3.3 * (1 + len(columns)), 6.4), layout="constrained")
    grid = figure.subplots(2, 1 + len(columns), squeeze=False)
    grid[0, 0].set_title("proxy (trained on)", fontweight="bold")
    for axes, path in zip(grid[0], (proxy, *columns.values()), strict=True):
        for arm in runs:
            _draw(axes, runs, arm, "iteration", path)
        _finish(axes, "iteration", None)
        clean(axes)
    for place, (label, path) in enumerate(columns.items(), 1):
        grid[0, place].set_title(label if path == ("diversity",) else f"held out: {label}")
        for arm in runs:
            _against(grid[1, place], runs, arm, proxy, path)
        grid[1, place].set(xlabel="proxy", ylabel=label)
        clean(grid[1, place])
    key = grid[1, 0]
    key.set_axis_off()
    for arm in runs:
        shade, shape = colour(arm, list(runs)), marker(arm, list(runs))
        key.plot([], [], color=shade, linewidth=2.2, marker=shape, markersize=4, label=arm)
    for name, face in (("untrained", "white"), ("last evaluation", SOFT)):
        key.plot(
            [],
            [],
            marker="o",
            markersize=8,
            markerfacecolor=face,
            markeredgecolor=SOFT,
            linestyle="none",
            label=name,
        )
    key.legend(loc="center", frameon=False, fontsize=9)
    return figure


def _proxy_panels(
    runs: Runs, proxy: Sequence[str], columns: Mapping[str, tuple[str, ...]]
) -> Figure:
    """A block of panels per metric over iterations, and one against the proxy; one panel per
    arm.
    """
    rows = -(-len(runs) // 4)
    blocks = [
        (None, "proxy (trained on)", proxy),
        *((None, label, path) for label, path in columns.items()),
    ]
    blocks += [(proxy, label, path) for label, path in columns.items()]
    figure = Figure(figsize=(12.5, (2.0 * rows + 0.5) * len(blocks)), layout="constrained")
    for part, (against, label, path) in zip(
        figure.subfigures(len(blocks), 1, squeeze=False).flatten(), blocks, strict=True
    ):
        if against is None:
            panels = multiples(
                part,
                list(runs),
                lambda axes, m, own, path=path: _draw(axes, runs, m, "iteration", path, own),
            )
            for axes in panels:
                _finish(axes, "iteration", None, label=False)
        else:
            multiples(
                part,
                list(runs),
                lambda axes, m, own, path=path: _against(axes, runs, m, proxy, path, own),
            )
        part.supxlabel("iteration" if against is None else "proxy", fontsize=10)
        part.supylabel(label, fontsize=10)
    return figure


def _against(
    axes: Axes, runs: Runs, arm: str, proxy: Sequence[str], path: Sequence[str], own: bool = True
) -> None:
    """Draw the mean over seeds of the metric at `path` against that of the proxy, at the iterations
    with both.
    """
    shade = colour(arm, list(runs)) if own else PALE
    x_at, y_at = (
        dict(zip(*mean_curve(runs[arm], "iteration", *metric), strict=True))
        for metric in (proxy, path)
    )
    shared = [at for at in x_at if at in y_at]
    xs, ys = [x_at[at] for at in shared], [y_at[at] for at in shared]
    axes.plot(
        xs, ys, color=shade, linewidth=1.6 if own else 1, marker="." if own else "", markersize=5
    )
    if own:
        axes.plot(
            xs[:1],
            ys[:1],
            marker="o",
            markersize=9,
            markerfacecolor="white",
            markeredgecolor=shade,
            linestyle="none",
        )
        axes.plot(xs[-1:], ys[-1:], marker="o", markersize=9, color=shade, linestyle="none")
    axes.margins(0.12)
    axes.xaxis.set_major_locator(MaxNLocator(4))
