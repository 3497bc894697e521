"""Held-out rewards and diversity: measurements that no training reward optimises and that therefore reveal reward hacking.

A measurement that fails (missing weights, a server that is down) becomes a warning and `None` in the metrics; the run goes on.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.distributed import Distributed
from flowrl.errors import RewardError, require
from flowrl.protocols import Features, RewardModel
from flowrl.registry import KINDS, build
from flowrl.rewards import FunctionReward, NoisyReward
from flowrl.rewards.diversity import group_features, pairwise_diversity
from flowrl.rollout import ImageBatch, score
from flowrl.training.config import RunConfig
from flowrl.types import Prompt
from flowrl.worlds.base import World

_LOG = logging.getLogger(__name__)
DIVERSITY_SEED = 20241
COMBINATIONS = ("weighted-sum", "clipped")
"""Built-in rewards that accept whatever their components accept; all other built-in rewards read images."""

SampleRows = Callable[[Sequence[Prompt], int, range], ImageBatch]
"""From all prompts, a noise seed and the numbers of some of them: the samples of these numbers."""


@dataclass(frozen=True)
class HeldoutMetrics:
    """Held-out `rewards` by name, and the `features` in which diversity is measured (None: diversity is not measured).

    `noise`, `bias` and `seed` are the errors of the training reward (`rewards.NoisyReward`), which the other scores of an
    evaluation leave out. Diversity is that of `samples` images of each of the first `prompts` held-out prompts.
    """

    rewards: Mapping[str, RewardModel]
    features: Features | None = None
    noise: float = 0.0
    bias: float = 0.0
    seed: int = 0
    prompts: int = 8
    samples: int = 8

    def measure(
        self, batch: ImageBatch, training_scores: Tensor, heldout: Sequence[Prompt], sample: SampleRows, distributed: Distributed
    ) -> dict[str, Any]:
        """The entries of a metrics line. The processes divide the work; all get the full result.

        `batch`: this process's evaluation samples, with their error-free `training_scores` [sample]. "proxy": the mean training
        reward, errors included. "heldout": each held-out reward's mean over valid samples. "diversity": the mean over prompts of
        `rewards.diversity.pairwise_diversity` of other samples, which `sample` draws for the prompts `heldout`.
        """
        with distributed.shared_errors():
            part = self._scores(batch, training_scores), self._diversity(heldout, sample, distributed)
        parts = distributed.gather(part)
        found: dict[str, Any] = {}
        if self.rewards:
            found["proxy"] = float(torch.cat([proxy for (proxy, _), _ in parts]).nanmean())
            found["heldout"] = {
                name: _mean_or_none(f"held-out reward {name}", [scores[name] for (_, scores), _ in parts])
                for name in self.rewards
            }
        if self.features is not None:
            found["diversity"] = _mean_or_none("diversity", [diversity for _, diversity in parts])
        return found

    def _scores(self, batch: ImageBatch, training_scores: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The proxy and every held-out reward of this process's samples [sample]; None for a reward that failed."""
        if not self.rewards or not batch.prompts:
            return torch.empty(0), {name: torch.empty(0) for name in self.rewards}
        known = FunctionReward(lambda images, _: training_scores.to(images.device), marks_invalid=True)
        proxy = score(NoisyReward(known, self.noise, self.bias, self.seed), batch.images, batch.prompts, invalid=True)
        return proxy.cpu(), {
            name: _or_none(f"held-out reward {name}", lambda model=model: score(model, batch.images, batch.prompts, invalid=True))
            for name, model in self.rewards.items()
        }

    def _diversity(self, heldout: Sequence[Prompt], sample: SampleRows, distributed: Distributed) -> Tensor | None:
        """Diversity of this process's prompts [prompt]; None if the features failed."""
        if self.features is None:
            return None
        features, chosen = self.features, heldout[: self.prompts]
        share = distributed.assign(len(chosen))
        repeated = [prompt for prompt in chosen for _ in range(self.samples)]
        rows = range(share.first * self.samples, (share.first + share.count) * self.samples)
        batch = sample(repeated, DIVERSITY_SEED, rows)[(share.own.start - share.first) * self.samples :]
        groups = (len(share.own), self.samples)
        if not share.own:
            return torch.empty(0)
        return _or_none("diversity", lambda: pairwise_diversity(group_features(features, batch.images, batch.latents, groups)))


def make_heldout_metrics(config: RunConfig, world: World) -> HeldoutMetrics | None:
    """The held-out metrics of `config` in `world`; None if it asks for none.

    Raises `ConfigError` for a reward or features that do not exist or do not fit the world; no weights are loaded yet.
    """
    evaluation, environment = config.evaluation, config.environment
    if not evaluation.heldout_rewards and not evaluation.diversity:
        return None
    features = build("features", evaluation.diversity, device=config.policy.device) if evaluation.diversity else None
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
    if spec in world.qualities:
        return world.qualities[spec]()
    if spec in world.forms and not config.policy.model:
        return world.reward(spec)
    name = spec.partition("(")[0].strip()
    reads_images = name in KINDS["reward"].built_in and name not in COMBINATIONS
    available = ", ".join([*world.forms, *world.qualities])
    allowed = f"{available} or path/to/file.py:Class; {name} scores images, and the {world.name} world has points"
    require(world.name != "mixture" or not reads_images, "heldout_rewards", spec, allowed)
    return build("reward", spec, device=config.policy.device)


def _mean_or_none(name: str, parts: Sequence[Tensor | None]) -> float | None:
    """The mean over the valid values of all processes; None if a process failed, or with a warning if no value is valid."""
    values = [part for part in parts if part is not None]
    if len(values) < len(parts):
        return None
    found = torch.cat(values)
    if bool(found.isnan().all()):
        _warn(name, RewardError(f"all {len(found)} samples were marked invalid"))
        return None
    return float(found.nanmean())


def _or_none(name: str, measure: Callable[[], Tensor]) -> Tensor | None:
    """The values on the CPU; None and a warning if `measure` raises."""
    try:
        return measure().cpu()
    except Exception as error:
        _warn(name, error)
        return None


def _warn(name: str, error: Exception) -> None:
    _LOG.warning("%s could not be measured and is left out: %s: %s", name, type(error).__name__, error)
