"""Rewards: without a network, wrappers around rewards, and feature spaces for diversity; those by
networks are in `clip`, `geneval` and `ocr`. The names below are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        load_reward,
    )
    from flowrl.rewards.diversity import (
        LatentFeatures,
        PixelFeatures,
        group_features,
        pairwise_diversity,
    )
    from flowrl.rewards.images import (
        Images,
        JPEGCompressibility,
        JPEGIncompressibility,
        Motion,
        stills,
        to_bytes,
        to_pillow,
    )

_HOMES = {
    **dict.fromkeys(
        (
            "Clipped",
            "FrameMean",
            "FunctionReward",
            "GroupSum",
            "NoisyReward",
            "WeightedSum",
            "WinRate",
            "evaluation_reward",
            "require_single",
            "weighted_total",
            "win_rates",
        ),
        "combine",
    ),
    **dict.fromkeys(
        (
            "ComponentScores",
            "check_scores",
            "component_methods",
            "load_reward",
        ),
        "contract",
    ),
    **dict.fromkeys(
        (
            "LatentFeatures",
            "PixelFeatures",
            "group_features",
            "pairwise_diversity",
        ),
        "diversity",
    ),
    **dict.fromkeys(
        (
            "Images",
            "JPEGCompressibility",
            "JPEGIncompressibility",
            "Motion",
            "stills",
            "to_bytes",
            "to_pillow",
        ),
        "images",
    ),
}

__all__ = [
    "Clipped",
    "ComponentScores",
    "FrameMean",
    "FunctionReward",
    "GroupSum",
    "Images",
    "JPEGCompressibility",
    "JPEGIncompressibility",
    "LatentFeatures",
    "Motion",
    "NoisyReward",
    "PixelFeatures",
    "WeightedSum",
    "WinRate",
    "check_scores",
    "component_methods",
    "evaluation_reward",
    "group_features",
    "load_reward",
    "pairwise_diversity",
    "require_single",
    "stills",
    "to_bytes",
    "to_pillow",
    "weighted_total",
    "win_rates",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"flowrl.rewards.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'flowrl.rewards' has no attribute {name!r}")
