"""Reward hacking: three proxies on the shapes world, with held-out rewards and diversity.

    python benchmarks/reward_hacking.py            # about six minutes on one core; continues where it was stopped

task     the task's own soft reward: the control, in which no metric should diverge
bright   the task's reward plus 40 times the mean pixel value (--reward-bias 40): a biased judge
jpeg     minus the size as a JPEG file (--reward jpeg-compressibility): the classic of DDPO (arXiv 2305.13301)

Compositional task, Flow-GRPO, 16 iterations of the default settings, 96 held-out samples, an
evaluation every second iteration. Held out: strict success, palette, clarity and balance
(`flowrl.worlds.verifier`); diversity of 8 samples of 8 prompts.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from flowrl_bench.results_file import provenance
from flowrl_compare.results import RunRecord, load_run
from flowrl_compare.style import clean
from matplotlib.figure import Figure
from safetensors.torch import load_file

from flowrl.training.config import preset
from flowrl.training.run import Run

RESULTS = Path(__file__).parent / "results" / "reward_hacking"
PROXIES: dict[str, dict[str, Any]] = {
    "task": {},
    "bright": {"reward_bias": 40.0},
    "jpeg": {"reward": "jpeg-compressibility"},
}
HELDOUT = ("strict", "palette", "clarity", "balance")
SHARED: dict[str, Any] = {
    "iterations": 16,
    "eval_every": 2,
    "eval_samples": 96,
    "heldout_rewards": HELDOUT,
    "diversity": "pixels",
}
COLUMNS = {
    "proxy": ("proxy",),
    "held out: strict success": ("heldout", "strict"),
    "held out: palette": ("heldout", "palette"),
    "diversity": ("diversity",),
}
SHADES = {"task": "#0072B2", "bright": "#D55E00", "jpeg": "#7A5195"}


def make(proxy: str, seed: int, folder: Path) -> None:
    """Make one run, or resume it, unless it is finished. Its processor seconds are written to
    cpu.json.
    """
    if (folder / "cpu.json").exists():
        return
    began = time.process_time()
    Run(preset("default").apply(seed=seed, **SHARED, **PROXIES[proxy]), folder).execute(
        (folder / "metrics.jsonl").exists()
    )
    (folder / "cpu.json").write_text(
        json.dumps({"cpu_seconds": time.process_time() - began, "commit": provenance()["commit"]})
    )
    print(f"{proxy}, seed {seed}: {time.process_time() - began:.0f} processor seconds", flush=True)


def figure(runs: dict[str, list[RunRecord]]) -> Figure:
    """A row per proxy: the proxy, two held-out rewards and the diversity over iterations; images
    before and after.
    """
    drawn = Figure(figsize=(15, 2.9 * len(runs)), layout="constrained")
    grid = drawn.add_gridspec(
        len(runs), len(COLUMNS) + 2, width_ratios=[1] * len(COLUMNS) + [0.8, 0.8]
    )
    lows = {label: _range(runs, path) for label, path in COLUMNS.items() if label != "proxy"}
    for row, (proxy, some) in enumerate(runs.items()):
        for column, (label, path) in enumerate(COLUMNS.items()):
            axes = drawn.add_subplot(grid[row, column])
            for run in some:
                axes.plot(
                    *run.curve("iteration", *path),
                    color=SHADES[proxy],
                    linewidth=2,
                    marker="o",
                    markersize=3.5,
                )
            if label in lows:
                axes.set_ylim(*lows[label])
            axes.set_title(
                label if column else f"proxy: {proxy}", fontweight="normal" if column else "bold"
            )
            if row == len(runs) - 1:
                axes.set_xlabel("iteration")
            clean(axes)
        images = load_file(some[0].folder / "samples.safetensors")
        for column, (name, title) in enumerate(
            {"before": "untrained", "after": "after 16 iterations"}.items(), len(COLUMNS)
        ):
            axes = drawn.add_subplot(grid[row, column])
            axes.imshow(_sheet(images[name][:4]).numpy(), interpolation="nearest")
            axes.set_title(title)
            axes.set_axis_off()
    return drawn


def _range(runs: dict[str, list[RunRecord]], path: tuple[str, ...]) -> tuple[float, float]:
    values = [
        value
        for some in runs.values()
        for run in some
        for value in run.curve("iteration", *path)[1]
    ]
    pad = 0.06 * (max(values) - min(values))
    return min(values) - pad, max(values) + pad


def _sheet(images: torch.Tensor) -> torch.Tensor:
    """Four images as two by two, [height, width, channel], with white lines between them."""
    framed = torch.nn.functional.pad(images.clamp(0, 1), (2, 2, 2, 2), value=0.6)
    rows = [torch.cat(list(framed[i : i + 2]), dim=2) for i in (0, 2)]
    return torch.cat(rows, dim=1).permute(1, 2, 0)


def table(runs: dict[str, list[RunRecord]]) -> str:
    """First, highest and last values, means over seeds."""
    lines = ["| proxy | | untrained | best | at iteration | last |", "|---|---|---|---|---|---|"]
    for proxy, some in runs.items():
        for label, path in {
            "proxy": ("proxy",),
            **{n: ("heldout", n) for n in HELDOUT},
            "diversity": ("diversity",),
        }.items():
            curves = [run.curve("iteration", *path) for run in some]
            mean = [
                statistics.fmean(values) for values in zip(*(ys for _, ys in curves), strict=True)
            ]
            best = max(range(len(mean)), key=lambda i: mean[i])
            shown = f"{mean[0]:.3f} | {mean[best]:.3f} | {curves[0][0][best]:.0f} | {mean[-1]:.3f}"
            lines.append(f"| {proxy if label == 'proxy' else ''} | {label} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/reward-hacking"), help="folder of the runs"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = {
        proxy: [options.runs / f"{proxy}-{seed}" for seed in options.seeds] for proxy in PROXIES
    }
    for number, seed in enumerate(options.seeds):
        for proxy in PROXIES:
            make(proxy, seed, folders[proxy][number])
    runs = {proxy: [load_run(folder) for folder in some] for proxy, some in folders.items()}
    made = [
        json.loads((folder / "cpu.json").read_text())
        for some in folders.values()
        for folder in some
    ]
    seconds, commits = (
        [run["cpu_seconds"] for run in made],
        ", ".join(sorted({run["commit"] for run in made})),
    )
    record = {
        "commit": commits,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "seeds": options.seeds,
        "cpu_seconds": [round(value, 1) for value in seconds],
        "settings": {proxy: {**SHARED, **changes} for proxy, changes in PROXIES.items()},
        "evaluations": {
            proxy: [
                [{"iteration": row["iteration"], **row["evaluation"]} for row in run.evaluations]
                for run in some
            ]
            for proxy, some in runs.items()
        },
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    figure(runs).savefig(RESULTS.with_suffix(".png"), dpi=80, facecolor="white")
    head = (
        f"Means over seeds {', '.join(map(str, options.seeds))}; {min(seconds):.0f} to"
        f" {max(seconds):.0f} processor seconds a run"
    )
    page = "# Reward hacking with three proxies\n\n"
    page += (
        f"`python benchmarks/reward_hacking.py` (commit {commits}, torch {torch.__version__}).\n\n"
    )
    page += f"<!-- figures -->\n{head}.\n\n{table(runs)}\n"
    RESULTS.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
