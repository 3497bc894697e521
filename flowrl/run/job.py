"""One training run in a folder: metrics line by line, checkpoints, samples, and a recorded
trajectory.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save
from torch import Tensor

from flowrl.core.errors import CheckpointError, part_errors, require
from flowrl.core.protocols import Observer, extras
from flowrl.core.sharded import full_tensors
from flowrl.core.types import Prompt
from flowrl.nonfinite import NonFiniteError
from flowrl.rewards import evaluation_reward
from flowrl.rewards.contract import load_reward
from flowrl.run.alive import FirstIteration, Line, alive_lines, block
from flowrl.run.begin import load_start, require_start
from flowrl.run.build import (
    METHOD_FILE,
    make_reward,
    make_trainer,
    make_world,
    method_parts,
    prompts_to_embed,
)
from flowrl.run.checkpoint import (
    LORA_FILE,
    Checkpoint,
    Checkpoints,
    restore_trainer,
    save_weights,
    to_resume,
    trainer_state,
    without_prefix,
)
from flowrl.run.config import SIZES, RunConfig, load_config
from flowrl.run.distributed import Distributed
from flowrl.run.ended import forget_error, record_error
from flowrl.run.evaluation import (
    Evaluation,
    as_evaluated,
    evaluate,
    make_heldout_metrics,
    write_trajectory,
)
from flowrl.run.export import run_lora
from flowrl.run.format import FORMAT
from flowrl.run.images import IterationImages, references_of
from flowrl.run.io import (
    append_bytes,
    disk_errors,
    folder_lock,
    new_folder,
    write_bytes,
    write_json,
)
from flowrl.run.monitors import limits_of, notices
from flowrl.run.observers import Observers
from flowrl.run.origins import given_origins, record_changed, record_origins
from flowrl.run.parts.kinds import TRIAL
from flowrl.run.parts.plugins import versions
from flowrl.run.parts.prompts import prompts_digest
from flowrl.run.parts.settings import settings_text
from flowrl.run.parts.trust import check_code, record_code
from flowrl.run.reading import as_kind, read_bytes, read_tensors, reading
from flowrl.run.results import (
    BEST,
    SCORED,
    MetricsRow,
    best_named,
    changes_text,
    comparable,
    has_progress,
    holds,
    require_no_run,
)
from flowrl.run.reward_guard import RewardGuard
from flowrl.run.sizes import find_sizes, out_of_memory
from flowrl.run.started import (
    begins_again,
    changed_settings,
    plain_settings,
    recorded_changes,
    require_resumable,
    resumed_prompts,
    store_prompts,
    stored_heldout,
    told_changes,
)
from flowrl.run.strips import write_extremes
from flowrl.run.trackers import forget_record
from flowrl.run.watch import Watch
from flowrl.run.worlds import ModelWorld, prompts_of
from flowrl.run.writers import Writer, Writers
from flowrl.trainer import Trainer

Row = dict[str, Any]
TOTALS = ("nfe", "probe_nfe", "train_nfe", "gradient_nfe", "decodes", "reward_calls", "seconds")
Report = Callable[[dict[str, Any]], None]
"""Called with {"phase", "iteration", "reward", "heldout", "nfe_total"} when one of them changes,
with {"folder"} when the run's folder exists, with {"phase", "prompts"}, a line on the progress of
embedding, with {"changed"}, what has changed since the run started, with {"note"}, another remark,
and with {"warning"}, whose "kinds" are those of its lines (`flowrl.run.monitors.Notice`). Another
thread may call it with {"slow"}, what takes long (`flowrl.run.watch`, which lists the phases).
"""


def trial() -> Any:
    """The module that tries the user's parts before a run."""
    return import_module(TRIAL)


@dataclass(frozen=True)
class _Written:
    """How much of metrics.jsonl a checkpoint belongs to: the first `length` bytes, and their
    hash.
    """

    length: int
    sha256: str


@dataclass
class Run:
    """A run in a folder.

    The folder gets config.json (and .yaml), method.json, the prompts (`run.started`),
    metrics.jsonl (a line per iteration; line 0 is the untrained model), checkpoints/ (of a LoRA
    also as a folder with diffusers' file, such as checkpoints/000010/) and, at the end, samples.*,
    trajectory.*, weights.safetensors (the averaged trainable weights; those of a diffusers pipeline
    also in lora/ or full/, in diffusers' format) and done.json. If an observer has named another
    iteration as the best, best/ has its weights in the same files. With `save_experience` the
    folder also gets experience/ (`flowrl.run.observers.SaveExperience`). A run that an observer
    stops ends in the same way; done.json and the last row then have the reason ("stopped") and, if
    the run ends with the best checkpoint that the observer has named, its iteration ("exported").
    Every process
    executes the run; only the main process writes and reports. If one process is asked to stop, all
    pause.

    Args:
        config: the settings.
        folder: the run's folder.
        report: called with the state of the run.
        stop: whether the run should pause.
        distributed: the processes.
        changed_code: continue although the files of the run's own parts have changed since it was
            started.
        change: with a resume, allow settings and training prompts that change the numbers of the
            run (`run.started`). The row of the first iteration after the change records them.
        observers: observers besides those of the setting `observe`; give them again when the run is
            resumed.
        trial: try the user's own parts before a new run, or with `changed_code`
            (`flowrl.testing.trial`).
        parts_tried: try only the reward, because the caller has tried the other parts.
        page: write report.html, at evaluations and at the end (`flowrl.run.writers.Page`).
        writers: writers besides the built-in ones (`flowrl.run.writers`); give them again when the
            run is resumed.
        origins: where settings come from, by setting, for the page; None: those that differ from
            the default are "given".
    """

    config: RunConfig
    folder: Path
    report: Report = lambda state: None
    stop: Callable[[], bool] = lambda: False
    distributed: Distributed = Distributed()
    changed_code: bool = False
    change: bool = False
    observers: Sequence[Observer] = ()
    trial: bool = True
    parts_tried: bool = False
    page: bool = False
    writers: Sequence[Writer] = ()
    origins: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._metrics = self.folder / "metrics.jsonl"
        self._digest, self._length = hashlib.sha256(), 0
        self._checkpoints = Checkpoints(self.folder, self.config.logging.keep_checkpoints)
        self._last: Checkpoint | None = None
        self._kept, self._saving = set[int](), threading.Lock()
        self._changed = dict[str, list[Any]]()
        self._before: Evaluation | None = None
        self._writers: Writers | None = None
        self._watch = Watch(
            lambda text: self._tell({"slow": text}),
            self.distributed.publish,
            self.distributed.calls_of_others,
        )
        self._guard = RewardGuard.of(self.config)
        self._first: FirstIteration | None = None

    def execute(self, resume: bool = False, start: str = "") -> bool:
        """Train to the end; with `resume`, from the last checkpoint or from the checkpoint `start`,
        whose successors are then deleted; a run that an observer stopped at `start` then continues.

        Returns True when the run is finished or an observer has stopped it, False when `stop`
        paused it. Raises a part's `FlowrlError`, `CheckpointError` for a damaged checkpoint,
        `DiskError` for a full disk, and `NonFiniteError` for a loss that is not finite (its data
        are then in failure/). If another process executes the run, a `ConfigError` names it.
        """
        full = disk_errors(self.folder, partial(to_resume, self.folder))
        watched = self._watch.running()
        with part_errors(), watched, full, out_of_memory(), ExitStack() as stack:
            self._tell({"phase": "loading"})
            if self.distributed.in_main(lambda: self._enter(stack, resume, start)):
                return True
            with self._finishing_writers():
                self._open(resume, start)
                while not self._ended:
                    with self._saved_after_failure():
                        self._iterate()
                        self._remember()
                        paused = self.distributed.any(not self._ended and self.stop())
                    done = self._trainer.done
                    due = done % self.config.logging.checkpoint_every == 0 or done in self._kept
                    if paused or due or self._ended:
                        self._tell({"phase": "saving"})
                        self.save_last()
                    if paused:
                        break
                if self._ended:
                    self._finish()
            return self._ended

    @contextmanager
    def _finishing_writers(self) -> Iterator[None]:
        """Finish the writers at the end, also after an error, which error.json then has."""
        try:
            yield
        except BaseException as error:
            if self._writers is not None:
                with suppress(Exception):  # the first error counts
                    record_error(self.folder, error)
                with suppress(Exception):
                    self._writers.finish()
            raise
        if self._writers is not None:
            self._writers.finish()

    # ----- Start

    def _enter(self, stack: ExitStack, resume: bool, start: str) -> bool:
        """Try the user's parts and lock the folder. Returns whether the run has ended already."""
        if self.trial and not self.parts_tried and (self.changed_code or not resume):
            trial().try_parts([self.config], self._warn_of_trial)
        text = "" if resume else require_start(self.config)
        if text:
            self._tell({"note": text})
        lock = folder_lock(self.folder)
        if not resume:
            require_no_run(self.folder)
            # a start that fails before its first iteration leaves no files, and may be repeated
            made, kept = partial(holds, entry="algorithm"), partial(has_progress, self.folder)
            lock = new_folder(self.folder, "run", made, kept)
        stack.enter_context(lock)
        self._tell({"folder": str(self.folder)})
        if not resume:
            return False
        ended = require_resumable(self.folder, self.config, start, self.change)
        if text := ended or begins_again(self.folder):
            self._tell({"note": text})
        return bool(ended)

    def _open(self, resume: bool, start: str) -> None:
        """Build the run, restore it if it is resumed, and evaluate the untrained model if it is
        new.
        """
        changed = self._tell_changes() if resume else {}
        self._world = make_world(self.config, self.distributed)
        given = self.config, self.folder, self.observers, self.distributed, self._world.forms
        self._observers = Observers(*given)
        if resume:
            self._compare_prompts()
        if text := getattr(self._world, "evaluated_on", ""):
            self._tell({"note": text})
        self._heldout = make_heldout_metrics(self.config, self._world)
        for part in (*self._heldout.rewards.values(), self._heldout.features):
            load_reward(part)
        is_main = self.distributed.is_main
        self._inspects = self.trial and not resume and is_main
        self._trainer = self._make_trainer()
        if self._inspects:
            self._inspect_heldout()
        self._rows = self._loaded(resume, start, changed)
        self._embed_prompts()
        self._tell({"phase": "sizes"})
        sizes, text = find_sizes(self._trainer, self.config)
        if sizes:
            self.config = self.config.replace(**sizes)
            self._trainer = self._make_trainer(self._trainer)
            self._rows = self._loaded(resume, start, {})
        if text:
            self._tell({"profile": text})
        self._require_iterations()
        if self.config.batches.compile:
            text = "compiling the network: its first calls take a minute or more"
            self._tell({"note": f"{text} (--compile False: none)"})
        # a run that an observer stopped has ended, unless it continues from a named checkpoint
        self._stopped = self._rows[-1].get("stopped", "") if self._rows and not start else ""
        self._evaluation: Evaluation | None = None
        if self._before is not None:
            self._write_samples(self._before)
        if is_main:
            self._write_settings()
            self._record_origins(sizes, {**changed, **self._changed} if resume else None)
            self._make_writers()
        if not self._rows:
            self._write_untrained()
        self._limits = limits_of(self._trainer, self.config)
        self._first = None if self._ended else FirstIteration(self._trainer)

    def _tell_changes(self) -> dict[str, list[Any]]:
        """The settings that have changed since the last start; measured sizes are as before."""
        self.config = self.config.replace(**self.distributed.in_main(self._measured_sizes))
        changed = self.distributed.in_main(lambda: changed_settings(self.folder, self.config))
        told = self.distributed.in_main(lambda: told_changes(self.folder, self.config))
        if told:
            self._tell({"changed": f"changed settings: {changes_text(told)}"})
        if unread := {name: values for name, values in changed.items() if name not in told}:
            text = f"a resume does not read config.yaml: {changes_text(unread)}"
            self._tell({"note": f"{text}. Edit config.json, or give options"})
        return changed

    def _require_iterations(self) -> None:
        """Raise `ConfigError` if the run would end before its last row, or with a row that has no
        evaluation; say which changes the next row records.
        """
        done, rows = self._trainer.done, self._rows
        least = done + bool(rows and not rows[-1]["evaluation"])
        allowed = f"{least} or more, or an earlier checkpoint with --from"
        fits = least <= self.config.iterations
        require(fits, "iterations", self.config.iterations, allowed)
        if self._changed:
            text = f"recorded with iteration {done + 1}: {changes_text(self._changed)}"
            self._tell({"note": text})

    def _make_trainer(self, first: Trainer | None = None) -> Trainer:
        """The trainer, with the policy of the `first` one, on which sizes were measured."""
        return make_trainer(
            self.config,
            self.distributed,
            self._world,
            first and first.policy,
            self._guard,
            report=self._tell,
            recorded=self._observers.recorded,
            on_phase=lambda phase: self._tell({"phase": phase}),
            on_images=self._see,
        )

    def _inspect_heldout(self) -> None:
        """Try the user's held-out rewards on their first batches."""
        tried = partial(trial().reward_trial, self.config, warn=self._warn_of_trial)
        for spec, reward in self._heldout.rewards.items():
            if (inspect := tried(reward, heldout=spec)) is not None:
                self._heldout.trials[spec] = inspect

    def _see(
        self, images: Tensor, latents: Tensor, prompts: Sequence[Prompt], scores: Tensor
    ) -> None:
        """Look at a batch of training images; try a reward of the user on its first one."""
        if self._inspects:
            self._inspects, reward = False, self._trainer.reward
            tried = trial().reward_trial(self.config, reward, warn=self._warn_of_trial)
            if tried is not None:
                with self._guard.without_failures():
                    tried(images, prompts, scores)
        self._images.add(images, latents, prompts, scores)

    def _embed_prompts(self) -> None:
        """Embed the held-out prompts and those of all coming iterations."""
        if (embedding := extras(self._trainer.policy, "warm")) is not None:
            self._tell({"phase": "prompts"})
            given = self.config, self._world, self._trainer.prompts, self._trainer.done
            embedding.warm(prompts_to_embed(*given), self.distributed, self._tell)

    def _compare_prompts(self) -> None:
        """Compare the world's prompts with those at the start of the run, whose held-out prompts
        stay held out.
        """
        held = self.distributed.in_main(lambda: stored_heldout(self.folder, self.config))
        if held and isinstance(self._world, ModelWorld):
            self._world.hold_out(held)
        given = self.folder, self._world, self.config, self.change
        config, text = self.distributed.in_main(lambda: resumed_prompts(*given))
        if text:
            self._tell({"changed": text})
        if config != self.config:
            self.config = self.config.replace(heldout_prompts=config.environment.heldout_prompts)
            self._world = make_world(self.config, self.distributed)

    def _measured_sizes(self) -> dict[str, Any]:
        """The auto sizes in the config.json of a run that is resumed, so that it uses the same;
        refuses changed code.
        """
        given, path = self.config.flat(), self.folder / "config.json"
        check_code(self.folder, given, self.changed_code)
        if not path.exists():
            return {}
        recorded = load_config(path, trust=True).flat()
        return {name: recorded[name] for name in SIZES if given[name] is None}

    def _record_origins(self, sizes: Mapping[str, Any], changed: Mapping[str, Any] | None) -> None:
        """Record where the settings come from: of a new run, or what a resume has changed."""
        if changed is not None:
            record_changed(self.folder, self.config, changed, self._trainer.done)
            return
        given = given_origins(self.config.typed()) if self.origins is None else self.origins
        record_origins(self.folder, {**given, **dict.fromkeys(sizes, "measured")})

    def _make_writers(self) -> None:
        forget_error(self.folder)
        given = self.config, self.folder, self._rows, self.page, self.writers
        self._writers = Writers(
            *given, warn=lambda k, text: self._warn([{"kind": k, "text": text}])
        )

    def _write_settings(self) -> None:
        """code.json, config.json, and config.yaml for ``flowrl train --config``."""
        record_code(self.folder, self.config.flat())
        values = {"format": FORMAT, **self.config.as_dict()}
        write_json(self.folder / "config.json", values)
        packages = ", ".join(f"{name} {version}" for name, version in versions().items())
        command = "flowrl train --config config.yaml --out NEW_FOLDER"
        comment = (
            f"All settings of this run; repeat it with: {command} ({packages})."
            " A resume reads config.json"
        )
        write_bytes(self.folder / "config.yaml", settings_text(values, comment).encode())
        store_prompts(self.folder, self._world, self.config)
        write_json(self.folder / METHOD_FILE, method_parts(self.config))

    def _loaded(self, resume: bool, start: str, changed: Mapping[str, Any]) -> list[Row]:
        """Load what the run continues from, or begins with; returns the rows up to there. The
        settings `changed` since the last start may ask for scores of the untrained model.
        """
        rows = self._restore(start, changed) if resume else []
        if not rows:
            load_start(self._trainer, self.config)
        return rows

    def _restore(self, start: str, changed: Mapping[str, Any]) -> list[Row]:
        """Rows up to the last checkpoint (or `start`); later rows will be computed again. Without a
        checkpoint the run starts anew.
        """
        trainer, checkpoint, rows = self._trainer, Checkpoint({}, {}), list[Row]()
        name = start or self._checkpoints.newest
        file = self._checkpoints.path(name)
        with reading(file, CheckpointError), self.distributed.shared_errors():
            if self.distributed.is_main and name:
                checkpoint = self._checkpoints.load(name)
                rows = self._rows_until(checkpoint)
        given = self.folder, self.config, checkpoint.values, prompts_digest(trainer.prompts.prompts)
        self._changed = self.distributed.in_main(lambda: recorded_changes(*given) if rows else {})
        if {*changed, *self._changed} & {*SCORED} and self._before is None:
            load_start(trainer, self.config)
            self._before = self._evaluate()
        with reading(file, CheckpointError):
            if self.distributed.any(bool(checkpoint.values)):
                restore_trainer(trainer, checkpoint)

        def rewind() -> list[Row]:
            self._observers.restore(checkpoint.tensors, trainer.done)
            for half in self.folder.glob("*.tmp"):  # of a killed process
                half.unlink()
            if start or trainer.done < self.config.iterations:  # the run has not ended
                (self.folder / "done.json").unlink(missing_ok=True)
            if start:
                forget_record(self.folder)
                self._checkpoints.forget_after(start)
            if rows:  # a crash leaves metrics with later rows, or a line that is cut
                lines = b"".join(map(_line, rows))
                write_bytes(self._metrics, lines)
                self._count(lines)
            return rows

        return self.distributed.in_main(rewind)

    def _rows_until(self, checkpoint: Checkpoint) -> list[Row]:
        """The rows at the time of `checkpoint`. Raises `CheckpointError` if metrics.jsonl has
        others.
        """
        rows = checkpoint.values.get("rows")  # of an earlier version
        if rows is None:
            written = as_kind(checkpoint.values.get("metrics"), _Written)
            lines = b""
            with suppress(FileNotFoundError):
                lines = read_bytes(self._metrics, None)[: written.length]
            if hashlib.sha256(lines).hexdigest() != written.sha256:
                raise CheckpointError(
                    f"{self._metrics} is missing or was changed: resuming needs its first"
                    f" {written.length} bytes as they were at this checkpoint; restore the file,"
                    " or start a new run"
                )
            rows = [json.loads(line) for line in lines.splitlines()]
        as_kind(rows, list[MetricsRow])
        return rows

    def _count(self, lines: bytes) -> None:
        """Count `lines` of metrics.jsonl."""
        self._digest.update(lines)
        self._length += len(lines)

    def _write_samples(self, before: Evaluation) -> None:
        """The samples of the untrained model."""
        if self.distributed.is_main:
            images = save({"images": before.images, "scores": before.image_scores})
            write_bytes(self.folder / "before.safetensors", images)

    def _write_untrained(self) -> None:
        """Row 0 and the samples of the untrained model."""
        before = self._evaluate()
        self._write_samples(before)
        if self.distributed.is_main:
            write_bytes(self._metrics, b"")
        totals = {f"{name}_total": 0 for name in TOTALS}
        self._append({"iteration": 0, "evaluation": before.row, **totals})
        self._tell({"heldout": before.row["reward"]})

    # ----- Iterations

    @property
    def _ended(self) -> bool:
        return self._trainer.done == self.config.iterations or bool(self._stopped)

    def _iterate(self) -> None:
        """One iteration, its evaluation if it has one, and what observers and monitors say; appends
        the row.
        """
        trainer, rows, every = self._trainer, self._rows, self.config.evaluation.eval_every
        evaluates = trainer.done + 1 == self.config.iterations or (trainer.done + 1) % every == 0
        self._images = IterationImages(shows=evaluates)
        try:
            with self._guard.explained():
                iteration = trainer.iteration()
        except NonFiniteError as error:
            write_json(self.folder / "failure" / "failure.json", error.values)
            place = f"Prompts, rewards and advantages are in {self.folder / 'failure'}"
            raise NonFiniteError(f"{error}. {place}", error.values) from error
        row: Row = dict(iteration)
        row |= self._guard.taken(row["trajectories"], self.distributed, row["invalid"])
        alive = self._alive(row, iteration.experience.prompts)
        if self.config.optim.final_share != 1 or self.config.optim.warmup:
            row["learning_rate"] = trainer.optimizer.param_groups[0]["lr"]
        if self._changed:
            row["changed"] = self._changed
            if self._before is not None and self._changed.keys() & {*SCORED}:
                row["untrained"] = self._before.row
            self._changed = {}
        row |= {
            f"{name}_total": rows[-1][f"{name}_total"] + row[name]
            for name in TOTALS
            if f"{name}_total" in rows[-1]  # a run that an older version began has fewer
        }
        looks, self._best, self._worst = self._images.collected(
            self.distributed, self.config.rollout.group_size
        )
        if looks:
            row["images"] = looks
        if self.page and self.distributed.is_main:
            write_extremes(self.folder, row, self._best, self._worst, iteration.credit.advantages)
        last, self._evaluation = self._ended, None
        row["evaluation"] = self._evaluate().row if evaluates else None
        entries = self._observers.observe(trainer, iteration, row, rows)
        warnings = entries.pop("warnings")
        if last and "exported" not in entries:
            entries.pop("stopped", None)
        row |= entries
        if "stopped" in row:
            self._stopped = row["stopped"]
            row["evaluation"] = row["evaluation"] or self._evaluate().row
            text = f"stopped after iteration {trainer.done} of {self.config.iterations} by"
            text += f" {self._stopped}{self._exported_text(row)}"
            warnings.append({"kind": "stopped", "text": text})
        noticed = notices(comparable([*rows, row]), self._limits)
        warnings = [*map(asdict, noticed), *warnings]
        if trainer.done == 1:  # a resumed run has the rows of one that was not interrupted
            texts = [line.warning for line in alive if line.warning]
            warnings += [{"kind": "alive", "text": text} for text in texts]
        if warnings:
            row["warnings"] = warnings
        self._append(row)
        self._warn(warnings)
        heldout = {"heldout": row["evaluation"]["reward"]} if row["evaluation"] else {}
        state = {"iteration": trainer.done, "reward": row["reward_mean"], **heldout}
        self._tell({**state, "nfe_total": row["nfe_total"]})
        if alive:
            self._tell({"alive": block(alive)})

    def _alive(self, row: Row, prompts: Sequence[Prompt]) -> list[Line]:
        """What is said of the first iteration since the start, whose prompts are given; nothing of
        others.
        """
        first, self._first = self._first, None
        if first is None:
            return []
        moved, unread = first.ended(prompts)
        if not self.distributed.is_main:
            return []
        evaluation, task = self.config.evaluation, self.config.environment.task
        heldout = prompts_of(self._world, task, "heldout")[: evaluation.eval_samples]
        return alive_lines(self._trainer, self.config, row, moved, unread, heldout)

    def _exported_text(self, row: Row) -> str:
        """What the stopped run ends with, if not with its last iteration."""
        if not (best := row.get("exported")):
            return ""
        path = self._checkpoints.path(f"{best:06d}")
        if self.distributed.in_main(path.exists):
            return f"; the weights and samples of the run are those of iteration {best}"
        del row["exported"]
        return f"; checkpoint {path} is missing, so the run ends with its last weights"

    def _evaluate(self) -> Evaluation:
        """The held-out evaluation of the averaged weights."""
        self._tell({"phase": "evaluation"})
        config, custom = self.config, None
        environment, settings = config.environment, config.evaluation
        if environment.reward and not config.policy.model:  # the only reward of a model's world
            exact = config.replace(reward_noise=0.0, reward_bias=0.0)
            custom = evaluation_reward(make_reward(exact))
        policy = self._trainer.policy
        with self._trainer.averaged(), self._guard.explained(), as_evaluated(policy, config):
            self._evaluation = evaluate(
                policy,
                self._world,
                environment.task,
                environment.reward_form,
                settings.eval_samples,
                settings.eval_steps,
                config.batches.max_batch,
                reward=custom,
                solver=settings.eval_solver,
                heldout_metrics=self._heldout,
                distributed=self.distributed,
                wrapped=self._guard.around,
            )
        counted = settings.eval_samples, self.distributed, None, "held-out samples"
        self._evaluation.row.update(self._guard.taken(*counted))
        return self._evaluation

    def _append(self, row: Row) -> None:
        self._rows.append(row)
        if self.distributed.is_main:
            line = _line(row)
            append_bytes(self._metrics, line)
            self._count(line)
        with self.distributed.shared_errors():
            if self._writers is not None:
                self._writers.row(row, self._evaluation)

    def _tell(self, state: dict[str, Any]) -> None:
        if "phase" in state:
            compiles = self.config.batches.compile and not self._last
            self._watch.enter(
                state["phase"], "its first calls compile the network" * bool(compiles)
            )
        if self.distributed.is_main:
            self.report(state)

    def _warn(self, warnings: list[dict[str, str]]) -> None:
        if warnings:
            text = "\n".join(warning["text"] for warning in warnings)
            self._tell({"warning": text, "kinds": [warning["kind"] for warning in warnings]})

    def _warn_of_trial(self, text: str) -> None:
        self._warn([{"kind": "trial", "text": text}])

    def _remember(self) -> None:
        """Copy the state after this iteration to main memory, for `save_last`."""
        observed = self._observers.state() if self.distributed.is_main else {}
        with self._saving:
            self._last = None  # two copies need twice the memory
            state = trainer_state(self._trainer)
            metrics = asdict(_Written(self._length, self._digest.hexdigest()))
            if self.distributed.is_main:
                self._kept = _kept(self._rows)
                tensors = {**state.tensors, **observed}
                own = {"metrics": metrics, "settings": plain_settings(self.config)}
                self._last = Checkpoint(tensors, state.values | own)

    def save_last(self) -> None:
        """Write the checkpoint of the last complete iteration, after the rows, of which it has the
        length and a hash, unless the disk has it. Another thread may call this while a part hangs.
        """
        with self._saving:
            last, newest = self._last, self._checkpoints.newest
            if last is not None and int(newest or 0) < last.values["done"]:
                with open(self._metrics, "rb") as file:
                    os.fsync(file.fileno())
                self._checkpoints.save(last, last.values["done"], self._kept, self._lora(last))

    def _lora(self, checkpoint: Checkpoint) -> bytes | None:
        """The file of the averaged LoRA of a model in a checkpoint; None for others."""
        if not self._is_lora:
            return None
        average = without_prefix("average.", checkpoint.tensors)
        return run_lora(self.config, self.folder, average, checkpoint.values["done"])

    @contextmanager
    def _saved_after_failure(self) -> Iterator[None]:
        """After a failure, save the last complete iteration, so that no result is lost; in a run
        of several processes the main one does, whichever failed.
        """
        try:
            yield
        except NonFiniteError:  # earlier checkpoints may be better to continue from
            raise
        except BaseException:
            with suppress(OSError):  # the first error counts
                self.save_last()
            raise

    # ----- End

    def _finish(self) -> None:
        """Write samples, weights, a trajectory, and last done.json."""
        self._tell({"phase": "finishing"})
        ended = dict(iterations=self._trainer.done)
        if best := self._rows[-1].get("exported"):
            ended["exported"] = best
            self._restore_weights(best)
            self._evaluation = None
        # none if the run was killed after its last checkpoint
        after = self._evaluation or self._evaluate()
        shapes = {"images": (None,) * 4, "scores": (None,)}
        read = partial(read_tensors, self.folder / "before.safetensors", shapes)
        before = self.distributed.in_main(read)
        if self.distributed.is_main:
            images = {"before": before["images"], "after": after.images}
            size = after.images.shape[-2], after.images.shape[-1]
            if (references := references_of(after.prompts, size)) is not None:
                images["references"] = references
            write_bytes(self.folder / "samples.safetensors", save(images))
            samples = {
                "references": references is not None,
                "prompts": [prompt.text for prompt in after.prompts],
                "reward_before": before["scores"].tolist(),
                "reward_after": after.image_scores.tolist(),
            }
            write_json(self.folder / "samples.json", samples)
        best = self._best_apart()
        with TemporaryDirectory() as scratch:
            folder = self.folder if self.distributed.is_main else Path(scratch)
            # the main process alone can neither call the network nor gather sharded weights
            if self.distributed.is_main or self.distributed.sharded:
                self._export(folder)
            shutil.rmtree(folder / BEST, ignore_errors=True)  # of an earlier end
            if best:
                last, ended["best"] = self._trainer.done, best
                self._restore_weights(best)
                if self.distributed.is_main or self.distributed.sharded:
                    self._write_weights(folder / BEST)
                self._restore_weights(last)
        if self.distributed.is_main:
            stopped = {"stopped": self._stopped} if self._stopped else {}
            write_json(self.folder / "done.json", {**ended, **stopped})

    def _best_apart(self) -> int:
        """The best iteration that the first observer with one has named, if its checkpoint is kept
        and the run ends with other weights; else 0.
        """
        best = next(iter(best_named(self._rows).values()), 0)
        ends_with = self._rows[-1].get("exported", self._trainer.done)
        exists = self._checkpoints.path(f"{best:06d}").exists
        return best if best not in (0, ends_with) and self.distributed.in_main(exists) else 0

    def _restore_weights(self, iteration: int) -> None:
        """Continue with the weights of the checkpoint of `iteration`."""
        with self.distributed.shared_errors():
            checkpoint = Checkpoint({}, {})
            if self.distributed.is_main:
                checkpoint = self._checkpoints.load(f"{iteration:06d}")
        restore_trainer(self._trainer, checkpoint)

    def _export(self, folder: Path) -> None:
        """Write the averaged weights, and a trajectory sampled with them."""
        with self._trainer.averaged():
            task = self.config.environment.task
            write_trajectory(folder, self._trainer, self._world, task)
        self._write_weights(folder)

    def _write_weights(self, folder: Path) -> None:
        """Write the averaged weights, also in diffusers' format."""
        trainer = self._trainer
        exported = extras(trainer.policy, "save")
        if exported is not None and not self._is_lora:
            with trainer.averaged():
                exported.save(folder / self.config.policy.tuning)
        average = full_tensors(dict(zip(trainer.parameters, trainer.average, strict=True)))
        if average:
            save_weights(folder / "weights.safetensors", average)
        if average and self._is_lora:
            lora = run_lora(self.config, self.folder, average, trainer.done)
            write_bytes(folder / "lora" / LORA_FILE, lora)

    @property
    def _is_lora(self) -> bool:
        """Whether the run trains a LoRA of a model."""
        policy = self.config.policy
        return bool(policy.model) and policy.tuning == "lora"


def _kept(rows: Sequence[Row]) -> set[int]:
    """The iterations whose checkpoints an observer keeps."""
    kept = {row["iteration"] for row in rows if "kept" in row}
    return kept | {*best_named(rows).values()}


def _line(row: Row) -> bytes:
    return (json.dumps(row) + "\n").encode()
