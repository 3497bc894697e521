"""Several rewards, each credited separately; then the advantages are summed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.credit.table import STD_EPSILON
from flowrl.credit.uniform import Uniform
from flowrl.errors import CreditError, require
from flowrl.options import checked_options
from flowrl.probes import Probe
from flowrl.protocols import CreditAssigner, PromptCreditAssigner, SelectiveCredit
from flowrl.types import NodeTable, Schedule, StepTable, checked


@checked_options
@dataclass(frozen=True)
class GDPO:
    """Several rewards are normalised one by one before they are summed.

    A = S / (std(S) + 1e-4), S = sum_k w_k A^(k), with A^(k) the advantages that `rule` assigns to reward k alone.

    No reward dominates by its spread, as in a sum of rewards that is normalised afterwards. A reward without components is one
    reward named "reward".

    `assign_parts` raises `CreditError` if `weights` names an unknown reward. Source: GDPO, group reward-decoupled normalisation
    (arXiv 2601.05242), there with uniform credit.

    Args:
        rule: the credit rule for each reward; it may neither select steps nor use prompts.
        weights: w_k by name of the reward; 1 for those left out.
        batch: divide the sum by its std over all prompts, members and steps of the table, as in the paper, so that the scale does
            not grow with the number of rewards. The mean is 0 in every group already. False: A = S.

    Raises:
        ConfigError: `rule` is not allowed.
    """

    rule: CreditAssigner = field(default_factory=Uniform)
    weights: Mapping[str, float] | None = None
    batch: bool = True

    def __post_init__(self) -> None:
        require(isinstance(self.rule, CreditAssigner), "GDPO.rule", self.rule, "a credit rule: attribute probe, method assign")
        plain = not isinstance(self.rule, SelectiveCredit | PromptCreditAssigner)
        require(plain, "GDPO.rule", self.rule, "a rule that selects no steps and uses no prompts")

    @property
    def probe(self) -> Probe:
        """What `rule` needs."""
        return self.rule.probe

    @property
    def shared_noise(self) -> bool:
        """Whether the members of a group start from the same noise under `rule`."""
        return bool(getattr(self.rule, "shared_noise", False))

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages of a single reward."""
        return self.assign_parts({"reward": rewards}, schedule)

    def assign_parts(self, parts: Mapping[str, Tensor], schedule: Schedule | None = None) -> Tensor:
        """Advantages [prompt, member, step] from one reward table [prompt, member, node] per name."""
        if self.weights is not None:
            unknown = sorted(set(self.weights) - set(parts))
            if unknown:
                raise CreditError(f"GDPO.weights names rewards {', '.join(unknown)}; there are {', '.join(parts)}")
        weighted = [self._weight(name) * self.rule.assign(table, schedule) for name, table in parts.items()]
        total = torch.stack(weighted).sum(dim=0)
        return total / (total.std(unbiased=False) + STD_EPSILON) if self.batch else total

    def _weight(self, name: str) -> float:
        return 1.0 if self.weights is None else float(self.weights.get(name, 1.0))
