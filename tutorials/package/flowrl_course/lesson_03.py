"""Checks of the lesson on GRPO."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
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
    same,
    same_gradient,
    tensor,
)

Answer = Callable[..., Any]


@check("Exercise 1")
def check_log_prob(answer: Answer) -> None:
    """`answer(x, mean, std)` is the Gaussian log-density, mean over elements."""
    generator = torch.Generator().manual_seed(0)
    x, mean = (torch.randn(5, 3, generator=generator) for _ in range(2))
    mean, std = mean.requires_grad_(), torch.linspace(0.2, 1.1, 5)
    normal = torch.distributions.Normal(mean, std[:, None])
    truth = normal.log_prob(x).mean(1)
    squares = (x - mean).square()
    constant = std.log() + 0.5 * math.log(2 * math.pi)
    got = answered(answer(x, mean, std), "log_prob")
    expect(
        not isinstance(got, Tensor) or got.shape != (5, 3),
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
    same_gradient(got, truth, mean)


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
    spread = torch.tensor([[1.0], [0.2], [3.0], [0.5]])
    rewards = spread * torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    rewards = rewards + torch.arange(-1.0, 3.0)[:, None]

    def score(mean: Tensor, std: Tensor) -> Tensor:
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
        isinstance(got, Tensor) and got.ndim == 0,
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
    same_gradient(got, torch.maximum(plain, held).mean(), new)


@check("Exercise 5")
def check_kl(answer: Answer) -> None:
    """`answer(mean, reference_mean, std)` is the KL per element."""
    generator = torch.Generator().manual_seed(2)
    mean, reference = (torch.randn(5, 3, generator=generator) for _ in range(2))
    mean, std = mean.requires_grad_(), torch.linspace(0.2, 1.1, 5)
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
    same_gradient(got, truth, mean)


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


@dataclass(frozen=True)
class _Run:
    """One iteration: the rewards that it computed, the arguments of the loss in each mini-batch,
    and the weights after it.
    """

    rewards: list[Tensor]
    losses: list[tuple[Any, ...]]
    weights: Tensor

    def pairs(self, argument: int) -> Tensor:
        """An argument of the loss, 1 the old log-probability and 2 the advantage, in the order of
        the permutation [pair].
        """
        return torch.cat([given[argument].detach().flatten() for given in self.losses])


def _run(notebook: dict[str, Any], net: torch.nn.Module, iteration: Answer) -> _Run:
    """`iteration` with a clip range of 0.02 and three mini-batches, from the present weights of
    `net`, which are restored.
    """
    start = {name: value.clone() for name, value in net.state_dict().items()}
    rewards, losses = [], []
    loss, reward_of = notebook["clipped_loss"], notebook["reward_of"]

    def watched_loss(new: Any, old: Any, advantage: Any, clip_range: Any) -> Any:
        losses.append((new.detach(), old, advantage, clip_range))
        return loss(new, old, advantage, clip_range)

    def watched_reward(points: Any, direction: Any) -> Any:
        rewards.append(reward_of(points, direction))
        return rewards[-1]

    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer.zero_grad()
    notebook |= {"clipped_loss": watched_loss, "reward_of": watched_reward}
    try:
        iteration(optimizer, torch.Generator().manual_seed(5), 0.02, 3)
        weights = torch.cat([value.detach().flatten() for value in net.parameters()])
        return _Run(rewards, losses, weights)
    finally:
        notebook |= {"clipped_loss": loss, "reward_of": reward_of}
        net.load_state_dict(start)


@check("Exercise 6")
def check_iteration(answer: Answer, net: torch.nn.Module) -> None:
    """`answer(optimizer, generator, clip_range, minibatches)` trains `net` for one iteration."""
    notebook = inspect.unwrap(answer).__globals__
    before = torch.cat([value.detach().clone().flatten() for value in net.parameters()])
    right, got = (_run(notebook, net, run) for run in (_iteration(notebook), answer))
    expect(got.losses, "the loss was never computed: call clipped_loss once per mini-batch")
    expect(
        len(got.losses) == 3,
        f"the loss was computed {len(got.losses)} times for 3 mini-batches: split the permutation"
        " with chunk(minibatches), and compute one loss for each chunk",
    )
    seen, wanted = (sum(len(new) for new, *_ in run.losses) for run in (got, right))
    expect(
        seen == wanted,
        f"the mini-batches have {seen} pairs instead of {wanted}: a sample has STEPS - 1",
    )
    expect(
        all(given[3] == 0.02 for given in got.losses),
        "the clip range is not the argument: pass clip_range",
    )
    if got.rewards:
        _check_rewards(notebook, got.rewards[-1], right.rewards[-1])
    _check_log_probs(got, right)
    _check_advantages(notebook, got, right)
    _check_order(notebook, got, right)
    expect(
        not same(got.weights, before),
        "the weights did not change: loss.backward(), optimizer.step()",
    )
    faults = {
        "add": "gradients add up over the mini-batches: call optimizer.zero_grad() before backward",
        "up": "the update makes the loss larger: clipped_loss is a loss already, minimise it",
    }
    close(
        got.weights,
        right.weights,
        "the mini-batches are right, but not the update: zero_grad, backward and step, once each",
        {
            text: _run(notebook, net, _iteration(notebook, name)).weights
            for name, text in faults.items()
        },
    )


def _check_rewards(notebook: dict[str, Any], got: Tensor, right: Tensor) -> None:
    """The rewards [sample], in the order of the samples."""
    generator, reward_of = torch.Generator().manual_seed(5), notebook["reward_of"]
    members, steps = notebook["MEMBERS"], notebook["STEPS"]
    with torch.no_grad():
        prompts = notebook["directions"](notebook["PROMPTS"], generator)
        state = generator.get_state()

        def nodes(direction: Tensor, random_steps: int) -> Tensor:
            return notebook["rollout"](direction, generator.set_state(state), random_steps)

        own, mixed = prompts.repeat_interleave(members, 0), prompts.repeat(members, 1)
        mistakes = {
            "these are the rewards of node 0, the noise: the image is the last node": reward_of(
                nodes(own, steps - 1)[0], own
            ),
            "the last step is random too: it follows the ODE, as in rollout(direction, "
            "generator)": reward_of(nodes(own, steps)[-1], own),
            "the members of a prompt are not adjacent: use repeat_interleave, not repeat": (
                reward_of(nodes(mixed, steps - 1)[-1], mixed)
            ),
        }
    close(
        got.detach().flatten(),
        right,
        "these are not the rewards of the last nodes: draw the directions, then roll out, both with"
        " `generator`, and score every sample with its own direction",
        mistakes,
    )


def _check_log_probs(got: _Run, right: _Run) -> None:
    """The old log-probabilities, whatever the order of the pairs."""
    new, old, *_ = got.losses[0]
    expect(
        same(new, old, 1e-5),
        "the first ratio is not 1: the old log-probability belongs to another pair, state, next"
        " state or direction than the new one",
    )
    expect(
        not same(got.losses[2][0], got.losses[2][1], 1e-9),
        "the last ratio is exactly 1: compute the old log-probability once, before the updates,"
        " and take a step of the optimizer after every mini-batch",
    )
    close(
        got.pairs(1).sort().values,
        right.pairs(1).sort().values,
        "these are not the log-probabilities of the rollout's own transitions: a pair leads from"
        " nodes[step, sample] to nodes[step + 1, sample], with direction[sample]",
    )


def _check_advantages(notebook: dict[str, Any], got: _Run, right: _Run) -> None:
    """The advantages of the pairs, whatever their order."""
    rewards, score = right.rewards[-1], notebook["group_advantage"]
    groups = rewards.view(notebook["PROMPTS"], notebook["MEMBERS"])
    credits = {
        "the advantages have the wrong sign: a better sample has a larger one": -score(groups),
        "these are the rewards: compare them within each group with group_advantage": rewards,
        "the mean of the group is subtracted, but not divided by its std: use group_advantage": (
            groups - groups.mean(1, keepdim=True)
        ),
        "all samples are one group here: view the rewards as [PROMPTS, MEMBERS]": score(
            rewards[None]
        ),
        "the rows are not groups: view the rewards as [PROMPTS, MEMBERS]": score(
            rewards.view(notebook["MEMBERS"], notebook["PROMPTS"])
        ),
    }
    steps = notebook["STEPS"] - 1
    otherwise = "a pair has another advantage than its sample: advantage[sample]"
    close(
        got.pairs(2).sort().values,
        right.pairs(2).sort().values,
        otherwise,
        {text: credit.flatten().repeat(steps).sort().values for text, credit in credits.items()},
    )
    close(got.pairs(2)[got.pairs(1).argsort()], right.pairs(2)[right.pairs(1).argsort()], otherwise)


def _check_order(notebook: dict[str, Any], got: _Run, right: _Run) -> None:
    """The order of the pairs in the mini-batches."""
    samples, steps = notebook["PROMPTS"] * notebook["MEMBERS"], notebook["STEPS"] - 1
    order = torch.arange(len(right.pairs(1)))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        direction = notebook["directions"](notebook["PROMPTS"], generator)
        notebook["rollout"](direction.repeat_interleave(notebook["MEMBERS"], 0), generator)
    permutation = torch.randperm(len(order), generator=generator)
    plain = right.pairs(1)[permutation.argsort()]  # by the number of the pair
    close(
        got.pairs(1),
        right.pairs(1),
        "the permutation is another one: draw torch.randperm with `generator`, after the rollout",
        {
            "the pairs are not shuffled: split torch.randperm(pairs), not the pairs": plain,
            "the pairs are numbered step by step: number them sample * (STEPS - 1) + step": (
                plain.view(samples, steps).T.flatten()[permutation]
            ),
        },
    )


def _iteration(notebook: dict[str, Any], fault: str = "") -> Answer:
    """The iteration of the exercise with the lesson's functions, or with one fault of its update:
    "add" or "up".
    """
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
        sample, step = pairs[order].unbind(1)

        def log_probs(part: Tensor) -> Tensor:
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
            (-lost if fault == "up" else lost).backward()
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
