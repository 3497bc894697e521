"""Every kind of file that flowrl reads: a valid one, how it is changed, and its reader."""

import contextlib
import hashlib
import itertools
import json
import lzma
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import fuzz_mutations as change
import torch
from flowrl_bench.explain import EXAMPLE, read_rewards
from flowrl_bench.results_file import ResultsFile, SamplesFile
from flowrl_bench.suite import kept_memory
from flowrl_compare.card import card_text
from flowrl_compare.comparison import CompareConfig, load_compare
from flowrl_compare.figures import samples, trajectory
from flowrl_compare.results import load_comparison, load_run, run_folder, summarise
from flowrl_rewards.clip import read_weights
from flowrl_testing.tiny import tiny_sd3
from safetensors.torch import load_file, save

from flowrl.core.errors import FlowrlError
from flowrl.io import write_bytes, write_json
from flowrl.parts.prompts import read_prompts, write_prompts
from flowrl.parts.trust import check_code
from flowrl.policies import load_policy
from flowrl.policies.pipeline import ModelOptions
from flowrl.training.build import check, load_trained, make_policy, make_trainer
from flowrl.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, save_weights
from flowrl.training.config import RunConfig, load_config, preset
from flowrl.training.observers import Observers
from flowrl.training.run import Run
from flowrl.worlds.base import PolicyOptions, weights_path, world

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it is in the folder of seeds, how it is changed, and how it is read.
    `share`: of the inputs.
    """

    name: str
    place: str
    mutate: change.Mutation
    read: Callable[[Path], object]
    share: float = 1.0
    named: str = ""
    """What a refusal must contain in place of the file's name."""


SETTINGS = {
    "world": "mixture",
    "task": "direction",
    "iterations": 2,
    "groups": 2,
    "group_size": 3,
    "num_steps": 4,
    "window": "0:3",
    "eval_every": 1,
    "eval_samples": 4,
    "eval_steps": 2,
    "checkpoint_every": 1,
}
RULE = (
    "import pathlib\npathlib.Path('CANARY').touch()\nclass Part:\n    def assign(self, values,"
    " decisions): return values\n"
)
PROMPTS = [
    {
        "prompt": "two dogs",
        "tag": "counting",
        "include": [{"class": "dog", "count": 2}],
        "exclude": [{"class": "cat"}],
    },
    {
        "prompt": "a red cup",
        "include": [
            {"class": "bench"},
            {"class": "cup", "color": "red", "position": ["left of", 0]},
        ],
    },
    {"prompt": "ein Haus über dem Fluß", "number": 1.5, "flags": [True, None]},
]


def make_seeds(folder: Path) -> None:
    """The valid files: a comparison with one finished run, prompts, presets, weights, a reward
    table and lines of results.
    """
    config = RunConfig.of(**SETTINGS)
    comparison = CompareConfig(config, {"flow-grpo": {"method": "flow-grpo"}}, (0,))
    write_json(folder / "config.json", comparison.as_dict())
    run = folder / "runs" / run_folder("flow-grpo", 0)
    Run(config, run).execute()
    write_json(run / "code.json", {"credit: rule.py:Rule": "0" * 64})
    score = {"base": 0.1, "trained": 0.2, "difference": 0.1, "low": 0.0, "high": 0.2, "wins": 0.5}
    facts = {
        "command": "flowrl evaluate --weights runs/a",
        "prompts": 4,
        "count": 2,
        "scores": {"pickscore": score},
        "each": [],
    }
    write_json(run / "evaluation" / "evaluation.json", facts)
    (folder / "prompts.txt").write_text(
        "# a comment\na house\n\na tree by a lake\nFluß\n", encoding="utf-8"
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in PROMPTS), encoding="utf-8"
    )
    (folder / "rewards.csv").write_text(EXAMPLE, encoding="utf-8")
    shutil.copy(ROOT / "flowrl" / "presets" / "methods" / "tp-grpo.yaml", folder / "preset.yaml")
    for suffix in (".safetensors", ".json"):
        shutil.copy(weights_path().with_suffix(suffix), folder / f"base{suffix}")
    head = {"0.weight": torch.randn(4, 8), "0.bias": torch.zeros(4)}
    write_bytes(folder / "head.safetensors", save(head))
    torch.save({"state_dict": head}, folder / "head.pth")
    results = ROOT / "benchmarks" / "results"
    with lzma.open(results / "claims-default-settings.jsonl.xz") as archive:
        (folder / "results.jsonl").write_bytes(b"".join(itertools.islice(archive, 3)))
    rows = json.loads((results / "claims-default-settings-samples.json").read_text())
    write_json(folder / "samples.json", {**rows, "rows": dict(list(rows["rows"].items())[:3])})
    shutil.copy(results / "claims-default-settings-memory.json", folder / "memory.json")
    (folder / f"{change.CANARY}.py").write_text(RULE)
    tiny_sd3().save_pretrained(folder / "model")


def rehashed(
    write: Callable[[Path, dict[str, torch.Tensor], random.Random], None],
) -> change.Mutation:
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
    changed = Checkpoint(tensors, {})
    object.__setattr__(changed, "values", values)  # of any kind, as a damaged file may hold
    save_checkpoint(path, changed)


def _base(path: Path, tensors: dict[str, torch.Tensor], draw: random.Random) -> None:
    path.write_bytes(save(change.tensors_changed(tensors, draw)))


def read_config(path: Path) -> None:
    config = load_config(path).allowed()
    numbers = [value for value in config.flat().values() if isinstance(value, int | float)]
    if max(map(abs, numbers)) < 1e5 and config.rollout.num_steps * config.rollout.group_size < 1e4:
        with contextlib.suppress(FlowrlError):  # about settings that do not fit together
            check(config)


def read_comparison(path: Path) -> None:
    comparison = load_comparison(path.parent)
    if comparison.arms:
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
    run = Run(RunConfig.of(**SETTINGS), path.parents[1])
    run._observers = Observers(run.config, run.folder, (), run.distributed)  # pyright: ignore[reportPrivateUsage]
    run._trainer = _trainer()  # pyright: ignore[reportPrivateUsage]
    run._restore("")  # pyright: ignore[reportPrivateUsage]


@cache
def _policy() -> Any:
    return make_policy(RunConfig.of(**SETTINGS))


def read_base(path: Path) -> None:
    place = path.with_suffix(".safetensors")
    if path.suffix == ".safetensors" and path.is_file():
        write_json(
            place.with_suffix(".json"), {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        )
    world("shapes").policy(PolicyOptions(base_weights=str(place)))


def copy_prompts(path: Path) -> None:
    write_prompts(path.with_name("again.jsonl"), read_prompts(path))
    path.with_name("again.jsonl").unlink()


def read_model(path: Path) -> None:
    load_policy(
        str(next(folder for folder in path.parents if folder.name == "model")),
        ModelOptions(height=16, width=16),
    )


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
    Kind(
        "run: config.yaml", f"{RUN}/config.yaml", change.mixed(change.yaml_changed), read_config, 2
    ),
    Kind(
        "preset: YAML",
        "preset.yaml",
        change.mixed(change.yaml_changed),
        lambda path: preset(str(path)).apply(),
        2,
    ),
    Kind("comparison: config.json", "config.json", JSON, read_comparison),
    Kind(
        "comparison: config.json, to repeat",
        "config.json",
        JSON,
        lambda path: load_compare(path).allowed(),
    ),
    Kind(
        "run: metrics.jsonl", f"{RUN}/metrics.jsonl", change.mixed(change.lines_changed), read_run
    ),
    Kind(
        "run: code.json",
        f"{RUN}/code.json",
        JSON,
        lambda path: check_code(path.parent, RunConfig().flat(), True, bool),
        0.5,
    ),
    Kind("run: samples.json", f"{RUN}/samples.json", JSON, partial(read_figure, samples), 0.5),
    Kind(
        "run: samples.safetensors",
        f"{RUN}/samples.safetensors",
        TENSORS,
        partial(read_figure, samples),
        0.5,
    ),
    Kind(
        "run: trajectory.json",
        f"{RUN}/trajectory.json",
        JSON,
        partial(read_figure, trajectory),
        0.5,
    ),
    Kind(
        "run: trajectory.safetensors",
        f"{RUN}/trajectory.safetensors",
        TENSORS,
        partial(read_figure, trajectory),
        0.5,
    ),
    Kind("run: evaluation.json", f"{RUN}/evaluation/evaluation.json", JSON, read_card),
    Kind(
        "run: weights.safetensors",
        f"{RUN}/weights.safetensors",
        change.mixed(change.safetensors_changed, rehashed(_weights)),
        lambda path: load_trained(_policy(), path.parent),
        2,
    ),
    Kind(
        "run: checkpoint",
        f"{RUN}/checkpoints/000002.safetensors",
        change.mixed(rehashed(_checkpoint)),
        read_checkpoint,
        2,
    ),
    Kind(
        "base weights",
        "base.safetensors",
        change.mixed(change.safetensors_changed, rehashed(_base)),
        read_base,
        0.5,
    ),
    Kind("base weights: card", "base.json", JSON, read_base, 0.5),
    Kind(
        "head of a reward: safetensors",
        "head.safetensors",
        TENSORS,
        lambda path: read_weights(str(path)),
    ),
    Kind(
        "head of a reward: PyTorch",
        "head.pth",
        change.mixed(),
        lambda path: read_weights(str(path)),
        0.5,
    ),
    Kind("model: model_index.json", "model/model_index.json", JSON, read_model, 0.3, "model"),
    Kind("model: config.json", "model/transformer/config.json", JSON, read_model, 0.3, "model"),
    Kind(
        "model: weights",
        "model/transformer/diffusion_pytorch_model.safetensors",
        TENSORS,
        read_model,
        0.3,
        "model",
    ),
    Kind("prompts: text", "prompts.txt", change.mixed(), copy_prompts),
    Kind(
        "prompts: JSON lines", "prompts.jsonl", change.mixed(change.lines_changed), copy_prompts, 2
    ),
    Kind("reward table: CSV", "rewards.csv", change.mixed(change.table_changed), read_rewards, 2),
    Kind(
        "bench: lines of results", "results.jsonl", change.mixed(change.lines_changed), read_results
    ),
    Kind("bench: samples.json", "samples.json", JSON, lambda path: SamplesFile(path).read(), 0.5),
    Kind("bench: memory.json", "memory.json", JSON, lambda path: kept_memory(path, None), 0.5),
)
