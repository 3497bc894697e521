"""Checks of the lesson on why a step may be credited."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flowrl_course.chain import Chain
from flowrl_course.checking import (
    answered,
    check,
    close,
    decide,
    expect,
    numbers,
    quiz,
    same,
    tensor,
)

Answer = Callable[..., Any]


def _values() -> Tensor:
    """Values of 5 trajectories with 4 decisions."""
    generator = torch.Generator().manual_seed(21)
    steps = torch.randn(5, 5, generator=generator) * torch.tensor([0.3, 0.2, 0.5, 0.4, 0.1])
    return 1.5 + 4 * steps.cumsum(-1)


@check("Exercise 1")
def check_score(answer: Answer) -> None:
    """`answer(z_next, mean, std, push)` is the gradient of the log-density by the wind,
    [sample, 2].
    """
    generator = torch.Generator().manual_seed(0)
    z, mean = torch.randn(2, 5, 2, generator=generator)
    std, push = torch.tensor(0.3), torch.tensor(0.7)
    right = push * (z - mean) / std**2
    got = answered(answer(z.clone(), mean.clone(), std, push), "the score")
    expect(
        not isinstance(got, Tensor) or got.shape != (5,),
        "the wind has two components, and so has the gradient by it: do not sum over dimensions",
    )
    mistakes = {
        "the sign is wrong: a sample beyond the mean makes a stronger wind more likely": -right,
        "push is missing: use the chain rule, since the wind moves the mean by way of it": right
        / push,
        "divided by std once: differentiate the log-density by the mean again": right * std,
        "not divided by the variance: where there is less noise, the derivative is larger": right
        * std**2,
        "the 2 of the exponent cancels: a square's derivative has a factor 2": right / 2,
        "this is the log-density (without its constant); take its derivative by the wind": (
            -(z - mean).square() / (2 * std**2)
        ),
        "push moves the mean; multiply by it, do not divide": (z - mean) / std**2 / push,
    }
    close(
        tensor(got, (5, 2), "the score"),
        right,
        "this is not the derivative of log pi by the wind",
        mistakes,
    )


TERMS = {
    "A": (True, "A: the noise z_0 is known before decision 4"),
    "B": (True, "B: V*_4 depends on z_4, from which decision 4 starts, and not on its result"),
    "C": (
        False,
        "C: V*_5 depends on z_5, which decision 4 draws; this term is the gradient itself",
    ),
    "D": (True, "D: given z_5, the mean of R is V*_5, so that what remains of R has mean 0"),
    "E": (True, "E: decision 2 was made before z_4 was reached"),
    "F": (True, "F: given z_6, the gain of decision 6 has mean 0 for every z_5"),
    "G": (True, "G: the other members' rewards are independent of this member's decisions"),
    "H": (False, "H: the mean of the group contains the member's own reward, a quarter of it"),
}
"""Whether E[psi_4 f] is 0 for each f of the exercise, and the reason."""


@check("Exercise 2")
def check_vanishing(answer: Mapping[str, bool]) -> None:
    """`answer` maps the letters A to H to True if the term is 0."""
    expect(
        isinstance(answer, Mapping) and set(answer) == set(TERMS),
        f"give a dict with the keys {', '.join(TERMS)}",
    )
    answered(None if any(value is ... for value in answer.values()) else answer, "all terms")
    for letter, (vanishes, reason) in TERMS.items():
        expect(answer[letter] in (True, False), f"{letter}: answer True or False")
        expect(bool(answer[letter]) == vanishes, f"look again at {reason}")


@lru_cache(1)
def _paths() -> tuple[Chain, Tensor, Tensor, Tensor]:
    """A chain, nodes of 4,000 trajectories, the scores of decisions, and the rewards."""
    chain = Chain()
    nodes = chain.roll(4000, seed=11)
    means = torch.stack([chain.mean(nodes[k], k) for k in range(chain.decisions)], 1)
    drawn = nodes[1:-1].transpose(0, 1)
    scores = (chain.pushes / chain.stds**2)[:, None] * (drawn - means)
    return chain, nodes, scores, chain.values(nodes)[:, -1]


def _noise(credit: Tensor, scores: Tensor) -> float:
    return float((scores * credit[..., None]).sum(1).var(0).sum())


@check("Exercise 3")
def check_baseline(answer: Answer) -> None:
    """`answer(z, time)` is a baseline [sample] that halves the variance of the estimate."""
    chain, nodes, scores, rewards = _paths()
    columns = []
    for k in range(chain.decisions):
        z, time = nodes[k].clone(), chain.times[k]
        column = tensor(answer(z, time), (len(z),), "the baseline")
        expect(bool(torch.isfinite(column).all()), f"the baseline is not finite at time {time:.1f}")
        alone = tensor(answer(nodes[k][:7].clone(), time), (7,), "the baseline")
        expect(
            same(alone, column[:7]),
            "the baseline of a state changes with the other states of the batch, or from call to "
            "call; it may depend on the state and its time only",
        )
        columns.append(column)
    table = torch.stack(columns, 1)
    constant = _noise((rewards - rewards.mean())[:, None].expand_as(table), scores)
    share = _noise(rewards[:, None] - table, scores) / constant
    expect(
        float(table.var(0).max()) > 1e-12,
        "this baseline has the same value in all states of a node; a better one tells promising "
        "states from others",
    )
    late = torch.corrcoef(torch.stack([table[:, -1], rewards]))[0, 1]
    expect(
        late > 0,
        f"at the last decision the baseline has correlation {float(late):.2f} with the reward; "
        "it should be high where the reward will be high",
    )
    expect(
        share < 0.5,
        f"the variance is {share:.2f} times that of the constant baseline; at most 0.5 is wanted."
        " Compare the baseline with the rewards: it should be an estimate of the reward from z",
    )


@check("Exercise 4")
def check_repaired(answer: Answer) -> None:
    """`answer(values, scores)` is sum_k psi_k (R - V_k), the credit centred over trajectories."""
    values = _values()
    scores = torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(5))

    def weighted(credit: Tensor) -> Tensor:
        return (scores * credit[..., None]).sum(1)

    def estimate(credit: Tensor, over: int | None) -> Tensor:
        return weighted(credit if over is None else credit - credit.mean(over, keepdim=True))

    before = values[:, -1:] - values[:, :-1]
    after = values[:, -1:] - values[:, 1:]
    got = tensor(answer(values.clone(), scores.clone()), (5, 2), "the estimate")
    mistakes = {
        "both bugs are still there": estimate(after, 1),
        "one bug is left: the baseline is V_{k+1}, which depends on the decision itself": (
            estimate(after, 0)
        ),
        "one bug is left: the mean is taken over the decisions of the trajectory itself, which "
        "contains later decisions; take it over trajectories": estimate(before, 1),
        "the baseline is right; the mean of a decision's credit over trajectories should still be "
        "subtracted": estimate(before, None),
        "the mean is taken over everything; each decision has its own": (
            weighted(before - before.mean())
        ),
        "this credits gains V_{k+1} - V_k; the function is to credit the reward to go, R - V_k": (
            estimate(values.diff(dim=-1), 0)
        ),
    }
    others = weighted(before - (before.sum(0) - before) / (len(before) - 1))
    wanted = others if same(got, others) else estimate(before, 0)
    close(got, wanted, "this is not the sum of psi_k (R - V_k), centred", mistakes)


@check("Exercise 5")
def check_lambda(answer: Answer) -> None:
    """`answer(values, lam)` is sum_j lam^j g_{k+j}, [sample, decision]."""
    values, lam = _values(), 0.6
    gains = values.diff(dim=-1)
    later = torch.arange(4)[:, None] - torch.arange(4)  # j - k
    weights = torch.where(later >= 0, lam ** later.clamp(min=0).float(), torch.zeros(()))
    right = gains @ weights
    to_go = values[:, -1:] - values[:, :-1]
    got = tensor(answer(values.clone(), lam), (5, 4), "the credit")
    mistakes = {
        "this is the sum of earlier gains; a decision is not the cause of them": (
            gains @ weights.T
        ),
        "the weights count from the start, lam^j; they count from the decision, lam^(j - k)": (
            (gains * lam ** torch.arange(4.0)) @ (later >= 0).float()
        ),
        "lam multiplies the value after the step as a discount does; it weighs whole gains": (
            lam * values[:, 1:] - values[:, :-1]
        ),
        "this mixes only the two ends, (1 - lam) gain + lam (R - V_k)": (
            (1 - lam) * gains + lam * to_go
        ),
        "these are the gains, the case lam = 0": gains,
        "this is R - V_k, the case lam = 1": to_go,
        "the decision's own gain has weight 1, not lam": lam * right,
        "the decision's own gain is missing": right - gains,
        "the weights do not add up to 1: the longest change has the weight that remains": sum(
            (1 - lam)
            * lam ** (n - 1)
            * torch.cat([values[:, n:] - values[:, :-n], torch.zeros(5, n - 1)], 1)
            for n in range(1, 5)
        ),
        "the weights of all changes with gain g_{k+j} add up to lam^j: no factor 1 - lam remains": (
            (1 - lam) * right
        ),
        "only the next gain is added; the recursion goes on to the last decision": (
            gains + lam * torch.cat([gains[:, 1:], torch.zeros(5, 1)], 1)
        ),
    }
    close(got, right, "this is not the average of the changes over 1, 2, ... decisions", mistakes)
    expect(
        same(answer(values.clone(), 1.0), to_go),
        "at lam = 1 the gains must telescope to R - V_k",
    )
    expect(same(answer(values.clone(), 0.0), gains), "at lam = 0 only the gain must remain")


@check("Exercise 6")
def check_bias(answer: str) -> None:
    """`answer` is how the bias with outdated values depends on lambda."""
    reasons = {
        "a": "the values are equally wrong, but the credit contains them with other weights:"
        " write down both ends",
        "b": "the gain contains V_{k+1}, whose error depends on decision k: causality does not"
        " remove it",
        "d": "V_k is a baseline, but V_{k+1} is not: for which lambda does it occur?",
    }
    decide(answer, "c", reasons)


@check("Exercise 7")
def check_noise(answer: Answer) -> None:
    """`answer(sizes, shares)` is the noise of uniform credit, reward to go and gains."""
    sizes = torch.tensor([0.3, 0.5, 0.8, 1.7])
    shares = torch.tensor([0.9, 0.2, 0.5, 0.4, 0.1])
    got = answered(answer(sizes.clone(), shares.clone()), "the noise")
    result = torch.tensor(numbers(got, 3, "return three numbers: uniform, reward to go, gain"))
    gain = (sizes * shares[1:]).sum()
    rest = shares[1:].flip(0).cumsum(0).flip(0)
    to_go, uniform = (sizes * rest).sum(), sizes.sum() * shares.sum()

    def three(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        return torch.stack([first, second, third])

    right = three(uniform, to_go, gain)
    mistakes = {
        "uniform credit contains V*_0 as well: R - J is the sum of all parts": three(
            sizes.sum() * shares[1:].sum(), to_go, gain
        ),
        "the reward to go of decision k contains its own gain": three(
            uniform, (sizes * (rest - shares[1:])).sum(), gain
        ),
        "the reward to go contains the gains of decision k and those after it, not those before": (
            three(uniform, (sizes * shares[1:].cumsum(0)).sum(), gain)
        ),
        "the first share is that of V*_0: decision k has shares[k + 1]": three(
            uniform, to_go, (sizes * shares[:-1]).sum()
        ),
        "each decision has its own size and share: multiply first, then sum": three(
            uniform, to_go, sizes.sum() * shares[1:].sum()
        ),
        "these are means over decisions; the estimate is a sum over decisions": right / 4,
        "the order is uniform, reward to go, gain": three(gain, to_go, uniform),
        "variances are wanted, not their roots": right.sqrt(),
        "`shares` are variances already; do not square them": three(
            sizes.sum() * shares.square().sum(),
            (sizes * shares[1:].square().flip(0).cumsum(0).flip(0)).sum(),
            (sizes * shares[1:].square()).sum(),
        ),
    }
    close(result, right, "these are not the sums of size times the variance of credit", mistakes)


@check("Exercise 8")
def check_improvement(answer: Answer) -> None:
    """`answer(log_ratios, advantages)` is the surrogate and the exact estimate of
    J(new) - J(old).
    """
    generator = torch.Generator().manual_seed(7)
    logs, credit = torch.randn(2, 5, 4, generator=generator) * 0.4
    got = answered(answer(logs.clone(), credit.clone()), "the improvement")
    order = "return two numbers: the surrogate, and the estimate with the whole path's weight"
    result = torch.tensor(numbers(got, 2, order))
    ratios, products = logs.exp(), logs.cumsum(1).exp()

    def two(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([(first * credit).sum(1).mean(), (second * credit).sum(1).mean()])

    right = two(ratios, products)
    before = (logs.cumsum(1) - logs).exp()
    mistakes = {
        "the product of decision k ends with its own ratio": two(ratios, before),
        "the second weight is the product of the ratios up to decision k; this is the product of "
        "all of them. It is right on average too, and noisier": two(
            ratios, products[:, -1:].expand_as(credit)
        ),
        "ratios are exponentials of log-ratios": two(logs, logs.cumsum(1)),
        "ratios are multiplied along the path, not added": two(ratios, ratios.cumsum(1)),
        "these are means over decisions; the sum of all A* is the improvement": right / 4,
        "these are sums over trajectories; take their mean": right * 5,
        "the order is surrogate, then whole path": right.flip(0),
        "the ratios are inverted: new over old": two((-logs).exp(), (-logs).cumsum(1).exp()),
        "both numbers use one ratio per decision": two(ratios, ratios),
    }
    close(
        result,
        right,
        "these are not the two estimates of the improvement: compute one trajectory by hand",
        mistakes,
    )


CHOICES = {
    "A": ("equal", "A: this is R - V_k itself"),
    "B": ("equal", "B: the coin knows nothing of what follows, so that F_k keeps its mean of 0"),
    "C": ("equal", "C: this is known before decision k, and F_k has mean 0 for every z_{k+1}"),
    "D": ("equal", "D: this is known with z_{k+1}, and F_k has mean 0 for every z_{k+1}"),
    "E": ("larger", "E: of F_k, only values with the sign of the gain remain; is their mean 0?"),
    "F": ("smaller", "F: of F_k, only values against the gain remain; in which direction?"),
    "G": ("equal", "G: after the last decision nothing is drawn: what is F_k?"),
}
"""How E[psi_k A_k] of each rule compares with that of the gain, and the reason."""


@check("Exercise 9")
def check_choosing(answer: Mapping[str, str]) -> None:
    """`answer` maps the letters A to G to "equal", "larger" or "smaller"."""
    expect(
        isinstance(answer, Mapping) and set(answer) == set(CHOICES),
        f"give a dict with the keys {', '.join(CHOICES)}",
    )
    answered(None if any(value is ... for value in answer.values()) else answer, "all rules")
    for letter, (right, reason) in CHOICES.items():
        given = str(answer[letter]).strip().lower()
        expect(
            given in ("equal", "larger", "smaller"),
            f'{letter}: answer "equal", "larger" or "smaller"',
        )
        expect(given == right, f"look again at {reason}")


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "this value contains the effect of the decision, which the gradient measures",
            "c": "this mean contains later decisions",
        },
    ),
    (
        "b",
        {
            "a": "the error of the value after the decision depends on the decision",
            "c": "one of them uses the wrong value as a baseline only",
        },
    ),
    (
        "a",
        {
            "b": "equal expectations mean that neither has a bias",
            "c": "values need additional evaluations",
        },
    ),
    (
        "b",
        {
            "a": "the noise is three times as large, and its square counts",
            "c": "the variance is already a square",
        },
    ),
    (
        "c",
        {
            "a": "noise averages out; this error remains with any number of samples",
            "b": "the clip only lowers the surrogate",
        },
    ),
)
