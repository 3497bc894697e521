"""Losses: pure functions of Gaussians (policy losses) or velocities (forward-process losses),
advantages and weights.
"""

from flowrl.losses.forward import AWM, DGPO, DiffusionNFT
from flowrl.losses.policy import (
    GSPO,
    ClippedLoss,
    FlowDPPO,
    GRPOGuard,
    KLPenalty,
    PolicyGradientLoss,
)

__all__ = [
    "AWM",
    "DGPO",
    "GSPO",
    "ClippedLoss",
    "DiffusionNFT",
    "FlowDPPO",
    "GRPOGuard",
    "KLPenalty",
    "PolicyGradientLoss",
]
