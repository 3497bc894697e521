"""Policies, which own a network: the closed-form mixture, the small built-in model, and diffusers'
pipelines.
"""

from flowrl.policies.families import (
    SD3,
    Family,
    Flux,
    QwenImage,
    Wan,
    decode_scaled,
    family_of,
    linear_guidance,
    packed_shape,
    resolution_shift,
    unpacked,
)
from flowrl.policies.load import load_policy
from flowrl.policies.lora import LORA_TARGETS, Adapters
from flowrl.policies.memory import (
    ARCHITECTURES,
    Architecture,
    Memory,
    StorageCounter,
    architecture_of,
    count_memory,
)
from flowrl.policies.mixture import MixturePolicy
from flowrl.policies.pipeline import (
    DTYPES,
    ModelOptions,
    PipelinePolicy,
    compile_blocks,
    device_of,
    has_compiled_blocks,
)
from flowrl.policies.small_sd3 import SmallSD3, SmallSD3Policy

__all__ = [
    "ARCHITECTURES",
    "DTYPES",
    "LORA_TARGETS",
    "SD3",
    "Adapters",
    "Architecture",
    "Family",
    "Flux",
    "Memory",
    "MixturePolicy",
    "ModelOptions",
    "PipelinePolicy",
    "QwenImage",
    "SmallSD3",
    "SmallSD3Policy",
    "StorageCounter",
    "Wan",
    "architecture_of",
    "compile_blocks",
    "count_memory",
    "decode_scaled",
    "device_of",
    "family_of",
    "has_compiled_blocks",
    "linear_guidance",
    "load_policy",
    "packed_shape",
    "resolution_shift",
    "unpacked",
]
