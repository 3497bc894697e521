"""Saved weights for a diffusers pipeline: those that training starts from, and those that replace a
policy's.
"""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flowrl.core.errors import CheckpointError, require
from flowrl.core.policy_options import PolicyOptions
from flowrl.policies.lora import is_lora
from flowrl.run.models.lora_files import Lora, lora_of_run, read_lora
from flowrl.run.reading import reading
from flowrl.run.saved import SavedWeights, find_weights

_LOG = logging.getLogger(__name__)


def network_tensors(
    saved: SavedWeights, pipe: Any, option: str = "weights"
) -> Mapping[str, Tensor]:
    """The tensors of `saved` for the transformer of `pipe`, a diffusers pipeline or its class with
    a transformer: of a LoRA, as `Adapters.tensors` returns it, or all weights by name.

    A warning is logged of what is not for the transformer. Raises `CheckpointError` if they cannot
    be read.
    """
    if saved.kind == "transformer":
        with reading(saved.path, CheckpointError):
            kind = type(pipe.transformer)
            return kind.from_pretrained(saved.path, use_safetensors=True).state_dict()
    if saved.kind == "lora":
        lora = read_lora(saved.path, type(pipe), option)
        if lora.others:
            text = f"{len(lora.others)} tensors for text encoders, such as {min(lora.others)}"
            _LOG.warning("Warning: %s: %s has %s: they are not used", option, saved, text)
        return lora.tensors
    require(bool(saved.setting("model")), option, str(saved), "weights of a model")
    tensors = saved.tensors()
    if saved.setting("tuning") == "full":
        return tensors
    return lora_of_run(tensors, saved.setting("lora_alpha") / saved.setting("lora_rank")).tensors


def given_weights(pipe: Any, options: PolicyOptions) -> dict[str, Any]:
    """The arguments `start` and `frozen` of `PipelinePolicy` for the adapters in `options`. All
    weights of a transformer are loaded into that of `pipe` at once.

    Raises `CheckpointError` if a file cannot be read or two adapters have the same name.
    """
    start = None
    if options.adapter:
        start = network_tensors(find_weights(options.adapter, option="adapter"), pipe, "adapter")
        if not is_lora(start):
            _load(pipe.transformer, start, options.adapter)
            start = None
    # with full fine-tuning the policy refuses them
    loras = frozen_loras(options, type(pipe)) if options.trained != "full" else {}
    return {"start": start, "frozen": {name: lora.named for name, lora in loras.items()}}


def frozen_loras(options: PolicyOptions, kind: Any) -> dict[str, Lora]:
    """The frozen adapters in `options` by name, multiplied by their weights, for pipelines of the
    class `kind`. Raises `CheckpointError` as `given_weights`.
    """
    loras: dict[str, Lora] = {}
    for number, spec in enumerate(options.frozen, 1):
        name, _, text = spec.rpartition("=")
        name = name or f"frozen{number}"
        text, weight = _weighted(text)
        saved = find_weights(text, option="frozen_adapters")
        allowed = "names that differ, as in one=PATH,two=PATH"
        require(name not in loras, "frozen_adapters", options.frozen_adapters, allowed)
        loras[name] = _frozen(saved, kind).times(weight)
    return loras


def _load(network: Any, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load all weights of a transformer; its buffers may be missing, as in a run's checkpoint."""
    with reading(source, CheckpointError):
        missing, unexpected = network.load_state_dict(tensors, strict=False)
        lacking = [*unexpected, *({*missing} & dict(network.named_parameters()).keys())]
        if lacking:
            raise CheckpointError(f"adapter: it is a transformer of another model: {lacking[0]}")


def _weighted(text: str) -> tuple[str, float]:
    """PATH:WEIGHT, or PATH with weight 1."""
    path, colon, end = text.rpartition(":")
    try:
        return (path, float(end)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0


def _frozen(saved: SavedWeights, kind: Any) -> Lora:
    """A frozen LoRA, also its matrices for text encoders."""
    if saved.kind == "lora":
        return read_lora(saved.path, kind, "frozen_adapters")
    is_run = saved.kind == "run"
    tensors = network_tensors(saved, None, "frozen_adapters") if is_run else {}
    if not is_lora(tensors):
        raise CheckpointError(f"frozen_adapters: {saved} holds all weights; allowed: a LoRA")
    return Lora(dict(tensors))
