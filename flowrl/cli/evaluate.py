"""`flowrl evaluate` and `flowrl sample`: images from base and trained weights."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from annotated_types import Ge, Le

from flowrl.cli.options import config_of, typed_command
from flowrl.core.errors import CheckpointError, ConfigError, require
from flowrl.core.options import Count, Seed, Whole

if TYPE_CHECKING:
    from flowrl.run.config import RunConfig
    from flowrl.run.report.weight_comparison import WeightComparison

SHAPES_PROMPTS = (
    "three red circles",
    "blue square left of green triangle",
    'text "K72"',
    "lively red and blue pattern",
)
REPLACED = (
    *("guidance_scale", "negative_prompt", "resolution", "width", "num_frames", "dtype"),
    "max_sequence_length",
)
"""Options that replace the run's setting of the same name."""


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
    limit: Count | None = None
    """Number of prompts, the first of the file [default: all; of a run without a model: as many as
    it evaluated].
    """
    shown: Count = 8
    """Prompts in grid.png."""
    out: Path | None = None
    """Folder for the results; default evaluation/ in the run's folder, or next to the weights."""
    html: bool = False
    """Write report.html as well."""
    trust: bool = False
    """Run code that the settings in `weights` name, and use their addresses and keys."""
    count: Annotated[int, Ge(1), Le(1000)] = 1
    """Images per prompt."""
    num_steps: Annotated[int, Ge(1), Le(1000)] | None = None
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
    max_sequence_length: Whole | None = None
    """Length of the prompts of the T5 encoder [default: the run's, else the pipeline's]."""
    batch: Count = 16
    """Latents per network call and images decoded at a time."""
    device: str = ""
    """cpu or cuda [default: cuda for a model if there is a GPU]."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision [default: the run's, else bfloat16 on cuda and float32 on the CPU]."""

    def main(self) -> int:
        """Compare, show, write."""
        from rich.progress import Progress

        from flowrl.rewards import evaluation_reward
        from flowrl.run.build import load_trained, make_policy, make_world, policy_options
        from flowrl.run.io import new_folder, require_no_links
        from flowrl.run.models.load import load_policy
        from flowrl.run.parts.prompts import read_prompts
        from flowrl.run.parts.registry import build
        from flowrl.run.report.card import write_card
        from flowrl.run.report.weight_comparison import (
            SamplingSettings,
            compare_weights,
            load_weights,
            write_evaluation,
        )
        from flowrl.run.worlds import prompts_of
        from flowrl.worlds.mixture import targets

        config = self.settings()
        world, options, environment = make_world(config), config.policy, config.environment
        if self.prompts:
            texts = read_prompts(self.prompts)
            prompts = texts if options.model else [world.parse(prompt.text) for prompt in texts]
        else:  # all of a model's, as many as the run evaluated of another world's
            end = None if options.model else config.evaluation.eval_samples
            prompts = prompts_of(world, environment.task, "heldout")[:end]
        prompts = prompts[: self.limit]
        specs = self.reward or tuple(filter(None, [environment.reward]))
        rewards = {
            spec: evaluation_reward(build("reward", spec, device=options.device)) for spec in specs
        } or {form: world.reward(form) for form in world.forms}
        if self.model:
            bare = replace(policy_options(config), fixed=True, gradient_checkpointing=False)
            policy = load_policy(self.model, bare)
            load = partial(load_weights, policy, self.weights)
        else:
            policy = make_policy(config)
            load = partial(load_trained, policy, self.weights)
        steps = config.evaluation.eval_steps
        how = SamplingSettings(steps, self.count, self.seed, self.batch, self.shown)
        facts = {
            "command": typed_command(),
            "weights": str(self.weights),
            "base": options.model or environment.subject,
            "method": None if self.model else config.algorithm.method,
            "guidance": options.guidance_scale,
            "resolution": options.resolution if options.model else None,
            "dtype": options.dtype,
            "device": options.device,
        }
        beside = self.weights if self.weights.is_dir() else self.weights.parent
        out = self.out or beside / "evaluation"
        of_run = not self.model and out == self.weights / "evaluation"
        if beside in out.parents:
            card = ("lora", "full") if of_run else ()
            require_no_links(beside, (out.relative_to(beside).parts[0], *card))
        with (
            new_folder(out, "evaluation", made_evaluation, lambda: False),
            Progress(transient=True) as bars,
        ):
            tasks = {side: bars.add_task(side) for side in ("base", "trained")}

            def show(side: str, done: int, total: int) -> None:
                bars.update(tasks[side], completed=done, total=total)

            evaluation = compare_weights(policy, load, prompts, rewards, how, facts, show)
            write_evaluation(evaluation, out, self.html, targets(evaluation.prompts))
        if of_run and (self.weights / "README.md").exists():
            write_card(self.weights)
        page = f" and {out}/report.html" if self.html else ""
        print(f"{table(evaluation)}\nWrote {out}/evaluation.json and {out}/grid.png{page}")
        return 0

    def settings(self) -> "RunConfig":
        """The settings of the run, or of the base model, with the options in their place."""
        import torch

        from flowrl.run.config import load_config, preset
        from flowrl.run.reads import require_read
        from flowrl.run.started import with_stored_prompts

        changes = {name: getattr(self, name) for name in REPLACED}
        changes = {name: value for name, value in changes.items() if value is not None}
        if self.num_steps:
            changes["eval_steps"] = self.num_steps
        if self.reward:
            changes["reward"] = self.reward[0]
        if self.model:
            require(bool(self.prompts), "prompts", self.prompts, "a file, or a slice as text[0:64]")
            require(bool(self.reward), "reward", self.reward, "one or more: --reward NAME")
            if not os.path.exists(self.weights):
                raise CheckpointError(f"weights: {self.weights} does not exist")
            config = preset("default").apply(model=self.model, prompts=self.prompts, **changes)
        else:
            allowed = "the folder of a run; for a LoRA or a transformer give its --model too"
            file = config_of("weights", self.weights, allowed)
            # the run's own reward, which is not built if another is given, needs no consent then
            option: dict[str, Any] = {"reward": self.reward[0]} if self.reward else {}
            config = load_config(file, self.trust, **option)
            config = with_stored_prompts(self.weights, config)
            read = changes.keys() - {"eval_steps", "reward"}
            require_read(config.replace(**{name: changes[name] for name in read}), read)
        is_cuda = bool(config.policy.model) and torch.cuda.is_available()
        device = self.device or ("cuda" if is_cuda else "cpu")
        return config.replace(**changes, device=device, reward_noise=0.0, reward_bias=0.0)


def made_evaluation(folder: Path) -> bool:
    """Whether `flowrl evaluate` has written the content of `folder`."""
    from flowrl.run.reading import read_json

    try:
        return {"command", "scores", "prompts"} <= read_json(folder / "evaluation.json").keys()
    except (ConfigError, AttributeError):
        return False


def table(comparison: "WeightComparison") -> str:
    """The results as text: per reward both means, the difference with its interval, and the
    fraction of improved prompts.
    """
    from flowrl.run.results import short

    rows = [("score", "base", "trained", "difference [95% interval]", "improved")]
    for spec, s in comparison.scores.items():
        d = s.digits
        interval = f"{s.low:+.{d}f}, {s.high:+.{d}f}" if s.prompts > 1 else "one prompt"
        change = f"{s.difference:+.{d}f} [{interval}]"
        means = f"{s.base:.{d}f}", f"{s.trained:.{d}f}"
        rows.append((short(spec), *means, change, f"{s.better:.0%}"))
    name, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [
        "  ".join([f"{label:{name}s}", *(f"{c:>{w}s}" for c, w in zip(cells, widths, strict=True))])
        for label, *cells in rows
    ]
    how, count = comparison.how, len(comparison.prompts)
    sizes = f"{count} prompts x {how.count} images, {how.steps} ODE steps"
    return "\n".join([*lines, f"{sizes}, the same noise; intervals over prompts"])


@dataclass(frozen=True)
class Sample:
    """Sample images for prompts from the base model or a finished run, as one PNG grid.

    Example: flowrl sample --prompts "three red circles" 'text "K72"' --weights
    runs/mine/runs/flow-grpo-seed0
    """

    prompts: tuple[str, ...] | None = None
    """Prompts in the world's language; default: four of the world's held-out prompts, or for shapes
    one of every kind.
    """
    weights: Path | None = None
    """Folder of a finished run; without it, the base model."""
    out: Path = Path("samples.png")
    """The PNG file to write."""
    world: str = "shapes"
    """The world of the base model: shapes, mixture, a plug-in or path/to/file.py:Class."""
    count: Annotated[int, Ge(1), Le(100)] = 8
    """Images per prompt."""
    num_steps: Annotated[int, Ge(1), Le(1000)] = 20
    """ODE steps."""
    seed: Seed = 0
    """Draws the noise; the same seed gives every model the same noise."""
    trust: bool = False
    """Run code that the settings in `weights` name, and use their addresses and keys."""

    def main(self) -> int:
        """Sample, score and write the grid."""
        import torch

        from flowrl.rewards import stills
        from flowrl.rollout import initial_noise, sample_images, score
        from flowrl.run.build import make_policy, make_world, trained_policy
        from flowrl.run.config import preset
        from flowrl.run.report.figures import image_grid
        from flowrl.run.report.style import require_figure, save
        from flowrl.run.worlds import check_policy, prompts_of
        from flowrl.worlds.mixture import targets

        require(self.prompts != (), "prompts", self.prompts, "one or more prompts")
        default = self.world == Sample.world or self.weights is None
        require(default, "world", self.world, "left out with --weights, which have theirs")
        require_figure(self.out)
        if self.weights:
            policy, config = trained_policy(self.weights, trust=self.trust)
        else:
            config = preset("default").apply(world=self.world)
            policy = make_policy(config)
        # the device of the training may not exist here
        world = make_world(config.replace(device=str(policy.device)))
        check_policy(world, policy)
        texts = SHAPES_PROMPTS if world.name == "shapes" else None
        if texts := self.prompts or texts:
            prompts = [world.parse(text) for text in texts]
        else:
            prompts = prompts_of(world, config.environment.task, "heldout")[:4]
        reward = world.reward("soft" if "soft" in world.forms else world.forms[0])
        repeated = [prompt for prompt in prompts for _ in range(self.count)]
        noise, most = initial_noise(policy, len(repeated), self.seed), config.batches.max_batch
        images, scores = [], []
        for batch in sample_images(policy, repeated, noise, self.num_steps, max_batch=most):
            images.append(stills(batch.images).cpu())
            result = score(reward, batch.images, batch.prompts, invalid=False)
            scores.append(result.total.cpu())
        shape = (len(prompts), self.count)
        cells, values = torch.cat(images).unflatten(0, shape), torch.cat(scores).view(shape)
        texts = [prompt.text for prompt in prompts]
        save(image_grid(cells, values, texts, targets(texts)), self.out)
        print(f"Wrote {self.out}: {len(prompts)} prompts x {self.count} images")
        return 0
