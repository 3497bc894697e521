"""The command line: `flowrl COMMAND`. Only the module of the chosen command is imported."""

import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any

from flowrl import __version__
from flowrl.cli.terminal import fitted
from flowrl.core.errors import FULL, ConfigError, FlowrlError, part_errors, require
from flowrl.core.options import check_ranges
from flowrl.run.parts.plugins import plugin
from flowrl.run.parts.settings import unknown
from flowrl.run.parts.sources import summary
from flowrl.run.signals import READER_ENDED, reader_ended, same_handlers

COMMANDS = {
    "train": "flowrl.cli.train:Train",
    "parts": "flowrl.cli.lookup:Parts",
    "presets": "flowrl.cli.lookup:Presets",
    "prompts": "flowrl.cli.lookup:Prompts",
    "env": "flowrl.cli.lookup:Env",
    "evaluate": "flowrl.cli.evaluate:Evaluate",
    "sample": "flowrl.cli.evaluate:Sample",
    "export": "flowrl.cli.export:Export",
    "report": "flowrl.cli.report:Report",
    "pretrain": "flowrl.cli.pretrain:Pretrain",
    "serve-reward": "flowrl.serving.command:ServeReward",
    "compare": "flowrl.compare.command:Compare",
    "sweep": "flowrl.compare.command:Sweep",
    "bench": "flowrl.bench.command:Bench",
    "explain": "flowrl.bench.explain_command:Explain",
}
"""Built-in commands and the import paths of their classes."""
DESCRIPTION = """\
usage: flowrl COMMAND [OPTIONS]

Reinforcement learning for flow-matching image models: compare the credit rules of Flow-GRPO, \
Stepwise-Flow-GRPO, TP-GRPO and others with your own. Start with `flowrl compare`."""


def plugins() -> dict[str, Any]:
    """The commands of installed packages: entry points in the group ``flowrl.commands``, each a
    tyro data class with `main`.
    """
    return {point.name: point for point in sorted(entry_points(group="flowrl.commands"))}


def overview() -> str:
    """What bare `flowrl` prints."""
    places = COMMANDS | {name: point.value for name, point in plugins().items()}
    longest = max(map(len, places))
    lines = [
        fitted(f"  {name:{longest}s}  {summary(place)}", longest + 4)
        for name, place in sorted(places.items())
    ]
    end = "flowrl COMMAND --help lists its options; flowrl --version prints the version."
    return "\n".join([fitted(DESCRIPTION), "", *lines, "", fitted(end)])


def load_command(name: str) -> Any:
    """The class of a command. Raises `ConfigError` for an unknown one, a name of two packages, or a
    failed import.
    """
    place = COMMANDS.get(name)
    if place is None:
        point = plugin("flowrl.commands", name, "command")
        if point is None:
            raise ConfigError(unknown(name, [*COMMANDS, *plugins()], "command"))
        place = point.value
    try:
        return resolve_name(place)
    except ImportError as error:
        raise ConfigError(f"command {name}: {place} cannot be imported: {error}") from error


def run_command(arguments: Sequence[str]) -> int:
    """Parse and run one command. A class that has `defaults(arguments)` says what its options start
    from.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"flowrl {__version__}")
        return 0
    for before, text in pairwise(arguments):
        option = text.partition("=")[0] if text.startswith("--") else before
        require("\0" not in text, option.lstrip("-"), text, "text without NUL characters")
    import tyro

    from flowrl.cli.options import require_once, with_help

    command = with_help(load_command(name))
    start = {"default": command.defaults(rest)} if hasattr(command, "defaults") else {}
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
    try:
        parsed = tyro.cli(command, prog=f"flowrl {name}", args=rest, config=config, **start)
    except SystemExit:  # --help, or a wrong option
        sys.stdout.flush()
        raise
    require_once(parsed, rest)
    check_ranges(parsed)
    return parsed.main()


def main(arguments: Sequence[str] | None = None) -> int:
    """`run` for programs: the handlers of signals are afterwards as before."""
    with same_handlers():
        return run(sys.argv[1:] if arguments is None else arguments)


def run(arguments: Sequence[str]) -> int:
    """Run a command line, and never print a traceback. Returns 2 for bad input, 1 for a run that
    failed, 130 after Ctrl-C, 141 if the reader of the output ended first (`| head`).

    Foreseen errors print one message. The traceback of any other is saved, and the message says
    where.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with part_errors():
            code = run_command(arguments)
        sys.stdout.flush()
    except FlowrlError as error:
        print(f"flowrl: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        code = 130
        if not reader_ended.is_set():
            print("flowrl: interrupted", file=sys.stderr)
    except Exception as error:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            needed = str(error).rpartition("allocate memory: ")[2]
            print(f"flowrl: error: out of memory: {needed}", file=sys.stderr)
            return 1
        if not isinstance(error, OSError) or (not error.filename and error.errno not in FULL):
            return report_unforeseen(error)
        # a path that cannot be read or written, or a full disk
        print(f"flowrl: error: {error.strerror}: {error.filename or 'the output'}", file=sys.stderr)
        return 1 if error.errno in FULL else 2
    return READER_ENDED if reader_ended.is_set() else code


def report_unforeseen(error: BaseException) -> int:
    """Save the traceback with what a bug report needs, and say where it is."""
    text = "".join(traceback.format_exception(error))
    words = shlex.join(["flowrl", *sys.argv[1:]])
    handle, path = tempfile.mkstemp(prefix="flowrl-error-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
        file.write(f"{words}\nflowrl {__version__}, Python {sys.version}\n\n{text}")
    print(
        f"flowrl: unexpected error: {type(error).__name__}: {str(error)[:500]}\nThe traceback is in"
        f" {path}; please report it together with the output of `flowrl env --devices`.",
        file=sys.stderr,
    )
    return 1


__all__ = ["main", "run"]
