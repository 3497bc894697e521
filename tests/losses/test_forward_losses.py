"""DiffusionNFT, AWM, DGPO and CRD against closed forms: identities, gradients, sums over groups, parts
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
from flowrl.losses import AWM, CRD, DGPO, DiffusionNFT
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


@pytest.mark.parametrize("clip", [5.0, 2.0])
def test_crd_begins_with_the_gradient_of_awm(clip):
    """The squares; the cross entropy's is c (sigmoid(A / (2 c)) - 1/2) grad l, for small A an eighth
    of it.
    """
    batch = batch_of(2)
    batch = replace(batch, old=batch.new.detach(), advantages=batch.advantages.clamp(-clip, clip))
    means = batch.advantages.view(GROUPS, MEMBERS, DRAWS).mean(1, keepdim=True)
    centred = (batch.advantages.view(GROUPS, MEMBERS, DRAWS) - means).flatten()
    awm = AWM(weight="uniform", advantage_clip=99.0, advantage_scale=99.0, clip=1e9, **PLAIN)
    expected = gradient(awm, replace(batch, advantages=centred))
    for beta in (0.3, 2.0):
        squares_ = CRD(beta=beta, advantage_clip=clip, kl_weight=0.0)
        close(gradient(squares_, batch), expected)
        entropy = replace(squares_, form="bce")
        weight = clip * ((centred / (2 * clip)).sigmoid() - 0.5)
        close(gradient(entropy, batch), gradient(awm, replace(batch, advantages=weight)))
        small = replace(batch, advantages=1e-4 * batch.advantages)
        close(gradient(entropy, small), 1e-4 * expected / 8, 1e-8)


def test_crd_by_hand():
    """One group of two rows of one element, targets 0, v_old = (1, 1), v = (0.5, 2): r = (0.75, -3),
    u = (0.6, 0.4): (2 (r - mean) - (u - mean))^2 = 3.65^2, times c / beta = 2.5. Normalised: r = 1 -
    |v|. Clipped advantages have u = 1 and 0.
    """
    one = torch.ones(2, 1)
    row = torch.arange(2)
    batch = ForwardBatch(
        time=torch.full((2,), 0.5),
        target=0 * one,
        new=torch.tensor([[0.5], [2.0]], requires_grad=True),
        advantages=torch.tensor([1.0, -1.0]),
        weight=torch.ones(2),
        group=0 * row,
        sample=row,
        old=one,
        reference=0 * one,
    )
    loss = CRD(beta=2.0, kl_weight=0.0)
    result = loss.loss(batch)
    assert float(result.loss.detach()) == pytest.approx(2.5 * 3.65**2)
    assert float(result.metrics["implied_reward"]) == pytest.approx(-1.125)
    assert float(result.metrics["old_distance"]) == pytest.approx((0.25 + 1.0) / 2)
    normalised = replace(loss, error="normalised").loss(batch).loss
    assert float(normalised.detach()) == pytest.approx(2.5 * (2 * 0.75 - 0.1) ** 2)
    far = replace(batch, advantages=torch.tensor([9.0, -50.0]))
    assert float(loss.loss(far).loss.detach()) == pytest.approx(2.5 * (2 * 1.875 - 0.5) ** 2)
    probability = torch.tensor([0.1, -0.1]).sigmoid()
    logit = torch.tensor([3.75, -3.75])
    entropy = -(probability * logit.sigmoid().log() + (1 - probability) * (-logit).sigmoid().log())
    assert_close(replace(loss, form="bce").loss(batch).loss, 2.5 * entropy.mean())
    held = replace(loss, kl_weight=0.1).loss(batch).metrics["kl"]  # f = 1e-3 + u (1 - 1e-3)
    assert float(held) == pytest.approx((0.6004 * 0.25 + 0.4006 * 4.0) / 2)


AVERAGE = Decay(0, 0.001, 0.3)


@pytest.mark.parametrize(
    ("loss", "copies", "needs_reference"),
    [
        (AWM(), {"old": WeightCopy(), "average": WeightCopy(AVERAGE)}, True),
        (AWM(off_policy=True), {"average": WeightCopy(AVERAGE, sample_from=0)}, True),
        (dgpo(), {"old": WeightCopy(Decay(1, 0.001, 0.3), "update", 200, False)}, True),
        (
            CRD(sampling_decay=(75, 0.0075, 0.999), kl_weight=0.0),
            {
                "old": WeightCopy(Decay(0, 0.001, 0.5)),
                "average": WeightCopy(Decay(75, 0.0075, 0.999), sample_from=0, evaluated=False),
            },
            False,
        ),
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
