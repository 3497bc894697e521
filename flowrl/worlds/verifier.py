"""Rule-based scores of images: classify the cells and compare them with the request, or measure the
image analytically.

Every score has three forms:

strict  0 or 1: everything requested is there, and nothing else.
graded  partial credit in [0, 1].
soft    the graded score of the cells' class *probabilities*, plus a fraction for clarity:
        continuous in the pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from rapidfuzz.distance.Levenshtein import distance as edit_distance
from torch import Tensor
from torch.nn import functional as F

from flowrl.core.errors import RewardError, require
from flowrl.core.types import Prompt
from flowrl.worlds.render import BACKGROUND, PALETTE, SIZE, split_cells, template_bank
from flowrl.worlds.scene import (
    CLASSES,
    COLOURS,
    GLYPHS,
    GRID,
    MOOD_OBJECTS,
    OBJECTS,
    Request,
    glyph_class,
    request_of,
)

FORMS = ("strict", "graded", "soft")
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
QUALITIES = ("palette", "balance", "clarity")

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
    size = cells.shape[-1]
    distance = (cells.square().sum(-1, keepdim=True) - 2 * cells @ templates.T + norms).clamp(
        min=0
    ) / size
    empty, rest = distance[..., :1], rearrange(distance[..., 1:], "s c (k n) -> s c k n", n=9)
    best = torch.cat([empty, rest.amin(-1)], dim=-1)
    limit = torch.full_like(best[..., :1], RESIDUAL_LIMIT)
    shortest = best.amin(-1)
    labels = torch.where(shortest <= RESIDUAL_LIMIT, best.argmin(-1), JUNK)
    probabilities = torch.softmax(-torch.cat([best, limit], dim=-1) / TEMPERATURE, dim=-1)
    clarity = torch.exp(-shortest / RESIDUAL_LIMIT).mean(-1)
    return Reading(labels, probabilities, clarity)


def _one_hot(classes: Tensor) -> Tensor:
    return F.one_hot(classes, CLASSES + 1).float()


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
    where = [int(presence[:, k].argmax()) for k in request.objects]
    sure = float(presence[where[0], request.objects[0]] * presence[where[1], request.objects[1]])
    horizontal = request.relation in ("left", "right")
    gap = (
        (where[1] % GRID - where[0] % GRID) if horizontal else (where[1] // GRID - where[0] // GRID)
    )
    return sure * float((gap if request.relation in ("left", "above") else -gap) > 0)


def _text_of(classes: Sequence[int]) -> str:
    """Glyphs in reading order; objects and unreadable cells read as '?'."""
    first = glyph_class(GLYPHS[0])
    return "".join(GLYPHS[k - first] if first <= k < CLASSES else "?" for k in classes if k != 0)


def text_similarity(read_text: str, wanted: str) -> float:
    """1 - edit distance / length of the longer text, in [0, 1]."""
    return 1 - edit_distance(read_text, wanted) / max(len(read_text), len(wanted), 1)


def _text_soft(probabilities: Presence, read_text: str, wanted: str) -> float:
    """Three quarters similarity, one quarter the mean over the prompt's glyphs of their largest
    probability.
    """
    clear = sum(
        float(probabilities[:, glyph_class(g)].max()) if g in GLYPHS else 0.0 for g in wanted
    )
    return 0.75 * text_similarity(read_text, wanted) + 0.25 * clear / len(wanted)


def looks(images: Tensor, requests: Sequence[Request]) -> dict[str, Tensor]:
    """Analytic preference score, smooth in the pixels; each part [sample] in [0, 1].

    palette: fraction of the painted area in the requested colours. balance: mirror symmetry of the
    cells' mean colour deviation d from the background, 1 - |d - flip(d)| / (|d| + |flip(d)|). mood:
    exp(-((area - target) / width)^2), the painted area that 4 objects (calm) or 9 objects (lively)
    would cover.
    """
    background = torch.tensor(BACKGROUND, device=images.device)[:, None, None]
    deviation = F.avg_pool2d(images.float().clamp(0, 1), 2) - background
    paint = deviation.abs().sum(1)
    strength = ((paint - 0.25) / 0.35).clamp(0, 1)
    anchors = (
        torch.tensor([PALETTE[c] for c in COLOURS], device=images.device) - background[:, 0, 0]
    )
    direction = F.normalize(deviation, dim=1)
    likeness = torch.softmax(
        torch.einsum("skhw,ck->schw", direction, F.normalize(anchors, dim=1)) * 40, dim=1
    )
    wanted = torch.tensor(
        [[float(c in r.colours) for c in COLOURS] for r in requests], device=images.device
    )
    area = strength.sum((1, 2))
    palette = (likeness * wanted[:, :, None, None]).sum(1).mul(strength).sum((1, 2)) / area.clamp(
        min=1.0
    )
    cells = F.avg_pool2d(deviation, SIZE // 2 // GRID)
    mirrored = cells.flip(-1)
    total = cells.abs().sum((1, 2, 3)) + mirrored.abs().sum((1, 2, 3))
    balance = 1 - (cells - mirrored).abs().sum((1, 2, 3)) / total.clamp(min=0.1)
    balance = balance * (total / 0.1).clamp(max=1.0)
    objects = torch.tensor([sum(MOOD_OBJECTS[r.mood]) / 2 for r in requests], device=images.device)
    per_object = 0.42 * (SIZE // 2 // GRID) ** 2
    mood = torch.exp(-(((area / per_object - objects) / (0.5 * objects)) ** 2))
    return {"palette": palette.clamp(0, 1), "balance": balance.clamp(0, 1), "mood": mood}


@dataclass(frozen=True)
class ShapesReward:
    """Scores images against their prompts' requests, any mix of tasks in one batch.

    `form` is strict (0/1), graded (partial credit) or soft (continuous); all are in [0, 1]. Raises
    `RewardError` for images of another size and `ConfigError` for an unknown form or a prompt
    outside the world's language.
    """

    form: str = "soft"

    def __post_init__(self) -> None:
        require(self.form in FORMS, "reward form", self.form, f"one of {', '.join(FORMS)}")

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[sample, 3, 64, 64] in [0, 1] and as many prompts -> [sample]."""
        if images.shape[1:] != (3, SIZE, SIZE) or len(images) != len(prompts):
            raise RewardError(
                f"ShapesReward needs [sample, 3, {SIZE}, {SIZE}] and as many prompts; "
                f"got {tuple(images.shape)} and {len(prompts)}"
            )
        requests = [request_of(prompt) for prompt in prompts]
        scores = torch.zeros(len(requests))
        looked = [i for i, r in enumerate(requests) if r.kind == "preference"]
        if looked:
            scores[looked] = self._looks_score(images[looked], [requests[i] for i in looked]).cpu()
        seen = [i for i, r in enumerate(requests) if r.kind != "preference"]
        if seen:
            reading = read(images[seen])
            classes, probabilities = reading.classes.cpu(), reading.probabilities.cpu()
            clarity = reading.clarity.cpu()
            presence = (probabilities if self.form == "soft" else _one_hot(classes)).numpy()
            values = [
                self._cell_score(classes[n], presence[n], float(clarity[n]), requests[i])
                for n, i in enumerate(seen)
            ]
            scores[seen] = torch.tensor(values)
        return scores.to(images.device)

    def _looks_score(self, images: Tensor, requests: Sequence[Request]) -> Tensor:
        parts = looks(images, requests)
        if self.form == "soft":
            return torch.stack(list(parts.values())).mean(0)
        met = torch.stack([value >= LOOK_LIMITS[name] for name, value in parts.items()]).float()
        return met.mean(0) if self.form == "graded" else met.prod(0)

    def _cell_score(
        self, classes: Tensor, presence: Presence, clarity: float, request: Request
    ) -> float:
        soft = self.form == "soft"
        if request.kind == "text":
            text = _text_of(classes.tolist())
            graded = (
                _text_soft(presence, text, request.text)
                if soft
                else text_similarity(text, request.text)
            )
        else:
            graded = _composition(presence, request)
        if soft:
            return (1 - CLARITY_SHARE) * graded + CLARITY_SHARE * clarity
        return graded if self.form == "graded" else float(math.isclose(graded, 1.0))


@dataclass(frozen=True)
class ShapesQuality:
    """One quality of images [sample, 3, 64, 64], in [0, 1].

    palette: fraction of the painted area in the colours that the prompt names (`verifier.looks`,
    which scores them for the task "preference"); a prompt that names none raises `RewardError`.
    balance: mirror symmetry, as there; does not read the prompt. clarity: how close the cells are
    to the world's own drawings, 1 if every cell is a clean object, glyph or empty
    (`verifier.read`); does not read the prompt, and an empty image is clear.
    """

    quality: str

    def __post_init__(self) -> None:
        require(
            self.quality in QUALITIES, "quality", self.quality, f"one of {', '.join(QUALITIES)}"
        )

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        if self.quality == "clarity":
            return read(images).clarity
        requests = [_as_look(request_of(prompt)) for prompt in prompts]
        if self.quality == "palette" and not all(request.colours for request in requests):
            text = next(p.text for p, r in zip(prompts, requests, strict=True) if not r.colours)
            raise RewardError(f"palette: the prompt {text!r} names no colour")
        return looks(images, requests)[self.quality]


def _as_look(request: Request) -> Request:
    """The request as one for a look: its colours, and a mood, which these two qualities do not
    read.
    """
    colours = request.colours or tuple(dict.fromkeys(OBJECTS[k - 1][0] for k in request.objects))
    return replace(request, colours=colours, mood=request.mood or "calm")
