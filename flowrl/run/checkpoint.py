"""Checkpoints: one safetensors file each, written atomically (a temporary name in the same folder,
fsync, rename).
"""

import hashlib
import json
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from flowrl.core.errors import CheckpointError, ConfigError, FlowrlError, part_call
from flowrl.core.processes import Processes
from flowrl.core.sharded import full_tensors
from flowrl.run.distributed import load_full_tensors
from flowrl.run.io import flush_folder, write_bytes
from flowrl.run.parts.prompts import prompts_digest
from flowrl.run.parts.state import state_of
from flowrl.run.parts.trust import trust_option
from flowrl.run.reading import read_bytes, read_json, reading
from flowrl.run.records import without_groups
from flowrl.trainer import Trainer

FORMAT, EARLIER = "flowrl-checkpoint-5", "flowrl-checkpoint-4"
"""The format that is written, and an earlier one that can be read: it holds the rows of metrics."""


LORA_FILE = "pytorch_lora_weights.safetensors"
"""diffusers' name of the file of a LoRA in a folder."""


def to_resume(run: Path) -> str:
    """The command that resumes the run in the folder `run`, with --trust if its settings need
    it.
    """
    option = ""
    with suppress(FlowrlError):
        settings = without_groups(read_json(run / "config.json", dict[str, Any]))
        option = trust_option(settings)
    return f"flowrl train --resume {shlex.quote(str(run))}{option}"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run: tensors, and values that JSON can represent, by name."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    def __or__(self, other: "Checkpoint") -> "Checkpoint":
        return Checkpoint(self.tensors | other.tensors, self.values | other.values)


def _hash(tensors: Mapping[str, Tensor], values: str) -> str:
    """A hash of the plain values, and of the tensors' names, types, shapes and bytes."""
    digest = hashlib.sha256(values.encode())
    for name, tensor in sorted(tensors.items()):
        _add(digest, name, tensor)
    return digest.hexdigest()


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)


def save_weights(path: Path, tensors: Mapping[str, Tensor], **card: str) -> None:
    """Write tensors by name as a safetensors file, with the entries of `card` and a hash of the
    content in its metadata. An old file remains until the new one is complete and on the disk.
    """
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = _hash(stored, card.get("values", ""))
    write_bytes(path, save(stored, {**card, "sha256": content}))


def load_weights(path: Path) -> dict[str, Tensor]:
    """The inverse of `save_weights`. Raises `CheckpointError` for a file that was changed or cannot
    be read.
    """
    return _read(path)[0]


def _read(path: Path, *formats: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file in one of `formats`; none: without a format."""
    with reading(path, CheckpointError):
        data = read_bytes(path, None)
        tensors = load(data)
        # the header: its length in 8 bytes, then JSON
        card = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        _require_format(card, formats)
        _require_hash(card, _hash(tensors, card.get("values", "")))
    return tensors, card


def _require_format(card: Mapping[str, str], formats: Collection[str]) -> None:
    if card.get("format", "") not in (formats or ("",)):
        known = " and ".join(formats) or "files without a format"
        raise CheckpointError(f"format {card.get('format')!r}; this version reads {known}")


def _require_hash(card: Mapping[str, str], found: str) -> None:
    if card["sha256"] != found:
        raise CheckpointError("it does not match its own hash: it was changed after it was written")


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint as `save_weights` does, with its plain values as JSON in the metadata."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        flush_folder(path.parent.parent)
    save_weights(path, checkpoint.tensors, format=FORMAT, values=json.dumps(checkpoint.values))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in the file `path`. Raises `CheckpointError` with the reason if it cannot
    be used.
    """
    tensors, card = _read(path, FORMAT, EARLIER)
    return Checkpoint(tensors, json.loads(card["values"]))


def read_values(path: Path) -> dict[str, Any]:
    """The plain values of the checkpoint in the file `path`, without reading its tensors: the hash
    is not checked. Raises `CheckpointError` if the file is missing or damaged.
    """
    with reading(path, CheckpointError), safe_open(path, "pt") as file:
        return json.loads(file.metadata()["values"])


def load_tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names begin with `prefix`, named without it. The others are
    read one by one for the hash, so that the moments of an optimizer need no memory.

    Raises `CheckpointError` if the file is missing or damaged.
    """
    chosen: dict[str, Tensor] = {}
    with reading(path, CheckpointError), safe_open(path, "pt") as file:
        card = file.metadata() or {}
        _require_format(card, (FORMAT, EARLIER))
        digest = hashlib.sha256(card.get("values", "").encode())
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            _add(digest, name, tensor)
            if name.startswith(prefix):
                chosen[name.removeprefix(prefix)] = tensor
        _require_hash(card, digest.hexdigest())
    return chosen


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
        """Names, oldest first."""
        # as numbers: names have more than six digits after a million iterations
        return sorted((path.stem for path in self.folder.glob("[0-9]*.safetensors")), key=int)

    def listed(self) -> str:
        """The names on one line."""
        return ", ".join(self.names()) or "none"

    @property
    def newest(self) -> str:
        """The name of the newest checkpoint, or ""."""
        return (self.names() or [""])[-1]

    def path(self, name: str) -> Path:
        """The file of checkpoint `name`."""
        return self.folder / f"{name}.safetensors"

    def save(
        self,
        checkpoint: Checkpoint,
        iteration: int,
        kept: Collection[int] = (),
        lora: bytes | None = None,
    ) -> None:
        """Write the checkpoint of `iteration`, then delete all but the newest `keep`, and those of
        the iterations `kept`.

        Before it, write the file `lora` of its LoRA, in diffusers' format, to the folder `run`/
        checkpoints/000010, for other programs.
        """
        name = f"{iteration:06d}"
        if lora is not None:
            write_bytes(self.folder / name / LORA_FILE, lora)
        save_checkpoint(self.path(name), checkpoint)
        others = [other for other in self.names() if other != name and int(other) not in kept]
        old = others[: max(0, len(others) - self.keep + 1)]
        for path in (*map(self.path, old), *self.folder.glob("*.tmp")):
            with suppress(OSError):  # what cannot be deleted remains until the next save
                path.unlink(missing_ok=True)
        for other in old:
            shutil.rmtree(self.folder / other, ignore_errors=True)

    def forget_after(self, name: str) -> None:
        """Delete checkpoints newer than `name`, the newest first, so that a crash leaves no gap."""
        for other in reversed(self.names()):
            if int(other) > int(name):
                self.path(other).unlink(missing_ok=True)
                shutil.rmtree(self.folder / other, ignore_errors=True)

    def complete(self, before: str = "") -> str:
        """The newest complete checkpoint, of those older than `before` if it is given, or ""."""
        names = self.names()
        for name in reversed(names[: names.index(before)] if before in names else names):
            with suppress(FlowrlError):
                load_checkpoint(self.path(name))
                return name
        return ""

    def load(self, name: str) -> Checkpoint:
        """Checkpoint `name`.

        Raises `CheckpointError` if it is missing or damaged, with the command that resumes from an
        earlier complete one.
        """
        if name not in self.names():
            raise CheckpointError(f"no checkpoint {name} in {self.run}; available: {self.listed()}")
        try:
            return load_checkpoint(self.path(name))
        except FlowrlError as error:
            advice = f"There is no earlier one in {self.run} (keep_checkpoints = {self.keep})"
            if earlier := self.complete(before=name):
                command = f"{to_resume(self.run)} --from {earlier}"
                advice = f"Checkpoint {earlier} is complete; resume from it with: {command}"
            raise CheckpointError(f"{error}. {advice}") from error


PER_PARAMETER = ("weight.", "average.", "optimizer.", "copy.")
"""Prefixes of the names of tensors that belong to a parameter."""


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `prefix` in front of their names."""
    return {prefix + name: value for name, value in values.items()}


def without_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` whose names begin with `prefix`, named without it."""
    chosen = (name for name in values if name.startswith(prefix))
    return {name.removeprefix(prefix): values[name] for name in chosen}


def full_state(live: Mapping[str, Tensor], values: Mapping[str, Any]) -> Checkpoint:
    """`values` and the full tensors of `live`, which share no memory with them."""
    return Checkpoint(
        {
            name: tensor.clone() if live[name].device.type == "cpu" else tensor
            for name, tensor in full_tensors(live).items()
        },
        dict(values),
    )


def training_state(
    parameters: Mapping[str, nn.Parameter],
    average: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
) -> Checkpoint:
    """Copies of full weights, averages and optimizer state, in the main process's main memory.

    With sharded weights all processes must call this. The plain numbers of the optimizer are
    values.
    """
    moments = {
        f"optimizer.{key}.{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    live = {
        **prefixed("weight.", parameters),
        **prefixed("average.", dict(zip(parameters, average, strict=True))),
        **{name: value for name, value in moments.items() if isinstance(value, Tensor)},
    }
    numbers = {name: value for name, value in moments.items() if not isinstance(value, Tensor)}
    return full_state(live, {"optimizer": numbers})


def trainer_state(trainer: Trainer) -> Checkpoint:
    """A copy of weights, averages, optimizer, generators, the prompt order, and the credit rule's
    memory if it has one, in main memory.

    Other processes than the main one get no tensors; with sharded weights all must call this.
    """
    state = training_state(trainer.parameters, trainer.average, trainer.optimizer)
    copies = full_state(trainer.copies.tensors(), trainer.copies.counters)
    if not trainer.processes.is_main:
        return state
    tensors = {
        "generator": trainer.generator.get_state(),
        "prompts.generator": trainer.prompts.generator.get_state(),
    }
    for prefix, part in trainer.with_memory.items():
        name = f"{prefix.removesuffix('.')}: {type(part).__name__}"
        tensors |= prefixed(prefix, state_of(name, part))
    values = {
        "done": trainer.done,
        "order": list(trainer.prompts.order),
        "prompts": prompts_digest(trainer.prompts.prompts),
        "loss_scale": trainer.scaler.state_dict(),
    }
    return state | copies | Checkpoint(tensors, values)


def restore_trainer(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Continue from `trainer_state`, in place, on any number of processes. All processes call this;
    only the main process's checkpoint is used. Other prompts begin with a new pass.

    Raises `ConfigError` if it belongs to other weights.
    """
    processes = trainer.processes
    restore_training_state(
        checkpoint, trainer.parameters, trainer.average, trainer.optimizer, processes
    )
    saved = checkpoint.tensors.items()
    small = {name: tensor for name, tensor in saved if not name.startswith(PER_PARAMETER)}
    tensors, values = processes.in_main(lambda: (small, checkpoint.values))
    load_matching(trainer.copies.tensors(), checkpoint.tensors, processes)
    trainer.copies.counters = values
    for prefix, part in trainer.with_memory.items():
        with part_call(f"{type(part).__name__}.load_state_dict"):
            part.load_state_dict(without_prefix(prefix, tensors))
    trainer.scaler.load_state_dict(values["loss_scale"])
    trainer.generator.set_state(tensors["generator"])
    trainer.prompts.generator.set_state(tensors["prompts.generator"])
    trainer.done = int(values["done"])
    now = prompts_digest(trainer.prompts.prompts)
    trainer.prompts.order = list(values["order"]) if values.get("prompts", now) == now else []


def load_matching(
    tensors: Mapping[str, Tensor], values: Mapping[str, Tensor], distributed: Processes
) -> None:
    """Fill `tensors` with the main process's `values` of the same names.

    Raises `ConfigError` in all processes if one is missing or has another shape.
    """
    with distributed.shared_errors():
        for name, tensor in tensors.items() if distributed.is_main else ():
            if name not in values or values[name].shape != tensor.shape:
                raise ConfigError(
                    f"checkpoint: no {name} of shape {tuple(tensor.shape)}; it belongs to another"
                    " run, loss or model"
                )
    load_full_tensors(tensors, values, distributed)


def restore_training_state(
    checkpoint: Checkpoint,
    parameters: Mapping[str, nn.Parameter],
    average: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    distributed: Processes,
) -> None:
    """The inverse of `training_state`, in place, on any number of processes, of which only the main
    one's checkpoint is used. Raises `ConfigError` if it belongs to other parameters.
    """
    averages = dict(zip(parameters, average, strict=True))
    live = {**prefixed("weight.", parameters), **prefixed("average.", averages)}
    load_matching(live, checkpoint.tensors, distributed)
    saved = {**checkpoint.tensors, **checkpoint.values.get("optimizer", {})}
    # The other processes get numbers, and of tensors the shape and type, before the tensors.
    described = {
        name: (value.shape, value.dtype) if isinstance(value, Tensor) else value
        for name, value in without_prefix("optimizer.", saved).items()
    }
    order = {name: index for index, name in enumerate(parameters)}
    state: dict[int, dict[str, Any]] = {}
    for entry, value in distributed.in_main(lambda: described).items():
        key, _, name = entry.partition(".")
        if isinstance(value, tuple):
            shape, dtype = value
            parameter = parameters[name].detach()
            # a moment is sharded like its parameter; a step counter is not
            if shape == parameter.shape:
                value = torch.empty_like(parameter, dtype=dtype)
            else:
                value = torch.empty(shape, dtype=dtype, device=parameter.device)
            load_full_tensors({f"optimizer.{entry}": value}, checkpoint.tensors, distributed)
        state.setdefault(order[name], {})[key] = value
    optimizer.zero_grad()
    # replaces the whole state, so that parameters without moments in the checkpoint have none
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
