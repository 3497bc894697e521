"""What is particular to one model family: grids, guidance, prompts, precisions, refusals; and the
how-to's example of a further family, run as it stands in docs/model-families.md.
"""

import re
from dataclasses import replace

import pytest
import torch
from family_cases import (
    CASES,
    PROMPTS,
    STEPS,
    TEXTS,
    TIME,
    Case,
    draw,
    noise_of,
    trainer_of,
    velocity,
)
from loading import ROOT
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.policies import Flux
from flowrl.run.models.load import load_policy
from flowrl.testing import policy_contract, tiny
from flowrl.testing.tiny import TINY, tiny_flux, tiny_sd3, tiny_wan

SD3, FLUX, QWEN, WAN = (CASES[name] for name in ("sd3", "flux", "qwen-image", "wan"))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (SD3, dict(use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64)),
        (FLUX, dict(use_dynamic_shifting=False, shift=1.0)),  # FLUX.1-schnell
    ],
    ids=["sd3", "flux"],
)
def test_grids_of_other_schedulers_are_the_pipelines_own(case, options):
    pipe = case.make()
    pipe.scheduler = type(pipe.scheduler)(**options)
    policy = case.policy(pipe, resolution=32, width=16)
    schedule = policy.schedule(7)
    case.picture(pipe, noise_of(policy), steps=7, height=32, width=16)
    assert torch.equal(schedule.times, pipe.scheduler.sigmas)
    assert torch.equal(schedule.network_timesteps, pipe.scheduler.timesteps)


def test_the_distilled_guidance_of_flux_is_an_input_if_the_network_has_it():
    weak, strong = (replace(FLUX, family=Flux(distilled_guidance=scale)) for scale in (1.0, 7.0))
    policy = strong.policy()
    without = (c.policy(tiny_flux(distilled=False)) for c in (weak, strong))
    plain = FLUX.picture(tiny_flux(), noise_of(policy), guidance_scale=7.0)
    assert_close(draw(policy), plain, atol=2e-6, rtol=0)
    assert (draw(weak.policy()) - plain).abs().max() > 1e-4
    assert torch.equal(*map(velocity, without))


def test_sd3_without_t5():
    pipe = tiny_sd3()
    pipe.text_encoder_3 = pipe.tokenizer_3 = None
    policy = SD3.policy(pipe)
    rows = policy.prompts.rows(policy.encode([Prompt("a dog")]).tensors["prompt"])
    assert rows["words"].shape[1] == 40 + 24 and not rows["words"][0, 40:].any()


def test_padding_changes_nothing_and_is_masked():
    """A prompt of Qwen-Image beside a longer one, and alone; with wrong embeddings in place of the
    padding; and without the mask. The prompt is what remains behind the pipeline's template.
    """
    policy = QWEN.policy()
    noise, rows = noise_of(policy), policy.prompts.rows(policy.encode(PROMPTS).tensors["prompt"])
    assert rows["words"].shape == (2, 19, 32) and rows["mask"].sum(1).tolist() == [19, 9]
    pipe = policy.pipe
    tokens = pipe.tokenizer.tokenize(pipe.prompt_template_encode.format(TEXTS[1]))
    assert len(tokens[pipe.prompt_template_encode_start_idx :]) == 9

    @torch.no_grad()
    def second(**changed):
        given = {name: tensor[1:] for name, tensor in {**rows, **changed}.items()}
        network, size = policy.transformer, policy.latent_size
        return policy.family.velocity(network, noise[1:], TIME[1:], given, size)

    alone = second(**{name: tensor[:, :9] for name, tensor in rows.items()})
    wrong = torch.where(rows["mask"].unsqueeze(-1), rows["words"], 3.0)
    for result in (second(), velocity(policy)[1:].detach(), second(words=wrong)):
        assert_close(result, alone, atol=2e-6, rtol=0)
    assert (second(mask=torch.ones_like(rows["mask"])) - alone).abs().max() > 1e-3


def test_a_prompt_of_wan_has_zeros_up_to_its_full_length_which_is_part_of_the_model():
    """512 tokens by default, as the pipeline's call has, not the 226 of its `encode_prompt`."""
    policy = WAN.policy(max_sequence_length=None)
    words = policy.prompts.rows(policy.encode(PROMPTS).tensors["prompt"])["words"]
    tokens = [len(policy.pipe.tokenizer(text).input_ids) for text in TEXTS]
    assert words.shape == (2, 512, 32) and (words.abs().sum(-1) > 0).sum(1).tolist() == tokens
    plain = WAN.picture(tiny_wan(), noise_of(policy), max_sequence_length=512)
    assert_close(draw(policy), plain, atol=5e-6, rtol=0)


def test_layers_that_diffusers_keeps_in_float32_stay_there(tmp_path):
    """Wan's norms, modulation, time embedding and rotary frequencies, as when diffusers loads the
    model in bfloat16.
    """
    from diffusers import WanTransformer3DModel

    tiny_wan().transformer.save_pretrained(tmp_path)
    plain = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    policy = WAN.policy(dtype="bfloat16", fixed=True)
    for named in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(policy.transformer, named)()), dict(getattr(plain, named)())
        assert {n: t.dtype for n, t in mine.items()} == {n: t.dtype for n, t in theirs.items()}
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert {p.dtype for p in plain.parameters()} == {torch.float32, torch.bfloat16}


def test_of_a_unipc_scheduler_only_the_shift_is_used():
    """As in many copies of Wan on the Hub: the Euler grid has the same shift, and other times."""
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    pipe = tiny_wan()
    pipe.scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    times, euler = WAN.policy(pipe).schedule(10).times, FlowMatchEulerDiscreteScheduler(shift=5.0)
    for scheduler in (euler, pipe.scheduler):
        scheduler.set_timesteps(10)
    assert torch.equal(times, euler.sigmas) and (times - pipe.scheduler.sigmas).abs().max() > 0.1
    pipe.scheduler = UniPCMultistepScheduler()
    with pytest.raises(ConfigError, match=r"'UniPCMultistepScheduler' .*flow sigmas"):
        WAN.policy(pipe)


def test_other_lengths_and_other_models_are_refused(tmp_path):
    assert [WAN.policy(num_frames=count).latent_shape[1] for count in (1, 5, 9)] == [1, 2, 3]
    second, distilled, pipe = tiny_wan(), QWEN.make(), tiny_sd3()
    second.register_modules(transformer_2=tiny_wan().transformer)
    distilled.transformer.register_to_config(guidance_embeds=True)
    config = {name: value for name, value in pipe.vae.config.items() if name[0] != "_"}
    pipe.vae = type(pipe.vae).from_config(config | {"out_channels": 4})
    pipe.save_pretrained(tmp_path)
    for make, message in (
        (lambda: WAN.policy(second), "boundary_ratio of the model = None"),
        (lambda: QWEN.policy(distilled), "guidance_embeds of the transformer = True"),
        (lambda: load_policy(str(tmp_path), TINY), "image decoder = 4 .* allowed: 3, red"),
        (lambda: Flux(distilled_guidance=-1.0), "distilled_guidance = -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


# The example of docs/model-families.md

DOCUMENT = ROOT / "docs" / "model-families.md"


def documented_family():
    """The class AuraFlow of the page."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    (code,) = [block for block in blocks if "class AuraFlow" in block]
    names = {"__name__": "my_families"}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names["AuraFlow"]()


def tiny_aura_flow():
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel
    from transformers import UMT5Config, UMT5EncoderModel

    with tiny.seeded(0):
        names = tiny.make_tokenizer(clip=False)
        sizes = dict(sample_size=8, in_channels=4, out_channels=4, pos_embed_max_size=64)
        sizes |= dict(attention_head_dim=16, num_attention_heads=2)
        sizes |= dict.fromkeys(("joint_attention_dim", "caption_projection_dim"), 32)
        sizes |= dict.fromkeys(("num_mmdit_layers", "num_single_dit_layers"), 1)
        text = dict(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, pad_token_id=0)
        encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(names), **text)).eval()
        network, scheduler = AuraFlowTransformer2DModel(**sizes), tiny.make_scheduler(shift=1.73)
        return AuraFlowPipeline(names, encoder, tiny.make_decoder(4), network, scheduler)


AURA = Case(tiny_aura_flow, documented_family(), {"negative_prompt": None})

test_protocol = policy_contract(AURA.policy)


def test_samples_and_grid_are_the_pipelines_own_before_and_after_an_update(tmp_path):
    policy, pipe = AURA.policy(guidance_scale=3.5, lora_alpha=128.0), AURA.make()
    before = AURA.picture(pipe, noise_of(policy), 3.5)
    assert torch.equal(policy.schedule(STEPS).times, pipe.scheduler.sigmas)
    assert_close(draw(policy), before, atol=5e-6, rtol=0)
    trainer_of(policy, learning_rate=3e-2).iteration()
    policy.save(tmp_path / "lora")
    pipe.load_lora_weights(tmp_path / "lora")
    after = AURA.picture(pipe, noise_of(policy), 3.5)
    assert_close(after, draw(policy), atol=5e-6, rtol=0)
    assert (after - before).abs().max() > 1e-4
