"""Whole runs of tiny SD3, FLUX, Qwen-Image and Wan pipelines on a device: paused, resumed,
evaluated, and on two GPUs.
"""

import json
from itertools import product

import pytest
import torch
from device_cases import MODELS, PROMPTS, any_trainer, assert_same, flat
from safetensors.torch import load_file
from small_run import model_files, rows_of, words

from flowrl.cli.main import main
from flowrl.policies import DTYPES
from flowrl.run.checkpoint import restore_trainer, trainer_state
from flowrl.run.config import preset
from flowrl.run.job import Run

SIZES = dict(
    groups=2,
    group_size=3,
    num_steps=3,
    minibatches=2,
    iterations=3,
    checkpoint_every=1,
    eval_samples=3,
    eval_steps=3,
    lora_rank=2,
    lora_alpha=4.0,
    learning_rate=1e-3,
    guidance_scale=2.0,
    kl_weight=0.1,
    tracker="none",
    method="tp-grpo",
)


def config_of(name, device, dtype, folder):
    files = model_files(folder, [prompt.text for prompt in PROMPTS], MODELS[name].make())
    return preset("tiny").apply(**files | SIZES | dict(device=device, dtype=dtype))


QUICK = ("sd3", "bfloat16"), ("wan", "bfloat16")


@pytest.mark.satellite
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in product(MODELS, DTYPES)
    ],
)
def test_a_paused_run_goes_on_as_a_whole_one_and_is_evaluated(name, dtype, device, tmp_path):
    config = config_of(name, device, dtype, tmp_path)
    Run(config, tmp_path / "whole").execute()
    assert not Run(config, tmp_path / "parts", stop=lambda: True).execute()
    assert len(rows_of(tmp_path / "parts")) == 2
    assert Run(config, tmp_path / "parts").execute(resume=True)
    weights = (load_file(tmp_path / run / "weights.safetensors") for run in ("parts", "whole"))
    assert_same(*(flat(tensors.values()) for tensors in weights), device)
    rows = rows_of(tmp_path / "parts")
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert all(row["grad_norm"] > 0 for row in rows[1:])
    options = words(weights=tmp_path / "parts", device=device, batch=2, num_steps=2, trust=True)
    assert main(["evaluate", *options, "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (result["prompts"], result["dtype"], result["device"]) == (len(PROMPTS), dtype, device)


@pytest.mark.parametrize("name", ["mixture", "shapes", *MODELS])
def test_a_checkpoint_restores_weights_moments_and_generators(name, device):
    """The state is in main memory; the generator goes on with the same noise."""
    trainer, again = (
        any_trainer(name, device, method="stepwise-flow-grpo", iterations=3) for _ in range(2)
    )
    trainer.iteration()
    state = trainer_state(trainer)
    assert {tensor.device.type for tensor in state.tensors.values()} == {"cpu"}
    restore_trainer(again, state)
    assert torch.equal(trainer.generator.get_state(), again.generator.get_state())
    assert torch.equal(flat(again.parameters.values()), flat(trainer.parameters.values()))
    assert again.iteration()["grad_norm"] > 0
