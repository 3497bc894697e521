"""Costs in forward equivalents: the formula by hand, and its constants counted again."""

import json
from contextlib import nullcontext
from pathlib import Path

import flops
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flowrl.run.build import make_trainer
from flowrl.run.config import preset
from flowrl.run.costs import REWARD_FLOPS, WORLDS, Prices, measured_prices, prices_of

COUNTED = Path(__file__).parents[2] / "benchmarks/results/flops.json"
COUNTS = {"nfe": 50, "probe_nfe": 20, "train_nfe": 30, "gradient_nfe": 10}
COUNTS |= {"decodes": 6, "reward_calls": 4}


GUIDED = {"guidance_scale": 4.5, "guidance_gradient": "prompt"}


def run(world="model", **policy):
    return {"environment": {"world": world}, "policy": policy}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (run("mixture"), (30, 20, 30 + 2 * 10, 0, 0)),
        (run("mixture", gradient_checkpointing=True), (30, 20, 30 + 3 * 10, 0, 0)),
        (run(guidance_scale=4.5), (60, 40, 60 + 2 * 20, 0, 0)),
        # the gradient flows through the pass with the prompt alone
        (run(**GUIDED), (60, 40, 60 + 2 * 10, 0, 0)),
        # half of an evaluation is one pass
        (run(**GUIDED, train_guidance_scale=1.0), (60, 40, 60 + 2 * 20, 0, 0)),
        (run("shapes"), (30, 20, 50, 6 * 3_178_496 / 8_396_800, 4 * 1_333_248 / 8_396_800)),
    ],
)
def test_the_parts_by_hand(config, parts):
    prices = prices_of(config).parts(COUNTS)
    assert tuple(vars(prices).values()) == pytest.approx(parts)
    assert prices.total == pytest.approx(sum(parts))
    # older records have neither probes, gradients nor decodes apart
    older = {name: COUNTS[name] for name in ("nfe", "train_nfe", "reward_calls")}
    assert Prices("", decode=1.0).parts(older).total == 50 + 3 * 30 + 4


def test_prices_of_other_worlds_are_measured():
    rows = [{"iteration": 0}] + [
        {"iteration": i, "nfe": 10, "reward_calls": 5, "phases": {"rollout": 2.0, **scoring}}
        for i, scoring in ((1, {"reward": 0.5}), (2, {"decode": 0.2, "reward": 0.3}))
    ]
    prices = measured_prices(rows, passes=2)
    assert prices.reward == pytest.approx((0.5 / 5) / (2.0 / 20))
    assert prices_of(run(), prices).reward == prices.reward
    assert prices_of(run("mixture"), prices).reward == 0 and measured_prices(rows[:1]) is None


@pytest.mark.parametrize("world", WORLDS)
def test_prices_of_the_built_in_worlds_are_their_flops(world):
    """Counted again, and as `benchmarks/flops.py` wrote them. A backward pass takes two forward
    passes, less those for the input of the first layer and for frozen weights.
    """
    trainer = make_trainer(preset("tiny").apply(world=world))
    policy, counted = trainer.policy, json.loads(COUNTED.read_text())[world]
    latent, condition = torch.zeros(1, *policy.latent_shape), policy.encode(trainer.prompts.take(1))
    time = torch.full((1,), 500.0)
    parts = {
        "forward": lambda: policy.velocity(latent, time, condition),
        "gradient": lambda: policy.velocity(latent, time, condition).sum().backward(),
        "decode": lambda: policy.decode(latent),
    }
    for part, work in parts.items():
        context = policy.frozen() if part == "forward" else nullcontext()
        with context, FlopCounterMode(display=False) as counter:
            work()
        assert counter.get_total_flops() == counted[part], part
    assert WORLDS[world].decode == counted["decode"] / counted["forward"]
    assert WORLDS[world].reward == counted["reward"] / counted["forward"]


def test_costs_of_rewards_are_counted():
    counts = json.loads(COUNTED.read_text())
    assert {name: counts[name]["reward"] for name in REWARD_FLOPS} == REWARD_FLOPS
    assert counts["geneval"]["detector"] == 105_582_170_112  # stated beside the constants


@pytest.mark.satellite
def test_costs_of_rewards_counted_again():
    counts = json.loads(COUNTED.read_text())
    for name, row in flops.rewards().items():
        assert counts[name] == row, name
