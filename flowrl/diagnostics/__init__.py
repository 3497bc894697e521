"""Diagnostics: a rule's credit explained, two sets of weights compared, statistics over seeds, memory."""

from flowrl.diagnostics.explain import Explanation, RewardFile, explain, parse_rewards, read_rewards
from flowrl.diagnostics.memory import peak_memory, peak_memory_during, reset_peak_memory
from flowrl.diagnostics.statistics import (
    Estimate,
    Index,
    Values,
    bootstrap,
    difference,
    first_reached,
    improvement,
    interquartile_mean,
    level,
    profile,
)
from flowrl.diagnostics.weight_comparison import WeightComparison, compare_weights, load_weights

__all__ = [
    "Estimate", "Explanation", "Index", "RewardFile", "Values", "WeightComparison", "bootstrap", "compare_weights", "difference",
    "explain", "first_reached", "improvement", "interquartile_mean", "level", "load_weights", "parse_rewards", "peak_memory",
    "peak_memory_during", "profile", "read_rewards", "reset_peak_memory",
]  # fmt: skip
