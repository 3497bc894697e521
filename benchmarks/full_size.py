"""`flowrl train` at the published sizes without a GPU: from a model's folder to a LoRA in plain
diffusers, with the memory.

    python benchmarks/full_size.py                                       # SD3.5-Medium, 2.2 billion weights in bfloat16
    python benchmarks/full_size.py --model flux.1-dev --blocks 0.25      # a quarter of FLUX.1-dev's blocks: 3 billion
    python benchmarks/full_size.py --model tiny-sd3 --out runs/tiny      # the same path in a minute

A pipeline with random weights is written to a folder: transformer and image decoder of the
published sizes, text encoders of one narrow layer with the published widths. `flowrl train` then
trains it by each method: 256 pixels, the preset's guidance, one group of two members, all steps but
the last trained, KL to the base model. The first method trains for two iterations. It is killed
after the second, before its checkpoint, and resumed: the second iteration must come out the same,
number by number. Plain diffusers loads every LoRA and draws the image of the run's last evaluation.

Bytes are those of PyTorch's tensors, counted as they come and go (`StorageCounter`), by phase, next
to what `flowrl train --plan` computes for the same settings. Seconds are wall-clock and processor
seconds; the load says what else ran. The exit code is 1 if a check fails. It needs 11 GB of memory
and 7 GB of disk. With --work, runs that are finished are not made again.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from full_size_model import write_pipeline
from safetensors.torch import load_file

from flowrl.bench.page import Table
from flowrl.rollout import EVALUATION_SEED
from flowrl.run.config import RunConfig, load_config
from flowrl.run.io import write_json
from flowrl.run.models.hub import family_of
from flowrl.run.models.memory import Memory
from flowrl.run.plan import memory, memory_text, plan, plan_text
from flowrl.run.workers import usable_cores

HERE = Path(__file__).parent
METHODS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
PROMPTS = ("a red cube on a table", "two blue balls", 'a sign that reads "open"')
SETTINGS: dict[str, Any] = {
    "reward": f"{HERE / 'full_size_model.py'}:Brightness",
    "resolution": 256,
    "dtype": "bfloat16",
    "max_sequence_length": 128,
    "groups": 1,
    "group_size": 2,
    "window": ":-1",
    "trained_steps": ":",
    "micro_batch": 2,
    "max_batch": 4,
    "decode_batch": 2,
    "kl_weight": 1e-3,
    "learning_rate": 1e-2,
    "ema_decay": 0.0,
    "eval_samples": 1,
    "eval_steps": 2,
    "eval_every": 100,
    "decode_dtype": "bfloat16",
    "checkpoint_every": 1,
    "tracker": "none",
    "device": "cpu",
}
TINY = {
    "resolution": 32,
    "max_sequence_length": 24,
    "lora_rank": 4,
    "lora_alpha": 8.0,
    "learning_rate": 5e-2,
}
PHASES = ("rollout", "decode", "update")
"""Phases of an iteration whose memory a plan has."""
TOLERANCE = 0.15
"""Largest relative error of the plan's memory, in any phase."""
SAME_IMAGE = 0.2
"""Largest distance of two images as a share of the LoRA's effect; the pipeline rounds latents to
bfloat16, flowrl does not.
"""
CLOCKS = ("seconds", "phases")


def train_words(args: argparse.Namespace, folder: Path, method: str, iterations: int) -> list[str]:
    """The options of `flowrl train`."""
    tiny = TINY if args.model.startswith("tiny") else {}
    texts = str(folder.with_name("prompts.txt"))
    chosen = {
        **SETTINGS,
        **tiny,
        "model": folder,
        "prompts": texts,
        "heldout_prompts": texts,
        "out": folder.with_name(method),
    }
    chosen |= {"num_steps": args.steps, "iterations": iterations}
    preset = f"{'flux.1-dev' if 'flux' in args.model else 'sd3.5-medium'},{method},ocr"
    options = ((f"--{key.replace('_', '-')}", str(value)) for key, value in chosen.items())
    return ["--preset", preset, *(word for option in options for word in option)]


def train(
    args: argparse.Namespace, folder: Path, method: str, iterations: int, end: str
) -> dict[str, Any]:
    """Run `flowrl train` in a process of its own; `end`: "finished", "killed" (after the last
    iteration) or "resumed".
    """
    out = folder.with_name(method)
    report, log = out.with_suffix(f".{end}.json"), out.with_suffix(f".{end}.log")
    if report.exists() and "wall" in (record := json.loads(report.read_text())):
        return record
    if end != "resumed":
        shutil.rmtree(out, ignore_errors=True)
    words = (
        ["--resume", str(out), "--trust"]
        if end == "resumed"
        else train_words(args, folder, method, iterations)
    )
    given = [str(report), str(args.threads), str(iterations if end == "killed" else 0), *words]
    command = [sys.executable, str(HERE / "full_size_train.py"), *given]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "passive"}
    load, start = os.getloadavg()[0], time.perf_counter()
    with log.open("w") as stream:
        code = subprocess.run(
            command, stdout=stream, stderr=subprocess.STDOUT, check=False, env=environment
        ).returncode
    seconds = time.perf_counter() - start
    if code != (-signal.SIGKILL if end == "killed" else 0):
        raise SystemExit(f"{method}, {end}: exit code {code}\n{log.read_text()[-3000:]}")
    record = {
        **json.loads(report.read_text()),
        "method": method,
        "end": end,
        "wall": seconds,
        "load": [load, os.getloadavg()[0]],
    }
    print(
        f"{method:<19s} {end:<9s} {seconds:6.0f} s, {record['processor']:.0f} of the processor",
        file=sys.stderr,
        flush=True,
    )
    if end == "killed":
        record["rows"] = rows(out)
    write_json(report, record)
    return record


def rows(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timeless = [
        {key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in lines
    ]
    return [
        {
            **row,
            "evaluation": {k: v for k, v in (row["evaluation"] or {}).items() if k != "seconds"},
        }
        for row in timeless
    ]


def compare_images(
    folder: Path, runs: dict[str, Path], config: RunConfig
) -> dict[str, dict[str, float]]:
    """Mean absolute differences of pixels per run: between diffusers' image with the LoRA and
    flowrl's ("to_flowrl"), and between flowrl's images with and without it ("of_the_lora").
    """
    diffusers.utils.logging.set_verbosity_error()  # it misses a LoRA of the text encoders
    pipe: Any = import_module("diffusers").DiffusionPipeline.from_pretrained(
        folder, dtype=torch.bfloat16, use_safetensors=True
    )
    pipe.set_progress_bar_config(disable=True)
    policy, family, differences = config.policy, family_of(type(pipe).__name__), {}
    side = policy.resolution
    noise = torch.randn(
        (1, *family.latent_shape(pipe, side, side)),
        generator=torch.Generator().manual_seed(EVALUATION_SEED),
    )
    guided = {} if family.pipeline == "FluxPipeline" else {"guidance_scale": policy.guidance_scale}
    for method, out in runs.items():
        pipe.load_lora_weights(out / "lora")
        latent = pipe(
            PROMPTS[0],
            num_inference_steps=config.evaluation.eval_steps,
            height=side,
            width=side,
            latents=noise.to(torch.bfloat16),
            max_sequence_length=policy.max_sequence_length,
            output_type="latent",
            **guided,
        ).images
        pipe.unload_lora_weights()
        with torch.no_grad():
            pixels = family.decode(
                pipe, latent.to(pipe.vae.dtype), (side // pipe.vae_scale_factor,) * 2
            ).float()
        image, samples = (pixels[0] / 2 + 0.5).clamp(0, 1), load_file(out / "samples.safetensors")
        differences[method] = {
            "to_flowrl": float((image - samples["after"][0]).abs().mean()),
            "of_the_lora": float((samples["before"][0] - samples["after"][0]).abs().mean()),
        }
    return differences


def memory_lines(
    method: str, phases: Sequence[dict[str, Any]], planned: Memory
) -> list[dict[str, Any]]:
    """Per phase of an iteration: the most bytes that were counted and those of the plan, in all and
    what the phase adds.
    """
    lines = []
    for phase in PHASES:
        seen = [entry for entry in phases if entry["phase"] == phase]
        counted, held = max(entry["peak"] for entry in seen), max(entry["held"] for entry in seen)
        adds = getattr(planned, phase)
        line = {
            "counted": counted,
            "planned": planned.weights + planned.trained + planned.trajectories + adds,
            "counted_adds": counted - held,
            "planned_adds": adds,
        }
        lines.append(
            {"method": method, "phase": phase, **line, "error": line["planned"] / counted - 1}
        )
    return lines


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything, in the folder `work`."""
    folder, note = work / args.model, work / "pipeline.json"
    if not note.exists():
        write_json(note, write_pipeline(args.model, args.blocks, folder))
    written = json.loads(note.read_text())
    print(f"{written['parameters'] / 1e9:.2f} billion weights written", file=sys.stderr, flush=True)
    (work / "prompts.txt").write_text("\n".join(PROMPTS))
    first, *others = args.methods
    killed, resumed = (train(args, folder, first, 2, end) for end in ("killed", "resumed"))
    same = killed.pop("rows") == rows(work / first)
    trained = [killed, resumed, *(train(args, folder, method, 1, "finished") for method in others)]
    lines, texts = [], {}
    configs = {
        method: load_config(work / method / "config.json", trust=True) for method in args.methods
    }
    for method, config in configs.items():
        counts = plan(config)
        planned = memory(counts, config)
        assert planned is not None
        lines += memory_lines(
            method,
            [phase for run in trained if run["method"] == method for phase in run["phases"]],
            planned,
        )
        texts[method] = f"{plan_text(counts, config)}\n{memory_text(counts, config)}".splitlines()
    start = time.perf_counter()
    images = compare_images(
        folder, {method: work / method for method in args.methods}, configs[first]
    )
    drawn = time.perf_counter() - start
    record = {
        "model": args.model,
        "blocks": args.blocks,
        "steps": args.steps,
        "threads": args.threads,
        **written,
        "machine": f"{usable_cores()} cores, {platform.machine()}",
        "torch": str(torch.__version__),
        "diffusers": diffusers.__version__,
        "seconds_diffusers": drawn,
        "seconds": (
            written["seconds_build"]
            + written["seconds_write"]
            + sum(run["wall"] for run in trained)
            + drawn
        ),
        "runs": trained,
        "resumed_equals_killed": same,
        "images": images,
        "memory": lines,
        "plan": texts,
    }
    return {**record, "failures": failures(record)}


def failures(record: dict[str, Any]) -> list[str]:
    """What did not hold. The memory of a tiny model does not count: its weights are smaller than
    what surrounds them.
    """
    wrong = (
        []
        if record["resumed_equals_killed"]
        else ["the resumed run's numbers differ from the killed one's"]
    )
    for line in record["memory"] if not record["model"].startswith("tiny") else ():
        if abs(line["error"]) > TOLERANCE:
            wrong.append(
                f"memory of {line['method']}, {line['phase']}: the plan is off by"
                f" {line['error']:+.0%}"
            )
    for method, image in record["images"].items():
        far, effect = image["to_flowrl"], image["of_the_lora"]
        if not far < SAME_IMAGE * effect:
            wrong.append(
                f"{method}: diffusers' image differs from flowrl's by {far:.4f}, the LoRA's effect"
                f" is {effect:.4f}"
            )
    return wrong


def show(record: dict[str, Any]) -> str:
    """Three tables in Markdown: seconds, memory, images."""
    names = ("load", "evaluation", "rollout", "decode", "reward", "update")
    runs = []
    for run in record["runs"]:
        parts = (
            sum(phase["processor"] for phase in run["phases"] if phase["phase"] == name)
            for name in names
        )
        numbers = (run["wall"], run["processor"], max(run["load"]), *parts)
        label = f"{run['method']}, {run['end']}"
        runs.append((label, *(f"{number:.0f}" for number in numbers)))
    memory = []
    for line in record["memory"]:
        counted, planned, *adds = (
            f"{line[key] / 1e9:.2f}"
            for key in ("counted", "planned", "counted_adds", "planned_adds")
        )
        row = (line["method"], line["phase"], counted, planned, f"{line['error']:+.1%}", *adds)
        memory.append(row)
    images = [
        (name, f"{image['to_flowrl']:.5f}", f"{image['of_the_lora']:.5f}")
        for name, image in record["images"].items()
    ]
    sizes = ("counted GB", "planned GB", "error", "phase adds, counted", "planned")
    pairs = ("diffusers' image against flowrl's", "with the LoRA against without")
    tables = (
        Table(("run", "seconds", "processor", "load", *names), runs),
        Table(("method", "phase", *sizes), memory),
        Table(("method", *pairs), images),
    )
    same = "equals" if record["resumed_equals_killed"] else "differs from"
    processor = sum(run["processor"] for run in record["runs"]) / 60
    summary = (
        f"The resumed run {same} the killed one. {record['seconds'] / 60:.1f} minutes,"
        f" {processor:.1f} of the processor."
    )
    failed = [f"FAILED: {text}" for text in record["failures"]]
    return "\n\n".join([*(table.markdown() for table in tables), summary, *failed])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, print; 1 if a check fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        choices=("sd3.5-medium", "flux.1-dev", "tiny-sd3", "tiny-flux"),
        default="sd3.5-medium",
    )
    parser.add_argument(
        "--blocks", type=float, default=1.0, help="share of the transformer's blocks"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--steps",
        type=int,
        default=2,
        help="denoising steps in training; all but the last are trained",
    )
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="folder for full_size-MODEL.json"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=None,
        help="folder for model and runs, which then stay [default: temporary]",
    )
    args = parser.parse_args(arguments)
    work = args.work or Path(tempfile.mkdtemp(prefix="full-size-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        record = measure(args, work)
    finally:
        if args.work is None:
            shutil.rmtree(work)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / f"full_size-{args.model}.json", record)
    print(show(record))
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
