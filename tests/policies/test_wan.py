"""What is particular to Wan: videos, zero-padded prompts, layers in float32, the Euler grid of
another scheduler's shift.
"""

import pytest
import torch
from family_cases import CASES, PROMPTS, TEXTS, draw, noise_of

from flowrl.core.errors import ConfigError
from flowrl.testing.tiny import tiny_wan

WAN = CASES["wan"]


def test_a_prompt_has_zeros_up_to_its_full_length_which_is_part_of_the_model():
    """512 tokens by default, as the pipeline's call has, not the 226 of its `encode_prompt`;
    another length is another video.
    """
    default, short = WAN.policy(max_sequence_length=0), WAN.policy()
    words, few = (
        p.prompts.rows(p.encode(PROMPTS).tensors["prompt"])["words"] for p in (default, short)
    )
    assert words.shape == (2, 512, 32) and few.shape == (2, 24, 32)
    used = words.abs().sum(-1) > 0
    assert used.sum(1).tolist() == [len(default.pipe.tokenizer(text).input_ids) for text in TEXTS]
    torch.testing.assert_close(words[:, :24], few, atol=1e-6, rtol=0)
    plain = WAN.picture(tiny_wan(), noise_of(default), max_sequence_length=512)
    torch.testing.assert_close(draw(default), plain, atol=5e-6, rtol=0)
    assert (draw(default) - draw(short)).abs().max() > 1e-3


def test_layers_that_diffusers_keeps_in_float32_stay_there(tmp_path):
    """Norms, modulation, time embedding and rotary frequencies, as when diffusers loads the model
    in bfloat16.
    """
    from diffusers import WanTransformer3DModel

    tiny_wan().transformer.save_pretrained(tmp_path)
    plain = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    policy = WAN.policy(dtype="bfloat16", tuning="nothing")
    for named in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(policy.transformer, named)()), dict(getattr(plain, named)())
        assert {n: t.dtype for n, t in mine.items()} == {n: t.dtype for n, t in theirs.items()}
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert {p.dtype for p in plain.parameters()} == {torch.float32, torch.bfloat16}


def test_a_unipc_scheduler_gives_its_shift_and_not_its_grid():
    """As in many copies of the model on the Hub: the Euler grid has the same shift, and other
    times.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    pipe = tiny_wan()
    pipe.scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    times = WAN.policy(pipe).schedule(10).times
    euler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    for scheduler in (euler, pipe.scheduler):
        scheduler.set_timesteps(10)
    assert torch.equal(times, euler.sigmas) and (times - pipe.scheduler.sigmas).abs().max() > 0.1
    pipe.scheduler = UniPCMultistepScheduler()
    with pytest.raises(
        ConfigError, match=r"scheduler = 'UniPCMultistepScheduler' .*flow sigmas and a flow_shift"
    ):
        WAN.policy(pipe)


def test_other_lengths_and_wan_2_2_are_refused():
    assert [WAN.policy(num_frames=count).latent_shape[1] for count in (1, 5, 9)] == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"num_frames = 6 .* 1 more than a multiple of 4"):
        WAN.policy(num_frames=6)
    second = tiny_wan()
    second.register_modules(transformer_2=tiny_wan().transformer)
    with pytest.raises(ConfigError, match=r"'Wan 2\.2' is not allowed"):
        WAN.policy(second)
