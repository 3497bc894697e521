"""`flowrl evaluate`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tyro

from flowrl.commands.settings import typed_command
from flowrl.errors import CheckpointError, ConfigError, require
from flowrl.training.build import make_reward, make_world, policy_options

if TYPE_CHECKING:
    from flowrl.diagnostics.paired import Comparison
    from flowrl.protocols import FlowPolicy, RewardModel
    from flowrl.types import Prompt

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluate:
    """Score base and trained weights on the same prompts from the same noise: table, JSON and a grid of images.

    Examples: flowrl evaluate --weights runs/mine --reward pickscore --reward ocr

    flowrl evaluate --weights lora-folder --model stabilityai/stable-diffusion-3.5-medium --prompts prompts.txt --reward pickscore
    """

    weights: Path
    """Folder of a finished run; or, with --model, a LoRA (file or folder) or a folder with transformer/ in diffusers' form."""
    model: str = ""
    """The base model of weights that are not a run's: a folder or a name on the Hub."""
    prompts: str = ""
    """File of prompts, or a generator's slice as text[0:64]; default the run's held-out prompts (required with --model)."""
    reward: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME, NAME(option=value) or path/to/file.py:Class; may be given several times. Default: the run's own."""
    limit: int = 0
    """Use the first so many prompts; 0 = all (of a built-in world: as many as the run evaluated)."""
    count: int = 1
    """Images per prompt."""
    num_steps: int | None = None
    """ODE steps [default: the run's, else 40]."""
    guidance_scale: float | None = None
    """Classifier-free guidance for both [default: the run's, else 1]."""
    resolution: int | None = None
    """Height and width in pixels [default: the run's, else 512]."""
    seed: int = 20240
    """Draws the noise, which is the same for both."""
    batch: int = 16
    """Latents per network call and images decoded at a time."""
    device: str = ""
    """cpu or cuda [default: cuda for a model where there is one]."""
    dtype: str = ""
    """float32, bfloat16 or float16 [default: the run's, else bfloat16 on cuda and float32 on the CPU]."""
    max_sequence_length: int = 0
    """Length of the prompts of the T5 encoder; 0 = as the run or the pipeline has it."""
    shown: int = 8
    """Prompts in grid.png."""
    out: Path | None = None
    """Folder for the results; default evaluation/ in the run's folder, or beside the weights."""
    html: bool = False
    """Write report.html as well."""

    def main(self) -> int:
        """Compare, show, write."""
        from flowrl.commands.card import write_card
        from flowrl.diagnostics.paired import Draw, compare_weights
        from flowrl.plots.report import write_evaluation

        require(self.limit >= 0, "limit", self.limit, "0 (all) or more")
        setup = _lora_setup(self) if self.model else _run_setup(self)
        how = Draw(setup.steps, self.count, self.seed, self.batch, self.shown)
        out = self.out or (self.weights if self.weights.is_dir() else self.weights.parent) / "evaluation"
        facts = {"command": typed_command(), "weights": str(self.weights), **setup.facts}
        found = compare_weights(setup.policy, setup.use_trained, setup.prompts, setup.rewards, how, facts, _progress())
        write_evaluation(found, out, self.html)
        if (self.weights / "README.md").exists() and not self.model and out == self.weights / "evaluation":
            write_card(self.weights)
        print(table(found))
        print(f"Wrote {out}/evaluation.json and {out}/grid.png{f' and {out}/report.html' if self.html else ''}")
        return 0


@dataclass(frozen=True)
class _Setup:
    """What is compared, and how the trained weights are put in."""

    policy: "FlowPolicy"
    use_trained: Callable[[], None]
    prompts: "list[Prompt]"
    rewards: "dict[str, RewardModel]"
    steps: int
    facts: dict[str, Any]


def _run_setup(asked: Evaluate) -> _Setup:
    """Base and averaged weights of a finished run, with its settings where none are given."""
    from flowrl.prompts import prompts_from
    from flowrl.registry import build
    from flowrl.training.build import load_trained
    from flowrl.training.config import load_config

    if not (asked.weights / "config.json").is_file():
        raise ConfigError(
            f"weights: {asked.weights} is not the folder of a run; for a LoRA or a transformer give its --model too"
        )
    config = load_config(asked.weights / "config.json")
    given = {name: getattr(asked, name) for name in ("guidance_scale", "resolution") if getattr(asked, name) is not None}
    given |= {name: getattr(asked, name) for name in ("dtype", "max_sequence_length") if getattr(asked, name)}
    config = config.replace(**given, reward_noise=0.0, reward_bias=0.0, device=_device(asked, bool(config.policy.model)))
    world = make_world(config)
    if asked.prompts:
        prompts = prompts_from(asked.prompts)
        prompts = prompts if config.policy.model else [world.parse(prompt.text) for prompt in prompts]
    else:
        prompts = world.prompts(config.environment.task, "heldout")[
            : None if config.policy.model else config.evaluation.eval_samples
        ]
    prompts = prompts[: asked.limit or None]
    if asked.reward:
        rewards = {spec: build("reward", spec, device=config.policy.device) for spec in asked.reward}
    elif config.environment.reward:
        rewards = {config.environment.reward: make_reward(config)}
    else:
        rewards = {form: world.reward(form) for form in world.forms}
    policy = world.policy(policy_options(config))
    facts = {"base": config.policy.model or f"{config.environment.world}/{config.environment.task}",
             "method": config.algorithm.method, "guidance": config.policy.guidance_scale,
             "resolution": config.policy.resolution if config.policy.model else None, "dtype": config.policy.dtype,
             "device": config.policy.device}  # fmt: skip
    return _Setup(
        policy,
        lambda: load_trained(policy, asked.weights),
        prompts,
        rewards,
        _given(asked.num_steps, config.evaluation.eval_steps),
        facts,
    )


def _lora_setup(asked: Evaluate) -> _Setup:
    """A base model, and weights in diffusers' form from any program."""
    from flowrl.diagnostics.paired import load_weights
    from flowrl.policies.load import load_policy
    from flowrl.policies.pipeline import ModelOptions
    from flowrl.prompts import prompts_from
    from flowrl.registry import build

    require(bool(asked.prompts), "prompts", asked.prompts, "a file of prompts, or a generator's slice such as text[0:64]")
    require(bool(asked.reward), "reward", asked.reward, "one or more: --reward NAME")
    if not asked.weights.exists():
        raise CheckpointError(f"weights: {asked.weights} does not exist")
    device = _device(asked, True)
    size, dtype = _given(asked.resolution, 512), asked.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    options = ModelOptions(
        size,
        size,
        device,
        dtype,
        _given(asked.guidance_scale, 1.0),
        tuning="nothing",
        max_sequence_length=asked.max_sequence_length,
        decode_batch=8,
    )
    prompts = prompts_from(asked.prompts)[: asked.limit or None]
    rewards = {spec: build("reward", spec, device=device) for spec in asked.reward}
    policy = load_policy(asked.model, options)
    facts = {"base": asked.model, "guidance": options.guidance_scale, "resolution": size, "dtype": dtype, "device": device}
    return _Setup(policy, lambda: load_weights(policy, asked.weights), prompts, rewards, _given(asked.num_steps, 40), facts)


def _given(value: T | None, usual: T) -> T:
    """An option's value, or the usual one where it was left out; 0 is a value."""
    return usual if value is None else value


def _device(asked: Evaluate, model: bool) -> str:
    import torch

    return asked.device or ("cuda" if model and torch.cuda.is_available() else "cpu")


def table(found: "Comparison") -> str:
    """The results as text: per reward both means, the difference with its interval, and the fraction of improved prompts."""
    from flowrl.training.results import short

    lines = [f"{'score':32s} {'base':>9s} {'trained':>9s} {'difference [95% interval]':>33s} {'improved':>8s}"]
    for spec, s in found.scores.items():
        interval = f"{s.difference:+.4f} [{s.low:+.4f}, {s.high:+.4f}]" if s.prompts > 1 else f"{s.difference:+.4f} [one prompt]"
        name = short(spec)
        name = name if len(name) <= 32 else f"{name[:29]}..."
        lines.append(f"{name:32s} {s.base:9.4f} {s.trained:9.4f} {interval:>33s} {s.better:8.0%}")
    images = f"{found.how.count} image{'s' if found.how.count > 1 else ''} per prompt"
    lines.append(f"{len(found.prompts)} prompts, {images}, {found.how.steps} ODE steps, the same noise; intervals over prompts")
    return "\n".join(lines)


def _progress() -> Callable[[str, int, int], None]:
    """Print every tenth percent of each of the two passes once."""
    last = ""

    def show(weights: str, done: int, total: int) -> None:
        nonlocal last
        line = f"{weights}: {done * 100 // total // 10 * 10}%"
        if line != last:
            print(line, flush=True)
            last = line

    return show
