"""Several rewards, each credited separately; then the advantages are summed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowrl.core.errors import CreditError
from flowrl.core.experience import Credit, CreditTable, Decisions, Experience, ValueTable
from flowrl.core.options import checked_options
from flowrl.core.protocols import CreditAssigner
from flowrl.credit.table import STD_EPSILON, credit_of, read_columns, require_assigner
from flowrl.credit.uniform import Uniform
from flowrl.probes import Probe


@checked_options
@dataclass(frozen=True)
class GDPO:
    """Several rewards are normalised one by one before they are summed.

    A = S / (std(S) + 1e-4), S = sum_j w_j A^(j), with A^(j) the advantages that `rule` assigns to
    reward j alone.

    No reward dominates by its spread, as in a sum of rewards that is normalised afterwards. A
    reward without components is one reward named "reward".

    `credit` raises `CreditError` if `weights` names an unknown reward. Source: GDPO, group
    reward-decoupled normalisation (arXiv 2601.05242), there with uniform credit.

    Args:
        rule: the credit rule for each reward, with a method `assign` and without memory.
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

    def __post_init__(self) -> None:
        require_assigner(self.rule, "GDPO.rule")

    @property
    def probe(self) -> Probe:
        """What `rule` needs."""
        return self.rule.probe

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
        return read_columns(self.rule, trained)

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages of a single reward."""
        return self._sum({"reward": self.rule.assign(values, decisions)}, decisions)

    def credit(self, experience: Experience) -> Credit:
        """Advantages from the value table of each component; of the weights that `rule` gives, the
        smallest.
        """
        parts = experience.parts or {"reward": experience.values}
        unknown = sorted(set(self.weights or {}) - set(parts))
        if unknown:
            raise CreditError(
                f"GDPO.weights names rewards {', '.join(unknown)}; there are {', '.join(parts)}"
            )
        each = {name: replace(experience, values=table, parts={}) for name, table in parts.items()}
        credits = {name: credit_of(self.rule, one) for name, one in each.items()}
        weights = [one.weights for one in credits.values() if one.weights is not None]
        advantages = self._sum(
            {name: one.advantages for name, one in credits.items()}, experience.decisions
        )
        return Credit(advantages, torch.stack(weights).amin(0) if weights else None)

    def _sum(self, advantages: Mapping[str, Tensor], decisions: Decisions) -> Tensor:
        weights = self.weights or {}
        weighted = [float(weights.get(name, 1.0)) * table for name, table in advantages.items()]
        total = torch.stack(weighted).sum(dim=0)
        return (
            total / (total[decisions.mask].std(unbiased=False) + STD_EPSILON)
            if self.batch
            else total
        )
