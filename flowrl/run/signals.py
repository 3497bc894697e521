"""Signals that stop a command, from the first import of a command to the end of its process; pipes
whose reader ends first."""

import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

HANGUP = getattr(signal, "SIGHUP", None)  # missing on Windows
STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, the signal of launchers and clusters, and that of a closed terminal, unless this process
was started with it ignored, as by nohup.
"""
if HANGUP and signal.getsignal(HANGUP) is not signal.SIG_IGN:
    STOPPING = (*STOPPING, HANGUP)
READER_ENDED = 128 + 13
"""Exit code of a command that could not write all of its output: that of SIGPIPE in a shell."""

reader_ended = threading.Event()
"""Set when the reader of standard output (`head`, a pager) has ended before the command."""


class _Output(io.FileIO):
    """Standard output or standard error in a pipe. After its reader has ended, output is dropped.

    If the reader of standard output ends, this stops the command as Ctrl-C does: a training pauses
    with a checkpoint.
    """

    def write(self, data: Any, /) -> int:
        """Write `data`, or drop it."""
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if self.fileno() == 1:
            reader_ended.set()
            # An exception that is already propagating ends the command and must not be replaced.
            if not isinstance(sys.exception(), (Exception, KeyboardInterrupt)):
                signal.raise_signal(signal.SIGINT)
        return super().write(data)


def watch_output() -> None:
    """Let the end of a pipe's reader stop the command without an error (`_Output`).

    If standard output or standard error was closed at the start (`>&-`), its output is dropped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            raw = _Output(stream.fileno(), "w", closefd=False)
            text = io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw),  # PYTHONUNBUFFERED
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, text)


def _handle(handler: Any, numbers: Iterable[int] = STOPPING) -> None:
    """Set the handler of signals; only the main thread can, and others receive none."""
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            signal.signal(number, handler)


@contextmanager
def on_stop(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle(number)` when a signal of `STOPPING` arrives, in the main thread.

    After SIGHUP the terminal is gone, so the output of this process is dropped. The previous
    handlers are restored at the end of the block, unless `ignore_stops` was called in it.
    """
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def react(number: int, _: object) -> None:
        for stream in terminals if number == HANGUP else ():
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        handle(number)

    before = {number: signal.getsignal(number) for number in STOPPING}
    _handle(react)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is react:
                _handle(handler, [number])


APART = 1.0
"""Signals of `STOPPING` within so many seconds count as one: launchers repeat that of the terminal.
"""


@contextmanager
def on_repeated_stop(*actions: Callable[[], None]) -> Iterator[None]:
    """Call the first of `actions` after a signal of `STOPPING`, the second after the next one, and
    so on, each in a thread of its own: also while the main thread waits outside Python.

    The signals need a handler, as of `on_stop`. Outside the main thread nothing is called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def watch() -> None:
        last, left = -APART, list(actions)
        while left and (numbers := receiver.recv(1)):
            now = time.monotonic()
            if numbers[0] in STOPPING and now - last >= APART:
                last = now
                threading.Thread(target=left.pop(0), daemon=True).start()

    watcher = threading.Thread(target=watch, daemon=True)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    _watched.set()
    watcher.start()
    try:
        yield
    finally:
        _watched.clear()
        signal.set_wakeup_fd(before)
        sender.close()
        watcher.join()
        receiver.close()


_watched = threading.Event()
"""Set within `on_repeated_stop`."""
if hasattr(os, "register_at_fork"):  # signals to a fork must not count in its parent
    os.register_at_fork(after_in_child=lambda: _watched.is_set() and signal.set_wakeup_fd(-1))


def ignore_stops() -> None:
    """Ignore signals of `STOPPING` from now on: the work is complete or paused, and the exit code
    must report it.

    For the end of a command, before its last line. `flowrl.cli.main` restores the handlers of its
    caller, and `leave` ends the process.
    """
    _handle(signal.SIG_IGN)


@contextmanager
def same_handlers() -> Iterator[None]:
    """Restore the handlers of `STOPPING` at the end of the block."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python
                _handle(handler, [number])


def leave(code: int) -> NoReturn:
    """End the process with exit code `code`, even if a signal of `STOPPING` ends its wait for
    threads.
    """
    _handle(lambda *_: os._exit(code))
    sys.exit(code)
