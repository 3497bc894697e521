"""What a run of a model leaves for people: event files, strips of samples, the settings as YAML,
the model card.
"""

import json
import sys
import types

import pytest
import torch
from safetensors.torch import load_file

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.testing.tiny import tiny_sd3
from flowrl.training.config import RunConfig, load_config, preset
from flowrl.training.logging import over_time, scalars, strip, tracker_name, write_image
from flowrl.training.results import load_run
from flowrl.training.run import Run

REWARD = """
class Redness:
    def score(self, images, prompts):
        return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of a tiny SD3 pipeline with TensorBoard."""
    pytest.importorskip("tensorboard")
    root = tmp_path_factory.mktemp("tracked")
    (root / "prompts.txt").write_text("a red fox\na red car\na red hat\n")
    (root / "reward.py").write_text(REWARD)
    tiny_sd3().save_pretrained(root / "model")
    files = [
        "--model",
        str(root / "model"),
        "--prompts",
        str(root / "prompts.txt"),
        "--reward",
        f"{root}/reward.py:Redness",
    ]
    sizes = [
        "--resolution",
        "16",
        "--max-sequence-length",
        "24",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--lora-rank",
        "2",
        "--lora-alpha",
        "8",
    ]
    more = [
        "--preset",
        "tiny",
        "--learning-rate",
        "0.03",
        "--groups",
        "1",
        "--checkpoint-every",
        "1",
        "--guidance-scale",
        "2",
    ]
    assert main(["train", *files, *sizes, *more, "--out", str(root / "run")]) == 0
    return root


def test_text_encoders_visit_the_device_twice(folder, tmp_path, monkeypatch):
    """For the held-out prompts, and for all prompts of the coming iterations; not at every
    iteration.
    """
    from flowrl.policies.pipeline import PipelinePolicy

    visits = []
    monkeypatch.setattr(
        PipelinePolicy,
        "_embed",
        lambda self, texts, old=PipelinePolicy._embed: visits.append(texts) or old(self, texts),
    )
    (tmp_path / "held.txt").write_text("a blue dog\n")
    config = load_config(folder / "run" / "config.json", trust=True)
    Run(
        config.replace(heldout_prompts=str(tmp_path / "held.txt"), iterations=3, tracker="none"),
        tmp_path / "run",
    ).execute()
    assert [sorted(texts) for texts in visits] == [
        ["", "a blue dog"],
        ["a red car", "a red fox", "a red hat"],
    ]


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


def test_event_files_hold_the_metrics_and_the_pictures(folder):
    found, rows = events(folder / "run" / "tensorboard"), load_run(folder / "run").rows
    for name in (
        "reward_mean",
        "loss",
        "grad_norm",
        "phases/update",
        "nfe_total",
        "evaluation/reward",
    ):
        told = [(event.step, event.value) for event in found.Scalars(name)]
        expected = [(row["iteration"], scalars(row)[name]) for row in rows if name in scalars(row)]
        assert [step for step, _ in told] == [step for step, _ in expected] and len(told) >= 2
        assert [value for _, value in told] == pytest.approx(
            [value for _, value in expected], rel=1e-6
        )
    assert [event.step for event in found.Images("samples")] == [0, 1, 2]
    settings = list((folder / "run" / "tensorboard").glob("*/hparams.yml"))
    assert len(settings) == 1 and "sampler: flow-sde(noise_level=0.7)" in settings[0].read_text()


def test_strips_show_the_same_prompts_from_the_same_noise(folder):
    from PIL import Image

    run = folder / "run"
    names = sorted(path.name for path in (run / "samples").iterdir())
    assert names == [
        "iteration-000000.png",
        "iteration-000001.png",
        "iteration-000002.png",
        "over-time.png",
        "prompts.txt",
    ]
    texts = (run / "samples" / "prompts.txt").read_text().splitlines()
    assert texts == json.loads((run / "samples.json").read_text())["prompts"]
    pictures = load_file(run / "samples.safetensors")
    for name, images in (("000000", pictures["before"]), ("000002", pictures["after"])):
        with Image.open(run / "samples" / f"iteration-{name}.png") as picture:
            assert list(picture.getdata()) == list(strip(images).getdata())
            assert picture.size == (4 * 256 + 3 * 4, 256)
    with Image.open(run / "samples" / "over-time.png") as picture:
        assert picture.size == (90 + (4 * 256 + 3 * 4) // 2, 3 * 128 + 2 * 4)


def test_the_settings_in_yaml_repeat_the_run(folder):
    again = folder / "again"
    assert load_config(folder / "run" / "config.yaml", trust=True) == load_config(
        folder / "run" / "config.json", trust=True
    )
    assert (
        main(
            [
                "train",
                "--config",
                str(folder / "run" / "config.yaml"),
                "--trust",
                "--out",
                str(again),
            ]
        )
        == 0
    )
    assert (again / "weights.safetensors").read_bytes() == (
        folder / "run" / "weights.safetensors"
    ).read_bytes()


def test_a_resumed_run_goes_on_in_the_event_files(folder, monkeypatch):
    config = load_config(folder / "run" / "config.json", trust=True)
    out = folder / "paused"
    assert Run(config, out, stop=lambda: True).execute() is False
    assert main(["train", "--resume", str(out), "--trust"]) == 0
    assert sorted(event.step for event in events(out / "tensorboard").Scalars("reward_mean")) == [
        1,
        2,
    ]


def test_the_card_says_what_was_measured_and_plain_diffusers_ignores_it(folder):
    from huggingface_hub import ModelCard

    run = folder / "run"
    card = ModelCard.load(run / "README.md")
    assert card.data.library_name == "diffusers" and card.data.pipeline_tag == "text-to-image"
    assert {"lora", "flow-grpo", "reinforcement-learning"} <= set(card.data.tags)
    rows = load_run(run).rows
    for value in (rows[0]["evaluation"]["reward"], rows[-1]["evaluation"]["reward"]):
        assert f"{value:.4f}" in card.text
    assert "flowrl train --config config.yaml" in card.text and "## Limitations" in card.text
    assert (
        "training prompts (no held-out prompts were given)" in card.text
        and "guidance 2" in card.text
    )
    names = {path.name for path in (run / "lora").iterdir()}
    assert names == {"README.md", "config.yaml", "samples", "pytorch_lora_weights.safetensors"}
    plain = tiny_sd3()
    plain.load_lora_weights(run / "lora")
    assert plain.get_active_adapters() == ["default_0"]


def test_which_tracker(monkeypatch):
    config = RunConfig()
    assert tracker_name(config) == "none"  # built-in worlds stay as fast as they are
    assert tracker_name(RunConfig.of(tracker="none")) == "none"
    model = preset("ocr").apply(model="somewhere")
    assert tracker_name(model) in ("tensorboard", "none")
    monkeypatch.setattr("flowrl.training.logging.find_spec", lambda name: None)
    assert tracker_name(model) == "none"
    with pytest.raises(
        ConfigError, match=r"tracker = 'wandb' is not allowed; allowed: a tracker that is installed"
    ):
        tracker_name(RunConfig.of(tracker="wandb"))
    with pytest.raises(ConfigError, match="one of auto, none, tensorboard, wandb, trackio"):
        RunConfig.of(tracker="mlflow")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_other_trackers_get_the_same(name, tmp_path, monkeypatch):
    """Against a stand-in for the package that records its calls: W&B and trackio have one
    interface.
    """
    calls = []

    class Running:
        def log(self, values, step=None, **more):
            calls.append((step, values))

        def finish(self):
            calls.append("finished")

    stand_in = types.ModuleType(name)
    stand_in.__dict__.update(
        init=lambda **words: calls.append(words) or Running(),
        config=types.SimpleNamespace(update=lambda values, **more: calls.append(values)),
        Image=lambda pixels: ("image", tuple(pixels.shape)),
    )
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr("flowrl.training.logging.find_spec", lambda package: True)
    config = preset("tiny").apply(tracker=name)
    Run(config, tmp_path / "run").execute()
    started, settings, *rest, last = calls
    assert started == {"project": "flowrl", "name": "run"} and last == "finished"
    assert settings["sampler"] == "flow-sde(noise_level=0.7)"
    numbers = {step: values for step, values in rest if "samples" not in values}
    assert (
        set(numbers) == {0, 1, 2}
        and "reward_mean" in numbers[1]
        and "evaluation/strict" in numbers[2]
    )
    pictures = [(step, values["samples"]) for step, values in rest if "samples" in values]
    expected = ("image", (256, 1036, 3))
    assert pictures == [(step, [expected] if name == "wandb" else expected) for step in (0, 1, 2)]


def test_numbers_of_a_row_by_name():
    row = {"a": 1, "b": {"c": 2.5, "d": {"e": 3}}, "f": [1, 2], "g": "text", "h": None, "i": True}
    assert scalars(row) == {"a": 1.0, "b/c": 2.5, "b/d/e": 3.0, "f/0": 1.0, "f/1": 2.0}


def test_strips_keep_the_shape_of_pictures_and_their_number_small(tmp_path):
    assert strip(torch.rand(3, 3, 512, 256)).size == (3 * 128 + 8, 256)
    assert strip(torch.rand(1, 3, 100, 200)).size == (200, 100)
    assert over_time(tmp_path) is None
    for i in range(40):
        write_image(
            tmp_path / f"iteration-{i:06d}.png", strip(torch.full((1, 3, 4, 4), i / 39), side=8)
        )
    picture = over_time(tmp_path)
    assert picture is not None and picture.size == (94, 16 * 4 + 15 * 4)
    assert picture.getpixel((92, 1)) == (0, 0, 0) and picture.getpixel(
        (92, picture.height - 2)
    ) == (255, 255, 255)


def test_a_run_is_sampled_where_its_device_is_not(folder, tmp_path):
    """A run that was trained on a GPU, on a machine without."""
    import shutil

    (tmp_path / "reward.py").write_text(
        "class Here:\n    def __init__(self, device='cpu'):\n        assert device == 'cpu'\n"
        "    def score(self, images, prompts):\n        return images.mean((1, 2, 3))\n"
    )
    shutil.copytree(folder / "run", tmp_path / "run")
    there = load_config(tmp_path / "run" / "config.json", trust=True).replace(
        device="cuda:99", reward=f"{tmp_path}/reward.py:Here"
    )
    (tmp_path / "run" / "config.json").write_text(json.dumps(there.as_dict()))
    more = [
        "--prompts",
        "a fox",
        "--count",
        "1",
        "--num-steps",
        "2",
        "--out",
        str(tmp_path / "picture.png"),
    ]
    assert main(["sample", "--weights", str(tmp_path / "run"), "--trust", *more]) == 0
