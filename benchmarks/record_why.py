"""Why the record on images is cheap: each of its changes taken back, and the noise of gradients.

    python benchmarks/record_why.py            # about 45 minutes; writes results/record-why.json
    python benchmarks/record_why.py --show     # the tables and docs/verdict/record-why.png

Costs: the record, the same with one change taken back, and Flow-GRPO's loss with the record's
prompts, rate and number of updates, so that its updates are as large (records/candidates/
images-why.yaml), in the quick mode of `flowrl bench record`: two tasks, four seeds.

Gradients: a batch has 8 prompts with 12 samples in the three tasks, with the base weights and after
five iterations of the record. G is the mean gradient over batches of fresh prompts, n the deviation
of one of them; signal is |G|^2, noise the mean of |n|^2, both without the bias of finitely many
batches. Their ratio s is what a batch is worth: a step at the best rate gains in proportion to s /
(1 + s). Policy gradients are measured decision by decision, for the final reward and for the reward
minus a calibrated baseline, on the same samples; weights are those of Weighted("noise").
DiffusionNFT is measured with several numbers of times per image. Costs of a batch are seconds of
SD3.5-Medium over those of the policy gradient.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, cast

import matplotlib.pyplot as plt
import numpy as np
import torch
from numpy.typing import NDArray

from flowrl.bench.contest import CONTESTS, iteration_seconds
from flowrl.bench.gradients import Setting, credit_tables, flat, forward_gradients
from flowrl.bench.record import (
    QUICK_SEEDS,
    QUICK_SHARE,
    QUICK_TASKS,
    Runner,
    over_flow_grpo,
    read_tries,
    standing,
)
from flowrl.compare.arms import load_arms
from flowrl.core.protocols import ForwardLoss, RewardModel
from flowrl.credit import CalibratedGain, Uniform
from flowrl.losses import PolicyGradientLoss
from flowrl.rollout import Groups, Rows, TransitionObjective
from flowrl.rollout.groups import PromptStream
from flowrl.run.build import make_trainer, run_method
from flowrl.run.io import write_bytes
from flowrl.run.report.style import png

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "record-why.json"
FIGURE = ROOT / "docs/verdict/record-why.png"
RULES = {"final reward": Uniform(), "minus a calibrated baseline": CalibratedGain(gain_weight=0)}
PLAIN = {"final reward": "final reward", "minus a calibrated baseline": "calibrated baseline"}
TIMES = (9, 3, 1)
"""Times per image of DiffusionNFT; 9 are all of its own."""
BATCH = {"groups": 8, "noise_level": 0.98}
BATCHES, TRAINED = 24, 5
"""Batches, and iterations of the record before the second measurement."""
WITHOUT = ROOT / "benchmarks/records/candidates/images-why.yaml"
CONTEST = CONTESTS["images"]


def nft(times: int) -> str:
    """DiffusionNFT with a number of times per image."""
    own = "" if times == 9 else f", times=steps(count={times})"
    return f"diffusion-nft(kl_weight=0{own})"  # on policy, beta does not change the gradient


def measured(task: str, trained: int, batches: int) -> dict[str, Any]:
    """Inner products of the gradients of all batches, of policy gradients also by decision; and the
    stds of the decisions.
    """
    record = standing(read_tries(ROOT / "benchmarks/records", "images"))
    assert record is not None
    trainer = make_trainer(CONTEST.run(task, record.settings, 0))
    for _ in range(trained):
        trainer.iteration()
    policy, schedule = trainer.policy, trainer.schedule
    reward = cast(RewardModel, trainer.reward)
    run = CONTEST.run(task, BATCH, 0)
    sampler = make_trainer(run).draw_sampler()
    losses = {times: run_method(CONTEST.run(task, forward(times), 0)) for times in TIMES}
    prompts = PromptStream(trainer.prompts.prompts, 1)
    groups = Groups(run.rollout.groups, run.rollout.group_size)
    generator = torch.Generator().manual_seed(2)
    vectors: dict[str, list[torch.Tensor]] = defaultdict(list)
    stds = torch.zeros(0)
    for batch in range(batches):
        setting = Setting(policy, sampler, schedule, reward, prompts.take(groups.prompts))
        stds = setting.stds[setting.stds > 0]
        result = setting.rollout(groups, generator, CalibratedGain().probe)
        found = setting.experience(result)
        for name, rule in RULES.items():
            loss, tables = PolicyGradientLoss(), credit_tables(rule, found)
            objective = TransitionObjective(policy, loss, result, found.decisions, *tables, sampler)
            for k in range(len(stds)):
                rows = Rows.of(torch.arange(groups.samples), torch.full((groups.samples,), k))
                value = loss.loss(objective.batch(rows)).loss
                vectors[name].append(flat(torch.autograd.grad(value, setting.parameters)))
        for times, method in losses.items():
            own = replace(setting, sampler=method.sampler)
            loss, members = cast(ForwardLoss, method.loss), groups.members
            row = forward_gradients(own, method.credit, loss, 1, members, batch)
            vectors[f"DiffusionNFT, {times} times"].append(row[0])
    products = {name: torch.stack(rows).double() for name, rows in vectors.items()}
    return {
        "stds": stds.tolist(),
        "products": {name: (rows @ rows.T).tolist() for name, rows in products.items()},
    }


def forward(times: int) -> dict[str, Any]:
    """The settings of DiffusionNFT with a number of times."""
    return {"method": "diffusion-nft", "loss": nft(times), "groups": BATCH["groups"]}


def costs() -> dict[str, float]:
    """Seconds per batch over those of the policy gradient."""
    task = next(iter(CONTEST.tasks))
    baseline = {**BATCH, "credit": "calibrated-gain(gain_weight=0)"}
    arms = dict(zip(RULES, (BATCH, baseline), strict=True))
    arms |= {f"DiffusionNFT, {times} times": forward(times) for times in TIMES}
    each = {name: iteration_seconds(CONTEST.run(task, arm, 0)) for name, arm in arms.items()}
    return {name: seconds / each["final reward"] for name, seconds in each.items()}


def signal_and_noise(
    products: NDArray[np.float64], decisions: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """S_kl = <G_k, G_l> and N_kl, the covariance of a batch's parts k and l, summed over
    parameters; from inner products [batch x decision, batch x decision].
    """
    count = len(products) // decisions
    table = products.reshape(count, decisions, count, decisions)
    same = np.einsum("bkbl->kl", table) / count
    other = (table.sum((0, 2)) - count * same) / (count * (count - 1))
    return (other + other.T) / 2, same - other


def worth(signal: Any, noise: Any, weights: Any) -> float:
    """Signal over noise of a batch with weights of its decisions."""
    return float(weights @ signal @ weights / (weights @ noise @ weights))


def best_weights(signal: Any, noise: Any) -> Any:
    """(S + N)^-1 S 1, at least 0."""
    ones = np.ones(len(signal))
    return np.clip(np.linalg.solve(signal + noise, signal @ ones), 0, None)


def summary(known: Mapping[str, Any]) -> dict[str, Any]:
    """By loss and rule: signal over noise of a batch; of policy gradients with weights of 1, by
    noise and the best ones, and of each decision alone.
    """
    stds, found = np.array(known["stds"]), dict[str, Any]()
    for name, products in known["products"].items():
        count = len(stds) if name in RULES else 1
        signal, noise = signal_and_noise(np.array(products), count)
        if count == 1:
            found[name] = {"batch": worth(signal, noise, np.ones(1))}
            continue
        found[name] = {
            "batch": worth(signal, noise, np.ones(count)),
            "weights by noise": worth(signal, noise, stds),
            "best weights": worth(signal, noise, best_weights(signal, noise)),
            "decisions": (np.diag(signal) / np.diag(noise)).tolist(),
        }
    return found


def one_change() -> dict[str, Any]:
    """By arm: the cost over Flow-GRPO's result's with its interval, and the runs that collapsed."""
    record = standing(read_tries(ROOT / "benchmarks/records", "images"))
    assert record is not None
    arms = {"the record": record.settings, **load_arms(WITHOUT, trust=False)}
    runner = Runner("images", ROOT / "runs/record-why", "python benchmarks/record_why.py")
    tasks, found = QUICK_TASKS["images"], dict[str, Any]()
    for arm, settings in arms.items():
        made = runner.run({arm: settings}, QUICK_SEEDS, tasks, QUICK_SHARE)
        if made is None:
            raise SystemExit(130)
        ratio = over_flow_grpo(CONTEST, {task: made[arm][task].curves for task in tasks})
        ends = [fmean(row[-1] for row in made[arm][task].rewards) for task in tasks]
        fallen = sum(made[arm][task].collapsed for task in tasks)
        reached = math.isfinite(ratio.value)
        cost = ratio.value if reached else ratio.more
        found[arm] = {"text": ratio.text(), "cost": cost, "reached": reached, "fell": fallen}
        found[arm] |= {"low": ratio.low, "high": min(ratio.high, 9.0), "last": ends}
        print(arm, ratio.text(), found[arm]["last"], fallen, flush=True)
    return found


def bars(summaries: Mapping[str, Any]) -> dict[str, tuple[list[float], float]]:
    """By label, signal over noise in every task and state, and the cost."""
    price, found = costs(), dict[str, tuple[list[float], float]]()
    for rule in RULES:
        for kind in ("batch", "weights by noise"):
            label = f"policy gradient, {PLAIN[rule]}{', weights by noise' * (kind != 'batch')}"
            found[label] = [known[rule][kind] for known in summaries.values()], price[rule]
    for times in TIMES:
        name = f"DiffusionNFT, {times} times"
        found[name] = [k[name]["batch"] for k in summaries.values()], price[name]
    return found


def figure(found: Mapping[str, Any]) -> Any:
    """The cost with each change taken back, and what a batch is worth at its cost: the geometric
    mean of the tasks and states, which are the dots.
    """
    made, axes = plt.subplots(1, 2, figsize=(12.0, 3.8), layout="constrained")
    names = list[str]()
    for place, (arm, known) in enumerate(found["costs"].items()):
        names.append(arm.replace("equal updates, ", "equal updates,\n"))
        colour = "#54a24b" if place == 0 else "#4c78a8" if "Flow-GRPO" in arm else "#bab0ac"
        axes[0].barh(place, known["cost"], 0.7, color=colour)
        if known["reached"]:
            axes[0].plot([known["low"], min(known["high"], 1.1)], [place] * 2, "k-", lw=1)
        else:
            axes[0].plot(known["cost"], place, ">", color=colour, ms=9, clip_on=False)
        fell = f", {known['fell']} of 8 fell" if known["fell"] else ""
        axes[0].text(0.01, place, known["text"] + fell, va="center", fontsize=8)
    axes[0].set_yticks(range(len(names)), names, fontsize=8.5)
    axes[0].set(xlim=(0, 1.1), xlabel="cost over Flow-GRPO's; triangle: not reached")
    axes[0].set_title("One change taken back")
    labels = bars(found["gradients"])
    for place, (name, (values, cost)) in enumerate(labels.items()):
        colour = "#54a24b" if name.startswith("DiffusionNFT") else "#4c78a8"
        worth_of = np.array(values) / cost
        axes[1].plot(worth_of, [place] * len(worth_of), "o", color=colour, ms=4, alpha=0.5)
        axes[1].plot(geometric_mean(worth_of), place, "|", color=colour, ms=22, mew=3)
    axes[1].set_yticks(range(len(labels)), list(labels), fontsize=8.5)
    axes[1].set(xlabel="signal / noise of a batch over its cost", xscale="log", xlim=(0.04, 4))
    axes[1].set_title("Gradients of 8 prompts; line: mean")
    axes[1].set_ylim(-0.6, len(labels) - 0.4)
    for axis in axes:
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    return made


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.show:
        found: dict[str, Any] = {"costs": one_change(), "gradients": {}}
        for task in CONTEST.tasks:
            for trained in (0, TRAINED):
                name = f"{task}, {trained} iterations"
                found["gradients"][name] = summary(measured(task, trained, BATCHES))
                print(name, json.dumps(found["gradients"][name]), flush=True)
        write_bytes(RESULT, (json.dumps(found, indent=1) + "\n").encode())
    known = json.loads(RESULT.read_text())
    for arm, row in known["costs"].items():
        print(f"{arm}: {row['text']}, {row['fell']} of 8 fell")
    for label, (values, cost) in bars(known["gradients"]).items():
        each = " ".join(f"{value:.3f}" for value in values)
        own = geometric_mean(values)
        print(f"{label}: {own:.3f} at {cost:.2f} of the cost, {own / cost:.3f}; {each}")
    write_bytes(FIGURE, png(figure(known)))


if __name__ == "__main__":
    main()
