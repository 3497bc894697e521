"""The microscope as a session: rules x stages of training x reward noise, in parallel, as plain rows of numbers.

Every rule looks at the same policy: the untrained one, and the one that Flow-GRPO's credit has trained for so many iterations.
"""

import copy
import json
import math
import multiprocessing
import os
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.diagnostics.gradient import Setting, alignment, pathwise_gradients, policy_gradients, update_evaluations
from flowrl.diagnostics.true_advantage import Look, TrueAdvantages, compare_credit, pooled, true_advantages
from flowrl.errors import ConfigError, CreditError, require
from flowrl.methods import try_credit
from flowrl.protocols import RandomSampler
from flowrl.registry import build
from flowrl.rewards import NoisyReward
from flowrl.rollout import Usage
from flowrl.training.build import even_schedule, make_method, make_reward, make_world, policy_options
from flowrl.training.config import RunConfig, preset
from flowrl.training.trainer import Trainer
from flowrl.types import Continuation

RULES: dict[str, str] = {
    "true advantage (16 continuations)": "stepwise-gain(probe='continuation:16')",
    "stepwise gains": "stepwise-gain",
    "stepwise gains, one-step estimate": "stepwise-gain(probe=tweedie)",
    "reward to go": "stepwise-gain(lam=1, probe=completion)",
    "gains, per-step normalised": "stepwise-gain(normalise=step)",
    "increments alone": "turning-point(where='none')",
    "turning points": "turning-point",
    "turning points, no constraint": "turning-point(consistent=False)",
    "turning points at random steps": "turning-point(where=random)",
    "uniform": "uniform",
    "uniform, noise-weighted": "weighted",
    "random": "random",
}
"""Rules by the name that figures use; the first and the last are planted: the best that credit could be, and the worst."""

HEARD = 2.0
"""A mean gradient shorter than so many of its standard errors has no direction to speak of."""
EQUAL_NFE = 10_000
"""Network evaluations that "signal-to-noise at equal NFE" allows every rule: sampling, probes and the policy's update."""


def _mixture_run() -> RunConfig:
    return preset("default").apply(world="mixture", window="all-but-last")


@dataclass(frozen=True)
class MicroscopeConfig:
    """What is looked at. `iterations`: stages of training; `noises`: stds of the noise added to the rewards that rules see.

    Noise is tried at the stage `noise_at` only. `looks` x all training prompts x `members` trajectories are compared;
    `continuations` per node estimate V. Gradients take `batches` of all prompts x `gradient_members`; rules that ask for
    continuations are left out there, one batch of them costs as much as a hundred of the others, and so is everything where
    the run's `reward_form` is not soft: a reward in steps has no gradient to compare with. Every rule is tried on a random table
    here; `ConfigError` or `CreditError` says what is wrong with the settings or with a rule.
    """

    run: RunConfig = field(default_factory=_mixture_run)
    rules: Mapping[str, str] = field(default_factory=lambda: dict(RULES))
    iterations: tuple[int, ...] = (0, 10, 40)
    noises: tuple[float, ...] = (0.0, 0.1, 0.3)
    noise_at: int = 10
    looks: int = 1
    members: int = 12
    continuations: int = 96
    batches: int = 20
    gradient_members: int = 8
    truth_batches: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("looks", "members", "batches", "truth_batches", "gradient_members", "continuations"):
            require(getattr(self, name) >= 2 - (name == "looks"), name, getattr(self, name), "2 or more (looks: 1)")
        require(self.batches >= 3, "batches", self.batches, "3 or more: the interval of a cosine leaves one out")
        once = len(set(self.iterations)) == len(self.iterations) >= 1
        require(once and min(self.iterations) >= 0, "iterations", self.iterations, "one or more, 0 or more, each once")
        good = all(math.isfinite(noise) and noise >= 0 for noise in self.noises) and len(set(self.noises)) == len(self.noises)
        require(good, "noises", self.noises, "standard deviations: finite, 0 or more, each once")
        require(len(self.noises) >= 1 and self.noises[0] == 0, "noises", self.noises, "0 first: the rule without noise")
        require(self.noise_at in self.iterations, "noise_at", self.noise_at, f"one of iterations = {self.iterations}")
        require(len(self.rules) >= 1, "rules", dict(self.rules), "one or more rules")
        if self.run.environment.world != "mixture":
            raise ConfigError(
                f"microscope: world = {self.run.environment.world!r} is not allowed: mixture, whose reward has a gradient"
            )
        schedule = even_schedule(
            self.run.rollout.num_steps, self.run.algorithm.sampler, self.run.algorithm.noise_level, self.run.algorithm.window
        )
        for name, spec in self.rules.items():
            for members in {self.members, self.gradient_members}:
                try:
                    try_credit(build("credit", spec), schedule, members)
                except CreditError as error:
                    raise CreditError(f"rule {name!r}: {error}") from error

    def noises_at(self, stage: int) -> tuple[float, ...]:
        """The noise levels that are tried at a stage."""
        return self.noises if stage == self.noise_at else self.noises[:1]

    def seeds(self) -> dict[str, Any]:
        """What is drawn from which seed: "training", "looks" and the "continuations" of each, "truth" and "gradients"."""
        looks = [self.seed + 1000 * look for look in range(self.looks)]
        return {
            "training": self.seed, "looks": looks, "continuations": [seed + 7 for seed in looks],
            "truth": self.seed + 1, "gradients": self.seed + 1000,
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def settings_of(config: MicroscopeConfig) -> dict[int, Setting]:
    """By stage: the policy after so many iterations of uniform credit (current weights, not averaged), and what it is asked."""
    run = config.run.replace(method="flow-grpo", credit="", iterations=max(1, *config.iterations), seed=config.seed)
    world, method = make_world(run), make_method(run)
    if isinstance(method.sampler, RandomSampler):
        raise ConfigError(f"microscope: window = {run.algorithm.window!r} is not allowed: one that is the same every iteration")
    policy = world.policy(policy_options(run))
    prompts = world.prompts(run.environment.task, "train")
    trainer = Trainer(policy, method, make_reward(run), prompts, run)
    found = {}
    for stage in sorted(set(config.iterations)):
        while trainer.done < stage:
            trainer.iteration()
        kept = copy.deepcopy(policy)
        found[stage] = Setting(
            kept, method.sampler, kept.schedule(run.rollout.num_steps), world.reward(run.environment.reward_form), prompts
        )
    return found


def jobs(config: MicroscopeConfig) -> Iterator[tuple[str, int, float, str]]:
    """(kind, iterations, noise, rule) in the order in which they should start: the long ones first."""
    for stage in config.iterations:
        yield "credit", stage, 0.0, ""
    for stage in config.iterations if config.run.environment.reward_form == "soft" else ():
        for noise in config.noises_at(stage):
            for name, spec in config.rules.items():
                if isinstance(build("credit", spec).probe, Continuation):
                    continue
                yield "gradient", stage, noise, name


def inspect(
    config: MicroscopeConfig, workers: int = 0, progress: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """Rows of numbers: kind "credit" (agreement with A*) and kind "gradient", one per rule, stage of training and noise.

    `workers` processes (0: one per core), one thread each (with 1: this process), so that the numbers do not depend on their
    number; for rules that draw from the global generators of torch, numpy or Python these are seeded, rule by rule. `progress` is
    told how many jobs of how many are done. Raises `ConfigError` for a negative `workers`, `CreditError` for a rule that fails.
    """
    require(workers >= 0, "workers", workers, "0 (one per core) or more")
    todo = list(jobs(config))
    count = min(len(todo), workers or min(os.cpu_count() or 1, 8))
    rows: list[dict[str, Any]] = []
    if count == 1:
        with _one_thread():
            for number, job in enumerate(todo, 1):
                rows += _do(config, job)
                if progress:
                    progress(number, len(todo))
        return rows
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(_do, config, job): job for job in todo}
        found = {}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                found[futures[future]] = future.result()
                if progress:
                    progress(number, len(todo))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [row for job in todo for row in found[job]]


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch computes with one thread inside, and with as many as before after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _seeded(*piece: Any) -> Iterator[None]:
    """The global generators of torch, numpy and Python as a function of `piece` inside, and as they were after."""
    seed = zlib.crc32(repr(piece).encode())
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 (rules may draw from it)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002


class _Laboratory:
    """What the jobs of one process share: the trained policies, and the true gradient at each stage."""

    def __init__(self, config: MicroscopeConfig) -> None:
        self.config, self.settings = config, settings_of(config)
        self.truths: dict[int, Tensor] = {}

    def truth(self, stage: int) -> Tensor:
        """Pathwise gradients [batch, parameter], made once."""
        if stage not in self.truths:
            count, seed = self.config.truth_batches, self.config.seeds()["truth"]
            self.truths[stage] = pathwise_gradients(self.settings[stage], count, 100, seed, decisions_only=True)
        return self.truths[stage]


@lru_cache(maxsize=1)
def _laboratory(config: str) -> _Laboratory:
    values = json.loads(config)
    lists = {name: tuple(values[name]) for name in ("iterations", "noises")}
    with _seeded("training", values["seed"]):
        return _Laboratory(MicroscopeConfig(**{**values, **lists, "run": RunConfig.from_dict(values["run"])}))


def _do(config: MicroscopeConfig, job: tuple[str, int, float, str]) -> list[dict[str, Any]]:
    """One job in a worker."""
    kind, stage, noise, name = job
    setting = _laboratory(json.dumps(config.as_dict())).settings[stage]
    with _seeded(config.seed, *job):
        if kind == "credit":
            return _credit_rows(config, setting, stage)
        return [_gradient_row(config, setting, stage, noise, name)]


def _shared(spec: str) -> bool:
    return bool(getattr(build("credit", spec), "shared_noise", False))


def _credit_rows(config: MicroscopeConfig, setting: Setting, stage: int) -> list[dict[str, Any]]:
    """Agreement of every rule with A*, at every noise level in the first stage."""
    seeds = config.seeds()
    looks = [Look(setting, config.members, seed) for seed in seeds["looks"]]
    truths: dict[bool, TrueAdvantages] = {}
    for shared in sorted({_shared(spec) for spec in config.rules.values()}):
        with_seeds = zip(looks, seeds["continuations"], strict=True)
        found = [true_advantages(setting, look.trajectories(shared), config.continuations, seed) for look, seed in with_seeds]
        truths[shared] = pooled(found)
    rows = []
    for noise in config.noises_at(stage):
        for name, spec in config.rules.items():
            reward = NoisyReward(setting.reward, noise) if noise > 0 else None
            shared = _shared(spec)
            with _seeded("credit", config.seed, stage, noise, name):
                rule = build("credit", spec)
                credits = [look.credit(rule, shared, reward) for look in looks]
            report = compare_credit(torch.cat([credit.advantages for credit in credits]), truths[shared], seed=config.seed)
            rows.append(
                {
                    "kind": "credit", "iteration": stage, "noise": noise, "rule": name, "spec": spec, "shared_noise": shared,
                    "nfe_per_trajectory": credits[0].nfe_per_trajectory, **asdict(report.overall),
                    "steps": list(report.steps), "per_step": [asdict(step) for step in report.per_step],
                }
            )  # fmt: skip
    return rows


def _gradient_row(config: MicroscopeConfig, setting: Setting, stage: int, noise: float, name: str) -> dict[str, Any]:
    """Cosine, bias and signal-to-noise of one rule's policy gradient.

    Signal-to-noise at equal NFE is that of as many batches as `EQUAL_NFE` evaluations pay for: those of sampling and probes
    ("nfe_per_batch") and those of the update ("train_nfe_per_batch"), as the trainer counts them.
    """
    spec, usage, shared = config.rules[name], Usage(), _shared(config.rules[name])
    truths = _laboratory(json.dumps(config.as_dict())).truth(stage)
    reward = NoisyReward(setting.reward, noise) if noise > 0 else None
    members, seed = config.gradient_members, config.seeds()["gradients"]
    with _seeded("gradient", config.seed, stage, noise, name):
        rule = build("credit", spec)
        found = policy_gradients(setting, rule, config.batches, members, shared, seed, usage=usage, reward=reward)
    result = alignment(found, truths)
    nfe, train_nfe = usage.nfe / config.batches, update_evaluations(setting, members)
    heard = result.signal_to_noise * math.sqrt(config.batches) > HEARD
    return {
        "kind": "gradient", "iteration": stage, "noise": noise, "rule": name, "spec": spec, "nfe_per_batch": nfe,
        "train_nfe_per_batch": train_nfe, "heard": heard, **asdict(result),
        "signal_to_noise_at_equal_nfe": result.signal_to_noise * math.sqrt(EQUAL_NFE / (nfe + train_nfe)),
    }  # fmt: skip
