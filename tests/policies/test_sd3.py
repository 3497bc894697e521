"""What is particular to Stable Diffusion 3: three encoders of which T5 may be absent, and the
scheduler's two kinds of shift.
"""

import pytest
import torch
from family_cases import CASES, draw, noise_of

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.policies.load import load_policy
from flowrl.testing.tiny import TINY, tiny_sd3

SD3 = CASES["sd3"]


@pytest.mark.parametrize(("height", "width", "steps"), [(32, 16, 7), (16, 16, 40)])
def test_the_grid_with_a_dynamic_shift_is_the_pipelines_own(height, width, steps):
    pipe = tiny_sd3()
    pipe.scheduler = type(pipe.scheduler)(
        use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64
    )
    policy = SD3.policy(pipe, height=height, width=width)
    schedule = policy.schedule(steps)
    SD3.picture(pipe, noise_of(policy), steps=steps, height=height, width=width)
    assert torch.equal(schedule.times, pipe.scheduler.sigmas)
    assert torch.equal(schedule.network_timesteps, pipe.scheduler.timesteps)


def test_t5_may_be_left_out():
    pipe = tiny_sd3()
    pipe.text_encoder_3 = pipe.tokenizer_3 = None
    policy = SD3.policy(pipe)
    rows = policy.prompts.rows(policy.encode([Prompt("a dog")]).tensors["prompt"])
    assert rows["words"].shape[1] == 40 + 24 and not bool(rows["words"][0, 40:].any())


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_large_sd3_draws_the_plain_pipelines_pictures(guidance):
    """SD3.5-Large: no second attention in any layer."""
    policy = SD3.policy(tiny_sd3(large=True), guidance_scale=guidance, negative_prompt="blurry")
    expected = SD3.picture(tiny_sd3(large=True), noise_of(policy), guidance)
    torch.testing.assert_close(draw(policy), expected, atol=2e-6, rtol=0)
    assert not any("attn2" in name for name in policy.trainable())


def test_a_decoder_of_other_channels_is_refused_when_the_model_is_loaded(tmp_path):
    pipe = tiny_sd3()
    config = {**pipe.vae.config, "out_channels": 4}
    pipe.vae = type(pipe.vae).from_config(
        {name: value for name, value in config.items() if not name.startswith("_")}
    )
    pipe.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^model: channels of the image decoder \(vae\) = 4 .* allowed: 3, red"
    ):
        load_policy(str(tmp_path), TINY)


def layers_with_lora(**changes):
    names = [name.split(".lora_")[0] for name in SD3.policy(**changes).trainable()]
    return {name.removeprefix("transformer_blocks.") for name in names}


def test_the_lora_is_on_the_joint_attention():
    """Of the image and the text stream, not on SD3.5-Medium's second attention; the last layer's
    text leads nowhere.
    """
    both = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    joint = {f"{layer}.attn.{name}" for layer in (0, 1) for name in both} | {"0.attn.to_add_out"}
    assert layers_with_lora() == joint
    few = {"0.attn.to_q", "0.attn2.to_q", "0.attn2.to_out.0", "1.attn.to_q"}
    assert layers_with_lora(lora_targets=("to_q", "attn2.to_out.0")) == few


def test_other_sizes_and_schedulers_are_refused():
    from diffusers import FlowMatchHeunDiscreteScheduler

    with pytest.raises(ConfigError, match=r"height = 68 .* a multiple of 4, at most 64"):
        SD3.policy(height=68)
    pipe = tiny_sd3()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    with pytest.raises(ConfigError, match="scheduler = 'FlowMatchHeunDiscreteScheduler'"):
        SD3.policy(pipe)
