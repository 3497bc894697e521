"""`flowrl serve-reward`."""

import os
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge, Gt, Le

from flowrl.core.errors import ConfigError, require
from flowrl.core.options import Count
from flowrl.run.reading import read_text, reading
from flowrl.serving.server_settings import TOKEN_VARIABLE


@dataclass(frozen=True)
class ServeReward:
    """Serve a reward over HTTP, for runs on other machines or in other environments
    (docs/guides/reward-server.md).

    If other machines can connect, a token is required: from --token-file, from FLOWRL_REWARD_TOKEN,
    or generated and printed. Example: flowrl serve-reward "pickscore(device='cuda')" --host 0.0.0.0
    --port 8000
    """

    reward: tyro.conf.Positional[str]
    """NAME, NAME(option=value) or path/to/file.py:Class; `flowrl parts --kind reward` lists names.
    """
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all addresses of this machine."""
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Port; 0 for any free port."""
    token_file: Path | None = None
    """A file with the token that clients must send."""
    no_token: bool = False
    """Serve requests without a token, including requests from other machines."""
    tls_certificate: Path | None = None
    """Certificate chain (PEM), for https."""
    tls_key: Path | None = None
    """Private key of the certificate (PEM)."""
    max_batch: Count = 64
    """Largest number of images in one call of the model, from one or several requests."""
    wait: Annotated[float, Ge(0), Le(60)] = 0.005
    """Seconds to wait for more requests before a call with fewer images."""
    merge: bool = True
    """Combine the images of several requests in one call. Without merging, scores do not depend on
    the traffic, not even in the last digit.
    """
    max_body: Count = 256
    """Largest size of a request in MiB."""
    max_samples: Count = 1024
    """Largest number of images in one request."""
    max_memory: Count = 4096
    """Memory limit for all requests and queued images, in MiB."""
    score_seconds: Annotated[float, Gt(0), Le(10**6)] = 300.0
    """Longest time from a request to its scores, including the queue, in seconds."""

    def main(self) -> int:
        """Listen, build the reward with its weights, and serve until SIGINT or SIGTERM."""
        self._check()
        token = self._token()
        try:
            from flowrl.serving import Listener, ServerLimits, ServerSettings, serve
        except ImportError as error:
            raise ConfigError(
                f"serve-reward needs the extra 'server' ({error}): pip install -e '.[server]'"
            ) from error
        from flowrl.rewards import require_single
        from flowrl.rewards.contract import load_reward
        from flowrl.run.parts.registry import build

        limits = ServerLimits(
            body_bytes=self.max_body * 2**20,
            samples=self.max_samples,
            memory_bytes=self.max_memory * 2**20,
            score_seconds=self.score_seconds,
        )
        listener = Listener.open(self.host, self.port)
        with listener.socket:
            reward = build("reward", self.reward, trust=True)
            reward = require_single(reward, "reward", self.reward)
            load_reward(reward)
            if not token and not listener.loopback and not self.no_token:
                token = secrets.token_urlsafe(32)
                print(f"Token for this server's clients: {TOKEN_VARIABLE}={token}")
            settings = ServerSettings(
                # without options and paths, which clients do not need
                name=self.reward.partition("(")[0].rpartition(":")[2],
                token=token,
                any_host=self.no_token,
                names=(self.host,),
                max_batch=self.max_batch,
                wait=self.wait,
                merge=self.merge,
                limits=limits,
            )
            url = listener.url("https" if self.tls_certificate else "http")
            access = "a token is required" if token else "no token is required"
            print(
                f"Serving {self.reward} at {url} ({access}; description: {url}/openapi.json)",
                flush=True,
            )
            serve(reward, settings, listener, self.tls_certificate, self.tls_key)
        return 0

    def _check(self) -> None:
        """Raise `ConfigError` for options with which a server cannot start, before anything is
        imported or opened.
        """
        allowed = "an address or a name of this machine; 0.0.0.0 for all"
        require(bool(self.host), "host", self.host, allowed)
        files = [str(path) for path in (self.tls_certificate, self.tls_key) if path]
        require(len(files) != 1, "tls_certificate, tls_key", files, "both or neither")
        if files:
            with reading(f"tls_certificate, tls_key: {', '.join(files)}"):
                # without a password it would ask for the passphrase of the key
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files, password="")

    def _token(self) -> str:
        """The token from the file or the environment; "" if there is none."""
        if self.no_token:
            allowed = "left out with --no-token"
            require(self.token_file is None, "token_file", str(self.token_file), allowed)
            return ""
        if self.token_file is None:
            return os.environ.get(TOKEN_VARIABLE, "").strip()
        with reading("token_file"):
            token = read_text(self.token_file).strip()
        require(bool(token), "token_file", str(self.token_file), "a file that contains a token")
        return token
