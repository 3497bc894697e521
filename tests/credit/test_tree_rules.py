"""Credit rules on trees: worked examples, the published code of BranchGRPO, special cases."""

import json
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from published_trees import GOLDEN, SPLITS, credit, published, record_of
from seeded import rand, seeded
from torch import Tensor
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, CreditError
from flowrl.core.tree import Tree, tree_of
from flowrl.credit import (
    GDPO,
    BackedUp,
    DepthRelative,
    SiblingRelative,
    StepwiseGain,
    Uniform,
    example,
    gains,
)
from flowrl.methods import METHODS, try_credit
from flowrl.probes import Branch, Comb
from flowrl.samplers import FixedWindow, FlowSDE

WORKED = json.loads((GOLDEN / "worked.json").read_text())
BRANCH = Branch((2,))
"""A branching probe for rules that are given their tree; its shape does not matter."""
RULES = {
    "uniform": Uniform(clamp=None, probe=BRANCH),
    "gain_joint": StepwiseGain(clamp=None, probe=BRANCH),
    "sibling": SiblingRelative(clamp=None),
    "depth_prompt": DepthRelative(clamp=None),
    "depth_tree_sample_std": DepthRelative("tree", "sample", clamp=None),
    "softmax_backup": BackedUp(clamp=None),
}


@dataclass(frozen=True)
class Worked:
    """A tree, the leaves' rewards [prompt, member] and log-probabilities [prompt, unit]."""

    tree: Tree
    rewards: Tensor
    log_probs: Tensor

    @property
    def record(self):
        return record_of(self.tree, self.rewards, self.log_probs)


@cache
def worked(name):
    entry = WORKED[name]
    parent, node = entry["parent"], entry["node"]
    leaves = [int(unit) for unit in entry["leaf_reward"]]
    visits = []
    for leaf in leaves:
        path = [leaf]
        while parent[path[-1]] >= 0:
            path.append(parent[path[-1]])
        visits.append([(node[unit], unit) for unit in reversed(path)])
    tree = tree_of(visits, lambda node, key: True)
    assert tree.parent.tolist() == parent, "units are numbered as in the file"
    log_probs = torch.zeros(1, tree.units)
    for unit, value in entry.get("logp", {}).items():
        log_probs[0, int(unit)] = value
    return Worked(tree, torch.tensor([list(entry["leaf_reward"].values())]), log_probs)


@pytest.mark.parametrize("name", ["E1", "E2"])
def test_values_and_advantages_of_the_worked_examples(name):
    case, entry = worked(name), WORKED[name]
    for kind, key in (("leaf", "V"), ("child", "child_mean")):
        if key in entry:
            expected = [entry[key][str(unit)] for unit in range(case.tree.units)]
            values = replace(case.tree, mean=kind).values(case.rewards)[0]
            assert_close(values, torch.tensor(expected), rtol=0, atol=1e-6)
    for rule, expected in entry["advantages"].items():
        gain = rule == "gain"
        table = gains(case.record.values) if gain else credit(RULES[rule], case.record)
        values = case.tree.edge_means(table)[0]  # uniform: the mean of the leaves behind a unit
        for unit, value in expected.items():
            assert values[int(unit)] == pytest.approx(value, abs=6e-5), (rule, unit)


# BranchGRPO's published code


RELEASED = DepthRelative("tree", "sample", clamp=None)


@pytest.mark.parametrize("name", list(SPLITS))
def test_values_and_advantages_of_the_published_code(name):
    case = published(name)
    values = case.tree.values(case.record.values[..., -1])
    assert_close(values, case.read("default/value"), rtol=0, atol=2e-7)
    expected = case.tree.decision_table(case.read("default/advantage"))
    assert_close(credit(RELEASED, case.record), expected, rtol=0, atol=5e-6)
    advantages = credit(METHODS["branch-grpo"]().credit, case.record)
    assert_close(advantages, expected.clamp(-5, 5), rtol=0, atol=5e-6)
    if name in ("published", "small", "late", "mixed"):
        weighted = credit(replace(RELEASED, backup="softmax"), case.record)
        expected = case.tree.decision_table(case.read("prob_weighted/advantage"))
        assert_close(weighted, expected, rtol=0, atol=2e-5)


# Closed forms and special cases


def drawn(probe, prompts, members, count, seed=0):
    """A record of `count` decisions with random rewards in float64."""
    return example(rand(prompts, members, count + 1, seed=seed, dtype=torch.float64), probe)


def zscores(values):
    """Z over axis 1."""
    centred = values - values.mean(1, keepdim=True)
    return centred / (centred.std(1, correction=0, keepdim=True) + 1e-4)


def test_leave_one_out_is_the_difference_to_the_others():
    values = torch.tensor([1.0, 3.0, 8.0], dtype=torch.float64)[None, :, None].expand(1, -1, 2)
    record = example(values, Branch((3,)))

    def siblings(**options):
        return credit(SiblingRelative(clamp=None, **options), record)[0, :, 0]

    plain, others = siblings(normalise=False), siblings(normalise=False, leave_one_out=True)
    assert others.tolist() == pytest.approx([1 - 5.5, 3 - 4.5, 8 - 2.0])
    assert_close(others, 1.5 * plain)
    assert_close(siblings(leave_one_out=True), 1.5 * siblings())


def test_strides_are_normalised_one_by_one_and_summed():
    probe = Comb(branches=3, count=1, high=1, strides=(1, 2, 3))
    shown = drawn(probe, 2, 9, 6, seed=3)
    scores = zscores(shown.values[..., -1].view(2, 3, 3))  # [prompt, branch, stride]
    advantages = credit(SiblingRelative(clamp=None, probe=probe), shown)
    assert_close(advantages, scores.sum(-1).repeat_interleave(3, dim=1)[..., None])


TREE_RULES = [SiblingRelative(), DepthRelative(), BackedUp("mean"), GDPO(DepthRelative())]


@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: type(rule).__name__)
def test_errors_name_what_is_missing(rule):
    shown = drawn(Branch((2, 2)), 2, 4, 5)
    with pytest.raises(CreditError, match="needs decisions with a branched tree"):
        rule.assign(shown.values, replace(shown.decisions, tree=None))
    missing = shown.values.clone()
    missing[..., [2, 5]] = float("nan")
    with pytest.raises(CreditError, match=r"finite value in column.* 5 of 0\.\.5.*Branch"):
        rule.assign(missing, shown.decisions)


def test_log_probabilities_are_named_when_they_are_missing():
    shown = drawn(Branch((2, 2)), 2, 4, 5)
    for rule in (DepthRelative(backup="softmax"), GDPO(BackedUp())):
        assert "log_probs" in rule.needs.fields
        with pytest.raises(CreditError, match="needs log-probabilities: "):
            credit(rule, replace(shown, log_probs=None))
    assert credit(BackedUp("mean"), replace(shown, log_probs=None)).isfinite().all()
    assert BackedUp("mean").needs.fields == ()


# The named methods at the default size


@pytest.mark.parametrize(
    ("name", "counts", "decisions"),
    [
        ("branch-grpo", [1, 1, 1, 3, 3, 6, 6, 12, 12, 12, 12], 3 + 3 + 6 + 6 + 12),
        ("tree-grpo", [1, 1, 1, 3, 6, 12, 12, 12, 12, 12, 12], 3 + 6 + 12 + 12 + 12),
        ("granular-grpo", None, 4),
        ("tempflow-grpo", None, 30),
    ],
)
def test_named_methods_fit_the_default_group(name, counts, decisions):
    method = replace(METHODS[name](), sampler=FlowSDE(0.7), window=FixedWindow(2, 7))
    probe, members = method.credit.probe, 30 if name == "tempflow-grpo" else 12
    for seed in range(3):
        generator = seeded(seed)
        tree = probe.tree(10, range(2, 7), members, method.shared_noise, generator)
        assert int(tree.drawn.sum()) == decisions and tree.counts[0] == 1
        assert counts is None or tree.counts == counts
        if name == "tempflow-grpo":  # in every iteration 6 draws of each decision
            assert tree.decisions.sum(0).tolist() == [0, 0, 6, 6, 6, 6, 6, 0, 0, 0]
        if tree.strides is not None:
            assert tree.strides.tolist() == 4 * [1, 2, 3]
    stds = torch.tensor([0.3] * 9 + [0.0])
    try_credit(METHODS[name](), stds, 54 if name == "tempflow-grpo" else 12)
    with pytest.raises(ConfigError, match="group_size = 7"):
        try_credit(METHODS[name](), stds, 7)
