"""Policies, which own a network: the closed-form mixture, the small built-in model, and diffusers'
pipelines. The names below are imported at their first use.
"""

from typing import TYPE_CHECKING

from flowrl.core.lazy import lazily

if TYPE_CHECKING:
    from flowrl.policies.device import device_of
    from flowrl.policies.families import (
        SD3,
        Family,
        Flux,
        Flux2Klein,
        FluxKontext,
        QwenImage,
        QwenImage21,
        QwenImageEdit,
        QwenImageEditPlus,
        Sana,
        Wan,
        ZImage,
        decode_scaled,
        linear_guidance,
        packed_shape,
        require_multiples,
        resolution_shift,
        unpacked,
    )
    from flowrl.policies.lora import LORA_TARGETS, Adapters
    from flowrl.policies.mixture import MixturePolicy
    from flowrl.policies.pipeline import (
        DTYPES,
        PipelinePolicy,
        compile_blocks,
        has_compiled_blocks,
    )
    from flowrl.policies.small_sd3 import SmallSD3, SmallSD3Policy


__all__ = [
    "DTYPES",
    "LORA_TARGETS",
    "SD3",
    "Adapters",
    "Family",
    "Flux",
    "Flux2Klein",
    "FluxKontext",
    "MixturePolicy",
    "PipelinePolicy",
    "QwenImage",
    "QwenImage21",
    "QwenImageEdit",
    "QwenImageEditPlus",
    "Sana",
    "SmallSD3",
    "SmallSD3Policy",
    "Wan",
    "ZImage",
    "compile_blocks",
    "decode_scaled",
    "device_of",
    "has_compiled_blocks",
    "linear_guidance",
    "packed_shape",
    "require_multiples",
    "resolution_shift",
    "unpacked",
]

__getattr__ = lazily(
    __name__,
    {
        "device": ("device_of",),
        "families": (
            "SD3",
            "Family",
            "Flux",
            "Flux2Klein",
            "FluxKontext",
            "QwenImage",
            "QwenImage21",
            "QwenImageEdit",
            "QwenImageEditPlus",
            "Sana",
            "Wan",
            "ZImage",
            "decode_scaled",
            "linear_guidance",
            "packed_shape",
            "require_multiples",
            "resolution_shift",
            "unpacked",
        ),
        "lora": ("LORA_TARGETS", "Adapters"),
        "mixture": ("MixturePolicy",),
        "pipeline": ("DTYPES", "PipelinePolicy", "compile_blocks", "has_compiled_blocks"),
        "small_sd3": ("SmallSD3", "SmallSD3Policy"),
    },
)
