"""`tutorials/nano_sd3.py` computes what the library computes, on tiny random weights."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from loading import load
from loss_rows import loss_rows

from flowrl import flow
from flowrl.core.types import Prompt
from flowrl.credit import zscore
from flowrl.losses import ClippedLoss
from flowrl.samplers import FlowSDE
from flowrl.testing.tiny import TINY, tiny_sd3, tiny_sd3_policy

nano = load("tutorials/nano_sd3.py")
PROMPTS = ["a red cat", "two dogs"]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-sd3")
    tiny_sd3().save_pretrained(path)
    return path


@pytest.fixture
def policy(folder):
    """A policy whose LoRA is not 0."""
    sizes = {"members": 3, "steps": 3, "decisions": 2, "updates": 1, "batch": 4}
    made = nano.Policy(nano.Settings(str(folder), "", device="cpu", resolution=16, rank=4, **sizes))
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters:
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return made


def library_policy(policy):
    """The library's, with the same LoRA."""
    options = replace(TINY, guidance_scale=policy.args.guidance, max_sequence_length=256)
    made = tiny_sd3_policy(options)
    theirs = made.trainable()
    assert len(theirs) == len(policy.parameters)
    for own, parameter in zip(policy.parameters, theirs.values(), strict=True):
        parameter.data.copy_(own.data)
    return made


def noise(policy, count):
    return torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(2))


def test_it_does_not_import_the_library():
    text = Path(nano.__file__).read_text()
    assert not re.findall(r"^ *(?:from|import) flowrl", text, re.MULTILINE)


def test_velocities_images_and_grid_are_the_library_s(policy):
    other, x = library_policy(policy), noise(policy, 2)
    schedule = other.schedule(3)
    torch.testing.assert_close(policy.times(), schedule.times)
    t = schedule.times[1]
    condition = other.encode([Prompt(text) for text in PROMPTS])
    with torch.no_grad():
        expected = other.velocity(x, (1000 * t).expand(2), condition)
        torch.testing.assert_close(policy.velocity(x, t, PROMPTS), expected, **CLOSE)
        torch.testing.assert_close(policy.decode(x), other.decode(x), **CLOSE)


@pytest.mark.parametrize("step", [0, 1])
def test_the_sampler_step_and_its_log_probability_are_the_library_s(policy, step):
    x, v, y = noise(policy, 6).split(2)
    times, steps = policy.times(), torch.full((2,), step)
    expected = FlowSDE(0.7).transition(x, v, library_policy(policy).schedule(3), steps)
    kernel = nano.transition(x, v, times[step], times[step + 1], 0.7)
    torch.testing.assert_close(kernel.mean, expected.mean, **CLOSE)
    torch.testing.assert_close(nano.log_prob(kernel, y), flow.log_prob(expected, y), **CLOSE)


def test_advantages_are_the_library_s():
    rewards = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    expected = zscore(rewards[..., None], over=("member",))[..., 0]
    torch.testing.assert_close(nano.advantages(rewards), expected, **CLOSE)


def test_before_the_first_update_all_ratios_are_exactly_1(policy):
    batches = nano.rollout(policy, PROMPTS, torch.Generator().manual_seed(0))
    ratios = nano.update(policy, torch.optim.AdamW(policy.parameters), batches)
    assert len(ratios) == 2 * 3 * 2
    assert torch.equal(ratios, torch.ones_like(ratios))


def test_the_gradient_off_policy_is_the_library_s(policy):
    """Of the clipped loss, after the parameters have moved."""
    policy.args.clip = 1e-3
    batches = nano.rollout(policy, PROMPTS, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        old = [
            FlowSDE(0.7).transition(
                batch.states[k],
                policy.velocity(batch.states[k], policy.times()[k], batch.prompts),
                library_policy(policy).schedule(3),
                torch.full((len(batch.prompts),), k),
            )
            for k in range(2)
            for batch in batches
        ]
        for parameter in policy.parameters:
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    other = library_policy(policy)
    losses = []
    for number, (k, batch) in enumerate((k, batch) for k in range(2) for batch in batches):
        t, steps = policy.times()[k], torch.full((len(batch.prompts),), k)
        condition = other.encode([Prompt(text) for text in batch.prompts])
        v = other.velocity(batch.states[k], (1000 * t).expand(len(steps)), condition)
        new = FlowSDE(0.7).transition(batch.states[k], v, other.schedule(3), steps)
        rows = loss_rows(
            new, old[number], next_node=batch.states[k + 1], advantages=batch.advantages
        )
        losses.append(ClippedLoss(clip_range=1e-3).loss(rows).loss * len(steps))
    expected = torch.autograd.grad(sum(losses) / 12, list(other.trainable().values()))
    policy_gradients = []
    optimizer = torch.optim.SGD(policy.parameters, lr=0.0)
    optimizer.step = lambda: policy_gradients.extend(p.grad.clone() for p in policy.parameters)
    ratios = nano.update(policy, optimizer, batches)
    assert 0 < ((ratios - 1).abs() > 1e-3).float().mean() < 1
    norm = torch.cat([g.flatten() for g in expected]).norm().clamp(min=1.0)
    torch.testing.assert_close(policy_gradients, [g / norm for g in expected], **CLOSE)


def test_plain_diffusers_loads_the_lora(policy, folder, tmp_path):
    policy.save(str(tmp_path))
    pipe = StableDiffusion3Pipeline.from_pretrained(folder)
    pipe.load_lora_weights(tmp_path)
    x, t, (tokens, pooled) = noise(policy, 2), torch.tensor(0.5), policy.encode(PROMPTS)
    inputs = x.repeat(2, 1, 1, 1), tokens, pooled, (1000 * t).expand(4)
    with torch.no_grad():
        loaded, trained, base = (
            network(*inputs, return_dict=False)[0]
            for network in (pipe.transformer, policy.network, tiny_sd3().transformer)
        )
    torch.testing.assert_close(loaded, trained, **CLOSE)
    assert (trained - base).abs().max() > 1e-3


def test_the_program_trains_and_saves(folder, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    sizes = {"groups": 2, "members": 2, "steps": 2, "decisions": 1, "resolution": 16}
    places = str(folder), str(tmp_path / "prompts.txt"), str(tmp_path / "lora"), "cpu"
    nano.main(nano.Settings(*places, iterations=1, **sizes))
    assert re.match(r"iteration 1: reward -\d\.\d+, clipped \d+%", capsys.readouterr().out)
    assert list((tmp_path / "lora").glob("*.safetensors"))


@pytest.mark.slow
def test_the_reward_rises(folder, monkeypatch):
    """Brightness, of images from the same noise; JPEGs of 16 x 16 pixels have nearly equal sizes."""
    monkeypatch.setattr(nano, "reward", lambda images, prompts: images.mean((1, 2, 3)))
    sizes = {"members": 16, "steps": 4, "decisions": 2, "updates": 2, "batch": 16, "clip": 0.1}
    policy = nano.Policy(nano.Settings(str(folder), "", device="cpu", resolution=16, **sizes))
    optimizer = torch.optim.AdamW(policy.parameters, 0.03)
    generator = torch.Generator().manual_seed(0)

    def level():
        batches = nano.rollout(policy, PROMPTS, torch.Generator().manual_seed(1))
        return float(torch.cat([batch.rewards for batch in batches]).mean())

    before = level()
    for _ in range(10):
        nano.update(policy, optimizer, nano.rollout(policy, PROMPTS, generator))
    assert level() > before + 0.005
