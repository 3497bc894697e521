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
from typing import NamedTuple

import flowrl
from flowrl.cli.main import COMMANDS, load_command, overview, plugins, run_command
from flowrl.parts.settings import allowed, fields_of, groups_of
from flowrl.training.config import RunConfig


class Page(NamedTuple):
    """A page of the reference: its file's name, its title, and the modules and packages of flowrl
    that it describes.

    If several pages describe a package, `parts` names the submodules (or single public names) of
    each; the first page has no `parts` and describes what the others leave.
    """

    file: str
    title: str
    modules: tuple[str, ...]
    parts: tuple[str, ...] = ()


CORE = ("errors", "options", "reading", "settings")
PARTS = ("registry", "specs", "sources", "plugins", "trust")
LOSS = ("values", "weights", "loss_batch", "forward_batch")
SAMPLING = ("sampling", "solvers", "EVALUATION_SEED", "SOLVERS")
COMBINED = ("combine", "diversity", "contract")
CHECKS = ("evaluation", "heldout", "monitors", "observers", "nonfinite", "memory")
HELPERS = ("io", "workers", "signals", "imports", "transfer")
PAGES = (
    Page("types", "Data types: prompts, trajectories, batches", ("types", "prompt")),
    Page("experience", "Decisions, the record of an iteration, credit", ("experience",)),
    Page(
        "protocols",
        "Protocols of samplers, credit rules, losses, rewards and policies",
        ("protocols",),
    ),
    Page("forward", "Forward-process batches and losses", ("forward",)),
    Page("methods", "Methods: Flow-GRPO, TP-GRPO and others by name", ("methods",)),
    Page("core", "Errors and settings", CORE),
    Page("parts", "Parts by name, from files and from packages", PARTS),
    Page("flow", "Flow: time grids, interpolant, Gaussians", ("flow",)),
    Page("samplers", "Samplers: Flow-SDE, CPS, windows", ("samplers",)),
    Page("credit", "Credit rules: uniform credit and stepwise gains", ("credit",)),
    Page(
        "credit-baselines",
        "Credit rules: baselines over iterations, GDPO, weights",
        ("credit",),
        ("memory", "wrappers"),
    ),
    Page(
        "credit-turning-points",
        "Credit rules: turning points",
        ("credit",),
        ("turning_point",),
    ),
    Page("credit-trees", "Credit rules on trees", ("credit",), ("trees",)),
    Page("losses", "Policy losses: clipped, GRPO-Guard, Flow-DPPO", ("losses",)),
    Page(
        "losses-forward",
        "Forward-process losses: DiffusionNFT, AWM, DGPO",
        ("losses",),
        ("forward",),
    ),
    Page("probes", "Probes: substeps, ODE completion, branches", ("probes",)),
    Page("probes-base", "Probes: the base class and its values", ("probes",), ("base", "types")),
    Page("rollout", "Rollout: trajectories and groups", ("rollout",)),
    Page("rollout-values", "Values, weights and batches of a loss", ("rollout",), LOSS),
    Page("rollout-sampling", "Sampling images, ODE solvers", ("rollout",), SAMPLING),
    Page("tree", "Trees of trajectories", ("tree",)),
    Page("rewards", "Reward models: GenEval, OCR, PickScore, HPS, CLIP", ("rewards",)),
    Page("rewards-combine", "Rewards: sums, groups, diversity, contract", ("rewards",), COMBINED),
    Page("prompts", "Prompts", ("prompts",)),
    Page("policies", "Policies: SD3, FLUX, Qwen-Image, Wan", ("policies",)),
    Page(
        "policies-small",
        "Small networks: a tiny SD3, a Gaussian mixture",
        ("policies",),
        ("small_sd3", "mixture"),
    ),
    Page(
        "policies-family",
        "Model families and LoRA",
        ("policies",),
        ("family", "lora", "LORA_TARGETS"),
    ),
    Page(
        "policies-memory",
        "Memory and sizes of models",
        ("policies",),
        ("memory", "ARCHITECTURES", "DECODER"),
    ),
    Page("worlds", "Worlds: built-in tasks, tasks from a model", ("worlds",)),
    Page("training", "Training: trainer, batches, optimizer", ("training",)),
    Page("training-config", "Settings as data classes: RunConfig", ("training",), ("config",)),
    Page(
        "training-policy", "Settings of the model: PolicyConfig", ("training",), ("PolicyConfig",)
    ),
    Page(
        "training-runs",
        "Runs, presets, plans and comparisons",
        ("training",),
        ("build", "run", "presets", "plan", "compare"),
    ),
    Page(
        "training-files",
        "Checkpoints, results, logs",
        ("training",),
        ("checkpoint", "results", "format", "logging", "card"),
    ),
    Page(
        "training-checks",
        "Evaluation, warnings, observers, non-finite values",
        ("training",),
        CHECKS,
    ),
    Page("diagnostics", "Diagnostics: comparison of weights, statistics", ("diagnostics",)),
    Page("testing", "Contract tests", ("testing",)),
    Page("plots", "Figures and reports", ("plots",)),
    Page("serving", "Reward server", ("serving",)),
    Page(
        "serving-client",
        "Reward client and wire format",
        ("serving",),
        ("client", "wire_format", "connections"),
    ),
    Page("distributed", "Several processes: collectives, FSDP2", ("distributed",)),
    Page("helpers", "Files, worker processes, signals, texts", HELPERS),
)
NOT_PYTHON = {"cli", "commands", "data"}
"""Parts of flowrl whose interface is the command line, or files."""


TOP = {name for _, name, _ in pkgutil.iter_modules(flowrl.__path__) if not name.startswith("_")}
"""The modules and packages directly below flowrl."""


def unlisted() -> set[str]:
    """Top-level modules of flowrl that no page describes."""
    return TOP - {name for page in PAGES for name in page.modules} - NOT_PYTHON


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
    found = pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    inside = [importlib.import_module(module.name) for module in found if "._" not in module.name]
    return [
        room,
        *(
            module
            for module in inside
            if hasattr(module, "__all__") or not hasattr(room, "__all__")
        ),
    ]


def modules_of_page(page: Page) -> tuple[str, ...]:
    """The modules of a page that exist: a distribution may leave out a satellite."""
    return tuple(name for name in page.modules if name in TOP)


def on_page(page: Page, room: str, module: ModuleType, name: str) -> bool:
    """Whether `page` describes the public name `name` of `module`, which belongs to the package
    `room`.
    """
    home = getattr(getattr(module, name), "__module__", "") or ""
    labels = {
        name,
        module.__name__.rsplit(".", 1)[-1],
        home.rsplit(".", 1)[-1] if home.startswith(f"flowrl.{room}.") else name,
    }
    if page.parts:
        wanted = set(page.parts)
        named_alone = {
            part for other in PAGES if room in other.modules for part in other.parts
        } - wanted
        return bool(labels & wanted) and name not in named_alone
    return not any(
        labels & set(other.parts) for other in PAGES if other is not page and room in other.modules
    )


def room_page(page: Page) -> str:
    """The documentation of public names, module by module. What a package exports is described
    there, and not again in the submodule that defines it.
    """
    text = [f"# {page.title}", ""]
    for room in modules_of_page(page):
        others = [
            f"[{other.title}]({other.file}.md)"
            for other in PAGES
            if room in other.modules and other is not page
        ]
        if others:
            text += [f"More of `flowrl.{room}`: {'; '.join(others)}.", ""]
        described: set[int] = set()
        for module in modules_of(room):
            new = [
                public
                for public in public_names(module)
                if id(getattr(module, public)) not in described
            ]
            described |= {id(getattr(module, public)) for public in new}
            chosen = [public for public in new if on_page(page, room, module, public)]
            if chosen or (module.__name__ == f"flowrl.{room}" and not page.parts):
                text += [*module_section(module, chosen, first=page_of(module, new) is page), ""]
    return "\n".join(text)


def page_of(module: ModuleType, names: list[str]) -> Page:
    """The page that has the docstring of a module: the first that describes one of its names."""
    room = module.__name__.split(".")[1]
    pages = [page for page in PAGES if room in page.modules]
    return next(
        (page for page in pages if any(on_page(page, room, module, name) for name in names)),
        pages[0],
    )


def module_section(module: ModuleType, names: list[str], first: bool) -> list[str]:
    """A heading, the module's docstring (on the `first` page about it), and the documentation of
    `names`; constants last, without their values.
    """
    # some are imported at their first use
    vars(module).update({name: getattr(module, name) for name in names})
    constants = [name for name in names if not callable(getattr(module, name))]
    rest = [name for name in names if name not in constants]
    label = [f"({module.__name__})="] if first else []
    lines = [*label, f"## {module.__name__}", "", "```{eval-rst}"]
    if first:
        lines += [
            f".. automodule:: {module.__name__}",
            *([f"   :members: {', '.join(rest)}"] if rest else []),
        ]
    else:
        lines += [f".. currentmodule:: {module.__name__}", ""]
        for name in rest:
            kind = "class" if isinstance(getattr(module, name), type) else "function"
            lines += [f".. auto{kind}:: {name}", *(["   :members:"] if kind == "class" else []), ""]
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
    """The list of the other pages, with the top modules of each."""
    rows = [
        f"| [{page.title}]({page.file}.md) |"
        f" {', '.join(f'`flowrl.{name}`' for name in page.modules)} |"
        for page in PAGES
    ]
    return "\n".join(
        [
            "# Python API",
            "",
            API,
            "",
            "| page | import from |",
            "|---|---|",
            *rows,
            "",
            TOCTREE,
            *files(),
            "```",
            "",
        ]
    )


API = """\
The public interface, made from the code. Import a name from the module under which it is listed, as in
`from flowrl.policies import load_policy`. [Versions](../../versioning.md) defines what is public, and what a change of a public
name requires. The top-level package exports the names that most programs need: `from flowrl import RunConfig, compare,
make_trainer, preset`."""
TOCTREE = "```{toctree}\n:hidden:\n:maxdepth: 1\n"


def files() -> list[str]:
    """The files of the pages about modules, without ending."""
    return [page.file for page in PAGES]


def pages() -> dict[str, str]:
    """The text of every page below reference/api, by file name."""
    made = {"index.md": index_page(), "settings.md": settings_page()}
    made |= {f"{file}.md": commands_page(file) for file in ("commands", *COMMAND_PAGES)}
    return made | {f"{page.file}.md": room_page(page) for page in PAGES}


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
