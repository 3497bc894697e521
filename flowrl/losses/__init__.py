"""Policy losses: pure functions of Gaussians, advantages and a mask, one file each."""

from flowrl.losses.clipped import ClippedLoss
from flowrl.losses.guard import GRPOGuard

__all__ = ["ClippedLoss", "GRPOGuard"]
