"""Short training runs, kept in memory: seconds each in the 2-D world, about half a minute with
images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl import RunConfig, Trainer, evaluate, preset
from flowrl.core.experience import needs_of
from flowrl.core.protocols import CreditAssigner, FlowPolicy
from flowrl.run.build import (
    build_trainer,
    make_method,
    make_policy,
    make_reward,
    make_trainer,
    make_world,
)
from flowrl.run.evaluation import Evaluation
from flowrl_course.progress import progress

PLANE: dict[str, Any] = {
    "world": "mixture",
    "groups": 12,
    "group_size": 8,
    "iterations": 20,
    "eval_every": 2,
    "eval_samples": 96,
    "eval_steps": 10,
}
"""Settings of the runs in the 2-D world that differ from the preset: fewer samples, more
evaluations.
"""


@dataclass(frozen=True)
class Curve:
    """One run, evaluated every few iterations; every tensor is [evaluation], and entry 0 is the
    untrained policy.

    `sampled` and `trained` count the network evaluations so far in rollouts (probes included) and
    in updates; `seconds` is the time of both, without evaluations. `reward` is the mean soft reward
    of ODE samples of the averaged weights, held-out prompts. `points` [evaluation, sample, 2] are
    those samples, sample i for held-out prompt i modulo their number. `clipped` is the mean
    fraction of (trajectory, decision) pairs whose ratio was beyond the clip range, 0 for a loss
    without a ratio.
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
        """All evaluations in units of one forward pass: a backward pass costs about two, so a
        trained pair costs three.
        """
        return self.sampled + 3 * self.trained


def start(
    method: str = "flow-grpo", seed: int = 0, rule: CreditAssigner | None = None, **settings: Any
) -> Trainer:
    """A trainer in the 2-D world by `method`, or by the credit `rule` with the method's sampler and
    loss.

    `settings` are those of `RunConfig`. With `initial_noise` "auto" the rule's own `Needs` decide
    whether members share their initial noise.
    """
    return _start(_config(method, seed, **settings), rule)


def _config(method: str, seed: int, **settings: Any) -> RunConfig:
    return preset("default").apply(**{**PLANE, "method": method, "seed": seed, **settings})


def _start(config: RunConfig, rule: CreditAssigner | None) -> Trainer:
    if rule is None:
        return make_trainer(config)
    chosen, world = make_method(config), make_world(config)
    automatic = config.algorithm.initial_noise is None
    shared = bool(needs_of(rule).shared_noise) if automatic else chosen.shared_noise
    chosen = replace(chosen, credit=rule, shared_noise=shared)
    prompts = world.prompts(config.environment.task, "train")
    return build_trainer(config, make_policy(config), chosen, make_reward(config), prompts)


def learn(
    method: str = "flow-grpo", seed: int = 0, rule: CreditAssigner | None = None, **settings: Any
) -> Curve:
    """Train to the end, arguments as in `start`. The same arguments give the same curve, except for
    its seconds.
    """
    config = _config(method, seed, **settings)
    trainer, world = _start(config, rule), make_world(config)
    task, form, evaluation = (
        config.environment.task,
        config.environment.reward_form,
        config.evaluation,
    )
    totals, rows, points, clipped = {"nfe": 0.0, "train_nfe": 0.0, "seconds": 0.0}, [], [], 0.0
    name = type(rule).__name__ if rule else method
    for done in progress(range(config.iterations + 1), f"{name}, seed {seed}: iteration"):
        if done > 0:
            metrics = trainer.iteration()
            totals = {name: total + metrics[name] for name, total in totals.items()}
            clipped += metrics.get("clip_fraction", 0.0) / config.iterations
        if done % evaluation.eval_every == 0 or done == config.iterations:
            count = evaluation.eval_samples
            with trainer.averaged():
                found = evaluate(
                    trainer.policy, world, task, form, count, evaluation.eval_steps, keep=count
                )
            rows.append((done, *totals.values(), found.scores[form]))
            points.append(found.images.flatten(1))
    return Curve(
        *torch.tensor(rows, dtype=torch.float64).T.contiguous().unbind(0),
        points=torch.stack(points),
        clipped=clipped,
    )


@dataclass(frozen=True)
class Trained:
    """A policy with the averaged weights of a run, the metrics of every iteration, and the held-out
    evaluation of the weights.
    """

    policy: FlowPolicy
    metrics: Sequence[Mapping[str, Any]]
    evaluation: Evaluation

    def curve(self, metric: str) -> list[float]:
        """One metric, iteration by iteration."""
        return [row[metric] for row in self.metrics]


def train(config: RunConfig, samples: int = 96, steps: int = 10) -> Trained:
    """All iterations of `config`, then a held-out evaluation with `samples` ODE samples of `steps`
    steps.
    """
    trainer, world = make_trainer(config), make_world(config)
    metrics = [trainer.iteration() for _ in progress(range(config.iterations), "iteration")]
    weights = list(trainer.policy.trainable().values())
    with trainer.averaged():
        averages = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight, average in zip(weights, averages, strict=True):
            weight.copy_(average)
    task, form = config.environment.task, config.environment.reward_form
    return Trained(
        trainer.policy, metrics, evaluate(trainer.policy, world, task, form, samples, steps)
    )
