"""Golden runs: the working tree must train to the same numbers, bit for bit, as another commit.

    python benchmarks/golden.py                           # as HEAD; three minutes on one core
    python benchmarks/golden.py --reference main          # as any commit with these options
    python benchmarks/golden.py --cases "mixture*" --keep out

The reference is checked out into a temporary git worktree. The same `flowrl train` commands
(`CASES`) run with its code and with the working tree's, each in one process with one
thread. Metrics, weights, checkpoints, samples, trajectories and exported LoRAs are compared, times
are not. The exit status is 1 if a command fails or a number differs. With `--keep`, the runs are in
out/SIDE/CASE.
"""

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from flowrl.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (".", "packages", "tutorials/package", "benchmarks/package")
COMPARED = ("metrics.jsonl", "samples.json", "trajectory.json", "summary.json", "*.safetensors")
SKIPPED_FILES = "untrained-*"  # of earlier versions
TIMES = re.compile(r"seconds|phases|(^|/)time(/|$)|warnings/\d+/text")

POINTS = "--preset tiny --world mixture --ema-decay 0.8 --minibatches 2 --checkpoint-every 2"
IMAGES = "--preset tiny --world shapes --ema-decay 0.8 --minibatches 2 --checkpoint-every 2"
MODEL = (
    "--preset tiny --world model --prompts ../prompts.txt --reward jpeg-compressibility"
    " --resolution 16 --max-sequence-length 24 --num-steps 4"
)
VARIANTS = {
    "clipped-kl": "--kl-weight 0.05 --micro-batch 3",
    "released-clipped": "--loss clipped(kl=without_delta,log_prob=released_cps) --kl-weight 0.1",
    "grpo-guard": "--loss grpo-guard --kl-weight 0.02",
    "flow-dppo": "--loss flow-dppo(bound=1e-5) --micro-batch 1 --lr-schedule linear"
    " --final-learning-rate 0.1",
    "gspo": "--loss gspo --micro-batch 2",
    "policy-gradient": "--loss policy-gradient --minibatches 1 --max-grad-norm 0.01",
    "random-steps": "--sampler dance-sde --noise-level 0.3 --trained-steps random(fraction=0.6)",
    "untrained-step": "--window : --trained-steps :-1",
    "sliding": "--sampler cps --window sliding(size=2,stride=1,every=1) --max-batch 5",
    "chunks": "--sampler ddim-sde --window : --chunk 1 --overlap-rewards true",
    "offload": "--window random(size=2) --offload --eval-solver heun --reward-noise 0.1",
    "equal-rewards": "--reward-form strict --groups 8 --drop-zero-advantages",
    "batch-std": "--credit uniform(std=batch,clamp=1) --weight-decay 0.1 --eval-solver unipc",
    "nft-path": "--method diffusion-nft --sampler ode --loss diffusion-nft(noise=path)",
    "awm-sum": "--method awm --loss awm(ratio=sum_first,kl=elbo,times=stratified(count=2))",
    "dgpo-old": "--loss dgpo(anchor=old,times=steps(count=2,steps=3)) --kl-weight 0.05",
    "turning-trend": (
        "--method tp-grpo"
        " --credit turning-point(consistent=false,balance=trend,balance_scope=prompt,clamp=none)"
    ),
    "reward-to-go": "--credit stepwise-gain(lam=0.9,gamma=0.95,probe=tweedie) --chunk 3",
    "moving-average": "--credit moving-average-gain --window random(size=2)",
    "edges": "--credit depth-relative(probe=branch(children=(1,3),weight=edge,mean=child))",
    "value-tracker": "--credit value-tracker --groups 6 --iterations 3",
    "win-rate": "--reward win-rate(reward=jpeg-compressibility) --world shapes",
    "bfloat16": "--world shapes --dtype bfloat16",
    "overflow": "--world shapes --dtype float16 --loss-scale 16777216 --minibatches 3",
    "text": "--world shapes --task text --reward-form graded --diversity pixels",
}
MODELS = {
    "sd3": "--model ../sd3 --lora-rank 2 --kl-weight 0.05 --micro-batch 3",
    "sd3-full": "--model ../sd3 --tuning full --learning-rate 0.001 --max-batch 3",
    "sd3-guided": "--model ../sd3 --lora-rank 2 --method tp-grpo --guidance-scale 2",
    "sd3-nft": (
        "--model ../sd3 --lora-rank 2 --method diffusion-nft --guidance-scale 2"
        " --train-guidance-scale 1"
    ),
    "flux": "--model ../flux --lora-rank 2 --method stepwise-flow-grpo --kl-weight 0.05 --decode-batch 2",
}
OWN = {"fdfo": " --minibatches 1"}
"""Options of a method whose bound is too tight for several updates in two dimensions."""
CASES = {
    **{f"mixture-{name}": f"{POINTS} --method {name}{OWN.get(name, '')}" for name in METHODS},
    **{f"shapes-{name}": f"{IMAGES} --method {name}" for name in METHODS},
    **{f"variant-{name}": f"{POINTS} {options}" for name, options in VARIANTS.items()},
    **{f"model-{name}": f"{MODEL} {options}" for name, options in MODELS.items()},
}
"""The options of `flowrl train` by case; a later option replaces an earlier one."""


def make_inputs(folder: Path) -> None:
    """Prompts and tiny random pipelines, which both sides read."""
    (folder / "prompts.txt").write_text("a red fox\na red car\na red hat\n")
    from flowrl.testing.tiny import tiny_flux, tiny_sd3  # here: other commits have them elsewhere

    tiny_sd3().save_pretrained(folder / "sd3")
    tiny_flux().save_pretrained(folder / "flux")


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit as a temporary git worktree."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree").resolve()
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def environment(tree: Path) -> dict[str, str]:
    """The variables with which Python imports the packages of `tree`, on one thread and without the
    network. Ends the process if an installed flowrl comes before that of the tree.
    """
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(tree / package) for package in PACKAGES),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
    }
    words = [sys.executable, "-c", "import flowrl; print(flowrl.__file__)"]
    path = subprocess.run(
        words, env=variables, cwd=tree.parent, check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(path).resolve().is_relative_to(tree):
        raise SystemExit(f"flowrl was imported from {path}, not from {tree}")
    return variables


def words_of(case: str) -> list[str]:
    """The options of a case, each once."""
    given = {text.split()[0]: text for text in re.split(r" (?=--)", CASES[case])}
    return " ".join(given.values()).split()


def execute(cases: list[str]) -> None:
    """In the process of one side, whose folder is the current one: run the commands of the cases."""
    from flowrl.cli.main import main as flowrl

    for case in cases:
        try:
            status = flowrl(["train", *words_of(case), "--out", case])
        except SystemExit as error:
            status = error.code
        except Exception:
            traceback.print_exc()
            status = 1
        if status == 0:
            Path(case, "finished").touch()


def run_side(tree: Path, folder: Path, cases: list[str]) -> None:
    """Run the cases in `folder` with the code of `tree`; their output goes to log.txt."""
    words = [sys.executable, str(Path(__file__).resolve()), "--execute", *cases]
    with open(folder / "log.txt", "w") as log:
        subprocess.run(
            words, cwd=folder, env=environment(tree), stdout=log, stderr=log, check=False
        )


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers, texts and nulls within nested JSON, by path, as in "evaluation/reward"."""
    if not isinstance(value, dict | list):
        yield prefix, value
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, f"{prefix}/{name}" if prefix else str(name))


def content(run: Path) -> dict[str, Any]:
    """What is compared of a run, as FILE:KEY: tensors, and other values without times."""
    compared: dict[str, Any] = {}
    for path in sorted({path for pattern in COMPARED for path in run.rglob(pattern)}):
        name = path.relative_to(run).as_posix()
        if path.match(SKIPPED_FILES):
            continue
        if path.suffix == ".safetensors":
            compared |= {f"{name}:{key}": tensor for key, tensor in load_file(path).items()}
            continue
        texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        values = leaves([json.loads(text) for text in texts])
        compared |= {f"{name}:{key}": value for key, value in values if not TIMES.search(key)}
    return compared


def difference(old: Any, new: Any) -> str:
    """How two values differ, in words; "" if they are equal bit for bit. NaN equals NaN."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        # a NaN differs from itself
        same = type(old) is type(new) and (old == new or (old != old and new != new))
        return "" if same else f"{old!r} -> {new!r}"
    if old.dtype != new.dtype or old.shape != new.shape:
        return f"{old.dtype} {tuple(old.shape)} -> {new.dtype} {tuple(new.shape)}"
    unequal = (old != new) & ~(old.isnan() & new.isnan())
    if not unequal.any():
        return ""
    largest = float((old.double() - new.double())[unequal].abs().max())
    return f"{int(unequal.sum())} of {old.numel()} elements, by at most {largest:.1e}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between the contents of two runs, metrics first."""
    texts = []
    for key in dict.fromkeys((*old, *new)):
        if key not in old or key not in new:
            texts.append(f"{key}: only in the {'working tree' if key in new else 'reference'}")
        elif text := difference(old[key], new[key]):
            texts.append(f"{key}: {text}")
    return sorted(texts, key=lambda text: not text.startswith("metrics.jsonl"))


def verdict(old: Path, new: Path) -> tuple[str, list[str]]:
    """Whether two runs are equal, DIFFERENT or FAILED, and the reasons."""
    failed = [run.as_posix() for run in (old, new) if not (run / "finished").exists()]
    if failed:
        return "FAILED", [f"{run} did not finish: see log.txt" for run in failed]
    before, after = content(old), content(new)
    reasons = differences(before, after)
    if not before:
        return "FAILED", ["there is nothing to compare"]
    return ("DIFFERENT" if reasons else f"equal, {len(before):,} values"), reasons


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", default="HEAD", metavar="COMMIT")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for all runs")
    parser.add_argument("--execute", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.execute:
        torch.set_num_threads(1)
        execute(options.execute)
        return 0
    chosen = [case for pattern in options.cases for case in fnmatch.filter(CASES, pattern)]
    if not chosen:
        parser.error(f"--cases: no case matches; known: {', '.join(CASES)}")
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        work = options.keep or Path(scratch)
        sides = work / "reference", work / "working-tree"
        for side in sides:
            side.mkdir(parents=True)
        make_inputs(work)
        with worktree(options.reference) as reference:
            for tree, side in zip((reference, ROOT), sides, strict=True):
                run_side(tree, side, chosen)
        for case in chosen:
            word, reasons = verdict(*(side / case for side in sides))
            print(f"{case:<36} {word}", *reasons[:10], sep="\n    ", flush=True)
            verdicts.append(word)
            if word == "FAILED":
                print(*((side / "log.txt").read_text()[-2000:] for side in sides), sep="\n")
    return int(any(not word.startswith("equal") for word in verdicts))


if __name__ == "__main__":
    sys.exit(main())
