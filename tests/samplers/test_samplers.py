"""Transition kernels against golden values, each other, and their contract."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

from flowrl.core.protocols import Sampler
from flowrl.core.types import Schedule
from flowrl.flow import (
    log_prob,
    log_prob_without_constants,
    sample,
    shifted_schedule,
    tweedie,
    uniform_schedule,
)
from flowrl.samplers import (
    CPS,
    DDIMSDE,
    ODE,
    DanceSDE,
    FlowSDE,
    Windowed,
    transition_stds,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "kernels.json").read_text())
KERNELS = [ODE(), FlowSDE(), DanceSDE(), CPS(), DDIMSDE()]
STEPS = 10


def name(thing: object) -> str:
    return type(thing).__name__


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_step(schedule: Schedule) -> torch.Tensor:
    return torch.arange(schedule.steps)


@pytest.mark.parametrize(
    ("kernel", "mean", "std"),
    [
        (FlowSDE(0.7), 0.568975, 0.271109),
        (DanceSDE(0.3), 0.578650, 0.094868),
        (CPS(0.7), 0.530859, 0.445503),
        (DDIMSDE(0.7), 0.570699, 0.221359),
        (ODE(), 0.58, 0.0),
    ],
    ids=name,
)
def test_worked_example(kernel: Sampler, mean: float, std: float) -> None:
    """x = .5, v = -.8, t = .6, s = .5, computed by hand from each paper's formula."""
    schedule = Schedule(torch.tensor([1.0, 0.6, 0.5, 0.0]))
    gaussian = kernel.transition(
        torch.tensor([[0.5]]), torch.tensor([[-0.8]]), schedule, torch.tensor([1])
    )
    assert float(gaussian.mean) == pytest.approx(mean, abs=1e-6)
    assert float(gaussian.std) == pytest.approx(std, abs=1e-6)


@pytest.mark.parametrize(
    "case", GOLDEN["steps"], ids=lambda c: f"{c['kind']}-{c['noise_level']}-{c['index']}"
)
def test_matches_the_public_flow_grpo_step(case: dict[str, Any]) -> None:
    """YunzeTong/TurningPoint-GRPO 994d26a (the formula of yifan123/flow_grpo), float32 on the
    CPU.
    """
    schedule = Schedule(torch.tensor(GOLDEN["sigmas"]))
    sde = case["kind"] == "sde"
    kernel = FlowSDE(case["noise_level"]) if sde else CPS(case["noise_level"])
    x, v, x_next = (torch.tensor(case[key]) for key in ("x", "v", "x_next"))
    gaussian = kernel.transition(x, v, schedule, torch.full((len(x),), case["index"]))
    std = torch.tensor(case["std_dev_t"]) * (schedule.deltas[case["index"]].sqrt() if sde else 1.0)
    torch.testing.assert_close(gaussian.mean, torch.tensor(case["mean"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gaussian.std, std, rtol=1e-5, atol=1e-7)
    if bool((std > 0).all()):
        density = log_prob if sde else log_prob_without_constants
        torch.testing.assert_close(
            density(gaussian, x_next), torch.tensor(case["log_prob"]), rtol=1e-5, atol=1e-5
        )
    else:
        assert case["kind"] == "cps" and case["index"] == STEPS - 1


@pytest.mark.parametrize("case", GOLDEN["dance"]["steps"], ids=lambda c: str(c["index"]))
def test_matches_the_public_dancegrpo_step(case: dict[str, Any]) -> None:
    """XueZeyue/DanceGRPO 15cc71d; its log-probability pins mean and std together."""
    schedule = Schedule(torch.tensor(GOLDEN["dance"]["sigmas"]))
    step = torch.full((2,), case["index"])
    x, v, x_next = (torch.tensor(case[key]) for key in ("x", "v", "x_next"))
    gaussian = DanceSDE(case["eta"]).transition(x, v, schedule, step)
    torch.testing.assert_close(
        tweedie(x, v, schedule.times[step]), torch.tensor(case["x0"]), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        log_prob(gaussian, x_next), torch.tensor(case["log_prob"]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kernel", [*KERNELS, Windowed(CPS(), range(2, 5))], ids=name)
class TestContract:
    """What every sampler promises."""

    schedule = shifted_schedule(STEPS)

    def test_is_a_sampler(self, kernel: Sampler) -> None:
        assert isinstance(kernel, Sampler)

    def test_bfloat16_input_gives_the_float32_result(self, kernel: Sampler) -> None:
        x, v = randn(STEPS, 2, 3).bfloat16(), randn(STEPS, 2, 3, seed=1).bfloat16()
        low = kernel.transition(x, v, self.schedule, every_step(self.schedule))
        high = kernel.transition(x.float(), v.float(), self.schedule, every_step(self.schedule))
        assert low.mean.dtype == low.std.dtype == torch.float32
        assert torch.equal(low.mean, high.mean) and torch.equal(low.std, high.std)

    def test_mixed_steps_equal_one_at_a_time(self, kernel: Sampler) -> None:
        x, v, step = randn(6, 2, 3), randn(6, 2, 3, seed=1), torch.tensor([9, 0, 4, 4, 8, 2])
        together = kernel.transition(x, v, self.schedule, step)
        for i in range(len(step)):
            alone = kernel.transition(x[i : i + 1], v[i : i + 1], self.schedule, step[i : i + 1])
            torch.testing.assert_close(together.mean[i], alone.mean[0], rtol=0, atol=1e-6)
            assert together.std[i] == alone.std[0]

    def test_gradient_flows_through_the_mean_only(self, kernel: Sampler) -> None:
        v = randn(STEPS, 3).requires_grad_()
        gaussian = kernel.transition(randn(STEPS, 3), v, self.schedule, every_step(self.schedule))
        assert not gaussian.std.requires_grad
        gaussian.mean.sum().backward()
        assert v.grad is not None and bool((v.grad != 0).all()) and bool(v.grad.isfinite().all())
        assert not sample(gaussian, torch.Generator().manual_seed(0)).requires_grad

    def test_is_finite_on_extreme_grids(self, kernel: Sampler) -> None:
        for schedule in (
            shifted_schedule(STEPS, 50.0),
            shifted_schedule(STEPS, 0.05),
            uniform_schedule(100),
        ):
            n = schedule.steps
            gaussian = kernel.transition(
                randn(n, 3), randn(n, 3, seed=1), schedule, every_step(schedule)
            )
            assert bool(gaussian.mean.isfinite().all())
            assert bool(gaussian.std.isfinite().all()) and bool((gaussian.std >= 0).all())

    def test_wrong_shapes_are_refused_at_the_door(self, kernel: Sampler) -> None:
        with pytest.raises(TypeCheckError, match=r"parameter .step."):
            kernel.transition(
                randn(4, 3), randn(4, 3), self.schedule, torch.zeros(3, dtype=torch.long)
            )


@pytest.mark.parametrize("kernel", [FlowSDE(0.0), DanceSDE(0.0), CPS(0.0), DDIMSDE(0.0)], ids=name)
def test_noise_level_zero_is_the_ode(kernel: Sampler) -> None:
    schedule = shifted_schedule(STEPS)
    x, v = randn(STEPS, 4), randn(STEPS, 4, seed=1)
    ours, ode = (k.transition(x, v, schedule, every_step(schedule)) for k in (kernel, ODE()))
    torch.testing.assert_close(ours.mean, ode.mean, rtol=0, atol=1e-6)
    assert torch.equal(ours.std, torch.zeros(STEPS))


def test_which_steps_are_decisions() -> None:
    schedule = shifted_schedule(4)
    positive = {name(k): (transition_stds(k, schedule) > 0).tolist() for k in KERNELS}
    assert positive == {
        "ODE": [False] * 4,
        "FlowSDE": [True] * 4,
        "DanceSDE": [True] * 4,
        "CPS": [True, True, True, False],
        "DDIMSDE": [False, True, True, False],
    }


def test_transition_stds_are_those_of_the_transition() -> None:
    schedule = shifted_schedule(STEPS)
    for kernel in KERNELS:
        expected = kernel.transition(
            randn(STEPS, 2), randn(STEPS, 2), schedule, every_step(schedule)
        ).std
        assert torch.equal(transition_stds(kernel, schedule), expected)


def test_ddim_noise_is_capped_where_all_of_it_is_fresh() -> None:
    schedule = Schedule(torch.tensor([1.0, 0.2, 0.1, 0.0]))
    assert transition_stds(DDIMSDE(3.0), schedule).tolist() == pytest.approx([0.0, 0.1, 0.0])


def test_window_is_the_kernel_inside_and_the_ode_outside() -> None:
    schedule = shifted_schedule(6)
    x, v, step = randn(6, 3), randn(6, 3, seed=1), every_step(schedule)
    windowed, kernel, ode = (
        k.transition(x, v, schedule, step)
        for k in (Windowed(FlowSDE(), range(2, 5)), FlowSDE(), ODE())
    )
    inside = torch.tensor([False, False, True, True, True, False])
    assert torch.equal(windowed.mean[inside], kernel.mean[inside])
    assert torch.equal(windowed.std[inside], kernel.std[inside])
    assert torch.equal(windowed.mean[~inside], ode.mean[~inside])
    assert torch.equal(windowed.std[~inside], torch.zeros(3))


def test_steps_of_a_window_need_no_order_and_no_neighbours() -> None:
    schedule = shifted_schedule(6)
    stds = transition_stds(FlowSDE(), schedule)
    assert torch.equal(
        transition_stds(Windowed(FlowSDE(), [4, 1]), schedule),
        stds * torch.tensor([0, 1, 0, 0, 1, 0]),
    )
