"""From an HTTP request to images and prompts: the memory budget, the multipart form and its
limits.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import FormParser, parse_options_header
from torch import Tensor

from flowrl.core.types import Prompt
from flowrl.serving.server_settings import ServerLimits
from flowrl.serving.wire_format import (
    WireFormatError,
    decode_pngs,
    decode_prompts,
    decode_references,
    decode_safetensors,
    png_size,
)

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings are in the response

REFERENCES = 4
"""Largest number of different images per sample to which prompts refer."""


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        code: error code for programs.
        message: text for users.
        retry: whether the same request may succeed later.
    """

    def __init__(self, status: int, code: str, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry = status, code, message, retry


class MemoryBudget:
    """Bytes of all requests together, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()

    def reserve(self, amount: int) -> None:
        """Count `amount` bytes. Raises `RequestError` (503) beyond the limit."""
        with self._lock:
            if self.used + amount > self.limit:
                message = f"requests take {self.used} bytes; allowed: {self.limit}"
                raise RequestError(503, "busy", message, retry=True)
            self.used += amount

    def release(self, amount: int) -> None:
        """Release reserved bytes."""
        with self._lock:
            self.used -= amount


class RequestMemory:
    """The bytes that one request has reserved in a `MemoryBudget`; leaving the context releases all
    of them.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._reserved = budget, 0

    def reserve(self, amount: int) -> None:
        """Reserve `amount` more bytes. Raises `RequestError`: 413 if this request alone needs more
        than the limit, else 503.
        """
        if self._reserved + amount > self._budget.limit:
            message = (
                f"the request needs more than {self._budget.limit} bytes of memory; send fewer or"
                " smaller images"
            )
            raise RequestError(413, "too_much_memory", message)
        self._budget.reserve(amount)
        self._reserved += amount

    def __enter__(self) -> "RequestMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.release(self._reserved)
        self._reserved = 0


class MultipartForm:
    """Collects the parts of one multipart/form-data body (RFC 7578) in memory; call `write` for
    every chunk, then `finish`.

    Args:
        content_type: the request's Content-Type.
        max_parts: allowed names of parts, and the largest number of each.
        max_bytes: largest size of a part, for some names.

    Raises:
        RequestError: 415 for another type. `write` and `finish` raise 400 or 413 with the fault of
            the body.
    """

    def __init__(
        self, content_type: str, max_parts: Mapping[str, int], max_bytes: Mapping[str, int]
    ) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
            message = "the body must be multipart/form-data with a boundary of 1 to 70 characters"
            raise RequestError(415, "not_multipart", message)
        self._max_parts, self._max_bytes = max_parts, max_bytes
        self._parts: dict[str, list[bytes]] = {name: [] for name in max_parts}
        self._complete = False
        self._parser = FormParser(
            "multipart/form-data",
            on_field=lambda field: self._add(field.field_name, field.value or b""),
            # a file in memory, as there is no limit beyond which it is written to the disk
            on_file=self._add_file,
            on_end=self._end,
            boundary=boundary,
            config={"MAX_MEMORY_FILE_SIZE": math.inf},
        )

    def write(self, chunk: bytes) -> None:
        """The next bytes of the body."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            message = f"the multipart body cannot be read: {error}"
            raise RequestError(400, "bad_multipart", message) from error

    def finish(self) -> dict[str, list[bytes]]:
        """The contents of the parts by name, in the order of the body."""
        if not self._complete:
            raise RequestError(400, "truncated", "the multipart body ends before its last boundary")
        return self._parts

    def _add(self, field_name: bytes | None, data: bytes) -> None:
        name = (field_name or b"").decode("latin-1")
        if name not in self._parts:
            allowed = ", ".join(self._parts)
            raise RequestError(400, "unknown_part", f"part {name[:40]!r}; allowed: {allowed}")
        most, size = self._max_parts[name], self._max_bytes.get(name, math.inf)
        if len(self._parts[name]) >= most:
            raise RequestError(413, "too_many_parts", f"parts {name!r}; allowed: {most}")
        if len(data) > size:
            raise RequestError(413, "part_too_large", f"part {name!r}; allowed: {size} bytes")
        self._parts[name].append(data)

    def _add_file(self, file: Any) -> None:
        self._add(file.field_name, file.file_object.getvalue())

    def _end(self) -> None:
        self._complete = True


async def read_request(
    request: Request, limits: ServerLimits, memory: RequestMemory
) -> tuple[Tensor, Sequence[Prompt]]:
    """Images [sample, channel, height, width] and as many prompts, within `limits`. Raises
    `RequestError`.
    """
    try:
        async with asyncio.timeout(limits.body_seconds):
            parts = await _receive_form(request, limits, memory)
    except TimeoutError:
        message = f"the body took longer than {limits.body_seconds:g} seconds"
        raise RequestError(408, "slow_body", message, retry=True) from None
    try:
        return await asyncio.to_thread(_decode, parts, limits, memory)
    except WireFormatError as error:
        status = 413 if error.code == "too_many_samples" else 422
        raise RequestError(status, error.code, str(error)) from error


async def _receive_form(
    request: Request, limits: ServerLimits, memory: RequestMemory
) -> dict[str, list[bytes]]:
    references = REFERENCES * limits.samples
    max_parts = {"prompts": 1, "safetensors": 1, "png": limits.samples, "reference": references}
    form = MultipartForm(
        request.headers.get("content-type", ""), max_parts, {"prompts": limits.prompts_bytes}
    )
    announced = request.headers.get("content-length", "0")
    size = int(announced[:20]) if announced.isdecimal() else 0
    _require_most(size, limits.body_bytes, "body_too_large", "bytes in the body")
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        _require_most(size, limits.body_bytes, "body_too_large", "bytes in the body")
        memory.reserve(len(chunk))
        form.write(chunk)
    return form.finish()


def _decode(
    parts: Mapping[str, Sequence[bytes]], limits: ServerLimits, memory: RequestMemory
) -> tuple[Tensor, Sequence[Prompt]]:
    pngs, tensors = parts["png"], parts["safetensors"]
    if not parts["prompts"]:
        message = "the part 'prompts' is missing: a JSON list, one object per image"
        raise RequestError(422, "no_prompts", message)
    if bool(pngs) == bool(tensors):
        message = "images are missing: send parts 'png' or one part 'safetensors'"
        raise RequestError(422, "no_images", message)
    references = decode_references(parts["reference"], limits.pixels)
    prompts = decode_prompts(parts["prompts"][0], limits.samples, references)
    if pngs:
        width, height = png_size(pngs)
        _require_most(width * height, limits.pixels, "too_many_pixels", "pixels in an image")
        memory.reserve(12 * len(pngs) * width * height)  # 3 floats per pixel
        images = decode_pngs(pngs)
    else:
        memory.reserve(4 * len(tensors[0]))  # a byte becomes at most a float
        images = decode_safetensors(tensors[0])
        pixels = images.shape[2] * images.shape[3]
        _require_most(pixels, limits.pixels, "too_many_pixels", "pixels in an image")
        _require_most(len(images), limits.samples, "too_many_samples", "images")
    if len(images) != len(prompts):
        message = f"{len(images)} images and {len(prompts)} prompts; allowed: one prompt per image"
        raise RequestError(422, "wrong_count", message)
    return images, prompts


def _require_most(count: int, most: int, code: str, what: str) -> None:
    if count > most:
        raise RequestError(413, code, f"{count} {what}; allowed: {most}")
