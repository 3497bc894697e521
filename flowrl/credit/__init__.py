"""Credit rules: pure functions from a reward table to an advantage table, one file each."""

from flowrl.credit.gdpo import GDPO
from flowrl.credit.moving_average import MovingAverageGain
from flowrl.credit.random_credit import RandomCredit
from flowrl.credit.stepwise import StepwiseGain, generalised_gains
from flowrl.credit.table import check_advantages, check_trained, gains, probed, reward_to_go, zscore
from flowrl.credit.turning_point import (
    TurningPoint,
    balanced,
    clear_swings,
    large_aggregates,
    process_rewards,
    random_steps,
    turning_points,
)
from flowrl.credit.uniform import Uniform
from flowrl.credit.weighted import Weighted

__all__ = [
    "GDPO", "MovingAverageGain", "RandomCredit", "StepwiseGain", "TurningPoint", "Uniform", "Weighted", "balanced",
    "check_advantages", "check_trained", "clear_swings", "gains", "generalised_gains", "large_aggregates", "probed",
    "process_rewards", "random_steps", "reward_to_go", "turning_points", "zscore",
]  # fmt: skip
