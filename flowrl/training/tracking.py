"""What a run shows while it runs: Accelerate's trackers (TensorBoard, W&B, trackio), and sample strips as PNG files."""

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowrl.errors import ConfigError, require
from flowrl.training.checkpoint import write_bytes
from flowrl.training.config import RunConfig
from flowrl.training.evaluation import Evaluation
from flowrl.training.pictures import over_time, strip, write_picture

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
PROJECT = "flowrl"


def tracker_name(config: RunConfig) -> str:
    """The tracker that `config` asks for: "auto" is TensorBoard for a model where it is installed, else none.

    Raises `ConfigError` where the tracker's package is not installed.
    """
    if config.tracker == "auto":
        return "tensorboard" if config.model and find_spec("tensorboard") else "none"
    if config.tracker != "none":
        package = PACKAGES[config.tracker]
        found = find_spec(package) is not None
        require(found, "tracker", config.tracker, f"a tracker that is installed (pip install {package}), auto or none")
    return config.tracker


def scalars(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a metrics row by name: groups become "group/name", lists "name/0", "name/1", ...; the rest is left out."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            found |= scalars({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = float(value)
    return found


class Journal:
    """Follows the run of `config` in `folder` from iteration `done` on; silent in all processes but the first.

    `row` takes each metrics row as it is written, with the evaluation's pictures where there was one. The tracker gets every
    number, the settings, and a strip of the first held-out samples; a model's run also gets the strips as PNG files in
    samples/, and samples/over-time.png. The tracker starts at the first row, so that a run that cannot start leaves nothing.
    """

    def __init__(self, config: RunConfig, folder: Path, done: int = 0) -> None:
        self.config, self.folder, self.done = config, folder, done
        self.name = tracker_name(config) if _first_process() else "none"
        self.pictures = _first_process() and (bool(config.model) or self.name != "none")
        self._tracker: Any = None

    def row(self, row: Mapping[str, Any], evaluation: Evaluation | None = None) -> None:
        """Show one row of metrics.jsonl; the untrained model's pictures (row 0) are those in before.safetensors."""
        step = int(row["iteration"])
        if self.name != "none":
            self._tracker = self._tracker or self._start()
            self._tracker.log({name: value for name, value in scalars(row).items() if name != "iteration"}, step=step)
        if not self.pictures:
            return
        images = None if evaluation is None else evaluation.images
        if step == 0:
            images = load_file(self.folder / "before.safetensors")["images"]
        if images is not None and images.shape[1] == 3:
            self._show(images, step)
        if evaluation is not None and self.config.model:
            texts = "".join(f"{prompt.text}\n" for prompt in evaluation.prompts)
            write_bytes(self.folder / "samples" / "prompts.txt", texts.encode())  # from left to right

    def _show(self, images: Tensor, step: int) -> None:
        picture = strip(images)
        if self.config.model:
            place = self.folder / "samples"
            write_picture(place / f"iteration-{step:06d}.png", picture)
            everything = over_time(place)
            if everything is not None:
                write_picture(place / "over-time.png", everything)
        if self._tracker is not None:
            self._send(np.asarray(picture), step)

    def _send(self, pixels: np.ndarray, step: int) -> None:
        """The strip, in the form that each tracker takes."""
        if self.name == "tensorboard":
            self._tracker.log_images({"samples": pixels[None]}, step=step, dataformats="NHWC")
        elif self.name == "wandb":
            self._tracker.log_images({"samples": [pixels]}, step=step)
        else:
            self._tracker.log({"samples": importlib.import_module("trackio").Image(pixels)}, step=step)

    def _start(self) -> Any:
        """The tracker, told the settings. On a resumed run it goes on after iteration `done`."""
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # the trackers' own messages need it
        kind = LOGGER_TYPE_TO_CLASS[self.name]
        if self.name == "tensorboard":
            purge = {"purge_step": self.done + 1} if self.done else {}
            tracker = kind("tensorboard", str(self.folder), **purge)
        else:
            tracker = kind(PROJECT, name=self.folder.name)
        try:
            tracker.start()
            settings = self.config.as_dict().items()
            plain = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in settings}
            tracker.store_init_configuration(plain)  # TensorBoard takes no lists
        except Exception as error:
            raise ConfigError(f"tracker: {self.name} cannot start: {error}; --tracker none goes without") from error
        return tracker

    def finish(self) -> None:
        """Close the tracker; call it at the end of a run and where it pauses."""
        if self._tracker is not None:
            self._tracker.finish()
            self._tracker = None


def _first_process() -> bool:
    parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not parallel or torch.distributed.get_rank() == 0
