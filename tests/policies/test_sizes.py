"""Iterations whose samples have several sizes in turn."""

import pytest
import torch
from family_cases import CASES, REDNESS, TEXTS, config_of, fill
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.methods import METHODS
from flowrl.policies import PipelinePolicy
from flowrl.rewards import FunctionReward
from flowrl.run.build import build_trainer, make_method
from flowrl.run.checkpoint import restore_trainer, trainer_state

PROMPTS = [Prompt(text) for text in TEXTS]
TRAINED = ("flux", "sd3", "qwen-image", "wan", "flux2-klein")


def made(case, seen, method="flow-grpo", **changes):
    """A trainer whose reward notes heights and widths."""

    def score(images, prompts):
        seen.append(tuple(images.shape[-2:]))
        return REDNESS.function(images, prompts)

    config = config_of(method=method)
    policy = fill(case.policy(**changes), std=0.4)
    return build_trainer(config, policy, make_method(config), FunctionReward(score), PROMPTS)


@pytest.mark.parametrize("name", TRAINED)
def test_iterations_have_the_sizes_in_turn(name):
    """With a ratio of 1 and the time shift of the size; evaluations have the size of the settings;
    a resume goes on with the next size.
    """
    case, seen, again = CASES[name], [], []
    trainer = made(case, seen, sizes=("16x32", "32x16", "16"))
    grids, shape = [], trainer.policy.latent_shape
    trainer.policy.transformer.register_forward_pre_hook(
        lambda *_: grids.append(trainer.schedule.times.tolist())
    )
    state, sizes = None, [(32, 16), (16, 32), (16, 16), (32, 16)]
    for size in sizes:
        seen.clear()
        row = trainer.iteration()
        assert {*seen} == {size} and 0 <= row["ratio_deviation"] < 1e-5 and row["grad_norm"] > 0
        assert trainer.policy.latent_shape == shape
        state = trainer_state(trainer) if state is None else state
    shifted = name in ("flux", "qwen-image", "flux2-klein")
    assert len({tuple(grid) for grid in grids}) == (2 if shifted else 1)
    other = made(case, again, sizes=("16x32", "32x16", "16"))
    restore_trainer(other, state)
    for _ in sizes[1:]:
        other.iteration()
    assert list(dict.fromkeys(again)) == sizes[1:]
    assert all(map(torch.equal, trainer.average, other.average))


def test_one_size_is_the_run_without_sizes():
    runs = [made(CASES["flux"], [], **changes) for changes in ({}, {"sizes": ("16x16",)})]
    for _ in range(2):
        rows = [trainer.iteration() for trainer in runs]
    assert rows[0]["reward_mean"] == rows[1]["reward_mean"]
    assert all(map(torch.equal, runs[0].average, runs[1].average))


@pytest.mark.satellite
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_several_sizes(method):
    trainer = made(CASES["flux"], [], method, sizes=("16x32", "16"))
    for _ in range(3):
        row = trainer.iteration()
        assert row["grad_norm"] >= 0 and row["reward_mean"] == row["reward_mean"]


def test_a_failed_iteration_leaves_the_size_of_evaluations():
    trainer = made(CASES["flux"], [], sizes=("32x16", "16x32"))
    schedule, shape = trainer.schedule, trainer.policy.latent_shape
    trainer.collector.reward = FunctionReward(lambda images, prompts: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        trainer.iteration()
    assert trainer.schedule is trainer.collector.schedule is schedule
    assert trainer.policy.latent_shape == shape


def test_sizes_are_checked_at_once():
    case = CASES["flux"]
    for sizes, message in (
        (
            ("big",),
            r"sizes = 'big' is not allowed; allowed: WIDTHxHEIGHT in pixels, or the side, as in 768x512 or 512",
        ),
        (("16x16", "18x16"), r"width = 18 .*multiple of 4.*settings resolution, width, sizes"),
    ):
        with pytest.raises(ConfigError, match=message):
            case.policy(sizes=sizes)
    policy = case.policy(sizes=("32x16", "24"))
    assert policy.sizes == ((16, 32), (24, 24))
    assert [shape[0] for shape in policy.latent_shapes] == [32, 36, 16]
    with policy.at_size(32, 16):
        assert_close(
            policy.schedule(4).times, case.policy(resolution=32, width=16).schedule(4).times
        )
    assert isinstance(policy, PipelinePolicy)
