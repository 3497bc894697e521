"""What an evaluation measures beside the reward, so that a reward that is being hacked shows: held-out rewards, and diversity.

Nothing here takes part in training. What cannot be measured (a model whose weights are missing, a server that is down) is a
warning and `None` in the metrics; the run goes on.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.errors import RewardError, require
from flowrl.protocols import Features, FlowPolicy, RewardModel
from flowrl.registry import KINDS, build
from flowrl.rewards import FunctionReward, NoisyReward
from flowrl.rewards.diversity import group_features, pairwise_diversity
from flowrl.rollout import Usage, score, solve
from flowrl.types import Prompt
from flowrl.worlds.base import World

if TYPE_CHECKING:
    from flowrl.training.config import RunConfig

DIVERSITY_SEED = 20241
COMBINATIONS = ("weighted-sum", "clipped", "remote", "remote-sum")
"""Rewards by name that take whatever the rewards within them take; all others by name read pictures."""


@dataclass(frozen=True)
class Sampling:
    """How an evaluation samples: its policy, held-out prompts, ODE steps and solver, and latents per network call."""

    policy: FlowPolicy
    prompts: Sequence[Prompt]
    steps: int
    solver: str
    max_batch: int


@dataclass(frozen=True)
class Beside:
    """Held-out `rewards` by name, and the `features` that diversity is measured in (None: it is not).

    `noise`, `bias` and `seed` are the errors of the training reward (`rewards.NoisyReward`), which an evaluation is otherwise
    without; the diversity is that of `members` samples of each of `prompts` held-out prompts, from noise of their own.
    """

    rewards: Mapping[str, RewardModel]
    features: Features | None = None
    noise: float = 0.0
    bias: float = 0.0
    seed: int = 0
    prompts: int = 8
    members: int = 8

    def measure(self, images: Tensor, prompts: Sequence[Prompt], trained: Tensor, sampling: Sampling) -> dict[str, Any]:
        """What a metrics line records beside the reward.

        "proxy": the mean of what training maximises on these `images` [sample, channel, height, width], its errors included, from
        the scores `trained` [sample] without them. "heldout": each held-out reward's mean over valid samples, None where it
        failed. "diversity": the mean over prompts of `rewards.diversity.pairwise_diversity`, where it is measured.
        """
        found: dict[str, Any] = {}
        if self.rewards:
            known = FunctionReward(lambda i, p: trained.to(i.device), marks_invalid=True)
            proxy = score(NoisyReward(known, self.noise, self.bias, self.seed), images, prompts, invalid=True)
            found["proxy"] = float(proxy.nanmean())
            found["heldout"] = {
                name: _or_none(f"held-out reward {name}", lambda model=model: _mean(model, images, prompts))
                for name, model in self.rewards.items()
            }
        if self.features is not None:
            found["diversity"] = _or_none("diversity", lambda: self._diversity(sampling))
        return found

    def _diversity(self, sampling: Sampling) -> float:
        assert self.features is not None
        policy = sampling.policy
        chosen = [prompt for prompt in sampling.prompts[: self.prompts] for _ in range(self.members)]
        generator = torch.Generator().manual_seed(DIVERSITY_SEED)
        noise = torch.randn((len(chosen), *policy.latent_shape), generator=generator).to(policy.device)
        schedule, condition = policy.schedule(sampling.steps), policy.encode(chosen)
        latents = solve(sampling.solver, policy, schedule, condition, noise, Usage(), sampling.max_batch)
        images = torch.cat([policy.decode(part) for part in latents.split(sampling.max_batch)])
        groups = (len(chosen) // self.members, self.members)
        return float(pairwise_diversity(group_features(self.features, images, latents, groups)).mean())


def make_beside(config: "RunConfig", world: World) -> Beside | None:
    """What `config` wants measured beside the reward in `world`; None where that is nothing.

    Raises `ConfigError` for a reward or features that do not exist or do not fit the world; nothing is loaded yet.
    """
    if not config.evaluation.heldout_rewards and not config.evaluation.diversity:
        return None
    features = (
        build("features", config.evaluation.diversity, device=config.policy.device) if config.evaluation.diversity else None
    )
    return Beside(
        {spec: _heldout(spec, config, world) for spec in config.evaluation.heldout_rewards},
        features,
        config.environment.reward_noise,
        config.environment.reward_bias,
        config.seed,
        config.evaluation.diversity_prompts,
        config.evaluation.diversity_samples,
    )


def _heldout(spec: str, config: "RunConfig", world: World) -> RewardModel:
    if spec in world.qualities:
        return world.qualities[spec]()
    if spec in world.forms and not config.policy.model:
        return world.reward(spec)
    name = spec.partition("(")[0].strip()
    reads_pictures = name in KINDS["reward"].built_in and name not in COMBINATIONS
    own = ", ".join([*world.forms, *world.qualities])
    allowed = f"{own} or path/to/file.py:Class; {name} scores pictures, and the {world.name} world has points"
    require(world.name != "mixture" or not reads_pictures, "heldout_rewards", spec, allowed)
    return build("reward", spec, device=config.policy.device)


def _mean(model: RewardModel, images: Tensor, prompts: Sequence[Prompt]) -> float:
    scores = score(model, images, prompts, invalid=True)
    if bool(scores.isnan().all()):
        raise RewardError(f"all {len(scores)} samples were marked invalid")
    return float(scores.nanmean())


def _or_none(what: str, measure: Callable[[], float]) -> float | None:
    """The number; or a warning and None, whatever went wrong."""
    try:
        return measure()
    except Exception as error:
        warnings.warn(f"{what} could not be measured and is left out: {type(error).__name__}: {error}", stacklevel=2)
        return None
