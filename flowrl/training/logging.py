"""The output of a run in progress: Accelerate's trackers (TensorBoard, W&B, trackio), and sample
strips as PNG files.
"""

import importlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from torch.nn import functional

from flowrl.core.errors import ConfigError, require
from flowrl.io import write_bytes
from flowrl.reading import read_tensors
from flowrl.training.build import method_parts
from flowrl.training.config import RunConfig
from flowrl.training.evaluation import Evaluation

PROJECT = "flowrl"


def tracker_name(config: RunConfig) -> str:
    """The run's tracker; "auto" is TensorBoard for a model if it is installed, else none.

    Raises `ConfigError` if the tracker's package is not installed.
    """
    if config.logging.tracker == "auto":
        return "tensorboard" if config.policy.model and find_spec("tensorboard") else "none"
    if config.logging.tracker != "none":
        # which is also its package's
        found, name = find_spec(config.logging.tracker) is not None, config.logging.tracker
        require(
            found,
            "tracker",
            name,
            f"a tracker that is installed (pip install {name}), auto or none",
        )
    return config.logging.tracker


def scalars(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a metrics row by name: groups become "group/name", lists "name/0", "name/1",
    ...

    Args:
        row: the row.
        prefix: prefix of the names.

    Returns:
        Numbers by name, without all other entries.
    """
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
    """Logs a run to its tracker and as images; inactive in all processes but the first.

    The tracker gets every number, the settings, and a strip of the first held-out samples. A
    model's run also writes the strips as PNG files in samples/, and samples/over-time.png. The
    tracker starts at the first row, so a run that cannot start leaves no files.

    Args:
        config: the run.
        folder: its folder.
        done: the iteration from which the run continues.
    """

    def __init__(self, config: RunConfig, folder: Path, done: int = 0) -> None:
        self.config, self.folder, self.done = config, folder, done
        self.name = tracker_name(config) if _first_process() else "none"
        self.keeps_images = _first_process() and (bool(config.policy.model) or self.name != "none")
        self._tracker: Any = None

    def row(self, row: Mapping[str, Any], evaluation: Evaluation | None = None) -> None:
        """Log one row of metrics.jsonl, with the images of its evaluation; the untrained model's
        (row 0) are those in before.safetensors.
        """
        step = int(row["iteration"])
        if self.name != "none":
            self._tracker = self._tracker or self._start()
            self._tracker.log(
                {name: value for name, value in scalars(row).items() if name != "iteration"},
                step=step,
            )
        if not self.keeps_images:
            return
        images = None if evaluation is None else evaluation.images
        if step == 0:
            images = read_tensors(self.folder / "before.safetensors", {"images": (None,) * 4})[
                "images"
            ]
        if images is not None and images.shape[1] == 3:
            self._show(images, step)
        if evaluation is not None and self.config.policy.model:
            texts = "".join(f"{prompt.text}\n" for prompt in evaluation.prompts)
            # from left to right
            write_bytes(self.folder / "samples" / "prompts.txt", texts.encode())

    def _show(self, images: Tensor, step: int) -> None:
        sheet = strip(images)
        if self.config.policy.model:
            place = self.folder / "samples"
            write_image(place / f"iteration-{step:06d}.png", sheet)
            everything = over_time(place)
            if everything is not None:
                write_image(place / "over-time.png", everything)
        if self._tracker is not None:
            self._send(np.asarray(sheet), step)

    def _send(self, pixels: np.ndarray, step: int) -> None:
        """Send the strip in the format of each tracker."""
        if self.name == "tensorboard":
            self._tracker.log_images({"samples": pixels[None]}, step=step, dataformats="NHWC")
        elif self.name == "wandb":
            self._tracker.log_images({"samples": [pixels]}, step=step)
        else:
            self._tracker.log(
                {"samples": importlib.import_module("trackio").Image(pixels)}, step=step
            )

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
            tracker = kind(PROJECT, name=self.folder.name)
        try:
            tracker.start()
            settings = self.config.flat() | method_parts(self.config)
            plain = {
                name: ", ".join(map(str, value)) if isinstance(value, tuple) else value
                for name, value in settings.items()
            }
            tracker.store_init_configuration(plain)  # TensorBoard takes no lists
        except Exception as error:
            raise ConfigError(
                f"tracker: {self.name} cannot start: {error}; --tracker none switches it off"
            ) from error
        return tracker

    def finish(self) -> None:
        """Close the tracker, at the end of a run or of a part of it."""
        if self._tracker is not None:
            self._tracker.finish()
            self._tracker = None


def _first_process() -> bool:
    parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not parallel or torch.distributed.get_rank() == 0


Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """Append a row to metrics.jsonl.

    Args:
        path: the file.
        row: the row.
    """
    with open(path, "a") as file:
        file.write(_line(row))


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def restore(path: Path, recorded: Sequence[Row]) -> str:
    """Rewrite a metrics file so that it contains exactly the rows that a checkpoint recorded.

    A crash leaves a file that ends early or within a line, which is completed without a message. A
    file with other content is kept as metrics.damaged.jsonl.

    Args:
        path: the file.
        recorded: the checkpoint's rows.

    Returns:
        A warning about other content; "" otherwise.
    """
    note = _difference(path, path.read_text(errors="replace") if path.exists() else "", recorded)
    if note:
        os.replace(path, path.with_name("metrics.damaged.jsonl"))
    write_bytes(path, "".join(map(_line, recorded)).encode())
    return note


def _difference(path: Path, text: str, recorded: Sequence[Row]) -> str:
    lines = text.splitlines(keepends=True)
    for number, (line, row) in enumerate(zip(lines, recorded, strict=False), start=1):
        if line != _line(row) and not (number == len(lines) and _line(row).startswith(line)):
            return (
                f"{path}: line {number} is not what the checkpoint recorded. Lines 1 to"
                f" {len(recorded)} were written again from the checkpoint; the other file is kept"
                " as metrics.damaged.jsonl"
            )
    return ""


SIDE = 256
"""Largest side of an image in a strip, in pixels."""
GAP = 4
"""White pixels between images, and between strips."""
MARGIN = 90
"""Pixels on the left of strips for their labels."""
MOST_ROWS = 16
"""Largest number of strips in samples/over-time.png."""


def strip(images: Tensor, side: int = SIDE) -> Image.Image:
    """Images side by side.

    Small images are enlarged by an integer factor, large ones reduced by antialiased bicubic
    interpolation.

    Args:
        images: images [sample, 3, height, width] in [0, 1].
        side: largest width and height of an image, in pixels.

    Returns:
        The strip.
    """
    images = images.float().cpu().clamp(0, 1)
    height, width = images.shape[2:]
    longest = max(height, width)
    if longest <= side:
        images = functional.interpolate(images, scale_factor=side // longest)
    else:
        size = [max(1, round(edge * side / longest)) for edge in (height, width)]
        images = functional.interpolate(images, size, mode="bicubic", antialias=True).clamp(0, 1)
    sheet = functional.pad(images, (0, GAP), value=1.0).permute(2, 0, 3, 1).flatten(1, 2)[:, :-GAP]
    return Image.fromarray((sheet * 255).round().to(torch.uint8).numpy())


def write_image(path: Path, image: Image.Image) -> None:
    """Write a PNG atomically.

    Args:
        path: the file.
        image: the image.
    """
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    write_bytes(path, buffer.getvalue())


def over_time(folder: Path) -> Image.Image | None:
    """The strips ``iteration-NUMBER.png`` in `folder` at half size, one below the other, with their
    iterations on the left.

    At most `MOST_ROWS`, including the first and the last; None if there are none.
    """
    files = sorted(folder.glob("iteration-*.png"))
    if not files:
        return None
    chosen = np.linspace(0, len(files) - 1, min(len(files), MOST_ROWS)).round().astype(int)
    rows = {
        int(files[i].stem.partition("-")[2]): ImageOps.scale(Image.open(files[i]), 0.5)
        for i in chosen
    }
    width, height = (
        max(row.width for row in rows.values()),
        sum(row.height + GAP for row in rows.values()) - GAP,
    )
    sheet = Image.new("RGB", (MARGIN + width, height), "white")
    pen, font, top = ImageDraw.Draw(sheet), ImageFont.load_default(size=15), 0
    for iteration, row in rows.items():
        pen.text(
            (6, top + row.height // 2), f"it. {iteration}", fill="black", font=font, anchor="lm"
        )
        sheet.paste(row, (MARGIN, top))
        top += row.height + GAP
    return sheet
