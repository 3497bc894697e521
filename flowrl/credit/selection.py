"""Which steps deserve their long-term reward: stricter criteria than the signs alone, and a blind control."""

import hashlib

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.credit.table import gains, reward_to_go

Steps = Bool[Tensor, "prompt member node-1"]


def large_aggregates(rewards: Float[Tensor, "prompt member node"], least: float) -> Steps:
    """Where |R_T - R_i| >= `least` (in units of the reward): a magnitude threshold. `least` = 0 keeps every step."""
    return reward_to_go(rewards).abs() >= least


def clear_swings(rewards: Float[Tensor, "prompt member node"], confidence: float) -> Steps:
    """Where |d_i| >= `confidence` times the std of d_i over the group's members at that step (population std).

    A turn that is small against the spread of its own step may be an accident of the estimate; `confidence` = 0 keeps every
    step. d_i = R_{i+1} - R_i.
    """
    increments = gains(rewards)
    spread = increments.std(dim=1, keepdim=True, unbiased=False)
    return increments.abs() >= confidence * spread


def random_steps(rewards: Float[Tensor, "prompt member node"], selected: Steps, seed: int = 0) -> Steps:
    """As many steps per trajectory as `selected` has, at places that know nothing of the rewards' sizes or signs.

    The control for "does the *place* of a turning point matter, or only that some steps get R_T - R_i?". The places are a
    pseudo-random permutation of the steps, drawn from `seed` and the order of the trajectory's rewards: a pure function of the
    table that does not change when members are permuted or a constant is added. Trajectories of the same order share it.
    """
    steps = selected.shape[-1]
    orders = rewards.argsort(dim=-1, stable=True).flatten(0, 1).tolist()
    known: dict[tuple[int, ...], list[int]] = {}
    for order in map(tuple, orders):
        if order not in known:
            digest = hashlib.sha256(repr((seed, order)).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            known[order] = torch.randperm(steps, generator=generator).tolist()
    places = torch.tensor([known[tuple(order)] for order in orders], device=selected.device).view(selected.shape)
    counts = selected.sum(dim=-1, keepdim=True)
    return places < counts
