"""Rollouts and losses on a simulated device: tensors have a device, a shape and a type, but no values.

Run as a program of its own, because a device cannot be removed again. Prints a JSON object: per case the error, or "ok".
"""

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from sys import modules
from unittest.mock import patch

import torch
from device_cases import any_trainer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from flowrl.losses import ClippedLoss
from flowrl.rollout import Usage, attach_stds, group_tree, rollout
from flowrl.rollout.loss_batch import LossBatches
from flowrl.types import Schedule

NAME = "simulated"
METHODS = {
    "completions": dict(method="tp-grpo"),
    "substeps, shared noise": dict(method="stepwise-flow-grpo"),
    "continuations": dict(credit="stepwise-gain(probe='continuation:2')", window="1:2"),
    "completions, shared noise": dict(method="stepwise-flow-grpo", credit="stepwise-gain(probe=completion)", window="1:2"),
}
CASES = {f"mixture: {name}": ("mixture", changes) for name, changes in METHODS.items()}
CASES |= {f"{model}: completions": (model, METHODS["completions"]) for model in ("shapes", "sd3", "flux")}


class FromTheCpu(ClippedLoss):
    """Has a constant on the CPU."""

    def loss(self, batch):
        found = super().loss(batch)
        return replace(found, loss=found.loss + (batch.advantages * torch.ones(len(batch.mask))).sum())


class ToTheCpu(ClippedLoss):
    """Copies to the CPU."""

    def loss(self, batch):
        return super().loss(replace(batch, advantages=batch.advantages.cpu().to(batch.mask.device)))


class CpuIndex:
    """A sampler whose index is on the CPU, which PyTorch allows and copies."""

    def __init__(self, sampler):
        self.sampler = sampler

    def transition(self, latent, velocity, schedule, step):
        return self.sampler.transition(latent[torch.arange(len(latent))], velocity, schedule, step)


class OneDevice(TorchDispatchMode):
    """Refuses operations on or between two devices, numbers apart."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_iter((args, kwargs, found)) if isinstance(t, Tensor) and t.ndim > 0]
        devices = {t.device.type for t in tensors}
        if len(devices) > 1:
            raise RuntimeError(f"{func} has tensors on {' and '.join(sorted(devices))}")
        return found


class Generator:
    """Nothing is drawn from it."""

    device = f"{NAME}:0"


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


def simulated(tree, mode):
    """A tree that was made before the simulation, which cannot read its numbers, as if its tensors were on the device."""
    fake = partial(moved, mode=mode)
    names = ("parent", "node", "drawn", "paths")
    found = replace(tree, **{name: fake(getattr(tree, name)) for name in names})
    parts = ("units", "parents", "place")
    edges = [[replace(one, **{part: fake(getattr(one, part)) for part in parts}) for one in at] for at in tree.edges]
    found.__dict__.update({"counts": tree.counts, "first_members": tree.first_members, "edges": edges})
    found.__dict__.update({name: fake(getattr(tree, name)) for name in ("passes", "leaves", "decisions")})
    return found


def work(model, changes, mode, sampler=None, loss=None):
    """A rollout, a loss with the reference, and its backward pass."""
    trainer = any_trainer(model, "cpu", kl_weight=0.1, **changes)
    policy, credit = trainer.policy, trainer.method.credit
    condition = policy.encode(trainer.prompts.take(2))
    drawn = trainer.draw_sampler()
    schedule = attach_stds(trainer.schedule, drawn)
    decisions = schedule.decisions
    tree = group_tree(schedule, trainer.groups, credit.probe, torch.Generator())
    tree = simulated(tree, mode)
    sampler, loss = sampler(drawn) if sampler else drawn, loss or trainer.method.loss
    move_policy(policy, mode)
    condition = replace(condition, tensors={name: moved(tensor, mode) for name, tensor in condition.tensors.items()})
    randn = torch.randn
    with ExitStack() as stack:
        stack.enter_context(patch.object(Schedule, "__post_init__", lambda schedule: None))  # it reads the times
        stack.enter_context(patch.object(torch, "randn", lambda *shape, generator=None, **named: randn(*shape, **named)))
        stack.enter_context(patch.object(modules["flowrl.rollout.rollout"], "attach_stds", lambda schedule, sampler: schedule))
        stack.enter_context(patch.object(modules["flowrl.rollout.rollout"], "group_tree", lambda *given: tree))
        stack.enter_context(patch.object(Schedule, "decisions", decisions))
        stack.enter_context(patch.object(modules["flowrl.rollout.probing"], "own_generator", lambda generator: generator))
        stack.enter_context(mode)
        timesteps = None if schedule.timesteps is None else moved(schedule.timesteps, mode)
        there = Schedule(moved(schedule.times, mode), timesteps, moved(schedule.stds, mode))
        noise = torch.randn(trainer.groups.samples, *policy.latent_shape, device=NAME)
        index = torch.zeros(5, dtype=torch.long, device=NAME)
        advantages = torch.randn(trainer.groups.samples, there.steps, device=NAME)
        stack.enter_context(OneDevice())
        found = rollout(policy, sampler, there, condition, noise, Generator(), trainer.groups, credit.probe, Usage(), max_batch=4)
        batches = LossBatches(policy, sampler, found, condition, advantages, with_reference=True)
        loss.loss(batches.of(index, index + 1)).loss.backward()
    made = [found.trajectories.nodes, found.trajectories.velocities, *found.estimates.values()]
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
    mode = FakeTensorMode()
    found = {case: outcome(model, changes, mode) for case, (model, changes) in CASES.items()}
    plain = dict(method="flow-grpo")
    found["constant on the CPU"] = outcome("mixture", plain, mode, loss=FromTheCpu(kl_weight=0.1))
    found["copy to the CPU"] = outcome("mixture", plain, mode, loss=ToTheCpu(kl_weight=0.1))
    found["index on the CPU"] = outcome("mixture", plain, mode, sampler=CpuIndex)
    print(json.dumps(found))
