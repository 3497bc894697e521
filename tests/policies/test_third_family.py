"""The how-to's example of a further family, run as it stands in docs/model-families.md."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowrl.core.types import Prompt
from flowrl.methods import flow_grpo
from flowrl.policies.pipeline import PipelinePolicy
from flowrl.rewards import FunctionReward
from flowrl.rollout import Usage, integrate
from flowrl.testing import policy_contract, tiny
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer

DOCUMENT = Path(__file__).parents[2] / "docs" / "model-families.md"
TEXTS = ["a dog", "three red circles"]


def documented_family():
    """The class AuraFlow of the page."""
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
        if "class AuraFlow" in block
    ]
    names = {"__name__": "my_families"}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names["AuraFlow"]()


def tiny_aura_flow():
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel
    from transformers import UMT5Config, UMT5EncoderModel

    with tiny._seeded(0):
        names = tiny._tokenizer(clip=False)
        transformer = AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            out_channels=4,
            pos_embed_max_size=64,
        )
        config = UMT5Config(
            vocab_size=len(names),
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            pad_token_id=0,
            eos_token_id=1,
        )
        return AuraFlowPipeline(
            names,
            UMT5EncoderModel(config).eval(),
            tiny._decoder(4),
            transformer,
            tiny._scheduler(shift=1.73),
        )


def picture(pipe, noise, guidance=1.0):
    pipe.set_progress_bar_config(disable=True)
    call = dict(
        height=16, width=16, num_inference_steps=4, max_sequence_length=24, output_type="pt"
    )
    return pipe(TEXTS, latents=noise, guidance_scale=guidance, **call).images


def draw(policy, noise):
    condition = policy.encode([Prompt(text) for text in TEXTS])
    return policy.decode(integrate(policy, policy.schedule(4), condition, noise, Usage()))


test_protocol = policy_contract(
    lambda: PipelinePolicy(tiny_aura_flow(), documented_family(), tiny.TINY)
)


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_samples_and_grid_are_the_pipelines_own(guidance):
    policy = PipelinePolicy(
        tiny_aura_flow(), documented_family(), replace(tiny.TINY, guidance_scale=guidance)
    )
    noise = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    pipe = tiny_aura_flow()
    plain = picture(pipe, noise, guidance)
    assert torch.equal(policy.schedule(4).times, pipe.scheduler.sigmas)
    torch.testing.assert_close(draw(policy, noise), plain, atol=5e-6, rtol=0)


def test_plain_diffusers_draws_the_same_picture_after_an_update(tmp_path):
    policy = PipelinePolicy(
        tiny_aura_flow(), documented_family(), replace(tiny.TINY, lora_alpha=128.0)
    )
    noise = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    before = draw(policy, noise)
    reward = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)))
    config = preset("tiny").apply(groups=2, group_size=3, learning_rate=3e-2)
    Trainer(policy, flow_grpo(), reward, [Prompt(text) for text in TEXTS], config).iteration()
    policy.save(tmp_path / "lora")
    plain = tiny_aura_flow()
    plain.load_lora_weights(tmp_path / "lora")
    torch.testing.assert_close(picture(plain, noise), draw(policy, noise), atol=5e-6, rtol=0)
    assert (draw(policy, noise) - before).abs().max() > 1e-4
