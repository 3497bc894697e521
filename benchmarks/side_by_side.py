"""What an iteration costs here and in released code: rows, network calls, dispatched operations,
processor time and memory, per trajectory and per trained (trajectory, step) pair.

    python benchmarks/side_by_side.py --flow-grpo PATH    # a checkout of yifan123/flow_grpo

The network has the depth of SD3.5-Medium (24 blocks, the first 13 with a second attention) and tiny
width, with a LoRA of rank 32, guidance 4.5 and a KL to the base model; the images are noise. Both
programs draw and train one group, in float32 on one core. Of the released code these parts run:
`pipeline_with_logprob`, with its batch of 9 samples, and `compute_log_prob` of scripts/train_sd3.py,
whose definition alone is taken out of the script, because the script itself needs GPUs and a
tracker. The loss around them is written here as the released loop has it. Operations leave out
views. Without a checkout its column says "not run". benchmarks/results/side_by_side.md is the
committed table.
"""

import argparse
import ast
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from flowrl_testing.tiny import tiny_sd3

from flowrl import Prompt, Trainer, preset
from flowrl.policies import PipelinePolicy, StorageCounter
from flowrl.policies.families import SD3
from flowrl.rewards import FunctionReward
from flowrl.training.build import make_method, model_options
from flowrl.training.config import RunConfig

PUBLISHED_BATCH = 9
"""Samples per network call of the released configuration, in sampling and training."""
MEMBERS, SCALE, KL, CLIP = 18, 4.5, 0.04, 1e-4
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


def own(rows: int, counting: bool) -> dict[str, Cost]:
    """An iteration of the trainer with `rows` network rows per call."""
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(
        model="none", device="cpu", dtype="float32", resolution=16, max_sequence_length=24
    )
    config = config.replace(
        **dict(groups=1, group_size=MEMBERS, minibatches=1, drop_zero_advantages=False),
        **dict(micro_batch=rows, max_batch="auto", gradient_checkpointing=False),
    )
    policy = PipelinePolicy(pipeline(), SD3(), model_options(config))
    return metered(config, policy, counting)


def metered(config: RunConfig, policy: PipelinePolicy, counting: bool) -> dict[str, Cost]:
    """The costs of an iteration of the trainer."""
    reward = FunctionReward(lambda images, prompts: images.mean((1, 2, 3)))
    trainer = Trainer(policy, make_method(config), reward, [Prompt("a dog")], config)
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
    config = preset("sd3.5-medium,flow-grpo,ocr").apply(
        model="none", device="cpu", dtype="float32", resolution=16, max_sequence_length=24
    )
    config = config.replace(gradient_checkpointing=False)
    policy = PipelinePolicy(pipeline(), SD3(), model_options(config))
    pipe, network = policy.pipe, policy.transformer
    with torch.no_grad():
        words = policy.family.encode(pipe, ["a dog", ""], 24, policy.device)
    prompt, negative = (
        {name: row[name].expand(PUBLISHED_BATCH, *row[name].shape) for name in row} for row in words
    )
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
                ratio = torch.exp(new - sample["log_probs"][:, j])
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
                distance = ((mean - base) ** 2).mean((1, 2, 3), keepdim=True)
                (loss + KL * (distance / (2 * std**2)).mean()).backward()
    return meter.costs


def function(path: Path, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """The function `name` of a script that is not run."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            space = {"torch": torch, "sde_step_with_logprob": step}
            exec(compile(ast.Module([node], []), str(path), "exec"), space)
            return space[name]
    raise SystemExit(f"{path} has no function {name}")


def version(folder: Path | None) -> str:
    """The commit of a checkout."""
    if folder is None:
        return "not run"
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "no commit"


def column(measure: Callable[[bool], dict[str, Cost]] | None) -> list[str]:
    """The cells of a program: counted once, timed twice, the faster time counts."""
    if measure is None:
        return ["not run"] * 10
    counted, timed = measure(True), [measure(False) for _ in range(2)]
    cells = []
    for phase, units in (("rollout", MEMBERS), ("update", 9 * MEMBERS)):
        cost, seconds = counted[phase], min(costs[phase].seconds for costs in timed)
        cells += [f"{cost.rows}", f"{cost.calls}", f"{cost.operations / units:,.0f}"]
        cells += [f"{1e3 * seconds / units:.0f} ms", f"{cost.peak / units / 1e3:,.0f} kB"]
    return cells


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flow-grpo", type=Path, help="checkout of yifan123/flow_grpo")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.flow_grpo
    columns = {
        f"flowrl, {rows} rows": column(lambda c, rows=rows: own(rows, c)) for rows in (28, 4)
    }
    columns[f"flow_grpo ({version(folder)})"] = column(
        None if folder is None else lambda counting: released(folder, counting)
    )
    unit = {"rollout": "trajectory", "update": "pair"}
    names = (
        "network rows per call",
        "network calls",
        "operations",
        "processor time",
        "peak memory",
    )
    rows = [
        f"{phase}: {name}{f' per {unit[phase]}' if number > 1 else ''}"
        for phase in PHASES
        for number, name in enumerate(names)
    ]
    print(
        f"| torch {torch.__version__}, diffusers {diffusers.__version__} | {' | '.join(columns)} |"
    )
    print("|---" * (len(columns) + 1) + "|")
    for number, row in enumerate(rows):
        print(f"| {row} | {' | '.join(cells[number] for cells in columns.values())} |")


if __name__ == "__main__":
    main()
