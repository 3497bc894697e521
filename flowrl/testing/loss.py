"""The promises of a policy loss."""

import math
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import FlowrlError
from flowrl.flow.gaussian import log_prob
from flowrl.testing.findings import Contract, ContractBroken, expect, same, twice, unchanged
from flowrl.types import Gaussian, LossBatch

CONTRACT = Contract("policy loss")
promise = CONTRACT.promise

PAIRS = 8
MOVE = 0.01
"""Distance between the new policy and the behaviour policy in most checks."""


def pairs(move: float = 0.0, seed: int = 0, tiles: int = 1) -> LossBatch:
    """Pairs whose new mean, a leaf with gradients, is `move` away from the behaviour's; `tiles` repeats the latent."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    std = torch.linspace(0.1, 0.8, PAIRS)
    old, step, noise, far = (draw(PAIRS, 2, 3).repeat(1, 1, tiles) for _ in range(4))
    return LossBatch(
        new=Gaussian((old + move * step).requires_grad_(), std),
        behaviour=Gaussian(old, std.clone()),
        next_node=old + std[:, None, None] * noise,
        advantages=draw(PAIRS),
        mask=torch.ones(PAIRS, dtype=torch.bool),
        delta=torch.linspace(0.05, 0.2, PAIRS),
        reference=Gaussian(old + 0.1 * far, std.clone()),
    )


def rows(batch: LossBatch, index: Tensor) -> LossBatch:
    """The pairs `index` of a batch, with a separate new mean to differentiate."""

    def take(value: Any) -> Any:
        if isinstance(value, Gaussian):
            return Gaussian(value.mean.detach()[index], value.std[index])
        return None if value is None else value[index]

    few = LossBatch(**{field.name: take(getattr(batch, field.name)) for field in fields(LossBatch)})
    few.new.mean.requires_grad_()
    return few


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


def equal(got: Tensor, expected: Tensor, what: str, hint: str = "", tolerance: float = 1e-4) -> None:
    """Raise `ContractBroken` unless values are equal up to rounding, relative to the largest value."""
    same(got, expected, what, hint, tolerance, lambda index: f" at pair {index[0]}" if index else "", floor=1e-6)


def without_penalty(loss: Any, batch: LossBatch) -> LossBatch:
    """The batch with the current policy as reference, so that a KL penalty has no gradient."""
    return replace(batch, reference=Gaussian(batch.new.mean.detach().clone(), batch.new.std)) if needs_reference(loss) else batch


@promise("the loss is one finite number to differentiate", basic=True)
def returns_a_scalar(loss: Any) -> None:
    expect(callable(getattr(loss, "loss", None)), "there is no method loss(batch)")
    for move in (0.0, MOVE, 1.0):
        result = loss.loss(pairs(move))
        value: Any = getattr(result, "loss", None)
        expect(isinstance(value, Tensor), f"loss returned {type(result).__name__}, not a LossResult(loss, metrics)")
        expect(value.ndim == 0, f"the loss has shape {tuple(value.shape)}; a scalar is needed. Take the mean over pairs.")
        expect(bool(torch.isfinite(value)), f"the loss is {value.item()} where means differ by about {move}")
        expect(value.requires_grad, "the loss carries no gradient. Was it detached, or made under no_grad?")


@promise("the same batch gives the same loss, and is not changed", basic=True)
def is_pure(loss: Any) -> None:
    batch = pairs(MOVE)
    with unchanged(tensors(batch)):
        first, second = twice(lambda: loss.loss(batch).loss)
    equal(second, first, "the loss in a second call", "Keep no state, and draw nothing.", 0.0)


@promise("metrics are finite numbers without a gradient")
def reports_detached_metrics(loss: Any) -> None:
    for name, value in loss.loss(pairs(MOVE)).metrics.items():
        expect(isinstance(value, Tensor) and value.ndim == 0, f"metric {name!r} is {value!r:.60}, not a scalar tensor")
        expect(not value.requires_grad, f"metric {name!r} carries a gradient. Detach it, or its graph is kept in memory.")
        expect(bool(torch.isfinite(value)), f"metric {name!r} is {float(value)}")


def counts_only(loss: Any, batch: LossBatch, kept: list[int], state: str, hint: str) -> None:
    """Check that the loss and its gradient are those of the pairs `kept` alone, and that the other pairs, in some `state`, have
    none."""
    few, others, found = rows(batch, torch.tensor(kept)), [i for i in range(PAIRS) if i not in kept], gradient(loss, batch)
    where = f"with pairs {others} {state},"
    equal(loss.loss(batch).loss, loss.loss(few).loss, f"{where} the loss", hint)
    expect(bool((found[others] == 0).all()), f"{where} these pairs have a gradient. {hint}")
    equal(found[kept], gradient(loss, few), f"{where} the gradient", hint)


@promise("masked pairs contribute neither to the loss nor to the gradient, even if their advantage or next node is not finite")
def ignores_masked_pairs(loss: Any) -> None:
    kept = [0, 2, 3, 5, 6]
    mask = torch.zeros(PAIRS, dtype=torch.bool).index_fill(0, torch.tensor(kept), True)
    for name, hidden in (("finite numbers", 3.0), ("nan", math.nan), ("inf", math.inf)):
        batch = replace(pairs(MOVE), mask=mask)
        batch.next_node[~mask], batch.advantages[~mask] = hidden, hidden
        hint = "Select the pairs that count before any arithmetic (0 * nan is nan), and divide by their number only."
        counts_only(loss, batch, kept, f"masked, which contain {name}", hint)


@promise("pairs whose std is 0 are no decisions: the loss and the gradient are those without them")
def ignores_deterministic_pairs(loss: Any) -> None:
    batch = pairs(MOVE)
    for name in ("new.std", "behaviour.std", "reference.std"):
        tensors(batch)[name][[2, 7]] = 0.0
    hint = "Never divide by a std of 0: leave out pairs whose behaviour std is 0, as if they were masked."
    counts_only(loss, batch, [0, 1, 3, 4, 5, 6], "of std 0", hint)


@promise("with every pair masked the loss is exactly 0, with zero gradients and finite metrics")
def survives_an_empty_mask(loss: Any) -> None:
    batch = replace(pairs(MOVE), mask=torch.zeros(PAIRS, dtype=torch.bool))
    result = loss.loss(batch)
    hint = "The mean over no pair is nan; return a 0 that is connected to new.mean, such as the sum over no pair."
    expect(result.loss.item() == 0.0, f"the loss is {result.loss.item()}. {hint}")
    expect(result.loss.requires_grad, f"the loss cannot be differentiated. {hint}")
    expect(bool((gradient(loss, batch) == 0).all()), f"there is a gradient. {hint}")
    for name, value in result.metrics.items():
        expect(bool(torch.isfinite(torch.as_tensor(value))), f"metric {name!r} is {torch.as_tensor(value).item()}. {hint}")


@promise("on policy (new = behaviour) the metrics, if given, are: ratio_mean 1; ratio_deviation, clip_fraction, approx_kl 0")
def starts_at_ratio_one(loss: Any) -> None:
    metrics = loss.loss(pairs(0.0)).metrics
    wanted = {"ratio_mean": 1.0, "ratio_deviation": 0.0, "clip_fraction": 0.0, "approx_kl": 0.0}
    for name in wanted.keys() & metrics.keys():
        found, hint = float(metrics[name]), "Is the ratio that of new to behaviour at the same node, computed alike for both?"
        expect(abs(found - wanted[name]) <= 1e-6, f"{name} is {found:.8g}, not {wanted[name]:g}. {hint}")


@promise(
    "on policy the gradient of each pair is the policy gradient, -A grad log pi, times a weight above 0 that does not depend on A"
)
def starts_as_the_policy_gradient(loss: Any) -> None:
    weights = []
    for factor in (1.0, -2.0):
        batch = without_penalty(loss, pairs(0.0))
        batch = replace(batch, advantages=factor * batch.advantages)
        (score,) = torch.autograd.grad(log_prob(batch.new, batch.next_node).sum(), batch.new.mean)
        expected, found = (-batch.advantages[:, None, None] * score).flatten(1), gradient(loss, batch).flatten(1)
        expect(bool(torch.isfinite(found).all()), "the gradient is not finite")
        weight = (found * expected).sum(1) / expected.square().sum(1)
        stray = (found - weight[:, None] * expected).norm(dim=1) / found.norm(dim=1).clamp(min=1e-12)
        for i in range(PAIRS):
            pair = f"pair {i} (A = {float(batch.advantages[i]):+.3g})"
            expect(float(stray[i]) < 1e-2, f"{pair}: {float(stray[i]):.0%} of the gradient is not along grad log pi")
            wrong = "is pushed the wrong way" if float(weight[i]) < 0 else "is not pushed at all"
            expect(float(weight[i]) > 0, f"{pair} {wrong}: weight {float(weight[i]):.3g}. Is a sign wrong? Losses are minimised.")
        weights.append(weight)
    ratio = weights[1] / weights[0]
    hint = "Normalising advantages is the credit rule's business; a clip must not act at ratio 1."
    equal(ratio, torch.ones(PAIRS), "with -2 A in place of A, the factor by which the weight changes", hint, 1e-2)


@promise("pairs of advantage 0 have no policy gradient")
def does_nothing_without_advantage(loss: Any) -> None:
    batch = pairs(MOVE)
    some = batch.advantages.index_fill(0, torch.tensor([1, 4]), 0.0)
    for name, advantages, silent in (("all", torch.zeros(PAIRS), slice(None)), ("pairs 1 and 4", some, [1, 4])):
        found = gradient(loss, replace(without_penalty(loss, batch), advantages=advantages))
        largest = float(found[silent].abs().max())
        expect(largest < 1e-7, f"with advantages of 0 for {name}, a gradient of {largest:.3g} remains there")


@promise("the loss is a mean: the same pairs twice give the same loss")
def is_a_mean_over_pairs(loss: Any) -> None:
    for move in (0.0, MOVE):
        batch = pairs(move)
        double = rows(batch, torch.arange(PAIRS).repeat(2))
        equal(loss.loss(double).loss, loss.loss(batch).loss, "the loss with every pair twice", "Is it a sum?")


@promise("the loss does not depend on the resolution: repeating the latent's elements changes nothing")
def does_not_depend_on_resolution(loss: Any) -> None:
    for move in (0.0, MOVE):
        small, large = pairs(move), pairs(move, tiles=3)
        hint = "Take means, not sums, over latent elements (also in the log-probability)."
        equal(loss.loss(large).loss, loss.loss(small).loss, "the loss with every latent element three times", hint)


@promise("sampled nodes, behaviour and reference are constants: no gradient reaches them")
def differentiates_the_new_policy_only(loss: Any) -> None:
    batch = pairs(MOVE)
    others = {name: tensors(batch)[name] for name in ("next_node", "behaviour.mean", "reference.mean")}
    for tensor in others.values():
        tensor.requires_grad_()
    found = torch.autograd.grad(loss.loss(batch).loss, list(others.values()), allow_unused=True)
    for name, value in zip(others, found, strict=True):
        if value is not None and bool((value != 0).any()):
            pair = int((value != 0).flatten(1).any(1).nonzero()[0])
            raise ContractBroken(f"a gradient reaches {name}, first at pair {pair}. Detach it.")


@promise("`needs_reference` is correct: if False the reference is not used, if True its absence is a clear error")
def says_whether_it_needs_the_reference(loss: Any) -> None:
    expect(
        isinstance(getattr(loss, "needs_reference", None), bool), "there is no property `needs_reference` that is True or False"
    )
    full, bare = pairs(MOVE), replace(pairs(MOVE), reference=None)
    if not loss.needs_reference:
        hint = "Set needs_reference = True if the reference is part of the loss."
        equal(loss.loss(bare).loss, loss.loss(full).loss, "the loss without a reference (needs_reference is False)", hint)
        return
    try:
        loss.loss(bare)
    except FlowrlError as error:
        expect("reference" in str(error), f"without a reference the error is only {str(error)!r}")
    except Exception as error:
        raise ContractBroken(f"without a reference it raised {type(error).__name__}: {error}; raise a ConfigError") from error
    else:
        raise ContractBroken("needs_reference is True, but without a reference it raised no error; raise a ConfigError")
