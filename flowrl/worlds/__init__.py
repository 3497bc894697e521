"""Worlds: prompts, rewards and a policy that fit together, built in or around a diffusers model."""

from flowrl.worlds import mixture
from flowrl.worlds.base import WORLDS, PolicyOptions, World, model_world, world

__all__ = ["WORLDS", "PolicyOptions", "World", "mixture", "model_world", "world"]
