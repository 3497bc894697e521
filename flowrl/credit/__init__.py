"""Credit rules: pure functions from a value table to a table of advantages."""

from flowrl.core.experience import Credit, Decisions, Needs
from flowrl.credit.calibrated import (
    CalibratedGain,
    calibrated_gains,
    calibration,
    predictions,
    value_quality,
)
from flowrl.credit.example import example, on_tree, probed
from flowrl.credit.memory import MovingAverageGain, ValueTracker
from flowrl.credit.stepwise import DenseGain, StepwiseGain, generalised_gains
from flowrl.credit.table import (
    credit_of,
    gain_columns,
    gains,
    last_column,
    masked_std,
    read_columns,
    require_columns,
    reward_to_go,
    zscore,
)
from flowrl.credit.trees import (
    BackedUp,
    DepthRelative,
    SiblingRelative,
    branched_tree,
    group_deviations,
    group_zscore,
    unit_values,
)
from flowrl.credit.turning_point import TurningPoint, balanced, process_rewards, turning_points
from flowrl.credit.uniform import Uniform
from flowrl.credit.wrappers import GDPO, RuleAround, Weighted

__all__ = [
    "GDPO",
    "BackedUp",
    "CalibratedGain",
    "Credit",
    "Decisions",
    "DenseGain",
    "DepthRelative",
    "MovingAverageGain",
    "Needs",
    "RuleAround",
    "SiblingRelative",
    "StepwiseGain",
    "TurningPoint",
    "Uniform",
    "ValueTracker",
    "Weighted",
    "balanced",
    "branched_tree",
    "calibrated_gains",
    "calibration",
    "credit_of",
    "example",
    "gain_columns",
    "gains",
    "generalised_gains",
    "group_deviations",
    "group_zscore",
    "last_column",
    "masked_std",
    "on_tree",
    "predictions",
    "probed",
    "process_rewards",
    "read_columns",
    "require_columns",
    "reward_to_go",
    "turning_points",
    "unit_values",
    "value_quality",
    "zscore",
]
