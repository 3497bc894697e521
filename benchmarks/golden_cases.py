"""The runs of `golden.py`, described in the reference's terms, and the rewards that they use.

Every run names its settings, so that no default of a world or a method decides its numbers. What
no setting names stays implicit: shipped weights, prompts, a pipeline's time grid, the solvers'
constants, the credit of a method of `compare`, and what follows from the seed, such as the initial
LoRA and the noise of evaluations.

The cases `uniform-*` have uniform credit in every run, `rules-*` in none. With another rule, an
iteration's trajectories, log-probabilities and final rewards can differ from the second one on.

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

Settings = dict[str, Any]
HERE = f"{Path(__file__).resolve()}:"


@dataclass(frozen=True)
class Job:
    """One `flowrl` command in folder `name`.

    `folder` is the option for its folder. `copy`: start from a copy of that job's folder. `pause`:
    Ctrl-C in iteration 2.
    """

    name: str
    settings: Mapping[str, Any]
    command: str = "train"
    folder: str = "out"
    copy: str = ""
    pause: bool = False

    def arguments(self, folder: str) -> list[str]:
        """The command line."""
        words = [self.command]
        for name, value in {self.folder: folder, **self.settings}.items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            else:
                values = value if isinstance(value, tuple) else (value,)
                words += [f"--{option}", *map(str, values)]
        return words


# --- settings -------------------------------------------------------------------------------------

COMMON: Settings = {
    "iterations": 2,
    "reward_noise": 0.0,
    "reward_bias": 0.0,
    "trained_steps": "all",
    "drop_zero_advantages": False,
    "groups": 2,
    "num_steps": 6,
    "max_batch": 512,
    "chunk": 0,
    "overlap_rewards": "false",
    "offload": False,
    "optimizer": "adamw",
    "final_learning_rate": 1.0,
    "betas": (0.9, 0.99),
    "weight_decay": 1e-4,
    "max_grad_norm": 1.0,
    "minibatches": 2,
    "micro_batch": 256,
    "ema_decay": 0.8,
    "device": "cpu",
    "dtype": "float32",
    "lora_rank": 8,
    "lora_alpha": 16.0,
    "eval_every": 1,
    "eval_samples": 6,
    "eval_steps": 3,
    "eval_solver": "euler",
    "checkpoint_every": 2,
    "keep_checkpoints": 1,
}
POINTS: Settings = {
    **COMMON,
    "world": "mixture",
    "task": "direction",
    "reward_form": "soft",
    "groups": 4,
    "loss": "clipped(kl=exact, log_prob=exact)",
    "clip_range": 0.05,
    "kl_weight": 0.0,
    "learning_rate": 0.02,
}
"""The 2-D world."""
SHAPES: Settings = {
    **COMMON,
    "world": "shapes",
    "task": "compositional",
    "reward_form": "soft",
    "loss": "clipped(kl=without_delta, log_prob=exact)",
    "clip_range": 0.002,
    "kl_weight": 0.02,
    "learning_rate": 0.004,
}
"""The image world."""
MODEL: Settings = {
    **COMMON,
    "reward": HERE + "Redness",
    "resolution": 16,
    "width": 16,
    "num_frames": 1,
    "guidance_scale": 1.0,
    "train_guidance_scale": 0.0,
    "reference_guidance_scale": 0.0,
    "guidance_gradient": "both",
    "max_sequence_length": 24,
    "gradient_checkpointing": True,
    "decode_batch": 8,
    "decode_dtype": "float32",
    "tuning": "lora",
    "lora_rank": 2,
    "lora_alpha": 4.0,
    "lora_targets": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
    "num_steps": 5,
    "eval_samples": 2,
    "loss": "clipped(kl=exact, log_prob=exact)",
    "clip_range": 0.001,
    "kl_weight": 0.0,
    "learning_rate": 0.01,
}
"""Tiny random pipelines of the real SD3 and FLUX classes."""


UNIFORM = "uniform(std={}, clamp={})".format
GAINS = "stepwise-gain(normalise={}, lam={}, gamma={}, pool={}, clamp={}, probe='{}')".format
DENSE = "dense-gain(lam=0.0, gamma=1.0, pool=prompt, clamp=5.0, probe='{}')".format
TURNS = (
    "turning-point(consistent={}, balance={}, balance_scope={}, first_step={}, normalise=step, "
    "combine=replace, clamp={}, probe='{}')"
).format
DEPTH = "depth-relative(scope={}, std={}, backup={}, clamp=5.0, probe='{}')".format
SIBLINGS = "sibling-relative(normalise=true, leave_one_out=false, clamp=5.0, probe='{}')".format
BRANCH = "branch(children={}, weight={}, mean={})".format
COMB = "comb(branches={}, count={}, low=0, strides={}, weight=leaf, mean=leaf)".format
SUBSTEPS = "substeps(count=5, every=1, solver=euler)"
COMPLETION = "completion(every=1, solver=euler)"
ROOTED = BRANCH("(1, 2, 2)", "leaf", "leaf")
NFT = (
    "diffusion-nft(beta=1.0, advantage_clip=5.0, error=normalised, mode=all, decay=(0, 0.1, 0.5), "
    "times='permuted(fraction=0.99, shared=false)', noise={})"
).format
AWM = (
    "awm(weight=ghuber, power=0.25, clip=0.004, ratio={}, advantage_clip=5.0, advantage_scale=1.0, "
    "average_weight=1.0, kl={}, off_policy=false, decay=(0, 0.1, 0.3), "
    "times='stratified(count=3, first=without, fraction=0.9, shared=false)', noise=each)"
).format
DGPO = (
    "dgpo(beta_dpo=1.0, clip=5e-4, clip_kl=false, anchor={}, decay=(1, 0.1, 0.3), sample_from=2, "
    "times='steps(count=2, steps=4, shared=true)', noise=group)"
).format
DPM, SA = "multistep(solver=dpm++, tau=0.0)", "multistep(solver=sa, tau=0.4)"

CREDIT = {
    "flow-grpo": UNIFORM("group", 5.0),
    "dance-grpo": UNIFORM("group", 5.0),
    "diffusion-nft": UNIFORM("batch", "none"),
    "awm": UNIFORM("batch", "none"),
    "dgpo": UNIFORM("batch", "none"),
    "stepwise-flow-grpo": GAINS("joint", 0.0, 1.0, "prompt", 5.0, SUBSTEPS),
    "tp-grpo": TURNS("true", "aggregate", "batch", "true", 5.0, COMPLETION),
    "noise-weighted": "weighted(weights=noise)",
    "dense-grpo": DENSE(COMPLETION),
    "branch-grpo": DEPTH("tree", "sample", "mean", BRANCH("(1, 1, 2, 1, 2)", "leaf", "leaf")),
    "tempflow-grpo": f'weighted(weights=noise, rule="{SIBLINGS(COMB(2, "none", "(1,)"))}")',
    "granular-grpo": SIBLINGS(COMB(1, 1, "(1, 2, 3)")),
    "tree-grpo": f"backed-up(backup=softmax, clamp=5.0, probe='{ROOTED}')",
}
KERNEL = ("sampler", "noise_level", "window")
COLUMNS = ("method", "credit", *KERNEL, "initial_noise", "group_size", "loss")
SAMPLING = {
    "flow-grpo": ("flow-sde", 0.7, "1:4", "independent", 4),
    "dance-grpo": ("dance-sde", 0.3, "all-but-last", "shared", 4),
    "diffusion-nft": (DPM, 0.0, "all", "independent", 4, NFT("each")),
    "awm": (SA, 0.0, "all", "independent", 4, AWM("exp_first", "uniform")),
    "dgpo": (DPM, 0.0, "all", "independent", 4, DGPO("reference")),
    "stepwise-flow-grpo": ("flow-sde", 0.7, "1:4", "shared", 4),
    "tp-grpo": ("flow-sde", 0.7, "0:5", "independent", 4),
    "noise-weighted": ("cps", 0.7, "1:4", "independent", 4),
    "dense-grpo": ("ddim-sde", 0.7, "all", "independent", 4),
    "branch-grpo": ("dance-sde", 0.3, "all", "shared", 8),
    "tempflow-grpo": ("flow-sde", 0.7, "all-but-last", "independent", 10),
    "granular-grpo": ("flow-sde", 0.7, "0:3", "shared", 9),
    "tree-grpo": ("flow-sde", 0.7, "random:3:0.5", "shared", 8),
}
"""Kernel, noise level, window, noise at the start, group size, a forward-process method's loss."""
METHODS = {x: dict(zip(COLUMNS, (x, CREDIT[x], *y), strict=False)) for x, y in SAMPLING.items()}
FLOW, STEPWISE, TURNING = (METHODS[x] for x in ("flow-grpo", "stepwise-flow-grpo", "tp-grpo"))
MOVING = f"moving-average-gain(decay=0.9, clamp=5.0, probe='{SUBSTEPS}')"

# --- cases ----------------------------------------------------------------------------------------

UNIFORM_POINTS: dict[str, Settings] = {
    "clipped-kl": {"kl_weight": 0.05, "micro_batch": 7},
    "clipped-kl-without-delta": {
        "loss": "clipped(kl=without_delta, log_prob=released_cps)",
        "kl_weight": 0.1,
        "ema_decay": 0.0,
        "minibatches": 3,
    },
    "grpo-guard": {"loss": "grpo-guard(kl=exact)", "kl_weight": 0.02, "micro_batch": 16},
    "flow-dppo": {
        "loss": "flow-dppo(bound=1e-5, kl=exact)",
        "micro_batch": 1,
        "final_learning_rate": 0.1,
        "groups": 2,
    },
    "policy-gradient": {
        "loss": "policy-gradient(kl=exact)",
        "minibatches": 1,
        "max_grad_norm": 0.01,
    },
    "random-steps": {"sampler": "dance-sde", "noise_level": 0.3, "trained_steps": "random:0.6"},
    "untrained-step": {"window": "all", "trained_steps": "all-but-last"},
    "sliding": {"sampler": "cps", "window": "sliding:2:1:1", "max_batch": 5},
    "chunks": {"sampler": "ddim-sde", "window": "all", "chunk": 1, "overlap_rewards": "true"},
    "offload": {"window": "random:3", "offload": True, "eval_solver": "heun", "reward_noise": 0.1},
    "equal-rewards": {"reward_form": "graded", "groups": 8},
    "batch-std": {
        "credit": UNIFORM("batch", 1.0),
        "weight_decay": 0.1,
        "eval_solver": "unipc",
        "seed": 3,
    },
    "drop-zero": {
        "reward_form": "graded",
        "groups": 8,
        "drop_zero_advantages": True,
        "kl_weight": 0.05,
    },
    "invalid": {"group_size": 6, "reward": HERE + "SometimesInvalid", "micro_batch": 9},
    "nft-path": {**METHODS["diffusion-nft"], "sampler": "ode", "loss": NFT("path")},
    "awm-sum": {**METHODS["awm"], "loss": AWM("sum_first", "elbo"), "micro_batch": 2},
    "dgpo-old": {**METHODS["dgpo"], "loss": DGPO("old"), "micro_batch": 3, "kl_weight": 0.05},
    "dgpo-stochastic": {**METHODS["dgpo"], "sampler": "flow-sde()", "noise_level": 0.7},
}
OTHER_POINTS: dict[str, Settings] = {
    "turning-trend": {
        **TURNING,
        "credit": TURNS("false", "trend", "prompt", "false", "none", COMPLETION),
    },
    "reward-to-go": {
        "credit": GAINS("step", 0.9, 0.95, "batch", "none", "tweedie"),
        "chunk": 3,
        "overlap_rewards": "true",
        "reward_noise": 0.1,
    },
    "edges": {
        **METHODS["branch-grpo"],
        "credit": DEPTH("prompt", "population", "softmax", BRANCH("{0: 2, 2: 2}", "edge", "child")),
        "initial_noise": "independent",
    },
    "pruned": {
        **METHODS["branch-grpo"],
        "credit": f'pruned(rule="{CREDIT["branch-grpo"]}", steps=(4,), every=1, width=best)',
    },
    "value-tracker": {
        "credit": "value-tracker(decay=0.9, std=prompt, clamp=5.0)",
        "groups": 12,
        "iterations": 3,
    },
    "random-credit": {"credit": "random(seed=0)"},
    "components": {
        "credit": f"gdpo(rule='{UNIFORM('group', 5.0)}', batch=true)",
        "reward": HERE + "Components",
        "heldout_rewards": ("strict", "density"),
    },
}
UNIFORM_SHAPES: dict[str, Settings] = {
    "text": {"task": "text", "reward_form": "graded", "diversity": "pixels"},
    "preference": {"task": "preference", "reward_bias": 0.5, "lora_rank": 4, "lora_alpha": 4.0},
    "cps": {"sampler": "cps", "window": "0:2", "eval_solver": "dpm++", "micro_batch": 5},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16", "loss_scale": 1024.0},
    "overflow": {"dtype": "float16", "loss_scale": 2.0**24, "minibatches": 3},
}
OTHER_SHAPES: dict[str, Settings] = {
    "stepwise-bfloat16": {**STEPWISE, "dtype": "bfloat16", "reward_form": "graded"},
    "turning-later": {**TURNING, "window": "2:3", "task": "text"},
}
UNIFORM_MODELS: dict[str, Settings] = {
    "sd3-kl": {"kl_weight": 0.05, "micro_batch": 3},
    "sd3-full": {"tuning": "full", "learning_rate": 0.001, "max_batch": 3},
    "sd3-nft": {
        **METHODS["diffusion-nft"],
        "guidance_scale": 2.0,
        "train_guidance_scale": 1.0,
        "reference_guidance_scale": 1.5,
        "kl_weight": 0.05,
    },
}
OTHER_MODELS: dict[str, Settings] = {
    "sd3-tp-grpo": {**TURNING, "guidance_scale": 2.0},
    "flux-stepwise": {**STEPWISE, "kl_weight": 0.05, "decode_batch": 2},
}
BUILD = """
import sys
from flowrl.testing.tiny import tiny_flux, tiny_sd3
tiny_sd3().save_pretrained(sys.argv[1] + "/sd3")
tiny_flux().save_pretrained(sys.argv[1] + "/flux")
"""
"""Makes the pipelines in the folder that is the first argument, with the reference's code."""


def runs(base: Settings, named: Mapping[str, Settings]) -> list[Job]:
    """Trainings with the settings `base`, those of Flow-GRPO and their own."""
    start = {"seed": 0, "tracker": "none", **base, **FLOW}
    return [Job(name, {**start, **settings}) for name, settings in named.items()]


def split_methods(uniform: bool) -> dict[str, Settings]:
    """The methods with uniform credit, or the others."""
    return {x: y for x, y in METHODS.items() if y["credit"].startswith("uniform(") == uniform}


def models(inputs: Path, named: Mapping[str, Settings]) -> list[Job]:
    """Trainings of the pipelines; the part of a name before "-" is the pipeline's."""
    own = {name: {"model": inputs / name.partition("-")[0], **x} for name, x in named.items()}
    return runs({**MODEL, "prompts": inputs / "prompts.txt"}, own)


def interrupted(name: str, base: Settings, settings: Settings) -> list[Job]:
    """Four iterations: whole, paused after two and resumed, and repeated from checkpoint 2."""
    noisy = {"reward": HERE + "PauseOnDemand", "reward_noise": 0.05, "final_learning_rate": 0.5}
    kept = {"iterations": 4, "checkpoint_every": 2, "keep_checkpoints": 2}
    (whole,) = runs(base, {f"{name}-whole": {**settings, **noisy, **kept}})
    paused = Job(f"{name}-paused", {**whole.settings, "checkpoint_every": 3}, pause=True)
    trust = {"trust": True}
    return [
        whole,
        paused,
        Job(f"{name}-resumed", trust, folder="resume", copy=paused.name),
        Job(f"{name}-repeated", {"from": "000002", **trust}, folder="resume", copy=whole.name),
    ]


def compared() -> Job:
    """A comparison of two forms of uniform credit; `compare` names that of added rules only."""
    own = ("method", "credit", "seed", "tracker")
    (job,) = runs(POINTS, {"compared": {}})
    settings = {name: value for name, value in job.settings.items() if name not in own}
    arms = {"methods": "flow-grpo", "credit": UNIFORM("batch", 1.0), "seeds": (0, 1)}
    return Job(job.name, {**settings, **arms, "workers": 1}, "compare")


def cases(inputs: Path) -> dict[str, list[Job]]:
    """All runs by case; the names of a case's jobs are unique."""
    uniform, others = split_methods(True), split_methods(False)
    return {
        "uniform-compare": [compared()],
        "uniform-mixture": runs(POINTS, {**uniform, **UNIFORM_POINTS}),
        "uniform-shapes": runs(SHAPES, {**uniform, **UNIFORM_SHAPES}),
        "uniform-models": models(inputs, UNIFORM_MODELS),
        "uniform-resume": interrupted("nft", POINTS, METHODS["diffusion-nft"]),
        "rules-mixture": runs(POINTS, {**others, **OTHER_POINTS}),
        "rules-shapes": runs(SHAPES, {**others, **OTHER_SHAPES}),
        "rules-models": models(inputs, OTHER_MODELS),
        "rules-resume": [
            *interrupted("moving", SHAPES, {**STEPWISE, "credit": MOVING, "window": "random:3"}),
            *interrupted("tree", POINTS, METHODS["tree-grpo"]),
        ],
    }


# --- rewards --------------------------------------------------------------------------------------


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
        small = -images.flatten(1).square().mean(1)
        return {"red": Redness().score(images, prompts), "small": small}

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
    """Sends this process Ctrl-C in iteration 2, if GOLDEN_PAUSE names the metrics of the run."""

    def score(self, images: Tensor, prompts: Sequence[Any]) -> Tensor:
        """One score per image."""
        metrics = Path(os.environ.get("GOLDEN_PAUSE", os.devnull))
        # Lines of the untrained model and of iteration 1.
        if metrics.is_file() and len(metrics.read_text().splitlines()) == 2:
            os.environ.pop("GOLDEN_PAUSE")
            signal.raise_signal(signal.SIGINT)
        return super().score(images, prompts)
