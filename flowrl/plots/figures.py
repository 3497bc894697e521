"""The figures of a comparison: curves, samples before and after, rewards along a trajectory, seconds by phase."""

import json

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from safetensors.torch import load_file
from torch import Tensor

from flowrl.credit import gains, turning_points
from flowrl.plots.style import INK, clean, colour, spread_labels
from flowrl.training.results import Comparison, mean_curve, summarise

AXES = {"iteration": "iteration", "nfe_total": "network evaluations while sampling", "seconds_total": "training seconds"}


def curves(comparison: Comparison, score: str = "reward") -> Figure:
    """Evaluation score against iterations, NFE and seconds: thin lines are seeds, thick ones their mean."""
    figure = Figure(figsize=(12.5, 3.9), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    baseline = mean_curve(comparison.of(comparison.baseline), "iteration", score)[1]
    values = [y for method in comparison.methods for run in comparison.of(method) for y in run.curve("iteration", score)[1]]
    pad = max(0.06 * (max(values) - min(values)), 0.01)
    low, high = min(values) - pad, max(values) + pad
    panels[0].set_ylim(low, high)
    for axes, (x, label) in zip(panels, AXES.items(), strict=True):
        ends = []
        for method in comparison.methods:
            shade = colour(method, comparison.config["methods"])
            for run in comparison.of(method):
                axes.plot(*run.curve(x, score), color=shade, alpha=0.3, linewidth=1)
            xs, ys = mean_curve(comparison.of(method), x, score)
            axes.plot(xs, ys, color=shade, linewidth=2.4, marker="o", markersize=3.5)
            ends.append((method, xs[-1], ys[-1], shade))
        if baseline:
            axes.axhline(baseline[-1], color="#8a8f98", linestyle="--", linewidth=1)
        if x == "iteration":
            right = max(1.0, *(end[1] for end in ends))
            heights = spread_labels([end[2] for end in ends], low + pad / 2, high - pad / 2, (high - low) * 0.075)
            for (method, _, _, shade), height in zip(ends, heights, strict=True):
                axes.annotate(method, (right * 1.03, height), color=shade, va="center", fontsize=9, fontweight="bold")
            axes.set_xlim(-0.02 * right, right * 1.62)
        clean(axes)
        axes.set_xlabel(label)
        if x == "nfe_total":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    form = comparison.config["run"]["environment"]["reward_form"]
    panels[0].set_ylabel(f"held-out reward ({form})" if score == "reward" else "held-out strict success")
    panels[1].set_title("dashed: the baseline's final value", fontsize=9, color="#555b66")
    return figure


def _picture(axes: object, image: Tensor) -> None:
    axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")  # pyright: ignore[reportAttributeAccessIssue]
    axes.set_xticks([])  # pyright: ignore[reportAttributeAccessIssue]
    axes.set_yticks([])  # pyright: ignore[reportAttributeAccessIssue]


def samples(comparison: Comparison) -> Figure | None:
    """The same prompts and noise before training and after each method (first seed); None where no run has finished."""
    runs = [next((r for r in comparison.of(m) if r.finished), None) for m in comparison.methods]
    finished = [run for run in runs if run is not None]
    if not finished:
        return None
    cards = [json.loads((run.folder / "samples.json").read_text()) for run in finished]
    tensors = [load_file(run.folder / "samples.safetensors") for run in finished]
    rows = [("base model", tensors[0]["before"], cards[0]["reward_before"], INK)]
    for run, card, tensor in zip(finished, cards, tensors, strict=True):
        rows.append((run.method, tensor["after"], card["reward_after"], colour(run.method, comparison.config["methods"])))
    prompts = cards[0]["prompts"]
    if tensors[0]["before"].shape[-1] == 1:
        return _scatter(rows, prompts)
    figure = Figure(figsize=(1.5 * len(prompts), 1.75 * len(rows) + 0.3), layout="constrained")
    grid = figure.subplots(len(rows), len(prompts), squeeze=False)
    for axes_row, (name, images, scores, shade) in zip(grid, rows, strict=True):
        for axes, image, value, first in zip(axes_row, images, scores, rows[0][2], strict=True):
            _picture(axes, image)
            better = "#00734f" if value > first + 0.02 else "#b3261e" if value < first - 0.02 else "#555b66"
            axes.set_xlabel(f"{value:.2f}", fontsize=9, color=better, fontweight="bold")
        axes_row[0].set_ylabel(name, color=shade, fontweight="bold", fontsize=9)
    for axes, text in zip(grid[0], prompts, strict=True):
        words = text.split()
        half = (len(words) + 1) // 2
        axes.set_title(" ".join(words[:half]) + "\n" + " ".join(words[half:]), fontsize=8.5)
    return figure


def _scatter(rows: list[tuple[str, Tensor, list[float], str]], prompts: list[str]) -> Figure:
    figure = Figure(figsize=(3 * len(rows), 3.2), layout="constrained")
    for axes, (name, points, _, shade) in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        axes.scatter(points[:, 0, 0, 0], points[:, 1, 0, 0], color=shade, s=18)
        for point, text in zip(points, prompts, strict=True):
            axes.annotate(text.split()[1], (float(point[0]), float(point[1])), fontsize=7)
        axes.set(xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), aspect="equal")
        axes.set_title(name, color=shade)
        clean(axes)
    return figure


def trajectory(comparison: Comparison) -> Figure | None:
    """Rewards along one trajectory (ODE completions and one-step estimates), its gains, and its turning points."""
    order = sorted(comparison.methods, key=lambda m: "tp" not in m)
    run = next((r for m in order for r in comparison.of(m) if r.finished), None)
    if run is None:
        return None
    record = json.loads((run.folder / "trajectory.json").read_text())
    images = load_file(run.folder / "trajectory.safetensors")["images"]
    table = torch.tensor(record["members"])[None]
    chosen, rewards = record["chosen"], torch.tensor(record["rewards"])
    steps = gains(table)[0, chosen]
    plain = turning_points(table, consistent=False, first_step=True)[0, chosen]
    strict = turning_points(table, consistent=True, first_step=True)[0, chosen]
    pictures = images.shape[-1] > 1
    figure = Figure(figsize=(11, 6.2 if pictures else 4.6), layout="constrained")
    nodes = len(rewards)
    shape = figure.add_gridspec(3 if pictures else 2, nodes, height_ratios=[1.0, 2.2, 1.3] if pictures else [2.2, 1.3])
    if pictures:
        for node in range(nodes):
            axes = figure.add_subplot(shape[0, node])
            _picture(axes, images[node])
            axes.set_title(f"{rewards[node]:.2f}", fontsize=9)
    curve = figure.add_subplot(shape[-2, :])
    curve.plot(range(nodes), table[0].T, color="#c9ccd3", linewidth=0.8)
    curve.plot(range(nodes), record["tweedie"], color="#D55E00", linestyle=":", linewidth=2)
    curve.plot(range(nodes), rewards, color="#009E73", linewidth=2.5, marker="o")
    curve.annotate(
        "ODE completion", (0.02, float(rewards[0])), color="#00734f", fontsize=9, xytext=(3, 8), textcoords="offset points"
    )
    curve.annotate(
        "one-step estimate", (1, record["tweedie"][1]), color="#a84600", fontsize=9, xytext=(10, 2), textcoords="offset points"
    )
    for step in range(nodes - 1):
        if plain[step] or strict[step]:
            height = float(rewards[step])
            shade = "#b3261e" if strict[step] else "#8a8f98"
            curve.scatter([step], [height], s=190, facecolors="none", edgecolors=shade, linewidths=2, zorder=5)
    curve.set_ylabel("estimated final reward")
    curve.set_title(
        f'"{record["prompt"]}": red rings are consistent turning points, grey ones plain; thin lines: the rest of the group',
        fontsize=10,
    )
    bars = figure.add_subplot(shape[-1, :], sharex=curve)
    bars.bar(
        [s + 0.5 for s in range(nodes - 1)], steps, width=0.8, color=["#009E73" if g >= 0 else "#b3261e" for g in steps.tolist()]
    )
    bars.axhline(0, color=INK, linewidth=0.8)
    bars.set_ylabel("gain of the step")
    bars.set_xlabel("node (0 = noise, last = image)")
    bars.set_xticks(range(nodes))
    for axes in (curve, bars):
        clean(axes)
        axes.set_xlim(-0.5, nodes - 0.5)
    return figure


def phases(comparison: Comparison) -> Figure:
    """Mean seconds of an iteration, by phase."""
    summaries = summarise(comparison)
    figure = Figure(figsize=(9, 0.7 + 0.55 * len(summaries)), layout="constrained")
    axes = figure.subplots()
    shades = {"rollout": "#35618f", "reward": "#e0a33a", "update": "#8fb3d1"}
    for row, summary in enumerate(summaries):
        left = 0.0
        for phase, shade in shades.items():
            width = getattr(summary, f"seconds_{phase}")
            axes.barh(row, width, left=left, color=shade, label=phase if row == 0 else None)
            left += width
        axes.annotate(f"{left:.1f} s", (left, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(summaries)), [s.method for s in summaries])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds per iteration")
    axes.margins(x=0.1)
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    return figure
