"""What a run looks at in the images of an iteration: cheap statistics, by which reward hacking
shows without a second reward model, and the best and the worst image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from flowrl.core.processes import Processes
from flowrl.core.types import Prompt
from flowrl.rewards.images import is_video, stills

THUMBNAIL = 32
"""Side of the grey image in which repetition is measured; the mean colours of a quarter of it are
compared for diversity.
"""
FLAT = 0.02
"""Contrast below which an image is constant."""
SHOWN = 4
"""Best images, and worst ones, that are kept."""
LONGEST = 256
"""Largest side of an image that is kept."""
NAMES = ("brightness", "contrast", "saturation", "detail", "repetition", "constant", "latent_rms")


def statistics(images: Tensor, latents: Tensor) -> Tensor:
    """The statistics `NAMES` of every image [sample, statistic], in float32.

    - brightness: mean over pixels and channels;
    - contrast: standard deviation over pixels, mean over channels;
    - saturation: mean over pixels of the largest minus the smallest channel;
    - detail: mean absolute difference of neighbouring pixels;
    - repetition: correlation of the image, in grey and `THUMBNAIL` pixels wide, with itself shifted
      by a quarter to a half of its side, the largest over horizontal and vertical shifts;
    - constant: 1 for an image with a contrast below `FLAT`, else 0;
    - latent_rms: root mean square of the latent.

    Args:
        images: images [sample, 3, height, width] in [0, 1], or videos [sample, frame, 3, height,
            width], whose statistics are means over frames.
        latents: their latents [sample, *latent].
    """
    if is_video(images):
        frames = images.shape[1]
        repeated = latents.repeat_interleave(frames, 0)
        return statistics(images.flatten(0, 1), repeated).unflatten(0, (-1, frames)).mean(1)
    pixels = images.float()
    contrast = pixels.flatten(2).std(-1, unbiased=False).mean(1)
    differences = [pixels.diff(dim=axis).abs().flatten(1).mean(1) for axis in (2, 3)]
    columns = [
        pixels.flatten(1).mean(1),
        contrast,
        (pixels.amax(1) - pixels.amin(1)).flatten(1).mean(1),
        sum(differences) / 2,
        _repetition(pixels),
        (contrast < FLAT).float(),
        latents.float().flatten(1).square().mean(1).sqrt(),
    ]
    return torch.stack(columns, 1)


def _repetition(pixels: Tensor) -> Tensor:
    """See `statistics` [sample]; 0 for a constant image."""
    grey = functional.interpolate(pixels.mean(1, keepdim=True), (THUMBNAIL, THUMBNAIL), mode="area")
    centred = grey[:, 0] - grey.mean((2, 3))[:, :, None]
    spectrum = torch.fft.rfft2(centred).abs().square()
    correlation = torch.fft.irfft2(spectrum, s=(THUMBNAIL, THUMBNAIL))
    lags = slice(THUMBNAIL // 4, THUMBNAIL // 2 + 1)
    shifted = torch.cat([correlation[:, lags, 0], correlation[:, 0, lags]], 1).amax(1)
    power = correlation[:, 0, 0]
    return torch.where(power > FLAT**2 * THUMBNAIL**2, shifted / power.clamp(min=1e-12), 0.0)


def colours(images: Tensor) -> Tensor:
    """Mean colours in a grid [sample, colour], by which images are compared."""
    side = THUMBNAIL // 4
    return functional.adaptive_avg_pool2d(stills(images).float(), (side, side)).flatten(1)


@dataclass(frozen=True)
class Shown:
    """One of the best or worst images of an iteration.

    Args:
        image: the image [3, height, width], in 8 bits, with its prompt's reference to its left.
        prompt: its prompt.
        reward: its reward.
        sample: its number among the samples of the iteration, in prompt-major order.
    """

    image: Tensor
    prompt: str
    reward: float
    sample: int


@dataclass
class _Part:
    """The images of one process."""

    statistics: list[Tensor] = field(default_factory=list)
    colours: list[Tensor] = field(default_factory=list)
    best: list[Shown] = field(default_factory=list)
    worst: list[Shown] = field(default_factory=list)
    count: int = 0


class IterationImages:
    """Collects the images of an iteration (`Trainer.on_images`).

    Args:
        shows: whether the best and the worst images are kept.
    """

    def __init__(self, shows: bool = False) -> None:
        self.shows, self._part = shows, _Part()

    def add(
        self, images: Tensor, latents: Tensor, prompts: Sequence[Prompt], scores: Tensor
    ) -> None:
        """Add a batch. Samples that are no images, such as points of the plane, are ignored."""
        part = self._part
        if images.shape[-3:-2] != (3,) or images.shape[-1] < 4:
            return
        part.statistics.append(statistics(images, latents).cpu())
        part.colours.append(colours(images).cpu())
        if self.shows:
            values = scores.float().cpu()
            order = values.argsort()[: values.isfinite().sum()].tolist()  # NaN is last
            for kept, rows in ((part.worst, order[:SHOWN]), (part.best, order[::-1][:SHOWN])):
                for row in rows:
                    prompt, value = prompts[row], float(values[row])
                    shown = beside_references(stills(images[row : row + 1]), [prompt])
                    kept.append(Shown(_small(shown), prompt.text, value, part.count + row))
            self._choose(part)
        part.count += len(images)

    @staticmethod
    def _choose(part: _Part) -> None:
        """Keep the extremes."""
        part.best = sorted(part.best, key=lambda shown: -shown.reward)[:SHOWN]
        part.worst = sorted(part.worst, key=lambda shown: shown.reward)[:SHOWN]

    def collected(
        self, processes: Processes, members: int
    ) -> tuple[dict[str, float], list[Shown], list[Shown]]:
        """Means of the statistics by name, with the "diversity" within groups of `members` samples,
        and the best and the worst images, of all processes, which must all call this. Empty if the
        samples are no images.

        Diversity is the root mean square, over groups and `colours`, of the standard deviation over
        members.
        """
        whole = _Part()
        for part in processes.gather(self._part):
            whole.statistics += part.statistics
            whole.colours += part.colours
            for kept, others in ((whole.best, part.best), (whole.worst, part.worst)):
                kept += [
                    Shown(other.image, other.prompt, other.reward, other.sample + whole.count)
                    for other in others
                ]
            whole.count += part.count
        if not whole.count:
            return {}, [], []
        self._choose(whole)
        means = torch.cat(whole.statistics).mean(0).tolist()
        groups = torch.cat(whole.colours).unflatten(0, (-1, members))
        diversity = float(groups.var(1, unbiased=False).mean().sqrt())
        named = dict(zip(NAMES, means, strict=True)) | {"diversity": diversity}
        return named, whole.best, whole.worst


def references_of(prompts: Sequence[Prompt], size: tuple[int, int]) -> Tensor | None:
    """The reference images of prompts, those of a prompt side by side, within `size` (height,
    width) on white, [prompt, 3, height, width]; None if no prompt has one.
    """
    most = max((len(prompt.images) for prompt in prompts), default=0)
    if not most:
        return None
    sheets, width = torch.ones(len(prompts), 3, *size), size[1] // most
    for sheet, prompt in zip(sheets, prompts, strict=True):
        for left, image in zip(range(0, size[1], width), prompt.images, strict=False):
            pixels = image.pixels()[None]
            scale = min(size[0] / pixels.shape[2], width / pixels.shape[3])
            sides = [max(1, round(scale * side)) for side in pixels.shape[2:]]
            small = functional.interpolate(pixels, sides, mode="area")[0]
            top, start = (size[0] - sides[0]) // 2, left + (width - sides[1]) // 2
            sheet[:, top : top + sides[0], start : start + sides[1]] = small
    return sheets


def beside_references(images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """Images [sample, 3, height, width] with the reference images of their prompts to their left,
    behind a grey line; as they are if no prompt has one.
    """
    height, width = images.shape[-2:]
    references = references_of(prompts, (height, width))
    if references is None:
        return images
    references[..., -max(1, width // 32) :] = 0.6
    return torch.cat([references.to(images), images], -1)


def _small(image: Tensor) -> Tensor:
    """An image [1, 3, height, width] with a side of at most `LONGEST`, in 8 bits."""
    small = image.float()
    longest = max(small.shape[-2:])
    if longest > LONGEST:
        small = functional.interpolate(small, scale_factor=LONGEST / longest, mode="area")
    return (small[0].clamp(0, 1) * 255).round().to(torch.uint8).cpu()
