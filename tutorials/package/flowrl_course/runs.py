"""Short training runs in the 2-D world, kept in memory: seconds each, so that a lesson can afford seeds."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.protocols import CreditAssigner
from flowrl.training.build import make_method, make_reward, make_world, policy_options
from flowrl.training.config import preset
from flowrl.training.evaluation import evaluate
from flowrl.training.trainer import Trainer

SMALL: dict[str, Any] = {
    "world": "mixture",
    "groups": 12,
    "group_size": 8,
    "iterations": 20,
    "eval_every": 2,
    "eval_samples": 96,
    "eval_steps": 10,
}
"""What differs from the presets here: fewer samples, more evaluations."""


@dataclass(frozen=True)
class Curve:
    """One run, evaluated every few iterations; every tensor is [evaluation], the first one is the untrained policy.

    `sampled` and `trained` count network evaluations so far in rollouts (probes included) and in updates; `seconds` is the time
    of both, without evaluations. `reward` is the mean soft reward of ODE samples of the averaged weights on held-out prompts.
    `points` [evaluation, sample, 2] are those samples, sample i for held-out prompt i modulo their number. `clipped`: mean share
    of (trajectory, step) pairs whose ratio was beyond the clip.
    """

    iterations: Tensor
    sampled: Tensor
    trained: Tensor
    seconds: Tensor
    reward: Tensor
    points: Tensor
    clipped: float

    @property
    def work(self) -> Tensor:
        """All evaluations in units of one forward pass: a backward pass costs about two, so a trained pair costs three."""
        return self.sampled + 3 * self.trained


def start(
    method: str = "flow-grpo", seed: int = 0, rule: CreditAssigner | None = None, shared_noise: bool | None = None, **changes: Any
) -> Trainer:
    """A trainer by `method`, or by the credit `rule` with Flow-GRPO's sampler and loss; `changes` are settings of `RunConfig`.

    `shared_noise` of a rule: as its own attribute says unless given.
    """
    config = preset("default").apply(**{**SMALL, "method": method, "seed": seed, **changes})
    world, chosen = make_world(config), make_method(config)
    if rule is not None:
        chosen = replace(chosen, credit=rule, shared_noise=bool(getattr(rule, "shared_noise", False)))
    if shared_noise is not None:
        chosen = replace(chosen, shared_noise=shared_noise)
    policy = world.policy(policy_options(config))
    return Trainer(policy, chosen, make_reward(config), world.prompts(config.environment.task, "train"), config)


def learn(
    method: str = "flow-grpo", seed: int = 0, rule: CreditAssigner | None = None, shared_noise: bool | None = None, **changes: Any
) -> Curve:
    """Train to the end, arguments as in `start`. The same arguments give the same curve, but for seconds."""
    trainer = start(method, seed, rule, shared_noise, **changes)
    config, policy, world = trainer.config, trainer.policy, make_world(trainer.config)
    totals, rows, points, clipped = {"nfe": 0.0, "train_nfe": 0.0, "seconds": 0.0}, [], [], 0.0
    for done in range(config.iterations + 1):
        if done > 0:
            metrics = trainer.iteration()
            totals = {name: total + metrics[name] for name, total in totals.items()}
            clipped += metrics["clip_fraction"] / config.iterations
        if done % config.evaluation.eval_every == 0 or done == config.iterations:
            with trainer.averaged():
                count = config.evaluation.eval_samples
                found = evaluate(
                    policy,
                    world,
                    config.environment.task,
                    config.environment.reward_form,
                    count,
                    config.evaluation.eval_steps,
                    keep=count,
                )
            rows.append((done, *totals.values(), found.scores[config.environment.reward_form]))
            points.append(found.images.flatten(1))
    return Curve(*torch.tensor(rows, dtype=torch.float64).T.contiguous().unbind(0), points=torch.stack(points), clipped=clipped)
