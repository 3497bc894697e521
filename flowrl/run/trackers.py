"""Logs a run to Accelerate's trackers: TensorBoard, W&B and trackio."""

import importlib
import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.errors import ConfigError, require
from flowrl.run.build import method_parts
from flowrl.run.config import RunConfig
from flowrl.run.evaluation import Evaluation
from flowrl.run.images import beside_references
from flowrl.run.io import write_json
from flowrl.run.reading import read_json
from flowrl.run.strips import has_images, strip
from flowrl.run.table import scalars

TRACKER_FILE = "tracker.json"
"""The id of the run at W&B or trackio; after a resume with --from also the one before."""


def chosen_tracker(config: RunConfig) -> str:
    """The run's tracker; None is TensorBoard for a model if it is installed, else none.

    Raises `ConfigError` if the tracker's package is not installed.
    """
    name = config.logging.tracker
    if name is None:
        return "tensorboard" if config.policy.model and find_spec("tensorboard") else "none"
    installed = name == "none" or find_spec(name) is not None  # also the name of its package
    require(installed, "tracker", name, f"auto, none or an installed tracker (pip install {name})")
    return name


class Tracker:
    """Logs a run to its tracker.

    The tracker gets every number, the settings, and the first held-out samples: W&B each with its
    prompt and reward, the others as a strip. It starts at the first row, so a run that cannot start
    leaves no files.

    Args:
        config: the run, whose tracker is not "none".
        folder: its folder.
        rows: its rows so far, which a record at W&B or trackio gets if it does not have them.
    """

    def __init__(
        self, config: RunConfig, folder: Path, rows: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.config, self.folder, self.rows = config, folder, tuple(rows)
        self.name = chosen_tracker(config)
        self._tracker: Any = None
        self._is_new = False

    def row(self, row: Mapping[str, Any], evaluation: Evaluation | None) -> None:
        """Log one row of metrics.jsonl, with the images of its evaluation."""
        self._tracker = self._tracker or self._start()
        self._log(row)
        step = int(row["iteration"])
        if evaluation is None or not has_images(evaluation):
            return
        if self.name == "wandb":
            self._tracker.log({"samples": _captioned(evaluation)}, step=step)
            return
        pixels = np.asarray(strip(evaluation.images))
        if self.name == "tensorboard":
            self._tracker.log_images({"samples": pixels[None]}, step=step, dataformats="NHWC")
        else:  # Accelerate's tracker logs no images to trackio
            image = importlib.import_module("trackio").Image(pixels)
            self._tracker.log({"samples": image}, step=step)

    def _log(self, row: Mapping[str, Any]) -> None:
        numbers = scalars({name: value for name, value in row.items() if name != "changed"})
        self._tracker.log(numbers, step=int(numbers.pop("iteration")))

    def _start(self) -> Any:
        """The tracker, initialised with the settings. On a resumed run it continues after the rows
        so far.
        """
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # the trackers' own messages need it
        kind = LOGGER_TYPE_TO_CLASS[self.name]
        if self.name == "tensorboard":
            purge = {"purge_step": self.rows[-1]["iteration"] + 1} if self.rows else {}
            tracker = kind("tensorboard", str(self.folder), **purge)
        else:
            tracker = kind(self.config.logging.tracker_project, **self._identity())
        settings = self.config.typed() | method_parts(self.config)
        # TensorBoard takes no lists
        plain = {
            name: ", ".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in settings.items()
        }
        try:
            tracker.start()
            tracker.store_init_configuration(plain)
        except Exception as error:
            raise ConfigError(
                f"tracker: {self.name} cannot start: {error}; to train without one, use"
                " --tracker none"
            ) from error
        self._tracker = tracker
        for row in self.rows[self._recorded() :]:
            self._log(row)
        return tracker

    def _recorded(self) -> int:
        """How many of the rows so far the record has. Offline, W&B does not know, and a killed run
        may have lost the last ones; what a record has twice, W&B drops.
        """
        if self.name == "wandb":
            return self._tracker.tracker.step
        return 0 if self._is_new else len(self.rows)

    def _identity(self) -> dict[str, Any]:
        """Options with which a resumed run continues its record at W&B or trackio, by the id in the
        run's folder; W&B's files are in this folder, too.
        """
        path, settings = self.folder / TRACKER_FILE, self.config.logging
        known = read_json(path, dict[str, str]) if path.exists() else {}
        self._is_new = "id" not in known
        if self._is_new:
            known = {"id": secrets.token_hex(4)} | known
            write_json(path, known)
        run, name = known["id"], settings.tracker_name or self.folder.resolve().name
        if self.name == "trackio":  # it has no other id
            return {"name": f"{name}-{run}", "resume": "allow"}
        given = {"name": name, "id": run, "dir": str(self.folder), "resume": "allow"}
        before = known.get("before")
        optional = {
            "entity": settings.tracker_entity,
            "tags": [*settings.tracker_tags],
            "notes": before and f"continues run {before}, from an earlier checkpoint",
        }
        return given | {name: value for name, value in optional.items() if value}

    def finish(self) -> None:
        """Close the tracker, at the end of a run or of a part of it."""
        if self._tracker is not None:
            self._tracker.finish()
            self._tracker = None


def _captioned(evaluation: Evaluation) -> list[Any]:
    """The images of an evaluation for W&B, with prompts and rewards."""
    image = importlib.import_module("wandb").Image
    shown = beside_references(evaluation.images, evaluation.prompts)
    return [
        image(strip(one[None]), caption=f"{prompt.text} (reward {reward:.4g})")
        for one, prompt, reward in zip(
            shown, evaluation.prompts, evaluation.image_scores.tolist(), strict=True
        )
    ]


def forget_record(folder: Path) -> None:
    """Begin a new record of the run in `folder` at W&B or trackio, which names the one before: a
    run that goes back to an earlier checkpoint repeats steps, which W&B drops if it has them.
    """
    path = folder / TRACKER_FILE
    if path.exists():
        write_json(path, {"before": read_json(path, dict[str, str]).get("id", "")})
