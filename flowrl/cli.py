"""The command line: `flowrl compare`, `train`, `pretrain`, `sample`, `explain`, `parts`, `prompts`, `bench`, `serve-reward`."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import tyro

from flowrl.commands.evaluate import Evaluate
from flowrl.commands.models import Pretrain, Sample
from flowrl.commands.parts import Explain, Parts
from flowrl.commands.presets import Presets
from flowrl.commands.prompts import Prompts
from flowrl.commands.runs import Compare, Train
from flowrl.errors import ConfigError, FlowrlError

COMMANDS: dict[str, Callable[..., Any]] = {
    "compare": Compare,
    "train": Train,
    "pretrain": Pretrain,
    "sample": Sample,
    "evaluate": Evaluate,
    "explain": Explain,
    "parts": Parts,
    "prompts": Prompts,
    "presets": Presets,
}

DESCRIPTION = (
    "Reinforcement learning for flow-matching image models: compare credit rules (Flow-GRPO, Stepwise-Flow-GRPO, TP-GRPO, "
    "or your own) on a laptop. Start with `flowrl compare`; every command explains itself with --help."
)


def commands() -> dict[str, Callable[..., Any]]:
    """The built-in commands and those of installed packages (entry-point group ``flowrl.commands``)."""
    points = sorted(entry_points(group="flowrl.commands"), key=lambda point: point.name)
    return {**COMMANDS, **{point.name: point.load() for point in points}}


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Errors of the user's making print one line and return 2; Ctrl-C returns 130."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            commands(),
            prog="flowrl",
            description=DESCRIPTION,
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes,),
        )
        return command.main()
    except FlowrlError as error:
        print(f"flowrl: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("flowrl: interrupted", file=sys.stderr)
        return 130


def entry() -> None:
    """Console script."""
    sys.exit(main())


__all__ = ["ConfigError", "entry", "main"]
