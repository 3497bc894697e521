"""Reward models that do not belong to a world, wrappers around rewards, and feature spaces for diversity."""

from flowrl.rewards.clip import Aesthetic, CLIPScore, HPSv21, PickScore
from flowrl.rewards.combine import Clipped, FunctionReward, NoisyReward, WeightedSum
from flowrl.rewards.contract import ComponentScores, check_scores, marks_invalid
from flowrl.rewards.diversity import ClipFeatures, LatentFeatures, PixelFeatures, group_features, pairwise_diversity
from flowrl.rewards.geneval import GenEval
from flowrl.rewards.images import JPEGCompressibility, JPEGIncompressibility
from flowrl.rewards.judge import Judge
from flowrl.rewards.ocr import OCR

__all__ = [
    "OCR",
    "Aesthetic",
    "CLIPScore",
    "ClipFeatures",
    "Clipped",
    "ComponentScores",
    "FunctionReward",
    "GenEval",
    "HPSv21",
    "JPEGCompressibility",
    "JPEGIncompressibility",
    "Judge",
    "LatentFeatures",
    "NoisyReward",
    "PickScore",
    "PixelFeatures",
    "WeightedSum",
    "check_scores",
    "group_features",
    "marks_invalid",
    "pairwise_diversity",
]
