"""Evaluation: ODE samples of the current weights for fixed held-out prompts and noise.

They are scored by the task's rewards and by metrics that no training reward optimises, which
therefore reveal reward hacking. Also the trajectory record of a run.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from flowrl.core.errors import RewardError, require
from flowrl.core.processes import Assignment
from flowrl.core.prompt import source_weights
from flowrl.core.protocols import Features, FlowPolicy, RewardModel, World, extras
from flowrl.core.types import Prompt
from flowrl.probes import Completion
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
from flowrl.rollout.values import decoded
from flowrl.run.config import RunConfig
from flowrl.run.distributed import Distributed
from flowrl.run.io import write_bytes, write_json
from flowrl.run.parts.registry import build
from flowrl.trainer import Trainer

_LOG = logging.getLogger(__name__)
DIVERSITY_SEED = 20241
CUSTOM, ERRORS, HELDOUT, DIVERSITY = "custom reward", "errors", "held-out reward ", "diversity"
"""Names of measurements: a training reward that is not one of the world's forms, the errors of the
training reward, the prefix of held-out rewards, and features.
"""


Measure = Callable[[ImageBatch], Tensor]
Inspect = Callable[[Tensor, Sequence[Prompt], Tensor], None]
"""A function of images, their prompts and their scores."""


def _none(images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    return torch.zeros(len(images), device=images.device)


@dataclass(frozen=True)
class HeldoutMetrics:
    """Held-out rewards, and the diversity of samples.

    If one fails (missing weights, an unavailable server), a warning is logged and the metric is
    `None`; the run continues.

    Args:
        rewards: held-out rewards by name.
        features: features in which diversity is measured; None: not measured.
        errors: noise and bias of the training reward, which other scores do not include.
        prompts: number of held-out prompts whose diversity is measured.
        samples: samples of each of these prompts.
        own: by held-out reward, prompts of its own on which it is measured.
        trials: called once, with the first images, prompts and scores of a held-out reward.
    """

    rewards: Mapping[str, RewardModel] = field(default_factory=dict)
    features: Features | None = None
    errors: NoisyReward = NoisyReward(FunctionReward(_none))
    prompts: int = 8
    samples: int = 8
    own: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    trials: dict[str, Inspect] = field(default_factory=dict)

    def vectors(self, batch: ImageBatch) -> Tensor:
        """The features of a batch [sample, 1, feature]."""
        assert self.features is not None
        return group_features(self.features, batch.images, batch.latents, (len(batch.prompts), 1))


def make_heldout_metrics(config: RunConfig, world: World) -> HeldoutMetrics:
    """The held-out metrics of a run in its `world`. Loads no weights.

    Raises `ConfigError` if a reward or features do not exist or do not fit the world.
    """
    evaluation, environment, device = config.evaluation, config.environment, config.policy.device
    errors = environment.reward_noise, environment.reward_bias, config.seed
    space = evaluation.diversity
    named = dict(zip(evaluation.heldout_rewards, evaluation.measured, strict=True))
    own = {text: place for text, (place, _) in named.items() if place}
    others, need = getattr(world, "others", {}), "REWARD: prompts of its own are for a model"
    require({*own.values()} <= {*others}, "heldout_rewards", [*own], need)
    return HeldoutMetrics(
        {text: _heldout_reward(spec, config, world) for text, (_, spec) in named.items()},
        build("features", space, device=device) if space else None,
        NoisyReward(FunctionReward(_none), *errors),
        evaluation.diversity_prompts,
        evaluation.diversity_samples,
        {text: others[place] for text, place in own.items()},
    )


def _heldout_reward(spec: str, config: RunConfig, world: World) -> RewardModel:
    qualities = getattr(world, "qualities", {})
    if spec in qualities:
        return qualities[spec]()
    if spec in world.forms and not config.policy.model:
        return world.reward(spec)
    device = config.environment.reward_device or config.policy.device
    reward = build("reward", spec, device=device)
    return require_single(reward, "heldout_rewards", spec)


def _measured(
    batches: Iterator[ImageBatch],
    measures: Mapping[str, Measure],
    optional: Collection[str],
    trials: Mapping[str, Inspect] = MappingProxyType({}),
) -> dict[str, Tensor | None]:
    """The measurements of this process's samples by name, in main memory. An `optional` one that
    raises an exception is reported once, left out and None.
    """
    values: dict[str, list[Tensor] | None] = {name: [torch.empty(0)] for name in measures}
    untried = dict(trials)
    for batch in batches:
        for name, measure in measures.items() if batch.prompts else ():
            parts = values[name]
            if parts is None:
                continue
            try:
                parts.append(measure(batch).cpu())
            except Exception as error:
                if name not in optional:
                    raise
                values[name] = _warn(name, error)
            else:
                if (inspect := untried.pop(name, None)) is not None:
                    inspect(batch.images, batch.prompts, parts[-1])
        del batch  # before the next one is sampled
    return {name: None if parts is None else torch.cat(parts) for name, parts in values.items()}


def _warn(name: str, error: Exception) -> None:
    kind = type(error).__name__
    _LOG.warning("%s could not be measured and is left out: %s: %s", name, kind, error)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Args:
        scores: mean scores by form. With prompts of several sources, the mean of a score is the
            mean of the sources' means, weighted by their shares.
        row: the entries of a metrics line: "reward", the trained score (that of the form, or of the
            custom reward); `scores`; "seconds"; with held-out rewards, or errors of the training
            reward, "proxy", its mean with its errors, and "spread", standard deviations over
            samples by name; "heldout", each held-out reward's mean over valid samples;
            "diversity", the mean over prompts of `rewards.diversity.pairwise_diversity` of further
            samples; "sources", with several, the trained score's mean of each.
        images: images of the first samples; of videos, `stills`.
        image_scores: their scores, by the custom reward if there is one.
        prompts: their prompts.
    """

    scores: dict[str, float]
    row: dict[str, Any]
    images: Tensor
    image_scores: Tensor
    prompts: list[Prompt]


@contextmanager
def as_evaluated(policy: FlowPolicy, config: RunConfig) -> Iterator[None]:
    """Within this context the samples of a model have the size, with its time grid, and the
    guidance of the run's evaluations. Raises `ConfigError` for a size that the model does not have.
    """
    if not config.policy.model:
        yield
        return
    chosen, model = config.as_evaluated().policy, extras(policy, "at_size", "guided")
    with model.at_size(*chosen.size), model.guided(chosen.guidance_scale):
        yield


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
    heldout_metrics: HeldoutMetrics = HeldoutMetrics(),
    distributed: Distributed = Distributed(),
    wrapped: Callable[[RewardModel], RewardModel] = lambda model: model,
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
        heldout_metrics: held-out rewards and diversity.
        distributed: the processes.
        wrapped: applied to the task's rewards and to `reward`.

    Returns:
        Scores and the first images.

    Raises:
        RewardError: a reward has marked all samples invalid.
    """
    started = time.perf_counter()
    heldout, share = world.prompts(task, "heldout"), distributed.assign(count)
    prompts = [heldout[i % len(heldout)] for i in range(count)]
    share_of = source_weights(heldout)
    metrics, training = heldout_metrics, form if reward is None else CUSTOM
    models = {name: world.reward(name) for name in world.forms}
    if reward is not None:
        models[CUSTOM] = reward
    models = {name: wrapped(model) for name, model in models.items()}
    has_proxy = bool(metrics.rewards) or (metrics.errors.std, metrics.errors.bias) != (0, 0)
    if has_proxy:
        models[ERRORS] = metrics.errors
    optional = {HELDOUT + spec: model for spec, model in metrics.rewards.items()}

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
        first = share.own.start * each
        return map(lambda batch, start: batch[max(0, first - start) :], batches, starts)

    def scored(model: RewardModel, batch: ImageBatch) -> Tensor:
        return score(model, batch.images, batch.prompts).total

    shown = [torch.empty(0)]

    def first_images(batch: ImageBatch) -> Tensor:
        """The batch's images that are among the first `keep` of all processes."""
        missing = keep - share.own.start - sum(map(len, shown))
        shown.append(stills(batch.images[: max(0, missing)]).cpu().clone())
        return shown[-1]

    measures: dict[str, Measure] = {
        name: partial(scored, model) for name, model in (models | optional).items()
    }
    apart = {HELDOUT + spec: prompts for spec, prompts in metrics.own.items()}
    common = {name: measure for name, measure in measures.items() if name not in apart}
    trials = {HELDOUT + spec: metrics.trials.pop(spec) for spec in list(metrics.trials)}
    with distributed.shared_errors():
        batches = sample(prompts, EVALUATION_SEED, share)
        values = _measured(batches, {**common, "images": first_images}, optional, trials)
        for name, others in apart.items():
            repeated = [others[i % len(others)] for i in range(count)]
            batches = sample(repeated, EVALUATION_SEED, share)
            tried = {name: trials[name]} if name in trials else {}
            values |= _measured(batches, {name: measures[name]}, (name,), tried)
    if metrics.features is not None:
        with distributed.shared_errors():
            chosen, each = heldout[: metrics.prompts], metrics.samples
            units = distributed.assign(len(chosen))
            repeated = [prompt for prompt in chosen for _ in range(each)]
            batches = sample(repeated, DIVERSITY_SEED, units, each)
            vectors = _measured(batches, {DIVERSITY: metrics.vectors}, (DIVERSITY,))[DIVERSITY]
            if vectors is not None and units.own:
                vectors = pairwise_diversity(vectors.view(len(units.own), each, -1))
            values[DIVERSITY] = vectors
    seconds = time.perf_counter() - started
    gathered = distributed.gather(values)

    def together(name: str) -> Tensor | None:
        """The measurements of all processes; None if one of them failed."""
        parts: list[Any] = [values[name] for values in gathered]
        return None if any(part is None for part in parts) else torch.cat(parts)

    def mean(name: str, errors: Any = 0.0) -> float | None:
        """The mean over valid samples; None if an optional metric could not be measured."""
        table = together(name)
        if table is None or not bool(table.isnan().all()):
            return None if table is None else average(name, table + errors)
        error = RewardError(f"evaluation: {name} marked all {len(table)} samples invalid")
        if name in models:
            raise error
        return _warn(name, error)

    def of_source(table: Tensor, source: str) -> float:
        """The mean over the valid samples of a source; NaN without any."""
        return float(table[[prompt.source == source for prompt in prompts]].nanmean())

    def average(name: str, table: Tensor) -> float:
        """The mean over valid samples; of several sources the weighted mean of their means."""
        if len(share_of) == 1 or name in (DIVERSITY, *apart):
            return float(table.nanmean())
        means = {source: of_source(table, source) for source in share_of}
        known = {source: value for source, value in means.items() if math.isfinite(value)}
        weights = sum(share_of[source] for source in known)
        return sum(share_of[source] * value for source, value in known.items()) / weights

    def spread(name: str, errors: Any = 0.0) -> float | None:
        """The standard deviation over valid samples; None as for `mean`."""
        table = together(name)
        values = torch.empty(0) if table is None else table + errors
        valid = values[values.isfinite()]
        return float(valid.std(unbiased=False)) if len(valid) else None

    scores: dict[str, Any] = {name: mean(name) for name in world.forms}
    row: dict[str, Any] = {"reward": mean(training), **scores, "seconds": seconds}
    if has_proxy:
        row["proxy"] = mean(training, together(ERRORS))
        row["spread"] = {"reward": spread(training), "proxy": spread(training, together(ERRORS))}
        row["spread"] |= {spec: spread(HELDOUT + spec) for spec in metrics.rewards}
    if metrics.rewards:
        row["heldout"] = {spec: mean(HELDOUT + spec) for spec in metrics.rewards}
    if metrics.features is not None:
        row[DIVERSITY] = mean(DIVERSITY)
    images, trained = together("images"), together(training)
    assert images is not None and trained is not None
    if len(share_of) > 1:
        means = {source: of_source(trained, source) for source in sorted(share_of)}
        row["sources"] = {source: value for source, value in means.items() if math.isfinite(value)}
    return Evaluation(scores, row, images, trained[:keep], prompts[:keep])


def write_trajectory(
    folder: Path, trainer: Trainer, world: World, task: str, members: int = 12
) -> None:
    """Write trajectory.json: values along the trajectories of one group, by ODE completion from the
    start of every decision.

    The member with the largest changes of reward is "chosen"; trajectory.safetensors contains the
    images of its completions.
    """
    policy, prompt = trainer.policy, world.prompts(task, "heldout")[0]
    generator, groups = torch.Generator(policy.device).manual_seed(7), Groups(1, members)
    result = rollout(
        policy,
        trainer.draw_sampler(),
        trainer.schedule,
        policy.encode([prompt]),
        groups.noise(policy.latent_shape, generator),
        generator,
        groups,
        Completion(),
        Usage(),
        trainer.collector.max_batch,
    )
    table = score_rollout(policy, trainer.reward, result, [prompt]).values[0]
    # without decisions the ODE leads to the image
    table = torch.where(table.isnan(), table[:, -1:], table)
    chosen = int(table.diff(dim=1).abs().sum(1).nan_to_num(-1.0).argmax())
    final = result.trajectories.images_latent
    latents = [result.estimates[node] for node in result.nodes] or [final]
    record = {
        "prompt": prompt.text,
        "chosen": chosen,
        "rewards": table[chosen].tolist(),
        "members": table.tolist(),
    }
    write_json(folder / "trajectory.json", record)
    row = slice(chosen, chosen + 1)
    images = torch.cat([stills(decoded(policy, node[row], [prompt])) for node in (*latents, final)])
    write_bytes(folder / "trajectory.safetensors", save({"images": images.cpu().contiguous()}))
