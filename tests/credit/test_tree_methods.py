"""Named tree methods: their shapes at default size, one run each, pruned decisions in training."""

import copy
import math

import pytest
import torch

from flowrl.credit import DepthRelative, Pruned
from flowrl.errors import ConfigError
from flowrl.losses import ClippedLoss
from flowrl.methods import Method, named_method, try_credit
from flowrl.probes import Branch, Comb
from flowrl.protocols import CreditAssigner
from flowrl.samplers import FlowSDE, Window
from flowrl.testing.credit import schedule_for
from flowrl.training.build import make_method, make_world, policy_options
from flowrl.training.config import RunConfig, preset
from flowrl.training.trainer import Trainer

SETTINGS = {"world": "mixture", "task": "direction", "group_size": 12, "num_steps": 10, "window": "2:5"}
TINY = preset("tiny").apply(**SETTINGS)


METHOD_SHAPES = {  # states at every node of a group of 12 with the built-in worlds' window, trajectories' decisions
    "branch-grpo": ([1, 1, 1, 3, 3, 6, 6, 12, 12, 12, 12], 3 + 3 + 6 + 6 + 12),
    "tree-grpo": ([1, 1, 1, 3, 6, 12, 12, 12, 12, 12, 12], 3 + 6 + 12 + 12 + 12),
}


@pytest.mark.parametrize("name", list(METHOD_SHAPES))
def test_tree_methods_fit_the_default_group(name: str) -> None:
    method, schedule = named_method(name, Window(FlowSDE(0.7), 2, 5)), schedule_for(10)
    probe = method.credit.probe
    assert isinstance(probe, Branch) and method.shared_noise
    tree = probe.tree(schedule.steps, range(2, 7), 12, True, torch.Generator())
    counts, decisions = METHOD_SHAPES[name]
    assert (tree.counts, int(tree.drawn.sum())) == (counts, decisions)


def test_comb_methods_fit_the_default_group() -> None:
    window = Window(FlowSDE(0.7), 2, 5)
    temp, granular = named_method("tempflow-grpo", window), named_method("granular-grpo", window)
    assert isinstance(temp.credit.probe, Comb) and isinstance(granular.credit.probe, Comb)
    seen = set()
    for seed in range(20):
        tree = temp.credit.probe.tree(10, range(2, 7), 12, temp.shared_noise, torch.Generator().manual_seed(seed))
        assert (int((tree.node == 0).sum()), int(tree.drawn.sum()), int(tree.decisions.sum())) == (2, 12, 12)
        seen |= set(tree.decisions.any(0).nonzero().flatten().tolist())
    assert seen == {2, 3, 4, 5, 6}
    tree = granular.credit.probe.tree(10, range(2, 7), 12, granular.shared_noise, torch.Generator().manual_seed(0))
    assert (int((tree.node == 0).sum()), int(tree.drawn.sum())) == (1, 4)
    assert tree.strides is not None and tree.strides.tolist() == 4 * [1, 2, 3]


@pytest.mark.parametrize("name", ["branch-grpo", "tempflow-grpo", "granular-grpo", "tree-grpo"])
def test_methods_are_tried_on_their_own_trees(name: str) -> None:
    method = named_method(name)
    try_credit(method.credit, schedule_for(10), 12)
    with pytest.raises(ConfigError, match="group_size = 7"):
        try_credit(method.credit, schedule_for(10), 7)


def trainer(config: RunConfig, method: Method) -> Trainer:
    chosen = make_world(config)
    reward, prompts = chosen.reward(config.environment.reward_form), chosen.prompts("direction", "train")
    return Trainer(chosen.policy(policy_options(config)), method, reward, prompts, config)


@pytest.mark.parametrize("name", ["branch-grpo", "tempflow-grpo", "granular-grpo", "tree-grpo"])
def test_tree_methods_run(name: str) -> None:
    run = trainer(TINY, make_method(preset("tiny").apply(**SETTINGS, method=name)))
    for _ in range(2):
        row = run.iteration()
        assert math.isfinite(row["loss"]) and row["abs_advantage"] > 0


def test_pruned_decisions_are_not_evaluated_and_the_count_is_kept() -> None:
    rule = Pruned(DepthRelative("tree", "sample", probe=Branch((3, 2))), steps=(2,), every=1, stop=1, width="extremes")

    def run(credit: CreditAssigner) -> Trainer:
        return trainer(TINY, Method("pruned", Window(FlowSDE(0.7), 0, 4), credit, ClippedLoss(), shared_noise=True))

    whole, pruned = run(rule.rule), run(copy.deepcopy(rule))
    everything, some = whole.iteration(), pruned.iteration()
    assert some["train_nfe"] < everything["train_nfe"]
    assert some["nfe"] == everything["nfe"]
    assert int(pruned.state().tensors["credit.iteration"]) == 1
