"""The settings of a run: one frozen data class, presets, and its JSON form."""

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_origin

import torch

from flowrl.errors import ConfigError, require
from flowrl.flow.time import uniform_schedule
from flowrl.methods import Method, make_method, make_sampler, try_credit
from flowrl.policies.pipeline import ModelOptions
from flowrl.protocols import PolicyLoss, RandomSampler, RewardModel
from flowrl.registry import build
from flowrl.rewards import NoisyReward
from flowrl.rollout import require_solver
from flowrl.samplers import transition_stds
from flowrl.training.optim import OPTIMISERS, LossScale
from flowrl.training.presets import combine
from flowrl.training.settings_file import read_settings
from flowrl.types import Schedule
from flowrl.worlds.base import PolicyOptions, World, world
from flowrl.worlds.finetune import FORM, TASK, model_world

DTYPES = ("float32", "bfloat16", "float16")
TRACKERS = ("auto", "none", "tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class RunConfig:
    """Everything one training run depends on. The defaults are the five-minute preset on the shapes world."""

    method: str = "flow-grpo"
    """flow-grpo, stepwise-flow-grpo, tp-grpo, dance-grpo, noise-weighted or dense-grpo; the name shown for a rule of your own."""
    credit: str = ""
    """Another credit rule: NAME, NAME(option=value), or path/to/file.py:Class (then `method` is only its name in tables)."""
    world: str = "shapes"
    """shapes (text to image), mixture (two dimensions) or model (see `model`)."""
    task: str = "compositional"
    """compositional, text or preference (shapes); direction (mixture); prompts (model)."""
    reward_form: str = "soft"
    """strict (0/1), graded (partial credit) or soft (continuous)."""
    reward: str = ""
    """Another reward than the task's own: NAME, NAME(option=value) or path/to/file.py:Class; `flowrl parts` lists names."""
    reward_noise: float = 0.0
    """Standard deviation of the noise on every score while training; evaluation is without."""
    reward_bias: float = 0.0
    """How much training also likes bright pictures: the mean of a picture's values times this; evaluation is without."""
    heldout_rewards: tuple[str, ...] = ()
    """Rewards that nobody trains on, scored in every evaluation: names as for `reward`; also strict, graded, soft, palette,
    balance and clarity (shapes), or strict, graded, soft and density (mixture)."""
    diversity: str = ""
    """How different the samples of one prompt are, in every evaluation: pixels, latents, clip, or path/to/file.py:Class."""
    diversity_prompts: int = 8
    """Held-out prompts whose samples are compared for `diversity`."""
    diversity_members: int = 8
    """Samples of each of them."""
    seed: int = 0
    """Draws the adapter's first matrices, the prompts' order and all noise."""
    iterations: int = 12
    """Rollouts with the updates that follow them."""
    prompts: int = 16
    """Prompts (groups) per iteration."""
    members: int = 12
    """Samples of each prompt: the size of a group."""
    steps: int = 10
    """Denoising steps while training."""
    sampler: str = "flow-sde"
    """flow-sde, dance-sde, cps or ddim-sde; NAME of a plug-in, or path/to/file.py:Class."""
    noise_level: float = 0.7
    """The sampler's noise: a of flow-sde and ddim-sde, eta of dance-sde and cps."""
    window: str = "2:5"
    """Stochastic (trained) steps: all, all-but-last, START:SIZE, random:SIZE, or sliding:SIZE[:STRIDE[:EVERY]]."""
    initial_noise: str = "auto"
    """Whether the members of a group start from the same noise: auto (as the method says), shared or independent."""
    loss: str = "clipped"
    """clipped, grpo-guard, flow-dppo or policy-gradient, with options as in clipped(kl=without_delta); a plug-in or file."""
    updates: int = 4
    """Optimiser steps per iteration; the trajectories are split between them."""
    lr: float = 4e-3
    """Learning rate of AdamW."""
    final_lr: float = 1.0
    """Share of `lr` that is left at the last iteration; it falls linearly."""
    clip: float = 2e-3
    """How far a ratio may move before its pair stops counting (losses that clip)."""
    kl_weight: float = 0.0
    """Weight of the KL to the base model in the loss (beta)."""
    rank: int = 8
    """LoRA rank (shapes)."""
    alpha: float = 16.0
    """LoRA alpha."""
    weight_decay: float = 1e-4
    """Weight decay of AdamW."""
    grad_clip: float = 1.0
    """Largest norm of a gradient; longer ones are scaled down."""
    ema: float = 0.8
    """Decay of the averaged weights that evaluation uses, per optimiser step; 0 = no averaging."""
    micro_batch: int = 256
    """(trajectory, step) pairs per backward pass."""
    max_batch: int = 512
    """Latents per network call."""
    chunk: int = 0
    """Groups rolled out at a time (by each process): less memory; 0 = all at once."""
    overlap_rewards: bool = False
    """Score finished chunks while the next one is rolled out, for slow (remote) rewards; needs a `chunk`."""
    offload: bool = False
    """Keep the trajectories in main memory between rollout and update."""
    optimiser: str = "adamw"
    """adamw, or adamw-8bit (needs bitsandbytes)."""
    loss_scale: float = 65536.0
    """First factor of the loss where `dtype` is float16, adapted as training goes; 0 = none."""
    compile: bool = False
    """Compile the blocks of `model` by torch.compile: a minute or more at the start, faster calls afterwards."""
    eval_every: int = 6
    """Iterations between evaluations; the first and last iterations are always evaluated."""
    eval_prompts: int = 192
    """Held-out samples per evaluation (prompts are repeated where there are fewer)."""
    eval_steps: int = 20
    """ODE steps while evaluating."""
    eval_solver: str = "euler"
    """euler, heun (two evaluations per step), dpm++ or unipc."""
    checkpoint_every: int = 10
    """Iterations between checkpoints; one is always written at the end and on Ctrl-C."""
    keep_checkpoints: int = 1
    """How many of the newest checkpoints stay; an older one goes when the newer is complete."""
    device: str = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    """Precision of the network: float32, bfloat16 or float16 (transition maths is always float32)."""
    weights: str = ""
    """Base weights other than those that ship (made by `flowrl pretrain`)."""
    model: str = ""
    """Train this instead of a world's model: the folder of a diffusers pipeline, or its name on the Hub."""
    prompt_file: str = ""
    """Training prompts for `model`: a text file with a prompt a line, .jsonl with "prompt" and metadata, a slice of a generator's
    list, as in compositional[0:500] (also text, pictures), or a dataset: hf:NAME[:SPLIT[:COLUMN]], a folder or .parquet."""
    heldout_file: str = ""
    """Prompts for evaluating `model`, in a file like `prompt_file`; without it, the training prompts."""
    resolution: int = 512
    """Height and width of the model's pictures in pixels."""
    guidance: float = 1.0
    """Classifier-free guidance of `model`, in sampling, training and evaluation; 1 = off."""
    tuning: str = "lora"
    """What of `model` is trained: lora or full."""
    adapter: str = ""
    """Start `model` from this LoRA (a file or folder that diffusers reads; `rank` must be the file's)."""
    frozen_adapters: str = ""
    """LoRAs of `model` that are in use but not trained: files or folders, as PATH or NAME=PATH, separated by commas."""
    decode_batch: int = 8
    """Latents of `model` per call of its image decoder."""
    decode_dtype: str = "float32"
    """Precision of the image decoder of `model`: float32, bfloat16 or float16."""
    text_tokens: int = 0
    """Length of the prompts of the model's T5 encoder; 0 = as its pipeline has it."""
    checkpointing: bool = False
    """Gradient checkpointing of `model`: less memory, one more forward pass in updates."""
    tracker: str = "auto"
    """none, tensorboard, wandb or trackio; auto is tensorboard for `model` where it is installed, and none else."""

    def __post_init__(self) -> None:
        for name in ("iterations", "prompts", "updates", "micro_batch", "max_batch", "eval_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.chunk >= 0, "chunk", self.chunk, "1 or more, or 0 for all groups at once")
        need = "with `chunk` 1 or more only: a chunk's rewards are computed beside the next one's rollout"
        require(self.chunk >= 1 or not self.overlap_rewards, "overlap_rewards", self.overlap_rewards, need)
        require(self.optimiser in OPTIMISERS, "optimiser", self.optimiser, f"one of {', '.join(OPTIMISERS)}")
        LossScale(self.loss_scale)
        for name in ("steps", "eval_prompts", "eval_steps", "diversity_prompts", "keep_checkpoints"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.members >= 2, "members", self.members, "2 or more: a group of one has nobody to be compared with")
        require(self.diversity_members >= 2, "diversity_members", self.diversity_members, "2 or more: one sample has no pair")
        require(len(set(self.heldout_rewards)) == len(self.heldout_rewards), "heldout_rewards", self.heldout_rewards, "each once")
        require(0 < self.lr < math.inf, "lr", self.lr, "above 0")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "0 or more")
        require(0 <= self.final_lr <= 1, "final_lr", self.final_lr, "in [0, 1]")
        require(self.grad_clip > 0, "grad_clip", self.grad_clip, "above 0")
        require(0 <= self.ema < 1, "ema", self.ema, "in [0, 1)")
        require(self.rank >= 1, "rank", self.rank, "1 or more")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(self.reward_noise >= 0, "reward_noise", self.reward_noise, "0 or more")
        require_solver(self.eval_solver)
        choices = ("auto", "shared", "independent")
        require(self.initial_noise in choices, "initial_noise", self.initial_noise, f"one of {', '.join(choices)}")
        fits = (self.world == "model") == bool(self.model)
        require(fits, "world", self.world, "model where `model` is given, and only there")
        require(self.tracker in TRACKERS, "tracker", self.tracker, f"one of {', '.join(TRACKERS)}")
        require(self.tuning in ("lora", "full"), "tuning", self.tuning, "lora or full")
        chosen = self.make_world()
        require(self.task in chosen.tasks, f"task of world {self.world}", self.task, f"one of {', '.join(chosen.tasks)}")
        require(self.reward_form in chosen.forms, "reward_form", self.reward_form, f"one of {', '.join(chosen.forms)}")
        silent = self.sampler == "ode" or self.noise_level == 0
        require(
            not silent,
            "noise_level" if self.sampler != "ode" else "sampler",
            self.noise_level if self.sampler != "ode" else "ode",
            "above 0, with a stochastic sampler: the loss needs log-probabilities, and a deterministic step has none",
        )
        stds = self._trial_schedule().stds
        require(stds is not None and bool((stds > 0).any()), "window", self.window, "at least one stochastic step")

    def _trial_schedule(self) -> Schedule:
        """An even grid with this run's stds, for checks before anything is built."""
        return even_schedule(self.steps, self.sampler, self.noise_level, self.window)

    def make_world(self) -> World:
        """The world by name, or the one that `model`, its prompts and its reward make up."""
        if not self.model:
            return world(self.world)
        return model_world(self.model, self.prompt_file, self.heldout_file, self.reward, self.model_options())

    def make_method(self) -> Method:
        """The method by name, with this run's sampler, clip and KL weight; its rule is tried on a random table first."""
        sampler = make_sampler(self.sampler, self.noise_level, self.window)
        shared = None if self.initial_noise == "auto" else self.initial_noise == "shared"
        method = make_method(self.method, sampler, self.make_loss(), self.credit, shared)
        try_credit(method.credit, self._trial_schedule(), self.members)
        return method

    def make_loss(self) -> PolicyLoss:
        """The loss by name, with this run's clip and KL weight where it has such options and the spec does not set them."""
        return build("loss", self.loss, clip=self.clip, kl_weight=self.kl_weight)

    def make_reward(self) -> RewardModel:
        """The reward that training uses: the task's own in `reward_form`, or `reward`; with errors where the run wants them."""
        model = build("reward", self.reward, device=self.device) if self.reward else self.make_world().reward(self.reward_form)
        errs = self.reward_noise != 0 or self.reward_bias != 0
        return NoisyReward(model, self.reward_noise, self.reward_bias, self.seed) if errs else model

    def model_options(self) -> ModelOptions:
        """How `model` becomes a policy."""
        return ModelOptions(
            height=self.resolution, width=self.resolution, guidance=self.guidance, train=self.tuning, adapter=self.adapter,
            text_tokens=self.text_tokens, checkpointing=self.checkpointing, keep_reference=self.make_loss().needs_reference,
            rank=self.rank, alpha=self.alpha, seed=self.seed, device=self.device, dtype=self.dtype,
            frozen_adapters=tuple(filter(None, self.frozen_adapters.split(","))), compile="inductor" if self.compile else "",
            decode_batch=self.decode_batch, decode_dtype=self.decode_dtype,
        )  # fmt: skip

    def policy_options(self) -> PolicyOptions:
        """What the world's policy is built from; the seed draws the adapter's first matrices."""
        return PolicyOptions(self.rank, self.alpha, self.seed, self.device, self.dtype, self.weights)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "RunConfig":
        """The inverse of `as_dict`. Raises `ConfigError` naming settings that do not exist."""
        known = {f.name for f in fields(RunConfig)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"config: unknown settings {', '.join(unknown)}; allowed: {', '.join(sorted(known))}")
        chosen: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return RunConfig(**chosen)


def even_schedule(steps: int, kernel: str, noise_level: float, window: str) -> Schedule:
    """An even grid with a sampler's stds; of a sampler that is drawn every iteration, those of its first draw."""
    sampler = make_sampler(kernel, noise_level, window)
    grid = uniform_schedule(steps)
    if isinstance(sampler, RandomSampler):
        sampler = sampler.draw(grid, torch.Generator().manual_seed(0))
    return replace(grid, stds=transition_stds(sampler, grid))


def load_config(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or settings from a .yaml file; `ConfigError` where it is missing or neither."""
    if not path.is_file():
        raise ConfigError(f"config: the file {path} does not exist")
    if path.suffix in (".yaml", ".yml"):
        return read_settings(path, setting_kinds()).settings
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"config: {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config: {path} must hold a JSON object")
    return values


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "long": {"iterations": 75, "lr": 3e-3, "final_lr": 0.2, "eval_every": 15, "eval_prompts": 384},
    "tiny": {
        "iterations": 2, "prompts": 2, "members": 3, "steps": 4, "eval_every": 1, "eval_prompts": 4,
        "eval_steps": 4, "window": "1:2",
    },
}  # fmt: skip

MIXTURE_DEFAULTS: dict[str, Any] = {
    "task": "direction", "lr": 2e-2, "iterations": 40, "eval_every": 5, "window": "0:5",
}  # fmt: skip


MODEL_DEFAULTS: dict[str, Any] = {
    "world": "model", "task": TASK, "reward_form": FORM, "steps": 10, "window": "all-but-last", "updates": 2, "lr": 3e-4,
    "clip": 1e-4, "rank": 32, "alpha": 64.0, "ema": 0.9, "prompts": 4, "members": 24, "micro_batch": 8, "max_batch": 16,
    "iterations": 300, "eval_every": 20, "eval_prompts": 32, "eval_steps": 40, "checkpointing": True,
}  # fmt: skip
"""Steps, updates, learning rate, clip, LoRA and group size as Flow-GRPO has them for SD3.5-Medium (arXiv 2505.05470); 4 groups an
iteration for one GPU instead of its 48."""


@dataclass(frozen=True)
class Preset:
    """A named set of changes to the defaults."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)

    def apply(self, **changes: Any) -> RunConfig:
        """The run with this preset's settings, then `changes` on top; the mixture world and models bring their own defaults."""
        base = MIXTURE_DEFAULTS if changes.get("world") == "mixture" else {}
        if {**self.changes, **changes}.get("model"):
            base = {**MODEL_DEFAULTS, "device": "cuda", "dtype": "bfloat16"} if torch.cuda.is_available() else MODEL_DEFAULTS
        return replace(RunConfig(), **{**base, **self.changes, **changes})


def preset(name: str) -> Preset:
    """A preset by name, a .yaml file, or several of them separated by commas (see `flowrl.training.presets`).

    Raises `ConfigError` for an unknown one."""
    return Preset(name, combine(name, PRESETS, setting_kinds()).settings)


def setting_kinds() -> dict[str, type]:
    """The settings of a run and their types."""
    return {item.name: get_origin(item.type) or item.type for item in fields(RunConfig)}  # pyright: ignore[reportReturnType]
