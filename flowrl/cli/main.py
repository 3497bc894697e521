"""The command line: `flowrl COMMAND`. Only the module of the chosen command is imported."""

import errno
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from flowrl import __version__
from flowrl.cli.layout import columns, listed, wrapped
from flowrl.core.errors import FULL, ConfigError, FlowrlError, part_errors
from flowrl.core.options import check_ranges
from flowrl.parts.plugins import package_of, plugin
from flowrl.parts.settings import unknown
from flowrl.parts.sources import summary
from flowrl.signals import READER_ENDED, reader_ended, same_handlers

COMMANDS = {
    "compare": (
        "flowrl.cli.runs:Compare",
        "Compare credit rules: train every method with every seed, write a report.",
    ),
    "train": (
        "flowrl.cli.runs:Train",
        "Train one method with one seed, on a world or a diffusers model.",
    ),
    "evaluate": (
        "flowrl.cli.evaluate:Evaluate",
        "Score base and trained weights on the same prompts and noise.",
    ),
    "sample": (
        "flowrl.cli.models:Sample",
        "Sample images for prompts from the base model or a finished run.",
    ),
    "parts": (
        "flowrl.cli.parts:Parts",
        "List credit rules, samplers, losses and rewards, or describe one (`flowrl parts NAME`).",
    ),
    "presets": (
        "flowrl.cli.presets:Presets",
        (
            "List the presets, print one next to the published values or as YAML, or find"
            " Accelerate's configurations."
        ),
    ),
    "prompts": ("flowrl.cli.prompts:Prompts", "Make or check a file of prompts."),
    "env": (
        "flowrl.cli.env:Env",
        "Print versions, cores and, with --devices, GPUs, as needed in a bug report.",
    ),
}
"""Built-in commands: where their class is, and a line for the list."""

GROUPS = {
    "train": ("compare", "train"),
    "results": ("evaluate", "sample"),
    "look up": ("parts", "presets", "prompts", "env"),
}
"""Built-in commands by purpose."""

DESCRIPTION = """\
usage: flowrl COMMAND [OPTIONS]

Reinforcement learning for flow-matching image models: compare the credit rules of Flow-GRPO,
Stepwise-Flow-GRPO, TP-GRPO and others with your own. Start with `flowrl compare`."""


def plugins() -> dict[str, EntryPoint]:
    """The commands of installed packages: entry points in the group ``flowrl.commands``, each a
    tyro data class with `main`.
    """
    return {
        point.name: point
        for point in sorted(entry_points(group="flowrl.commands"), key=lambda point: point.name)
    }


def overview() -> str:
    """What bare `flowrl` prints."""
    width, groups = (
        columns(),
        {title: [(name, COMMANDS[name][1]) for name in names] for title, names in GROUPS.items()},
    )
    for name, point in plugins().items():
        groups.setdefault(f"from {package_of(point)}", []).append((name, summary(point.value)))
    longest = max(len(name) for rows in groups.values() for name, _ in rows)
    lines = wrapped(DESCRIPTION, width)
    for title, rows in groups.items():
        lines += [
            "",
            f"{title}:",
            *listed([(f"{name:{longest}s}", text) for name, text in rows], width),
        ]
    return "\n".join(
        [*lines, "", "flowrl COMMAND --help lists the options of a command; flowrl --version."]
    )


def load_command(name: str) -> Any:
    """The class of a command. Raises `ConfigError` for an unknown one, a name of two packages, or a
    failed import.
    """
    if name in COMMANDS:
        module, _, attribute = COMMANDS[name][0].partition(":")
        return getattr(import_module(module), attribute)
    point = plugin("flowrl.commands", name, "command")
    if point is None:
        raise ConfigError(unknown(name, [*COMMANDS, *plugins()], "command"))
    try:
        return point.load()
    except ImportError as error:
        raise ConfigError(f"command {name}: {point.value} cannot be imported: {error}") from error


def run_command(arguments: Sequence[str]) -> int:
    """Parse and run one command. A class that has `defaults(arguments)` says what its options start
    from.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    if arguments[0] == "--version":
        print(f"flowrl {__version__}")
        return 0
    for text in arguments:
        if "\0" in text:
            raise ConfigError(
                f"{text!r:.200} contains a NUL character, which no option, file or prompt may have"
            )
    import tyro

    from flowrl.cli.help_texts import with_help

    name, rest = arguments[0], list(arguments[1:])
    command = with_help(load_command(name))
    start = {"default": command.defaults(rest)} if hasattr(command, "defaults") else {}
    try:
        parsed = tyro.cli(
            command, prog=f"flowrl {name}", args=rest, config=(tyro.conf.OmitArgPrefixes,), **start
        )
    except SystemExit:  # --help, or a wrong option
        sys.stdout.flush()
        raise
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
    except OSError as error:
        if error.errno not in USERS_OWN:
            return report_unforeseen(error)
        print(f"flowrl: error: {error.strerror}: {error.filename or 'the output'}", file=sys.stderr)
        return 1 if error.errno in FULL else 2
    except Exception as error:
        return report_unforeseen(error)
    return READER_ENDED if reader_ended.is_set() else code


USERS_OWN = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOENT,
    errno.EEXIST,
    errno.ELOOP,
    *FULL,
)
"""What a file system answers to paths that cannot be read or written."""


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
