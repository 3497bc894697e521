"""Credit rules: pure functions from a reward table to an advantage table, one file each."""

from flowrl.credit.normalise import zscore
from flowrl.credit.stepwise import StepwiseGain, generalised_gains
from flowrl.credit.table import check_advantages, gains, reward_to_go
from flowrl.credit.turning_point import TurningPoint, balanced, process_rewards, turning_points
from flowrl.credit.uniform import Uniform
from flowrl.credit.weighted import Weighted

__all__ = [
    "StepwiseGain",
    "TurningPoint",
    "Uniform",
    "Weighted",
    "balanced",
    "check_advantages",
    "gains",
    "generalised_gains",
    "process_rewards",
    "reward_to_go",
    "turning_points",
    "zscore",
]
