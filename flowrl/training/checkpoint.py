"""Checkpoints: safetensors and JSON only; written to a temporary folder, flushed to the disk, and moved into place."""

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from flowrl.distributed import Distributed, as_module, full_tensors, load_full_tensors
from flowrl.errors import CheckpointError, ConfigError
from flowrl.io import flush_folder, write_file

FORMAT = "flowrl-checkpoint-3"


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors and plain values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace `folder` by the new checkpoint; the old one stays until the new one is complete and on the disk."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()})
    card = {
        "format": FORMAT,
        "sha256": hashlib.sha256(data).hexdigest(),
        "values_sha256": _hash(checkpoint.values),
        "values": checkpoint.values,
    }
    try:
        if not folder.parent.exists():
            folder.parent.mkdir(parents=True)
            flush_folder(folder.parent.parent)
        new.mkdir()
        write_file(new / "tensors.safetensors", data)
        write_file(new / "checkpoint.json", json.dumps(card).encode())
        flush_folder(new)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        os.replace(new, folder)
        flush_folder(folder.parent)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint, or its predecessor where a crash fell between two renames. `CheckpointError` says what is wrong."""
    if not folder.exists() and folder.with_name(folder.name + ".old").exists():
        folder = folder.with_name(folder.name + ".old")
    card_path, tensor_path = folder / "checkpoint.json", folder / "tensors.safetensors"
    for path in (card_path, tensor_path):
        if not path.is_file():
            raise CheckpointError(f"checkpoint: {path} does not exist")
    values, expected = _read_card(card_path)
    try:
        data = tensor_path.read_bytes()
        if hashlib.sha256(data).hexdigest() != expected:
            raise CheckpointError(
                f"checkpoint: {tensor_path} does not match the hash in {card_path.name}; it is damaged or foreign"
            )
        return Checkpoint(load(data), values)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint: {tensor_path} cannot be read: {error}") from error


def _read_card(path: Path) -> tuple[dict[str, Any], str]:
    """The plain values of a checkpoint, and the hash that its tensors must have."""
    try:
        card = json.loads(path.read_bytes())
        found = card["format"]
        if found != FORMAT:
            raise CheckpointError(
                f"checkpoint: {path.parent} was written by another version of flowrl (format {found!r}; this version reads "
                f"{FORMAT!r})"
            )
        values, expected = card["values"], card["sha256"]
        if card["values_sha256"] != _hash(values):
            raise CheckpointError(f"checkpoint: {path} does not match its own hash; it was changed after it was written")
        return dict(values), expected
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint: {path} is not a flowrl checkpoint ({type(error).__name__}: {error})") from error


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of the run in folder `run`: `run`/checkpoints/000010 after iteration 10, and so on.

    `save` keeps the newest `keep` and deletes an older one only when the newer is complete and on the disk, so a complete one can
    be read at every moment after the first save.
    """

    run: Path
    keep: int = 1

    @property
    def folder(self) -> Path:
        """Where the numbered ones are."""
        return self.run / "checkpoints"

    def names(self) -> list[str]:
        """Oldest first."""
        return sorted({name.removesuffix(".old") for name in self._entries(r"\d{6,}(\.old)?")}, key=int)

    def _entries(self, pattern: str) -> list[str]:
        """Names in `folder` that match as a whole."""
        if not self.folder.is_dir():
            return []
        return [path.name for path in self.folder.iterdir() if re.fullmatch(pattern, path.name)]

    def path(self, name: str) -> Path:
        """The folder of checkpoint `name`."""
        return self.folder / name

    def save(self, checkpoint: Checkpoint, iteration: int) -> None:
        """Write the checkpoint of `iteration`, then delete those that are no longer kept."""
        name = f"{iteration:06d}"
        save_checkpoint(self.path(name), checkpoint)
        for old in self._entries(r"\d{6,}\.old"):  # a crash between two renames left it: it is that checkpoint
            if not self.path(old.removesuffix(".old")).exists():
                with suppress(OSError):
                    os.replace(self.folder / old, self.path(old.removesuffix(".old")))
        others = [other for other in self.names() if other != name]
        self._delete(others[: max(0, len(others) - self.keep + 1)])

    def forget_after(self, name: str) -> None:
        """Delete what is newer than `name`, the newest first, so that a crash leaves no gap."""
        names = self.names()
        self._delete(reversed(names[names.index(name) + 1 :]))

    def _delete(self, names: Iterator[str] | list[str]) -> None:
        """Rename, then remove: half a checkpoint never carries a checkpoint's name. What cannot be deleted stays until later."""
        for name in names:
            for path in (self.path(name), self.path(f"{name}.old")):
                if path.exists():
                    with suppress(OSError):
                        os.replace(path, self.folder / f"{name}.gone")
                    shutil.rmtree(self.folder / f"{name}.gone", ignore_errors=True)
        for leftover in self._entries(r"\w+\.(new|gone|old)"):
            shutil.rmtree(self.folder / leftover, ignore_errors=True)

    def load(self, name: str = "") -> Checkpoint:
        """Checkpoint `name`, or the newest. Raises `CheckpointError` where it is missing or damaged, with the way to go on from
        an earlier one that is complete."""
        names = self.names()
        if not names or (name and name not in names):
            there = f"; there are {', '.join(names)}" if names else ""
            raise CheckpointError(f"checkpoint: there is no checkpoint {name or 'at all'} in {self.run}{there}")
        chosen = name or names[-1]
        try:
            return load_checkpoint(self.path(chosen))
        except CheckpointError as error:
            earlier = self._newest_complete(names[: names.index(chosen)])
            if earlier is None:
                raise CheckpointError(
                    f"{error}. There is no earlier one in {self.run} (keep_checkpoints = {self.keep}; 2 or more keeps some)"
                ) from error
            raise CheckpointError(
                f"{error}. Checkpoint {earlier} is complete; go on from there with: "
                f"flowrl train --resume {shlex.quote(str(self.run))} --from {earlier}"
            ) from error

    def _newest_complete(self, names: list[str]) -> str | None:
        for name in reversed(names):
            with suppress(CheckpointError):
                load_checkpoint(self.path(name))
                return name
        return None


FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG, errno.EROFS)


@contextmanager
def disk_errors(checkpoints: Checkpoints) -> Iterator[None]:
    """Turns "the disk is full" (or read-only) into a `CheckpointError` that says what is safe and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = error.filename or checkpoints.run
        raise CheckpointError(f"disk: {where} cannot be written: {error.strerror}. {_what_is_left(checkpoints)}") from error
    except SafetensorError as error:  # written by a library that does not raise OSError
        if "os error 28" not in str(error):
            raise
        raise CheckpointError(
            f"disk: {checkpoints.run} cannot be written: No space left on device. {_what_is_left(checkpoints)}"
        ) from error


def _what_is_left(checkpoints: Checkpoints) -> str:
    names = checkpoints.names()
    last = f"Checkpoint {names[-1]} is complete" if names else "There was no checkpoint yet"
    free = shutil.disk_usage(checkpoints.run).free / 1e6
    return f"{last}; {free:,.1f} MB are free. Make room, then: flowrl train --resume {shlex.quote(str(checkpoints.run))}"


PER_PARAMETER = ("weight.", "average.", "optimizer.")
"""Beginnings of the names of tensors that belong to a parameter."""


def training_state(
    parameters: Mapping[str, nn.Parameter], average: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> Checkpoint:
    """Full weights, averages and optimizer state (its plain numbers are values). They are in the main process's main memory;
    other processes get an empty checkpoint, and with sharded weights must call this too."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    tensors = {f"weight.{name}": tensor for name, tensor in full_tensors(parameters).items()}
    averages = full_tensors(dict(zip(parameters, average, strict=True)))
    tensors |= {f"average.{name}": tensor for name, tensor in averages.items()}
    numbers: dict[str, Any] = {}
    if optimizer.state:  # PyTorch would take a step to fill it
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: Any = get_optimizer_state_dict(as_module(parameters.values()), optimizer, options=options).get("state", {})
        for i, name in enumerate(parameters):
            for key, value in state.get(str(i), {}).items():
                (tensors if isinstance(value, Tensor) else numbers)[f"optimizer.{key}.{name}"] = value
    return Checkpoint(tensors, {"optimizer": numbers})


def restore_training_state(
    checkpoint: Checkpoint,
    parameters: Mapping[str, nn.Parameter],
    average: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    distributed: Distributed,
) -> None:
    """The inverse of `training_state`, in place; the main process's checkpoint counts, on any number of processes. Raises
    `ConfigError` if it belongs to other parameters."""
    with distributed.shared_errors():
        for name, parameter in parameters.items() if distributed.is_main else ():
            found = checkpoint.tensors.get(f"weight.{name}")
            if found is None or found.shape != parameter.shape:
                raise ConfigError(f"checkpoint: no weight {name} of shape {tuple(parameter.shape)}; it belongs to another run")
    for prefix, tensors in (("weight", parameters), ("average", dict(zip(parameters, average, strict=True)))):
        values = {name.removeprefix(f"{prefix}."): value for name, value in checkpoint.tensors.items()}
        load_full_tensors(tensors, values, distributed)
    _restore_optimizer(checkpoint, parameters, optimizer, distributed)


def _restore_optimizer(
    checkpoint: Checkpoint, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, distributed: Distributed
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    state: dict[str, dict[str, Any]] = {}
    numbers = {name: str(i) for i, name in enumerate(parameters)}
    everything = {**checkpoint.tensors, **checkpoint.values.get("optimizer", {})} if distributed.is_main else {}
    for full_name, value in everything.items():
        prefix, _, rest = full_name.partition(".")
        key, _, name = rest.partition(".")
        if prefix == "optimizer":
            state.setdefault(numbers[name], {})[key] = value.clone() if isinstance(value, Tensor) else value
    with_state = distributed.gather(set(state))[0]
    optimizer.zero_grad()
    if with_state:
        group: dict[str, Any] = {**optimizer.param_groups[0], "params": list(numbers.values())}
        given: Any = {"state": state, "param_groups": [group]} if distributed.is_main else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=distributed.world_size > 1, strict=False)
        set_optimizer_state_dict(as_module(parameters.values()), optimizer, given, options=options)
    for number, parameter in zip(numbers.values(), parameters.values(), strict=True):
        if number not in with_state:
            optimizer.state.pop(parameter, None)
