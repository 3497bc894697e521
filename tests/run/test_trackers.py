"""What a run of a model leaves for people: event files and strips of samples."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small_run import SMALL, error_of, flowrl_, model_files, numbers, words

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.run.build import make_world, policy_options
from flowrl.run.checkpoint import Checkpoints
from flowrl.run.config import RunConfig, load_config, preset
from flowrl.run.io import write_json
from flowrl.run.job import Run
from flowrl.run.records import load_run
from flowrl.run.strips import over_time, strip, write_image
from flowrl.run.table import scalars
from flowrl.run.trackers import chosen_tracker

SETTINGS = {
    "lora_rank": 2,
    "lora_alpha": 8,
    "preset": "tiny",
    "learning_rate": 0.03,
    "groups": 1,
    "checkpoint_every": 1,
    "guidance_scale": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of a tiny SD3 pipeline with TensorBoard."""
    pytest.importorskip("tensorboard")
    root = tmp_path_factory.mktemp("tracked")
    assert main(["train", *words(**SETTINGS, **model_files(root), out=root / "run")]) == 0
    return root


def trusted_config(folder):
    return load_config(folder / "run" / "config.json", trust=True)


def test_text_encoders_visit_the_device_once(folder, tmp_path, monkeypatch):
    """For the held-out prompts and all prompts of the coming iterations; a repeated run embeds
    nothing.
    """
    from flowrl.policies.pipeline import PipelinePolicy

    visits, embed = [], PipelinePolicy._embed
    watched = lambda self, some: visits.append(some) or embed(self, some)  # noqa: E731
    monkeypatch.setattr(PipelinePolicy, "_embed", watched)
    (tmp_path / "held.txt").write_text("a blue dog\n")
    changes = {"heldout_prompts": str(tmp_path / "held.txt"), "iterations": 3, "tracker": "none"}
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    states = []
    for name in ("run", "again"):
        Run(trusted_config(folder).replace(**changes), tmp_path / name, states.append).execute()
    prompts = ["", "a blue dog", "a red car", "a red fox", "a red hat"]
    assert [sorted(prompt.text for prompt in some) for some in visits] == [prompts]
    *_, line = [state["prompts"] for state in states if "prompts" in state]
    assert line.startswith("5 of 5 prompts embedded (5 new ones, ") and "/cache/prompts/" in line
    assert numbers(tmp_path / "run") == numbers(tmp_path / "again")


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorded = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    recorded.Reload()
    return recorded


def test_event_files_hold_the_metrics_and_the_pictures(folder):
    recorded, rows = events(folder / "run" / "tensorboard"), load_run(folder / "run").rows
    for name in ("reward_mean", "phases/update", "nfe_total", "evaluation/reward"):
        points = [(event.step, event.value) for event in recorded.Scalars(name)]
        expected = [(row["iteration"], scalars(row)[name]) for row in rows if name in scalars(row)]
        assert torch.allclose(torch.tensor(points), torch.tensor(expected)) and len(points) >= 2
    assert [event.step for event in recorded.Images("samples")] == [0, 1, 2]


def test_strips_show_the_same_prompts_from_the_same_noise(folder):
    run, images = folder / "run", load_file(folder / "run" / "samples.safetensors")
    texts = (run / "samples" / "prompts.txt").read_text().splitlines()
    assert texts == json.loads((run / "samples.json").read_text())["prompts"]
    for number, side in ((0, "before"), (2, "after")):
        with Image.open(run / "samples" / f"iteration-{number:06d}.png") as picture:
            assert picture.tobytes() == strip(images[side]).tobytes()


def test_a_resumed_run_has_the_same_numbers_and_goes_on_in_the_event_files(folder):
    out = folder / "paused"
    assert Run(trusted_config(folder), out, stop=lambda: True).execute() is False
    assert flowrl_(f"train --resume {out} --trust") == 0
    assert numbers(out) == numbers(folder / "run")
    recorded = events(out / "tensorboard").Scalars("reward_mean")
    assert sorted(event.step for event in recorded) == [1, 2]


def test_a_tracker_is_used_if_it_is_installed(monkeypatch):
    model = preset("ocr").apply(model="somewhere")
    assert chosen_tracker(RunConfig()) == "none"  # built-in worlds stay as fast as they are
    monkeypatch.setattr("flowrl.run.trackers.find_spec", lambda name: None)
    assert chosen_tracker(model) == "none"
    with pytest.raises(ConfigError, match="tracker = 'wandb' is not allowed"):
        chosen_tracker(RunConfig.of(tracker="wandb"))


def test_trackio_gets_the_same(tmp_path, monkeypatch):
    """Against a stand-in for the package that records its calls."""
    calls = []
    package = Mock(__spec__=ModuleSpec("trackio", None), Image=lambda pixels: tuple(pixels.shape))
    package.init.return_value.log = lambda values, step=None, **more: calls.append((step, values))
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.setattr("flowrl.run.trackers.find_spec", lambda package: True)
    given = {"tracker": "trackio", "tracker_project": "mine", "tracker_name": "first"}
    Run(preset("tiny").apply(**given), tmp_path / "run").execute()
    package.init.return_value.finish.assert_called_once()
    started = package.init.call_args.kwargs
    assert started["project"] == "mine" and started["name"].startswith("first-")
    (settings,) = package.config.update.call_args.args
    assert settings["sampler"] == "flow-sde(noise_level=0.7)"
    pictures = {"samples": (256, 1036, 3)}
    assert [step for step, values in calls if values == pictures] == [0, 1, 2]
    logged = {step: values for step, values in calls if values != pictures}
    assert set(logged) == {0, 1, 2} and {"reward_mean", "evaluation/strict"} <= set(logged[2])


def test_a_resumed_run_continues_its_record_at_trackio(tmp_path, monkeypatch):
    """By an id in its folder, also from another working directory. Two runs in folders of one name
    differ.
    """
    package = Mock(__spec__=ModuleSpec("trackio", None))
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.setattr("flowrl.run.trackers.find_spec", lambda package: True)
    config = SMALL.replace(tracker="trackio", keep_checkpoints=2)
    for out in (tmp_path / "run", tmp_path / "other" / "run"):
        assert not Run(config, out, stop=lambda: True).execute()
    monkeypatch.chdir(tmp_path)
    assert Run(config, Path("run")).execute(resume=True)
    first, other, resumed = (call.kwargs for call in package.init.call_args_list)
    assert first["name"] == resumed["name"] != other["name"] and "run" in resumed["name"]
    assert resumed["resume"] == "allow"


def wandb_records(folder):
    """What W&B has written in the `folder` of a run, per start: the run, and by step its values."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    starts = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_ctime):
        data, place, whole, run, steps = path.read_bytes(), 7, b"", None, {}
        while place + 7 <= len(data):  # LevelDB's log: checksum, length, kind; blocks of 32 KiB
            if (rest := 2**15 - place % 2**15) < 7:
                place += rest
                continue
            size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
            whole += data[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # the last piece
                record = internal.Record()
                record.ParseFromString(whole)
                whole = b""
                if record.WhichOneof("record_type") == "run":
                    run = run or record.run
                elif record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    values = {i.key or "/".join(i.nested_key): i.value_json for i in items}
                    steps[record.history.step.num] = values
        starts.append((run, steps))
    return starts


@pytest.mark.slow
def test_wandb_has_one_record_of_a_run_that_was_killed_and_resumed(tmp_path, monkeypatch):
    """Offline, with the real package: one id, all numbers, also those that W&B had not written
    before the kill, the images of evaluations with prompt and reward, and all files in the run's
    folder. From an earlier checkpoint it is a new record, which begins with the rows so far, since
    W&B drops what has an earlier step.
    """
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    line = words(preset="tiny", iterations=900, eval_every=5, checkpoint_every=1, out="run")
    line += words(tracker="wandb", tracker_project="mine", tracker_entity="team")
    line += ["--keep-checkpoints", "9", "--tracker-tags", "night", "test"]
    process = subprocess.Popen([sys.executable, "-m", "flowrl", "train", *line])
    until = time.monotonic() + 120
    written = lambda: [p.stat().st_size for p in run.glob("wandb/offline-run-*/*.wandb")]  # noqa: E731
    while max(written(), default=0) < 2**15 and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait(60)
    done = int(Checkpoints(run).newest)
    total = done + 2
    assert flowrl_(f"train --resume {run} --trust --iterations {total} --eval-every 1") == 0
    (first, began), (second, ended) = wandb_records(run)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    for record in (first, second):
        assert record.run_id == json.loads((run / "tracker.json").read_text())["id"]
        assert (record.project, record.entity, record.display_name) == ("mine", "team", "run")
        assert list(record.tags) == ["night", "test"]
    rows = load_run(run).rows
    assert began and [*ended] == [*range(total + 1)]
    for step, values in [*began.items(), *ended.items()]:
        expected = {n: v for n, v in scalars(rows[step]).items() if not n.startswith("changed/")}
        del expected["iteration"]
        assert expected.keys() <= values.keys()
        if step > 0:
            assert json.loads(values["reward_mean"]) == expected["reward_mean"]
    samples = json.loads((run / "samples" / f"iteration-{total:06d}.json").read_text())["samples"]
    captions = json.loads(ended[total]["samples/captions"])
    assert captions == [f"{one['prompt']} (reward {one['reward']:.4g})" for one in samples]
    again = f"train --resume {run} --trust --from {done} --learning-rate 1e-3 --change"
    assert flowrl_(again) == 0
    third, steps = wandb_records(run)[-1]
    assert third.run_id != first.run_id and first.run_id in third.notes
    assert [*steps] == [*range(total + 1)]


@pytest.mark.parametrize(
    ("line", "refused", "need"),
    [
        ("--tracker-project mine", "tracker_project = 'mine'", "tracker wandb or trackio"),
        ("--tracker-name mine", "tracker_name = 'mine'", "tracker wandb or trackio"),
        ("--tracker-entity me --tracker none", "tracker_entity = 'me'", "tracker wandb"),
        ("--tracker-tags a b --tracker tensorboard", "tracker_tags = ('a', 'b')", "tracker wandb"),
    ],
)
def test_a_setting_that_the_tracker_does_not_read_is_refused(line, refused, need, tmp_path, capsys):
    error = error_of(f"train --preset tiny {line} --out {tmp_path}/run", capsys)
    assert error.count("\n") == 1 and f"{refused} is not allowed" in error
    assert f"left out without {need}:" in error and not (tmp_path / "run").exists()


def test_numbers_of_a_row_by_name():
    row = {"a": 1, "b": {"c": 2.5, "d": {"e": 3}}, "f": [1, 2], "g": "text", "h": None, "i": True}
    assert scalars(row) == {"a": 1.0, "b/c": 2.5, "b/d/e": 3.0, "f/0": 1.0, "f/1": 2.0}


def test_strips_keep_the_shape_of_pictures_and_their_number_small(tmp_path):
    assert strip(torch.rand(3, 3, 512, 256)).size == (3 * 128 + 8, 256)
    assert strip(torch.rand(1, 3, 100, 200)).size == (200, 100)
    for i in range(20):
        write_image(tmp_path / f"iteration-{i:06d}.png", strip(torch.full((1, 3, 4, 4), i / 19)))
    picture = over_time(tmp_path)
    assert picture.size == (90 + 128, 16 * 128 + 15 * 4)
    ends = [picture.getpixel((100, y)) for y in (1, picture.height - 2)]
    assert ends == [(0, 0, 0), (255, 255, 255)]


def test_a_run_is_sampled_where_its_device_is_not(folder, tmp_path):
    """A run that was trained on a GPU, on a machine without."""
    run = shutil.copytree(folder / "run", tmp_path / "run")
    config = trusted_config(folder).replace(device="cuda:99")
    write_json(run / "config.json", config.as_dict())
    options = f"--prompts 'a fox' --count 1 --num-steps 2 --trust --out {tmp_path}/picture.png"
    assert flowrl_(f"sample --weights {run} {options}") == 0


def test_the_policy_of_a_models_world_has_the_options_of_its_caller(folder):
    config = trusted_config(folder)
    policy = make_world(config).policy(replace(policy_options(config), lora_rank=3))
    assert {min(weight.shape) for weight in policy.trainable().values()} == {3}
