"""Advantages multiplied by a weight per decision."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import CreditError, require
from flowrl.core.experience import Credit, CreditTable, Decisions, Experience, ValueTable
from flowrl.core.options import checked_options
from flowrl.core.protocols import CreditAssigner
from flowrl.credit.table import credit_of, read_columns, require_assigner, require_clamp
from flowrl.credit.uniform import Uniform
from flowrl.probes import NoProbe, Probe


@checked_options
@dataclass(frozen=True)
class Weighted:
    """The advantages of another rule, times a weight per decision.

    A_k = w_k A_k', with A' the advantages of `rule`; None: A' = A of `Uniform(std, clamp, probe)`.

    The weights multiply advantages, so they scale the policy term and no penalty. `assign` raises
    `CreditError` if the number of weights is not the number of decisions. Source: TempFlow-GRPO
    (arXiv 2508.04324, ICLR 2026), noise-aware weighting.

    Args:
        weights: one finite number per decision; or a function of the decisions' times [decision]
            that returns the weights [decision]; or "noise": w_k proportional to the transition's
            std (sigma sqrt(Delta)), with mean 1 over the trained decisions.
        std: as in `Uniform`, without `rule` only.
        clamp: as in `Uniform`, without `rule` only; applied before the weights.
        probe: as in `Uniform`, without `rule` only.
        rule: the rule for A', with a method `assign` and without memory.

    Raises:
        ConfigError: a field is out of range, `rule` is not allowed, or `std`, `clamp` or `probe` is
            given together with `rule`.
    """

    weights: tuple[float, ...] | Callable[[Tensor], Tensor] | Literal["noise"] = "noise"
    std: Literal["group", "batch"] = "group"
    clamp: float | None = 5.0
    probe: Probe = NoProbe()
    rule: CreditAssigner | None = None

    def __post_init__(self) -> None:
        allowed = "'noise', a tuple of one finite number per decision, or a function of the time"
        numbers = (
            isinstance(self.weights, tuple)
            and len(self.weights) > 0
            and all(map(math.isfinite, self.weights))
        )
        fits = numbers or callable(self.weights) or self.weights == "noise"
        require(fits, "Weighted.weights", self.weights, allowed)
        require(self.std in ("group", "batch"), "Weighted.std", self.std, "'group' or 'batch'")
        require_clamp("Weighted", self.clamp)
        if self.rule is not None:
            require_assigner(self.rule, "Weighted.rule")
            own = (self.std, self.clamp, self.probe)
            fits = own in (("group", 5.0, NoProbe()), ("group", 5.0, self.rule.probe))
            require(
                fits,
                "Weighted.std, clamp, probe",
                own,
                "left out if a rule is given: set them there",
            )
            object.__setattr__(self, "probe", self.rule.probe)

    @property
    def shared_noise(self) -> bool:
        """Whether the members of a group start from the same noise under `rule`."""
        return bool(getattr(self.rule, "shared_noise", False))

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """The fields of the record that `rule` needs."""
        return getattr(self.rule, "reads_fields", ())

    def reads(self, trained: Tensor) -> Tensor:
        """The columns that `rule` reads."""
        return read_columns(self._rule, trained)

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]; the clamp applies before the weights."""
        return self._times(self._rule.assign(values, decisions), decisions)

    def credit(self, experience: Experience) -> Credit:
        """As `assign`, for a rule that reads more of the record."""
        found = credit_of(self._rule, experience)
        return replace(found, advantages=self._times(found.advantages, experience.decisions))

    @property
    def _rule(self) -> CreditAssigner:
        return self.rule or Uniform(std=self.std, clamp=self.clamp, probe=self.probe)

    def _times(self, advantages: Tensor, decisions: Decisions) -> Tensor:
        if isinstance(self.weights, tuple):
            weights = torch.tensor(self.weights)
        elif callable(self.weights):
            weights = self.weights(decisions.time)
        else:
            weights = decisions.std / decisions.std[decisions.trained].mean()
        if weights.shape != (len(decisions),):
            found = (
                f"{len(weights)} weights"
                if weights.ndim == 1
                else f"weights {tuple(weights.shape)}"
            )
            raise CreditError(f"Weighted has {found}, but the table has {len(decisions)} decisions")
        return advantages * weights.to(advantages)
