"""Training a diffusers model from the command line: prompts from a file, a reward by name, weights
that others read.
"""

import json

from small_run import model_files

from flowrl.losses import ClippedLoss
from flowrl.training.build import make_world, run_method
from flowrl.training.config import RunConfig, preset


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
