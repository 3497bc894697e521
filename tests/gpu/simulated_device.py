"""Rollouts and losses on a simulated device: tensors have a device, a shape and a type, but no values.

Run as a program of its own, because a device cannot be removed again. Prints a JSON object: per case the error, or "ok".
"""

import json
from contextlib import ExitStack
from dataclasses import replace
from sys import modules
from unittest.mock import patch

import torch
from device_cases import any_trainer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from flowrl.experience import Decisions
from flowrl.losses import ClippedLoss
from flowrl.protocols import ForwardLoss
from flowrl.rollout import Usage, group_tree, rollout
from flowrl.rollout.forward_batch import ForwardBatches
from flowrl.rollout.loss_batch import LossBatches
from flowrl.samplers import transition_stds
from flowrl.types import Schedule

NAME = "simulated"
METHODS = {
    "completions": dict(method="tp-grpo"),
    "substeps, shared noise": dict(method="stepwise-flow-grpo"),
    "continuations": dict(credit="stepwise-gain(probe='continuation:2')", window="1:3"),
    "completions, shared noise": dict(method="stepwise-flow-grpo", credit="stepwise-gain(probe=completion)", window="1:3"),
}
CASES = {f"mixture: {name}": ("mixture", changes) for name, changes in METHODS.items()}
CASES |= {f"{model}: completions": (model, METHODS["completions"]) for model in ("shapes", "sd3", "flux")}
TREES = {
    "branches": dict(credit="depth-relative(probe='branch(children=(1, 3))')", window="0:2"),
    "comb": dict(credit="sibling-relative(probe='comb(branches=3, count=1)')"),
}
FORWARD = {name: dict(method=name, sampler="flow-sde()", num_steps=8) for name in ("diffusion-nft", "awm", "dgpo")}
CASES |= {f"mixture: {name}": ("mixture", changes) for name, changes in (TREES | FORWARD).items()}
CASES |= {
    f"mixture: {name}, offloaded": ("mixture", {**changes, "offload": True})
    for name, changes in ({"completions": METHODS["completions"]} | TREES | FORWARD).items()
}


class FromTheCpu(ClippedLoss):
    """Has a constant on the CPU."""

    def loss(self, batch):
        found = super().loss(batch)
        return replace(found, loss=found.loss + (batch.advantages * torch.ones(len(batch.weight))).sum())


class ToTheCpu(ClippedLoss):
    """Copies to the CPU."""

    def loss(self, batch):
        return super().loss(replace(batch, advantages=batch.advantages.cpu().to(batch.weight.device)))


class CpuIndex:
    """A sampler whose index is on the CPU, which PyTorch allows and copies."""

    def __init__(self, sampler):
        self.sampler = sampler

    def transition(self, latent, velocity, schedule, step):
        return self.sampler.transition(latent[torch.arange(len(latent))], velocity, schedule, step)


class OneDevice(TorchDispatchMode):
    """Refuses operations on or between two devices, numbers apart, unless they are `allowed` for a while."""

    allowed = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_iter((args, kwargs, found)) if isinstance(t, Tensor) and t.ndim > 0]
        devices = {t.device.type for t in tensors}
        if len(devices) > 1 and not self.allowed:
            raise RuntimeError(f"{func} has tensors on {' and '.join(sorted(devices))}")
        return found


class Generator:
    """Nothing is drawn from it."""

    device = f"{NAME}:0"


PATH = ("states", "outputs")


def to_device(tensor, device):
    """`transfer.to_device` without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def training_noise(loss, groups, shape, draws, seed, device):
    """`forward_batch.training_noise` without a generator, which the simulated device has not."""
    return torch.randn(groups.samples, draws, *shape, device=device)


def moved(tensor, mode):
    """A tensor without values on the simulated device."""
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=NAME)


def move_policy(policy, mode):
    """Its network, and what else `velocity` reads."""
    for module in policy.velocity_network.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = torch.nn.Parameter(moved(value, mode), requires_grad=value.requires_grad)
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else moved(value, mode)
    if hasattr(policy, "mixture"):
        means, weights = moved(policy.mixture.means, mode), moved(policy.mixture.weights, mode)
        policy.mixture = replace(policy.mixture, means=means, weights=weights)
    if hasattr(policy, "prompts"):
        policy.prompts._table = {name: moved(table, mode) for name, table in policy.prompts._table.items()}
        policy.prompts._places = moved(policy.prompts._places, mode)


def work(model, changes, mode, sampler=None, loss=None):
    """A rollout, a loss with the reference, and its backward pass. Only `transfer.to_device` copies to the device."""
    trainer = any_trainer(model, "cpu", kl_weight=0.1, **changes)
    policy, credit = trainer.policy, trainer.method.credit
    condition = policy.encode(trainer.prompts.take(2))
    drawn = trainer.draw_sampler()
    schedule, stds = trainer.schedule, transition_stds(drawn, trainer.schedule)
    tree = group_tree(stds, trainer.groups, credit.probe, torch.Generator())
    tree.edges, tree.first_members, tree.drawn_steps, tree.decisions  # noqa: B018 - read numbers, which no simulated tensor has
    valid = torch.ones(trainer.groups.prompts, tree.members, dtype=torch.bool)
    decisions = Decisions.of(schedule, stds, tree, valid)
    sampler, loss = sampler(drawn) if sampler else drawn, loss or trainer.method.loss
    move_policy(policy, mode)
    condition = replace(condition, tensors={name: moved(tensor, mode) for name, tensor in condition.tensors.items()})
    randn = torch.randn
    with ExitStack() as stack:
        stack.enter_context(patch.object(Schedule, "__post_init__", lambda schedule: None))  # it reads the times
        stack.enter_context(patch.object(torch, "randn", lambda *shape, generator=None, **named: randn(*shape, **named)))
        spread = stack.enter_context(patch.object(modules["flowrl.rollout.rollout"], "transition_stds"))
        for part in (modules["flowrl.rollout.rollout"]._Walk, modules["flowrl.rollout.estimates"].Walkers):
            stack.enter_context(patch.object(part, "stochastic", (stds > 0).tolist()))
        stack.enter_context(patch.object(modules["flowrl.rollout.rollout"], "group_tree", lambda *given: tree))
        stack.enter_context(patch.object(modules["flowrl.rollout.probing"], "own_generator", lambda generator: generator))
        for name in ("types", "rollout.rollout", "rollout.probing", "rollout.loss_batch", "rollout.forward_batch"):
            stack.enter_context(patch.object(modules[f"flowrl.{name}"], "to_device", to_device))
        stack.enter_context(mode)
        timesteps = None if schedule.timesteps is None else moved(schedule.timesteps, mode)
        there = Schedule(moved(schedule.times, mode), timesteps)
        spread.return_value = moved(stds, mode)
        noise = torch.randn(trainer.groups.samples, *policy.latent_shape, device=NAME)
        advantages, weights = torch.randn(2, trainer.groups.samples, len(decisions), device=NAME)
        one_device = stack.enter_context(OneDevice())
        found = rollout(policy, sampler, there, condition, noise, Generator(), trainer.groups, credit.probe, Usage(), max_batch=4)
        made = [found.trajectories.states, found.trajectories.outputs, *(one.latents for one in found.estimates.values())]
        stored = "cpu" if trainer.config.rollout.offload else NAME
        path = found.trajectories
        kept = replace(found, trajectories=replace(path, **{n: torch.empty(getattr(path, n).shape, device=stored) for n in PATH}))
        index = torch.zeros(5, dtype=torch.long, device=stored)
        if isinstance(loss, ForwardLoss):
            stack.enter_context(patch.object(modules["flowrl.rollout.forward_batch"], "training_noise", training_noise))
            times, copies = torch.rand(trainer.groups.samples, 2, device=NAME), trainer.copies.by_name
            one_device.allowed = True  # before the loop over micro-batches
            batches = ForwardBatches(policy, loss, kept, condition, advantages, weights, times, decisions, 0, copies)
            one_device.allowed = False
        else:
            batches = LossBatches(policy, sampler, kept, condition, advantages, weights, with_reference=True)
        loss.loss(batches.of(index, index)).loss.backward()
    made += [p.grad for p in policy.trainable().values() if p.grad is not None]
    assert {tensor.device.type for tensor in made} == {NAME}


def outcome(*given, **named):
    """ "ok", or the error."""
    try:
        work(*given, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(NAME)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = {case: outcome(model, changes, mode) for case, (model, changes) in CASES.items()}
    plain = dict(method="flow-grpo")
    found["constant on the CPU"] = outcome("mixture", plain, mode, loss=FromTheCpu(kl_weight=0.1))
    found["copy to the CPU"] = outcome("mixture", plain, mode, loss=ToTheCpu(kl_weight=0.1))
    found["index on the CPU"] = outcome("mixture", plain, mode, sampler=CpuIndex)
    print(json.dumps(found))
