"""The wire format between `remote` and a reward server, API 1.1: encoding and decoding of both
directions.

A request is a multipart form: `prompts` (JSON), and the images as one part `safetensors` or as one
part `png` per image. A response is JSON (`ScoreResponse` or `ErrorResponse`). Neither side
unpickles anything.
"""

import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flowrl.core.errors import FlowrlError, RewardContractError, RewardError
from flowrl.core.types import Prompt
from flowrl.reading import finite_number, once
from flowrl.rewards.contract import ComponentScores, check_scores
from flowrl.rewards.images import to_pillow

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
    "decode_safetensors",
    "decode_scores",
    "encode_request",
    "encode_scores",
    "png_size",
]

API_VERSION = "1.1"
"""The version of the HTTP interface."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
PNG_MODES = ("RGB", "L", "P", "1")

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
    """A prompt: its `text`, and `metadata` as any JSON object."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = Field(max_length=100_000)
    metadata: dict[str, Any] = Field(default_factory=dict)


class ScoreResponse(BaseModel):
    """One finite number per image, in the order of the request, or a mark that the reward cannot
    judge the image.
    """

    model_config = ConfigDict(strict=True)

    request: str = Field(description="The request's X-Request-Id, or an id made by the server")
    scores: list[FiniteFloat | None] = Field(
        description=(
            "One finite number per image, in the order of the request; higher is better. null if"
            " invalid is true"
        )
    )
    invalid: list[bool] = Field(
        default_factory=list,
        description=(
            "Per image, whether the reward marked it as one that it cannot judge. All false from"
            " rewards without marks"
        ),
    )
    parts: dict[str, list[FiniteFloat | None]] | None = Field(
        None,
        description=(
            "With ?parts=true: the scores of every component; null only where invalid is true"
        ),
    )
    weights: dict[str, FiniteFloat] | None = Field(
        None,
        description=(
            "With ?parts=true: the weight of every component; scores are the weighted sum of parts"
        ),
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


_PROMPTS: TypeAdapter[list[PromptMessage]] = TypeAdapter(list[PromptMessage])
_ENTRIES: TypeAdapter[list[Any]] = TypeAdapter(list[Any])
OBJECTS = 100
"""Largest mean number of JSON objects of a prompt with its metadata."""
HEADER_BYTES = 10_000
"""Largest header of a safetensors part."""


# --- requests
# --------------------------------------------------------------------------------------------------


def encode_request(
    images: Tensor, prompts: Sequence[Prompt], image_format: Literal["safetensors", "png"]
) -> list[FormPart]:
    """The parts of the form that a request sends.

    Args:
        images: images [sample, channel, height, width] in [0, 1].
        prompts: one prompt per image.
        image_format: "safetensors" (float32) or "png" (8 bits).

    Returns:
        (field, (file name, content, media type)) of each part.

    Raises:
        RewardError: images are not finite or have no PNG, or JSON cannot represent the metadata.
    """
    listed = [
        {"text": prompt.text, "metadata": _to_json(prompt.metadata, prompt, "metadata")}
        for prompt in prompts
    ]
    parts = [("prompts", ("prompts.json", json.dumps(listed).encode(), "application/json"))]
    pixels = images.detach().cpu().float().contiguous()
    if not bool(torch.isfinite(pixels).all()):
        raise RewardError("remote: the images have values that are not finite; they are not sent")
    if image_format == "safetensors":
        return [
            *parts,
            (
                "safetensors",
                ("images.safetensors", save({"images": pixels}), "application/octet-stream"),
            ),
        ]
    return [
        *parts,
        *(("png", (f"{i}.png", data, "image/png")) for i, data in enumerate(_encode_pngs(pixels))),
    ]


def _encode_pngs(images: Tensor) -> list[bytes]:
    """[sample, 3 or 1, height, width] in [0, 1] as 8-bit PNG files: round(255 x)."""
    if images.shape[1] not in (1, 3):
        raise RewardError(
            f"remote: images='png' needs 1 or 3 channels, got {images.shape[1]}; use"
            " images='safetensors'"
        )
    files = [io.BytesIO() for _ in images]
    for file, image in zip(files, to_pillow(images), strict=True):
        image.save(file, "PNG", compress_level=1)
    return [file.getvalue() for file in files]


def _to_json(value: Any, prompt: Prompt, path: str) -> Any:
    """Metadata in JSON's types. Raises `RewardError` naming the prompt and the entry that JSON
    cannot represent.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _to_json(getattr(value, f.name), prompt, f"{path}.{f.name}")
            for f in fields(value)
        }
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _to_json(entry, prompt, f"{path}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry, prompt, f"{path}[{number}]") for number, entry in enumerate(value)]
    raise RewardError(
        f"remote: {path} of prompt {prompt.text!r} is {repr(value)[:60]} ({type(value).__name__}),"
        " which cannot be sent; allowed: text, finite numbers, true, false, null, lists, and"
        " objects of them"
    )


def decode_prompts(data: bytes, most: int = 2**31) -> list[Prompt]:
    """A JSON list of at most `most` {"text": ..., "metadata": {...}}; without NaN, and with every
    name of an object once. Raises `WireFormatError`.
    """
    if (objects := data.count(b"{")) > OBJECTS * most:  # before they cost seconds
        message = f"prompts with {objects} objects; allowed: 1 to {most} samples of {OBJECTS}"
        raise WireFormatError("too_many_samples", message)
    try:
        if (count := len(_ENTRIES.validate_json(data))) > most:
            message = f"{count} samples in one request; allowed: 1 to {most}"
            raise WireFormatError("too_many_samples", message)
        found = _PROMPTS.validate_json(data)
        json.loads(
            data,
            object_pairs_hook=once,
            parse_constant=finite_number,
            parse_float=finite_number,
        )
    except ValueError as error:
        if not isinstance(error, ValidationError):
            raise WireFormatError("bad_prompts", f"prompts: {str(error)[:200]}") from error
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise WireFormatError(
            "bad_prompts", f"prompts{f' at {place}' if place else ''}: {first['msg'][:200]}"
        ) from error
    return [Prompt(item.text, item.metadata) for item in found]


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
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        AttributeError,
        OverflowError,
        MemoryError,
    ) as error:
        message = f"the safetensors part cannot be read: {type(error).__name__}: {str(error)[:200]}"
        raise WireFormatError("bad_safetensors", message) from error
    if set(tensors) != {"images"}:
        names = ", ".join(sorted(tensors))[:200] or "none"
        raise WireFormatError(
            "bad_safetensors",
            f"the safetensors part holds the tensors {names}; allowed: images, alone",
        )
    images = tensors["images"]
    if images.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise WireFormatError(
            "bad_images",
            f"images are {str(images.dtype).removeprefix('torch.')}; allowed: {allowed}",
        )
    if images.ndim != 4 or 0 in images.shape:
        allowed = "[sample, channel, height, width], none of them 0"
        raise WireFormatError(
            "bad_images", f"images have shape {list(images.shape)}; allowed: {allowed}"
        )
    values = images.float() / 255.0 if images.dtype == torch.uint8 else images.float()
    if not bool(torch.isfinite(values).all()):
        raise WireFormatError("bad_images", "images hold values that are not finite")
    return values


def png_size(files: Sequence[bytes]) -> tuple[int, int]:
    """Width and height of all images, from the headers of the files alone. Raises `WireFormatError`
    if they differ.
    """
    sizes = {_open_png(number, data).size for number, data in enumerate(files)}
    if len(sizes) != 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:4])
        raise WireFormatError(
            "bad_images", f"the images of one request must have one size; found {shown}"
        )
    return sizes.pop()


def decode_pngs(files: Sequence[bytes]) -> Tensor:
    """[sample, 3, height, width] float32 in [0, 1]: value / 255. Raises `WireFormatError`.

    The files are 8-bit RGB, grey or palette images of one size, without transparency or animation.
    """
    images = torch.empty(0)
    for number, data in enumerate(files):
        image = _open_png(number, data)
        if image.mode not in PNG_MODES or "transparency" in image.info:
            message = (
                f"png {number} has mode {image.mode}; allowed: 8-bit {', '.join(PNG_MODES)} without"
                " transparency"
            )
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
    reason = (
        "it is no PNG"
        if isinstance(error, UnidentifiedImageError)
        else f"{type(error).__name__}: {str(error)[:100]}"
    )
    return WireFormatError("bad_images", f"png {number} cannot be read: {reason}")


# --- responses
# --------------------------------------------------------------------------------------------------


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
    marks = scores.invalid.tolist()
    total = [
        None if mark else value for value, mark in zip(scores.total.tolist(), marks, strict=True)
    ]
    found: dict[str, Any] = {"request": request_id, "scores": total, "invalid": marks}
    if weights is not None:
        parts = {
            name: [None if math.isnan(value) else value for value in part.tolist()]
            for name, part in scores.parts.items()
        }
        found |= {"parts": parts, "weights": dict(weights)}
    return ScoreResponse(**found).model_dump_json(exclude_unset=True).encode()


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
        TransientError: `content` is no response to this request.
        RewardContractError: the scores break the contract.
    """
    response = _read_response(content, origin)
    if response.request != request_id:
        raise TransientError("the response belongs to another request")
    count = len(prompts)
    marks = torch.tensor(
        response.invalid if "invalid" in response.model_fields_set else [False] * count,
        dtype=torch.bool,
    )
    if marks.shape != (count,):
        raise RewardContractError(f"{origin} sent {len(marks)} invalid marks for {count} images")

    def read(values: Sequence[float | None], what: str) -> Tensor:
        numbers = torch.tensor(
            [math.nan if value is None else value for value in values], dtype=torch.float64
        ).float()
        check_scores(numbers, prompts, f"{origin} ({what})", allow_invalid=True)
        unmarked = (numbers.isnan() & ~marks).nonzero().flatten().tolist()
        if unmarked:
            raise RewardContractError(
                f"{origin} sent null in {what} for sample {unmarked[0]} of {count} without an"
                " invalid mark"
            )
        return numbers

    total = read(response.scores, "scores")
    scored = (marks & ~total.isnan()).nonzero().flatten().tolist()
    if scored:
        raise RewardContractError(
            f"{origin} marks sample {scored[0]} of {count} invalid, yet sends a score for it"
        )
    if not with_parts:
        return ComponentScores(total), {}
    if not response.parts:
        raise RewardContractError(
            f"{origin} sends no components; remote-sum needs a weighted-sum there"
        )
    weights = response.weights or {}
    if set(weights) != set(response.parts):
        names = ", ".join(response.parts)[:60]
        raise RewardContractError(
            f"{origin} sent {repr(weights)[:60]} as the weights of the components {names}"
        )
    parts = {name: read(values, f"component {name!r}") for name, values in response.parts.items()}
    return ComponentScores(total, parts), weights


def _read_response(content: bytes, origin: str) -> ScoreResponse:
    """The response by its types. Raises `TransientError` if it is none, `RewardContractError` for a
    wrong value in it.
    """
    try:
        return ScoreResponse.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        # no JSON, no object, or one without the fields of a response
        if not place or first["type"] == "missing":
            raise TransientError(
                f"the response cannot be read ({place or 'JSON'}: {first['msg'][:100]})"
            ) from error
        raise RewardContractError(
            f"{origin} sent {repr(first['input'])[:40]} as {place[:60]}: {first['msg'][:100]}"
        ) from error


def decode_error(content: bytes) -> ErrorDetail | None:
    """The error of an `ErrorResponse`; None if the content is something else."""
    try:
        return ErrorResponse.model_validate_json(content).error
    except ValidationError:
        return None
