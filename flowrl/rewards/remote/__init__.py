"""A reward behind a server: the client of `flowrl serve-reward` (docs/reward-server.md)."""

from flowrl.rewards.remote.client import RemoteReward, RemoteSum

__all__ = ["RemoteReward", "RemoteSum"]
