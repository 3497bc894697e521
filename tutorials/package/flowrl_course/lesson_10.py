"""Checks of the lesson Test your own rule: state values, learning curves, verdicts, power,
calibrated estimates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.bench.statistics import detectable
from flowrl.core.experience import needs_of
from flowrl_course import rule_checks as rules
from flowrl_course.checking import (
    answered,
    check,
    choice,
    close,
    expect,
    number,
    quiz,
    tensor,
    whole,
)
from flowrl_course.rule_checks import centred, centred_by_step

Answer = Callable[..., Any]

_NOISE = (0.8, 0.9, 0.4, 0.7)
_GROWTH = (1.1, 0.6, 1.4, 0.8)


def _state_values(latents: Tensor, steps: list[int], noise: bool = True) -> Tensor:
    """The exact values in `check_state_value` if these steps are made."""
    mean, variance = latents.flatten(1), 0.0
    for step in steps:
        mean, variance = _GROWTH[step] * mean, _GROWTH[step] ** 2 * variance + _NOISE[step] ** 2
    return mean[:, 0].square() + variance * noise - 2 * mean[:, 1]


@check("Exercise 1")
def check_state_value(answer: Answer) -> None:
    """`answer(latents, node, steps, go, reward, count)` is the mean reward of stochastic
    continuations.
    """
    generator = torch.Generator().manual_seed(1)
    rows: list[int] = []
    visited: list[int] = []

    def go(latents: Tensor, step: int) -> Tensor:
        expect(
            0 <= int(step) < 4, f"go was called with step {int(step)}; with 4 steps they are 0 to 3"
        )
        rows.append(len(latents))
        visited.append(int(step))
        noise = torch.randn(latents.shape, generator=generator)
        return _GROWTH[int(step)] * latents + _NOISE[int(step)] * noise

    def reward(latents: Tensor) -> Tensor:
        return latents.flatten(1)[:, 0].square() - 2 * latents.flatten(1)[:, 1]

    latents = torch.tensor([[2.0, 0.5], [0.0, 1.5], [-1.0, -0.7]])[..., None]
    node, count = 1, 20_000
    got = answered(answer(latents, node, 4, go, reward, count), "state_value")
    expect(bool(rows), "go was never called: from node j the steps j, j + 1, ..., T - 1 follow")
    expect(
        sum(rows) >= 2 * len(latents) * count,
        "there is only one continuation (or few) of each state: make `count` of them",
    )
    got = tensor(got, (3,), "the values")
    wanted = _state_values(latents, [1, 2, 3])
    mistakes = {
        "the first step is missing: step j leads from node j to node j + 1, so start with it": (
            _state_values(latents, [2, 3])
        ),
        "the last step, T - 1, is missing: range(node, steps)": _state_values(latents, [1, 2]),
        "all steps from 0 are made: the state is already at `node`": (
            _state_values(latents, [0, 1, 2, 3])
        ),
        "the steps are made in reverse: begin with step `node`": _state_values(latents, [3, 2, 1]),
        "the reward is that of the mean state: average the rewards": (
            _state_values(latents, [1, 2, 3], noise=False)
        ),
        "the continuations of different states are mixed: repeat_interleave keeps those of "
        "one state together": wanted.mean().expand(3),
    }
    made = sorted(set(visited))
    steps = f"from node 1 of 4 steps the steps 1, 2, 3 follow: you made {', '.join(map(str, made))}"
    values = "the values are not the mean rewards of the continuations"
    close(got, wanted, values if made == [1, 2, 3] else steps, mistakes, 0.02)
    expect(made == [1, 2, 3], steps)


@check("Exercise 2")
def check_course(answer: str) -> None:
    """`answer` is the predicted course of the held-out reward."""
    letter = choice(answer, "abc")
    expect(
        letter != "c", "the gradient has the right direction at the start: what follows at first?"
    )
    expect(
        letter == "b",
        "this assumes that the diagnostics hold for every policy: ask what training does to the"
        " velocity, from which the values are computed",
    )


def _area(cost: Tensor, reward: Tensor, budget: float, cut: bool = True, end: bool = True) -> float:
    """The area below the curve up to the budget; `cut`: not beyond it, `end`: with the piece after
    the last evaluation.
    """
    if not cut:
        return float(torch.trapezoid(reward, cost))
    i = int((cost < budget).sum())
    part = (budget - cost[i - 1]) / (cost[i] - cost[i - 1])
    last = reward[i - 1] + part * (reward[i] - reward[i - 1])
    x = torch.cat([cost[:i], torch.tensor([budget], dtype=cost.dtype)])
    y = torch.cat([reward[:i], last[None]])
    return float(torch.trapezoid(y, x) if end else torch.trapezoid(y[:-1], x[:-1]))


@check("Exercise 3")
def check_mean_reward(answer: Answer) -> None:
    """`answer(cost, reward, budget)` is the mean of the piecewise linear curve from 0 to the
    budget.
    """
    cost = torch.tensor([0.0, 2.0, 3.0, 8.0, 12.0], dtype=torch.float64)
    reward = torch.tensor([-0.4, 0.3, 0.7, 0.9, 0.6], dtype=torch.float64)
    for budget in (10.0, 5.0, 8.0, 12.0, 1.0):
        got = number(answer(cost, reward, budget), "the mean reward")
        wanted = _area(cost, reward, budget)
        inside = cost <= budget
        steps = reward[inside]
        mistakes = {
            "this is the area: divide it by the budget": wanted,
            "this is the mean of the evaluated rewards: the evaluations are not evenly spaced": (
                float(steps.mean())
            ),
            "the curve beyond the budget is included: stop at the budget": (
                _area(cost, reward, budget, cut=False) / budget
            ),
            "the whole area is divided by the last cost, whatever the budget is": (
                _area(cost, reward, budget, cut=False) / 12.0
            ),
            "the piece from the last evaluation to the budget is missing": (
                _area(cost, reward, budget, end=False) / budget
            ),
            "these are rectangles; the curve is linear between evaluations: torch.trapezoid": (
                float((reward[:-1] * (cost[1:].clamp(max=budget) - cost[:-1]).clamp(min=0)).sum())
                / budget
            ),
            "this is the reward at the budget, not the mean up to it": _end(cost, reward, budget),
        }
        close(
            got,
            wanted / budget,
            f"{got:.4g} instead of {wanted / budget:.4g} for a budget of {budget:g}",
            mistakes,
            1e-6,
        )


def _end(cost: Tensor, reward: Tensor, budget: float) -> float:
    i = int((cost < budget).sum())
    part = (budget - cost[i - 1]) / (cost[i] - cost[i - 1])
    return float(reward[i - 1] + part * (reward[i] - reward[i - 1]))


@dataclass(frozen=True)
class _Found:
    """A mean difference with its interval and an uncorrected p-value."""

    value: float
    low: float
    high: float
    p: float = 0.0


WORDS = ("better", "worse", "no difference that matters", "undecided")
"""The verdicts of exercise 4."""

_ALIKE_FIRST = (
    "the p-value is read first: a difference whose whole interval lies within ±0.02 does not"
    " matter, even if it excludes 0"
)
_LEVEL = "the corrected p-value decides at 0.05: below it the sign of the mean counts"
_VERDICTS = (
    (
        _Found(0.08, 0.05, 0.11),
        0.001,
        "better",
        "a clear positive difference is better: value > 0 and adjusted < 0.05",
    ),
    (
        _Found(-0.08, -0.11, -0.05),
        0.001,
        "worse",
        "a clear negative difference is worse: the sign of the mean decides",
    ),
    (_Found(0.01, 0.004, 0.016), 0.001, "no difference that matters", _ALIKE_FIRST),
    (_Found(-0.01, -0.016, -0.004), 0.001, "no difference that matters", _ALIKE_FIRST),
    (
        _Found(0.01, -0.30, 0.32),
        0.9,
        "undecided",
        (
            "only the mean (or the p-value) decides here: the whole interval must lie within ±0.02,"
            " and this one is wide"
        ),
    ),
    (
        _Found(0.03, 0.001, 0.059),
        0.13,
        "undecided",
        "the interval excludes 0, but the corrected p-value is not below 0.05: undecided",
    ),
    (
        _Found(0.01, -0.015, 0.035),
        0.4,
        "undecided",
        "one end of the interval is beyond 0.02: both ends must lie within ±0.02",
    ),
    (
        _Found(-0.01, -0.035, 0.015),
        0.4,
        "undecided",
        "one end of the interval is beyond -0.02: both ends must lie within ±0.02",
    ),
    (
        _Found(0.015, 0.005, 0.025),
        0.01,
        "better",
        "one end of the interval is beyond 0.02 and the p-value is small: better",
    ),
    (_Found(0.05, 0.002, 0.098), 0.048, "better", _LEVEL),
    (_Found(-0.05, -0.098, -0.002), 0.048, "worse", _LEVEL),
    (_Found(-0.05, -0.1, 0.0), 0.052, "undecided", _LEVEL),
)


@check("Exercise 4")
def check_verdict(answer: Answer) -> None:
    """`answer(inference, adjusted, smallest)` is one of `WORDS`."""
    for interval, adjusted, wanted, mistake in _VERDICTS:
        got = answered(answer(interval, adjusted), "verdict")
        expect(
            got in WORDS, f"{got!r} is not one of the four strings {', '.join(map(repr, WORDS))}"
        )
        expect(
            got == wanted,
            f"{got!r} for [{interval.low:g}, {interval.high:g}] with p = {adjusted:g}: {mistake}",
        )
    wide = answer(_Found(0.03, 0.01, 0.05), 0.001, 0.06)
    expect(
        wide == WORDS[2],
        "with smallest=0.06 the interval [0.01, 0.05] does not matter: is the 0.02 written into the"
        " function?",
    )


@check("Exercise 5")
def check_unfair_line(answer: int) -> None:
    """`answer` is the number of the unfair line."""
    line = whole(answer, "the line")
    expect(1 <= line <= 6, "give the number of a line, 1 to 6")
    expect(
        line != 1,
        "line 1 searches on seeds that no result uses: look at how its grids are used",
    )
    expect(
        line != 3,
        "line 3 only uses what was chosen before: look at which rule that choice suits",
    )
    expect(line != 4, "a budget that all runs reached is right: otherwise curves end too early")
    expect(line == 2, "this line treats both rules alike: check the others against the table")


def _check_draws(values: Tensor, scale: float) -> None:
    """Whether [experiment, seed] are independent normal draws with this standard deviation."""
    means = values.mean(0)
    expect(
        float(means.max() - means.min()) < 0.6 * scale,
        "the differences depend on the place of the seed, as if they were sorted: leave them as"
        " they are drawn",
    )
    far = float(((values - values.mean()).abs() > 2 * scale).float().mean())
    expect(
        0.02 < far < 0.09, "the noise is not normal: torch.randn draws it, torch.rand is uniform"
    )


@check("Exercise 6")
def check_rate(answer: Answer) -> None:
    """`answer(judge, spread, seeds, effect, draws, generator)` is the fraction of simulated
    experiments judged "better".
    """
    drawn: list[Tensor] = []
    counts = zip(WORDS, (5, 6, 2, 7), strict=True)
    verdicts = [word for word, count in counts for _ in range(count)]

    def judge(differences: Tensor) -> str:
        drawn.append(
            tensor(differences, (7,), "the differences of an experiment of 7 seeds").clone()
        )
        return verdicts[len(drawn) % 20]

    got = answered(
        answer(judge, 0.5, 7, 2.0, 400, torch.Generator().manual_seed(1)), "rate_of_better"
    )
    expect(
        len(drawn) == 400,
        f"judge was called {len(drawn)} times for 400 draws: judge every experiment once",
    )
    values = torch.stack(drawn)
    expect(
        float((values - values.flatten()[0]).abs().max()) > 0,
        "the differences have no noise: spread * torch.randn(...)",
    )
    expect(
        bool((values[0] != values[1]).any()),
        "all experiments have the same noise: draw inside the loop",
    )
    expect(
        bool((values != values[:, :1]).any()),
        "all seeds of an experiment have the same difference: draw one number per seed",
    )
    scale, centre = float(values.std()), float(values.mean())
    expect(
        abs(scale - 0.5 / 7**0.5) > 0.03,
        "this is the spread of a mean of 7 seeds: each difference has the whole spread",
    )
    expect(
        abs(scale - 0.25) > 0.05,
        "the spread is squared: multiply standard normal noise by the spread",
    )
    expect(
        abs(scale - 0.5) < 0.05,
        f"the differences have a standard deviation of {scale:.2f} instead of 0.5: spread * randn",
    )
    expect(abs(centre) > 0.1, "the effect is missing: the differences have the mean `effect`")
    expect(
        abs(centre - 2.0) < 0.1,
        f"the differences have a mean of {centre:.2f} instead of 2: add the effect, unscaled",
    )
    _check_draws(values, scale)
    for seed, equal, message in (
        (1, True, "the same generator gives other experiments: draw with `generator`"),
        (2, False, "another generator gives the same experiments: draw with `generator`"),
    ):
        drawn.clear()
        answer(judge, 0.5, 7, 2.0, 400, torch.Generator().manual_seed(seed))
        expect(torch.equal(torch.stack(drawn), values) == equal, message)
    value = number(got, "the rate")
    wrong = {
        "this is a number of experiments: divide it by `draws`": 100.0,
        "this is the fraction that is not better": 0.75,
        'this counts "worse" too: count "better" alone': 0.55,
    }
    close(
        value,
        0.25,
        f"{value:.3g} instead of 0.25, the fraction of experiments judged better",
        wrong,
        1e-6,
    )


@check("Exercise 7")
def check_plan(answer: dict[str, int]) -> None:
    """`answer` has the numbers of clip ranges, seeds of the search, and seeds of the result."""
    expect(
        isinstance(answer, dict) and set(answer) == {"clips", "search_seeds", "seeds"},
        "keep the three names: clips, search_seeds, seeds",
    )
    clips, search, seeds = (
        whole(answer[name], name) for name in ("clips", "search_seeds", "seeds")
    )
    expect(seeds > 1, "one difference has no interval: choose two seeds or more")
    expect(
        round(detectable(0.05, seeds), 3) <= 0.035,  # 18 seeds: 0.03504
        f"{seeds} seeds find {detectable(0.05, seeds):.3f} in 80%: use more seeds in the result",
    )
    expect(clips >= 3, "a grid of one or two cannot show a maximum inside: try three or more")
    expect(search >= 2, "one seed per clip range chooses by chance: use two or more")
    runs = 2 * (clips * search + seeds)
    expect(runs <= 64, f"the plan needs {runs} runs of 64: both rules need a search and a result")


def calibration_slopes(
    table: Tensor, over: tuple[int, ...] = (0, 1), inverse: bool = False
) -> Tensor:
    """The slope of the final reward on the value of each column, both centred within their group:
    [1, 1, decision+1].
    """
    values = centred(table)
    final = values[..., -1:]
    below = final.square().expand_as(values) if inverse else values.square()
    return (values * final).mean(over, keepdim=True) / (below.mean(over, keepdim=True) + 1e-8)


def _calibrated(table: Tensor, slopes: Tensor) -> Tensor:
    return centred_by_step((slopes * centred(table)).diff(dim=-1))


@check("Exercise 8")
def check_calibrated(rule: Any) -> None:
    """`rule` gives the gains of slope_k (V_k - group mean), slope_k regressed on R over the whole
    table.
    """
    made = rules.make_rule(rule)
    shared = (
        "a state that all members share (noise) has no spread: add 1e-8 to the denominator of the"
        " slope"
    )
    level = (
        "the slope measures easy and hard prompts: subtract the group's mean from the values first"
    )
    hints = {
        "gives_a_silent_group_zero": shared,
        "survives_extremes": shared,
        "ignores_a_constant": level,
        **rules.MASKED,
    }
    rules.check_contract(made, hints, rounding=True)
    rules.check_one_step_probe(made)
    shared = bool(needs_of(made).shared_noise)
    expect(shared, "the members start from different noise: keep Needs(shared_noise=True)")

    def late(table: Tensor, shift: int = 0) -> Tensor:
        slopes = calibration_slopes(table)
        return centred_by_step(
            slopes[..., shift : slopes.shape[-1] - 1 + shift] * centred(table).diff(dim=-1)
        )

    after = (
        "the slope multiplies the gain V_{k+1} - V_k: calibrate both values first, then take their"
        " difference"
    )
    mistakes = {
        "the slope is inverted: it predicts V_k from R. Divide by the spread of V_k": (
            lambda table: _calibrated(table, calibration_slopes(table, inverse=True))
        ),
        "every group has its own slope, which is noisy with few members: pool over prompts "
        "and members": lambda table: _calibrated(table, calibration_slopes(table, over=(1,))),
        after: late,
        f"{after} ": lambda table: late(table, 1),
        "the slopes are missing: these are plain gains": lambda table: _calibrated(
            table, torch.ones(table.shape[-1])
        ),
    }
    otherwise = "the advantages are not those of the calibrated values slope_k (V_k - mean)"
    rules.check_advantages(
        made, lambda table: _calibrated(table, calibration_slopes(table)), otherwise, mistakes
    )
    table = rules.value_tables(1)[0]
    table[..., 2] *= -1
    close(
        rules.advantages_of(made, table),
        _calibrated(table, calibration_slopes(table)),
        "a value that falls where the reward rises has a negative slope: keep its sign",
        tolerance=2e-3,
    )


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "the errors of 10 Euler steps are small here; compare the standard deviations",
            "c": "it uses the velocity of the rollout, which has never been trained on rewards",
        },
    ),
    (
        "a",
        {
            "b": "a cosine of 0.98 means that the direction is right on average",
            "c": "neither number measures the length of the gradient",
        },
    ),
    (
        "b",
        {
            "a": "its signal-to-noise ratio was the highest; noise averages out over iterations",
            "c": "a small clip range slows training; it does not make a reward fall",
        },
    ),
    (
        "c",
        {
            "a": "a large p-value is not evidence of equality; look at both ends of the interval",
            "b": "the interval contains 0 and negative differences",
        },
    ),
    (
        "a",
        {
            "b": "every seed has its own noise; the search changes something else",
            "c": "tests may be correlated; the question is a bias of the means",
        },
    ),
)
