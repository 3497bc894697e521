"""Policy losses: closed forms, weights, clipping, parity options, metrics."""

import math
from dataclasses import replace

import pytest
import torch
from loss_rows import loss_rows
from seeded import randn, seeded
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.types import Gaussian, Schedule
from flowrl.flow import kl, log_prob, sample
from flowrl.losses import (
    GSPO,
    RSM,
    ClippedLoss,
    Distillation,
    FlowDPPO,
    GRPOGuard,
    KLPenalty,
    PolicyGradientLoss,
    StepNFT,
)
from flowrl.samplers import FlowSDE

LOSSES = [
    ClippedLoss(),
    ClippedLoss(kl_weight=0.1, log_prob="released_cps"),
    GRPOGuard(kl_weight=0.1, kl="without_delta"),
    PolicyGradientLoss(kl_weight=0.1),
    FlowDPPO(),
    GSPO(kl_weight=0.1),
    KLPenalty(),
    RSM(),
    StepNFT(),
]
N = 6


def rows_of(new, behaviour, **fields):
    """Rows whose new mean takes gradients."""
    return loss_rows(Gaussian(new.clone().requires_grad_(), behaviour.std), behaviour, **fields)


def make_batch(move=0.0, weight=None):
    """Random rows whose new mean is `move` away from the behaviour's."""
    generator, std = seeded(), torch.linspace(0.1, 1.0, N)
    means = torch.randn(3, N, 2, 3, generator=generator)
    behaviour = Gaussian(means[0], std)
    return rows_of(
        means[0] + move * means[1],
        behaviour,
        next_node=sample(behaviour, generator),
        advantages=torch.randn(N, generator=generator),
        weight=torch.ones(N) if weight is None else weight,
        delta=torch.linspace(0.05, 0.3, N),
        reference=Gaussian(means[2], std),
        slope=torch.linspace(0.1, 0.6, N),
    )


def scalars(new, **fields):
    """Rows of one element with std 1, node 1 and behaviour 0: log ratio d - d^2 / 2."""
    count = len(new)
    behaviour = Gaussian(torch.zeros(count, 1), torch.ones(count))
    return rows_of(torch.tensor(new)[:, None], behaviour, **fields)


def gradient(loss, batch):
    return torch.autograd.grad(loss.loss(batch).loss, batch.new.mean)[0]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_the_reference_penalty_and_its_parity_form(loss):
    batch = make_batch(0.01)
    plain = replace(loss, kl_weight=0.0).loss(batch).loss
    exact = kl(batch.new, batch.reference)
    distance = 2 * exact * (batch.new.std / batch.slope).square()
    forms = {"exact": exact, "without_delta": exact * batch.delta, "velocity": distance}
    for form, divergence in forms.items():
        result = replace(loss, kl_weight=0.3, kl=form).loss(batch)
        assert_close(result.loss, plain + 0.3 * divergence.mean())
        assert_close(result.metrics["kl"], divergence.mean().detach())
        if not isinstance(loss, KLPenalty):  # the policy term has no penalty
            assert_close(result.policy_term, plain)
    with pytest.raises(ConfigError, match=r"kl_weight = 0\.3 needs LossBatch\.reference"):
        replace(loss, kl_weight=0.3).loss(replace(batch, reference=None))
    assert "kl" not in replace(loss, kl_weight=0.0).loss(replace(batch, reference=None)).metrics


def test_the_distance_of_velocities_is_the_kl_over_half_of_w_squared():
    """w_k = |d mu / d v| / std. On SD3's grid with a = 0.7: half of its mean square, and how much
    more the distance weights step 0 relative to step 8.
    """
    even = torch.linspace(
        1.0, 3e-3 / 1.002, 10
    )  # diffusers' grid: shift 3 of sigmas from 1 to 3e-3
    grid = Schedule(torch.cat([3 * even / (1 + 2 * even), torch.zeros(1)]))
    step = torch.arange(9)
    x, own, base = randn(3, 9, 2, 3)
    sampler, velocity = FlowSDE(0.7), own.requires_grad_()
    new, reference, behaviour, unit = (
        sampler.transition(at, v, grid, step)
        for at, v in ((x, velocity), (x, base), (x, own), (0 * x, torch.ones_like(x)))
    )
    slope = unit.mean[:, 0, 0].abs()
    half = (slope / new.std).square() / 2
    drawn = behaviour.mean.detach()
    fields = dict(reference=reference, slope=slope, next_node=drawn, delta=grid.deltas[:9])
    batch = loss_rows(new, behaviour, **fields, advantages=torch.zeros(9), weight=1.0 / half)
    mse = (velocity - base).square().flatten(1).mean(1)
    assert_close(kl(new, reference), half * mse)
    result = ClippedLoss(kl_weight=1.0, kl="velocity").loss(batch)
    assert_close(result.metrics["kl"], (mse / half).sum().detach() / (1 / half).sum())
    exact = ClippedLoss(kl_weight=1.0).loss(replace(batch, weight=1.0 / half.square()))
    slopes = [torch.autograd.grad(r.loss, velocity, retain_graph=True)[0] for r in (result, exact)]
    assert_close(slopes[0] * (1 / half).sum(), slopes[1] * (1 / half.square()).sum())
    assert float(half.mean()) == pytest.approx(0.1915, abs=1e-4)
    assert float(half[8] / half[0]) == pytest.approx(681, abs=1)
    with pytest.raises(ConfigError, match=r"ClippedLoss needs .*LossBatch\.slope"):
        ClippedLoss(kl="velocity").loss(replace(batch, slope=None))


def test_the_std_gets_no_gradient():
    batch = make_batch()
    std = batch.new.std.clone().requires_grad_()
    ClippedLoss().loss(replace(batch, new=Gaussian(batch.new.mean, std))).loss.backward()
    assert std.grad is None


def test_on_policy_gradient_is_the_policy_gradient():
    """-mean over pairs of A grad logp, with grad logp = (x - mu) / std^2 over the number of
    elements.
    """
    batch = make_batch()
    std = batch.new.std.reshape(N, 1, 1)
    score = (batch.next_node - batch.behaviour.mean) / std.square() / 6
    expected = -(batch.advantages.reshape(N, 1, 1) * score) / N
    for loss, factor in (
        (ClippedLoss(), 1.0),
        (PolicyGradientLoss(), 1.0),
        (FlowDPPO(), 1.0),
        (GRPOGuard(), std / batch.delta.reshape(N, 1, 1)),
        (RSM(), 1.0),
        (RSM(fair=True), std / batch.delta.reshape(N, 1, 1)),
        (StepNFT(step=0.5, scale=3.0), 0.3 * std.square() / (std.square() + 1e-4)),
        (ClippedLoss(log_prob="released_cps"), 2 * std.square()),
    ):
        assert_close(gradient(loss, batch), expected * factor)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    # a gain beyond 1 + c is clipped, a loss of probability is not
    [(1.0, -(1.05 + 0.904837) / 2), (-1.0, (1.105171 + 0.95) / 2)],
)
def test_clipped_loss_by_hand(advantage, expected):
    """Ratios e^.1 and e^-.1 around a clip of .05; the clipped row has no gradient."""
    batch = scalars([0.10557281, -0.09544512], advantages=torch.full((2,), advantage))
    result = ClippedLoss(clip_range=0.05).loss(batch)
    assert result.loss.detach() == pytest.approx(expected, abs=1e-5)
    assert float(result.metrics["clip_fraction"]) == 1.0
    assert result.metrics["ratio_deviation"] == pytest.approx(0.105171, abs=1e-5)
    assert int((gradient(ClippedLoss(clip_range=0.05), batch) == 0).sum()) == 1


def test_dppo_drops_rows_that_are_far_and_would_move_further():
    """Shifts towards (+) and away from (-) the node, with A = 1 and A = -2: KL = move^2 / 2 =
    .00125 and .045. Dropped rows count in the mean, and in the penalty.
    """
    advantages = torch.tensor([1.0] * 4 + [-2.0] * 4)
    dropped = torch.tensor([False, False, True, False, False, False, False, True])
    reference = Gaussian(torch.ones(8, 1), torch.ones(8))
    moves = [0.05, -0.05, 0.3, -0.3] * 2
    batch = scalars(moves, advantages=advantages, reference=reference)
    result, mean = FlowDPPO(bound=0.01).loss(batch), batch.new.mean.detach()
    terms = torch.where(dropped, 0.0, -advantages * (mean - mean.square() / 2).exp().flatten())
    assert_close(result.loss.detach(), terms.mean())
    assert float(result.metrics["clip_fraction"]) == 0.25
    plain = gradient(FlowDPPO(bound=0.01), batch)
    assert_close(plain, terms[:, None] * (1 - mean) / 8)
    pulled = gradient(FlowDPPO(bound=0.01, kl_weight=0.5), batch)
    assert_close(pulled - plain, 0.5 * (mean - 1) / 8)
    assert gradient(FlowDPPO(bound=0.046), batch).all()


def test_the_plain_policy_gradient_ignores_the_behaviour():
    far, loss = make_batch(0.3), PolicyGradientLoss()
    near = replace(far, behaviour=Gaussian(far.new.mean.detach(), far.new.std))
    assert_close(gradient(loss, far), gradient(loss, near))
    assert loss.loss(near).metrics["ratio_mean"] == pytest.approx(1.0)
    assert not torch.allclose(gradient(FlowDPPO(1e6), far), gradient(loss, far), rtol=1e-3)


def test_guards_ratio_is_the_projected_noise():
    """std (log ratio + |mu - mu_old|^2 / (2 std^2)) = mean of eps (mu - mu_old), eps = (x - mu_old)
    / std.
    """
    batch = make_batch(0.05)
    eps = (batch.next_node - batch.behaviour.mean) / batch.new.std.reshape(N, 1, 1)
    log_ratio = (eps * (batch.new.mean.detach() - batch.behaviour.mean)).mean((1, 2))
    metrics = GRPOGuard(clip_range=0.5).loss(batch).metrics
    assert_close(metrics["ratio_mean"], log_ratio.exp().mean())
    terms = -batch.advantages * log_ratio.exp() / batch.delta
    assert_close(metrics["policy_loss"], terms.mean())


def test_gspo_by_hand():
    """Two trajectories of two steps, with weights 1 and 3 within a trajectory."""
    moves, weight = torch.tensor([0.3, -0.3, 0.1, 0.02]), torch.tensor([1.0, 1.0, 3.0, 3.0])
    advantages = torch.tensor([1.0, -2.0, 1.0, -2.0])
    batch = scalars(moves.tolist(), advantages=advantages, weight=weight)
    log = (moves - moves.square() / 2).tolist()
    ratios = [math.exp((log[0] + 3 * log[2]) / 4), math.exp((log[1] + 3 * log[3]) / 4)]
    assert ratios[0] > 1.1 and 0.9 < ratios[1] < 1.0
    result = GSPO(clip_range=0.1).loss(batch)
    assert result.loss.detach() == pytest.approx((-1.1 + 2 * ratios[1]) / 2, abs=1e-6)
    assert float(result.metrics["clip_fraction"]) == 0.5
    assert result.metrics["ratio_mean"] == pytest.approx(sum(ratios) / 2)
    rows = gradient(GSPO(clip_range=0.1), batch).flatten()
    assert not rows[[0, 2]].any()  # the trajectory is clipped
    expected = 2 * ratios[1] * weight / weight.sum() * (1 - moves)
    assert_close(rows[[1, 3]], expected[[1, 3]])
    own = torch.tensor([1.0, -2.0, 1.0, -4.0])  # the last step of the second counts twice
    by_step = GSPO(clip_range=0.1, by_step=True)
    assert not by_step.one_advantage and GSPO().one_advantage
    rows = gradient(by_step, replace(batch, advantages=own)).flatten()
    assert_close(rows[[1, 3]], (expected * own / advantages)[[1, 3]])


def test_chunks_of_one_step_are_steps_and_of_all_steps_trajectories():
    batch, step, whole = make_batch(0.05), ClippedLoss(clip_range=0.5), GSPO(clip_range=0.5)
    batch = replace(batch, advantages=batch.advantages[:3].repeat(2))
    for chunks, same in (((2, 1), step), ((3,), whole), ((1, 9), whole)):
        assert_close(gradient(replace(whole, chunks=chunks), batch), gradient(same, batch))
    assert not torch.allclose(gradient(step, batch), gradient(whole, batch), rtol=1e-3)


def test_rsm_clips_the_log_ratio_from_one_side():
    """max(c |A| - A log rho, 0), and log rho = -m, m = mean(w dv)^2 / 2 + mean(w dv eps), w dv = (mu_old
    - mu) / std: the released error.
    """
    batch, c = make_batch(0.05), 0.01
    log = log_prob(batch.new, batch.next_node) - log_prob(batch.behaviour, batch.next_node)
    std = batch.behaviour.std[:, None, None]
    move, noise = ((batch.behaviour.mean - x) / std for x in (batch.new.mean, batch.next_node))
    expected = -(move.square() / 2 - move * noise).mean((1, 2))
    assert_close(log, expected, atol=1e-5, rtol=1e-5)
    for fair, scale in ((False, 1.0), (True, batch.behaviour.std.square())):
        room = c * batch.advantages.abs() - batch.advantages * scale * log
        assert 0 < (room < 0).sum() < N or fair
        step = batch.behaviour.std * batch.delta if fair else 1.0
        result = RSM(clip_range=c, fair=fair).loss(batch)
        assert_close(result.loss, (room.clamp(min=0) / step).mean())
        assert_close(result.metrics["clip_fraction"], (room < 0).float().mean())


def test_step_nft_by_hand():
    """E+ - E- = -4 step (mu - mu_old) eps std / (std^2 + 1e-4): -0.2 for a move of 0.05."""
    loss = StepNFT().loss(scalars([0.05], advantages=torch.tensor([5.0]))).loss
    assert loss.detach() == pytest.approx(0.644397 - math.log(2.0), abs=1e-5)


def test_distillation_is_the_penalty_alone():
    batch = make_batch(0.1)
    none = replace(batch, advantages=torch.zeros(N))
    assert_close(Distillation().loss(batch).loss, ClippedLoss(kl_weight=1.0).loss(none).loss)
    distance = (batch.new.mean - batch.reference.mean).square().flatten(1).mean(1)
    equal = Distillation(equal=True)
    assert_close(equal.loss(batch).loss, (distance / batch.slope.square() / 2).mean())
    taught = replace(batch, reference=replace(batch.new, mean=batch.new.mean.detach()))
    assert not gradient(Distillation(), taught).any()
    with pytest.raises(ConfigError, match=r"Distillation needs .*LossBatch\.slope"):
        equal.loss(replace(batch, slope=None))


def test_the_penalty_pulls_to_the_behaviour_also_at_advantage_0():
    """Gradient of c KL: c (mu - mu_old) / std^2 per element, times weight / elements / sum of
    weights.
    """
    weight = torch.tensor([1.0, 2.0, 0.5, 0.0, 1.0, 1.0])
    batch = replace(make_batch(0.05, weight=weight), advantages=torch.zeros(N))
    pull = (batch.new.mean - batch.behaviour.mean).detach() / batch.new.std.square()[:, None, None]
    expected = 3.0 * pull * (weight / weight.sum())[:, None, None] / 6
    assert_close(gradient(KLPenalty(coefficient=3.0), batch), expected)
    assert KLPenalty().loss(batch).policy_term == 0.0
    far = make_batch(0.05)
    difference = gradient(KLPenalty(1e-9), far) - gradient(ClippedLoss(clip_range=0.999), far)
    assert difference.abs().max() < 1e-7
