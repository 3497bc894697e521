"""Rewards made from other rewards: weighted sums, win rates in a group, limits and noise; and
functions as rewards.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from jaxtyping import Float
from torch import Tensor

from flowrl.core.errors import ConfigError, RewardError, require
from flowrl.core.options import allowed, checked_options
from flowrl.core.protocols import AnyReward, GroupReward, RewardModel
from flowrl.core.types import Prompt, checked
from flowrl.rewards.contract import check_scores, marks_invalid
from flowrl.rewards.images import Images

Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]


def weighted_total(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """sum_k w_k R^(k) over named scores of one shape.

    Args:
        parts: scores R^(k) by name, all of the same shape.
        weights: weights w_k by name; a missing weight is 1.

    Returns:
        The weighted sum, of the shape of the scores.
    """
    return torch.stack(
        [float(weights.get(name, 1.0)) * values for name, values in parts.items()]
    ).sum(dim=0)


@dataclass(frozen=True)
class RewardSum:
    """Named rewards with weights, which are finite numbers for some of them; what `WeightedSum` and
    `GroupSum` share.
    """

    models: Mapping[str, Any]
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fits = set(self.weights) <= set(self.models) and all(
            allowed(weight, Finite) for weight in self.weights.values()
        )
        names = (
            f"finite numbers for some of the models {', '.join(self.models)}, of which there is one"
            " or more"
        )
        require(
            len(self.models) > 0 and fits,
            f"{type(self).__name__}.weights",
            dict(self.weights),
            names,
        )

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of `parts`."""
        return weighted_total(parts, self.weights)


@checked_options
@dataclass(frozen=True)
class WeightedSum(RewardSum):
    """R = sum_k w_k R^(k) over named reward models.

    `parts` returns the unweighted scores of every component: the trainer logs them, and a rule such
    as `credit.GDPO` normalises each component separately. A sample that one of the models marks
    invalid is invalid.

    Args:
        models: reward models of single samples, by name.
        weights: finite weights w_k by name; a missing weight is 1.

    Raises:
        ConfigError: there are no models, a weight is not finite, or a weight has no model.
    """

    models: Mapping[str, RewardModel]

    def __post_init__(self) -> None:
        super().__post_init__()
        compared = [name for name, model in self.models.items() if isinstance(model, GroupReward)]
        singles = (
            "rewards of single samples; group-sum adds them to rewards that compare the members of"
            " a group"
        )
        require(not compared, "WeightedSum.models", compared, singles)

    def parts(self, images: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Every component's scores [sample], unweighted. Raises `RewardContractError` naming a
        wrong component.
        """
        return {
            name: check_scores(
                model.score(images, prompts), prompts, f"reward {name!r}", marks_invalid(model)
            )
            for name, model in self.models.items()
        }

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The weighted sum [sample]."""
        return self.total(self.parts(images, prompts))


@checked
def win_rates(scores: Float[Tensor, "prompt member"]) -> Float[Tensor, "prompt member"]:
    """w_i = 1/(M-1) sum_{j != i} (1 if s_i > s_j, 1/2 if s_i = s_j, else 0) over the M members of
    each prompt; in [0, 1].

    The mean of a group is 1/2. NaN marks invalid members: their rate is NaN, and M counts the
    others. The rate of a single valid member is NaN.
    """
    mine, other, judged = scores[:, :, None], scores[:, None, :], ~scores.isnan()
    wins = (mine > other).sum(2) + 0.5 * (mine == other).sum(2) - 0.5  # each is equal to itself
    rates = wins / (judged.sum(1, keepdim=True) - 1).clamp(min=0)
    return rates.where(judged, torch.nan).to(scores.dtype)


@checked_options
@dataclass(frozen=True)
class WinRate:
    """R_i = the fraction of the other members of the group with a lower score than sample i; a tie
    counts 1/2.

    `reward` scores each sample separately. Only the order of the scores within a group matters, not
    their scale, and an outlier does not widen the group's std. The rates of a group of M have mean
    1/2 and, without ties, the population variance (M+1) / (12 (M-1)), so every group has the same
    weight in training. M (M-1) / 2 comparisons of M scores. Evaluations measure `reward` itself.

    Source: Pref-GRPO (arXiv 2508.20751), in which a vision-language model judges pairs of images.
    `score_groups` raises `RewardError` for groups of one sample.
    """

    reward: RewardModel

    @property
    def evaluation(self) -> RewardModel:
        """The reward whose scores are compared."""
        return self.reward

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Win rates [prompt, member]."""
        if images.shape[1] < 2:
            raise RewardError(
                "win-rate compares the samples of a prompt, but groups have one sample; allowed: 2"
                " or more"
            )
        return win_rates(scores_of_members(self.reward, images, prompts, "the reward of win-rate"))


@checked_options
@dataclass(frozen=True)
class GroupSum(RewardSum):
    """R = sum_k w_k R^(k) over named rewards, some of which compare the members of a group.

    Components are logged and may be credited separately, as in `WeightedSum`. Evaluations measure
    the weighted sum of the components' `evaluation` rewards, whose scales may differ from those of
    win rates; add the components as held-out rewards to log each.

    Args:
        models: rewards of groups or of single samples, by name.
        weights: finite weights w_k by name; a missing weight is 1.

    Raises:
        ConfigError: there are no models, a weight is not finite, or a weight has no model.
    """

    models: Mapping[str, AnyReward]

    @property
    def evaluation(self) -> RewardModel:
        """The weighted sum of the components' evaluation rewards."""
        return WeightedSum(
            {name: evaluation_reward(model) for name, model in self.models.items()}, self.weights
        )

    def group_parts(self, images: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Every component's scores [prompt, member], unweighted. Raises `RewardContractError`
        naming a wrong one.
        """
        return {
            name: scores_of_members(model, images, prompts, f"reward {name!r}")
            for name, model in self.models.items()
        }

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The weighted sum [prompt, member]."""
        return self.total(self.group_parts(images, prompts))


def scores_of_members(
    reward: AnyReward, images: Tensor, prompts: Sequence[Prompt], origin: str
) -> Tensor:
    """Scores [prompt, member] by a reward of either kind, checked; `origin` is the subject of the
    error's message.
    """
    members = images.shape[1]
    if isinstance(reward, GroupReward):
        scores = reward.score_groups(images, prompts)
        return check_scores(scores, prompts, origin, marks_invalid(reward), members)
    repeated = [prompt for prompt in prompts for _ in range(members)]
    scores = check_scores(
        reward.score(images.flatten(0, 1), repeated), repeated, origin, marks_invalid(reward)
    )
    return scores.view(len(prompts), members)


def evaluation_reward(reward: AnyReward) -> RewardModel:
    """The reward of single samples for evaluations: `reward` itself, or the `evaluation` of a group
    reward.
    """
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
    if isinstance(reward, GroupReward):
        raise ConfigError(
            f"{name} = {spec!r:.500} is not allowed: {type(reward).__name__} compares members of a"
            " group; allowed: a reward of single samples, such as the"
            f" {type(reward.evaluation).__name__} by which this one is evaluated"
        )
    return reward


@checked_options
@dataclass(frozen=True)
class Clipped:
    """min(`high`, max(`low`, R)) of another reward.

    Scores beyond a limit gain nothing, which reduces reward hacking.

    Args:
        reward: the reward to limit.
        low: lower limit.
        high: upper limit, above `low`.

    Raises:
        ConfigError: `low` is not below `high`.
    """

    reward: RewardModel
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        require(self.low < self.high, "low, high", (self.low, self.high), "low below high")

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The clipped scores [sample]."""
        return self.reward.score(images, prompts).clamp(self.low, self.high)


@dataclass(frozen=True)
class FunctionReward:
    """Wraps `function(images, prompts) -> [sample]` as a reward.

    Args:
        function: scores images [sample, channel, height, width] in [0, 1] and as many prompts.
        marks_invalid: NaN marks samples that cannot be judged and are left out
            (`protocols.RewardModel`).
    """

    function: Callable[[Tensor, Sequence[Prompt]], Tensor]
    marks_invalid: bool = False

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The function's scores; the rollout checks their shape and that they are finite."""
        return self.function(images, prompts)


@checked_options
@dataclass(frozen=True)
class NoisyReward:
    """R + `std` e + `bias` m, e standard normal, m the mean of the image's values (a bias towards
    bright images).

    The noise is a fixed pseudo-random function of the image and `seed`: the same image gets the
    same score, as from a deterministic but unreliable judge. Scores do not depend on the batch, and
    a resumed run gets the same noise. The noise of different images is practically independent.

    Args:
        model: the reward model R.
        std: standard deviation of the noise, 0 or more.
        bias: weight of the image's mean.
        seed: seed of the noise.

    Raises:
        ConfigError: `std` is negative or infinite.
    """

    model: RewardModel
    std: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    bias: Finite = 0.0
    seed: int = 0

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        noise = (
            pseudo_normal(images, self.seed).to(images.device, torch.float32)
            if self.std > 0
            else 0.0
        )
        return (
            self.model.score(images, prompts)
            + self.std * noise
            + self.bias * images.flatten(1).mean(1)
        )


def pseudo_normal(images: Tensor, seed: int = 0) -> Float[Tensor, " sample"]:
    """A pseudo-random N(0, 1) number per image, which depends only on the image's values and
    `seed`.
    """
    flat = images.detach().flatten(1).double().cpu()
    generator = torch.Generator().manual_seed(seed)
    directions = torch.rand(flat.shape[1], 2, generator=generator, dtype=torch.float64) + 0.5
    first, second = (((flat @ directions).sin() * 43758.5453e3) % 1.0).unbind(1)
    radius = (-2.0 * (1.0 - first).clamp(min=1e-12).log()).sqrt()
    return radius * (2.0 * torch.pi * second).cos()
