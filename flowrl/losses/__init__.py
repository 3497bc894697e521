"""Losses, one file each: pure functions of Gaussians (policy losses) or velocities (forward-process
losses), advantages and weights.
"""

from flowrl.losses.awm import AWM
from flowrl.losses.clipped import ClippedLoss
from flowrl.losses.dgpo import DGPO
from flowrl.losses.dppo import FlowDPPO
from flowrl.losses.gspo import GSPO
from flowrl.losses.guard import GRPOGuard
from flowrl.losses.kl_penalty import KLPenalty
from flowrl.losses.nft import DiffusionNFT
from flowrl.losses.policy_gradient import PolicyGradientLoss

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
