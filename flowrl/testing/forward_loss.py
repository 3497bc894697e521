"""The promises of a forward-process loss."""

import math
from dataclasses import fields, replace
from typing import Any, get_args

import torch
from torch import Tensor

from flowrl.core.errors import FlowrlError
from flowrl.core.forward import ForwardBatch, Noise, WeightCopy
from flowrl.core.types import Unit, unit_means
from flowrl.flow import uniform_schedule
from flowrl.testing.findings import (
    INAPPLICABLE,
    Contract,
    ContractBroken,
    adds_up,
    expect,
    finite,
    keeps_order,
    same,
    twice,
    unchanged,
    weighs_rows,
)

CONTRACT = Contract("forward-process loss")
promise = CONTRACT.promise

GROUPS, MEMBERS, DRAWS = 2, 4, 2
ROWS = GROUPS * MEMBERS * DRAWS
MOVE = 0.05
"""Distance between the velocities of the networks in most checks."""
COPIES = ("old", "average")
NOISE = get_args(Noise)


def rows_of_iteration(move: float = 0.0, seed: int = 0, tiles: int = 1) -> ForwardBatch:
    """Every row of a small iteration, with the same times for all samples.

    `new`, a leaf with gradients, old, average and reference are `move` apart. Advantages sum to 0
    over each group; `tiles` repeats the latent.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    sample, number = (
        axis.flatten()
        for axis in torch.meshgrid(
            torch.arange(GROUPS * MEMBERS), torch.arange(DRAWS), indexing="ij"
        )
    )
    target, error, *steps = (draw(ROWS, 2, 3).repeat(1, 1, tiles) for _ in range(6))
    base = target + error
    advantages = draw(GROUPS, MEMBERS)
    advantages = advantages - advantages.mean(1, keepdim=True)
    new, old, average, reference = (base + move * step for step in steps)
    return ForwardBatch(
        time=torch.tensor([0.9, 0.35])[number],
        target=target,
        new=new.requires_grad_(),
        advantages=advantages.flatten()[sample],
        weight=torch.ones(ROWS),
        group=sample // MEMBERS,
        sample=sample,
        old=old,
        average=average,
        reference=reference,
    )


def chosen(batch: ForwardBatch, index: Tensor) -> ForwardBatch:
    """The rows `index` of a batch, with a separate new velocity to differentiate."""
    few = batch.rows(index)
    return replace(few, new=few.new.detach().requires_grad_())


def tensors(batch: ForwardBatch) -> dict[str, Any]:
    """Every field of a batch by name."""
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def differentiated(loss: Any, batch: ForwardBatch) -> Tensor:
    """Gradient of the loss with respect to the new velocities; 0 if the loss does not depend on
    them.
    """
    value = loss.loss(batch).loss
    if not value.requires_grad:
        return torch.zeros_like(batch.new)
    (found,) = torch.autograd.grad(value, batch.new, allow_unused=True)
    return torch.zeros_like(batch.new) if found is None else found


def equal(
    got: Tensor, expected: Tensor, what: str, hint: str = "", tolerance: float = 1e-4
) -> None:
    """Raise `ContractBroken` unless values are equal up to rounding, relative to the largest
    value.
    """
    same(
        got,
        expected,
        what,
        hint,
        tolerance,
        lambda index: f" at row {index[0]}" if index else "",
        floor=1e-6,
    )


def unit(loss: Any) -> Any:
    return getattr(loss, "unit", "transition")


def error_gradient(batch: ForwardBatch) -> Tensor:
    """The gradient of each row's error l = mean (v - v*)^2 with respect to its velocity."""
    return 2.0 * (batch.new - batch.target).detach() / batch.new[0].numel()


def weights_of_errors(loss: Any, batch: ForwardBatch, what: str) -> Tensor:
    """d loss / d l of every row, [row], minus its value at advantages of 0. Raises `ContractBroken`
    if the gradient is not parallel to the error's.
    """
    penalty = differentiated(loss, replace(batch, advantages=torch.zeros(ROWS)))
    found, along = (
        (differentiated(loss, batch) - penalty).flatten(1),
        error_gradient(batch).flatten(1),
    )
    finite(found, f"the gradient {what}")
    weight = (found * along).sum(1) / along.square().sum(1)
    stray = (found - weight[:, None] * along).norm(dim=1) / found.norm(dim=1).clamp(min=1e-12)
    for row in range(len(stray)):
        share = float(stray[row])
        expect(
            share < 1e-2,
            f"row {row}, {what}: {share:.0%} of the gradient is not along that of its error |v -"
            " v*|^2",
        )
    return weight


@promise("the loss is one finite number to differentiate, with finite gradients", basic=True)
def returns_a_scalar(loss: Any) -> None:
    expect(callable(getattr(loss, "loss", None)), "there is no method loss(batch)")
    for move in (0.0, MOVE, 2.0):
        batch = rows_of_iteration(move)
        result = loss.loss(batch)
        value: Any = getattr(result, "loss", None)
        expect(
            isinstance(value, Tensor),
            f"loss returned {type(result).__name__}, not a LossResult(loss, metrics)",
        )
        expect(
            value.ndim == 0,
            f"the loss has shape {tuple(value.shape)}; a scalar is needed. Take the mean over"
            " rows.",
        )
        expect(
            bool(torch.isfinite(value)),
            f"the loss is {value.item()} where velocities differ by about {move}",
        )
        expect(
            value.requires_grad,
            "the loss carries no gradient. Was it detached, or made under no_grad?",
        )
        finite(differentiated(loss, batch), f"the gradient where velocities differ by about {move}")


@promise("the same batch gives the same loss, and is not changed", basic=True)
def is_pure(loss: Any) -> None:
    batch = rows_of_iteration(MOVE)
    with unchanged(tensors(batch)):
        first, second = twice(lambda: loss.loss(batch).loss)
    equal(second, first, "the loss in a second call", "Keep no state, and draw nothing.", 0.0)


@promise("it declares what the trainer prepares: copies, needs_reference, unit, noise", basic=True)
def declares_what_it_needs(loss: Any) -> None:
    copies: Any = getattr(loss, "copies", None)
    hint = f"a mapping from {' or '.join(COPIES)} to forward.WeightCopy"
    expect(hasattr(copies, "items"), f"copies is {copies!r}; it must be {hint}")
    for name, copy in copies.items():
        expect(
            name in COPIES and isinstance(copy, WeightCopy),
            f"copies has {name!r}: {copy!r}; it must be {hint}",
        )
    needs: Any = getattr(loss, "needs_reference", None)
    expect(isinstance(needs, bool), "there is no property `needs_reference` that is True or False")
    declared: Any = getattr(loss, "unit", None)
    expect(declared in get_args(Unit), f"unit is {declared!r}, none of {', '.join(get_args(Unit))}")
    noise = getattr(loss, "noise", None)
    expect(noise in NOISE, f"noise is {noise!r}, none of {', '.join(NOISE)}")
    if declared != "transition":
        expect(
            hasattr(loss, "row_terms"),
            "unit is not 'transition', but there is no method row_terms(batch)",
        )


@promise(
    "a velocity that it declares is used or its absence is a clear error; others are not needed"
)
def needs_what_it_declares(loss: Any) -> None:
    full = rows_of_iteration(MOVE)
    evaluated = {name for name, copy in loss.copies.items() if copy.evaluated}
    for name in (*COPIES, "reference"):
        declared = loss.needs_reference if name == "reference" else name in evaluated
        bare = replace(full, **{name: None})
        if not declared:
            equal(
                loss.loss(bare).loss,
                loss.loss(full).loss,
                f"the loss without {name}, which it does not declare,",
            )
            continue
        try:
            loss.loss(bare)
        except FlowrlError as error:
            expect(name in str(error), f"without {name} the error is only {str(error)!r}")
        except Exception as error:
            raise ContractBroken(
                f"without {name} it raised {type(error).__name__}: {error}; raise a ConfigError"
            ) from error
        else:
            raise ContractBroken(
                f"it declares {name}, but without it raised no error; raise a ConfigError, or"
                " declare less"
            )


@promise("training times are in (0, 1], one row per sample, and the generator's only")
def draws_times(loss: Any) -> None:
    times: Any = getattr(loss, "times", None)
    expect(
        callable(getattr(times, "draw", None)),
        f"times is {times!r}; it needs draws(schedule) and draw(schedule, samples, generator)",
    )
    for steps in (10, 14):
        schedule = uniform_schedule(steps)
        first, second = twice(
            lambda schedule=schedule: times.draw(schedule, 6, torch.Generator().manual_seed(3))
        )
        shape, wanted = tuple(first.shape), (6, times.draws(schedule))
        expect(
            shape == wanted,
            f"times have shape {shape} on a grid of {steps} steps, not [sample, draw] = {wanted}",
        )
        inside = bool(((first > 0) & (first <= 1)).all())
        expect(
            inside,
            f"times are from {float(first.min()):.3g} to {float(first.max()):.3g}; they must be in"
            " (0, 1]",
        )
        equal(
            second,
            first,
            "times drawn again with the same seed",
            "Draw everything from the generator.",
            0.0,
        )
        if unit(loss) == "group":
            equal(
                first,
                first[:1].expand_as(first),
                "times",
                "A group needs equal times for its members.",
                0.0,
            )


@promise("metrics are finite numbers without a gradient")
def reports_detached_metrics(loss: Any) -> None:
    for name, value in loss.loss(rows_of_iteration(MOVE)).metrics.items():
        number = torch.as_tensor(value)
        expect(
            number.numel() == 1,
            f"metric {name!r} has shape {tuple(number.shape)}; take a mean over rows",
        )
        expect(not number.requires_grad, f"metric {name!r} carries a gradient; use .detach()")
        expect(bool(torch.isfinite(number)), f"metric {name!r} is {number.item()}")


@promise("rows of weight 0 contribute neither to the loss nor to the gradient")
def ignores_rows_of_weight_0(loss: Any) -> None:
    batch = rows_of_iteration(MOVE)
    out = batch.sample % MEMBERS == 1
    kept = (~out).nonzero().flatten()
    few = chosen(batch, kept)
    for name, value in (("large", 1e3), ("NaN", math.nan)):
        spoiled = torch.where(out[:, None, None], value, batch.new.detach()).requires_grad_()
        advantages = torch.where(out, value, batch.advantages)
        masked = replace(batch, new=spoiled, weight=(~out).float(), advantages=advantages)
        hint = (
            f"Rows of weight 0 had {name} velocities and advantages; replace them before any"
            " arithmetic."
        )
        equal(loss.loss(masked).loss, loss.loss(few).loss, "the loss with rows of weight 0", hint)
        found = differentiated(loss, masked)
        equal(
            found[out], torch.zeros_like(found[out]), "the gradient of rows of weight 0", hint, 0.0
        )
        equal(found[kept], differentiated(loss, few), "the gradient of the other rows", hint)


@promise("a batch whose weights are all 0 gives 0 with a zero gradient")
def survives_weights_of_0(loss: Any) -> None:
    batch = rows_of_iteration(MOVE)
    batch = replace(batch, weight=torch.zeros(ROWS))
    value, hint = loss.loss(batch).loss, "0 / 0 is nan: divide by 1 if the sum of the weights is 0."
    equal(value, torch.zeros(()), "the loss", hint, 0.0)
    expect(value.requires_grad, f"the loss carries no gradient. {hint}")
    equal(differentiated(loss, batch), torch.zeros(ROWS, 2, 3), "the gradient", hint, 0.0)


@promise("if all networks are equal, rows of advantage 0 have no gradient")
def does_nothing_without_advantage(loss: Any) -> None:
    batch = rows_of_iteration()
    some = batch.advantages.index_fill(0, torch.tensor([1, 6]), 0.0)
    for name, advantages, silent in (
        ("all", torch.zeros(ROWS), slice(None)),
        ("rows 1 and 6", some, [1, 6]),
    ):
        found = differentiated(loss, replace(batch, advantages=advantages))
        largest = float(found[silent].abs().max())
        expect(
            largest < 1e-7,
            f"with advantages of 0 for {name}, a gradient of {largest:.3g} remains there",
        )


@promise(
    "if all networks are equal, the gradient of a row is A grad |v - v*|^2 times a weight above 0"
    " that does not depend on A"
)
def starts_along_the_advantage(loss: Any) -> None:
    weights = []
    for factor in (1.0, -2.0):
        batch = rows_of_iteration()
        batch = replace(batch, advantages=factor * batch.advantages)
        weight = weights_of_errors(loss, batch, "with all networks equal") / batch.advantages
        for row in range(ROWS):
            wrong = "is pushed the wrong way" if float(weight[row]) < 0 else "is not pushed at all"
            name = f"row {row} (A = {float(batch.advantages[row]):+.3g})"
            expect(
                float(weight[row]) > 0,
                f"{name} {wrong}: weight {float(weight[row]):.3g}. Is a sign wrong? Losses are"
                " minimised.",
            )
        weights.append(weight)
    hint = "The gradient must be proportional to A where the networks are equal."
    equal(
        weights[1] / weights[0],
        torch.ones(ROWS),
        "with -2 A in place of A, the factor by which the weight changes",
        hint,
        1e-2,
    )


@promise("the order of the rows has no effect")
def does_not_depend_on_order(loss: Any) -> None:
    keeps_order(loss, rows_of_iteration(MOVE), chosen, differentiated, equal)


@promise(
    "the loss is a weighted mean: weight n counts as the row n times, and a common factor has no"
    " effect"
)
def is_a_weighted_mean(loss: Any) -> None:
    for move in (0.0, MOVE):
        weighs_rows(loss, rows_of_iteration(move), chosen, differentiated, equal)


@promise(
    "the loss does not depend on the resolution: repeating the latent's elements changes nothing"
)
def does_not_depend_on_resolution(loss: Any) -> None:
    for move in (0.0, MOVE):
        small, large = rows_of_iteration(move), rows_of_iteration(move, tiles=3)
        hint = "Take means, not sums, over latent elements."
        equal(
            loss.loss(large).loss,
            loss.loss(small).loss,
            "the loss with every latent element three times",
            hint,
        )


@promise("targets, times, advantages and other networks are constants: no gradient reaches them")
def differentiates_the_new_network_only(loss: Any) -> None:
    batch = rows_of_iteration(MOVE)
    others = {
        name: tensors(batch)[name]
        for name in ("target", "time", "advantages", *COPIES, "reference")
    }
    for tensor in others.values():
        tensor.requires_grad_()
    found = torch.autograd.grad(loss.loss(batch).loss, list(others.values()), allow_unused=True)
    for name, value in zip(others, found, strict=True):
        if value is not None and bool((value != 0).any()):
            row = (
                int((value != 0).flatten(1).any(1).nonzero()[0])
                if value.ndim > 1
                else int((value != 0).nonzero()[0])
            )
            raise ContractBroken(f"a gradient reaches {name}, first at row {row}. Detach it.")


@promise(
    "parts of a batch add up: their gradients, times their share of the weights, are those of the"
    " whole"
)
def adds_up_over_parts(loss: Any) -> None:
    adds_up(loss, rows_of_iteration(MOVE), chosen, differentiated, equal)


@promise(
    "with unit = 'group' and advantages that sum to 0, the weights of a group's errors in the"
    " gradient sum to 0"
)
def balances_groups(loss: Any) -> str | None:
    if unit(loss) != "group":
        return INAPPLICABLE
    batch = rows_of_iteration(MOVE)
    batch = replace(batch, old=batch.new.detach(), average=batch.new.detach())
    weights = weights_of_errors(loss, batch, "with new and old equal")
    means = unit_means(weights, batch.units("group"), batch.weight) / weights.abs().max()
    row = int(means.abs().argmax())
    found = (
        f"the mean weight of the errors in the group of row {row} is {float(means[row]):.3g} of the"
        " largest"
    )
    expect(
        float(means[row].abs()) < 1e-3,
        f"{found}, not 0. All members of a group at one time need the same factor.",
    )
