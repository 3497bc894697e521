"""Pages of the reference that are made from the code: public names room by room, settings, and commands. Called by conf.py."""

import dataclasses
import importlib
import io
import os
import pkgutil
import shutil
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import ModuleType

import flowrl
from flowrl.cli import COMMANDS, load_command, overview, plugins, run_command
from flowrl.settings import allowed, groups_of
from flowrl.training.config import RunConfig

ROOMS = {
    "Core": (
        "types",
        "prompt",
        "forward",
        "protocols",
        "errors",
        "options",
        "reading",
        "settings",
        "specs",
        "registry",
        "sources",
        "plugins",
        "trust",
        "methods",
    ),
    "Flow": ("flow",),
    "Samplers": ("samplers",),
    "Credit": ("credit",),
    "Losses": ("losses",),
    "Probes": ("probes",),
    "Rollout": ("rollout", "tree"),
    "Rewards": ("rewards",),
    "Prompts": ("prompts",),
    "Policies": ("policies",),
    "Worlds": ("worlds",),
    "Training": ("training",),
    "Diagnostics": ("diagnostics",),
    "Contract tests": ("testing",),
    "Figures and reports": ("plots",),
    "Reward server": ("serving",),
    "Helpers": ("distributed", "workers", "signals", "imports", "io", "text", "transfer"),
}
"""Title of a page: the modules and packages of flowrl that it describes."""
NOT_PYTHON = {"cli", "commands", "launch", "data"}
"""Parts of flowrl whose interface is the command line, or files."""


TOP = {name for _, name, _ in pkgutil.iter_modules(flowrl.__path__) if not name.startswith("_")}
"""The modules and packages directly below flowrl."""


def unlisted() -> set[str]:
    """Top-level modules of flowrl that no page describes."""
    return TOP - {name for names in ROOMS.values() for name in names} - NOT_PYTHON


def public_names(module: ModuleType) -> list[str]:
    """The `__all__` of a module; without one, the public classes and functions that it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    here = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name for name in here if not name.startswith("_")]


def modules_of(name: str) -> list[ModuleType]:
    """A room and its public submodules. If the room has an `__all__`, only submodules with one of their own are public."""
    room = importlib.import_module(f"flowrl.{name}")
    if not hasattr(room, "__path__"):
        return [room]
    found = pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    inside = [importlib.import_module(module.name) for module in found if "._" not in module.name]
    return [room, *(module for module in inside if hasattr(module, "__all__") or not hasattr(room, "__all__"))]


def room_page(title: str, names: tuple[str, ...]) -> str:
    """The documentation of public names, module by module. What a room exports is described there, and not again in the
    submodule that defines it."""
    text = [f"# {title}", ""]
    for name in names:
        described: set[int] = set()
        for module in modules_of(name):
            chosen = [public for public in public_names(module) if id(getattr(module, public)) not in described]
            described |= {id(getattr(module, public)) for public in chosen}
            if chosen or module.__name__ == f"flowrl.{name}":
                text += [*module_section(module, chosen), ""]
    return "\n".join(text)


def module_section(module: ModuleType, names: list[str]) -> list[str]:
    """A heading, the module's docstring, and the documentation of `names`; constants last, without their values."""
    vars(module).update({name: getattr(module, name) for name in names})  # some are imported at their first use
    constants = [name for name in names if not callable(getattr(module, name))]
    rest = [name for name in names if name not in constants]
    lines = [f"({module.__name__})=", f"## {module.__name__}", "", "```{eval-rst}", f".. automodule:: {module.__name__}"]
    lines += [f"   :members: {', '.join(rest)}"] if rest else []
    for name in constants:
        lines += ["", f".. py:data:: {module.__name__}.{name}", "", *(f"   {line}" for line in constant_doc(module, name))]
    return [*lines, "```"]


def constant_doc(module: ModuleType, name: str) -> list[str]:
    """The string below a constant's definition, in `module` or in the submodule from which it imports the constant."""
    from sphinx.pycode import ModuleAnalyzer

    inside = [found for key, found in sys.modules.items() if key.startswith(f"{module.__name__}.")]
    for home in [module, *inside]:
        documented = ModuleAnalyzer.for_module(home.__name__).find_attr_docs()
        if getattr(home, name, None) is getattr(module, name) and ("", name) in documented:
            return documented["", name]
    return []


def settings_page() -> str:
    """Every setting of a run by group: name, default, what is allowed, meaning."""
    text = ["# Settings", "", SETTINGS, ""]
    groups = {"": RunConfig, **groups_of(RunConfig)}
    for group, kind in groups.items():
        text += [f"## `{group}`" if group else "## The run", "", "| name | default | allowed | meaning |", "|---|---|---|---|"]
        known = kind.__pydantic_fields__
        for item in dataclasses.fields(kind):
            if item.name not in groups:
                default = "" if item.default in ("", ()) else f"`{item.default}`"
                meaning = " ".join((known[item.name].description or "").split())
                cells = (f"`{item.name}`", default, allowed(kind, item.name), meaning.replace("|", "\\|"))
                text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


SETTINGS = """\
The defaults are those of the built-in image world; the mixture world and models have some of their own, which
`flowrl train --world mixture --help` and `flowrl presets` show. On the command line a setting is an option with
hyphens, without its group: `--learning-rate 1e-3`."""


def commands_page() -> str:
    """What `flowrl` and `flowrl COMMAND --help` print."""
    text = ["# Commands", "", "```text", overview(), "```", ""]
    os.environ["COLUMNS"] = "88"
    ours = [name for name, point in plugins().items() if point.value.startswith("flowrl")]
    for name in [*COMMANDS, *ours]:
        calls = [[name]]
        if name == "bench":
            calls += [[name, part.__name__.lower()] for part in subcommands(name)]
        for call in calls:
            text += [f"## flowrl {' '.join(call)}", "", "```text", help_of(call), "```", ""]
    return "\n".join(text)


def subcommands(name: str) -> list[type]:
    """The classes between which a command's only field chooses."""
    (field,) = dataclasses.fields(load_command(name))
    union = field.type.__origin__ if hasattr(field.type, "__origin__") else field.type
    return list(union.__args__)


def help_of(call: list[str]) -> str:
    """The help of one command, as text."""
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        run_command([*call, "--help"])
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def write_reference(docs: Path) -> None:
    """Write the pages below reference/api. Raises `RuntimeError` if a module belongs to no page."""
    if unlisted():
        raise RuntimeError(f"docs/reference_pages.py: ROOMS lacks {sorted(unlisted())}")
    target = docs / "reference" / "api"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "settings.md").write_text(settings_page(), encoding="utf-8")
    (target / "commands.md").write_text(commands_page(), encoding="utf-8")
    for title, names in ROOMS.items():
        chosen = tuple(name for name in names if name in TOP)
        (target / f"{names[0]}.md").write_text(room_page(title, chosen), encoding="utf-8")
