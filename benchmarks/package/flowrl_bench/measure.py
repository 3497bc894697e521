"""One run, measured: the learning curve, what it cost, and what the 2-D world lets us see besides the reward."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.policies.mixture import MixturePolicy
from flowrl.protocols import FlowPolicy
from flowrl.rollout import EVALUATION_SEED, Usage, integrate
from flowrl.training.build import make_method, make_reward, make_world, policy_options
from flowrl.training.config import RunConfig
from flowrl.training.evaluation import evaluate
from flowrl.training.trainer import Trainer
from flowrl.worlds.base import World

CURVE = ("iteration", "nfe", "train_nfe", "seconds", "reward", "strict", "graded", "soft", "quality", "diversity")
"""Columns of a run's curve: totals up to the evaluation, and its scores."""
TOTALS = ("nfe", "train_nfe", "seconds", "reward_calls", "calls")
PHASES = ("rollout", "reward", "update")


def measure(config: RunConfig, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
    """Train by `config` and return plain numbers; None where `stop` asked to give up. The same config gives the same numbers
    (but for seconds) on one machine.

    curve: rows of `CURVE`. quality: mean log-density of held-out ODE samples under the data (the 2-D world; else null);
    diversity: mean distance of two samples of one prompt there. gains: mean |g_i| per step in the first and the last quarter
    of training, where the rule has every node scored. seconds: those of the processor, so that other work on the machine does
    not count; a run has one thread, so on a free core they are the time on the clock.
    """
    torch.set_num_threads(1)
    world, method = make_world(config), make_method(config)
    policy = world.policy(policy_options(config))
    trainer = Trainer(policy, method, make_reward(config), world.prompts(config.environment.task, "train"), config)
    totals: dict[str, float] = dict.fromkeys(TOTALS, 0.0)
    phases, gains, curve = dict.fromkeys(PHASES, 0.0), [], [_evaluated(trainer, world, 0, totals)]
    while trainer.done < config.iterations:
        if stop():
            return None
        started = time.process_time()
        row = trainer.iteration()
        seconds = time.process_time() - started
        for name in totals:
            totals[name] += seconds if name == "seconds" else row[name]
        for name in PHASES:
            phases[name] += row["phases"][name] / row["seconds"] * seconds / config.iterations
        gains.append(row.get("mean_abs_gain"))
        if trainer.done % config.evaluation.eval_every == 0 or trainer.done == config.iterations:
            curve.append(_evaluated(trainer, world, trainer.done, totals))
    quarter = max(1, config.iterations // 4)
    scored = gains[0] is not None
    return {
        "curve": curve,
        "totals": {**totals, "trajectories": config.rollout.groups * config.rollout.group_size * config.iterations},
        "phases": phases,
        "gains": [_mean(gains[:quarter]), _mean(gains[-quarter:])] if scored else None,
    }


def _mean(rows: list[list[float]]) -> list[float]:
    return torch.tensor(rows).mean(0).tolist()


def _evaluated(trainer: Trainer, world: World, iteration: int, totals: dict[str, float]) -> list[float | None]:
    """A row of `CURVE`, by the averaged weights."""
    c = trainer.config
    with trainer.averaged():
        found = evaluate(
            trainer.policy,
            world,
            c.environment.task,
            c.environment.reward_form,
            c.evaluation.eval_samples,
            c.evaluation.eval_steps,
            c.rollout.max_batch,
            solver=c.evaluation.eval_solver,
        )
        quality, diversity = _plausible(trainer.policy, world, c)
    scores = [found.scores[name] for name in (c.environment.reward_form, "strict", "graded", "soft")]
    return [iteration, totals["nfe"], totals["train_nfe"], totals["seconds"], *scores, quality, diversity]


def _plausible(policy: FlowPolicy, world: World, config: RunConfig) -> tuple[float | None, float | None]:
    """Quality and diversity of held-out ODE samples; None outside the 2-D world, whose density is known."""
    if not isinstance(policy, MixturePolicy):
        return None, None
    prompts, repeats = world.prompts(config.environment.task, "heldout"), 32
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    noise = torch.randn((len(prompts) * repeats, *policy.latent_shape), generator=generator)
    points = integrate(
        policy, policy.schedule(config.evaluation.eval_steps), policy.encode(prompts).repeat(repeats), noise, Usage(), 4096
    )
    spread = torch.cdist(points.flatten(1).view(-1, repeats, 2), points.flatten(1).view(-1, repeats, 2))
    return log_density(policy, points), float(spread.sum((1, 2)).mean() / (repeats * (repeats - 1)))


def log_density(policy: MixturePolicy, points: Tensor) -> float:
    """Mean log-density of points [sample, 2, 1, 1] under the data the base model was made for."""
    return float(policy.mixture.log_marginal(points.flatten(1), torch.zeros(len(points))).mean())
