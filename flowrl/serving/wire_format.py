"""The wire format between `remote` and a reward server, API 1.2: encoding and decoding of both
directions.

A request is a multipart form: `prompts` (JSON), the images as one part `safetensors` or as one part
`png` per image, and every different image to which the prompts refer as one part `reference`. A
response is JSON (`ScoreResponse` or `ErrorResponse`). Neither side unpickles anything.
"""

import hashlib
import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from flowrl.core.errors import FlowrlError, RewardContractError, RewardError
from flowrl.core.prompt import Prompt, ReferenceImage
from flowrl.rewards.contract import ComponentScores, check_scores
from flowrl.rewards.images import to_bytes, to_pillow
from flowrl.run.reading import parse_json

__all__ = [
    "API_VERSION",
    "ErrorDetail",
    "ErrorResponse",
    "PromptMessage",
    "ScoreResponse",
    "TransientError",
    "WireFormatError",
    "decode_error",
    "decode_pngs",
    "decode_prompts",
    "decode_references",
    "decode_safetensors",
    "decode_scores",
    "encode_request",
    "encode_scores",
    "png_size",
]

API_VERSION = "1.2"
"""The version of the HTTP interface."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
PNG_MODES = ("RGB", "L", "P", "1")

ImageFormat = Literal["safetensors", "uint8", "png"]
FormPart = tuple[str, tuple[str, bytes, str]]
"""A part of a multipart form: its name, then file name, content and media type."""


class WireFormatError(FlowrlError):
    """A request does not follow the format: `code` is the error code of the response, such as
    bad_images; `message` has the details.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TransientError(Exception):
    """An attempt failed temporarily, for this `reason`. `retry_after`: the pause that the server
    requests, in seconds.
    """

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class PromptMessage(BaseModel):
    """A prompt: its `text`, `metadata` as any JSON object, and the SHA-256 of the `images` to which
    it refers.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = Field(max_length=100_000)
    metadata: dict[str, Any] = Field(default_factory=dict)
    images: list[str] = Field(default_factory=list, max_length=16)


class ScoreResponse(BaseModel):
    """One finite number per image, in the order of the request, or a mark that the reward cannot
    judge the image.
    """

    model_config = ConfigDict(strict=True)

    request: str = Field(description="The request's X-Request-Id, or an id made by the server")
    scores: list[FiniteFloat | None] = Field(
        description="One finite number per image, in the order of the request; null if invalid"
    )
    invalid: list[bool] = Field(
        description="Per image, whether the reward marked it as one that it cannot judge"
    )
    parts: dict[str, list[FiniteFloat | None]] | None = Field(
        None,
        description="With ?parts=true: the scores of every component; null if it marked the image",
    )
    weights: dict[str, FiniteFloat] | None = Field(
        None,
        description="With ?parts=true: the weight of every component of the sum",
    )


class ErrorDetail(BaseModel):
    """Why there are no scores."""

    model_config = ConfigDict(strict=True)

    code: str = Field(description="A word for programs, such as too_many_samples")
    message: str = Field(description="A sentence for people")
    retry: bool = Field(description="Whether the same request may succeed later")


class ErrorResponse(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


ENTRIES = 400
"""Largest mean number of entries of a prompt with its metadata; a JSON object counts as 4."""
HEADER_BYTES = 10_000
"""Largest header of a safetensors part."""
_PROMPTS: TypeAdapter[list[PromptMessage]] = TypeAdapter(list[PromptMessage])


def encode_request(
    images: Tensor, prompts: Sequence[Prompt], image_format: ImageFormat
) -> list[FormPart]:
    """The parts of the form that a request sends.

    Args:
        images: images [sample, channel, height, width] in [0, 1].
        prompts: one prompt per image.
        image_format: "safetensors" (float32), "uint8" (safetensors with 8 bits) or "png" (8 bits).

    Returns:
        (field, (file name, content, media type)) of each part.

    Raises:
        RewardError: images are not finite or have no PNG, or JSON cannot represent the metadata.
    """
    listed = ",".join(map(_encode_prompt, prompts))
    parts = [("prompts", ("prompts.json", f"[{listed}]".encode(), "application/json"))]
    references = {image.sha256: image for prompt in prompts for image in prompt.images}
    for name, image in references.items():
        parts.append(("reference", (name, image.content(), "application/octet-stream")))
    pixels = images.detach().cpu().float().contiguous()
    if not bool(torch.isfinite(pixels).all()):
        raise RewardError("remote: the images have values that are not finite; they are not sent")
    if image_format == "uint8":
        pixels = to_bytes(pixels).permute(0, 3, 1, 2).contiguous()
    if image_format != "png":
        content = save({"images": pixels})
        file = ("images.safetensors", content, "application/octet-stream")
        return [*parts, ("safetensors", file)]
    files = enumerate(_encode_pngs(pixels))
    return [*parts, *(("png", (f"{number}.png", data, "image/png")) for number, data in files)]


def _encode_pngs(images: Tensor) -> list[bytes]:
    """[sample, 3 or 1, height, width] in [0, 1] as 8-bit PNG files: round(255 x)."""
    if images.shape[1] not in (1, 3):
        raise RewardError(f"remote: images='png' needs 1 or 3 channels, not {images.shape[1]}")
    files = [io.BytesIO() for _ in images]
    for file, image in zip(files, to_pillow(images), strict=True):
        image.save(file, "PNG", compress_level=1)
    return [file.getvalue() for file in files]


def _encode_prompt(prompt: Prompt) -> str:
    """A `PromptMessage` as JSON. Raises `RewardError` for metadata that JSON cannot represent."""
    message = {"text": prompt.text, "metadata": prompt.metadata}
    if prompt.images:  # a server of API 1.1 does not know the entry
        message["images"] = [image.sha256 for image in prompt.images]
    try:
        return json.dumps(message, allow_nan=False, default=asdict)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"remote: the metadata of prompt {prompt.text!r} cannot be sent ({error}); allowed:"
            " text, finite numbers, true, false, null, lists, objects and data classes of them"
        ) from error


def decode_prompts(
    data: bytes, most: int = 2**31, references: Mapping[str, ReferenceImage] = MappingProxyType({})
) -> list[Prompt]:
    """A JSON list of at most `most` {"text": ..., "metadata": {...}, "images": [...]}; without NaN,
    and with every name of an object once. `references` are the images by hash. Raises
    `WireFormatError`.
    """
    # Counted before they cost seconds; an object takes as long as four other entries.
    if (entries := data.count(b",") + 4 * data.count(b"{")) > ENTRIES * most:
        message = f"prompts with {entries} entries; allowed: 1 to {most} samples of {ENTRIES}"
        raise WireFormatError("too_many_samples", message)
    try:
        messages = parse_json(data, finite=True)
        if isinstance(messages, list) and len(messages) > most:
            message = f"{len(messages)} samples in one request; allowed: 1 to {most}"
            raise WireFormatError("too_many_samples", message)
        prompts = _PROMPTS.validate_python(messages)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise WireFormatError("bad_prompts", f"prompts {place}: {first['msg'][:200]}") from error
    except ValueError as error:
        raise WireFormatError("bad_prompts", f"prompts: {str(error)[:200]}") from error
    if missing := {name for item in prompts for name in item.images} - references.keys():
        message = f"no part 'reference' has the SHA-256 {sorted(missing)[0]:.64}"
        raise WireFormatError("bad_references", message)
    return [
        Prompt(item.text, item.metadata, tuple(references[name] for name in item.images))
        for item in prompts
    ]


def decode_references(files: Sequence[bytes], most: int) -> dict[str, ReferenceImage]:
    """Images of at most `most` pixels by the hash of their file. Raises `WireFormatError`."""
    images = dict[str, ReferenceImage]()
    for number, data in enumerate(files):
        name = hashlib.sha256(data).hexdigest()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                width, height = Image.open(io.BytesIO(data)).size
            if width * height > most:
                raise ValueError(f"{width} x {height} pixels; allowed: {most}")
            images[name] = ReferenceImage(name, data=data)
            images[name].pillow()
        except Exception as error:  # Pillow raises many kinds for damaged files
            message = f"reference {number} cannot be read: {str(error)[:200]}"
            raise WireFormatError("bad_references", message) from error
    return images


def decode_safetensors(data: bytes) -> Tensor:
    """The tensor `images` [sample, channel, height, width] in float32; uint8 is divided by 255.
    Raises `WireFormatError`.
    """
    header = int.from_bytes(data[:8], "little")
    if header > HEADER_BYTES:  # of one tensor; the library reads a longer one in seconds
        message = f"the safetensors header has {header} bytes; allowed: {HEADER_BYTES}"
        raise WireFormatError("bad_safetensors", message)
    try:
        tensors = load(data)
    except Exception as error:  # the library raises many kinds for damaged files
        message = f"the safetensors part cannot be read: {type(error).__name__}: {str(error)[:200]}"
        raise WireFormatError("bad_safetensors", message) from error
    if set(tensors) != {"images"}:
        message = f"the safetensors part has tensors {sorted(tensors)!s:.200}; allowed: images"
        raise WireFormatError("bad_safetensors", message)
    images = tensors["images"]
    if images.dtype not in DTYPES:
        message = f"images are {images.dtype}; allowed: {', '.join(map(str, DTYPES))}"
        raise WireFormatError("bad_images", message)
    if images.ndim != 4 or 0 in images.shape:
        allowed = "[sample, channel, height, width], none of them 0"
        message = f"images have shape {list(images.shape)}; allowed: {allowed}"
        raise WireFormatError("bad_images", message)
    values = images.float() / 255.0 if images.dtype == torch.uint8 else images.float()
    if not bool(torch.isfinite(values).all()):
        raise WireFormatError("bad_images", "images contain values that are not finite")
    return values


def png_size(files: Sequence[bytes]) -> tuple[int, int]:
    """Width and height of all images, from the headers of the files alone. Raises `WireFormatError`
    if they differ.
    """
    sizes = {_open_png(number, data).size for number, data in enumerate(files)}
    if len(sizes) != 1:
        message = f"the images of a request must have one size, not {sorted(sizes)[:4]}"
        raise WireFormatError("bad_images", message)
    return sizes.pop()


def decode_pngs(files: Sequence[bytes]) -> Tensor:
    """[sample, 3, height, width] float32 in [0, 1]: value / 255. Raises `WireFormatError`.

    The files are 8-bit RGB, grey or palette images of one size, without transparency or animation.
    """
    images = torch.empty(0)
    for number, data in enumerate(files):
        image = _open_png(number, data)
        if image.mode not in PNG_MODES or "transparency" in image.info:
            allowed = f"8-bit {', '.join(PNG_MODES)} without transparency"
            message = f"png {number} has mode {image.mode}; allowed: {allowed}"
            raise WireFormatError("bad_images", message)
        if getattr(image, "n_frames", 1) != 1:
            raise WireFormatError("bad_images", f"png {number} is animated; allowed: one frame")
        try:
            # every chunk's checksum, to the end of the file; decoding alone is lenient
            _open_png(number, data).verify()
            pixels = np.array(image.convert("RGB"))
        except Exception as error:  # Pillow raises many kinds for damaged files
            raise _unreadable_png(number, error) from error
        if number == 0:
            images = torch.empty(len(files), 3, *pixels.shape[:2])
        images[number] = torch.from_numpy(pixels).permute(2, 0, 1)
    return images.div_(255.0)


def _open_png(number: int, data: bytes) -> Image.Image:
    """The image with its header read. Pillow tries its PNG reader only."""
    try:
        with warnings.catch_warnings():
            # the server checks its own limit before decoding
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data), formats=("PNG",))
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise _unreadable_png(number, error) from error


def _unreadable_png(number: int, error: Exception) -> WireFormatError:
    reason = f"{type(error).__name__}: {str(error)[:100]}"
    if isinstance(error, UnidentifiedImageError):
        reason = "it is not a PNG"
    return WireFormatError("bad_images", f"png {number} cannot be read: {reason}")


def encode_scores(
    request_id: str, scores: ComponentScores, weights: Mapping[str, float] | None = None
) -> bytes:
    """A `ScoreResponse` as JSON, with null for invalid samples.

    Args:
        request_id: identifier of the request.
        scores: total and components [sample].
        weights: weights of the components; None leaves out the components.

    Returns:
        Body of the response.
    """
    marks = scores.invalid
    fields: dict[str, Any] = {
        "request": request_id,
        "scores": _without_nan(scores.total.masked_fill(marks, math.nan)),
        "invalid": marks.tolist(),
    }
    if weights is not None:
        parts = {name: _without_nan(part) for name, part in scores.parts.items()}
        fields |= {"parts": parts, "weights": dict(weights)}
    return ScoreResponse(**fields).model_dump_json(exclude_unset=True).encode()


def _without_nan(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def decode_scores(
    content: bytes,
    request_id: str,
    prompts: Sequence[Prompt],
    origin: str,
    with_parts: bool = False,
) -> tuple[ComponentScores, dict[str, float]]:
    """The scores in a response of the reward server: finite, or null for a sample that is marked
    invalid.

    Args:
        content: body of the response.
        request_id: identifier of the request.
        prompts: prompts of the request, one per image.
        origin: subject of an error message.
        with_parts: return components and weights too.

    Returns:
        The scores [sample], NaN for invalid samples, and the weights of the components (empty
        without `with_parts`).

    Raises:
        TransientError: `content` is not a response to this request.
        RewardContractError: the scores break the contract.
    """
    response = _read_response(content, origin)
    if response.request != request_id:
        raise TransientError("the response belongs to another request")
    if len(response.invalid) != len(prompts):
        marks = f"{len(response.invalid)} invalid marks for {len(prompts)} images"
        raise RewardContractError(f"{origin} sent {marks}")
    marks = torch.tensor(response.invalid)

    def read(values: Sequence[float | None], what: str) -> Tensor:
        numbers = [math.nan if value is None else value for value in values]
        scores = torch.tensor(numbers, dtype=torch.float64).float()
        check_scores(scores, prompts, f"{origin} ({what})", allow_invalid=True)
        if bool((scores.isnan() & ~marks).any()):
            raise RewardContractError(f"{origin} sent null in {what} without an invalid mark")
        return scores

    total = read(response.scores, "scores")
    if bool((marks & ~total.isnan()).any()):
        raise RewardContractError(f"{origin} sent a score for a sample that it marks invalid")
    if not with_parts:
        return ComponentScores(total), {}
    weights, components = response.weights or {}, response.parts or {}
    if not components or set(weights) != set(components):
        names = f"components {[*components]!s:.60} and weights {weights!s:.60}"
        raise RewardContractError(f"{origin} sent {names}; remote-sum needs a weighted-sum there")
    parts = {name: read(values, f"component {name!r}") for name, values in components.items()}
    return ComponentScores(total, parts), weights


def _read_response(content: bytes, origin: str) -> ScoreResponse:
    """The response by its types. Raises `TransientError` if it is none, `RewardContractError` for a
    wrong value in it.
    """
    try:
        return ScoreResponse.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        # no JSON, no object, or one without the fields of a response
        if not place or first["type"] == "missing":
            message = f"the response cannot be read ({place or 'JSON'}: {first['msg'][:100]})"
            raise TransientError(message) from error
        raise RewardContractError(
            f"{origin} sent {repr(first['input'])[:40]} as {place[:60]}: {first['msg'][:100]}"
        ) from error


def decode_error(content: bytes) -> ErrorDetail | None:
    """The error of an `ErrorResponse`; None if the content is something else."""
    try:
        return ErrorResponse.model_validate_json(content).error
    except ValidationError:
        return None
