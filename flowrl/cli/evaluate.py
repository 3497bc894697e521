"""`flowrl evaluate` and `flowrl sample`: images from base and trained weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from annotated_types import Ge, Le

from flowrl.cli.options import typed_command
from flowrl.core.errors import ConfigError, require
from flowrl.core.options import Count, Seed, Whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flowrl.core.protocols import AnyReward, FlowPolicy
    from flowrl.core.types import Prompt
    from flowrl.run.config import RunConfig
    from flowrl.run.report.weight_comparison import ScoreDifference, WeightComparison
    from flowrl.run.saved import SavedWeights

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

    flowrl evaluate --weights runs/mine@000050 runs/mine@best runs/other

    flowrl evaluate --weights lora.safetensors --model stabilityai/stable-diffusion-3.5-medium
    --prompts prompts.txt --reward pickscore
    """

    weights: tuple[str, ...]
    """A run in any state, a checkpoint of it as RUN@000010, RUN@best or RUN@last, a LoRA of any
    program (file or folder), a folder with a transformer, or a name on the Hub; several are
    compared with the base and with the first one.
    """
    live: bool = False
    """Use a run's weights of the last step and not their average."""
    model: str = ""
    """The base model (folder or name on the Hub) of weights that are not a run's, or in place of
    the run's.
    """
    original: str = ""
    """If `model` is a single file: the pipeline that it was trained from."""
    prompts: str = ""
    """File of prompts, or a generator's slice as text[0:64]; default the run's held-out prompts
    (required without a run).
    """
    benchmark: str = ""
    """geneval, ocr or drawbench: rewards, images per prompt, prompts (drawbench has none) and a
    table as in papers. Other options replace them.
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
    count: Annotated[int, Ge(1), Le(1000)] | None = None
    """Images per prompt [default: the benchmark's, else 1]."""
    num_steps: Annotated[int, Ge(1), Le(1000)] | None = None
    """ODE steps [default: the run's, else 40]."""
    guidance_scale: Annotated[float, Ge(1)] | None = None
    """Classifier-free guidance of both models [default: that of the run's evaluations, else 1]."""
    negative_prompt: str | None = None
    """Negative prompt of the guidance [default: the run's, else empty]."""
    resolution: Count | None = None
    """Height in pixels, and width without --width [default: that of the run's evaluations, else
    512].
    """
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
        return self.completed().compared()

    def completed(self) -> "Evaluate":
        """With the prompts, the rewards and the images per prompt of the benchmark that no option
        gives.
        """
        if not self.benchmark:
            return replace(self, count=self.count or 1)
        from flowrl.run.report.benchmarks import benchmark

        chosen = benchmark(self.benchmark, self.prompts)
        return replace(
            self,
            prompts=self.prompts or chosen.prompts,
            reward=self.reward or chosen.rewards,
            count=self.count or chosen.count,
        )

    def compared(self) -> int:
        """Compare, show, write, with complete options."""
        from rich.progress import Progress

        from flowrl.rewards import evaluation_reward
        from flowrl.run.build import make_world
        from flowrl.run.export import iteration_of
        from flowrl.run.io import new_folder, require_no_links
        from flowrl.run.parts.prompts import read_prompts
        from flowrl.run.parts.registry import build
        from flowrl.run.parts.specs import parse_spec
        from flowrl.run.report.benchmarks import prompts_note, tasks_of
        from flowrl.run.report.card import write_card
        from flowrl.run.report.weight_comparison import (
            SamplingSettings,
            compare_weights,
            write_evaluation,
        )
        from flowrl.run.trained import base_policy, with_weights
        from flowrl.run.worlds import prompts_of
        from flowrl.worlds.mixture import targets

        found = self.found()
        config = self.settings(found)
        world, options, environment = make_world(config), config.policy, config.environment
        fits = bool(options.model) or not self.benchmark
        require(fits, "benchmark", self.benchmark, "left out without a model")
        if self.prompts:
            texts = read_prompts(self.prompts)
            prompts = texts if options.model else [world.parse(prompt.text) for prompt in texts]
        else:  # all of a model's, as many as the run evaluated of another world's
            end = None if options.model else config.evaluation.eval_samples
            prompts = prompts_of(world, environment.task, "heldout")[:end]
        prompts = prompts[: self.limit]
        tasks = tasks_of(self.benchmark, prompts)
        specs = self.reward or tuple(filter(None, [environment.sources.reward]))
        of_sources = [spec for spec in specs if parse_spec(spec).name == "by-source"]
        need = "one or more with --prompts: each source of the run's prompts has its own"
        require(not (self.prompts and of_sources), "reward", "", need)
        rewards = {
            spec: evaluation_reward(build("reward", spec, device=options.device)) for spec in specs
        } or {form: world.reward(form) for form in world.forms}
        policy = base_policy(config)
        weights = {str(saved): with_weights(policy, saved) for saved in found}
        steps = config.evaluation.eval_steps
        how = SamplingSettings(steps, self.count or 1, self.seed, self.batch, self.shown)
        first = found[0]
        beside = first.path if first.path.is_dir() else first.path.parent
        out = self.out or beside / "evaluation"
        of_run = first.kind == "run" and out == beside / "evaluation"
        facts = {
            "command": typed_command(),
            "weights": ", ".join(weights),
            "iteration": iteration_of(first) if of_run else None,
            "live": first.live,
            "base": options.model or environment.subject,
            "method": config.algorithm.method if first.kind == "run" else None,
            "guidance": options.guidance_scale,
            "resolution": options.resolution if options.model else None,
            "dtype": options.dtype,
            "device": options.device,
        }
        if self.benchmark:
            note = prompts_note(self.benchmark, self.prompts)
            facts |= {"benchmark": self.benchmark, "benchmark_prompts": note}
        if beside in out.parents:
            card = ("lora", "full") if of_run else ()
            require_no_links(beside, (out.relative_to(beside).parts[0], *card))
        with (
            new_folder(out, "evaluation", made_evaluation, lambda: False),
            Progress(transient=True) as bars,
        ):
            sides = {side: bars.add_task(side) for side in ("base", *weights)}

            def show(side: str, done: int, total: int) -> None:
                bars.update(sides[side], completed=done, total=total)

            evaluation = compare_weights(policy, weights, prompts, rewards, how, facts, show, tasks)
            write_evaluation(evaluation, out, self.html, targets(evaluation.prompts))
        if of_run and all((beside / name).exists() for name in ("done.json", "README.md")):
            write_card(beside)
        page = f" and {out}/report.html" if self.html else ""
        print(f"{table(evaluation)}\nWrote {out}/evaluation.json and {out}/grid.png{page}")
        return 0

    def found(self) -> "list[SavedWeights]":
        """The weights that are named; nothing is loaded."""
        from flowrl.run.saved import find_weights

        require(self.weights != (), "weights", self.weights, "one or more")
        found = [find_weights(text, self.live) for text in self.weights]
        names = list(map(str, found))
        allowed = "weights that differ"
        require(len({*names}) == len(names), "weights", ", ".join(names), allowed)
        return found

    def settings(self, found: "Sequence[SavedWeights]") -> "RunConfig":
        """The settings of the run, or of the base model, with the options in their place."""
        import torch

        from flowrl.run.reads import require_read
        from flowrl.run.trained import sampling_settings

        changes = {name: getattr(self, name) for name in REPLACED}
        changes = {name: value for name, value in changes.items() if value is not None}
        read = changes.keys()
        if self.num_steps:
            changes["eval_steps"] = self.num_steps
        if self.reward:  # the run's own, which is not built, needs no consent then
            changes["reward"] = self.reward[0]
        if not any(saved.kind == "run" for saved in found):
            require(bool(self.prompts), "prompts", self.prompts, "a file, or a slice as text[0:64]")
            require(bool(self.reward), "reward", self.reward, "one or more: --reward NAME")
            changes["prompts"] = self.prompts
        config = sampling_settings(found, self.trust, self.model, self.original, **changes)
        require_read(config, read)
        is_cuda = bool(config.policy.model) and torch.cuda.is_available()
        device = self.device or ("cuda" if is_cuda else "cpu")
        return config.replace(device=device, reward_noise=0.0, reward_bias=0.0)


def made_evaluation(folder: Path) -> bool:
    """Whether `flowrl evaluate` has written the content of `folder`."""
    from flowrl.run.reading import read_json

    try:
        return {"command", "scores", "prompts"} <= read_json(folder / "evaluation.json").keys()
    except (ConfigError, AttributeError):
        return False


def table(comparison: "WeightComparison") -> str:
    """The results as text: per reward both means, the difference with its interval, and the
    fraction of improved prompts; of several weights a table per reward. Then the tables of a
    benchmark.
    """
    from flowrl.run.results import short

    first, *others = comparison.compared
    if others:
        text = "\n\n".join(_of_several(comparison, spec) for spec in first.scores)
    else:
        rows = [("score", "base", "trained", "difference [95% interval]", "improved")]
        for spec, s in first.scores.items():
            means = f"{s.base:.{s.digits}f}", f"{s.trained:.{s.digits}f}"
            rows.append((short(spec), *means, _difference(s), f"{s.better:.0%}"))
        text = _aligned(rows)
    how, count = comparison.how, len(comparison.prompts)
    sizes = f"{count} prompts x {how.count} images, {how.steps} ODE steps"
    text = f"{text}\n{sizes}, the same noise; intervals over prompts"
    if not comparison.benchmark:
        return text
    facts = comparison.facts
    parts = [f"{facts['benchmark']} on {facts['benchmark_prompts']}"]
    for one in comparison.benchmark_tables:
        parts += [*filter(None, [one.title]), _aligned([one.header, *one.rows])]
    return "\n\n".join([text, "\n".join(parts)])


def _of_several(comparison: "WeightComparison", spec: str) -> str:
    """A table of one reward: a row per weights, with their differences from the base and from the
    first weights.
    """
    from flowrl.run.results import short

    pairs = {(pair.weights, pair.against): pair.scores[spec] for pair in comparison.compared}
    (first, base), *_ = pairs
    names = {name: text for name, text in comparison.names.items() if name != base}
    from_first = f"minus {names[first]} [95%]"
    digits = max(s.digits for s in pairs.values())
    rows = [
        (short(spec), "mean", "minus base [95%]", "improved", from_first),
        (base, f"{pairs[first, base].base:.{digits}f}", "", "", ""),
    ]
    for name, label in names.items():
        s, other = pairs[name, base], pairs.get((name, first))
        mean, change = f"{s.trained:.{digits}f}", _difference(s)
        rows.append((label, mean, change, f"{s.better:.0%}", _difference(other) if other else ""))
    return _aligned(rows)


def _difference(s: "ScoreDifference") -> str:
    interval = f"{s.low:+.{s.digits}f}, {s.high:+.{s.digits}f}" if s.prompts > 1 else "one prompt"
    return f"{s.difference:+.{s.digits}f} [{interval}]"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns: the first to the left, the others to the right."""
    name, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [
        "  ".join([f"{label:{name}s}", *(f"{c:>{w}s}" for c, w in zip(cells, widths, strict=True))])
        for label, *cells in rows
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Sample:
    """Sample images for prompts from the base model or trained weights, as one PNG grid.

    Examples: flowrl sample --prompts "three red circles" 'text "K72"' --weights
    runs/mine/runs/flow-grpo-seed0

    flowrl sample --weights runs/sd3@best --prompts "a red fox"
    """

    prompts: tuple[str, ...] | None = None
    """Prompts in the world's language; default: four of the world's held-out prompts, or for shapes
    one of every kind.
    """
    weights: str = ""
    """A run in any state, a checkpoint of it as RUN@000010, RUN@best or RUN@last, or, with --model,
    a LoRA or a transformer; without it, the base model.
    """
    live: bool = False
    """Use a run's weights of the last step and not their average."""
    model: str = ""
    """The base model (folder or name on the Hub) of weights that are not a run's, or in place of
    the run's.
    """
    original: str = ""
    """If `model` is a single file: the pipeline that it was trained from."""
    out: Path = Path("samples.png")
    """The PNG file to write."""
    world: str = "shapes"
    """The world of the base model: shapes, mixture, a plug-in or path/to/file.py:Class."""
    count: Annotated[int, Ge(1), Le(100)] = 8
    """Images per prompt."""
    num_steps: Annotated[int, Ge(1), Le(1000)] | None = None
    """ODE steps [default: those of the run's evaluations, else 20; of a model 40]."""
    guidance_scale: Annotated[float, Ge(1)] | None = None
    """Classifier-free guidance of a model [default: the run's, else 1]."""
    negative_prompt: str | None = None
    """Negative prompt of the guidance [default: the run's, else empty]."""
    resolution: Count | None = None
    """Height in pixels of a model's images, and width [default: the run's, else 512]."""
    reward: str = ""
    """Score the images of a model by this reward; those of a world have its own."""
    seed: Seed = 0
    """Draws the noise; the same seed gives every model the same noise."""
    trust: bool = False
    """Run code that the settings in `weights` name, and use their addresses and keys."""

    def main(self) -> int:
        """Sample, score and write the grid."""
        from contextlib import nullcontext

        from flowrl.run.report.style import require_figure, save
        from flowrl.run.saved import find_weights
        from flowrl.run.trained import base_policy, with_weights

        require(self.prompts != (), "prompts", self.prompts, "one or more prompts")
        default = self.world == Sample.world or not (self.weights or self.model)
        require(default, "world", self.world, "left out with --weights or --model")
        require_figure(self.out)
        found = [find_weights(self.weights, self.live)] if self.weights else []
        config = self.settings(found)
        prompts, reward = self.prompts_and_reward(config)
        policy = base_policy(config)
        with with_weights(policy, found[0]) if found else nullcontext():
            figure = self.grid(policy, prompts, reward, config)
        save(figure, self.out)
        print(f"Wrote {self.out}: {len(prompts)} prompts x {self.count} images")
        return 0

    def settings(self, found: "list[SavedWeights]") -> "RunConfig":
        """The settings of the run, the model or the world, on a device that exists here."""
        import torch

        from flowrl.run.config import preset
        from flowrl.run.trained import sampling_settings

        names = ("guidance_scale", "negative_prompt", "resolution")
        changes = {name: value for name in names if (value := getattr(self, name)) is not None}
        if found or self.model:
            config = sampling_settings(found, self.trust, self.model, self.original, **changes)
        else:
            config = preset("default").apply(world=self.world, **changes)
        on_gpu = bool(config.policy.model) and torch.cuda.is_available()
        return config.replace(device="cuda" if on_gpu else "cpu")

    def prompts_and_reward(self, config: "RunConfig") -> "tuple[list[Prompt], AnyReward | None]":
        """The prompts, and the reward that scores their images."""
        from flowrl.core.types import Prompt
        from flowrl.run.build import make_world
        from flowrl.run.parts.prompts import in_turns, read_sources
        from flowrl.run.parts.registry import build
        from flowrl.run.worlds import prompts_of

        environment, texts = config.environment, self.prompts
        if config.policy.model:
            device = config.policy.device
            reward = build("reward", self.reward, device=device) if self.reward else None
            sources = environment.sources.heldout or environment.sources.train
            require(bool(texts or sources), "prompts", texts, "one or more prompts")
            if texts:
                return list(map(Prompt, texts)), reward
            return in_turns(read_sources(sources))[:4], reward
        require(not self.reward, "reward", self.reward, "left out: the world has its own")
        world = make_world(config)
        if texts := texts or (SHAPES_PROMPTS if world.name == "shapes" else None):
            prompts = [world.parse(text) for text in texts]
        else:
            prompts = prompts_of(world, environment.task, "heldout")[:4]
        return prompts, world.reward("soft" if "soft" in world.forms else world.forms[0])

    def grid(
        self,
        policy: "FlowPolicy",
        prompts: "list[Prompt]",
        reward: "AnyReward | None",
        config: "RunConfig",
    ) -> "Figure":
        """A row of images per prompt."""
        import torch

        from flowrl.rewards import stills
        from flowrl.rollout import initial_noise, sample_images, score
        from flowrl.run.report.figures import image_grid
        from flowrl.worlds.mixture import targets

        repeated = [prompt for prompt in prompts for _ in range(self.count)]
        noise, most = initial_noise(policy, len(repeated), self.seed), config.batches.max_batch
        steps = self.num_steps or config.evaluation.eval_steps
        images, scores = [], []
        for batch in sample_images(policy, repeated, noise, steps, max_batch=most):
            images.append(stills(batch.images).cpu())
            if reward is not None:
                result = score(reward, batch.images, batch.prompts, invalid=False)
                scores.append(result.total.cpu())
        shape = (len(prompts), self.count)
        cells = torch.cat(images).unflatten(0, shape)
        values = torch.cat(scores).view(shape) if scores else None
        return image_grid(cells, values, prompts, targets([prompt.text for prompt in prompts]))
