"""The output of a run in progress: metrics.jsonl, Accelerate's trackers (TensorBoard, W&B,
trackio), and sample strips as PNG files.
"""

import importlib
import io
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from torch.nn import functional

from flowrl.core.errors import ConfigError, require
from flowrl.run.build import method_parts
from flowrl.run.config import RunConfig
from flowrl.run.evaluation import Evaluation
from flowrl.run.io import write_bytes, write_json
from flowrl.run.reading import read_json

SIDE = 256
"""Largest side of an image in a strip, in pixels."""
GAP = 4
"""White pixels between images, and between strips."""
MARGIN = 90
"""Pixels on the left of strips for their labels."""
MOST_ROWS = 16
"""Largest number of strips in samples/over-time.png."""
TRACKER_FILE = "tracker.json"
"""The id of the run at W&B or trackio."""


def tracker_name(config: RunConfig) -> str:
    """The run's tracker; None is TensorBoard for a model if it is installed, else none.

    Raises `ConfigError` if the tracker's package is not installed.
    """
    name = config.logging.tracker
    if name is None:
        return "tensorboard" if config.policy.model and find_spec("tensorboard") else "none"
    installed = name == "none" or find_spec(name) is not None  # also the name of its package
    require(installed, "tracker", name, f"auto, none or an installed tracker (pip install {name})")
    return name


def scalars(row: Mapping[str, Any] | list[Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a metrics row by name, without all other entries: groups become "group/name",
    lists "name/0", "name/1", ...
    """
    numbers: dict[str, float] = {}
    for name, value in enumerate(row) if isinstance(row, list) else row.items():
        if isinstance(value, Mapping | list):
            numbers |= scalars(value, f"{prefix}{name}/")
        elif type(value) in (int, float):
            numbers[f"{prefix}{name}"] = float(value)
    return numbers


class Journal:
    """Logs a run to its tracker and as images.

    The tracker gets every number, the settings, and a strip of the first held-out samples. A
    model's run also writes the strips as PNG files in samples/, and samples/over-time.png. The
    tracker starts at the first row, so a run that cannot start leaves no files.

    Args:
        config: the run.
        folder: its folder.
        done: the iteration from which the run continues.
        active: whether this process logs.
    """

    def __init__(self, config: RunConfig, folder: Path, done: int, active: bool) -> None:
        self.config, self.folder, self.done = config, folder, done
        self.name = tracker_name(config) if active else "none"
        self.writes_files = active and bool(config.policy.model)
        self._tracker: Any = None

    def row(self, row: Mapping[str, Any], evaluation: Evaluation | None = None) -> None:
        """Log one row of metrics.jsonl, with the images of its evaluation."""
        step = int(row["iteration"])
        if self.name != "none":
            self._tracker = self._tracker or self._start()
            numbers = scalars({name: value for name, value in row.items() if name != "changed"})
            del numbers["iteration"]
            self._tracker.log(numbers, step=step)
        # points of the mixture world are no images
        if evaluation is None or evaluation.images.shape[1] != 3:
            return
        sheet, samples = strip(evaluation.images), self.folder / "samples"
        if self.writes_files:
            write_image(samples / f"iteration-{step:06d}.png", sheet)
            write_image(samples / "over-time.png", over_time(samples))
            texts = "".join(f"{prompt.text}\n" for prompt in evaluation.prompts)
            write_bytes(samples / "prompts.txt", texts.encode())  # from left to right
        pixels = np.asarray(sheet)
        if self.name in ("tensorboard", "wandb"):
            layout = {"dataformats": "NHWC"} if self.name == "tensorboard" else {}
            self._tracker.log_images({"samples": pixels[None]}, step=step, **layout)
        elif self.name == "trackio":  # Accelerate's tracker logs no images
            image = importlib.import_module("trackio").Image(pixels)
            self._tracker.log({"samples": image}, step=step)

    def _start(self) -> Any:
        """The tracker, initialised with the settings. On a resumed run it continues after iteration
        `done`.
        """
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # the trackers' own messages need it
        kind = LOGGER_TYPE_TO_CLASS[self.name]
        if self.name == "tensorboard":
            purge = {"purge_step": self.done + 1} if self.done else {}
            tracker = kind("tensorboard", str(self.folder), **purge)
        else:
            tracker = kind("flowrl", **self._identity())
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
        return tracker

    def _identity(self) -> dict[str, str]:
        """Options with which a resumed run continues its record at W&B or trackio, by the id in the
        run's folder; W&B's files are in this folder, too.
        """
        path, name = self.folder / TRACKER_FILE, self.folder.resolve().name
        if not path.exists():
            write_json(path, {"id": secrets.token_hex(4)})
        run = read_json(path, dict[str, str])["id"]
        if self.name == "wandb":
            return {"name": name, "id": run, "dir": str(self.folder), "resume": "allow"}
        return {"name": f"{name}-{run}", "resume": "allow"}  # trackio has no other id

    def finish(self) -> None:
        """Close the tracker, at the end of a run or of a part of it."""
        if self._tracker is not None:
            self._tracker.finish()
            self._tracker = None


def strip(images: Tensor) -> Image.Image:
    """Images [sample, 3, height, width] in [0, 1] side by side; small ones are enlarged by an
    integer factor, large ones reduced to `SIDE`.
    """
    longest = max(images.shape[2:])
    scale = SIDE // longest or SIDE / longest
    gap = max(1, round(GAP / scale))
    padded = functional.pad(images.float().cpu().clamp(0, 1), (0, gap), value=1.0)
    sheet = rearrange(padded, "sample c h w -> h (sample w) c")[:, :-gap]
    picture = Image.fromarray((sheet * 255).round().to(torch.uint8).numpy())
    method = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BICUBIC
    return ImageOps.scale(picture, scale, method)


def write_image(path: Path, image: Image.Image) -> None:
    """Write a PNG atomically."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    write_bytes(path, buffer.getvalue())


def over_time(folder: Path) -> Image.Image:
    """The strips ``iteration-NUMBER.png`` in `folder` at half size, one below the other, with their
    iterations on the left; at most `MOST_ROWS`, including the first and the last.
    """
    files, rows = sorted(folder.glob("iteration-*.png")), []
    chosen = np.linspace(0, len(files) - 1, min(len(files), MOST_ROWS)).round().astype(int)
    for path in (files[i] for i in chosen):
        picture = ImageOps.scale(Image.open(path), 0.5)
        row = ImageOps.expand(picture, (MARGIN, 0, 0, GAP), "white")
        label, place = f"it. {int(path.stem.partition('-')[2])}", (6, picture.height // 2)
        ImageDraw.Draw(row).text(place, label, fill="black", anchor="lm", font_size=15)
        rows.append(np.asarray(row))
    return Image.fromarray(np.concatenate(rows)[:-GAP])
