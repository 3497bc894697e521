"""What comes from elsewhere: files, folders, and objects of users."""

import os
import re
import shlex
import time
from pathlib import Path
from typing import Protocol

import pytest
import torch
from pydantic import BaseModel
from small_run import MIXTURE, TINY_RUN, error_of, flowrl_, model_files, words

import flowrl.run.watch as watch
from flowrl.compare.comparison import CompareConfig
from flowrl.core.errors import ConfigError, PartError, part_call
from flowrl.core.types import Prompt
from flowrl.probes import Completion, NoProbe
from flowrl.run.config import preset
from flowrl.run.io import folder_lock, write_file, write_json
from flowrl.run.job import Run
from flowrl.run.parts.registry import check_part
from flowrl.run.parts.state import state_of
from flowrl.run.reading import read_bytes
from flowrl.run.reads import unread
from flowrl.run.watch import Watch
from flowrl.testing.tiny import tiny_sd3_policy

ROOT = Path(__file__).parent.parent
WRONG = object()
OTHERS = (Exception, BaseModel, Protocol, tuple)
"""Classes with checks of their own, or without any."""


FILES = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
    "large": lambda path: path.write_bytes(b"12345"),
}


@pytest.mark.parametrize("kind", FILES)
def test_only_regular_files_of_limited_size_are_read(kind, tmp_path):
    path = tmp_path / "file"
    FILES[kind](path)
    with pytest.raises(ConfigError, match=r"not a regular file|has 5 bytes; allowed: 4"):
        read_bytes(path, 4)
    (tmp_path / "link").symlink_to(__file__)
    assert read_bytes(tmp_path / "link").startswith(b'"""What comes')


def test_the_library_opens_files_in_one_place():
    opening = re.compile(r"\.read_text\(|\.read_bytes\(|[^\w.]open\(")
    allowed = {"reading.py", "io.py", "signals.py", "workers.py", "sources.py", "job.py"}
    lab = {"bench", "compare", "serving"}
    lines = [
        f"{path}: {line.strip()}"
        for path in (ROOT / "flowrl").rglob("*.py")
        if path.name not in allowed and not lab & {*path.parts}
        for line in path.read_text().splitlines()
        if opening.search(line) and "files(" not in line
    ]
    assert len(lines) <= 1, lines  # data that ship with the package


def interrupted_run(folder):
    """A run that can go on after its last iteration."""
    assert flowrl_(f"train {MIXTURE} --checkpoint-every 1 --out {folder}") == 0
    for name in ("done.json", "weights.safetensors"):
        (folder / name).unlink()
    return folder


def test_a_link_in_a_run_folder_is_neither_written_nor_deleted(tmp_path, capsys):
    run, other = interrupted_run(tmp_path / "run"), tmp_path / "other"
    os.rename(run / "checkpoints", other)
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    (run / "checkpoints").symlink_to(other)
    assert "checkpoints is a symbolic link" in error_of(f"train --resume {run}", capsys)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before
    (run / "checkpoints").unlink()
    os.rename(other, run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert "metrics.jsonl is a pipe or a device" in error_of(f"train --resume {run}", capsys)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl.tmp").symlink_to(tmp_path / "untouched")
    with pytest.raises(OSError, match="symbolic links"):
        write_file(run / "metrics.jsonl.tmp", b"1")
    assert not (tmp_path / "untouched").exists()
    (tmp_path / "linked").symlink_to(run)  # the folder itself may be one
    with folder_lock(tmp_path / "linked"):
        pass


def test_other_links_block_nothing(tmp_path, monkeypatch):
    """As those that W&B makes, also in the folder of weights that are not a run's."""
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    run, data = interrupted_run(tmp_path / "run"), tmp_path / "data"
    (data / "checkpoints").mkdir(parents=True)
    (data / "mine").write_text("mine")
    (run / "wandb").mkdir()
    for place in (run / "wandb" / "latest-run", run / "mine", run / "checkpoints" / "mine"):
        place.symlink_to(data)
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(data / "mine")  # written anew: the link is replaced
    assert flowrl_(f"train --resume {run}") == 0
    command = f"evaluate --weights {run} --limit 1 --num-steps 1"
    assert flowrl_(command) == 0 and (data / "mine").read_text() == "mine"
    assert (run / "mine").is_symlink() and (run / "config.yaml").is_file()
    files = model_files(tmp_path) | {"reward": "jpeg-compressibility"}
    del files["max_sequence_length"]
    tiny_sd3_policy().save(tmp_path / "mine")
    weights = next((tmp_path / "mine").glob("*.safetensors"))
    for name in ("checkpoints", "lora", "latest"):
        (weights.parent / name).symlink_to(data)
    assert flowrl_(f"evaluate --weights {weights} --num-steps 1 {shlex.join(words(**files))}") == 0
    assert sorted(path.name for path in data.iterdir()) == ["checkpoints", "mine"]


class Rule:
    probe = NoProbe()

    def assign(self, values, decisions):
        return values


class Reward:
    def score(self, images, prompts):
        return images


@pytest.mark.parametrize(
    ("kind", "members", "message"),
    [
        ("credit", {"probe": None}, r"Wrong\.probe = None .*allowed: an instance"),
        ("credit", {"probe": "completion"}, r"Wrong\.probe = 'completion'"),
        ("credit", {"probe": Completion}, r"Wrong\.probe = <class .*Completion"),
        ("credit", {"assign": 3}, r"Wrong\.assign = 3 .*allowed: a method"),
        ("credit", {"state_dict": lambda self: {}}, "has only state_dict"),
        ("credit", {"state_dict": {}, "load_state_dict": {}}, r"Wrong\.state_dict = {}"),
        (
            "credit",
            {"state_dict": lambda self: 1.0, "load_state_dict": lambda self, state: None},
            "allowed: a dictionary of tensors",
        ),
        ("credit", {"metrics": {}}, r"Wrong\.metrics = {}"),
        ("reward", {"score": 3}, r"Wrong\.score = 3"),
        (
            "reward",
            {"score": lambda self, images: images},
            r"Wrong\.score must be a method \(images, pro",
        ),
    ],
)
def test_mistakes_of_authors_are_named_when_the_part_is_built(kind, members, message):
    base = {"credit": Rule, "reward": Reward}[kind]
    check_part(kind, base())
    with pytest.raises(ConfigError, match=message):
        check_part(kind, type("Wrong", (base,), members)())


STATES = """
from flowrl.credit import Uniform
class Rule(Uniform):
    calls = 0
    def state_dict(self):
        Rule.calls += 1
        return {"mean": 1.0} if Rule.calls > 3 else {}
    def load_state_dict(self, state):
        pass
"""


def test_a_state_that_changes_its_type_is_named_in_that_iteration(tmp_path):
    (tmp_path / "my.py").write_text(STATES)
    config = TINY_RUN.replace(iterations=9, checkpoint_every=9, credit=f"{tmp_path}/my.py:Rule")
    need = r"credit: Rule\.state_dict\(\) = {'mean': 1\.0} is not allowed; allowed: a dictionary of"
    with pytest.raises(PartError, match=need):
        Run(config, tmp_path / "run", trial=False).execute()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) < 5


def test_a_saved_state_is_a_copy():
    memory = torch.zeros(2)
    part = type("Remembers", (), {"state_dict": lambda self: {"memory": memory}})()
    state = state_of("credit: Remembers", part)
    memory.add_(1)
    assert state["memory"].tolist() == [0, 0]


def test_a_prompt_has_no_nul(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"prompt = 'a\\x00b' is not allowed; .*without NUL"):
        Prompt("a\0b")
    for name, text in (("a.txt", "a\0b\n"), ("a.jsonl", '{"prompt": "a\\u0000b"}\n')):
        (tmp_path / name).write_text(text)
        error = error_of(f"prompts check --file {tmp_path / name}", capsys)
        assert f"{name}, line 1 " in error and "without NUL" in error


def test_terminal_codes_and_wide_tables(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat", "tag": "\\u001b[31mred"}\n')
    assert flowrl_(f"prompts check --file {tmp_path}/p.jsonl") == 0
    assert r"\x1b[31mred" in (shown := capsys.readouterr().out) and "\x1b" not in shown
    lines = [",".join(f"value_{k}" for k in range(1001)), *(["0," * 1000 + "1"] * 2)]
    (tmp_path / "wide.csv").write_text("\n".join(lines))
    explain = f"explain uniform --rewards {tmp_path}/wide.csv --out {tmp_path}/t.png"
    assert "columns = 1001 is not allowed; allowed: 1000" in error_of(explain, capsys)


def test_what_a_part_raises_has_its_line():
    with (
        pytest.raises(PartError, match=r"test_gate\.py, line \d+\) failed: KeyError: 'oops'"),
        part_call("X.assign"),
    ):
        (lambda: {}["oops"])()


def test_a_phase_that_takes_long_is_told_with_the_call_that_it_waits_for(monkeypatch):
    """After 0.1 s, 0.2 s, ...; a phase that usually takes longer after twice its usual time."""
    monkeypatch.setattr(watch, "SLOW", 0.1)
    told, published = list[str](), list[str]()

    def until(count):
        deadline = time.monotonic() + 20
        while len(told) < count and time.monotonic() < deadline:
            time.sleep(0.005)

    watched = Watch(told.append, published.append)
    with watched.running():
        watched.enter("rollout")
        until(2)
        watched.enter("reward")
        with part_call("X.score"):
            until(3)
        watched.enter("rollout", "compiles")
        began = time.monotonic()
        watched.enter("rollout")  # continues
        until(4)
        assert time.monotonic() - began > 0.4
    assert told[:3] == [
        "sampling has taken 0.1 s so far",
        "sampling has taken 0.2 s so far",
        "reward: X.score has not returned for 0.1 s",
    ]
    assert re.fullmatch(r"sampling has taken \S+ s so far \(compiles\)", told[3])
    assert published[:2] == ["X.score", ""]


@pytest.mark.parametrize(
    ("seconds", "text"), [(30, "30 s"), (60.0, "60 s"), (120, "2 min"), (3840.0, "64 min")]
)
def test_durations(seconds, text):
    assert watch.duration(seconds) == text


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"dtype": "bfloat16", "lora_rank": 4, "loss_scale": 2.0}, None),
        ({"clip_range": 0.1, "noise_level": 0.5, "window": "0:2", "seed": 1}, []),
        ({"method": "awm", "clip_range": 0.1}, ["clip_range"]),
        ({"method": "diffusion-nft", "window": "1:2"}, ["window"]),
        ({"loss": "clipped(clip_range=0.2)", "clip_range": 0.1}, ["clip_range"]),
        ({"sampler": "flow-sde(noise_level=0.7)", "noise_level": 0.5}, ["noise_level"]),
    ],
)
def test_settings_without_effect_are_found(settings, names):
    names = list(settings) if names is None else names
    assert unread(TINY_RUN.replace(**settings), settings) == names


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"tuning": "full", "adapter": "a", "lora_rank": 4}, ["adapter", "lora_rank"]),
        ({"adapter": "a", "lora_rank": 4, "lora_targets": ("to_q",)}, []),
        ({"negative_prompt": "x", "guidance_gradient": "prompt"}, None),
        ({"negative_prompt": "x", "guidance_gradient": "prompt", "guidance_scale": 2.0}, []),
        ({"method": "awm", "guidance_gradient": "prompt", "train_guidance_scale": 2.0}, []),
        ({"method": "awm", "reference_guidance_scale": 2.0}, ["reference_guidance_scale"]),
        ({"method": "awm", "reference_guidance_scale": 2.0, "kl_weight": 0.1}, []),
        ({"diversity_prompts": 2, "diversity_samples": 3, "strict": True}, None),
        ({"diversity_prompts": 2, "diversity": "pixels"}, []),
        ({"reward_form": "reward"}, None),
    ],
)
def test_settings_of_a_model_without_effect_are_found(settings, names):
    files = {"model": "m", "prompts": "text[0:2]", "reward": "ocr"}
    run = preset("tiny").apply(**files).replace(**settings)
    assert unread(run, settings) == (list(settings) if names is None else names)


def test_an_adapter_in_a_file_that_nothing_reads_is_refused(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("policy: {model: m, tuning: full, adapter: a}\n")
    files = "--prompts text[0:2] --reward jpeg-compressibility"
    error = error_of(f"train --preset tiny,{tmp_path}/mine.yaml {files}", capsys)
    assert "adapter = 'a' is not allowed; allowed: left out without tuning lora" in error


@pytest.mark.satellite
def test_an_option_that_nothing_reads_is_refused(tmp_path, capsys):
    out = f"--out {tmp_path}/new"
    for command in ("train", "compare --seeds 0"):
        error = error_of(f"{command} {MIXTURE} {out} --dtype bfloat16", capsys)
        assert "dtype = 'bfloat16' is not allowed; allowed: left out" in error
    arms = "--arm a: --arm 'b: method=awm' --seeds 0 --workers 1 --clip-range 0.1"
    assert flowrl_(f"compare {MIXTURE} {out} {arms}") == 0
    assert "Note: clip_range has no effect on b" in capsys.readouterr().out


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The settings of a run and of a comparison by command."""
    folder, arms = tmp_path_factory.mktemp("begun"), {"base": {}, "soft": {"clip_range": 0.1}}
    configs = {"train": TINY_RUN, "compare": CompareConfig(TINY_RUN, arms, (0,))}
    for name, config in configs.items():
        write_json(folder / name / "config.json", config.as_dict())
    return {name: folder / name for name in configs}


@pytest.mark.parametrize(
    ("command", "mode"),
    [
        ("train", "--config {}/config.json"),  # a resume: tests/run/test_changes.py
        ("compare", "--config {}/config.json"),
        ("compare", "--resume {}"),
    ],
)
@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--iterations 9", "iterations = 9 "),
        ("--num-steps 10", "num_steps = 10 is not allowed; allowed: 4 or left out"),  # the default
        ("--world shapes", "world = 'shapes' "),
        ("--kl-weight 0.2", "kl_weight = 0.2 "),
        ("--preset tiny", "preset = 'tiny' "),
    ],
)
def test_what_is_repeated_keeps_its_settings(mode, command, option, named, begun, capsys):
    error = error_of(f"{command} {mode.format(begun[command])} {option}", capsys)
    assert named in error and error.count("\n") == 1


def test_a_comparison_that_goes_on_keeps_its_arms(begun, capsys):
    for option in ("--arm a:", "--seeds 3", "--credit uniform"):
        error = error_of(f"compare --resume {begun['compare']} {option}", capsys)
        assert "left out with --resume, which sets it" in error
