"""What fits on the device: sizes that double as long as memory and speed allow, the same after a
resumption, and errors with advice.
"""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flowrl_testing.tiny import TINY as TINY_MODEL
from flowrl_testing.tiny import tiny_sd3_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import TINY_RUN, rows_of

from flowrl.core.errors import ConfigError, TrainingError
from flowrl.core.types import Prompt
from flowrl.rewards import FunctionReward
from flowrl.training import memory
from flowrl.training.build import make_method, make_trainer
from flowrl.training.config import load_config, preset
from flowrl.training.memory import GAIN, Measured, find_batches, grow, room
from flowrl.training.run import Run
from flowrl.training.trainer import Trainer

FIXED = TINY_RUN.replace(iterations=4, checkpoint_every=1, kl_weight=0.1)
AUTO = FIXED.replace(micro_batch="auto", max_batch="auto")
ANY = 10**18


def simulate(patch, room, base=1.0, each=2.0, half=1e12, limit=ANY):
    """A call on n latents takes base + each * n bytes and (half + n) seconds; from `limit` on
    memory runs out unforeseen. Returns the sizes of the calls.
    """
    calls = []

    def measured(trainer, batch, train):
        calls.append(batch)
        if batch >= limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Measured(base, base + each * batch, half + batch)

    patch.setattr(memory, "measured", measured)
    patch.setattr(memory, "room", lambda trainer: room)
    return calls


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(FIXED)


def best(trainer, limit=ANY):
    return grow(trainer, True, limit)[1]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**8), st.integers(1, 10**5))
def test_the_size_is_the_largest_power_of_two_that_fits(trainer, base, each, room, limit):
    """Larger is always faster. No call is made that is predicted not to fit."""
    with pytest.MonkeyPatch.context() as patch:
        calls = simulate(patch, room, base, each)
        fits = max(0, (room - base) // each)
        size = best(trainer, limit)
        assert size == min(limit, 2 ** (fits.bit_length() - 1)) if fits else size == 0
        assert max(calls) == max(size, 1) and len(calls) <= 1 + math.log2(max(size, 1)) + 1


@pytest.mark.parametrize("half", [0.0, 0.5, 4.0, 16.0, 1000.0])
def test_growth_ends_when_a_step_brings_less_than_the_gain(half, trainer, monkeypatch):
    simulate(monkeypatch, ANY, half=half)
    chosen = best(trainer)
    rates = {n: n / (half + n) for n in (chosen // 2, chosen, 2 * chosen) if n}
    assert rates[2 * chosen] <= GAIN * rates[chosen]
    assert chosen == 1 or rates[chosen] > GAIN * rates[chosen // 2]


def test_memory_that_runs_out_unforeseen_ends_growth_and_no_room_is_an_error(trainer, monkeypatch):
    simulate(monkeypatch, ANY, limit=11)
    assert best(trainer, 64) == 8
    simulate(monkeypatch, 2.0)
    parts = trainer.policy, trainer.method, trainer.reward, trainer.prompts.prompts
    with pytest.raises(ConfigError, match=r"micro_batch = 'auto' .* resolution"):
        find_batches(Trainer(*parts, AUTO))


def test_the_room_leaves_a_tenth_of_the_gpu_and_what_training_holds_later(trainer, monkeypatch):
    assert room.__wrapped__(trainer) == math.inf
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * 10**9)
    weights = sum(parameter.numel() for parameter in trainer.parameters)
    policy = SimpleNamespace(device=torch.device("cuda"), latent_shape=(10**6,))
    shown = SimpleNamespace(**{**vars(trainer), "policy": policy})
    nodes = 2 * 3 * (2 * 4 + 1)  # groups x members x (nodes and velocities)
    assert room.__wrapped__(shown) == pytest.approx(67e9 - 4e6 * nodes - 8 * weights)
    shown.config = trainer.config.replace(offload=True, optimizer="adamw-8bit")
    assert room.__wrapped__(shown) == pytest.approx(67e9 - 2 * weights)


def test_measuring_changes_nothing_and_running_out_of_memory_is_one_error(trainer, monkeypatch):
    fresh = make_trainer(FIXED)
    grow(trainer, True, 4)
    assert all(parameter.grad is None for parameter in trainer.parameters)
    assert trainer.iteration()["grad_norm"] == fresh.iteration()["grad_norm"]
    simulate(monkeypatch, 0.0, limit=2)
    words = r"GPU memory ran out: .*micro_batch .*gradient_checkpointing"
    with pytest.raises(TrainingError, match=words), memory.out_of_memory():
        memory.measured(trainer, 2, True)


RED = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)))


@pytest.mark.parametrize(
    ("room", "changes", "size", "on"),
    [
        (10**4, {}, 128, False),  # the speed ends the growth without checkpointing
        (40, {}, 16, True),  # 4 without, 0.33 rows per second; 16 with, 0.53
        (300, {}, 32, False),  # 32 without, 0.80 rows per second; 128 with, 0.75
        (40, {"gradient_checkpointing": False}, 4, False),
    ],
)
def test_gradient_checkpointing_is_on_where_it_pays_only(room, changes, size, on, monkeypatch):
    auto = {"micro_batch": "auto", "max_batch": "auto", "gradient_checkpointing": True}
    config = preset("tiny").apply(model="none", iterations=1, group_size=64, **{**auto, **changes})
    checkpointing = config.policy.gradient_checkpointing
    policy = tiny_sd3_policy(replace(TINY_MODEL, gradient_checkpointing=checkpointing))
    run = Trainer(policy, make_method(config), RED, [Prompt("a dog"), Prompt("a fox")], config)

    def measured(trainer, batch, train):
        saved = trainer.policy.transformer.is_gradient_checkpointing or not train
        seconds = (8 + batch) * (1.25 if saved else 1)
        return Measured(0, batch * (2 if saved else 8), seconds)

    monkeypatch.setattr(memory, "measured", measured)
    monkeypatch.setattr(memory, "room", lambda trainer: room)
    find_batches(run)
    config = run.config
    assert (config.optim.micro_batch, config.policy.gradient_checkpointing) == (size, on)
    assert run.policy.transformer.is_gradient_checkpointing == on
    assert run.collector.max_batch == config.rollout.max_batch != "auto"


def test_a_run_writes_what_it_found_and_goes_on_with_it(tmp_path, monkeypatch):
    simulate(monkeypatch, 1.0 + 3.5 * 2.0)
    pause = Run(AUTO, tmp_path / "run", stop=lambda: True)
    assert not pause.execute()
    sizes = {"micro_batch": 2, "max_batch": 2}
    written = load_config(tmp_path / "run" / "config.json")
    assert written == pause.config == FIXED.replace(**sizes)
    monkeypatch.setattr(memory, "measured", lambda *call: pytest.fail("measured again"))
    rest = Run(AUTO, tmp_path / "run")
    assert rest.execute(resume=True) and rest.config == written
    Run(written, tmp_path / "same").execute()
    assert json.dumps(rows_of(tmp_path / "run")) == json.dumps(rows_of(tmp_path / "same"))
