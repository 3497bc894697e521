"""Random credit: the negative control that every rule must beat."""

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.experience import CreditTable, Decisions, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import last_column, require_columns
from flowrl.probes import NoProbe, Probe


@checked_options
@dataclass
class RandomCredit:
    """Random credit, a control.

    A ~ N(0, 1) for every member and decision, drawn anew for every table; 0 for a group whose final
    rewards are all equal.

    A negative control: every measurement of credit rules should find it useless. The draws are
    assigned by the rank of the members' rewards, so the order of members has no effect. They depend
    on `seed` and on the number of earlier tables, which checkpoints contain.

    Args:
        seed: seed of the draws, in [0, 10^12); None: the run's seed (0 without a run).
        probe: the probe of the rollout, whose rewards are not used.

    Raises:
        ConfigError: `seed` is out of range.
    """

    seed: int | None = None
    probe: Probe = NoProbe()
    tables: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        require(0 <= (self.seed or 0) < 10**12, "RandomCredit.seed", self.seed, "in [0, 10^12)")

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision]; counts the table."""
        require_columns(values, decisions, self, last_column(decisions.mask))
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed or 0) + self.tables)
        self.tables += 1
        draws = torch.randn(decisions.mask.shape, generator=generator).to(values)
        members = decisions.mask.any(-1)
        final = values[..., -1].masked_fill(~members, torch.inf)
        ranks = final.argsort(dim=1, stable=True).argsort(dim=1)
        credit = draws.gather(1, ranks[..., None].expand_as(draws))
        silent = ((final == final.amin(1, keepdim=True)) | ~members).all(1)
        return credit.masked_fill(silent[:, None, None], 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """The number of tables so far."""
        return {"tables": torch.tensor(self.tables)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.tables = int(state.get("tables", torch.tensor(0)))


def with_seed(rule: Any, seed: int) -> Any:
    """A rule whose random credit without a seed has this one, also within other rules (their option
    `rule`).
    """
    if isinstance(rule, RandomCredit):
        return replace(rule, seed=seed % 10**12) if rule.seed is None else rule
    inner = getattr(rule, "rule", None)
    if inner is None or not is_dataclass(rule):
        return rule
    changed, whole = with_seed(inner, seed), cast(Any, rule)
    return rule if changed is inner else replace(whole, rule=changed)
