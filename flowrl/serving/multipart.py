"""A multipart/form-data body (RFC 7578) into named parts, in memory and within limits."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from flowrl.serving.limits import Refusal

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings go to the client, not to the log


class Parts:
    """Collects the parts of one body; feed it with `write`, then call `finish`.

    `allowed` maps part names to the largest number of parts of that name, `sizes` some of them to the largest number of bytes.
    Raises `Refusal` (400, 413 or 415) that says what is wrong with the body.
    """

    def __init__(self, content_type: str, allowed: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
            raise Refusal(415, "not_multipart", "the body must be multipart/form-data with a boundary of 1 to 70 characters")
        self.allowed, self.sizes = allowed, sizes
        self.found: dict[str, list[bytes]] = {name: [] for name in allowed}
        self._complete = False
        self._name = ""
        self._data = bytearray()
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._part_begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def write(self, chunk: bytes) -> None:
        """The next bytes of the body."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise Refusal(400, "bad_multipart", f"the multipart body cannot be read: {error}") from error

    def finish(self) -> dict[str, list[bytes]]:
        """The parts' contents by name, in the order of the body."""
        if not self._complete:
            raise Refusal(400, "truncated", "the multipart body ends before its last boundary")
        return self.found

    def _part_begin(self) -> None:
        self._name, self._data, self._disposition = "", bytearray(), b""

    def _header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("latin-1")
        if self._name not in self.allowed:
            raise Refusal(400, "unknown_part", f"unknown part {self._name[:40]!r}; allowed: {', '.join(self.allowed)}")
        if len(self.found[self._name]) >= self.allowed[self._name]:
            most = self.allowed[self._name]
            raise Refusal(413, "too_many_parts", f"more than {most} part{'s' if most > 1 else ''} called {self._name!r}")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        most = self.sizes.get(self._name)
        if most is not None and len(self._data) > most:
            raise Refusal(413, "part_too_large", f"the part {self._name!r} is larger than {most} bytes")

    def _part_end(self) -> None:
        self.found[self._name].append(bytes(self._data))
        self._data = bytearray()

    def _end(self) -> None:
        self._complete = True
