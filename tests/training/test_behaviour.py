"""Copies of the weights: what they are after updates and iterations, and when they are current."""

import pytest
import torch
from small_run import MIXTURE, flowrl_, rows_of

from flowrl.core.errors import ConfigError
from flowrl.core.forward import Decay, WeightCopy
from flowrl.weights import Behaviour


def made(policy, **declared):
    return Behaviour(WeightCopy(**declared), policy, policy.trainable())


def change(policy, by=0.5):
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(by)


def first(tensors):
    return torch.stack([tensor.detach().flatten()[0] for tensor in tensors])


@pytest.mark.parametrize("every", ["update", "iteration"])
@pytest.mark.parametrize("decay", [Decay(0, 0.0, 0.0), Decay(1, 0.1, 0.3)])
def test_a_copy_follows_by_its_decay(mixture_policy, every, decay):
    """It is current at first, and after it has followed with a decay of 0."""
    copy = made(mixture_policy, decay=decay, every=every)
    assert copy.is_current
    expected = first(copy.values)
    for steps in range(1, 7):
        change(mixture_policy)
        copy.after("update", steps)
        assert every == "update" or not copy.is_current
        if steps % 2 == 0:
            copy.after("iteration", steps)
        if every == "update" or steps % 2 == 0:
            kept = decay.at(steps)
            expected = kept * expected + (1 - kept) * first(copy.parameters)
            assert copy.is_current == (kept == 0)
        torch.testing.assert_close(first(copy.values), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("begin", "expected"), [(None, [False] * 3), (0, [True] * 3), (200, [False, True, True])]
)
def test_when_a_copy_samples(mixture_policy, begin, expected):
    copy = made(mixture_policy, sample_from=begin)
    assert [copy.samples(steps) for steps in (199, 200, 201)] == expected


@pytest.mark.parametrize(
    "bad", [dict(start=-1), dict(rate=-0.1), dict(cap=1.0), dict(rate=float("inf"))]
)
def test_decays_out_of_range_are_named(bad):
    with pytest.raises(ConfigError, match=rf"Decay.{next(iter(bad))} = .* is not allowed"):
        Decay(**bad)


def test_a_finished_run_can_teach(tmp_path):
    """The student's divergence from the teacher falls; without a loss that reads it, a reference is
    refused.
    """
    common = f"train {MIXTURE} --iterations 8 --groups 8 --out {tmp_path}/"
    reference = f" --reference {tmp_path}/teacher"
    assert flowrl_(f"{common}teacher --learning-rate 0.01") == 0
    student = f"{common}student --loss distillation --learning-rate 0.003"
    assert flowrl_(student + reference) == 0
    kl = [row["kl"] for row in rows_of(tmp_path / "student") if "kl" in row]
    assert 0 < kl[-1] < kl[0] / 2
    assert flowrl_(f"{common}refused{reference}") == 2
