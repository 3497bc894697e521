"""Rewards by name on the command line, and training a model with several of them."""

import json

import pytest
from tiny_rewards import tiny_clip

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.registry import build
from flowrl.rewards import Clipped, CLIPScore, JPEGCompressibility, WeightedSum
from flowrl.testing.tiny import tiny_sd3
from flowrl.training.results import load_run


def test_rewards_within_a_reward_take_their_options_and_the_device():
    models = "{'size': 'jpeg-compressibility(quality=50)', 'clip': 'clipscore', 'cut': \"clipped(reward='clipscore', high=1)\"}"
    found = build("reward", f"weighted-sum(models={models})", device="meta")
    assert isinstance(found, WeightedSum) and found.models["size"] == JPEGCompressibility(50)
    assert found.models["clip"] == CLIPScore(device="meta") and found.models["cut"] == Clipped(CLIPScore(device="meta"), high=1)


TWO = "weighted-sum(models={'plain': 'jpeg-compressibility', 'rough': 'jpeg-compressibility(quality=20)'})"


@pytest.mark.parametrize(
    ("reward", "credit", "told"),
    [
        (TWO, "gdpo(weights={'plain': 2.0})", ""),
        (TWO, "gdpo(weights={'smooth': 2.0})", "GDPO.weights names rewards smooth; there are plain, rough"),
        ("jpeg-compressibility", "gdpo(weights={'plain': 2.0})", "GDPO.weights names rewards plain; there are reward"),
    ],
)
def test_gdpo_weights_components_by_name(tmp_path, capsys, reward, credit, told):
    run = [
        "train",
        "--preset",
        "tiny",
        "--iterations",
        "1",
        "--out",
        str(tmp_path / "run"),
        "--reward",
        reward,
        "--credit",
        credit,
    ]
    assert main(run) == (2 if told else 0)
    assert told in capsys.readouterr().err
    if not told:
        assert set(load_run(tmp_path / "run").rows[-1]["parts"]) == {"plain", "rough"}


@pytest.mark.parametrize("weight", ["'x'", "'nan'", "None"])
def test_a_weight_is_a_number(weight):
    with pytest.raises(ConfigError, match=r"WeightedSum.weights\['size'\] = .* is not allowed; allowed: a finite number"):
        build("reward", f"weighted-sum(models={{'size': 'jpeg-compressibility'}}, weights={{'size': {weight}}})")


def test_points_are_no_pictures(tmp_path, capsys):
    run = ["train", "--world", "mixture", "--preset", "tiny", "--out", str(tmp_path), "--reward", "jpeg-compressibility"]
    assert main(run) == 2
    assert "this reward needs images with 1 channel or 3, not 2" in capsys.readouterr().err


def test_train_with_two_rewards(tmp_path, capsys):
    tiny_sd3().save_pretrained(tmp_path / "model")
    tiny_clip(tmp_path / "clip", size=16)
    assert main(["prompts", "compositional", "--count", "6", "--file", str(tmp_path / "prompts.jsonl")]) == 0
    models = f"{{'size': 'jpeg-compressibility', 'clip': \"clipscore(model='{tmp_path}/clip')\"}}"
    options = {
        "model": tmp_path / "model", "prompts": tmp_path / "prompts.jsonl", "groups": 2, "out": tmp_path / "run",
        "reward": f"weighted-sum(models={models}, weights={{'clip': 2.0}})",
        "resolution": 16, "max-sequence-length": 24, "device": "cpu", "dtype": "float32", "lora-rank": 2, "lora-alpha": 8,
        "preset": "tiny",
    }  # fmt: skip
    assert main(["train", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]) == 0
    capsys.readouterr()
    rows = load_run(tmp_path / "run").rows
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    parts = rows[1]["parts"]
    assert rows[1]["reward_mean"] == pytest.approx(parts["size"] + 2 * parts["clip"], abs=1e-5) and rows[1]["invalid"] == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["environment"]["reward"].startswith("weighted-sum")
