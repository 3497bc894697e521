"""What a run of a model leaves for people: event files and strips of samples."""

import json
import shutil
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small_run import SMALL, flowrl_, model_files, numbers, words

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.run.build import make_world, policy_options
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
    watched = lambda self, texts: visits.append(texts) or embed(self, texts)  # noqa: E731
    monkeypatch.setattr(PipelinePolicy, "_embed", watched)
    (tmp_path / "held.txt").write_text("a blue dog\n")
    changes = {"heldout_prompts": str(tmp_path / "held.txt"), "iterations": 3, "tracker": "none"}
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    states = []
    for name in ("run", "again"):
        Run(trusted_config(folder).replace(**changes), tmp_path / name, states.append).execute()
    prompts = ["", "a blue dog", "a red car", "a red fox", "a red hat"]
    assert [sorted(texts) for texts in visits] == [prompts]
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


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_other_trackers_get_the_same(name, tmp_path, monkeypatch):
    """Against a stand-in for the package that records its calls: W&B and trackio have one
    interface.
    """
    calls = []
    package = Mock(__spec__=ModuleSpec(name, None), Image=lambda pixels: tuple(pixels.shape))
    package.init.return_value.log = lambda values, step=None, **more: calls.append((step, values))
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr("flowrl.run.trackers.find_spec", lambda package: True)
    Run(preset("tiny").apply(tracker=name), tmp_path / "run").execute()
    package.init.return_value.finish.assert_called_once()
    (settings,) = package.config.update.call_args.args
    assert settings["sampler"] == "flow-sde(noise_level=0.7)"
    picture = (256, 1036, 3)
    pictures = {"samples": [picture] if name == "wandb" else picture}
    assert [step for step, values in calls if values == pictures] == [0, 1, 2]
    logged = {step: values for step, values in calls if values != pictures}
    assert set(logged) == {0, 1, 2} and {"reward_mean", "evaluation/strict"} <= set(logged[2])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_continues_its_record(name, tmp_path, monkeypatch):
    """By an id in its folder, also from another working directory. From an earlier checkpoint it
    is a new record, since W&B does not replace what it has. Two runs in folders of one name differ.
    """
    package = Mock(__spec__=ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr("flowrl.run.trackers.find_spec", lambda package: True)
    config, key = (
        SMALL.replace(tracker=name, keep_checkpoints=2),
        "id" if name == "wandb" else "name",
    )
    for out in (tmp_path / "run", tmp_path / "other" / "run"):
        assert not Run(config, out, stop=lambda: True).execute()
    monkeypatch.chdir(tmp_path)
    run = Run(config, Path("run"))
    assert run.execute(resume=True) and run.execute(resume=True, start="000001")
    first, other, resumed, earlier = (call.kwargs for call in package.init.call_args_list)
    assert (
        first[key] == resumed[key] and len({given[key] for given in (first, other, earlier)}) == 3
    )
    assert resumed["resume"] == "allow" and "run" in resumed["name"]
    if name == "wandb":
        assert (resumed["dir"], resumed["name"]) == ("run", "run")


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
