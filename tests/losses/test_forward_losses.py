"""DiffusionNFT, AWM and DGPO against closed forms: identities, gradients, sums over groups, parts
of groups.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import seeded
from torch.testing import assert_close

from flowrl.core.forward import Decay, ForwardBatch, WeightCopy
from flowrl.losses import AWM, DGPO, DiffusionNFT
from flowrl.losses.terms import quadratic

GROUPS, MEMBERS, DRAWS = 2, 3, 2
ROWS = GROUPS * MEMBERS * DRAWS
SHAPE = (2, 3)
PLAIN = {"kl_weight": 0.0, "average_weight": 0.0}


def squares(x):
    return x.square().flatten(1).mean(1)


def inner(x, y):
    return (x * y).flatten(1).mean(1)


def batch_of(seed):
    """Rows in float64: networks 0.3 from each other, times equal for all members, advantages
    that sum to 0 in a group.
    """
    generator = seeded(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sample = torch.arange(GROUPS * MEMBERS).repeat_interleave(DRAWS)
    target, base = draw(ROWS, *SHAPE), draw(ROWS, *SHAPE)
    new, old, average, reference = (base + 0.3 * draw(ROWS, *SHAPE) for _ in range(4))
    advantages = draw(GROUPS, MEMBERS)
    advantages = (advantages - advantages.mean(1, keepdim=True)).flatten()[sample]
    return ForwardBatch(
        time=torch.tensor([0.8, 0.3], dtype=torch.float64).repeat(GROUPS * MEMBERS),
        target=target,
        new=new.requires_grad_(),
        advantages=advantages,
        weight=torch.ones(ROWS),
        group=sample // MEMBERS,
        sample=sample,
        old=old,
        average=average,
        reference=reference,
    )


def gradient(loss, batch):
    (derivative,) = torch.autograd.grad(loss.loss(batch).loss, batch.new)
    return derivative


def close(got, expected, tolerance=1e-12):
    assert_close(
        got, expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max())
    )


@given(seed=st.integers(0, 10**6), beta=st.floats(0.05, 2.0), clip=st.floats(3.0, 8.0))
@settings(max_examples=30, deadline=None)
def test_nft_is_linear_matching_plus_a_proximal_term(seed, beta, clip):
    """Where both branches have the same w: (t^2/w) [(c/beta) l(v_old) + 2A <v_old - v*, v - v_old>
    + c beta |v - v_old|^2]. The branches of the paper's error have no w; its identity is that one
    with t^2/w = beta/c.
    """
    batch = batch_of(seed)
    batch = replace(batch, advantages=batch.advantages.clamp(-clip, clip))
    loss = DiffusionNFT(beta=beta, advantage_clip=clip, kl_weight=0.0, error="velocity")
    step, error = batch.new - batch.old, batch.old - batch.target
    linear = 2 * batch.advantages * inner(error, step)
    expected = beta / clip * (clip / beta * squares(error) + linear + clip * beta * squares(step))
    close(loss.loss(batch).loss, expected.mean())


def test_v_grpo_begins_with_the_gradient_of_diffusion_nft():
    """At the old weights, for one time per sample."""
    batch = batch_of(1)
    new = batch.new.detach()
    batch = replace(batch, old=new, average=new, reference=new)
    loss = AWM(weight="normalised", advantage_scale=5.0, **PLAIN)
    close(gradient(loss, batch), gradient(DiffusionNFT(kl_weight=0.0), batch))


def test_the_quadratic_bound_of_fdfo():
    """q = 0.02, c = 0.03, D = +-0.1: -D rho + |D| (rho - 1)^2 / (2 c)."""
    ratio, difference = torch.tensor([0.02, 0.02]).exp(), torch.tensor([0.1, -0.1])
    assert_close(
        quadratic(ratio, difference, 0.03), torch.tensor([-0.101340, 0.102700]), atol=1e-6, rtol=0
    )
    batch, loss = batch_of(4), AWM(weight="uniform", trust="quadratic", clip=0.5, **PLAIN)
    ratio = (squares(batch.old - batch.target) - squares(batch.new - batch.target)).exp()
    close(loss.loss(batch).loss, quadratic(ratio, batch.advantages / 5, 0.5).mean())


def dgpo(**options):
    return DGPO(**{"kl_weight": 0.0, "clip": None, "beta_dpo": 3.0, **options})


AVERAGE = Decay(0, 0.001, 0.3)


@pytest.mark.parametrize(
    ("loss", "copies", "needs_reference"),
    [
        (AWM(), {"old": WeightCopy(), "average": WeightCopy(AVERAGE)}, True),
        (AWM(off_policy=True), {"average": WeightCopy(AVERAGE, sample_from=0)}, True),
        (dgpo(), {"old": WeightCopy(Decay(1, 0.001, 0.3), "update", 200, False)}, True),
        (dgpo(anchor="old"), {"old": WeightCopy(Decay(1, 0.001, 0.3), "update", 200)}, False),
    ],
)
def test_the_copies_of_the_weights_and_the_reference_that_a_loss_needs(
    loss, copies, needs_reference
):
    assert (loss.copies, loss.needs_reference) == (copies, needs_reference)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (Decay(), {1: 0.0, 1000: 0.0}),
        (Decay(75, 0.0075, 0.999), {74: 0.0, 75: 0.0, 76: 0.0075, 101: 0.195, 209: 0.999}),
        (Decay(0, 0.9, 0.9), {0: 0.0, 1: 0.9, 9: 0.9}),
    ],
)
def test_decays_by_hand(decay, expected):
    assert {step: decay.at(step) for step in expected} == pytest.approx(expected, abs=1e-15)
