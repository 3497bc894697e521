"""Overlapped rewards, loss scaling in float16, 8-bit optimizers and compiled networks change the
cost of training, not its numbers.
"""

import json
import sys
import threading
import time
from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config
import torch._inductor.cpp_builder
from small_run import trained, trainer_of, weights
from torch import nn

from flowrl.core.errors import ConfigError, RewardError, TrainingError
from flowrl.policies import MixturePolicy
from flowrl.rewards import Clipped, FunctionReward, NoisyReward, WeightedSum
from flowrl.serving.client import RemoteReward
from flowrl.training.build import make_reward
from flowrl.training.config import OptimConfig, preset
from flowrl.training.optim import LossScaler, make_optimizer, prepare_policy
from flowrl.training.trainer import overlaps_rewards

TINY = preset("tiny").apply(world="mixture", groups=4, iterations=3, method="tp-grpo", chunk=1)
INFINITE = float("inf")


def test_overlapped_rewards_are_the_same_numbers_and_overlap_with_the_rollout():
    """Scores arrive late, in another thread, during the rollout of the next chunk."""
    threads, spans, calls = set(), [], []
    reward = make_reward(TINY)

    def slow(images, prompts):
        threads.add(threading.current_thread().name)
        began = time.perf_counter()
        time.sleep(0.02)
        spans.append((began, time.perf_counter()))
        return reward.score(images, prompts)

    trainer = trainer_of(TINY.replace(overlap_rewards=True), reward=FunctionReward(slow))
    velocity = trainer.policy.velocity

    def timed(*arguments):
        calls.append(time.perf_counter())
        return velocity(*arguments)

    trainer.policy.velocity = timed
    rows, result = trained(trainer)
    assert threads == {"rewards_0"}
    assert any(began < call < ended for began, ended in spans for call in calls)
    expected_rows, expected = trained(trainer_of(TINY))
    assert rows == expected_rows and torch.equal(result, expected)


@pytest.mark.parametrize(
    ("overlap", "chunk", "local", "remote"),
    [
        ("auto", 1, False, True),
        ("auto", 0, False, False),
        (True, 1, True, True),
        ("false", 1, False, False),
    ],
)
def test_rewards_overlap_by_default_if_a_server_computes_them(overlap, chunk, local, remote):
    served, reward = RemoteReward("http://localhost:1"), make_reward(TINY)
    config = TINY.replace(overlap_rewards=overlap, chunk=chunk)
    assert overlaps_rewards(config, reward) is local
    total = WeightedSum({"local": reward, "served": served})
    for wrapper in (served, NoisyReward(served), Clipped(served, high=1.0), total):
        assert overlaps_rewards(config, wrapper) is remote, wrapper


def test_an_error_of_an_overlapped_reward_is_raised():
    broken = FunctionReward(lambda images, prompts: torch.full((len(images),), float("nan")))
    with pytest.raises(RewardError, match="not finite"):
        trainer_of(TINY.replace(overlap_rewards=True), reward=broken).iteration()
    assert not [t for t in threading.enumerate() if t.name.startswith("rewards")]


def scaler_and_optimizer(init_scale):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    return LossScaler(init_scale, torch.device("cpu")), optimizer, parameter


def stepped(scaler, optimizer, gradient):
    """Whether a step along a gradient whose elements are all `gradient` was taken."""
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    scaler.scale((parameter * gradient).sum()).backward()
    scaler.clip(optimizer, 100.0)
    return scaler.step(optimizer)


def test_the_loss_scale_skips_halves_and_stops_at_one():
    scaler, optimizer, parameter = scaler_and_optimizer(8.0)
    scaler.scale(parameter.sum() * 3).backward()
    assert parameter.grad.tolist() == [24.0, 24.0]
    assert scaler.clip(optimizer, 100.0) == pytest.approx(18**0.5)
    assert scaler.step(optimizer) and parameter.tolist() == [0.25, 0.25]
    for skipped, scale in enumerate((4.0, 2.0, 1.0), 1):
        assert not stepped(scaler, optimizer, INFINITE)
        assert (scaler.value, scaler.skipped) == (scale, skipped)
    with pytest.raises(TrainingError, match="loss scale"):
        stepped(scaler, optimizer, float("nan"))
    assert parameter.tolist() == [0.25, 0.25]


def test_the_loss_scale_is_restored_grows_and_can_be_off():
    scaler, optimizer, parameter = scaler_and_optimizer(8.0)
    assert not stepped(scaler, optimizer, INFINITE)
    state = json.loads(json.dumps(scaler.state_dict()))
    again, *_ = scaler_and_optimizer(1.0)
    again.load_state_dict({**state, "growth_interval": 2})
    assert (again.value, again.skipped) == (4.0, 1)
    assert stepped(again, optimizer, 0.0) and again.value == 4.0
    assert stepped(again, optimizer, 0.0) and again.value == 8.0  # two good steps in a row
    off, *_ = scaler_and_optimizer(0.0)
    off.load_state_dict(state)
    loss = torch.tensor(1.0)
    assert off.scale(loss) is loss and off.value == 1.0 and off.state_dict() == {}
    assert stepped(off, optimizer, 1.0) and parameter.tolist() == [0.75, 0.75]


HALF = preset("tiny").apply(
    dtype="float16", iterations=2, groups=2, minibatches=1, learning_rate=1e-3
)


def test_float16_keeps_small_gradients_and_skips_a_step_that_overflows():
    """The loss is a mean over many pairs of small advantages: unscaled, its gradient is below
    float16's smallest number.
    """
    (exact,), expected = trained(trainer_of(HALF.replace(dtype="float32")), 1)
    trainer = trainer_of(HALF)
    before, state = weights(trainer), trainer.state()
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0**60})
    row = trainer.iteration()
    assert row["skipped_steps"] == 1 and "grad_norm" not in row
    assert torch.equal(weights(trainer), before) and trainer.scaler.value == 2.0**59
    trainer.restore(state)
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


class Layers(nn.Sequential):
    """A network with its own forward: torch.compile skips that of `nn.Sequential`, the built-in
    network of the 2-D world.
    """

    def forward(self, input):
        for layer in self:
            input = layer(input)
        return input


def layers_of(policy):
    if not isinstance(policy.net, Layers):
        policy.net = Layers(*policy.net)
    return policy.net


def has_compiler():
    try:
        return bool(torch._inductor.cpp_builder.get_cpp_compiler())
    except RuntimeError:
        return False


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_network_gives_the_same_numbers(monkeypatch, backend):
    """To float rounding. "inductor", the default, generates code for this CPU."""
    if backend == "inductor" and not has_compiler():
        pytest.skip("no C++ compiler")
    graphs = torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr("flowrl.training.optim._require_compiler", lambda: None)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    config = TINY.replace(learning_rate=1e-4)
    (row,), expected = trained(trainer_of(config), 1)
    before = graphs["unique_graphs"]
    monkeypatch.setattr(MixturePolicy, "velocity_network", property(layers_of))
    (compiled,), result = trained(trainer_of(config.replace(compile=True)), 1)
    assert graphs["unique_graphs"] >= before + 2  # without gradients, and with them
    assert compiled["reward_mean"] == pytest.approx(row["reward_mean"], abs=1e-5)
    assert compiled["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-3)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_only_a_policy_that_has_a_network_is_compiled():
    trainer = trainer_of(TINY)
    closed = SimpleNamespace(trainable=trainer.policy.trainable, device=trainer.policy.device)
    with pytest.raises(ConfigError, match="velocity_network"):
        prepare_policy(closed, trainer.distributed, compiled=True)
