"""Narrow numbers, little memory and odd batch sizes change what they cost, and nothing else."""

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
from torch import nn

from flowrl.core.errors import ConfigError, RewardError, TrainingError
from flowrl.policies import MixturePolicy
from flowrl.rewards import Clipped, FunctionReward, NoisyReward, WeightedSum
from flowrl.serving.client import RemoteReward
from flowrl.training.build import make_method, make_reward, make_world, policy_options
from flowrl.training.config import OptimConfig, preset
from flowrl.training.optim import LossScaler, make_optimizer
from flowrl.training.trainer import Trainer, overlaps_rewards

TINY = preset("tiny").apply(
    world="mixture", task="direction", groups=4, iterations=3, method="tp-grpo"
)


def trainer(config=TINY, reward=None):
    world = make_world(config)
    policy, prompts = (
        world.policy(policy_options(config)),
        world.prompts(config.environment.task, "train"),
    )
    return Trainer(policy, make_method(config), reward or make_reward(config), prompts, config)


def trained(config, reward=None, iterations=2):
    run = trainer(config, reward)
    rows = [run.iteration() for _ in range(iterations)]
    return run, rows


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.parameters])


def test_overlapped_rewards_are_the_same_numbers_and_really_overlap():
    """Scores arrive late, in another thread, while the next chunk is rolled out; every number is
    that of one after the other.
    """
    config = TINY.replace(chunk=1)
    own = make_reward(config)
    threads, spans = set(), []

    def slow(images, prompts):
        threads.add(threading.current_thread().name)
        began = time.perf_counter()
        time.sleep(0.02)
        spans.append((began, time.perf_counter()))
        return own.score(images, prompts)

    one, rows = trained(config)
    calls = []
    overlapping = trainer(config.replace(overlap_rewards=True), FunctionReward(slow))
    velocity = overlapping.policy.velocity
    overlapping.policy.velocity = lambda *given: (
        calls.append(time.perf_counter()),
        velocity(*given),
    )[1]
    late = [overlapping.iteration() for _ in range(2)]
    assert threads == {"rewards_0"}
    assert any(began < call < ended for began, ended in spans for call in calls)
    assert torch.equal(weights(one), weights(overlapping))
    timing = {"seconds", "phases"}
    for a, b in zip(rows, late, strict=True):
        assert {k: v for k, v in a.items() if k not in timing} == {
            k: v for k, v in b.items() if k not in timing
        }


@pytest.mark.parametrize(
    ("chosen", "chunk", "local", "remote"),
    [
        ("auto", 1, False, True),
        ("auto", 0, False, False),
        ("true", 1, True, True),
        ("false", 1, False, False),
        (True, 1, True, True),
        (False, 1, False, False),
    ],
)
def test_rewards_overlap_by_default_if_a_server_computes_them(chosen, chunk, local, remote):
    served, own = RemoteReward("http://localhost:1"), make_reward(TINY)
    config = TINY.replace(overlap_rewards=chosen, chunk=chunk)
    assert overlaps_rewards(config, own) is local
    for reward in (
        served,
        NoisyReward(served),
        Clipped(served, high=1.0),
        WeightedSum({"own": own, "served": served}),
    ):
        assert overlaps_rewards(config, reward) is remote, reward


def test_an_error_of_an_overlapped_reward_arrives():
    def broken(images, prompts):
        return torch.full((len(images),), float("nan"))

    run = trainer(TINY.replace(chunk=1, overlap_rewards=True), FunctionReward(broken))
    with pytest.raises(RewardError, match="not finite"):
        run.iteration()
    assert not [t for t in threading.enumerate() if t.name.startswith("rewards")]


@pytest.mark.parametrize("size", [1, 5, 7, 1000])
def test_any_micro_batch_has_the_right_mean(size):
    """12 samples x 3 steps in 5 updates: nothing divides anything."""
    config = TINY.replace(window="0:3", minibatches=5, learning_rate=1e-3)
    reference, rows = trained(config.replace(micro_batch=4), iterations=1)
    other, others = trained(config.replace(micro_batch=size), iterations=1)
    assert others[0]["train_nfe"] == 36
    for name in ("loss", "policy_loss", "ratio_mean", "clip_fraction", "grad_norm"):
        assert others[0][name] == pytest.approx(rows[0][name], abs=1e-6)
    torch.testing.assert_close(weights(other), weights(reference), atol=1e-5, rtol=1e-4)


def stepped(scaler, optimizer, gradient):
    """One step of `scaler` along a gradient whose elements are all `gradient`; whether it was
    taken.
    """
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    scaler.scale((parameter * gradient).sum()).backward()
    scaler.clip(optimizer, 100.0)
    return scaler.step(optimizer)


def test_the_loss_scale_skips_halves_and_stops_at_one():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    scaler = LossScaler(8.0, torch.device("cpu"))
    scaler.scale(parameter.sum() * 3).backward()
    assert parameter.grad.tolist() == [24.0, 24.0]
    assert scaler.clip(optimizer, 100.0) == pytest.approx(18**0.5) and parameter.grad.tolist() == [
        3.0,
        3.0,
    ]
    assert scaler.step(optimizer) and parameter.tolist() == [0.25, 0.25]
    infinite = float("inf")
    assert not stepped(scaler, optimizer, infinite) and (scaler.value, scaler.skipped) == (4.0, 1)
    assert parameter.tolist() == [0.25, 0.25]
    assert stepped(scaler, optimizer, 1.0) and parameter.tolist() == [0.0, 0.0]
    for value in (2.0, 1.0):
        assert not stepped(scaler, optimizer, infinite) and scaler.value == value
    with pytest.raises(TrainingError, match="loss scale"):
        stepped(scaler, optimizer, float("nan"))
    assert parameter.tolist() == [0.0, 0.0]


def test_the_loss_scale_grows_goes_on_and_can_be_off():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    scaler = LossScaler(8.0, torch.device("cpu"))
    assert stepped(scaler, optimizer, 1.0) and not stepped(scaler, optimizer, float("inf"))
    state = json.loads(json.dumps(scaler.state_dict()))
    again = LossScaler(1.0, torch.device("cpu"))
    again.load_state_dict({**state, "growth_interval": 2})
    assert (again.value, again.skipped) == (4.0, 1)
    assert stepped(again, optimizer, 1.0) and again.value == 4.0
    assert stepped(again, optimizer, 1.0) and again.value == 8.0  # two good steps in a row
    off = LossScaler(0.0, torch.device("cpu"))
    off.load_state_dict(state)
    loss = torch.tensor(1.0)
    assert off.scale(loss) is loss and off.value == 1.0 and off.state_dict() == {}
    before = parameter.tolist()
    assert stepped(off, optimizer, 1.0) and parameter.tolist() == [value - 0.25 for value in before]


def with_scale(run, value):
    run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": value})
    assert run.scaler.value == value


def test_float16_saves_gradients_that_would_vanish():
    """The loss is a mean over many pairs of small advantages: unscaled, its gradient is below
    float16's smallest number.
    """
    config = preset("tiny").apply(dtype="float16", iterations=2, groups=2, learning_rate=1e-3)
    exact, rows = trained(config.replace(dtype="float32"), iterations=1)
    scaled, narrow = trained(config, iterations=1)
    assert narrow[0]["skipped_steps"] == 0 and narrow[0]["loss_scale"] == 65536
    assert narrow[0]["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=0.1)
    assert all(p.dtype == torch.float32 for p in scaled.parameters)
    assert "loss_scale" not in rows[0]
    state = scaled.state()
    with_scale(scaled, 4.0)
    scaled.restore(state)
    assert scaled.scaler.value == 65536.0
    assert torch.allclose(weights(exact), weights(scaled), atol=5e-3)


def test_float16_skips_a_step_that_overflows_and_goes_on():
    config = preset("tiny").apply(dtype="float16", iterations=2, groups=2, minibatches=1)
    run = trainer(config)
    with_scale(run, 2.0**60)
    before = weights(run)
    row = run.iteration()
    assert row["skipped_steps"] == 1 and run.scaler.value == 2.0**59 and "grad_norm" not in row
    assert torch.equal(weights(run), before)
    with_scale(run, 256.0)
    row = run.iteration()
    assert row["grad_norm"] > 0 and not torch.equal(weights(run), before)


EIGHT_BIT = OptimConfig(optimizer="adamw-8bit", learning_rate=1e-3, weight_decay=0.1)


def test_eight_bit_adam_is_wired_or_asked_for(monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(2))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="needs the package bitsandbytes"):
        make_optimizer(EIGHT_BIT, [parameter])
    fake = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=lambda *given, **named: (given, named)))
    monkeypatch.setitem(sys.modules, "bitsandbytes", fake)
    made = make_optimizer(EIGHT_BIT, [parameter])
    assert made == (([parameter],), {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1})
    with pytest.raises(ConfigError, match="adamw, adamw-8bit"):
        OptimConfig(optimizer="sgd")


class Layers(nn.Sequential):
    """A network with a forward of its own: torch.compile skips that of `nn.Sequential`, the
    built-in network of the 2-D world.
    """

    def forward(self, input):
        for layer in self:
            input = layer(input)
        return input


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_network_gives_the_same_numbers(monkeypatch, backend):
    """To float rounding. "inductor", the default, generates code for this CPU."""
    compiler, graphs = cpp_compiler(), torch._dynamo.utils.counters["stats"]
    if compiler is None and backend == "inductor":
        pytest.skip("no C++ compiler")
    monkeypatch.setattr("flowrl.training.optim._require_compiler", lambda: None)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    plain, rows = trained(TINY.replace(learning_rate=1e-4), iterations=1)
    before = graphs["unique_graphs"]
    monkeypatch.setattr(MixturePolicy, "velocity_network", property(own_network))
    compiled, others = trained(TINY.replace(learning_rate=1e-4, compile=True), iterations=1)
    assert graphs["unique_graphs"] >= before + 2  # without gradients, and with them
    assert others[0]["reward_mean"] == pytest.approx(rows[0]["reward_mean"], abs=1e-5)
    assert others[0]["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-3)
    torch.testing.assert_close(weights(compiled), weights(plain), atol=1e-5, rtol=0)


def own_network(policy):
    if not isinstance(policy.net, Layers):
        policy.net = Layers(*policy.net)
    return policy.net


def cpp_compiler():
    try:
        return torch._inductor.cpp_builder.get_cpp_compiler()
    except RuntimeError:
        return None


def test_only_a_policy_that_shows_its_network_is_compiled():
    world = make_world(TINY)
    policy = world.policy(policy_options(TINY))
    parts = (
        "latent_shape",
        "device",
        "schedule",
        "encode",
        "velocity",
        "decode",
        "trainable",
        "reference",
        "frozen",
    )
    closed = SimpleNamespace(**{name: getattr(policy, name) for name in parts})
    config = TINY.replace(compile=True)
    with pytest.raises(ConfigError, match="velocity_network"):
        Trainer(
            closed,
            make_method(config),
            make_reward(config),
            world.prompts("direction", "train"),
            config,
        )
