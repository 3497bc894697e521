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
from flowrl.flow import expand
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


def at_old(batch):
    """The batch with all networks equal to `new`."""
    new = batch.new.detach()
    return replace(batch, old=new, average=new, reference=new)


def clipped_rows(batch, clip):
    """Where the errors' ratio is beyond the clip in the direction of the advantage."""
    ratio = (squares(batch.old - batch.target) - squares(batch.new.detach() - batch.target)).exp()
    clipped = torch.where(batch.advantages > 0, ratio > 1 + clip, ratio < 1 - clip)
    assert 0 < clipped.sum() < ROWS
    return clipped


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


def test_nft_gradient_by_the_closed_form():
    """dL/dv = (c/beta) (t^2/d) 2 beta [r (v+ - v*)/w+ - (1-r)(v- - v*)/w-] + 2 kl (v - v_ref)/d,
    over the number of rows.
    """
    batch, beta = batch_of(3), 0.7
    loss = DiffusionNFT(beta=beta, kl_weight=0.2, advantage_clip=2.0)
    new, d = batch.new.detach(), 6
    plus, minus = (batch.old + s * beta * (new - batch.old) - batch.target for s in (1, -1))
    t = expand(batch.time, new)
    w_plus, w_minus = (t * expand(x.abs().flatten(1).mean(1), x) for x in (plus, minus))
    r = expand((0.5 + batch.advantages.clamp(-2, 2) / 4), new)
    pull = 2.0 * t.square() * (r * plus / w_plus - (1 - r) * minus / w_minus)
    expected = (pull + 0.2 * (new - batch.reference)) * 2 / d / ROWS
    close(gradient(loss, batch), expected)
    positive = (batch.time.square() * squares(plus) / w_plus[:, 0, 0]).mean()
    close(loss.loss(batch).metrics["positive"], positive)


@pytest.mark.parametrize("weight", ["uniform", "t", "t2", "huber", "ghuber"])
def test_awm_at_the_old_weights_is_advantage_weighted_matching(weight):
    """dL/dv = -A/5 dlog p/dv: the weight of (v - v*) is A/5 times 2/d times 1, t, t^2, t/(2 sqrt l)
    or t l^(p-1).
    """
    batch = at_old(batch_of(1))
    loss = AWM(weight=weight, **PLAIN)
    error, t = (batch.new - batch.target).detach(), batch.time
    matching = squares(error) + 1e-10
    factor = {
        "uniform": torch.ones_like(t),
        "t": t,
        "t2": t.square(),
        "huber": t / (2 * matching.sqrt()),
        "ghuber": t * matching**-0.75,
    }[weight]
    expected = expand(batch.advantages / 5 * factor, error) * 2 * error / 6 / ROWS
    close(gradient(loss, batch), expected)
    assert float(loss.loss(batch).metrics["ratio_deviation"]) == 0.0
    assert loss.log_prob(batch.target, batch.target, t).abs().max() < 1e-12


def test_v_grpo_begins_with_the_gradient_of_diffusion_nft():
    """At the old weights, for one time per sample."""
    batch = at_old(batch_of(1))
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


def test_awm_clips_only_what_the_advantage_pushes_outwards():
    batch = batch_of(6)
    loss, clipped = AWM(weight="uniform", clip=0.05, **PLAIN), clipped_rows(batch, 0.05)
    rows = gradient(loss, batch).flatten(1)
    assert (rows[clipped] == 0).all() and (rows[~clipped] != 0).any(1).all()


def test_sum_first_is_one_ratio_per_sample():
    """Gradient of max(-A r_s, -A clip(r_s)), r_s = exp(mean over times of log p - log p_old), by
    autograd on the whole table.
    """
    batch = batch_of(7)
    loss = AWM(weight="t", ratio="sum_first", clip=0.1, **PLAIN)
    new = batch.new.detach().clone().requires_grad_()
    now, before = (loss.log_prob(v, batch.target, batch.time) for v in (new, batch.old))
    ratio = (now - before).view(-1, DRAWS).mean(1).exp()
    advantages = loss.scaled(batch.advantages).view(-1, DRAWS)[:, 0]
    objective = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.9, 1.1)).mean()
    (expected,) = torch.autograd.grad(objective, new)
    close(loss.loss(batch).loss, objective)
    close(gradient(loss, batch), expected)


def test_elbo_weight_is_that_of_flow_sde():
    """1 / (2 sigma^2) with Flow-SDE's sigma = 0.7 sqrt(t / (1-t))."""
    batch, loss = batch_of(8), AWM(kl="elbo", kl_weight=2.0, average_weight=0.0)
    errors = squares(batch.new - batch.reference).detach()
    expected = errors / (2 * 0.49 * batch.time / (1 - batch.time))
    close(loss.loss(batch).metrics["kl"], expected.mean())


def dgpo(**options):
    return DGPO(**{"kl_weight": 0.0, "clip": None, "beta_dpo": 3.0, **options})


def test_dgpo_is_the_gradient_of_its_logistic_objective():
    """-log sigmoid(-S) / beta_dpo, mean over groups and times, by autograd through S."""
    batch, beta = batch_of(9), 3.0
    new = batch.new.detach().clone().requires_grad_()
    gap = squares(new - batch.target) - squares(batch.reference - batch.target)
    sums = (beta * batch.advantages * gap).view(GROUPS, MEMBERS, DRAWS).mean(1)
    (expected,) = torch.autograd.grad(-torch.nn.functional.logsigmoid(-sums).mean() / beta, new)
    close(gradient(dgpo(), batch), expected)


def test_dgpo_clips_by_the_errors_of_the_old_network():
    batch = batch_of(12)
    clipped = clipped_rows(batch, 0.1)
    for kl_weight, clip_kl in ((0.0, False), (0.5, False), (0.5, True)):
        rows = gradient(dgpo(clip=0.1, kl_weight=kl_weight, clip_kl=clip_kl), batch)
        penalty = 2 * kl_weight * (1 - clip_kl) * (batch.new - batch.reference).detach() / 6 / ROWS
        close(rows[clipped], penalty[clipped])
        assert (rows - penalty)[~clipped].abs().flatten(1).max(1).values.min() > 0


def test_modes_of_nft():
    advantages = torch.tensor([-8.0, -1.0, 0.0, 2.0, 8.0])
    expected = {
        "all": [0.0, 0.4, 0.5, 0.7, 1.0],
        "positive_only": [0.5, 0.5, 0.5, 0.7, 1.0],
        "negative_only": [0.0, 0.4, 0.5, 0.5, 0.5],
        "one_only": [0.5, 0.5, 0.5, 0.6, 0.6],
        "binary": [0.4, 0.4, 0.5, 0.6, 0.6],
    }
    for mode, values in expected.items():
        assert_close(DiffusionNFT(mode=mode).optimality(advantages), torch.tensor(values))


AVERAGE, NFT_DECAY = Decay(0, 0.001, 0.3), Decay(0, 0.001, 0.5)


@pytest.mark.parametrize(
    ("loss", "copies", "needs_reference"),
    [
        (DiffusionNFT(), {"old": WeightCopy(NFT_DECAY, sample_from=0)}, True),
        (DiffusionNFT(kl_weight=0.0), {"old": WeightCopy(NFT_DECAY, sample_from=0)}, False),
        (AWM(), {"old": WeightCopy(), "average": WeightCopy(AVERAGE)}, True),
        (AWM(**PLAIN), {"old": WeightCopy()}, False),
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
