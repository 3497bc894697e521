"""Transition kernels: pure functions from (node, velocity) to a Gaussian over the next node, one
file each.
"""

from flowrl.samplers._kernels import transition_stds
from flowrl.samplers.cps import CPS
from flowrl.samplers.dance_sde import DanceSDE
from flowrl.samplers.ddim_sde import DDIMSDE
from flowrl.samplers.flow_sde import FlowSDE
from flowrl.samplers.multistep import Multistep
from flowrl.samplers.ode import ODE
from flowrl.samplers.windows import (
    FixedWindow,
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
    "FixedWindow",
    "FlowSDE",
    "Multistep",
    "RandomWindow",
    "SlidingWindow",
    "Windowed",
    "trained_steps",
    "transition_stds",
    "windowed",
]
