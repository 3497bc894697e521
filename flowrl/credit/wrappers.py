"""Rules around another rule: weights per decision, and several rewards."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import CreditError, require
from flowrl.core.experience import Credit, Decisions, Experience, Needs, ValueTable, needs_of
from flowrl.core.options import checked_options
from flowrl.core.protocols import CreditAssigner, Stateful
from flowrl.credit.table import STD_EPSILON, credit_of
from flowrl.credit.uniform import Uniform
from flowrl.probes import Probe


class RuleAround:
    """The base of a rule around another one, which is its field `rule`: the probe and the needs are
    those of `rule`. A subclass defines `assign`, which calls `inner_credit`; one with needs of its
    own overrides `needs` with ``replace(super().needs, ...)``.
    """

    rule: Any

    def __post_init__(self) -> None:
        fits = not isinstance(self.rule, Stateful)  # the rule around it would not store the memory
        require(fits, f"{type(self).__name__}.rule", self.rule, "a rule without memory")

    @property
    def probe(self) -> Probe:
        """The probe of `rule`."""
        return self.rule.probe

    @property
    def needs(self) -> Needs:
        """What `rule` needs."""
        return needs_of(self.rule)

    def inner_credit(
        self, values: ValueTable, decisions: Decisions, record: Experience | None
    ) -> Credit:
        """The checked credit of `rule` for a table, with the record if there is one."""
        if record is None:
            record = Experience((), values, decisions, decisions.mask.any(-1))
        return credit_of(self.rule, replace(record, values=values))


@checked_options
@dataclass(frozen=True)
class Weighted(RuleAround):
    """Multiplies the advantages of another rule by a weight per decision.

    A_k = w_k A_k', with A' the advantages of `rule`.

    The weights multiply advantages, so they scale the policy term and no penalty. `assign` raises
    `CreditError` if the number of weights is not the number of decisions. Source: TempFlow-GRPO
    (arXiv 2508.04324, ICLR 2026), noise-aware weighting.

    Args:
        weights: one finite number per decision; or a function of the decisions' times [decision]
            that returns the weights [decision]; or "noise": w_k proportional to the transition's
            std (sigma sqrt(Delta)), with mean 1 over the trained decisions; or "velocity":
            proportional to std / Delta, likewise, so that the gradients in v have the same spread
            (Flow-SDE has |d mean / d v| = (1 + a^2/2) Delta at t < 1). On an even grid the two are
            the same.
        rule: the rule for A', without memory.

    Raises:
        ConfigError: a field is out of range, or `rule` is not allowed.
    """

    weights: tuple[float, ...] | Callable[[Tensor], Tensor] | Literal["noise", "velocity"] = "noise"
    rule: CreditAssigner = field(default_factory=Uniform)

    def __post_init__(self) -> None:
        if isinstance(self.weights, tuple):
            fits = len(self.weights) > 0 and all(map(math.isfinite, self.weights))
            require(fits, "Weighted.weights", self.weights, "a finite number per decision")
        super().__post_init__()

    @checked
    def assign(
        self, values: ValueTable, decisions: Decisions, record: Experience | None = None
    ) -> Credit:
        """Advantages [prompt, member, decision]; the rule's clamp applies before the weights. The
        weights in the loss are those of `rule`.
        """
        credit = self.inner_credit(values, decisions, record)
        if isinstance(self.weights, tuple):
            weights = torch.tensor(self.weights)
        elif callable(self.weights):
            weights = self.weights(decisions.time)
        else:
            spread = decisions.std
            if self.weights == "velocity":
                spread = spread / decisions.delta.clamp(min=1e-6)  # 0: the initial noise
            weights = spread / spread[decisions.trained].mean()
        if weights.shape != (len(decisions),):
            given, count = tuple(weights.shape), len(decisions)
            raise CreditError(f"Weighted has weights {given}, but the table has {count} decisions")
        advantages = credit.advantages * weights.to(credit.advantages)
        return replace(credit, advantages=advantages)


@checked_options
@dataclass(frozen=True)
class GDPO(RuleAround):
    """Normalises several rewards separately before it sums them.

    A = S / (std(S) + 1e-4), S = sum_j w_j A^(j), with A^(j) the advantages that `rule` assigns to
    reward j alone.

    No reward dominates by its spread, as in a sum of rewards that is normalised afterwards. A
    reward without components is one reward named "reward".

    `assign` raises `CreditError` if `weights` names an unknown reward. Source: GDPO, group
    reward-decoupled normalisation (arXiv 2601.05242), there with uniform credit.

    Args:
        rule: the credit rule for each reward, without memory.
        weights: w_j by name of the reward; 1 for those left out.
        batch: divide the sum by its std over all entries of the mask, as in the paper, so that the
            scale does not grow with the number of rewards. The mean is 0 in every group already.
            False: A = S.

    Raises:
        ConfigError: `rule` is not allowed.
    """

    rule: CreditAssigner = field(default_factory=Uniform)
    weights: Mapping[str, float] | None = None
    batch: bool = True

    @property
    def needs(self) -> Needs:
        """The components, of which `weights` names some, and what `rule` needs."""
        inner = needs_of(self.rule)
        return replace(inner, fields=("parts", *inner.fields), parts=tuple(self.weights or ()))

    @checked
    def assign(
        self, values: ValueTable, decisions: Decisions, record: Experience | None = None
    ) -> Credit:
        """Advantages from the value table of each component, without a record those of one reward;
        of the weights that `rule` gives, the smallest.
        """
        parts = {"reward": values}
        if record is not None and record.parts:
            parts, record = record.parts, replace(record, parts={})
        unknown = ", ".join(sorted(set(self.weights or {}) - set(parts)))
        if unknown:
            raise CreditError(
                f"GDPO.weights names unknown rewards {unknown}; allowed: {', '.join(parts)}"
            )
        credits = [self.inner_credit(table, decisions, record) for table in parts.values()]
        factors = [float((self.weights or {}).get(name, 1.0)) for name in parts]
        weighted = [w * credit.advantages for w, credit in zip(factors, credits, strict=True)]
        total = torch.stack(weighted).sum(dim=0)
        if self.batch:
            total = total / (total[decisions.mask].std(unbiased=False) + STD_EPSILON)
        weights = [credit.weights for credit in credits if credit.weights is not None]
        return Credit(total, torch.stack(weights).amin(0))
