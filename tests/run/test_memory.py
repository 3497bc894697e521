"""What fits on the device: sizes that double as long as memory and speed allow, the same after a
resumption, and errors with advice.
"""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import TINY_RUN, error_of, flowrl_, model_files, rows_of, words

from flowrl.core.errors import ConfigError, TrainingError
from flowrl.core.types import Prompt
from flowrl.rewards import FunctionReward
from flowrl.rollout.sampling import sample_images
from flowrl.run import sizes
from flowrl.run.build import build_trainer, make_method, make_trainer
from flowrl.run.config import SIZES, load_config, preset
from flowrl.run.job import Run
from flowrl.run.sizes import GAIN, Measured, find_sizes, grow, room
from flowrl.testing.tiny import TINY as TINY_MODEL
from flowrl.testing.tiny import tiny_sd3_policy

FIXED = TINY_RUN.replace(iterations=4, checkpoint_every=1, kl_weight=0.1)
ANY = 10**18


def simulate(patch, room, base=1.0, each=2.0, half=1e12, limit=ANY):
    """A call on n latents takes base + each * n bytes and (half + n) seconds; from `limit` on
    memory runs out unforeseen. Returns the sizes of the calls.
    """
    calls = []

    def measured(trainer, batch, work):
        calls.append(batch)
        if batch >= limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Measured(base, base + each * batch, half + batch)

    patch.setattr(sizes, "measured", measured)
    patch.setattr(sizes, "room", lambda *given: room)
    return calls


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(FIXED)


def best(trainer, limit=ANY):
    return grow(trainer, FIXED, "update", limit)[1]


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
    with pytest.raises(ConfigError, match=r"micro_batch = 'auto' .* resolution"):
        find_sizes(*tiny_trainer())


def test_the_room_leaves_a_tenth_of_the_gpu_and_what_training_holds_later(trainer, monkeypatch):
    assert room(trainer, FIXED) == math.inf
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * 10**9)
    weights = sum(parameter.numel() for parameter in trainer.parameters.values())
    policy = SimpleNamespace(device=torch.device("cuda"), latent_shape=(10**6,))
    shown = SimpleNamespace(**{**vars(trainer), "policy": policy})
    nodes = 2 * 3 * (2 * 4 + 1)  # groups x members x (nodes and velocities)
    assert room(shown, FIXED) == pytest.approx(67e9 - 4e6 * nodes - 8 * weights)
    small = FIXED.replace(offload=True, optimizer="adamw-8bit")
    assert room(shown, small) == pytest.approx(67e9 - 2 * weights)


def test_measuring_changes_nothing_and_running_out_of_memory_is_one_error(trainer, monkeypatch):
    fresh = make_trainer(FIXED)
    grow(trainer, FIXED, "update", 4)
    assert all(parameter.grad is None for parameter in trainer.parameters.values())
    assert trainer.iteration()["grad_norm"] == fresh.iteration()["grad_norm"]
    simulate(monkeypatch, 0.0, limit=2)
    words = r"GPU memory ran out: .*micro_batch .*gradient_checkpointing"
    with pytest.raises(TrainingError, match=words), sizes.out_of_memory():
        sizes.measured(trainer, 2, "update")


RED = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)))
AUTO = dict.fromkeys(SIZES, "auto")


def tiny_trainer(options=TINY_MODEL, **changes):
    config = preset("tiny").apply(model="none", iterations=1, **{**AUTO, **changes})
    policy = tiny_sd3_policy(options)
    prompts = [Prompt("a dog"), Prompt("a fox")]
    return build_trainer(config, policy, make_method(config), RED, prompts), config


@pytest.mark.parametrize(
    ("room", "changes", "size", "on"),
    [
        (10**4, {}, 128, False),  # the speed ends the growth without checkpointing
        (40, {}, 16, True),  # 4 without, 0.33 rows per second; 16 with, 0.53
        (300, {}, 32, False),  # 32 without, 0.80 rows per second; 128 with, 0.75
        (40, {"gradient_checkpointing": False}, 4, False),
        (300, {"micro_batch": 32, "max_batch": 7}, 32, False),
        (40, {"micro_batch": 16}, 16, True),
    ],
)
def test_gradient_checkpointing_is_on_where_it_pays_only(room, changes, size, on, monkeypatch):
    """Rollout and update have the rows that were found, unless both sizes are given."""
    run, config = tiny_trainer(group_size=64, **changes)

    def measured(trainer, batch, work):
        saved = trainer.policy.transformer.is_gradient_checkpointing
        if work == "decode":
            return Measured(0, 0, max(batch, 4))
        seconds = (8 + batch) * (1.25 if saved else 1)
        return Measured(0, batch * (2 if saved else 8), seconds)

    monkeypatch.setattr(sizes, "measured", measured)
    monkeypatch.setattr(sizes, "profile_path", lambda *given: Path("nowhere/at/all"))
    monkeypatch.setattr(sizes, "write_bytes", lambda *file: None)
    monkeypatch.setattr(sizes, "room", lambda *given: room)
    found = config.replace(**find_sizes(run, config)[0]).batches
    options = run.policy.options
    assert (found.micro_batch, found.gradient_checkpointing) == (size, on)
    assert run.policy.transformer.is_gradient_checkpointing == on
    assert (found.decode_batch, found.compile, options.compile) == (4, False, False)
    rows = 0 if "max_batch" in changes else size
    assert (options.rows, options.decode_batch, found.rows) == (rows, 4, rows)
    assert found.max_batch == changes.get("max_batch", size)


@pytest.mark.parametrize("seconds", [0.1, 0.8])
def test_compiling_pays_if_it_is_faster_and_exact(seconds, monkeypatch):
    (run, config), rates = tiny_trainer(), {False: 1.0, True: seconds}

    def measured(trainer, batch, work):
        return Measured(0, 0, rates[trainer.policy.options.compile])

    def compiled(policy, compile):
        policy.options = replace(policy.options, compile=compile)

    monkeypatch.setattr(sizes, "measured", measured)
    monkeypatch.setattr(type(run.policy), "resize", compiled)
    assert not sizes.compiling_pays(run, config, 4, 4 / 0.5, math.inf)  # on the CPU
    monkeypatch.setattr(run.policy, "device", SimpleNamespace(type="cuda"))
    assert not sizes.compiling_pays(run, config, 4, 4 / 0.5, 0.0)  # too late
    monkeypatch.setattr(sizes, "room", lambda *given: 1.0)
    exact = dict.fromkeys((True, False), torch.ones(1))
    monkeypatch.setattr(sizes, "velocities", lambda trainer, count, train=True: exact[train])
    assert sizes.compiling_pays(run, config, 4, 4 / 0.5, math.inf) == (seconds < 0.5)
    exact[False] = exact[False] + 1e-6
    assert not sizes.compiling_pays(run, config, 4, 4 / 0.5, math.inf)


def test_a_profile_belongs_to_its_settings_and_its_device(monkeypatch):
    run, config = tiny_trainer()
    paths, cards = {sizes.profile_path(run, config)}, ["NVIDIA H100", "NVIDIA L4"]
    config = config.replace(resolution=32)
    paths.add(sizes.profile_path(run, config))
    monkeypatch.setattr(run.policy, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: cards.pop())
    paths |= {sizes.profile_path(run, config) for _ in range(2)}
    assert len(paths) == 4 and not cards


def test_no_size_is_begun_after_the_deadline(trainer, monkeypatch):
    calls = simulate(monkeypatch, ANY)
    assert grow(trainer, FIXED, "update", ANY, 0.0)[1] == 1 and calls == [1]


@pytest.mark.satellite
def test_a_profile_is_kept_used_again_and_reproduced(tmp_path, monkeypatch, capsys):
    """In the user's cache, in the run, after a resumption and with --profile."""
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    simulate(monkeypatch, 1.0 + 3.5 * 2.0)
    files = model_files(tmp_path)
    auto = preset("tiny").apply(**files, iterations=2, tracker="none", **AUTO)
    pause = Run(auto, tmp_path / "run", stop=lambda: True)
    assert not pause.execute()
    written = load_config(tmp_path / "run" / "config.json", trust=True)
    assert written == pause.config and (written.batches.rows, written.batches.micro_batch) == (2, 2)
    monkeypatch.setattr(sizes, "measured", lambda *call: pytest.fail("measured again"))
    again = Run(auto, tmp_path / "same")
    assert again.execute() and again.config == written
    (kept,) = (tmp_path / "cache" / "profiles").iterdir()
    profile = kept.rename(tmp_path / "profile.yaml")
    rest = Run(auto, tmp_path / "run")
    assert rest.execute(resume=True) and rest.config == written
    assert json.dumps(rows_of(tmp_path / "run")) == json.dumps(rows_of(tmp_path / "same"))
    line = "train --preset tiny " + shlex.join(words(**files, **AUTO, tracker="none"))
    assert flowrl_(f"{line} --profile {profile} --out {tmp_path}/third") == 0
    config = load_config(tmp_path / "third" / "config.json", trust=True)
    assert config.batches == written.batches
    (tmp_path / "other.yaml").write_text("optim: {learning_rate: 1e-3}\n")
    assert "learning_rate" in error_of(f"{line} --profile {tmp_path}/other.yaml", capsys)
    kept.write_text("optim: {micro_batch: many}\n")  # a damaged profile is made anew
    simulate(monkeypatch, 1.0 + 7.5 * 2.0)
    said, full = [], OSError(28, "No space left on device")
    monkeypatch.setattr(sizes, "write_bytes", lambda *_: (_ for _ in ()).throw(full))
    anew = Run(auto, tmp_path / "anew", said.append, stop=lambda: True)
    assert not anew.execute() and anew.config.batches.rows == 4
    assert "not kept in" in str(said) and "(No space left on device)" in str(said)


@pytest.mark.parametrize(("gradient", "micro"), [("both", 3), ("prompt", 6)])
def test_rollout_update_and_evaluation_have_calls_of_one_shape(gradient, micro):
    """All calls have 6 rows, also those of the reference and the last of a batch; the numbers are
    those of calls that are not filled up.
    """
    guided = {"guidance_scale": 2.0, "guidance_gradient": gradient}
    options, settings = replace(TINY_MODEL, **guided), {**guided, "kl_weight": 0.1}
    sizes = {**AUTO, "gradient_checkpointing": False, "decode_batch": 2, "compile": False}
    fixed, given = tiny_trainer(
        options, **settings, **{**sizes, "micro_batch": micro, "max_batch": 3}
    )
    config = given.replace(max_batch="auto")
    assert config.batches == replace(given.batches, rows=6)
    one, _ = tiny_trainer(replace(options, rows=6), **settings, **{**sizes, "micro_batch": micro})
    shapes = []
    one.policy.transformer.register_forward_pre_hook(
        lambda network, given, named: shapes.append(len(named["hidden_states"])), with_kwargs=True
    )
    rows, expected = one.iteration(), fixed.iteration()
    list(sample_images(one.policy, PROMPTS, torch.randn(5, *one.policy.latent_shape), 2))
    assert set(shapes) == {6} and rows["ratio_noise"] == 0.0
    for name in ("reward_mean", "loss", "kl", "grad_norm"):
        assert rows[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


PROMPTS = [Prompt("a dog")] * 5
