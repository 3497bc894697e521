"""The ceiling of a credit rule: its correlation with the true advantage if every state's value is
known.

The rule is applied to the table of true values V. For gains this is the true advantage itself after
the rule's normalisation:
z-scored by decision, over the group, or not at all. Rules that read only the final reward are at
their ceiling by definition.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.experience import CreditTable, Experience, ValueTable
from flowrl.core.protocols import CreditRule
from flowrl.credit import probed
from flowrl.rollout import Rollout
from flowrl_bench.continuations import TrueAdvantages, from_continuations
from flowrl_bench.gradients import assigned
from flowrl_bench.true_advantage import correlation, credit_sums

LEVELS = (1.0, 1.5, 2.0, 2.5)
"""Variance of the noise in the table of values, in units of its own, from which the ceiling is
extrapolated to 0.
"""
FOLDS, DRAWS = 4, 3
"""Parts of the continuations, each of which is the truth once; draws of the added noise."""


def ceiling_sums(
    make: Callable[[], CreditRule],
    rewards: Float[Tensor, "sample column continuation"],
    trajectories: Rollout,
    experience: Experience,
    seed: int = 0,
) -> Float[Tensor, "level 9"]:
    """The `credit_sums` of a rule on tables of values with increasing noise (`LEVELS`), from which
    `ceiling` extrapolates.

    Sums of several trajectories can be added. `make` builds the rule, which may have a state; it
    gets the record `experience` of `trajectories` with other values. `rewards` are the scores of
    continuations (`continuation_rewards`), a multiple of `FOLDS` of them: each part in turn is the
    truth, and the others give the table, so their errors are independent. Further noise is normal,
    with the standard errors of the table.
    """
    count = rewards.shape[2]
    fits = f"a multiple of {FOLDS}, {2 * FOLDS} or more"
    require(count % FOLDS == 0 and count >= 2 * FOLDS, "continuations for ceilings", count, fits)
    generator = torch.Generator().manual_seed(seed)
    whole, part = from_continuations(rewards, trajectories), count // FOLDS
    error = whole.state_errors * math.sqrt(count / (count - part))
    sums = torch.zeros(len(LEVELS), 9, dtype=torch.float64)
    for fold in range(FOLDS):
        out = torch.zeros(count, dtype=torch.bool)
        out[fold * part : (fold + 1) * part] = True
        table, other = (
            from_continuations(rewards[..., mask], trajectories) for mask in (~out, out)
        )
        truth = TrueAdvantages(
            other.values, whole.errors * math.sqrt(FOLDS), other.state_values, error, whole.steps
        )
        for row, level in enumerate(LEVELS):
            draws = 1 if level == 1 else DRAWS
            for _ in range(draws):
                noise = torch.randn(error.shape, generator=generator) * error * math.sqrt(level - 1)
                rule = make()
                credit = with_values(rule, experience, table.state_values + noise)
                sums[row] += credit_sums(credit, truth).sum((0, 1)) / draws
    return sums


def with_values(rule: CreditRule, experience: Experience, values: ValueTable) -> CreditTable:
    """The rule's advantages for the record with `values` in the columns that its probe fills."""
    return assigned(
        rule, replace(experience, values=probed(values, rule.probe), parts={})
    ).advantages


def ceiling(sums: Float[Tensor, "level 9"]) -> float:
    """The correlation without noise in the table, by a parabola in the variance of the noise;
    within [-1, 1]. Without noise (one level), the correlation itself.

    Source: simulation and extrapolation (SIMEX), Cook and Stefanski 1994.
    """
    if len(sums) == 1:
        return correlation(sums)
    correlations = [correlation(row) for row in sums]
    return max(-1.0, min(1.0, float(np.polyval(np.polyfit(LEVELS, correlations, 2), 0.0))))
