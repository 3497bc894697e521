"""What an iteration costs here and in released code: rows, network calls, dispatched operations,
processor time and memory, per trajectory and per trained (trajectory, step) pair.

    python benchmarks/side_by_side.py --flow-grpo PATH --flow-factory PATH --out FILE.md

The paths are checkouts of yifan123/flow_grpo and X-GenGroup/Flow-Factory. The network has the depth
of SD3.5-Medium (24 blocks, the first 13 with a second attention) and tiny width, with a LoRA of rank
32, guidance 4.5 and a KL to the base model; the images are noise. All programs draw and train one
group, in float32 on one core.

Of flow_grpo these parts run: `pipeline_with_logprob`, with its batch of 9 samples, and
`compute_log_prob` of scripts/train_sd3.py, whose definition alone is taken out of the script,
because the script itself needs GPUs and a tracker. Of Flow-Factory: `inference` and `forward` of
its `SD3_5Adapter` with its scheduler, in batches of 8 samples (examples/grpo/lora/sd3_5), without
the adapter's constructor, which needs a trainer's configuration and an accelerator. The loss around
them is written here as the released loops have it. Operations leave out views. The page says which
commit ran, or why a program did not run. benchmarks/results/side_by_side.md is the committed page.
"""

import argparse
import ast
import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from flowrl_testing.tiny import tiny_sd3

from flowrl import Prompt, preset
from flowrl.policies import PipelinePolicy, StorageCounter
from flowrl.policies.families import SD3
from flowrl.rewards import FunctionReward
from flowrl.training.build import build_trainer, make_method, model_options
from flowrl.training.config import RunConfig

PUBLISHED_BATCH, FACTORY_BATCH = 9, 8
"""Samples per network call of the released configurations, in sampling and training."""
MEMBERS, SCALE, KL, CLIP = 18, 4.5, 0.04, 1e-4
FACTORY_MEMBERS = 16  # two full batches
PHASES = ("rollout", "update")


@dataclass
class Cost:
    """Of a phase: rows of the largest call, calls, operations, processor seconds, peak bytes."""

    rows: int = 0
    calls: int = 0
    operations: int = 0
    seconds: float = 0.0
    peak: int = 0


class Meter:
    """Counts the phases of a program that calls `transformer`."""

    def __init__(self, transformer: torch.nn.Module, counting: bool) -> None:
        self.costs = {name: Cost() for name in PHASES}
        self.counting, self.now = counting, Cost()
        transformer.register_forward_pre_hook(self._called, with_kwargs=True)

    def _called(self, network: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.now.calls += 1
        self.now.rows = max(self.now.rows, len(named["hidden_states"]))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context whose work belongs to the phase `name`."""
        self.now = self.costs[name]
        counter = StorageCounter("cpu") if self.counting else None
        began = time.process_time()
        with counter or nullcontext():
            yield
        self.now.seconds += time.process_time() - began
        if counter is not None:
            self.now.operations += counter.operations
            self.now.peak = max(self.now.peak, counter.largest)


def pipeline() -> Any:
    """A tiny pipeline whose transformer has the depth of SD3.5-Medium."""
    pipe = tiny_sd3()
    config = {
        **pipe.transformer.config,
        "num_layers": 24,
        "dual_attention_layers": tuple(range(13)),
    }
    torch.manual_seed(0)
    pipe.transformer = type(pipe.transformer).from_config(config)
    return pipe


CONFIG = (
    preset("sd3.5-medium,flow-grpo,ocr")
    .apply(model="none", device="cpu", dtype="float32", resolution=16, max_sequence_length=24)
    .replace(gradient_checkpointing=False)
)


def own(rows: int, counting: bool) -> dict[str, Cost]:
    """An iteration of the trainer with `rows` network rows per call."""
    config = CONFIG.replace(
        **dict(groups=1, group_size=MEMBERS, minibatches=1, drop_zero_advantages=False),
        **dict(micro_batch=rows, max_batch="auto"),
    )
    policy = PipelinePolicy(pipeline(), SD3(), model_options(config))
    return metered(config, policy, counting)


def metered(config: RunConfig, policy: PipelinePolicy, counting: bool) -> dict[str, Cost]:
    """The costs of an iteration of the trainer."""
    reward = FunctionReward(lambda images, prompts: images.mean((1, 2, 3)))
    trainer = build_trainer(config, policy, make_method(config), reward, [Prompt("a dog")])
    policy.encode([Prompt("a dog")])
    meter, collect = Meter(policy.transformer, counting), trainer.collector.collect

    def collected(*arguments: Any) -> Any:
        with meter.phase("rollout"):
            return collect(*arguments)

    trainer.collector.collect = collected
    update = trainer.loss_batches

    stack: list[Any] = []

    def batches(*arguments: Any) -> Any:
        stack.append(meter.phase("update"))
        stack[0].__enter__()
        return update(*arguments)

    trainer.loss_batches = batches
    trainer.iteration()
    stack[0].__exit__(None, None, None)
    return meter.costs


def released(folder: Path, counting: bool) -> dict[str, Cost]:
    """An iteration of the released functions in the checkout at `folder`."""
    sys.path.insert(0, str(folder))
    package = "flow_grpo.diffusers_patch"
    sample_images = import_module(f"{package}.sd3_pipeline_with_logprob").pipeline_with_logprob
    step = import_module(f"{package}.sd3_sde_with_logprob").sde_step_with_logprob
    log_prob = function(folder / "scripts" / "train_sd3.py", "compute_log_prob", step)
    policy = PipelinePolicy(pipeline(), SD3(), model_options(CONFIG))
    pipe, network = policy.pipe, policy.transformer
    prompt, negative = embedded(policy, PUBLISHED_BATCH)
    meter, samples = Meter(network, counting), []
    with meter.phase("rollout"):
        for _ in range(0, MEMBERS, PUBLISHED_BATCH):
            _, latents, log_probs = sample_images(
                pipe,
                prompt_embeds=prompt["words"],
                pooled_prompt_embeds=prompt["pooled"],
                negative_prompt_embeds=negative["words"],
                negative_pooled_prompt_embeds=negative["pooled"],
                num_inference_steps=10,
                guidance_scale=SCALE,
                output_type="pt",
                height=16,
                width=16,
                noise_level=0.7,
            )
            states = torch.stack(latents, 1)
            samples.append(
                {
                    "latents": states[:, :-1],
                    "next_latents": states[:, 1:],
                    "timesteps": pipe.scheduler.timesteps.repeat(PUBLISHED_BATCH, 1),
                    "log_probs": torch.stack(log_probs, 1),
                }
            )
    embeds = torch.cat([negative["words"], prompt["words"]])
    pooled = torch.cat([negative["pooled"], prompt["pooled"]])
    settings = SimpleNamespace(
        train=SimpleNamespace(cfg=True),
        sample=SimpleNamespace(guidance_scale=SCALE, noise_level=0.7, sde_type="sde"),
    )
    advantages = torch.randn(PUBLISHED_BATCH)
    with meter.phase("update"):
        for sample in samples:
            for j in range(9):
                given = pipe, sample, j, embeds, pooled, settings
                _, new, mean, std = log_prob(network, *given)
                with torch.no_grad(), policy.reference():
                    _, _, base, _ = log_prob(network, *given)
                loss = clipped(advantages, new - sample["log_probs"][:, j])
                distance = ((mean - base) ** 2).mean((1, 2, 3), keepdim=True)
                (loss + KL * (distance / (2 * std**2)).mean()).backward()
    return meter.costs


def embedded(policy: PipelinePolicy, count: int) -> list[dict[str, torch.Tensor]]:
    """The embeddings of a prompt and of the negative prompt, `count` times."""
    with torch.no_grad():
        words = policy.family.encode(policy.pipe, ["a dog", ""], 24, policy.device)
    return [{name: row[name].expand(count, *row[name].shape) for name in row} for row in words]


def clipped(advantages: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """The clipped loss of a batch from the differences of its log-probabilities."""
    ratio = torch.exp(difference)
    limited = ratio.clamp(1 - CLIP, 1 + CLIP)
    return torch.maximum(-advantages * ratio, -advantages * limited).mean()


def factory(folder: Path, counting: bool) -> dict[str, Cost]:
    """An iteration of Flow-Factory's SD3.5 adapter in the checkout at `folder`."""
    sys.path.insert(0, str(folder / "src"))
    kind = import_module("flow_factory.models.stable_diffusion.sd3_5").SD3_5Adapter
    scheduler = import_module("flow_factory.scheduler").FlowMatchEulerDiscreteSDEScheduler
    policy = PipelinePolicy(pipeline(), SD3(), model_options(CONFIG))
    pipe, network = policy.pipe, policy.transformer
    pipe.scheduler = scheduler(noise_level=0.7, shift=pipe.scheduler.config.shift)
    members = {"pipeline": pipe, "transformer": network, "device": policy.device}
    members |= {"__init__": lambda self: None}
    members |= {"cast_latents": lambda self, latents, default_dtype=None: latents}  # to float32
    adapter = type("Adapter", (kind,), members)()
    meter, batches = Meter(network, counting), []

    prompt, negative = embedded(policy, FACTORY_BATCH)
    named = {"prompt_embeds": prompt["words"], "pooled_prompt_embeds": prompt["pooled"]}
    named["negative_prompt_embeds"] = negative["words"]
    named["negative_pooled_prompt_embeds"] = negative["pooled"]
    named |= {"guidance_scale": SCALE}
    with meter.phase("rollout"):
        for _ in range(0, FACTORY_MEMBERS, FACTORY_BATCH):
            samples = adapter.inference(
                prompt=["a dog"] * FACTORY_BATCH,
                negative_prompt=[""] * FACTORY_BATCH,
                height=16,
                width=16,
                num_inference_steps=10,
                trajectory_indices="all",
                **named,
            )
            names = "timesteps", "all_latents", "log_probs"
            batches.append([torch.stack([getattr(s, name) for s in samples]) for name in names])
    with meter.phase("update"):
        for times, latents, log_probs in batches:
            advantages = torch.randn(FACTORY_BATCH)
            for j in range(9):
                call = dict(t=times[:, j], t_next=times[:, j + 1], noise_level=0.7, **named)
                call |= dict(latents=latents[:, j], next_latents=latents[:, j + 1])
                new = adapter.forward(**call, return_kwargs=["log_prob", "next_latents_mean", "dt"])
                with torch.no_grad(), policy.reference():
                    call["compute_log_prob"] = False
                    base = adapter.forward(**call, return_kwargs=["next_latents_mean"])
                loss = clipped(advantages, new.log_prob - log_probs[:, j])
                distance = (new.next_latents_mean - base.next_latents_mean) ** 2
                (loss + KL * distance.mean()).backward()
    return meter.costs


def function(path: Path, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """The function `name` of a script that is not run."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            space = {"torch": torch, "sde_step_with_logprob": step}
            exec(compile(ast.Module([node], []), str(path), "exec"), space)
            return space[name]
    raise SystemExit(f"{path} has no function {name}")


def version(folder: Path) -> str:
    """The commit of a checkout, or a digest of the Python files of another folder."""
    command = ["git", "-C", str(folder), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    top, *commit = result.stdout.split() or [""]
    if commit and Path(top).samefile(folder):
        return f"commit {commit[0]}"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return f"no git, files {digest.hexdigest()[:10]}"


def column(measure: Callable[[bool], dict[str, Cost]], members: int = MEMBERS) -> list[str]:
    """The cells of a program: counted once, timed twice, the faster time counts."""
    counted, timed = measure(True), [measure(False) for _ in range(2)]
    cells, pair = [], 0.0
    for phase, units in (("rollout", members), ("update", 9 * members)):
        cost, seconds = counted[phase], min(costs[phase].seconds for costs in timed)
        cells += [f"{cost.rows}", f"{cost.calls}", f"{cost.operations / units:,.0f}"]
        cells += [f"{1e3 * seconds / units:.0f} ms", f"{cost.peak / units / 1e3:,.0f} kB"]
        pair += cost.operations / (9 * members)
    return [*cells, f"{pair:,.0f}"]


def tried(
    name: str, folder: Path | None, measure: Callable[[Path, bool], dict[str, Cost]], members: int
) -> tuple[str, list[str], str]:
    """Heading, cells and origin of a released program; if it cannot run, why."""
    if folder is None:
        return name, ["not run"] * 11, f"{name} was not run: no checkout was given."
    origin = version(folder)
    try:
        cells = column(partial(measure, folder), members)
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        return name, ["not run"] * 11, f"{name} ({origin}) was not run: {reason}."
    return f"{name} ({origin})", cells, f"{name} is that of {folder.name}, {origin}."


TEXT = """# Costs side by side with released code

Made by `python benchmarks/side_by_side.py{arguments}` on one core of {cores} ({processor}), torch {torch}, diffusers {diffusers}, float32:
one measurement of the counts and the faster of two of the times. The network has the depth of SD3.5-Medium and tiny width, so
processor time is mostly dispatch; on a GPU with wide layers it is not. Guidance {guidance}, KL, no gradient checkpointing, 10 steps, 9
of them trained, one group of {members} (Flow-Factory: 16, two of its batches). 28 rows are what `--plan` chooses for an H100, 4 for 24 GB. {origins}

{table}
"""


def main() -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flow-grpo", type=Path, help="checkout of yifan123/flow_grpo")
    parser.add_argument("--flow-factory", type=Path, help="checkout of X-GenGroup/Flow-Factory")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = {f"flowrl, {rows} rows": column(partial(own, rows)) for rows in (28, 4)}
    given = {"flow_grpo": options.flow_grpo, "Flow-Factory": options.flow_factory}
    origins = []
    for name, measure, members in (
        ("flow_grpo", released, MEMBERS),
        ("Flow-Factory", factory, FACTORY_MEMBERS),
    ):
        heading, cells, origin = tried(name, given[name], measure, members)
        columns[heading] = cells
        origins.append(origin)
    unit = {"rollout": "trajectory", "update": "pair"}
    names = "network rows per call", "network calls", "operations", "processor time", "peak memory"
    rows = [
        f"{phase}: {name}{f' per {unit[phase]}' if number > 1 else ''}"
        for phase in PHASES
        for number, name in enumerate(names)
    ]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for number, row in enumerate([*rows, "operations per pair, rollout and update"]):
        lines.append(f"| {row} | {' | '.join(cells[number] for cells in columns.values())} |")
    page = TEXT.format(
        arguments="".join(
            f" --{name.lower().replace('_', '-')} PATH" for name in given if given[name]
        ),
        cores=os.cpu_count(),
        processor=platform.processor() or platform.machine(),
        torch=torch.__version__,
        diffusers=diffusers.__version__,
        guidance=SCALE,
        members=MEMBERS,
        origins=" ".join(origins),
        table="\n".join(lines),
    )
    if options.out:
        options.out.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
