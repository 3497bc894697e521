"""What a run shows while it runs: Accelerate's trackers (TensorBoard, W&B, trackio), and sample strips as PNG files."""

import importlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file
from torch import Tensor

from flowrl.errors import ConfigError, require
from flowrl.io import write_bytes
from flowrl.training.config import RunConfig
from flowrl.training.evaluation import Evaluation

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
PROJECT = "flowrl"


def tracker_name(config: RunConfig) -> str:
    """The tracker that `config` asks for: "auto" is TensorBoard for a model where it is installed, else none.

    Raises `ConfigError` where the tracker's package is not installed.
    """
    if config.logging.tracker == "auto":
        return "tensorboard" if config.policy.model and find_spec("tensorboard") else "none"
    if config.logging.tracker != "none":
        package = PACKAGES[config.logging.tracker]
        found = find_spec(package) is not None
        require(found, "tracker", config.logging.tracker, f"a tracker that is installed (pip install {package}), auto or none")
    return config.logging.tracker


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
        self.pictures = _first_process() and (bool(config.policy.model) or self.name != "none")
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
        if evaluation is not None and self.config.policy.model:
            texts = "".join(f"{prompt.text}\n" for prompt in evaluation.prompts)
            write_bytes(self.folder / "samples" / "prompts.txt", texts.encode())  # from left to right

    def _show(self, images: Tensor, step: int) -> None:
        picture = strip(images)
        if self.config.policy.model:
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
            settings = self.config.flat().items()
            plain = {name: ", ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in settings}
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


Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """One line more."""
    with open(path, "a") as file:
        file.write(_line(row))


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


@dataclass(frozen=True)
class Restored:
    """The rows up to a checkpoint, and what was wrong with the file ("" where nothing was)."""

    rows: list[Row]
    note: str


def restore(path: Path, recorded: Sequence[Row]) -> Restored:
    """The rows that a checkpoint recorded, and a file that holds them and nothing else: later lines will be made again.

    A file that ends early, or in half a line, is what a crash leaves and is completed in silence; a file that says something else
    is kept as metrics.damaged.jsonl.
    """
    note = _difference(path, path.read_text(errors="replace") if path.exists() else "", recorded)
    if note:
        os.replace(path, path.with_name("metrics.damaged.jsonl"))
    write_bytes(path, "".join(map(_line, recorded)).encode())
    return Restored(list(recorded), note)


def _difference(path: Path, text: str, recorded: Sequence[Row]) -> str:
    lines = text.splitlines(keepends=True)
    for number, (line, row) in enumerate(zip(lines, recorded, strict=False), start=1):
        if line != _line(row) and not (number == len(lines) and _line(row).startswith(line)):
            return (
                f"{path}: line {number} is not what the checkpoint recorded. Lines 1 to {len(recorded)} were written again from "
                "the checkpoint; the other file is kept as metrics.damaged.jsonl"
            )
    return ""


SIDE = 256
"""Largest side of a picture in a strip, in pixels."""
MOST_ROWS = 16
"""Rows of the picture over time."""


def tiles(images: Tensor, side: int = SIDE) -> list[Image.Image]:
    """Pictures [sample, 3, height, width] in [0, 1], at most `side` pixels wide and high; small ones are enlarged."""
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().contiguous().numpy()
    found = []
    for array in pixels:
        picture = Image.fromarray(array)
        longest = max(picture.size)
        if longest <= side:
            factor = side // longest
            picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
        else:
            shape = (max(1, round(edge * side / longest)) for edge in picture.size)
            picture = picture.resize((next(shape), next(shape)), Image.Resampling.LANCZOS)
        found.append(picture)
    return found


def strip(images: Tensor, side: int = SIDE) -> Image.Image:
    """Pictures beside each other, 4 pixels of white between them."""
    parts = tiles(images, side)
    sheet = Image.new("RGB", (sum(p.width + 4 for p in parts) - 4, max(p.height for p in parts)), "white")
    left = 0
    for part in parts:
        sheet.paste(part, (left, 0))
        left += part.width + 4
    return sheet


def stacked(rows: Sequence[Image.Image], labels: Sequence[str], margin: int = 90) -> Image.Image:
    """Strips below each other, `labels` on their left."""
    width = margin + max(row.width for row in rows)
    sheet = Image.new("RGB", (width, sum(row.height + 4 for row in rows) - 4), "white")
    pen, font, top = ImageDraw.Draw(sheet), ImageFont.load_default(size=15), 0
    for row, label in zip(rows, labels, strict=True):
        pen.text((6, top + row.height // 2), label, fill="black", font=font, anchor="lm")
        sheet.paste(row, (margin, top))
        top += row.height + 4
    return sheet


def write_picture(path: Path, picture: Image.Image) -> None:
    """Write a PNG; a reader sees the old file or the new one."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    write_bytes(path, buffer.getvalue())


def over_time(folder: Path) -> Image.Image | None:
    """The strips ``iteration-NUMBER.png`` in `folder` below each other: at most `MOST_ROWS`, first and last among them."""
    files = sorted(folder.glob("iteration-*.png"))
    if not files:
        return None
    count = min(len(files), MOST_ROWS)
    chosen = [files[round(i * (len(files) - 1) / max(1, count - 1))] for i in range(count)]
    rows = []
    for path in chosen:
        with Image.open(path) as picture:
            rows.append(picture.convert("RGB").resize((max(1, picture.width // 2), max(1, picture.height // 2))))
    return stacked(rows, [f"it. {int(path.stem.partition('-')[2])}" for path in chosen])
