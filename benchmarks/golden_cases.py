"""The runs of `golden.py`, described in the reference's terms, and the rewards that they use.

This file is itself a plug-in: `--reward golden_cases.py:Redness`.
"""

import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """One `flowrl` command in folder `name`. `copy`: start from a copy of that job's folder. `pause`: Ctrl-C in iteration 2."""

    name: str
    settings: Mapping[str, Any]
    command: str = "train"
    folder: str = "out"
    copy: str = ""
    pause: bool = False

    def arguments(self, folder: str, names: Mapping[str, str]) -> list[str]:
        """The command line, with settings called as in `names`, which the reference's own tree leaves empty."""
        words, former = [self.command], FORMER_DEFAULTS if names and "model" in self.settings else {}
        for name, value in {self.folder: folder, **self.settings, **former}.items():
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            values = ("true",) if names and name == "overlap_rewards" else values  # a flag in the reference
            words += [f"--{names.get(name, name).replace('_', '-')}", *map(str, values)]
        return [*words, "--trust"] if names and self.folder == "resume" else words


FORMER_DEFAULTS = {
    "betas": (0.9, 0.99), "ema_decay": 0.9, "lora_targets": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj",
    "add_v_proj", "to_add_out"),
}  # fmt: skip
"""What the reference has by default for a model, and the working tree only on request, under the working tree's names."""
POINTS = {
    "preset": "tiny", "world": "mixture", "groups": 4, "members": 4, "steps": 5, "window": "all-but-last", "updates": 2,
    "lr": 0.02, "clip": 0.001, "eval_prompts": 6, "eval_steps": 3,
}  # fmt: skip
"""Two iterations on the 2-D world."""
SHAPES = {"preset": "tiny", "window": "all-but-last", "updates": 2}
"""Two iterations on the image world."""
HERE = f"{Path(__file__).resolve()}:"

VARIANTS: dict[str, dict[str, Any]] = {
    "clipped-kl": {**POINTS, "kl_weight": 0.05, "micro_batch": 7},
    "clipped-kl-without-delta": {**POINTS, "loss": "clipped(kl=without_delta)", "kl_weight": 0.1, "ema": 0, "updates": 3},
    "grpo-guard": {**POINTS, "loss": "grpo-guard", "kl_weight": 0.02, "micro_batch": 16, "sampler": "flow-sde"},
    "flow-dppo": {**POINTS, "loss": "flow-dppo", "micro_batch": 1, "final_lr": 0.1, "groups": 2},
    "policy-gradient": {**POINTS, "loss": "policy-gradient", "updates": 1, "grad_clip": 0.01},
    "dance-grpo": {**POINTS, "method": "dance-grpo", "sampler": "dance-sde", "noise_level": 0.3, "window": "random:2"},
    "noise-weighted": {**POINTS, "method": "noise-weighted", "sampler": "cps", "window": "sliding:2:1:1", "max_batch": 5},
    "dense-grpo": {**POINTS, "method": "dense-grpo", "sampler": "ddim-sde", "window": "all", "chunk": 1},
    "stepwise": {**POINTS, "method": "stepwise-flow-grpo", "chunk": 3, "overlap_rewards": True, "reward_noise": 0.1},
    "turning-trend": {**POINTS, "credit": "turning-point(balance=trend)", "offload": True, "initial_noise": "shared"},
    "moving-average": {**POINTS, "credit": "moving-average-gain", "window": "random:3", "eval_solver": "heun"},
    "random-credit": {**POINTS, "credit": "random", "weight_decay": 0.1, "eval_solver": "unipc", "seed": 3},
    "components": {**POINTS, "credit": "gdpo", "reward": HERE + "Components", "heldout_rewards": ("strict", "density")},
    "invalid-samples": {**POINTS, "members": 6, "reward": HERE + "SometimesInvalid", "micro_batch": 9},
    "shapes-text": {**SHAPES, "task": "text", "reward_form": "graded", "method": "tp-grpo", "diversity": "pixels"},
    "shapes-preference": {**SHAPES, "task": "preference", "reward_bias": 0.5, "kl_weight": 0.05, "rank": 4, "alpha": 4},
    "shapes-cps": {**SHAPES, "sampler": "cps", "window": "0:2", "eval_solver": "dpm++", "micro_batch": 5},
    "shapes-bfloat16": {**SHAPES, "dtype": "bfloat16", "method": "stepwise-flow-grpo"},
    "shapes-float16": {**SHAPES, "dtype": "float16", "loss_scale": 1024.0, "kl_weight": 0.05},
    "shapes-float16-overflow": {**SHAPES, "dtype": "float16", "loss_scale": 2.0**24, "updates": 3},
}

BUILD = """
import sys
try:
    from flowrl.testing.tiny import tiny_flux, tiny_sd3
except ImportError:
    from flowrl.policies.tiny import tiny_flux, tiny_sd3
tiny_sd3().save_pretrained(sys.argv[1] + "/sd3")
tiny_flux().save_pretrained(sys.argv[1] + "/flux")
"""
"""Makes the pipelines in the folder that is the first argument; the tiny builders moved after the first reference."""


def models(inputs: Path) -> list[Job]:
    """Tiny random pipelines of the real SD3 and FLUX classes."""
    common = {
        "preset": "tiny", "prompts": inputs / "prompts.txt", "groups": 2, "reward": HERE + "Redness", "resolution": 16,
        "text_tokens": 24, "rank": 2, "alpha": 4, "updates": 2, "eval_prompts": 2, "lr": 0.01, "tracker": "none",
        "window": "all-but-last",
    }  # fmt: skip
    runs = {
        "sd3-tp-grpo": {"model": inputs / "sd3", "method": "tp-grpo", "guidance": 2.0},
        "sd3-kl": {"model": inputs / "sd3", "kl_weight": 0.05, "micro_batch": 3},
        "sd3-full": {"model": inputs / "sd3", "tuning": "full", "lr": 0.001, "max_batch": 3},
        "flux": {"model": inputs / "flux", "method": "stepwise-flow-grpo", "kl_weight": 0.05, "decode_batch": 2},
    }
    return [Job(name, {**common, **settings}) for name, settings in runs.items()]


def interrupted() -> list[Job]:
    """Four iterations: as a whole, paused after two and resumed, and repeated from the checkpoint of the second."""
    settings = {
        **SHAPES, "iterations": 4, "credit": "moving-average-gain", "window": "random:2", "reward": HERE + "PauseOnDemand",
        "reward_noise": 0.05, "kl_weight": 0.02, "final_lr": 0.5, "checkpoint_every": 2, "keep_checkpoints": 2,
    }  # fmt: skip
    return [
        Job("whole", settings),
        Job("paused", {**settings, "checkpoint_every": 3}, pause=True),
        Job("resumed", {}, folder="resume", copy="paused"),
        Job("repeated", {"from": "000002"}, folder="resume", copy="whole"),
    ]


def cases(inputs: Path) -> dict[str, list[Job]]:
    """All runs by case; the names of jobs are unique."""
    together = {"workers": 1}
    return {
        "tiny": [Job("tiny", {"preset": "tiny", "seeds": (0, 1), **together}, "compare")],
        "mixture": [Job("mixture", {"world": "mixture", "seeds": (0,), "iterations": 6, **together}, "compare")],
        "mixture-variants": [Job(name, settings) for name, settings in VARIANTS.items()],
        "sd3": models(inputs),
        "resume": interrupted(),
    }


@dataclass(frozen=True)
class Redness:
    """Reward of the runs above: the first channel's mean minus the others'."""

    def score(self, images: Tensor, prompts: Sequence[Any]) -> Tensor:
        """One score per image."""
        return images[:, 0].flatten(1).mean(1) - images[:, 1:].flatten(1).mean(1)


@dataclass(frozen=True)
class Components(Redness):
    """A reward of two components."""

    def parts(self, images: Tensor, prompts: Sequence[Any]) -> dict[str, Tensor]:
        """The components' scores."""
        return {"red": Redness().score(images, prompts), "small": -images.flatten(1).square().mean(1)}

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The reward that the components make up."""
        return parts["red"] + 0.5 * parts["small"]

    def score(self, images: Tensor, prompts: Sequence[Any]) -> Tensor:
        """One score per image."""
        return self.total(self.parts(images, prompts))


@dataclass(frozen=True)
class SometimesInvalid(Redness):
    """A reward that cannot judge about a quarter of the points."""

    marks_invalid = True

    def score(self, images: Tensor, prompts: Sequence[Any]) -> Tensor:
        """One score per image, or NaN."""
        scores = super().score(images, prompts)
        return torch.where(scores < -1.5, math.nan, scores)


@dataclass(frozen=True)
class PauseOnDemand(Redness):
    """Sends this process Ctrl-C in iteration 2, if the variable GOLDEN_PAUSE names the metrics file of the run."""

    def score(self, images: Tensor, prompts: Sequence[Any]) -> Tensor:
        """One score per image."""
        metrics = Path(os.environ.get("GOLDEN_PAUSE", os.devnull))
        if metrics.is_file() and len(metrics.read_text().splitlines()) == 2:  # the untrained model and iteration 1
            os.environ.pop("GOLDEN_PAUSE")
            signal.raise_signal(signal.SIGINT)
        return super().score(images, prompts)
