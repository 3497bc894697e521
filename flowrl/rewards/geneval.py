"""Whether an image shows the objects, numbers, colours and positions that its prompt requests:
GenEval's score.

A detector finds the objects (`load_detector`), a CLIP model classifies their colours, and
`strict_score` or `partial_score` compare both with the request.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Lt
from jaxtyping import Bool
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.options import Count, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.clip import DATA_ONLY, ClipNetwork, Precision, load_network, loading
from flowrl.rewards.geneval_requests import COLOURS, OBJECTS, Clause, Request, request_of
from flowrl.rewards.images import Images, to_pillow

RENAMED = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
"""Labels of COCO detectors that have other names in GenEval."""
MOST_OBJECTS = 16
"""Largest number of objects of a class that are considered."""
MARGIN = 0.1
"""Fraction of both objects' sizes by which their centres must be apart for one to be left of, or
above, the other.
"""
GREY = 0x99 / 255
"""The background of an object while its colour is classified."""
TEMPLATES = (
    "a photo of a {colour} {name}",
    "a photo of a {colour}-colored {name}",
    "a photo of a {colour} object",
)


Mask = Bool[Tensor, "height width"]


@dataclass(frozen=True)
class Detection:
    """An object: its class, the detector's score, its box (left, top, right, bottom) in pixels, and
    its mask.
    """

    name: str
    score: float
    box: tuple[float, ...]
    mask: Mask


Detections = Mapping[str, list[Detection]]
"""Detections by class."""
Threshold = Annotated[float, Ge(0), Lt(1)]
ColoursOf = Callable[[Sequence[Detection], str], list[str]]
"""From objects and their class to the colour of each."""


@checked_options
@dataclass(frozen=True)
class GenEval:
    """Objects found by a detector, compared with the request in the prompt's metadata
    (`flowrl.rewards.geneval_requests`).

    An object counts if its score is above the threshold. Overlapping objects all count (the limit
    in GenEval's code is 1.0, no limit). Colours: zero-shot classification of the object on grey by
    CLIP, ten colours with three templates each.

    `score` raises `RewardError` for a prompt without a request, or with a class that the detector
    does not have. Source: GenEval (arXiv 2310.11513) and its public code; released: Flow-GRPO's
    (arXiv 2505.05470) reward server.

    Args:
        form: "strict", GenEval's verdict: 1 if for every clause at least `count` objects of its
            class are found, the `count` of them with the highest scores have its colour and its
            position, and no excluded number is reached; else 0. "partial", a mean over entries:
            max(0, 1 - |found - count| / count) for every clause; for a requested colour or
            position, the fraction of objects with the colour, or 1 if all are in position, and 0
            unless the number is exact. "released", Flow-GRPO's server: as "partial", but the first
            term may be negative (-14 for 16 objects instead of one), and a wrong position counts as
            a 0 and a 1.
        model: Mask2Former (GenEval's detector) or another instance segmentation model of
            transformers with the same classes; other models need other thresholds.
        clip: the CLIP model for colours.
        threshold: smallest score of an object, in [0, 1).
        counting_threshold: this score if the request's tag is "counting", in [0, 1).
        device: name of the device.
        dtype: precision of the networks.
        batch: images per network call.

    Raises:
        ConfigError: a field is out of range. `load` and `score` also raise it if a model cannot be
            loaded.
    """

    form: Literal["strict", "partial", "released"] = "strict"
    model: str = "facebook/mask2former-swin-small-coco-instance"
    clip: str = "openai/clip-vit-large-patch14"
    threshold: Threshold = 0.3
    counting_threshold: Threshold = 0.9
    device: str = "cpu"
    dtype: Precision = "float32"
    batch: Count = 8

    def refuses(self, prompt: Prompt) -> str:
        """Why `score` raises an error for `prompt`; "" if it does not. The classes of a `model`
        other than the default are not known before it is loaded.
        """
        try:
            _request(prompt, OBJECTS if self.model == GenEval.model else None)
        except RewardError as error:
            return str(error)
        return ""

    def load(self) -> "Detector":
        """The detector, loaded with the CLIP model for colours at the first call."""
        self._clip.load()
        return load_detector(self.model, self.device, self.dtype, self.batch)

    @property
    def _clip(self) -> ClipNetwork:
        return ClipNetwork(self.clip, self.device, self.dtype)

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [0, 1], or at most 1 for form "released"."""
        detector, scores = self.load(), []
        requests = [_request(prompt, detector.names) for prompt in prompts]
        per_image = detector.find(images, min(self.threshold, self.counting_threshold))
        for image, objects, request in zip(images, per_image, requests, strict=True):
            limit = self.counting_threshold if request.tag == "counting" else self.threshold
            names = {clause.name for clause in (*request.include, *request.exclude)}
            detections = {name: of_class(objects, name, limit) for name in names}
            colours = partial(object_colours, self._clip, image)
            if self.form == "strict":
                scores.append(strict_score(request, detections, colours))
            else:
                released = self.form == "released"
                scores.append(partial_score(request, detections, colours, released))
        return torch.tensor(scores)


def of_class(objects: Sequence[Detection], name: str, threshold: float) -> list[Detection]:
    """The `MOST_OBJECTS` objects of a class with the highest scores above `threshold`."""
    return [o for o in objects if o.name == name and o.score > threshold][:MOST_OBJECTS]


def strict_score(request: Request, detections: Detections, colours: ColoursOf) -> float:
    """GenEval's verdict, 1 or 0; see `GenEval`."""
    matched: list[Sequence[Detection]] = []
    for clause in request.include:
        objects, count = detections[clause.name][: clause.count], clause.count
        right = len(objects) == count
        if right and clause.colour:
            right = colours(objects, clause.name).count(clause.colour) == count
        if not right or not _in_position(clause, objects, matched):
            return 0.0
        matched.append(objects)
    return float(all(len(detections[c.name]) < c.count for c in request.exclude))


def partial_score(
    request: Request, detections: Detections, colours: ColoursOf, released: bool = False
) -> float:
    """Partial credit in [0, 1], or that of Flow-GRPO's reward server, at most 1; see `GenEval`."""
    entries: list[float] = []
    matched: list[Sequence[Detection]] = []  # of a clause that is not fulfilled: empty
    for clause in request.include:
        objects, count = detections[clause.name], clause.count
        number = 1 - abs(len(objects) - count) / count
        entries.append(number if released else max(0.0, number))
        good = len(objects) == count
        if released and not good:
            # the server scores a single 0 for colour and position
            entries += [0.0] if clause.colour or clause.position else []
        else:
            if clause.colour:
                right = colours(objects, clause.name).count(clause.colour) if good else 0
                entries.append(right / count)
                good = right == count
            if clause.position and (good or not released):
                targets = matched[clause.position[1]]
                good = good and bool(targets) and _in_position(clause, objects, matched)
                # the server adds a 1 even to a wrong position
                entries += [0.0, 1.0] if released and targets and not good else [float(good)]
        matched.append(objects if good else [])
    return sum(entries) / len(entries)


def _in_position(
    clause: Clause, objects: Sequence[Detection], matched: Sequence[Sequence[Detection]]
) -> bool:
    """Whether all objects are in the clause's relation, if it has one, to all objects of the
    earlier clause.
    """
    if clause.position is None:
        return True
    relation, target = clause.position
    pairs = itertools.product(objects, matched[target])
    return all(relation in relations(item.box, other.box) for item, other in pairs)


def relations(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """The position of box a relative to box b: none, one or two of "left of", "right of", "above"
    and "below".

    Let d = centre_a - centre_b. The part of |d| beyond 0.1 of the sum of both boxes' sizes, with
    the sign of d and divided by
    |d|, must exceed 0.5 along an axis.
    """
    first, second = np.reshape(a, (2, 2)), np.reshape(b, (2, 2))
    offset = (first.sum(0) - second.sum(0)) / 2
    sizes = np.ptp(first, 0) + np.ptp(second, 0)
    beyond = np.sign(offset) * np.maximum(np.abs(offset) - MARGIN * sizes, 0)
    if (np.abs(beyond) < 1e-3).all():
        return set()
    across, down = beyond / math.hypot(*offset)
    sides = {"left of": -across, "right of": across, "above": -down, "below": down}
    return {name for name, distance in sides.items() if distance > 0.5}


def object_colours(
    clip: ClipNetwork, image: Tensor, objects: Sequence[Detection], name: str
) -> list[str]:
    """The most likely of ten colours for each object: CLIP features of its crop against the mean
    features of the templates.
    """
    if not objects:
        return []
    texts = [text.format(colour=colour, name=name) for colour in COLOURS for text in TEMPLATES]
    classes = F.normalize(clip.texts(texts).unflatten(0, (len(COLOURS), -1)).mean(1), dim=1)
    pixels = torch.cat([clip.pixels(_crop(image, item)[None]) for item in objects])
    return [COLOURS[i] for i in (clip.features(pixels) @ classes.T).argmax(1).tolist()]


def _crop(image: Tensor, detection: Detection) -> Tensor:
    """The object's box, grey outside its mask; at least a pixel wide and high."""
    left, top, right, bottom = map(int, detection.box)
    image = torch.where(detection.mask.to(image.device), image, GREY)
    return image[:, top : max(bottom, top + 1), left : max(right, left + 1)]


def _request(prompt: Prompt, known: Sequence[str] | None) -> Request:
    """The prompt's request; its classes must be among those `known` to the detector."""
    try:
        request = request_of(prompt.metadata)
    except ConfigError as error:
        raise RewardError(
            f"geneval: the prompt {prompt.text!r} {error}; write the prompts as JSON lines"
        ) from error
    names = {clause.name for clause in (*request.include, *request.exclude)}
    if known is not None and (unknown := names - set(known)):
        raise RewardError(
            f"geneval: the detector has no class {', '.join(map(repr, unknown))}; allowed:"
            f" {', '.join(known[:100])}"
        )
    return request


@dataclass(frozen=True)
class Detector:
    """A detector with its preprocessing; `batch` images at a time."""

    model: Any
    processor: Any
    batch: int

    @property
    def names(self) -> list[str]:
        """The detector's classes; the index is the detector's label."""
        return [RENAMED.get(name, name) for name in map(str, self.model.config.id2label.values())]

    @torch.no_grad()
    def find(self, images: Images, threshold: float) -> list[list[Detection]]:
        """The objects in every image with a score of at least `threshold`, highest scores first."""
        detections: list[list[Detection]] = []
        for piece in images.split(self.batch):
            inputs = self.processor(images=to_pillow(piece), return_tensors="pt")
            inputs = inputs.to(self.model.device, self.model.dtype)
            masks = {
                name: inputs[name] for name in ("pixel_values", "pixel_mask") if name in inputs
            }
            outputs = self.model(**masks)
            for name, value in outputs.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    outputs[name] = value.float()
            for result in self.processor.post_process_instance_segmentation(
                outputs,
                threshold=threshold,
                target_sizes=[tuple(piece.shape[-2:])] * len(piece),
                return_binary_maps=True,
            ):
                # without a segment the second is a map of -1
                maps = result["segmentation"].bool().cpu()
                objects = [
                    Detection(self.names[info["label_id"]], info["score"], box_of(mask), mask)
                    for info, mask in zip(result["segments_info"], maps, strict=False)
                ]
                detections.append(sorted(objects, key=lambda item: -item.score))
        return detections


@lru_cache(maxsize=2)
def load_detector(
    model: str, device: str = "cpu", dtype: str = "float32", batch: int = 8
) -> Detector:
    """The detector in the folder `model`, or of that name on the Hub, loaded once per setting.

    Raises `ConfigError` for a model that cannot be loaded or lacks weights, or a device that does
    not exist.
    """
    with loading(model):
        from transformers import AutoImageProcessor, AutoModelForUniversalSegmentation

        network = load_network(AutoModelForUniversalSegmentation, model, device, dtype)
        return Detector(network, AutoImageProcessor.from_pretrained(model, **DATA_ONLY), batch)


def box_of(mask: Mask) -> tuple[float, ...]:
    """The smallest box (left, top, right, bottom) around a mask; right and bottom are exclusive."""
    return tuple(map(float, Image.fromarray(mask.numpy()).getbbox() or (0, 0, 0, 0)))
