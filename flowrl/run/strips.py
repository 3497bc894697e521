"""Images of a run as PNG files in samples/: the same prompts and noise at every evaluation, and the
best and worst training images.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from torch.nn import functional

from flowrl.run.evaluation import Evaluation
from flowrl.run.images import Shown, beside_references
from flowrl.run.io import write_bytes, write_json
from flowrl.run.records import finite

SIDE = 256
"""Largest side of an image in a strip, in pixels."""
GAP = 4
"""White pixels between images, and between strips."""
MARGIN = 90
"""Pixels on the left of strips for their labels."""
MOST_ROWS = 16
"""Largest number of strips in samples/over-time.png, and of evaluations on a run's page."""
EXTREMES = "extremes"
"""The name of the files with the best and worst images of the last evaluated iteration."""

REFERENCE = "samples/reference.png"
"""The reference image of the first prompt."""


class Strips:
    """Writes the images of every evaluation: samples/iteration-000010.png, from left to right, each
    beside its prompt's reference image if there is one, with their prompts and rewards in
    iteration-000010.json; prompts.txt, `REFERENCE` and, of all evaluations, over-time.png.

    Args:
        folder: the run's folder.
        done: the last iteration so far; images of later ones are deleted.
    """

    def __init__(self, folder: Path, done: int) -> None:
        self.folder = folder / "samples"
        for path in self.folder.glob("iteration-*.*"):
            if int(path.stem.partition("-")[2]) > done:  # will be computed again
                path.unlink()

    def row(self, row: Mapping[str, Any], evaluation: Evaluation | None) -> None:
        """Write the images of the evaluation, unless they are no images, as in the mixture
        world.
        """
        if evaluation is None or not has_images(evaluation):
            return
        prompts = [prompt.text for prompt in evaluation.prompts]
        rewards = evaluation.image_scores.tolist()
        samples = [{"prompt": p, "reward": r} for p, r in zip(prompts, rewards, strict=True)]
        path = self.folder / f"iteration-{row['iteration']:06d}"
        shown = beside_references(evaluation.images, evaluation.prompts)
        write_strip(path, shown, row["iteration"], samples)
        write_image(self.folder / "over-time.png", over_time(self.folder))
        if images := evaluation.prompts[0].images:
            write_image(self.folder / Path(REFERENCE).name, images[0].pillow())
        write_bytes(self.folder / "prompts.txt", "".join(f"{p}\n" for p in prompts).encode())

    def finish(self) -> None:
        """Nothing: all files are complete."""


def has_images(evaluation: Evaluation) -> bool:
    """Whether the samples are images: those of the mixture world are points."""
    return evaluation.images.shape[1] == 3


def write_extremes(
    folder: Path, row: Mapping[str, Any], best: list[Shown], worst: list[Shown], advantages: Tensor
) -> None:
    """Write the best and worst training images of an iteration with prompt, reward and advantage to
    samples/extremes.png and .json of the run in `folder`; no image twice.

    Args:
        folder: the run's folder.
        row: the iteration's row.
        best: its best images, the best first.
        worst: its worst images, the worst first.
        advantages: advantages [prompt, member, decision]; that of an image is the mean over
            decisions.
    """
    half = max(1, int(row["trajectories"]) // 2)
    means = advantages.float().nanmean(-1).flatten().tolist()
    shown = [("best", one) for one in best[:half]] + [("worst", one) for one in worst[:half]]
    if not shown:
        return
    samples = [
        {"kind": k, "prompt": s.prompt, "reward": s.reward, "advantage": means[s.sample]}
        for k, s in shown
    ]
    images = torch.stack([one.image for _, one in shown]).float() / 255
    write_strip(folder / "samples" / EXTREMES, images, row["iteration"], samples)


def write_strip(
    path: Path, images: Tensor, iteration: int, samples: Sequence[Mapping[str, Any]]
) -> None:
    """Write a `strip` as PATH.png, and its `samples`, an entry per image, as PATH.json; "gap" in it
    is the distance of two images as a fraction of their width.
    """
    write_image(path.with_suffix(".png"), strip(images))
    gap = _scale_and_gap(images)[1] / images.shape[-1]
    values = {"iteration": iteration, "gap": gap, "samples": finite([dict(s) for s in samples])}
    write_json(path.with_suffix(".json"), values)


def _scale_and_gap(images: Tensor) -> tuple[float, int]:
    """The factor by which a strip enlarges images, and the pixels between them before."""
    longest = max(images.shape[2:])
    scale = SIDE // longest or SIDE / longest
    return scale, max(1, round(GAP / scale))


def strip(images: Tensor) -> Image.Image:
    """Images [sample, 3, height, width] in [0, 1] side by side; small ones are enlarged by an
    integer factor, large ones reduced to `SIDE`.
    """
    scale, gap = _scale_and_gap(images)
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
    rows = list[Image.Image]()
    for path in spread(sorted(folder.glob("iteration-*.png"))):
        picture = ImageOps.scale(Image.open(path), 0.5)
        row = ImageOps.expand(picture, (MARGIN, 0, 0, GAP), "white")
        label, place = f"it. {int(path.stem.partition('-')[2])}", (6, picture.height // 2)
        ImageDraw.Draw(row).text(place, label, fill="black", anchor="lm", font_size=15)
        rows.append(row)
    width = max(row.width for row in rows)  # a resume may change the number of samples
    wide = [ImageOps.expand(row, (0, 0, width - row.width, 0), "white") for row in rows]
    return Image.fromarray(np.concatenate([np.asarray(row) for row in wide])[:-GAP])


def spread(files: Sequence[Path]) -> list[Path]:
    """At most `MOST_ROWS` of `files`, including the first and the last."""
    chosen = np.linspace(0, len(files) - 1, min(len(files), MOST_ROWS)).round().astype(int)
    return [files[i] for i in chosen]
