"""A trained adapter beside frozen ones: what the reference has, and their files."""

import pytest
import torch
from family_cases import CASES, draw, fill, noise_of, trainer_of
from family_cases import velocity as velocity_of
from torch.testing import assert_close

from flowrl.core.errors import CheckpointError
from flowrl.run.build import policy_options
from flowrl.run.config import preset

FLUX = CASES["flux"]


def velocity(policy):
    return velocity_of(policy).detach()


@pytest.fixture
def style(tmp_path):
    """A saved LoRA of another rank and of fewer layers, and the velocity of the model that has
    it.
    """
    policy = fill(FLUX.policy(lora_rank=2, lora_alpha=6.0, lora_targets=("to_q", "to_k")), std=0.2)
    policy.save(tmp_path / "style")
    return tmp_path / "style", velocity(policy)


def test_a_frozen_adapter_is_part_of_policy_and_reference(style, tmp_path):
    path, with_style = style
    policy = FLUX.policy(frozen_adapters=f"style={path}")
    assert policy.adapters.frozen == ("style",)
    assert all(".default." in name for name in policy.trainable())
    assert_close(velocity(policy), with_style, atol=2e-6, rtol=0)
    assert (with_style - velocity(FLUX.policy())).abs().max() > 1e-2
    weights = dict(policy.transformer.named_parameters())
    frozen = {n: p.detach().clone() for n, p in weights.items() if not p.requires_grad}
    row = trainer_of(policy).iteration()
    assert row["kl"] == pytest.approx(0, abs=1e-9) and row["ratio_deviation"] < 1e-4
    assert all(torch.equal(p, weights[n]) for n, p in frozen.items())
    assert (velocity(policy) - with_style).abs().max() > 1e-3
    with policy.reference():
        assert_close(velocity(policy), with_style, atol=2e-6, rtol=0)
    with policy.reference(), policy.frozen():  # merges the frozen adapters only
        assert_close(velocity(policy), with_style, atol=5e-6, rtol=0)
    trained = velocity(policy)
    with policy.frozen():
        assert_close(velocity(policy), trained, atol=5e-6, rtol=0)
    assert torch.equal(velocity(policy), trained)  # merging left nothing behind
    policy.save(tmp_path / "mine")
    pipe = FLUX.make()  # plain diffusers stacks the files to the same image
    pipe.load_lora_weights(path, adapter_name="style")
    pipe.load_lora_weights(tmp_path / "mine", adapter_name="mine")
    pipe.set_adapters(["style", "mine"])
    picture = FLUX.picture(pipe, noise_of(policy))
    assert_close(draw(policy), picture, atol=5e-6, rtol=0)


def test_files_that_are_no_loras_are_refused(tmp_path):
    generator = torch.get_rng_state()
    FLUX.policy()
    assert torch.equal(generator, torch.get_rng_state())  # the adapter has a generator of its own
    with pytest.raises(CheckpointError, match="none does not exist"):
        FLUX.policy(frozen_adapters=str(tmp_path / "none"))
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"no safetensors")
    for changes in ({"adapter": str(tmp_path)}, {"frozen_adapters": str(tmp_path)}):
        with pytest.raises(CheckpointError, match="cannot be read"):
            FLUX.policy(**changes)


def test_settings_of_a_run_reach_the_model():
    files = {"model": "somewhere", "prompts": "prompts.txt", "reward": "jpeg-compressibility"}
    same = {"decode_batch": 3, "lora_targets": ("attn.to_q", "ff.net.2")}
    config = preset("default").apply(**files, **same, frozen_adapters="style=a,b", compile=True)
    options = policy_options(config)
    assert {name: getattr(options, name) for name in same} == same
    assert options.frozen == ("style=a", "b") and options.compile is True
