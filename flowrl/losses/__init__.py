"""Losses: pure functions of Gaussians (policy losses) or velocities (forward-process losses),
advantages and weights.
"""

from flowrl.losses.forward import AWM, CRD, DGPO, DiffusionNFT, RewardAscent
from flowrl.losses.policy import (
    GSPO,
    RSM,
    ClippedLoss,
    Distillation,
    FlowDPPO,
    GRPOGuard,
    KLPenalty,
    PolicyGradientLoss,
    StepNFT,
)

__all__ = [
    "AWM",
    "CRD",
    "DGPO",
    "GSPO",
    "RSM",
    "ClippedLoss",
    "DiffusionNFT",
    "Distillation",
    "FlowDPPO",
    "GRPOGuard",
    "KLPenalty",
    "PolicyGradientLoss",
    "RewardAscent",
    "StepNFT",
]
