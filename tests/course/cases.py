"""What is tried on one check of the course."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A check, an answer (or tuple of answers) that it accepts, and likely mistakes, each with a
    part of its message.
    """

    check: Callable[..., Any]
    solution: Any
    mistakes: Sequence[tuple[Any, str]]

    @property
    def name(self) -> str:
        """The check's name."""
        return self.check.__name__
