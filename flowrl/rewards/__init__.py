"""Reward models that do not belong to a world, wrappers around rewards, and feature spaces for
diversity.
"""

from flowrl.rewards.clip import Aesthetic, CLIPScore, HPSv21, PickScore
from flowrl.rewards.combine import (
    Clipped,
    FrameMean,
    FunctionReward,
    GroupSum,
    NoisyReward,
    WeightedSum,
    WinRate,
    evaluation_reward,
    require_single,
    weighted_total,
    win_rates,
)
from flowrl.rewards.contract import (
    ComponentScores,
    check_scores,
    component_methods,
)
from flowrl.rewards.diversity import (
    ClipFeatures,
    LatentFeatures,
    PixelFeatures,
    group_features,
    pairwise_diversity,
)
from flowrl.rewards.geneval import GenEval
from flowrl.rewards.images import (
    OCR,
    Images,
    JPEGCompressibility,
    JPEGIncompressibility,
    Motion,
    stills,
    to_pillow,
)

__all__ = [
    "OCR",
    "Aesthetic",
    "CLIPScore",
    "ClipFeatures",
    "Clipped",
    "ComponentScores",
    "FrameMean",
    "FunctionReward",
    "GenEval",
    "GroupSum",
    "HPSv21",
    "Images",
    "JPEGCompressibility",
    "JPEGIncompressibility",
    "LatentFeatures",
    "Motion",
    "NoisyReward",
    "PickScore",
    "PixelFeatures",
    "WeightedSum",
    "WinRate",
    "check_scores",
    "component_methods",
    "evaluation_reward",
    "group_features",
    "pairwise_diversity",
    "require_single",
    "stills",
    "to_pillow",
    "weighted_total",
    "win_rates",
]
