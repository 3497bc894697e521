"""Which settings a run reads: most are read by every run, an option of a part if the part takes it,
and some under the conditions of `READ_IF`.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import partial

from flowrl.core.errors import require
from flowrl.core.protocols import MultistepSolver
from flowrl.run.build import make_world, run_method
from flowrl.run.config import RunConfig
from flowrl.run.parts.prompt_sources import rewards_of
from flowrl.run.parts.registry import options_of
from flowrl.run.parts.settings import owners
from flowrl.run.parts.specs import parse_spec
from flowrl.samplers import ODE

NAMED = ("adapter", "frozen_adapters", "negative_prompt")
"""Settings without a value in presets: those of a user's file need a reader, too."""


def _takes(kind: str, name: str, config: RunConfig) -> bool:
    """Whether the run's part of some `kind` takes the setting `name` as an option, and its spec
    does not set it.
    """
    if spec := getattr(config.algorithm, kind):
        parsed = parse_spec(spec, kind)
        return name in options_of(kind, parsed.name).keys() - parsed.options.keys()
    part = getattr(run_method(config), kind)
    return is_dataclass(part) and name in {item.name for item in fields(part)}


def _draws_steps(config: RunConfig) -> bool:
    return not isinstance(run_method(config).sampler, ODE | MultistepSolver)


def _has_lora(name: str, config: RunConfig) -> bool:
    return config.policy.tuning == "lora" if config.policy.model else _world_reads(name, config)


def _world_reads(name: str, config: RunConfig) -> bool:
    return name in getattr(make_world(config), "reads", [name])


def _guides_training(config: RunConfig) -> bool:
    return config.loss_guidance().scales(config.policy.guidance_scale)[0] != 1


def _guides(config: RunConfig) -> bool:
    own, evaluated = (run.policy.guidance_scale for run in (config, config.as_evaluated()))
    return {own, evaluated, *config.loss_guidance().scales(own)} != {1}


def _has_reference(config: RunConfig) -> bool:
    return run_method(config).loss.needs_reference


def _has_common_reward(config: RunConfig) -> bool:
    """Whether the setting `reward` is that of the task or of a source of prompts."""
    texts = (*config.environment.prompts, *config.environment.heldout_prompts)
    return not texts or len(rewards_of(texts)) < len(texts)


READ_IF: dict[str, Callable[[RunConfig], bool]] = {
    "noise_level": partial(_takes, "sampler", "noise_level"),
    **{name: partial(_takes, "loss", name) for name in ("clip_range", "kl_weight")},
    "window": _draws_steps,
    **{name: partial(_has_lora, name) for name in ("lora_rank", "lora_alpha", "lora_targets")},
    **{name: partial(_has_lora, name) for name in ("adapter", "frozen_adapters")},
    "guidance_gradient": _guides_training,
    "negative_prompt": _guides,
    **dict.fromkeys(("reference", "reference_guidance_scale"), _has_reference),
    **dict.fromkeys(
        ("diversity_prompts", "diversity_samples"), lambda run: bool(run.evaluation.diversity)
    ),
    "strict": lambda run: bool(run.logging.observe),
    **dict.fromkeys(
        ("tracker_project", "tracker_name"),
        lambda run: run.logging.tracker in ("wandb", "trackio"),
    ),
    **dict.fromkeys(("tracker_entity", "tracker_tags"), lambda run: run.logging.tracker == "wandb"),
    "reward_form": lambda run: not run.environment.reward,
    "reward": _has_common_reward,
    "hold_out": lambda run: bool(run.policy.model) and not run.environment.heldout_prompts,
    "loss_scale": lambda run: run.policy.dtype == "float16",
}
"""Settings that not every run reads, by the condition under which a run does."""

NEEDS = {
    **dict.fromkeys(("adapter", "frozen_adapters"), "tuning lora"),
    **dict.fromkeys(("lora_rank", "lora_alpha", "lora_targets"), "tuning lora"),
    "negative_prompt": "a guidance_scale or eval_guidance above 1",
    "guidance_gradient": "a guidance_scale above 1",
    **dict.fromkeys(("diversity_prompts", "diversity_samples"), "diversity"),
    "strict": "observe",
    **dict.fromkeys(("tracker_project", "tracker_name"), "tracker wandb or trackio"),
    **dict.fromkeys(("tracker_entity", "tracker_tags"), "tracker wandb"),
    "reward_form": "a reward of the task",
    "reward": "a source of prompts that has no reward of its own",
    "hold_out": "prompts of the user's own, or with heldout_prompts",
}
"""What a setting needs so that something reads it, in words."""


def _is_read(name: str, config: RunConfig) -> bool:
    value = config.flat()[name]
    empty = name in ("noise_level", "clip_range", "kl_weight", "window") and not value
    if empty or (name in NAMED and not (value or "").strip()):  # a negative prompt may be a space
        return True
    if name in READ_IF:
        return READ_IF[name](config)
    of_policy = owners(RunConfig)[name] == "policy" and not config.policy.model
    return not of_policy or _world_reads(name, config)


def unread(config: RunConfig, chosen: Iterable[str]) -> list[str]:
    """Those of the settings `chosen` that have no effect on this run."""
    return [name for name in chosen if not _is_read(name, config)]


def require_read(config: RunConfig, chosen: Iterable[str]) -> None:
    """Raise `ConfigError` for one of the settings `chosen` without effect on this run."""
    for name in unread(config, chosen):
        without = f" without {NEEDS[name]}" if name in NEEDS else ""
        allowed = f"left out{without}: nothing in this run uses it"
        require(False, name, config.flat()[name], allowed)
