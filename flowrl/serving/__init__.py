"""A reward model behind HTTP: receives images (PNG or safetensors) and prompts (JSON), returns
scores. Needs the extra `server`.

`create_app` makes the application for any ASGI server, `serve` runs it with uvicorn, and `flowrl
serve-reward` serves a reward by name. The client is the reward `remote` (`flowrl.serving.client`).

Names are imported at their first use, so `flowrl serve-reward --help` works without the extra.
"""

from typing import TYPE_CHECKING

from flowrl.core.lazy import lazily

if TYPE_CHECKING:
    from flowrl.serving.app import create_app
    from flowrl.serving.server_settings import ServerLimits, ServerSettings
    from flowrl.serving.uvicorn_server import Listener, make_server, serve

__all__ = ["Listener", "ServerLimits", "ServerSettings", "create_app", "make_server", "serve"]

__getattr__ = lazily(
    __name__,
    {
        "app": ("create_app",),
        "server_settings": ("ServerLimits", "ServerSettings"),
        "uvicorn_server": ("Listener", "make_server", "serve"),
    },
)
