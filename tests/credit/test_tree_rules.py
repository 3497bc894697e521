"""Credit rules on trees: worked examples, the published code of BranchGRPO, invariants on random
trees, special cases.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from flowrl.core.errors import ConfigError, CreditError
from flowrl.core.experience import Decisions, Experience
from flowrl.core.protocols import CreditAssigner, CreditRule, Stateful
from flowrl.core.tree import Tree, tree_of
from flowrl.credit import (
    GDPO,
    BackedUp,
    DepthRelative,
    Pruned,
    RandomCredit,
    SiblingRelative,
    StepwiseGain,
    TurningPoint,
    Uniform,
    Weighted,
    credit_of,
    example,
    generalised_gains,
    zscore,
)
from flowrl.credit.units import on_tree
from flowrl.probes import Branch, Comb, Completion, Probe
from flowrl.testing.tables import of_members

GOLDEN = Path(__file__).parent.parent / "golden_trees"
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


def record_of(tree: Tree, rewards: Tensor, log_probs: Tensor | None = None) -> Experience:
    """The record of a tree from the leaves' rewards [prompt, member] and log-probabilities [prompt,
    unit].
    """
    shown = on_tree(rewards, Decisions.like(torch.zeros(*rewards.shape, tree.steps + 1)), tree)
    found = shown.experience()
    if log_probs is None:
        return found
    return replace(
        found,
        log_probs=tree.decision_table(log_probs).masked_fill(~shown.decisions.drawn, torch.nan),
    )


def credit(rule: CreditRule, record: Experience) -> Tensor:
    """Advantages [prompt, member, decision]."""
    return credit_of(rule, record).advantages


def trained(rule: Pruned, record: Experience) -> Tensor:
    """The decisions of weight 1 [prompt, member, decision]."""
    weights = credit_of(rule, record).weights
    assert weights is not None and bool(((weights == 0) | (weights == 1)).all())
    return weights.bool()


@dataclass(frozen=True)
class Worked:
    """A tree, the leaves' rewards [prompt, member] and log-probabilities [prompt, unit]."""

    tree: Tree
    rewards: Tensor
    log_probs: Tensor

    @property
    def record(self) -> Experience:
        return record_of(self.tree, self.rewards, self.log_probs)


@cache
def worked(name: str) -> Worked:
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
def test_values_of_the_worked_examples(name: str) -> None:
    example, entry = worked(name), WORKED[name]
    for kind, key in (("leaf", "V"), ("child", "child_mean")):
        if key in entry:
            expected = torch.tensor([entry[key][str(unit)] for unit in range(example.tree.units)])
            found = replace(example.tree, mean=kind).values(example.rewards)[0]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rule"), [(e, r) for e in ("E1", "E2") for r in WORKED[e]["advantages"]]
)
def test_advantages_of_the_worked_examples(name: str, rule: str) -> None:
    shown, expected = worked(name), WORKED[name]["advantages"][rule]
    advantages = (
        generalised_gains(shown.record.values)
        if rule == "gain"
        else credit(RULES[rule], shown.record)
    )
    found = shown.tree.edge_means(advantages)[0]  # uniform: the mean of the leaves behind a unit
    for unit, value in expected.items():
        assert found[int(unit)] == pytest.approx(value, abs=6e-5), f"unit {unit}"


def test_the_worked_costs_are_those_of_the_probes() -> None:
    cases = {
        "T10 roots3 branch2,4,6 k2": (Branch({2: 2, 4: 2, 6: 2}), 10, 24, False),
        "BranchGRPO T20 roots1 branch0,3,6,9 k2": (Branch({0: 2, 3: 2, 6: 2, 9: 2}), 20, 16, False),
        "TreeGRPO T10 window3 k3 start0": (Branch((3, 3, 3)), 10, 27, False),
        "plain T10 G24": (Branch({}), 10, 24, False),
        "shared xT T10 G24": (Branch({0: 24}), 10, 24, False),
    }
    assert set(cases) == set(WORKED["cost"])
    for name, (probe, steps, members, shared) in cases.items():
        tree, entry = (
            probe.tree(steps, range(steps), members, shared, torch.Generator()),
            WORKED["cost"][name],
        )
        assert tree.counts == entry["alive"], name
        assert (sum(tree.counts[:-1]), tree.units, tree.members) == (
            entry["nfe"],
            entry["nodes"],
            entry["leaves"],
        ), name
        split = torch.bincount(tree.parent[tree.drawn], minlength=tree.units) > 1
        assert (int(split.sum()), int(split[tree.parent[tree.drawn]].sum())) == (
            entry["branch_parents"],
            entry["branch_edges"],
        )
    combs = {
        "completions K1 T10 M0..9": (Comb(1), 10, 10),
        "TempFlow K6 T10 M0..9 per seed": (Comb(6), 10, 60),
        "G2RPO G12 T16 M0..7 lambda1": (Comb(12, high=8), 16, 96),
        "G2RPO lambda123": (Comb(12, high=8, strides=(1, 2, 3)), 16, 288),
    }
    for name, (probe, steps, members) in combs.items():
        tree = probe.tree(steps, range(steps), members, False, torch.Generator())
        assert sum(tree.counts[:-1]) == WORKED["comb"][name], name


# BranchGRPO's published code


@dataclass(frozen=True)
class Published:
    """A pair of trees of the published code as one tree of two prompts; `units` [prompt, unit] are
    the nodes in its files.
    """

    name: str
    tree: Tree
    units: Tensor

    def read(self, what: str) -> Tensor:
        """A number per unit [prompt, unit]."""
        return FILES[f"{self.name}/{what}"][self.units]

    @property
    def record(self) -> Experience:
        log_probs = FILES[f"{self.name}/log_prob"][self.units]
        return record_of(self.tree, FILES[f"{self.name}/rewards"].view(2, -1), log_probs)


FILES = load_file(GOLDEN / "branch.safetensors")
SPLITS = {
    "published": (20, (0, 3, 6, 9)),
    "small": (4, (0, 2)),
    "late": (8, (1, 4, 5)),
    "rounds": (10, (0, 3, 6)),
    "mixed": (12, (0, 3, 6, 9)),
    "equal_rewards": (4, (0, 2)),
}


@cache
def published(name: str) -> Published:
    steps, splits = SPLITS[name]
    depth, parent, leaf = (FILES[f"{name}/{what}"].tolist() for what in ("step", "parent", "leaf"))
    decisions = sorted(
        {d - 1 for d, sde in zip(depth, FILES[f"{name}/is_sde_edge"].tolist(), strict=True) if sde}
    )
    members = 2 ** len(splits)
    tree = Branch(dict.fromkeys(splits, 2)).tree(
        steps, decisions, members, False, torch.Generator()
    )
    units = torch.zeros(2, tree.units, dtype=torch.long)
    for place, node in enumerate(leaf):
        for unit in reversed(tree.paths[place % members].tolist()):
            units[place // members, unit] = node
            node = parent[node]
        assert node == -1
    assert sorted(units.flatten().tolist()) == list(range(len(depth))), "every node is one unit"
    assert torch.equal(FILES[f"{name}/step"][units], tree.node.expand(2, -1).short())
    return Published(name, tree, units)


RELEASED = DepthRelative("tree", "sample", clamp=None)


@pytest.mark.parametrize("name", list(SPLITS))
def test_values_and_advantages_of_the_published_code(name: str) -> None:
    case = published(name)
    torch.testing.assert_close(
        case.tree.values(case.record.values[..., -1]), case.read("default/value"), rtol=0, atol=2e-7
    )
    found = credit(RELEASED, case.record)
    torch.testing.assert_close(
        found, case.tree.decision_table(case.read("default/advantage")), rtol=0, atol=5e-6
    )


@pytest.mark.parametrize("name", ["published", "small", "late", "mixed"])
def test_probability_weighted_values_of_the_published_code(name: str) -> None:
    case = published(name)
    found = credit(replace(RELEASED, backup="softmax"), case.record)
    torch.testing.assert_close(
        found, case.tree.decision_table(case.read("prob_weighted/advantage")), rtol=0, atol=2e-5
    )
    assert not torch.allclose(found, credit(RELEASED, case.record), atol=1e-2)


def test_branch_grpo_has_the_published_advantages() -> None:
    from flowrl.methods import named_method

    rule, case = named_method("branch-grpo").credit, published("published")
    expected = case.tree.decision_table(case.read("default/advantage")).clamp(-5, 5)
    torch.testing.assert_close(credit(rule, case.record), expected, rtol=0, atol=5e-6)


LATE = dict(steps=(14, 15, 16, 17))
SLIDE = dict(**LATE, every=30, stop=8)
PRUNING = {
    ("published", "default"): ({}, 0),
    ("published", "depth"): (LATE, 0),
    ("published", "depth_slide_step0"): (SLIDE, 0),
    ("published", "depth_slide_step100"): (SLIDE, 100),
    ("published", "depth_slide_step299"): (SLIDE, 299),
    # the code's own stop is the last split, 9
    ("published", "depth_slide_no_stop_step299"): (SLIDE, 299),
    ("published", "width1"): (dict(width="best"), 0),
    ("published", "width2"): (dict(width="extremes"), 0),
    ("published", "width2_ratio0.3"): (dict(width="extremes", ratio=0.3), 0),
    ("published", "depth_and_width1"): (dict(**LATE, width="best"), 0),
    ("published", "depth_and_width2"): (dict(**LATE, width="extremes"), 0),
    ("published", "after_pruning_cutoff"): (dict(**LATE, width="extremes", until=150), 200),
    ("published", "at_pruning_cutoff"): (dict(**LATE, width="extremes", until=150), 150),
    ("small", "width1"): (dict(width="best"), 0),
    ("small", "width2"): (dict(width="extremes"), 0),
    ("late", "depth"): (dict(steps=(0, 5)), 0),
    ("late", "width1"): (dict(width="best"), 0),
    ("late", "width2"): (dict(width="extremes"), 0),
    ("rounds", "width2"): (dict(width="extremes"), 0),
    ("mixed", "default"): ({}, 0),
    ("mixed", "prob_weighted"): ({}, 0),
}


@pytest.mark.parametrize(("name", "variant"), list(PRUNING))
def test_pruning_masks_of_the_published_code(name: str, variant: str) -> None:
    case, (options, iteration) = published(name), PRUNING[name, variant]
    rule = Pruned(RELEASED, released=True, **options)
    rule.iteration = iteration
    found = trained(rule, case.record)
    expected = case.tree.decision_table(case.read(f"{variant}/trained").float()).bool()
    assert torch.equal(found, expected)


def test_every_published_variant_is_tested() -> None:
    variants = {tuple(name.split("/")[:2]) for name in FILES if name.endswith("/trained")}
    without_pruning = {(n, v) for n, v in variants if v in ("default", "prob_weighted")}
    assert variants - without_pruning <= set(PRUNING)
    for name, variant in without_pruning:
        case = published(name)
        expected = case.tree.decision_table(case.read(f"{variant}/trained").float())
        assert torch.equal(expected.bool(), case.record.decisions.mask)


# Pruning as it should be


def test_width_pruning_keeps_whole_branches() -> None:
    probe = Branch((2, 1, 4))
    values = torch.rand(2, 8, 6, generator=torch.Generator().manual_seed(0)).sort(dim=1).values
    shown = example(values, probe).experience()
    advantages = credit(SiblingRelative(probe=probe), shown)
    kept = trained(Pruned(DepthRelative(probe=probe), width="best", ratio=0.5), shown)
    assert kept[..., :3].all(), "the split itself is trained"
    assert torch.equal(kept[..., 3], kept[..., 4]), "whole branches"
    for prompt in range(2):
        for half in (slice(0, 4), slice(4, 8)):
            rewards = shown.values[prompt, half, -1]
            assert torch.equal(
                kept[prompt, half, 3], rewards >= rewards.sort(descending=True).values[1]
            )
    extremes = trained(Pruned(SiblingRelative(), width="extremes", ratio=0.5), shown)
    worth = advantages[..., 2]
    for prompt in range(2):
        found = worth[prompt][extremes[prompt, :, 3]].sort().values
        torch.testing.assert_close(found, worth[prompt].sort().values[[0, 1, 6, 7]])


@pytest.mark.parametrize("width", ["best", "extremes"])
def test_width_pruning_ranks_the_members_in_the_mask(width: str) -> None:
    """Of four branches two are invalid, so one of the other two remains with "best", and the better
    with "extremes".
    """
    rewards = torch.tensor([[0.1, 0.9, float("nan"), float("nan")]])
    shown = example(torch.zeros(1, 4, 3), Branch((4,)))
    tree = shown.decisions.tree
    assert tree is not None
    kept = trained(Pruned(SiblingRelative(), width=width, ratio=0.5), record_of(tree, rewards))  # pyright: ignore[reportArgumentType]
    assert kept[0, :, 0].tolist() == [True, True, False, False]
    assert kept[0, :, 1].tolist() == [False, True, False, False]


def test_width_pruning_ignores_trees_without_branches() -> None:
    shown = example(torch.rand(1, 4, 4), Branch({})).experience()
    assert trained(Pruned(width="best"), shown).all()


def test_pruned_keeps_count_and_the_memory_of_its_rule() -> None:
    rule = Pruned(RandomCredit(probe=Branch((2,))), steps=(2,), every=1)
    assert isinstance(rule, Stateful)
    shown = example(torch.rand(1, 4, 4), rule.probe).experience()
    left = [(~trained(rule, shown)[0, 0]).nonzero().flatten().tolist() for _ in range(4)]
    assert left == [[2], [1], [0], [0]]
    restored = Pruned(RandomCredit(probe=Branch((2,))), steps=(2,), every=1)
    restored.load_state_dict(rule.state_dict())
    assert restored.iteration == 4
    assert torch.equal(credit(restored, shown), credit(rule, shown))


def test_pruned_may_wrap_any_rule_and_multiplies_its_weights() -> None:
    shown = example(torch.rand(1, 4, 4), Branch((2,))).experience()
    twice = Pruned(Pruned(GDPO(SiblingRelative()), steps=(0,)), steps=(2,))
    assert trained(twice, shown)[0, 0].tolist() == [False, True, False]
    assert twice.reads_fields == () and Pruned(BackedUp()).reads_fields == ("log_probs",)

    class Records:
        probe = Branch((2,))

        def credit(self, experience: Experience) -> object:
            return credit_of(SiblingRelative(), experience)

    only = Pruned(Records())  # pyright: ignore[reportArgumentType]
    assert torch.equal(credit(only, shown), credit(SiblingRelative(), shown))
    with pytest.raises(CreditError, match=r"Records needs the record of an iteration"):
        only.assign(shown.values, shown.decisions)


# Invariants on random trees


@st.composite
def grown(draw: st.DrawFn) -> Worked:
    """Trees of up to 5 steps in which every state has 1 to 3 children, some of the steps being no
    decisions.
    """
    steps = draw(st.integers(1, 5))
    decisions = draw(st.lists(st.booleans(), min_size=steps, max_size=steps).filter(any))
    paths: list[tuple[int, ...]] = [(root,) for root in range(draw(st.integers(1, 3)))]
    for step in range(steps):
        many = [
            draw(st.integers(1, 3)) if decisions[step] and len(paths) < 20 else 1 for _ in paths
        ]
        paths = [
            (*path, child)
            for path, count in zip(paths, many, strict=True)
            for child in range(count)
        ]
    visits = [[(node, path[: node + 1]) for node in range(steps + 1)] for path in paths]
    mean = draw(st.sampled_from(["leaf", "child"]))
    tree = replace(tree_of(visits, lambda node, _: decisions[node - 1]), mean=mean)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    log_probs = torch.randn(2, tree.units, generator=generator) * tree.drawn
    rewards = torch.rand(2, tree.members, generator=generator, dtype=torch.float64)
    return Worked(tree, rewards, log_probs)


EVERY = [
    SiblingRelative(),
    SiblingRelative(leave_one_out=True),
    SiblingRelative(normalise=False),
    DepthRelative(),
    DepthRelative("tree", "sample"),
    DepthRelative(backup="softmax"),
    BackedUp(),
    BackedUp("mean"),
    Uniform(probe=BRANCH),
    StepwiseGain(probe=BRANCH),
    GDPO(SiblingRelative()),
]


@settings(max_examples=60, deadline=None)
@given(grown())
def test_gains_sum_to_the_reward_minus_the_value_of_the_root(case: Worked) -> None:
    values = case.record.values
    torch.testing.assert_close(generalised_gains(values).sum(-1), case.rewards - values[..., 0])


@settings(max_examples=60, deadline=None)
@given(grown())
def test_leaf_weighted_gains_of_siblings_sum_to_0(case: Worked) -> None:
    tree = replace(case.tree, mean="leaf")
    gains = tree.edge_means(generalised_gains(tree.value_table(tree.values(case.rewards))))
    sums = torch.zeros_like(gains).index_add(
        1, tree.parent.clamp(min=0), gains * tree.leaves * tree.drawn
    )
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(grown(), st.sampled_from(EVERY), st.floats(-100, 100))
def test_a_constant_changes_nothing(case: Worked, rule: CreditAssigner, constant: float) -> None:
    moved = replace(case, rewards=case.rewards + constant)
    torch.testing.assert_close(
        credit(rule, moved.record), credit(rule, case.record), rtol=0, atol=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(grown(), st.sampled_from(EVERY), st.sampled_from([0.3, -3.3, 12345.678, 1e6 / 3]))
def test_a_silent_group_gets_exact_zeros(case: Worked, rule: CreditAssigner, reward: float) -> None:
    rewards = case.rewards.clone()
    rewards[0] = reward
    for dtype in (torch.float32, torch.float64):
        silent = replace(case, rewards=rewards.to(dtype))
        assert not credit(rule, silent.record)[0].any()


@settings(max_examples=60, deadline=None)
@given(grown())
def test_siblings_alone_get_no_sibling_credit_and_no_gain(case: Worked) -> None:
    tree = case.tree
    parents = tree.parent[tree.drawn]
    only = tree.drawn & (
        torch.bincount(parents.clamp(min=0), minlength=tree.units)[tree.parent.clamp(min=0)] == 1
    )
    for advantages in (
        credit(SiblingRelative(), case.record),
        generalised_gains(case.record.values),
    ):
        assert not tree.edge_means(advantages)[:, only].abs().gt(1e-12).any()


@settings(max_examples=40, deadline=None)
@given(grown())
def test_plain_means_up_the_tree_are_uniform_credit(case: Worked) -> None:
    tree = replace(case.tree, mean="child")
    members = torch.ones(2, tree.members, 1, dtype=torch.bool)
    scores = zscore(case.rewards[..., None], ("member",), clamp=None, mask=members)[..., 0]
    expected = tree.decision_table(tree.values(scores))
    torch.testing.assert_close(credit(BackedUp("mean", clamp=None), case.record), expected)


@settings(max_examples=60, deadline=None)
@given(grown(), st.sampled_from([rule for rule in EVERY if not isinstance(rule, StepwiseGain)]))
def test_invalid_leaves_change_nothing_for_the_others(case: Worked, rule: CreditAssigner) -> None:
    """The credit of the others is that of a tree without the invalid leaf; other prompts are
    untouched.
    """
    left = (torch.arange(case.tree.members) + 1) % case.tree.members < case.tree.members - 1
    left = left if case.tree.members > 1 else ~left
    rewards = case.rewards.clone()
    rewards[0, ~left] = torch.nan
    whole, found = case.record, credit(rule, record_of(case.tree, rewards, case.log_probs))
    if not isinstance(rule, GDPO):  # it divides by the std of the batch
        assert torch.equal(found[1], credit(rule, whole)[1])
    rewards[1, ~left] = torch.nan
    both = record_of(case.tree, rewards, case.log_probs)
    expected = credit(rule, of_members(both, left.nonzero().flatten()))
    torch.testing.assert_close(credit(rule, both)[:, left], expected, rtol=0, atol=1e-6)
    assert not credit(rule, both)[:, ~left].any()


# Closed forms and special cases


def drawn(probe: Probe, prompts: int, members: int, count: int, seed: int = 0) -> Experience:
    """A record of `count` decisions with random rewards in float64."""
    generator = torch.Generator().manual_seed(seed)
    return example(
        torch.rand(prompts, members, count + 1, generator=generator, dtype=torch.float64), probe
    ).experience()


def zscores(values: Tensor) -> Tensor:
    """Z over axis 1."""
    return (values - values.mean(1, keepdim=True)) / (
        values.std(1, unbiased=False, keepdim=True) + 1e-4
    )


def sibling_pair(rewards: list[float], **options: object) -> Tensor:
    values = torch.tensor(rewards, dtype=torch.float64)[None, :, None].expand(1, -1, 2)
    shown = example(values, Branch((len(rewards),))).experience()
    return credit(SiblingRelative(clamp=None, **options), shown)[0, :, 0]  # pyright: ignore[reportArgumentType]


def test_leave_one_out_is_the_difference_to_the_others() -> None:
    found = sibling_pair([1.0, 3.0, 8.0], normalise=False, leave_one_out=True)
    torch.testing.assert_close(
        found, torch.tensor([1 - 5.5, 3 - 4.5, 8 - 2.0], dtype=torch.float64)
    )
    plain = sibling_pair([1.0, 3.0, 8.0], normalise=False)
    torch.testing.assert_close(found, 1.5 * plain)
    torch.testing.assert_close(
        sibling_pair([1.0, 3.0, 8.0], leave_one_out=True), 1.5 * sibling_pair([1.0, 3.0, 8.0])
    )


def test_two_siblings_keep_the_sign_only() -> None:
    torch.testing.assert_close(
        sibling_pair([0.0, 0.25]), torch.tensor([-1.0, 1.0]).double(), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(
        sibling_pair([0.0, 25.0]), torch.tensor([-1.0, 1.0]).double(), rtol=1e-3, atol=0
    )


def test_strides_are_normalised_one_by_one_and_summed() -> None:
    probe = Comb(branches=3, count=1, high=1, strides=(1, 2, 3))
    shown = drawn(probe, 2, 9, 6, seed=3)
    scores = zscores(shown.values[..., -1].view(2, 3, 3))  # [prompt, branch, stride]
    found = credit(SiblingRelative(clamp=None, probe=probe), shown)
    torch.testing.assert_close(found, scores.sum(-1).repeat_interleave(3, dim=1)[..., None])
    tree = shown.decisions.tree
    assert tree is not None
    mixed = replace(shown, decisions=replace(shown.decisions, tree=replace(tree, strides=None)))
    together = credit(SiblingRelative(clamp=None, probe=Comb(3, 1, 0, 1)), mixed)
    assert not torch.allclose(together, found, atol=0.1)


def test_strides_with_members_outside_the_mask() -> None:
    probe = Comb(branches=3, count=1, high=1, strides=(1, 2))
    shown = drawn(probe, 1, 6, 5)
    tree, final = shown.decisions.tree, shown.values[..., -1].clone()
    assert tree is not None
    final[0, 5] = torch.nan  # the last branch has no member of stride 2
    found = credit(SiblingRelative(clamp=None, probe=probe), record_of(tree, final))[0, :, 0]
    expected = zscores(final[:, [0, 2, 4]])[0]
    expected[:2] += zscores(final[:, [1, 3]])[0]
    torch.testing.assert_close(
        found, torch.cat([expected[[0, 0, 1, 1, 2]], torch.zeros(1).double()])
    )


def test_a_comb_compares_draws_not_the_trunk() -> None:
    probe = Comb(branches=2, high=3)
    shown = drawn(probe, 1, 6, 4)
    expected = zscores(shown.values[0, :, -1].view(3, 2))
    for rule in (SiblingRelative(probe=probe), DepthRelative(probe=probe)):
        found = credit(rule, shown)[0]
        torch.testing.assert_close(found.sum(-1), expected.flatten())
        assert (found != 0).sum() == 6, "every member has one decision"


def test_depth_averages_the_strides_of_a_draw() -> None:
    """Strides skip nodes, so after the draw the members of one draw have different values."""
    probe = Comb(branches=2, strides=(1, 2, 3), high=3)
    shown = drawn(probe, 1, 18, 6)
    expected = zscores(shown.values[0, :, -1].view(3, 2, 3).mean(-1))
    found = credit(DepthRelative(probe=probe), shown)[0].sum(-1)
    torch.testing.assert_close(found, expected.flatten().repeat_interleave(3))


def test_shared_noise_is_a_tree_of_one_split() -> None:
    """Sibling- and depth-relative credit of the first decision is then uniform credit."""
    shown = drawn(Branch((6,)), 3, 6, 4)
    uniform = credit(Uniform(probe=Branch((6,))), shown)
    for rule in (SiblingRelative(), DepthRelative(), BackedUp()):
        torch.testing.assert_close(credit(rule, shown)[..., 0], uniform[..., 0])
    torch.testing.assert_close(credit(DepthRelative(), shown), uniform)


def test_a_plain_group_as_a_tree_has_uniform_depth_credit() -> None:
    shown = drawn(Branch({}), 3, 6, 4)
    torch.testing.assert_close(credit(DepthRelative(), shown), credit(Uniform(), shown))
    assert not credit(SiblingRelative(), shown).any()
    assert not credit(StepwiseGain(), shown).any()


def test_noise_weights_multiply_any_rule() -> None:
    probe = Branch((2, 2))
    shown = drawn(probe, 2, 4, 5)
    shown = replace(shown, decisions=replace(shown.decisions, std=torch.linspace(0.5, 0.1, 5)))
    plain = credit(SiblingRelative(), shown)
    weighted = Weighted(rule=SiblingRelative())
    assert weighted.probe == probe
    torch.testing.assert_close(credit(weighted, shown), plain * torch.linspace(0.5, 0.1, 5) / 0.3)
    by_hand = credit(Weighted((1.0, 2.0, 0.0, 0.0, 0.0), rule=SiblingRelative()), shown)
    torch.testing.assert_close(by_hand, plain * torch.tensor([1.0, 2.0, 0.0, 0.0, 0.0]))


def test_several_rewards_on_a_tree_are_credited_one_by_one() -> None:
    first, second = (drawn(Branch((2, 2)), 2, 4, 5, seed=seed) for seed in (0, 1))
    parts = {"a": first.values, "b": 100 * second.values}
    for inner in (Weighted(rule=DepthRelative()), BackedUp()):
        rule = GDPO(inner, batch=False)
        found = credit(rule, replace(first, parts=parts))
        expected = sum(credit(inner, replace(first, values=values)) for values in parts.values())
        torch.testing.assert_close(found, expected)
    assert GDPO(BackedUp()).reads_fields == Weighted(rule=BackedUp()).reads_fields == ("log_probs",)


TREE_RULES = [SiblingRelative(), DepthRelative(), BackedUp("mean"), GDPO(DepthRelative())]


@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: type(rule).__name__)
def test_errors_name_what_is_missing(rule: CreditAssigner) -> None:
    shown = drawn(Branch((2, 2)), 2, 4, 5)
    with pytest.raises(CreditError, match="needs decisions with a branched tree"):
        rule.assign(shown.values, replace(shown.decisions, tree=None))
    with pytest.raises(
        CreditError, match=r"needs values \[prompt, member, decision\+1\] = \(2, 4, 6\)"
    ):
        rule.assign(torch.rand(2, 5, 6), shown.decisions)
    missing = shown.values.clone()
    missing[..., [2, 5]] = float("nan")
    with pytest.raises(CreditError, match=r"finite value in column.* 5 of 0\.\.5.*Branch"):
        rule.assign(missing, shown.decisions)


def test_log_probabilities_are_named_when_they_are_missing() -> None:
    shown = drawn(Branch((2, 2)), 2, 4, 5)
    for rule in (
        BackedUp(),
        DepthRelative(backup="softmax"),
        GDPO(BackedUp()),
        Weighted(rule=BackedUp()),
    ):
        assert rule.reads_fields == ("log_probs",)
        for call in (
            lambda r=rule: r.assign(shown.values, shown.decisions),
            lambda r=rule: r.credit(replace(shown, log_probs=None)),
        ):
            with pytest.raises(CreditError, match="needs log-probabilities: "):
                call()
    assert credit(BackedUp("mean"), replace(shown, log_probs=None)).isfinite().all()
    assert BackedUp("mean").reads_fields == ()


@dataclass(frozen=True)
class RecordsOnly:
    """A rule with `credit` only."""

    probe: Probe = Completion()

    def credit(self, experience: Experience) -> object:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: SiblingRelative(probe=Probe()), "SiblingRelative.probe"),
        (lambda: DepthRelative(probe=Probe()), "DepthRelative.probe"),
        (lambda: BackedUp(probe=Probe()), "BackedUp.probe"),
        (lambda: DepthRelative(clamp=0.0), "DepthRelative.clamp"),
        (lambda: Pruned(Uniform()), "Pruned.rule.probe"),
        (lambda: Pruned("depth"), "Pruned.rule"),  # pyright: ignore[reportArgumentType]
        (lambda: Pruned(steps=(3,), stop=4), "Pruned.stop"),
        (lambda: Pruned(ratio=0.0), "Pruned.ratio"),
        (lambda: Pruned(every=0), "Pruned.every"),
        (lambda: Pruned(until=-1), "Pruned.until"),
        (lambda: Pruned(steps=(-1,)), "Pruned.steps"),
        (lambda: Weighted(rule=Pruned()), "Weighted.rule"),
        (lambda: Weighted(rule=RandomCredit()), "Weighted.rule"),
        (lambda: Weighted(rule=TurningPoint(), std="batch"), "Weighted.std"),
        (lambda: GDPO(Pruned()), "GDPO.rule"),
        (lambda: GDPO(RecordsOnly()), "GDPO.rule = RecordsOnly"),  # pyright: ignore[reportArgumentType]
        (lambda: Weighted(rule=RecordsOnly()), "Weighted.rule = RecordsOnly"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_options_are_named(build: object, field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        build()  # pyright: ignore[reportCallIssue]


def test_pruned_steps_must_be_on_the_schedule() -> None:
    with pytest.raises(CreditError, match=r"Pruned.steps = \(9,\) on a schedule of 4 steps"):
        trained(Pruned(steps=(9,)), drawn(Branch((2, 2)), 1, 4, 4))
