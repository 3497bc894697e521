"""Comparisons of arms, their figures and pages. The names below are imported at their first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.compare.comparison import CompareConfig, compare
    from flowrl.compare.results import load_comparison, summarise
    from flowrl.compare.tuned import tuned_arms

_HOMES = {
    **dict.fromkeys(("CompareConfig", "compare"), "comparison"),
    **dict.fromkeys(("load_comparison", "summarise"), "results"),
    "tuned_arms": "tuned",
}

__all__ = [
    "CompareConfig",
    "compare",
    "load_comparison",
    "summarise",
    "tuned_arms",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"flowrl.compare.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'flowrl.compare' has no attribute {name!r}")
