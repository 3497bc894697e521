"""Worlds: prompts, rewards and a policy that fit together, built in, a user's, or around a
diffusers model.
"""

from flowrl.core.policy_options import PolicyOptions
from flowrl.core.protocols import World
from flowrl.run.worlds import ModelWorld, world
from flowrl.worlds import mixture
from flowrl.worlds.built_in import EditsWorld, MixtureWorld, ShapesWorld

__all__ = [
    "EditsWorld",
    "MixtureWorld",
    "ModelWorld",
    "PolicyOptions",
    "ShapesWorld",
    "World",
    "mixture",
    "world",
]
