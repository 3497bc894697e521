"""What is particular to Wan: videos, zero-padded prompts, layers in float32, the Euler grid of another scheduler's shift."""

from dataclasses import replace

import pytest
import torch
from all_but_last import AllButLast
from safetensors.torch import load_file

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.flow import log_prob
from flowrl.methods import stepwise_flow_grpo, tp_grpo
from flowrl.policies import Flux, PipelinePolicy, Wan
from flowrl.protocols import FlowPolicy
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Usage, initial_noise, integrate, rollout, sample_images, score
from flowrl.samplers import FlowSDE
from flowrl.testing import policy_contract
from flowrl.testing.tiny import TINY, TINY_VIDEO, tiny_flux, tiny_wan, tiny_wan_policy
from flowrl.training.build import trained_policy
from flowrl.training.config import preset
from flowrl.training.results import load_run
from flowrl.training.trainer import Trainer
from flowrl.types import Prompt

TEXTS = ["three red circles", "a dog"]
PROMPTS = [Prompt(text) for text in TEXTS]
NEGATIVE = "blurry, static"

test_contract = policy_contract(tiny_wan_policy)
test_contract_with_guidance = policy_contract(
    lambda: tiny_wan_policy(replace(TINY_VIDEO, guidance_scale=5.0, negative_prompt=NEGATIVE))
)


def noise_of(policy, count=2):
    return torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(0))


def video(pipe, noise, guidance=1.0, size=(16, 16, 5), steps=4, tokens=TINY.max_sequence_length):
    """The plain pipeline's own videos, [sample, frame, 3, height, width]."""
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        TEXTS, negative_prompt=[NEGATIVE] * 2, guidance_scale=guidance, height=size[0], width=size[1], num_frames=size[2],
        num_inference_steps=steps, latents=noise, output_type="pt", max_sequence_length=tokens,
    ).frames  # fmt: skip


def draw(policy, noise, steps=4):
    return policy.decode(integrate(policy, policy.schedule(steps), policy.encode(PROMPTS), noise, Usage()))


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize(("height", "width", "frames", "steps"), [(16, 16, 5, 4), (32, 16, 9, 3), (16, 32, 1, 6)])
def test_videos_and_grid_are_the_pipelines_own(guidance, height, width, frames, steps):
    """A difference of 1e-6 is rounding."""
    options = replace(
        TINY, height=height, width=width, num_frames=frames, guidance_scale=guidance, negative_prompt=NEGATIVE, decode_batch=1
    )
    policy, pipe = tiny_wan_policy(options), tiny_wan()
    noise = noise_of(policy)
    assert isinstance(policy, FlowPolicy) and policy.latent_shape == (4, (frames - 1) // 4 + 1, height // 4, width // 4)
    plain = video(pipe, noise, guidance, (height, width, frames), steps)
    mine = draw(policy, noise, steps)
    assert mine.shape == (2, frames, 3, height, width)
    torch.testing.assert_close(mine, plain, atol=5e-6, rtol=0)
    schedule = policy.schedule(steps)
    assert torch.equal(schedule.times, pipe.scheduler.sigmas)
    assert torch.equal(schedule.network_timesteps, pipe.scheduler.timesteps) and schedule.network_timesteps[0] == 1000
    assert (plain[0] - plain[1]).abs().max() > 0.1


def test_guidance_is_linear_and_the_negative_prompt_matters():
    make = lambda text: tiny_wan_policy(replace(TINY_VIDEO, guidance_scale=5.0, negative_prompt=text))  # noqa: E731
    policy, noise, time = make(NEGATIVE), noise_of(make("")), torch.full((2,), 600.0)
    with torch.no_grad():
        guided = policy.velocity(noise, time, policy.encode(PROMPTS))
        with policy.guided(1.0):
            towards = policy.velocity(noise, time, policy.encode(PROMPTS))
            away = policy.velocity(noise, time, policy.encode([Prompt(NEGATIVE)] * 2))
    torch.testing.assert_close(guided, away + 5.0 * (towards - away), atol=1e-5, rtol=1e-5)
    empty = make("")
    with torch.no_grad():
        assert (empty.velocity(noise, time, empty.encode(PROMPTS)) - guided).abs().max() > 1e-3


def test_a_prompt_has_zeros_up_to_its_full_length_which_is_part_of_the_model():
    """512 tokens by default, as the pipeline's call has, not the 226 of its `encode_prompt`; another length is another video."""
    default = tiny_wan_policy(replace(TINY_VIDEO, max_sequence_length=0))
    rows = default.prompts.rows(default.encode(PROMPTS).tensors["prompt"])
    short = tiny_wan_policy()
    few = short.prompts.rows(short.encode(PROMPTS).tensors["prompt"])["words"]
    assert rows["words"].shape == (2, 512, 32) and few.shape == (2, 24, 32)
    used = rows["words"].abs().sum(-1) > 0
    assert used.sum(1).tolist() == [len(default.pipe.tokenizer(text).input_ids) for text in TEXTS]
    torch.testing.assert_close(rows["words"][:, :24], few, atol=1e-6, rtol=0)
    noise = noise_of(default)
    torch.testing.assert_close(draw(default, noise), video(tiny_wan(), noise, tokens=512), atol=5e-6, rtol=0)
    assert (draw(default, noise) - draw(short, noise)).abs().max() > 1e-3


def test_layers_that_diffusers_keeps_in_float32_stay_there(tmp_path):
    """Norms, modulation, time embedding and rotary frequencies, as when diffusers loads the model in bfloat16."""
    from diffusers import WanTransformer3DModel

    tiny_wan().transformer.save_pretrained(tmp_path)
    plain = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    policy = tiny_wan_policy(replace(TINY_VIDEO, dtype="bfloat16", tuning="nothing"))
    for named in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(policy.transformer, named)()), dict(getattr(plain, named)())
        assert {n: t.dtype for n, t in mine.items()} == {n: t.dtype for n, t in theirs.items()}
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert {p.dtype for p in plain.parameters()} == {torch.float32, torch.bfloat16}


def test_a_unipc_scheduler_gives_its_shift_and_not_its_grid():
    """As in many copies of the model on the Hub: the Euler grid has the same shift, and other times."""
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    pipe = tiny_wan()
    pipe.scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    times = PipelinePolicy(pipe, Wan(), TINY_VIDEO).schedule(10).times
    euler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    for scheduler in (euler, pipe.scheduler):
        scheduler.set_timesteps(10)
    assert torch.equal(times, euler.sigmas) and (times - pipe.scheduler.sigmas).abs().max() > 0.1
    pipe.scheduler = UniPCMultistepScheduler()
    with pytest.raises(ConfigError, match=r"scheduler = 'UniPCMultistepScheduler' .*flow sigmas and a flow_shift"):
        PipelinePolicy(pipe, Wan(), TINY_VIDEO)


@pytest.mark.parametrize(("dtype", "moved", "error"), [("float32", 0.0, 0), ("bfloat16", 0.1, 0), ("float32", 0.1, 1e-4)])
def test_the_ratio_is_one_on_policy(dtype, moved, error):
    """Exactly, in the batch of the rollout; but for rounding if the float32 rollout merged a LoRA into the weights."""
    policy = tiny_wan_policy(replace(TINY_VIDEO, guidance_scale=5.0, negative_prompt=NEGATIVE, dtype=dtype))
    for name, parameter in policy.trainable().items():
        if moved:
            torch.nn.init.normal_(parameter, std=moved, generator=torch.Generator().manual_seed(len(name)))
    sampler, groups, generator = AllButLast(FlowSDE(0.7)), Groups(2, 2), torch.Generator().manual_seed(0)
    schedule, condition = policy.schedule(4), policy.encode(PROMPTS)
    noise = groups.noise(policy.latent_shape, generator)
    nodes = (found := rollout(policy, sampler, schedule, condition, noise, generator, groups).trajectories).nodes
    assert nodes.shape == (4, 5, 4, 2, 4, 4)
    for step in range(3):
        new = policy.velocity(nodes[:, step], schedule.network_timesteps[step].expand(4), condition.repeat(2)).detach()
        index, target = torch.full((4,), step), nodes[:, step + 1]
        now, then = (
            log_prob(sampler.transition(nodes[:, step], velocity, schedule, index), target)
            for velocity in (new, found.velocities[:, step])
        )
        torch.testing.assert_close((now - then).exp(), torch.ones(4), atol=error, rtol=0)


FADE_IN = FunctionReward(lambda videos, prompts: videos[:, -1].flatten(1).mean(1) - videos[:, 0].flatten(1).mean(1))


def gain(make, seed, iterations, **changes):
    """The paired difference of 32 videos' rewards after training, and its standard error."""
    policy = tiny_wan_policy(replace(TINY_VIDEO, lora_rank=8, lora_alpha=16.0, seed=seed))
    config = preset("tiny").apply(num_steps=6, minibatches=2, learning_rate=1e-2, seed=seed, **changes)
    trainer = Trainer(policy, make(), FADE_IN, PROMPTS, config)

    def scores():
        with policy.frozen():
            (batch,) = sample_images(policy, PROMPTS * 16, initial_noise(policy, 32), 6)
        return score(FADE_IN, batch.images, batch.prompts)

    before = scores()
    rows = [trainer.iteration() for _ in range(iterations)]
    assert rows[0]["ratio_noise"] == 0
    change = scores() - before
    return float(change.mean()), float(change.std()) / 32**0.5


@pytest.mark.slow
@pytest.mark.parametrize("make", [stepwise_flow_grpo, tp_grpo])
def test_per_step_credit_learns_a_reward_of_motion(make):
    """Brightness that rises over the frames: each of three seeds gains more than 5 standard errors over videos in 12 iterations
    of 32 videos. benchmarks/tiny_video.py has 20, and the numbers."""
    for seed in range(3):
        mean, error = gain(make, seed, 12, groups=4, group_size=8)
        assert mean > 5 * error > 0


@pytest.fixture
def folder(tmp_path):
    """Prompts, a reward of images, and the tiny pipeline on disk."""
    (tmp_path / "red.py").write_text("class Red:\n    def score(self, images, prompts): return images[:, 0].mean((1, 2))\n")
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    tiny_wan().save_pretrained(tmp_path / "model")
    return tmp_path


def settings(folder, *more, **changes):
    small = {
        "model": folder / "model", "prompts": folder / "prompts.txt", "heldout-prompts": "", "width": 16, "num-frames": 5,
        "reward": f"frame-mean(reward='{folder}/red.py:Red', frames=2)", "resolution": 16, "max-sequence-length": 24,
        "iterations": 2, "groups": 2, "group-size": 3, "num-steps": 4, "eval-samples": 2, "eval-steps": 3, "lora-rank": 2,
        "learning-rate": 0.03, "device": "cpu", "dtype": "float32", "tracker": "none", "negative-prompt": NEGATIVE,
    } | changes  # fmt: skip
    given = [f"--{name}={value}" for name, value in small.items()]
    return ["train", "--preset", "wan2.1-t2v-1.3b,flow-grpo,pickscore", *given, *more]


def test_the_preset_is_planned_trained_and_resumed_and_plain_diffusers_reads_the_lora(folder, capsys):
    """With the preset's guidance and LoRA targets, and motion and diversity as held-out metrics."""
    assert main(settings(folder, "--plan", "--dtype=bfloat16")) == 0
    told = capsys.readouterr().out
    assert "(24 + 36) x 2 (guidance) = 120 forward passes" in told and "trained ones" in told
    held = ("--heldout-rewards", "motion", "--diversity=pixels")
    whole = folder / "whole"
    assert main(settings(folder, *held, f"--out={whole}", "--checkpoint-every=1", "--keep-checkpoints=2")) == 0
    found, weights = load_run(whole), load_file(whole / "weights.safetensors")
    assert found.finished and [row["trajectories"] for row in found.rows[1:]] == [6, 6] and found.rows[1]["grad_norm"] > 0
    assert found.rows[1]["ratio_noise"] < 1e-5
    last = found.rows[-1]["evaluation"]
    assert last["heldout"]["motion"] > 0.01 and last["diversity"] > 0
    assert (
        main(["sample", "--weights", str(whole), "--prompts", "a dog", "--count=2", f"--out={folder}/grid.png", "--trust"]) == 0
    )
    images = load_file(whole / "samples.safetensors")["after"]
    assert images.shape == (2, 3, 16, 3 * 16)  # first, middle and last frame
    card = (whole / "README.md").read_text()
    assert "text-to-video" in card and "num_frames=5, " in card and ").frames[0]" in card
    assert main(["train", "--resume", str(whole), "--from", "000001", "--trust"]) == 0
    again = load_file(whole / "weights.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights) and load_run(whole).finished
    policy, _ = trained_policy(whole, trust=True)
    plain, noise = tiny_wan(), noise_of(policy)
    base = video(plain, noise, 4.5)
    plain.load_lora_weights(whole / "lora")
    trained = video(plain, noise, 4.5)
    torch.testing.assert_close(draw(policy, noise), trained, atol=1e-5, rtol=0)
    assert (trained - base).abs().max() > 1e-3
    assert {name.split(".lora_")[0].split(".", 2)[2] for name in policy.trainable()} == set(Wan().lora_targets)


def test_what_is_wrong_is_said(folder, capsys):
    for changes, message in (
        ({"num_frames": 6}, r"num_frames = 6 .* 1 more than a multiple of 4"),
        ({"height": 20}, r"height = 20 .* a multiple of 8"),
        ({"lora_targets": ("attn.to_q",)}, "no layer's name ends with attn.to_q"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny_wan_policy(replace(TINY_VIDEO, **changes))
    with pytest.raises(ConfigError, match=r"num_frames = 5 .* 1: a FluxPipeline makes images"):
        PipelinePolicy(tiny_flux(), Flux(), TINY_VIDEO)
    second = tiny_wan()
    second.register_modules(transformer_2=tiny_wan().transformer)
    with pytest.raises(ConfigError, match="transformer_2 of the pipeline = 'WanTransformer3DModel'"):
        PipelinePolicy(second, Wan(), TINY_VIDEO)
    assert main(settings(folder, f"--out={folder}/images", reward="jpeg-compressibility")) == 2
    assert "frame-mean(reward=...)" in capsys.readouterr().err
