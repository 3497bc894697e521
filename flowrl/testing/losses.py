"""The promises of policy losses and of forward-process losses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from flowrl.core.errors import FlowrlError
from flowrl.core.forward import ForwardBatch, Noise
from flowrl.core.types import Gaussian, LossBatch, Unit, unit_means
from flowrl.flow import uniform_schedule
from flowrl.flow.gaussian import log_prob
from flowrl.testing.contract import (
    INAPPLICABLE,
    Contract,
    ContractBroken,
    expect,
    is_pure,
    maker,
    same,
    tensors,
    twice,
)

MOVE = 0.02
"""Distance between the new policy and the others in most promises."""
COPIES = ("old", "average")
HIDDEN = {"large numbers": 1e3, "nan": math.nan, "inf": math.inf}


@dataclass(frozen=True)
class Case:
    """A policy loss, and batches of two steps of two trajectories of two groups."""

    loss: Any
    repeats = 0.0
    declares = (
        ("unit", get_args(Unit)),
        ("needs_reference", (True, False)),
        ("trains_zero_advantages", (True, False)),
    )
    constants = ("next_node", "behaviour.mean", "reference.mean")
    hidden = ("next_node", "advantages")
    optional = ("reference",)

    def batch(self, move: float = MOVE, tiles: int = 1) -> Any:
        """Transitions whose new means are `move` away from the behaviour's; `tiles` repeats the
        latent. Advantages are one per trajectory if the loss needs that.
        """
        std, row = torch.linspace(0.1, 0.8, 8), torch.arange(8)
        old, step, noise, far, column = noises(8, 5, tiles)
        sample, number, advantages = row % 4, row // 4, 2 * column[:, 0, 0]
        one_each = getattr(self.loss, "one_advantage", False)
        return LossBatch(
            new=Gaussian(old + move * step, std),
            behaviour=Gaussian(old, std.clone()),
            next_node=old + std[:, None, None] * noise,
            advantages=advantages[sample] if one_each else advantages,
            weight=torch.ones(8),
            delta=torch.linspace(0.05, 0.2, 8),
            sample=sample,
            group=sample // 2,
            step=number + 1,
            time=torch.tensor([0.8, 0.6])[number],
            reference=Gaussian(old + 0.1 * far, std.clone()),
        )

    @cached_property
    def inputs(self) -> Mapping[str, Any]:
        """What `result` must leave alone."""
        return {"batch": self.batch()}

    def result(self, batch: Any = None) -> Tensor:
        """The loss of a batch, [1]."""
        return self.loss.loss(self.inputs["batch"] if batch is None else batch).loss

    def gradient(self, batch: Any) -> Tensor:
        """The gradient of the loss with respect to the new means [row, element]; 0 if it does not
        depend on them.
        """
        batch, leaf = with_leaf(batch)
        value = self.loss.loss(batch).loss
        if not value.requires_grad:
            return torch.zeros_like(leaf).flatten(1)
        (gradient,) = torch.autograd.grad(value, leaf, materialize_grads=True, allow_unused=True)
        return gradient.flatten(1)

    def uphill(self, batch: Any) -> Tensor:
        """The direction of a row's gradient for an advantage of 1 [row, element]: of -log pi."""
        batch, leaf = with_leaf(batch)
        score = torch.autograd.grad(log_prob(batch.new, batch.next_node).sum(), leaf)[0]
        return -score.flatten(1)


class ForwardCase(Case):
    """A forward-process loss, and batches of two times of four samples of two groups."""

    declares = (
        ("unit", get_args(Unit)),
        ("needs_reference", (True, False)),
        ("noise", get_args(Noise)),
    )
    constants = ("target", "time", "advantages", *COPIES, "reference")
    hidden = ("new", "advantages")
    optional = (*COPIES, "reference")

    def batch(self, move: float = MOVE, tiles: int = 1) -> Any:
        """Rows in which `new`, old, average and reference are `move` apart. Advantages sum to 0
        over each group.
        """
        sample, number = torch.arange(16) // 2, torch.arange(16) % 2
        target, error, new, old, average, reference, column = noises(16, 7, tiles)
        advantages = column[:8, 0, 0].view(2, 4)
        advantages = advantages - advantages.mean(1, keepdim=True)
        base = target + error
        return ForwardBatch(
            time=torch.tensor([0.9, 0.35])[number],
            target=target,
            new=base + move * new,
            advantages=advantages.flatten()[sample],
            weight=torch.ones(16),
            group=sample // 4,
            sample=sample,
            old=base + move * old,
            average=base + move * average,
            reference=base + move * reference,
        )

    def uphill(self, batch: Any) -> Tensor:
        """The direction of a row's gradient for an advantage of 1: of mean |v - v*|^2."""
        return 2.0 * (batch.new - batch.target).detach().flatten(1) / batch.new[0].numel()


def noises(rows: int, count: int, tiles: int) -> list[Tensor]:
    """Tensors of noise [row, 2, 3], whose elements are repeated `tiles` times."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, rows, 2, 3, generator=generator)
    return list(drawn.repeat(1, 1, 1, tiles))


def with_leaf(batch: Any) -> tuple[Any, Tensor]:
    """The batch with a separate new mean or velocity, which carries the gradient."""
    gaussian = isinstance(batch.new, Gaussian)
    leaf = (batch.new.mean if gaussian else batch.new).detach().clone().requires_grad_()
    return replace(batch, new=Gaussian(leaf, batch.new.std) if gaussian else leaf), leaf


def equal(
    got: Tensor, expected: Tensor, what: str, hint: str = "", tolerance: float = 1e-4
) -> None:
    """Check that values are equal up to rounding, relative to the largest value."""
    same(got, expected, what, hint, tolerance, floor=1e-6)


def declares_what_it_needs(case: Case) -> None:
    """It declares what the trainer prepares: `unit`, `needs_reference`; a policy loss
    `trains_zero_advantages`, a forward-process loss `copies` and `noise`.
    """
    for name, allowed in case.declares:
        value = getattr(case.loss, name, None)
        expect(value in allowed, f"`{name}` is {value!r}; allowed: {allowed}")
    terms = case.loss.unit == "transition" or hasattr(case.loss, "row_terms")
    expect(terms, "unit is not 'transition', but there is no method row_terms(batch)")


def returns_a_scalar(case: Case) -> None:
    """The loss is one finite number to differentiate, with finite gradients."""
    for move in (0.0, MOVE, 1.0):
        batch = with_leaf(case.batch(move))[0]
        value = case.loss.loss(batch).loss
        expect(value.ndim == 0, f"the loss has shape {tuple(value.shape)}. Take a mean over rows.")
        expect(value.requires_grad, "the loss carries no gradient. Was it detached?")
        finite = value.isfinite() and case.gradient(batch).isfinite().all()
        expect(
            finite, f"the loss {value.item()} or its gradient where means differ by about {move}"
        )


def reports_detached_metrics(case: Case) -> None:
    """Metrics are finite numbers without a gradient, also if all weights are 0."""
    batch = with_leaf(case.batch())[0]
    for given in (batch, replace(batch, weight=torch.zeros_like(batch.weight))):
        for name, metric in case.loss.loss(given).metrics.items():
            value = torch.as_tensor(metric)
            expect(value.numel() == 1, f"metric {name!r} has shape {tuple(value.shape)}")
            expect(not value.requires_grad, f"metric {name!r} carries a gradient: detach it")
            expect(value.isfinite(), f"metric {name!r} is {value.item()}")


def counts_only(case: Case, batch: Any, kept: Tensor, state: str, hint: str) -> None:
    """Check that loss and gradient are those of the rows `kept` [row] alone, and that the others,
    in some `state`, have none.
    """
    few, gradient = batch.rows(kept.nonzero().flatten()), case.gradient(batch)
    equal(case.result(batch), case.result(few), f"with rows {state}, the loss", hint)
    rest = gradient[~kept]
    equal(rest, torch.zeros_like(rest), f"the gradient of rows {state}", hint, 0.0)
    equal(gradient[kept], case.gradient(few), f"with rows {state}, the other gradients", hint)


def ignores_rows_of_weight_0(case: Case) -> None:
    """Rows of weight 0 contribute neither value nor gradient, even if their numbers are not
    finite.
    """
    hint = "Replace them before any arithmetic (0 * nan is nan); divide by the sum of the weights."
    for name, value in HIDDEN.items():
        batch = case.batch()
        kept = torch.arange(len(batch.weight)) % 3 != 1
        for field in case.hidden:
            getattr(batch, field)[~kept] = value
        batch = replace(batch, weight=kept.float())
        counts_only(case, batch, kept, f"of weight 0, which contain {name}", hint)


def ignores_deterministic_rows(case: Case) -> None:
    """Rows whose std is 0 are no decisions: the loss and the gradient are those without them."""
    batch = case.batch()
    kept = torch.arange(len(batch.weight)) % 5 != 2
    for gaussian in (batch.new, batch.behaviour, batch.reference):
        gaussian.std[~kept] = 0.0
    hint = "Leave out rows whose behaviour std is 0, as if their weight were 0."
    counts_only(case, batch, kept, "of std 0", hint)


def survives_weights_of_0(case: Case) -> None:
    """If all weights are 0 the loss is exactly 0, with a zero gradient."""
    batch = case.batch()
    batch = with_leaf(replace(batch, weight=torch.zeros_like(batch.weight)))[0]
    value, gradient = case.result(batch), case.gradient(batch)
    fits = value == 0 and value.requires_grad and (gradient == 0).all()
    hint = "0 / 0 is nan: divide by 1 if the sum of the weights is 0, and keep the graph."
    expect(fits, f"the loss is {value}, its largest gradient {gradient.abs().max():.3g}. {hint}")


def starts_at_ratio_one(case: Case) -> None:
    """On policy (new = behaviour) the metrics, if given, are: ratio_mean 1; ratio_deviation,
    clip_fraction, approx_kl 0.
    """
    metrics = case.loss.loss(case.batch(0.0)).metrics
    wanted = {"ratio_mean": 1.0, "ratio_deviation": 0.0, "clip_fraction": 0.0, "approx_kl": 0.0}
    for name in wanted.keys() & metrics.keys():
        value = float(metrics[name])
        expect(abs(value - wanted[name]) <= 1e-6, f"{name} is {value:.8g}, not {wanted[name]:g}")


def row_weights(case: Case, batch: Any) -> Tensor:
    """The factor of each row's gradient along its `uphill` direction [row], without the gradient
    that remains for advantages of 0 (that of a penalty).
    """
    penalty = case.gradient(replace(batch, advantages=torch.zeros_like(batch.advantages)))
    gradient, along = case.gradient(batch) - penalty, case.uphill(batch)
    factor = (gradient * along).sum(1) / along.square().sum(1)
    stray = (gradient - factor[:, None] * along).norm(dim=1) / gradient.norm(dim=1).clamp(min=1e-12)
    row = int(stray.argmax())
    expect(
        stray[row] < 1e-2,
        f"row {row}: {float(stray[row]):.0%} of the gradient is not along that of log pi, or of"
        " the error |v - v*|^2",
    )
    return factor


def starts_along_the_advantage(case: Case) -> None:
    """If all networks are equal, the gradient of a row is its advantage times that of -log pi (of
    |v - v*|^2), times a weight above 0 that does not depend on the advantage.
    """
    batch = case.batch(0.0)
    weights = row_weights(case, batch) / batch.advantages
    row = int(weights.argmin())
    wrong = "is pushed the wrong way" if float(weights[row]) < 0 else "is not pushed at all"
    what = f"row {row} (A = {float(batch.advantages[row]):+.3g}) {wrong}"
    expect(weights[row] > 0, f"{what}. Is a sign wrong? Losses are minimised.")
    other = replace(batch, advantages=-2.0 * batch.advantages)
    ratio = row_weights(case, other) / other.advantages / weights
    hint = "Normalising advantages is the credit rule's business; a clip must not act at ratio 1."
    what = "with -2 A in place of A, the factor by which the weight changes"
    equal(ratio, torch.ones_like(ratio), what, hint, 1e-2)


def trains_zero_advantages_as_declared(case: Case) -> None:
    """Units of advantage 0 have a gradient if and only if a policy loss declares
    `trains_zero_advantages`; of a forward-process loss never, if all networks are equal.
    """
    declared = getattr(case.loss, "trains_zero_advantages", False)
    batch = case.batch(0.0 if isinstance(case, ForwardCase) else MOVE)
    numbers = torch.stack([number.double() for number in batch.units(case.loss.unit)])
    silent = (numbers == numbers[:, :1]).all(0)
    batch = replace(batch, advantages=batch.advantages.masked_fill(silent, 0.0))
    largest = float(case.gradient(batch)[silent].abs().max())
    what = f"with advantages of 0 in a unit, the largest gradient there is {largest:.3g}"
    expect((largest > 1e-7) == declared, f"{what}, but trains_zero_advantages is {declared}")


def is_a_weighted_mean(case: Case) -> None:
    """The loss is the weighted mean of the loss of its rows alone, whatever their order and
    weights, so that parts of a batch add up; a loss of whole units needs `pooled` for that, and
    computes it if the batch has none.
    """
    hint = (
        "Take sum(weight x terms) / sum(weight), also for penalties; group by numbers, not by"
        " place; `unit` must declare which rows a term depends on, `pooled` replace the others."
    )
    batch = case.batch()
    rows = torch.randperm(len(batch.weight), generator=torch.Generator().manual_seed(1))
    batch = replace(batch.rows(rows), weight=0.5 * (rows * 5 % 3))
    share, gradient = batch.weight / batch.weight.sum(), case.gradient(batch)
    pooled = batch
    if case.loss.unit != "transition":
        terms = case.loss.row_terms(with_leaf(batch)[0])
        expect(not terms.requires_grad, "row_terms carries a gradient; use torch.no_grad()")
        means = unit_means(terms, batch.units(case.loss.unit), batch.weight)
        pooled = replace(batch, pooled=means)
    alone = [pooled.rows(slice(i, i + 1)) for i in range(len(rows))]
    if pooled is batch:
        values = torch.stack([case.result(row) for row in alone])
        equal(case.result(batch), values @ share, "the loss, against a mean of its rows',", hint)
    expected = torch.cat([case.gradient(row) for row in alone]) * share[:, None]
    equal(gradient, expected, "the gradient, against that of its rows alone,", hint)


def does_not_depend_on_resolution(case: Case) -> None:
    """The loss does not depend on the resolution: repeating the latent's elements changes
    nothing.
    """
    hint = "Take means, not sums, over latent elements (also in the log-probability)."
    for move in (0.0, MOVE):
        large, small = case.result(case.batch(move, tiles=3)), case.result(case.batch(move))
        equal(large, small, "the loss with every latent element three times", hint, 1e-2)


def differentiates_the_new_policy_only(case: Case) -> None:
    """Data, advantages and other policies are constants: no gradient reaches them."""
    batch = with_leaf(case.batch())[0]
    others = [tensors(batch)[name].requires_grad_() for name in case.constants]
    reached = torch.autograd.grad(case.result(batch), others, allow_unused=True)
    for name, gradient in zip(case.constants, reached, strict=True):
        constant = gradient is None or not gradient.any()
        expect(constant, f"a gradient reaches {name}. Detach it.")


def needs_what_it_declares(case: Case) -> None:
    """A reference or a copy that it declares is used, or its absence is a clear error; others are
    not needed.
    """
    batch, loss = case.batch(), case.loss
    copies = [name for name, made in getattr(loss, "copies", {}).items() if made.evaluated]
    for name in case.optional:
        bare, what = replace(batch, **{name: None}), f"it declares {name}, but without it"
        if name not in copies and not (name == "reference" and loss.needs_reference):
            expected = case.result(batch)
            equal(case.result(bare), expected, f"the loss without {name}, which it does not need,")
            continue
        try:
            case.result(bare)
        except FlowrlError as error:
            expect(name in str(error), f"{what} the error is only {str(error)!r}")
        except Exception as error:
            raise ContractBroken(f"{what} it raised {error!r}, not a ConfigError") from error
        else:
            raise ContractBroken(f"{what} it raised no ConfigError")


def draws_times(case: Case) -> None:
    """Training times are in (0, 1], one row per sample, and the generator's only."""
    times, schedule = case.loss.times, uniform_schedule(10)
    first, second = twice(lambda: times.draw(schedule, 6, torch.Generator().manual_seed(3)))
    shape, wanted = tuple(first.shape), (6, times.draws(schedule))
    expect(shape == wanted, f"times have shape {shape}, not [sample, draw] = {wanted}")
    inside = bool(((first > 0) & (first <= 1)).all())
    expect(inside, f"times are from {first.min():.3g} to {first.max():.3g}, not in (0, 1]")
    equal(second, first, "times drawn again with the same seed", tolerance=0.0)
    if case.loss.unit == "group":
        equal(first, first[:1].expand(wanted), "times of a group's members", tolerance=0.0)


def balances_groups(case: Case) -> str | None:
    """With unit = 'group' and advantages that sum to 0, the weights of a group's errors in the
    gradient sum to 0.
    """
    if case.loss.unit != "group":
        return INAPPLICABLE
    batch = case.batch()
    batch = replace(batch, old=batch.new, average=batch.new)
    weights = row_weights(case, batch)
    means = unit_means(weights, batch.units("group"), batch.weight) / weights.abs().max()
    hint = "All members of a group at one time need the same factor."
    same(means, torch.zeros_like(means), "a group's mean weight of errors", hint, 1e-3)
    return None


BASIC = (declares_what_it_needs, returns_a_scalar, is_pure)
COMMON = (
    reports_detached_metrics,
    ignores_rows_of_weight_0,
    survives_weights_of_0,
    starts_along_the_advantage,
    trains_zero_advantages_as_declared,
    is_a_weighted_mean,
    does_not_depend_on_resolution,
    differentiates_the_new_policy_only,
    needs_what_it_declares,
)
POLICY = (*COMMON, ignores_deterministic_rows, starts_at_ratio_one)
FORWARD = (*COMMON, draws_times, balances_groups)


def policy_loss(part: Any, without: Sequence[str] = ()) -> Contract:
    """The contract of a policy loss (`PolicyLoss`).

    Args:
        part: the policy loss: an object (copied for every promise), a class, or a function that
            makes it.
        without: names of promises that the part breaks on purpose.
    """
    return Contract("policy loss", BASIC, POLICY, maker(part), Case, without)


def forward_loss(part: Any, without: Sequence[str] = ()) -> Contract:
    """The contract of a forward-process loss (`ForwardLoss`).

    Args:
        part: as for `check_loss`.
        without: names of promises that the part breaks on purpose.
    """
    return Contract("forward-process loss", BASIC, FORWARD, maker(part), ForwardCase, without)
