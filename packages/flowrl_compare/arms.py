"""Arms of a comparison: names, each with the settings in which its runs differ from those of the
other arms.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from flowrl.cli.options import rule_name
from flowrl.core.errors import ConfigError, require
from flowrl.parts.settings import read_arms
from flowrl.parts.specs import identity, parse_options
from flowrl.parts.trust import PARTS, trusted
from flowrl.training.config import EvaluationConfig, RunConfig
from flowrl_compare.results import REWARDS, run_folder

Arms = Mapping[str, Mapping[str, Any]]
"""Settings, named without their groups, by the name of the arm."""
LONGEST = 200
"""Bytes in the name of a run's folder; file systems allow 255."""
COMMON = ("world", "task", "heldout_prompts", *(item.name for item in fields(EvaluationConfig)))
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
    difference.
    """
    name, colon, options = text.partition(":")
    name = name.strip()
    need = "'NAME: setting=value, ...', or 'NAME:' for no difference"
    require(bool(name and colon) and "=" not in name, "arm", text, need)
    return {name: parse_options(options, f"arm {name!r}")}


def load_arms(path: Path, trust: bool = False) -> dict[str, dict[str, Any]]:
    """The arms of a YAML file: below ``arms:``, lines of settings by the name of the arm.

    Args:
        path: the file.
        trust: allow settings with code, addresses and similar entries (`flowrl.parts.trust`).

    Returns:
        The arms.

    Raises:
        ConfigError: the file cannot be read, or has an entry that is not allowed.
    """
    return {
        name: trusted(settings, path, trust)
        for name, settings in read_arms(path, RunConfig).items()
    }


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
    settings = [config.flat() for config in runs.values()]
    for name in COMMON:
        values = [chosen[name] for chosen in settings]
        need = "the same in all arms, because they are evaluated alike"
        require(all(value == values[0] for value in values), name, values, need)
    given = settings[0]["heldout_rewards"]
    same = len({tuple(chosen[name] for name in REWARDS) for chosen in settings}) == 1
    need = "one or more, the first of which compares arms that are trained on different rewards"
    require(same or len(given) > 0, "heldout_rewards", given, need)


def meaning(config: RunConfig) -> str:
    """A text that runs with equal settings share: other spellings of a part, and the label of a
    credit rule, do not count.
    """
    settings, credit = config.flat(), config.algorithm.credit
    for name in PARTS:
        if isinstance(settings[name], str) and settings[name]:
            settings[name] = identity(settings[name])
    if credit and config.algorithm.method == rule_name(credit):
        del settings["method"]
    return repr(settings)
