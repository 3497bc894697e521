"""Prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.core.errors import require


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Args:
        text: the text, which conditions the network.
        metadata: data that a verifier needs (for example the requested objects).
    """

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # C libraries (tokenizers, file names, PNG texts) end a text at NUL
        require("\0" not in self.text, "prompt", self.text, "text without NUL characters")
