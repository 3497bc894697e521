"""Pages of the reference that are made from the code: public names package by package, settings,
and commands.
"""

import dataclasses
import importlib
import io
import os
import pkgutil
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import ModuleType

import flowrl
from flowrl.cli.main import COMMANDS, load_command, overview, plugins, run_command
from flowrl.run.config import RunConfig
from flowrl.run.parts.settings import allowed, fields_of, groups_of

PAGES = {
    "core": "Values, protocols and errors",
    "methods": "Methods: Flow-GRPO, TP-GRPO and others by name",
    "flow": "Flow: time grids, interpolant, Gaussians",
    "samplers": "Samplers: Flow-SDE, CPS, windows, multistep solvers",
    "credit": "Credit rules: uniform credit, stepwise gains, turning points, trees",
    "losses": "Losses: clipped, GSPO, GRPO-Guard, Flow-DPPO, DiffusionNFT, AWM, DGPO, CRD, direct reward gradients",
    "probes": "Probes: substeps, ODE completion, branches",
    "rollout": "Rollout: trajectories, values, weights, rows of a loss",
    "rewards": "Rewards: JPEG sizes, motion, sums, win rates, diversity; GenEval, OCR, PickScore, HPS, CLIP",
    "policies": "Policies: SD3, FLUX, Z-Image, Qwen-Image, Wan, two small networks",
    "worlds": "Worlds: built-in tasks, tasks from a model",
    "trainer": "Trainer: one iteration, from prompts to new weights",
    "weights": "Trained weights: loss scale, averages, copies",
    "nonfinite": "Reports of values that are not finite",
    "run": "Runs: settings, parts by name, checkpoints, evaluation, processes, reports",
    "cli": "Command line",
    "serving": "Reward server and its client",
    "testing": "Contract tests, tiny pipelines",
    "compare": "Comparisons, figures and reports",
    "bench": "Benchmarks of credit rules: exact values, tuning, the verdict",
}
"""A page of the reference per package or module of flowrl, and its title."""
NOT_PYTHON = {"data"}
"""Parts of flowrl whose interface is the command line, or files."""


TOP = {name for _, name, _ in pkgutil.iter_modules(flowrl.__path__) if not name.startswith("_")}
"""The modules and packages directly below flowrl."""


def unlisted() -> set[str]:
    """Top-level modules of flowrl that no page describes."""
    return TOP - PAGES.keys() - NOT_PYTHON


def public_names(module: ModuleType) -> list[str]:
    """The `__all__` of a module; without one, the public classes and functions that it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    here = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    return [name for name in here if not name.startswith("_")]


def modules_of(name: str) -> list[ModuleType]:
    """A package and its public submodules. If the package has an `__all__`, only submodules with
    one of their own are public.
    """
    room = importlib.import_module(f"flowrl.{name}")
    if not hasattr(room, "__path__"):
        return [room]
    names = pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    inside = [importlib.import_module(module.name) for module in names if "._" not in module.name]
    return [
        room,
        *(
            module
            for module in inside
            if hasattr(module, "__all__") or not hasattr(room, "__all__")
        ),
    ]


def room_page(room: str) -> str:
    """The documentation of public names, module by module. What a package exports is described
    there, and not again in the submodule that defines it.
    """
    text, described = [f"# {PAGES[room]}", ""], set[int]()
    for module in modules_of(room):
        # some names are imported at their first use
        vars(module).update({name: getattr(module, name) for name in public_names(module)})
        names = [name for name in public_names(module) if id(vars(module)[name]) not in described]
        described |= {id(vars(module)[name]) for name in names}
        if names or module.__name__ == f"flowrl.{room}":
            text += [*module_section(module, names), ""]
    return "\n".join(text)


def module_section(module: ModuleType, names: list[str]) -> list[str]:
    """A heading, the module's docstring, and the documentation of `names`; constants last, without
    their values.
    """
    constants = [name for name in names if not callable(getattr(module, name))]
    members = ", ".join(name for name in names if name not in constants)
    lines = [
        f"({module.__name__})=",
        f"## {module.__name__}",
        "",
        "```{eval-rst}",
        f".. automodule:: {module.__name__}",
        *([f"   :members: {members}"] if members else []),
    ]
    for name in constants:
        lines += [
            "",
            f".. py:data:: {module.__name__}.{name}",
            "",
            *(f"   {line}" for line in constant_doc(module, name)),
        ]
    return [*lines, "```"]


def constant_doc(module: ModuleType, name: str) -> list[str]:
    """The string below a constant's definition, in `module` or in the submodule from which it
    imports the constant.
    """
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
        text += [
            f"## `{group}`" if group else "## The run",
            "",
            "| name | default | allowed | meaning |",
            "|---|---|---|---|",
        ]
        known = kind.__pydantic_fields__
        for item in fields_of(kind):
            if item.name not in groups:
                default = "" if item.default in ("", ()) else f"`{item.default}`"
                meaning = " ".join((known[item.name].description or "").split())
                cells = (
                    f"`{item.name}`",
                    default,
                    allowed(kind, item.name),
                    meaning.replace("|", "\\|"),
                )
                text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


SETTINGS = """\
The defaults are those of the built-in image world; the mixture world and models have some of their own, which
`flowrl train --world mixture --help` and `flowrl presets` show. On the command line a setting is an option with
hyphens, without its group: `--learning-rate 1e-3`."""


COMMAND_PAGES = {
    "commands-train": ("flowrl train", ("train",)),
    "commands-compare": ("flowrl compare", ("compare",)),
    "commands-bench": ("flowrl bench, explain and pretrain", ("bench", "explain", "pretrain")),
}
"""File of a page: its title and its commands; the page `commands` has the overview and the others.
"""


def commands_page(file: str = "commands") -> str:
    """What `flowrl COMMAND --help` prints, for the commands of a page of `COMMAND_PAGES`, or for
    those of no other page.
    """
    os.environ["COLUMNS"] = "88"
    ours = [name for name, point in plugins().items() if point.value.startswith("flowrl")]
    elsewhere = {name for _, names in COMMAND_PAGES.values() for name in names}
    if file in COMMAND_PAGES:
        title, names = COMMAND_PAGES[file]
        text = [f"# {title}: options", ""]
    else:
        names = tuple(name for name in [*COMMANDS, *ours] if name not in elsewhere)
        text = ["# Commands", "", "```text", overview(), "```", ""]
        text += [f"- [{title}]({page}.md)" for page, (title, _) in COMMAND_PAGES.items()] + [""]
    for name in names:
        calls = [[name]]
        if name == "bench":
            calls += [[name, part.__name__.lower()] for part in subcommands(name)]
        for call in calls:
            text += [f"## flowrl {' '.join(call)}", "", "```text", help_of(call), "```", ""]
    return "\n".join(text)


def all_commands() -> str:
    """The text of all pages about commands."""
    return "\n".join(commands_page(file) for file in ("commands", *COMMAND_PAGES))


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


def index_page() -> str:
    """The list of the other pages."""
    rows = [f"| [{title}]({name}.md) | `flowrl.{name}` |" for name, title in PAGES.items()]
    head = ["# Python API", "", API, "", "| page | import from |", "|---|---|", *rows, ""]
    return "\n".join([*head, TOCTREE, *PAGES, "```", ""])


API = """\
The public interface, made from the code. Import a name from the module under which it is listed, as in
`from flowrl.policies import PipelinePolicy`. CONTRIBUTING.md defines what is public, and what a change of a public
name requires. The top-level package exports the names that most programs need: `from flowrl import RunConfig,
make_trainer, preset`."""
TOCTREE = "```{toctree}\n:hidden:\n:maxdepth: 1\n"


def pages() -> dict[str, str]:
    """The text of every page below reference/api, by file name."""
    made = {"index.md": index_page(), "settings.md": settings_page()}
    made |= {f"{file}.md": commands_page(file) for file in ("commands", *COMMAND_PAGES)}
    return made | {f"{name}.md": room_page(name) for name in PAGES}


def write_reference(docs: Path) -> None:
    """Write the pages below reference/api; one whose text is as before keeps its time. Raises
    `RuntimeError` if a module belongs to no page.
    """
    if unlisted():
        raise RuntimeError(f"docs/reference_pages.py: PAGES lacks {sorted(unlisted())}")
    target = docs / "reference" / "api"
    target.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in target.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        path = target / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
