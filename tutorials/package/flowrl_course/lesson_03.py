"""Checks of the lesson on GRPO."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from flowrl_course.checking import (
    answered,
    check,
    choice,
    close,
    expect,
    number,
    quiz,
    same,
    tensor,
)

Answer = Callable[..., Any]


@check("Exercise 1")
def check_log_prob(answer: Answer) -> None:
    """`answer(x, mean, std)` is the Gaussian log-density, mean over elements."""
    generator = torch.Generator().manual_seed(0)
    x, mean = torch.randn(2, 5, 3, generator=generator)
    std = torch.linspace(0.2, 1.1, 5)
    normal = torch.distributions.Normal(mean, std[:, None])
    truth = normal.log_prob(x).mean(1)
    squares = (x - mean).square()
    constant = std.log() + 0.5 * math.log(2 * math.pi)
    got = answered(answer(x, mean, std), "log_prob")
    expect(
        not isinstance(got, torch.Tensor) or got.shape != (5, 3),
        "return one number per sample: take the mean over elements",
    )
    mistakes = {
        "this is the sum over elements; return the mean": normal.log_prob(x).sum(1),
        "the squares are summed, the rest is not: take the mean": (
            -squares.sum(1) / (2 * std**2) - constant
        ),
        "the sign is wrong: this is the negative log-density": -truth,
        "the squares have the wrong sign: far from the mean the density is small": (
            squares.mean(1) / (2 * std**2) - constant
        ),
        "a / 2 * b is (a / 2) b: put 2 std^2 in brackets": -squares.mean(1) / 2 * std**2 - constant,
        "the normalisation is missing: - log std - log(2 pi) / 2": -squares.mean(1) / (2 * std**2),
        "the 2 below the fraction bar is missing: (x - mu)^2 / (2 std^2)": (
            -squares.mean(1) / std**2 - constant
        ),
        "divided by std, not by its square": -squares.mean(1) / (2 * std) - constant,
    }
    close(
        tensor(got, (5,), "the log-probability"),
        truth,
        "this is not the log-density of a Gaussian, averaged over elements",
        mistakes,
    )


@check("Exercise 2")
def check_gradient_samples(answer: Answer) -> None:
    """`answer(x, mean, std, rewards, baseline)` is the score-function estimate of every sample."""
    generator = torch.Generator().manual_seed(3)
    x, rewards = (
        0.4 + 0.7 * torch.randn(6, generator=generator),
        torch.rand(6, generator=generator) + 1,
    )
    mean, std, baseline = 0.4, 0.7, 1.3
    score = (x - mean) / std**2
    log_prob = torch.distributions.Normal(mean, std).log_prob(x)
    mistakes = {
        "the sign is wrong: actions above the mean with a good reward push the mean up": (
            -(rewards - baseline) * score
        ),
        "the derivative of log pi by the mean has std squared below the fraction bar": (
            (rewards - baseline) * (x - mean) / std
        ),
        "the variance is missing: the derivative is (x - mu) / std^2": (
            (rewards - baseline) * (x - mean)
        ),
        "the 2 cancels: the derivative of (x - mu)^2 / (2 std^2) has none": (
            (rewards - baseline) * score / 2
        ),
        "the baseline is missing: R - b": rewards * score,
        "the baseline is subtracted from the product; subtract it from the reward": (
            rewards * score - baseline
        ),
        "the baseline is added: R - b": (rewards + baseline) * score,
        "this is the log-probability; the estimate needs its derivative by the mean": (
            (rewards - baseline) * log_prob
        ),
        "the baseline is divided by; subtract it": rewards / baseline * score,
    }
    got = answered(answer(x, mean, std, rewards, baseline), "gradient_samples")
    expect(
        not same(got, ((rewards - baseline) * score).mean()),
        "return the estimate of every sample, not their mean",
    )
    close(
        tensor(got, (6,), "the estimates"),
        (rewards - baseline) * score,
        "this is not (R - b) (x - mu) / std^2",
        mistakes,
    )
    each = answer(x, mean, std, rewards, rewards)
    expect(same(each, torch.zeros(6)), "the baseline may be one number per sample, too")


@check("Exercise 3")
def check_group_advantage(answer: Answer) -> None:
    """`answer(rewards)` is the z-score within each prompt."""
    rewards = (
        torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) + torch.arange(4.0)[:, None]
    )

    def score(mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        return (rewards - mean) / (std + 1e-4)

    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, correction=0, keepdim=True)
    silent = tensor(answer(torch.full((2, 3), 0.7)), (2, 3), "the advantages")
    expect(
        bool(torch.isfinite(silent).all()),
        "a group of equal rewards gives nan: add 1e-4 to the std",
    )
    expect(float(silent.abs().max()) < 1e-2, "a group of equal rewards must get 0")
    got = tensor(answer(rewards), (4, 6), "the advantages")
    mistakes = {
        "the whole batch is one group here: take mean and std over the members of each "
        "prompt (dim=1, keepdim=True)": score(rewards.mean(), rewards.std(correction=0)),
        "this compares the same member of different prompts: reduce over dim=1": score(
            rewards.mean(0, keepdim=True), rewards.std(0, correction=0, keepdim=True)
        ),
        "this divides by G - 1: torch's std does so by default; write correction=0": score(
            mean, rewards.std(1, keepdim=True)
        ),
        "the mean is taken off, but not divided by the std": rewards - mean,
        "divided by the variance": (
            (rewards - mean) / (rewards.var(1, correction=0, keepdim=True) + 1e-4)
        ),
    }
    close(
        got,
        score(mean, std),
        "this is not (R - mean) / (std + 1e-4) within each prompt",
        mistakes,
        1e-6,
    )


@check("Exercise 4")
def check_clipped_loss(answer: Answer) -> None:
    """`answer(new, old, advantage, clip)` is PPO's clipped loss."""
    new = torch.tensor([0.3, -0.4, 0.02, -0.01, 0.5, -0.6], requires_grad=True)
    old, advantage = torch.zeros(6) + 0.05, torch.tensor([1.0, 1.0, -0.5, 2.0, -1.5, -0.3])
    ratio, c = (new - old).exp(), 0.1
    plain, held = -advantage * ratio, -advantage * ratio.clamp(1 - c, 1 + c)
    got = answered(answer(new, old, advantage, c), "clipped_loss")
    expect(
        not isinstance(got, float),
        "the loss is a plain number, and carries no gradient: leave out .item()",
    )
    expect(
        isinstance(got, torch.Tensor) and got.ndim == 0,
        "the loss must be one number: take the mean",
    )
    other = (old - new).exp()
    mistakes = {
        "the clip is missing: this is the plain reweighted loss": plain.mean(),
        "only the clipped term is used: corrections of ratios that are already too far get "
        "no gradient": (held.mean()),
        "this takes the minimum: of two losses the pessimistic one is the larger": (
            torch.minimum(plain, held).mean()
        ),
        "the sign is wrong: a loss is minimised, so -A": -torch.maximum(plain, held).mean(),
        "the sign of A is wrong: a loss is minimised, so -A": torch.maximum(-plain, -held).mean(),
        "the range is 1 - c to 1 + c: the ratio is near 1, not near 0": (
            torch.maximum(plain, -advantage * ratio.clamp(-c, c)).mean()
        ),
        "the ratio of probabilities is exp(new - old), not new / old": (
            torch.maximum(
                -advantage * new / old, -advantage * (new / old).clamp(1 - c, 1 + c)
            ).mean()
        ),
        "the ratio is inverted: new over old": (
            torch.maximum(-advantage * other, -advantage * other.clamp(1 - c, 1 + c)).mean()
        ),
        "this is the sum; take the mean over pairs": torch.maximum(plain, held).sum(),
        "the ratio is the difference of log-probabilities; take its exponential": (
            torch.maximum(
                -advantage * (new - old), -advantage * (new - old).clamp(1 - c, 1 + c)
            ).mean()
        ),
    }
    close(
        got,
        torch.maximum(plain, held).mean(),
        "this is not mean max(-A rho, -A clip(rho))",
        mistakes,
        1e-5,
    )
    expect(got.requires_grad, "the loss carries no gradient to the new log-probability")
    wanted, grown = (
        torch.autograd.grad(loss, new)[0] for loss in (torch.maximum(plain, held).mean(), got)
    )
    expect(
        same(grown, wanted, 1e-5), "the value is right, but not its gradient: is a part detached?"
    )


@check("Exercise 5")
def check_kl(answer: Answer) -> None:
    """`answer(mean, reference_mean, std)` is the KL per element."""
    generator = torch.Generator().manual_seed(2)
    mean, reference = torch.randn(2, 5, 3, generator=generator)
    std = torch.linspace(0.2, 1.1, 5)
    p, q = (torch.distributions.Normal(m, std[:, None]) for m in (mean, reference))
    truth = torch.distributions.kl_divergence(p, q).mean(1)
    mistakes = {
        "this is the sum over elements; take the mean": truth * 3,
        "the 2 is missing: ||mu - mu_ref||^2 / (2 std^2)": truth * 2,
        "divided by std, not by its square": truth * std,
        "not divided by the variance: the same distance matters more where there is less noise": (
            truth * std**2
        ),
        "a / 2 * b is (a / 2) b: put 2 std^2 in brackets": truth * std**4,
        "the distance is not squared": (mean - reference).abs().mean(1) / (2 * std**2),
    }
    got = answered(answer(mean, reference, std), "kl")
    expect(not same(got, truth.mean()), "return one number per sample, not the mean over the batch")
    close(
        tensor(got, (5,), "the KL"),
        truth,
        "this is not ||mu - mu_ref||^2 / (2 std^2), averaged over elements",
        mistakes,
    )


@check("Exercise 8")
def check_translated_clip(answer: Answer) -> None:
    """`answer(clip_range, elements, own_elements)` is the clip range for the same change per
    element.
    """
    for clip, elements, own in ((1e-4, 65536, 1024), (0.02, 4, 400)):
        right, factor = clip * (elements / own) ** 0.5, elements / own
        mistakes = {
            "this is the inverse factor: with fewer elements the ratio moves further from 1, "
            "so the range grows": (clip / factor**0.5),
            "the spread is delta / sqrt(d), not delta / d: take the root": clip * factor,
            "the range is unchanged; the spread delta / sqrt(d) depends on the number of "
            "elements": (clip),
            "this is the change delta per element; divide it by the root of your own number "
            "of elements": (clip * elements**0.5),
            "the root is applied to the clip range too": (clip * factor) ** 0.5,
            "this is the factor between the two; multiply it by the clip range": factor**0.5,
        }
        got = number(answer(clip, elements, own), "the clip range")
        message = next(
            (text for text, value in mistakes.items() if math.isclose(got, value, rel_tol=1e-4)),
            None,
        )
        expect(
            math.isclose(got, right, rel_tol=1e-4),
            message or "this does not keep delta = clip_range x sqrt(elements) constant",
        )


@check("Exercise 9")
def check_diagnosis(answer: dict[int, str]) -> None:
    """`answer` maps the logs 1, 2, 3 to the settings A, B, C."""
    expect(
        isinstance(answer, dict) and set(answer) == {1, 2, 3},
        "give a dict with the keys 1, 2 and 3",
    )
    answered(None if ... in answer.values() else answer, "the diagnosis")
    given = {log: str(letter).strip().upper() for log, letter in answer.items()}
    expect(set(given.values()) == {"A", "B", "C"}, "use each of the letters A, B and C once")
    expect(given[1] != "A", "the reward of log 1 moves a lot: its advantages cannot all be 0")
    expect(
        given[1] != "C", "the reward of log 1 moves a lot: with a tiny clip nothing would move far"
    )
    expect(
        given[2] != "A",
        "log 2 clips pairs, so ratios move and gradients exist; where all advantages are 0 nothing"
        " would move",
    )
    expect(
        given == {1: "B", 2: "C", 3: "A"},
        "look again at logs 2 and 3: which of them has advantages at all?",
    )


@check("Exercise 6")
def check_iteration(answer: Answer, net: torch.nn.Module) -> None:
    """`answer(optimizer, generator, clip_range, minibatches)` trains `net` for one iteration."""
    notebook, clip = inspect.unwrap(answer).__globals__, 0.02
    loss = notebook["clipped_loss"]
    start = {name: value.clone() for name, value in net.state_dict().items()}

    def trained(function: Answer) -> tuple[torch.Tensor, list[tuple[Any, ...]]]:
        """The weights after an iteration, and the arguments of the loss in each mini-batch."""
        calls: list[tuple[Any, ...]] = []

        def watched(new: Any, old: Any, advantage: Any, clip_range: Any) -> Any:
            calls.append((new.detach(), old.detach(), advantage, clip_range))
            return loss(new, old, advantage, clip_range)

        net.load_state_dict(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer.zero_grad()
        notebook["clipped_loss"] = watched
        try:
            function(optimizer, torch.Generator().manual_seed(5), clip, 3)
            return torch.cat([value.detach().flatten() for value in net.parameters()]), calls
        finally:
            notebook["clipped_loss"] = loss
            net.load_state_dict(start)

    (weights, right), (got, calls) = trained(_iteration(notebook)), trained(answer)
    pairs = sum(len(new) for new, *_ in right)
    untouched = torch.cat([value.flatten() for value in start.values()])
    expect(calls, "the loss was never computed: call clipped_loss once per mini-batch")
    expect(
        len(calls) == 3,
        f"the loss was computed {len(calls)} times for 3 mini-batches: split the permutation with"
        " chunk(minibatches), and compute one loss for each chunk",
    )
    seen = sum(len(new) for new, *_ in calls)
    expect(
        seen == pairs,
        f"the mini-batches have {seen} pairs instead of {pairs}: a sample has STEPS - 1",
    )
    expect(
        same(calls[0][0], calls[0][1], 1e-5),
        "the first ratio is not 1: the old log-probability belongs to another pair, state, next"
        " state or direction than the new one",
    )
    expect(
        all(given[3] == clip for given in calls),
        "the clip range is not the argument: pass clip_range",
    )
    advantages = [torch.cat([given[2] for given in run]).sort().values for run in (calls, right)]
    expect(
        same(advantages[0], advantages[1]),
        "the advantages are not the group advantages of the rewards: are the members of a prompt"
        " adjacent (repeat_interleave), and has every pair the advantage of its sample?",
    )
    expect(
        not same(calls[2][0], calls[2][1], 1e-9),
        "the last ratio is exactly 1: compute the old log-probability once, before the updates,"
        " and take a step of the optimizer after every mini-batch",
    )
    expect(
        not same(got, untouched), "the weights did not change: loss.backward(), optimizer.step()"
    )
    wrong = {
        "gradients add up over the mini-batches: call optimizer.zero_grad() before backward": (
            "add"
        ),
        "the pairs are not shuffled: split torch.randperm(pairs), not the pairs in order": "order",
    }
    close(
        got,
        weights,
        "the update differs from the one described: number the pairs sample * (STEPS - 1) + step,"
        " pass the generator to directions, rollout and randperm, and draw in this order",
        {text: trained(_iteration(notebook, fault))[0] for text, fault in wrong.items()},
    )


def _iteration(notebook: dict[str, Any], fault: str = "") -> Answer:
    """The iteration of the exercise with the lesson's functions, or with one fault."""
    count, members, steps = (notebook[name] for name in ("PROMPTS", "MEMBERS", "STEPS"))

    def run(
        optimizer: Any, generator: torch.Generator, clip_range: float, minibatches: int
    ) -> None:
        with torch.no_grad():
            direction = notebook["directions"](count, generator).repeat_interleave(members, 0)
            nodes = notebook["rollout"](direction, generator)
            rewards = notebook["reward_of"](nodes[-1], direction)
            advantage = notebook["group_advantage"](rewards.view(count, members)).flatten()
            pairs = torch.cartesian_prod(torch.arange(len(direction)), torch.arange(steps - 1))
            order = torch.randperm(len(pairs), generator=generator)
        sample, step = (pairs if fault == "order" else pairs[order]).unbind(1)

        def log_probs(part: torch.Tensor) -> torch.Tensor:
            i, chosen = step[part], sample[part]
            gaussian = notebook["transition"](nodes[i, chosen], i, direction[chosen])
            return notebook["log_prob"](nodes[i + 1, chosen], *gaussian)

        with torch.no_grad():
            before = log_probs(torch.arange(len(pairs)))
        for part in torch.arange(len(pairs)).chunk(minibatches):
            after = log_probs(part)
            if fault != "add":
                optimizer.zero_grad()
            lost = notebook["clipped_loss"](
                after, before[part], advantage[sample[part]], clip_range
            )
            lost.backward()
            optimizer.step()

    return run


@check("Exercise 7")
def check_one_minibatch(answer: str) -> None:
    """`answer` is the predicted fraction of clipped pairs with one mini-batch."""
    letter = choice(answer, "abc")
    expect(letter != "c", "the size of the mini-batch plays no role: which policy drew the pairs?")
    expect(
        letter == "a",
        "with four mini-batches the later ones see changed weights: how many are there with one?",
    )


@check("Exercise 10")
def check_wrong_line(answer: int) -> None:
    """`answer` is the number of the wrong line."""
    line = int(number(answer, "the line"))
    expect(1 <= line <= 5, "give the number of a line, 1 to 5")
    expect(line not in (1, 4), "lines 1 and 4 fit together: the members of a prompt are adjacent")
    expect(line == 3, "this line does what it says: which node is the image, and which the noise?")


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "the reward varies between samples, otherwise nothing could be learned",
            "c": "no reward is evaluated at shifted images; samples and log-probabilities suffice",
        },
    ),
    (
        "a",
        {
            "b": "the group's mean grows by 10, too, and is subtracted",
            "c": "the mean is subtracted before the division",
        },
    ),
    (
        "b",
        {
            "a": "the clip stops a pair with A < 0 only below 1 - c; here it must still shrink",
            "c": "A is negative, so the pair must become less likely",
        },
    ),
    (
        "b",
        {
            "a": "the reward is what training raises; look at the figure of 300 samples",
            "c": "the noise level is a setting of the sampler and is not trained",
        },
    ),
    (
        "b",
        {
            "a": "1e-4 limits the mean over elements; multiply the log-ratio by 65,536",
            "c": "compute (1 + 1e-4) to the power 65,536",
        },
    ),
)
