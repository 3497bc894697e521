"""What is checked before a run, in seconds: settings, packages, devices, files and prompts. No
weights of a model are read, and nothing is downloaded.
"""

import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.core.errors import ConfigError, DiskError, FlowrlError, require
from flowrl.core.policy_options import PolicyOptions
from flowrl.core.types import Prompt
from flowrl.policies import device_of
from flowrl.policies.pipeline import PipelinePolicy
from flowrl.policies.prompt_length import cut_prompts
from flowrl.rewards.contract import refusal, require_packages
from flowrl.run.begin import require_start
from flowrl.run.build import check, make_reward, policy_options, require_room
from flowrl.run.config import RunConfig
from flowrl.run.evaluation import as_evaluated, make_heldout_metrics
from flowrl.run.models.hub import find_source
from flowrl.run.models.load import quantization
from flowrl.run.models.sources import Source
from flowrl.run.models.weights import given_weights
from flowrl.run.optim import make_optimizer
from flowrl.run.parts.prompts import prompt_lines, prompt_places, read_prompts
from flowrl.run.parts.registry import find_maker
from flowrl.run.parts.trust import own_parts
from flowrl.run.results import require_no_run
from flowrl.run.saved import find_weights
from flowrl.run.trackers import chosen_tracker
from flowrl.run.worlds import prompts_of

SHOWN = 3
"""How many refused prompts a message lists."""
CHECKPOINT_BYTES = 4 * (1 + 1 + 2)
"""Bytes in a checkpoint per trained weight: the weight, its average, AdamW's two moments."""


@dataclass(frozen=True)
class Finding:
    """What was checked, and the result in words, or the error."""

    subject: str
    text: str
    error: FlowrlError | None = None


def findings(config: RunConfig, out: Path | None = None, processes: int = 1) -> Iterator[Finding]:
    """Check everything that can be known before weights are loaded.

    Args:
        config: the run.
        out: its new folder; None for a run that is resumed.
        processes: number of processes on this machine.

    Yields:
        Each finding when it is known, in the order in which a run would fail.
    """
    run, failed = _Checks(config, out, processes), set[str]()
    for subject, needs, work in (
        ("settings", (), run.settings),
        ("start", (), run.start),
        ("device", (), run.device),
        ("packages", (), run.packages),
        ("reward", ("settings",), run.reward),
        ("model", (), run.model),
        ("network", ("settings", "model"), run.network),
        ("prompts", ("network",), run.lengths),
        ("disk", ("network",), run.disk),
        ("out", (), run.folder),
    ):
        if failed & {*needs}:
            failed.add(subject)
            continue
        try:
            text = work()
        except FlowrlError as error:
            failed.add(subject)
            yield Finding(subject, str(error), error)
        else:
            if text:
                yield Finding(subject, text)


def require_ready(config: RunConfig, out: Path | None = None, processes: int = 1) -> None:
    """Raise the first error of `findings`."""
    for finding in findings(config, out, processes):
        if finding.error is not None:
            raise finding.error


@dataclass
class _Checks:
    config: RunConfig
    out: Path | None
    processes: int

    def settings(self) -> str:
        self.world = check(self.config)
        config, rollout = self.config, self.config.rollout
        subject = config.policy.model or config.environment.subject
        count = f"{rollout.groups} x {rollout.group_size} trajectories of {rollout.num_steps} steps"
        return f"{config.algorithm.method} on {subject}: {config.iterations} iterations, {count}"

    def start(self) -> str:
        return "" if self.out is None else require_start(self.config)

    def device(self) -> str:
        policy, self.found_device = self.config.policy, False
        device = device_of(policy.device)
        self.found_device = True
        text = f"{policy.device}, {policy.dtype}"
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            fits = policy.dtype != "bfloat16" or torch.cuda.is_bf16_supported()
            require(fits, "dtype", policy.dtype, f"float16 or float32 on {name}")
            text += f" on {name}"
        reward = self.config.environment.reward_device
        return f"{text}; reward on {device_of(reward)}" if reward else text

    def packages(self) -> str:
        config = self.config
        make_optimizer(config.optim, [nn.Parameter(torch.zeros(1))])
        tracker, options = chosen_tracker(config), policy_options(config)
        quantization(options)
        if config.batches.compile:
            _require_compiler(options.device)
        weights = f", {options.quantize} weights" if options.quantize != "none" else ""
        return f"optimizer {config.optim.optimizer}, tracker {tracker}{weights}"

    def reward(self) -> str:
        if self.out is None:  # a run that has begun goes on with its prompts
            return ""
        environment, texts = self.config.environment, list[str]()
        spec = environment.sources.reward
        if spec and _can_be_asked("reward", spec):
            reward = make_reward(self.config)
            require_packages(reward)
            count = self._require_scored(reward)
            texts.append(f"{spec}, which refuses none of {count:,} prompts")
        elif spec:
            texts.append(f"{spec}, which has no method refuses")
        metrics = make_heldout_metrics(self.config, self.world)
        for name, reward in metrics.rewards.items():
            if _can_be_asked("heldout_rewards", name):
                require_packages(reward)
                prompts = metrics.own.get(name) or self._prompts["heldout"]
                refused = [one for one in prompts if refusal(reward, one)]
                if refused:
                    which = f"{len(refused):,} of {len(prompts):,} held-out prompts"
                    texts.append(f"{name} cannot score {which} and will be left out")
        return "; ".join(texts)

    @cached_property
    def _prompts(self) -> dict[str, list[Prompt]]:
        task = self.config.environment.task
        return {part: prompts_of(self.world, task, part) for part in ("train", "heldout")}

    def _require_scored(self, reward: object) -> int:
        """The number of prompts, all of which `reward` can score. Raises `ConfigError` with the
        places of those that it cannot.
        """
        environment, asked = self.config.environment, 0
        sources = {"train": environment.sources.train, "heldout": environment.sources.heldout}
        for part, prompts in self._prompts.items():
            if part == "heldout" and prompts == self._prompts["train"]:
                continue
            asked += len(prompts)
            reasons = {n: text for n, one in enumerate(prompts) if (text := refusal(reward, one))}
            if not reasons:
                continue
            places = [f"number {number}" for number in range(1, len(prompts) + 1)]
            if self.config.policy.model:
                given = sources[part] or sources["train"]
                by_prompt = {
                    _identity(replace(one, source=source.name)): place
                    + f" of {source.place}" * bool(source.name)
                    for source in reversed(given)
                    for one, place in reversed(
                        [*zip(read_prompts(source.place), prompt_places(source.place), strict=True)]
                    )
                }
                places = [by_prompt[_identity(one)] for one in prompts]
            listed = "; ".join(f"{places[n]}: {reasons[n]}" for n in [*reasons][:SHOWN])
            more = f" and {len(reasons) - SHOWN:,} more" if len(reasons) > SHOWN else ""
            setting = "prompts" if part == "train" else "heldout_prompts"
            raise ConfigError(
                f"{setting}: the reward cannot score {len(reasons):,} of {len(prompts):,} prompts:"
                f" {listed}{more}"
            )
        return asked

    def model(self) -> str:
        self.source: Source | None = None
        policy = self.config.policy
        if not policy.model:
            return ""
        try:
            source = find_source(policy.model, policy.original, download=False)
        except ConfigError:
            names = policy.original or policy.model, policy.model
            offline = import_module("huggingface_hub.constants").HF_HUB_OFFLINE
            if offline or any(map(os.path.exists, names)):
                raise
            return f"{names[0]} is not downloaded yet, so its parts are not checked"
        source.check()
        self.source = source
        parts = []
        for part in source.parts:
            variant = None if part in source.in_file else source.variant(part)
            origin = source.file.name if source.file and part in source.in_file else variant
            parts.append(f"{part} ({origin})" if origin else part)
        return f"{source.name}: {', '.join(parts)}"

    def network(self) -> str:
        """The policy on meta: sizes, layers, ranks, adapters, attention kernels."""
        self.policy: PipelinePolicy | None = None
        if self.source is None or not self.source.can_be_on_meta:
            return ""
        options = replace(policy_options(self.config), compile=False)
        if not self.found_device:  # that error is known
            options = replace(options, device="cpu", attention_backend=None)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*non-meta parameter")  # of an adapter
            pipe, family = self.source.on_meta(), self.source.family
            policy = PipelinePolicy(pipe, family, options, **_adapters(pipe, options))
        require_room(self.config, policy, self.processes)
        with as_evaluated(policy, self.config):  # the size and the guidance are allowed
            self.policy = policy
        count = sum(parameter.numel() for parameter in policy.trainable().values())
        trained = f"LoRA of rank {options.lora_rank}" if options.trained == "lora" else "full"
        latents, pixels = (" x ".join(map(str, s)) for s in (policy.latent_shape, options.size))
        return f"{pixels} pixels, latents {latents}; {trained}, {count:,} trained weights"

    def lengths(self) -> str:
        if self.policy is None:
            return ""
        texts = {one.text: None for prompts in self._prompts.values() for one in prompts}
        pipe, family = self.policy.pipe, self.policy.family
        tokens = self.policy.options.max_sequence_length or family.text_tokens
        cut = cut_prompts(pipe, family, [*texts], tokens)
        return "; ".join(cut) or f"none of {len(texts):,} is cut at a text encoder's length"

    def disk(self) -> str:
        if self.policy is None or self.out is None:
            return ""
        count = sum(parameter.numel() for parameter in self.policy.trainable().values())
        # one more while it is written; the weights at the end in two forms
        kept = self.config.logging.keep_checkpoints + 1
        needed = (kept * CHECKPOINT_BYTES + 8) * count
        place = next(folder for folder in (self.out, *self.out.parents) if folder.exists())
        free = shutil.disk_usage(place).free
        text = f"{needed / 1e9:,.2f} GB for checkpoints and weights, {free / 1e9:,.2f} GB free"
        if needed > free:
            raise DiskError(f"out: {self.out} needs about {text}; keep fewer (keep_checkpoints)")
        return text

    def folder(self) -> str:
        if self.out is None:
            return ""
        require_no_run(self.out)
        return f"{self.out} is free"


def _identity(prompt: Prompt) -> bytes:
    """A prompt without its weight, which may be that of a source."""
    return prompt_lines([replace(prompt, weight=1)])


def _adapters(pipe: Any, options: PolicyOptions) -> dict[str, Any]:
    """The LoRAs in `options`, read; of all weights of a transformer only that they exist."""
    if options.adapter and find_weights(options.adapter, option="adapter").is_full:
        options = replace(options, adapter=None)
    return given_weights(pipe, options)


def _can_be_asked(setting: str, spec: str) -> bool:
    """Whether a reward may be built for its `refuses`: those of the user only if they have it, as
    others may load weights when they are built.
    """
    own = [part.spec for part in own_parts({setting: spec}) if part.kind == "reward"]
    return all(hasattr(find_maker("reward", one), "refuses") for one in own)


def _require_compiler(device: str) -> None:
    """Raise `ConfigError` without what torch.compile needs."""
    if device_of(device).type == "cuda":
        found, need = find_spec("triton") is not None, "with the package triton: pip install triton"
    else:
        compilers: Sequence[str] = ("g++", "clang++", "c++", os.environ.get("CXX", "g++"))
        found, need = any(map(shutil.which, compilers)), "with a C++ compiler such as g++"
    require(found, "compile", True, f"{need}; or False")
