"""What an iteration reports about its rewards and its time."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Clock:
    """Seconds by phase; `on_phase` is told when one begins."""

    def __init__(self, on_phase: Callable[[str], None], phase: str) -> None:
        self.phases: dict[str, float] = {}
        self.on_phase, self.phase = on_phase, phase
        self.last = time.perf_counter()

    def enter(self, phase: str) -> None:
        """The time since the last call belonged to the phase before; `phase` begins."""
        self.stop()
        self.phase = phase
        self.on_phase(phase)

    def stop(self) -> None:
        """The time since the last call belonged to the present phase."""
        if torch.cuda.is_initialized():  # something of this process runs on a GPU
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now - self.last
        self.last = now


def reward_metrics(rewards: Tensor) -> dict[str, Any]:
    """Statistics of the finished images' rewards, and of the gains where every node was scored; invalid samples left out."""
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
