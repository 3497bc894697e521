"""Notifications about a run: to a web address, or by a command."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowrl.core.errors import require
from flowrl.run.results import reward_text

VARIABLE = "FLOWRL_NOTIFY"
"""The environment variable with further targets, one per line."""
URL_SECONDS, COMMAND_SECONDS = 10.0, 30.0
ENDS = ("finished", "paused")


def targets_of(given: Sequence[str]) -> list[str]:
    """The targets that are `given` and those of the environment; raises `ConfigError` for an empty
    one, or an address that is not http or https.
    """
    targets = [*given, *os.environ.get(VARIABLE, "").splitlines()]
    for target in targets:
        scheme, mark, rest = target.partition("://")
        web = scheme.lower() in ("http", "https") and rest.strip("/")
        fits = bool(target.strip()) and (not mark or " " in scheme or bool(web))
        require(fits, "notify", shown(target), "a command, or an address with https:// or http://")
    return list(dict.fromkeys(targets))


def is_url(target: str) -> bool:
    """Whether a target is a web address."""
    return target.lower().startswith(("http://", "https://"))


def shown(target: str) -> str:
    """A target without what may be secret: the server's name, or the name of the program."""
    if is_url(target):
        return f"{urlsplit(target).scheme}://{urlsplit(target).hostname}/..."
    return target.partition(" ")[0]


def hide(targets: Sequence[str]) -> None:
    """Remove `targets` from the recorded command line, which trackers and bug reports contain."""
    hidden = {target: "..." for target in targets}
    hidden |= {f"--notify={target}": "--notify=..." for target in targets}
    sys.argv[:] = [hidden.get(word, word) for word in sys.argv]


class Notifier:
    """Sends a run's warnings and its end to targets, in order, in another thread. A context, which
    ends when everything is sent; every target has a time-out.

    An address gets a POST of JSON: {"run", "event", "text", "content", "iteration", "reward"}.
    Slack shows "text" and Discord shows "content", which are equal. A command is run by the shell
    with the JSON as its input, and with FLOWRL_EVENT, FLOWRL_RUN and FLOWRL_TEXT in its
    environment. A target that fails is reported once by `warn`.

    Args:
        targets: addresses and commands.
        run: the run's folder.
        warn: prints a line.
    """

    def __init__(self, targets: Sequence[str], run: Path, warn: Any = print) -> None:
        self.targets, self.run, self.warn = targets, run, warn
        self._failed, self._last = set[str](), dict[str, Any]()
        self._queue = ThreadPoolExecutor(1, "notify") if targets else None

    def __call__(self, state: dict[str, Any]) -> None:
        """Take an event of the run: its warnings and its end are sent."""
        lines = state.get("warning", "").splitlines()
        for kind, text in zip(state.get("kinds", ()), lines, strict=False):
            if kind != "stopped":
                self.send("warning", text)
        if "iteration" in state:
            self._last = {name: state[name] for name in ("iteration", "reward")}
        if ended := state.get("ended"):
            event, stopped = ended if ended in ENDS else "stopped", f" by {ended}"
            reward = f", training reward {reward_text(self._last['reward'])}" if self._last else ""
            text = f"{event}{stopped if event == 'stopped' else ''}"
            self.send(event, f"{text} (iteration {self._last.get('iteration', 0)}{reward})")

    def __enter__(self) -> "Notifier":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Send the error of a run that fails, and wait until everything is sent."""
        if isinstance(error, Exception):
            self.send("failed", f"failed: {type(error).__name__}: {error}")
        if self._queue is not None:
            self._queue.shutdown()

    def send(self, event: str, text: str) -> None:
        """Send an event: "finished", "stopped", "paused", "failed" or "warning"."""
        if self._queue is None:
            return
        text = f"{self.run.name}: {text}"
        message = {
            "run": str(self.run),
            "event": event,
            "text": text,
            "content": text[:2000],  # Discord's limit
            "iteration": self._last.get("iteration", 0),
            "reward": self._last.get("reward"),
        }
        for target in self.targets:
            self._queue.submit(self._deliver, target, message)

    def _deliver(self, target: str, message: dict[str, Any]) -> None:
        try:
            (_post if is_url(target) else _execute)(target, message)
        except Exception as error:
            if target not in self._failed:
                self._failed.add(target)
                # of an address only what cannot contain it
                reason = getattr(error, "reason", "") if is_url(target) else error
                text = f"{type(error).__name__} {getattr(error, 'code', '')} {reason}".strip()
                self.warn(f"Warning: the notification to {shown(target)} failed: {text}")


def _post(url: str, message: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "flowrl"}
    request = urllib.request.Request(url, json.dumps(message).encode(), headers)
    with urllib.request.urlopen(request, timeout=URL_SECONDS):
        pass


def _execute(command: str, message: dict[str, Any]) -> None:
    names = {f"FLOWRL_{name.upper()}": str(message[name]) for name in ("event", "run", "text")}
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **names},
        start_new_session=True,  # Ctrl-C ends the run only
    )
    try:
        process.communicate(json.dumps(message).encode(), COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise TimeoutError(f"no end after {COMMAND_SECONDS:g} s") from None
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}")
