"""Rewards made from other rewards: weighted sums with logged components, limits and noise; and functions as rewards."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import require
from flowrl.options import checked_options
from flowrl.protocols import GroupReward, RewardModel
from flowrl.rewards.contract import check_score_shape, marks_invalid
from flowrl.rewards.images import Images
from flowrl.types import Prompt


def weighted_total(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """sum_k w_k R^(k) over named scores of one shape.

    Args:
        parts: scores R^(k) by name, all of the same shape.
        weights: weights w_k by name; a missing weight is 1.

    Returns:
        The weighted sum, of the shape of the scores.
    """
    return torch.stack([float(weights.get(name, 1.0)) * values for name, values in parts.items()]).sum(dim=0)


def require_weights(part: str, models: Mapping[str, object], weights: Mapping[str, float]) -> None:
    """Raise `ConfigError` unless there are models, and `weights` are finite numbers for some of them; `part` names the sum."""
    require(len(models) > 0, f"{part}.models", dict(models), "one or more named reward models")
    unknown = sorted(set(weights) - set(models))
    require(not unknown, f"{part}.weights", unknown, f"names among {', '.join(models)}")
    for name, weight in weights.items():
        number = isinstance(weight, int | float) and math.isfinite(weight)
        require(number, f"{part}.weights[{name!r}]", weight, "a finite number")


@checked_options
@dataclass(frozen=True)
class WeightedSum:
    """R = sum_k w_k R^(k) over named reward models.

    `parts` returns the unweighted scores of every component: the trainer logs them, and a rule such as `credit.GDPO` normalises
    each component separately.

    Args:
        models: reward models of single samples, by name.
        weights: finite weights w_k by name; a missing weight is 1.

    Raises:
        ConfigError: there are no models, a weight is not finite, or a weight has no model.
    """

    models: Mapping[str, RewardModel]
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_weights("WeightedSum", self.models, self.weights)
        compared = [name for name, model in self.models.items() if isinstance(model, GroupReward)]
        allowed = "rewards of single samples; group-sum adds them to rewards that compare the members of a group"
        require(not compared, "WeightedSum.models", compared, allowed)

    @property
    def marks_invalid(self) -> bool:
        """Whether any of the models may mark samples invalid; a sample that one of them marks is invalid."""
        return any(marks_invalid(model) for model in self.models.values())

    def parts(self, images: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Every component's scores [sample], unweighted. Raises `RewardContractError` naming a component of the wrong shape."""
        scores = {name: model.score(images, prompts) for name, model in self.models.items()}
        return {name: check_score_shape(values, len(prompts), f"reward {name!r}") for name, values in scores.items()}

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of `parts`."""
        return weighted_total(parts, self.weights)

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The weighted sum [sample]."""
        return self.total(self.parts(images, prompts))


@checked_options
@dataclass(frozen=True)
class Clipped:
    """min(`high`, max(`low`, R)) of another reward.

    Scores beyond a limit gain nothing, which reduces reward hacking.

    Args:
        reward: the reward to limit.
        low: lower limit; None: no lower limit.
        high: upper limit; None: no upper limit.

    Raises:
        ConfigError: both limits are None, or `low` is not below `high`.
    """

    reward: RewardModel
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        require(self.low is not None or self.high is not None, "low, high", (self.low, self.high), "one of them, or both")
        ordered = self.low is None or self.high is None or self.low < self.high
        require(ordered, "low, high", (self.low, self.high), "low below high")

    @property
    def marks_invalid(self) -> bool:
        """Whether the reward may mark samples invalid."""
        return marks_invalid(self.reward)

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The clipped scores [sample]."""
        return self.reward.score(images, prompts).clamp(self.low, self.high)


@dataclass(frozen=True)
class FunctionReward:
    """Wraps `function(images, prompts) -> [sample]` as a reward.

    Args:
        function: scores images [sample, channel, height, width] in [0, 1] and as many prompts.
        marks_invalid: NaN marks samples that cannot be judged and are left out (`protocols.RewardModel`).
    """

    function: Callable[[Tensor, Sequence[Prompt]], Tensor]
    marks_invalid: bool = False

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The function's scores; the rollout checks their shape and that they are finite."""
        return self.function(images, prompts)


@dataclass(frozen=True)
class NoisyReward:
    """R + `std` e + `bias` m, e standard normal, m the mean of the image's values (a bias towards bright images).

    The noise is a fixed pseudo-random function of the image and `seed`: the same image gets the same score, as from a
    deterministic but unreliable judge. Scores do not depend on the batch, and a resumed run gets the same noise. The noise of
    different images is practically independent.

    Args:
        model: the reward model R.
        std: standard deviation of the noise, 0 or more.
        bias: weight of the image's mean.
        seed: seed of the noise.

    Raises:
        ConfigError: `std` is negative or infinite.
    """

    model: RewardModel
    std: float = 0.0
    bias: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(math.isfinite(self.std) and self.std >= 0, "NoisyReward.std", self.std, "finite and 0 or more")
        require(math.isfinite(self.bias), "NoisyReward.bias", self.bias, "finite")

    @property
    def marks_invalid(self) -> bool:
        """Whether the model may mark samples invalid."""
        return marks_invalid(self.model)

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        noise = pseudo_normal(images, self.seed).to(images.device, torch.float32) if self.std > 0 else 0.0
        return self.model.score(images, prompts) + self.std * noise + self.bias * images.flatten(1).mean(1)


def pseudo_normal(images: Tensor, seed: int = 0) -> Float[Tensor, " sample"]:
    """A pseudo-random N(0, 1) number per image, which depends only on the image's values and `seed`."""
    flat = images.detach().flatten(1).double().cpu()
    generator = torch.Generator().manual_seed(seed)
    directions = torch.rand(flat.shape[1], 2, generator=generator, dtype=torch.float64) + 0.5
    first, second = (((flat @ directions).sin() * 43758.5453e3) % 1.0).unbind(1)
    radius = (-2.0 * (1.0 - first).clamp(min=1e-12).log()).sqrt()
    return radius * (2.0 * torch.pi * second).cos()
