"""Checks of the lesson on GRPO."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
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
    whole,
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
        "the normalisation is missing: the density must integrate to 1": -squares.mean(1)
        / (2 * std**2),
        "a factor 2 is missing: the exponent of a Gaussian has it": (
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
        "divided by std once: differentiate log pi by the mean again": (
            (rewards - baseline) * (x - mean) / std
        ),
        "the variance is missing: the derivative is larger where there is less noise": (
            (rewards - baseline) * (x - mean)
        ),
        "the 2 of the exponent cancels: a square's derivative has a factor 2": (
            (rewards - baseline) * score / 2
        ),
        "the baseline is missing: it is subtracted from the reward": rewards * score,
        "the baseline is subtracted from the product; subtract it from the reward": (
            rewards * score - baseline
        ),
        "the baseline is added: subtract it": (rewards + baseline) * score,
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
        "this is not the weighted derivative of log pi: differentiate it by the mean, sample by"
        " sample",
        mistakes,
    )
    each = answer(x, mean, std, rewards, rewards)
    expect(same(each, torch.zeros(6)), "the baseline may be one number per sample, too")


NO_CONSTANT = (
    "equal rewards get 0, but the public code adds 1e-4 to the std: do the same, so that the loop"
    " below has its numbers"
)


@check("Exercise 3")
def check_group_advantage(answer: Answer) -> None:
    """`answer(rewards)` is the z-score within each prompt."""
    spread = torch.tensor([[1.0], [0.2], [3.0], [0.5]])
    rewards = spread * torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    rewards = rewards + torch.arange(-1.0, 3.0)[:, None]

    means = {
        "": rewards.mean(1, keepdim=True),
        "the mean of the same member over all prompts is subtracted: take the mean over the members"
        " of each prompt (dim=1, keepdim=True)": rewards.mean(0, keepdim=True),
        "the mean of all prompts is subtracted: take the mean over the members of each prompt"
        " (dim=1, keepdim=True)": rewards.mean(),
    }
    stds = {
        "": rewards.std(1, correction=0, keepdim=True),
        "this divides by G - 1: torch's std does so by default; write correction=0": rewards.std(
            1, keepdim=True
        ),
        "the std of all prompts is used: take the std of each prompt": rewards.std(correction=0),
        "the std of the same member over all prompts is used: take dim=1": rewards.std(
            0, correction=0, keepdim=True
        ),
        "divided by the variance: take the standard deviation": rewards.var(
            1, correction=0, keepdim=True
        ),
        "the mean is taken off, but not divided by the std of the group": torch.tensor(1 - 1e-4),
    }
    silent = tensor(answer(torch.full((2, 3), 0.7)), (2, 3), "the advantages")
    expect(bool(torch.isfinite(silent).all()), "a group of equal rewards gives nan: add 1e-4")
    expect(float(silent.abs().max()) < 1e-2, "a group of equal rewards must get 0")
    got = tensor(answer(rewards), (4, 6), "the advantages")
    right = (rewards - means[""]) / (stds[""] + 1e-4)
    mistakes = {"the sign is wrong: more reward than the group is positive": -right}
    for (of_mean, mean), (of_std, std), small in product(means.items(), stds.items(), (1e-4, 0.0)):
        message = of_mean or of_std or NO_CONSTANT
        if (of_mean or of_std or not small) and same(got, (rewards - mean) / (std + small), 1e-6):
            mistakes[message] = (rewards - mean) / (std + small)
    close(
        got,
        right,
        "this is not the deviation from the group's mean in its (population) standard deviations,"
        " within each prompt; add 1e-4 to the std",
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
        "a quotient of log-probabilities is not the ratio of the probabilities": (
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
        "this is not the mean of the pessimistic loss: compare the terms of one pair by hand",
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
        "a factor 2 is missing: take the difference of two Gaussian log-densities": truth * 2,
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
        "this is not the KL of the two Gaussians, averaged over elements: compare one element with"
        " torch.distributions.kl_divergence",
        mistakes,
    )
    same_gradient(got, truth, mean)


@check("Exercise 10")
def check_translated_clip(answer: Answer) -> None:
    """`answer(clip_range, elements, own_elements)` is the clip range for the same change per
    element.
    """
    for clip, elements, own in ((1e-4, 65536, 1024), (0.02, 4, 400)):
        right, factor = clip * (elements / own) ** 0.5, elements / own
        mistakes = {
            "this is the inverse factor: with fewer elements the ratio moves further from 1, "
            "so the range grows": (clip / factor**0.5),
            "the spread of a mean of d numbers falls more slowly than 1 / d: take the root": (
                clip * factor
            ),
            "the range is unchanged, but the spread of the ratio depends on the elements": clip,
            "this is the change per element; convert it back for your own number of elements": (
                clip * elements**0.5
            ),
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
            message or "this does not keep the change per element constant",
        )


@check("Exercise 11")
def check_diagnosis(answer: dict[int, str]) -> None:
    """`answer` maps the logs 1, 2, 3 to the settings A, B, C."""
    expect(
        isinstance(answer, dict) and set(answer) == {1, 2, 3},
        "give a dict with the keys 1, 2 and 3",
    )
    answered(None if ... in answer.values() else answer, "the diagnosis")
    given = {log: choice(letter, "abc").upper() for log, letter in answer.items()}
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


@contextmanager
def _awake(net: torch.nn.Module, size: float) -> Iterator[None]:
    """`net` with fixed weights, of `size` in its last layer, so that its output depends on the
    prompt and not on training; its own weights are restored.
    """
    start = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad(), torch.random.fork_rng([]):
        torch.manual_seed(8)
        for layer in net.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.reset_parameters()
        for value in list(net.parameters())[-2:]:
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(8))
            value.copy_(size * noise)
    try:
        yield
    finally:
        net.load_state_dict(start)


def _unit(count: int) -> Tensor:
    """Directions [sample, 2], all different."""
    angle = torch.linspace(0, 2 * math.pi, count + 1)[:-1]
    return torch.stack([angle.cos(), angle.sin()], dim=1)


@check("Exercise 6")
def check_rollout(answer: Answer, net: torch.nn.Module) -> None:
    """`answer(direction, generator, random_steps)` returns the nodes of a rollout."""
    notebook, direction = inspect.unwrap(answer).__globals__, _unit(400)
    steps = notebook["STEPS"]

    def run(*options: int, seed: int = 4) -> Tensor:
        with torch.no_grad():
            try:
                got = answer(direction, torch.Generator().manual_seed(seed), *options)
            except ConfigError as error:
                alone = "velocity: t = " in str(error)
                expect(not alone, "velocity needs a time for every sample, not one number")
                raise
        shape = tuple(got.shape) if isinstance(got, Tensor) else ()
        expect(
            shape != (steps, 400, 2),
            f"there are {steps} nodes; {steps} steps have one node more: count the noise as node 0",
        )
        expect(
            shape != (400, steps + 1, 2), "the axes are [node, sample, 2]: stack along dimension 0"
        )
        expect(shape != (400, 2), "only the last node came back: keep all nodes in a list")
        return tensor(got, (steps + 1, 400, 2), "the result")

    with _awake(net, 20.0):
        mixed = run(3)
        expect(
            same(run(3), mixed, 1e-6),
            "the same generator gives other nodes: pass `generator` to every torch.randn",
        )
        expect(not same(run(3, seed=5), mixed), "another generator gives the same nodes")
        _check_noise(mixed[0], "node 0, the noise,")
        for nodes, count in ((mixed, 3), (run(), steps - 1), (run(0), 0)):
            _check_steps(notebook, nodes, direction, count)


def _check_noise(noise: Tensor, what: str) -> None:
    """Whether `noise` [sample, 2] is standard normal, with a false alarm in 10,000 at most."""
    mean, std, fourth = float(noise.mean()), float(noise.std()), float((noise**4).mean())
    expect(std > 1e-3, f"{what} is missing")
    expect(
        len(noise[:, 0].round(decimals=4).unique()) > 0.9 * len(noise),
        f"{what} is equal for several samples: draw [sample, 2] numbers",
    )
    expect(
        abs(mean) < 0.16 and abs(std - 1) < 0.12,
        f"{what} has mean {mean:.2f} and standard deviation {std:.2f} instead of 0 and 1",
    )
    expect(
        abs(fourth - 3) < 1.1, f"{what} is not normal: use torch.randn, not torch.rand or its like"
    )
    expect(
        abs(float(torch.corrcoef(noise.T)[0, 1])) < 0.22,
        f"{what} is equal in both coordinates: draw [sample, 2] numbers",
    )


def _check_steps(notebook: dict[str, Any], nodes: Tensor, direction: Tensor, count: int) -> None:
    """Whether the first `count` steps are draws of the policy, and the others ODE steps."""
    times, steps, noises = notebook["times"], notebook["STEPS"], [nodes[0]]
    for i in range(steps):
        x, step = nodes[i], torch.full((len(direction),), i)
        with torch.no_grad():
            mean, std = notebook["transition"](x, step, direction)
            v = notebook["velocity"](x, times[step], direction)
            late = notebook["velocity"](x, times[step + 1], direction)
        delta, where = times[i] - times[i + 1], f"with random_steps={count}, step {i}"
        ode, drawn = x - delta * v, (nodes[i + 1] - mean) / std[:, None]
        if i < count:
            expect(
                all(
                    float(((nodes[i + 1] - other) / std[:, None]).abs().max()) > 0.05
                    for other in (ode, mean)
                ),
                f"{where} draws nothing: the first {count} steps are random",
            )
            expect(
                all(not same(drawn, noise, 1e-3) for noise in noises),
                f"{where} uses the noise of an earlier node again: draw inside the loop",
            )
            expect(
                not same(drawn, drawn[:1].expand_as(x), 0.01),
                f"{where} has one draw for all samples: draw x.shape numbers",
            )
            _check_noise(drawn, f"{where}: (next node - mean) / std")
            noises.append(drawn)
            continue
        length = f"{where} has another length: an ODE step from t to s is (t - s) long"
        close(
            nodes[i + 1],
            ode,
            f"{where} is not an ODE step: take v at the time and the node where the step starts",
            {
                f"{where} moves away from the data: v points towards noise, and t falls": x
                + delta * v,
                f"{where} uses the mean of the random step: an ODE step has no score correction": (
                    mean
                ),
                f"{where} uses the velocity at the time where it ends: take times[i]": (
                    x - delta * late
                ),
                # the last step ends at time 0, where both are the same
                **({length: x - times[i] * v} if times[i + 1] > 0 else {}),
            },
        )


@check("Exercise 7")
def check_credit(answer: Answer) -> None:
    """`answer(nodes, direction, score)` is the group advantage at every decision."""
    notebook, generator = inspect.unwrap(answer).__globals__, torch.Generator().manual_seed(6)
    members, steps, count = (notebook[name] for name in ("MEMBERS", "STEPS", "PROMPTS"))
    direction = _unit(count).repeat_interleave(members, 0)
    spread = torch.linspace(0.3, 1.5, count).repeat_interleave(members)[:, None]
    nodes = 2 * direction + spread * torch.randn(steps + 1, len(direction), 2, generator=generator)
    got, decisions = answered(answer(nodes, direction), "credit"), steps - 1
    if isinstance(got, Tensor):
        for shape, text in {
            (len(direction),): "this is one number per sample; repeat it for every decision",
            (count, members): "flatten the groups, and repeat each number for every decision",
            (len(direction), steps): "the last step is an ODE step: it draws nothing, so it is no"
            " decision",
            (decisions, len(direction)): "the axes are [sample, decision]",
            (steps + 1, len(direction)): "a node is not a decision: only the last node is scored",
        }.items():
            expect(tuple(got.shape) != shape, text)
    rewards = torch.exp(-(nodes - 2 * direction).square().sum(-1) / 2)
    final = rewards[-1].view(count, members)

    def score(values: Tensor, groups: Tensor | None = None) -> Tensor:
        groups = values if groups is None else groups
        centred = values - groups.mean(1, keepdim=True)
        return centred / (groups.std(1, correction=0, keepdim=True) + 1e-4)

    def table(values: Tensor) -> Tensor:
        return values.flatten()[:, None].expand(-1, decisions)

    mistakes = {
        "the advantages have the wrong sign: a better sample has a larger one": -score(final),
        "these are the rewards: compare them within each group with group_advantage": final,
        "the group's mean is subtracted, but not divided by its std: use group_advantage": (
            final - final.mean(1, keepdim=True)
        ),
        "all samples are one group here: view the rewards as [prompt, MEMBERS]": score(
            rewards[-1][None]
        ),
        "the rows are not groups: the members of a prompt are adjacent, so view the rewards as"
        " [prompt, MEMBERS]": score(rewards[-1].view(members, count)),
        "the columns are not groups: the members of a prompt are adjacent": score(
            rewards[-1].view(members, count).T
        ).T,
        "this scores node 0, the noise: the finished sample is the last node": score(
            rewards[0].view(count, members)
        ),
        "this scores the state before the last step: the finished sample is the last node": score(
            rewards[-2].view(count, members)
        ),
    }
    close(
        tensor(got, (len(direction), decisions), "the credit"),
        table(score(final)),
        "this is not the group advantage of the sample's reward at every decision",
        {text: table(value) for text, value in mistakes.items()},
    )
    doubled = answer(nodes, direction, lambda points, _: (points - 1).square().sum(-1))
    other = score((nodes[-1] - 1).square().sum(-1).view(count, members))
    expect(same(doubled, table(other)), "another score has no effect: compute rewards with `score`")


@dataclass(frozen=True)
class _Update:
    """The arguments of the loss in each mini-batch of an update, and the weights after it."""

    losses: list[tuple[Any, ...]]
    weights: Tensor

    def pairs(self, argument: int) -> Tensor:
        """An argument of the loss, 1 the old log-probability and 2 the advantage, [pair]."""
        return torch.cat([given[argument].detach().flatten() for given in self.losses])


@dataclass(frozen=True)
class _Task:
    """A rollout of the lesson's policy with random advantages, and its pairs [pair, 2]."""

    notebook: dict[str, Any]
    net: torch.nn.Module
    nodes: Tensor
    direction: Tensor
    advantage: Tensor
    every: Tensor

    @classmethod
    def new(cls, notebook: dict[str, Any], net: torch.nn.Module) -> "_Task":
        generator, steps = torch.Generator().manual_seed(5), notebook["STEPS"]
        direction = _unit(notebook["PROMPTS"]).repeat_interleave(notebook["MEMBERS"], 0)
        nodes = [torch.randn(direction.shape, generator=generator)]
        for i in range(steps):
            with torch.no_grad():
                step = torch.full((len(direction),), i)
                mean, std = notebook["transition"](nodes[-1], step, direction)
            noise = torch.randn(direction.shape, generator=generator)
            nodes.append(mean + std[:, None] * noise)
        pairs = torch.cartesian_prod(torch.arange(len(direction)), torch.arange(steps - 1))
        advantage = torch.randn(len(direction), steps - 1, generator=generator)
        return cls(notebook, net, torch.stack(nodes), direction, advantage, pairs)

    def log_probs(self, pairs: Tensor) -> Tensor:
        """Under the present weights, [pair]."""
        sample, step = self.every[pairs].unbind(1)
        gaussian = self.notebook["transition"](
            self.nodes[step, sample], step, self.direction[sample]
        )
        return self.notebook["log_prob"](self.nodes[step + 1, sample], *gaussian)

    def run(self, answer: Answer, seed: int = 7) -> _Update:
        """`answer` with a clip range of 0.02 and three mini-batches; weights are restored."""
        start = {name: value.clone() for name, value in self.net.state_dict().items()}
        losses, loss = [], self.notebook["clipped_loss"]

        def watched(new: Any, old: Any, advantage: Any, clip_range: Any) -> Any:
            expect(
                not old.requires_grad,
                "the old log-probabilities carry a gradient: compute them under torch.no_grad()",
            )
            losses.append((new.detach(), old, advantage, clip_range))
            return loss(new, old, advantage, clip_range)

        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        optimizer.zero_grad()
        self.notebook["clipped_loss"] = watched
        given = self.nodes, self.direction, self.advantage
        try:
            answer(optimizer, *given, 0.02, 3, torch.Generator().manual_seed(seed))
            weights = torch.cat([value.detach().flatten() for value in self.net.parameters()])
            return _Update(losses, weights)
        finally:
            self.notebook["clipped_loss"] = loss
            self.net.load_state_dict(start)

    def updated(self, chunks: list[Tensor], fault: str = "") -> Tensor:
        """The weights after an update with these pairs per mini-batch; a fault is "add" or "up"."""

        def update(optimizer: Any, *_: Any) -> None:
            with torch.no_grad():
                old = [self.log_probs(pairs) for pairs in chunks]
            for pairs, before in zip(chunks, old, strict=True):
                if fault != "add":
                    optimizer.zero_grad()
                sample, step = self.every[pairs].unbind(1)
                lost = self.notebook["clipped_loss"](
                    self.log_probs(pairs), before, self.advantage[sample, step], 0.02
                )
                (-lost if fault == "up" else lost).backward()
                optimizer.step()

        return self.run(update).weights


@check("Exercise 8")
def check_update(answer: Answer, net: torch.nn.Module) -> None:
    """`answer(optimizer, nodes, direction, advantage, clip_range, minibatches, generator)`
    trains `net` on all pairs once.
    """
    notebook = inspect.unwrap(answer).__globals__
    with _awake(net, 1.0):
        task = _Task.new(notebook, net)
        before = torch.cat([value.detach().clone().flatten() for value in net.parameters()])
        got = task.run(answer)
        expect(got.losses, "no loss yet: replace the dots, and call clipped_loss in each chunk")
        expect(
            len(got.losses) == 3,
            f"the loss was computed {len(got.losses)} times for 3 mini-batches: split the"
            " permutation with chunk(minibatches), and compute one loss for each chunk",
        )
        expect(
            all(given[3] == 0.02 for given in got.losses),
            "the clip range is not the argument: pass clip_range",
        )
        chunks = _chunks(task, got)
        _check_shuffled(task, torch.cat(chunks))
        other = task.run(answer)
        expect(
            same(other.pairs(1), got.pairs(1), 1e-6),
            "the same generator gives another order: pass `generator` to torch.randperm",
        )
        expect(
            not same(task.run(answer, seed=8).pairs(1), got.pairs(1), 1e-6),
            "another generator gives the same order: pass `generator` to torch.randperm",
        )
        expect(
            not same(got.weights, before, 1e-7),
            "the weights did not change: loss.backward(), optimizer.step()",
        )
        faults = {
            "add": "gradients add up over the mini-batches: call optimizer.zero_grad() before"
            " backward",
            "up": "the update makes the loss larger: clipped_loss is a loss already, minimise it",
        }
        close(
            got.weights,
            task.updated(chunks),
            "the mini-batches are right, but not the update: zero_grad, backward and step, once"
            " each",
            {text: task.updated(chunks, name) for name, text in faults.items()},
            1e-5,
        )


def _chunks(task: _Task, got: _Update) -> list[Tensor]:
    """The numbers of the pairs in each mini-batch, from the arguments of the loss."""
    seen = sum(len(new) for new, *_ in got.losses)
    expect(
        seen == len(task.every),
        f"the mini-batches have {seen} pairs instead of {len(task.every)}: a sample has STEPS - 1"
        " decisions, and each pair is used once",
    )
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
    with torch.no_grad():
        log_probs = task.log_probs(torch.arange(len(task.every)))
    close(
        got.pairs(1).sort().values,
        log_probs.sort().values,
        "these are not the log-probabilities of all transitions: a pair leads from"
        " nodes[step, sample] to nodes[step + 1, sample], with direction[sample], and occurs once",
    )
    places = torch.stack([got.pairs(1), got.pairs(2)], dim=1).double()
    known = torch.stack([log_probs, task.advantage.flatten()], dim=1).double()
    distance, number = torch.cdist(places, known).min(dim=1)
    expect(
        float(distance.max()) < 1e-3 and len(number.unique()) == len(number),
        "a pair has another pair's advantage: take advantage[sample, step]",
    )
    return list(number.split([len(given[0]) for given in got.losses]))


def _check_shuffled(task: _Task, order: Tensor) -> None:
    """Whether neither samples nor steps follow each other."""
    sample, step = task.every[order].T.float()
    place = torch.arange(len(order)).float()
    for name, values in (("samples", sample), ("steps", step)):
        related = float(torch.corrcoef(torch.stack([place, values]))[0, 1])
        expect(
            abs(related) < 0.2,
            f"the pairs are not shuffled, and the {name} follow each other: chunk a torch.randperm"
            " of the pairs",
        )
    neighbours = (sample[1:] == sample[:-1]).float().mean()
    expect(neighbours < 0.2, "only whole samples are shuffled: chunk a torch.randperm of all pairs")


@check("Exercise 9")
def check_one_minibatch(answer: str) -> None:
    """`answer` is the predicted fraction of clipped pairs with one mini-batch."""
    letter = choice(answer, "abc")
    expect(letter != "c", "the size of the mini-batch plays no role: which policy drew the pairs?")
    expect(
        letter == "a",
        "with four mini-batches the later ones see changed weights: how many are there with one?",
    )


@check("Exercise 12")
def check_wrong_line(answer: int) -> None:
    """`answer` is the number of the wrong line."""
    line = whole(answer, "the line")
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
