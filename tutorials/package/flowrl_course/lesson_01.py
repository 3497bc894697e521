"""Checks of the lesson on flow matching."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flowrl.flow import GaussianMixture, interpolate, tweedie
from flowrl_course.checking import (
    Unsolved,
    answered,
    check,
    choice,
    close,
    decide,
    expect,
    number,
    quiz,
    same,
    same_gradient,
    tensor,
)

Answer = Callable[..., Any]


def _batch(count: int = 5, dim: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    clean, noise = (2 * torch.randn(count, dim, generator=generator) for _ in range(2))
    return clean, noise, torch.linspace(0.1, 0.9, count)


@check("Exercise 1")
def check_interpolate(answer: Answer) -> None:
    """`answer(clean, noise, time)` is x_t."""
    clean, noise, time = _batch(3, 3)
    t = 0.3  # equal for all samples: the axes do not matter yet
    mistakes = {
        "the ends are swapped: at t = 0 the result must be the data, at t = 1 the noise": (
            (1 - t) * noise + t * clean
        ),
        "this moves away from the noise: the way from x_0 to eps is eps - x_0": (
            clean + t * (clean - noise)
        ),
        "the data are not scaled by (1 - t): the weights of the two ends must add up to 1": (
            clean + t * noise
        ),
        "the speed is not constant: t is squared": clean + t**2 * (noise - clean),
        "this is the velocity eps - x_0, not the point on the line": noise - clean,
    }
    got = tensor(answer(clean, noise, torch.full((3,), t)), (3, 3), "x_t")
    otherwise = "x_t is not the point at the fraction t of the way from x_0 to eps"
    close(got, (1 - t) * clean + t * noise, otherwise, mistakes)
    expect(
        not same(answer(clean, noise, time), (1 - time) * clean + time * noise),
        "times are spread over the dimensions, not the samples: write time[:, None]",
    )
    clean, noise, time = _batch()
    got = tensor(answer(clean, noise, time), (5, 3), "x_t")
    close(got, interpolate(clean, noise, time), otherwise)


@check("Exercise 2")
def check_loss(answer: Answer) -> None:
    """`answer(network, clean, noise, time)` is the flow matching loss."""
    clean, noise, time = _batch()
    weight = torch.tensor(0.7, requires_grad=True)
    seen: list[tuple[Tensor, Tensor]] = []

    def network(x: Tensor, t: Tensor) -> Tensor:
        seen.append((x.detach().clone(), t.detach().clone()))
        return weight * x

    got = answered(answer(network, clean, noise, time), "flow_matching_loss")
    expect(bool(seen), "the network was not called")
    x = interpolate(clean, noise, time)
    for wrong, what in ((clean, "the clean data"), (noise, "the noise")):
        expect(not same(seen[0][0], wrong), f"the network was given {what}; it must see x_t only")
    expect(same(seen[0][0], x), "the network was not given x_t")
    expect(same(seen[0][1], time), "the network was not given the times [sample]")
    squares = (0.7 * x - (noise - clean)).square()
    mistakes = {
        "the sign of the target is wrong: time grows towards noise": (
            (0.7 * x - (clean - noise)).square().mean()
        ),
        "the target is the noise; that is another parametrisation: differentiate x_t by t": (
            (0.7 * x - noise).square().mean()
        ),
        "the target is the data; that is another parametrisation: differentiate x_t by t": (
            (0.7 * x - clean).square().mean()
        ),
        "this is a sum; take the mean over samples and dimensions": squares.sum(),
        "this is summed over dimensions; take the mean over them too": squares.sum(1).mean(),
        "this is the root of the mean square; take no root": squares.mean().sqrt(),
        "these are absolute values; square the differences": squares.sqrt().mean(),
    }
    expect(
        not isinstance(got, float),
        "the loss is a plain number, and carries no gradient: leave out .item()",
    )
    expect(
        isinstance(got, Tensor) and got.ndim == 0,
        "the loss must be one number: take the mean over samples and dimensions",
    )
    close(got, squares.mean(), "this is not the mean square of the velocity's error", mistakes)
    expect(
        got.requires_grad,
        "the loss carries no gradient to the network: do not detach or use .item()",
    )
    same_gradient(got, (weight * x - (noise - clean)).square().mean(), weight)


@check("Exercise 3")
def check_train(answer: Answer) -> None:
    """`answer(velocity, optimizer, data, updates, generator, size)` trains and returns losses."""
    ring, updates, size = GaussianMixture.ring(), 3, 400
    seen: list[tuple[Tensor, Tensor]] = []
    drawn: list[Tensor] = []
    weight = torch.nn.Parameter(torch.zeros(()))

    class Data:
        """The ring, which records what it gives out."""

        def sample(self, count: int, generator: torch.Generator) -> Tensor:
            drawn.append(ring.sample(count, generator))
            return drawn[-1]

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        seen.append((x.detach().clone(), t.detach().clone()))
        return weight * x

    def train() -> tuple[Any, float]:
        weight.data.zero_()
        weight.grad = None
        seen.clear()
        drawn.clear()
        optimizer = torch.optim.SGD([weight], lr=0.2)
        generator = torch.Generator().manual_seed(4)
        losses = answered(answer(velocity, optimizer, Data(), updates, generator, size), "train")
        return losses, weight.item()

    losses, trained = train()
    expect(len(losses) > 0, "the list of losses is empty: append one number per update")
    expect(
        all(isinstance(loss, float) for loss in losses),
        "the losses are tensors, which keep their graphs in memory: append loss.item()",
    )
    expect(
        len(losses) == updates == len(seen),
        f"{len(losses)} losses for {updates} updates: make one update per turn of the loop",
    )
    expect(len(drawn) == updates, "all updates see the same data: sample inside the loop")
    expect(same(train()[1], trained), "two runs with equal generators differ: pass `generator`")
    plain, summed, total, wanted = 0.0, 0.0, 0.0, []
    earlier: Tensor | None = None
    for clean, (x, t) in zip(drawn, seen, strict=True):
        expect(t.shape == (size,) == clean.shape[:1], "each of the `size` samples needs a time")
        expect(t.std() > 0.01, "the whole batch has one time: draw torch.rand(size)")
        uniform = t.min() >= 0 and t.max() <= 1 and abs(t.std() - 12**-0.5) < 0.05
        expect(uniform, "the times are not uniform on [0, 1]: use torch.rand, not torch.randn")
        noise = (x - (1 - t[:, None]) * clean) / t[:, None]
        late = noise[t > 0.1]
        standard = abs(late.mean()) < 0.2 and abs(late.std() - 1) < 0.2
        expect(late.std(0).min() > 0.1, "the noise is equal for all samples: torch.randn(size, 2)")
        own = len(late[:, 0].round(decimals=4).unique()) > 0.9 * len(late)
        expect(own, "several samples share their noise: each needs two numbers of its own")
        shared = earlier is not None and bool(((noise - earlier).abs() < 1e-3).float().mean() > 0.5)
        expect(
            not shared, "all updates use the same noise: draw it inside the loop, by `generator`"
        )
        earlier = noise
        expect(standard, "the noise is not standard normal: use torch.randn")
        related = float(torch.corrcoef(late.T)[0, 1])
        expect(abs(related) < 0.5, "both coordinates get the same noise: torch.randn(size, 2)")
        target = noise - clean
        wanted.append(float((plain * x - target).square().mean()))
        plain -= 0.2 * float((2 * x * (plain * x - target)).mean())
        total += float((2 * x * (summed * x - target)).mean())
        summed -= 0.2 * total
    expect(
        any(not same(seen[0][1], t) for _, t in seen[1:]),
        "all updates use the same times: draw them inside the loop",
    )
    expect(trained != 0, "the weights did not change: loss.backward(), then optimizer.step()")
    mistakes = {"gradients add up over the updates: call optimizer.zero_grad()": summed}
    close(trained, plain, "the weights are not those of one step per update", mistakes, 1e-3)
    close(
        torch.tensor(losses),
        torch.tensor(wanted),
        "these are not the losses of the updates, in their order: append loss.item() in each",
        tolerance=1e-3,
    )


@check("Exercise 4")
def check_exact_loss(answer: str) -> None:
    """`answer` is the predicted loss of the exact velocity."""
    letter = choice(answer, "abc")
    expect(
        letter != "a",
        "the exact velocity is not the target: compare a single target with the mean of all"
        " targets at the same point",
    )
    expect(letter == "c", "nothing halves the variance: compare it with the network's loss")


def _field(x: Tensor, t: Tensor) -> Tensor:
    expect(
        t.shape == x.shape[:1],
        f"velocity was given a time of shape {tuple(t.shape)}; it needs one per sample,"
        " t.expand(len(x))",
    )
    return x * (1 + t[:, None] ** 2)


def _path(noise: Tensor, times: Tensor, sign: float = -1.0, ahead: int = 0) -> Tensor:
    nodes = [noise]
    for i in range(len(times) - 1):
        nodes.append(
            nodes[-1]
            + sign
            * (times[i] - times[i + 1])
            * _field(nodes[-1], times[i + ahead].expand(len(noise)))
        )
    return torch.stack(nodes)


@check("Exercise 5")
def check_euler(answer: Answer) -> None:
    """`answer(velocity, noise, times)` gives all nodes of Euler's path."""
    noise, times = _batch()[1], torch.tensor([1.0, 0.7, 0.3, 0.0])
    try:
        got = answered(answer(_field, noise.clone(), times), "euler")
    except IndexError as error:
        raise Unsolved(
            f"your code raised IndexError: {error}. The grid has T + 1 times and T steps: the last"
            " step starts at node T - 1"
        ) from None
    expect(
        isinstance(got, Tensor) and got.ndim == 3, "return all nodes stacked, [node, sample, dim]"
    )
    expect(len(got) != 1, "only the noise came back: append one node per step")
    expect(
        len(got) == 4,
        f"{len(got)} nodes came back for a grid of 4 times (3 steps); node 0 is the noise itself",
    )
    mistakes = {
        "the sign is wrong: v points towards noise, and time runs down": _path(
            noise, times, sign=1.0
        ),
        "the velocity is taken at t_{i+1}; take it where the step starts, at t_i": _path(
            noise, times, ahead=1
        ),
        "all steps have the same length here; the grid is uneven: use t_i - t_{i+1}": _path(
            noise, torch.linspace(1, 0, 4)
        ),
    }
    even = [noise]
    for t in times[:-1]:
        even.append(even[-1] - _field(even[-1], t.expand(len(noise))) / 3)
    mistakes["all steps have the same length; the grid may be uneven: use t_i - t_{i+1}"] = (
        torch.stack(even)
    )
    expect(
        not all(same(node, got[0]) for node in got),
        "all nodes are the same: `x -= ...` changes the tensor that is already in the list; write x"
        " = x - ...",
    )
    close(
        got,
        _path(noise, times),
        "these are not the nodes of Euler's path: follow one step by hand",
        mistakes,
    )


@check("Exercise 6")
def check_one_step(answer: str) -> None:
    """`answer` is where a single Euler step ends."""
    reasons = {
        "a": "the blob is not determined yet: which information about x_0 does pure noise contain?",
        "c": "the radius of the samples is not that of the data: compute v(x, 1)",
        "d": "the noise does not remain: a step of length 1 subtracts v(x, 1) = x - E[x_0]",
    }
    decide(answer, "b", reasons)


@check("Exercise 7")
def check_tweedie(answer: Answer) -> None:
    """`answer(x, velocity, time)` is the clean estimate."""
    x, velocity, time = _batch()
    got = tensor(answer(x, velocity, time), (5, 3), "the estimate")
    t = time[:, None]
    mistakes = {
        "the sign is wrong: v points towards noise, so subtract it": x + t * velocity,
        "the whole velocity is subtracted: for how long does a state at time t still move?": x
        - velocity,
        "this uses 1 - t, the time already passed; t remains": x - (1 - t) * velocity,
        "this is the estimate of the noise: go to time 0, not to time 1": x + (1 - t) * velocity,
    }
    close(
        got,
        tweedie(x, velocity, time),
        "this is not where a straight line from x_t along v ends at time 0",
        mistakes,
    )


@check("Exercise 8")
def check_euler_error(answer: Answer) -> None:
    """`answer(noise, steps)` is the error of Euler's method with that many steps."""
    ring = GaussianMixture.ring()
    noise = torch.randn(50, 2, generator=torch.Generator().manual_seed(2))

    def end(steps: int, start: Tensor = noise) -> Tensor:
        x, times = start, torch.linspace(1, 0, steps + 1)
        for t, s in pairwise(times):
            x = x - (t - s) * ring.velocity(x, t.expand(len(x)))
        return x

    fine = end(640)
    expect(
        number(answer(noise, 640), "the error") < 1e-4,
        "with 640 steps the error must be 0: are the noise and the field, ring.velocity, the same"
        " on both sides?",
    )
    gap = end(10) - fine
    mistakes = {
        "this is the mean square: take its root": gap.square().sum(1).mean(),
        "this averages over the two coordinates; a distance sums over them": (
            gap.square().mean().sqrt()
        ),
        "this is the mean distance; return the root mean square": gap.norm(dim=1).mean(),
        "this sums over samples: take their mean": gap.norm(),
        "a grid of T steps has T + 1 times: linspace(1, 0, steps + 1)": (
            (end(9) - end(639)).square().sum(1).mean().sqrt()
        ),
    }
    got = number(answer(noise, 10), "the error")
    close(
        got,
        gap.square().sum(1).mean().sqrt(),
        "the error with 10 steps is not what Euler's method gives",
        mistakes,
        2e-4,
    )


@check("Exercise 9")
def check_better_ends(answer: Answer) -> None:
    """`answer(velocity, noise, evaluations)` has at most half of Euler's error."""
    ring, evaluations = GaussianMixture.ring(), 20
    noise = torch.randn(100, 2, generator=torch.Generator().manual_seed(2))
    calls: list[Tensor] = []

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        expect(t.shape == x.shape[:1], "velocity needs one time per sample: t.expand(len(x))")
        calls.append(t)
        return ring.velocity(x, t)

    def euler(steps: int) -> Tensor:
        x = noise
        for t, s in pairwise(torch.linspace(1, 0, steps + 1)):
            x = x - (t - s) * ring.velocity(x, t.expand(len(x)))
        return x

    got = tensor(answer(velocity, noise.clone(), evaluations), (100, 2), "the final points")
    expect(calls, "the argument velocity was never called: only its calls are counted")
    expect(
        len(calls) <= evaluations,
        f"{len(calls)} evaluations exceed the budget: with two per step, halve the steps",
    )
    error, limit = (float((end - euler(640)).norm()) for end in (got, euler(evaluations)))
    expect(
        error <= limit / 2,
        f"the error is {error / limit:.2f} times Euler's: correct the velocity within a step by a"
        " second evaluation",
    )


def broken_samples(number: int, count: int) -> Tensor:
    """Final points [sample, 2] of one of the three samplers of exercise 10."""
    ring, times = GaussianMixture.ring(), torch.linspace(1, 0, 11)
    generator = torch.Generator().manual_seed(5)
    draw = torch.rand if number == 1 else torch.randn
    x = draw(count, 2, generator=generator)
    for t, s in pairwise(times[:-1] if number == 3 else times):
        x = x - (t - s) * ring.velocity(x, (times[0] if number == 2 else t).expand(count))
    return x


@check("Exercise 10")
def check_bugs(answer: dict[int, str]) -> None:
    """`answer` maps the samplers 1, 2, 3 to the bugs A, B, C."""
    expect(isinstance(answer, dict) and set(answer) == {1, 2, 3}, "give a dict with keys 1, 2, 3")
    given = {number: choice(letter, "abc") for number, letter in answer.items()}
    expect(len(set(given.values())) == 3, "use each of the letters A, B and C once")
    expect(
        given[3] != "a",
        "sampler 3 finds all eight blobs: with one velocity for all times none would be chosen",
    )
    expect(given[2] != "b", "sampler 2 reaches no blob: one missing step cannot cause this")
    expect(
        given == {1: "c", 2: "a", 3: "b"},
        "some blobs are never reached by sampler 1: the angle of the noise determines the blob",
    )


check_quiz = quiz(
    __name__,
    (
        "b",
        {
            "a": "the nearer line is unknown: only x and t are, and both lines pass through x",
            "c": "a conditional mean exists for every x that has a density",
        },
    ),
    (
        "c",
        {
            "a": "the exact field has a large loss too: see exercise 4",
            "b": "the loss of the exact field does not fall either: see exercise 4",
        },
    ),
    (
        "a",
        {
            "b": "differentiate the path by t; at t = 1 it is x_0",
            "c": "differentiate the path by t: the sign is the other one",
        },
    ),
    (
        "b",
        {
            "a": "at t = 0 the estimate is the state itself",
            "c": "insert v(x, 1) = x - E[x_0] into x - t v",
        },
    ),
    (
        "a",
        {
            "b": "Euler's method for the ODE draws nothing after the first noise",
            "c": "the final point is a function of the noise, so equal noise gives equal points",
        },
    ),
)
