"""Loading a policy from a model's folder, or from its name on the Hugging Face Hub."""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from flowrl.errors import ConfigError
from flowrl.plugins import plugin
from flowrl.policies.family import DTYPES, Family, ModelOptions
from flowrl.policies.flux import Flux
from flowrl.policies.pipeline import PipelinePolicy
from flowrl.policies.sd3 import SD3

FAMILIES: dict[str, Callable[[], Family]] = {"StableDiffusion3Pipeline": SD3, "FluxPipeline": Flux}
"""Built-in families by the class of their pipeline; a package adds one by an entry point of that name in `flowrl.families`."""


def family_of(pipeline: str) -> Family:
    """The family of a diffusers pipeline class. Raises `ConfigError` that lists the available ones."""
    if pipeline in FAMILIES:
        return FAMILIES[pipeline]()
    point = plugin("flowrl.families", pipeline, "model family")
    if point is not None:
        return point.load()()
    known = ", ".join([*FAMILIES, *entry_points(group="flowrl.families").names])
    raise ConfigError(f"model: no family for a {pipeline}; known: {known}. docs/model-families.md explains how to add one")


def load_policy(model: str, options: ModelOptions = ModelOptions(), family: Family | None = None) -> PipelinePolicy:
    """The pipeline in the folder `model` (or of that name on the Hub, from the local cache or downloaded) as a policy.

    Weights are read from safetensors only; the frozen ones in `options.dtype`, the image decoder in float32. Raises `ConfigError`
    if there is no such model, or no family for it.
    """
    diffusers: Any = import_module("diffusers")
    try:
        name = str(diffusers.DiffusionPipeline.load_config(model)["_class_name"])
    except (OSError, KeyError, ValueError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "0") in ("1", "true", "TRUE", "ON", "YES")
        hint = "; only the local cache was searched: HF_HUB_OFFLINE=0 allows downloads" if offline else ""
        raise ConfigError(
            f"model: {model!r} is no folder with a model_index.json, and cannot be loaded from the Hub under this name "
            f"({error}){hint}"
        ) from error
    chosen = family or family_of(name)
    network = "float32" if options.tuning == "full" else options.dtype
    dtypes = {"default": DTYPES[options.dtype], "transformer": DTYPES[network], "vae": DTYPES["float32"]}
    try:
        pipe = getattr(diffusers, name).from_pretrained(model, use_safetensors=True, dtype=dtypes)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: the {name} in {model!r} cannot be read: {error}") from error
    return PipelinePolicy(pipe, chosen, options)
