"""Rewards that compare the members of a group: win rates, and weighted sums with such rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import ConfigError, RewardError
from flowrl.options import checked_options
from flowrl.protocols import AnyReward, GroupReward, RewardModel
from flowrl.rewards.combine import WeightedSum, require_weights, weighted_total
from flowrl.rewards.contract import check_group_scores, check_scores, marks_invalid
from flowrl.types import Prompt, checked


@checked
def win_rates(scores: Float[Tensor, "prompt member"]) -> Float[Tensor, "prompt member"]:
    """w_i = 1/(M-1) sum_{j != i} (1 if s_i > s_j, 1/2 if s_i = s_j, else 0) over the M members of each prompt; in [0, 1].

    The mean of a group is 1/2. NaN marks invalid members: their rate is NaN, and M counts the others. The rate of a single valid
    member is NaN.
    """
    mine, other, judged = scores[:, :, None], scores[:, None, :], ~scores.isnan()
    wins = (mine > other).sum(2) + 0.5 * (mine == other).sum(2) - 0.5  # each is equal to itself
    rates = wins / (judged.sum(1, keepdim=True) - 1).clamp(min=0)
    return rates.where(judged, torch.nan).to(scores.dtype)


@checked_options
@dataclass(frozen=True)
class WinRate:
    """R_i = the fraction of the other members of the group with a lower score than sample i; a tie counts 1/2.

    `reward` scores each sample separately. Only the order of the scores within a group matters, not their scale, and an outlier
    does not widen the group's std. The rates of a group of M have mean 1/2 and, without ties, the population variance (M+1) / (12
    (M-1)), so every group has the same weight in training. M (M-1) / 2 comparisons of M scores. Evaluations measure `reward`
    itself.

    Source: Pref-GRPO (arXiv 2508.20751), in which a vision-language model judges pairs of images. `score_groups` raises
    `RewardError` for groups of one sample.
    """

    reward: RewardModel

    @property
    def evaluation(self) -> RewardModel:
        """The reward whose scores are compared."""
        return self.reward

    @property
    def marks_invalid(self) -> bool:
        """Whether the reward may mark samples invalid, which are not compared with the others."""
        return marks_invalid(self.reward)

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Win rates [prompt, member]."""
        if images.shape[1] < 2:
            raise RewardError("win-rate compares the samples of a prompt, but groups have one sample; allowed: 2 or more")
        return win_rates(scores_of_members(self.reward, images, prompts, "the reward of win-rate"))


@checked_options
@dataclass(frozen=True)
class GroupSum:
    """R = sum_k w_k R^(k) over named rewards, some of which compare the members of a group.

    Components are logged and may be credited separately, as in `WeightedSum`. Evaluations measure the weighted sum of the
    components' `evaluation` rewards, whose scales may differ from those of win rates; add the components as held-out rewards to
    log each.

    Args:
        models: rewards of groups or of single samples, by name.
        weights: finite weights w_k by name; a missing weight is 1.

    Raises:
        ConfigError: there are no models, a weight is not finite, or a weight has no model.
    """

    models: Mapping[str, AnyReward]
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_weights("GroupSum", self.models, self.weights)

    @property
    def evaluation(self) -> RewardModel:
        """The weighted sum of the components' evaluation rewards."""
        return WeightedSum({name: evaluation_reward(model) for name, model in self.models.items()}, self.weights)

    @property
    def marks_invalid(self) -> bool:
        """Whether any of the models may mark samples invalid; a sample that one of them marks is invalid."""
        return any(marks_invalid(model) for model in self.models.values())

    def group_parts(self, images: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Every component's scores [prompt, member], unweighted. Raises `RewardContractError` naming a component that breaks
        its contract."""
        return {name: scores_of_members(model, images, prompts, f"reward {name!r}") for name, model in self.models.items()}

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of `parts`."""
        return weighted_total(parts, self.weights)

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The weighted sum [prompt, member]."""
        return self.total(self.group_parts(images, prompts))


def scores_of_members(reward: AnyReward, images: Tensor, prompts: Sequence[Prompt], origin: str) -> Tensor:
    """Scores [prompt, member] by a reward of either kind, checked; `origin` is the subject of the error's message."""
    members = images.shape[1]
    if isinstance(reward, GroupReward):
        return check_group_scores(reward.score_groups(images, prompts), prompts, members, origin, marks_invalid(reward))
    repeated = [prompt for prompt in prompts for _ in range(members)]
    scores = reward.score(images.flatten(0, 1), repeated)
    return check_scores(scores, repeated, origin, marks_invalid(reward)).view(len(prompts), members)


def evaluation_reward(reward: AnyReward) -> RewardModel:
    """The reward of single samples for evaluations: `reward` itself, or the `evaluation` of a group reward."""
    return reward.evaluation if isinstance(reward, GroupReward) else reward


def require_single(reward: AnyReward, name: str, spec: str) -> RewardModel:
    """Return `reward`, unless it compares the members of a group.

    Args:
        reward: the reward that `spec` describes.
        name: name of the setting, for the message.
        spec: value of the setting, for the message.

    Returns:
        The reward, which scores single images.

    Raises:
        ConfigError: `reward` is a `GroupReward`.
    """
    if not isinstance(reward, GroupReward):
        return reward
    allowed = (
        f"allowed: a reward of single samples, such as the {type(reward.evaluation).__name__} by which this one is evaluated"
    )
    raise ConfigError(f"{name} = {spec!r:.500} is not allowed: {type(reward).__name__} compares members of a group; {allowed}")
