"""A reward model behind HTTP: pictures as PNG or safetensors and prompts as JSON in, scores out. Needs the extra `server`.

`create_app` makes the application for any ASGI server, `serve` runs it with uvicorn, `flowrl serve-reward` does that for a
reward by name. The client is `flowrl.rewards.remote.RemoteReward`. docs/reward-server.md describes both.
"""

from flowrl.serving.app import Settings, create_app
from flowrl.serving.limits import Limits
from flowrl.serving.serve import Listener, serve

__all__ = ["Limits", "Listener", "Settings", "create_app", "serve"]
