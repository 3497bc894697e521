"""Which samples count: those that the reward could judge and, on request, whose advantages are not all 0."""

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.errors import RewardError
from flowrl.rollout import RewardTables


def valid_credit(tables: RewardTables, assign: Callable[[RewardTables], Tensor]) -> tuple[Tensor, Tensor]:
    """Advantages [prompt, member, step] by `assign`, and which samples [prompt, member] count.

    Every group is shown to the rule without its invalid samples, so that the others get what they would get in a group that never
    had them; groups with as many valid samples share a table (statistics over a batch, and a rule's memory, are then taken table
    by table). Samples that do not count have advantage 0: invalid ones, and those left alone in their group. Raises
    `RewardError` where none is left.
    """
    if bool(tables.valid.all()):
        return assign(tables), tables.valid
    counts = tables.valid.sum(1)
    used = tables.valid & (counts >= 2)[:, None]
    if not bool(used.any()):
        raise RewardError(
            f"the reward marked {int((~tables.valid).sum())} of {tables.valid.numel()} samples invalid; no prompt has two left "
            "to be compared"
        )
    prompts, members, nodes = tables.total.shape
    advantages = torch.zeros(prompts, members, nodes - 1)
    for count in sorted(set(counts[counts >= 2].tolist())):
        kept = tables.valid & (counts == count)[:, None]

        def part(table: Tensor, kept: Tensor = kept, count: int = count) -> Tensor:
            return table[kept].view(-1, count, nodes)

        smaller = RewardTables(
            part(tables.total),
            {name: part(table) for name, table in tables.parts.items()},
            torch.ones(int(kept.sum()) // count, count, dtype=torch.bool),
        )
        advantages[kept] = assign(smaller).to(advantages).flatten(0, 1)
    return advantages, used


def with_advantage(used: Tensor, advantages: Tensor, steps: Tensor) -> Tensor:
    """The samples `used` [prompt, member] whose `advantages` [prompt, member, step] are not 0 at each of the trained `steps`.

    Flow-GRPO's public code (arXiv 2505.05470) leaves the others out of the loss and its mean, so that they give no KL either.
    """
    return used & (advantages[..., steps.to(advantages.device)] != 0).any(-1)
