"""Rule-based scores of images: classify the cells and compare them with the request, or measure the
image analytically.

Every score has three forms:

strict  0 or 1: everything requested is there, and nothing else.
graded  partial credit in [0, 1].
soft    the graded score of the cells' class *probabilities*, plus a fraction for clarity:
        continuous in the pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rapidfuzz.distance.Levenshtein import normalized_similarity
from torch import Tensor
from torch.nn import functional as F

from flowrl.core.errors import RewardError
from flowrl.core.options import checked_options
from flowrl.core.types import Prompt
from flowrl.worlds.render import BACKGROUND, PALETTE, SIZE, split_cells, template_bank
from flowrl.worlds.scene import (
    CLASSES,
    COLOURS,
    GLYPHS,
    GRID,
    MOOD_OBJECTS,
    Request,
    glyph_class,
    request_of,
)

Form = Literal["strict", "graded", "soft"]
RESIDUAL_LIMIT = 0.015
"""Mean squared pixel error beyond which a cell counts as unreadable (class `JUNK`)."""
TEMPERATURE = 0.0015
"""Mean squared pixel error that makes a class e times less likely in the soft form."""
CLARITY_SHARE = 0.15
JUNK = CLASSES
LOOK_LIMITS = {"palette": 0.85, "balance": 0.7, "mood": 0.55}
"""Thresholds above which a part of the preference score counts as met (graded); strict requires all
of them.
"""
Quality = Literal["palette", "balance", "clarity"]

Presence = NDArray[np.float32]
"""[16, CLASSES + 1]: the class of each cell, as 0/1 or as probabilities."""


@dataclass(frozen=True)
class Reading:
    """The classified cells of images. `classes` [sample, 16] (JUNK = unreadable), `probabilities`
    [sample, 16, CLASSES + 1], `clarity` [sample] in (0, 1]: 1 if every cell equals a template.
    """

    classes: Tensor
    probabilities: Tensor
    clarity: Tensor


@lru_cache(maxsize=4)
def _bank(device: torch.device) -> tuple[Tensor, Tensor]:
    templates = template_bank().to(device)
    return templates, templates.square().sum(1)


def read(images: Tensor) -> Reading:
    """Nearest template per cell, at half resolution, over 9 sub-pixel placements of every class."""
    templates, norms = _bank(images.device)
    cells = split_cells(F.avg_pool2d(images.float().clamp(0, 1), 2)).flatten(2)
    products = cells.square().sum(-1, keepdim=True) - 2 * cells @ templates.T + norms
    distance = products.clamp(min=0) / cells.shape[-1]
    empty, rest = distance[..., :1], distance[..., 1:].unflatten(-1, (-1, 9))
    best = torch.cat([empty, rest.amin(-1)], dim=-1)
    shortest = best.amin(-1)
    labels = torch.where(shortest <= RESIDUAL_LIMIT, best.argmin(-1), JUNK)
    limit = torch.full_like(best[..., :1], RESIDUAL_LIMIT)
    probabilities = torch.softmax(-torch.cat([best, limit], dim=-1) / TEMPERATURE, dim=-1)
    return Reading(labels, probabilities, torch.exp(-shortest / RESIDUAL_LIMIT).mean(-1))


def _composition(presence: Presence, request: Request) -> float:
    """Partial credit: matched objects over the larger of the requested and the found number; for
    positions, the relation is half of it.
    """
    counts = presence.sum(0)
    wanted = np.zeros(CLASSES + 1)
    for k in request.objects:
        wanted[k] += request.number
    matched = np.minimum(counts, wanted)[1:].sum()
    fraction = float(matched / max(counts[1:].sum(), wanted.sum()))
    if request.kind != "position":
        return fraction
    return fraction * (0.5 + 0.5 * _relation(presence, request))


def _relation(presence: Presence, request: Request) -> float:
    """How far the relation holds between the most likely cells of the two objects."""
    first, second = (int(presence[:, k].argmax()) for k in request.objects)
    sure = float(presence[first, request.objects[0]] * presence[second, request.objects[1]])
    across, down = second % GRID - first % GRID, second // GRID - first // GRID
    distances = {"left": across, "right": -across, "above": down, "below": -down}
    return sure * (distances[request.relation] > 0)


def _text(classes: Sequence[int], presence: Presence, wanted: str, soft: bool) -> float:
    """1 - edit distance / length of the longer text; objects and unreadable cells are read as '?'.

    The soft form is three quarters of this, and one quarter the mean over the prompt's glyphs of
    their largest probability.
    """
    glyphs = {glyph_class(glyph): glyph for glyph in GLYPHS}
    text = "".join(glyphs.get(k, "?") for k in classes if k != 0)
    similarity = normalized_similarity(text, wanted)
    if not soft:
        return similarity
    clear = sum(float(presence[:, glyph_class(glyph)].max()) for glyph in wanted)
    return 0.75 * similarity + 0.25 * clear / len(wanted)


def looks(images: Tensor, requests: Sequence[Request]) -> dict[str, Tensor]:
    """Analytic preference score, smooth in the pixels; each part [sample] in [0, 1].

    palette: fraction of the painted area in the requested colours. balance: mirror symmetry of the
    cells' mean colour deviation d from the background, 1 - |d - flip(d)| / (|d| + |flip(d)|). mood:
    exp(-((area - target) / width)^2), the painted area that 4 objects (calm) or 9 objects (lively)
    would cover.
    """
    device, cell = images.device, SIZE // 2 // GRID
    background = torch.tensor(BACKGROUND, device=device)[:, None, None]
    deviation = F.avg_pool2d(images.float().clamp(0, 1), 2) - background
    strength = ((deviation.abs().sum(1) - 0.25) / 0.35).clamp(0, 1)
    area = strength.sum((1, 2))
    anchors = torch.tensor([PALETTE[c] for c in COLOURS], device=device) - background[:, 0, 0]
    direction, anchors = F.normalize(deviation, dim=1), F.normalize(anchors, dim=1)
    likeness = torch.softmax(torch.einsum("skhw,ck->schw", direction, anchors) * 40, dim=1)
    wanted = torch.tensor([[float(c in r.palette) for c in COLOURS] for r in requests])
    painted = (likeness * wanted.to(device)[:, :, None, None]).sum(1).mul(strength).sum((1, 2))
    cells = F.avg_pool2d(deviation, cell)
    mirrored = cells.flip(-1)
    total = cells.abs().sum((1, 2, 3)) + mirrored.abs().sum((1, 2, 3))
    balance = 1 - (cells - mirrored).abs().sum((1, 2, 3)) / total.clamp(min=0.1)
    balance = balance * (total / 0.1).clamp(max=1.0)  # 0 for an image without paint
    moods = [MOOD_OBJECTS[r.mood or "calm"] for r in requests]
    objects = torch.tensor([sum(limits) / 2 for limits in moods], device=device)
    covered = area / (0.42 * cell**2)  # in objects, which cover 42% of a cell
    mood = torch.exp(-(((covered - objects) / (0.5 * objects)) ** 2))
    return {
        "palette": (painted / area.clamp(min=1.0)).clamp(0, 1),
        "balance": balance.clamp(0, 1),
        "mood": mood,
    }


def require_pictures(reward: object, images: Tensor, prompts: Sequence[Prompt]) -> None:
    """Raise `RewardError` for images that are not of this world, or another number of prompts."""
    if images.shape[1:] != (3, SIZE, SIZE) or len(images) != len(prompts):
        raise RewardError(
            f"{type(reward).__name__} needs [sample, 3, {SIZE}, {SIZE}] and as many prompts; "
            f"got {tuple(images.shape)} and {len(prompts)}"
        )


def cell_scores(
    images: Tensor, form: Form, score: Callable[[int, Presence, Sequence[int]], float]
) -> Tensor:
    """Scores of images by their cells.

    Args:
        images: images [sample, 3, 64, 64].
        form: in the soft form `Presence` has the classes' probabilities, and the score a share for
            clarity.
        score: from a sample's number, its `Presence` and the classes of its cells to its score.

    Returns:
        The scores [sample], in main memory.
    """
    soft, reading = form == "soft", read(images)
    classes, share = reading.classes.cpu(), CLARITY_SHARE if soft else 0.0
    certain = F.one_hot(classes, CLASSES + 1).float()
    table = (reading.probabilities.cpu() if soft else certain).numpy()
    rows = zip(table, classes.tolist(), reading.clarity.tolist(), strict=True)
    return torch.tensor(
        [
            (1 - share) * score(sample, presence, cells) + share * clear
            for sample, (presence, cells, clear) in enumerate(rows)
        ]
    )


@checked_options
@dataclass(frozen=True)
class ShapesReward:
    """Scores images against their prompts' requests, any mix of tasks in one batch.

    `form` is strict (0/1), graded (partial credit) or soft (continuous); all are in [0, 1]. Raises
    `RewardError` for images of another size and `ConfigError` for an unknown form or a prompt
    outside the world's language.
    """

    form: Form = "soft"

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[sample, 3, 64, 64] in [0, 1] and as many prompts -> [sample]."""
        require_pictures(self, images, prompts)
        requests = [request_of(prompt) for prompt in prompts]
        scores = torch.zeros(len(requests))
        for is_look, score in ((True, self._looks), (False, self._cells)):
            chosen = [i for i, r in enumerate(requests) if (r.kind == "preference") == is_look]
            if chosen:
                scores[chosen] = score(images[chosen], [requests[i] for i in chosen]).cpu()
        if self.form == "strict":
            scores = scores.isclose(torch.ones(())).float()
        return scores.to(images.device)

    def _looks(self, images: Tensor, requests: Sequence[Request]) -> Tensor:
        parts = looks(images, requests)
        if self.form != "soft":
            parts = {name: (value >= LOOK_LIMITS[name]).float() for name, value in parts.items()}
        return torch.stack(list(parts.values())).mean(0)

    def _cells(self, images: Tensor, requests: Sequence[Request]) -> Tensor:
        def score(sample: int, presence: Presence, classes: Sequence[int]) -> float:
            request = requests[sample]
            if request.kind == "text":
                return _text(classes, presence, request.text, self.form == "soft")
            return _composition(presence, request)

        return cell_scores(images, self.form, score)


@checked_options
@dataclass(frozen=True)
class ShapesQuality:
    """One quality of images [sample, 3, 64, 64], in [0, 1].

    palette: fraction of the painted area in the colours that the prompt names (`verifier.looks`,
    which scores them for the task "preference"); a prompt that names none raises `RewardError`.
    balance: mirror symmetry, as there; does not read the prompt. clarity: how close the cells are
    to the world's own drawings, 1 if every cell is a clean object, glyph or empty
    (`verifier.read`); does not read the prompt, and an empty image is clear.
    """

    quality: Quality

    def refuses(self, prompt: Prompt) -> str:
        """Why `score` raises an error for `prompt`; "" if it does not."""
        lacks = self.quality == "palette" and not request_of(prompt).palette
        return f"palette: the prompt {prompt.text!r} names no colour" if lacks else ""

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        if self.quality == "clarity":
            return read(images).clarity
        for reason in filter(None, map(self.refuses, prompts)):
            raise RewardError(reason)
        requests = [request_of(prompt) for prompt in prompts]
        return looks(images, requests)[self.quality]
