"""`flowrl train` at the published sizes without a GPU: every step from a model's folder to a LoRA in plain diffusers, and the memory.

    python benchmarks/full_size.py                                       # SD3.5-Medium: 2.2 billion weights in bfloat16
    python benchmarks/full_size.py --model flux.1-dev --blocks 0.25      # a quarter of FLUX.1-dev's blocks: 3 billion
    python benchmarks/full_size.py --model tiny-sd3 --out runs/tiny      # the same path in a minute

A pipeline with random weights is written to a folder: transformer and image decoder of the published sizes, text encoders of one
narrow layer with the published widths and prompt lengths. `flowrl train` then trains it by each method: 256 pixels, guidance as in
the preset, one group of two members, three steps, two of them trained, KL to the base model. The first method trains for two iterations. It
is killed after the second, before its checkpoint, and resumed: the second iteration must come out the same, number by number. Plain
diffusers loads every LoRA and draws the image of the run's last evaluation.

Bytes are those of PyTorch's tensors, counted as they come and go (`StorageCounter`), by phase, beside what `flowrl train --plan`
computes for the same settings. Seconds are wall-clock and processor seconds; the load says what else ran. The command exits with 1
if a check fails. It needs 10 GB of memory and 6 GB of disk.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from full_size_model import write_pipeline
from safetensors.torch import load_file

from flowrl.io import write_json
from flowrl.policies import Memory
from flowrl.policies.load import family_of
from flowrl.rollout import EVALUATION_SEED
from flowrl.training.config import RunConfig, load_config
from flowrl.training.plan import memory, memory_text, plan, plan_text

HERE = Path(__file__).parent
METHODS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")
PROMPTS = ("a red cube on a table", "two blue balls", 'a sign that reads "open"')
SETTINGS: dict[str, Any] = {
    "reward": f"{HERE / 'full_size_model.py'}:Brightness", "resolution": 256, "dtype": "bfloat16", "max_sequence_length": 128,
    "groups": 1, "group_size": 2, "window": "all-but-last", "micro_batch": 2, "max_batch": 4, "decode_batch": 2,
    "kl_weight": 1e-3, "learning_rate": 1e-2, "ema_decay": 0.0, "eval_samples": 1, "eval_steps": 2, "eval_every": 100,
    "decode_dtype": "bfloat16", "checkpoint_every": 1, "tracker": "none", "device": "cpu",
}  # fmt: skip
TINY = {"resolution": 32, "max_sequence_length": 24, "lora_rank": 4, "lora_alpha": 8.0}
PHASES = {"rollout": "rollout", "reward": "decode", "update": "update"}
"""Phases of an iteration and their names in a plan."""
TOLERANCE = 0.15
"""Largest relative error of the plan's memory, in any phase."""
CLOCKS = ("seconds", "phases")


def train(args: argparse.Namespace, folder: Path, method: str, iterations: int, end: str) -> dict[str, Any]:
    """Run `flowrl train` in a process of its own; `end`: "finished", "killed" (after the last iteration) or "resumed"."""
    out, name = folder.with_name(method), args.model
    if end == "resumed":
        words = ["--resume", str(out)]
    else:
        chosen = {**SETTINGS, **(TINY if name.startswith("tiny") else {}), "num_steps": args.steps, "iterations": iterations}
        options = {f"--{key.replace('_', '-')}": str(value) for key, value in chosen.items()}
        base = "flux.1-dev" if "flux" in name else "sd3.5-medium"
        texts = folder.with_name("prompts.txt")
        words = ["--preset", f"{base},{method},ocr", "--model", str(folder), "--prompts", str(texts)]
        words += ["--heldout-prompts", str(texts), "--out", str(out)]
        words += [word for option in options.items() for word in option]
    report, log = out.with_suffix(f".{end}.json"), out.with_suffix(f".{end}.log")
    if report.exists() and "wall" in (found := json.loads(report.read_text())):
        return found
    given = [str(report), str(args.threads), str(iterations if end == "killed" else 0), *words]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "OMP_WAIT_POLICY": "passive",
    }  # threads that wait use no processor
    load, start = os.getloadavg()[0], time.perf_counter()
    with log.open("w") as stream:
        command = [sys.executable, str(HERE / "full_size_train.py"), *given]
        code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False, env=environment).returncode
    seconds = time.perf_counter() - start
    if code != (-9 if end == "killed" else 0):
        raise SystemExit(f"{method}, {end}: exit code {code}\n{log.read_text()[-3000:]}")
    found = json.loads(report.read_text())
    print(f"{method:<20s} {end:<9s} {seconds:7.0f} s, {found['processor']:.0f} of the processor", file=sys.stderr, flush=True)
    found = {"method": method, "load": [load, os.getloadavg()[0]], **found, "end": end, "wall": seconds}
    if end == "killed":
        found["rows"] = rows(out)
    write_json(report, found)
    return found


def rows(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timeless = [{key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in found]
    return [{**row, "evaluation": {k: v for k, v in (row["evaluation"] or {}).items() if k != "seconds"}} for row in timeless]


def compare_images(folder: Path, runs: dict[str, Path], config: RunConfig) -> dict[str, dict[str, float]]:
    """Per run: mean absolute difference of pixels between diffusers' image with the LoRA and flowrl's, and between flowrl's images
    with and without it."""
    diffusers.utils.logging.set_verbosity_error()  # it misses a LoRA of the text encoders
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    policy, found = config.policy, {}
    family = family_of(type(pipe).__name__)
    shape = family.latent_shape(pipe, policy.resolution, policy.resolution)
    size = (policy.resolution // pipe.vae_scale_factor,) * 2
    noise = torch.randn((1, *shape), generator=torch.Generator().manual_seed(EVALUATION_SEED))
    guided = {} if family.pipeline == "FluxPipeline" else {"guidance_scale": policy.guidance_scale}
    for method, out in runs.items():
        pipe.load_lora_weights(out / "lora")
        latent = pipe(
            PROMPTS[0], num_inference_steps=config.evaluation.eval_steps, height=policy.resolution, width=policy.resolution,
            latents=noise.to(torch.bfloat16), max_sequence_length=policy.max_sequence_length, output_type="latent", **guided,
        ).images  # fmt: skip
        pipe.unload_lora_weights()
        decoder = pipe.vae.float()
        with torch.no_grad():
            image = (family.decode(pipe, latent.float(), size) / 2 + 0.5).clamp(0, 1)
        decoder.to(torch.bfloat16)
        own = load_file(out / "samples.safetensors")
        found[method] = {
            "to_flowrl": float((image[0] - own["after"][0]).abs().mean()),
            "of_the_lora": float((own["before"][0] - own["after"][0]).abs().mean()),
        }
    return found


def memory_lines(trained: Sequence[dict[str, Any]], planned: Memory) -> list[dict[str, Any]]:
    """Per phase: the most bytes that were counted, and those of the plan."""
    lines = []
    for phase, name in PHASES.items():
        seen = [entry for entry in trained if entry["phase"] == phase]
        counted, held = max(entry["peak"] for entry in seen), max(entry["held"] for entry in seen)
        whole = planned.always + getattr(planned, name)
        lines.append(
            {"phase": phase, "counted": counted, "planned": whole, "error": whole / counted - 1, "held": held, "adds": counted - held,
             "planned_adds": getattr(planned, name)}
        )  # fmt: skip
    return lines


def read_or_write(note: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the pipeline unless it is there; what it took."""
    if not note.exists():
        write_json(note, write_pipeline(args.model, args.blocks, folder))
    return json.loads(note.read_text())


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything, in the folder `work`."""
    folder = work / args.model
    written = read_or_write(work / "pipeline.json", args, folder)
    print(f"{written['parameters'] / 1e9:.2f} billion weights written", file=sys.stderr, flush=True)
    (work / "prompts.txt").write_text("\n".join(PROMPTS))
    runs = {method: work / method for method in args.methods}
    first, *others = args.methods
    trained = [train(args, folder, first, 2, "killed")]
    trained.append(train(args, folder, first, 2, "resumed"))
    same = trained[0].pop("rows") == rows(runs[first])
    trained += [train(args, folder, method, 1, "finished") for method in others]
    table, texts = [], {}
    for method, out in runs.items():
        config = load_config(out / "config.json")
        counts = plan(config)
        planned = memory(counts, config)
        assert planned is not None
        phases = [phase for run in trained if run["method"] == method for phase in run["phases"]]
        table += [{"method": method, **line} for line in memory_lines(phases, planned)]
        texts[method] = plan_text(counts, config) + "\n" + memory_text(counts, config)
    begun = time.perf_counter()
    images = compare_images(folder, runs, load_config(runs[first] / "config.json"))
    found = {
        "model": args.model, "blocks": args.blocks, **written, "threads": args.threads, "seconds_diffusers": time.perf_counter() - begun,
        "seconds": sum(run["wall"] for run in trained) + written["seconds_build"] + written["seconds_write"] + time.perf_counter() - begun, "machine": f"{os.cpu_count()} cores ({platform.processor() or platform.machine()})",
        "versions": {"torch": str(torch.__version__), "diffusers": diffusers.__version__}, "runs": trained, "memory": table,
        "images": images, "resumed_equals_killed": same, "plan": texts,
    }  # fmt: skip
    found["failures"] = failures(found)
    return found


def failures(found: dict[str, Any]) -> list[str]:
    """What did not hold."""
    wrong = [] if found["resumed_equals_killed"] else ["the resumed run's numbers differ from the killed one's"]
    for line in found["memory"] if not found["model"].startswith("tiny") else ():
        if abs(line["error"]) > TOLERANCE:
            wrong.append(f"memory of {line['method']}, {line['phase']}: the plan is off by {line['error']:+.0%}")
    for method, image in found["images"].items():
        if not image["to_flowrl"] < 0.2 * image["of_the_lora"]:
            wrong.append(
                f"{method}: diffusers' image differs by {image['to_flowrl']:.4f}, the LoRA's effect is {image['of_the_lora']:.4f}"
            )
    return wrong


def show(found: dict[str, Any]) -> str:
    """The tables."""
    lines = ["method              end        wall s  processor s  load        phases: wall s (processor s)"]
    for run in found["runs"]:
        sums: dict[str, list[float]] = {}
        for phase in run["phases"]:
            total = sums.setdefault(phase["phase"], [0.0, 0.0])
            total[0] += phase["seconds"]
            total[1] += phase["processor"]
        parts = ", ".join(f"{name} {wall:.0f} ({own:.0f})" for name, (wall, own) in sums.items())
        load = " to ".join(f"{value:.1f}" for value in run["load"])
        lines.append(f"{run['method']:<19s} {run['end']:<9s} {run['wall']:7.0f} {run['processor']:12.0f}  {load:<10s}  {parts}")
    lines.append("method              phase    counted GB  planned GB  error   phase adds GB: counted, planned")
    for line in found["memory"]:
        counted, planned, adds, planned_adds = (line[k] / 1e9 for k in ("counted", "planned", "adds", "planned_adds"))
        lines.append(
            f"{line['method']:<19s} {line['phase']:<8s} {counted:10.3f} {planned:11.3f} {line['error']:+6.1%}   {adds:.3f}, {planned_adds:.3f}"
        )
    for method, image in found["images"].items():
        lines.append(
            f"{method:<19s} image: diffusers - flowrl {image['to_flowrl']:.5f}, with - without LoRA {image['of_the_lora']:.5f}"
        )
    lines.append(f"resumed equals killed: {found['resumed_equals_killed']}; {found['seconds'] / 60:.1f} minutes in all")
    return "\n".join([*lines, *(f"FAILED: {text}" for text in found["failures"])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, print; 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("sd3.5-medium", "flux.1-dev", "tiny-sd3", "tiny-flux"), default="sd3.5-medium")
    parser.add_argument("--blocks", type=float, default=1.0, help="share of the transformer's blocks")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=3, help="denoising steps in training; all but the last are trained")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for full_size-MODEL.json")
    parser.add_argument("--work", type=Path, default=None, help="folder for model and runs, which then stay [default: temporary]")
    args = parser.parse_args(arguments)
    work = args.work or Path(tempfile.mkdtemp(prefix="full-size-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        found = measure(args, work)
    finally:
        if args.work is None:
            shutil.rmtree(work)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / f"full_size-{args.model}.json", found)
    print(show(found))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
