"""The laboratory's rules: random credit, variants of turning points, pruned trees."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loading import ROOT
from published_trees import credit, published
from seeded import rand, randn, seeded
from small_run import TINY_RUN

from flowrl.bench.rules import (
    EvenGain,
    Pruned,
    RandomCredit,
    TurningPointVariant,
    clear_swings,
    luck,
    random_steps,
    shifted,
)
from flowrl.core.experience import Decisions
from flowrl.core.protocols import Stateful
from flowrl.credit import (
    DepthRelative,
    SiblingRelative,
    TurningPoint,
    calibrated_gains,
    credit_of,
    example,
    process_rewards,
    turning_points,
)
from flowrl.probes import Branch
from flowrl.run.build import make_method
from flowrl.testing import credit_contract

PER_PROMPT = TurningPoint(balance_scope="prompt")
test_variants = [
    credit_contract(TurningPointVariant(min_size=0.1, confidence=0.5, rule=PER_PROMPT)),
    credit_contract(TurningPointVariant(where="shift", rule=PER_PROMPT)),
    credit_contract(TurningPointVariant(where="early", rule=PER_PROMPT)),
]
test_moving_depths_contract = credit_contract(
    Pruned(DepthRelative("tree", "sample"), width="extremes", steps=(2,), every=1, stop=1),
    decisions=6,
)


def table(seed, prompts=3, members=6, columns=11):
    return rand(prompts, members, columns, seed=seed)


def test_the_even_weight_is_that_of_least_squares():
    """Of a step A*_k = g_k + h_k the value sees g_k; the hidden part has the same variance in every
    step. Ordinary least squares of A*_k on g_k and u_{k+1}.
    """
    seen, hidden = randn(2, 400, 50, 4, dtype=torch.float64)
    seen *= torch.tensor([0.5, 1.0, 1.5, 0.0])
    values = torch.nn.functional.pad(seen.cumsum(-1), (1, 0))
    values[..., -1] += hidden.sum(-1)
    credit = EvenGain().gains(values, torch.ones_like(values, dtype=torch.bool))
    error = (credit - (seen + hidden)).square().mean((0, 1))
    for weight in (None, 0.0, 1.0):
        other = calibrated_gains(values, weight) - (seen + hidden)
        assert (error < other.square().mean((0, 1))).all()
    for k in range(3):
        unexplained = (values[..., -1] - values[..., k + 1])[..., None]
        inputs = torch.cat([seen[..., k, None], unexplained], -1).flatten(0, 1)
        best = torch.linalg.lstsq(inputs, (seen + hidden)[..., k].flatten()).solution
        ours = torch.linalg.lstsq(inputs, credit[..., k].flatten()).solution
        torch.testing.assert_close(ours * 50 / 49, best, atol=0.05, rtol=0)


# Random credit


def test_random_credit_has_the_runs_seed_unless_its_own_is_given():
    """It changes with every table, and equal rewards get none."""
    config = TINY_RUN.replace(credit="random", seed=7)
    assert make_method(config).credit.seed == 7
    rule = make_method(config.replace(credit="random(seed=0)", seed=3)).credit
    values, other = table(0), RandomCredit(seed=1)
    tables = [some.assign(values, Decisions.like(values)) for some in (rule, rule, other)]
    assert rule.seed == 0 and len(torch.stack(tables).unique(dim=0)) == 3


# Variants of turning points


@given(st.integers(0, 10_000))
def test_random_steps_keep_the_density_of_every_trajectory_and_nothing_else(seed):
    values = table(seed)
    mask = rand(3, 6, 10, seed=seed) > 0.3
    turns = turning_points(values) & mask
    moved = random_steps(values, turns, seed, mask)
    assert torch.equal(moved.sum(-1), turns.sum(-1)) and not (moved & ~mask).any()
    order = torch.randperm(6, generator=seeded(seed))
    rows = (values[:, order], turns[:, order], seed, mask[:, order])
    assert torch.equal(random_steps(*rows), moved[:, order])
    assert torch.equal(random_steps(values + 0.5, turns, seed, mask), moved)


def test_the_random_control_has_marks_without_effect():
    """At the last decision R - V_k is the gain. Consistent turning points are never there, the
    control's marks are, and taking them away changes no credit.
    """
    values = table(0, members=40)
    mask = torch.ones(*values.shape[:2], values.shape[2] - 1, dtype=torch.bool)
    control = TurningPointVariant(where="random")
    chosen = control.selected(values, mask)
    assert chosen[..., -1].any() and not turning_points(values)[..., -1].any()
    fewer, decisions = chosen.clone(), Decisions.like(values)
    fewer[..., -1] = False
    expected = control.rule.scores(values, decisions, fewer)
    assert torch.equal(control.assign(values, decisions), expected)


PAGES = ["docs/verdict.md", "docs/log.md", "docs/papers/variants.md", "flowrl/data/coverage.yaml"]
SOURCES = ["07_tp_grpo.py", "08_side_by_side.py"]


@pytest.mark.parametrize("page", [*PAGES, *(f"tutorials/source/{name}" for name in SOURCES)])
def test_a_page_with_the_random_control_says_that_it_is_weaker(page):
    assert re.search(r"changes? the credit less", (ROOT / page).read_text())


def test_the_lessons_controls_have_the_marks_and_the_dose_of_turning_points():
    lesson = json.loads((ROOT / "tutorials/07_tp_grpo.ipynb").read_text())
    texts = [
        "".join(part.get("text", [])) for c in lesson["cells"] for part in c.get("outputs", [])
    ]
    (printed,) = (text for text in texts if "dose (rms change" in text)
    marks, doses = zip(*re.findall(r"one by one (.*?); dose .*? ([\d.]+)", printed), strict=True)
    assert len(doses) == 5 and len(set(marks[:4])) == 1 and marks[0].endswith(" 0%")
    assert all(0.9 < float(dose) / float(doses[0]) < 1.1 for dose in doses[1:4])


ALL = TurningPoint(balance=None)
CONTROLS = ("shift", "dose", "sign")


def walk(prompts=6000, members=8, decisions=5):
    """Exact values of a random walk, R = x_K, with equal steps; V_k = x_k."""
    steps = randn(prompts, members, decisions, seed=1, dtype=torch.float64)
    return torch.nn.functional.pad(steps.cumsum(-1), (1, 0))


def effect(values, where):
    """E[eps_k credit_k] by decision; that of the gains is 1."""
    variant = TurningPointVariant(where=where, rule=ALL)
    mask = torch.ones_like(values[..., 1:], dtype=torch.bool)
    table = variant._with_bonus(values, mask) if where == "bonus" else values
    credit = process_rewards(table, variant.selected(table, mask))
    return (values.diff(dim=-1) * credit).mean((0, 1))


def test_turning_points_are_biased_and_marks_that_look_at_nothing_are_not():
    """Consistent turning points of a walk of five equal steps: 1 + tau_k/(pi sigma) at decision 0,
    tau_k the deviation of what follows; 1.637 1.267 1.207 1.133 1 in all. Five standard errors.
    """
    values = walk()
    expected = torch.tensor([1.637, 1.267, 1.207, 1.133, 1.0], dtype=torch.float64)
    torch.testing.assert_close(effect(values, "turning"), expected, atol=0.05, rtol=0)
    ones = torch.ones(5, dtype=torch.float64)
    for where in ("early", "shift", "dose", "none"):
        torch.testing.assert_close(effect(values, where), ones, atol=0.05, rtol=0)
    sign = effect(values, "sign")
    assert (sign[:-1] > 1.08).all() and abs(sign[-1] - 1) < 0.05  # without any turning
    # 1 + kappa E|eps|
    variant, mask = (
        TurningPointVariant(rule=ALL),
        torch.ones_like(values[..., 1:], dtype=torch.bool),
    )
    kappa = (variant.selected(values, mask) * luck(values).abs()).mean((0, 1))
    torch.testing.assert_close(effect(values, "bonus"), 1 + kappa * 0.798, atol=0.05, rtol=0)


def test_the_controls_have_the_dose_of_turning_points():
    values = walk(600)
    mask = torch.ones_like(values[..., 1:], dtype=torch.bool)
    own = TurningPointVariant(rule=ALL).selected(values, mask)
    marks = {w: TurningPointVariant(where=w, rule=ALL).selected(values, mask) for w in CONTROLS}
    assert torch.equal(marks["shift"].sum(1), own.sum(1))  # by prompt and decision
    for where, chosen in marks.items():
        assert torch.equal(chosen.sum((0, 1)), own.sum((0, 1))), where
        assert not chosen[..., -1].any() and not torch.equal(chosen, own)
        dose = [(m * luck(values) ** 2).mean((0, 1))[:-1].sqrt() for m in (chosen, own)]
        least = 0.8 if where == "shift" else 0.9
        assert ((dose[0] / dose[1] > least) & (dose[0] / dose[1] < 1.1)).all(), where
    agree = (values.diff(dim=-1) * luck(values)) > 0
    assert not (marks["sign"] & ~agree).any()


def test_a_shifted_mark_is_another_members():
    values, mask = table(3, 1, 6, 5), torch.ones(1, 6, 4, dtype=torch.bool)
    for member in range(6):
        marks = torch.zeros_like(mask)
        marks[0, member, 2] = True
        moved = shifted(values, marks, 0, mask)
        assert moved.sum() == 1 and moved[0, :, 2].any() and not moved[0, member].any()
    assert not shifted(values[:, :1], mask[:, :1], 0, mask[:, :1]).any()  # nobody else
    everybody = shifted(values, mask, 0, mask)
    assert torch.equal(everybody, mask)


def test_filters_by_hand():
    values = torch.tensor(
        [[[0.5, 0.4, 0.3, 0.45, 0.6], [0.5, 0.6, 0.7, 0.55, 0.4], [0.5, 0.55, 0.52, 0.65, 0.62]]]
    )
    turns, mask = turning_points(values), torch.ones(1, 3, 4, dtype=torch.bool)
    assert turns.nonzero().tolist() == [[0, 0, 2], [0, 1, 2], [0, 2, 0]]
    # std of d_0 over the members is 0.0850, of d_2 0.1370
    assert (turns & clear_swings(values, 1.0, mask)).nonzero().tolist() == [[0, 0, 2], [0, 1, 2]]
    # another group's spread does not count
    swings = clear_swings(torch.cat([values, 100 * values]), 1.0, mask.repeat(2, 1, 1))
    assert torch.equal(swings[:1], clear_swings(values, 1.0, mask))
    rule = TurningPoint(balance=None)
    for options, count in (
        ({"min_size": 0.2}, 2),
        ({"confidence": 0.5}, 3),
        ({"confidence": 1.1}, 0),
    ):
        assert TurningPointVariant(**options, rule=rule).selected(values).sum() == count
    masked = torch.tensor([[[True], [True], [False]]])
    swings = clear_swings(torch.tensor([[[0.0, 1.0], [0.0, -1.0], [0.0, 50.0]]]), 0.9, masked)
    assert swings[0, :2].all()


# Pruned trees

LATE = dict(steps=(14, 15, 16, 17))
SLIDE = dict(**LATE, every=30, stop=8)
BEST, EXTREMES = dict(width="best"), dict(width="extremes")
PRUNING = {
    ("published", "default"): ({}, 0),
    ("published", "depth"): (LATE, 0),
    ("published", "depth_slide_step0"): (SLIDE, 0),
    ("published", "depth_slide_step100"): (SLIDE, 100),
    ("published", "depth_slide_step299"): (SLIDE, 299),
    # the code's own stop is the last split, 9
    ("published", "depth_slide_no_stop_step299"): (SLIDE, 299),
    ("published", "width1"): (BEST, 0),
    ("published", "width2"): (EXTREMES, 0),
    ("published", "width2_ratio0.3"): (EXTREMES | dict(ratio=0.3), 0),
    ("published", "depth_and_width1"): (LATE | BEST, 0),
    ("published", "depth_and_width2"): (LATE | EXTREMES, 0),
    ("published", "after_pruning_cutoff"): (LATE | EXTREMES | dict(until=150), 200),
    ("published", "at_pruning_cutoff"): (LATE | EXTREMES | dict(until=150), 150),
    ("late", "depth"): (dict(steps=(0, 5)), 0),
    ("late", "width2"): (EXTREMES, 0),
    ("rounds", "width2"): (EXTREMES, 0),
    ("mixed", "prob_weighted"): ({}, 0),
}


def trained(rule, record):
    """The decisions of weight 1 [prompt, member, decision]."""
    weights = credit_of(rule, record).weights
    assert ((weights == 0) | (weights == 1)).all()
    return weights.bool()


@pytest.mark.parametrize(("name", "variant"), list(PRUNING))
def test_pruning_masks_of_the_published_code(name, variant):
    case, (options, iteration) = published(name), PRUNING[name, variant]
    rule = Pruned(DepthRelative("tree", "sample", clamp=None), released=True, **options)
    rule.iteration = iteration
    expected = case.tree.decision_table(case.read(f"{variant}/trained").float()).bool()
    assert torch.equal(trained(rule, case.record), expected)


def test_width_pruning_keeps_whole_branches_of_every_state():
    probe = Branch((2, 1, 4))
    values = rand(2, 8, 6).sort(dim=1).values
    record = example(values, probe)
    mask = trained(Pruned(DepthRelative(probe=probe), width="best", ratio=0.5), record)
    assert mask[..., :3].all(), "the split itself is trained"
    assert torch.equal(mask[..., 3], mask[..., 4]), "whole branches"
    halves, final = mask[..., 3].view(2, 2, 4), record.values[..., -1].view(2, 2, 4)
    assert torch.equal(halves, final >= final.sort(descending=True).values[..., 1:2])
    extremes = trained(Pruned(SiblingRelative(), width="extremes", ratio=0.5), record)
    worth = credit(SiblingRelative(probe=probe), record)[..., 2]
    for prompt in range(2):
        chosen = worth[prompt][extremes[prompt, :, 3]].sort().values
        torch.testing.assert_close(chosen, worth[prompt].sort().values[[0, 1, 6, 7]])


def test_pruned_keeps_count_and_the_memory_of_its_rule():
    rule, restored = (
        Pruned(RandomCredit(probe=Branch((2,))), steps=(2,), every=1) for _ in range(2)
    )
    assert isinstance(rule, Stateful)
    record = example(torch.rand(1, 4, 4), rule.probe)
    pruned = [(~trained(rule, record)[0, 0]).nonzero().flatten().tolist() for _ in range(4)]
    assert pruned == [[2], [1], [0], [0]]
    restored.load_state_dict(rule.state_dict())
    assert restored.iteration == 4
    assert torch.equal(credit(restored, record), credit(rule, record))
