"""Rows of a loss whose fields are ones, for tests that change some of them."""

import torch

from flowrl.core.types import LossBatch


def loss_rows(new, behaviour, **fields):
    """The first half of the rows is at step 1, the second at step 2 of the same trajectories, two
    of each group.
    """
    count = len(new.mean)
    row, half = torch.arange(count), max(count // 2, 1)
    step, ones = 1 + row // half, torch.ones(count)
    sample = row % half
    values = dict.fromkeys(("advantages", "weight", "delta"), ones) | {"time": 1.0 - 0.1 * step}
    values |= {"sample": sample, "group": sample // 2, "step": step}
    values["next_node"] = torch.ones_like(behaviour.mean)
    return LossBatch(new=new, behaviour=behaviour, **values | fields)
