"""Folders with networks: what is damaged, incomplete or another model is refused, never scored with random weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_rewards import tiny_clip, tiny_detector

from flowrl.errors import ConfigError
from flowrl.registry import build
from flowrl.rewards import PickScore
from flowrl.rewards.geneval import load_detector
from flowrl.types import Prompt


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def score(folder, **options):
    return PickScore(str(folder), tokenizer="", **options).score(torch.rand(2, 3, 40, 40), [Prompt("a fox"), Prompt("a cat")])


def drop_weights(folder):
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("text_model")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def cut_file(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def change_shapes(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"projection_dim": 16}))


def drop_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def break_config(folder):
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (drop_weights, "its files lack .* of the weights, such as text_model"),
        (cut_file, "cannot be loaded as the model that this reward needs"),
        (change_shapes, "cannot be loaded as the model that this reward needs"),
        (drop_tokenizer, "a tokenizer for 90 pieces of text"),
        (break_config, "cannot be loaded as the model that this reward needs: .*JSON"),
    ],
)
def test_damaged_folders_are_refused(folder, damage, told):
    assert bool(score(folder).isfinite().all())
    damage(folder)
    with pytest.raises(ConfigError, match=told):
        score(folder, batch=3)  # other settings, so that nothing kept is used


def test_another_kind_of_model_is_refused(whole, tmp_path):
    other = tiny_detector(tmp_path / "detector", masks=True)
    with pytest.raises(ConfigError, match="is no CLIPModel: its files lack"):
        PickScore(str(other), tokenizer=str(whole)).score(torch.rand(1, 3, 40, 40), [Prompt("a fox")])
    with pytest.raises(ConfigError, match=f"reward: the files in '{whole}' cannot be loaded"):
        load_detector(str(whole))


def test_a_detector_that_lacks_weights_is_refused(tmp_path):
    folder = tiny_detector(tmp_path, masks=False)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "decoder" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="is no RTDetrForObjectDetection: its files lack"):
        load_detector(str(folder))


@pytest.mark.parametrize("batch", ["0", "2.5"])
def test_a_batch_is_a_whole_number(whole, batch):
    def scored():
        return build("reward", f"clipscore(model='{whole}', batch={batch})").score(torch.rand(1, 3, 40, 40), [Prompt("a fox")])

    with pytest.raises(ConfigError, match=r"batch = .* is not allowed; allowed: a whole number"):
        scored()
