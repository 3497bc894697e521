"""Credit where some samples could not be judged."""

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
