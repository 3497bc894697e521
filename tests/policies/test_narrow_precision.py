"""Narrow networks, guidance, image decoders and compiled blocks at tiny size; where the text encoders are, and how many prompts
are kept."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.losses import ClippedLoss
from flowrl.methods import stepwise_flow_grpo, tp_grpo
from flowrl.policies import LORA_TARGETS, compile_blocks
from flowrl.policies.pipeline import PipelinePolicy
from flowrl.policies.sd3 import SD3
from flowrl.rewards import FunctionReward
from flowrl.rollout import Usage, integrate
from flowrl.samplers import FlowSDE
from flowrl.testing.tiny import TINY, tiny_flux, tiny_flux_policy, tiny_sd3, tiny_sd3_policy
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer
from flowrl.types import Prompt

TEXTS = ["three red circles", "a dog"]
PROMPTS = [Prompt(text) for text in TEXTS]
STEPS = 4
FAMILIES = {"sd3": (tiny_sd3_policy, tiny_sd3, "guidance_scale"), "flux": (tiny_flux_policy, tiny_flux, "true_cfg_scale")}
REDNESS = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3)))
PICTURE = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 7e-3}
"""Root mean square difference of a picture in [0, 1] after 4 steps between our network in a precision and a float32 one with
the same rounded weights. Found: 1.4e-7, 1.8e-4 and, for bfloat16, 1.8e-3 (SD3) and 5.9e-3 (FLUX, whose transformer rounds the
time it is told to its own precision, in plain diffusers too)."""


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def noise_of(policy, count=2):
    return torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(0))


def picture(policy):
    return policy.decode(integrate(policy, policy.schedule(STEPS), policy.encode(PROMPTS), noise_of(policy), Usage()))


def rms(difference):
    return float(difference.square().mean().sqrt())


def filled(make, **changes):
    """A policy whose adapter, on both attentions, does something that shows in a picture."""
    policy = make(replace(TINY, lora_targets=tuple(name.removeprefix("attn.") for name in LORA_TARGETS), **changes))
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.15, generator=generator)
    return policy


def trainer_of(policy, method):
    config = preset("tiny").apply(num_steps=STEPS, groups=2, group_size=3, minibatches=2, learning_rate=1e-2)
    made = method(FlowSDE(0.7), ClippedLoss(clip_range=1e-2, kl_weight=0.1))
    return Trainer(policy, made, REDNESS, PROMPTS, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("guidance", "method"), [(1.0, tp_grpo), (3.0, stepwise_flow_grpo)], ids=["plain", "guided"])
def test_train_save_reload_resume(family, dtype, guidance, method, tmp_path):
    """Rollouts with probes, updates with a KL, saving, the same picture from plain diffusers, and a resume to the bit."""
    make, plain, scale = family
    trainer = trainer_of(filled(make, dtype=dtype, guidance_scale=guidance), method)
    row = trainer.iteration()
    assert row["grad_norm"] > 0 and row["kl"] > 0 and 0 <= row["ratio_deviation"] < (1e-1 if dtype == "bfloat16" else 5e-2)
    state = trainer.state()
    trainer.iteration()
    again = trainer_of(filled(make, dtype=dtype, guidance_scale=guidance), method)
    again.restore(state)
    again.iteration()
    assert all(torch.equal(a, b) for a, b in zip(trainer.parameters, again.parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(trainer.average, again.average, strict=True))
    policy = trainer.policy
    policy.save(tmp_path / "lora")
    pipe = plain()
    pipe.transformer.to(getattr(torch, dtype)).to(torch.float32)
    call = dict(height=16, width=16, num_inference_steps=STEPS, max_sequence_length=TINY.max_sequence_length, output_type="pt")
    call |= {scale: guidance, "negative_prompt": [""] * 2} | ({} if scale == "guidance_scale" else {"guidance_scale": 3.5})
    pipe.set_progress_bar_config(disable=True)
    base = pipe(TEXTS, latents=noise_of(policy), **call).images
    pipe.load_lora_weights(tmp_path / "lora")
    expected, ours = pipe(TEXTS, latents=noise_of(policy), **call).images, picture(policy)
    assert rms(ours - expected) < PICTURE[dtype]
    assert rms(expected - base) > 2 * PICTURE[dtype]  # a lost adapter would show


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_large_sd3_draws_the_plain_pipelines_pictures(guidance):
    """SD3.5-Large: no second attention in any layer."""
    policy = PipelinePolicy(tiny_sd3(large=True), SD3(), replace(TINY, guidance_scale=guidance, negative_prompt="blurry"))
    pipe = tiny_sd3(large=True)
    pipe.set_progress_bar_config(disable=True)
    call = dict(height=16, width=16, num_inference_steps=STEPS, max_sequence_length=TINY.max_sequence_length, output_type="pt")
    expected = pipe(TEXTS, latents=noise_of(policy), guidance_scale=guidance, negative_prompt=["blurry"] * 2, **call).images
    torch.testing.assert_close(picture(policy), expected, atol=2e-6, rtol=0)
    assert not any("attn2" in name for name in policy.trainable())


def test_the_image_decoder_may_be_narrow(family):
    make, *_ = family
    exact, narrow = make(), make(replace(TINY, decode_dtype="bfloat16"))
    images = narrow.decode(noise_of(narrow))
    assert images.dtype == torch.float32 and {p.dtype for p in narrow.pipe.vae.parameters()} == {torch.bfloat16}
    assert 0 < (images - exact.decode(noise_of(exact))).abs().max() < 0.02
    with pytest.raises(ConfigError, match="decode_dtype = 'int8'"):
        replace(TINY, decode_dtype="int8")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_blocks_compute_the_same(dtype):
    """Sampling, the reference and a gradient under checkpointing, where the blocks run again in the backward pass."""
    found = []
    for backend in ("", "eager"):
        policy = filled(tiny_flux_policy, dtype=dtype, compile=backend, gradient_checkpointing=True)
        condition, told = policy.encode(PROMPTS), torch.full((2,), 600.0)
        with policy.frozen():
            sampled = policy.velocity(noise_of(policy), told, condition)
        with policy.reference():
            reference = policy.velocity(noise_of(policy), told, condition)
        for count in (2, 1, 2):  # a smaller last batch, then the usual one again
            policy.velocity(noise_of(policy, count), told[:count], condition.take(torch.arange(count))).square().sum().backward()
        gradients = [p.grad for p in policy.trainable().values() if p.grad is not None]
        found.append((sampled, reference, *gradients))
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-6, rtol=1e-5)
    with pytest.raises(ConfigError, match="compile = 'nothing'"):
        compile_blocks(None, "nothing")


def test_a_velocity_reads_nothing_back_from_the_device(family, monkeypatch):
    """On a GPU that would wait for all work under way. The numbers of a condition are known where it was made."""
    policy = family[0](replace(TINY, guidance_scale=2.0))
    condition = policy.encode(PROMPTS).repeat(2).take(torch.tensor([0, 3, 2]))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: pytest.fail("read back"))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("read back"))
    with torch.no_grad():
        policy.velocity(noise_of(policy, 3), torch.full((3,), 600.0), condition)


def test_conditions_of_several_calls_may_be_joined(family):
    policy = family[0]()
    early, late = policy.encode(PROMPTS[:1]), policy.encode(PROMPTS[1:])
    both = policy.encode(PROMPTS)
    joined = type(early).cat([early, late])
    assert joined.keys == early.keys | late.keys
    with torch.no_grad():
        found = [policy.velocity(noise_of(policy), torch.full((2,), 600.0), told) for told in (joined, both)]
    assert torch.equal(*found)


def test_rows_on_the_device_have_the_networks_precision(family):
    policy = family[0](replace(TINY, dtype="bfloat16"))
    rows = policy.prompts.rows(policy.encode(PROMPTS).tensors["prompt"])
    assert {tensor.dtype for tensor in rows.values()} == {torch.bfloat16}


def encoders(policy):
    return [getattr(policy.pipe, name) for name in policy.family.encoders]


def test_encoders_wait_in_main_memory_also_after_a_failure(family, monkeypatch):
    policy = family[0]()
    policy.encode(PROMPTS)
    for encoder in encoders(policy):
        assert {p.device.type for p in encoder.parameters()} == {"cpu"}
        assert not any(p.requires_grad or p.is_meta for p in encoder.parameters())
    visits = []
    for encoder in encoders(policy):
        monkeypatch.setattr(encoder, "to", lambda place, visits=visits: visits.append(str(place)))
    monkeypatch.setattr(type(policy.family), "encode", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy.encode([Prompt("new")])
    count = len(encoders(policy))
    assert visits[count:] == ["cpu"] * count


def test_a_warm_cache_needs_no_encoders(family):
    make, *_ = family
    policy, usual = make(), make()
    policy.warm(PROMPTS)
    assert policy.prompts.misses == 3 and len(policy.prompts) == 3  # and the negative prompt
    gone = [weakref.ref(encoder) for encoder in encoders(policy)]
    policy.release_encoders()
    gc.collect()
    assert all(encoder() is None for encoder in gone)
    time = torch.full((2,), 600.0)
    found = [p.velocity(noise_of(p), time, p.encode(PROMPTS)).detach() for p in (policy, usual)]
    assert torch.equal(*found) and policy.prompts.misses == 3
    with pytest.raises(ConfigError, match="'another' is new, but the text encoders were released"):
        policy.encode([Prompt("another")])


def test_only_the_latest_prompts_are_on_the_device(family):
    policy = family[0]()
    for start in range(0, 6, 2):
        policy.encode([Prompt(f"number {start}"), Prompt(f"number {start + 1}")])
    policy.warm([Prompt(f"word {n}") for n in range(9)])
    assert len(policy.prompts._table["words"]) == 3


def test_compiled_blocks_are_not_compiled_again_as_a_whole(monkeypatch):
    from flowrl.distributed import Distributed
    from flowrl.training.optim import prepare_policy

    monkeypatch.setattr("flowrl.training.optim._require_compiler", lambda: None)  # nothing is called, so nothing is compiled
    blocks, plain = filled(tiny_flux_policy, compile="eager"), filled(tiny_flux_policy)
    for policy in (blocks, plain):
        prepare_policy(policy, Distributed(), compiled=True)
    assert blocks.transformer._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in blocks.transformer.transformer_blocks)
    assert plain.transformer._compiled_call_impl is not None


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_sd3_policy, tiny_flux_policy])
def test_batches_of_many_sizes_are_three_compilations_of_a_block(make):
    """PyTorch compiles a block for the first size, again with the size as a variable, and for a single row; other sizes take the
    second version, so that padding to a few sizes would save no compilation. Both networks have two kinds of blocks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    policy = filled(make, compile="eager")
    timestep, condition = policy.schedule(4).network_timesteps[1], policy.encode(PROMPTS[:1])
    for rows in (12, 5, 7, 3, 9, 11, 2, 1, 12, 10):
        with torch.no_grad():
            policy.velocity(torch.zeros(rows, *policy.latent_shape), timestep.expand(rows), condition.repeat(rows))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * 3
