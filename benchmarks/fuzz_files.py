"""Damaged and hostile files, given to every reader of files: each must read the file or refuse it by name.

    python benchmarks/fuzz_files.py [--inputs 10000] [--seed 0] [--only KIND] [--out FILE]

Valid files of a tiny run are changed (`fuzz_mutations`) and read in this process, a forked one per kind of file. A reader must
return, or raise a `FlowrlError` that names the file in at most 2,000 characters, within 2 seconds of CPU time and 500 MB, and run
no code, import nothing that the file names, and open no connection. Prints a table per kind and exits 1 if there is a problem.
The same seed gives the same inputs.
"""

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import fuzz_mutations as change
import torch
from flowrl_bench.explain import EXAMPLE, read_rewards
from flowrl_bench.results_file import ResultsFile, SamplesFile
from flowrl_bench.suite import kept_memory
from safetensors.torch import load_file, save

from flowrl.commands.card import card_text
from flowrl.errors import FlowrlError
from flowrl.io import write_bytes, write_json
from flowrl.plots.image_grids import samples, trajectory
from flowrl.policies import load_policy
from flowrl.policies.pipeline import ModelOptions
from flowrl.prompts import load_prompts
from flowrl.prompts.files import write_prompts
from flowrl.rewards.weights import read_weights
from flowrl.testing.tiny import tiny_sd3
from flowrl.training.build import check, load_trained, make_policy, make_trainer
from flowrl.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, save_weights
from flowrl.training.compare import CompareConfig, load_compare
from flowrl.training.config import RunConfig, load_config, preset
from flowrl.training.results import load_comparison, load_run, run_folder, summarise
from flowrl.training.run import Run
from flowrl.trust import check_code
from flowrl.worlds.base import PolicyOptions, weights_path, world

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "results" / "fuzz_files.md"
SECONDS, MEGABYTES, CHARACTERS, HANG = 2.0, 500, 2000, 20
EVENTS = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pickle.find_class",
    "socket.connect", "socket.getaddrinfo", "webbrowser.open",
}  # fmt: skip
"""Audit events that no reader may cause."""


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it is in the folder of seeds, how it is changed, and how it is read. `share`: of the inputs."""

    name: str
    place: str
    mutate: change.Mutation
    read: Callable[[Path], object]
    share: float = 1.0
    named: str = ""
    """What a refusal must contain in place of the file's name."""


@dataclass
class Found:
    """What the inputs of one kind led to."""

    accepted: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0
    memory: float = 0.0

    @property
    def tried(self) -> int:
        """All inputs."""
        return self.accepted + self.refused + len(self.problems)


SETTINGS = {
    "world": "mixture", "task": "direction", "iterations": 2, "groups": 2, "group_size": 3, "num_steps": 4, "window": "0:3",
    "eval_every": 1, "eval_samples": 4, "eval_steps": 2, "checkpoint_every": 1,
}  # fmt: skip
RULE = "import pathlib\npathlib.Path('CANARY').touch()\nclass Part:\n    def assign(self, rewards, schedule): return rewards\n"
PROMPTS = [
    {"prompt": "two dogs", "tag": "counting", "include": [{"class": "dog", "count": 2}], "exclude": [{"class": "cat"}]},
    {"prompt": "a red cup", "include": [{"class": "bench"}, {"class": "cup", "color": "red", "position": ["left of", 0]}]},
    {"prompt": "ein Haus über dem Fluß", "number": 1.5, "flags": [True, None]},
]  # fmt: skip


def make_seeds(folder: Path) -> None:
    """The valid files: a comparison with one finished run, prompts, presets, weights, a reward table and lines of results."""
    config = RunConfig.of(**SETTINGS)
    comparison = CompareConfig(config, ("flow-grpo",), (0,))
    write_json(folder / "config.json", comparison.as_dict())
    run = folder / "runs" / run_folder("flow-grpo", 0)
    Run(config, run).execute()
    write_json(run / "code.json", {"credit: rule.py:Rule": "0" * 64})
    score = {"base": 0.1, "trained": 0.2, "difference": 0.1, "low": 0.0, "high": 0.2, "wins": 0.5}
    facts = {"command": "flowrl evaluate --weights runs/a", "prompts": 4, "count": 2, "scores": {"pickscore": score}, "each": []}
    write_json(run / "evaluation" / "evaluation.json", facts)
    (folder / "prompts.txt").write_text("# a comment\na house\n\na tree by a lake\nFluß\n", encoding="utf-8")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in PROMPTS), encoding="utf-8")
    (folder / "rewards.csv").write_text(EXAMPLE, encoding="utf-8")
    shutil.copy(ROOT / "flowrl" / "presets" / "methods" / "tp-grpo.yaml", folder / "preset.yaml")
    for suffix in (".safetensors", ".json"):
        shutil.copy(weights_path().with_suffix(suffix), folder / f"base{suffix}")
    head = {"0.weight": torch.randn(4, 8), "0.bias": torch.zeros(4)}
    write_bytes(folder / "head.safetensors", save(head))
    torch.save({"state_dict": head}, folder / "head.pth")
    results = ROOT / "benchmarks" / "results"
    lines = (results / "claims.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "results.jsonl").write_bytes(b"".join(lines[:3]))
    rows = json.loads((results / "claims-samples.json").read_text())
    write_json(folder / "samples.json", {**rows, "rows": dict(list(rows["rows"].items())[:3])})
    shutil.copy(results / "claims-memory.json", folder / "memory.json")
    (folder / f"{change.CANARY}.py").write_text(RULE)
    tiny_sd3().save_pretrained(folder / "model")


def rehashed(write: Callable[[Path, dict[str, torch.Tensor], random.Random], None]) -> change.Mutation:
    """A mutation whose file has the right hash: `write` makes it from the changed tensors."""

    def mutation(data: bytes, draw: random.Random) -> bytes:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "file.safetensors"
            path.write_bytes(data)
            write(path, load_file(path), draw)
            return path.read_bytes()

    return mutation


def _weights(path: Path, tensors: dict[str, torch.Tensor], draw: random.Random) -> None:
    save_weights(path, change.tensors_changed(tensors, draw))


def _checkpoint(path: Path, tensors: dict[str, torch.Tensor], draw: random.Random) -> None:
    values = load_checkpoint(path).values
    if draw.random() < 0.6:
        values = change.changed_value(values, draw)
    else:
        tensors = change.tensors_changed(tensors, draw)
    save_checkpoint(path, Checkpoint(tensors, values))


def _base(path: Path, tensors: dict[str, torch.Tensor], draw: random.Random) -> None:
    path.write_bytes(save(change.tensors_changed(tensors, draw)))


def read_config(path: Path) -> None:
    config = load_config(path)
    numbers = [value for value in config.flat().values() if isinstance(value, int | float)]
    if max(map(abs, numbers)) < 1e5 and config.rollout.num_steps * config.rollout.group_size < 1e4:
        with contextlib.suppress(FlowrlError):  # about settings that do not fit together
            check(config)


def read_comparison(path: Path) -> None:
    comparison = load_comparison(path.parent)
    if comparison.methods:
        summarise(comparison)


def read_run(path: Path) -> None:
    run = load_run(path.parent)
    run.mean("phases", "rollout")
    assert isinstance(run.heldout_rewards, list)
    read_comparison(path.parents[2] / "config.json")


def read_card(path: Path) -> None:
    folder = path.parents[1]
    card_text(folder, load_config(folder / "config.json"))


@cache
def _trainer() -> Any:
    return make_trainer(RunConfig.of(**SETTINGS))


def read_checkpoint(path: Path) -> None:
    Run(RunConfig.of(**SETTINGS), path.parents[1])._restore(_trainer(), "")  # pyright: ignore[reportPrivateUsage]


@cache
def _policy() -> Any:
    return make_policy(RunConfig.of(**SETTINGS))


def read_base(path: Path) -> None:
    place = path.with_suffix(".safetensors")
    if path.suffix == ".safetensors" and path.is_file():
        write_json(place.with_suffix(".json"), {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    world("shapes").policy(PolicyOptions(base_weights=str(place)))


def read_prompts(path: Path) -> None:
    found = load_prompts(path)
    found.remarks()
    write_prompts(path.with_name("again.jsonl"), found.prompts)
    path.with_name("again.jsonl").unlink()


def read_model(path: Path) -> None:
    load_policy(str(next(folder for folder in path.parents if folder.name == "model")), ModelOptions(height=16, width=16))


def read_figure(draw: Callable[[Any], object], path: Path) -> None:
    draw(load_comparison(path.parents[2]))


def read_results(path: Path) -> None:
    file = ResultsFile(path)
    file.unchecked()
    file.read(any_code=True)


RUN = f"runs/{run_folder('flow-grpo', 0)}"
JSON, TENSORS = change.mixed(change.json_changed), change.mixed(change.safetensors_changed)
KINDS = (
    Kind("run: config.json", f"{RUN}/config.json", JSON, read_config, 2),
    Kind("run: config.yaml", f"{RUN}/config.yaml", change.mixed(change.yaml_changed), read_config, 2),
    Kind("preset: YAML", "preset.yaml", change.mixed(change.yaml_changed), lambda path: preset(str(path)).apply(), 2),
    Kind("comparison: config.json", "config.json", JSON, read_comparison),
    Kind("comparison: config.json, to repeat", "config.json", JSON, load_compare),
    Kind("run: metrics.jsonl", f"{RUN}/metrics.jsonl", change.mixed(change.lines_changed), read_run),
    Kind("run: code.json", f"{RUN}/code.json", JSON, lambda path: check_code(path.parent, RunConfig.of(**SETTINGS).flat(), True), 0.5),
    Kind("run: samples.json", f"{RUN}/samples.json", JSON, partial(read_figure, samples), 0.5),
    Kind("run: samples.safetensors", f"{RUN}/samples.safetensors", TENSORS, partial(read_figure, samples), 0.5),
    Kind("run: trajectory.json", f"{RUN}/trajectory.json", JSON, partial(read_figure, trajectory), 0.5),
    Kind("run: trajectory.safetensors", f"{RUN}/trajectory.safetensors", TENSORS, partial(read_figure, trajectory), 0.5),
    Kind("run: evaluation.json", f"{RUN}/evaluation/evaluation.json", JSON, read_card),
    Kind("run: weights.safetensors", f"{RUN}/weights.safetensors", change.mixed(change.safetensors_changed, rehashed(_weights)),
         lambda path: load_trained(_policy(), path.parent), 2),
    Kind("run: checkpoint", f"{RUN}/checkpoints/000002.safetensors", change.mixed(rehashed(_checkpoint)),
         read_checkpoint, 2),
    Kind("base weights", "base.safetensors", change.mixed(change.safetensors_changed, rehashed(_base)), read_base, 0.5),
    Kind("base weights: card", "base.json", JSON, read_base, 0.5),
    Kind("head of a reward: safetensors", "head.safetensors", TENSORS, lambda path: read_weights(str(path))),
    Kind("head of a reward: PyTorch", "head.pth", change.mixed(), lambda path: read_weights(str(path)), 0.5),
    Kind("model: model_index.json", "model/model_index.json", JSON, read_model, 0.3, "model"),
    Kind("model: config.json", "model/transformer/config.json", JSON, read_model, 0.3, "model"),
    Kind("model: weights", "model/transformer/diffusion_pytorch_model.safetensors", TENSORS, read_model, 0.3, "model"),
    Kind("prompts: text", "prompts.txt", change.mixed(), read_prompts),
    Kind("prompts: JSON lines", "prompts.jsonl", change.mixed(change.lines_changed), read_prompts, 2),
    Kind("reward table: CSV", "rewards.csv", change.mixed(change.table_changed), read_rewards, 2),
    Kind("bench: lines of results", "results.jsonl", change.mixed(change.lines_changed), read_results),
    Kind("bench: samples.json", "samples.json", JSON, lambda path: SamplesFile(path).any_code(), 0.5),
    Kind("bench: memory.json", "memory.json", JSON, lambda path: kept_memory(path, None), 0.5),
)  # fmt: skip


class Watch:
    """Records forbidden audit events while it is on. Hooks cannot be removed, so there is one per process."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and (event in EVENTS or (event == "import" and str(arguments[0]).startswith(change.CANARY))):
            self.seen.append(f"{event} {arguments!r:.100}")


watch = cache(Watch)


class Hang(BaseException):
    """Raised in a reader that does not end."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """At most `MEGABYTES` more of address space, and `HANG` seconds."""

    def stop(*_: object) -> None:
        raise Hang

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, old = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 2**20, before[1]))
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(kind: Kind, path: Path, canary: Path, found: Found) -> str:
    """Read the file and count it as accepted or refused; the problem, or ""."""
    problem, error = "", None
    started, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch().on = True
    try:
        with (
            limits(),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            kind.read(path)
    except FlowrlError as refusal:
        error = refusal
        if (kind.named or path.name) not in str(refusal):
            problem = f"the file is not named: {str(refusal)[:200]}"
        elif len(str(refusal)) > CHARACTERS:
            problem = f"a message of {len(str(refusal))} characters: {str(refusal)[:200]}"
    except Hang:
        problem = f"not done after {HANG} s"
    except BaseException as other:
        error = other
        place = traceback.extract_tb(other.__traceback__)[-1]
        own = next((f for f in reversed(traceback.extract_tb(other.__traceback__)) if "/flowrl" in f.filename), place)
        problem = f"{type(other).__name__}: {str(other)[:150]} ({Path(own.filename).name}:{own.lineno})"
    finally:
        watch().on = False
    seconds = time.process_time() - started
    found.slowest = max(found.slowest, seconds)
    found.memory = max(found.memory, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024)
    if seconds > SECONDS and not problem:
        problem = f"{seconds:.1f} s of CPU time"
    if watch().seen or canary.exists():
        problem = f"code was run or looked up: {'; '.join(watch().seen) or canary.name}"
        watch().seen.clear()
        canary.unlink(missing_ok=True)
    if not problem:
        found.accepted += error is None
        found.refused += error is not None
    return problem


def fuzz(kind: Kind, seeds: Path, inputs: int, seed: int, keep: Path | None = None) -> Found:
    """Read `inputs` changed files of a kind; files that led to a problem are copied to the folder `keep`."""
    found = Found()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "work"
        shutil.copytree(seeds, work)
        path, data = work / kind.place, (work / kind.place).read_bytes()
        others = [file.read_bytes() for file in sorted(seeds.rglob("*")) if file.is_file() and file.stat().st_size < 100_000]
        with contextlib.chdir(work), importable(work):
            judge(kind, path, work / "CANARY", Found())  # imports and caches
            problem = judge(kind, path, work / "CANARY", Found())
            if problem or not path.is_file():
                return Found(problems=[f"the valid file: {problem}"])
            for number in range(inputs):
                put(path, data, others, kind, random.Random(f"{seed} {kind.name} {number}"))
                problem = judge(kind, path, work / "CANARY", found)
                if problem:
                    found.problems.append(f"input {number}: {problem}")
                    if keep is not None and path.is_file():
                        keep.mkdir(parents=True, exist_ok=True)
                        shutil.copy(path, keep / f"{number}-{path.name}")
    return found


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules in `folder`, the canary among them, can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def put(path: Path, data: bytes, others: Sequence[bytes], kind: Kind, draw: random.Random) -> None:
    """Write the next input to `path`: changed bytes, or seldom no file, a folder, or a link to nothing."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    special = draw.random()
    if special < 0.005:
        path.mkdir()
    elif special < 0.01:
        path.symlink_to("nowhere")
    elif special > 0.015:  # else: no file
        path.write_bytes(change.spliced(data, others, draw) if special < 0.05 else kind.mutate(data, draw))


def shared_out(inputs: int, kinds: Sequence[Kind] = KINDS) -> dict[str, int]:
    """How many of the inputs each kind gets."""
    total = sum(kind.share for kind in kinds)
    return {kind.name: max(1, round(inputs * kind.share / total)) for kind in kinds}


def forked(kind: Kind, seeds: Path, inputs: int, seed: int, keep: Path | None) -> Found:
    """`fuzz` in a process of its own, so that a crash of the interpreter is a problem like the others."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(fuzz(kind, seeds, inputs, seed, keep)))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        return Found(problems=[f"the interpreter ended with exit code {process.exitcode}"])
    finally:
        process.join()


HEAD = ("file", "tried", "accepted", "refused", "problems", "slowest (s)", "memory (MB)")


def row(name: str, found: Found) -> list[str]:
    numbers = (found.tried, found.accepted, found.refused, len(found.problems))
    return [name, *map(str, numbers), f"{found.slowest:.2f}", f"{found.memory:.0f}"]


def page(results: Mapping[str, Found], command: str) -> str:
    """The table in Markdown."""
    rows = [row(name, found) for name, found in results.items()]
    total = Found(
        sum(found.accepted for found in results.values()),
        sum(found.refused for found in results.values()),
        [problem for found in results.values() for problem in found.problems],
        max(found.slowest for found in results.values()),
        max(found.memory for found in results.values()),
    )
    lines = [HEAD, ["---", *["---:"] * (len(HEAD) - 1)], *rows, row("all", total)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{TEXT}\nCommand: `{command}`.\n\n{table}\n"


TEXT = """# Damaged and hostile files

Each row is a kind of file that flowrl reads. A file is accepted if its reader returns, and refused if the reader raises a
`FlowrlError` that names the file. Everything else is a problem: another exception, a message without the file's name or of more
than 2,000 characters, more than 2 s of CPU time, more than 500 MB, code that runs, a process or a connection.
Changes that leave a valid file, such as another number, are accepted.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name contains this text")
    parser.add_argument("--out", type=Path, help=f"write the table to this file (the committed one: {TABLE.relative_to(ROOT)})")
    parser.add_argument("--keep", type=Path, help="folder for the inputs that led to a problem")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, results = shared_out(options.inputs), dict[str, Found]()
    with tempfile.TemporaryDirectory() as folder:
        seeds = Path(folder)
        make_seeds(seeds)
        for kind in (kind for kind in KINDS if options.only in kind.name):
            keep = options.keep and options.keep / kind.name.replace(": ", "-")
            results[kind.name] = found = forked(kind, seeds, counts[kind.name], options.seed, keep)
            print("  ".join(row(kind.name, found)), flush=True)
            for text, times in Counter(p.partition(": ")[2] for p in found.problems).most_common(8):
                print(f"    {times} x {text}", flush=True)
    if options.out:
        command = f"python benchmarks/fuzz_files.py --inputs {options.inputs} --seed {options.seed}"
        options.out.write_text(page(results, command))
    return 1 if any(found.problems for found in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
