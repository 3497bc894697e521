"""Arms of a comparison: names, each with the settings in which its runs differ from those of the
other arms.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, require
from flowrl.parts.settings import read_arms
from flowrl.parts.specs import identity, parse_options
from flowrl.parts.trust import PARTS, trusted
from flowrl.training.config import EvaluationConfig, RunConfig
from flowrl.training.results import REWARDS, run_folder

Arms = Mapping[str, Mapping[str, Any]]
"""Settings, named without their groups, by the name of the arm."""
LONGEST = 200
"""Bytes in the name of a run's folder; file systems allow 255."""
COMMON = ("world", "task", "heldout_prompts", *(item.name for item in fields(EvaluationConfig)))
"""Settings that determine the held-out evaluation, by which arms are compared."""


def method_arms(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An arm for each method, by its name."""
    require(len(set(names)) == len(names), "methods", names, "each method once")
    return {name: {"method": name} for name in names}


def credit_arms(specs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An arm for each credit rule, named by `rule_name`: Flow-GRPO with this rule."""
    found: dict[str, dict[str, Any]] = {}
    for spec in specs:
        name = rule_name(spec)
        other = found.get(name, {}).get("credit", "")
        require(
            not other,
            "credit",
            spec,
            f"a rule with a name of its own, which is not that of {other}: rename a class",
        )
        found[name] = {"method": name, "credit": spec}
    return found


def rule_name(spec: str) -> str:
    """A rule's name in tables: its spec, without the path of a file."""
    path, mark, rest = spec.partition(".py:")
    return rest if mark and "(" not in path else spec


def parse_arm(text: str) -> dict[str, dict[str, Any]]:
    """The arm that ``NAME: setting=value, ...`` describes; nothing after the colon: no
    difference.
    """
    name, colon, options = text.partition(":")
    name = name.strip()
    require(
        bool(name and colon) and "=" not in name,
        "arm",
        text,
        "'NAME: setting=value, ...', or 'NAME:' for no difference",
    )
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
    found = read_arms(path, RunConfig)
    for settings in found.values():
        trusted(settings, path, trust)
    return found


def together(*several: Arms) -> dict[str, dict[str, Any]]:
    """All arms in one. Raises `ConfigError` if two have the same name."""
    found: dict[str, dict[str, Any]] = {}
    for arms in several:
        for name, settings in arms.items():
            require(
                name not in found, "arm", name, "a name of its own: there are two arms of this name"
            )
            found[name] = dict(settings)
    return found


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
    own = {"credit": ""} if "method" in settings else {}
    return run.replace(**{**own, **settings})


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
    runs = dict[str, RunConfig]()
    for name, settings in arms.items():
        require(
            name.isprintable() and name == name.strip() != "", "arm", name, "a name on one line"
        )
        with of_arm(name):
            require(
                "seed" not in settings,
                "seed",
                settings.get("seed"),
                "left out: every arm has all seeds",
            )
            runs[name] = arm_run(run, settings)
    folders, known = dict[str, str](), dict[str, str]()
    for name, config in runs.items():
        folder = run_folder(name, max(seeds)).casefold()
        require(
            len(folder.encode()) <= LONGEST,
            "arm",
            name,
            f"a name for a folder, of {LONGEST} bytes or fewer",
        )
        other = folders.setdefault(folder, name)
        require(
            other is name, "arm", name, f"a name whose folder is not that of {other!r}, {folder}"
        )
        with of_arm(name):
            other = known.setdefault(meaning(config), name)
        require(other is name, "arm", name, f"settings that differ from those of {other!r}")
    _check_evaluation({name: config.flat() for name, config in runs.items()})


def meaning(config: RunConfig) -> str:
    """A text that runs with equal settings share: other spellings of a part, and the label of a
    credit rule, do not count.
    """
    settings = config.flat()
    for name in PARTS:
        if isinstance(settings[name], str) and settings[name]:
            settings[name] = identity(settings[name])
    return repr(
        {
            name: value
            for name, value in settings.items()
            if name != "method" or not _is_label(config)
        }
    )


def _is_label(config: RunConfig) -> bool:
    return bool(config.algorithm.credit) and config.algorithm.method == rule_name(
        config.algorithm.credit
    )


def _check_evaluation(runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `ConfigError` unless the held-out evaluations of all arms can be compared."""
    baseline = next(iter(runs))
    for name, settings in runs.items():
        for setting in COMMON:
            allowed = (
                f"{runs[baseline][setting]!r}, as for {baseline!r}: arms are compared by the same"
                " evaluation"
            )
            with of_arm(name):
                require(
                    settings[setting] == runs[baseline][setting],
                    setting,
                    settings[setting],
                    allowed,
                )
    rewards = {tuple(settings[name] for name in REWARDS) for settings in runs.values()}
    given = runs[baseline]["heldout_rewards"]
    need = (
        "one or more: arms that are trained on different rewards are compared by the first of them"
    )
    require(len(rewards) == 1 or len(given) > 0, "heldout_rewards", given, need)
