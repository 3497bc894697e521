"""One training run in a folder: metrics line by line, checkpoints, samples, and a recorded
trajectory.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load, save

from flowrl.core.errors import CheckpointError, ConfigError, part_errors
from flowrl.core.protocols import FlowPolicy, Observer, World, extras
from flowrl.distributed import Distributed, full_tensors
from flowrl.io import disk_errors, folder_lock, new_folder, write_bytes, write_json
from flowrl.parts.plugins import versions
from flowrl.parts.settings import settings_text
from flowrl.parts.trust import check_code, record_code
from flowrl.reading import as_kind, read_json, read_tensors, reading
from flowrl.rewards import evaluation_reward
from flowrl.training import logging as lines
from flowrl.training.build import make_reward, make_world, policy_options, trainer_in
from flowrl.training.checkpoint import Checkpoint, Checkpoints, save_weights, to_resume
from flowrl.training.config import RunConfig, load_config
from flowrl.training.evaluation import Evaluation, evaluate, write_trajectory
from flowrl.training.format import COMMENT, FORMAT
from flowrl.training.heldout import HeldoutMetrics, make_heldout_metrics
from flowrl.training.logging import Journal
from flowrl.training.memory import memory_notices, out_of_memory
from flowrl.training.monitors import Notice, limits_of, notices
from flowrl.training.nonfinite import NonFiniteError
from flowrl.training.observers import Observers
from flowrl.training.results import MetricsRow, has_progress, holds
from flowrl.training.trainer import Trainer
from flowrl.training.trial import reward_trial, try_parts

TOTALS = ("nfe", "reward_calls", "train_nfe", "seconds")
Report = Callable[[dict[str, Any]], None]
"""Called with {"phase", "iteration", "reward", "heldout", "nfe_total"} when one of them changes,
and with {"warning"}, whose "kinds" are those of its lines (`flowrl.training.monitors.KINDS`).
"""


def _heldout(row: dict[str, Any]) -> dict[str, Any]:
    """The held-out reward of a row with an evaluation, for `Report`."""
    return {"heldout": row["evaluation"]["reward"]} if row["evaluation"] else {}


@dataclass
class Run:
    """A run in a folder.

    The folder gets config.json (and .yaml), metrics.jsonl (a line per iteration; line 0 is the
    untrained model), checkpoints/ and, at the end, samples.*, trajectory.*, weights.safetensors
    (the averaged trainable weights; those of a diffusers pipeline also in lora/ or full/, in
    diffusers' format) and done.json. With `save_experience` it also gets experience/
    (`flowrl.training.observers.SaveExperience`). A run that an observer stops ends in the same way;
    done.json and the last row then have the reason ("stopped"). Every process executes the run;
    only the main process writes and reports. If one process is asked to stop, all pause.

    Args:
        config: the settings.
        folder: the run's folder.
        report: called with the state of the run.
        stop: whether the run should pause.
        shared: a folder in which the runs of a comparison store the evaluation of the untrained
            model, which is the same for all.
        distributed: the processes.
        changed_code: continue although the files of the run's own parts have changed since it was
            started.
        observers: observers besides those of the setting `observe`; give them again when the run is
            resumed.
        world: a world, as an object, that replaces that of the settings; to resume such a run it is
            needed again.
        trial: try the user's own parts before a new run, or with `changed_code`
            (`flowrl.training.trial`).
    """

    config: RunConfig
    folder: Path
    report: Report = lambda state: None
    stop: Callable[[], bool] = lambda: False
    shared: Path | None = None
    distributed: Distributed = Distributed()
    changed_code: bool = False
    observers: Sequence[Observer] = ()
    world: World | None = None
    trial: bool = True
    parts_tried: bool = field(default=False, init=False)
    _heldout: HeldoutMetrics | None = field(default=None, init=False, repr=False)
    _stopped: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        if self.world is not None:
            self.config = self.config.replace(world=self.world)

    def execute(self, resume: bool = False, start: str = "") -> bool:
        """Train to the end; with `resume`, from the last checkpoint or from the checkpoint `start`,
        whose successors are then deleted; a run that an observer stopped at `start` then continues.

        Returns True when the run is finished or an observer has stopped it, False when `stop`
        paused it. Raises a part's `FlowrlError`, `CheckpointError` for a damaged checkpoint,
        `DiskError` for a full disk, and `NonFiniteError` for a loss that is not finite (its data
        are then in failure/). If another process executes the run, a `ConfigError` names it.
        """
        self.config = self.config.allowed()
        full = disk_errors(self.folder, self._checkpoints.newest, lambda: to_resume(self.folder))
        with part_errors(), full, out_of_memory(), ExitStack() as stack:
            with self.distributed.shared_errors():
                if self.distributed.is_main:
                    if self.trial and not self.parts_tried and (self.changed_code or not resume):
                        try_parts([self.config], self._warn_of_trial)
                    stack.enter_context(folder_lock(self.folder) if resume else self._new_folder())
            return self._execute(resume, start)

    def _new_folder(self) -> AbstractContextManager[None]:
        """A context: a start that fails before its first iteration leaves no files, and one that
        was killed by then may be repeated.
        """
        if has_progress(self.folder):
            raise ConfigError(
                f"out: {self.folder} already holds a run; choose another folder or resume it"
            )
        return new_folder(
            self.folder,
            "run",
            lambda folder: holds(folder, "algorithm"),
            lambda: has_progress(self.folder),
        )

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder, self.config.logging.keep_checkpoints)

    def _execute(self, resume: bool, start: str) -> bool:
        if resume and not start and (self.folder / "done.json").exists():
            return True
        with self.distributed.shared_errors():
            if resume and self.distributed.is_main:
                check_code(self.folder, self.config.flat(), self.changed_code)
        if resume:
            self.config = self._with_found_batches()
        observers = Observers(self.config, self.folder, self.observers, self.distributed)
        world = make_world(self.config)
        self._heldout = make_heldout_metrics(self.config, world)
        trainer = trainer_in(world, self.config, self.distributed)
        found, self.config, policy = trainer.config != self.config, trainer.config, trainer.policy
        if self.trial and not resume and self.distributed.is_main:
            trainer.collector.inspect = reward_trial(
                self.config, trainer.reward, self._warn_of_trial
            )
            for spec, reward in self._heldout.rewards.items() if self._heldout else ():
                inspect = reward_trial(self.config, reward, self._warn_of_trial, spec)
                if inspect is not None:
                    self._heldout.trials[spec] = inspect
        trainer.on_phase, trainer.recorded = (
            lambda phase: self._tell({"phase": phase}),
            observers.recorded,
        )
        rows = self._restore(trainer, observers, start) if resume else []
        self._stopped = rows[-1].get("stopped", "") if rows and not start else ""
        journal = Journal(self.config, self.folder, trainer.done)
        if self.distributed.is_main and (found or not rows):
            self._write_settings()
        if not rows:
            rows = [self._first_row(policy, world)]
            journal.row(rows[0])
        if (embedding := extras(policy, "warm")) is not None:
            self._tell({"phase": "prompts"})
            embedding.warm(
                trainer.prompts.upcoming(
                    (self.config.iterations - trainer.done) * self.config.rollout.groups
                )
            )
        latest = self._train(trainer, world, rows, journal, observers)
        if self._ended(trainer):
            self._finish(trainer, world, latest or self._evaluate(trainer, world))
        journal.finish()
        return self._ended(trainer)

    def _ended(self, trainer: Trainer) -> bool:
        return trainer.done == self.config.iterations or bool(self._stopped)

    def _train(
        self,
        trainer: Trainer,
        world: World,
        rows: list[dict[str, Any]],
        journal: Journal,
        observers: Observers,
    ) -> Evaluation | None:
        """Iterations to the end or to a pause; returns the evaluation of the last iteration if it
        had one.
        """
        latest: Evaluation | None = None
        limits = limits_of(trainer)
        found = (
            memory_notices(trainer)
            if trainer.policy.device.type == "cuda" and trainer.done < self.config.iterations
            else []
        )
        self._warn(found)
        while not self._ended(trainer):
            row, latest, observed = self._iterate(trainer, world, rows, observers)
            rows.append(row)
            new = notices(rows, limits) + observed
            if found or new:
                row["warnings"] = [notice.as_dict() for notice in (*found, *new)]
            found = []
            self._append(row)
            journal.row(row, latest)
            self._warn(new)
            self._tell(
                {
                    "iteration": trainer.done,
                    "reward": row["reward_mean"],
                    "nfe_total": row["nfe_total"],
                    **_heldout(row),
                }
            )
            paused = self.distributed.any(not self._ended(trainer) and self.stop())
            due = trainer.done % self.config.logging.checkpoint_every == 0 or "kept" in row
            if paused or due or self._ended(trainer):
                self._save(trainer.state(copied=False), trainer, rows, observers)
            if paused:
                return latest
        return latest

    def _iterate(
        self, trainer: Trainer, world: World, rows: list[dict[str, Any]], observers: Observers
    ) -> tuple[dict[str, Any], Evaluation | None, list[Notice]]:
        """One iteration: its row, its evaluation if it has one, and the observers' warnings. Its
        record ends here.
        """
        before = trainer.small_state()
        try:
            iteration = trainer.iteration()
        except NonFiniteError as error:
            raise error.saved(self.folder / "failure") from error
        except (Exception, SystemExit):
            self._save_before(trainer, before, rows, observers)
            raise
        row: dict[str, Any] = dict(iteration)
        for name in TOTALS:
            row[f"{name}_total"] = rows[-1][f"{name}_total"] + row[name]
        last = trainer.done == self.config.iterations
        due = trainer.done % self.config.evaluation.eval_every == 0 or last
        latest = self._evaluate(trainer, world) if due else None
        row["evaluation"] = latest.row(self.config.environment.reward_form) if latest else None
        decided = observers.observe(trainer, iteration, row, rows)
        row |= decided.metrics | ({"kept": True} if decided.keep else {})
        if decided.stop and not last:
            self._stopped = row["stopped"] = decided.stop
            latest = latest or self._evaluate(trainer, world)
            row["evaluation"] = latest.row(self.config.environment.reward_form)
            text = (
                f"stopped after iteration {trainer.done} of {self.config.iterations} by"
                f" {decided.stop}"
            )
            decided.warnings.append(Notice("stopped", text))
        return row, latest, decided.warnings

    def _save(
        self, state: Checkpoint, trainer: Trainer, rows: list[dict[str, Any]], observers: Observers
    ) -> None:
        """Write `state`, the rows and the observers' state as the checkpoint of this iteration."""
        if self.distributed.is_main:
            whole = Checkpoint(
                {**state.tensors, **observers.state()}, {**state.values, "rows": rows}
            )
            self._checkpoints.save(
                whole, trainer.done, {row["iteration"] for row in rows if "kept" in row}
            )

    def _save_before(
        self, trainer: Trainer, before: Checkpoint, rows: list[dict[str, Any]], observers: Observers
    ) -> None:
        """After a failure before the first update of an iteration, save a checkpoint of its
        beginning, so that no result is lost.
        """
        if trainer.updated or trainer.done == 0 or self.distributed.world_size > 1:
            return
        state = trainer.state(copied=False)
        whole = Checkpoint({**state.tensors, **before.tensors}, {**state.values, **before.values})
        self._save(whole, trainer, rows, observers)

    def _warn(self, found: list[Notice]) -> None:
        if found:
            kinds = [notice.kind for notice in found]
            self._tell({"warning": "\n".join(notice.text for notice in found), "kinds": kinds})

    def _warn_of_trial(self, text: str) -> None:
        self._tell({"warning": text, "kinds": ["trial"]})

    def _write_settings(self) -> None:
        """code.json, config.json, and config.yaml for ``flowrl train --config``."""
        record_code(self.folder, self.config.flat())
        values = {"format": FORMAT, **self.config.as_dict()}
        write_json(self.folder / "config.json", values)
        packages = ", ".join(f"{name} {found}" for name, found in versions().items())
        comment = f"{COMMENT}: flowrl train --config config.yaml --out NEW_FOLDER ({packages})"
        write_bytes(self.folder / "config.yaml", settings_text(values, comment).encode())

    def _with_found_batches(self) -> RunConfig:
        """The run with the auto sizes from its config.json, so that a resumed run uses the same
        sizes.
        """
        found: dict[str, Any] = {}
        with self.distributed.shared_errors():
            if self.distributed.is_main and (self.folder / "config.json").exists():
                recorded = load_config(self.folder / "config.json")
                found = {
                    name: value
                    for name, value in recorded.flat().items()
                    if self.config.flat()[name] == "auto"
                }
                if "micro_batch" in found:
                    found["gradient_checkpointing"] = recorded.policy.gradient_checkpointing
        return self.config.replace(**self.distributed.gather(found)[0])

    def _first_row(self, policy: FlowPolicy, world: World) -> dict[str, Any]:
        self._tell({"phase": "evaluation"})
        images, scores = self._untrained(policy, world)
        row: dict[str, Any] = {"iteration": 0, "evaluation": scores}
        row |= {f"{name}_total": 0 for name in TOTALS}
        if self.distributed.is_main:
            write_bytes(self.folder / "before.safetensors", images)
            write_bytes(self.folder / "metrics.jsonl", b"")
        self._append(row)
        self._tell(_heldout(row))
        return row

    def _tell(self, state: dict[str, Any]) -> None:
        if self.distributed.is_main:
            self.report(state)

    def _untrained(self, policy: FlowPolicy, world: World) -> tuple[bytes, dict[str, float]]:
        """First samples (safetensors) and scores of the model before training, computed once per
        evaluation setting.
        """
        c = self.config
        values = c.as_dict()
        settings = [
            values["environment"],
            values["policy"],
            values["evaluation"],
            c.seed if c.environment.reward_noise else 0,
        ]
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
        kept = None if self.shared is None else self.shared / f"untrained-{key}.safetensors"
        if kept is not None and kept.exists() and kept.with_suffix(".json").exists():
            return kept.read_bytes(), read_json(kept.with_suffix(".json"), dict[str, Any])
        before = self._score(policy, world)
        images = save({"images": before.images, "scores": before.image_scores})
        if kept is not None and not before.incomplete:
            write_bytes(kept, images)
            write_json(kept.with_suffix(".json"), before.row(c.environment.reward_form))
        return images, before.row(c.environment.reward_form)

    def _append(self, row: dict[str, Any]) -> None:
        if self.distributed.is_main:
            lines.append(self.folder / "metrics.jsonl", row)

    def _restore(self, trainer: Trainer, observers: Observers, start: str) -> list[dict[str, Any]]:
        """Rows up to the last checkpoint (or `start`); later rows will be computed again. Without a
        checkpoint the run starts anew.
        """
        kept = self._checkpoints
        checkpoint: Checkpoint | None = None
        with self.distributed.shared_errors():
            if self.distributed.is_main and (kept.names() or start):
                checkpoint = kept.load(start)
                with reading(kept.path(start or kept.names()[-1]), CheckpointError):
                    as_kind(checkpoint.values.get("rows"), list[MetricsRow])
        if self.distributed.any(checkpoint is not None):
            with reading(kept.path(start or (kept.names() or [""])[-1]), CheckpointError):
                trainer.restore(checkpoint or Checkpoint({}, {}))
        rows: list[dict[str, Any]] = []
        with self.distributed.shared_errors():
            if self.distributed.is_main:
                observers.restore(checkpoint.tensors if checkpoint else {}, trainer.done)
                rows = self._rewind(checkpoint, start)
        return self.distributed.gather(rows)[0]

    def _rewind(self, checkpoint: Checkpoint | None, start: str) -> list[dict[str, Any]]:
        """Restore the folder to the checkpoint's iteration; returns its rows."""
        for half in self.folder.glob("*.tmp"):
            half.unlink()
        if checkpoint is None:
            return []
        if start:
            (self.folder / "done.json").unlink(missing_ok=True)
            self._checkpoints.forget_after(start)
        note = lines.restore(self.folder / "metrics.jsonl", checkpoint.values["rows"])
        if note:
            self._tell({"warning": note})
        return checkpoint.values["rows"]

    def _score(self, policy: FlowPolicy, world: World) -> Evaluation:
        c, own = self.config, None
        if c.environment.reward and not c.policy.model:  # the only reward of a model's world
            own = evaluation_reward(make_reward(c.replace(reward_noise=0.0, reward_bias=0.0)))
        return evaluate(
            policy,
            world,
            c.environment.task,
            c.environment.reward_form,
            c.evaluation.eval_samples,
            c.evaluation.eval_steps,
            c.batches.max_batch,
            reward=own,
            solver=c.evaluation.eval_solver,
            heldout_metrics=self._heldout,
            distributed=self.distributed,
        )

    def _evaluate(self, trainer: Trainer, world: World) -> Evaluation:
        self._tell({"phase": "evaluation"})
        with trainer.averaged():
            return self._score(trainer.policy, world)

    def _finish(self, trainer: Trainer, world: World, after: Evaluation) -> None:
        before = self._before(world)
        if self.distributed.is_main:
            write_bytes(
                self.folder / "samples.safetensors",
                save({"before": before["images"], "after": after.images}),
            )
            samples = {
                "prompts": [prompt.text for prompt in after.prompts],
                "reward_before": before["scores"].tolist(),
                "reward_after": after.image_scores.tolist(),
            }
            write_json(self.folder / "samples.json", samples)
            self._export(self.folder, trainer, world)
            stopped = {"stopped": self._stopped} if self._stopped else {}
            write_json(self.folder / "done.json", {"iterations": trainer.done, **stopped})
        # the main process alone can neither call the network nor gather its weights
        elif self.distributed.sharded:
            with TemporaryDirectory() as scratch:
                self._export(Path(scratch), trainer, world)

    def _before(self, world: World) -> dict[str, torch.Tensor]:
        """The untrained model's samples and scores; computed again if the file is missing or
        damaged.
        """
        path, found = self.folder / "before.safetensors", None
        if self.distributed.is_main:
            with suppress(CheckpointError):
                found = read_tensors(path, {"images": (None,) * 4, "scores": (None,)})
        found = self.distributed.gather(found)[0]
        if found is None:
            images, _ = self._untrained(world.policy(policy_options(self.config)), world)
            if self.distributed.is_main:
                write_bytes(path, images)
            found = load(images)
        return found

    def _export(self, folder: Path, trainer: Trainer, world: World) -> None:
        """Write the averaged weights, and a trajectory sampled with them."""
        with trainer.averaged():
            write_trajectory(folder, trainer, world)
            if (exported := extras(trainer.policy, "save")) is not None:
                exported.save(folder / self.config.policy.tuning)
        average = full_tensors(dict(zip(trainer.names, trainer.average, strict=True)))
        if average:
            save_weights(folder / "weights.safetensors", average)
