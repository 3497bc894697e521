"""Training a diffusers model from the command line: prompts from a file, a reward by name, weights
that others read.
"""

import json

import torch
from flowrl_testing.tiny import tiny_flux
from safetensors.torch import load_file
from small_run import model_files, words

from flowrl.cli.main import main
from flowrl.losses import ClippedLoss
from flowrl.training.build import make_world, run_method
from flowrl.training.config import RunConfig, preset


def test_full_fine_tuning_of_flux_against_its_reference(tmp_path):
    options = model_files(tmp_path, pipe=tiny_flux()) | dict(preset="tiny", tuning="full")
    options |= dict(kl_weight=0.1, learning_rate=0.001, out=tmp_path / "run")
    assert main(["train", *words(**options)]) == 0
    kind = type(tiny_flux().transformer)
    transformer = kind.from_pretrained(tmp_path / "run" / "full", subfolder="transformer")
    averaged = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(torch.equal(p, averaged[name]) for name, p in transformer.named_parameters())


def test_held_out_prompts_have_their_own_file(tmp_path):
    files = model_files(tmp_path, ("# prompts", "a red fox", "", "  a red car  ", "a red hat"))
    (tmp_path / "held.jsonl").write_text('{"prompt": "two cats", "count": 2}\n')
    config = preset("default").apply(**files, heldout_prompts=f"{tmp_path}/held.jsonl")
    world = make_world(config)
    training = [prompt.text for prompt in world.prompts("prompts", "train")]
    assert training == ["a red fox", "a red car", "a red hat"]
    (held,) = world.prompts("prompts", "heldout")
    assert (held.text, held.metadata) == ("two cats", {"count": 2})
    assert world.reward("reward") is world.reward("reward")
    loss = run_method(config).loss
    assert isinstance(loss, ClippedLoss) and loss.clip_range == 1e-4
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict())), trust=True) == config
