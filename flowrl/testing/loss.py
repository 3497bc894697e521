"""The promises of a policy loss."""

import math
from dataclasses import fields, replace
from typing import Any, get_args

import torch
from torch import Tensor

from flowrl.core.errors import FlowrlError
from flowrl.core.types import Gaussian, LossBatch, Unit
from flowrl.flow.gaussian import log_prob
from flowrl.testing.findings import (
    Contract,
    ContractBroken,
    adds_up,
    expect,
    keeps_order,
    same,
    twice,
    unchanged,
    weighs_rows,
)

CONTRACT = Contract("policy loss")
promise = CONTRACT.promise

ROWS, TRAJECTORIES = 8, 4
MOVE = 0.01
"""Distance between the new policy and the behaviour policy in most checks."""


def transitions(loss: Any, move: float = 0.0, seed: int = 0, tiles: int = 1) -> LossBatch:
    """Two steps of two trajectories of two groups; the new means, a leaf with gradients, are `move`
    away from the behaviour's.

    `tiles` repeats the latent. Advantages are one per transition, or one per trajectory if the loss
    needs that.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    std = torch.linspace(0.1, 0.8, ROWS)
    old, step, noise, far = (draw(ROWS, 2, 3).repeat(1, 1, tiles) for _ in range(4))
    row, advantages = torch.arange(ROWS), draw(ROWS)
    sample, number = row % TRAJECTORIES, row // TRAJECTORIES
    return LossBatch(
        new=Gaussian((old + move * step).requires_grad_(), std),
        behaviour=Gaussian(old, std.clone()),
        next_node=old + std[:, None, None] * noise,
        advantages=advantages[sample] if getattr(loss, "one_advantage", False) else advantages,
        weight=torch.ones(ROWS),
        delta=torch.linspace(0.05, 0.2, ROWS),
        sample=sample,
        group=sample // 2,
        step=number + 1,
        time=torch.tensor([0.8, 0.6])[number],
        reference=Gaussian(old + 0.1 * far, std.clone()),
    )


def rows(batch: LossBatch, index: Tensor) -> LossBatch:
    """The rows `index` of a batch, with a separate new mean to differentiate."""
    few = batch.rows(index)
    return replace(few, new=Gaussian(few.new.mean.detach().requires_grad_(), few.new.std))


def unit(loss: Any) -> Any:
    return getattr(loss, "unit", "transition")


def tensors(batch: LossBatch) -> dict[str, Tensor]:
    """Every tensor of a batch by name."""
    found: dict[str, Tensor] = {}
    for field in fields(LossBatch):
        value = getattr(batch, field.name)
        if isinstance(value, Gaussian):
            found |= {f"{field.name}.mean": value.mean, f"{field.name}.std": value.std}
        elif value is not None:
            found[field.name] = value
    return found


def needs_reference(loss: Any) -> bool:
    return bool(getattr(loss, "needs_reference", False))


def gradient(loss: Any, batch: LossBatch) -> Tensor:
    """Gradient of the loss with respect to the new means; 0 if the loss does not depend on them."""
    value = loss.loss(batch).loss
    if not value.requires_grad:
        return torch.zeros_like(batch.new.mean)
    (found,) = torch.autograd.grad(value, batch.new.mean, allow_unused=True)
    return torch.zeros_like(batch.new.mean) if found is None else found


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


def without_penalty(loss: Any, batch: LossBatch) -> LossBatch:
    """The batch with the current policy as reference, so that a KL penalty has no gradient."""
    return (
        replace(batch, reference=Gaussian(batch.new.mean.detach().clone(), batch.new.std))
        if needs_reference(loss)
        else batch
    )


@promise("the loss is one finite number to differentiate", basic=True)
def returns_a_scalar(loss: Any) -> None:
    expect(callable(getattr(loss, "loss", None)), "there is no method loss(batch)")
    for move in (0.0, MOVE, 1.0):
        result = loss.loss(transitions(loss, move))
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
            f"the loss is {value.item()} where means differ by about {move}",
        )
        expect(
            value.requires_grad,
            "the loss carries no gradient. Was it detached, or made under no_grad?",
        )


@promise("the same batch gives the same loss, and is not changed", basic=True)
def is_pure(loss: Any) -> None:
    batch = transitions(loss, MOVE)
    with unchanged(tensors(batch)):
        first, second = twice(lambda: loss.loss(batch).loss)
    equal(second, first, "the loss in a second call", "Keep no state, and draw nothing.", 0.0)


@promise("metrics are finite numbers without a gradient")
def reports_detached_metrics(loss: Any) -> None:
    for name, value in loss.loss(transitions(loss, MOVE)).metrics.items():
        expect(
            isinstance(value, Tensor) and value.ndim == 0,
            f"metric {name!r} is {value!r:.60}, not a scalar tensor",
        )
        expect(
            not value.requires_grad,
            f"metric {name!r} carries a gradient. Detach it, or its graph is kept in memory.",
        )
        expect(bool(torch.isfinite(value)), f"metric {name!r} is {float(value)}")


def counts_only(loss: Any, batch: LossBatch, kept: list[int], state: str, hint: str) -> None:
    """Check that the loss and its gradient are those of the rows `kept` alone, and that the other
    rows, in some `state`, have none.
    """
    few, others, found = (
        rows(batch, torch.tensor(kept)),
        [i for i in range(ROWS) if i not in kept],
        gradient(loss, batch),
    )
    where = f"with rows {others} {state},"
    equal(loss.loss(batch).loss, loss.loss(few).loss, f"{where} the loss", hint)
    expect(bool((found[others] == 0).all()), f"{where} these rows have a gradient. {hint}")
    equal(found[kept], gradient(loss, few), f"{where} the gradient", hint)


@promise(
    "rows of weight 0 contribute neither value nor gradient, even if their advantage or next node"
    " is not finite"
)
def ignores_rows_of_weight_0(loss: Any) -> None:
    kept = [0, 2, 3, 5, 6]
    weight = torch.zeros(ROWS).index_fill(0, torch.tensor(kept), 1.0)
    for name, hidden in (("finite numbers", 3.0), ("nan", math.nan), ("inf", math.inf)):
        batch = replace(transitions(loss, MOVE), weight=weight)
        batch.next_node[weight == 0], batch.advantages[weight == 0] = hidden, hidden
        hint = (
            "Replace such rows before any arithmetic (0 * nan is nan), and divide by the sum of the"
            " weights only."
        )
        counts_only(loss, batch, kept, f"of weight 0, which contain {name}", hint)


@promise("rows whose std is 0 are no decisions: the loss and the gradient are those without them")
def ignores_deterministic_rows(loss: Any) -> None:
    batch = transitions(loss, MOVE)
    for name in ("new.std", "behaviour.std", "reference.std"):
        tensors(batch)[name][[2, 7]] = 0.0
    hint = (
        "Never divide by a std of 0: leave out rows whose behaviour std is 0, as if their weight"
        " were 0."
    )
    counts_only(loss, batch, [0, 1, 3, 4, 5, 6], "of std 0", hint)


@promise("if all weights are 0 the loss is exactly 0, with zero gradients and finite metrics")
def survives_weights_of_0(loss: Any) -> None:
    batch = replace(transitions(loss, MOVE), weight=torch.zeros(ROWS))
    result = loss.loss(batch)
    hint = (
        "0 / 0 is nan; return a 0 that is connected to new.mean, such as the sum of weight * terms."
    )
    expect(result.loss.item() == 0.0, f"the loss is {result.loss.item()}. {hint}")
    expect(result.loss.requires_grad, f"the loss cannot be differentiated. {hint}")
    expect(bool((gradient(loss, batch) == 0).all()), f"there is a gradient. {hint}")
    for name, value in result.metrics.items():
        expect(
            bool(torch.isfinite(torch.as_tensor(value))),
            f"metric {name!r} is {torch.as_tensor(value).item()}. {hint}",
        )


@promise(
    "on policy (new = behaviour) the metrics, if given, are: ratio_mean 1; ratio_deviation,"
    " clip_fraction, approx_kl 0"
)
def starts_at_ratio_one(loss: Any) -> None:
    metrics = loss.loss(transitions(loss, 0.0)).metrics
    wanted = {"ratio_mean": 1.0, "ratio_deviation": 0.0, "clip_fraction": 0.0, "approx_kl": 0.0}
    for name in wanted.keys() & metrics.keys():
        found, hint = (
            float(metrics[name]),
            "Is the ratio that of new to behaviour at the same node, computed alike for both?",
        )
        expect(
            abs(found - wanted[name]) <= 1e-6,
            f"{name} is {found:.8g}, not {wanted[name]:g}. {hint}",
        )


@promise(
    "on policy the gradient of each row is the policy gradient, -A grad log pi, times a weight"
    " above 0 that does not depend on A"
)
def starts_as_the_policy_gradient(loss: Any) -> None:
    weights = []
    for factor in (1.0, -2.0):
        batch = without_penalty(loss, transitions(loss, 0.0))
        batch = replace(batch, advantages=factor * batch.advantages)
        (score,) = torch.autograd.grad(log_prob(batch.new, batch.next_node).sum(), batch.new.mean)
        expected, found = (
            (-batch.advantages[:, None, None] * score).flatten(1),
            gradient(loss, batch).flatten(1),
        )
        expect(bool(torch.isfinite(found).all()), "the gradient is not finite")
        weight = (found * expected).sum(1) / expected.square().sum(1)
        stray = (found - weight[:, None] * expected).norm(dim=1) / found.norm(dim=1).clamp(
            min=1e-12
        )
        for i in range(ROWS):
            row = f"row {i} (A = {float(batch.advantages[i]):+.3g})"
            expect(
                float(stray[i]) < 1e-2,
                f"{row}: {float(stray[i]):.0%} of the gradient is not along grad log pi",
            )
            wrong = "is pushed the wrong way" if float(weight[i]) < 0 else "is not pushed at all"
            expect(
                float(weight[i]) > 0,
                f"{row} {wrong}: weight {float(weight[i]):.3g}. Is a sign wrong? Losses are"
                " minimised.",
            )
        weights.append(weight)
    ratio = weights[1] / weights[0]
    hint = "Normalising advantages is the credit rule's business; a clip must not act at ratio 1."
    equal(
        ratio,
        torch.ones(ROWS),
        "with -2 A in place of A, the factor by which the weight changes",
        hint,
        1e-2,
    )


@promise("units of advantage 0 have a gradient if and only if `trains_zero_advantages`")
def trains_zero_advantages_as_declared(loss: Any) -> None:
    batch, declared = transitions(loss, MOVE), loss.trains_zero_advantages
    silent = torch.zeros(ROWS, dtype=torch.bool)
    for row in (1, 4):
        silent |= torch.stack([number == number[row] for number in batch.units(unit(loss))]).all(0)
    some = batch.advantages.masked_fill(silent, 0.0)
    every = torch.ones_like(silent)
    for name, where, advantages in (("all", every, torch.zeros(ROWS)), ("some", silent, some)):
        largest = float(gradient(loss, replace(batch, advantages=advantages))[where].abs().max())
        what = f"with advantages of 0 in {name} units, the largest gradient there is {largest:.3g}"
        hint = (
            "Declare it, or the trainer leaves these units out."
            if not declared
            else "Declare False, which saves evaluations."
        )
        expect(
            (largest > 1e-7) == declared,
            f"{what}, but trains_zero_advantages is {declared}. {hint}",
        )


@promise(
    "the loss is a weighted mean: weight n counts as the row n times, and a common factor has no"
    " effect"
)
def is_a_weighted_mean(loss: Any) -> None:
    for move in (0.0, MOVE):
        weighs_rows(loss, transitions(loss, move), rows, gradient, equal)


@promise("the order of the rows has no effect")
def does_not_depend_on_order(loss: Any) -> None:
    keeps_order(loss, transitions(loss, MOVE), rows, gradient, equal)


@promise(
    "parts of a batch add up: their gradients, times their share of the weights, are those of the"
    " whole"
)
def adds_up_over_parts(loss: Any) -> None:
    adds_up(loss, transitions(loss, MOVE), rows, gradient, equal)


@promise("it declares `unit` and `trains_zero_advantages`", basic=True)
def declares_what_it_needs(loss: Any) -> None:
    declared: Any = getattr(loss, "unit", None)
    expect(declared in get_args(Unit), f"unit is {declared!r}, none of {', '.join(get_args(Unit))}")
    zeros = getattr(loss, "trains_zero_advantages", None)
    expect(
        isinstance(zeros, bool),
        "there is no property `trains_zero_advantages` that is True or False",
    )
    if declared != "transition":
        expect(
            hasattr(loss, "row_terms"),
            "unit is not 'transition', but there is no method row_terms(batch)",
        )


@promise(
    "the loss does not depend on the resolution: repeating the latent's elements changes nothing"
)
def does_not_depend_on_resolution(loss: Any) -> None:
    for move in (0.0, MOVE):
        small, large = transitions(loss, move), transitions(loss, move, tiles=3)
        hint = "Take means, not sums, over latent elements (also in the log-probability)."
        equal(
            loss.loss(large).loss,
            loss.loss(small).loss,
            "the loss with every latent element three times",
            hint,
        )


@promise("sampled nodes, behaviour and reference are constants: no gradient reaches them")
def differentiates_the_new_policy_only(loss: Any) -> None:
    batch = transitions(loss, MOVE)
    others = {
        name: tensors(batch)[name] for name in ("next_node", "behaviour.mean", "reference.mean")
    }
    for tensor in others.values():
        tensor.requires_grad_()
    found = torch.autograd.grad(loss.loss(batch).loss, list(others.values()), allow_unused=True)
    for name, value in zip(others, found, strict=True):
        if value is not None and bool((value != 0).any()):
            row = int((value != 0).flatten(1).any(1).nonzero()[0])
            raise ContractBroken(f"a gradient reaches {name}, first at row {row}. Detach it.")


@promise(
    "`needs_reference` is correct: if False the reference is not used, if True its absence is a"
    " clear error"
)
def says_whether_it_needs_the_reference(loss: Any) -> None:
    expect(
        isinstance(getattr(loss, "needs_reference", None), bool),
        "there is no property `needs_reference` that is True or False",
    )
    full, bare = transitions(loss, MOVE), replace(transitions(loss, MOVE), reference=None)
    if not loss.needs_reference:
        hint = "Set needs_reference = True if the reference is part of the loss."
        equal(
            loss.loss(bare).loss,
            loss.loss(full).loss,
            "the loss without a reference (needs_reference is False)",
            hint,
        )
        return
    try:
        loss.loss(bare)
    except FlowrlError as error:
        expect("reference" in str(error), f"without a reference the error is only {str(error)!r}")
    except Exception as error:
        raise ContractBroken(
            f"without a reference it raised {type(error).__name__}: {error}; raise a ConfigError"
        ) from error
    else:
        raise ContractBroken(
            "needs_reference is True, but without a reference it raised no error; raise a"
            " ConfigError"
        )
