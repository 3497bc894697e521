"""Diagnostics: two sets of weights compared, curves, memory."""

from flowrl.diagnostics.curves import Values, first_reached
from flowrl.diagnostics.memory import peak_memory, peak_memory_during, reset_peak_memory
from flowrl.diagnostics.weight_comparison import WeightComparison, compare_weights, load_weights

__all__ = [
    "Values", "WeightComparison", "compare_weights", "first_reached", "load_weights", "peak_memory", "peak_memory_during",
    "reset_peak_memory",
]  # fmt: skip
