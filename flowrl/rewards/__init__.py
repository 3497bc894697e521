"""Rewards: without a network, wrappers around rewards, and feature spaces for diversity; those by
networks are in `clip`, `geneval` and `ocr`. The names below are imported at their first use.
"""

from typing import TYPE_CHECKING

from flowrl.core.lazy import lazily

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

__getattr__ = lazily(
    __name__,
    {
        "combine": (
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
        "contract": ("ComponentScores", "check_scores", "component_methods", "load_reward"),
        "diversity": ("LatentFeatures", "PixelFeatures", "group_features", "pairwise_diversity"),
        "images": (
            "Images",
            "JPEGCompressibility",
            "JPEGIncompressibility",
            "Motion",
            "stills",
            "to_bytes",
            "to_pillow",
        ),
    },
)
