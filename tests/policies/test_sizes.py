"""Iterations whose samples have several sizes in turn, and evaluations with a size and a guidance
of their own.
"""

import pytest
import torch
from family_cases import CASES, REDNESS, TEXTS, config_of, fill
from safetensors.torch import load_file
from small_run import error_of, model_files, rows_of, words
from torch.testing import assert_close

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.methods import METHODS
from flowrl.policies import PipelinePolicy
from flowrl.rewards import FunctionReward
from flowrl.rollout import initial_noise
from flowrl.run.build import build_trainer, make_method
from flowrl.run.checkpoint import restore_trainer, trainer_state
from flowrl.run.config import RunConfig, preset
from flowrl.run.plan import memory, plan, plan_text, times
from flowrl.run.reads import unread

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


EVALUATED = {"eval_resolution": 32, "eval_guidance": 2.0, "negative_prompt": "blurry"}


def test_evaluations_have_their_own_size_and_guidance(tmp_path, capsys, monkeypatch):
    """Golden: diffusers' pipeline at that size, with its time shift and guidance. Training keeps
    its own.
    """
    case, grids = CASES["flux"], set()
    schedule = PipelinePolicy.schedule

    def seen(policy, steps):
        grids.add((policy.latent_shape[0], steps))
        return schedule(policy, steps)

    monkeypatch.setattr(PipelinePolicy, "schedule", seen)
    files = model_files(tmp_path, TEXTS, case.make()) | EVALUATED | {"preset": "tiny", "width": 32}
    sizes = {"lora_rank": 2, "groups": 1, "iterations": 1, "eval_samples": 2, "eval_steps": 3}
    given = files | sizes | {"tracker": "none"}
    assert main(["train", *words(**given, out=tmp_path / "run")]) == 0
    assert grids == {(32, 4), (128, 3)}  # tokens of 16 x 32 and 32 x 64 pixels, steps
    before = load_file(tmp_path / "run" / "samples.safetensors")["before"]
    noise = initial_noise(case.policy(resolution=32, width=64), 2)
    plain = case.picture(case.make(), noise, 2.0, 3, height=32, width=64)
    assert_close(before, plain, atol=5e-6, rtol=0)
    own = case.picture(case.make(), noise, 1.0, 3, height=32, width=64)
    assert (before - own).abs().max() > 1e-3
    card = (tmp_path / "run" / "README.md").read_text()
    assert "height=32, width=64" in card and "true_cfg_scale=2.0" in card
    assert "| 64 x 32 pixels (training: 32 x 16) |" in card and "| 2 (training: 1) |" in card
    (row,) = rows_of(tmp_path / "run")[1:]
    run = f"--resume {tmp_path}/run --iterations 2 --trust"
    assert row["nfe"] == 3 * 4 and row["evaluation"]["reward"] == row["evaluation"]["reward"]
    assert "cannot change eval_resolution 32 -> 16 (the samples before" in error_of(
        f"train {run} --eval-resolution 16", capsys
    )
    again = f"train {run} --eval-guidance 3"
    assert "eval_guidance 2.0 -> 3.0: the numbers" in error_of(again, capsys)
    assert main([*again.split(), "--change"]) == 0
    assert rows_of(tmp_path / "run")[2]["untrained"]["reward"] != row["evaluation"]["reward"]
    other = words(**given | {"eval_resolution": 18}, out=tmp_path / "no")
    assert main(["train", *other]) == 2
    assert "height = 18 is not allowed" in capsys.readouterr().err


def small_and_large():
    """A run, and the same with larger samples with guidance in evaluations."""
    model = {"model": "stabilityai/stable-diffusion-3.5-medium", "reward": "ocr"}
    small = preset("default").apply(**model, prompts="text[0:20]", max_batch=4, micro_batch=4)
    return small, small.replace(**EVALUATED | {"eval_resolution": 1024})


def test_the_size_of_evaluations_in_settings_and_plans():
    small, large = small_and_large()
    assert large.as_evaluated().policy.size == (1024, 1024)
    assert large.as_evaluated() == large.as_evaluated().as_evaluated()
    assert large.replace(width=768).as_evaluated().policy.size == (1024, 1536)
    assert small.as_evaluated() == small
    assert unread(large, ["negative_prompt"]) == []
    assert unread(large.replace(eval_guidance=None), ["negative_prompt"]) == ["negative_prompt"]
    counts = plan(small), plan(large)
    assert [one.evaluation_passes for one in counts] == [1, 2]
    assert [one.passes_per_evaluation for one in counts] == [1, 1]
    assert [one.rows_per_call for one in counts] == [4, 8]
    assert "32 samples of 1024 x 1024 pixels every" in plan_text(counts[1], large)
    for name in ("eval_resolution", "eval_guidance"):
        with pytest.raises(ConfigError, match=f"{name} = .* left out without a `model`"):
            RunConfig.of(**{name: 2})


@pytest.mark.satellite
def test_larger_samples_of_evaluations_take_memory_and_time():
    counted, taken = [], []
    for run in small_and_large():
        counts = plan(run)
        need = memory(counts, run)
        assert need is not None
        counted.append(need)
        taken.append(times(counts, run, need, "H100"))
    small, large = counted
    assert large.decode > 1.5 * small.decode and large.rollout > 1.5 * small.rollout
    assert (large.update, large.trajectories) == (small.update, small.trajectories)
    assert taken[1].evaluation > 8 * taken[0].evaluation
    assert (taken[1].update, taken[1].sampling) == (taken[0].update, taken[0].sampling)
