"""Comparisons of arms, evaluations of trained weights, and their figures and pages: `flowrl
compare`, `flowrl evaluate` and `flowrl sample`. The names below are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flowrl import __version__ as __version__

if TYPE_CHECKING:
    from flowrl_compare.comparison import CompareConfig, compare
    from flowrl_compare.results import load_comparison, load_run, summarise
    from flowrl_compare.tuned import tuned_arms
    from flowrl_compare.weight_comparison import compare_weights

_HOMES = {
    **dict.fromkeys(("CompareConfig", "compare"), "comparison"),
    **dict.fromkeys(("load_comparison", "load_run", "summarise"), "results"),
    "compare_weights": "weight_comparison",
    "tuned_arms": "tuned",
}

__all__ = [
    "CompareConfig",
    "compare",
    "compare_weights",
    "load_comparison",
    "load_run",
    "summarise",
    "tuned_arms",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"flowrl_compare.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'flowrl_compare' has no attribute {name!r}")
