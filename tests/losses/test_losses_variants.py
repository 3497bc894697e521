"""Policy losses on a real policy: parameter gradients against closed forms, and Flow-DPPO's mask
pair by pair.
"""

from dataclasses import replace

import pytest
import torch
from all_but_last import AllButLast

from flowrl.core.protocols import PolicyLoss
from flowrl.core.types import Gaussian, LossBatch
from flowrl.losses import ClippedLoss, FlowDPPO, GRPOGuard, PolicyGradientLoss
from flowrl.policies.mixture import MixturePolicy
from flowrl.rollout import Groups, rollout
from flowrl.rollout.batches import LossBatches
from flowrl.rollout.metrics import step_gradients
from flowrl.rollout.rollout import Rollout
from flowrl.samplers import FlowSDE
from flowrl.worlds.base import PolicyOptions, world

STEPS, GROUPS, LEVEL = 6, Groups(prompts=3, members=4), 0.7
SAMPLER = AllButLast(FlowSDE(LEVEL))


class OnPolicy:
    """Trajectories of a mixture policy away from its start, and all their transitions as the
    trainer sees them before any update; the last decision of the first sample has weight 0, and the
    last step is an ODE step.
    """

    def __init__(self) -> None:
        chosen = world("mixture")
        self.policy = chosen.policy(PolicyOptions())
        assert isinstance(self.policy, MixturePolicy)
        generator = torch.Generator().manual_seed(0)
        self.parameters = list(self.policy.trainable().values())
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        self.condition = self.policy.encode(chosen.prompts("direction", "train")[: GROUPS.prompts])
        noise = GROUPS.noise(self.policy.latent_shape, generator)
        self.result = rollout(
            self.policy,
            SAMPLER,
            self.policy.schedule(STEPS),
            self.condition,
            noise,
            generator,
            GROUPS,
        )
        # a decision's index is its step's
        assert self.result.trajectories.tree.drawn_steps == list(range(STEPS - 1))
        self.advantages = torch.randn(GROUPS.samples, STEPS - 1, generator=generator)
        self.weights = torch.ones_like(self.advantages)
        self.weights[0, -1] = 0
        pairs = torch.cartesian_prod(torch.arange(GROUPS.samples), torch.arange(STEPS - 1))
        self.sample, self.step = pairs.unbind(1)

    def batch(self) -> LossBatch:
        return self.batches(kl_weight=0.1).of(self.sample, self.step)

    def batches(self, result: Rollout | None = None, kl_weight: float = 0.0) -> LossBatches:
        given = self.policy, ClippedLoss(kl_weight=kl_weight), result or self.result, self.condition
        return LossBatches(*given, self.advantages, self.weights, SAMPLER)

    def gradient(self, loss: PolicyLoss, batch: LossBatch | None = None) -> torch.Tensor:
        value = loss.loss(self.batch() if batch is None else batch).loss
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, self.parameters)])

    def closed_form(self, weights: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
        """Gradient of mean(-w A log pi + penalty_weight KL) through v alone, with the sampler's
        formula written out:

        d log pi / d mu = (x_next - mu) / (std^2 d), d KL / d mu = (mu - mu_ref) / (std^2 d), and
        d mu / d v = -(1 + sigma^2 (1-t) / (2 t)) Delta; `weights` and `penalty` are per pair.
        """
        path, batch = self.result.trajectories, self.batch()
        times = path.schedule.times
        t, s = times[self.step], times[self.step + 1]
        sigma_squared = LEVEL**2 * t / (1 - torch.where(t == 1, s, t))
        x = path.nodes[self.sample, self.step]
        velocity = self.policy.velocity(
            x, 1000 * t, self.condition.take(self.sample // GROUPS.members)
        )
        assert batch.reference is not None
        mean, reference = batch.new.mean.detach(), batch.reference.mean
        counted = self.weights.flatten()
        variance = sigma_squared * (t - s)
        advantages = self.advantages[self.sample, self.step]
        to_mean = -(weights * advantages)[:, None] * (
            path.nodes[self.sample, self.step + 1] - mean
        ).flatten(1)
        to_mean = to_mean + penalty[:, None] * (mean - reference).flatten(1)
        through = -(1 + sigma_squared * (1 - t) / (2 * t)) * (t - s)
        scale = counted / counted.sum() * through / (variance * 2)
        cotangent = (to_mean * scale[:, None]).view(velocity.shape)
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(velocity, self.parameters, cotangent)]
        )


@pytest.fixture(scope="module")
def world_of() -> OnPolicy:
    return OnPolicy()


def weights_of(loss: PolicyLoss, batch: LossBatch) -> torch.Tensor:
    """What each loss's docstring says it multiplies the policy gradient by, per pair."""
    if isinstance(loss, GRPOGuard):
        return batch.new.std / batch.delta
    if isinstance(loss, ClippedLoss) and loss.log_prob == "released_cps":
        return 2 * batch.new.std.square()
    return torch.ones_like(batch.delta)


@pytest.mark.parametrize("kl", ["exact", "without_delta"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PolicyGradientLoss, {}),
        (ClippedLoss, {}),
        (ClippedLoss, {"log_prob": "released_cps"}),
        (GRPOGuard, {}),
        (FlowDPPO, {}),
        (FlowDPPO, {"bound": 1e-12}),
    ],
)
def test_on_policy_parameter_gradients_are_the_closed_form(
    world_of: OnPolicy, kind: type, options: dict, beta, kl
) -> None:
    loss, batch = kind(kl_weight=beta, kl=kl, **options), world_of.batch()
    penalty = beta * (batch.delta if kl == "without_delta" else torch.ones_like(batch.delta))
    expected = world_of.closed_form(weights_of(loss, batch), penalty)
    assert float(expected.norm()) > 0.01
    torch.testing.assert_close(
        world_of.gradient(loss), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    "loss", [ClippedLoss(), ClippedLoss(log_prob="released_cps"), GRPOGuard(), FlowDPPO()], ids=repr
)
def test_step_gradients_are_those_of_the_policy_term_alone(
    world_of: OnPolicy, loss: PolicyLoss
) -> None:
    """On policy d(term) / dv = -A w eps slope / (std d N), with eps the step's noise; a KL and a
    backward pass change nothing.
    """
    batch = world_of.batch()
    assert batch.velocity is not None
    slope = torch.stack(
        [
            g.flatten()[0]
            for g in torch.autograd.grad(batch.new.mean.sum(), batch.velocity, retain_graph=True)[0]
        ]
    )
    counted, std, size = (
        (batch.weight > 0) & (batch.new.std > 0),
        batch.new.std.clamp(min=1e-9),
        batch.next_node[0].numel(),
    )
    eps = ((batch.next_node - batch.new.mean.detach()).flatten(1) / std[:, None]).norm(dim=1)
    pairs = weights_of(loss, batch) * batch.advantages * eps * slope / (std * size * counted.sum())
    expected = torch.zeros(STEPS, dtype=torch.float64).index_add_(
        0, world_of.step, (pairs * counted).double().square()
    )
    for penalised in (loss, replace(loss, kl_weight=0.3)):
        batch = world_of.batch()
        result = penalised.loss(batch)
        found = step_gradients(result, batch, world_of.step, STEPS)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
        result.loss.backward()
    assert expected[-1] == 0 and bool((expected[:-1] > 0).all())
    # a row of weight 0: nothing counts
    fifth = world_of.batches().of(world_of.sample[4:5], world_of.step[4:5])
    assert not step_gradients(loss.loss(fifth), fifth, world_of.step[4:5], STEPS).any()


MOVES = (0.05, -0.05, 0.3, -0.3)
"""Shifts of the mean towards (+) and away from (-) the node sampled: KL = move^2 / 2 = .00125 and
.045.
"""


def moved(tiles: int = 1) -> LossBatch:
    """Eight pairs: every move with A = +1 and A = -2; std 1, node at 1, behaviour at 0, reference
    at 1.
    """
    move = torch.tensor(MOVES).repeat(2)[:, None].repeat(1, tiles)
    ones, still = torch.ones(8), torch.zeros(8, tiles)
    return LossBatch(
        new=Gaussian(move.requires_grad_(), ones),
        behaviour=Gaussian(still, ones),
        next_node=torch.ones(8, tiles),
        advantages=torch.tensor([1.0] * 4 + [-2.0] * 4),
        weight=ones,
        delta=ones,
        sample=torch.arange(8),
        group=torch.arange(8),
        step=torch.zeros(8, dtype=torch.long),
        time=ones,
        reference=Gaussian(torch.ones(8, tiles), ones),
    )


DROPPED = torch.tensor([False, False, True, False, False, False, False, True])
"""Far and going further: towards the node with A > 0, away from it with A < 0."""


@pytest.mark.parametrize("tiles", [1, 5])
def test_dppo_drops_in_two_of_the_eight_cases(tiles: int) -> None:
    """Kept pairs: gradient -A ratio (x - mu) / d / N, N counting the dropped ones; dropped pairs:
    exactly 0.
    """
    batch = moved(tiles)
    result = FlowDPPO(bound=0.01).loss(batch)
    (found,) = torch.autograd.grad(result.loss, batch.new.mean)
    mean = batch.new.mean.detach()
    ratio = (mean[:, 0] - mean[:, 0].square() / 2).exp()
    terms = torch.where(DROPPED, 0.0, -batch.advantages * ratio)
    torch.testing.assert_close(result.loss.detach(), terms.mean())
    torch.testing.assert_close(found, terms[:, None] * (1 - mean) / tiles / 8)
    assert bool((found[DROPPED] == 0).all()) and bool((found[~DROPPED] != 0).all())
    assert float(result.metrics["mask_fraction"]) == float(result.metrics["clip_fraction"]) == 0.25


def test_dppo_still_pulls_dropped_pairs_to_the_reference() -> None:
    batch = moved()
    (found,) = torch.autograd.grad(
        FlowDPPO(bound=0.01, kl_weight=0.5).loss(batch).loss, batch.new.mean
    )
    pull = 0.5 * (batch.new.mean.detach() - 1) / 8
    torch.testing.assert_close(found[DROPPED], pull[DROPPED])
