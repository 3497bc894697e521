"""Rewards made from other rewards: weighted sums, win rates in a group, means over frames, limits
and noise; and functions as rewards.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from jaxtyping import Float
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import RewardError, require
from flowrl.core.options import allowed, checked_options
from flowrl.core.protocols import AnyReward, GroupReward, RewardModel
from flowrl.core.types import ImagesOrVideos, Prompt
from flowrl.rewards.contract import checked_scores, refusal
from flowrl.rewards.images import Frames, Images, chosen_frames, is_video

Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]


def weighted_total(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """sum_k w_k R^(k) over named scores of one shape.

    Args:
        parts: scores R^(k) by name, all of the same shape.
        weights: weights w_k by name; a missing weight is 1.

    Returns:
        The weighted sum, of the shape of the scores.
    """
    terms = [float(weights.get(name, 1.0)) * scores for name, scores in parts.items()]
    return torch.stack(terms).sum(dim=0)


@dataclass(frozen=True)
class RewardSum:
    """Named rewards with weights, which are finite numbers for some of them; what `WeightedSum` and
    `GroupSum` share.
    """

    models: Mapping[str, Any]
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = all(allowed(weight, Finite) for weight in self.weights.values())
        fits = bool(self.models) and self.weights.keys() <= self.models.keys() and numbers
        names = f"finite numbers for some of the models {', '.join(self.models)}"
        require(fits, f"{type(self).__name__}.weights", dict(self.weights), names)

    def each(self, scores: Callable[..., Tensor], *batch: Any) -> dict[str, Tensor]:
        """`scores` of every model for a batch of images and prompts, unweighted."""
        return {
            name: scores(model, *batch, f"reward {name!r}") for name, model in self.models.items()
        }

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
        allowed = "rewards of single samples; group-sum adds rewards that compare members"
        require(not compared, "WeightedSum.models", compared, allowed)

    def parts(self, images: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Every component's scores [sample], unweighted. Raises `RewardContractError` naming a
        wrong component.
        """
        return self.each(checked_scores, images, prompts)

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
            raise RewardError("win-rate: groups have one sample; allowed: 2 or more")
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
        return self.each(scores_of_members, images, prompts)

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The weighted sum [prompt, member]."""
        return self.total(self.group_parts(images, prompts))


@dataclass(frozen=True)
class SourceRewards:
    """A reward for each source of prompts; what `BySource` and `GroupBySource` share.

    Args:
        models: rewards by name.
        sources: by source (`Prompt.source`) the name of its reward; empty: the sources are the
            names.
    """

    models: Mapping[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fits = bool(self.models) and {*self.sources.values()} <= self.models.keys()
        need = f"a source: the name of one of the models {', '.join(self.models)}"
        require(fits, f"{type(self).__name__}.sources", dict(self.sources), need)

    def name(self, prompt: Prompt) -> str:
        """The name of the reward of a prompt. Raises `RewardError` if its source has none."""
        names = self.sources or {name: name for name in self.models}
        if prompt.source not in names:
            raise RewardError(
                f"by-source: the prompt {prompt.text!r:.60} is of the source {prompt.source!r};"
                f" allowed: {', '.join(names)}"
            )
        return names[prompt.source]

    def refuses(self, prompt: Prompt) -> str:
        """Why the reward of the prompt's source cannot score its images; "" if it can."""
        return refusal(self.models[self.name(prompt)], prompt)

    def each(
        self, scores: Callable[..., Tensor], images: Tensor, prompts: Sequence[Prompt]
    ) -> Tensor:
        """`scores` of each reward for the prompts of its sources."""
        names, parts, order = [self.name(prompt) for prompt in prompts], list[Tensor](), list[int]()
        for name in dict.fromkeys(names):
            rows = [row for row, other in enumerate(names) if other == name]
            some = [prompts[row] for row in rows]
            parts.append(scores(self.models[name], images[rows], some, f"reward {name!r}").float())
            order += rows
        return torch.cat(parts)[torch.tensor(order).argsort().to(parts[0].device)]


@checked_options
@dataclass(frozen=True)
class BySource(SourceRewards):
    """R = the reward of the source that the prompt is from.

    Scores of different sources need not be on one scale: credit is assigned within a source. The
    components of a weighted sum in `models` are not logged. A run with several sources of prompts
    makes this reward itself, as in ``--prompts "signs.txt @ ocr" "objects.jsonl @ geneval"``.

    Args:
        models: reward models of single samples, by name.
        sources: by source (`Prompt.source`) the name of its reward; empty: the sources are the
            names.

    Raises:
        ConfigError: there are no models, or a source has none.
    """

    models: Mapping[str, RewardModel]

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]. Raises `RewardError` for a prompt of another source."""
        return self.each(checked_scores, images, prompts)


@checked_options
@dataclass(frozen=True)
class GroupBySource(SourceRewards):
    """`BySource` if some of the rewards compare the members of a group."""

    models: Mapping[str, AnyReward]

    @property
    def evaluation(self) -> RewardModel:
        """The evaluation reward of each source."""
        single = {name: evaluation_reward(model) for name, model in self.models.items()}
        return BySource(single, self.sources)

    def score_groups(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [prompt, member]. Raises `RewardError` for a prompt of another source."""
        return self.each(scores_of_members, images, prompts)


def by_source(
    models: Mapping[str, AnyReward], sources: Mapping[str, str] | None = None
) -> BySource | GroupBySource:
    """A reward for each source of prompts: `BySource`, or `GroupBySource` if some compare the
    members of a group.

    Args:
        models: rewards by name.
        sources: by source the name of its reward; None: the sources are the names.

    Raises:
        ConfigError: there are no models, or a source has none.
    """
    grouped = any(isinstance(model, GroupReward) for model in models.values())
    return (GroupBySource if grouped else BySource)(models, sources or {})  # pyright: ignore


def scores_of_members(
    reward: AnyReward, images: Tensor, prompts: Sequence[Prompt], origin: str
) -> Tensor:
    """Scores [prompt, member] by a reward of either kind; `origin` is the subject of the
    error's message.
    """
    if isinstance(reward, GroupReward):
        return checked_scores(reward, images, prompts, origin)
    repeated = [prompt for prompt in prompts for _ in range(images.shape[1])]
    scores = checked_scores(reward, images.flatten(0, 1), repeated, origin)
    return scores.view(images.shape[:2])


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
    single = evaluation_reward(reward)
    kind, allowed = type(reward).__name__, f"a reward of single samples, as {type(single).__name__}"
    fits = not isinstance(reward, GroupReward)
    require(fits, name, spec, f"{allowed}: {kind} compares members of a group")
    return single


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


@checked_options
@dataclass(frozen=True)
class FrameMean:
    """The mean over frames of a reward for images: R = 1/|F| sum_{f in F} r(frame f, prompt).

    The reward scores all chosen frames of a video in one call. An image counts as a video of one
    frame. A video is invalid if the reward marks one of its chosen frames. For components, put it
    inside a weighted sum.

    Args:
        reward: a reward for images.
        frames: F: all, or a number of frames at equal distances, including the first and the last;
            1 is the middle one.

    Raises:
        ConfigError: `frames` is not allowed.
    """

    reward: RewardModel
    frames: Frames = "all"

    @checked
    def score(self, images: ImagesOrVideos, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]. Raises `RewardContractError` if the reward breaks its contract on the
        frames.
        """
        videos = images if is_video(images) else images.unsqueeze(1)
        chosen = chosen_frames(self.frames, videos.shape[1])
        repeated = [prompt for prompt in prompts for _ in chosen]
        origin = f"the reward {type(self.reward).__name__} of frame-mean"
        stack = videos[:, chosen].flatten(0, 1)
        scores = checked_scores(self.reward, stack, repeated, origin)
        return scores.view(len(prompts), -1).mean(1)


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
        noise = pseudo_normal(images, self.seed).to(images.device, torch.float32)
        brightness = images.flatten(1).mean(1)
        return self.model.score(images, prompts) + self.std * noise + self.bias * brightness


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
