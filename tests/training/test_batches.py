"""Batch sizes that are found by trying: as large as memory allows and speed rewards, and the same
after a resumption.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from flowrl.training.batches import GAIN, HEADROOM, Measured, find_batches, grow
from hypothesis import given
from hypothesis import strategies as st

from flowrl.core.errors import ConfigError, TrainingError
from flowrl.core.types import Prompt
from flowrl.policies import PipelinePolicy
from flowrl.rewards import FunctionReward
from flowrl.testing.tiny import TINY as TINY_MODEL
from flowrl.testing.tiny import tiny_sd3_policy
from flowrl.training import batches, presets
from flowrl.training.build import make_method, make_trainer
from flowrl.training.config import RunConfig, load_config, preset
from flowrl.training.plan import plan, plan_text
from flowrl.training.run import Run
from flowrl.training.trainer import Trainer

FIXED = preset("tiny").apply(world="mixture", iterations=4, checkpoint_every=1, kl_weight=0.1)
AUTO = FIXED.replace(micro_batch="auto", max_batch="auto")
NONE, ONE, FLAT = 10**9, 3 * 10**9, 16.0
"""A simulated device: bytes in use without a call and in a call on 1, and the batch that has half
of the top speed.
"""


def simulate(patch, room, base=NONE, each=ONE - NONE, half=FLAT, limit=10**9, seen=None):
    """A call on n takes base + each * n bytes and (half + n) seconds; from `limit` on memory runs
    out unforeseen.
    """

    def measured(trainer, batch, train):
        if seen is not None:
            seen.append(batch)
        if batch >= limit:
            raise torch.OutOfMemoryError
        return Measured(base, base + each * batch, half + batch)

    patch.setattr(batches, "measured", measured)
    patch.setattr(batches, "room", lambda device: room)
    patch.setattr(batches, "later_bytes", lambda trainer: 0.0)


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(FIXED)


def best(trainer, limit=10**9):
    found = grow(trainer, True, limit)
    return found.best.batch if found.best else 0


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**8), st.integers(0, 10**8))
def test_a_size_fits_and_more_room_gives_no_smaller_one(trainer, base, each, room, more):
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch, room, base, each, half=1e12)  # larger is always faster
        small = best(trainer)
        fits = max(0, (room - base) // each)
        assert small <= fits < GAIN * small or small == fits == 0
        simulate(patch, room + more, base, each, half=1e12)
        assert best(trainer) >= small


@pytest.mark.parametrize("half", [0.0, 0.5, 4.0, 16.0, 1000.0])
def test_growth_ends_when_a_step_brings_less_than_the_gain(half, trainer, monkeypatch):
    simulate(monkeypatch, 10**18, half=half)
    found = best(trainer)
    rates = {n: n / (half + n) for n in (found // 2, found, 2 * found) if n}
    assert rates[2 * found] < GAIN * rates[found]
    assert found == 1 or rates[found] >= GAIN * rates[found // 2]
    assert best(trainer, limit=found) == found and best(trainer, limit=max(1, found - 1)) == max(
        1, found - 1
    )


def test_no_call_is_made_that_is_predicted_not_to_fit(trainer, monkeypatch):
    seen = []
    simulate(monkeypatch, NONE + 13.5 * (ONE - NONE), half=1e12, seen=seen)
    assert best(trainer) == 13 == max(seen) and seen == [1, 2, 4, 8, 13]


def test_memory_that_runs_out_unforeseen_ends_the_growth(trainer, monkeypatch):
    simulate(monkeypatch, 10**18, half=1e12, limit=11)
    found = grow(trainer, True, 64)
    assert found.best is not None and found.best.batch == 8 and found.full
    assert all(parameter.grad is None for parameter in trainer.parameters)


def test_a_tenth_of_the_gpu_stays_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * 10**9)
    assert HEADROOM == 0.1 and batches.room(torch.device("cuda")) == pytest.approx(67e9)
    assert batches.room(torch.device("cpu")) == math.inf


def test_what_training_holds_later_counts(trainer, monkeypatch):
    simulate(monkeypatch, 11 * 10**9, half=1e12, each=10**9)
    assert best(trainer) == 10
    monkeypatch.setattr(batches, "later_bytes", lambda trainer: 4e9)
    assert best(trainer) == 6


def test_not_even_one_is_one_clear_error(monkeypatch):
    simulate(monkeypatch, ONE - 1)
    with pytest.raises(
        TrainingError,
        match=r"micro_batch auto: not even a batch of 1 fits into 90% .* Use gradient",
    ):
        make_trainer(AUTO)
    with pytest.raises(TrainingError, match="max_batch auto: not even a batch of 1 fits"):
        make_trainer(FIXED.replace(max_batch="auto"))


# --- gradient checkpointing
# -----------------------------------------------------------------------------------------

RED = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)))


def model_trainer(**changes):
    """A trainer of the tiny SD3 with the defaults of models."""
    settings = {
        "micro_batch": "auto",
        "max_batch": "auto",
        "gradient_checkpointing": True,
        "group_size": 64,
        **changes,
    }
    config = preset("tiny").apply(model="none", iterations=1, **settings)
    policy = tiny_sd3_policy(
        replace(TINY_MODEL, gradient_checkpointing=config.policy.gradient_checkpointing)
    )
    return Trainer(policy, make_method(config), RED, [Prompt("a dog"), Prompt("a fox")], config)


@pytest.mark.parametrize(
    ("room", "changes", "found", "on"),
    [
        (10**4, {}, 128, False),  # the speed ends the growth without checkpointing
        (40, {}, 20, True),  # 5 without, 0.38 pairs per second; 20 with, 0.57
        (200, {}, 25, False),  # 25 without, 0.76 pairs per second; 64 with, 0.71
        (7, {}, 3, True),  # not even 1 without
        (200, {"gradient_checkpointing": False}, 25, False),
        (40, {"micro_batch": 5}, 5, True),  # as it is set
    ],
)
def test_gradient_checkpointing_is_on_where_it_pays_only(room, changes, found, on, monkeypatch):
    run = model_trainer(**changes)

    def measured(trainer, batch, train):
        saved = trainer.policy.transformer.is_gradient_checkpointing or not train
        return Measured(0, batch * (2 if saved else 8), (8 + batch) * (1.25 if saved else 1))

    monkeypatch.setattr(batches, "measured", measured)
    monkeypatch.setattr(batches, "room", lambda device: room)
    monkeypatch.setattr(batches, "later_bytes", lambda trainer: 0.0)
    find_batches(run)
    config = run.config
    assert (config.optim.micro_batch, config.policy.gradient_checkpointing) == (found, on)
    assert (
        isinstance(run.policy, PipelinePolicy)
        and run.policy.transformer.is_gradient_checkpointing == on
    )
    assert (
        isinstance(config.rollout.max_batch, int)
        and run.collector.max_batch == config.rollout.max_batch
    )


def test_models_on_cuda_find_their_sizes_by_default(monkeypatch):
    assert (
        preset("tiny").apply(model="none").batches
        == preset("tiny").apply(model="none", micro_batch="auto").batches
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert presets.accelerator_defaults() == {
        "device": "cuda",
        "dtype": "bfloat16",
        "micro_batch": "auto",
        "max_batch": "auto",
    }
    on_cpu = preset("tiny").apply(model="none", device="cpu")
    assert (on_cpu.optim.micro_batch, on_cpu.rollout.max_batch) == (8, 16)
    assert preset("tiny").apply().optim.micro_batch == 256


# --- runs
# --------------------------------------------------------------------------------------------------


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_what_it_found_and_goes_on_with_it(tmp_path, monkeypatch):
    simulate(monkeypatch, NONE + 3.5 * (ONE - NONE), half=1e12)
    pause = Run(AUTO, tmp_path / "run", stop=lambda: True)
    assert not pause.execute()
    found = {"micro_batch": 3, "max_batch": 3}
    assert {name: pause.config.flat()[name] for name in found} == found
    written = load_config(tmp_path / "run" / "config.json")
    assert written == pause.config == FIXED.replace(**found)
    assert "micro_batch: 3" in (tmp_path / "run" / "config.yaml").read_text()

    monkeypatch.setattr(
        batches, "measured", lambda *call: pytest.fail("a resumed run tries nothing again")
    )
    rest = Run(AUTO, tmp_path / "run")
    assert rest.execute(resume=True) and rest.config == written

    Run(FIXED.replace(**found), tmp_path / "same").execute()
    Run(FIXED, tmp_path / "large").execute()
    for other, exact in (("same", True), ("large", False)):
        for mine, its in zip(rows(tmp_path / "run"), rows(tmp_path / other), strict=True):
            for name in ("reward_mean", "loss", "kl", "grad_norm") if mine["iteration"] else ():
                assert mine[name] == (
                    its[name] if exact else pytest.approx(its[name], rel=1e-4, abs=1e-6)
                )


def test_trying_for_real_changes_no_number_and_leaves_no_gradient():
    run, fixed = make_trainer(AUTO), make_trainer(FIXED)
    sizes = run.config.batches
    assert 1 <= sizes.micro_batch <= 6 and 1 <= sizes.max_batch <= 6, (
        "a process has no more: 6 samples, 24 pairs in 4 mini-batches"
    )
    assert (
        run.config.replace(micro_batch=256, max_batch=512) == FIXED
        and run.collector.max_batch == sizes.max_batch
    )
    assert all(parameter.grad is None for parameter in run.parameters)
    for _ in range(2):
        first, second = run.iteration(), fixed.iteration()
        for name in ("reward_mean", "loss", "kl", "grad_norm"):
            assert first[name] == pytest.approx(second[name], rel=1e-5, abs=1e-7)


def test_the_plan_says_what_is_found_at_the_start():
    text = plan_text(plan(AUTO), AUTO)
    assert "micro_batch auto (measured at the start; counted as 256) =" in text
    assert "split by max_batch auto (measured at the start; counted as 512):" in text
    assert "measured at the start" not in plan_text(plan(FIXED), FIXED)


def test_another_word_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"micro_batch = 'all' is not allowed; allowed: a whole number, 1 or more .* or auto",
    ):
        RunConfig.of(micro_batch="all")
