"""The images on the page of a run: the same prompts and noise over time, and the best and worst
training images of an iteration.
"""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.run.reading import read_bytes, read_json, reading
from flowrl.run.records import RunRecord
from flowrl.run.results import decimals
from flowrl.run.strips import EXTREMES, spread

SIDE = 128
"""About the largest side of an image on the page, in pixels."""


@dataclass(frozen=True)
class Sample:
    """An image (a data URI) with its prompt and reward as text; of a training image also its
    `kind`, "best" or "worst", and its advantage.
    """

    image: str
    prompt: str
    reward: str
    kind: str = ""
    advantage: str = ""


@dataclass(frozen=True)
class OverTime:
    """Evaluations with the same prompts: the prompts, and the samples by iteration."""

    prompts: list[str]
    rows: dict[int, list[Sample]]


@dataclass(frozen=True)
class _Strip:
    """The content of a strip's JSON (`flowrl.run.strips.write_strip`)."""

    iteration: int
    gap: float
    samples: list[dict[str, Any]]


def samples_over_time(run: RunRecord) -> list[OverTime]:
    """The samples of at most 16 evaluations, including the first and the last; a part for each
    change of the prompts.
    """
    evaluated = {row["iteration"] for row in run.evaluations}
    files = sorted((run.folder / "samples").glob("iteration-*.json"))
    kept = [path for path in files if int(path.stem.partition("-")[2]) in evaluated]
    strips = [(path, read_json(path, _Strip)) for path in spread(kept)] if kept else []
    rewards = [one["reward"] for _, strip in strips for one in strip.samples]
    found = [reward for reward in rewards if reward is not None]
    digits = decimals(*(reward - found[0] for reward in found), least=2) if found else 2
    parts = groupby(strips, lambda item: [one["prompt"] for one in item[1].samples])
    return [
        OverTime(prompts, {strip.iteration: _samples(path, strip, digits) for path, strip in part})
        for prompts, part in parts
    ]


def extremes(run: RunRecord) -> tuple[int, list[Sample]]:
    """The best and worst training images of the last evaluated iteration, and this iteration; none
    if the run has none.
    """
    path = run.folder / "samples" / f"{EXTREMES}.json"
    if not path.exists():
        return 0, []
    strip = read_json(path, _Strip)
    if strip.iteration > run.rows[-1]["iteration"]:  # a resume has gone back
        return 0, []
    digits = decimals(strip.samples[0]["reward"] - strip.samples[-1]["reward"], least=2)
    return strip.iteration, _samples(path, strip, digits)


def _samples(path: Path, strip: _Strip, digits: int) -> list[Sample]:
    file, count = path.with_suffix(".png"), len(strip.samples)
    with reading(file):
        images = _pieces(file, file.stat().st_mtime_ns, count, strip.gap)
    return [
        Sample(
            image,
            one["prompt"],
            _number(one["reward"], f".{digits}f", "invalid"),
            one.get("kind", ""),
            _number(one.get("advantage"), "+.2f", ""),
        )
        for image, one in zip(images, strip.samples, strict=True)
    ]


def _number(value: float | None, form: str, other: str) -> str:
    return other if value is None else f"{value:{form}}"


@lru_cache(64)
def _pieces(path: Path, changed: int, count: int, gap: float) -> list[str]:
    """The `count` images of a strip as data URIs, of the file that was last `changed` then."""
    strip = Image.open(io.BytesIO(read_bytes(path))).convert("RGB")
    width = strip.width / (count + (count - 1) * gap)
    lefts = [width * (1 + gap) * i for i in range(count)]
    boxes = [(round(left), 0, round(left + width), strip.height) for left in lefts]
    return [_uri(strip.crop(box)) for box in boxes]


def _uri(image: Image.Image) -> str:
    """A small copy of an image as a data URI, in the shorter of two formats: flat areas as PNG."""
    small = image.reduce(max(1, max(image.size) // SIDE))
    files: Mapping[str, io.BytesIO] = {"png": io.BytesIO(), "jpeg": io.BytesIO()}
    small.save(files["png"], "PNG")
    small.save(files["jpeg"], "JPEG", quality=85)
    kind = min(files, key=lambda name: files[name].tell())
    return f"data:image/{kind};base64,{base64.b64encode(files[kind].getvalue()).decode()}"
