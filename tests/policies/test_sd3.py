"""What is particular to Stable Diffusion 3: three encoders of which T5 may be absent, and the scheduler's two kinds of shift."""

from dataclasses import replace

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.policies.load import load_policy
from flowrl.policies.pipeline import PipelinePolicy
from flowrl.policies.sd3 import SD3
from flowrl.testing.tiny import TINY, tiny_sd3, tiny_sd3_policy
from flowrl.types import Prompt


def grid_of(pipe, **call):
    """The sigmas that the plain pipeline walks along."""
    pipe.set_progress_bar_config(disable=True)
    pipe("a dog", output_type="latent", guidance_scale=1.0, max_sequence_length=TINY.max_sequence_length, **call)
    return pipe.scheduler.sigmas, pipe.scheduler.timesteps


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("height", "width", "steps"), [(16, 16, 10), (32, 16, 7), (16, 16, 40)])
def test_the_grid_is_the_pipelines_own(dynamic, height, width, steps):
    pipe = tiny_sd3()
    if dynamic:
        pipe.scheduler = type(pipe.scheduler)(use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64)
    policy = PipelinePolicy(pipe, SD3(), replace(TINY, height=height, width=width))
    schedule = policy.schedule(steps)
    sigmas, timesteps = grid_of(pipe, height=height, width=width, num_inference_steps=steps)
    assert torch.equal(schedule.times, sigmas) and torch.equal(schedule.network_timesteps, timesteps)


def test_the_shift_of_sd35_is_in_the_grid():
    """sigma = s u / (1 + (s - 1) u) with s = 3: u = 1/2 becomes 3/4."""
    times = tiny_sd3_policy().schedule(1000).times
    assert float((times - 0.75).abs().min()) < 1e-3 and float(times[0]) == 1.0 and float(times[-1]) == 0.0
    assert float((times > 0.5).float().mean()) > 0.7


def test_t5_may_be_left_out():
    pipe = tiny_sd3()
    pipe.text_encoder_3 = pipe.tokenizer_3 = None
    policy = PipelinePolicy(pipe, SD3(), TINY)
    rows = policy.prompts.rows(policy.encode([Prompt("a dog")]).tensors["prompt"])
    assert rows["words"].shape[1] == 40 + TINY.max_sequence_length and not bool(rows["words"][0, 40:].any())


def test_a_decoder_of_other_channels_is_refused_when_the_model_is_loaded(tmp_path):
    pipe = tiny_sd3()
    config = {**pipe.vae.config, "out_channels": 4}
    pipe.vae = type(pipe.vae).from_config({name: value for name, value in config.items() if not name.startswith("_")})
    pipe.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^model: channels of the image decoder \(vae\) = 4 .* allowed: 3, red"):
        load_policy(str(tmp_path), TINY)


def test_pictures_may_be_oblong_and_sizes_are_checked():
    policy = tiny_sd3_policy(replace(TINY, height=32, width=16))
    assert policy.latent_shape == (4, 16, 8)
    latents = torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    velocity = policy.velocity(latents, torch.tensor([500.0]), policy.encode([Prompt("a dog")]))
    assert velocity.shape == latents.shape and policy.decode(latents).shape == (1, 3, 32, 16)
    with pytest.raises(ConfigError, match=r"width = 18 .* a multiple of 4, at most 64"):
        tiny_sd3_policy(replace(TINY, width=18))
    with pytest.raises(ConfigError, match="height = 68"):
        tiny_sd3_policy(replace(TINY, height=68))


def layers_with_lora(targets=()):
    found = {}
    for name in tiny_sd3_policy(replace(TINY, lora_targets=targets)).trainable():
        _, layer, *path = name.split(".lora_")[0].split(".")
        found.setdefault((layer, path[0]), set()).add(".".join(path[1:]))
    return found


def test_the_lora_is_on_the_joint_attention():
    """Of the image and the text stream, not on SD3.5-Medium's second attention; the last layer's text leads nowhere."""
    image, text = {"to_q", "to_k", "to_v", "to_out.0"}, {"add_q_proj", "add_k_proj", "add_v_proj"}
    assert layers_with_lora() == {("0", "attn"): image | text | {"to_add_out"}, ("1", "attn"): image | text}
    assert layers_with_lora(("to_q", "attn2.to_out.0")) == {
        ("0", "attn"): {"to_q"}, ("0", "attn2"): {"to_q", "to_out.0"}, ("1", "attn"): {"to_q"},
    }  # fmt: skip


def test_other_schedulers_are_refused():
    from diffusers import FlowMatchHeunDiscreteScheduler

    pipe = tiny_sd3()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    with pytest.raises(ConfigError, match="scheduler = 'FlowMatchHeunDiscreteScheduler'"):
        PipelinePolicy(pipe, SD3(), TINY)
