"""Between the first and the last network call of a rollout, and within the loop over micro-batches,
the host never waits for the device: it can therefore prepare work ahead of the device.
"""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from device_cases import any_trainer
from host_sync import HostSyncError, no_host_sync

from flowrl.core.errors import PartError
from flowrl.losses import ClippedLoss

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
WAITS_NOT = {
    "index": lambda t: t[torch.arange(2, device=t.device)],
    "fill by mask": lambda t: t.masked_fill(t > 0, 0.0),
    "repeats": lambda t: t.repeat_interleave(3),
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "dtype": lambda t: t.to(torch.float16).to(t.device),
    "sum": lambda t: t.sum() / len(t),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_makes_the_host_wait_is_refused(name, device):
    values = torch.arange(1.0, 4.0, device=device)
    with pytest.raises((HostSyncError, RuntimeError)), no_host_sync(device):
        WAITS[name](values)
    WAITS[name](values)


@pytest.mark.parametrize("name", WAITS_NOT)
def test_what_does_not_is_allowed(name, device):
    values = torch.arange(1.0, 4.0, device=device)
    with no_host_sync(device):
        WAITS_NOT[name](values)


def watched(trainer, device):
    """`trainer`, watched from the first network call of every rollout to its last step, and in
    every loop over micro-batches. Returns a dictionary that counts both.
    """
    policy, entered = trainer.policy, {"rollout": 0, "micro-batch": 0}
    frozen, velocity, minibatches, steps = (
        policy.frozen,
        policy.velocity,
        trainer.minibatches,
        ExitStack(),
    )
    sampling = []

    class Frozen:
        def __enter__(self):
            self.inner = frozen()
            self.inner.__enter__()
            sampling.append(True)

        def __exit__(self, *error):
            sampling.clear()
            steps.close()
            return self.inner.__exit__(*error)

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

    policy.frozen, policy.velocity = Frozen, watched_velocity
    trainer.minibatches = lambda *given: [
        (Watched(minibatch), count) for minibatch, count in minibatches(*given)
    ]
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
    trainer = any_trainer(
        name,
        device,
        dtype=dtype,
        guidance_scale=3.0,
        kl_weight=0.1,
        loss_scale=64.0,
        options={"gradient_checkpointing": True},
    )
    entered = watched(trainer, device)
    assert trainer.iteration()["grad_norm"] > 0
    assert entered["micro-batch"] >= 2


class Reads(ClippedLoss):
    def loss(self, batch):
        result = super().loss(batch)
        assert result.loss.item() == result.loss.item()
        return result


class Constant(ClippedLoss):
    def loss(self, batch):
        result = super().loss(batch)
        return replace(
            result, loss=result.loss + (batch.advantages * torch.ones(len(batch.weight))).sum()
        )


@pytest.mark.parametrize("loss", [Reads, Constant])
def test_a_loss_that_reads_its_value_or_has_a_constant_on_the_host_is_caught(loss, device):
    trainer = any_trainer("mixture", device)
    trainer.method = replace(trainer.method, loss=loss(clip_range=1e-3))
    watched(trainer, device)
    with pytest.raises(
        PartError,
        match=r"_local_scalar_dense|synchronizing|on the host|same device",
    ):
        trainer.iteration()


def test_a_sampler_that_reads_a_time_is_caught(device):
    trainer = any_trainer("mixture", device)
    kept = trainer.method.sampler.transition

    class Sampler:
        def transition(self, latent, velocity, schedule, step):
            return kept(
                latent, velocity, schedule, step + 0 * int(schedule.times[int(step[0])] < 0)
            )

    trainer.method = replace(trainer.method, sampler=Sampler())
    watched(trainer, device)
    with pytest.raises(PartError, match=r"_local_scalar_dense|synchronizing"):
        trainer.iteration()
