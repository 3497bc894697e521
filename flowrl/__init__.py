"""flowrl: reinforcement learning for flow-matching image models.

Three storeys: the method (`core` to `rollout`, `methods`, `trainer`), the run (`run`, `worlds`,
`serving`, `cli`) and the lab (`testing`, `compare`, `bench`). The names below are imported at their
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Method": "flowrl.methods",
    "METHODS": "flowrl.methods",
    "RunConfig": "flowrl.run.config",
    "Trainer": "flowrl.trainer",
    "Updates": "flowrl.trainer",
    "Run": "flowrl.run.job",
    "evaluate": "flowrl.run.evaluation",
    "make_method": "flowrl.run.build",
    "make_policy": "flowrl.run.build",
    "make_reward": "flowrl.run.build",
    "make_trainer": "flowrl.run.build",
    "make_world": "flowrl.run.build",
    "world": "flowrl.run.worlds",
    "World": "flowrl.core.protocols",
    "PolicyOptions": "flowrl.core.policy_options",
    "preset": "flowrl.run.config",
    "Prompt": "flowrl.core.types",
    "Schedule": "flowrl.core.types",
}

if TYPE_CHECKING:
    from flowrl.core.policy_options import PolicyOptions
    from flowrl.core.protocols import World
    from flowrl.core.types import Prompt, Schedule
    from flowrl.methods import METHODS, Method
    from flowrl.run.build import (
        make_method,
        make_policy,
        make_reward,
        make_trainer,
        make_world,
    )
    from flowrl.run.config import RunConfig, preset
    from flowrl.run.evaluation import evaluate
    from flowrl.run.job import Run
    from flowrl.run.worlds import world
    from flowrl.trainer import Trainer, Updates

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
