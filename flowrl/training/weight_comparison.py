"""Base against trained weights: images of the same prompts from the same noise, and score
differences with intervals.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import CheckpointError, ConfigError, require
from flowrl.core.protocols import FlowPolicy, RewardModel
from flowrl.core.types import Prompt
from flowrl.rewards import stills
from flowrl.rollout import EVALUATION_SEED, sample_images, score
from flowrl.training.statistics import mean


@dataclass(frozen=True)
class ScoreDifference:
    """Means over prompts of a score before and after training, and of the difference with its 95%
    interval.

    Args:
        base: mean score with the base weights.
        trained: mean score with the trained weights.
        difference: `trained` - `base`.
        low: lower end of the interval; NaN for fewer than two prompts.
        high: upper end of the interval; NaN for fewer than two prompts.
        better: fraction of prompts that score higher with the trained weights.
        prompts: number of compared prompts.
        invalid: number of pairs left out because the reward marked an image invalid.
    """

    base: float
    trained: float
    difference: float
    low: float
    high: float
    better: float
    prompts: int
    invalid: int


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of sampling for a comparison of weights.

    The noise of an image depends only on `seed`, the prompt's position in the list, `count` and the
    image's number.

    Args:
        steps: number of ODE steps.
        count: images per prompt.
        seed: seed of the noise.
        batch: latents per network call.
        shown: number of prompts of which images are kept.
        solver: name of the solver (see `rollout.solve`).

    Raises:
        ConfigError: a number is below 1.
    """

    steps: int = 40
    count: int = 1
    seed: int = EVALUATION_SEED
    batch: int = 16
    shown: int = 8
    solver: str = "euler"

    def __post_init__(self) -> None:
        for name in ("steps", "count", "batch", "shown"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")

    def noise(self, policy: FlowPolicy, prompts: int) -> Iterator[Tensor]:
        """One latent per image, in order of the prompts, each from a separate CPU generator, so
        that the batch size has no effect.
        """
        for number in range(prompts * self.count):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            yield torch.randn(policy.latent_shape, generator=generator)


@dataclass(frozen=True)
class ScoredImages:
    """Scores and example images of one set of weights.

    Args:
        scores: scores [prompt, count] by reward.
        shown: the first prompts' first images [shown, 3, height, width]; for videos, `stills`.
    """

    scores: dict[str, Tensor]
    shown: Tensor


def sample_and_score(
    policy: FlowPolicy,
    prompts: Sequence[Prompt],
    rewards: Mapping[str, RewardModel],
    how: SamplingSettings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ScoredImages:
    """Sample images of all prompts and score each batch by all rewards; `progress` gets the
    finished and the total images.
    """
    require(len(prompts) >= 1, "prompts", len(prompts), "one or more")
    require(len(rewards) >= 1, "rewards", tuple(rewards), "one or more")
    scores: dict[str, list[Tensor]] = {name: [] for name in rewards}
    shown: list[Tensor] = []
    repeated, done = [prompt for prompt in prompts for _ in range(how.count)], 0
    for batch in sample_images(
        policy, repeated, how.noise(policy, len(prompts)), how.steps, how.solver, how.batch
    ):
        for name, reward in rewards.items():
            scores[name].append(score(reward, batch.images, batch.prompts, invalid=True).cpu())
        numbers = range(done, done + len(batch.prompts))
        firsts = [
            number - done
            for number in numbers
            if number % how.count == 0 and number < how.shown * how.count
        ]
        shown += list(stills(batch.images[firsts]).cpu())
        done = numbers.stop
        progress(done, len(repeated))
        del batch  # before the next one is sampled
    tables = {
        name: torch.cat(found).view(len(prompts), how.count) for name, found in scores.items()
    }
    return ScoredImages(tables, torch.stack(shown))


def compare_scores(base: Tensor, trained: Tensor) -> ScoreDifference:
    """Paired comparison of scores [prompt, count]: images of one prompt are averaged, prompts are
    the independent units.

    The interval is Student's t for the mean of the prompts' differences. It covers other prompts of
    this kind, not other training seeds. Pairs with an invalid (NaN) score are left out. Raises
    `ConfigError` if no pair is left.
    """
    valid = base.isfinite() & trained.isfinite()
    kept = valid.any(1)
    if not bool(kept.any()):
        raise ConfigError(
            "evaluate: the reward marked an image of every pair invalid; there is nothing to"
            " compare"
        )
    weight = valid[kept].double()
    before, after = (
        (torch.where(valid, t, 0.0)[kept].double() * weight).sum(1) / weight.sum(1)
        for t in (base, trained)
    )
    difference = after - before
    found, n = mean(difference.tolist()), len(difference)
    low, high = (found.low, found.high) if n > 1 else (math.nan, math.nan)
    better = float((difference > 0).double().mean())
    return ScoreDifference(
        float(before.mean()),
        float(after.mean()),
        found.value,
        low,
        high,
        better,
        n,
        int((~valid).sum()),
    )


@dataclass(frozen=True)
class WeightComparison:
    """A finished comparison of base and trained weights.

    Args:
        scores: differences by reward.
        base: images and scores of the base weights.
        trained: images and scores of the trained weights.
        prompts: texts of the prompts.
        how: settings of sampling.
        facts: further facts about the weights.
    """

    scores: dict[str, ScoreDifference]
    base: ScoredImages
    trained: ScoredImages
    prompts: tuple[str, ...]
    how: SamplingSettings
    facts: dict[str, Any]

    def values(self) -> dict[str, Any]:
        """Plain values for JSON: `facts`, settings, differences, and every prompt with its mean
        scores (null: invalid).
        """
        sides = (self.base.scores, self.trained.scores)
        each = [
            {
                "prompt": text,
                "scores": {
                    name: [_number(float(side[name][i].nanmean())) for side in sides]
                    for name in self.scores
                },
            }
            for i, text in enumerate(self.prompts)
        ]
        scores = {
            name: {k: _number(v) for k, v in asdict(found).items()}
            for name, found in self.scores.items()
        }
        return {
            **self.facts,
            "prompts": len(self.prompts),
            **asdict(self.how),
            "scores": scores,
            "each": each,
        }


def _number(value: float) -> float | None:
    return None if isinstance(value, float) and math.isnan(value) else value


def compare_weights(
    policy: FlowPolicy,
    load_trained: Callable[[], None],
    prompts: Sequence[Prompt],
    rewards: Mapping[str, RewardModel],
    how: SamplingSettings,
    facts: dict[str, Any],
    progress: Callable[[str, int, int], None] = lambda weights, done, total: None,
) -> WeightComparison:
    """Sample and score with the base weights of `policy`, and again after `load_trained` has
    replaced them.

    Args:
        policy: the policy with the base weights.
        load_trained: replaces the weights of `policy` by the trained ones.
        prompts: the prompts.
        rewards: reward models by name.
        how: settings of sampling, the same for both weights.
        facts: facts about the weights, stored in the result.
        progress: called with (stage, done, total).

    Returns:
        Scores and images of both weights.
    """
    base = sample_and_score(
        policy, prompts, rewards, how, lambda done, total: progress("base", done, total)
    )
    load_trained()
    trained = sample_and_score(
        policy, prompts, rewards, how, lambda done, total: progress("trained", done, total)
    )
    scores = {name: compare_scores(base.scores[name], trained.scores[name]) for name in rewards}
    return WeightComparison(
        scores, base, trained, tuple(prompt.text for prompt in prompts), how, facts
    )


def load_weights(policy: Any, folder: Path) -> None:
    """Load trained weights in diffusers' formats into a `PipelinePolicy` without adapters.

    Args:
        policy: the policy, without adapters.
        folder: a LoRA (a file or a folder), or a folder with a transformer in ``transformer/``.

    Raises:
        CheckpointError: the weights have another format or belong to another model.
    """
    from safetensors import SafetensorError

    try:
        if (folder / "transformer").is_dir():
            whole = type(policy.transformer).from_pretrained(
                folder, subfolder="transformer", use_safetensors=True
            )
            policy.transformer.load_state_dict(whole.state_dict())
        else:
            place = (
                (str(folder.parent), {"weight_name": folder.name})
                if folder.is_file()
                else (str(folder), {})
            )
            policy.pipe.load_lora_weights(place[0], use_safetensors=True, **place[1])
            _require_all_loaded(
                policy, policy.pipe.lora_state_dict(place[0], use_safetensors=True, **place[1])
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"weights: {folder} holds no LoRA and no transformer for this model ({first[:200]})"
        ) from error


def _require_all_loaded(policy: Any, state: Any) -> None:
    """Raise `ValueError` if layers of a LoRA are not in the model: diffusers ignores them
    silently.
    """
    tensors = state[0] if isinstance(state, tuple) else state
    wanted = {
        name.removeprefix("transformer.")
        for name in tensors
        if "lora_A" in name and not name.startswith("text_encoder")
    }
    layers = {
        name
        for name, module in policy.transformer.named_modules()
        if hasattr(module, "lora_A") and len(module.lora_A)
    }
    lost = sorted(name for name in wanted if name.partition(".lora_A")[0] not in layers)
    if lost or not wanted:
        raise ValueError(
            f"{len(lost)} of its {len(wanted)} layers are not in the model, such as {lost[0]}"
            if lost
            else "no LoRA layers"
        )
