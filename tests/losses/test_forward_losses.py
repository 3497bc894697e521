"""DiffusionNFT, AWM and DGPO against closed forms: identities, gradients, sums over groups, parts
of groups.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.core.errors import ConfigError
from flowrl.core.forward import Decay, ForwardBatch, WeightCopy
from flowrl.core.protocols import ForwardLoss
from flowrl.core.types import unit_means
from flowrl.flow import expand
from flowrl.losses import AWM, DGPO, DiffusionNFT

GROUPS, MEMBERS, DRAWS = 2, 3, 2
ROWS = GROUPS * MEMBERS * DRAWS
SHAPE = (2, 3)


def squares(x):
    return x.square().flatten(1).mean(1)


def inner(x, y):
    return (x * y).flatten(1).mean(1)


def batch_of(seed=0, apart=0.3, **given):
    """Rows in float64: networks `apart` from each other, times equal for all members, advantages
    that sum to 0 in a group.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sample = torch.arange(GROUPS * MEMBERS).repeat_interleave(DRAWS)
    target, base = draw(ROWS, *SHAPE), draw(ROWS, *SHAPE)
    new, old, average, reference = (base + apart * draw(ROWS, *SHAPE) for _ in range(4))
    advantages = draw(GROUPS, MEMBERS)
    advantages = (advantages - advantages.mean(1, keepdim=True)).flatten()[sample]
    values = dict(
        time=torch.tensor([0.8, 0.3], dtype=torch.float64).repeat(GROUPS * MEMBERS),
        target=target,
        new=new,
        advantages=advantages,
        weight=torch.ones(ROWS),
        group=sample // MEMBERS,
        sample=sample,
        old=old,
        average=average,
        reference=reference,
    )
    values |= given
    values["new"] = values["new"].detach().clone().requires_grad_()
    return ForwardBatch(**values)


def at_old(batch):
    """The batch with all networks equal to `new`."""
    new = batch.new.detach()
    return replace(batch, old=new, average=new, reference=new)


def gradient(loss, batch):
    (found,) = torch.autograd.grad(loss.loss(batch).loss, batch.new)
    return found


def take(batch, rows):
    few = batch.rows(rows)
    return replace(few, new=few.new.detach().requires_grad_())


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(
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


def test_nft_identity_with_the_released_weights():
    """w+ = w-, because all elements of the error are equal and the step adds to one half of them
    what it takes from the other.
    """
    size = torch.linspace(0.5, 2.0, ROWS, dtype=torch.float64)[:, None, None]
    halves = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64).view(1, *SHAPE)
    batch, error, step = batch_of(), size.expand(-1, *SHAPE), 0.3 * size * halves + 0.0
    batch = replace(
        batch, old=batch.target + error, new=(batch.target + error + step).requires_grad_()
    )
    for beta in (1.0, 0.1):
        loss = DiffusionNFT(beta=beta, kl_weight=0.0)
        w = batch.time * size.flatten()
        inside = (
            5 / beta * squares(error)
            + 2 * batch.advantages * inner(error, step)
            + 5 * beta * squares(step)
        )
        result = loss.loss(batch)
        close(result.loss, (batch.time.square() / w * inside).mean())
        close(
            result.metrics["positive"],
            (batch.time.square() * squares(error + beta * step) / w).mean(),
        )


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
    expected = (
        2.0 * t.square() * 2 / d * (r * plus / w_plus - (1 - r) * minus / w_minus)
        + 2 * 0.2 * (new - batch.reference) / d
    )
    close(gradient(loss, batch), expected / ROWS)


@pytest.mark.parametrize("weight", ["uniform", "t", "t2", "huber", "ghuber"])
def test_awm_at_the_old_weights_is_advantage_weighted_matching(weight):
    """dL/dv = -A/5 dlog p/dv: the weight of (v - v*) is A/5 times 2/d times 1, t, t^2, t/(2 sqrt l)
    or t l^(p-1).
    """
    batch = at_old(batch_of(1))
    loss = AWM(weight=weight, kl_weight=0.0, average_weight=0.0, advantage_clip=5.0)
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


def test_nft_without_advantage_is_proximal_only():
    batch, loss = batch_of(5), DiffusionNFT(beta=0.5, kl_weight=0.0, error="velocity")
    still = replace(batch, advantages=0 * batch.advantages)
    close(gradient(loss, still), 2 * 0.5**2 * (batch.new - batch.old).detach() / 6 / ROWS)


def test_awm_clips_only_what_the_advantage_pushes_outwards():
    batch = batch_of(6)
    loss = AWM(weight="uniform", clip=0.05, kl_weight=0.0, average_weight=0.0)
    ratio = (squares(batch.old - batch.target) - squares(batch.new.detach() - batch.target)).exp()
    clipped = torch.where(batch.advantages > 0, ratio > 1.05, ratio < 0.95)
    assert 0 < int(clipped.sum()) < ROWS
    found = gradient(loss, batch).flatten(1)
    assert bool((found[clipped] == 0).all()) and bool((found[~clipped] != 0).any(1).all())


def test_sum_first_is_one_ratio_per_sample():
    """Gradient of max(-A r_s, -A clip(r_s)), r_s = exp(mean over times of log p - log p_old), by
    autograd on the whole table.
    """
    batch = batch_of(7)
    loss = AWM(weight="t", ratio="sum_first", clip=0.1, kl_weight=0.0, average_weight=0.0)
    new = batch.new.detach().clone().requires_grad_()
    gap = loss.log_prob(new, batch.target, batch.time) - loss.log_prob(
        batch.old, batch.target, batch.time
    )
    ratio, advantages = (
        gap.view(-1, DRAWS).mean(1).exp(),
        loss.scaled(batch.advantages).view(-1, DRAWS)[:, 0],
    )
    objective = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.9, 1.1)).mean()
    (expected,) = torch.autograd.grad(objective, new)
    close(loss.loss(batch).loss, objective)
    close(gradient(loss, batch), expected)


def test_elbo_weight_is_that_of_flow_sde():
    """1 / (2 sigma^2) with Flow-SDE's sigma = 0.7 sqrt(t / (1-t))."""
    batch = batch_of(8)
    loss = AWM(kl="elbo", kl_weight=2.0, average_weight=0.0)
    sigma2 = 0.49 * batch.time / (1 - batch.time)
    close(
        loss.loss(batch).metrics["kl"],
        (squares(batch.new - batch.reference).detach() / (2 * sigma2)).mean(),
    )


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


@pytest.mark.parametrize(
    "loss", [dgpo(), dgpo(clip=0.05, kl_weight=0.3, clip_kl=True), dgpo(anchor="old")], ids=repr
)
def test_dgpo_in_parts_of_groups_is_exact(loss):
    batch = batch_of(11)
    whole, terms = gradient(loss, batch), loss.row_terms(batch)
    given = replace(batch, pooled=unit_means(terms, batch.units("group"), batch.weight))
    for size in (1, 5):
        parts = [
            gradient(loss, take(given, rows)) * len(rows) / ROWS
            for rows in torch.arange(ROWS).split(size)
        ]
        close(torch.cat(parts), whole, 1e-14)
    alone = gradient(loss, take(batch, torch.arange(5))) * 5 / ROWS
    assert float((alone - whole[:5]).abs().max()) > 1e-4


def test_dgpo_clips_by_the_errors_of_the_old_network():
    batch = batch_of(12)
    ratio = (squares(batch.old - batch.target) - squares(batch.new.detach() - batch.target)).exp()
    clipped = torch.where(batch.advantages > 0, ratio > 1.1, ratio < 0.9)
    assert 0 < int(clipped.sum()) < ROWS
    for kl_weight, clip_kl in ((0.0, False), (0.5, False), (0.5, True)):
        found = gradient(dgpo(clip=0.1, kl_weight=kl_weight, clip_kl=clip_kl), batch)
        penalty = 2 * kl_weight * (1 - clip_kl) * (batch.new - batch.reference).detach() / 6 / ROWS
        close(found[clipped], penalty[clipped]) if kl_weight * (1 - clip_kl) else close(
            found[clipped], 0 * penalty[clipped]
        )
        assert float((found - penalty)[~clipped].abs().flatten(1).max(1).values.min()) > 0


def test_members_of_weight_0_leave_the_group():
    batch = batch_of(13)
    mask = batch.sample != 1
    kept = mask.nonzero().flatten()
    for loss in (dgpo(), dgpo(clip=0.1, kl_weight=0.3), AWM(ratio="sum_first"), DiffusionNFT()):
        found = gradient(loss, replace(batch, weight=mask.float(), new=batch.new))
        close(found[kept], gradient(loss, take(batch, kept)), 1e-14)
        assert not found[~mask].any()


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
        torch.testing.assert_close(
            DiffusionNFT(mode=mode).optimality(advantages), torch.tensor(values)
        )


def test_what_the_losses_declare():
    copies = DiffusionNFT(decay=(75, 0.0075, 0.999)).copies
    assert copies == {"old": WeightCopy(Decay(75, 0.0075, 0.999), "iteration", sample_from=0)}
    assert AWM().copies == {"old": WeightCopy(), "average": WeightCopy(Decay(0, 0.001, 0.3))}
    assert set(AWM(average_weight=0.0).copies) == {"old"}
    assert AWM(off_policy=True, average_weight=0.0).copies == {
        "average": WeightCopy(Decay(0, 0.001, 0.3), sample_from=0)
    }
    assert DGPO().copies == {"old": WeightCopy(Decay(1, 0.001, 0.3), "update", sample_from=200)}
    assert (
        not DGPO(clip=None).copies["old"].evaluated
        and DGPO(clip=None, anchor="old").copies["old"].evaluated
    )
    assert [
        loss.needs_reference
        for loss in (DiffusionNFT(), DiffusionNFT(kl_weight=0.0), AWM(), AWM(kl_weight=0.0))
    ] == [
        1,
        0,
        1,
        0,
    ]
    assert (
        DGPO(kl_weight=0.0).needs_reference
        and not DGPO(kl_weight=0.0, anchor="old").needs_reference
    )
    assert [loss.unit for loss in (DiffusionNFT(), AWM(), AWM(ratio="sum_first"), DGPO())] == [
        "transition",
        "transition",
        "trajectory",
        "group",
    ]
    for loss in (DiffusionNFT(), AWM(), DGPO()):
        assert isinstance(loss, ForwardLoss)
    assert hasattr(DGPO(), "row_terms") and not hasattr(DiffusionNFT(), "row_terms")


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        (DiffusionNFT(), "old"),
        (DiffusionNFT(), "reference"),
        (AWM(), "average"),
        (AWM(), "old"),
        (DGPO(), "reference"),
    ],
)
def test_a_missing_velocity_is_named(loss, missing):
    with pytest.raises(
        ConfigError, match=rf"{type(loss).__name__} needs ForwardBatch.{missing}, which is None"
    ):
        loss.loss(replace(batch_of(), **{missing: None}))


def test_unit_means_by_hand():
    values, weight = (
        torch.tensor([1.0, 2.0, 4.0, float("nan"), 10.0]),
        torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]),
    )
    group, time = torch.tensor([0, 0, 1, 0, 0]), torch.tensor([0.5, 0.5, 0.5, 0.5, 0.25])
    assert unit_means(values, (group, time), weight).tolist() == [1.5, 1.5, 4.0, 1.5, 10.0]
    assert unit_means(values, (group,), weight).tolist()[0] == pytest.approx(13 / 3)
    uneven = torch.tensor([1.0, 0.5, 2.0, 0.0, 0.25])
    assert unit_means(values, (group,), uneven).tolist()[0] == pytest.approx((1 + 1 + 2.5) / 1.75)
    assert unit_means(values, (group,), 0 * weight).tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("decay", "steps", "expected"),
    [
        (Decay(), (1, 1000), (0.0, 0.0)),
        (Decay(0, 0.001, 0.5), (0, 1, 100, 500, 601), (0.0, 0.001, 0.1, 0.5, 0.5)),
        (
            Decay(75, 0.0075, 0.999),
            (74, 75, 76, 101, 208, 209),
            (0.0, 0.0, 0.0075, 0.195, 0.9975, 0.999),
        ),
        (Decay(1, 0.001, 0.3), (1, 101, 501), (0.0, 0.1, 0.3)),
        (Decay(0, 0.9, 0.9), (0, 1, 9), (0.0, 0.9, 0.9)),
    ],
)
def test_decays_by_hand(decay, steps, expected):
    assert [decay.at(step) for step in steps] == pytest.approx(expected, abs=1e-15)
