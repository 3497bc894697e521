"""Credit rules on trees: worked examples, the published code of BranchGRPO, invariants on random trees, special cases."""

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
    example,
    generalised_gains,
)
from flowrl.errors import ConfigError, CreditError
from flowrl.flow import uniform_schedule
from flowrl.methods import named_method
from flowrl.probes import Branch, Comb, Probe
from flowrl.protocols import CreditAssigner, SelectiveCredit, Stateful
from flowrl.testing.credit import schedule_for
from flowrl.tree import Tree, tree_of
from flowrl.types import Schedule

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


@dataclass(frozen=True)
class Worked:
    """A worked example: its tree, with log-probabilities if it has some, and the leaves' rewards [prompt, member]."""

    tree: Tree
    rewards: Tensor

    @property
    def table(self) -> Tensor:
        return self.tree.node_table(self.tree.values(self.rewards))

    @property
    def schedule(self) -> Schedule:
        return replace(uniform_schedule(self.tree.steps), tree=self.tree)


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
    return Worked(replace(tree, log_probs=log_probs), torch.tensor([list(entry["leaf_reward"].values())]))


def of_units(tree: Tree, advantages: Tensor) -> Tensor:
    """[unit] of a one-prompt table in which every member that passes a unit has the same advantage there."""
    means = tree.edge_means(advantages)
    torch.testing.assert_close(tree.step_table(means), advantages, rtol=0, atol=1e-6)
    return means[0]


@pytest.mark.parametrize("name", ["E1", "E2"])
def test_values_of_the_worked_examples(name: str) -> None:
    example, entry = worked(name), WORKED[name]
    for kind, key in (("leaf", "V"), ("child", "child_mean")):
        if key in entry:
            expected = torch.tensor([entry[key][str(unit)] for unit in range(example.tree.units)])
            found = replace(example.tree, mean=kind).values(example.rewards)[0]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "rule"), [(e, r) for e in ("E1", "E2") for r in WORKED[e]["advantages"]])
def test_advantages_of_the_worked_examples(name: str, rule: str) -> None:
    shown, expected = worked(name), WORKED[name]["advantages"][rule]
    advantages = generalised_gains(shown.table) if rule == "gain" else RULES[rule].assign(shown.table, shown.schedule)
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
        tree, entry = probe.tree(steps, range(steps), members, shared, torch.Generator()), WORKED["cost"][name]
        assert tree.counts == entry["alive"], name
        assert (sum(tree.counts[:-1]), tree.units, tree.members) == (entry["nfe"], entry["nodes"], entry["leaves"]), name
        split = torch.bincount(tree.parent[tree.drawn], minlength=tree.units) > 1
        assert (int(split.sum()), int(split[tree.parent[tree.drawn]].sum())) == (entry["branch_parents"], entry["branch_edges"])
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
    """A pair of trees of the published code as one tree of two prompts; `units` [prompt, unit] are the nodes in its files."""

    name: str
    tree: Tree
    units: Tensor

    def read(self, what: str) -> Tensor:
        """A number per unit [prompt, unit]."""
        return FILES[f"{self.name}/{what}"][self.units]

    @property
    def table(self) -> Tensor:
        return self.tree.node_table(self.tree.values(FILES[f"{self.name}/rewards"].view(2, -1)))

    @property
    def schedule(self) -> Schedule:
        return replace(uniform_schedule(self.tree.steps), tree=self.tree)


FILES = load_file(GOLDEN / "branch.safetensors")
SPLITS = {
    "published": (20, (0, 3, 6, 9)), "small": (4, (0, 2)), "late": (8, (1, 4, 5)), "rounds": (10, (0, 3, 6)),
    "mixed": (12, (0, 3, 6, 9)), "equal_rewards": (4, (0, 2)),
}  # fmt: skip


@cache
def published(name: str) -> Published:
    steps, splits = SPLITS[name]
    depth, parent, leaf = (FILES[f"{name}/{what}"].tolist() for what in ("step", "parent", "leaf"))
    decisions = sorted({d - 1 for d, sde in zip(depth, FILES[f"{name}/is_sde_edge"].tolist(), strict=True) if sde})
    members = 2 ** len(splits)
    tree = Branch(dict.fromkeys(splits, 2)).tree(steps, decisions, members, False, torch.Generator())
    units = torch.zeros(2, tree.units, dtype=torch.long)
    for place, node in enumerate(leaf):
        for unit in reversed(tree.paths[place % members].tolist()):
            units[place // members, unit] = node
            node = parent[node]
        assert node == -1
    assert sorted(units.flatten().tolist()) == list(range(len(depth))), "every node is one unit"
    assert torch.equal(FILES[f"{name}/step"][units], tree.node.expand(2, -1).short())
    log_probs = FILES[f"{name}/log_prob"][units] * tree.drawn
    return Published(name, replace(tree, log_probs=log_probs), units)


RELEASED = DepthRelative("tree", "sample", clamp=None)


@pytest.mark.parametrize("name", list(SPLITS))
def test_values_and_advantages_of_the_published_code(name: str) -> None:
    case = published(name)
    torch.testing.assert_close(case.tree.values(case.table[..., -1]), case.read("default/value"), rtol=0, atol=2e-7)
    found = RELEASED.assign(case.table, case.schedule)
    torch.testing.assert_close(found, case.tree.step_table(case.read("default/advantage")), rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["published", "small", "late", "mixed"])
def test_probability_weighted_values_of_the_published_code(name: str) -> None:
    case = published(name)
    found = replace(RELEASED, backup="softmax").assign(case.table, case.schedule)
    torch.testing.assert_close(found, case.tree.step_table(case.read("prob_weighted/advantage")), rtol=0, atol=2e-5)
    assert not torch.allclose(found, RELEASED.assign(case.table, case.schedule), atol=1e-2)


def test_branch_grpo_has_the_published_advantages() -> None:
    rule, case = named_method("branch-grpo").credit, published("published")
    found = rule.assign(case.table, case.schedule)
    expected = case.tree.step_table(case.read("default/advantage")).clamp(-5, 5)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


LATE = dict(steps=(14, 15, 16, 17))
SLIDE = dict(**LATE, every=30, stop=8)
PRUNING = {
    ("published", "default"): ({}, 0),
    ("published", "depth"): (LATE, 0),
    ("published", "depth_slide_step0"): (SLIDE, 0),
    ("published", "depth_slide_step100"): (SLIDE, 100),
    ("published", "depth_slide_step299"): (SLIDE, 299),
    ("published", "depth_slide_no_stop_step299"): (SLIDE, 299),  # the code's own stop is the last split, 9
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
    found = rule.trained(rule.assign(case.table, case.schedule), case.schedule)
    expected = case.tree.step_table(case.read(f"{variant}/trained").float()).bool()
    assert torch.equal(found, expected)


def test_every_published_variant_is_tested() -> None:
    variants = {tuple(name.split("/")[:2]) for name in FILES if name.endswith("/trained")}
    without_pruning = {(n, v) for n, v in variants if v in ("default", "prob_weighted")}
    assert variants - without_pruning <= set(PRUNING)
    for name, variant in without_pruning:
        expected = published(name).tree.step_table(published(name).read(f"{variant}/trained").float())
        assert torch.equal(expected.bool(), published(name).tree.decisions.expand(expected.shape))


# Pruning as it should be


def test_width_pruning_keeps_whole_branches() -> None:
    shown = example(torch.rand(2, 8, 7, generator=torch.Generator().manual_seed(0)), schedule_for(6), Branch((2, 1, 4)))
    rule = Pruned(SiblingRelative(probe=Branch((2, 1, 4))), width="best", ratio=0.5)
    advantages = rule.assign(shown.rewards, shown.schedule)
    trained = rule.trained(advantages, shown.schedule)
    assert trained[..., :3].all(), "the split itself is trained"
    assert torch.equal(trained[..., 3], trained[..., 4]) and not trained[..., 5].any(), (
        "whole branches; the last step is an ODE step"
    )
    for prompt in range(2):
        for half in (slice(0, 4), slice(4, 8)):
            best = shown.rewards[prompt, half, -1] >= shown.rewards[prompt, half, -1].sort(descending=True).values[1]
            assert torch.equal(trained[prompt, half, 3], best)
    extremes = Pruned(SiblingRelative(), width="extremes", ratio=0.5).trained(advantages, shown.schedule)
    worth = advantages[..., 2]
    for prompt in range(2):
        kept = worth[prompt][extremes[prompt, :, 3]].sort().values
        torch.testing.assert_close(kept, worth[prompt].sort().values[[0, 1, 6, 7]])


def test_width_pruning_ignores_trees_without_branches() -> None:
    shown = example(torch.rand(1, 4, 5), schedule_for(4), Branch({}))
    assert Pruned(width="best").trained(torch.zeros(1, 4, 4), shown.schedule)[..., :3].all()


def test_pruned_keeps_count_and_the_memory_of_its_rule() -> None:
    rule = Pruned(RandomCredit(probe=Branch((2,))), steps=(2,), every=1)
    assert isinstance(rule, SelectiveCredit) and isinstance(rule, Stateful)
    shown = example(torch.rand(1, 4, 5), schedule_for(4), rule.probe)
    left = []
    for _ in range(4):
        advantages = rule.assign(shown.rewards, shown.schedule)
        left.append((~rule.trained(advantages, shown.schedule)[0, 0, :3]).nonzero().flatten().tolist())
    assert left == [[2], [1], [0], [0]]
    restored = Pruned(RandomCredit(probe=Branch((2,))), steps=(2,), every=1)
    restored.load_state_dict(rule.state_dict())
    assert restored.iteration == 4
    assert torch.equal(restored.assign(shown.rewards, shown.schedule), rule.assign(shown.rewards, shown.schedule))


# Invariants on random trees


@dataclass(frozen=True)
class Grown:
    """A random tree with random rewards of two prompts."""

    tree: Tree
    rewards: Tensor

    @property
    def table(self) -> Tensor:
        return self.tree.node_table(self.tree.values(self.rewards))

    @property
    def schedule(self) -> Schedule:
        return replace(uniform_schedule(self.tree.steps), tree=self.tree)


@st.composite
def grown(draw: st.DrawFn) -> Grown:
    """Trees of up to 5 steps in which every state has 1 to 3 children, some of the steps being no decisions."""
    steps = draw(st.integers(1, 5))
    decisions = draw(st.lists(st.booleans(), min_size=steps, max_size=steps))
    paths: list[tuple[int, ...]] = [(root,) for root in range(draw(st.integers(1, 3)))]
    for step in range(steps):
        many = [draw(st.integers(1, 3)) if decisions[step] and len(paths) < 20 else 1 for _ in paths]
        paths = [(*path, child) for path, count in zip(paths, many, strict=True) for child in range(count)]
    visits = [[(node, path[: node + 1]) for node in range(steps + 1)] for path in paths]
    mean = draw(st.sampled_from(["leaf", "child"]))
    tree = replace(tree_of(visits, lambda node, _: decisions[node - 1]), mean=mean)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    log_probs = torch.randn(2, tree.units, generator=generator) * tree.drawn
    rewards = torch.rand(2, tree.members, generator=generator, dtype=torch.float64)
    return Grown(replace(tree, log_probs=log_probs), rewards)


EVERY = [
    SiblingRelative(), SiblingRelative(leave_one_out=True), SiblingRelative(normalise=False), DepthRelative(),
    DepthRelative("tree", "sample"), DepthRelative(backup="softmax"), BackedUp(), BackedUp("mean"),
    Uniform(probe=BRANCH), StepwiseGain(probe=BRANCH), GDPO(SiblingRelative()),
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(grown())
def test_gains_sum_to_the_reward_minus_the_value_of_the_root(case: Grown) -> None:
    gains = generalised_gains(case.table)
    torch.testing.assert_close(gains.sum(-1), case.rewards - case.table[..., 0])


@settings(max_examples=60, deadline=None)
@given(grown())
def test_leaf_weighted_gains_of_siblings_sum_to_0(case: Grown) -> None:
    tree = replace(case.tree, mean="leaf")
    gains = tree.edge_means(generalised_gains(tree.node_table(tree.values(case.rewards))))
    sums = torch.zeros_like(gains).index_add(1, tree.parent.clamp(min=0), gains * tree.leaves * (tree.parent >= 0))
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(grown(), st.sampled_from(EVERY), st.floats(-100, 100))
def test_a_constant_changes_nothing(case: Grown, rule: CreditAssigner, constant: float) -> None:
    moved = replace(case, rewards=case.rewards + constant)
    torch.testing.assert_close(
        rule.assign(moved.table, moved.schedule), rule.assign(case.table, case.schedule), rtol=0, atol=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(grown(), st.sampled_from(EVERY), st.sampled_from([0.3, -3.3, 12345.678, 1e6 / 3]))
def test_a_silent_group_gets_exact_zeros(case: Grown, rule: CreditAssigner, reward: float) -> None:
    rewards = case.rewards.clone()
    rewards[0] = reward
    for dtype in (torch.float32, torch.float64):
        silent = replace(case, rewards=rewards.to(dtype))
        assert not rule.assign(silent.table, silent.schedule)[0].any()


@settings(max_examples=60, deadline=None)
@given(grown())
def test_siblings_alone_get_no_sibling_credit_and_no_gain(case: Grown) -> None:
    tree = case.tree
    parents = tree.parent[tree.drawn]
    only = tree.drawn & (torch.bincount(parents.clamp(min=0), minlength=tree.units)[tree.parent.clamp(min=0)] == 1)
    for advantages in (SiblingRelative().assign(case.table, case.schedule), generalised_gains(case.table)):
        assert not tree.edge_means(advantages)[:, only].abs().gt(1e-12).any()


@settings(max_examples=40, deadline=None)
@given(grown())
def test_plain_means_up_the_tree_are_uniform_credit(case: Grown) -> None:
    tree = replace(case.tree, mean="child")
    scores = Uniform(clamp=None, probe=BRANCH).assign(case.table, case.schedule)[..., 0]
    expected = tree.step_table(tree.values(scores))
    torch.testing.assert_close(BackedUp("mean", clamp=None).assign(case.table, case.schedule), expected)


# Closed forms and special cases


def sibling_pair(rewards: list[float], **options: object) -> Tensor:
    shown = example(
        torch.tensor(rewards, dtype=torch.float64)[None, :, None].expand(1, -1, 3), schedule_for(2), Branch((len(rewards),))
    )
    return SiblingRelative(clamp=None, **options).assign(shown.rewards, shown.schedule)[0, :, 0]  # pyright: ignore[reportArgumentType]


def test_leave_one_out_is_the_difference_to_the_others() -> None:
    found = sibling_pair([1.0, 3.0, 8.0], normalise=False, leave_one_out=True)
    torch.testing.assert_close(found, torch.tensor([1 - 5.5, 3 - 4.5, 8 - 2.0], dtype=torch.float64))
    plain = sibling_pair([1.0, 3.0, 8.0], normalise=False)
    torch.testing.assert_close(found, 1.5 * plain)
    torch.testing.assert_close(sibling_pair([1.0, 3.0, 8.0], leave_one_out=True), 1.5 * sibling_pair([1.0, 3.0, 8.0]))


def test_two_siblings_keep_the_sign_only() -> None:
    torch.testing.assert_close(sibling_pair([0.0, 0.25]), torch.tensor([-1.0, 1.0]).double(), rtol=1e-3, atol=0)
    torch.testing.assert_close(sibling_pair([0.0, 25.0]), torch.tensor([-1.0, 1.0]).double(), rtol=1e-3, atol=0)


def test_strides_are_normalised_one_by_one_and_summed() -> None:
    probe = Comb(branches=3, count=1, high=1, strides=(1, 2, 3))
    rewards = torch.rand(2, 9, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    shown = example(rewards, schedule_for(6), probe)
    final = shown.rewards[..., -1].view(2, 3, 3)  # [prompt, branch, stride]
    scores = (final - final.mean(1, keepdim=True)) / (final.std(1, unbiased=False, keepdim=True) + 1e-4)
    found = SiblingRelative(clamp=None, probe=probe).assign(shown.rewards, shown.schedule)
    torch.testing.assert_close(found[..., 0], scores.sum(-1).repeat_interleave(3, dim=1))
    assert not found[..., 1:].any()
    tree = shown.schedule.tree
    assert tree is not None
    mixed = replace(shown.schedule, tree=replace(tree, strides=None))
    together = SiblingRelative(clamp=None, probe=Comb(3, 1, 0, 1)).assign(shown.rewards, mixed)
    assert not torch.allclose(together[..., 0], found[..., 0], atol=0.1)


def test_strides_survive_members_left_out() -> None:
    probe = Comb(branches=3, count=1, high=1, strides=(1, 2))
    shown = example(torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(0)), schedule_for(5), probe)
    tree = shown.schedule.tree
    assert tree is not None
    members = torch.tensor([True, True, True, True, True, False])  # the last branch has no member of stride 2
    left = replace(shown.schedule, tree=tree.keep(members))
    found = SiblingRelative(clamp=None, probe=probe).assign(shown.rewards[:, members], left)[0, :, 0]
    first, second = shown.rewards[0, [0, 2, 4], -1], shown.rewards[0, [1, 3], -1]
    expected = (first - first.mean()) / (first.std(unbiased=False) + 1e-4)
    expected[:2] += (second - second.mean()) / (second.std(unbiased=False) + 1e-4)
    torch.testing.assert_close(found, expected[[0, 0, 1, 1, 2]])


def test_a_comb_compares_draws_not_the_trunk() -> None:
    probe = Comb(branches=2)
    shown = example(torch.rand(1, 6, 5, generator=torch.Generator().manual_seed(0)), schedule_for(4), probe)
    final = shown.rewards[0, :, -1].view(3, 2)
    expected = (final - final.mean(1, keepdim=True)) / (final.std(1, unbiased=False, keepdim=True) + 1e-4)
    for rule in (SiblingRelative(probe=probe), DepthRelative(probe=probe)):
        found = rule.assign(shown.rewards, shown.schedule)[0]
        torch.testing.assert_close(found.sum(-1), expected.flatten())
        assert (found != 0).sum() == 6, "every member has one decision"


def test_shared_noise_is_a_tree_of_one_split() -> None:
    """Sibling- and depth-relative credit of the first step is then uniform credit."""
    shown = example(torch.rand(3, 6, 5, generator=torch.Generator().manual_seed(0)), schedule_for(4), Branch((6,)))
    uniform = Uniform(probe=Branch((6,))).assign(shown.rewards, shown.schedule)
    for rule in (SiblingRelative(), DepthRelative(), BackedUp()):
        found = rule.assign(shown.rewards, shown.schedule)
        torch.testing.assert_close(found[..., 0], uniform[..., 0])
    torch.testing.assert_close(DepthRelative().assign(shown.rewards, shown.schedule)[..., :3], uniform[..., :3])


def test_a_plain_group_as_a_tree_has_uniform_depth_credit() -> None:
    shown = example(torch.rand(3, 6, 5, generator=torch.Generator().manual_seed(0)), schedule_for(4), Branch({}))
    uniform = Uniform().assign(shown.rewards)
    torch.testing.assert_close(DepthRelative().assign(shown.rewards, shown.schedule)[..., :3], uniform[..., :3])
    assert not SiblingRelative().assign(shown.rewards, shown.schedule).any()
    assert not StepwiseGain().assign(shown.rewards).any()


def test_noise_weights_multiply_any_rule() -> None:
    probe = Branch((2, 2))
    shown = example(torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(0)), schedule_for(5), probe)
    stds = shown.schedule.stds
    assert stds is not None
    plain = SiblingRelative().assign(shown.rewards, shown.schedule)
    weighted = Weighted(rule=SiblingRelative())
    assert weighted.probe == probe
    torch.testing.assert_close(weighted.assign(shown.rewards, shown.schedule), plain * stds / stds[stds > 0].mean())
    by_hand = Weighted((1.0, 2.0, 0.0, 0.0, 0.0), rule=SiblingRelative()).assign(shown.rewards, shown.schedule)
    torch.testing.assert_close(by_hand, plain * torch.tensor([1.0, 2.0, 0.0, 0.0, 0.0]))


def test_several_rewards_on_a_tree_are_credited_one_by_one() -> None:
    first = example(torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(0)), schedule_for(5), Branch((2, 2)))
    second = example(100 * torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(1)), schedule_for(5), Branch((2, 2)))
    rule = GDPO(Weighted(rule=DepthRelative()), batch=False)
    found = rule.assign_parts({"a": first.rewards, "b": second.rewards}, first.schedule)
    expected = sum(Weighted(rule=DepthRelative()).assign(one.rewards, first.schedule) for one in (first, second))
    torch.testing.assert_close(found, expected)


TREE_RULES = [SiblingRelative(), DepthRelative(), BackedUp(), GDPO(BackedUp())]


@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: type(rule).__name__)
def test_errors_name_what_is_missing(rule: CreditAssigner) -> None:
    shown = example(torch.rand(2, 4, 6), schedule_for(5), Branch((2, 2)))
    tree = shown.schedule.tree
    assert tree is not None
    for schedule, words in (
        (None, "no schedule"),
        (replace(shown.schedule, tree=None), "without a tree"),
        (replace(shown.schedule, tree=replace(tree, branched=False)), "without branches"),
    ):
        with pytest.raises(CreditError, match=f"schedule with a branched tree.*{words}"):
            rule.assign(shown.rewards, schedule)
    with pytest.raises(CreditError, match="4 members and 5 steps"):
        rule.assign(torch.rand(2, 5, 6), shown.schedule)
    missing = shown.rewards.clone()
    missing[..., 2] = float("nan")
    with pytest.raises(CreditError, match=r"finite rewards at every node.*Branch"):
        rule.assign(missing, shown.schedule)


def test_log_probabilities_are_named_when_they_are_missing() -> None:
    shown = example(torch.rand(2, 4, 6), schedule_for(5), Branch((2, 2)))
    tree = shown.schedule.tree
    assert tree is not None
    bare = replace(shown.schedule, tree=replace(tree, log_probs=None))
    for rule in (BackedUp(), DepthRelative(backup="softmax")):
        with pytest.raises(CreditError, match="log_probs is missing"):
            rule.assign(shown.rewards, bare)
    assert BackedUp("mean").assign(shown.rewards, bare).isfinite().all()


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: SiblingRelative(probe=Probe()), "SiblingRelative.probe"),
        (lambda: DepthRelative(probe=Probe()), "DepthRelative.probe"),
        (lambda: BackedUp(probe=Probe()), "BackedUp.probe"),
        (lambda: DepthRelative(clamp=0.0), "DepthRelative.clamp"),
        (lambda: Pruned(Uniform()), "Pruned.rule.probe"),
        (lambda: Pruned(GDPO(SiblingRelative())), "Pruned.rule"),
        (lambda: Pruned(Pruned()), "Pruned.rule"),
        (lambda: Pruned(steps=(3,), stop=4), "Pruned.stop"),
        (lambda: Pruned(ratio=0.0), "Pruned.ratio"),
        (lambda: Pruned(every=0), "Pruned.every"),
        (lambda: Pruned(until=-1), "Pruned.until"),
        (lambda: Pruned(steps=(-1,)), "Pruned.steps"),
        (lambda: Weighted(rule=GDPO()), "Weighted.rule"),
        (lambda: Weighted(rule=Pruned()), "Weighted.rule"),
        (lambda: Weighted(rule=RandomCredit()), "Weighted.rule"),
        (lambda: Weighted(rule=TurningPoint(), std="batch"), "Weighted.std"),
        (lambda: GDPO(Pruned()), "GDPO.rule"),
    ],
)
def test_bad_options_are_named(build: object, field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        build()  # pyright: ignore[reportCallIssue]


def test_pruned_steps_must_be_on_the_schedule() -> None:
    shown = example(torch.rand(1, 4, 5), schedule_for(4), Branch((2, 2)))
    with pytest.raises(CreditError, match=r"Pruned.steps = \(9,\) on a schedule of 4 steps"):
        Pruned(steps=(9,)).trained(torch.zeros(1, 4, 4), shown.schedule)
