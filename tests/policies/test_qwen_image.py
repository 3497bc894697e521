"""What is particular to Qwen-Image: guidance with the prompt's norm, padded prompts, a grid that ends at .02, a video decoder."""

from dataclasses import replace

import pytest
import torch
from all_but_last import AllButLast

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.flow import log_prob
from flowrl.policies import LORA_TARGETS, PipelinePolicy, QwenImage
from flowrl.registry import build
from flowrl.rollout import Groups, Usage, integrate, rollout
from flowrl.samplers import FlowSDE
from flowrl.testing import policy_contract
from flowrl.testing.tiny import TINY, tiny_qwen_image, tiny_qwen_image_policy
from flowrl.training.build import trained_policy
from flowrl.training.results import load_run
from flowrl.types import Prompt

TEXTS = ["three red circles", "a dog"]
PROMPTS = [Prompt(text) for text in TEXTS]

test_contract = policy_contract(tiny_qwen_image_policy)
test_contract_with_guidance = policy_contract(
    lambda: tiny_qwen_image_policy(replace(TINY, guidance_scale=4.0, negative_prompt=" "))
)


def noise_of(policy, count=2):
    return torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(0))


def picture(pipe, noise, guidance=1.0, texts=TEXTS, size=(16, 16), steps=4, output="pt"):
    pipe.set_progress_bar_config(disable=True)
    negative = [" "] * len(texts) if guidance > 1 else None
    return pipe(
        texts, negative_prompt=negative, true_cfg_scale=guidance, height=size[0], width=size[1], num_inference_steps=steps,
        latents=noise, output_type=output, max_sequence_length=TINY.max_sequence_length,
    ).images  # fmt: skip


def draw(policy, noise, steps=4):
    return policy.decode(integrate(policy, policy.schedule(steps), policy.encode(PROMPTS), noise, Usage()))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize(("height", "width", "steps"), [(16, 16, 4), (32, 16, 10), (16, 64, 3)])
def test_images_and_grid_are_the_pipelines_own(guidance, height, width, steps):
    """Two prompts of different length, in one batch with a negative prompt of a third: a difference of 1e-6 is rounding."""
    options = replace(TINY, height=height, width=width, guidance_scale=guidance, negative_prompt=" ")
    policy, pipe = tiny_qwen_image_policy(options), tiny_qwen_image()
    noise = noise_of(policy)
    plain = picture(pipe, noise, guidance, size=(height, width), steps=steps)
    torch.testing.assert_close(draw(policy, noise, steps), plain, atol=2e-6, rtol=0)
    schedule = policy.schedule(steps)
    assert torch.equal(schedule.times, pipe.scheduler.sigmas)
    assert torch.equal(schedule.network_timesteps, pipe.scheduler.timesteps)
    assert (plain[0] - plain[1]).abs().max() > 0.1


def test_guidance_has_the_norm_of_the_prompts_velocity_in_every_token():
    policy = tiny_qwen_image_policy(replace(TINY, guidance_scale=4.0, negative_prompt=" "))
    noise, time, condition = noise_of(policy), torch.full((2,), 600.0), policy.encode(PROMPTS)
    with torch.no_grad():
        guided = policy.velocity(noise, time, condition)
        with policy.guided(1.0):
            towards = policy.velocity(noise, time, condition)
            away = policy.velocity(noise, time, policy.encode([Prompt(" ")] * 2))
    torch.testing.assert_close(guided.norm(dim=-1), towards.norm(dim=-1), atol=1e-5, rtol=1e-5)
    combined = away + 4.0 * (towards - away)
    assert (guided - combined).norm() > 5e-3 * combined.norm()  # plain guidance is something else
    torch.testing.assert_close(torch.cosine_similarity(guided, combined, dim=-1), torch.ones(2, 16), atol=1e-5, rtol=0)


def test_gradients_flow_through_the_norms():
    """Of both branches, and of one: the derivative by hand, d(c |u|/|c|) . w with c = a + s (u - a)."""
    generator, scale = torch.Generator().manual_seed(0), 4.0
    away, towards, weight = (torch.randn(3, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
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
    """A prompt beside a longer one, and alone; with wrong embeddings in place of the padding; and without the mask."""
    policy = tiny_qwen_image_policy()
    noise, time, condition = noise_of(policy), torch.full((2,), 600.0), policy.encode(PROMPTS)
    rows = policy.prompts.rows(condition.tensors["prompt"])
    assert rows["words"].shape == (2, 19, 32) and rows["mask"].sum(1).tolist() == [19, 9]
    assert rows["mask"].dtype == torch.bool

    def velocity(of, **changed):
        given = {name: tensor[of] for name, tensor in {**rows, **changed}.items()}
        with torch.no_grad():
            return policy.family.velocity(policy.transformer, noise[of], time[of], given, policy.latent_size)

    alone = tiny_qwen_image_policy()
    short = alone.prompts.rows(alone.encode(PROMPTS[1:]).tensors["prompt"])
    short = {name: tensor[:1, :9] for name, tensor in short.items()}
    with torch.no_grad():
        expected = alone.family.velocity(alone.transformer, noise[1:], time[1:], short, alone.latent_size)
    torch.testing.assert_close(velocity(slice(0, 2))[1:], expected, atol=2e-6, rtol=0)
    wrong = torch.where(rows["mask"].unsqueeze(-1), rows["words"], 3.0)
    torch.testing.assert_close(velocity(slice(0, 2), words=wrong)[1:], expected, atol=2e-6, rtol=0)
    unmasked = velocity(slice(1, 2), mask=torch.ones_like(rows["mask"]))
    assert (unmasked - expected).abs().max() > 1e-3


def test_a_longer_prompt_pads_the_embeddings_that_are_there():
    """In bfloat16 too, where masks stay masks."""
    policy = tiny_qwen_image_policy(replace(TINY, dtype="bfloat16"))
    early = policy.encode(PROMPTS[1:])
    other = policy.encode([Prompt("a very long sentence of many words")])
    both = torch.cat([early.tensors["prompt"], other.tensors["prompt"]])
    rows = policy.prompts.rows(both)
    assert rows["words"].shape == (2, 24, 32) and rows["words"].dtype == torch.bfloat16
    assert rows["mask"].dtype == torch.bool and rows["mask"].sum(1).tolist() == [9, 24]


def test_the_template_is_dropped_and_the_prompt_is_what_remains():
    policy = tiny_qwen_image_policy()
    tokenizer, pipe = policy.pipe.tokenizer, policy.pipe
    tokens = tokenizer.tokenize(pipe.prompt_template_encode.format("a dog"))[pipe.prompt_template_encode_start_idx :]
    words = policy.prompts.rows(policy.encode(PROMPTS[1:]).tensors["prompt"])["words"]
    assert words.shape == (1, len(tokens), 32)
    assert tokenizer.convert_tokens_to_string(tokens).startswith("a dog<|im_end|>")


def test_the_last_step_has_little_noise_and_a_window_leaves_it_out():
    """From t = .02 to 0: with noise it would have 42% of the squared gradient norm of Flow-SDE (benchmarks/translation.py)."""
    policy = tiny_qwen_image_policy(replace(TINY, height=64, width=64))
    times = policy.schedule(10).times
    assert times[-2:].tolist() == pytest.approx([0.02, 0.0])
    assert policy.schedule(1).times.tolist() == [1.0, 0.0] and policy.schedule(2).times[1] == pytest.approx(0.02)
    zero, steps = torch.zeros(10, *policy.latent_shape), torch.arange(10)
    stds = {name: sampler.transition(zero, zero, policy.schedule(10), steps).std
            for name, sampler in (("all", FlowSDE(1.2)), ("inner", AllButLast(FlowSDE(1.2))))}  # fmt: skip
    assert 0 < stds["all"][9] < 0.15 * stds["all"][8] and stds["inner"][9] == 0 < stds["inner"][8]
    window = build("window", "random(size=2, high=5)")
    found = {tuple(window.steps(10, torch.Generator().manual_seed(seed))) for seed in range(40)}
    assert found == {(0, 1), (1, 2), (2, 3), (3, 4)}


@pytest.mark.parametrize(("dtype", "moved", "error"), [("float32", 0.0, 0), ("bfloat16", 0.1, 0), ("float32", 0.1, 1e-4)])
def test_the_ratio_is_one_on_policy(dtype, moved, error):
    """Exactly, in the batch of the rollout; but for rounding if the float32 rollout merged a LoRA into the weights."""
    policy = tiny_qwen_image_policy(replace(TINY, guidance_scale=4.0, negative_prompt=" ", dtype=dtype))
    for name, parameter in policy.trainable().items():
        if moved:
            torch.nn.init.normal_(parameter, std=moved, generator=torch.Generator().manual_seed(len(name)))
    sampler, groups, generator = AllButLast(FlowSDE(1.2)), Groups(2, 2), torch.Generator().manual_seed(0)
    schedule, condition = policy.schedule(4), policy.encode(PROMPTS)
    noise = groups.noise(policy.latent_shape, generator)
    nodes = (found := rollout(policy, sampler, schedule, condition, noise, generator, groups).trajectories).nodes
    for step in range(3):
        new = policy.velocity(nodes[:, step], schedule.network_timesteps[step].expand(4), condition.repeat(2)).detach()
        index, target = torch.full((4,), step), nodes[:, step + 1]
        now, then = (
            log_prob(sampler.transition(nodes[:, step], velocity, schedule, index), target)
            for velocity in (new, found.velocities[:, step])
        )
        torch.testing.assert_close((now - then).exp(), torch.ones(4), atol=error, rtol=0)


@pytest.fixture
def folder(tmp_path):
    """Prompts, a reward, and the tiny pipeline on disk."""
    (tmp_path / "red.py").write_text("class Red:\n    def score(self, images, prompts): return images[:, 0].mean((1, 2))\n")
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    tiny_qwen_image().save_pretrained(tmp_path / "model")
    return tmp_path


def settings(folder, *more):
    small = {
        "model": folder / "model", "prompts": folder / "prompts.txt", "heldout-prompts": "", "reward": f"{folder}/red.py:Red",
        "resolution": 16, "max-sequence-length": 24, "iterations": 2, "groups": 2, "group-size": 3, "eval-samples": 2,
        "eval-steps": 3, "lora-rank": 2, "learning-rate": 0.03, "device": "cpu", "dtype": "float32", "tracker": "none",
    }  # fmt: skip
    given = [f"--{name}={value}" for name, value in small.items()]
    return ["train", "--preset", "qwen-image,flow-grpo,pickscore", *given, *more]


def test_the_preset_is_planned_and_trained_and_plain_diffusers_reads_the_lora(folder, capsys):
    """With the preset's window, guidance, negative prompt and LoRA targets."""
    assert main(settings(folder, "--plan", "--dtype=bfloat16")) == 0
    told = capsys.readouterr().out
    assert "(60 + 12) x 2 (guidance) = 144 forward passes" in told and "trained ones" in told
    assert main(settings(folder, f"--out={folder}/run")) == 0
    run = load_run(folder / "run")
    assert run.finished and [row["trajectories"] for row in run.rows[1:]] == [6, 6] and run.rows[1]["grad_norm"] > 0
    policy, _ = trained_policy(folder / "run", trust=True)
    plain, noise = tiny_qwen_image(), noise_of(policy)
    base = picture(plain, noise, 4.0)
    plain.load_lora_weights(folder / "run" / "lora")
    trained = picture(plain, noise, 4.0)
    torch.testing.assert_close(draw(policy, noise), trained, atol=5e-6, rtol=0)
    assert (trained - base).abs().max() > 1e-3
    layers = {name.split(".lora_")[0] for name in policy.trainable()}
    assert len(layers) == 2 * 12 and any("txt_mlp.net.2" in name for name in layers)


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"no layer's name ends with img_mlp.net.2.proj"):
        tiny_qwen_image_policy(replace(TINY, lora_targets=(*LORA_TARGETS, "img_mlp.net.2.proj")))
    with pytest.raises(ConfigError, match=r"height = 18 .* a multiple of 4"):
        tiny_qwen_image_policy(replace(TINY, height=18))
    pipe = tiny_qwen_image()
    pipe.transformer.register_to_config(guidance_embeds=True)
    with pytest.raises(ConfigError, match="guidance_embeds of the transformer = True"):
        PipelinePolicy(pipe, QwenImage(), TINY)
    with pytest.raises(ConfigError, match=r"window = .* high is set twice"):
        build("window", "random(size=2, high=3, high=4)")
