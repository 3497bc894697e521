"""What every policy loss promises."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import FlowrlError
from flowrl.flow.gaussian import log_prob
from flowrl.testing.findings import Contract, ContractBroken, expect
from flowrl.types import Gaussian, LossBatch

CONTRACT = Contract("policy loss")
promise = CONTRACT.promise

PAIRS = 8


def pairs(move: float = 0.0, seed: int = 0, tiles: int = 1) -> LossBatch:
    """Pairs whose new mean, a leaf that takes gradients, is `move` away from the behaviour's; `tiles` repeats the latent."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    std = torch.linspace(0.1, 0.8, PAIRS)
    old, step, noise, far = (draw(PAIRS, 2, 3).repeat(1, 1, tiles) for _ in range(4))
    return LossBatch(
        new=Gaussian((old + move * step).requires_grad_(), std),
        behaviour=Gaussian(old, std),
        next_node=old + std[:, None, None] * noise,
        advantages=draw(PAIRS),
        mask=torch.ones(PAIRS, dtype=torch.bool),
        delta=torch.linspace(0.05, 0.2, PAIRS),
        reference=Gaussian(old + 0.1 * far, std),
    )


def gradient(loss: Any, batch: LossBatch) -> Tensor:
    """Gradient of the loss to the new means; 0 where the loss does not depend on them."""
    value = loss.loss(batch).loss
    (found,) = torch.autograd.grad(value, batch.new.mean, allow_unused=True)
    return torch.zeros_like(batch.new.mean) if found is None else found


def equal(got: Tensor, expected: Tensor, what: str, hint: str = "", tolerance: float = 1e-4) -> None:
    gap = float((got - expected).detach().abs().max())
    largest = float(expected.detach().abs().max())
    if not gap <= tolerance * (largest + 1e-6):
        raise ContractBroken(f"{what}: off by {gap:.3g} where values are up to {largest:.3g}. {hint}".strip())


def without_penalty(loss: Any, batch: LossBatch) -> LossBatch:
    """The batch with the current policy as its own reference, so that a KL penalty has no gradient."""
    return replace(batch, reference=Gaussian(batch.new.mean.detach().clone(), batch.new.std)) if loss.needs_reference else batch


@promise("the loss is one finite number to differentiate; metrics are finite numbers without gradient")
def returns_a_scalar_and_metrics(loss: Any) -> None:
    result = loss.loss(pairs(0.01))
    expect(result.loss.ndim == 0, f"the loss has shape {tuple(result.loss.shape)}; a scalar is needed")
    expect(bool(torch.isfinite(result.loss)), f"the loss is {result.loss.item()}")
    expect(result.loss.requires_grad, "the loss carries no gradient")
    for name, value in result.metrics.items():
        expect(isinstance(value, Tensor) and value.ndim == 0, f"metric {name!r} is no scalar tensor")
        expect(not value.requires_grad, f"metric {name!r} carries a gradient. Detach it.")
        expect(bool(torch.isfinite(value)), f"metric {name!r} is {float(value)}")


@promise("masked pairs contribute neither to the loss nor to the gradient, whatever they hold")
def ignores_masked_pairs(loss: Any) -> None:
    batch = pairs(0.01)
    mask = batch.mask.clone()
    mask[[1, 4]] = False
    spoiled = batch.next_node.clone()
    spoiled[[1, 4]] = float("nan")
    advantages = batch.advantages.clone()
    advantages[[1, 4]] = float("inf")
    masked = replace(batch, mask=mask, next_node=spoiled, advantages=advantages)
    kept = mask.nonzero().flatten()
    few = replace(
        batch,
        new=Gaussian(batch.new.mean[kept].detach().requires_grad_(), batch.new.std[kept]),
        behaviour=Gaussian(batch.behaviour.mean[kept], batch.behaviour.std[kept]),
        next_node=batch.next_node[kept],
        advantages=batch.advantages[kept],
        mask=mask[kept],
        delta=batch.delta[kept],
        reference=None if batch.reference is None else Gaussian(batch.reference.mean[kept], batch.reference.std[kept]),
    )
    equal(loss.loss(masked).loss, loss.loss(few).loss, "the loss with two pairs masked, against the loss without them", _SELECT)
    found = gradient(loss, masked)
    expect(bool((found[~mask] == 0).all()), f"masked pairs have a gradient. {_SELECT}")
    equal(found[kept], gradient(loss, few), "the gradient with two pairs masked, against that without them", _SELECT)


_SELECT = "Select the pairs that count before any arithmetic: 0 * nan is nan; and take the mean over them only."


@promise("pairs whose std is 0 are no decisions: they have no gradient and leave everything finite")
def ignores_deterministic_pairs(loss: Any) -> None:
    batch = pairs(0.01)
    std = batch.new.std.clone()
    std[2] = 0.0
    reference = None if batch.reference is None else Gaussian(batch.reference.mean, std)
    still = replace(batch, new=Gaussian(batch.new.mean, std), behaviour=Gaussian(batch.behaviour.mean, std), reference=reference)
    found = gradient(loss, still)
    expect(bool(torch.isfinite(found).all()), "the gradient is not finite. Never divide by a std of 0.")
    expect(bool((found[2] == 0).all()), "a pair with std 0 has a gradient")


@promise("with every pair masked the loss is exactly 0, with zero gradients")
def survives_an_empty_mask(loss: Any) -> None:
    batch = replace(pairs(0.01), mask=torch.zeros(PAIRS, dtype=torch.bool))
    value = loss.loss(batch).loss
    expect(value.item() == 0.0, f"the loss is {value.item()}; a mean over nothing is nan")
    expect(bool((gradient(loss, batch) == 0).all()), "there is a gradient")


@promise("on policy (new = behaviour) the gradient of each pair is the policy gradient, -A grad log pi, times a weight above 0")
def starts_as_the_policy_gradient(loss: Any) -> None:
    batch = without_penalty(loss, pairs(0.0))
    (score,) = torch.autograd.grad(log_prob(batch.new, batch.next_node).sum(), batch.new.mean)
    expected = -batch.advantages[:, None, None] * score
    found = gradient(loss, batch)
    for i in range(PAIRS):
        ratio = found[i] / expected[i]
        expect(bool(torch.isfinite(found[i]).all()), f"the gradient of pair {i} is not finite")
        weight = float(ratio.mean())
        expect(
            weight > 0, f"pair {i} (A = {float(batch.advantages[i]):+.2f}) is pushed the wrong way: weight {weight:.3g}. A sign?"
        )
        spread = float(ratio.std())
        expect(spread < 1e-3 * abs(weight), f"pair {i}: the gradient is not along grad log pi (weights vary by {spread:.3g})")


@promise("pairs of advantage 0 have no policy gradient")
def does_nothing_without_advantage(loss: Any) -> None:
    batch = replace(without_penalty(loss, pairs(0.01)), advantages=torch.zeros(PAIRS))
    largest = float(gradient(loss, batch).abs().max())
    expect(largest < 1e-7, f"all advantages are 0, yet a gradient of {largest:.3g} remains")


@promise("the loss is a mean: the same pairs twice give the same loss")
def is_a_mean_over_pairs(loss: Any) -> None:
    batch = pairs(0.01)

    def twice(x: Tensor) -> Tensor:
        return torch.cat([x, x])

    def both(g: Gaussian) -> Gaussian:
        return Gaussian(twice(g.mean), twice(g.std))

    double = LossBatch(
        both(batch.new), both(batch.behaviour), twice(batch.next_node), twice(batch.advantages), twice(batch.mask),
        twice(batch.delta), None if batch.reference is None else both(batch.reference),
    )  # fmt: skip
    equal(loss.loss(double).loss, loss.loss(batch).loss, "with every pair twice", "Is it a sum?")


@promise("the loss does not depend on the resolution: repeating the latent's elements changes nothing")
def does_not_depend_on_resolution(loss: Any) -> None:
    small, large = pairs(0.01), pairs(0.01, tiles=3)
    hint = "Take means, not sums, over latent elements."
    equal(loss.loss(large).loss, loss.loss(small).loss, "with every latent element three times", hint)


@promise("sampled node, behaviour and reference are constants: no gradient reaches them")
def differentiates_the_new_policy_only(loss: Any) -> None:
    batch = pairs(0.01)
    node = batch.next_node.clone().requires_grad_()
    old = batch.behaviour.mean.clone().requires_grad_()
    assert batch.reference is not None
    base = batch.reference.mean.clone().requires_grad_()
    watched = replace(
        batch, next_node=node, behaviour=Gaussian(old, batch.behaviour.std), reference=Gaussian(base, batch.reference.std)
    )
    found = torch.autograd.grad(loss.loss(watched).loss, [node, old, base], allow_unused=True)
    for name, value in zip(("next_node", "behaviour", "reference"), found, strict=True):
        leak = value is not None and bool((value != 0).any())
        expect(not leak, f"a gradient reaches {name}. Detach it.")


@promise("`needs_reference` is honest: without a need the reference is not read, with one its absence is a clear error")
def says_whether_it_needs_the_reference(loss: Any) -> None:
    bare = replace(pairs(0.01), reference=None)
    if not loss.needs_reference:
        loss.loss(bare)
        return
    try:
        loss.loss(bare)
    except FlowrlError:
        return
    except Exception as error:
        raise ContractBroken(f"without a reference it raised {type(error).__name__}: {error}; raise a ConfigError") from error
    raise ContractBroken("without a reference it went on silently")
