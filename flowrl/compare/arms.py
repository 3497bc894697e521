"""Arms of a comparison: names, each with the settings in which its runs differ from those of the
other arms.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from flowrl.cli.options import rule_name
from flowrl.compare.results import run_folder
from flowrl.core.errors import MAX_SEED, ConfigError, require
from flowrl.methods import METHODS
from flowrl.run.config import EvaluationConfig, RunConfig
from flowrl.run.parts.settings import owners, read_arms, unknown
from flowrl.run.parts.specs import identity, parse_options
from flowrl.run.parts.trust import PARTS, require_trust

Arms = Mapping[str, Mapping[str, Any]]
"""Settings, named without their groups, by the name of the arm."""
LONGEST = 200
"""Bytes in the name of a run's folder; file systems allow 255."""
COMMON = (
    "world",
    "task",
    "heldout_prompts",
    "hold_out",
    *(item.name for item in fields(EvaluationConfig)),
)
"""Settings that determine the held-out evaluation, by which arms are compared."""


def method_arms(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An arm for each method, by its name."""
    return together(*({name: {"method": name}} for name in names))


def credit_arms(specs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An arm for each credit rule, named by `rule_name`: Flow-GRPO with this rule."""
    return together(
        *({rule_name(spec): {"method": rule_name(spec), "credit": spec}} for spec in specs)
    )


def parse_arm(text: str) -> dict[str, dict[str, Any]]:
    """The arm that ``NAME: setting=value, ...`` describes; nothing after the colon: no
    difference. The name of a method alone is its arm.
    """
    name, colon, options = text.partition(":")
    name = name.strip()
    if text in METHODS:
        return method_arms([text])
    need = "'NAME: setting=value, ...', 'NAME:' for no difference, or a method's name"
    require(bool(name and colon) and "=" not in name, "arm", text, need)
    return {name: parse_options(options, f"arm {name!r}")}


MOST_POINTS = 1000


def parse_grid(text: str) -> dict[str, list[Any]]:
    """The values by setting that ``setting=value,value,... setting=value,...`` describes.

    Raises:
        ConfigError: the text cannot be read, a setting is unknown or occurs twice, or has a value
            twice.
    """
    grid, words = dict[str, list[Any]](), list[str]()
    for word in re.split(r"\s+(?=\w+=)", text.strip()):
        if words and words[-1].count("(") > words[-1].count(")"):  # within the options of a part
            words[-1] += f" {word}"
        else:
            words.append(word)
    for word in words:
        name, _, values = word.partition("=")
        require(values != "", "grid", text, "'setting=value,value,... setting=value,...'")
        if name not in owners(RunConfig):
            raise ConfigError(f"grid: {unknown(name, owners(RunConfig))}")
        require(name not in grid, "grid", text, f"{name} once")
        grid[name] = parse_options(f"{name}=[{values}]", "grid")[name]
        once = len(set(map(repr, grid[name]))) == len(grid[name]) >= 1
        require(once, f"grid: {name}", values, "one or more values, each once")
    return grid


def require_apart(arms: Arms, grid: Mapping[str, Sequence[Any]]) -> None:
    """Raise `ConfigError` if one of `arms` sets a setting of the `grid`."""
    for arm, settings in arms.items():
        both = ", ".join(settings.keys() & grid.keys())
        require(not both, "grid", both, f"a setting that {arm} leaves to the grid")


def grid_arms(arms: Arms, grid: Mapping[str, Sequence[Any]]) -> tuple[Arms, Arms]:
    """An arm for each of `arms` and each point of a `grid`, and what it consists of: the name of
    its arm ("arm") and the values of the grid. Raises `ConfigError` if there are more than
    `MOST_POINTS`.
    """
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    count, made, origins = len(points) * len(arms), {}, {}
    require(count <= MOST_POINTS, "grid", f"{count} points", f"at most {MOST_POINTS}")
    for (arm, settings), point in itertools.product(arms.items(), points):
        name = " ".join([arm, *(f"{key}={value}" for key, value in point.items())])
        made[name], origins[name] = {**settings, **point}, {"arm": arm, **point}
    return made, origins


def parse_seeds(texts: Sequence[str]) -> tuple[int, ...]:
    """The seeds of texts such as ``3`` and ``0-4``. Raises `ConfigError` for another text."""
    seeds = list[int]()
    for text in texts:
        match = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", text, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        fits = first <= last <= MAX_SEED and last - first < MOST_POINTS
        require(fits, "seeds", text, f"a seed in [0, {MAX_SEED}], or a range such as 0-4")
        seeds += range(first, last + 1)
    return tuple(seeds)


def load_arms(path: Path, trust: bool = False) -> dict[str, dict[str, Any]]:
    """The arms of a YAML file: below ``arms:``, lines of settings by the name of the arm.

    Args:
        path: the file.
        trust: allow settings with code, addresses and similar entries (`flowrl.run.parts.trust`).

    Returns:
        The arms.

    Raises:
        ConfigError: the file cannot be read, or has an entry that is not allowed.
    """
    arms = read_arms(path, RunConfig)
    for settings in arms.values():
        require_trust(settings, path, trust)
    return arms


def together(*several: Arms) -> dict[str, dict[str, Any]]:
    """All arms in one. Raises `ConfigError` if two have the same name."""
    pairs = [pair for arms in several for pair in arms.items()]
    names = [name for name, _ in pairs]
    require(len(set(names)) == len(names), "arms", names, "a different name for each")
    return {name: dict(settings) for name, settings in pairs}


@contextmanager
def of_arm(name: str) -> Iterator[None]:
    """Within this context the message of a `ConfigError` names the arm."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"arm {name!r}: {error}") from error


def arm_run(run: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The run `run` with the `settings` of an arm. A method has its own credit rule unless `credit`
    gives another.
    """
    cleared = {"credit": ""} if "method" in settings else {}
    return run.replace(**{**cleared, **settings})


def check_arms(run: RunConfig, arms: Arms, seeds: Sequence[int]) -> None:
    """Check the names and the settings of `arms`, before any part is built.

    Args:
        run: the settings of all runs.
        arms: the arms.
        seeds: the seeds.

    Raises:
        ConfigError: an unknown setting, a value that is not allowed, arms with equal settings or
            the same folder, or arms with different evaluations.
    """
    runs, names = dict[str, RunConfig](), dict[str, str]()
    for name, settings in arms.items():
        folder = run_folder(name, max(seeds)).casefold()  # some file systems ignore case
        fits = name.isprintable() and name == name.strip() and len(folder.encode()) <= LONGEST
        need = f"a name on one line, for a folder of {LONGEST} bytes or fewer"
        require(fits and name != "", "arm", name, need)
        with of_arm(name):
            require("seed" not in settings, "seed", settings.get("seed"), "left out of arms")
            runs[name] = arm_run(run, settings)
            keys = (f"folder {folder}", meaning(runs[name]))
        for key in keys:
            other = names.setdefault(key, name)
            require(other is name, "arm", name, f"a folder and settings other than {other!r} has")
    settings = [config.typed() for config in runs.values()]
    for name in COMMON:
        values = [chosen[name] for chosen in settings]
        need = "the same in all arms, because they are evaluated alike"
        require(all(value == values[0] for value in values), name, values, need)
    first, files = settings[0], [chosen["prompts"] for chosen in settings]
    same = not first["hold_out"] or bool(first["heldout_prompts"]) or len({*files}) == 1
    need = "one file for all arms: of different training prompts, different ones would be held out"
    require(same, "heldout_prompts", first["heldout_prompts"], need)
    given = settings[0]["heldout_rewards"]
    tasks = [config.environment for config in runs.values()]
    same = len({(task.sources.reward, task.reward_form) for task in tasks}) == 1
    need = "one or more, the first of which compares arms that are trained on different rewards"
    require(same or len(given) > 0, "heldout_rewards", given, need)


def meaning(config: RunConfig) -> str:
    """A text that runs with equal settings share: other spellings of a part, and the label of a
    credit rule, do not count.
    """
    settings, credit = config.typed(), config.algorithm.credit
    for name in PARTS:
        if isinstance(settings[name], str) and settings[name]:
            settings[name] = identity(settings[name])
    if credit and config.algorithm.method == rule_name(credit):
        del settings["method"]
    return repr(settings)
