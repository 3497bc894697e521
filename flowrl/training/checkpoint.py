"""Checkpoints: safetensors and JSON only, written to a temporary folder and moved into place."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flowrl.errors import CheckpointError

FORMAT = "flowrl-checkpoint-1"


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors and plain values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def write_json(path: Path, values: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    write_bytes(path, (json.dumps(values, indent=1) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace `folder` by the new checkpoint; the old one stays until the new one is complete."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()})
    write_bytes(new / "tensors.safetensors", data)
    card = {"format": FORMAT, "sha256": hashlib.sha256(data).hexdigest(), "values": checkpoint.values}
    write_json(new / "checkpoint.json", card)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint, or its predecessor where a crash fell between two renames. `CheckpointError` says what is wrong."""
    if not folder.exists() and folder.with_name(folder.name + ".old").exists():
        folder = folder.with_name(folder.name + ".old")
    card_path, tensor_path = folder / "checkpoint.json", folder / "tensors.safetensors"
    for path in (card_path, tensor_path):
        if not path.is_file():
            raise CheckpointError(f"checkpoint: {path} does not exist")
    try:
        card = json.loads(card_path.read_text())
        if card["format"] != FORMAT:
            raise CheckpointError(f"checkpoint: {folder} has format {card['format']!r}; this version reads {FORMAT!r}")
        values, expected = card["values"], card["sha256"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint: {card_path} is not a flowrl checkpoint ({type(error).__name__}: {error})") from error
    data = tensor_path.read_bytes()
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(f"checkpoint: {tensor_path} does not match the hash in {card_path.name}; it is damaged or foreign")
    try:
        return Checkpoint(load(data), values)
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint: {tensor_path} cannot be read: {error}") from error


def optimiser_tensors(optimiser: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """AdamW's state as named tensors."""
    tensors = {}
    for name, parameter in zip(names, optimiser.param_groups[0]["params"], strict=True):
        for key, value in optimiser.state[parameter].items():
            tensors[f"optimiser.{key}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return tensors


def restore_optimiser(optimiser: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimiser_tensors`."""
    for name, parameter in zip(names, optimiser.param_groups[0]["params"], strict=True):
        state = {key: tensors.get(f"optimiser.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
        if all(value is not None for value in state.values()):
            optimiser.state[parameter] = {key: value.clone() for key, value in state.items() if value is not None}
