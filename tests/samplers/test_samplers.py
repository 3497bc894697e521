"""Transition kernels against golden values, each other, their contract, and the marginals."""

import json
import math

import pytest
import torch
from loading import ROOT, load
from seeded import randn
from torch.testing import assert_close

from flowrl.core.types import Schedule
from flowrl.flow import (
    log_prob,
    log_prob_without_constants,
    shifted_schedule,
    tweedie,
    uniform_schedule,
)
from flowrl.samplers import (
    CPS,
    DDIMSDE,
    ODE,
    DanceSDE,
    ExponentialSDE,
    FlowSDE,
    Windowed,
    transition_stds,
)

GOLDEN = json.loads((ROOT / "tests" / "golden" / "kernels.json").read_text())
KERNELS = [
    *(ODE(), FlowSDE(), DanceSDE(), CPS(), DDIMSDE(), ExponentialSDE()),
    Windowed(CPS(), range(2, 5)),
]
STEPS = 10
SCHEDULE = shifted_schedule(STEPS)


def name(part):
    return type(part).__name__


@pytest.mark.parametrize(
    ("kernel", "mean", "std"),
    [
        (FlowSDE(), 0.568975, 0.271109),
        (DanceSDE(), 0.578650, 0.094868),
        (CPS(), 0.530859, 0.445503),
        (CPS(0.273555), 0.571818, 0.208299),  # FDFO's churn of 0.1
        (DDIMSDE(), 0.570699, 0.221359),
        (ExponentialSDE(), 0.571489, 0.212242),
        (ExponentialSDE(0.3), 0.578373, 0.094649),
        (ExponentialSDE(1.0), 0.563485, 0.288675),
        (ExponentialSDE(0.0), 0.58, 0.0),
        (ODE(), 0.58, 0.0),
    ],
    ids=name,
)
def test_worked_example(kernel, mean, std):
    """x = .5, v = -.8, t = .6, s = .5, computed by hand from each paper's formula."""
    schedule = Schedule(torch.tensor([1.0, 0.6, 0.5, 0.0]))
    x, v = torch.tensor([[0.5]]), torch.tensor([[-0.8]])
    gaussian = kernel.transition(x, v, schedule, torch.tensor([1]))
    assert gaussian.mean == pytest.approx(mean, abs=1e-6)
    assert gaussian.std == pytest.approx(std, abs=1e-6)


def test_the_exponential_step_is_the_posterior_at_sqrt_2_and_forgets_the_noise_at_time_1():
    """a = sqrt(2): q(x_s | x_t, x_0) of the interpolant, from its two Gaussians."""
    schedule, step = Schedule(torch.tensor([1.0, 0.6, 0.5, 0.0])), torch.tensor([0, 1, 2])
    x, v = torch.tensor([[0.5]]).expand(3, 1), torch.tensor([[-0.8]]).expand(3, 1)
    gaussian = ExponentialSDE(math.sqrt(2)).transition(x, v, schedule, step)
    t, s, clean = 0.6, 0.5, 0.5 + 0.6 * 0.8
    scale = (1 - t) / (1 - s)  # x_t = scale x_s + spread noise
    spread = t**2 - (scale * s) ** 2
    precision = scale**2 / spread + 1 / s**2
    mean = (scale * 0.5 / spread + (1 - s) * clean / s**2) / precision
    assert gaussian.mean[1].item() == pytest.approx(mean, abs=1e-6)
    assert gaussian.std[1].item() == pytest.approx(precision**-0.5, abs=1e-6)
    assert gaussian.std[0].item() == pytest.approx(0.6) and gaussian.std[2] == 0
    later = Schedule(torch.tensor([1.0, 0.5, 0.0]))
    first = ExponentialSDE(0.7).transition(x[:1], v[:1], later, step[:1])
    assert (first.mean.item(), first.std.item()) == (pytest.approx(0.65), pytest.approx(0.5))


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_matches_the_public_flow_grpo_step(kind):
    """YunzeTong/TurningPoint-GRPO 994d26a (the formula of yifan123/flow_grpo), float32 on the
    CPU.
    """
    schedule, sde = Schedule(torch.tensor(GOLDEN["sigmas"])), kind == "sde"
    density = log_prob if sde else log_prob_without_constants
    cases = [case for case in GOLDEN["steps"] if case["kind"] == kind]
    for case in cases:
        kernel = (FlowSDE if sde else CPS)(case["noise_level"])
        x, v, x_next = (torch.tensor(case[key]) for key in ("x", "v", "x_next"))
        gaussian = kernel.transition(x, v, schedule, torch.full((len(x),), case["index"]))
        delta = schedule.deltas[case["index"]]
        std = torch.tensor(case["std_dev_t"]) * (delta.sqrt() if sde else 1.0)
        assert_close(gaussian.mean, torch.tensor(case["mean"]), rtol=1e-5, atol=1e-5)
        assert_close(gaussian.std, std, rtol=1e-5, atol=1e-7)
        if bool((std > 0).all()):
            expected = torch.tensor(case["log_prob"])
            assert_close(density(gaussian, x_next), expected, rtol=1e-5, atol=1e-5)


def test_matches_the_public_dancegrpo_step():
    """XueZeyue/DanceGRPO 15cc71d; its log-probability determines mean and std together."""
    schedule = Schedule(torch.tensor(GOLDEN["dance"]["sigmas"]))
    for case in GOLDEN["dance"]["steps"]:
        step = torch.full((2,), case["index"])
        x, v, x_next = (torch.tensor(case[key]) for key in ("x", "v", "x_next"))
        gaussian = DanceSDE(case["eta"]).transition(x, v, schedule, step)
        clean, density = tweedie(x, v, schedule.times[step]), log_prob(gaussian, x_next)
        assert_close(clean, torch.tensor(case["x0"]), rtol=1e-5, atol=1e-6)
        assert_close(density, torch.tensor(case["log_prob"]), rtol=1e-5, atol=1e-5)


def test_which_steps_are_decisions():
    steps = {name(k): (transition_stds(k, SCHEDULE) > 0).nonzero().flatten() for k in KERNELS}
    assert {kernel: places.tolist() for kernel, places in steps.items()} == {
        "ODE": [],
        "FlowSDE": list(range(10)),
        "DanceSDE": list(range(10)),
        "CPS": list(range(9)),
        "DDIMSDE": list(range(1, 9)),
        "ExponentialSDE": list(range(9)),
        "Windowed": [2, 3, 4],
    }
    schedule = Schedule(torch.tensor([1.0, 0.2, 0.1, 0.0]))  # at most as much noise as there is
    assert transition_stds(DDIMSDE(3.0), schedule).tolist() == pytest.approx([0.0, 0.1, 0.0])


def test_a_window_is_the_kernel_inside_and_the_ode_outside():
    """Its steps need no order and no neighbours."""
    x, v, step = randn(STEPS, 3), randn(STEPS, 3, seed=1), torch.arange(STEPS)
    kernels = (Windowed(FlowSDE(), [7, 1, 4]), FlowSDE(), ODE())
    windowed, kernel, ode = (k.transition(x, v, SCHEDULE, step) for k in kernels)
    inside = torch.isin(step, torch.tensor([1, 4, 7]))
    assert torch.equal(windowed.mean, torch.where(inside[:, None], kernel.mean, ode.mean))
    assert torch.equal(windowed.std, kernel.std * inside)


# What kernels that keep the marginals do to the distribution of the next node, without sampling:
# for x_0 = m the exact velocity is affine in x, so a step maps a Gaussian to another one

MEAN, NODES = 0.8, 10


@pytest.mark.parametrize("kernel", [CPS(0.9), DDIMSDE(0.7), ExponentialSDE(0.7)], ids=repr)
def test_a_step_from_the_marginal_of_a_point_has_the_variance_of_the_next_one(kernel):
    """From x ~ N((1-t) m, t^2) to s^2."""
    schedule, step = uniform_schedule(NODES), torch.arange(1, NODES).repeat(2)
    x, t = torch.tensor([[0.0], [1.0]]).repeat_interleave(NODES - 1, 0), schedule.times[step, None]
    velocity = (x - (1 - t) * MEAN) / t - MEAN  # E[eps - x_0 | x_t = x]
    transition = kernel.transition(x, velocity, schedule, step)
    offset, at_one = transition.mean.double().view(2, -1)
    noise, start = transition.std[: NODES - 1].double(), schedule.times[1:-1].double()
    variance = ((at_one - offset) * start).square() + noise.square()
    assert_close(variance, schedule.times[2:].double().square(), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "variances"),
    [
        (CPS(0.9), {10: 0.110, 40: 0.131, 640: 0.143}),
        (CPS(0.5), {10: 0.160, 40: 0.196, 640: 0.211}),
        (DDIMSDE(0.7), {10: 0.171, 40: 0.207, 640: 0.217}),
    ],
    ids=repr,
)
def test_a_spread_becomes_narrower_also_in_the_limit_of_many_steps(kernel, variances):
    """From x_0 ~ N(0, 1/4); the numbers are those of the page."""
    page = (ROOT / "docs" / "papers" / "stepwise-flow-grpo.md").read_text()
    for steps, expected in variances.items():
        schedule, step = uniform_schedule(steps), torch.arange(steps)
        x, t = torch.ones(steps, 1), schedule.times[:-1, None]
        slope = (t - (1 - t) / 4) / ((1 - t).square() / 4 + t.square())  # E[eps - x_0 | x_t] / x_t
        transition = kernel.transition(x, slope, schedule, step)
        variance = 1.0
        for factor, noise in zip(
            transition.mean[:, 0].tolist(), transition.std.tolist(), strict=True
        ):
            variance = factor**2 * variance + noise**2
        assert variance == pytest.approx(expected, abs=6e-4) and f"{expected:.3f}" in page


def test_the_page_on_few_steps_has_the_numbers_of_the_closed_form():
    """Goldens of the wide Gaussian and of the narrow one, derived by hand; a point is exact."""
    script = load("benchmarks/few_steps.py")
    stored = json.loads((ROOT / "benchmarks" / "results" / "few-steps.json").read_text())
    page = (ROOT / "docs" / "models" / "few-steps.md").read_text()
    golden = {
        10: {
            "ODE": (0.773, 0.381),
            "Flow-SDE 0.7": (0.932, 0.621),
            "CPS 0.7": (0.580, 0.327),
            "exponential 0.7": (0.741, 0.365),
            "exponential 1.41": (0.648, 0.327),
        },
        640: {"CPS 0.7": (0.721, 0.704), "exponential 0.7": (0.995, 0.981)},
    }
    for steps, rows in golden.items():
        for name, expected in rows.items():
            kernel = script.kernels(steps)[name]
            for data, value, key in zip((1.0, 0.01), expected, ("wide", "narrow"), strict=True):
                ratio = script.variance(kernel, steps, data) / data
                assert ratio == pytest.approx(value, abs=1.1e-3)
                assert stored[key][name][str(steps)] == pytest.approx(ratio, abs=1e-4)
            assert script.variance(kernel, steps, 0.0) == pytest.approx(0.0, abs=1e-9)
    shown = [stored["wide"]["ODE"]["4"], stored["wide"]["ODE"]["10"]]
    shown += [stored["wide"]["CPS 0.7"]["640"]]
    assert all(f"{value:.2f}" in page for value in shown) and "0.995 with 640" in page
