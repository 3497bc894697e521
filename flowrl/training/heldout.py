"""Held-out rewards and diversity, which no training reward optimises and which therefore reveal
reward hacking.

If a measurement fails (missing weights, an unavailable server), a warning is logged and the metric
is `None`; the run continues.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import RewardError, require
from flowrl.core.protocols import Features, RewardModel, World
from flowrl.core.types import Prompt
from flowrl.distributed import Distributed
from flowrl.parts.registry import KINDS, build
from flowrl.rewards import FunctionReward, NoisyReward, require_single
from flowrl.rewards.diversity import group_features, pairwise_diversity
from flowrl.rollout import ImageBatch, score
from flowrl.rollout.values import Inspect
from flowrl.training.config import RunConfig

_LOG = logging.getLogger(__name__)
DIVERSITY_SEED = 20241
COMBINATIONS = ("weighted-sum", "clipped", "frame-mean", "group-sum", "win-rate")
"""Built-in rewards whose input is that of their components; all other built-in rewards read images.
"""

SampleRows = Callable[[Sequence[Prompt], int, range, int], Iterator[ImageBatch]]
"""From all prompts, a noise seed and indices of some of them: the samples of these indices, batch
by batch. Those below the last argument are sampled, because all processes make equally many network
calls, but not returned.
"""


@dataclass(frozen=True)
class HeldoutMetrics:
    """Held-out rewards, and the diversity of samples.

    `noise`, `bias` and `seed` are the errors of the training reward (`rewards.NoisyReward`), which
    other scores do not include.

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

    def columns(self) -> "HeldoutColumns":
        """Empty columns for one evaluation."""
        return HeldoutColumns(self)

    def measure(
        self,
        columns: "HeldoutColumns",
        heldout: Sequence[Prompt],
        sample: SampleRows,
        distributed: Distributed,
    ) -> dict[str, Any]:
        """The entries of a metrics line. The processes divide the work; all get the full result.

        `columns` are of this process's evaluation samples. "proxy": the mean training reward with
        its errors. "heldout": each held-out reward's mean over valid samples. "diversity": the mean
        over prompts of `rewards.diversity.pairwise_diversity` of further samples, which `sample`
        draws for the prompts `heldout`.
        """
        with distributed.shared_errors():
            diversity = self._diversity(heldout, sample, distributed)
        rewards = {name: column.values for name, column in columns.rewards.items()}
        parts = distributed.gather((columns.proxy.values, rewards, diversity))
        found: dict[str, Any] = {}
        if self.rewards:
            found["proxy"] = float(
                torch.cat([proxy for proxy, _, _ in parts if proxy is not None]).nanmean()
            )
            found["heldout"] = {
                name: _mean_or_none(
                    f"held-out reward {name}", [scores[name] for _, scores, _ in parts]
                )
                for name in self.rewards
            }
        if self.features is not None:
            found["diversity"] = _mean_or_none(
                "diversity", [diversity for _, _, diversity in parts]
            )
        return found

    def _diversity(
        self, heldout: Sequence[Prompt], sample: SampleRows, distributed: Distributed
    ) -> Tensor | None:
        """Diversity of this process's prompts [prompt]; None if the features failed."""
        if self.features is None:
            return None
        features, chosen, column = self.features, heldout[: self.prompts], _Column("diversity")
        share = distributed.assign(len(chosen))
        repeated = [prompt for prompt in chosen for _ in range(self.samples)]
        rows = range(share.first * self.samples, (share.first + share.count) * self.samples)

        for batch in sample(repeated, DIVERSITY_SEED, rows, share.own.start * self.samples):
            if batch.prompts:
                column.add(
                    lambda b=batch: group_features(
                        features, b.images, b.latents, (len(b.prompts), 1)
                    )
                )
            del batch
        found = column.values
        return (
            found
            if found is None or not share.own
            else pairwise_diversity(found.view(len(share.own), self.samples, -1))
        )


@dataclass
class _Column:
    """A measurement of samples, batch by batch, on the CPU. After a failure, logged as a warning,
    its values are None.
    """

    name: str
    parts: list[Tensor] | None = field(default_factory=list)

    def add(self, measure: Callable[[], Tensor]) -> None:
        """Append the values of a batch."""
        if self.parts is not None:
            try:
                self.parts.append(measure().cpu())
            except Exception as error:
                _warn(self.name, error)
                self.parts = None

    @property
    def values(self) -> Tensor | None:
        """All values [sample, ...]."""
        return None if self.parts is None else torch.cat([torch.empty(0), *self.parts])


class HeldoutColumns:
    """The proxy and every held-out reward of this process's samples in one evaluation."""

    def __init__(self, metrics: HeldoutMetrics) -> None:
        self.metrics = metrics
        self.proxy = _Column("proxy")
        self.rewards = {name: _Column(f"held-out reward {name}") for name in metrics.rewards}

    def add(self, batch: ImageBatch, training_scores: Tensor) -> None:
        """Score a batch with the error-free `training_scores` [sample]. A held-out reward that has
        failed is not called again.
        """
        m = self.metrics
        if not m.rewards:
            return
        known = FunctionReward(
            lambda images, _: training_scores.to(images.device), marks_invalid=True
        )
        proxy = score(
            NoisyReward(known, m.noise, m.bias, m.seed), batch.images, batch.prompts, invalid=True
        )
        self.proxy.add(lambda: proxy)
        for name, model in m.rewards.items():
            column = self.rewards[name]
            column.add(lambda model=model: score(model, batch.images, batch.prompts, invalid=True))
            if column.parts and (inspect := m.trials.pop(name, None)):
                inspect(batch.images, batch.prompts, column.parts[-1])


def make_heldout_metrics(config: RunConfig, world: World) -> HeldoutMetrics | None:
    """The held-out metrics of a run; loads no weights.

    Args:
        config: the run.
        world: its world.

    Returns:
        The metrics; None if the run has none.

    Raises:
        ConfigError: a reward or features do not exist or do not fit the world.
    """
    config = config.allowed()
    evaluation, environment = config.evaluation, config.environment
    if not evaluation.heldout_rewards and not evaluation.diversity:
        return None
    features = (
        build("features", evaluation.diversity, device=config.policy.device)
        if evaluation.diversity
        else None
    )
    return HeldoutMetrics(
        {spec: _heldout_reward(spec, config, world) for spec in evaluation.heldout_rewards},
        features,
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
    reads_images = name in KINDS["reward"].built_in and name not in COMBINATIONS
    available = ", ".join([*world.forms, *qualities])
    allowed = (
        f"{available} or path/to/file.py:Class; {name} scores images, and the {world.name} world"
        " has points"
    )
    points = getattr(world, "points", False)
    require(not points or not reads_images, "heldout_rewards", spec, allowed)
    return require_single(
        build("reward", spec, device=config.policy.device), "heldout_rewards", spec
    )


def _mean_or_none(name: str, parts: Sequence[Tensor | None]) -> float | None:
    """The mean over the valid values of all processes; None if a process failed, or with a warning
    if no value is valid.
    """
    values = [part for part in parts if part is not None]
    if len(values) < len(parts):
        return None
    found = torch.cat(values)
    if bool(found.isnan().all()):
        _warn(name, RewardError(f"all {len(found)} samples were marked invalid"))
        return None
    return float(found.nanmean())


def _warn(name: str, error: Exception) -> None:
    _LOG.warning(
        "%s could not be measured and is left out: %s: %s", name, type(error).__name__, error
    )
