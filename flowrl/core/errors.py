"""Errors that a user can fix: each message names the wrong value, its location and the allowed
values.
"""

import errno
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

OWN_PACKAGES = ("flowrl", "flowrl_course")
"""The packages of this distribution."""


class FlowrlError(Exception):
    """Base of every error that flowrl raises on purpose; the command line prints it and returns its
    `exit_code`.
    """

    exit_code = 2


class ConfigError(FlowrlError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class ArgumentError(ConfigError, TypeError):
    """An argument of a call has a wrong name, type or shape."""


class CheckpointError(FlowrlError):
    """A checkpoint or weight file is missing, truncated, of another program, or does not match its
    recorded hash.
    """


class DiskError(FlowrlError):
    """The disk is full or has become read-only. Files that were complete before remain complete."""

    exit_code = 1


class RewardError(FlowrlError):
    """A reward model returns no scores: it refuses a prompt or an image, cannot be reached, or
    broke its contract.
    """


class RewardContractError(RewardError):
    """The scores of a reward model break its contract: wrong type, wrong shape, or a value that is
    not finite.
    """


class CreditError(FlowrlError):
    """A credit rule broke its contract or lacks an input."""


class ProbeError(FlowrlError):
    """A probe broke its contract: it changed its input, or its estimates are not latents of
    unfinished nodes.
    """


class TrainingError(FlowrlError):
    """Training or sampling cannot continue: a value, such as a loss or a latent, is not finite."""

    exit_code = 1


class PartError(FlowrlError):
    """A part that is not flowrl's own (a rule, reward, loss, sampler or world) raised an exception,
    or `SystemExit`.
    """

    exit_code = 1


FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
"""Error numbers for a full disk, an exceeded quota, or a file of the largest size."""
MAX_SEED = 2**62
"""Largest seed of a run, a rule or a command; derived seeds remain below PyTorch's 2^63."""


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Check a value.

    Args:
        condition: whether the value is allowed.
        field: name of the field or argument.
        value: the value.
        allowed: description of the allowed values.

    Raises:
        ConfigError: `condition` is false; the message contains `field`, `value` and `allowed`.
    """
    if not condition:
        raise ConfigError(f"{field} = {value!r:.500} is not allowed; allowed: {allowed}")


@contextmanager
def part_errors() -> Iterator[None]:
    """Convert exceptions of code outside flowrl into a `PartError` that names the part, the call
    and the line.
    """
    try:
        yield
    except FlowrlError:
        raise
    except (Exception, SystemExit) as error:
        call = "" if is_disk_error(error) else foreign_call(error)
        if not call:
            raise
        raise PartError(f"{call} failed: {type(error).__name__}: {error}") from error


_calls: dict[object, tuple[str, float]] = {}
"""The calls in progress, the longest first, and when each began."""


@contextmanager
def part_call(call: str) -> Iterator[None]:
    """The context of a call of a part of the user: what it raises is a `PartError` that names it
    and the line, and `call` is among the `calls_in_progress`.
    """
    key = object()
    _calls[key] = (call, time.monotonic())
    try:
        with part_errors():
            yield
    finally:
        del _calls[key]


def calls_in_progress() -> list[tuple[str, float]]:
    """The calls of parts that have not returned, the outermost first, and when each began
    (`time.monotonic`).
    """
    return [*_calls.copy().values()]


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk is full, read-only or damaged."""
    return isinstance(error, OSError) and error.errno in (errno.EIO, errno.EROFS, *FULL)


def foreign_call(error: BaseException) -> str:
    """The call of code outside flowrl that raised `error`, with file and line, as in "MyRule.assign
    (my.py, line 3)"; "" if flowrl's own code raised it.
    """
    foreign = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_foreign(frame)
    ]
    if not foreign:
        return ""
    # The outermost frame is the part's method; the innermost one has the line to mend.
    (outer, _), (inner, line) = foreign[0], foreign[-1]
    owner = f"{type(outer.f_locals['self']).__name__}." if "self" in outer.f_locals else ""
    return f"{owner}{outer.f_code.co_name} ({inner.f_code.co_filename}, line {line})"


def _is_foreign(frame: FrameType) -> bool:
    """Whether a frame belongs neither to flowrl nor to a library; packages with parts of flowrl are
    not libraries.
    """
    file = Path(frame.f_code.co_filename)
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package in OWN_PACKAGES or not file.exists():
        return False
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    if not any(file.is_relative_to(folder) for folder in libraries):
        return True
    # here, since a Ctrl-C while `flowrl` itself is imported shows a traceback
    from importlib.metadata import entry_points

    groups = [group for group in entry_points().groups if group.startswith("flowrl.")]
    modules = [point.module for group in groups for point in entry_points(group=group)]
    return any(module.partition(".")[0] == package for module in modules)
