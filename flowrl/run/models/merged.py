"""Base models with trained weights in them, as folders in diffusers' form."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.run.io import write_bytes
from flowrl.run.models.lora_files import Lora
from flowrl.run.reading import read_json, reading


def check_base(layers: Mapping[str, tuple[int, int]], base: Path) -> None:
    """Raise `CheckpointError` unless the base model has all `layers` with these numbers of outputs
    and inputs; only the headers of its files are read, and nothing is checked without files.
    """
    shapes: dict[str, list[int]] = {}
    for path in (base / "transformer").glob("*.safetensors"):
        with reading(path, CheckpointError), safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for layer, shape in layers.items() if shapes else ():
        found = shapes.get(f"{layer}.weight")
        if found != [*shape]:
            theirs = f"is {found} there" if found else "is not there"
            raise CheckpointError(
                f"weights: they belong to another model than {base}: {layer}.weight of {[*shape]}"
                f" {theirs}"
            )


def write_merged(
    folder: Path,
    base: Path,
    loras: Sequence[Lora] = (),
    weights: Mapping[str, Tensor] = {},
    dtype: torch.dtype | None = None,
) -> None:
    """Write a pipeline in diffusers' form whose transformer has the trained weights; the files of
    the other parts are copied.

    Args:
        folder: the new folder.
        base: the folder of the base model.
        loras: their products B A are added in float32, and the sum is rounded once.
        weights: weights that replace those of the transformer.
        dtype: type of the transformer's weights; None for that of the base model's.

    Raises:
        ConfigError: the base model has no transformer in safetensors format.
        CheckpointError: a trained layer is not in the base model, or has another shape.
    """
    shards = sorted((base / "transformer").glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"model: {base / 'transformer'} has no *.safetensors file")
    for lora in loras:
        check_base(lora.shapes, base)
    index = read_json(base / "model_index.json", dict[str, Any])
    parts = [name for name, entry in index.items() if isinstance(entry, list) and entry[0]]
    for part in [name for name in parts if name != "transformer" and (base / name).is_dir()]:
        shutil.copytree(base / part, folder / part, dirs_exist_ok=True)
    for path in (base / "model_index.json", *base.glob("LICENSE*")):
        shutil.copyfile(path, folder / path.name)
    (folder / "transformer").mkdir(exist_ok=True)
    for path in (base / "transformer").glob("*.json"):
        shutil.copyfile(path, folder / "transformer" / path.name)
    left = set(weights)
    for shard in shards:
        with reading(shard, CheckpointError):
            tensors = load_file(shard)
        left -= tensors.keys()
        changed = {n: _changed(n, t, loras, weights, dtype) for n, t in tensors.items()}
        write_bytes(folder / "transformer" / shard.name, save(changed, {"format": "pt"}))
    if left:
        raise CheckpointError(
            f"model: {len(left)} trained weights are not in {base}, such as {min(left)}"
        )


def _changed(
    name: str,
    old: Tensor,
    loras: Sequence[Lora],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> Tensor:
    """The trained weight in place of the `old` one."""
    new, layer = weights.get(name, old), name.removesuffix(".weight")
    if new.shape != old.shape:
        raise CheckpointError(f"{name} is {[*new.shape]}, {[*old.shape]} in the base model")
    for lora in loras:
        down, up = (lora.tensors.get(f"{layer}.lora_{x}.weight") for x in "AB")
        if name.endswith(".weight") and down is not None and up is not None:
            new = new.float() + up.float() @ down.float()
    kind = (dtype or old.dtype) if old.is_floating_point() else old.dtype
    return new.to(kind).contiguous()
