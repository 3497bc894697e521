"""Diagnostics: a rule's credit explained, two sets of weights compared, curves, memory."""

from flowrl.diagnostics.curves import Values, first_reached
from flowrl.diagnostics.explain import Explanation, RewardFile, explain, parse_rewards, read_rewards
from flowrl.diagnostics.memory import peak_memory, peak_memory_during, reset_peak_memory
from flowrl.diagnostics.weight_comparison import WeightComparison, compare_weights, load_weights

__all__ = [
    "Explanation", "RewardFile", "Values", "WeightComparison", "compare_weights", "explain", "first_reached", "load_weights",
    "parse_rewards", "peak_memory", "peak_memory_during", "read_rewards", "reset_peak_memory",
]  # fmt: skip
