"""Checks of the lesson on ODE and SDE."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flowrl.flow import GaussianMixture, uniform_schedule
from flowrl.samplers import ODE, transition_stds
from flowrl_course.checking import (
    answered,
    check,
    close,
    decide,
    expect,
    number,
    quiz,
    same,
    tensor,
)

Answer = Callable[..., Any]


def _state(time: float = 0.6) -> tuple[Tensor, Tensor]:
    """Points [7, 2] and their velocities on the ring."""
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(5))
    return x, GaussianMixture.ring().velocity(x, torch.full((7,), time))


def _two(value: Any) -> tuple[Any, Any]:
    expect(
        isinstance(value, tuple | list) and len(value) == 2,
        "return two values: the mean, and the standard deviation",
    )
    return answered(value[0], "the mean"), answered(value[1], "the standard deviation")


@check("Exercise 1")
def check_score(answer: Answer) -> None:
    """`answer(x, velocity, time)` is the gradient of log p_t."""
    ring, time = GaussianMixture.ring(), torch.linspace(0.2, 0.9, 7)
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(5), requires_grad=True)
    (truth,) = torch.autograd.grad(ring.log_marginal(x, time).sum(), x)
    x = x.detach()
    velocity, t = ring.velocity(x, time), time[:, None]
    noise = x + (1 - t) * velocity
    mistakes = {
        "the sign is wrong: the score points away from the noise": noise / t,
        "the noise is not divided by its standard deviation t": -noise,
        "divided by t squared: the noise in x_t already has one factor t": -noise / t**2,
        "this is built on the estimate of the clean sample; the score needs that of the noise": (
            -(x - t * velocity) / t
        ),
    }
    got = tensor(answer(x, velocity, time), (7, 2), "the score")
    close(
        got,
        truth,
        "this is not the gradient of log p_t (compared with autograd on the ring)",
        mistakes,
        2e-4,
    )


def _flow_sde(x: Tensor, v: Tensor, t: float, s: float, a: float) -> tuple[Tensor, float]:
    variance, delta = a**2 * t / (1 - t), t - s
    return x - delta * v - variance * delta / (2 * t) * (x + (1 - t) * v), math.sqrt(
        variance * delta
    )


@check("Exercise 2")
def check_flow_sde(answer: Answer) -> None:
    """`answer(x, velocity, t, s, noise_level)` is mean and std of a Flow-SDE step."""
    for t, s, a in ((0.6, 0.45, 0.7), (0.8, 0.5, 0.4)):
        _check_flow_sde(answer, t, s, a)


def _check_flow_sde(answer: Answer, t: float, s: float, a: float) -> None:
    x, v = _state(t)
    got_mean, got_std = _two(answer(x, v, t, s, a))
    mean, std = _flow_sde(x, v, t, s, a)
    sigma, delta = a * math.sqrt(t / (1 - t)), t - s
    close(
        number(got_std, "the standard deviation"),
        std,
        "the standard deviation of the step is wrong: which part depends on t, which on Delta?",
        {
            "this is sigma times Delta; noise grows with the root of Delta": sigma * delta,
            "this is sigma; times the root of Delta": sigma,
            "this is the variance; take its root": std**2,
            "the root in sigma is missing: look at the definition of the noise level": (
                a * t / (1 - t) * math.sqrt(delta)
            ),
            "sigma is taken at the next time s; take it where the step starts, at t": (
                a * math.sqrt(s / (1 - s) * delta)
            ),
            "sigma has 1 - t and t swapped: there is more noise near t = 1": (
                a * math.sqrt((1 - t) / t) * math.sqrt(delta)
            ),
        },
    )
    noise = x + (1 - t) * v
    pull = sigma**2 * delta / (2 * t) * noise
    mistakes = {
        "this is the ODE's mean: the score correction is missing, so the samples spread out": (
            x - delta * v
        ),
        "the score correction has the wrong sign: it must undo the spreading": x - delta * v + pull,
        "the score correction is twice too large: it must undo the spreading alone": (
            x - delta * v - 2 * pull
        ),
        "the velocity has the wrong sign: time runs down": x + delta * v - pull,
        "the score correction uses sigma instead of sigma squared": x - delta * v - pull / sigma,
        "the score correction is not multiplied by Delta": x - delta * v - pull / delta,
        "the noise is estimated with another time: take the time t of the state x": (
            x - delta * v - pull * (x + (1 - s) * v) / noise
        ),
    }
    random = not same(got_mean, _two(answer(x, v, t, s, a))[0])
    expect(
        not random,
        "the mean is another one at every call: the noise is not drawn here, only its std is"
        " returned",
    )
    close(
        tensor(got_mean, (7, 2), "the mean"),
        mean,
        "the mean is not the ODE's step plus the score correction",
        mistakes,
    )


_WIDTH = 0.5
"""Standard deviation of the Gaussian data of exercise 3, whose velocity is linear and whose
marginals are known.
"""


def _linear_velocity(x: Tensor, time: Tensor) -> Tensor:
    """The velocity of data from N(0, _WIDTH^2 I): x_t has variance (1-t)^2 _WIDTH^2 + t^2."""
    t = time[:, None]
    return (t - (1 - t) * _WIDTH**2) / ((1 - t) ** 2 * _WIDTH**2 + t**2) * x


def _std_after(
    start: float,
    times: list[float],
    a: float,
    pull: float,
    noise: Callable[[float], float] = math.sqrt,
) -> float:
    """Standard deviation after all steps from `start`, with `pull` times the score correction and
    noise(variance) per step.
    """
    std = start
    for t, s in pairwise(times):
        unit = torch.ones(1, 1)
        v = float(_linear_velocity(unit, torch.tensor([t])))
        delta, variance = t - s, a**2 * t / (1 - t) * (t - s)
        gain = 1 - delta * v - pull * variance / (2 * t) * (1 + (1 - t) * v)
        std = math.hypot(gain * std, noise(variance))
    return std


def _moved(first: Tensor, ends: Tensor) -> Tensor:
    """By which factor the final points depend on the first ones, and their mean on that of the
    first, each by coordinate [2, dim].
    """
    centred = first - first.mean(0)
    slopes = (centred * (ends - ends.mean(0))).mean(0) / centred.square().mean(0)
    return torch.stack([slopes, ends.mean(0) / first.mean(0)])


def _one_draw(answer: Answer, times: list[float], a: float) -> bool:
    """Whether samples that start at one point end at one point, which depends on the seed."""
    first, second = (
        answer(_linear_velocity, torch.ones(8, 2), times, a, True, generator)
        for generator in (torch.Generator().manual_seed(7), torch.Generator().manual_seed(8))
    )
    return same(first, first[:1].expand(8, 2)) and not same(first, second)


@check("Exercise 3")
def check_sde_ends(answer: Answer) -> None:
    """`answer(velocity, x, times, noise_level, correct, generator)` follows Flow-SDE with or
    without the score correction.
    """
    times, a, count = torch.linspace(0.9, 0.0, 13).tolist(), 0.8, 40_000
    first = torch.randn(count, 2, generator=torch.Generator().manual_seed(6))
    start = float(first.std())
    first = first + torch.tensor([1.5, -0.8])
    final, stds, seen = {}, {}, []

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        expect(time.shape == x.shape[:1], "velocity needs one time per sample: torch.full")
        seen.append(float(time[0]))
        return _linear_velocity(x, time)

    for correct in (True, False):
        generator = torch.Generator().manual_seed(7)
        ends = answer(velocity, first.clone(), times, a, correct, generator)
        ends = tensor(answered(ends, "sde_ends"), (count, 2), "the final points")
        expect(
            not same(ends, first),
            "the points are returned unchanged: replace the dots, and assign the new points to x",
        )
        final[correct], stds[correct] = ends, float(ends.std(0).square().mean().sqrt())
    expect(
        seen[:1] != times[1:2],
        "the velocity is evaluated at the end of the step: evaluate it at t, where x is",
    )
    repeated = answer(
        _linear_velocity, first.clone(), times, a, True, torch.Generator().manual_seed(7)
    )
    expect(
        same(repeated, final[True]),
        "two calls with equal generators differ: draw the noise with torch.randn(x.shape,"
        " generator=generator)",
    )
    reseeded = answer(
        _linear_velocity, first.clone(), times, a, True, torch.Generator().manual_seed(8)
    )
    expect(
        not same(reseeded, final[True]),
        "another generator gives the same points: draw the noise with `generator`",
    )
    expected = {correct: _std_after(start, times, a, float(correct)) for correct in (True, False)}
    expect(
        not math.isclose(stds[True], stds[False], rel_tol=1e-3),
        "`correct` has no effect: if it is False, the mean is that of the ODE, x - Delta v",
    )
    mistakes = {
        (
            expected[False],
            expected[True],
        ): "the two cases are swapped: the correction is left out if `correct` is False",
        (
            expected[True],
            _std_after(start, times, 0.0, 0.0),
        ): "with correct=False the noise is missing too: replace the mean only",
        (
            expected[True],
            _std_after(start, times, a, -1.0),
        ): "with correct=False the correction has the opposite sign; leave it out",
        (
            expected[True],
            _std_after(start, times, a, 2.0),
        ): "with correct=False the correction is twice as large; leave it out",
    }
    for (corrected, uncorrected), message in mistakes.items():
        near = math.isclose(stds[True], corrected, rel_tol=0.015) and math.isclose(
            stds[False], uncorrected, rel_tol=0.015
        )
        expect(not near, message)
    expect(
        not _one_draw(answer, times, a),
        "all samples get the same noise: draw noise of the shape of x",
    )
    noiseless = _std_after(start, times, a, 1.0, lambda _: 0.0)
    expect(
        not math.isclose(stds[True], noiseless, rel_tol=0.01),
        "the noise is missing: add std times torch.randn(...)",
    )
    squared = _std_after(start, times, a, 1.0, lambda variance: variance)
    expect(
        not math.isclose(stds[True], squared, rel_tol=0.01), "the noise is multiplied by std twice"
    )
    early = _std_after(start, times[:2], a, 1.0)
    expect(
        not math.isclose(stds[True], early, rel_tol=0.01),
        "the loop ends after one step: `return x` comes after the loop",
    )
    for correct, value in stds.items():
        expect(
            math.isclose(value, expected[correct], rel_tol=0.01),
            f"with correct={correct} the final points have a standard deviation of {value:.3f}"
            f" instead of {expected[correct]:.3f}",
        )
        gain = _std_after(1.0, times, a, float(correct), lambda _: 0.0)
        expect(
            bool((_moved(first, final[correct]) - gain).abs().max() < 0.02),
            f"with correct={correct} the final points have the right spread, but in the mean a"
            " point does not end where its own beginning leads: keep samples, coordinates and"
            " signs as they are",
        )
    uneven, level = [0.9, 0.5, 0.2, 0.0], 0.4
    other = answer(
        _linear_velocity, first.clone(), uneven, level, False, torch.Generator().manual_seed(7)
    )
    spread = float(tensor(other, (count, 2), "the final points").std(0).square().mean().sqrt())
    expect(
        math.isclose(spread, _std_after(start, uneven, level, 0.0), rel_tol=0.015),
        "right for one grid and noise level, not for others: use `times` and `noise_level`",
    )


def colleague_ends(velocity: Answer, x: Tensor, times: list[float], noise_level: float) -> Tensor:
    """The final points of a loop that adds the same noise in every step (exercise 4)."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    for t, s in pairwise(times):
        mean, std = _flow_sde(x, velocity(x, torch.full((len(x),), t)), t, s, noise_level)
        x = mean + std * noise
    return x


@check("Exercise 4")
def check_cause(answer: str) -> None:
    """`answer` is the letter of the bug that explains the log."""
    reasons = {
        "a": "std^2 is proportional to the step length, so its noise vanishes with more steps:"
        " here the spread grows",
        "c": "without the correction the spread is about 0.6, see the table above: compare",
        "d": "a finer grid would help against a coarse one: here it makes the spread worse",
    }
    decide(answer, "b", reasons)


@check("Exercise 5")
def check_excess_variance(answer: Answer) -> None:
    """`answer(t, s, sigma)` is Delta^2 sigma^2 (1/t + sigma^2 / (4 t^2))."""
    for t, s, sigma in ((0.7, 0.4, 0.9), (0.9, 0.8, 1.3)):
        _check_excess_variance(answer, t, s, sigma)


def _check_excess_variance(answer: Answer, t: float, s: float, sigma: float) -> None:
    delta = t - s
    fresh, pull = sigma**2 * delta, sigma**2 * delta / (2 * t)
    truth = delta**2 * sigma**2 * (1 / t + sigma**2 / (4 * t**2))
    mistakes = {
        "this is the whole variance of x_s: subtract s squared": truth + s**2,
        "this is only the new noise: the old noise's coefficient shrinks too": fresh,
        "the new noise is missing: it has a variance, too": (s - pull) ** 2 - s**2,
        "standard deviations do not add: square each coefficient on its own": (
            (s - pull + math.sqrt(fresh)) ** 2 - s**2
        ),
        "the variance of the new noise grows with the length of the step": (s - pull) ** 2
        + sigma**2
        - s**2,
        "a coefficient c of the noise gives variance c^2: square that of the old noise": (
            s - pull + fresh - s**2
        ),
        "the square of the change of the old noise's coefficient is missing": truth - pull**2,
        "this is a difference of standard deviations; take that of the variances": (
            math.sqrt(truth + s**2) - s
        ),
        "x_0 is the same for all samples: it has no variance": truth + (1 - s) ** 2,
    }
    got = number(answer(t, s, sigma), "the excess variance")
    close(got, truth, "this is not the variance of x_s minus s squared", mistakes, 1e-6)


@check("Exercise 6")
def check_cps(answer: Answer) -> None:
    """`answer(x, velocity, t, s, eta)` is mean and std of a CPS step."""
    for t, s, eta in ((0.6, 0.45, 0.7), (0.8, 0.5, 0.3)):
        _check_cps(answer, t, s, eta)


def _check_cps(answer: Answer, t: float, s: float, eta: float) -> None:
    x, v = _state(t)
    got_mean, got_std = _two(answer(x, v, t, s, eta))
    std = s * math.sin(eta * math.pi / 2)
    close(
        number(got_std, "the standard deviation"),
        std,
        "the standard deviation is not the one of CPS: what are its values at eta = 0 and 1?",
        {
            "this uses the time t; the factor is the next time s": t * math.sin(eta * math.pi / 2),
            "sin takes radians: at eta = 1 the angle is a right angle": s * math.sin(eta),
            "CPS has no root of Delta: sigma is the step's standard deviation": (
                std * math.sqrt(t - s)
            ),
            "this is the variance": std**2,
        },
    )
    clean, noise = x - t * v, x + (1 - t) * v
    rest = math.sqrt(s**2 - std**2)
    mistakes = {
        "old noise keeps its whole coefficient s: with the new noise the variance is then "
        "too large": ((1 - s) * clean + s * noise),
        "standard deviations were subtracted: variances add": ((1 - s) * clean + (s - std) * noise),
        "the clean part is weighted with 1 - t; at the next node it is 1 - s": (
            (1 - t) * clean + rest * noise
        ),
        "the root is missing: a coefficient is the root of a variance": (
            (1 - s) * clean + (s**2 - std**2) * noise
        ),
        "the velocity is not the old noise: use the estimate of the noise": (1 - s) * clean
        + rest * v,
        "the two estimates are swapped": (1 - s) * noise + rest * clean,
    }
    wanted = (1 - s) * clean + rest * noise
    got = tensor(got_mean, (7, 2), "the mean")
    close(
        got,
        wanted,
        "the mean is not the clean estimate and the old noise with their coefficients at s",
        mistakes,
    )
    final = _two(answer(x, v, t, 0.0, eta))
    expect(
        bool(torch.isfinite(torch.as_tensor(final[0])).all()),
        "at s = 0 the mean is not finite: is the root taken of a tiny negative?",
    )


@check("Exercise 7")
def check_blobs(answer: dict[str, str]) -> None:
    """`answer` maps samplers to sharper or wider."""
    ode, sde, cps = "ODE", "Flow-SDE, all steps random", "CPS"
    expect(isinstance(answer, dict) and set(answer) == {ode, sde, cps}, "keep the three keys")
    answered(None if ... in answer.values() else answer, "all samplers")
    answer = {key: str(word).strip().lower() for key, word in answer.items()}
    allowed = set(answer.values()) <= {"sharper", "wider"}
    expect(allowed, 'answer "sharper" or "wider" for each sampler')
    expect(
        answer[sde] == "wider",
        "Flow-SDE: its last step adds noise as well, and no later step removes this noise",
    )
    expect(
        answer[ode] == "sharper",
        "ODE: ten steps are not exact: the last one ends at a conditional mean",
    )
    expect(
        answer[cps] == "sharper",
        "CPS: its noise is 0 at s = 0: the sample is a conditional mean, as with the ODE",
    )


@check("Exercise 8")
def check_decisions(answer: dict[str, Any]) -> None:
    """`answer` counts stochastic steps of ten for FlowSDE, CPS and DDIMSDE."""
    expect(isinstance(answer, dict), "give a dict with the keys FlowSDE, CPS and DDIMSDE")
    missing = [key for key in ("FlowSDE", "CPS", "DDIMSDE") if key not in answer]
    expect(not missing, f"no entry for {', '.join(missing)}")
    expect(len(answer) == 3, "there are other keys than FlowSDE, CPS and DDIMSDE")
    counts = {key: number(value, key) for key, value in answer.items()}
    expect(
        counts["FlowSDE"] != 9,
        "FlowSDE: nothing in sigma sqrt(Delta) vanishes at the last step; it takes a wrapper to"
        " make it an ODE step",
    )
    expect(
        counts["FlowSDE"] == 10,
        "FlowSDE: sigma sqrt(Delta) is above 0 at every step (at t = 1 the denominator uses the"
        " next time)",
    )
    expect(counts["CPS"] != 10, "CPS: look at the factor s at the last step")
    expect(counts["CPS"] == 9, "CPS: only a factor s = 0 makes the std 0")
    expect(
        counts["DDIMSDE"] != 9,
        "DDIMSDE: the factor sqrt(1-t) matters too; what is t at the first step?",
    )
    expect(counts["DDIMSDE"] == 8, "DDIMSDE: both ends drop out, and nothing else")


@check("Exercise 9")
def check_random_step(answer: str) -> None:
    """`answer` is where a single random step changes the blob most often."""
    reasons = {
        "b": "in the middle many points are already near a blob: compare with an earlier step",
        "c": "a late point is inside its blob, and the noise of a late step is small: compare the"
        " std with the distance between blobs",
        "d": "a is the same, but sigma_t sqrt(Delta) is not: compute it early and late",
    }
    decide(answer, "a", reasons)


@check("Exercise 10")
def check_sampler(answer: Any) -> None:
    """`answer` is a sampler with enough decisions, exploration, and no grain."""
    expect(
        hasattr(type(answered(answer, "the sampler")), "transition"),
        "give a sampler object, for example CPS(0.1) with brackets",
    )
    sharp, schedule = GaussianMixture.ring(std=0.05), uniform_schedule(10)

    def ends(sampler: Any) -> tuple[Tensor, Tensor]:
        """The distance to the nearest centre and its blob, for 1000 final points."""
        generator = torch.Generator().manual_seed(8)
        x = torch.randn(1000, 2, generator=generator)
        for i in range(10):
            v = sharp.velocity(x, schedule.times[i].expand(1000))
            step = sampler.transition(x, v, schedule, torch.full((1000,), i))
            x = step.mean + step.std[:, None] * torch.randn(x.shape, generator=generator)
        nearest = torch.cdist(x, sharp.means).min(dim=1)
        return nearest.values, nearest.indices

    count = int((transition_stds(answer, schedule) > 0).sum())
    expect(count >= 4, f"only {count} decisions: make more steps stochastic")
    distance, blob = ends(answer)
    median, other = float(distance.median()), float((blob != ends(ODE())[1]).float().mean())
    expect(
        median <= 0.059,
        f"the median distance is {median:.3f}, so grain remains: which step adds noise that no"
        " later step removes, or is the noise level too high?",
    )
    expect(
        other >= 0.6,
        f"only {other:.0%} of the samples end at another blob: use earlier steps or more noise",
    )


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "the score correction grows with sigma_t^2 and cancels the spread",
            "c": "the blobs are those of the data, which noise does not change",
        },
    ),
    (
        "c",
        {
            "a": "the end point of the SDE depends on the later noise too",
            "b": "look at the animation: sixty paths from one noise reach different blobs",
        },
    ),
    (
        "b",
        {
            "a": "variances, not standard deviations, are proportional to the step length",
            "c": "sigma_t is unchanged, but std = sigma_t sqrt(Delta)",
        },
    ),
    (
        "b",
        {
            "a": "every Euler step evaluates the network",
            "c": "the velocity is the output of the network",
        },
    ),
    (
        "a",
        {
            "b": "early steps explore, and the noise of the last step would remain",
            "c": "more noise leaves more grain",
        },
    ),
)
