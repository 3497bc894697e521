"""Every tensor, generator and index where it belongs, in the right precision; the same bodies run
on the CPU and on a GPU.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from device_cases import (
    MODELS,
    PROMPTS,
    any_trainer,
    assert_same,
    flat,
    model_policy,
    model_trainer,
)
from host_sync import no_host_sync
from seeded import rand, seeded
from tiny_rewards import tiny_clip

from flowrl.core.experience import Decisions
from flowrl.core.types import copies_done, to_device, to_main_memory
from flowrl.policies import DTYPES
from flowrl.rollout import Rows, TransitionObjective, Usage, initial_noise, sample_images
from flowrl.run.parts.registry import build

EVERYWHERE = ["mixture", "shapes", *MODELS]
NOISE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest deviation of an on-policy ratio from 1 on a GPU, whose kernels depend on the batch size.
On the CPU it is 1e-6 in every precision (found: 1.2e-7), because samples and updates have the same
rounding.
"""
IMAGE = {"float32": 3e-3, "float16": 3e-3, "bfloat16": 3e-2}
"""Largest root mean square difference of images in [0, 1] from those of the CPU in float32; GPUs
have TF32 in convolutions.
"""


def most_noise(device, dtype="float32"):
    return 1e-6 if device == "cpu" else NOISE[dtype]


def kinds(*tensors):
    return {tensor.device.type for tensor in tensors if tensor is not None}


def iterated(trainer):
    """A row of metrics, and what the trainer collected and evaluated on the way."""
    seen, collect, objective = {}, trainer.collector.collect, trainer.objective
    trainer.collector.collect = lambda *given: seen.setdefault("collected", collect(*given))
    trainer.objective = lambda *given: seen.setdefault("objective", objective(*given))
    return trainer.iteration(), *seen["collected"], seen["objective"]


def state_of(trainer):
    """Weights, gradients, averages and moments."""
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    gradients = [
        parameter.grad for parameter in trainer.parameters.values() if parameter.grad is not None
    ]
    return *trainer.parameters.values(), *gradients, *trainer.average, *moments


@pytest.mark.parametrize("method", ["tp-grpo", "stepwise-flow-grpo"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_an_iteration_makes_is_on_the_device(name, method, device):
    trainer = any_trainer(name, device, method=method, kl_weight=0.1, iterations=3)
    row, rollout, scored, objective = iterated(trainer)
    path = rollout.trajectories
    (part,) = objective.minibatches(torch.arange(6), 1)
    micro = objective.micro_batches(part, 100, trainer.processes)[0]
    batch = objective.batch(micro)
    made = micro.sample, micro.column, path.states, path.outputs, path.schedule.times, path.stds
    rows = batch.next_node, batch.advantages, batch.weight, batch.delta
    means = batch.new.mean, batch.behaviour.mean
    on_device = *state_of(trainer), *rollout.condition.tensors.values(), *made, *rows, *means
    assert kinds(*on_device) == {device} and trainer.generator.device.type == device
    assert kinds(scored.values, scored.valid) == {"cpu"}
    assert row["grad_norm"] > 0 and row["kl"] >= 0 and row["ratio_noise"] < most_noise(device)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_offloaded_trajectories_wait_in_main_memory_and_train_the_same(name, device):
    changes = []
    for offload, place in ((False, device), (True, "cpu")):
        trainer = any_trainer(name, device, offload=offload, chunk=1)
        before = flat(trainer.parameters.values())
        path = iterated(trainer)[1].trajectories
        changes.append(flat(trainer.parameters.values()) - before)
        assert kinds(path.states, path.outputs) == {place}
    assert_same(*changes, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_only_the_network_is_narrow(name, dtype, device):
    """Frozen weights, embeddings and activations have the policy's precision; what is trained or
    stored is float32. Ratios on the policy are 1 up to rounding: sampling and training see other
    batch sizes, and in float32 a merged adapter.
    """
    narrow = DTYPES[dtype]
    trainer = model_trainer(name, device, dtype=dtype, guidance_scale=2.0, loss_scale=64.0)
    policy, activations = trainer.policy, set()
    network, ends = policy.transformer, ("attn.to_q", "attn1.to_q", "attention.to_q")
    layer = next(module for name, module in network.named_modules() if name.endswith(ends))
    layer.register_forward_hook(lambda module, given, result: activations.add(result.dtype))
    row, rollout, *_ = iterated(trainer)
    assert activations == {narrow} and not torch.is_autocast_enabled(torch.device(device).type)
    kept = set(network._keep_in_fp32_modules or ())  # as diffusers loads Wan
    frozen = {n: p.dtype for n, p in network.named_parameters() if not p.requires_grad}
    assert {d for n, d in frozen.items() if not kept & set(n.split("."))} == {narrow}
    rows = policy.prompts.rows(policy.encode(PROMPTS).tensors["prompt"]).values()
    assert {t.dtype for t in rows} - {torch.bool} == {narrow} and kinds(*rows) == {device}
    path = rollout.trajectories
    wide = path.states, path.outputs, *state_of(trainer), policy.decode(path.images_latent)
    assert {t.dtype for t in wide} == {torch.float32}
    assert ("loss_scale" in row) == (dtype == "float16") and row["grad_norm"] > 0
    assert row["ratio_noise"] < most_noise(device, dtype)
    assert row["ratio_noise"] <= row["ratio_deviation"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_device_draws_the_images_of_the_cpu(name, dtype, device):
    """Same weights, prompts and noise."""
    images = []
    for here, precision in (("cpu", "float32"), (device, dtype)):
        policy = model_policy(name, here, dtype=precision, guidance_scale=2.0)
        (batch,) = sample_images(policy, PROMPTS, initial_noise(policy, len(PROMPTS)), 4)
        assert batch.images.device.type == here
        images.append(batch.images.cpu())
    assert (images[0] - images[1]).square().mean().sqrt() <= IMAGE[dtype]


@pytest.mark.parametrize("name", MODELS)
def test_a_device_has_the_gradients_of_the_cpu(name, device):
    """Of one loss on the same trajectories, moved from the CPU to the device."""
    trainer, gradients = model_trainer(name, "cpu", method="flow-grpo"), []
    sampler, prompts = trainer.draw_sampler(), PROMPTS[:2]
    generator, condition = seeded(), trainer.policy.encode(prompts)
    noise = trainer.groups.noise(trainer.policy.latent_shape, generator)
    given = prompts, condition, noise, sampler, generator, Usage(), lambda phase: None
    result, _ = trainer.collector.collect(*given)
    path, count = result.trajectories, len(result.trajectories.tree.drawn_steps)
    for place in ("cpu", device):
        policy = model_policy(name, place)
        names = ("states", "outputs", "schedule", "stds")
        tensors = {name: getattr(path, name).to(place) for name in names}
        moved = replace(
            result,
            trajectories=replace(path, **tensors),
            condition=policy.encode(prompts),
        )
        advantages = torch.linspace(-1, 1, 6 * count).view(2, 3, count)
        decisions = Decisions.of(path.schedule, path.stds, path.tree, advantages[..., 0] > -2)
        given = moved, decisions, advantages, torch.ones_like(advantages), sampler
        objective = TransitionObjective(policy, trainer.method.loss, *given)
        index = torch.arange(6)
        batch = objective.batch(Rows.of(index, index % count))
        trainer.method.loss.loss(batch).loss.backward()
        # the text stream's last projections reach no image in Qwen-Image
        gradients.append(flat(p.grad for p in policy.trainable().values() if p.grad is not None))
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert difference < (1e-5 if device == "cpu" else 1e-2)


def test_text_encoders_visit_the_device_and_leave_it(device):
    policy, seen = model_policy("sd3", device), set()
    encoder = policy.pipe.text_encoder_3
    encoder.register_forward_hook(lambda *_: seen.update(kinds(*encoder.parameters())))
    policy.encode(PROMPTS)
    assert seen == {device} and kinds(*encoder.parameters()) == {"cpu"}


def test_a_reward_scores_on_the_device(device, tmp_path):
    folder = tiny_clip(tmp_path / "clip")
    images = rand(3, 3, 32, 32)
    scores = [
        build("reward", f"clipscore(model='{folder}')", device=here).score(images.to(here), PROMPTS)
        for here in ("cpu", device)
    ]
    torch.testing.assert_close(scores[1].cpu(), scores[0], atol=2e-3, rtol=0)


def test_copies_to_main_memory_and_back_keep_the_values(device):
    """On CUDA through pinned memory, without a wait until the host reads them."""
    values, index = torch.arange(12.0, device=device).view(3, 4)[:, 1:], torch.tensor([2, 0])
    no_wait = partial(no_host_sync, device) if device == "cuda" else nullcontext
    with no_wait():
        kept = to_main_memory(values)
    copies_done(torch.device(device))
    assert kept.device.type == "cpu" and kept.is_pinned() == (device == "cuda")
    with no_wait():
        back = to_device(kept[index], torch.device(device))
    assert back.device.type == device and torch.equal(back, values[index.to(device)])
