"""The two figures of the README's first screen.

    flowrl compare --methods flow-grpo --seeds 0 1 2 --out runs/front
    python benchmarks/front_page.py runs/front

docs/before-after.png: images of the same prompts and noise before training and after it, by seed,
with the share of correct images among all held-out ones. docs/loop.png: one iteration with the
untrained model's trajectories of one prompt: rollout, reward, credit, update.
"""

import argparse
import textwrap
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor

from flowrl import world
from flowrl.bench.gradients import Setting
from flowrl.compare.results import Comparison, load_comparison
from flowrl.credit import StepwiseGain, TurningPoint, Uniform, credit_of
from flowrl.probes import Substeps
from flowrl.rollout import Groups
from flowrl.run.reading import read_json
from flowrl.run.report.style import COLOURS, INK, PALE, SOFT, clean, save
from flowrl.samplers import FlowSDE, Windowed
from flowrl.worlds import PolicyOptions

DOCS = Path(__file__).parents[1] / "docs"
RIGHT, WRONG = "#007a53", "#b3261e"
SHAPES = world("shapes")
SHOWN = (0, 2, 4, 6, 8)
"""Decisions whose estimates are drawn."""


def cell(axes: Any, image: Tensor, colour: str = PALE) -> None:
    """Draw an image with a frame."""
    axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=colour, linewidth=1.0 if colour == PALE else 2.5)


def before_after(comparison: Comparison) -> Figure:
    """A row before training and one per seed after it; frames mark correct images."""
    runs = comparison.of(comparison.baseline)
    prompts = read_json(runs[0].folder / "samples.json")["prompts"]
    tensors = [load_file(run.folder / "samples.safetensors") for run in runs]
    shares = [run.curve("iteration", "strict")[1] for run in runs]
    rows = [("before training", tensors[0]["before"], sum(s[0] for s in shares) / len(shares))]
    for run, kept, share in zip(runs, tensors, shares, strict=True):
        name = f"after {len(run.rows) - 1} updates\n(seed {run.seed})"
        rows.append((name, kept["after"], share[-1]))
    figure = Figure(figsize=(13, 1.72 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(prompts) + 1, width_ratios=[*[1] * len(prompts), 0.9])
    judge = SHAPES.reward("strict")
    known = {prompt.text: prompt for prompt in SHAPES.prompts("compositional", "heldout")}
    for line, (name, images, share) in zip(grid, rows, strict=True):
        correct = judge.score(images, [known[text] for text in prompts])
        for axes, image, mark in zip(line, images, correct.tolist(), strict=False):
            cell(axes, image, RIGHT if mark else WRONG)
        line[0].set_ylabel(name, fontsize=11, color=INK)
        line[-1].axis("off")
        line[-1].text(0.5, 0.55, f"{share:.0%}", ha="center", va="center", fontsize=22, color=INK)
        line[-1].text(0.5, 0.3, "correct", ha="center", va="center", fontsize=11, color=SOFT)
    for axes, text in zip(grid[0], prompts, strict=False):
        axes.set_title("\n".join(textwrap.wrap(text, 19)), fontsize=10)
    return figure


def loop(comparison: Comparison) -> Figure:
    """One iteration, from left to right."""
    policy, judge = SHAPES.policy(PolicyOptions()), SHAPES.reward("soft")
    listed = [p for part in ("train", "heldout") for p in SHAPES.prompts("compositional", part)]
    prompt = next(p for p in listed if p.text == "two blue triangles")
    sampler = Windowed(FlowSDE(0.7), range(9))
    setting = Setting(policy, sampler, policy.schedule(10), judge, [prompt])
    sampled = setting.rollout(Groups(1, 12, True), torch.Generator().manual_seed(3), Substeps(5))
    record = setting.experience(sampled)
    rewards = record.values[0, :, -1]
    order = rewards.argsort(descending=True)
    members = order[[0, 4, 8, 11]].tolist()
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    outer = figure.subfigures(1, 4, width_ratios=[5.6, 1.5, 3.2, 2.7])
    titles = ("1  Rollout: images, step by step", "2  Reward")
    titles += ("3  Credit: which step earned it?", "4  Update")
    for part, title in zip(outer, titles, strict=True):
        part.suptitle(title, x=0.02, ha="left", fontsize=12, color=INK, fontweight="bold")
    grid = outer[0].subplots(4, len(SHOWN) + 1)
    estimates, path = sampled.estimates, sampled.trajectories
    for line, member in zip(grid, members, strict=True):
        for axes, node in zip(line, SHOWN, strict=False):
            rows = estimates[node]
            cell(axes, policy.decode(rows[[member if len(rows) == 12 else 0]])[0].detach())
        cell(line[-1], policy.decode(path.images_latent[[member]])[0].detach(), INK)
    for axes, node in zip(grid[0], SHOWN, strict=False):
        axes.set_title(f"step {node}", fontsize=9, color=SOFT)
    grid[0][-1].set_title("image", fontsize=9, color=INK)
    words = f"“{prompt.text}”, same noise: the image expected before each step"
    outer[0].supxlabel(words, fontsize=10)
    bars = outer[1].subplots(4, 1)
    for axes, member in zip(bars, members, strict=True):
        axes.barh([0], [float(rewards[member])], color=SOFT, height=0.5)
        axes.set(xlim=(0, 1), ylim=(-1, 1), xticks=[], yticks=[])
        axes.text(0.02, 0.55, f"{float(rewards[member]):.2f}", fontsize=11, color=INK)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels = outer[2].subplots(3, 1, sharex=True)
    rules = {
        "flow-grpo": Uniform(),
        "stepwise-flow-grpo": StepwiseGain(),
        "tp-grpo": TurningPoint(),
    }
    names = (
        "Flow-GRPO: the same for all",
        "Stepwise: its gain",
        "TP-GRPO: gain, or total later gain",
    )
    for axes, (method, rule), name in zip(panels, rules.items(), names, strict=True):
        credit = credit_of(rule, record).advantages[0, members[0]]
        axes.bar(range(len(credit)), credit, color=COLOURS[method])
        axes.axhline(0, color=PALE, linewidth=0.8)
        axes.set_title(name, fontsize=9, loc="left", color=COLOURS[method], pad=2)
        axes.set(yticks=[], xticks=range(0, 9, 2))
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("step of the first image", fontsize=9)
    axes = outer[3].subplots()
    for run in comparison.of(comparison.baseline):
        axes.plot(*run.curve("iteration", "reward"), color=COLOURS["flow-grpo"], linewidth=1.2)
    axes.set(xlabel="updates")
    axes.set_title("makes credited steps likelier", fontsize=9, color=SOFT, loc="left")
    axes.set_ylabel("reward of held-out prompts", fontsize=9)
    clean(axes)
    return figure


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the comparison")
    comparison = load_comparison(parser.parse_args().folder)
    save(before_after(comparison), DOCS / "before-after.png", dpi=85)
    save(loop(comparison), DOCS / "loop.png", dpi=85)


if __name__ == "__main__":
    main()
