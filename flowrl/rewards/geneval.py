"""Whether an image shows the objects, numbers, colours and positions that its prompt requests: GenEval's score.

A detector finds the objects (`load_detector`), a CLIP model classifies their colours, and `strict_score` or `partial_score`
compare both with the request.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from flowrl.errors import ConfigError, RewardError, require
from flowrl.options import checked_options
from flowrl.prompts.geneval import COLOURS, Clause, Request, request_of
from flowrl.rewards.clip import Encoder, clip_pixels, load_encoder
from flowrl.rewards.images import Images, to_pillow
from flowrl.rewards.weights import DATA_ONLY, frozen_on, load_network, loading
from flowrl.types import Prompt

SEGMENTERS = ("mask2former", "maskformer")
RENAMED = {
    "mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard", "motorbike": "motorcycle",
    "aeroplane": "airplane", "sofa": "couch", "pottedplant": "potted plant", "diningtable": "dining table", "tvmonitor": "tv",
}  # fmt: skip
"""Labels of COCO detectors that have other names in GenEval."""
FORMS = ("strict", "partial", "released")
MOST_OBJECTS = 16
"""Largest number of objects of a class that are considered."""
MARGIN = 0.1
"""Fraction of both objects' sizes by which their centres must be apart for one to be left of, or above, the other."""
GREY = 0x99 / 255
"""The background of an object while its colour is classified."""
TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")


@dataclass(frozen=True)
class Detection:
    """An object: its class, the detector's score, its box (left, top, right, bottom) in pixels, and its mask if there is one."""

    name: str
    score: float
    box: tuple[float, float, float, float]
    mask: Bool[Tensor, "height width"] | None = None


Found = dict[str, list[Detection]]
"""Detections by class."""
ColoursOf = Callable[[Sequence[Detection], str], list[str]]
"""From objects and their class to the colour of each."""


@checked_options
@dataclass(frozen=True)
class GenEval:
    """Objects found by a detector, compared with the request in the prompt's metadata (`flowrl.prompts.geneval`).

    An object counts if its score is above the threshold. Overlapping objects all count (the limit in GenEval's code is 1.0, no
    limit). Colours: zero-shot classification of the object on grey by CLIP, ten colours with three templates each.

    `score` raises `RewardError` for a prompt without a request, or with a class that the detector does not have. Source: GenEval
    (arXiv 2310.11513) and its public code; released: Flow-GRPO's (arXiv 2505.05470) reward server.

    Args:
        form: "strict", GenEval's verdict: 1 if for every clause at least `count` objects of its class are found, the `count` of
            them with the highest scores have its colour and its position, and no excluded number is reached; else 0. "partial", a
            mean over entries: max(0, 1 - |found - count| / count) for every clause; for a requested colour or position, the
            fraction of objects with the colour, or 1 if all are in position, and 0 unless the number is exact. "released",
            Flow-GRPO's server: as "partial", but the first term may be negative (-14 for 16 objects instead of one), and a wrong
            position counts as a 0 and a 1.
        model: Mask2Former (GenEval's detector) or any object detector of transformers with the same classes; other detectors need
            other thresholds.
        clip: the CLIP model for colours.
        threshold: smallest score of an object, in [0, 1).
        counting_threshold: this score if the request's tag is "counting", in [0, 1).
        device: name of the device.
        dtype: precision of the networks.
        batch: images per network call.

    Raises:
        ConfigError: a field is out of range. `load` and `score` also raise it if a model cannot be loaded.
    """

    form: str = "strict"
    model: str = "facebook/mask2former-swin-small-coco-instance"
    clip: str = "openai/clip-vit-large-patch14"
    threshold: float = 0.3
    counting_threshold: float = 0.9
    device: str = "cpu"
    dtype: str = "float32"
    batch: int = 8

    def __post_init__(self) -> None:
        require(self.form in FORMS, "form", self.form, f"one of {', '.join(FORMS)}")
        for name in ("threshold", "counting_threshold"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")

    def load(self) -> "Detector":
        """The detector, loaded with the CLIP model for colours at the first call."""
        self._encoder()
        return load_detector(self.model, self.device, self.dtype, self.batch)

    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [0, 1], or at most 1 for form "released"."""
        detector = load_detector(self.model, self.device, self.dtype, self.batch)
        requests = [_request(prompt, detector.names) for prompt in prompts]
        if any(clause.colour for request in requests for clause in request.include):
            self._encoder()  # a wrong folder raises here, not at the first object with a colour
        found = detector.find(images, min(self.threshold, self.counting_threshold))
        compare = {"strict": strict_score, "partial": partial_score, "released": released_score}[self.form]
        scores = []
        for image, objects, request in zip(images, found, requests, strict=True):
            limit = self.counting_threshold if request.tag == "counting" else self.threshold
            names = {clause.name for clause in (*request.include, *request.exclude)}
            by_class = {name: of_class(objects, name, limit, MOST_OBJECTS) for name in names}
            scores.append(compare(request, by_class, self._colours(image)))
        return torch.tensor(scores)

    def _colours(self, image: Float[Tensor, "channel height width"]) -> ColoursOf:
        def colours(objects: Sequence[Detection], name: str) -> list[str]:
            return object_colours(self._encoder(), image, objects, name)

        return colours

    def _encoder(self) -> Encoder:
        return load_encoder(self.clip, "", self.device, self.dtype)


def of_class(objects: Sequence[Detection], name: str, threshold: float, most: int) -> list[Detection]:
    """The objects of a class with a score above `threshold`, highest scores first, at most `most`."""
    return [detection for detection in objects if detection.name == name and detection.score > threshold][:most]


def strict_score(request: Request, found: Found, colours: ColoursOf) -> float:
    """GenEval's verdict, 1 or 0; see `GenEval`."""
    matched: list[list[Detection]] = []
    for clause in request.include:
        objects = found.get(clause.name, [])[: clause.count]
        if len(objects) < clause.count:
            return 0.0
        if clause.colour and colours(objects, clause.name).count(clause.colour) < clause.count:
            return 0.0
        if clause.position and not _in_position(clause, objects, matched[clause.target]):
            return 0.0
        matched.append(objects)
    return float(all(len(found.get(clause.name, [])) < clause.count for clause in request.exclude))


def partial_score(request: Request, found: Found, colours: ColoursOf) -> float:
    """Partial credit in [0, 1]; see `GenEval`."""
    entries: list[float] = []
    matched: list[list[Detection] | None] = []
    for clause in request.include:
        objects = found.get(clause.name, [])
        entries.append(max(0.0, 1 - abs(len(objects) - clause.count) / clause.count))
        good = len(objects) == clause.count
        if clause.colour:
            right = colours(objects, clause.name).count(clause.colour) if good else 0
            entries.append(right / clause.count)
            good = good and right == clause.count
        if clause.position:
            target = matched[clause.target]
            good = good and target is not None and _in_position(clause, objects, target)
            entries.append(float(good))
        matched.append(objects if good else None)
    return sum(entries) / len(entries)


def released_score(request: Request, found: Found, colours: ColoursOf) -> float:
    """Partial credit of Flow-GRPO's reward server, at most 1; see `GenEval`."""
    entries: list[float] = []
    matched: list[list[Detection] | None] = []
    for clause in request.include:
        objects = found.get(clause.name, [])
        entries.append(1 - abs(len(objects) - clause.count) / clause.count)
        good = len(objects) == clause.count
        if not good and (clause.colour or clause.position):
            entries.append(0.0)
        if good and clause.colour:
            right = colours(objects, clause.name).count(clause.colour)
            entries.append(right / clause.count)
            good = right == clause.count
        if good and clause.position:
            target = matched[clause.target]
            good = target is not None and _in_position(clause, objects, target)
            entries += [1.0] if good else [0.0] if target is None else [0.0, 1.0]
        matched.append(objects if good else None)
    return sum(entries) / len(entries)


def _in_position(clause: Clause, objects: Sequence[Detection], targets: Sequence[Detection]) -> bool:
    """Whether all objects are in the clause's position relative to all targets."""
    return all(clause.position in relations(one.box, other.box) for one in objects for other in targets)


def relations(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """The position of box a relative to box b: none, one or two of "left of", "right of", "above" and "below".

    Let d = centre_a - centre_b. The part of |d| beyond 0.1 of the sum of both boxes' sizes, with the sign of d and divided by
    |d|, must exceed 0.5 along an axis.
    """
    offset = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    sizes = [abs(a[i + 2] - a[i]) + abs(b[i + 2] - b[i]) for i in (0, 1)]
    beyond = [math.copysign(max(abs(d) - MARGIN * size, 0.0), d) for d, size in zip(offset, sizes, strict=True)]
    if all(abs(d) < 1e-3 for d in beyond):
        return set()
    across, down = (d / math.hypot(*offset) for d in beyond)
    checks = {"left of": across < -0.5, "right of": across > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {name for name, holds in checks.items() if holds}


def object_colours(
    encoder: Encoder, image: Float[Tensor, "channel height width"], objects: Sequence[Detection], name: str
) -> list[str]:
    """The most likely of ten colours for each object: CLIP features of its crop against the mean features of the templates."""
    if not objects:
        return []
    texts = [template.format(colour=colour, name=name) for colour in COLOURS for template in TEMPLATES]
    classes = F.normalize(encoder.texts(texts).view(len(COLOURS), len(TEMPLATES), -1).mean(1), dim=1)
    pixels = torch.cat([clip_pixels(_crop(image, detection)[None], encoder.size) for detection in objects])
    return [COLOURS[i] for i in (encoder.features(pixels) @ classes.T).argmax(1).tolist()]


def _crop(image: Float[Tensor, "channel height width"], detection: Detection) -> Tensor:
    """The object's box, grey outside its mask; at least a pixel wide and high."""
    if detection.mask is not None:
        image = torch.where(detection.mask.to(image.device), image, torch.full_like(image, GREY))
    height, width = image.shape[-2:]
    box = [round(edge) for edge in detection.box]
    left, top = min(max(box[0], 0), width - 1), min(max(box[1], 0), height - 1)
    right, bottom = min(max(box[2], left + 1), width), min(max(box[3], top + 1), height)
    return image[:, top:bottom, left:right]


def _request(prompt: Prompt, known: Sequence[str]) -> Request:
    """The prompt's request; its classes must be among those `known` to the detector."""
    if "include" not in prompt.metadata:
        raise RewardError(
            f'geneval: the prompt {prompt.text!r} has no request; give prompts as JSON lines with an entry "include"'
        )
    try:
        request = request_of(prompt.metadata)
    except ConfigError as error:
        raise RewardError(f"geneval: the prompt {prompt.text!r}: {error}") from error
    for clause in (*request.include, *request.exclude):
        if clause.name not in known:
            raise RewardError(f"geneval: the detector has no class {clause.name!r}; allowed: {', '.join(known[:100])}")
    return request


@dataclass(frozen=True)
class Detector:
    """A detector with its preprocessing; `batch` images at a time."""

    model: Any
    processor: Any
    batch: int

    @property
    def names(self) -> tuple[str, ...]:
        """The detector's classes."""
        return tuple(RENAMED.get(str(name), str(name)) for name in self.model.config.id2label.values())

    @torch.no_grad()
    def find(self, images: Images, threshold: float) -> list[list[Detection]]:
        """The objects in every image with a score of at least `threshold`, highest scores first."""
        found: list[list[Detection]] = []
        weight = next(self.model.parameters())
        for piece in images.split(self.batch):
            inputs = self.processor(images=to_pillow(piece), return_tensors="pt").to(weight.device)
            inputs["pixel_values"] = inputs["pixel_values"].to(weight.dtype)
            sizes = [(piece.shape[-2], piece.shape[-1])] * len(piece)
            outputs = self.model(**{name: inputs[name] for name in ("pixel_values", "pixel_mask") if name in inputs})
            if self.model.config.model_type in SEGMENTERS:
                results = self.processor.post_process_instance_segmentation(
                    _floats(outputs), threshold=threshold, target_sizes=sizes, return_binary_maps=True
                )
                found += [self._from_masks(result) for result in results]
            else:
                results = self.processor.post_process_object_detection(_floats(outputs), threshold=threshold, target_sizes=sizes)
                found += [self._from_boxes(result) for result in results]
        return [sorted(objects, key=lambda detection: -detection.score) for objects in found]

    def _from_boxes(self, result: dict[str, Tensor]) -> list[Detection]:
        rows = zip(result["labels"].tolist(), result["scores"].tolist(), result["boxes"].tolist(), strict=True)
        return [Detection(self._name(label), score, (box[0], box[1], box[2], box[3])) for label, score, box in rows]

    def _from_masks(self, result: dict[str, Any]) -> list[Detection]:
        segments = result["segments_info"]
        masks = result["segmentation"].bool().cpu() if segments else ()
        return [
            Detection(self._name(segment["label_id"]), segment["score"], box_of(mask), mask)
            for segment, mask in zip(segments, masks, strict=True)
        ]

    def _name(self, label: int) -> str:
        name = str(self.model.config.id2label[label])
        return RENAMED.get(name, name)


@lru_cache(maxsize=2)
def load_detector(model: str, device: str = "cpu", dtype: str = "float32", batch: int = 8) -> Detector:
    """The detector in the folder `model`, or of that name on the Hub, loaded once per setting.

    An instance segmentation model (Mask2Former) or any of transformers' object detectors. Raises `ConfigError` for a model that
    cannot be loaded or lacks weights, a device that does not exist, or an unknown precision.
    """
    with loading(model, "", dtype, batch):
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection, AutoModelForUniversalSegmentation

        kind = AutoConfig.from_pretrained(model, **DATA_ONLY).model_type
        loader: Any = AutoModelForUniversalSegmentation if kind in SEGMENTERS else AutoModelForObjectDetection
        network = load_network(loader, model, dtype)
        processor = AutoImageProcessor.from_pretrained(model, **DATA_ONLY)
    return Detector(frozen_on(network, device), processor, batch)


def _floats(outputs: Any) -> Any:
    """The outputs converted to float32."""
    for name, value in list(outputs.items()):
        if isinstance(value, Tensor) and value.is_floating_point():
            outputs[name] = value.float()
    return outputs


def box_of(mask: Bool[Tensor, "height width"]) -> tuple[float, float, float, float]:
    """The smallest box (left, top, right, bottom) around a mask; right and bottom are exclusive."""
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
