"""The published models at full size on one GPU: how long rollout and update take, and how much of
the GPU they use.

    python benchmarks/gpu.py --out results            # SD3.5-Medium and FLUX.1-dev, three methods, every optimisation on and off
    python benchmarks/gpu.py --models sd3.5-medium --variants none --minutes 8
    python benchmarks/gpu.py --tiny                   # end to end on the CPU in under a minute; its figures mean nothing

The transformers and image decoders have the published sizes and random weights: nothing is
downloaded. Text encoders are left out; prompts are noise of the shape of their embeddings, which
are cached in training anyway. Everything else is what `flowrl train` does: the trainer, the method,
a LoRA of rank 32 on all attention, AdamW, images decoded and scored (by their brightness, so the
reward costs nothing).

Columns. rollout, score (decoding) and update: seconds of an iteration, the fastest of --repeats.
images/s: trajectories over all of it. pairs/s: (trajectory, step) pairs over the update. GB: most
memory at a time. use: useful floating-point operations of the transformer (counted; recomputation
under gradient checkpointing is not useful) over seconds and over the ceiling, which is the best
matrix product of the same precision, measured just before on the same GPU (or CPU threads); a share
above 100% is an error. other: share of the phase in which the network did not work.

Variants change one setting of the base each; `--set` changes the base. Every configuration is one
line of OUT/gpu.jsonl, so a stopped benchmark goes on where it was (finished lines of the same code,
settings and device are not made again); OUT/gpu.json has everything.
"""

import argparse
import gc
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_cases import METHODS, MODELS, Case, RandomEmbeddings, Setting, cases, parse_changes
from gpu_compute import (
    LARGE,
    Meter,
    MeteredFamily,
    NetworkCost,
    matrix_product_ceiling,
    network_cost,
    share_of_ceiling,
)

from flowrl import PolicyOptions, Prompt, preset
from flowrl.bench.digest import code_digest
from flowrl.bench.page import Table
from flowrl.bench.results_file import ResultsFile
from flowrl.policies import DTYPES, PipelinePolicy, compile_blocks
from flowrl.rewards import FunctionReward
from flowrl.run.build import build_trainer, make_method
from flowrl.run.config import RunConfig
from flowrl.run.parts.plugins import versions
from flowrl.run.results import scoring_seconds
from flowrl.run.workers import usable_cores

BRIGHTNESS = FunctionReward(lambda images, prompts: images.mean((1, 2, 3)))


def build(case: Case, device: str) -> tuple[PipelinePolicy, Meter, NetworkCost]:
    """The policy with a meter around its network, and what an evaluation costs."""
    model, setting = MODELS[case.model], case.setting
    options = PolicyOptions(
        resolution=setting.resolution,
        device=device,
        dtype=setting.dtype,
        guidance_scale=setting.guidance,
        lora_rank=setting.rank,
        lora_alpha=2.0 * setting.rank,
        gradient_checkpointing=setting.checkpointing,
        decode_batch=setting.decode_batch,
        decode_dtype=setting.decode_dtype,
        attention_backend=setting.attention or None,
    )
    pipe = model.pipeline(device, DTYPES[setting.dtype])
    policy = PipelinePolicy(pipe, RandomEmbeddings(model.family, model.tokens), options)  # pyright: ignore[reportArgumentType]
    if setting.compile:
        compile_blocks(policy.transformer, setting.compile)
    condition = policy.encode([Prompt("a prompt")])
    cost = network_cost(policy, policy.prompts.rows(condition.tensors["prompt"]))
    meter = Meter(policy.device)
    policy.family = MeteredFamily(policy.family, meter)  # pyright: ignore[reportAttributeAccessIssue]
    meter.watch(list(policy.trainable().values()))
    return policy, meter, cost


def run_config(case: Case) -> RunConfig:
    """The settings of the trainer."""
    setting = case.setting
    return preset("default").apply(
        method=case.method,
        groups=setting.prompts,
        group_size=setting.members,
        num_steps=setting.steps,
        minibatches=setting.updates,
        window=":-1",
        micro_batch=setting.micro_batch,
        max_batch=setting.max_batch,
        learning_rate=3e-4,
        clip_range=1e-4,
        ema_decay=0.9,
        kl_weight=setting.kl_weight,
        dtype=setting.dtype,
        offload=setting.offload,
        iterations=1000,
    )


def measure(
    case: Case, device: str, repeats: int, ceiling: float, left: Callable[[], float]
) -> dict[str, Any]:
    """One unmeasured iteration (start-up, compilation), then the fastest of up to `repeats`, as
    many as the time allows.
    """
    setting = case.setting
    policy, meter, cost = build(case, device)
    config = run_config(case)
    trainer = build_trainer(
        config,
        policy,
        make_method(config),
        BRIGHTNESS,
        [Prompt(f"prompt {n}") for n in range(16)],
        on_phase=meter.phase,
    )
    if not setting.fused:
        trainer.optimizer = torch.optim.AdamW(
            [*trainer.parameters.values()], config.optim.learning_rate, foreach=False
        )
    measured: list[dict[str, Any]] = []
    for _ in range(repeats + 1):
        meter.work.clear()
        start = time.perf_counter()
        meter.phase("rollout")
        trainer.iteration()
        meter.phase("")
        seconds = time.perf_counter() - start
        measured.append(summary(case, meter, cost, ceiling, seconds))
        if left() < 1.2 * seconds:
            break
    timed = measured[1:] or measured
    best = min(timed, key=lambda line: line["seconds"])
    return {
        **best,
        "warm": len(measured) > 1,
        "repeats": len(timed),
        "all_seconds": [line["seconds"] for line in measured],
    }


def summary(
    case: Case, meter: Meter, cost: NetworkCost, ceiling: float, seconds: float
) -> dict[str, Any]:
    """The figures of one iteration."""
    setting = case.setting
    trajectories = setting.prompts * setting.members
    phases: dict[str, Any] = {}
    for name, work in meter.work.items():
        operations = work.operations(cost)
        phases[name] = {
            **asdict(work),
            "operations": operations,
            "use": share_of_ceiling(operations, work.seconds, ceiling),
            "other": 1 - work.network_seconds / work.seconds if work.seconds else 0.0,
        }
    pairs = trajectories * (setting.steps - 1)
    return {
        "seconds": seconds,
        "phases": phases,
        "images_per_second": trajectories / seconds,
        "pairs_per_second": pairs / phases["update"]["seconds"],
        "peak_gigabytes": max(work.peak_bytes for work in meter.work.values()) / 1e9,
        "forward_operations": cost.forward,
        "backward_operations": cost.backward,
    }


def release() -> None:
    """Forget the last model before the next one is built."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def attempt(
    case: Case, device: str, repeats: int, ceiling: float, left: Callable[[], float]
) -> dict[str, Any]:
    """`measure`, or what went wrong: running out of memory is a result too."""
    try:
        return measure(case, device, repeats, ceiling, left)
    except torch.OutOfMemoryError as error:
        return {"error": "out of memory", "detail": str(error).splitlines()[0]}
    except Exception as error:
        return {"error": f"{type(error).__name__}", "detail": str(error)[:500], "retry": True}
    finally:
        release()


def environment(device: str) -> dict[str, Any]:
    """Where and with what: part of every line, and of what must agree for a line to be kept."""
    cuda = torch.cuda.get_device_properties(0) if device.startswith("cuda") else None
    cores = f"{torch.get_num_threads()} threads, {usable_cores()} cores"
    return {
        "device": cuda.name if cuda else f"CPU ({platform.machine()}), {cores}",
        "memory_gigabytes": cuda.total_memory / 1e9 if cuda else None,
        "versions": {"python": platform.python_version(), **versions()},
        "code": code_digest(),
    }


COLUMNS = (
    "model",
    "method",
    "variant",
    "rollout",
    "score",
    "update",
    "images/s",
    "pairs/s",
    "GB",
    "use: rollout",
    "use: update",
    "other: rollout",
    "other: update",
)


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    case = line["case"]
    head = (case["model"], case["method"], case["variant"])
    if "error" in line:
        return (*head, line["error"], *("",) * (len(COLUMNS) - 4))
    phases, peak = line["phases"], line["peak_gigabytes"]
    spent = {name: work["seconds"] for name, work in phases.items()}
    parts = (spent["rollout"], scoring_seconds(spent), spent["update"])
    seconds = tuple(f"{part:.2f}" for part in parts)
    shares = [
        f"{100 * phases[name][what]:.1f}%"
        for what in ("use", "other")
        for name in ("rollout", "update")
    ]
    rates = (f"{line['images_per_second']:.2f}", f"{line['pairs_per_second']:.1f}", f"{peak:.1f}")
    return (*head, *seconds, *rates, *shares)


def ceilings(device: str, dtypes: Sequence[str]) -> dict[str, float]:
    """Operations per second of the best matrix product, by precision, on the threads that the work
    will have.
    """
    cpu = device == "cpu"
    sizes = (512, LARGE) if cpu else (LARGE, 4096, 8192, 16384)
    return {
        d: matrix_product_ceiling(torch.device(device), DTYPES[d], sizes, 0.1 if cpu else 1.0)
        for d in dtypes
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet; write and print everything."""
    args = parse(arguments)
    device = args.device or ("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    models = args.models or (
        ["tiny-sd3", "tiny-flux"] if args.tiny else ["sd3.5-medium", "flux.1-dev"]
    )
    end = time.monotonic() + 60 * args.minutes
    todo = list(cases(models, args.methods, args.variants, parse_changes(args.set)))
    where = environment(device)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "gpu.jsonl"
    kept = {
        json.dumps(line["case"], sort_keys=True): line
        for line in ResultsFile(file).unchecked()
        if line["where"] == where
    }
    limits = ceilings(device, sorted({case.setting.dtype for case in todo}))
    for name, limit in limits.items():
        print(f"ceiling {name}: {limit / 1e12:.3g} TFLOP/s on {where['device']}", file=sys.stderr)
    lines = []
    for number, case in enumerate(todo, 1):
        key = json.dumps(asdict(case), sort_keys=True)
        line, label = (
            kept.get(key),
            f"[{number}/{len(todo)}] {case.model} {case.method} {case.variant}",
        )
        if line is None or line.get("retry"):
            if time.monotonic() > end:
                print(
                    f"{label}: not measured, the time is up; the same command goes on here",
                    file=sys.stderr,
                )
                continue
            start = time.monotonic()
            result = attempt(
                case,
                device,
                args.repeats,
                limits[case.setting.dtype],
                lambda: end - time.monotonic(),
            )
            line = {
                "case": asdict(case),
                "where": where,
                "ceiling": limits[case.setting.dtype],
                **result,
            }
            with file.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
            outcome = (
                line.get("detail", "")
                if "error" in line
                else f"{line['seconds']:.2f} s an iteration"
            )
            print(
                f"{label}: {line.get('error', '')} {outcome} (took"
                f" {time.monotonic() - start:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
        lines.append(line)
    command = shlex.join(
        ["python", "benchmarks/gpu.py", *(sys.argv[1:] if arguments is None else arguments)]
    )
    record = {"command": command, **where, "ceilings": limits, "lines": lines}
    (args.out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{where['device']}, torch {where['versions']['torch']}, {len(lines)} of {len(todo)}"
        " configurations"
    )
    print(Table(COLUMNS, [_cells(line) for line in lines]).markdown())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help="default: sd3.5-medium flux.1-dev"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--variants",
        default="all",
        help="all, none, or names separated by commas (of the first method)",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help=f"of the base: {', '.join(asdict(Setting()))}",
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="measured iterations, after one that is not"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no further configuration after this time"
    )
    parser.add_argument("--device", default="", help="default: cuda where there is one")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
