"""Pictures of a run as PNG files: the same prompts from the same noise, evaluation after evaluation."""

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.training.checkpoint import write_bytes

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
