"""Checks of the lesson on Stepwise-Flow-GRPO."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.credit import gains
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

Answer = Callable[..., Any]


def _values() -> Tensor:
    """2 prompts of different scales, 3 members, 4 decisions; values of both signs rise and fall."""
    steps = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(5))
    return steps.cumsum(-1) * torch.tensor([0.9, 0.3])[:, None, None]


@check("Exercise 1")
def check_values(answer: Answer) -> None:
    """`answer(gained, final)` is the value table [prompt, member, decision+1]."""
    values = _values()
    gained, final = gains(values), values[..., -1]
    got = answered(answer(gained, final), "values_from_gains")
    expect(
        not isinstance(got, Tensor) or got.shape != gained.shape,
        "a column is missing: there is one column more than decisions, and the last one is R",
    )
    forward = torch.cat([torch.zeros_like(values[..., :1]), gained.cumsum(-1)], dim=-1)
    later = values[..., -1:] - values
    mistakes = {
        "the sign is wrong: the later gains are what is missing to R": (values[..., -1:] + later),
        "these are changes since the start, V_k - V_0: the final reward fixes the level": forward,
        "this begins at R: the last column is R, and the first is the start": (
            final[..., None] + forward
        ),
        "this is the reward-to-go R - V_k: subtract it from R": later,
        "all gains so far are subtracted from R; those that follow must be": (
            final[..., None] - forward
        ),
        "each column lacks its own gain only; all later gains are missing to R": torch.cat(
            [final[..., None] - gained, final[..., None]], dim=-1
        ),
        "the columns are in reversed order": values.flip(-1),
    }
    close(
        tensor(got, (2, 3, 5), "the result"),
        values,
        "these values do not have these gains and final rewards",
        mistakes,
    )


FIGURE_1 = {"g at 0.86": 3, "g at 0.71": 5, "into the dip at 0.86": 2}


@check("Exercise 3")
def check_figure_1(answer: dict[str, Any]) -> None:
    """`answer` maps the paper's labels to steps: g_t leaves the state at t; the step before leads
    into it.
    """
    expect(
        isinstance(answer, dict) and set(answer) == set(FIGURE_1),
        f"give a dict with the keys {', '.join(FIGURE_1)}",
    )
    given = {label: number(value, label) for label, value in answer.items()}
    backwards = all(given[label] == 10 - FIGURE_1[label] for label in ("g at 0.86", "g at 0.71"))
    expect(
        not backwards,
        "these count from the image; our steps count from the noise: step 0 leaves t = 1",
    )
    entered = given["g at 0.86"] == 2 or given["g at 0.71"] == 4
    expect(
        not entered,
        "g at t is the gain of the step that leaves the state at t, not of the step that leads"
        " to it",
    )
    late = given["g at 0.86"] == 4 or given["g at 0.71"] == 6
    expect(not late, "one too large: node 0 is t = 1, and step i leaves node i")
    expect(
        given["g at 0.86"] == 3,
        "g at 0.86: find the node with t = 0.86; the step that leaves it has the same number",
    )
    expect(
        given["g at 0.71"] == 5,
        "g at 0.71: find the node with t = 0.71; the step that leaves it has the same number",
    )
    dip = given["into the dip at 0.86"]
    expect(dip != 3, "step 3 leads out of the dip: which step leads into it?")
    expect(dip == 2, "this step does not end at the node of the dip: which one does?")


def _field(x: Tensor, t: Any) -> Tensor:
    """A velocity that depends on both, so that every slip shows."""
    return torch.sin(x) * (1.0 + 2.0 * float(t) ** 2)


def _euler(
    x: Tensor,
    t: float,
    count: int,
    length: float | None = None,
    still: bool = False,
    ahead: int = 0,
) -> Tensor:
    length = t / count if length is None else length
    v = _field(x, t)
    for k in range(count):
        if k > 0:
            v = _field(x, t if still else t - (k + ahead) * t / count)
        x = x - length * v
    return x


@check("Exercise 2")
def check_substeps(answer: Answer) -> None:
    """`answer(velocity, x, t, v, count)` is the estimate after `count` Euler steps."""
    x, t, count = torch.randn(4, 3, generator=torch.Generator().manual_seed(6)), 0.6, 4
    v, calls = _field(x, t), []

    def velocity(state: Tensor, time: Any) -> Tensor:
        one = torch.as_tensor(time).numel() == 1
        expect(one, "`velocity` takes the time as one number here, not one per sample")
        calls.append(float(time))
        return _field(state, time)

    got = tensor(answer(velocity, x, t, v, count), (4, 3), "the estimate")
    mistakes = {
        "the first velocity is used for every substep: this is the Tweedie estimate; "
        "evaluate `velocity` after each substep": (x - t * v),
        "the velocity is always evaluated at the time t: time falls with each substep": _euler(
            x, t, count, still=True
        ),
        "substeps have the length 1 / count: only the time t remains": _euler(
            x, t, count, length=1 / count
        ),
        "the sign is wrong: v points towards noise, so subtract it": _backwards(x, t, count),
        "substeps have the length 1 / count, and the times too: only the time t remains": _from_one(
            x, t, count
        ),
        "the velocity is evaluated one substep ahead of its state": _euler(x, t, count, ahead=1),
        "the velocity is evaluated one substep behind its state": _euler(x, t, count, ahead=-1),
        "one substep is missing: the last one ends at t = 0": _short(x, t, count),
    }
    close(
        got,
        _euler(x, t, count),
        "this is not `count` Euler steps of length t / count from x",
        mistakes,
    )
    expect(
        len(calls) == count - 1,
        f"the estimate is right, but the network was evaluated {len(calls)} times; v at (x, t) is"
        f" given, so {count - 1} suffice",
    )


def _backwards(x: Tensor, t: float, count: int) -> Tensor:
    v = _field(x, t)
    for k in range(count):
        v = _field(x, t - k * t / count) if k > 0 else v
        x = x + t / count * v
    return x


def _from_one(x: Tensor, t: float, count: int) -> Tensor:
    for k in range(count):
        x = x - _field(x, t - k / count) / count
    return x


def _short(x: Tensor, t: float, count: int) -> Tensor:
    for k in range(count - 1):
        x = x - t / count * _field(x, t - k * t / count)
    return x


@check("Exercise 5")
def check_mean_squares(answer: Answer) -> None:
    """`answer(means, stds)` is the mean square of each decision's joint advantage."""
    means, stds = torch.tensor([0.3, -0.1, 0.05, 0.4]), torch.tensor([0.2, 0.5, 0.1, 0.3])
    centred, own = means - means.mean(), stds.square()
    squares = own + centred.square()
    mistakes = {
        "every decision gets 1 only if it is normalised by itself": torch.ones(4),
        "the means have no effect: the joint mean is not the mean of each decision": (
            own / own.mean()
        ),
        "the means of the decisions differ, and their spread is part of the joint standard"
        " deviation": squares / own.mean(),
        "the spread of the means is in the joint standard deviation, but not in A_k": (
            own / squares.mean()
        ),
        "the joint mean is not subtracted": (own + means.square()) / squares.mean(),
        "the joint mean is not subtracted in either place": (
            (own + means.square()) / (own + means.square()).mean()
        ),
        "these are shares, which add up to 1: divide by the mean, not by the sum": (
            squares / squares.sum()
        ),
        "this is the root: the mean square is wanted": (squares / squares.mean()).sqrt(),
        "the squares are not divided by the joint variance": squares,
        "divided by the joint standard deviation: a square needs the variance": (
            squares / squares.mean().sqrt()
        ),
        "standard deviations do not add up: add variances and squared distances": (
            (stds + centred.abs()).square() / squares.mean()
        ),
    }
    close(
        tensor(answer(means, stds), (4,), "the result"),
        squares / squares.mean(),
        "this is not the mean square of the joint z-scores of each decision",
        mistakes,
    )


@check("Exercise 7")
def check_credit_error(answer: Answer) -> None:
    """`answer(lam, remaining)` is the standard deviation of the error of A_k."""
    for lam, remaining in ((0.5, 4), (0.8, 6), (0.0, 3), (1.0, 3), (0.3, 1)):
        powers = [lam**j for j in range(remaining)]
        between = [(1 - lam) * power for power in powers[:-1]]
        variance = 1 + sum(weight**2 for weight in between)
        mistakes = {
            "the finished image's reward has no error": variance + powers[-1] ** 2,
            "the error of V_k is missing": variance - 1,
            "there are only D - k - 1 estimates between V_k and R": (
                variance + ((1 - lam) * powers[-1]) ** 2
            ),
            "neighbouring gains share an estimate, and its errors partly cancel: collect the"
            " factor of each V_j first": sum(2 * power**2 for power in powers),
            "neighbouring gains share an estimate, and its errors partly cancel: collect the"
            " factor of each V_j first; and R has no error": (
                sum(2 * power**2 for power in powers) - powers[-1] ** 2
            ),
            "each V_{k+j} is in two neighbouring gains: subtract their weights": (
                1 + sum(power**2 for power in powers[:-1])
            ),
            "the factors are added up before they are squared: variances of independent errors"
            " add": (1 + sum(between)) ** 2,
            "this is the variance: take its root": variance**2,
        }
        got = number(answer(lam, remaining), "the standard deviation")
        close(
            torch.tensor(got),
            torch.tensor(variance**0.5),
            f"with lambda = {lam} and {remaining} gains this is not the spread of the error",
            {text: torch.tensor(max(0.0, value) ** 0.5) for text, value in mistakes.items()},
        )


@check("Exercise 8")
def check_worth(answer: Answer) -> None:
    """`answer(weak, strong)` is how many batches of the weak rule are as clear as one of the
    strong.
    """
    for weak, strong in ((0.2, 0.65), (0.5, 0.3)):
        worth = strong / (1 - strong) * (1 - weak) / weak
        mistakes = {
            "this is the ratio of the cosines: solve cos = q / (q + 1) for q first": strong / weak,
            "this is the ratio of the squared cosines; solve cos = q / (q + 1) for q": (
                (strong / weak) ** 2
            ),
            "this is the inverse: how many batches of `weak` are worth one of `strong`": 1 / worth,
            "this compares the noise only: divide signal by noise for each rule": (
                (1 - weak) / (1 - strong)
            ),
            "q is a ratio of squared lengths already: no root": worth**0.5,
        }
        got = number(answer(weak, strong), "batches_worth")
        close(got, worth, "this is not the ratio of the two signal-to-noise ratios q", mistakes)


@check("Exercise 4")
def check_largest_gains(answer: str) -> None:
    """`answer` is the predicted dependence of gains on the decision."""
    letter = choice(answer, "abc")
    expect(letter != "a", "accuracy is not size: how much can the last decision change the image?")
    expect(letter == "b", "the middle is too late: which noise selects among most images?")


@check("Exercise 6")
def check_wrong_line(answer: int) -> None:
    """`answer` is the number of the wrong line."""
    line = whole(answer, "the line")
    expect(1 <= line <= 5, "give the number of a line, 1 to 5")
    expect(line != 5, "line 5 is right for a table in the order of time: is it in that order?")
    expect(line == 4, "this line does what it says: follow the order of the columns instead")


CLOSE = 5
"""Substeps whose estimates are close to the whole ODE in the lesson's table."""


@check("Exercise 9")
def check_choice_of_probe(answer: dict[str, Any]) -> None:
    """`answer` has the nodes of five decisions and a probe, within 80 evaluations."""
    expect(
        isinstance(answer, dict) and set(answer) == {"nodes", "probe"},
        "give a dict with nodes and probe",
    )
    nodes, probe = answer["nodes"], answered(answer["probe"], "the probe")
    nodes = [whole(node, "a node") for node in nodes]
    expect(
        len(nodes) == 5 and nodes == sorted(set(nodes)) and nodes[0] >= 0 and nodes[-1] < 39,
        "give five different nodes in increasing order, from 0 to 38",
    )
    each = [39 - node if probe == "completion" else number(probe, "probe") - 1 for node in nodes]
    expect(
        40 + sum(each) <= 80,
        f"{40 + sum(each):.0f} evaluations are too many: the five estimates may cost 40 together",
    )
    expect(
        probe == "completion" or probe == int(probe),
        f"{probe} substeps: give a whole number of them, or 'completion'",
    )
    expect(
        probe == "completion" or probe > 2,
        f"{probe} substeps are too few: their estimates are blurred and far from the whole ODE in"
        " the table above",
    )
    expect(
        probe == "completion" or probe >= CLOSE,
        f"the lesson has not measured {probe} substeps: take a number from its table",
    )
    expect(
        nodes[-1] <= 27,
        f"node {nodes[-1]} of 40 is too late: of ten decisions those after 6 have nearly no gain",
    )


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "the finished image has a column, too",
            "c": "the ODE steps are not decisions and have no columns",
        },
    ),
    (
        "a",
        {
            "b": "all have the same sum, but what is the mean gain of the group?",
            "c": "the gains telescope, whatever they are in between",
        },
    ),
    (
        "b",
        {
            "a": "both its values are estimates, so the common error cancels",
            "c": "most gains are differences of two estimates with the same error",
        },
    ),
    (
        "b",
        {
            "a": "subtracting the mean may change signs in both versions; think of the division",
            "c": "differences between members are what remains, at every decision",
        },
    ),
    (
        "c",
        {
            "a": "this is what we know already: it says nothing about cost",
            "b": "an update of rule B may cost twice as much",
        },
    ),
)
