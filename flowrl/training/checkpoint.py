"""Checkpoints: one safetensors file each, written atomically (a temporary name in the same folder,
fsync, rename).
"""

import hashlib
import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from flowrl.core.errors import CheckpointError, ConfigError, FlowrlError
from flowrl.distributed import Distributed, as_module, full_tensors, is_sharded, load_full_tensors
from flowrl.io import flush_folder, write_bytes
from flowrl.parts.trust import trust_option
from flowrl.training.config import load_config

FORMAT = "flowrl-checkpoint-4"


def to_resume(run: Path) -> str:
    """The command that resumes the run in the folder `run`, with --trust if its settings need
    it.
    """
    option = ""
    with suppress(FlowrlError):
        option = trust_option(load_config(run / "config.json").flat())
    return f"flowrl train --resume {shlex.quote(str(run))}{option}"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run.

    Args:
        tensors: tensors by name.
        values: values that JSON can represent, by name.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: an old file remains until the new one is complete and on the
    disk.

    The metadata of the safetensors file contain the format, the plain values as JSON, and a hash of
    values and tensors.

    Args:
        path: the file.
        checkpoint: the checkpoint.
    """
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()
    }
    values = json.dumps(checkpoint.values)
    data = save(tensors, {"format": FORMAT, "values": values, "sha256": _hash(tensors, values)})
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        flush_folder(path.parent.parent)
    write_bytes(path, data)


def save_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write trained weights as a safetensors file, with a hash of names, types, shapes and values
    in its metadata.

    Args:
        path: the file.
        tensors: the weights by name.
    """
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(found, {"sha256": _hash(found, "")}))


def load_weights(path: Path) -> dict[str, Tensor]:
    """The inverse of `save_weights`. Raises `CheckpointError` for a file that was changed or cannot
    be read.
    """
    try:
        data = path.read_bytes()
        tensors = load(data)
        recorded = _card(data).get("sha256")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"weights: {path} cannot be read: {error}") from error
    if recorded != _hash(tensors, ""):
        raise CheckpointError(
            f"weights: {path} does not match its own hash; it was changed after it was written"
        )
    return tensors


def _card(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file."""
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in the file `path`. Raises `CheckpointError` with the reason if it cannot
    be used.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint: {path} does not exist")
    try:
        data = path.read_bytes()
        tensors = load(data)
        card = _card(data)
        if card["format"] != FORMAT:
            raise _other_version(path, card["format"])
        if card["sha256"] != _hash(tensors, card["values"]):
            raise CheckpointError(
                f"checkpoint: {path} does not match its own hash; it was changed after it was"
                " written"
            )
        return Checkpoint(tensors, json.loads(card["values"]))
    except OSError as error:
        raise CheckpointError(f"checkpoint: {path} cannot be read: {error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint: {path} is not a flowrl checkpoint ({type(error).__name__}: {error})"
        ) from error


def _other_version(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint: {path} was written by another version of flowrl (format {found!r}; this"
        f" version reads {FORMAT!r})"
    )


def _hash(tensors: Mapping[str, Tensor], values: str) -> str:
    found = hashlib.sha256(values.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run: `run`/checkpoints/000010.safetensors after iteration 10, and so on.

    `save` deletes an old checkpoint only when a newer one is complete and on the disk. After the
    first save a complete checkpoint exists at all times.

    Args:
        run: the run's folder.
        keep: number of newest checkpoints to keep.
    """

    run: Path
    keep: int = 1

    @property
    def folder(self) -> Path:
        """The folder of the numbered files."""
        return self.run / "checkpoints"

    def names(self) -> list[str]:
        """Names, oldest first. Raises `CheckpointError` for checkpoints of an older version, which
        were folders.
        """
        for card in self.folder.glob("*/checkpoint.json"):
            raise _other_version(card.parent, "flowrl-checkpoint-3 or older")
        return sorted((path.stem for path in self.folder.glob("[0-9]*.safetensors")), key=int)

    def newest(self) -> str:
        """A sentence about the newest checkpoint."""
        names = self.names()
        return f"Checkpoint {names[-1]} is complete" if names else "There was no checkpoint yet"

    def path(self, name: str) -> Path:
        """The file of checkpoint `name`."""
        return self.folder / f"{name}.safetensors"

    def save(self, checkpoint: Checkpoint, iteration: int, kept: Collection[int] = ()) -> None:
        """Write the checkpoint of `iteration`, then delete all but the newest `keep`, and those of
        the iterations `kept`.
        """
        name = f"{iteration:06d}"
        save_checkpoint(self.path(name), checkpoint)
        others = [other for other in self.names() if other != name and int(other) not in kept]
        self._delete(
            [
                *map(self.path, others[: max(0, len(others) - self.keep + 1)]),
                *self.folder.glob("*.tmp"),
            ]
        )

    def forget_after(self, name: str) -> None:
        """Delete checkpoints newer than `name`, the newest first, so that a crash leaves no gap."""
        self._delete(self.path(other) for other in reversed(self.names()) if int(other) > int(name))

    def _delete(self, paths: Iterable[Path]) -> None:
        """Delete files; files that cannot be deleted remain until the next save."""
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def load(self, name: str = "") -> Checkpoint:
        """Checkpoint `name`, or the newest.

        Raises `CheckpointError` if it is missing or damaged, with the command that resumes from an
        earlier complete one.
        """
        names = self.names()
        if not names or (name and name not in names):
            there = f"; there are {', '.join(names)}" if names else ""
            raise CheckpointError(
                f"checkpoint: there is no checkpoint {name or 'at all'} in {self.run}{there}"
            )
        chosen = name or names[-1]
        try:
            return load_checkpoint(self.path(chosen))
        except CheckpointError as error:
            earlier = next(filter(self._complete, reversed(names[: names.index(chosen)])), None)
            advice = (
                f"There is no earlier one in {self.run} (keep_checkpoints = {self.keep}; 2 or more"
                " keeps some)"
                if earlier is None
                else (
                    f"Checkpoint {earlier} is complete; resume from it with: {to_resume(self.run)}"
                    f" --from {earlier}"
                )
            )
            raise CheckpointError(f"{error}. {advice}") from error

    def _complete(self, name: str) -> bool:
        try:
            load_checkpoint(self.path(name))
        except CheckpointError:
            return False
        return True


PER_PARAMETER = ("weight.", "average.", "optimizer.", "copy.")
"""Prefixes of the names of tensors that belong to a parameter."""


def in_own_memory(checkpoint: Checkpoint, live: Iterable[Tensor]) -> Checkpoint:
    """`checkpoint` with copies of the tensors that share memory with `live` ones, as on the CPU."""

    def place(tensor: Any) -> int:
        local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
        return local.untyped_storage().data_ptr()

    used = set(map(place, live))
    items = checkpoint.tensors.items()
    tensors = {name: tensor.clone() if place(tensor) in used else tensor for name, tensor in items}
    return Checkpoint(tensors, checkpoint.values)


def training_state(
    parameters: Mapping[str, nn.Parameter],
    average: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    copied: bool = True,
) -> Checkpoint:
    """Full weights, averages and optimizer state, in the main process's main memory.

    With sharded weights all processes must call this.

    Args:
        parameters: the trained parameters by name.
        average: their averages, in the same order.
        optimizer: the optimizer.
        copied: copy tensors that are in main memory already; otherwise updates change them.

    Returns:
        The state; its plain numbers are values. Empty in other processes than the main one.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    tensors = {f"weight.{name}": tensor for name, tensor in full_tensors(parameters).items()}
    averages = full_tensors(dict(zip(parameters, average, strict=True)))
    tensors |= {f"average.{name}": tensor for name, tensor in averages.items()}
    numbers: dict[str, Any] = {}
    if optimizer.state:  # if it is empty, PyTorch would take a step to fill it
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: Any = get_optimizer_state_dict(
            as_module(parameters.values()), optimizer, options=options
        ).get("state", {})
        for i, name in enumerate(parameters):
            for key, value in state.get(str(i), {}).items():
                (tensors if isinstance(value, Tensor) else numbers)[f"optimizer.{key}.{name}"] = (
                    value
                )
    state = Checkpoint(tensors, {"optimizer": numbers})
    if not copied:
        return state
    entries = [entry for entries in optimizer.state.values() for entry in entries.values()]
    moments = [entry for entry in entries if isinstance(entry, Tensor)]
    return in_own_memory(state, [*parameters.values(), *average, *moments])


def restore_training_state(
    checkpoint: Checkpoint,
    parameters: Mapping[str, nn.Parameter],
    average: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    distributed: Distributed,
) -> None:
    """The inverse of `training_state`, in place, on any number of processes.

    Args:
        checkpoint: the state; only the main process's is used.
        parameters: the trained parameters by name.
        average: their averages, in the same order.
        optimizer: the optimizer.
        distributed: the processes.

    Raises:
        ConfigError: the state belongs to other parameters.
    """
    with distributed.shared_errors():
        for name, parameter in parameters.items() if distributed.is_main else ():
            found = checkpoint.tensors.get(f"weight.{name}")
            if found is None or found.shape != parameter.shape:
                raise ConfigError(
                    f"checkpoint: no weight {name} of shape {tuple(parameter.shape)}; it belongs to"
                    " another run"
                )
    for prefix, tensors in (
        ("weight", parameters),
        ("average", dict(zip(parameters, average, strict=True))),
    ):
        values = {
            name.removeprefix(f"{prefix}."): value for name, value in checkpoint.tensors.items()
        }
        load_full_tensors(tensors, values, distributed)
    _restore_optimizer(checkpoint, parameters, optimizer, distributed)


def _restore_optimizer(
    checkpoint: Checkpoint,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    distributed: Distributed,
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    state: dict[str, dict[str, Any]] = {}
    numbers = {name: str(i) for i, name in enumerate(parameters)}
    everything = (
        {**checkpoint.tensors, **checkpoint.values.get("optimizer", {})}
        if distributed.is_main
        else {}
    )
    for full_name, value in everything.items():
        prefix, _, rest = full_name.partition(".")
        key, _, name = rest.partition(".")
        if prefix == "optimizer":
            state.setdefault(numbers[name], {})[key] = (
                value.clone() if isinstance(value, Tensor) else value
            )
    with_state = distributed.gather(set(state))[0]
    optimizer.zero_grad()
    if with_state:
        group: dict[str, Any] = {**optimizer.param_groups[0], "params": list(numbers.values())}
        given: Any = {"state": state, "param_groups": [group]} if distributed.is_main else {}
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=distributed.world_size > 1, strict=False
        )
        set_optimizer_state_dict(as_module(parameters.values()), optimizer, given, options=options)
    for number, parameter in zip(numbers.values(), parameters.values(), strict=True):
        if number not in with_state:
            optimizer.state.pop(parameter, None)
