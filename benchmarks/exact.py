"""Exact values of the 2-D world: the grid's convergence, trust in credit, and collapses.

    python benchmarks/exact.py          # about three minutes of one core
    python benchmarks/exact.py --only drift

Writes results/exact.json and results/exact.md. Errors are those of the true advantages A*, relative
to their root mean square over all decisions, against a grid of 225 points per axis. Trust: the
policy is trained with exact gains; at each stage, the advantages of the rule from the probe's grid
are compared with those from 169 points, group by group.

Drift: a run that collapses, sampled with a later iteration's network in the trained steps and the
network before the fall in the steps after the window, and the other way round. Only the trained
steps contribute to the policy gradient, though the steps after the window use the same network.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flowrl_bench.arms import tuned
from flowrl_bench.ceilings import with_values
from flowrl_bench.continuations import Look, TrueAdvantages, walk_of
from flowrl_bench.exact import MAX_BATCH, Exact, ValueGrid, exact_advantages
from flowrl_bench.gradients import Setting
from flowrl_bench.measurements import reproducible
from flowrl_bench.results_file import provenance
from torch import Tensor
from torch.nn import Module

from flowrl.io import write_json
from flowrl.parts.prompts import PromptStream
from flowrl.parts.registry import build
from flowrl.policies import MixturePolicy
from flowrl.reading import read_json
from flowrl.rollout import Groups, score
from flowrl.training.build import make_trainer, make_world
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
Compared = tuple[TrueAdvantages, TrueAdvantages]
WINDOWS, FORMS, PROMPTS, MEMBERS = ("0:5", ":-1"), ("soft", "strict"), 4, 12
STAGES = (0, 3, 6, 10, 15, 20)
RULE, TRUSTED = "stepwise-gain", 0.99
DRIFT_SEED, DRIFT, DRIFT_MEMBERS = 13, 5, 64
"""A seed that collapses with joint normalisation at the tuned settings, the iterations of its fall,
and trajectories per prompt.
"""


@dataclass(frozen=True)
class Hermite(ValueGrid):
    """The grid with Gauss-Hermite quadrature of `order` nodes per axis."""

    order: int = 5

    def smoothed(self, tables: Tensor, std: float) -> Tensor:
        """E table(x + std z) by quadrature."""
        z, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(self.order))
        index, taps = self.taps(self.axis[:, None] + std * z)
        taps = taps * (weights / weights.sum())[:, None]
        matrix = torch.zeros(self.points, self.points, dtype=torch.float64)
        matrix.scatter_add_(1, index.flatten(1), taps.flatten(1))
        return matrix @ tables @ matrix.T


GRIDS = {
    "29 points": ValueGrid(29),
    "57 points (the probe)": ValueGrid(),
    "81 points (the microscope)": ValueGrid(81),
    "113 points": ValueGrid(113),
    "57 points, linear": ValueGrid(interpolation="linear"),
    "113 points, linear": ValueGrid(113, interpolation="linear"),
    "reach 4, same spacing": ValueGrid(45, 3.9),
    "reach 6, same spacing": ValueGrid(69, 6.1),
    **{f"{n} Gauss-Hermite nodes": Hermite(order=n) for n in (3, 5, 9, 15)},
}


def trainer_of(window: str, form: str, clip_range: float = 0.06) -> Trainer:
    """Exact gains, a clip range at which few runs collapse, and the tuned noise level."""
    run = preset("default").apply(
        world="mixture",
        method="flow-grpo",
        credit=f"{RULE}(probe=exact)",
        reward_form=form,
        window=window,
        noise_level=0.5,
        clip_range=clip_range,
    )
    return make_trainer(run)


def setting_of(trainer: Trainer, form: str, count: int = PROMPTS) -> Setting:
    """The current policy with training prompts."""
    world = make_world(trainer.config)
    prompts = PromptStream(world.prompts("direction", "train"), 0).take(count)
    reward = world.reward(form)
    return Setting(trainer.policy, trainer.draw_sampler(), trainer.schedule, reward, prompts)


def rms(values: Tensor) -> float:
    """Root mean square."""
    return float(values.square().mean().sqrt())


def convergence(window: str, form: str, stage: int) -> list[dict]:
    """Errors of all grids, true and estimated."""
    trainer = trainer_of(window, form)
    for _ in range(stage):
        trainer.iteration()
    setting = setting_of(trainer, form)
    result = Look(setting, MEMBERS, 1).trajectories(False)
    reference = exact_advantages(setting, result, (), ValueGrid(225, 6.0))[0].values
    rows = []
    for name, grid in GRIDS.items():
        advantages = exact_advantages(setting, result, (), grid)[0]
        error = rms(advantages.values - reference) / rms(reference)
        estimate = rms(advantages.errors) / rms(reference)
        case = {"window": window, "form": form, "iterations": stage, "grid": name}
        rows.append({**case, "error": error, "estimate": estimate})
    return rows


def agreements(setting: Setting, members: int, seed: int) -> tuple[list[float], Compared]:
    """Within each group that has credit, the correlation of the advantages from the probe's grid
    with those from 169 points; and both sets of advantages.
    """
    result = Look(setting, members, seed).trajectories(True)
    probe, reference = (
        exact_advantages(setting, result, (), grid)[0] for grid in (Exact().grid, ValueGrid(169))
    )
    record, rule = setting.experience(result), build("credit", RULE)
    credit, best = (with_values(rule, record, t.state_values) for t in (probe, reference))
    credited = best.abs().mean((1, 2)) > 0.05  # groups with credit
    pairs = zip(credit[credited].flatten(1), best[credited].flatten(1), strict=True)
    return [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairs], (probe, reference)


def trust(window: str, form: str) -> list[dict]:
    """By stage of training: the spread of rewards and the agreement of credit within groups."""
    trainer, rows = trainer_of(window, form), []
    for stage in STAGES:
        while trainer.done < stage:
            trainer.iteration()
        agreement, (probe, reference) = agreements(setting_of(trainer, form), MEMBERS, stage)
        rows.append(
            {
                "window": window,
                "form": form,
                "iterations": stage,
                "reward": float(reference.state_values[..., -1].mean()),
                "spread": float(reference.state_values[..., -1].std(1).median()),
                "gain": rms(reference.values),
                "estimate": rms(probe.errors) / max(rms(probe.values), 1e-12),
                "groups": len(agreement),
                "lowest": min(agreement, default=1.0),
                "distrusted": sum(value < TRUSTED for value in agreement),
            }
        )
    return rows


def drift() -> list[dict]:
    """The fall of a run, by iteration: mean rewards of stochastic samples with the network of this
    iteration, with it within the window only, and after the window only; and the lowest agreement
    of credit.
    """
    run = preset("default").apply(
        **{"world": "mixture", "task": "direction", "method": "flow-grpo", "seed": DRIFT_SEED},
        **{**tuned("mixture", "true advantages"), "credit": f"{RULE}(probe=exact)"},
    )
    with reproducible("run", run.seed):
        trainer = make_trainer(run)
        assert isinstance(trainer.policy, MixturePolicy)
        network = trainer.policy.velocity_network
        weights, rewards = [copy.deepcopy(network.state_dict())], []
        while trainer.done < run.iterations:
            rewards.append(trainer.iteration()["reward_mean"])
            weights.append(copy.deepcopy(network.state_dict()))
    falls = [rewards[i] - rewards[i + DRIFT] for i in range(len(rewards) - DRIFT)]
    first = falls.index(max(falls))
    setting, rows = setting_of(trainer, "soft", 16), []
    for iteration in range(first, first + DRIFT + 1):
        both, within, after = (
            sampled(setting, network, [weights[i] for i in pair])
            for pair in ((iteration, iteration), (iteration, first), (first, iteration))
        )
        network.load_state_dict(weights[iteration])
        lowest = min(agreements(setting_of(trainer, "soft"), MEMBERS, iteration)[0], default=1.0)
        means = {"both": both, "within": within, "after": after}
        rows.append({"iterations": iteration, **means, "lowest": lowest})
    return rows


def sampled(setting: Setting, network: Module, weights: Sequence[dict]) -> float:
    """The mean reward of samples whose network has the first `weights` up to the last stochastic
    step and the second after it.
    """
    groups = Groups(len(setting.prompts), DRIFT_MEMBERS, False)
    walk = walk_of(setting, groups, 0, None, MAX_BATCH)
    x, last = groups.noise(setting.policy.latent_shape, walk.generator), max(walk.stds.nonzero())
    with torch.no_grad():
        for step in range(walk.schedule.steps):
            network.load_state_dict(weights[step > int(last)])
            timestep = walk.schedule.network_timesteps[step].expand(len(x))
            mean = walk.transition(x, walk.velocity(x, timestep, walk.conditions(x)), step).mean
            x = mean + walk.stds[step] * torch.randn(x.shape, generator=walk.generator)
    prompts = [prompt for prompt in setting.prompts for _ in range(DRIFT_MEMBERS)]
    return float(score(setting.reward, setting.policy.decode(x), prompts).total.mean())


def page(results: dict) -> str:
    """The tables."""
    cases = list(dict.fromkeys((r["window"], r["form"], r["iterations"]) for r in results["grids"]))
    head = [f"{window}, {form}, {stage} iterations" for window, form, stage in cases]
    lines = [
        "Made by `python benchmarks/exact.py`; commit {commit}; {hardware}.".format(**results),
        "",
        "Error of the true advantages / its estimate, relative to their root mean square.",
        "",
        "| grid | " + " | ".join(head) + " |",
        "|---" * (len(head) + 1) + "|",
    ]
    for name in GRIDS:
        rows = [row for row in results["grids"] if row["grid"] == name]
        cells = [f"{row['error']:.2%} / {row['estimate']:.2%}" for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Trust: {PROMPTS} groups of {MEMBERS} per stage. Agreement: the correlation within a group"
        f" of the advantages from the probe's grid with those from 169 points, over groups with"
        f" credit (mean absolute advantage above 0.05); distrusted: below {TRUSTED}.",
        "",
        "| window | reward | iterations | mean reward | median std of a group's rewards"
        " | estimated error of A* | groups with credit | lowest agreement | distrusted |",
        "|---" * 9 + "|",
    ]
    for r in results["trust"]:
        lines.append(
            f"| {r['window']} | {r['form']} | {r['iterations']} | {r['reward']:.3f} |"
            f" {r['spread']:.1e} | {r['estimate']:.1%} | {r['groups']} | {r['lowest']:.4f} |"
            f" {r['distrusted']} |"
        )
    lines += [
        "",
        f"Drift: seed {DRIFT_SEED} at the tuned settings, joint normalisation, window 0:5 of 10"
        f" steps; {16 * DRIFT_MEMBERS} samples. The other network is that of the first row.",
        "",
        "| iterations | mean reward | this network within the window only"
        " | after the window only | lowest agreement |",
        "|---" * 5 + "|",
    ]
    for r in results["drift"]:
        cells = [f"{r[name]:.3f}" for name in ("both", "within", "after")]
        lines.append(f"| {r['iterations']} | {' | '.join(cells)} | {r['lowest']:.4f} |")
    return "\n".join(lines) + "\n"


def measured(part: str) -> list[dict]:
    """A part of the results."""
    cases = [(window, form) for window in WINDOWS for form in FORMS]
    if part == "grids":
        return [row for case in cases for stage in (0, 5) for row in convergence(*case, stage)]
    return drift() if part == "drift" else [row for case in cases for row in trust(*case)]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = ("grids", "trust", "drift")
    parser.add_argument("--only", choices=parts, help="the other parts stay as they are")
    only = parser.parse_args().only
    previous = read_json(RESULTS / "exact.json", dict[str, Any]) if only else {}
    measurements = {part: measured(part) for part in parts if only in (None, part)}
    origin = {f"{only} made at": provenance()} if only else provenance()
    results = {**previous, **origin, **measurements}
    write_json(RESULTS / "exact.json", results)
    (RESULTS / "exact.md").write_text(page(json.loads(json.dumps(results))))


if __name__ == "__main__":
    main()
