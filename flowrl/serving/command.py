"""`flowrl serve-reward`."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import tyro

from flowrl.errors import ConfigError, require
from flowrl.serving.client import TOKEN_VARIABLE


@dataclass(frozen=True)
class ServeReward:
    """Serve a reward over HTTP, for runs on other machines or in other environments (docs/reward-server.md).

    If other machines can connect, a token is required: from --token-file, from FLOWRL_REWARD_TOKEN, or generated and printed.
    Example: flowrl serve-reward "pickscore(device='cuda')" --host 0.0.0.0 --port 8000
    """

    reward: tyro.conf.Positional[str]
    """NAME, NAME(option=value) or path/to/file.py:Class; `flowrl parts --kind reward` lists names."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """0 takes a free port."""
    token_file: Path | None = None
    """A file with the token that clients must send."""
    no_token: bool = False
    """Serve all who can connect, also from other machines, without a token."""
    tls_certificate: Path | None = None
    """Certificate chain (PEM), for https."""
    tls_key: Path | None = None
    """Its private key (PEM)."""
    max_batch: int = 64
    """Images in one call of the model, from one or several requests."""
    wait: float = 0.005
    """Seconds that a call waits for more requests while it is not full."""
    merge: bool = True
    """Whether requests share calls. If not, scores are independent of the traffic, down to the last digit."""
    max_body: int = 256
    """Largest request, MiB."""
    max_samples: int = 1024
    """Most images in one request."""
    max_memory: int = 4096
    """Most memory for requests and images that wait, MiB."""
    score_seconds: float = 300.0
    """Longest time to the scores of a request, time in the queue included, in seconds."""

    def main(self) -> int:
        """Build the reward, listen, and serve until SIGINT or SIGTERM."""
        token = self._token()
        try:
            from flowrl.serving import Listener, ServerLimits, ServerSettings, serve
        except ImportError as error:
            message = f"serve-reward needs the extra 'server' ({error}); install it with: pip install -e '.[server]'"
            raise ConfigError(message) from error
        from flowrl.registry import build

        tls = self.tls_certificate is not None
        require(tls == (self.tls_key is not None), "tls_key", self.tls_key, "given together with tls_certificate, or not at all")
        limits = ServerLimits(
            body_bytes=self.max_body * 2**20,
            samples=self.max_samples,
            memory_bytes=self.max_memory * 2**20,
            score_seconds=self.score_seconds,
        )
        settings = ServerSettings(self.reward, token, self.no_token, self.max_batch, self.wait, self.merge, limits)
        reward = build("reward", self.reward)
        listener = Listener.open(self.host, self.port)
        if not token and not listener.loopback and not self.no_token:
            token = secrets.token_urlsafe(32)
            settings = ServerSettings(self.reward, token, False, self.max_batch, self.wait, self.merge, limits)
            print(f"Token for this server's clients: {TOKEN_VARIABLE}={token}")
        url = listener.url("https" if tls else "http")
        access = "a token is required" if token else "no token is required"
        print(f"Serving {self.reward} at {url} ({access}; description: {url}/docs)", flush=True)
        serve(reward, settings, listener, self.tls_certificate, self.tls_key)
        return 0

    def _token(self) -> str:
        """The token from the file or the environment; "" if there is none."""
        if self.no_token:
            require(self.token_file is None, "token_file", str(self.token_file), "left out with --no-token")
            return ""
        if self.token_file is None:
            return os.environ.get(TOKEN_VARIABLE, "").strip()
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token_file: {self.token_file} cannot be read: {error}") from error
        require(bool(token), "token_file", str(self.token_file), "a file that holds a token")
        return token
