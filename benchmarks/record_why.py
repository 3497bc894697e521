"""Why the record is cheap: signal and noise of the policy gradient, by decision and rule.

    python benchmarks/record_why.py            # about 15 minutes; writes results/record-why.json
    python benchmarks/record_why.py --show     # the table and docs/verdict/record-why.png

A batch is the record's: its prompts, members, steps and noise. G_k is the mean over batches of
decision k's part of the gradient, n_k the deviation of a batch from it. Signal is |sum_k w_k G_k|^2,
noise the mean of |sum_k w_k n_k|^2, both without the bias of finitely many batches. Their ratio is
what a batch is worth: a step at the best rate gains in proportion to s / (1 + s). Rules share their
trajectories; weights are those of Weighted("noise"). In the three tasks of the image world, with
the base weights and after five iterations of the record.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from numpy.typing import NDArray

from flowrl.bench.gradients import Setting, credit_tables, flat
from flowrl.bench.record import read_tries, standing
from flowrl.credit import CalibratedGain, Uniform
from flowrl.losses import PolicyGradientLoss
from flowrl.rollout import Groups, Rows, TransitionObjective
from flowrl.rollout.groups import PromptStream
from flowrl.run.build import make_trainer
from flowrl.run.config import RunConfig
from flowrl.run.io import write_bytes
from flowrl.run.report.style import png

ROOT = Path(__file__).parents[1]
RESULT, FIGURE = ROOT / "benchmarks/results/record-why.json", ROOT / "docs/verdict/record-why.png"
RULES = {"final reward": Uniform(), "minus a calibrated baseline": CalibratedGain(gain_weight=0)}
BATCHES = 48
TRAINED = 5
"""Iterations of the record before the second measurement."""
Products = dict[str, list[list[float]]]


def measured(config: RunConfig, batches: int, trained: int) -> dict[str, Any]:
    """Inner products of the gradients of all batches and decisions, by rule, and the stds."""
    trainer = make_trainer(config)
    for _ in range(trained):
        trainer.iteration()
    policy, schedule = trainer.policy, trainer.schedule
    prompts = PromptStream(trainer.prompts.prompts, 1)
    groups = Groups(config.rollout.groups, config.rollout.group_size)
    generator = torch.Generator().manual_seed(2)
    vectors: dict[str, list[torch.Tensor]] = {name: [] for name in RULES}
    stds = torch.zeros(0)
    for _ in range(batches):
        chosen = prompts.take(groups.prompts)
        setting = Setting(policy, trainer.draw_sampler(), schedule, trainer.reward, chosen)
        stds = setting.stds[setting.stds > 0]
        result = setting.rollout(groups, generator, CalibratedGain().probe)
        record = setting.experience(result)
        for name, rule in RULES.items():
            loss, tables = PolicyGradientLoss(), credit_tables(rule, record)
            objective = TransitionObjective(
                policy, loss, result, record.decisions, *tables, setting.sampler
            )
            for k in range(len(stds)):
                rows = Rows.of(torch.arange(groups.samples), torch.full((groups.samples,), k))
                value = loss.loss(objective.batch(rows)).loss
                vectors[name].append(flat(torch.autograd.grad(value, setting.parameters)))
    products = {name: torch.stack(rows).double() for name, rows in vectors.items()}
    return {
        "stds": stds.tolist(),
        "products": {name: (rows @ rows.T).tolist() for name, rows in products.items()},
    }


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
    """By rule: signal over noise of each decision, and of a batch with weights of 1, by noise and
    the best ones.
    """
    stds, found = np.array(known["stds"]), dict[str, Any]()
    for name, products in known["products"].items():
        signal, noise = signal_and_noise(np.array(products), len(stds))
        found[name] = {
            "decisions": (np.diag(signal) / np.diag(noise)).tolist(),
            "weights of 1": worth(signal, noise, np.ones(len(stds))),
            "weights by noise": worth(signal, noise, stds),
            "best weights": worth(signal, noise, best_weights(signal, noise)),
        }
    return found


WEIGHTS = ("weights of 1", "weights by noise", "best weights")


def figure(summaries: Mapping[str, Any]) -> Any:
    """Per task and state of training: the worth of a batch by rule and weights."""
    made, axes = plt.subplots(1, 2, figsize=(9.0, 3.4), layout="constrained")
    colours = dict(zip(RULES, ("#4c78a8", "#e45756"), strict=True))
    for rule, colour in colours.items():
        rows = np.array([known[rule]["decisions"] for known in summaries.values()])
        places = 1 + np.arange(rows.shape[1])
        axes[0].plot(places, rows.mean(0), "o-", color=colour, label=rule)
        axes[0].plot(places, rows.T, color=colour, alpha=0.25, lw=0.8)
        each = np.array([[known[rule][name] for name in WEIGHTS] for known in summaries.values()])
        shift = -0.19 if rule == next(iter(RULES)) else 0.19
        axes[1].bar(np.arange(3) + shift, each.mean(0), 0.36, color=colour, label=rule)
        for number in range(3):
            axes[1].plot([number + shift] * len(each), each[:, number], "k.", ms=3)
    axes[0].set(xlabel="decision", ylabel="signal / noise of a batch", title="Each decision alone")
    axes[0].set_xticks(places)
    axes[1].set_xticks(np.arange(3), [name.replace(" ", "\n", 1) for name in WEIGHTS])
    axes[1].set(ylabel="signal / noise of a batch", title="All decisions together")
    axes[0].legend(frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0)
    return made


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.show:
        record = standing(read_tries(ROOT / "benchmarks/records", "images"))
        assert record is not None
        found = dict[str, Any]()
        for task in record.contest.tasks:
            config = record.contest.run(task, record.settings, 0)
            for trained in (0, TRAINED):
                name = f"{task}, {trained} iterations"
                found[name] = summary(measured(replace(config), BATCHES, trained))
                print(name, json.dumps(found[name]), flush=True)
        write_bytes(RESULT, (json.dumps(found, indent=1) + "\n").encode())
    summaries = json.loads(RESULT.read_text())
    for name, known in summaries.items():
        for rule, numbers in known.items():
            each = " ".join(f"{value:.3f}" for value in numbers["decisions"])
            together = ", ".join(f"{kind} {numbers[kind]:.2f}" for kind in WEIGHTS)
            print(f"{name}, {rule}: {together}; decisions {each}")
    write_bytes(FIGURE, png(figure(summaries)))


if __name__ == "__main__":
    main()
