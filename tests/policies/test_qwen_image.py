"""What is particular to Qwen-Image: guidance with the prompt's norm, padded prompts, a grid that
ends at .02.
"""

import pytest
import torch
from family_cases import CASES, PROMPTS, TIME, noise_of, velocity

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
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


def test_padding_changes_nothing_and_is_masked():
    """A prompt beside a longer one, and alone; with wrong embeddings in place of the padding; and
    without the mask.
    """
    policy = QWEN.policy()
    noise, rows = noise_of(policy), policy.prompts.rows(policy.encode(PROMPTS).tensors["prompt"])
    assert rows["words"].shape == (2, 19, 32) and rows["mask"].sum(1).tolist() == [19, 9]

    @torch.no_grad()
    def second(**changed):
        given = {name: tensor[1:] for name, tensor in {**rows, **changed}.items()}
        network, size = policy.transformer, policy.latent_size
        return policy.family.velocity(network, noise[1:], TIME[1:], given, size)

    alone = second(**{name: tensor[:, :9] for name, tensor in rows.items()})
    wrong = torch.where(rows["mask"].unsqueeze(-1), rows["words"], 3.0)
    for result in (second(), velocity(policy)[1:].detach(), second(words=wrong)):
        torch.testing.assert_close(result, alone, atol=2e-6, rtol=0)
    assert (second(mask=torch.ones_like(rows["mask"])) - alone).abs().max() > 1e-3


def test_the_template_is_dropped_and_the_prompt_is_what_remains():
    policy = QWEN.policy()
    tokenizer, pipe = policy.pipe.tokenizer, policy.pipe
    tokens = tokenizer.tokenize(pipe.prompt_template_encode.format("a dog"))
    tokens = tokens[pipe.prompt_template_encode_start_idx :]
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
    assert policy.schedule(1).times.tolist() == [1.0, 0.0]
    zero, steps = torch.zeros(10, *policy.latent_shape), torch.arange(10)
    std = FlowSDE(1.2).transition(zero, zero, schedule, steps).std
    assert 0 < std[9] < 0.15 * std[8]


def test_a_distilled_transformer_is_refused():
    pipe = QWEN.make()
    pipe.transformer.register_to_config(guidance_embeds=True)
    with pytest.raises(ConfigError, match="guidance_embeds of the transformer = True"):
        QWEN.policy(pipe)
