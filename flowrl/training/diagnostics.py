"""Diagnostics: two sets of weights compared, curves, means with intervals, memory."""

from flowrl.training.curves import Values, first_reached
from flowrl.training.memory import peak_memory, peak_memory_during, reset_peak_memory
from flowrl.training.statistics import (
    COLLAPSE,
    LEVEL,
    Estimate,
    Inference,
    collapsed,
    mean,
    t_interval,
)
from flowrl.training.weight_comparison import WeightComparison, compare_weights, load_weights

__all__ = [
    "COLLAPSE",
    "LEVEL",
    "Estimate",
    "Inference",
    "Values",
    "WeightComparison",
    "collapsed",
    "compare_weights",
    "first_reached",
    "load_weights",
    "mean",
    "peak_memory",
    "peak_memory_during",
    "reset_peak_memory",
    "t_interval",
]
