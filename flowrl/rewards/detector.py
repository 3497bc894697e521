"""Finding objects in pictures with a detector from transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.rewards.pictures import to_pillow
from flowrl.rewards.pretrained import load_network, placed, refused, require_options, unavailable

SEGMENTERS = ("mask2former", "maskformer")
RENAMED = {
    "mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard", "motorbike": "motorcycle",
    "aeroplane": "airplane", "sofa": "couch", "pottedplant": "potted plant", "diningtable": "dining table", "tvmonitor": "tv",
}  # fmt: skip
"""Labels of COCO detectors whose names are other ones in GenEval."""


@dataclass(frozen=True)
class Detection:
    """An object: its class, how sure the detector is, its box (left, top, right, bottom) in pixels, perhaps its mask."""

    name: str
    score: float
    box: tuple[float, float, float, float]
    mask: Bool[Tensor, "height width"] | None = None


@dataclass(frozen=True)
class Detector:
    """A detector with its preprocessing; `batch` pictures at a time."""

    model: Any
    processor: Any
    batch: int

    @property
    def names(self) -> tuple[str, ...]:
        """The classes that it knows."""
        return tuple(RENAMED.get(str(name), str(name)) for name in self.model.config.id2label.values())

    @torch.no_grad()
    def find(self, images: Float[Tensor, "sample channel height width"], threshold: float) -> list[list[Detection]]:
        """Objects in every picture that the detector is at least `threshold` sure of, surest first."""
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
        return [sorted(objects, key=lambda thing: -thing.score) for objects in found]

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


def box_of(mask: Bool[Tensor, "height width"]) -> tuple[float, float, float, float]:
    """The smallest box (left, top, right, bottom) around a mask; the right and bottom edges lie behind its last pixels."""
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _floats(outputs: Any) -> Any:
    """The outputs in float32, whatever the network's precision."""
    for name, value in list(outputs.items()):
        if isinstance(value, Tensor) and value.is_floating_point():
            outputs[name] = value.float()
    return outputs


@lru_cache(maxsize=2)
def load_detector(model: str, device: str = "cpu", dtype: str = "float32", batch: int = 8) -> Detector:
    """The detector in the folder `model`, or of that name on the Hub, loaded once per setting.

    An instance segmentation model (Mask2Former) or any of transformers' object detectors. Raises `ConfigError` for a model that
    cannot be had or lacks weights, a device that does not exist, or a precision that is none.
    """
    require_options(dtype, batch)
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection, AutoModelForUniversalSegmentation

    try:
        kind = AutoConfig.from_pretrained(model).model_type
        loader: Any = AutoModelForUniversalSegmentation if kind in SEGMENTERS else AutoModelForObjectDetection
        network = load_network(loader, model, dtype)
        processor = AutoImageProcessor.from_pretrained(model)
    except refused() as error:
        raise unavailable(model, "", error) from error
    return Detector(placed(network, device), processor, batch)


def of_class(objects: Sequence[Detection], name: str, threshold: float, most: int) -> list[Detection]:
    """The objects of a class with a score above `threshold`, surest first, at most `most`."""
    return [thing for thing in objects if thing.name == name and thing.score > threshold][:most]
