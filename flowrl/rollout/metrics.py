"""What an iteration reports: seconds by phase, statistics of its rewards, and means of what the loss measured."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.types import LossResult

Row = dict[str, float]


class Clock:
    """Seconds by phase; `on_phase` is called with the name of every phase that begins."""

    def __init__(self, on_phase: Callable[[str], None], phase: str) -> None:
        self.phases: dict[str, float] = {}
        self.on_phase, self.phase = on_phase, phase
        self.last = time.perf_counter()

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self.stop()
        self.phase = phase
        self.on_phase(phase)

    def stop(self) -> None:
        """Add the time since the last call to the current phase."""
        if torch.cuda.is_initialized():  # something of this process runs on a GPU
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now - self.last
        self.last = now


def reward_metrics(rewards: Tensor) -> dict[str, Any]:
    """Statistics of the finished images' rewards, and of the gains if every node was scored; without invalid samples.

    `rewards` is [prompt, member, node].
    """
    valid = rewards[..., -1].isfinite()
    rewards, groups = rewards[valid], [group[kept] for group, kept in zip(rewards[..., -1], valid, strict=True) if kept.any()]
    final = rewards[..., -1]
    spread = torch.stack([group.std(unbiased=False) for group in groups])
    metrics: dict[str, Any] = {
        "reward_mean": float(final.mean()),
        "reward_std": float(final.std()) if final.numel() > 1 else 0.0,
        "group_std": float(spread.mean()),
        "zero_spread_groups": float((spread < 1e-6).float().mean()),
    }
    if bool(torch.isfinite(rewards).all()):
        metrics["mean_abs_gain"] = rewards.diff(dim=-1).abs().mean(0).tolist()
    return metrics


class LossMetrics:
    """Means over all pairs of an iteration of the loss and its metrics, and the largest "ratio_deviation".

    `add` takes a micro-batch's result without waiting for the device, `take` fetches all of a mini-batch at once, and `merge`
    adds the mini-batch's rows of all processes. "ratio_noise" is the largest deviation of a ratio in the first mini-batch: the
    policy has not changed yet, so only rounding moves a ratio from 1.
    """

    def __init__(self) -> None:
        self.means: dict[str, float] = {}
        self.merged = 0
        self._weights: list[float] = []
        self._names: list[str] = []
        self._values: list[Tensor] = []

    def add(self, weight: float, result: LossResult) -> None:
        """A micro-batch's loss and metrics; `weight` is its share of the iteration's pairs. Weight 0 is left out."""
        if weight > 0:
            named = {"loss": result.loss.detach(), **result.metrics}
            self._names = list(named)
            self._weights.append(weight)
            self._values.append(torch.stack([value.detach().double().reshape(()) for value in named.values()]))

    def take(self) -> list[Row]:
        """One row per micro-batch since the last call: "weight", "loss" and the loss's metrics."""
        values = torch.stack(self._values).tolist() if self._values else []
        named = [dict(zip(self._names, row, strict=True)) for row in values]
        rows = [{"weight": weight, **row} for weight, row in zip(self._weights, named, strict=True)]
        self._weights, self._values = [], []
        return rows

    def merge(self, rows: Sequence[Sequence[Row]]) -> None:
        """Add the rows of one mini-batch, process by process."""
        for row in (row for part in rows for row in part):
            for key, value in row.items():
                if key == "ratio_deviation":
                    self._raise("ratio_deviation", value)
                    if self.merged == 0:
                        self._raise("ratio_noise", value)
                elif key != "weight":
                    self.means[key] = self.means.get(key, 0.0) + value * row["weight"]
        self.merged += 1

    def _raise(self, key: str, value: float) -> None:
        self.means[key] = max(self.means.get(key, 0.0), value)
