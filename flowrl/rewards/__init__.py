"""Reward models that are not tied to a world."""

from flowrl.rewards.clip import Aesthetic, CLIPScore, HPSv21, PickScore
from flowrl.rewards.combine import WeightedSum
from flowrl.rewards.function import FunctionReward
from flowrl.rewards.jpeg import JPEGCompressibility, JPEGIncompressibility
from flowrl.rewards.noisy import NoisyReward
from flowrl.rewards.ocr import OCR

__all__ = [
    "OCR",
    "Aesthetic",
    "CLIPScore",
    "FunctionReward",
    "HPSv21",
    "JPEGCompressibility",
    "JPEGIncompressibility",
    "NoisyReward",
    "PickScore",
    "WeightedSum",
]
