"""Overlapped rewards, loss scaling in float16, 8-bit optimizers and compiled networks change the
cost of training, not its numbers.
"""

import json
import shlex
import sys
import threading
import time
from functools import partialmethod
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.utils
from small_run import TINY_RUN, flowrl_, model_files, trained, trainer_of, weights, words
from torch import nn

from flowrl.core.errors import ConfigError, RewardError, TrainingError
from flowrl.core.types import Prompt
from flowrl.rewards import Clipped, FunctionReward, NoisyReward, WeightedSum
from flowrl.rollout.values import decoded
from flowrl.run.build import make_reward, overlaps_rewards
from flowrl.run.checkpoint import restore_trainer, trainer_state
from flowrl.run.config import OptimConfig, preset
from flowrl.run.optim import make_optimizer, prepare_policy
from flowrl.serving.client import RemoteReward
from flowrl.testing.tiny import tiny_sd3
from flowrl.weights import LossScaler

TINY = TINY_RUN.replace(groups=4, iterations=3, method="tp-grpo", chunk=1)
INFINITE = float("inf")
NOT_FINITE = FunctionReward(lambda images, prompts: torch.full((len(images),), float("nan")))


def test_overlapped_rewards_are_the_same_numbers_from_another_thread():
    threads, reward = set(), make_reward(TINY)

    def slow(images, prompts):
        threads.add(threading.current_thread().name)
        time.sleep(0.02)
        return reward.score(images, prompts)

    overlapped = TINY.replace(overlap_rewards=True)
    rows, result = trained(trainer_of(overlapped, reward=FunctionReward(slow)))
    assert threads == {"rewards_0"}
    expected_rows, expected = trained(trainer_of(TINY))
    assert rows == expected_rows and torch.equal(result, expected)
    with pytest.raises(RewardError, match="not finite"):
        trainer_of(overlapped, reward=NOT_FINITE).iteration()
    assert not [t for t in threading.enumerate() if t.name.startswith("rewards")]


@pytest.mark.parametrize("overlap", [False, True])
def test_decoding_and_scoring_are_phases_unless_another_phase_runs_beside_them(overlap):
    trainer, phases = trainer_of(TINY.replace(groups=2, overlap_rewards=overlap)), list[str]()
    trainer.on_phase = phases.append
    row = trainer.iteration()
    scoring = ["decode", "reward"] * 2  # finished images, then estimates
    chunks = ["rollout", "reward"] if overlap else ["rollout", *scoring] * 2
    assert [phase for phase, _ in groupby(phases)] == [*chunks, "update"]
    assert row["seconds"] == sum(row["phases"].values()) and {*row["phases"]} == {*phases}


BROKEN = {
    "decoder's images": lambda pipe: pipe.vae.decoder.conv_out.bias,
    "sampled latents": lambda pipe: pipe.transformer.proj_out.bias,
    "the text encoder's embedding": lambda pipe: (
        pipe.text_encoder.text_model.embeddings.token_embedding.weight
    ),
}


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("part", BROKEN)
def test_the_first_part_with_values_that_are_not_finite_is_named(
    command, part, tmp_path, capsys, monkeypatch
):
    """Not the reward, which sees images of 8 bits."""
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    pipe = tiny_sd3()
    torch.nn.init.constant_(BROKEN[part](pipe), INFINITE - INFINITE)
    files = model_files(tmp_path, pipe=pipe) | {"reward": "jpeg-compressibility"}
    files["out"] = tmp_path / "out"
    if command == "train":
        files |= dict(preset="tiny", groups=2)
    else:
        files |= dict(weights=tmp_path / "model" / "transformer", num_steps=2)
        del files["max_sequence_length"]
    assert flowrl_(f"{command} {shlex.join(words(**files))}") == 1
    error = capsys.readouterr().err
    assert part in error and "not finite" in error


@pytest.mark.parametrize(
    ("embedding", "latent", "image", "named"),
    [
        (torch.nan, torch.nan, torch.nan, "embeddings of the prompts"),
        (0.0, torch.inf, 1.0, "sampled latents"),
        (0.0, 1.0, torch.nan, "decoder's images"),
    ],
)
def test_values_that_are_not_finite_are_named_with_their_prompt(embedding, latent, image, named):
    def second(value, size):
        return torch.stack([torch.zeros(size), torch.full((size,), value)])

    condition = SimpleNamespace(tensors={"embedding": second(embedding, 2)})
    images = second(image, 12).view(2, 3, 2, 2)
    policy = SimpleNamespace(encode=lambda prompts: condition, decode=lambda latents: images)
    with pytest.raises(TrainingError, match=f"the {named} .* in 1 of 2 samples, first .* 'b'; "):
        decoded(policy, second(latent, 4), [Prompt("a"), Prompt("b")])


@pytest.mark.parametrize(
    ("overlap", "chunk", "device", "local", "remote"),
    [
        ("auto", 1, "cpu", False, True),
        ("auto", "auto", "cpu", False, True),
        ("auto", "auto", "cuda", True, True),
        ("auto", 0, "cuda", False, False),
        (True, 1, "cpu", True, True),
        ("false", 1, "cuda", False, False),
    ],
)
def test_rewards_overlap_by_default_unless_on_the_policys_cores(
    overlap, chunk, device, local, remote
):
    served, reward = RemoteReward("http://localhost:1"), make_reward(TINY)
    config = TINY.replace(overlap_rewards=overlap, chunk=chunk, device=device)
    assert overlaps_rewards(config, reward) is local
    total = WeightedSum({"local": reward, "served": served})
    for wrapper in (NoisyReward(served), Clipped(served, high=1.0), total):
        assert overlaps_rewards(config, wrapper) is remote, wrapper


class Scaled:
    """A loss scaler with an optimizer of two weights."""

    def __init__(self, init_scale):
        self.scaler = LossScaler(init_scale, torch.device("cpu"))
        self.weights = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weights], lr=0.25)

    def step(self, gradient):
        """The gradient's norm before clipping, and whether the step was taken."""
        self.optimizer.zero_grad()
        self.scaler.scale((self.weights * gradient).sum()).backward()
        return self.scaler.clip(self.optimizer, 100.0), self.scaler.take(self.optimizer)


def test_the_loss_scale_skips_halves_and_stops_at_one():
    run = Scaled(8.0)
    assert run.step(3) == (pytest.approx(18**0.5), True)
    assert run.weights.tolist() == [0.25, 0.25]
    for skipped, scale in enumerate((4.0, 2.0, 1.0), 1):
        assert not run.step(INFINITE)[1]
        assert (run.scaler.get_scale(), run.scaler.skipped) == (scale, skipped)
    with pytest.raises(TrainingError, match="loss scale"):
        run.step(float("nan"))
    assert run.weights.tolist() == [0.25, 0.25]


def test_the_loss_scale_is_restored_grows_and_can_be_off():
    run, again, off = map(Scaled, (8.0, 1.0, 0.0))
    run.step(INFINITE)
    state = json.loads(json.dumps(run.scaler.state_dict()))
    again.scaler.load_state_dict({**state, "growth_interval": 2})
    assert (again.scaler.get_scale(), again.scaler.skipped) == (4.0, 1)
    assert again.step(0.0)[1] and again.step(0.0)[1] and again.scaler.get_scale() == 8.0
    off.scaler.load_state_dict(state)
    assert off.scaler.get_scale() == 1.0 and off.scaler.state_dict() == {}
    assert off.step(1.0)[1] and off.weights.tolist() == [0.75, 0.75]


HALF = preset("tiny").apply(
    dtype="float16", iterations=2, groups=2, minibatches=1, learning_rate=1e-3
)


def test_float16_keeps_small_gradients_and_skips_a_step_that_overflows():
    """The loss is a mean over many pairs of small advantages: unscaled, its gradient is below
    float16's smallest number.
    """
    (exact,), expected = trained(trainer_of(HALF.replace(dtype="float32")), 1)
    trainer = trainer_of(HALF)
    before, state = weights(trainer), trainer_state(trainer)
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0**60})
    row = trainer.iteration()
    assert row["skipped_steps"] == 1 and "grad_norm" not in row
    assert torch.equal(weights(trainer), before) and trainer.scaler.get_scale() == 2.0**59
    restore_trainer(trainer, state)
    (row,), result = trained(trainer, 1)
    assert row["skipped_steps"] == 0 and row["loss_scale"] == 65536
    assert row["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    assert result.dtype == torch.float32 and "loss_scale" not in exact
    assert torch.allclose(expected, result, atol=5e-3)


def test_eight_bit_adam_is_made_by_its_package(monkeypatch):
    settings = OptimConfig(optimizer="adamw-8bit", learning_rate=1e-3, weight_decay=0.1)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="needs the package bitsandbytes"):
        make_optimizer(settings, [])
    fake = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=lambda parameters, **named: named))
    monkeypatch.setitem(sys.modules, "bitsandbytes", fake)
    expected = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    assert make_optimizer(settings, []) == expected


@pytest.mark.satellite
def test_a_compiled_network_gives_the_same_numbers(monkeypatch):
    """To float rounding, with the backend that runs the traced graphs in PyTorch."""
    graphs = torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    critic = "calibrated-gain(probe='critic(reads=hidden, base=zero)')"
    config = preset("tiny").apply(iterations=2, learning_rate=1e-4, credit=critic)
    (_, row), expected = trained(trainer_of(config))
    before = graphs["unique_graphs"]
    (_, compiled), result = trained(trainer_of(config.replace(compile=True)))
    assert graphs["unique_graphs"] >= before + 2  # without gradients, and with them
    for name in ("reward_mean", "value_r2", "grad_norm"):
        assert compiled[name] == pytest.approx(row[name], abs=1e-3), name
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_only_a_policy_that_has_a_network_is_compiled():
    trainer = trainer_of(TINY)
    closed = SimpleNamespace(trainable=trainer.policy.trainable, device=trainer.policy.device)
    with pytest.raises(ConfigError, match="velocity_network"):
        prepare_policy(closed, trainer.processes, compiled=True)
