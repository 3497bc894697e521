"""Checks of the lesson Side by side: intervals, permutation test, cost to a target, tuned
comparison, claims.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl_course.checking import (
    answered,
    check,
    choice,
    close,
    expect,
    number,
    quiz,
    tensor,
)

Answer = Callable[..., Any]

_QUANTILES = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
)
T_QUANTILE = dict(enumerate(_QUANTILES, 1))
"""The 97.5% quantile of Student's t by degrees of freedom, 1 to 16."""


def _seeds(spread: float, half: float, lost: int = 1, power: float = 0.5, first: int = 2) -> int:
    """The smallest number of seeds from `first` on, with quantiles for n - `lost` degrees of
    freedom, or 0.
    """
    for n in range(first, 18):
        if T_QUANTILE[min(max(n - lost, 1), 16)] * spread / n**power <= half:
            return n
    return 0


CASES = ((0.1, 0.1), (0.05, 0.04), (2.0, 3.0), (0.3, 0.16), (0.3, 0.1), (1.0, 0.8))
"""Spread and half width."""


@check("Exercise 1")
def check_seeds(answer: Answer) -> None:
    """`answer(spread, half)` is the smallest number of seeds, or None."""
    got = []
    for case in CASES:
        given = answer(*case)
        expect(given is not ..., "no answer yet for seeds_needed; replace the dots")
        got.append(0 if given is None else number(given, "the number of seeds"))
        expect(given is None or got[-1] > 0, "no number of seeds is 0: return None if over 17")
    right = [_seeds(*case) for case in CASES]
    normal = [math.ceil((1.96 * spread / half) ** 2) for spread, half in CASES]
    mistakes = {
        "1.96 holds for a known spread; with few seeds take T_QUANTILE": normal,
        "1.96 holds for a known spread; with few seeds take the quantile T_QUANTILE": [
            n if n < 18 else 0 for n in normal
        ],
        "n seeds leave n - 1 degrees of freedom, not n": [_seeds(*case, lost=0) for case in CASES],
        "n seeds leave n - 1 degrees of freedom, not n - 2": [
            _seeds(*case, lost=2, first=3) for case in CASES
        ],
        "the mean's standard error is spread / sqrt(n), not spread / n": [
            _seeds(*case, power=1.0) for case in CASES
        ],
        "half is half the width: the interval is the mean plus and minus half": [
            _seeds(spread, half / 2) for spread, half in CASES
        ],
        "the interval may be twice as wide as this: it is the mean plus and minus half": [
            _seeds(spread, 2 * half) for spread, half in CASES
        ],
        "this is the standard error alone: multiply it by the quantile": [
            next((n for n in range(2, 18) if spread / n**0.5 <= half), 0) for spread, half in CASES
        ],
        "this is one seed too many": [n + (n > 0) for n in right],
        "this is one seed too few": [n - (n > 0) for n in right],
        "more than 17 seeds are needed there: return None": [n or 17 for n in right],
        "the largest interval that fits is wanted: the smallest number of seeds": [
            17 if _seeds(*case) else 0 for case in CASES
        ],
    }
    missing = any(wanted and not given for given, wanted in zip(got, right, strict=True)) and (
        "the result is None where 17 seeds or fewer are enough: try n = 2 to 17"
    )
    close(
        torch.tensor(got),
        torch.tensor([float(n) for n in right]),
        missing or "this is not the smallest n whose interval is narrow enough",
        {text: torch.tensor([float(n) for n in value]) for text, value in mistakes.items()},
    )


TIE = 1e-6
"""Differences of means that are closer than this are equal."""


def _differences(a: Tensor, b: Tensor) -> Tensor:
    """mean - mean of every way to split the values into groups of these sizes."""
    everything = torch.cat([a, b]).double()
    differences = []
    for chosen in itertools.combinations(range(len(everything)), len(a)):
        mask = torch.zeros(len(everything), dtype=torch.bool)
        mask[list(chosen)] = True
        differences.append(everything[mask].mean() - everything[~mask].mean())
    return torch.stack(differences)


@check("Exercise 2")
def check_permutation(answer: Answer) -> None:
    """`answer(a, b)` is the exact two-sided p of the difference of means."""
    tables = (
        (torch.tensor([0.60, 0.72, 0.55, 0.81]), torch.tensor([0.10, 0.20, 0.17])),
        (torch.tensor([0.71, 0.74, 0.66, 0.73]), torch.tensor([0.61, 0.72, 0.55])),
        (torch.tensor([0.40, 0.53, 0.47]), torch.tensor([0.44, 0.50, 0.55])),
        (torch.tensor([-0.40, 0.33, -0.17]), torch.tensor([0.44, -0.50, 0.55, 0.21])),
        (torch.tensor([0.1, 0.6, 0.5, 0.3]), torch.tensor([0.2, 0.3, 0.4])),  # rounded ties
    )
    for a, b in tables:
        splits, observed = _differences(a, b), float(a.double().mean() - b.double().mean())
        size = abs(observed)
        got = number(answer(a, b), "p")
        expect(
            got > 0,
            "p = 0 is impossible: the split that was observed is one of all splits, so count"
            " differences >= the observed",
        )
        one_sided = "this counts one side only; compare absolute differences"
        mistakes = {
            "a difference as large as the observed one counts too: write >= (less a rounding)": (
                splits.abs() > size + TIE
            ),
            "this is the other tail: count the splits that differ as much or more": (
                splits.abs() <= size + TIE
            ),
            one_sided: splits >= observed - TIE,
            f"{one_sided} (it was the left side)": splits <= observed + TIE,
        }
        wrong = {message: float(chosen.double().mean()) for message, chosen in mistakes.items()}
        wanted = float((splits.abs() >= size - TIE).double().mean())
        otherwise = "p is not the share of all splits whose difference is at least the observed one"
        if 0 < wanted - got < 0.5:
            otherwise += (
                ": splits as far apart as the observed one are missing (lost to rounding? allow"
                " 1e-6)"
            )
        close(got, wanted, otherwise, wrong, 1e-6)


@check("Exercise 3")
def check_apart(answer: str) -> None:
    """`answer` is the fraction of pairs of one method whose bars do not overlap."""
    letter = choice(answer, "abc")
    expect(
        letter != "a",
        "a standard deviation of three numbers is imprecise: what if it is small by chance?",
    )
    expect(
        letter == "b",
        "the means of three seeds vary less than single seeds: compare SD / sqrt(3) with two SD",
    )


@check("Exercise 4")
def check_reach(answer: Answer) -> None:
    """`answer(cost, reward, target)` is the cost at which the curve first reaches the target."""
    cost = torch.tensor([0.0, 10.0, 30.0, 40.0, 80.0])
    reward = torch.tensor([0.2, 0.4, 0.8, 0.5, 0.9])
    mistakes = {
        "this is the next evaluation after the crossing: interpolate between the two": 30.0,
        "this is the last evaluation before the crossing: interpolate between the two": 10.0,
        "this is the last crossing; the curve fell back once, and the first one counts": 60.0,
        "this is a number of evaluations, not a cost": 1.75,
        "this is the place of the evaluation, not its cost": 2.0,
    }
    got = number(answer(cost, reward, 0.7), "the cost")
    close(
        got,
        25.0,
        "between (10, 0.4) and (30, 0.8) a straight line passes 0.7 at a cost of 25",
        mistakes,
    )
    unsorted = (
        "right where the curve rises, not where it falls back: take the first evaluation at or"
        " above the target, from the left"
    )
    sharp = number(answer(cost, torch.tensor([0.2, 0.8, 0.5, 0.6, 0.9]), 0.7), "the cost")
    close(sharp, 25.0 / 3, unsorted)
    fallen = number(answer(cost, torch.tensor([0.2, 0.6, 0.4, 0.8, 0.9]), 0.7), "the cost")
    close(
        fallen, 37.5, "interpolate from the evaluation just before, though an earlier one is higher"
    )
    below = number(answer(cost, reward - 1, -0.3), "the cost")
    close(below, 25.0, "rewards may be negative: compare them with the target as they are")
    exact = number(answer(cost, torch.tensor([0.25, 0.75, 0.5, 0.5, 1.0]), 0.75), "the cost")
    close(exact, 10.0, "an evaluation that equals the target has reached it: >=")
    never = answer(cost, reward, 0.95)
    expect(
        never is not None, "a target that is never reached has no cost: return math.nan, not None"
    )
    never = number(never, "the cost of a target that is never reached")
    expect(
        math.isnan(never),
        f"a target that is never reached has no cost: return nan, not {never:g}; averages of it"
        " would be wrong",
    )
    start = number(answer(cost, reward, 0.1), "the cost of a target below the start")
    expect(start == 0.0, "a target below the first evaluation is reached at once: at cost[0]")


@check("Exercise 5")
def check_summary(answer: Answer) -> None:
    """`answer(costs)` is the median, with nan as a cost above all others."""
    nan = math.nan
    mistakes = {
        "only the runs that reach the target are averaged: give the others a cost": 31.25 / 3,
        "this is the median of the runs that reach the target: give the others a cost": 10.0,
        "a run that never reaches the target counts as cheap: it is the most expensive": 9.0,
    }
    costs = torch.tensor([12.25, nan, 9.0, nan, 10.0])
    got = number(answer(costs), "the cost")
    expect(not math.isnan(got), "the result is nan: replace nan by a number before the median")
    close(got, 12.25, "this is not the median of all five costs", mistakes)
    even = number(answer(torch.tensor([14.0, 8.0, nan, 10.0])), "the cost")
    expect(even != 10, "torch.median takes the lower of the two in the middle: return their mean")
    expect(even == 12, "with four costs the median is the mean of the second and the third")
    most = number(answer(torch.tensor([nan, 9.0, nan, 10.0, nan])), "the cost")
    expect(
        not math.isfinite(most),  # `quantile` computes inf - inf
        "most runs never reach the target, so the median is infinite: use math.inf for them",
    )


@check("Exercise 6")
def check_wider(answer: str) -> None:
    """`answer` is the predicted effect of a wider clip range on the lead."""
    letter = choice(answer, "abc")
    expect(
        letter != "a",
        "the same range can restrict rules differently: more than half of all pairs are outside",
    )
    expect(
        letter == "c",
        "a wider range lets every rule take larger steps: which one was restricted most?",
    )


@check("Exercise 7")
def check_tuned(answer: Answer) -> None:
    """`answer(results, tuning)` is [rule]: the mean over the reporting seeds at the setting
    that the tuning seeds chose.
    """
    results = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(4)) - 0.5
    for tuning in (2, 3):
        tune, report = results[..., :tuning].mean(-1), results[..., tuning:].mean(-1)
        everything = results.mean(-1)

        def pick(choice: Tensor, values: Tensor) -> Tensor:
            return values.gather(1, choice[:, None])[:, 0]

        best = tune.argmax(1)
        common = torch.full((3,), int(tune.mean(0).argmax()))
        mistakes = {
            "the setting is chosen on the reporting seeds, so luck is reported as skill; "
            "choose on the first ones": report.amax(1),
            "the setting is chosen with all seeds, the reporting ones among them; choose on "
            "the first ones only": pick(everything.argmax(1), report),
            "this reports the seeds that chose the setting: the best of several is too good. "
            "Report the others": tune.amax(1),
            "one setting for all rules favours the rule it suits; choose for each rule by itself": (
                pick(common, report)
            ),
            "this reports all seeds, those that chose among them; report the others only": pick(
                best, everything
            ),
            "all seeds choose and all report: choose with the first ones, report the others": (
                everything.amax(1)
            ),
        }
        got = tensor(answer(results, tuning), (3,), "tuned")
        close(
            got,
            pick(best, report),
            "this is not the mean at each rule's own best setting, on the remaining seeds",
            mistakes,
        )


SUPPORTED, CONTRADICTED, OPEN = "supported", "contradicted", "open"

_CLAIMS: dict[str, tuple[str, str]] = {
    "A": (
        SUPPORTED,
        (
            "all seeds of both step-wise rules reach the target at 2e-3 long before any seed of"
            " uniform credit"
        ),
    ),
    "B": (
        CONTRADICTED,
        "look at the rows of clip 0.2: in iterations the rules are nearly equal there",
    ),
    "C": (
        CONTRADICTED,
        (
            "the control without any turning point keeps most of the lead; whether turning points"
            " help a little, six seeds do not decide"
        ),
    ),
    "D": (
        SUPPORTED,
        (
            "at each rule's own best clip uniform credit needs the fewest forward passes, by a"
            " factor of about 1.5"
        ),
    ),
    "E": (
        OPEN,
        "seconds in a tiny network are mostly overhead per call; nothing here measured a large one",
    ),
    "F": (
        CONTRADICTED,
        (
            "every run was evaluated on the same six prompts and the same noise; the interval"
            " covers seeds only"
        ),
    ),
    "G": (
        OPEN,
        (
            "results in two dimensions do not decide claims about image models; they show which"
            " control such a claim needs"
        ),
    ),
}


@check("Exercise 8")
def check_claims(answer: Mapping[str, str]) -> None:
    """`answer` maps a claim's letter to supported, contradicted or open."""
    allowed = (SUPPORTED, CONTRADICTED, OPEN)
    expect(isinstance(answer, Mapping), "write a dictionary from letters to words")
    expect(set(answer) <= set(_CLAIMS), "there are only the claims A to G")
    for letter, (verdict, reason) in _CLAIMS.items():
        expect(letter in answer, f"claim {letter} has no verdict")
        choice = str(answered(answer[letter], f"claim {letter}")).strip().lower()
        expect(choice in allowed, f"claim {letter}: {choice!r} is none of {', '.join(allowed)}")
        if verdict == OPEN:
            wrong = f"claim {letter} is about something that was not measured here: {reason}"
        elif choice == OPEN:
            wrong = f"claim {letter} can be decided with the runs above: {reason}"
        else:
            wrong = f"claim {letter}: {reason}"
        expect(choice == verdict, wrong)


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "there are 20 splits, and the opposite one is as extreme: 2/20",
            "c": "the smallest possible p is 2/20",
        },
    ),
    (
        "b",
        {
            "a": "0.02 is the spread of single seeds",
            "c": "1.96 SD describes single seeds: divide by the root of 5, and use 2.78",
        },
    ),
    (
        "a",
        {
            "b": "this is true of the NFE, which are not your limit",
            "c": "compare the number of calls of the reward model until the target",
        },
    ),
    (
        "b",
        {
            "a": "default settings may have cost very different tuning efforts",
            "c": "the best seed is chosen by chance, and too good on average",
        },
    ),
    (
        "b",
        {
            "a": "the control lacks this part and reaches the same reward",
            "c": "an interval of ± 0.02 excludes chance as the cause of 0.62",
        },
    ),
)
