"""The axis of decisions, from the rollout to the credit: inserted ODE steps change nothing, and no
other state is estimated.
"""

from dataclasses import replace

import pytest
import torch
from rollouts import PROMPTS, SQUARES, Straight, rolled
from torch.testing import assert_close

from flowrl.core.experience import Credit, Decisions, Needs
from flowrl.core.tree import plain_tree
from flowrl.core.types import Gaussian, Schedule
from flowrl.credit import StepwiseGain, TurningPoint, Uniform, credit_of
from flowrl.flow import uniform_schedule
from flowrl.probes import Completion, Substeps, Tweedie
from flowrl.rewards import FunctionReward, WeightedSum
from flowrl.rollout import log_probs, score_rollout

COARSE = [1.0, 0.8, 0.55, 0.3, 0.1, 0.0]
DRAWN = [0.8, 0.55, 0.3]
"""The times from which decisions start, whatever the grid."""


class Jump:
    """A draw of std 0.2 around the state itself, at the times of `DRAWN`; between them the ODE."""

    def transition(self, latent, velocity, schedule, step):
        time, delta = (table[step].view(-1, 1, 1, 1) for table in (schedule.times, schedule.deltas))
        drawn = torch.isclose(schedule.times[step, None], torch.tensor(DRAWN)).any(1)
        inside = drawn.view(-1, 1, 1, 1)
        return Gaussian(
            torch.where(inside, latent + 0 * time, latent - delta * velocity), 0.2 * drawn
        )


def walk(times, probe, columns=None):
    """A rollout on a grid, its record and its usage. A decision takes no time: it ends at a node
    right after its start, and the ODE's grid is inserted around it.
    """
    times = sorted({*times, *(time - 1e-3 for time in DRAWN)}, reverse=True)
    options = dict(members=6, sampler=Jump(), columns=columns)
    result, usage = rolled(Straight(), probe, steps=Schedule(torch.tensor(times)), **options)
    record = score_rollout(Straight(), SQUARES, result, PROMPTS, usage)
    return result, replace(record, log_probs=log_probs(Jump(), result.trajectories)), usage


class ReadsLogProbs:
    """Credit by record: the reward-to-go, weighted by the transition's log-probability."""

    probe, needs = Completion(), Needs(fields=("log_probs",))

    def assign(self, values, decisions, record):
        return Credit(values[..., -1:] - values[..., :-1], record.log_probs.sigmoid())


FINER = [1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.55, 0.45, 0.3, 0.2, 0.1, 0.05, 0.0]
RULES = [Uniform(), StepwiseGain(probe=Tweedie()), TurningPoint(), ReadsLogProbs()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_inserted_ode_steps_change_neither_states_nor_values_nor_credit(rule):
    """The same draws at the same decisions, with more ODE steps before, between and after them."""
    coarse, fine = (walk(times, rule.probe) for times in (COARSE, FINER))
    close = dict(atol=1e-5, rtol=0, equal_nan=True)
    records = coarse[1], fine[1]
    for later in (0, 1):
        states = (
            torch.stack([result.trajectories.at(int(k) + later) for k in record.decisions.step])
            for result, record, _ in (coarse, fine)
        )
        assert_close(*states, **close)
    for name in ("time", "delta", "std"):
        assert_close(*(getattr(record.decisions, name) for record in records))
    assert_close(*(record.values for record in records), **close)
    assert_close(*(record.log_probs for record in records), atol=1e-3, rtol=0)
    first, second = (vars(credit_of(rule, record)) for record in records)
    assert_close(second, first, atol=1e-4, rtol=0)
    assert first["advantages"].abs().max() > 0.5


def test_a_sample_that_is_invalid_in_one_value_has_none():
    """In one component at one state: the total and all components are NaN at every decision."""
    result = walk(COARSE, Completion())[0]

    def marked(images, prompts):
        finished = len(images) == 12  # estimates have batches of their own
        return torch.ones(len(images)).where(torch.arange(len(images)) != 15 + finished, torch.nan)

    reward = WeightedSum({"all": SQUARES, "some": FunctionReward(marked, marks_invalid=True)})
    scored = score_rollout(Straight(), reward, result, PROMPTS)
    assert scored.valid.tolist() == [[True, True, True, False, True, True], [True] * 6]
    for values in (scored.values, *scored.parts.values()):
        assert values[0, 3].isnan().all() and values[scored.valid].isfinite().all()


@pytest.mark.parametrize(
    ("probe", "saved"),
    [(Completion(), 4), (Completion(together=False), 4), (Substeps(3), 2), (Tweedie(), 0)],
)
def test_only_the_columns_that_are_asked_for_are_estimated(probe, saved):
    """Without the second of 3 decisions, at node 3 of 8: `saved` evaluations fewer of each
    trajectory.
    """
    every, record, spent = walk(COARSE, probe)
    asked = torch.tensor([True, False, True, True])
    some, fewer, usage = walk(COARSE, probe, asked)
    assert list(some.estimates) == [every.nodes[0], every.nodes[2]]
    expected = record.values.where(asked, torch.nan)
    assert_close(fewer.values, expected, equal_nan=True)
    assert fewer.valid.all()
    assert spent.reward_calls - usage.reward_calls == 12 and spent.nfe - usage.nfe == 12 * saved


def test_without_a_drawn_transition_the_initial_noise_is_the_only_decision():
    grid, valid = uniform_schedule(4), torch.tensor([[True, True], [True, False]])
    only = Decisions.of(grid, torch.zeros(4), plain_tree(2, 4, ()), valid)
    assert [float(x) for x in (only.step, only.time, only.delta, only.std)] == [-1, 1, 0, 1]
    assert only.mask[..., 0].tolist() == valid.tolist() and only.tree is None
    stds, tree = torch.tensor([0.0, 0.5, 0.0, 0.2]), plain_tree(2, 4, (1, 3))
    drawn = Decisions.of(grid, stds, tree, valid, trained=[1, 2])
    assert (drawn.step.tolist(), drawn.trained.tolist()) == ([1, 3], [True, False])
    assert drawn.time.tolist() == [0.75, 0.25]
    assert drawn.mask[..., 0].tolist() == valid.tolist() and not drawn.mask[..., 1].any()
