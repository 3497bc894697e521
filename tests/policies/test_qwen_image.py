"""What is particular to Qwen-Image: guidance with the prompt's norm, padded prompts, a grid that
ends at .02.
"""

import pytest
import torch
from all_but_last import AllButLast
from family_cases import CASES, PROMPTS, TIME, noise_of, velocity

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.policies import QwenImage
from flowrl.samplers import FlowSDE

QWEN = CASES["qwen-image"]


def test_guidance_has_the_norm_of_the_prompts_velocity_in_every_token():
    policy = QWEN.policy(guidance_scale=4.0, negative_prompt=" ")
    with torch.no_grad():
        guided = velocity(policy)
        with policy.guided(1.0):
            towards = velocity(policy)
            away = policy.velocity(noise_of(policy), TIME, policy.encode([Prompt(" ")] * 2))
    torch.testing.assert_close(guided.norm(dim=-1), towards.norm(dim=-1), atol=1e-5, rtol=1e-5)
    combined = away + 4.0 * (towards - away)
    assert (guided - combined).norm() > 5e-3 * combined.norm()  # plain guidance is something else
    torch.testing.assert_close(
        torch.cosine_similarity(guided, combined, dim=-1), torch.ones(2, 16), atol=1e-5, rtol=0
    )


def test_gradients_flow_through_the_norms():
    """Of both branches: the derivative by hand, d(c |u|/|c|) . w with c = a + s (u - a)."""
    generator, scale = torch.Generator().manual_seed(0), 4.0
    away, towards, weight = (
        torch.randn(3, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    away.requires_grad_()
    towards.requires_grad_()
    (QwenImage().guide(away, towards, scale) * weight).sum().backward()
    with torch.no_grad():
        c = away + scale * (towards - away)
        c_norm, u_norm = c.norm(dim=-1, keepdim=True), towards.norm(dim=-1, keepdim=True)
        along = (c * weight).sum(-1, keepdim=True)
        to_c = u_norm / c_norm * (weight - c * along / c_norm**2)
        by_hand = scale * to_c + along / c_norm * towards / u_norm
    torch.testing.assert_close(towards.grad, by_hand)
    torch.testing.assert_close(away.grad, (1 - scale) * to_c)


def test_padding_changes_nothing_and_is_masked():
    """A prompt beside a longer one, and alone; with wrong embeddings in place of the padding; and
    without the mask.
    """
    policy = QWEN.policy()
    noise, rows = noise_of(policy), policy.prompts.rows(policy.encode(PROMPTS).tensors["prompt"])
    assert rows["words"].shape == (2, 19, 32) and rows["mask"].sum(1).tolist() == [19, 9]

    def second(**changed):
        given = {name: tensor[1:] for name, tensor in {**rows, **changed}.items()}
        with torch.no_grad():
            return policy.family.velocity(
                policy.transformer, noise[1:], TIME[1:], given, policy.latent_size
            )

    alone = second(**{name: tensor[:, :9] for name, tensor in rows.items()})
    torch.testing.assert_close(second(), alone, atol=2e-6, rtol=0)
    torch.testing.assert_close(velocity(policy)[1:].detach(), alone, atol=2e-6, rtol=0)
    wrong = torch.where(rows["mask"].unsqueeze(-1), rows["words"], 3.0)
    torch.testing.assert_close(second(words=wrong), alone, atol=2e-6, rtol=0)
    assert (second(mask=torch.ones_like(rows["mask"])) - alone).abs().max() > 1e-3


def test_a_longer_prompt_pads_the_embeddings_that_are_there():
    """In bfloat16 too, where masks stay masks."""
    policy = QWEN.policy(dtype="bfloat16")
    early, other = (
        policy.encode(PROMPTS[1:]),
        policy.encode([Prompt("a very long sentence of many words")]),
    )
    rows = policy.prompts.rows(torch.cat([early.tensors["prompt"], other.tensors["prompt"]]))
    assert rows["words"].shape == (2, 24, 32) and rows["words"].dtype == torch.bfloat16
    assert rows["mask"].dtype == torch.bool and rows["mask"].sum(1).tolist() == [9, 24]


def test_the_template_is_dropped_and_the_prompt_is_what_remains():
    policy = QWEN.policy()
    tokenizer, pipe = policy.pipe.tokenizer, policy.pipe
    tokens = tokenizer.tokenize(pipe.prompt_template_encode.format("a dog"))[
        pipe.prompt_template_encode_start_idx :
    ]
    words = policy.prompts.rows(policy.encode(PROMPTS[1:]).tensors["prompt"])["words"]
    assert words.shape == (1, len(tokens), 32)
    assert tokenizer.convert_tokens_to_string(tokens).startswith("a dog<|im_end|>")


def test_the_last_step_has_little_noise():
    """From t = .02 to 0: with noise it would have 42% of the squared gradient norm of Flow-SDE
    (benchmarks/translation.py).
    """
    policy = QWEN.policy(height=64, width=64)
    schedule = policy.schedule(10)
    assert schedule.times[-2:].tolist() == pytest.approx([0.02, 0.0])
    assert policy.schedule(1).times.tolist() == [1.0, 0.0] and policy.schedule(2).times[
        1
    ] == pytest.approx(0.02)
    zero, steps = torch.zeros(10, *policy.latent_shape), torch.arange(10)
    every, inner = (
        sampler.transition(zero, zero, schedule, steps).std
        for sampler in (FlowSDE(1.2), AllButLast(FlowSDE(1.2)))
    )
    assert 0 < every[9] < 0.15 * every[8] and inner[9] == 0 < inner[8]


def test_a_distilled_transformer_is_refused():
    pipe = QWEN.make()
    pipe.transformer.register_to_config(guidance_embeds=True)
    with pytest.raises(ConfigError, match="guidance_embeds of the transformer = True"):
        QWEN.policy(pipe)
