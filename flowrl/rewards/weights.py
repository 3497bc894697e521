"""Loading of complete weights of reward networks from a folder or the Hugging Face Hub; incomplete
weights raise an error.

Networks come from folders in transformers' format. CLIP weights may also be in OpenAI's and
open_clip's naming, and heads in any safetensors or PyTorch file; no code in these files is run.
"""

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from flowrl.core.errors import ConfigError

Precision = Literal["float32", "bfloat16", "float16"]
UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    AssertionError,
    pickle.UnpicklingError,
    SafetensorError,
)
"""What transformers, safetensors and PyTorch raise for files that are missing, damaged, or of
another model, and for a device that does not exist.
"""

DATA_ONLY: dict[str, Any] = {"trust_remote_code": False}
"""For every `from_pretrained`: never run code in a model's folder (``auto_map``), without a prompt
to allow it.
"""

CLIP_NAMES = {
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.proj": "visual_projection.weight",
    "transformer.resblocks": "text_model.encoder.layers",
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "text_projection": "text_projection.weight",
    ".ln_1": ".layer_norm1",
    ".ln_2": ".layer_norm2",
    ".attn.": ".self_attn.",
    ".mlp.c_fc": ".mlp.fc1",
    ".mlp.c_proj": ".mlp.fc2",
}
"""Parts of the names in open_clip's files and in transformers' `CLIPModel`, replaced in this order.
"""
CLIP_CONSTANTS = ("attn_mask", "input_resolution", "context_length", "vocab_size")
"""Entries of open_clip's files that are not weights."""


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Errors of transformers and PyTorch within this context become `ConfigError`s with a
    remedy.
    """
    try:
        yield
    except ConfigError:
        raise
    except UNREADABLE as error:
        raise ConfigError(
            f"reward: {model!r} cannot be loaded as the model that this reward needs:"
            f" {brief(error)}; give a folder with its files and an existing device, or allow"
            " downloads from the Hub: HF_HUB_OFFLINE=0"
        ) from error


def load_network(loader: Any, model: str, device: str, dtype: str) -> Any:
    """`loader.from_pretrained(model)` for inference in the precision `dtype`, with every weight
    from safetensors files.

    transformers fills missing weights with random ones, and such a network would score noise, so
    missing weights raise `ConfigError` here.
    """
    network, info = loader.from_pretrained(
        model,
        dtype=getattr(torch, dtype),
        output_loading_info=True,
        use_safetensors=True,
        **DATA_ONLY,
    )
    missing = sorted(set(info["missing_keys"]) & {name for name, _ in network.named_parameters()})
    if missing:
        kind, count = type(network).__name__, len(missing)
        raise ConfigError(
            f"reward: {model!r} is no {kind}: its files lack {count} of the weights, such as"
            f" {missing[0]}"
        )
    return network.eval().requires_grad_(False).to(device)


def read_weights(place: str) -> dict[str, Tensor]:
    """The tensors by name in a safetensors or PyTorch file (those under "state_dict" if it has that
    entry), on the CPU.

    `place` is a path, or ``REPOSITORY:FILE`` on the Hub. PyTorch files are read with
    ``weights_only``. Raises `ConfigError` for a file that does not exist or contains anything else.
    """
    repository, _, name = place.rpartition(":")
    try:
        if repository and not Path(place).is_file():
            from huggingface_hub import hf_hub_download

            path = hf_hub_download(repository, name)
        else:
            path = place
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
        found = found.get("state_dict", found)
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    except Exception as error:  # a damaged pickle can raise anything
        message = f"weights: {place} is no file of tensors that can be read ({brief(error)})"
        raise ConfigError(f"{message}; HF_HUB_OFFLINE=0 allows downloads") from error


def brief(error: Exception) -> str:
    """The start of an error's message, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def from_open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a CLIP model in OpenAI's and open_clip's naming, renamed for transformers'
    `CLIPModel`.

    Their query, key and value matrices are one matrix [3 width, width], and their projections are
    transposed.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in CLIP_CONSTANTS:
            continue
        for old, new in CLIP_NAMES.items():
            name = name.replace(old, new)
        if ".in_proj_" in name:
            matrices = zip("qkv", tensor.chunk(3), strict=True)
            result |= {
                name.replace("in_proj_", f"{letter}_proj."): matrix for letter, matrix in matrices
            }
        else:
            result[name] = tensor.t().contiguous() if "projection" in name else tensor
    return result


def affine_map(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The map x W + b of a stack of linear layers without activations: W [feature], b [], both
    float64.

    Layers are the entries ``[PREFIX.N.]weight`` and ``bias`` in the order of N. Raises
    `ConfigError` unless they fit together and end in one number.
    """
    names = sorted(
        (n for n in weights if n.split(".")[-1] == "weight"),
        key=lambda n: [int(d) for d in re.findall(r"\d+", n)],
    )
    try:
        layers = [
            (weights[name].double(), weights[name.removesuffix("weight") + "bias"].double())
            for name in names
        ]
        (weight, bias), *rest = layers
        for next_weight, next_bias in rest:
            weight, bias = next_weight @ weight, next_weight @ bias + next_bias
        return weight.squeeze(0), bias.reshape(())
    except (ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"head: {', '.join(weights)}: no stack of linear layers that ends in one number"
        ) from error
