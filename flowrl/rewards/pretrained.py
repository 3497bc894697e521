"""Networks from transformers' folders or from the Hugging Face Hub: loaded whole, or refused with a reason."""

import pickle
from pathlib import Path
from typing import Any

import torch

from flowrl.errors import ConfigError, require

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_network(loader: Any, model: str, dtype: str) -> Any:
    """`loader.from_pretrained(model)` in the precision `dtype`, every weight of it from the files.

    transformers fills weights that a folder lacks with random ones; here that is an error: a reward with such a network scores
    noise. Raises `ConfigError` for missing weights or weights of other shapes, and what `refused` names.
    """
    network, told = loader.from_pretrained(model, dtype=DTYPES[dtype], output_loading_info=True)
    missing = sorted(set(told["missing_keys"]) & {name for name, _ in network.named_parameters()})
    if missing:
        kind, count = type(network).__name__, len(missing)
        raise ConfigError(f"reward: {model!r} is no {kind}: its files lack {count} of the weights, such as {missing[0]}")
    return network


def refused() -> tuple[type[Exception], ...]:
    """What transformers raises for a model that is not there, is damaged, or is of another kind or shape."""
    from safetensors import SafetensorError

    return (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError)


def unavailable(model: str, tokenizer: str, error: Exception) -> ConfigError:
    """What to do about weights that cannot be loaded; a `ConfigError` stays as it is."""
    if isinstance(error, ConfigError):
        return error
    told = repr(model) if tokenizer in ("", model) else f"{model!r} (or its tokenizer {tokenizer!r})"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if all(Path(place).is_dir() for place in (model, tokenizer or model)):
        return ConfigError(f"reward: the files in {told} cannot be loaded as the model that this reward needs: {first}")
    return ConfigError(
        f"reward: {told} is no folder with a model, and cannot be had from the Hub ({first}); give a folder, as in "
        "model='path/to/folder', or allow downloads: HF_HUB_OFFLINE=0"
    )


def require_options(dtype: str, batch: int) -> None:
    """Raises `ConfigError` for a precision that is none, or a batch that is no number above 0."""
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    require(isinstance(batch, int) and batch >= 1, "batch", batch, "a whole number, 1 or more")


def require_tokenizer(words: Any, known: int, place: str) -> None:
    """Raises `ConfigError` where the tokenizer is not made for a model that knows `known` pieces.

    transformers makes a tokenizer of two special tokens out of a folder without a vocabulary: all texts are then the same.
    """
    fits = known / 2 <= len(words) <= known
    require(fits, "tokenizer", place, f"the folder of a tokenizer for {known} pieces of text (this one has {len(words)})")


def placed(network: Any, device: str) -> Any:
    """`network` on `device`, for scoring only. Raises `ConfigError` where there is no such device."""
    try:
        return network.eval().requires_grad_(False).to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device = {device!r} is not allowed: {error}") from error
