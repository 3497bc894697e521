"""The microscope: each rule's credit and gradient against the truth, by stage of training and reward noise.

All rules are applied to the same policies: the untrained one, and those after some iterations with Flow-GRPO's credit.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import ConfigError, CreditError, require
from flowrl.methods import try_credit
from flowrl.probes import Continuation
from flowrl.protocols import RandomSampler
from flowrl.registry import build
from flowrl.rewards import NoisyReward
from flowrl.rollout import Usage
from flowrl.training.build import make_trainer, make_world, trial_schedule
from flowrl.training.config import RunConfig, preset
from flowrl.workers import Worker, run_jobs, worker_count
from flowrl_bench.gradients import Setting, alignment, pathwise_gradients, policy_gradients, update_evaluations
from flowrl_bench.measurements import reproducible
from flowrl_bench.true_advantage import Look, TrueAdvantages, compare_credit, pooled, true_advantages

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
"""Rules by their names in figures. The first and the last are controls: the best possible credit, and random credit."""

DETECTED = 2.0
"""A mean gradient shorter than this many of its standard errors has no reliable direction."""
EQUAL_NFE = 10_000
"""Network evaluations per rule for "signal-to-noise at equal NFE": sampling, probes and the update."""
Job = tuple[str, int, float, str]
"""(kind, iterations, noise, rule)."""


def _mixture_run() -> RunConfig:
    return preset("default").apply(world="mixture", window="all-but-last")


@dataclass(frozen=True)
class MicroscopeConfig:
    """The settings of a session. `iterations`: stages of training; `noises`: stds of the noise on the rewards that rules see,
    of which those other than 0 are tried at the stage `noise_stage` only.

    Credit is compared on `groups_per_prompt` x all training prompts x `group_size` trajectories, with `continuations` per node
    for V. Gradients take `batches` of all prompts x `gradient_group_size` and are left out for rules with continuations (a batch
    costs as much as a hundred of the others) and for a `reward_form` other than soft (a reward in steps has no gradient).

    Every rule is tried on a random table here; `ConfigError` or `CreditError` says what is wrong with the settings or a rule.
    """

    run: RunConfig = field(default_factory=_mixture_run)
    rules: Mapping[str, str] = field(default_factory=lambda: dict(RULES))
    iterations: tuple[int, ...] = (0, 10, 40)
    noises: tuple[float, ...] = (0.0, 0.1, 0.3)
    noise_stage: int = 10
    groups_per_prompt: int = 1
    group_size: int = 12
    continuations: int = 96
    batches: int = 20
    gradient_group_size: int = 8
    truth_batches: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"groups_per_prompt": 1, "batches": 3}
        for name in ("groups_per_prompt", "group_size", "batches", "truth_batches", "gradient_group_size", "continuations"):
            least_value = least.get(name, 2)
            require(getattr(self, name) >= least_value, name, getattr(self, name), f"{least_value} or more")
        once = len(set(self.iterations)) == len(self.iterations) >= 1
        require(once and min(self.iterations) >= 0, "iterations", self.iterations, "one or more, 0 or more, each once")
        good = all(math.isfinite(noise) and noise >= 0 for noise in self.noises) and len(set(self.noises)) == len(self.noises)
        require(good, "noises", self.noises, "standard deviations: finite, 0 or more, each once")
        require(len(self.noises) >= 1 and self.noises[0] == 0, "noises", self.noises, "0 first: the rule without noise")
        stages = f"one of iterations = {self.iterations}"
        require(self.noise_stage in self.iterations, "noise_stage", self.noise_stage, stages)
        require(len(self.rules) >= 1, "rules", dict(self.rules), "one or more rules")
        world = self.run.environment.world
        require(world == "mixture", "microscope: world", world, "mixture, whose reward has a gradient")
        schedule = trial_schedule(self.run)
        for name, spec in self.rules.items():
            for members in {self.group_size, self.gradient_group_size}:
                try:
                    try_credit(build("credit", spec), schedule, members)
                except CreditError as error:
                    raise CreditError(f"rule {name!r}: {error}") from error

    def noises_at(self, stage: int) -> tuple[float, ...]:
        """The noise levels that are tried at a stage."""
        return self.noises if stage == self.noise_stage else self.noises[:1]

    def seeds(self) -> dict[str, Any]:
        """The seeds of "training", of the "groups" and the "continuations" (one each per group of a prompt), and of the
        gradients: "truth" and "gradients"."""
        groups = [self.seed + 1000 * number for number in range(self.groups_per_prompt)]
        return {
            "training": self.seed, "groups": groups, "continuations": [seed + 7 for seed in groups],
            "truth": self.seed + 1, "gradients": self.seed + 1000,
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "run": self.run.as_dict(), "rules": dict(self.rules)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "MicroscopeConfig":
        """The inverse of `as_dict`, also after JSON."""
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return MicroscopeConfig(**{**plain, "run": RunConfig.from_dict(values["run"], trust=True)})


def settings_by_stage(config: MicroscopeConfig) -> dict[int, Setting]:
    """By stage: the policy after so many iterations of uniform credit (current weights, not averaged), and its setting."""
    run = config.run.replace(method="flow-grpo", credit="", iterations=max(1, *config.iterations), seed=config.seed)
    trainer, world = make_trainer(run), make_world(run)
    sampler = trainer.method.sampler
    if isinstance(sampler, RandomSampler):
        raise ConfigError(f"microscope: window = {run.algorithm.window!r} is not allowed: one that is the same every iteration")
    reward, prompts = world.reward(run.environment.reward_form), world.prompts(run.environment.task, "train")
    found = {}
    for stage in sorted(set(config.iterations)):
        while trainer.done < stage:
            trainer.iteration()
        kept = copy.deepcopy(trainer.policy)
        found[stage] = Setting(kept, sampler, kept.schedule(run.rollout.num_steps), reward, prompts)
    return found


def microscope_jobs(config: MicroscopeConfig) -> Iterator[Job]:
    """All jobs in the order in which they should start: the long ones first."""
    for stage in config.iterations:
        yield "credit", stage, 0.0, ""
    for stage in config.iterations if config.run.environment.reward_form == "soft" else ():
        for noise in config.noises_at(stage):
            for name, spec in config.rules.items():
                if not isinstance(build("credit", spec).probe, Continuation):
                    yield "gradient", stage, noise, name


def run_microscope(
    config: MicroscopeConfig, workers: int = 0, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[dict[str, Any]]:
    """Rows of numbers: kind "credit" (agreement with A*) and kind "gradient", one per rule, stage of training and noise.

    `workers` processes (0: one per core; 1: this process); the numbers do not depend on their number, since every job has one
    thread and its own state of the global generators. `progress(done, total)` counts jobs. Raises `ConfigError` for negative
    `workers`, and `CreditError` for a rule that fails.
    """
    jobs, rows = list(microscope_jobs(config)), dict[Job, list[dict[str, Any]]]()

    def finished(job: Job, found: list[dict[str, Any]]) -> None:
        rows[job] = found
        progress(len(rows), len(jobs))

    if worker_count(workers, len(jobs)) == 1:
        for job in jobs:
            finished(job, _do(None, config, job))
    elif not run_jobs(
        _do, {job: (config, job) for job in jobs}, workers, finished=finished, describe=lambda job: f"the microscope's job {job}"
    ):
        raise KeyboardInterrupt
    return [row for job in jobs for row in rows[job]]


class _Session:
    """What the jobs of one process share: the trained policies, and the true gradient at each stage."""

    def __init__(self, config: MicroscopeConfig) -> None:
        self.config, self.settings = config, settings_by_stage(config)
        self.truths: dict[int, Tensor] = {}

    def truth(self, stage: int) -> Tensor:
        """Pathwise gradients [batch, parameter], made once."""
        if stage not in self.truths:
            count, seed = self.config.truth_batches, self.config.seeds()["truth"]
            self.truths[stage] = pathwise_gradients(self.settings[stage], count, 100, seed, decisions_only=True)
        return self.truths[stage]


@lru_cache(maxsize=1)
def _session(config: str) -> _Session:
    values = json.loads(config)
    with reproducible("training", values["seed"]):
        return _Session(MicroscopeConfig.from_dict(values))


def _do(worker: Worker | None, config: MicroscopeConfig, job: Job) -> list[dict[str, Any]]:
    """One job."""
    kind, stage, noise, name = job
    session = _session(json.dumps(config.as_dict()))
    with reproducible(config.seed, *job):
        if kind == "credit":
            return _credit_rows(config, session.settings[stage], stage)
        return [_gradient_row(session, stage, noise, name)]


def _shared_noise(spec: str) -> bool:
    return bool(getattr(build("credit", spec), "shared_noise", False))


def _seen_reward(setting: Setting, noise: float) -> NoisyReward | None:
    """The reward that rules see, if it is not the setting's own."""
    return NoisyReward(setting.reward, noise) if noise > 0 else None


def _credit_rows(config: MicroscopeConfig, setting: Setting, stage: int) -> list[dict[str, Any]]:
    """Agreement of every rule with A*, at every noise level of the stage."""
    seeds = config.seeds()
    looks = [Look(setting, config.group_size, seed) for seed in seeds["groups"]]
    truths: dict[bool, TrueAdvantages] = {}
    for shared in sorted({_shared_noise(spec) for spec in config.rules.values()}):
        with_seeds = zip(looks, seeds["continuations"], strict=True)
        found = [true_advantages(setting, look.trajectories(shared), config.continuations, seed) for look, seed in with_seeds]
        truths[shared] = pooled(found)
    rows = []
    for noise in config.noises_at(stage):
        for name, spec in config.rules.items():
            shared = _shared_noise(spec)
            with reproducible("credit", config.seed, stage, noise, name):
                rule = build("credit", spec)
                credits = [look.credit(rule, shared, _seen_reward(setting, noise)) for look in looks]
            report = compare_credit(torch.cat([credit.advantages for credit in credits]), truths[shared], seed=config.seed)
            rows.append(
                {
                    "kind": "credit", "iteration": stage, "noise": noise, "rule": name, "spec": spec, "shared_noise": shared,
                    "nfe_per_trajectory": credits[0].nfe_per_trajectory, **asdict(report.overall),
                    "steps": list(report.steps), "per_step": [asdict(step) for step in report.per_step],
                }
            )  # fmt: skip
    return rows


def _gradient_row(session: _Session, stage: int, noise: float, name: str) -> dict[str, Any]:
    """Cosine, bias and signal-to-noise of one rule's policy gradient.

    Signal-to-noise at equal NFE is that of as many batches as `EQUAL_NFE` evaluations allow: those of sampling and probes
    ("nfe_per_batch") and those of the update ("train_nfe_per_batch"), as the trainer counts them.
    """
    config, setting, usage = session.config, session.settings[stage], Usage()
    spec, members, seed = config.rules[name], config.gradient_group_size, config.seeds()["gradients"]
    truths, shared, reward = session.truth(stage), _shared_noise(spec), _seen_reward(setting, noise)
    with reproducible("gradient", config.seed, stage, noise, name):
        rule = build("credit", spec)
        found = policy_gradients(setting, rule, config.batches, members, shared, seed, usage=usage, reward=reward)
    result = alignment(found, truths)
    nfe, train_nfe = usage.nfe / config.batches, update_evaluations(setting, members)
    detected = result.signal_to_noise * math.sqrt(config.batches) > DETECTED
    return {
        "kind": "gradient", "iteration": stage, "noise": noise, "rule": name, "spec": spec, "nfe_per_batch": nfe,
        "train_nfe_per_batch": train_nfe, "detected": detected, **asdict(result),
        "signal_to_noise_at_equal_nfe": result.signal_to_noise * math.sqrt(EQUAL_NFE / (nfe + train_nfe)),
    }  # fmt: skip
