"""A prompt: what a policy is given and a reward judges by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A prompt: its text, and the metadata that a verifier needs (for example the requested objects)."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
