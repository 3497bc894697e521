"""The gradient of one share of an iteration's pairs, in micro-batches of any size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.distributed import Distributed
from flowrl.protocols import FlowPolicy, PolicyLoss, Sampler
from flowrl.rollout.collector import Collected
from flowrl.rollout.loss_batch import loss_pairs
from flowrl.types import LossBatch


@dataclass(frozen=True)
class Part:
    """A micro-batch: pairs (`sample`, `step`), samples numbered among those of this process, and what their mean loss weighs in
    the mean over the share. Weight 0: padding, since sharded weights need equally many network calls in every process."""

    sample: Tensor
    step: Tensor
    weight: float


def parts_of(share: Tensor, steps: Tensor, size: int, found: Collected, distributed: Distributed) -> list[Part]:
    """This process's pairs of `share` (numbers of samples among all) x `steps`, at most `size` at a time.

    Weights are pairs of the part / pairs of the share, over all processes; nothing needs to divide anything.
    """
    groups = found.result.groups.of or found.result.groups.prompts
    sample, step = torch.cartesian_prod(share, steps).unbind(1)
    own = found.owned(sample)
    mine = (
        list(zip((sample[own] - found.samples.start).split(size), step[own].split(size), strict=True)) if bool(own.any()) else []
    )
    parts = [Part(rows, columns, len(rows) / len(sample)) for rows, columns in mine]
    if distributed.sharded:
        assigned = [distributed.assign(groups, rank) for rank in range(distributed.world_size)]
        counts = [int(found.owned(sample, groups_of_rank).sum()) for groups_of_rank in assigned]
        empty = Part(torch.zeros_like(share[:1]), steps[:1], 0.0)
        parts += [empty] * (-(-max(counts) // size) - len(parts))
    return parts


@dataclass(frozen=True)
class Gradients:
    """Differentiates parts. `advantages` is [sample, step] of this process's samples."""

    policy: FlowPolicy
    sampler: Sampler
    loss: PolicyLoss
    found: Collected
    advantages: Tensor

    def batch(self, part: Part) -> LossBatch:
        """What the loss sees of `part`."""
        return loss_pairs(
            self.policy, self.sampler, self.found.result, self.found.condition, self.advantages, part.sample, part.step,
            self.loss.needs_reference,
        )  # fmt: skip

    def of(self, parts: list[Part], backward: Callable[[Tensor], None]) -> list[dict[str, float]]:
        """Hand every part's weighted loss to `backward`; returns "weight", "loss" and the loss's metrics, part by part.

        The values are fetched from the device once, at the end.
        """
        weights, values = [], []
        names: list[str] = []
        for part in parts:
            outcome = self.loss.loss(self.batch(part))
            backward(outcome.loss * part.weight)
            if part.weight > 0:
                named = {"loss": outcome.loss.detach(), **outcome.metrics}
                names = list(named)
                weights.append(part.weight)
                values.append(torch.stack([value.detach().double().reshape(()) for value in named.values()]))
        rows = torch.stack(values).tolist() if values else []
        return [{"weight": w, **dict(zip(names, row, strict=True))} for w, row in zip(weights, rows, strict=True)]


def add_metrics(totals: dict[str, float], part: Mapping[str, float], shares: int) -> None:
    """Add a part's metrics to the iteration's: means over all pairs, and the largest "ratio_deviation"."""
    scale = part["weight"] / shares
    for key, value in part.items():
        if key == "ratio_deviation":
            totals[key] = max(totals.get(key, 0.0), value)
        elif key != "weight":
            totals[key] = totals.get(key, 0.0) + value * scale
