"""Prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Args:
        text: the text, which conditions the network.
        metadata: data that a verifier needs (for example the requested objects).
    """

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
