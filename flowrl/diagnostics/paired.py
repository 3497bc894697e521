"""Base against trained weights: the same prompts, the same noise, any rewards, paired differences with intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from flowrl.errors import CheckpointError, ConfigError, require
from flowrl.protocols import FlowPolicy, RewardModel
from flowrl.rollout import Usage, score, solve
from flowrl.types import Prompt

EVALUATION_SEED = 20240
LEVEL = 0.95


@dataclass(frozen=True)
class PairedScore:
    """Means over prompts of a score before and after, and of the difference with its 95% interval [`low`, `high`].

    `better` is the share of prompts that score higher with the trained weights, `prompts` how many were compared, `invalid` how
    many pictures the reward marked invalid (their pairs are left out). NaN bounds: fewer than two prompts.
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
class Pictures:
    """What one set of weights draws: scores by reward [prompt, count], the first prompts' pictures [shown, 3, height, width]."""

    scores: dict[str, Tensor]
    shown: Tensor


@dataclass(frozen=True)
class Draw:
    """How pictures are drawn: `count` per prompt by `steps` ODE steps; `batch` latents at a time. The noise depends on `seed`,
    the prompt's place in the list and the picture's number alone."""

    steps: int = 40
    count: int = 1
    seed: int = EVALUATION_SEED
    batch: int = 16
    shown: int = 8
    solver: str = "euler"

    def __post_init__(self) -> None:
        for name in ("steps", "count", "batch", "shown"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")


def draw_and_score(
    policy: FlowPolicy,
    prompts: Sequence[Prompt],
    rewards: Mapping[str, RewardModel],
    how: Draw,
    tell: Callable[[int, int], None] = lambda done, all: None,
) -> Pictures:
    """Draw `how.count` pictures of every prompt and score them; only those of the first `how.shown` prompts are kept."""
    require(len(prompts) >= 1, "prompts", len(prompts), "one or more")
    require(len(rewards) >= 1, "rewards", tuple(rewards), "one or more")
    scores: dict[str, list[Tensor]] = {name: [] for name in rewards}
    shown: list[Tensor] = []
    everyone = [(i, j) for i in range(len(prompts)) for j in range(how.count)]
    schedule = policy.schedule(how.steps)
    for start in range(0, len(everyone), how.batch):
        part = everyone[start : start + how.batch]
        asked = [prompts[i] for i, _ in part]
        noise = torch.stack([_noise(policy.latent_shape, how.seed, i * how.count + j) for i, j in part]).to(policy.device)
        latents = solve(how.solver, policy, schedule, policy.encode(asked), noise, Usage(), how.batch)
        images = policy.decode(latents)
        for name, reward in rewards.items():
            scores[name].append(score(reward, images, asked, invalid=True).cpu())
        shown += [images[k].cpu() for k, (i, j) in enumerate(part) if j == 0 and i < how.shown]
        tell(start + len(part), len(everyone))
    return Pictures({name: torch.cat(found).view(len(prompts), how.count) for name, found in scores.items()}, torch.stack(shown))


def _noise(shape: tuple[int, ...], seed: int, number: int) -> Tensor:
    """Standard normal, drawn on the CPU by a generator of its own, so that it does not depend on batches or the device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed * 1_000_003 + number))


def compare_scores(base: Tensor, trained: Tensor) -> PairedScore:
    """Paired comparison of scores [prompt, count]: pictures of one prompt are averaged, prompts are the independent units.

    The interval is Student's t for the mean of the prompts' differences. It speaks of other prompts of this kind, not of other
    seeds of training. Pairs with an invalid (NaN) score are left out. Raises `ConfigError` where none is left.
    """
    valid = base.isfinite() & trained.isfinite()
    kept = valid.any(1)
    if not bool(kept.any()):
        raise ConfigError("evaluate: the reward marked a picture of every pair invalid; there is nothing to compare")
    weight = valid[kept].double()
    before, after = ((torch.where(valid, t, 0.0)[kept].double() * weight).sum(1) / weight.sum(1) for t in (base, trained))
    difference = after - before
    n, mean = len(difference), float(difference.mean())
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * float(difference.std()) / math.sqrt(n) if n > 1 else math.nan
    return PairedScore(
        float(before.mean()), float(after.mean()), mean, mean - half, mean + half, float((difference > 0).double().mean()), n,
        int((~valid).sum()),
    )  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A finished evaluation: scores by reward, per-prompt means, what was compared and how, and the first pictures of both."""

    scores: dict[str, PairedScore]
    base: Pictures
    trained: Pictures
    prompts: tuple[str, ...]
    how: Draw
    facts: dict[str, Any]

    def values(self) -> dict[str, Any]:
        """Plain values for JSON: `facts`, the settings, the scores, and every prompt with its mean scores (null: invalid)."""
        lines = []
        for i, text in enumerate(self.prompts):
            means = {name: [_mean(self.base.scores[name][i]), _mean(self.trained.scores[name][i])] for name in self.scores}
            lines.append({"prompt": text, "scores": means})
        scores = {name: {k: _number(v) for k, v in asdict(found).items()} for name, found in self.scores.items()}
        return {**self.facts, "prompts": len(self.prompts), **asdict(self.how), "scores": scores, "each": lines}


def _mean(scores: Tensor) -> float | None:
    return _number(float(scores.nanmean()))


def _number(value: float) -> float | None:
    return None if isinstance(value, float) and math.isnan(value) else value


def compare_weights(
    policy: FlowPolicy,
    use_trained: Callable[[], None],
    prompts: Sequence[Prompt],
    rewards: Mapping[str, RewardModel],
    how: Draw,
    facts: dict[str, Any],
    tell: Callable[[str, int, int], None] = lambda what, done, all: None,
) -> Comparison:
    """Draw and score with `policy` as it is (the base weights), then again after `use_trained` has put the trained ones in."""
    base = draw_and_score(policy, prompts, rewards, how, lambda done, all: tell("base", done, all))
    use_trained()
    trained = draw_and_score(policy, prompts, rewards, how, lambda done, all: tell("trained", done, all))
    scores = {name: compare_scores(base.scores[name], trained.scores[name]) for name in rewards}
    return Comparison(scores, base, trained, tuple(prompt.text for prompt in prompts), how, facts)


def load_weights(policy: Any, folder: Path) -> None:
    """Put trained weights that diffusers can read into a `PipelinePolicy` without adapters.

    They are a LoRA (a file or a folder), or a folder with a transformer in ``transformer/``. Raises `CheckpointError` where they
    are neither, or of another model.
    """
    from safetensors import SafetensorError

    try:
        if (folder / "transformer").is_dir():
            whole = type(policy.transformer).from_pretrained(folder, subfolder="transformer", use_safetensors=True)
            policy.transformer.load_state_dict(whole.state_dict())
        else:
            place = (str(folder.parent), {"weight_name": folder.name}) if folder.is_file() else (str(folder), {})
            policy.pipe.load_lora_weights(place[0], use_safetensors=True, **place[1])
            _require_all_loaded(policy, policy.pipe.lora_state_dict(place[0], use_safetensors=True, **place[1]))
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"weights: {folder} holds no LoRA and no transformer for this model ({first[:200]})") from error


def _require_all_loaded(policy: Any, state: Any) -> None:
    """Raise `ValueError` where layers of a LoRA have found no place: diffusers silently leaves out those of another model."""
    tensors = state[0] if isinstance(state, tuple) else state
    wanted = {name.removeprefix("transformer.") for name in tensors if "lora_A" in name and not name.startswith("text_encoder")}
    layers = {name for name, module in policy.transformer.named_modules() if hasattr(module, "lora_A") and len(module.lora_A)}
    lost = sorted(name for name in wanted if name.partition(".lora_A")[0] not in layers)
    if lost or not wanted:
        raise ValueError(
            f"{len(lost)} of its {len(wanted)} layers are not in the model, such as {lost[0]}" if lost else "no LoRA layers"
        )
