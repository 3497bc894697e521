"""Weight files that are not in transformers' format: found, read without running code from them, and renamed."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flowrl.errors import ConfigError

NAMES = {
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
LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}


def find_file(place: str) -> Path:
    """The file at the path `place`, or ``REPOSITORY:FILE`` on the Hugging Face Hub. Raises `ConfigError` where there is none."""
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
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"weights: {name} of {repository!r} cannot be had from the Hub ({first}); give the path of a file, or allow "
            "downloads: HF_HUB_OFFLINE=0"
        ) from error


def read_weights(place: str) -> dict[str, Tensor]:
    """The tensors by name in a safetensors or PyTorch file (those under "state_dict" where it has that entry), on the CPU.

    PyTorch files are read with ``weights_only``, so that no code in them runs. Raises `ConfigError` for any other file.
    """
    path = find_file(place)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
        found = found.get("state_dict", found)
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    except (pickle.UnpicklingError, RuntimeError, AttributeError, EOFError, OSError) as error:
        raise ConfigError(f"weights: {path} is no file of tensors: {str(error).splitlines()[0]}") from error
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            raise ConfigError(f"weights: {path} is no file of tensors: {error}") from error
        raise


def from_open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a CLIP model in OpenAI's and open_clip's naming, named as transformers' `CLIPModel` has them.

    Query, key and value matrices are stored as one [3 width, width] there; projections transposed. Names that do not belong to a
    CLIP with two vision and text transformers raise `ConfigError`.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in TRANSPOSED:
            result[TRANSPOSED[name]] = tensor.t().contiguous()
            continue
        prefix = next((p for p in NAMES if name == p or name.startswith(p + ".")), None)
        if prefix is None:
            if name in ("attn_mask", "input_resolution", "context_length", "vocab_size"):
                continue
            raise ConfigError(f"weights: {name!r} is no weight of a CLIP model in open_clip's format")
        rest = name[len(prefix) :]
        layer = re.fullmatch(r"\.(\d+)\.(.+)", rest) if prefix.endswith("resblocks") else None
        if layer is None:
            result[NAMES[prefix] + rest] = tensor
        else:
            result |= _layer(f"{NAMES[prefix]}.{layer[1]}", layer[2], tensor)
    return result


def _layer(place: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One entry of a transformer layer; the joint attention matrix becomes three."""
    joint = re.fullmatch(r"attn\.in_proj_(weight|bias)", name)
    if joint:
        return {f"{place}.self_attn.{part}_proj.{joint[1]}": t for part, t in zip("qkv", tensor.chunk(3), strict=True)}
    for old, new in LAYER.items():
        if name.startswith(old + "."):
            return {f"{place}.{new}{name[len(old) :]}": tensor}
    raise ConfigError(f"weights: {place}: {name!r} is no weight of a CLIP layer in open_clip's format")


def affine_map(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The map x W + b that a stack of linear layers without activations is: W [feature], b [], both float64.

    Layers are the entries ``[PREFIX.N.]weight`` and ``bias`` in the order of N. Raises `ConfigError` unless they fit onto each
    other and end in one number.
    """
    layers = sorted(
        (name for name in weights if name.split(".")[-1] == "weight"), key=lambda n: [int(d) for d in re.findall(r"\d+", n)]
    )
    try:
        weight, bias = weights[layers[0]].double(), weights[_bias(layers[0])].double()
        for name in layers[1:]:
            following = weights[name].double()
            weight, bias = following @ weight, following @ bias + weights[_bias(name)].double()
        return weight.squeeze(0), bias.reshape(())
    except (IndexError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"head: {', '.join(weights) or 'an empty file'}: no stack of linear layers that ends in one number"
        ) from error


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias"
