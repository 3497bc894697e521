"""Credit rules: pure functions from a value table to a table of advantages, one file each."""

from flowrl.credit.backed_up import BackedUp
from flowrl.credit.depth_relative import DepthRelative
from flowrl.credit.detection import ExpectedCalls, expected_calls
from flowrl.credit.gdpo import GDPO
from flowrl.credit.moving_average import MovingAverageGain
from flowrl.credit.pruned import Pruned
from flowrl.credit.random_credit import RandomCredit
from flowrl.credit.sibling_relative import SiblingRelative
from flowrl.credit.stepwise import DenseGain, StepwiseGain, generalised_gains
from flowrl.credit.table import (
    check_signature,
    credit_of,
    gains,
    probed,
    read_columns,
    reward_to_go,
    zscore,
)
from flowrl.credit.turning_point import (
    TurningPoint,
    balanced,
    clear_swings,
    large_aggregates,
    likely_turns,
    process_rewards,
    random_steps,
    turn_probability,
    turning_points,
)
from flowrl.credit.uniform import Uniform
from flowrl.credit.units import (
    Example,
    branched_tree,
    example,
    group_deviations,
    group_zscore,
    unit_values,
)
from flowrl.credit.value_tracker import ValueTracker
from flowrl.credit.weighted import Weighted

__all__ = [
    "GDPO",
    "BackedUp",
    "DenseGain",
    "DepthRelative",
    "Example",
    "ExpectedCalls",
    "MovingAverageGain",
    "Pruned",
    "RandomCredit",
    "SiblingRelative",
    "StepwiseGain",
    "TurningPoint",
    "Uniform",
    "ValueTracker",
    "Weighted",
    "balanced",
    "branched_tree",
    "check_signature",
    "clear_swings",
    "credit_of",
    "example",
    "expected_calls",
    "gains",
    "generalised_gains",
    "group_deviations",
    "group_zscore",
    "large_aggregates",
    "likely_turns",
    "probed",
    "process_rewards",
    "random_steps",
    "read_columns",
    "reward_to_go",
    "turn_probability",
    "turning_points",
    "unit_values",
    "zscore",
]
