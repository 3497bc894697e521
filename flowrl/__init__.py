"""flowrl: reinforcement learning for flow-matching image models.

Three storeys: the method (`core` to `rollout`, `methods`, `trainer`), the run (`run`, `worlds`,
`serving`, `cli`) and the lab (`testing`, `compare`, `bench`). The names below are imported at their
first use.
"""

from typing import TYPE_CHECKING

from flowrl.core.lazy import lazily

__version__ = "0.1.0"

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

__getattr__ = lazily(
    __name__,
    {
        "core.policy_options": ("PolicyOptions",),
        "core.protocols": ("World",),
        "core.types": ("Prompt", "Schedule"),
        "methods": ("METHODS", "Method"),
        "run.build": ("make_method", "make_policy", "make_reward", "make_trainer", "make_world"),
        "run.config": ("RunConfig", "preset"),
        "run.evaluation": ("evaluate",),
        "run.job": ("Run",),
        "run.worlds": ("world",),
        "trainer": ("Trainer", "Updates"),
    },
)
