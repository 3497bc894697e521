"""The how-to's example of a further family, run as it stands in docs/model-families.md."""

import re

import torch
from family_cases import STEPS, Case, draw, noise_of, trainer_of
from flowrl_testing import policy_contract, tiny
from loading import ROOT
from torch.testing import assert_close

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

    with tiny._seeded(0):
        names = tiny._tokenizer(clip=False)
        sizes = dict(sample_size=8, in_channels=4, out_channels=4, pos_embed_max_size=64)
        sizes |= dict(attention_head_dim=16, num_attention_heads=2)
        sizes |= dict.fromkeys(("joint_attention_dim", "caption_projection_dim"), 32)
        sizes |= dict.fromkeys(("num_mmdit_layers", "num_single_dit_layers"), 1)
        text = dict(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, pad_token_id=0)
        encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(names), **text)).eval()
        network, scheduler = AuraFlowTransformer2DModel(**sizes), tiny._scheduler(shift=1.73)
        return AuraFlowPipeline(names, encoder, tiny._decoder(4), network, scheduler)


AURA = Case(tiny_aura_flow, documented_family(), "guidance_scale", {"negative_prompt": None})

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
