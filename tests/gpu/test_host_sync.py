"""Between the first and the last network call of a rollout, and within the loop over micro-batches,
the host never waits for the device: it can therefore prepare work ahead of the device.
"""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from device_cases import any_trainer
from host_sync import HostSyncError, no_host_sync

WAITS = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0] > 0),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "assignment by mask": lambda t: t.__setitem__(t > 0, 0.0),
    "equal": lambda t: torch.equal(t, t),
    "number": lambda t: torch.tensor(1.0, device=t.device),
    "repeats": lambda t: t.repeat_interleave(torch.ones_like(t, dtype=torch.long)),
}
ALLOWED = {
    "index": lambda t: t[torch.arange(2, device=t.device)],
    "fill by mask": lambda t: t.masked_fill(t > 0, 0.0),
    "repeats": lambda t: t.repeat_interleave(3),
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "dtype": lambda t: t.to(torch.float16).to(t.device),
    "sum": lambda t: t.sum() / len(t),
}


def test_what_makes_the_host_wait_is_refused_and_nothing_else(device):
    values = torch.arange(1.0, 4.0, device=device)
    for operation in WAITS.values():
        with pytest.raises((HostSyncError, RuntimeError)), no_host_sync(device):
            operation(values)
        operation(values)
    with no_host_sync(device):
        for operation in ALLOWED.values():
            operation(values)


def watched(trainer, device):
    """`trainer`, watched from the first network call of every rollout to its last step, and in
    every loop over micro-batches. Returns a dictionary that counts both.
    """
    policy, entered = trainer.policy, {"rollout": 0, "micro-batch": 0}
    frozen, velocity, objective = policy.frozen, policy.velocity, trainer.objective
    sampling, steps = [], ExitStack()

    @contextmanager
    def watched_frozen():
        with frozen():
            sampling.append(True)
            try:
                yield
            finally:
                sampling.clear()
                steps.close()

    def watched_velocity(*given):
        if sampling and sampling.pop():
            steps.enter_context(no_host_sync(device))
            entered["rollout"] += 1
        return velocity(*given)

    class Watched(list):
        def __iter__(self):
            with no_host_sync(device):
                for micro in super().__iter__():
                    entered["micro-batch"] += 1
                    yield micro

    policy.frozen, policy.velocity = watched_frozen, watched_velocity

    def watched_objective(*given):
        made = objective(*given)
        micro_batches = made.micro_batches
        made.micro_batches = lambda *rows: Watched(micro_batches(*rows))
        return made

    trainer.objective = watched_objective
    return entered


CASES = {
    "completions": dict(method="tp-grpo", kl_weight=0.1),
    "one-step estimates": dict(
        method="stepwise-flow-grpo", credit="stepwise-gain(probe='substeps:2')"
    ),
    "continuations": dict(credit="stepwise-gain(probe='continuation:2')"),
    "window, small batches, chunks": dict(method="flow-grpo", window="1:3", max_batch=2, chunk=1),
    "guard": dict(method="flow-grpo", loss="grpo-guard", kl_weight=0.1),
    "dppo": dict(method="flow-grpo", loss="flow-dppo"),
    "gspo": dict(method="flow-grpo", loss="gspo"),
    "policy gradient": dict(method="flow-grpo", loss="policy-gradient"),
    "comb": dict(credit="sibling-relative(probe='comb(branches=3, count=1)')"),
    "branches": dict(
        credit="depth-relative(probe='branch(children=(1, 3))')",
        window="0:2",
        kl_weight=0.1,
        micro_batch=2,
    ),
    "diffusion-nft": dict(method="diffusion-nft", kl_weight=0.1),
    "awm": dict(method="awm", kl_weight=0.1, num_steps=8),
    "dgpo, groups in several micro-batches": dict(method="dgpo", num_steps=8, micro_batch=2),
    "crd, groups in several micro-batches": dict(loss="crd", num_steps=8, micro_batch=2),
    "offloaded": dict(method="flow-grpo", offload=True, chunk=1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["mixture", "shapes", "sd3", "flux"])
def test_the_host_never_waits_inside_rollouts_and_updates(name, case, device):
    trainer = any_trainer(name, device, **CASES[case])
    entered = watched(trainer, device)
    assert trainer.iteration()["grad_norm"] > 0
    assert entered["rollout"] >= 1 and entered["micro-batch"] >= 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_nor_with_guidance_autocast_checkpointing_and_a_scaled_loss(name, dtype, device):
    options = {"gradient_checkpointing": True}
    changes = dict(guidance_scale=3.0, kl_weight=0.1, loss_scale=64.0, options=options)
    trainer = any_trainer(name, device, dtype=dtype, **changes)
    entered = watched(trainer, device)
    assert trainer.iteration()["grad_norm"] > 0
    assert entered["micro-batch"] >= 2
