"""Training a diffusers model from the command line: prompts from a file, a reward by name, weights
that others read.
"""

import json
import logging

import pytest
import torch
from flowrl_compare.results import load_run
from flowrl_testing.tiny import tiny_flux
from safetensors.torch import load_file
from small_run import TINY_MODEL, model_files, words

from flowrl.cli.main import main
from flowrl.losses import ClippedLoss
from flowrl.training.build import make_world, run_method
from flowrl.training.config import RunConfig, preset

SIZES = words(**TINY_MODEL, lora_rank=2, lora_alpha=8, preset="tiny")


@pytest.fixture
def folder(tmp_path):
    """Prompts, a reward, and a tiny SD3 pipeline on disk."""
    model_files(tmp_path, ("# prompts", "a red fox", "", "  a red car  ", "a red hat"))
    return tmp_path


def arguments(folder, *more):
    files = {"model": "model", "prompts": "prompts.txt", "reward": "reward.py:Redness"}
    return [*(f"--{name}={folder}/{file}" for name, file in files.items()), *SIZES, *more]


def test_full_fine_tuning_of_flux_against_its_reference(folder):
    tiny_flux().save_pretrained(folder / "model")
    more = ("--tuning=full", "--kl-weight=0.1", "--learning-rate=0.001", f"--out={folder}/run")
    assert main(["train", *arguments(folder, *more)]) == 0
    run = load_run(folder / "run")
    assert [row["kl"] >= 0 for row in run.rows[1:]] == [True, True]
    kind = type(tiny_flux().transformer)
    transformer = kind.from_pretrained(folder / "run" / "full", subfolder="transformer")
    averaged = load_file(folder / "run" / "weights.safetensors")
    assert all(torch.equal(p, averaged[name]) for name, p in transformer.named_parameters())


def test_held_out_prompts_have_their_own_file(folder):
    (folder / "held.jsonl").write_text('{"prompt": "two cats", "count": 2}\n')
    files = {"prompts": str(folder / "prompts.txt"), "heldout_prompts": str(folder / "held.jsonl")}
    reward = f"{folder}/reward.py:Redness"
    config = preset("default").apply(model="somewhere", reward=reward, **files)
    world = make_world(config)
    training = [prompt.text for prompt in world.prompts("prompts", "train")]
    assert training == ["a red fox", "a red car", "a red hat"]
    (held,) = world.prompts("prompts", "heldout")
    assert (held.text, held.metadata) == ("two cats", {"count": 2})
    assert world.reward("reward") is world.reward("reward")
    loss = run_method(config).loss
    assert isinstance(loss, ClippedLoss) and loss.clip_range == 1e-4
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict())), trust=True) == config


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--reward=", "a model has none of its own"),
        ("--model=nowhere/at-all", "no folder with a model_index.json"),
        ("--prompts=", "prompts = ''"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, capsys, more, words):
    logging.getLogger("diffusers").setLevel(logging.CRITICAL)
    assert main(["train", *arguments(folder, f"--out={folder}/run", more)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]  # before it: progress of loading
    assert last.startswith("flowrl: error: ") and words in last
