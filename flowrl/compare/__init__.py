"""Comparisons of arms, their figures and pages. The names below are imported at their first use."""

from typing import TYPE_CHECKING

from flowrl.core.lazy import lazily

if TYPE_CHECKING:
    from flowrl.compare.comparison import CompareConfig, compare
    from flowrl.compare.results import load_comparison, summarise
    from flowrl.compare.tuned import tuned_arms


__all__ = [
    "CompareConfig",
    "compare",
    "load_comparison",
    "summarise",
    "tuned_arms",
]

__getattr__ = lazily(
    __name__,
    {
        "comparison": ("CompareConfig", "compare"),
        "results": ("load_comparison", "summarise"),
        "tuned": ("tuned_arms",),
    },
)
