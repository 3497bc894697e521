"""Observers of a run: the built-in ones, the tables of --save-experience, and how a run calls
them.
"""

import copy
import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from flowrl.core.errors import PartError, foreign_call, is_disk_error, require
from flowrl.core.experience import FIELDS, LARGER, Actions, Record
from flowrl.core.options import Whole, checked_options
from flowrl.core.protocols import Observer, Stateful
from flowrl.core.types import inputs_unchanged
from flowrl.distributed import Distributed
from flowrl.io import write_bytes
from flowrl.parts.registry import build
from flowrl.parts.specs import parse_spec
from flowrl.training.config import RunConfig
from flowrl.training.monitors import Notice
from flowrl.training.trainer import Iteration, Trainer

EXPERIENCE = "experience"
"""Folder of the tables of `SaveExperience` within a run's folder."""


@checked_options
@dataclass(frozen=True)
class StopOnCollapse:
    """Stops the run when the held-out reward has fallen from its best, the untrained model's
    included, by more than ``drop * abs(best)``.

    Args:
        drop: the fraction, in (0, 1]; choose a small one for a reward with a large constant part.
    """

    drop: float = 0.3
    fields = ("metrics", "history")

    def __post_init__(self) -> None:
        require(0 < self.drop <= 1, "drop", self.drop, "in (0, 1]")

    def observe(self, record: Record) -> Actions | None:
        """Compare the evaluation, if there is one, with the best so far."""
        rewards = [
            row["evaluation"]["reward"]
            for row in (*record.history, record.metrics)
            if row.get("evaluation")
        ]
        best = max(rewards, default=0.0)
        if not record.metrics.get("evaluation") or best - rewards[-1] <= self.drop * abs(best):
            return None
        return Actions(
            stop=f"the held-out reward fell to {rewards[-1]:.3f} from its best, {best:.3f}"
        )


@checked_options
@dataclass(frozen=True)
class Budget:
    """Stops the run after a number of network evaluations or seconds; a resumed run continues to
    count.

    Args:
        nfe: network evaluations of the rollouts (`nfe_total`); 0 = no limit.
        seconds: seconds of training (`seconds_total`), without evaluations on held-out prompts; 0 =
            no limit.
    """

    nfe: Whole = 0
    seconds: float = 0.0
    fields = ("metrics",)

    def __post_init__(self) -> None:
        require(self.nfe >= 0, "nfe", self.nfe, "0 or more")
        require(self.seconds >= 0, "seconds", self.seconds, "0 or more")
        require(self.nfe + self.seconds > 0, "nfe", self.nfe, "above 0, or seconds above 0")

    def observe(self, record: Record) -> Actions | None:
        """Compare the totals so far with the limits."""
        nfe, seconds = record.metrics["nfe_total"], record.metrics["seconds_total"]
        if 0 < self.nfe <= nfe:
            return Actions(stop=f"{nfe:,} network evaluations, of {self.nfe:,} allowed")
        if 0 < self.seconds <= seconds:
            return Actions(stop=f"{seconds:.0f} seconds, of {self.seconds:g} allowed")
        return None


@dataclass(frozen=True)
class SaveExperience:
    """Writes the table and the tensors of every `every`-th iteration.

    experience/000010.csv has a line per sample: iteration, prompt (index of the group), member,
    text, reward, valid, part_NAME for each component of a composite reward, advantage_k and
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
            place = self.folder / EXPERIENCE / f"{record.iteration:06d}"
            write_bytes(place.with_suffix(".csv"), _table(record).encode())
            write_bytes(place.with_suffix(".safetensors"), _tensors(record))

    def forget_after(self, iteration: int) -> None:
        """Delete the files of iterations after `iteration`, which will be computed again."""
        for path in (self.folder / EXPERIENCE).glob("[0-9]*.*"):
            if int(path.stem) > iteration:
                path.unlink()


def _table(record: Record) -> str:
    """One line per sample; a cell that is NaN is empty."""
    finals = {
        "reward": record.values[..., -1],
        **{f"part_{name}": table[..., -1] for name, table in record.parts.items()},
    }
    credits = {"advantage": record.advantages, "weight": record.weights}
    columns = finals | {
        f"{name}_{k}": table[..., k]
        for name, table in credits.items()
        for k in range(len(record.decisions))
    }
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = list(columns)
    writer.writerow(["iteration", "prompt", "member", "text", "reward", "valid", *names[1:]])
    for i, prompt in enumerate(record.prompts):
        for j, valid in enumerate(record.valid[i].tolist()):
            reward, *others = (
                "" if math.isnan(x) else f"{x:.9g}"
                for x in (float(columns[name][i, j]) for name in names)
            )
            writer.writerow([record.iteration, i, j, prompt.text, reward, valid, *others])
    return text.getvalue()


def _tensors(record: Record) -> bytes:
    """The tensors as safetensors."""
    columns, decisions = "prompt member decision+1", record.decisions
    named = {"values": (record.values, columns)} | {
        f"part.{name}": (table, columns) for name, table in record.parts.items()
    }
    tables = {"advantages": record.advantages, "weights": record.weights, "mask": decisions.mask}
    named |= {name: (table, "prompt member decision") for name, table in tables.items()}
    named |= {name: (getattr(decisions, name), "decision") for name in ("step", "time", "std")}
    named["valid"] = (record.valid, "prompt member")
    axes = json.dumps({name: words for name, (_, words) in named.items()})
    found = {name: tensor.contiguous() for name, (tensor, _) in named.items()}
    return save(found, {"axes": axes})  # safetensors writes several entries in random order


@dataclass
class Decided:
    """The actions of all observers after an iteration.

    Args:
        metrics: numbers by OBSERVER/NAME.
        warnings: the observers' warnings and failures.
        keep: whether to keep the checkpoint of the iteration.
        stop: "OBSERVER: reason" of the first observer that stops the run.
    """

    metrics: dict[str, float | None] = field(default_factory=dict)
    warnings: list[Notice] = field(default_factory=list)
    keep: bool = False
    stop: str = ""


class Observers:
    """The observers of a run, which exist in the main process only; all processes receive their
    decisions.

    Args:
        config: the run's settings.
        folder: its folder.
        others: observers besides those of the settings.
        distributed: the processes.

    Raises:
        ConfigError: an observer cannot be built, or declares an unknown field.
    """

    def __init__(
        self, config: RunConfig, folder: Path, others: Sequence[Observer], distributed: Distributed
    ) -> None:
        chosen, self.strict, self.distributed = config.logging, config.logging.strict, distributed
        self.saved = SaveExperience(folder, chosen.save_experience or 1)
        self.named: dict[str, Observer] = {}
        self.memory: dict[str, dict[str, Tensor]] = {}
        self.any = bool(chosen.observe or others or chosen.save_experience)
        with distributed.shared_errors():
            if distributed.is_main:
                found = [("save-experience", self.saved)] if chosen.save_experience else []
                found += [
                    (parse_spec(spec).name.rpartition(":")[2], build("observer", spec))
                    for spec in chosen.observe
                ]
                for name, observer in (
                    *found,
                    *((type(other).__name__, other) for other in others),
                ):
                    self._add(name, observer)
        needed = {
            name for observer in self.named.values() for name in observer.fields if name in LARGER
        }
        self.recorded: set[str] = distributed.gather(needed)[0] if self.any else set()

    def _add(self, name: str, observer: Observer) -> None:
        fields = observer.fields
        fits = not isinstance(fields, str) and set(fields) <= set(FIELDS)
        require(
            fits, f"fields of observer {name}", fields, f"a tuple with some of {', '.join(FIELDS)}"
        )
        same = sum(other == name or other.startswith(f"{name}#") for other in self.named)
        self.named[f"{name}#{same + 1}" if same else name] = observer

    def observe(
        self,
        trainer: Trainer,
        iteration: Iteration,
        row: dict[str, Any],
        rows: Sequence[dict[str, Any]],
    ) -> Decided:
        """Call the observers and the `metrics` of parts; all processes must call this.

        Args:
            trainer: the trainer.
            iteration: the iteration and its record.
            row: its metrics, with totals and evaluation.
            rows: the earlier rows.

        Returns:
            The decisions, the same in all processes.

        Raises:
            PartError: an observer raised an exception, and `strict` is set.
        """
        decided, method = Decided(), trainer.method
        parts: dict[str, Any] = {
            "credit": method.credit,
            "loss": method.loss,
            "sampler": method.sampler,
        }
        parts["reward"] = trainer.reward
        metered = {
            kind: part.metrics
            for kind, part in parts.items()
            if callable(getattr(part, "metrics", None))
        }
        if not (self.any or metered):
            return decided
        warned = {said["kind"] for earlier in rows for said in earlier.get("warnings", ())}
        with self.distributed.shared_errors():
            for kind, metrics in metered.items() if self.distributed.is_main else ():
                self._decide(
                    kind,
                    f"metrics of {kind}",
                    lambda metrics=metrics: Actions(metrics=metrics()),
                    decided,
                    warned,
                )
            for name, observer in self.named.items():
                look = partial(self._look, name, observer, iteration, row, rows)
                self._decide(name, f"observer {name}", look, decided, warned)
        return self.distributed.gather(decided)[0]

    def _look(
        self,
        name: str,
        observer: Observer,
        iteration: Iteration,
        row: dict[str, Any],
        rows: Sequence[dict[str, Any]],
    ) -> Actions | None:
        """Call one observer, and note its state for the next checkpoint."""
        experience = iteration.experience
        known = {
            "advantages": iteration.credit.advantages,
            "weights": iteration.weights,
            "metrics": row,
            "history": rows,
        }
        fields = {
            key: known[key] if key in known else getattr(experience, key) for key in observer.fields
        }
        fields |= {
            key: copy.deepcopy(fields[key]) for key in ("metrics", "history") if key in fields
        }
        inputs = [value for value in fields.values() if isinstance(value, Tensor)]
        with inputs_unchanged(f"{type(observer).__name__}.observe", PartError, *inputs):
            actions = observer.observe(Record(row["iteration"], **fields))
        if isinstance(observer, Stateful):
            self.memory[name] = {
                key: tensor.detach().cpu().clone() for key, tensor in observer.state_dict().items()
            }
        return actions

    def _decide(
        self,
        name: str,
        label: str,
        call: Callable[[], Actions | None],
        decided: Decided,
        warned: set[str],
    ) -> None:
        """Add the actions that `call` returns; an exception is a warning, unless one was given for
        this name before.
        """
        try:
            actions = call()
            if actions is None:
                return
            if not isinstance(actions, Actions):
                raise PartError(
                    f"it returned a {type(actions).__name__}, not "
                    f"flowrl.core.experience.Actions or None"
                )
            metrics = {f"{name}/{key}": float(value) for key, value in actions.metrics.items()}
        except (Exception, SystemExit) as error:
            if is_disk_error(error):
                raise
            kind, place = f"{name} failed", foreign_call(error)
            problem = (
                str(error) if isinstance(error, PartError) else f"{type(error).__name__}: {error}"
            )
            text = _line(f"{label}{f', {place}' if place else ''}: {problem}")
            if self.strict:
                raise PartError(text) from error
            decided.warnings += [Notice(kind, f"{text} (shown once)")] if kind not in warned else []
            return
        decided.metrics |= {
            key: value if math.isfinite(value) else None for key, value in metrics.items()
        }
        decided.warnings += [Notice(name, _line(actions.warn))] if actions.warn else []
        decided.keep |= actions.keep
        decided.stop = decided.stop or (f"{name}: {_line(actions.stop)}" if actions.stop else "")

    def state(self) -> dict[str, Tensor]:
        """The state of the observers with memory after the last iteration, by name, for a
        checkpoint.
        """
        return {
            f"observer/{name}/{key}": tensor
            for name, state in self.memory.items()
            for key, tensor in state.items()
        }

    def restore(self, tensors: Mapping[str, Tensor], iteration: int) -> None:
        """Continue from the `tensors` of the checkpoint of `iteration`, in the main process."""
        for name, observer in self.named.items():
            head = f"observer/{name}/"
            found = {
                key.removeprefix(head): tensor
                for key, tensor in tensors.items()
                if key.startswith(head)
            }
            if isinstance(observer, Stateful) and found:
                observer.load_state_dict(found)
                self.memory[name] = {key: tensor.clone() for key, tensor in found.items()}
        with suppress(FileNotFoundError):
            self.saved.forget_after(iteration)


def _line(text: str) -> str:
    """`text` in one line."""
    return " ".join(text.split())
