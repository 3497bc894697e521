"""The promises of policy losses and of forward-process losses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, get_args

import torch
from torch import Tensor

from flowrl.core.errors import FlowrlError
from flowrl.core.forward import ForwardBatch, Noise
from flowrl.core.types import Gaussian, LossBatch, Unit, pooled_units, unit_means
from flowrl.flow import uniform_schedule
from flowrl.flow.gaussian import log_prob
from flowrl.rollout.batches import checked_loss
from flowrl.run.parts.registry import check_part
from flowrl.testing.contract import (
    Pure,
    basic,
    expect,
    promise,
    same,
    tensors,
    twice,
)

MOVE = 0.02
"""Distance between the new policy and the others in most promises."""
HIDDEN = {"large numbers": 1e3, "nan": math.nan, "inf": math.inf}
"""Numbers in rows that must have no effect."""
NETWORKS = ("old", "average", "reference")
CONSTANTS = ("next_node", "behaviour.mean", "reference.mean", "target", *NETWORKS)
"""Tensors of a batch that take no gradient."""


class LossContract(Pure):
    """The promises that both kinds of losses have in common."""

    batch: Any
    """A function of a distance between networks and a number of repeats of the latent."""
    uphill: Any
    """A function of a batch: the direction of a row's gradient for an advantage of 1."""

    @cached_property
    def inputs(self) -> Mapping[str, Any]:
        """What `result` must leave alone."""
        return {"batch": self.batch()}

    def result(self, batch: Any = None) -> Tensor:
        """The loss of a batch, []."""
        return checked_loss(self.part, batch or self.inputs["batch"]).loss

    def gradient(self, batch: Any) -> Tensor:
        """The gradient of the loss with respect to the new means or velocities [row, element]."""
        value, network = self.result(batch), output(batch)
        (gradient,) = torch.autograd.grad(value, network, materialize_grads=True, allow_unused=True)
        return gradient.flatten(1)

    @basic
    def declares_what_it_needs(self) -> None:
        """It declares what the trainer prepares: `unit`, `needs_reference`; a policy loss
        `trains_zero_advantages`, a forward-process loss `copies` and `noise`; for units other than
        "transition" it has a method row_terms(batch).
        """
        check_part("loss", self.part)
        fits = self.part.unit in get_args(Unit) and getattr(self.part, "noise", "each") in get_args(
            Noise
        )
        expect(fits, f"`unit` must be one of {get_args(Unit)}, `noise` one of {get_args(Noise)}")
        expect(
            self.part.unit == "transition" or hasattr(self.part, "row_terms"),
            "row_terms is missing",
        )

    @basic
    def returns_a_scalar(self) -> None:
        """The loss is one finite number to differentiate, with finite gradients."""
        for move in (0.0, MOVE, 1.0):
            batch = self.batch(move)
            value, finite = self.result(batch), self.gradient(batch).isfinite().all()
            what = f"the loss {value.item()} or its gradient where means differ by about {move}"
            expect(value.isfinite() and finite, f"{what} is not finite")

    @promise
    def ignores_rows_of_weight_0(self) -> None:
        """Rows of weight 0 contribute neither value nor gradient, even if their numbers are not
        finite.

        Replace them before any arithmetic (0 * nan is nan); divide by the sum of the weights.
        """
        for name, value in HIDDEN.items():
            batch = self.batch()
            kept = torch.arange(len(batch.weight)) % 3 != 1
            fields = tensors(batch)
            for field in {"next_node", "new", "advantages"} & fields.keys():
                fields[field].data[~kept] = value
            batch = replace(batch, weight=kept.float())
            self.counts_only(batch, kept, f"of weight 0, which contain {name}")

    def counts_only(self, batch: Any, kept: Tensor, state: str) -> None:
        """Check that loss and gradient are those of the rows `kept` [row] alone, and that the
        others, in some `state`, have none.
        """
        few, gradient = batch.rows(kept.nonzero().flatten()), self.gradient(batch)
        equal(self.result(batch), self.result(few), f"with rows {state}, the loss")
        rest = gradient[~kept]
        equal(rest, torch.zeros_like(rest), f"the gradient of rows {state}", tolerance=0.0)
        equal(gradient[kept], self.gradient(few), f"with rows {state}, the other gradients")

    @promise
    def survives_weights_of_0(self) -> None:
        """If all weights are 0 the loss is exactly 0, with a zero gradient; metrics, which never
        carry a gradient, are finite.

        0 / 0 is nan: divide by 1 if the sum of the weights is 0, and keep the loss's graph.
        """
        batch = self.batch()
        batch = replace(batch, weight=torch.zeros_like(batch.weight))
        value, gradient = self.result(batch), self.gradient(batch)
        same(value, torch.zeros_like(value), "the loss")
        same(gradient, torch.zeros_like(gradient), "the gradient")
        for name, metric in self.part.loss(batch).metrics.items():
            number = torch.as_tensor(metric)
            fits = number.numel() == 1 and number.isfinite() and not number.requires_grad
            expect(fits, f"the metric {name!r} is {metric}")

    @promise
    def starts_along_the_advantage(self) -> None:
        """If all networks are equal, the gradient of a row is its advantage times that of -log pi
        (of |v - v*|^2), times a weight above 0 that does not depend on the advantage.

        Is a sign wrong? Losses are minimised. Normalising advantages is the credit rule's business;
        a clip must not act at ratio 1.
        """
        batch = self.batch(0.0)
        weights = self.row_weights(batch) / batch.advantages
        row = int(weights.argmin())
        wrong = "is pushed the wrong way" if float(weights[row]) < 0 else "is not pushed at all"
        expect(weights[row] > 0, f"row {row} (A = {float(batch.advantages[row]):+.3g}) {wrong}")
        other = replace(batch, advantages=-2.0 * batch.advantages)
        ratio = self.row_weights(other) / other.advantages / weights
        what = "with -2 A in place of A, the factor by which the weight changes"
        equal(ratio, torch.ones_like(ratio), what, tolerance=1e-2)

    def row_weights(self, batch: Any) -> Tensor:
        """The factor of each row's gradient along its `uphill` direction [row], without the
        gradient that remains for advantages of 0 (that of a penalty).
        """
        penalty = self.gradient(replace(batch, advantages=torch.zeros_like(batch.advantages)))
        gradient, along = self.gradient(batch) - penalty, self.uphill(batch)
        factor = (gradient * along).sum(1) / along.square().sum(1)
        stray = (gradient - factor[:, None] * along).norm(dim=1) / gradient.norm(dim=1).clamp(
            min=1e-12
        )
        what = (
            f"up to {float(stray.max()):.0%} of a row's gradient is not along that of log pi, or of"
        )
        expect(stray.max() < 1e-2, f"{what} the error |v - v*|^2")
        return factor

    @promise
    def trains_zero_advantages_as_declared(self) -> None:
        """Units of advantage 0 have a gradient if and only if a policy loss declares
        `trains_zero_advantages`; of a forward-process loss never, if all networks are equal.
        """
        declared = getattr(self.part, "trains_zero_advantages", False)
        batch = self.batch(0.0 if isinstance(self, ForwardLossContract) else MOVE)
        first_unit = [number == number[0] for number in batch.units(self.part.unit)]
        silent = torch.stack(first_unit).all(0)
        batch = replace(batch, advantages=batch.advantages.masked_fill(silent, 0.0))
        largest = float(self.gradient(batch)[silent].abs().max())
        what = f"with advantages of 0 in a unit, the largest gradient there is {largest:.3g}"
        expect((largest > 1e-7) == declared, f"{what}, but trains_zero_advantages is {declared}")

    @promise
    def is_a_weighted_mean(self) -> None:
        """The loss is the weighted mean of the loss of its rows alone, whatever their order and
        weights, so that parts of a batch add up; a loss of whole units needs `pooled` for that, and
        computes it if the batch has none.

        Take sum(weight x terms) / sum(weight), also for penalties; group by numbers, not by place;
        `unit` must declare which rows a term depends on, `pooled` replace the others.
        """
        batch = self.batch()
        rows = torch.randperm(len(batch.weight), generator=torch.Generator().manual_seed(1))
        batch = pooled = replace(batch.rows(rows), weight=0.5 * (rows * 5 % 3))
        if self.part.unit != "transition":
            terms = self.part.row_terms(batch)
            expect(not terms.requires_grad, "row_terms carries a gradient; use torch.no_grad()")
            means = unit_means(terms, pooled_units(self.part, batch), batch.weight)
            pooled = replace(batch, pooled=means)
        alone = [pooled.rows(slice(i, i + 1)) for i in range(len(rows))]
        share = batch.weight / batch.weight.sum()
        if pooled is batch:
            values = torch.stack([self.result(row) for row in alone])
            equal(self.result(batch), values @ share, "the loss, against a mean of its rows',")
        expected = torch.cat([self.gradient(row) for row in alone]) * share[:, None]
        equal(self.gradient(batch), expected, "the gradient, against that of its rows alone,")

    @promise
    def does_not_depend_on_resolution(self) -> None:
        """The loss does not depend on the resolution: repeating the latent's elements changes
        nothing.

        Take means, not sums, over latent elements (also in the log-probability).
        """
        for move in (0.0, MOVE):
            large, small = self.result(self.batch(move, tiles=3)), self.result(self.batch(move))
            equal(large, small, "the loss with every latent element three times", tolerance=1e-2)

    @promise
    def differentiates_the_new_policy_only(self) -> None:
        """Data, advantages and other policies are constants: no gradient reaches them."""
        batch = self.batch()
        fields = tensors(batch)
        others = {name: fields[name].requires_grad_() for name in CONSTANTS if name in fields}
        self.result(batch).backward()
        for name, tensor in others.items():
            expect(tensor.grad is None or not tensor.grad.any(), f"a gradient reaches {name}")

    @promise
    def needs_what_it_declares(self) -> None:
        """A reference or a copy that it declares is used, or its absence is a ConfigError that
        names it; others are not needed.
        """
        batch, loss = self.batch(), self.part
        needed = [name for name, made in getattr(loss, "copies", {}).items() if made.evaluated]
        needed += ["reference"] * loss.needs_reference
        for name in [name for name in NETWORKS if hasattr(batch, name)]:
            bare = replace(batch, **{name: None})
            try:
                value = self.result(bare)
            except FlowrlError as error:
                fits = name in needed and name in str(error)
                expect(fits, f"it declares {needed}; without {name} it raised {error}")
            else:
                expect(name not in needed, f"it declares {name}, but computes a loss without it")
                equal(
                    value, self.result(batch), f"the loss without {name}, which it does not need,"
                )


@dataclass(frozen=True)
class PolicyLossContract(LossContract):
    """The contract of a policy loss (`PolicyLoss`).

    Args:
        part: the policy loss: an object (copied for every promise), a class, or a function that
            makes it.
        without: names of promises that the part breaks on purpose.
    """

    def batch(self, move: float = MOVE, tiles: int = 1) -> Any:
        """Transitions whose new means are `move` away from the behaviour's; `tiles` repeats the
        latent. Advantages are one per trajectory if the loss needs that.
        """
        std, row = torch.linspace(0.1, 0.8, 8), torch.arange(8)
        old, step, noise, far, column = noises(8, 5, tiles)
        sample, number, advantages = row % 4, row // 4, 2 * column[:, 0, 0]
        one_each = getattr(self.part, "one_advantage", False)
        return LossBatch(
            new=Gaussian((old + move * step).requires_grad_(), std),
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
            slope=torch.linspace(0.06, 0.25, 8),
        )

    def uphill(self, batch: Any) -> Tensor:
        """The direction of a row's gradient for an advantage of 1 [row, element]: of -log pi."""
        score = torch.autograd.grad(log_prob(batch.new, batch.next_node).sum(), output(batch))[0]
        return -score.flatten(1)

    @promise
    def ignores_deterministic_rows(self) -> None:
        """Rows whose std is 0 are no decisions: the loss and the gradient are those without them.

        Leave out rows whose behaviour std is 0, as if their weight were 0.
        """
        batch = self.batch()
        kept = torch.arange(len(batch.weight)) % 5 != 2
        for gaussian in (batch.new, batch.behaviour, batch.reference):
            gaussian.std[~kept] = 0.0
        self.counts_only(batch, kept, "of std 0")

    @promise
    def starts_at_ratio_one(self) -> None:
        """On policy (new = behaviour) the metrics, if given, are: ratio_mean 1; ratio_deviation,
        clip_fraction, approx_kl 0.
        """
        metrics = self.part.loss(self.batch(0.0)).metrics
        wanted = {"ratio_mean": 1.0, "ratio_deviation": 0.0, "clip_fraction": 0.0, "approx_kl": 0.0}
        for name in wanted.keys() & metrics.keys():
            same(torch.as_tensor(metrics[name]), torch.tensor(wanted[name]), name, 1e-6)


@dataclass(frozen=True)
class ForwardLossContract(LossContract):
    """The contract of a forward-process loss (`ForwardLoss`).

    Args:
        part: as for `check_loss`.
        without: names of promises that the part breaks on purpose.
    """

    def batch(self, move: float = MOVE, tiles: int = 1) -> Any:
        """Rows in which `new`, old, average and reference are `move` apart. Advantages sum to 0
        over each group.
        """
        sample, number = torch.arange(16) // 2, torch.arange(16) % 2
        drawn = noises(16, 8, tiles)
        target, error, new, old, average, reference, column, slope = drawn
        advantages = column[:8, 0, 0].view(2, 4)
        advantages = advantages - advantages.mean(1, keepdim=True)
        base = target + error
        return ForwardBatch(
            time=torch.tensor([0.9, 0.35])[number],
            target=target,
            new=(base + move * new).requires_grad_(),
            advantages=advantages.flatten()[sample],
            weight=torch.ones(16),
            group=sample // 4,
            sample=sample,
            old=base + move * old,
            average=base + move * average,
            reference=base + move * reference,
            reward=column[8:, 0, 0].repeat(2),
            slope=slope,
        )

    def uphill(self, batch: Any) -> Tensor:
        """The direction of a row's gradient for an advantage of 1: of mean |v - v*|^2."""
        return 2.0 * (batch.new - batch.target).detach().flatten(1) / batch.new[0].numel()

    @promise
    def draws_times(self) -> None:
        """Training times are in (0, 1], one row per sample, and the generator's only; the same for
        a group's members if the unit is the group.
        """
        times, schedule = self.part.times, uniform_schedule(10)
        first, second = twice(lambda: times.draw(schedule, 6, torch.Generator().manual_seed(3)))
        wanted = (6, times.draws(schedule))
        fits = first.shape == wanted and ((first > 0) & (first <= 1)).all()
        expect(fits, f"times are {first}, not numbers [sample, draw] = {wanted} in (0, 1]")
        same(second, first, "times drawn again with the same seed")
        if self.part.unit == "group":
            same(first, first[:1].expand(wanted), "times of a group's members")


def noises(rows: int, count: int, tiles: int) -> list[Tensor]:
    """Tensors of noise [row, 2, 3], whose elements are repeated `tiles` times."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, rows, 2, 3, generator=generator)
    return list(drawn.repeat(1, 1, 1, tiles))


def output(batch: Any) -> Tensor:
    """The new mean or velocity, which carries the gradient."""
    return batch.new.mean if isinstance(batch, LossBatch) else batch.new


equal = partial(same, tolerance=1e-4, floor=1e-6)
"""Check that values are equal up to rounding, relative to the largest value."""
