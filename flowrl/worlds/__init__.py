"""Worlds: prompts, rewards and a policy that fit together, built in or around a diffusers model."""

from flowrl.worlds.base import WORLDS, PolicyOptions, World, model_world, world

__all__ = ["WORLDS", "PolicyOptions", "World", "model_world", "world"]
