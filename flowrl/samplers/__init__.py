"""Samplers: transition kernels, multistep solvers, and the windows of stochastic steps."""

from flowrl.samplers.kernels import (
    CPS,
    DDIMSDE,
    ODE,
    DanceSDE,
    ExponentialSDE,
    FlowSDE,
    transition_stds,
)
from flowrl.samplers.multistep import Multistep
from flowrl.samplers.windows import (
    FixedWindow,
    RandomSteps,
    RandomWindow,
    SlidingWindow,
    Windowed,
    trained_steps,
    windowed,
)

__all__ = [
    "CPS",
    "DDIMSDE",
    "ODE",
    "DanceSDE",
    "ExponentialSDE",
    "FixedWindow",
    "FlowSDE",
    "Multistep",
    "RandomSteps",
    "RandomWindow",
    "SlidingWindow",
    "Windowed",
    "trained_steps",
    "transition_stds",
    "windowed",
]
