"""Checks of the lesson on TP-GRPO."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl.credit import balanced, gains, reward_to_go, turning_points
from flowrl_course.checking import (
    Unsolved,
    answered,
    check,
    choice,
    close,
    expect,
    number,
    quiz,
    same,
    tensor,
    whole,
)

Answer = Callable[..., Any]


def _field(x: Tensor, t: Any) -> Tensor:
    """A velocity that depends on both, so that every slip shows."""
    return torch.sin(x) * (1.0 + 2.0 * float(t) ** 2)


def _walk(
    x: Tensor, times: Tensor, first: int, last: int, ahead: int = 0, sign: float = -1.0
) -> Tensor:
    for i in range(first, last):
        x = x + sign * (times[i] - times[i + 1]) * _field(x, times[i + ahead])
    return x


@check("Exercise 1")
def check_complete(answer: Answer) -> None:
    """`answer(velocity, x, node, times)` is the ODE's end point."""
    times = torch.tensor([1.0, 0.85, 0.6, 0.3, 0.1, 0.0])
    x, node, steps = torch.randn(4, 3, generator=torch.Generator().manual_seed(6)), 2, 5

    def velocity(state: Tensor, time: Any) -> Tensor:
        one = torch.as_tensor(time).numel() == 1
        expect(one, "`velocity` takes the time as one number here, not one per sample")
        return _field(state, time)

    got = tensor(answer(velocity, x, node, times), (4, 3), "the end point")
    even = x
    for k in range(steps - node):
        t = float(times[node]) * (1 - k / (steps - node))
        even = even - float(times[node]) / (steps - node) * _field(even, t)
    mistakes = {
        "all steps from t = 1 are taken; the state is at times[node], and only the remaining "
        "steps are left": _walk(x, times, 0, steps),
        "this is the one-step (Tweedie) estimate; take the remaining steps one by one": (
            x - times[node] * _field(x, times[node])
        ),
        "the steps are even; a completion uses the sampler's own grid, times[i] - times[i + 1]": (
            even
        ),
        "one step is missing: the last one ends at t = 0": _walk(x, times, node, steps - 1),
        "the velocity is taken at times[i + 1]; take it where the step starts": _walk(
            x, times, node, steps, ahead=1
        ),
        "the sign is wrong: v points towards noise, so subtract it": _walk(
            x, times, node, steps, sign=1.0
        ),
        "the first step is missing: begin at node itself": _walk(x, times, node + 1, steps),
    }
    close(
        got,
        _walk(x, times, node, steps),
        "this is not the Euler path over times[node:], from x",
        mistakes,
    )


PLAIN = {"a": [2], "b": [2], "c": [0, 2]}
CONSISTENT = {"a": [2], "b": [2], "c": [0]}


def _lists(answer: Any, what: str) -> dict[str, list[int]]:
    expect(
        isinstance(answered(answer, what), Mapping),
        f"{what} must be a dictionary with the keys a, b, c",
    )
    expect(set(answer) == set(PLAIN), f"{what} must have the keys a, b, c")
    for name, steps in answer.items():
        expect(
            steps is not ...,
            f"{what}[{name!r}] is not answered yet: a list of decisions, [] for none",
        )
        expect(
            isinstance(steps, list | tuple | set),
            f"{what}[{name!r}] must be a list of decisions, such as [2]",
        )
    return {
        name: sorted(whole(step, "a decision") for step in steps) for name, steps in answer.items()
    }


@check("Exercise 2")
def check_by_hand(plain: Any, consistent: Any) -> None:
    """The turning points of the three example trajectories under both rules."""
    first, second = _lists(plain, "plain"), _lists(consistent, "consistent")
    expect(
        first != {name: [step + 1 for step in steps] for name, steps in PLAIN.items()},
        "each is one too large: decision k leads from column k to column k + 1; give the number of"
        " the first",
    )
    expect(
        bool(first["b"]) or not first["a"],
        "b ends below its start, so its trend R - V_0 is negative: turning points of b go down",
    )
    expect(
        not (1 in first["a"] and 1 in first["b"] and 2 not in first["a"]),
        "a and b turn at column 2: the decision that turned them starts there, and does not lead"
        " to it",
    )
    expect(
        not (3 in first["a"] or 3 in first["b"]),
        "only the first decision in the new direction turns; the one before decision 3 of a and b"
        " already went with the trend",
    )
    expect(
        not (1 in first["c"] or 3 in first["c"]),
        "decisions 1 and 3 of c go down, but c ends higher than it began: a turning point goes with"
        " the trend",
    )
    expect(
        0 in first["c"],
        "a decision of c is missing: the first decision counts when it has the sign of the trend",
    )
    expect(
        0 not in first["a"] and 0 not in first["b"],
        "decision 0 of a and b goes against the trend; compare with R - V_0",
    )
    expect(
        2 in first["c"],
        "a decision of c is missing under the plain rule: which one goes with the trend after one"
        " against it?",
    )
    wrong = ", ".join(name for name in PLAIN if first[name] != PLAIN[name])
    expect(first == PLAIN, f"plain: look again at g_{{k-1}}, g_k and R - V_0 of {wrong}")
    expect(
        2 not in second["c"],
        "decision 2 of c is not consistent: after it the reward falls from 0.65 to 0.62, against"
        " the decision's own direction",
    )
    expect(
        0 in second["c"],
        "c has a consistent turning point: compare each plain one with the change after it",
    )
    expect(
        second == CONSISTENT,
        "consistent: for each plain turning point compare g_k with R - V_{k+1}",
    )


def _table() -> Tensor:
    """Many short trajectories with repeated values of both signs, so that zero differences
    occur.
    """
    drawn = torch.randint(0, 6, (2, 60, 6), generator=torch.Generator().manual_seed(8))
    return (drawn.float() - 2) / 5


def _bools(value: Any, shape: tuple[int, ...], what: str) -> Tensor:
    expect(
        isinstance(answered(value, what), Tensor), f"{what} must return a torch.Tensor of booleans"
    )
    expect(value.dtype == torch.bool, f"{what} returned dtype {value.dtype}; booleans are wanted")
    if tuple(value.shape) == (*shape[:-1], shape[-1] - 1):
        expect(False, "there is one entry too few on the last axis: fill decision 0 with False")
    return tensor(value, shape, "the result")


def _signs(values: Tensor) -> tuple[Tensor, Tensor]:
    return gains(values).sign(), (values[..., -1:] - values[..., :1]).sign()


def _later(pairs: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(pairs[..., :1]), pairs], dim=-1)


@check("Exercise 3")
def check_plain(answer: Answer) -> None:
    """`answer(values)` marks the plain turning points of decisions 1 and later."""
    values = _table()
    step, trend = _signs(values)
    along = step * trend
    before, here = along[..., :-1], along[..., 1:]
    got = _bools(answer(values), (2, 60, 5), "plain_turns")
    turns = (before < 0) & (here > 0)
    mistakes = {
        "every change of direction is marked; a turning point turns towards the trend R - V_0": (
            _later(step[..., :-1] * step[..., 1:] < 0)
        ),
        "only turns upwards are marked; where the trend is down, turning points go down": _later(
            (step[..., :-1] < 0) & (step[..., 1:] > 0)
        ),
        "the mark is one too early: it belongs to the decision that goes with the trend, not "
        "to the one before it": torch.cat([turns, torch.zeros_like(turns[..., :1])], dim=-1),
        "zero differences are taken for a decision against the trend; they never qualify: "
        "use < 0, not <= 0": _later((before <= 0) & (here > 0)),
        "zero differences are taken for a decision with the trend; they never qualify: use > "
        "0, not >= 0": _later((before < 0) & (here >= 0)),
        "zero differences qualify here; they must not: use strict inequalities": _later(
            (before <= 0) & (here >= 0)
        ),
        "these are turns away from the trend; the decision before went against it, this one "
        "goes with it": _later((before > 0) & (here < 0)),
        "decision 0 is marked; leave it False here, the next exercise adds it": turning_points(
            values, consistent=False
        ),
    }
    wanted = turning_points(values, consistent=False, first_step=False)
    close(
        got,
        wanted,
        "compare the signs of g_{k-1}, g_k and R - V_0 decision by decision",
        mistakes,
    )


@check("Exercise 4")
def check_consistent(answer: Answer) -> None:
    """`answer(values)` marks the consistent turning points, the first decision included."""
    values = _table()
    got = _bools(answer(values), (2, 60, 5), "consistent_turns")
    step, trend = _signs(values)
    plain = turning_points(values, consistent=False, first_step=False)
    after = (values[..., -1:] - values[..., 1:]).sign()
    agrees = step * after > 0

    def first(turns: Tensor, mark: Tensor) -> Tensor:
        return torch.cat([mark[..., :1], turns[..., 1:]], dim=-1)

    local = step * reward_to_go(values).sign() > 0
    mistakes = {
        "the first decision is missing: it has no decision before it, but may count": (
            plain & agrees
        ),
        "the first decision is compared with the trend; here what comes after it decides": first(
            plain & agrees, step * trend > 0
        ),
        "R - V_k contains the decision's own gain: take what comes after the decision": (
            first(plain & local, local)
        ),
        "R - V_k contains the decision's own gain: take what comes after it (the first decision "
        "is right)": first(plain & local, agrees),
        "consistency is not required: these are the plain turning points": turning_points(
            values, consistent=False
        ),
        "only consistency is required; the plain rule must hold too": agrees,
        "zero differences qualify here; use > 0, not >= 0": first(
            plain & (step * after >= 0), step * after >= 0
        ),
    }
    wanted = turning_points(values, consistent=True)
    close(
        got,
        wanted,
        "a consistent turning point is a plain one with a second condition: compare decision 0 and"
        " a later one with the definition",
        mistakes,
    )


def _ranked(turns: Tensor, size: Tensor, plus: int, minus: int, largest: bool = True) -> Tensor:
    kept = torch.zeros_like(turns)
    for sign, count in ((1.0, plus), (-1.0, minus)):
        value = torch.where(turns & (size * sign > 0), size.abs(), torch.nan).flatten()
        order = value.nan_to_num(nan=-1.0 if largest else 9.0).argsort(descending=largest)[:count]
        kept.view(-1)[order] = True
    return kept & turns


PAPER_LABELS = {5: 0.35, 2: 0.45}


@check("Exercise 6")
def check_paper_labels(answer: dict[int, float]) -> None:
    """`answer` maps the paper's t of the consistent turning points to their aggregated values."""
    expect(isinstance(answer, dict), "give a dict such as {4: 0.10}")
    expect(... not in answer and ... not in answer.values(), "not answered yet: replace the dots")
    given = {whole(t, "t"): number(value, f"the reward at t = {t}") for t, value in answer.items()}
    expect(
        set(given) != {0, 3},
        "these are our numbers of decisions; the paper's t is T - k, with T = 5",
    )
    expect(set(given) != {4, 1}, "one too small: the first decision has t = T = 5, so t = T - k")
    expect(
        1 not in given,
        "the last decision goes up after one up, so nothing turns there; and none follows it",
    )
    expect(
        3 not in given, "t = 3 goes down, against the trend; a turning point goes with the trend"
    )
    expect(
        4 not in given, "t = 4 goes down, against the trend; a turning point goes with the trend"
    )
    expect(5 in given, "the first decision is missing: look at Remark 5.2")
    expect(2 in given, "a decision that goes up after one down is missing")
    expect(
        set(given) == set(PAPER_LABELS),
        f"t runs from 5 to 1, and only two qualify: not all of {sorted(given)} are among them",
    )
    for amounts, mistake in (
        (
            (0.10, 0.15),
            (
                "these are the increments r_t; a turning point has R - V_k, the change from before"
                " the decision to the end"
            ),
        ),
        (
            (0.25, 0.30),
            (
                "these are the changes after the decision, R - V_{k+1}; the aggregated reward"
                " includes the decision itself"
            ),
        ),
        (
            (0.35, 0.35),
            (
                "this is the trend for both; the aggregated reward begins at the state before the"
                " decision"
            ),
        ),
        ((-0.35, -0.45), "the signs are wrong: R - V_k is positive if the reward rises"),
        (
            (0.40, 0.30),
            "these are the rewards before the decisions; subtract them from the last one",
        ),
    ):
        expect(not (same(given[5], amounts[0], 1e-3) and same(given[2], amounts[1], 1e-3)), mistake)
    for t, value in PAPER_LABELS.items():
        expect(
            same(given[t], value, 1e-3),
            f"the aggregated reward at t = {t} is R - V_k with k = {5 - t}",
        )


@check("Exercise 7")
def check_balance(answer: Answer) -> None:
    """`answer(turns, size)` says which turning points remain."""
    generator = torch.Generator().manual_seed(13)
    size = torch.rand(2, 3, 4, generator=generator) - 0.35
    turns = torch.rand(2, 3, 4, generator=generator) < 0.7
    plus, minus = int((turns & (size > 0)).sum()), int((turns & (size < 0)).sum())
    k = min(plus, minus)
    got = _bools(answer(turns, size), (2, 3, 4), "balance")
    scope = torch.stack(
        [balanced(size_to_values(s)[None], t[None])[0] for t, s in zip(turns, size, strict=True)]
    )
    total = torch.where(turns, size.abs(), -1.0).flatten()
    top = torch.zeros_like(turns)
    top.view(-1)[total.argsort(descending=True)[: 2 * k]] = True
    wanted = _ranked(turns, size, k, k)
    mistakes = {
        "nothing is dropped; of the more frequent sign only the min(n+, n-) largest remain": turns,
        "the smallest are kept; keep those of the largest |R - V_k|": _ranked(
            turns, size, k, k, largest=False
        ),
        "the largest of both signs together are kept; keep min(n+, n-) of each sign": top & turns,
        "each prompt is balanced by itself; here the whole table is one batch": scope,
        "entries that are no turning points are kept: combine with `turns`": _ranked(
            torch.ones_like(turns), size, k, k
        ),
    }
    close(got, wanted, "keep the min(n+, n-) largest of each sign", mistakes)
    one_sign = (
        "if all turning points have the same sign, all of them remain; here some or all are dropped"
    )
    try:
        single = answer(turns.clone(), size.abs())
    except (RuntimeError, ValueError, IndexError) as error:
        raise Unsolved(one_sign, f"if one sign does not occur: {error}") from error
    close(_bools(single, (2, 3, 4), "balance"), turns, one_sign)
    mirrored = _bools(answer(turns.clone(), -size), (2, 3, 4), "balance")
    swapped = (
        "right if positive turns are more frequent, but not if negative ones are: then the most"
        " negative are the largest"
    )
    close(mirrored, wanted, swapped)


def size_to_values(size: Tensor) -> Tensor:
    """Values [member, decision+1] with R - V_k = `size` [member, decision] and R = 0."""
    return torch.cat([-size, torch.zeros_like(size[..., :1])], dim=-1)


@check("Exercise 8")
def check_null(answer: Answer) -> None:
    """`answer(turning, columns)` is the mean count of turning points of pure noise."""
    seen: list[tuple[int, ...]] = []

    def plain(values: Tensor) -> Tensor:
        seen.append(tuple(values.shape))
        return turning_points(values, consistent=False)

    got = number(answer(plain, 10), "noise_count")
    expect(bool(seen), "`turning` was not called")
    expect(seen[0][-1] == 10, f"`turning` was given {seen[0][-1]} columns; use `columns` = 10")
    expect(len(seen[0]) == 3, "`turning` needs a table [prompt, member, decision+1]: three axes")
    trajectories = sum(shape[0] * shape[1] for shape in seen)
    expect(
        abs(got - 3.33 / 9) > 0.02,
        "this is the share of decisions that turn; sum over the decisions of a trajectory, then"
        " take the mean",
    )
    expect(
        abs(got - 2.61) > 0.03,
        "this is the count of a random walk; here the values of different columns are independent",
    )
    expect(got < 20, "this is a total over trajectories; take the mean per trajectory")
    if abs(got - 3.33) < 0.5 and trajectories < 5000:
        expect(
            False, f"{trajectories:,} trajectories are too few for two digits; take 5,000 or more"
        )
    expect(
        abs(got - 3.33) < 0.03,
        "the plain rule has 3.33 turning points per trajectory in noise of 10 columns; you get"
        f" {got:.2f}",
    )
    strict = number(
        answer(lambda values: turning_points(values, consistent=True), 10), "noise_count"
    )
    expect(
        abs(strict - 1.60) < 0.03,
        f"the consistent rule has 1.60; you get {strict:.2f}: is `turning` used?",
    )
    seen.clear()
    answer(plain, 6)
    expect(
        seen and seen[0][-1] == 6,
        "right for 10 columns, but with `columns` = 6 the trajectories still have another length:"
        " use `columns`",
    )


@check("Exercise 5")
def check_cause(answer: str) -> None:
    """`answer` is why no decision turns."""
    letter = choice(answer, "abcd")
    expect(letter != "a", "random signs have turning points: about one and a half per trajectory")
    expect(letter != "c", "trajectories do lose reward: look at the fraction of losses")
    expect(letter == "b", "balancing is not applied here: the function only marks turning points")


@check("Exercise 9")
def check_against_chance(answer: str) -> None:
    """`answer` is the predicted comparison with the null models."""
    letter = choice(answer, "abc")
    expect(letter != "a", "the method credits whatever the definition marks: noise is marked, too")
    expect(letter == "c", "noise and a walk satisfy the definition, too: do they do so less often?")


@check("Exercise 10")
def check_random_marks(answer: Answer) -> None:
    """`answer(turns, generator)` has as many marks per trajectory, at random decisions, none at the
    last.
    """
    turns = torch.rand(40, 50, 6, generator=torch.Generator().manual_seed(3)) < torch.tensor(
        [0.8, 0.5, 0.3, 0.2, 0.1, 0.0]
    )
    first, second, again = (
        _bools(answer(turns, torch.Generator().manual_seed(seed)), turns.shape, "the marks")
        for seed in (1, 2, 1)
    )
    expect(torch.equal(first, again), "the same generator gives other marks: pass `generator`")
    expect(
        int((first.sum() - turns.sum()).abs()) < 300,
        "there are more or fewer marks than turning points: keep their number",
    )
    expect(
        torch.equal(first.sum(-1), turns.sum(-1)),
        "the total is right, but not that of every trajectory: permute within the last axis",
    )
    expect(not torch.equal(first, second), "the marks are not random: use `generator`")
    rates = first.float().mean((0, 1))
    expect(
        rates[-1] == 0,
        "the last decision is marked, where a mark changes nothing: R - V_k is its gain there;"
        " permute the other decisions",
    )
    rates = rates[:-1]
    expect(
        float(rates.max() - rates.min()) < 0.06,
        "some decisions are marked more often: permute every trajectory by itself",
    )


check_quiz = quiz(
    __name__,
    (
        "a",
        {
            "b": "R also depends on the noise of decision k and of those after it",
            "c": "the gain compares with the next completion, which depends on the noise",
        },
    ),
    (
        "b",
        {
            "a": "a turn needs a decision against the trend before it",
            "c": "the first decision has a condition of its own",
        },
    ),
    (
        "a",
        {
            "b": "if the trend is down, a turning point goes down, and so does R - V_k",
            "c": "it starts with the decision's own gain",
        },
    ),
    (
        "c",
        {
            "a": "the credit may still be good; only this argument for it is refuted",
            "b": "equal counts say nothing about positions",
        },
    ),
    (
        "b",
        {
            "a": "TP-GRPO differs from it in the credit of single decisions as well",
            "c": "this tests the effect of the KL",
        },
    ),
)
