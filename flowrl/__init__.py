"""flowrl: reinforcement learning for flow-matching image models.

Packages: `samplers` (transition kernels), `credit` (credit assignment over denoising steps),
`losses`, `rollout` (trajectories and reward tables), `methods` (papers as compositions), `worlds`,
`training`. The names below are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Method": "flowrl.methods",
    "METHODS": "flowrl.methods",
    "RunConfig": "flowrl.training.config",
    "Trainer": "flowrl.trainer",
    "Updates": "flowrl.trainer",
    "Run": "flowrl.training.run",
    "evaluate": "flowrl.training.evaluation",
    "make_method": "flowrl.training.build",
    "make_policy": "flowrl.training.build",
    "make_reward": "flowrl.training.build",
    "make_trainer": "flowrl.training.build",
    "make_world": "flowrl.training.build",
    "world": "flowrl.worlds.base",
    "World": "flowrl.core.protocols",
    "PolicyOptions": "flowrl.core.protocols",
    "preset": "flowrl.training.config",
    "Prompt": "flowrl.core.types",
    "Schedule": "flowrl.core.types",
}

if TYPE_CHECKING:
    from flowrl.core.protocols import PolicyOptions, World
    from flowrl.core.types import Prompt, Schedule
    from flowrl.methods import METHODS, Method
    from flowrl.trainer import Trainer, Updates
    from flowrl.training.build import (
        make_method,
        make_policy,
        make_reward,
        make_trainer,
        make_world,
    )
    from flowrl.training.config import RunConfig, preset
    from flowrl.training.evaluation import evaluate
    from flowrl.training.run import Run
    from flowrl.worlds.base import world

__all__ = [
    "METHODS",
    "Method",
    "PolicyOptions",
    "Prompt",
    "Run",
    "RunConfig",
    "Schedule",
    "Trainer",
    "Updates",
    "World",
    "__version__",
    "evaluate",
    "make_method",
    "make_policy",
    "make_reward",
    "make_trainer",
    "make_world",
    "preset",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}")
