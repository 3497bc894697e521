"""Named tree methods: their shapes at default size, one run each, pruned decisions in training."""

import math

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.methods import METHODS, Method, try_credit
from flowrl.probes import Branch, Comb
from flowrl.samplers import FixedWindow, FlowSDE
from flowrl.training.build import make_method, make_world, policy_options
from flowrl.training.config import RunConfig, preset
from flowrl.training.trainer import Trainer

SETTINGS = {
    "world": "mixture",
    "task": "direction",
    "group_size": 12,
    "num_steps": 10,
    "window": "2:7",
}
TINY = preset("tiny").apply(**SETTINGS)


# states at every node of a group of 12 with the built-in worlds' window, trajectories' decisions
METHOD_SHAPES = {
    "branch-grpo": ([1, 1, 1, 3, 3, 6, 6, 12, 12, 12, 12], 3 + 3 + 6 + 6 + 12),
    "tree-grpo": ([1, 1, 1, 3, 6, 12, 12, 12, 12, 12, 12], 3 + 6 + 12 + 12 + 12),
}


@pytest.mark.parametrize("name", list(METHOD_SHAPES))
def test_tree_methods_fit_the_default_group(name: str) -> None:
    method = METHODS[name](FlowSDE(0.7), window=FixedWindow(2, 7))
    probe = method.credit.probe
    assert isinstance(probe, Branch) and method.shared_noise
    tree = probe.tree(10, range(2, 7), 12, True, torch.Generator())
    counts, decisions = METHOD_SHAPES[name]
    assert (tree.counts, int(tree.drawn.sum())) == (counts, decisions)


def test_comb_methods_fit_the_default_group() -> None:
    window = FixedWindow(2, 7)
    temp, granular = (
        METHODS["tempflow-grpo"](window=window),
        METHODS["granular-grpo"](window=window),
    )
    assert isinstance(temp.credit.probe, Comb) and isinstance(granular.credit.probe, Comb)
    size = preset("default").apply(world="mixture", method="tempflow-grpo").rollout.group_size
    for seed in range(3):  # all decisions in every iteration: 6 draws of each, from one trunk
        tree = temp.credit.probe.tree(
            10, range(2, 7), size, temp.shared_noise, torch.Generator().manual_seed(seed)
        )
        assert (int((tree.node == 0).sum()), int(tree.drawn.sum()), int(tree.decisions.sum())) == (
            1,
            30,
            30,
        )
        assert tree.decisions.sum(0).tolist() == [0, 0, 6, 6, 6, 6, 6, 0, 0, 0]
    tree = granular.credit.probe.tree(
        10, range(2, 7), 12, granular.shared_noise, torch.Generator().manual_seed(0)
    )
    assert (int((tree.node == 0).sum()), int(tree.drawn.sum())) == (1, 4)
    assert tree.strides is not None and tree.strides.tolist() == 4 * [1, 2, 3]


@pytest.mark.parametrize("name", ["branch-grpo", "tempflow-grpo", "granular-grpo", "tree-grpo"])
def test_methods_are_tried_on_their_own_trees(name: str) -> None:
    method = METHODS[name]()
    stds = torch.tensor([0.3] * 9 + [0.0])
    # 6 draws at each of 9 decisions
    try_credit(method, stds, 54 if name == "tempflow-grpo" else 12)
    with pytest.raises(ConfigError, match="group_size = 7"):
        try_credit(method, stds, 7)


def trainer(config: RunConfig, method: Method) -> Trainer:
    chosen = make_world(config)
    reward, prompts = (
        chosen.reward(config.environment.reward_form),
        chosen.prompts("direction", "train"),
    )
    return Trainer(chosen.policy(policy_options(config)), method, reward, prompts, config)


@pytest.mark.parametrize("name", ["branch-grpo", "tempflow-grpo", "granular-grpo", "tree-grpo"])
def test_tree_methods_run(name: str) -> None:
    # tiny: 2 draws at each of 5 decisions
    size = {"group_size": 10} if name == "tempflow-grpo" else {}
    config = preset("tiny").apply(**SETTINGS | size, method=name)
    run = trainer(config, make_method(config))
    for _ in range(2):
        row = run.iteration()
        assert math.isfinite(row["loss"]) and row["abs_advantage"] > 0
