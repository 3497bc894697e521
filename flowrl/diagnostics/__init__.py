"""Diagnostics: credit of a rule explained, credit and gradients compared with the ground truth, statistics over seeds, memory."""

from flowrl.diagnostics.explain import Explanation, RewardFile, explain, parse_rewards, read_rewards
from flowrl.diagnostics.gradient import (
    Alignment,
    RawCredit,
    Setting,
    alignment,
    pathwise_gradients,
    policy_gradients,
    update_evaluations,
)
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
from flowrl.diagnostics.true_advantage import CreditReport, Look, TrueAdvantages, compare_credit, pooled, true_advantages
from flowrl.diagnostics.weight_comparison import WeightComparison, compare_weights, load_weights

__all__ = [
    "Alignment", "CreditReport", "Estimate", "Explanation", "Index", "Look", "RawCredit", "RewardFile", "Setting",
    "TrueAdvantages", "Values", "WeightComparison", "alignment", "bootstrap", "compare_credit", "compare_weights", "difference",
    "explain", "first_reached", "improvement", "interquartile_mean", "level", "load_weights", "parse_rewards",
    "pathwise_gradients", "peak_memory", "peak_memory_during", "policy_gradients", "pooled", "profile", "read_rewards",
    "reset_peak_memory", "true_advantages", "update_evaluations",
]  # fmt: skip
