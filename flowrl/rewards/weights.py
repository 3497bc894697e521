"""Loading of complete weights of reward networks from a folder or the Hugging Face Hub; incomplete weights raise an error.

Networks come from folders in transformers' format. CLIP weights may also be in OpenAI's and open_clip's naming, and heads in any
safetensors or PyTorch file; no code in these files is run.
"""

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from flowrl.errors import ConfigError, require

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNREADABLE = (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError)
"""What transformers, safetensors and PyTorch raise for files that are missing, damaged, or of another model."""

DATA_ONLY: dict[str, Any] = {"trust_remote_code": False}
"""For every `from_pretrained`: never run code in a model's folder (``auto_map``), without a prompt to allow it."""

CLIP_NAMES = {
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "transformer.resblocks": "text_model.encoder.layers",
    "logit_scale": "logit_scale",
}
"""Names in open_clip's files and in transformers' `CLIPModel`."""
CLIP_LAYER_NAMES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
CLIP_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
CLIP_CONSTANTS = ("attn_mask", "input_resolution", "context_length", "vocab_size")
"""Entries of open_clip's files that are no weights."""


@contextmanager
def loading(model: str, tokenizer: str = "", dtype: str = "float32", batch: int = 1) -> Iterator[None]:
    """Errors of transformers within this context become `ConfigError`s with a remedy.

    Raises `ConfigError` at once for an unknown precision, or a batch that is not a whole number above 0.
    """
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    require(isinstance(batch, int) and batch >= 1, "batch", batch, "a whole number, 1 or more")
    try:
        yield
    except ConfigError:
        raise
    except UNREADABLE as error:
        names = repr(model) if tokenizer in ("", model) else f"{model!r} (or its tokenizer {tokenizer!r})"
        reason = _first_line(error)
        if all(Path(place).is_dir() for place in (model, tokenizer or model)):
            message = f"reward: the files in {names} cannot be loaded as the model that this reward needs: {reason}"
        else:
            message = (
                f"reward: {names} is no folder with a model, and cannot be loaded from the Hub ({reason}); give a folder, as in "
                "model='path/to/folder', or allow downloads: HF_HUB_OFFLINE=0"
            )
        raise ConfigError(message) from error


def load_network(loader: Any, model: str, dtype: str) -> Any:
    """`loader.from_pretrained(model)` in the precision `dtype`, with every weight from the files.

    The files are safetensors. transformers fills missing weights with random ones, and such a network would score noise, so
    missing weights raise `ConfigError` here.
    """
    network, info = loader.from_pretrained(
        model, dtype=DTYPES[dtype], output_loading_info=True, **DATA_ONLY, use_safetensors=True
    )
    missing = sorted(set(info["missing_keys"]) & {name for name, _ in network.named_parameters()})
    if missing:
        kind, count = type(network).__name__, len(missing)
        raise ConfigError(f"reward: {model!r} is no {kind}: its files lack {count} of the weights, such as {missing[0]}")
    return network


def require_tokenizer(tokenizer: Any, vocabulary: int, place: str) -> None:
    """Raise `ConfigError` unless the tokenizer fits a model with a vocabulary of this size.

    From a folder without a vocabulary transformers makes a tokenizer of two special tokens, which encodes all texts alike.
    """
    fits, found = vocabulary / 2 <= len(tokenizer) <= vocabulary, f"this one has {len(tokenizer)}"
    require(fits, "tokenizer", place, f"the folder of a tokenizer for {vocabulary} pieces of text ({found})")


def frozen_on(network: Any, device: str) -> Any:
    """`network` on `device` in evaluation mode, without gradients. Raises `ConfigError` if there is no such device."""
    try:
        return network.eval().requires_grad_(False).to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device = {device!r} is not allowed: {error}") from error


def read_weights(place: str) -> dict[str, Tensor]:
    """The tensors by name in a safetensors or PyTorch file (those under "state_dict" if it has that entry), on the CPU.

    `place` is a path, or ``REPOSITORY:FILE`` on the Hub. PyTorch files are read with ``weights_only``. Raises `ConfigError` for
    a file that does not exist or contains anything else.
    """
    path = _find_file(place)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
        found = found.get("state_dict", found)
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    except Exception as error:  # a damaged pickle can raise anything
        raise ConfigError(f"weights: {path} is no file of tensors: {_first_line(error)}") from error


def _find_file(place: str) -> Path:
    path = Path(place)
    if path.is_file():
        return path
    repository, _, name = place.rpartition(":")
    if not repository:
        raise ConfigError(f"weights: the file {place} does not exist")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"weights: {name} of {repository!r} cannot be loaded from the Hub ({_first_line(error)}); give the path of a file, "
            "or allow downloads: HF_HUB_OFFLINE=0"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def from_open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a CLIP model in OpenAI's and open_clip's naming, renamed for transformers' `CLIPModel`.

    Their query, key and value matrices are one matrix [3 width, width], and their projections are transposed. Raises
    `ConfigError` for names that do not belong to a CLIP with two transformers.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in CLIP_CONSTANTS:
            continue
        if name in CLIP_TRANSPOSED:
            result[CLIP_TRANSPOSED[name]] = tensor.t().contiguous()
            continue
        prefix = next((p for p in CLIP_NAMES if name == p or name.startswith(p + ".")), None)
        if prefix is None:
            raise ConfigError(f"weights: {name!r} is no weight of a CLIP model in open_clip's format")
        rest = name[len(prefix) :]
        layer = re.fullmatch(r"\.(\d+)\.(.+)", rest) if prefix.endswith("resblocks") else None
        if layer is None:
            result[CLIP_NAMES[prefix] + rest] = tensor
        else:
            result |= _clip_layer(f"{CLIP_NAMES[prefix]}.{layer[1]}", layer[2], tensor)
    return result


def _clip_layer(place: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One entry of a transformer layer; the joint attention matrix becomes three."""
    joint = re.fullmatch(r"attn\.in_proj_(weight|bias)", name)
    if joint:
        return {f"{place}.self_attn.{part}_proj.{joint[1]}": t for part, t in zip("qkv", tensor.chunk(3), strict=True)}
    for old, new in CLIP_LAYER_NAMES.items():
        if name.startswith(old + "."):
            return {f"{place}.{new}{name[len(old) :]}": tensor}
    raise ConfigError(f"weights: {place}: {name!r} is no weight of a CLIP layer in open_clip's format")


def affine_map(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The map x W + b of a stack of linear layers without activations: W [feature], b [], both float64.

    Layers are the entries ``[PREFIX.N.]weight`` and ``bias`` in the order of N. Raises `ConfigError` unless they fit together
    and end in one number.
    """
    names = sorted((n for n in weights if n.split(".")[-1] == "weight"), key=lambda n: [int(d) for d in re.findall(r"\d+", n)])
    try:
        layers = [(weights[name].double(), weights[name.removesuffix("weight") + "bias"].double()) for name in names]
        (weight, bias), *rest = layers
        for next_weight, next_bias in rest:
            weight, bias = next_weight @ weight, next_weight @ bias + next_bias
        return weight.squeeze(0), bias.reshape(())
    except (ValueError, KeyError, RuntimeError) as error:
        content = ", ".join(weights) or "an empty file"
        raise ConfigError(f"head: {content}: no stack of linear layers that ends in one number") from error
