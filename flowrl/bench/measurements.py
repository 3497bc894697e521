"""What is measured of a training run."""

import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flowrl.core.errors import RewardContractError, TrainingError
from flowrl.core.protocols import FlowPolicy
from flowrl.policies import MixturePolicy
from flowrl.rollout import EVALUATION_SEED, Usage, solve
from flowrl.run.build import make_trainer, make_world
from flowrl.run.config import RunConfig
from flowrl.run.costs import COUNTS
from flowrl.run.evaluation import evaluate
from flowrl.run.results import scoring_seconds
from flowrl.trainer import Trainer
from flowrl.worlds import World

CURVE = (
    "iteration",
    "nfe",
    "train_nfe",
    "seconds",
    "reward",
    "strict",
    "graded",
    "soft",
    "quality",
    "diversity",
    "probe_nfe",
    "gradient_nfe",
    "decodes",
    "reward_calls",
)
"""Columns of a run's learning curve: totals up to the evaluation, its scores, and further totals.
"""
TOTALS = (*COUNTS, "seconds", "calls")
PHASES = ("rollout", "reward", "update")


@contextmanager
def reproducible(*key: Any) -> Iterator[None]:
    """A context in which torch uses one thread, and the global generators of torch, numpy and
    Python depend only on `key`.

    Everything is restored afterwards. Built-in parts have their own generators; a third party's
    rule may use the global ones.
    """
    seed, threads = zlib.crc32(repr(key).encode()), torch.get_num_threads()
    python = random.getstate()
    arrays = np.random.get_state()  # noqa: NPY002 (rules may draw from it)
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002


def measure(
    config: RunConfig, stop: Callable[[], bool] = lambda: False, lenient: bool = False
) -> dict[str, Any] | None:
    """Train by `config` and return plain numbers; None if `stop` ended the run. On one machine, a
    config determines all but the seconds.

    curve: rows of `CURVE`; null for a form that the world does not have. quality: mean log-density
    of held-out ODE samples under the data (2-D world only, else null); diversity: mean distance
    between two samples of a prompt (likewise). gains: mean |g_k| per decision in the first and the
    last quarter of training, if the rule reads the values of all of them. seconds: processor time
    of one thread, so that other work on the machine does not count.

    If numbers became infinite, a `lenient` measurement has rewards of 0, the lowest of the built-in
    worlds, from there on, with the costs so far continued, and the message as `diverged`.
    """
    with reproducible("run", config.seed):
        trainer, world = make_trainer(config), make_world(config)
        totals: dict[str, float] = dict.fromkeys(TOTALS, 0.0)
        diverged: dict[str, str] = {}
        phases, gains, curve = (
            dict.fromkeys(PHASES, 0.0),
            [],
            [_evaluated(trainer, config, world, totals)],
        )
        try:
            while trainer.done < config.iterations:
                if stop():
                    return None
                started = time.process_time()
                row = trainer.iteration()
                seconds = time.process_time() - started
                for name in totals:
                    totals[name] += seconds if name == "seconds" else row[name]
                spent = {**row["phases"], "reward": scoring_seconds(row["phases"])}
                for name in PHASES:
                    phases[name] += spent[name] / row["seconds"] * seconds / config.iterations
                gains.append(row.get("mean_abs_gain"))
                if (
                    trainer.done % config.evaluation.eval_every == 0
                    or trainer.done == config.iterations
                ):
                    curve.append(_evaluated(trainer, config, world, totals))
        except (TrainingError, RewardContractError) as error:
            if not (lenient and trainer.done):
                raise
            diverged = {"diverged": str(error)}
            curve += _zeros(config, curve[-1], totals, trainer.done)
    quarter = max(1, config.iterations // 4)
    scored = gains[0] is not None
    return {
        "curve": curve,
        "totals": {
            **totals,
            "trajectories": config.rollout.groups * config.rollout.group_size * config.iterations,
        },
        "phases": phases,
        "gains": [_mean(gains[:quarter]), _mean(gains[-quarter:])] if scored else None,
        **diverged,
    }


def _zeros(
    config: RunConfig, last: Sequence[float | None], totals: Mapping[str, float], done: int
) -> Iterator[list[float | None]]:
    """The evaluations after the `last` one of a run that diverged after `done` iterations, which
    cost `totals`.
    """
    every, end = config.evaluation.eval_every, config.iterations
    for iteration in sorted({*range(int(last[0] or 0) + every, end, every), end}):
        counts = {name: total * iteration / done for name, total in totals.items()}
        row: dict[str, float | None] = {**dict.fromkeys(CURVE, 0.0), **counts}
        row |= {"iteration": float(iteration), "quality": None, "diversity": None}
        yield [row[name] for name in CURVE]


def _mean(rows: list[list[float]]) -> list[float]:
    return torch.tensor(rows).mean(0).tolist()


def _evaluated(
    trainer: Trainer, config: RunConfig, world: World, totals: Mapping[str, float]
) -> list[float | None]:
    """A row of `CURVE`, with the averaged weights."""
    with trainer.averaged():
        scores = _scores(trainer, config, world)
        quality, diversity = _plausible(trainer.policy, world, config)
    forms = (config.environment.reward_form, "strict", "graded", "soft")
    row: dict[str, float | None] = {"iteration": trainer.done, **totals, "quality": quality}
    row |= {"diversity": diversity, **dict(zip(CURVE[4:8], map(scores.get, forms), strict=True))}
    return [row[name] for name in CURVE]


def _scores(trainer: Trainer, config: RunConfig, world: World) -> dict[str, float]:
    """Held-out scores by form, with the policy's current weights."""
    environment, evaluation = config.environment, config.evaluation
    return evaluate(
        trainer.policy,
        world,
        environment.task,
        environment.reward_form,
        evaluation.eval_samples,
        evaluation.eval_steps,
        config.batches.max_batch,
        solver=evaluation.eval_solver,
    ).scores


def _plausible(
    policy: FlowPolicy, world: World, config: RunConfig
) -> tuple[float | None, float | None]:
    """Quality and diversity of held-out ODE samples; None outside the 2-D world, whose density is
    known.
    """
    if not isinstance(policy, MixturePolicy):
        return None, None
    prompts, repeats = world.prompts(config.environment.task, "heldout"), 32
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    noise = torch.randn((len(prompts) * repeats, *policy.latent_shape), generator=generator)
    schedule, condition = (
        policy.schedule(config.evaluation.eval_steps),
        policy.encode(prompts).repeat(repeats),
    )
    points = solve(policy, schedule, condition, noise, Usage(), 4096)
    by_prompt = points.flatten(1).view(len(prompts), repeats, -1)
    spread = torch.cdist(by_prompt, by_prompt)
    return log_density(policy, points), float(spread.sum((1, 2)).mean() / (repeats * (repeats - 1)))


def log_density(policy: MixturePolicy, points: torch.Tensor) -> float:
    """Mean log-density of points [sample, 2, 1, 1] under the data of the base model."""
    return float(policy.mixture.log_marginal(points.flatten(1), torch.zeros(len(points))).mean())
