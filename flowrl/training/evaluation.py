"""Evaluation: ODE samples of the current weights for fixed held-out prompts and noise.

They are scored by the task's rewards and by metrics that no training reward optimises, which
therefore reveal reward hacking. Also the trajectory record of a run.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from flowrl.core.errors import RewardError, require
from flowrl.core.protocols import Features, FlowPolicy, RewardModel, World
from flowrl.core.types import Prompt
from flowrl.distributed import Assignment, Distributed
from flowrl.io import write_bytes, write_json
from flowrl.parts.registry import available, build
from flowrl.probes import Completion, Tweedie
from flowrl.rewards import FunctionReward, NoisyReward, require_single, stills
from flowrl.rewards.diversity import group_features, pairwise_diversity
from flowrl.rollout import (
    EVALUATION_SEED,
    Groups,
    ImageBatch,
    Usage,
    initial_noise,
    rollout,
    sample_images,
    score,
    score_rollout,
)
from flowrl.rollout.values import Inspect
from flowrl.training.config import RunConfig
from flowrl.training.trainer import Trainer

_LOG = logging.getLogger(__name__)
DIVERSITY_SEED = 20241
CUSTOM = "custom reward"
"""The key of a training reward that is not one of the world's forms."""
COMBINATIONS = ("weighted-sum", "clipped", "frame-mean", "group-sum", "win-rate")
"""Rewards whose input is that of their components; flowrl's other rewards read images."""


@dataclass(frozen=True)
class HeldoutMetrics:
    """Held-out rewards, and the diversity of samples.

    If one fails (missing weights, an unavailable server), a warning is logged and the metric is
    `None`; the run continues. `noise`, `bias` and `seed` are the errors of the training reward
    (`rewards.NoisyReward`), which other scores do not include.

    Args:
        rewards: held-out rewards by name.
        features: features in which diversity is measured; None: not measured.
        noise: standard deviation of the training reward's noise.
        bias: weight of the training reward's bias.
        seed: seed of the training reward's noise.
        prompts: number of held-out prompts whose diversity is measured.
        samples: samples of each of these prompts.
        trials: called once, with the first images, prompts and scores of a held-out reward.
    """

    rewards: Mapping[str, RewardModel]
    features: Features | None = None
    noise: float = 0.0
    bias: float = 0.0
    seed: int = 0
    prompts: int = 8
    samples: int = 8
    trials: dict[str, Inspect] = field(default_factory=dict)

    def with_errors(self, batch: ImageBatch, scores: Tensor) -> Tensor:
        """The training reward's `scores` [sample] of a batch, with its noise and bias."""
        known = FunctionReward(lambda images, _: scores.to(images.device), marks_invalid=True)
        noisy = NoisyReward(known, self.noise, self.bias, self.seed)
        return score(noisy, batch.images, batch.prompts).total


def make_heldout_metrics(config: RunConfig, world: World) -> HeldoutMetrics | None:
    """The held-out metrics of a run in its `world`; None if it has none. Loads no weights.

    Raises `ConfigError` if a reward or features do not exist or do not fit the world.
    """
    config = config.allowed()
    evaluation, environment, device = config.evaluation, config.environment, config.policy.device
    specs, diversity = evaluation.heldout_rewards, evaluation.diversity
    if not specs and not diversity:
        return None
    return HeldoutMetrics(
        {spec: _heldout_reward(spec, config, world) for spec in specs},
        build("features", diversity, device=device) if diversity else None,
        environment.reward_noise,
        environment.reward_bias,
        config.seed,
        evaluation.diversity_prompts,
        evaluation.diversity_samples,
    )


def _heldout_reward(spec: str, config: RunConfig, world: World) -> RewardModel:
    qualities = getattr(world, "qualities", {})
    if spec in qualities:
        return qualities[spec]()
    if spec in world.forms and not config.policy.model:
        return world.reward(spec)
    name = spec.partition("(")[0].strip()
    ours = available("reward").get(name) in ("flowrl", "flowrl-lab")
    fits = not (getattr(world, "points", False) and ours and name not in COMBINATIONS)
    own = ", ".join([*world.forms, *qualities])
    require(fits, "heldout_rewards", spec, f"a reward of points: {own} or path/to/file.py:Class")
    reward = build("reward", spec, device=config.policy.device)
    return require_single(reward, "heldout_rewards", spec)


class _Scores:
    """Measurements of this process's samples by name, batch by batch, in main memory.

    An optional one that raises an exception is reported once and not measured again.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.parts: dict[str, list[Tensor] | None] = {name: [torch.empty(0)] for name in names}

    def add(self, name: str, measure: Callable[[], Tensor], optional: bool = False) -> None:
        parts = self.parts[name]
        if parts is not None:
            try:
                parts.append(measure().cpu())
            except Exception as error:
                if not optional:
                    raise
                _warn(name, error)
                self.parts[name] = None

    def own(self, name: str) -> Tensor | None:
        """This process's values [sample, ...]; None after a failure."""
        parts = self.parts[name]
        return None if parts is None else torch.cat(parts)


def _warn(name: str, error: Exception) -> None:
    kind = type(error).__name__
    _LOG.warning("%s could not be measured and is left out: %s: %s", name, kind, error)


def _diversity(
    metrics: HeldoutMetrics,
    heldout: Sequence[Prompt],
    sample: Callable[..., Iterator[ImageBatch]],
    scores: _Scores,
    distributed: Distributed,
) -> Tensor | None:
    """Diversity of this process's prompts [prompt]; None if the features failed."""
    chosen, each = heldout[: metrics.prompts], metrics.samples
    if metrics.features is None:
        return None
    share = distributed.assign(len(chosen))
    repeated = [prompt for prompt in chosen for _ in range(each)]
    for batch in sample(repeated, DIVERSITY_SEED, share, each):
        if batch.prompts:
            features = partial(group_features, metrics.features, batch.images, batch.latents)
            scores.add("diversity", partial(features, (len(batch.prompts), 1)), optional=True)
            del features
        del batch  # before the next one is sampled
    features = scores.own("diversity")
    if features is None or not share.own:
        return features
    return pairwise_diversity(features.view(len(share.own), each, -1))


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Args:
        scores: mean scores by form.
        seconds: duration.
        images: images of the first samples; of videos, `stills`.
        image_scores: their scores, by the custom reward if there is one.
        prompts: their prompts.
        custom_reward: mean of a training reward that is not the task's; None without one.
        heldout: entries of a metrics line: "proxy", the mean training reward with its errors;
            "heldout", each held-out reward's mean over valid samples; "diversity", the mean over
            prompts of `rewards.diversity.pairwise_diversity` of further samples.
    """

    scores: dict[str, float]
    seconds: float
    images: Tensor
    image_scores: Tensor
    prompts: list[Prompt]
    custom_reward: float | None = None
    heldout: dict[str, Any] = field(default_factory=dict)

    @property
    def incomplete(self) -> bool:
        """Whether a held-out metric could not be measured."""
        return None in (
            *self.heldout.get("heldout", {}).values(),
            self.heldout.get("diversity", 0.0),
        )

    def row(self, form: str) -> dict[str, Any]:
        """The entries of a metrics line; "reward" is the trained score: that of the form, or the
        custom reward.
        """
        reward = self.scores[form] if self.custom_reward is None else self.custom_reward
        return {"reward": reward, **self.scores, "seconds": self.seconds, **self.heldout}


def evaluate(
    policy: FlowPolicy,
    world: World,
    task: str,
    form: str,
    count: int,
    steps: int,
    max_batch: int = 256,
    keep: int = 8,
    reward: RewardModel | None = None,
    solver: str = "euler",
    heldout_metrics: HeldoutMetrics | None = None,
    distributed: Distributed = Distributed(),
) -> Evaluation:
    """Sample images of the held-out prompts with the current weights and score them.

    At most `max_batch` samples are on the device at a time: each batch is encoded, sampled, decoded
    and scored before the next. The noise is the same in every evaluation. The processes divide the
    samples; all get the full result. Means are over the samples that the reward has not marked
    invalid.

    Args:
        policy: the policy.
        world: the world with prompts and rewards.
        task: name of the task.
        form: form of the score for `image_scores`.
        count: number of samples; prompts are repeated if there are fewer.
        steps: number of ODE steps.
        max_batch: largest number of samples per batch.
        keep: number of images in the result.
        reward: a further reward to measure; None for the task's forms only.
        solver: name of the solver (see `rollout.solve`).
        heldout_metrics: held-out rewards and diversity; None: not measured.
        distributed: the processes.

    Returns:
        Scores and the first images.

    Raises:
        RewardError: a reward has marked all samples invalid.
    """
    started = time.perf_counter()
    metrics = heldout_metrics or HeldoutMetrics({})
    heldout, share = world.prompts(task, "heldout"), distributed.assign(count)
    prompts = [heldout[i % len(heldout)] for i in range(count)]
    models = {name: world.reward(name) for name in world.forms}
    if reward is not None:
        models[CUSTOM] = reward
    training = form if reward is None else CUSTOM
    named = {f"held-out reward {name}": model for name, model in metrics.rewards.items()}
    scores, shown = _Scores([*models, "proxy", *named, "diversity"]), [torch.empty(0)]

    def sample(
        prompts: Sequence[Prompt], seed: int, share: Assignment, each: int = 1
    ) -> Iterator[ImageBatch]:
        """This process's `share` of the samples of `prompts`, divided in units of `each`. All
        processes make equally many network calls; samples that another one keeps are left out.
        """
        rows = slice(share.first * each, (share.first + share.count) * each)
        noise = initial_noise(policy, len(prompts), seed)[rows]
        batches = sample_images(policy, prompts[rows], noise, steps, solver, max_batch)
        # a generator would keep a batch while the next one is sampled
        starts = itertools.count(rows.start, max_batch)
        own = share.own.start * each
        return map(lambda batch, start: batch[max(0, own - start) :], batches, starts)

    def measure(batch: ImageBatch) -> None:
        """Score a batch, and keep its images that are among the first `keep`; nothing of it stays
        on the device.
        """

        def scored(model: RewardModel) -> Tensor:
            return score(model, batch.images, batch.prompts).total

        for name, model in models.items():
            scores.add(name, partial(scored, model))
        if named:
            trained = scores.parts[training] or shown
            scores.add("proxy", partial(metrics.with_errors, batch, trained[-1]))
        for spec, (name, model) in zip(metrics.rewards, named.items(), strict=True):
            scores.add(name, partial(scored, model), optional=True)
            if (parts := scores.parts[name]) and (inspect := metrics.trials.pop(spec, None)):
                inspect(batch.images, batch.prompts, parts[-1])
        missing = keep - share.own.start - sum(map(len, shown))
        if missing > 0:
            shown.append(stills(batch.images[:missing]).cpu().clone())

    with distributed.shared_errors():
        for batch in sample(prompts, EVALUATION_SEED, share):
            if batch.prompts:
                measure(batch)
            del batch  # before the next one is sampled
    seconds = time.perf_counter() - started
    with distributed.shared_errors():
        diversity = _diversity(metrics, heldout, sample, scores, distributed)
    mine = {name: scores.own(name) for name in scores.parts} | {"diversity": diversity}
    gathered = distributed.gather((mine, torch.cat(shown)))
    images = torch.cat([part for _, part in gathered if len(part)])
    tables: dict[str, Any] = {}
    for name in mine:
        parts: list[Any] = [part[name] for part, _ in gathered]
        tables[name] = None if any(part is None for part in parts) else torch.cat(parts)
    means: dict[str, Any] = {name: _mean(name, tables[name]) for name in models}
    entries: dict[str, Any] = {}
    if named:
        entries["proxy"] = _mean("proxy", tables["proxy"])
        optional = [_mean(name, tables[name], optional=True) for name in named]
        entries["heldout"] = dict(zip(metrics.rewards, optional, strict=True))
    if metrics.features is not None:
        entries["diversity"] = _mean("diversity", tables["diversity"], optional=True)
    custom = means.pop(CUSTOM, None)
    shown_scores = tables[training][:keep]
    return Evaluation(means, seconds, images, shown_scores, prompts[:keep], custom, entries)


def _mean(name: str, values: Tensor | None, optional: bool = False) -> float | None:
    """The mean over valid samples; None if an optional value could not be measured."""
    if values is None:
        return None
    if not bool(values.isnan().all()):
        return float(values.nanmean())
    error = RewardError(f"evaluation: {name} marked all {len(values)} samples invalid")
    if not optional:
        raise error
    return _warn(name, error)


def write_trajectory(folder: Path, trainer: Trainer, world: World, members: int = 12) -> None:
    """Write trajectory.json: values along the trajectories of one group, by ODE completion from the
    start of every decision.

    The member with the largest changes of reward is "chosen". The file also contains its rewards by
    one-step (Tweedie) estimates, and trajectory.safetensors contains the images of its completions.
    """
    policy, prompt = trainer.policy, world.prompts(trainer.config.environment.task, "heldout")[0]
    generator = torch.Generator(policy.device).manual_seed(7)
    groups = Groups(1, members)
    noise = groups.noise(policy.latent_shape, generator)
    start = generator.get_state()
    sampler, batch = trainer.draw_sampler(), trainer.config.batches.max_batch
    tables, latents = [], []
    for probe in (Completion(), Tweedie()):
        generator.set_state(start)  # the same trajectories
        condition, usage = policy.encode([prompt]), Usage()
        schedule = trainer.schedule
        result = rollout(
            policy, sampler, schedule, condition, noise, generator, groups, probe, usage, batch
        )
        table = score_rollout(policy, trainer.reward, result, [prompt]).total[0]
        images = result.trajectories.images_latent
        # without decisions the ODE leads to the image
        tables.append(torch.where(table.isnan(), table[:, -1:], table))
        starts = [result.estimates[node] for node in result.nodes] or [images]
        latents = latents or [*starts, images]
    chosen = int(tables[0].diff(dim=1).abs().sum(1).nan_to_num(-1.0).argmax())
    record = {
        "prompt": prompt.text,
        "chosen": chosen,
        "rewards": tables[0][chosen].tolist(),
        "members": tables[0].tolist(),
        "tweedie": tables[1][chosen].tolist(),
    }
    write_json(folder / "trajectory.json", record)
    images = torch.cat([stills(policy.decode(node[chosen : chosen + 1])) for node in latents])
    write_bytes(folder / "trajectory.safetensors", save({"images": images.cpu().contiguous()}))
