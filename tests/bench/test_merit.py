"""The study of merit: rows and costs by their formulas, verdicts from known numbers, and a small
session.
"""

from dataclasses import replace

import pytest
import torch
from flowrl_bench.merit import setting_of, structure
from flowrl_bench.merit_page import judged, recommendation, verdicts
from flowrl_bench.merit_rows import REFERENCE, ROWS, WORLDS
from flowrl_bench.merit_train import sampling_nfe
from flowrl_bench.true_advantage import Look, TrueAdvantages, credit_sums
from seeded import randn

from flowrl.probes import Branch, NoProbe
from flowrl.training.build import make_method, make_trainer
from flowrl.training.plan import plan

FORMULAS = {
    # sampling, probe, update, decisions per trajectory: 16 groups of 12, T = 10, shapes with
    # stochastic steps 2 to 6
    "flow-grpo": (10, 0, 5, 5),
    "stepwise-flow-grpo": (3 / 12 + 7, 4 * (1 / 12 + 4), 5, 5),
    "tp-grpo": (10, 7 + 6 + 5 + 4 + 3, 5, 5),
    "gains, Substeps(5), every second node": (3 / 12 + 7, 4 * (1 / 12 + 2), 5, 5),
    "branch-grpo": (57 / 12, 0, (1 + 3 + 3 + 6 + 6) / 12, (3 + 3 + 6 + 6 + 12) / 12),
    "tree-grpo": (72 / 12, 0, (1 + 3 + 6 + 12 + 12) / 12, (3 + 6 + 12 + 12 + 12) / 12),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_costs_are_the_formulas(name):
    sampling, probe, update, decisions = FORMULAS[name]
    run = ROWS[name].run("shapes")
    counted = plan(run)
    assert counted.nfe / counted.trajectories == pytest.approx(sampling + probe)
    assert counted.train_nfe / counted.trajectories == pytest.approx(update)
    plain = sampling_nfe(run)
    assert plain is None or plain == pytest.approx(sampling)
    mixture = ROWS[name].run("mixture", window="2:7")  # the same structure, with a small network
    trainer, method = make_trainer(mixture), make_method(mixture)
    setting = setting_of("mixture", 0, trainer.policy, 2)
    look = Look(replace(setting, sampler=trainer.draw_sampler()))
    tree = method.credit.probe if isinstance(method.credit.probe, Branch) else NoProbe()
    shares = structure(look.trajectories(method.shared_noise, tree))
    assert shares == pytest.approx({"sampling": sampling, "update": update, "decisions": decisions})
    credit = look.credit(method.credit, method.shared_noise)
    assert credit.nfe_per_trajectory == pytest.approx(sampling + probe)


def sums_of(noise, seed=0):
    """`credit_sums` of credit = truth + noise on 40 groups of 12 members and 5 steps; the truth has
    no noise.
    """
    exact, errors = (randn(40, 12, 5, seed=number).double() for number in (1, seed + 10))
    states = torch.zeros(40, 12, 6)
    truth = TrueAdvantages(exact, 0 * exact, states, states, tuple(range(5)))
    return credit_sums(exact + noise * errors, truth)


def cells_of(probes):
    """Two worlds, two stages: rows by name with the noise of their credit and the evaluations of
    their probe.
    """
    rows = {REFERENCE: (0.5, 40.0), **probes}
    usual, cell = {"sampling": 10.0, "update": 5.0, "decisions": 5.0, "seconds": 0.01}, {}
    for name, (noise, probe) in rows.items():
        sums = [sums_of(noise, seed) for seed in (0, 1)]
        costs = [{**usual, "probe": probe}] * 2
        cell[name] = {"sums": sums, "steps": list(range(5)), "costs": costs}
    return {(world, stage): cell for world in WORLDS for stage in ("before", "after")}


def lines_of(finals):
    """Training lines of both worlds, base 0.2."""
    costs = {"sampling": 10.0, "probe": 0.0, "update": 5.0, "seconds": 1.0}
    return {
        (world, row, seed): {"base": 0.2, "final": final, **costs}
        for world in WORLDS
        for row, rewards in finals.items()
        for seed, final in enumerate(rewards)
    }


GOOD, CHEAP, POOR = (
    "gains, Substeps(5), every second node",
    "gains, Substeps(3), every second node",
    "gains, Tweedie",
)


def test_a_probe_is_recommended_if_it_is_cheap_and_agrees_and_trains():
    costly = "gains, Completion"
    probes = {GOOD: (0.5, 10.0), CHEAP: (0.45, 14.0), POOR: (1.5, 0.0), costly: (0.4, 45.0)}
    cells = judged(cells_of(probes), 200)
    steady = {
        REFERENCE: [0.9, 0.91, 0.9, 0.92],
        GOOD: [0.9, 0.9, 0.91, 0.92],
        POOR: [0.3, 0.1, 0.4, 0.3],
    }

    def verdict_of(**changes):
        rows = verdicts(cells, lines_of({**steady, **changes}))
        return {row.row: row for row in rows}, recommendation(rows)

    rows, text = verdict_of()
    assert rows[GOOD].recommended and rows[GOOD].share == {"mixture": 0.4, "shapes": 0.4}
    assert rows[CHEAP].reaches and rows[CHEAP].trained is None and not rows[CHEAP].recommended
    assert not rows[POOR].reaches and rows[POOR].trained is False
    assert "110% of the evaluations, 2-D world" in rows[costly].why
    assert GOOD in text and "40%" in text
    rows, text = verdict_of(**{GOOD: [0.5, 0.5, 0.51, 0.5]})
    assert not any(row.recommended for row in rows.values()) and text.startswith("No cheaper probe")
    rows, _ = verdict_of(**{GOOD: [0.9, 0.9, 0.19, 0.92]})  # one seed has learned nothing
    assert rows[GOOD].trained is False and "does not learn, shapes world" in rows[GOOD].why
