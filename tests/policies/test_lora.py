"""Several named adapters: which is trained, which are in use, what the reference has, and their
files.
"""

import pytest
import torch
from family_cases import CASES, draw, fill, noise_of, trainer_of
from family_cases import velocity as velocity_of

from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.testing.tiny import TINY
from flowrl.training.build import model_options
from flowrl.training.config import preset


@pytest.fixture(params=["sd3", "flux"])
def case(request):
    return CASES[request.param]


def velocity(policy):
    return velocity_of(policy).detach()


@pytest.fixture
def style(case, tmp_path):
    """A saved LoRA of another rank and of fewer layers, and the velocity of the model that has
    it.
    """
    policy = fill(case.policy(lora_rank=2, lora_alpha=6.0, lora_targets=("to_q", "to_k")), std=0.2)
    policy.save(tmp_path / "style")
    return tmp_path / "style", velocity(policy)


def test_a_frozen_adapter_is_part_of_policy_and_reference(case, style):
    path, with_style = style
    policy = case.policy(frozen_adapters=(f"style={path}",), adapter_name="mine")
    assert policy.adapters.names == ("style", "mine") and policy.adapters.frozen == ("style",)
    assert all(".mine." in name for name in policy.trainable())
    torch.testing.assert_close(velocity(policy), with_style, atol=2e-6, rtol=0)
    assert (with_style - velocity(case.policy())).abs().max() > 1e-2
    frozen = {
        n: p.detach().clone()
        for n, p in policy.transformer.named_parameters()
        if not p.requires_grad
    }
    row = trainer_of(policy).iteration()
    assert row["kl"] == pytest.approx(0, abs=1e-9) and row["ratio_deviation"] < 1e-4
    assert all(
        torch.equal(p, dict(policy.transformer.named_parameters())[n]) for n, p in frozen.items()
    )
    assert (velocity(policy) - with_style).abs().max() > 1e-3
    with policy.reference():
        torch.testing.assert_close(velocity(policy), with_style, atol=2e-6, rtol=0)
    with policy.reference(), policy.frozen():  # merges the frozen adapters only
        torch.testing.assert_close(velocity(policy), with_style, atol=5e-6, rtol=0)
    trained = velocity(policy)
    with policy.frozen():
        torch.testing.assert_close(velocity(policy), trained, atol=5e-6, rtol=0)
    assert torch.equal(velocity(policy), trained)  # merging left nothing behind


def test_plain_diffusers_stacks_the_files_to_the_same_picture(case, style, tmp_path):
    policy = case.policy(frozen_adapters=(str(style[0]),), adapter_name="mine", lora_rank=3)
    trainer_of(policy).iteration()
    policy.save(tmp_path / "mine")
    pipe = case.make()
    pipe.load_lora_weights(style[0], adapter_name="style")
    pipe.load_lora_weights(tmp_path / "mine", adapter_name="mine")
    pipe.set_adapters(["style", "mine"])
    torch.testing.assert_close(
        draw(policy), case.picture(pipe, noise_of(policy)), atol=5e-6, rtol=0
    )


def test_adapters_are_added_and_chosen(case):
    policy = case.policy(adapter_name="first")
    base = velocity(policy)
    fill(policy, 1, 0.2)
    first = velocity(policy)
    policy.adapters.add("second", rank=2, alpha=2.0, targets=("to_v",), seed=3)
    assert torch.equal(velocity(policy), first) and all(
        ".first." in name for name in policy.trainable()
    )
    policy.adapters.train("second")
    assert torch.equal(velocity(policy), base) and all(
        ".second." in name for name in policy.trainable()
    )
    fill(policy, 2, 0.2)
    alone = velocity(policy)
    policy.adapters.train("second", frozen=["first"])
    both = velocity(policy)
    assert min((both - other).abs().max() for other in (base, first, alone)) > 1e-3
    with policy.reference():
        assert torch.equal(velocity(policy), first)
    assert torch.equal(velocity(policy), both)
    assert {t.shape[0] for n, t in policy.adapters.tensors().items() if "lora_A" in n} == {2}
    policy.adapters.train("first")
    assert torch.equal(velocity(policy), first) and policy.adapters.rank == TINY.lora_rank
    with policy.reference():
        assert torch.equal(velocity(policy), base)


def test_what_is_wrong_is_said(case, tmp_path):
    policy = case.policy()
    with pytest.raises(ConfigError, match="'other' is not allowed; allowed: default"):
        policy.adapters.train("other")
    with pytest.raises(ConfigError, match="cannot be trained and frozen"):
        policy.adapters.train("default", frozen=["default"])
    with pytest.raises(ConfigError, match="no name of another adapter"):
        policy.adapters.add("default", 1, 1.0, ("to_q",), 0)
    with pytest.raises(ConfigError, match=r"adapter_name = 'a\.b'"):
        case.policy(adapter_name="a.b")
    with pytest.raises(ConfigError, match="name 'a b'"):
        case.policy(frozen_adapters=("a b=x",))
    with pytest.raises(CheckpointError, match="none does not exist"):
        case.policy(frozen_adapters=(str(tmp_path / "none"),))
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"no safetensors")
    for changes in ({"adapter": str(tmp_path)}, {"frozen_adapters": (str(tmp_path),)}):
        with pytest.raises(CheckpointError, match="cannot be read"):
            case.policy(**changes)


def test_settings_of_a_run_reach_the_model(tmp_path):
    (tmp_path / "prompts.txt").write_text("a dog\n")
    files = {
        "model": "somewhere",
        "prompts": str(tmp_path / "prompts.txt"),
        "reward": "jpeg-compressibility",
    }
    same = {
        "decode_batch": 3,
        "decode_dtype": "bfloat16",
        "lora_targets": ("attn.to_q", "ff.net.2"),
        "prompt_cache": 7,
    }
    same |= {"guidance_gradient": "prompt", "attention_backend": "_native_math"}
    options = model_options(
        preset("default").apply(**files, **same, frozen_adapters="style=a,b", compile=True)
    )
    assert {name: getattr(options, name) for name in same} == same
    assert options.frozen_adapters == ("style=a", "b") and options.compile == "inductor"
    usual = model_options(preset("default").apply(**files))
    assert (usual.frozen_adapters, usual.compile, usual.decode_batch, usual.decode_dtype) == (
        (),
        "",
        8,
        "float32",
    )
    trainer = trainer_of(CASES["sd3"].policy(), betas=(0.5, 0.75))
    assert trainer.optimizer.param_groups[0]["betas"] == (0.5, 0.75)
