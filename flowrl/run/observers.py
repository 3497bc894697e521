"""How a run calls its observers, and the tables of --save-experience."""

import copy
import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from flowrl.core.errors import PartError, is_disk_error, part_call, require
from flowrl.core.experience import FIELDS, LARGER, Actions, Record
from flowrl.core.protocols import Observer, Stateful
from flowrl.run.checkpoint import prefixed, without_prefix
from flowrl.run.config import RunConfig
from flowrl.run.costs import prices_of
from flowrl.run.distributed import Distributed
from flowrl.run.io import write_bytes
from flowrl.run.parts.registry import build
from flowrl.run.parts.specs import parse_spec
from flowrl.run.parts.state import state_of
from flowrl.trainer import Iteration, Trainer


@dataclass(frozen=True)
class SaveExperience:
    """Writes the table and the tensors of every `every`-th iteration.

    experience/000010.csv has a line per sample: iteration, prompt (index of the group), member,
    text, valid, reward, part_NAME for each component of a composite reward, advantage_k and
    weight_k for decision k. experience/000010.safetensors has values and part.NAME [prompt, member,
    decision+1]; advantages, weights and mask [prompt, member, decision]; valid [prompt, member];
    step, time and std [decision]. The entry "axes" of its metadata lists these axes as JSON.

    Args:
        folder: the run's folder.
        every: iterations between tables.
    """

    folder: Path
    every: int
    fields = ("prompts", "values", "parts", "valid", "decisions", "advantages", "weights")

    def observe(self, record: Record) -> None:
        """Write both files; older ones of this iteration are replaced."""
        if record.iteration % self.every == 0:
            path = self.folder / "experience" / f"{record.iteration:06d}"
            write_bytes(path.with_suffix(".csv"), _table(record).encode())
            write_bytes(path.with_suffix(".safetensors"), _tensors(record))


def _table(record: Record) -> str:
    """One line per sample; a cell that is NaN is empty."""
    columns = {"reward": record.values[..., -1]}
    columns |= {f"part_{name}": table[..., -1] for name, table in record.parts.items()}
    for name, table in (("advantage", record.advantages), ("weight", record.weights)):
        columns |= {f"{name}_{k}": column for k, column in enumerate(table.unbind(-1))}
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["iteration", "prompt", "member", "text", "valid", *columns])
    numbers = torch.stack(list(columns.values()), dim=-1).tolist()
    for i, prompt in enumerate(record.prompts):
        for j, valid in enumerate(record.valid[i].tolist()):
            cells = ["" if math.isnan(number) else f"{number:.9g}" for number in numbers[i][j]]
            writer.writerow([record.iteration, i, j, prompt.text, valid, *cells])
    return lines.getvalue()


def _tensors(record: Record) -> bytes:
    """The tensors as safetensors."""
    decisions, columns = record.decisions, "prompt member decision+1"
    named = {"values": (record.values, columns), "valid": (record.valid, "prompt member")}
    named |= {f"part.{name}": (table, columns) for name, table in record.parts.items()}
    tables = {"advantages": record.advantages, "weights": record.weights, "mask": decisions.mask}
    named |= {name: (table, "prompt member decision") for name, table in tables.items()}
    named |= {name: (getattr(decisions, name), "decision") for name in ("step", "time", "std")}
    axes = json.dumps({name: words for name, (_, words) in named.items()})
    # one entry of metadata: safetensors writes several in random order
    return save({name: table.contiguous() for name, (table, _) in named.items()}, {"axes": axes})


@dataclass(frozen=True)
class _PartMetrics:
    """The optional `metrics` of a part as an observer."""

    kind: str
    part: Any
    fields = ()

    @property
    def call(self) -> str:
        return f"{self.kind}: {type(self.part).__name__}.metrics()"

    def observe(self, record: Record) -> Actions:
        with part_call(f"{type(self.part).__name__}.metrics"):
            metrics = self.part.metrics()
        return Actions(metrics=_numbers(self.call, metrics))


class MetricsError(PartError):
    """Metrics of a part that are not numbers by name, or whose names have changed."""


def _numbers(call: str, metrics: Any) -> dict[str, float]:
    """Metrics as numbers by name. Raises `MetricsError`, which names the `call`, for others."""
    need = "allowed: a dictionary of numbers by name"
    if not isinstance(metrics, Mapping):
        raise MetricsError(f"{call} = {metrics!r:.200} is not allowed; {need}")
    numbers = dict[str, float]()
    for name, value in metrics.items():
        fits = isinstance(name, str) and not isinstance(value, str | bytes)  # float() reads texts
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            fits = False
        if not fits:
            raise MetricsError(f"{call}: {name!r:.100} = {value!r:.100} is not allowed; {need}")
    return numbers


class Observers:
    """The observers of a run: those of its `config`, and `others`. They exist in the main process
    only; all processes receive their decisions. Raises `ConfigError` if an observer cannot be built
    or declares an unknown field.

    Args:
        config: the run.
        folder: its folder.
        others: observers beside those of `config`.
        distributed: the processes.
        forms: names of the rewards that its world evaluates.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        others: Sequence[Observer],
        distributed: Distributed,
        forms: Sequence[str],
    ) -> None:
        self.config, self.folder, self.distributed = config.logging, folder, distributed
        self.named: dict[str, Observer] = {}
        self._names: dict[str, set[str]] = {}
        known = {
            "eval_samples": config.evaluation.eval_samples,
            "heldout": config.evaluation.heldout_rewards,
            "scores": ("reward", *forms, *config.evaluation.heldout_rewards),
            "prices": prices_of(config.as_dict()),
        }
        with distributed.shared_errors():
            if distributed.is_main:
                if every := self.config.save_experience:
                    self._add("save-experience", SaveExperience(folder, every))
                for spec in self.config.observe:
                    name = parse_spec(spec).name.rpartition(":")[2]
                    self._add(name, build("observer", spec, **known))
                for other in others:
                    self._add(type(other).__name__, other)
        fields = {name for observer in self.named.values() for name in observer.fields}
        self.recorded: set[str] = distributed.in_main(lambda: fields & set(LARGER))

    def _add(self, name: str, observer: Observer) -> None:
        fields, known = observer.fields, ", ".join(FIELDS)
        fits = not isinstance(fields, str) and set(fields) <= set(FIELDS)
        require(fits, f"fields of observer {name}", fields, f"a tuple with some of {known}")
        same = sum(other.partition("#")[0] == name for other in self.named)
        self.named[f"{name}#{same + 1}" if same else name] = observer

    def observe(
        self,
        trainer: Trainer,
        iteration: Iteration,
        row: dict[str, Any],
        rows: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """Call the observers and the `metrics` of parts; all processes must call this.

        Args:
            trainer: the trainer.
            iteration: the iteration and its record.
            row: its metrics, with totals and evaluation.
            rows: the earlier rows.

        Returns:
            Entries of the row, the same in all processes: numbers by OBSERVER/NAME, "warnings",
            "kept" if an observer keeps the checkpoint, "best" with the best iteration by OBSERVER,
            "stopped" with "OBSERVER: reason" of the first that stops the run, and "exported" with
            its best iteration if that is an earlier one.

        Raises:
            PartError: an observer raised an exception, and `strict` is set; or the `metrics` of a
                part are not numbers by name, or their names have changed.
        """
        known = dict(vars(iteration.experience), metrics=row, history=rows)
        known |= {"advantages": iteration.credit.advantages, "weights": iteration.weights}
        parts = {kind: getattr(trainer.method, kind) for kind in ("credit", "loss", "sampler")}
        parts["reward"] = trainer.reward
        called: dict[str, Any] = {
            kind: _PartMetrics(kind, part)
            for kind, part in parts.items()
            if callable(getattr(part, "metrics", None))
        }
        called |= self.named
        warned = {warning["kind"] for earlier in rows for warning in earlier.get("warnings", ())}
        entries: dict[str, Any] = {"warnings": []}
        with self.distributed.shared_errors():
            for name, observer in called.items() if self.distributed.is_main else ():
                kind, is_part = name, isinstance(observer, _PartMetrics)
                try:
                    actions = _call(observer, known)
                    numbers = _numbers("its metrics", actions.metrics)
                    if is_part:
                        self._require_same_names(observer.call, numbers)
                except (Exception, SystemExit) as error:
                    if is_disk_error(error) or (is_part and isinstance(error, MetricsError)):
                        raise
                    text = f"{name}: {error}" if is_part else f"observer {name}: {error}"
                    if self.config.strict:
                        raise PartError(text) from error
                    kind, numbers = f"{name} failed", {}
                    actions = Actions(warn="" if kind in warned else f"{text} (shown once)")
                for key, number in numbers.items():
                    entries[f"{name}/{key}"] = number if math.isfinite(number) else None
                if actions.warn:
                    text = " ".join(actions.warn.split())
                    entries["warnings"].append({"kind": kind, "text": text})
                if actions.keep:
                    entries["kept"] = True
                if actions.best:
                    entries.setdefault("best", {})[name] = actions.best
                if actions.stop and "stopped" not in entries:
                    entries["stopped"] = f"{name}: {actions.stop}"
                    if actions.best and actions.best < trainer.done:
                        entries["exported"] = actions.best
        return self.distributed.gather(entries)[0]

    def _require_same_names(self, call: str, numbers: Mapping[str, float]) -> None:
        """Raise `MetricsError` if the names differ from those of the first iteration."""
        names = self._names.setdefault(call, {*numbers})
        if names != {*numbers}:
            text = f"{call} returned the names {sorted(numbers)}, but before {sorted(names)}"
            raise MetricsError(
                f"{text}; allowed: the same names in every iteration (NaN: no value)"
            )

    def state(self) -> dict[str, Tensor]:
        """The state of the observers with memory, by name, for a checkpoint."""
        state: dict[str, Tensor] = {}
        for name, observer in self.named.items():
            if isinstance(observer, Stateful):
                state |= prefixed(f"observer/{name}/", state_of(f"observer: {name}", observer))
        return state

    def restore(self, tensors: Mapping[str, Tensor], iteration: int) -> None:
        """Continue from the `tensors` of the checkpoint of `iteration`, in the main process."""
        for name, observer in self.named.items():
            state = without_prefix(f"observer/{name}/", tensors)
            if isinstance(observer, Stateful) and state:
                with part_call(f"{type(observer).__name__}.load_state_dict"):
                    observer.load_state_dict(state)
        for path in (self.folder / "experience").glob("[0-9]*.*"):
            if int(path.stem) > iteration:  # will be computed again
                path.unlink()


def _call(observer: Observer, known: Mapping[str, Any]) -> Actions:
    """The actions of one observer for the fields that it declares."""
    fields = {
        key: copy.deepcopy(known[key]) if key in ("metrics", "history") else known[key]
        for key in observer.fields
    }
    with part_call(f"{type(observer).__name__}.observe"):
        actions = observer.observe(Record(known["metrics"]["iteration"], **fields)) or Actions()
    if not isinstance(actions, Actions):
        raise PartError(f"it returned a {type(actions).__name__}, not Actions or None")
    best, last = actions.best, known["metrics"]["iteration"]
    if best is not None and not 1 <= best <= last:
        raise PartError(f"its best = {best!r} is not allowed; allowed: iterations 1 to {last}")
    return actions
