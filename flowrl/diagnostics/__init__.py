"""Diagnostics: two sets of weights compared, curves, means with intervals, memory."""

from flowrl.diagnostics.curves import Values, first_reached
from flowrl.diagnostics.memory import peak_memory, peak_memory_during, reset_peak_memory
from flowrl.diagnostics.statistics import Estimate, Inference, collapsed, mean
from flowrl.diagnostics.weight_comparison import WeightComparison, compare_weights, load_weights

__all__ = [
    "Estimate", "Inference", "Values", "WeightComparison", "collapsed", "compare_weights", "first_reached", "load_weights",
    "mean", "peak_memory", "peak_memory_during", "reset_peak_memory",
]  # fmt: skip
