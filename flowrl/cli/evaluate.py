"""`flowrl evaluate`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from annotated_types import Ge

from flowrl.cli.options import typed_command
from flowrl.core.errors import CheckpointError, ConfigError, require
from flowrl.core.options import Count, Seed, Whole

if TYPE_CHECKING:
    from flowrl.core.protocols import FlowPolicy, RewardModel
    from flowrl.core.types import Prompt
    from flowrl.training.weight_comparison import WeightComparison

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingOptions:
    """How images are sampled; both models sample alike."""

    count: Count = 1
    """Images per prompt."""
    num_steps: Count | None = None
    """ODE steps [default: the run's, else 40]."""
    guidance_scale: Annotated[float, Ge(1)] | None = None
    """Classifier-free guidance of both models [default: the run's, else 1]."""
    negative_prompt: str | None = None
    """Negative prompt of the guidance [default: the run's, else empty]."""
    resolution: Count | None = None
    """Height in pixels, and width without --width [default: the run's, else 512]."""
    width: Count | None = None
    """Width in pixels [default: the run's, else the height]."""
    num_frames: Count | None = None
    """Frames of a video [default: the run's, else 1]."""
    seed: Seed = 20240
    """Seed of the noise, which is the same for both models."""
    max_sequence_length: Whole = 0
    """Length of the prompts of the T5 encoder; 0 = as the run or the pipeline has it."""


@dataclass(frozen=True)
class ComputingOptions:
    """Where the networks compute, and in which precision."""

    batch: Count = 16
    """Latents per network call and images decoded at a time."""
    device: str = ""
    """cpu or cuda [default: cuda for a model if there is a GPU]."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """float32, bfloat16 or float16 [default: the run's, else bfloat16 on cuda and float32 on the
    CPU].
    """


@dataclass(frozen=True)
class Evaluate:
    """Score base and trained weights on the same prompts from the same noise: table, JSON and a
    grid of images.

    Examples: flowrl evaluate --weights runs/mine --reward pickscore --reward ocr

    flowrl evaluate --weights lora-folder --model stabilityai/stable-diffusion-3.5-medium --prompts
    prompts.txt --reward pickscore
    """

    weights: Path
    """Folder of a finished run; or, with --model, a LoRA (file or folder) or a folder with
    transformer/ in diffusers' form.
    """
    model: str = ""
    """The base model of weights that are not a run's: a folder or a name on the Hub."""
    prompts: str = ""
    """File of prompts, or a generator's slice as text[0:64]; default the run's held-out prompts
    (required with --model).
    """
    reward: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME, NAME(option=value) or path/to/file.py:Class; repeat the option for several rewards.
    Default: the run's.
    """
    limit: Whole = 0
    """Number of prompts, the first of the file; 0 = all (of a run without a model: as many as it
    evaluated).
    """
    shown: Whole = 8
    """Prompts in grid.png."""
    out: Path | None = None
    """Folder for the results; default evaluation/ in the run's folder, or next to the weights."""
    html: bool = False
    """Write report.html as well."""
    trust: bool = False
    """Run code that the settings in `weights` name, and use their addresses and keys."""

    sampling: Annotated[SamplingOptions, tyro.conf.arg(name="sampling")] = field(
        default_factory=SamplingOptions
    )
    computing: Annotated[ComputingOptions, tyro.conf.arg(name="computing")] = field(
        default_factory=ComputingOptions
    )

    def main(self) -> int:
        """Compare, show, write."""
        from flowrl.cli.card import write_card
        from flowrl.cli.report import write_evaluation
        from flowrl.io import new_folder
        from flowrl.training.weight_comparison import SamplingSettings, compare_weights

        setup = _lora_setup(self) if self.model else _run_setup(self)
        how = SamplingSettings(
            setup.steps, self.sampling.count, self.sampling.seed, self.computing.batch, self.shown
        )
        out = (
            self.out
            or (self.weights if self.weights.is_dir() else self.weights.parent) / "evaluation"
        )
        facts = {"command": typed_command(), "weights": str(self.weights), **setup.facts}
        with new_folder(
            out, "evaluation", lambda folder: (folder / "evaluation.json").exists(), lambda: False
        ):
            found = compare_weights(
                setup.policy,
                setup.load_trained,
                setup.prompts,
                setup.rewards,
                how,
                facts,
                _progress(),
            )
            write_evaluation(found, out, self.html)
        if (
            (self.weights / "README.md").exists()
            and not self.model
            and out == self.weights / "evaluation"
        ):
            write_card(self.weights)
        print(table(found))
        print(
            f"Wrote {out}/evaluation.json and"
            f" {out}/grid.png{f' and {out}/report.html' if self.html else ''}"
        )
        return 0


@dataclass(frozen=True)
class _Setup:
    """The policy with base weights, a function that loads the trained ones, and what both are
    compared on.
    """

    policy: "FlowPolicy"
    load_trained: Callable[[], None]
    prompts: "list[Prompt]"
    rewards: "dict[str, RewardModel]"
    steps: int
    facts: dict[str, Any]


def _run_setup(args: Evaluate) -> _Setup:
    """Base and averaged weights of a finished run, with the run's settings unless the options
    replace them.
    """
    from flowrl.core.protocols import GroupReward
    from flowrl.parts.prompts import prompts_from
    from flowrl.rewards import evaluation_reward
    from flowrl.training.build import load_trained, make_reward, make_world, policy_options
    from flowrl.training.config import load_config
    from flowrl.worlds.base import prompts_of

    if not (args.weights / "config.json").is_file():
        raise ConfigError(
            f"weights: {args.weights} is not the folder of a run; for a LoRA or a transformer give"
            " its --model too"
        )
    config = load_config(args.weights / "config.json", args.trust).allowed(
        ("reward",) if args.reward else ()
    )
    given = ("guidance_scale", "negative_prompt", "resolution", "width", "num_frames")
    sampling, computing = args.sampling, args.computing
    changes = {
        name: getattr(sampling, name) for name in given if getattr(sampling, name) is not None
    }
    changes |= {"dtype": computing.dtype} if computing.dtype else {}
    changes |= (
        {"max_sequence_length": sampling.max_sequence_length}
        if sampling.max_sequence_length
        else {}
    )
    # The file's reward is not built, and may need consent.
    changes |= {"reward": args.reward[0]} if args.reward else {}
    config = config.replace(
        **changes,
        reward_noise=0.0,
        reward_bias=0.0,
        device=_device(args, bool(config.policy.model)),
    )
    environment, options = config.environment, config.policy
    world = make_world(config)
    is_model = bool(options.model)
    if args.prompts:
        prompts = prompts_from(args.prompts)
        prompts = prompts if is_model else [world.parse(prompt.text) for prompt in prompts]
    else:  # all of a model's held-out prompts, as many as the run evaluated of another world's
        prompts = prompts_of(world, environment.task, "heldout")[
            : None if is_model else config.evaluation.eval_samples
        ]
    if args.reward:
        rewards = _named_rewards(args, options.device)
    elif environment.reward:
        own = make_reward(config)
        name = (
            f"evaluation of {environment.reward}"
            if isinstance(own, GroupReward)
            else environment.reward
        )
        rewards = {name: evaluation_reward(own)}
    else:
        rewards = {form: world.reward(form) for form in world.forms}
    prompts = prompts[: args.limit or None]
    cached = config.replace(prompt_cache=_cache_size(prompts)) if is_model else config
    policy = make_world(cached).policy(policy_options(config))
    facts = {
        "base": options.model or environment.subject,
        "method": config.algorithm.method,
        "guidance": options.guidance_scale,
        "resolution": options.resolution if options.model else None,
        "dtype": options.dtype,
        "device": options.device,
    }
    steps = _value_or(args.sampling.num_steps, config.evaluation.eval_steps)
    return _Setup(
        policy, lambda: load_trained(policy, args.weights), prompts, rewards, steps, facts
    )


def _lora_setup(args: Evaluate) -> _Setup:
    """A base model, and weights in diffusers' formats that any program may have written."""
    from flowrl.parts.prompts import prompts_from
    from flowrl.policies.load import load_policy
    from flowrl.policies.pipeline import ModelOptions
    from flowrl.training.weight_comparison import load_weights

    require(
        bool(args.prompts),
        "prompts",
        args.prompts,
        "a file of prompts, or a generator's slice such as text[0:64]",
    )
    require(bool(args.reward), "reward", args.reward, "one or more: --reward NAME")
    if not args.weights.exists():
        raise CheckpointError(f"weights: {args.weights} does not exist")
    sampling = args.sampling
    device, size = _device(args, True), _value_or(sampling.resolution, 512)
    prompts, rewards = (
        prompts_from(args.prompts)[: args.limit or None],
        _named_rewards(args, device),
    )
    options = ModelOptions(
        height=size,
        width=_value_or(sampling.width, size),
        num_frames=_value_or(sampling.num_frames, 1),
        device=device,
        dtype=args.computing.dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
        guidance_scale=_value_or(sampling.guidance_scale, 1.0),
        negative_prompt=_value_or(sampling.negative_prompt, ""),
        tuning="nothing",
        max_sequence_length=sampling.max_sequence_length,
        decode_batch=8,
        prompt_cache=_cache_size(prompts),
    )
    policy = load_policy(args.model, options)
    facts = {
        "base": args.model,
        "guidance": options.guidance_scale,
        "resolution": size,
        "dtype": options.dtype,
        "device": device,
    }
    return _Setup(
        policy,
        lambda: load_weights(policy, args.weights),
        prompts,
        rewards,
        _value_or(sampling.num_steps, 40),
        facts,
    )


def _cache_size(prompts: "list[Prompt]") -> int:
    """Embeddings that are kept: all prompts' and the negative one's, so that none is computed again
    for the trained weights.
    """
    return len(prompts) + 1


def _named_rewards(args: Evaluate, device: str) -> "dict[str, RewardModel]":
    from flowrl.parts.registry import build
    from flowrl.rewards import require_single

    return {
        spec: require_single(build("reward", spec, device=device), "reward", spec)
        for spec in args.reward
    }


def _value_or(value: T | None, default: T) -> T:
    """The default only if the option was left out: 0 is a value."""
    return default if value is None else value


def _device(args: Evaluate, model: bool) -> str:
    import torch

    return args.computing.device or ("cuda" if model and torch.cuda.is_available() else "cpu")


def table(found: "WeightComparison") -> str:
    """The results as text: per reward both means, the difference with its interval, and the
    fraction of improved prompts.
    """
    from flowrl.training.results import short

    lines = [
        f"{'score':32s} {'base':>9s} {'trained':>9s} {'difference [95% interval]':>33s}"
        f" {'improved':>8s}"
    ]
    for spec, s in found.scores.items():
        interval = (
            f"{s.difference:+.4f} [{s.low:+.4f}, {s.high:+.4f}]"
            if s.prompts > 1
            else f"{s.difference:+.4f} [one prompt]"
        )
        name = short(spec)
        name = name if len(name) <= 32 else f"{name[:29]}..."
        lines.append(f"{name:32s} {s.base:9.4f} {s.trained:9.4f} {interval:>33s} {s.better:8.0%}")
    images = f"{found.how.count} image{'s' if found.how.count > 1 else ''} per prompt"
    lines.append(
        f"{len(found.prompts)} prompts, {images}, {found.how.steps} ODE steps, the same noise;"
        " intervals over prompts"
    )
    return "\n".join(lines)


def _progress() -> Callable[[str, int, int], None]:
    """Print every tenth percent of each of the two passes once."""
    shown = set()

    def show(weights: str, done: int, total: int) -> None:
        line = f"{weights}: {done * 100 // total // 10 * 10}%"
        if line not in shown:
            print(line, flush=True)
            shown.add(line)

    return show
