"""Policy losses: pure functions of Gaussians, advantages and a mask, one file each."""

from flowrl.losses.clipped import ClippedLoss
from flowrl.losses.dppo import FlowDPPO
from flowrl.losses.guard import GRPOGuard
from flowrl.losses.policy_gradient import PolicyGradientLoss

__all__ = ["ClippedLoss", "FlowDPPO", "GRPOGuard", "PolicyGradientLoss"]
