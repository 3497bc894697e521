"""The names of credit rules and other arms and the folders of their results, chosen so that no two
share one.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl_compare.arms import arm_run, credit_arms, meaning, rule_name
from flowrl_compare.results import difference

from flowrl.core.errors import ConfigError
from flowrl.io import write_json
from flowrl.parts.specs import identity
from flowrl.reading import read_json
from flowrl.training.config import RunConfig
from flowrl_bench.arms import Arm, own_arm
from flowrl_bench.digest import config_id
from flowrl_bench.results_file import ResultsFile
from flowrl_bench.rule_plan import BASELINES

TUNING, RESULTS, ARM = "tuning.jsonl", "results.jsonl", "arm.json"
"""The files of a rule's folder that hold runs, and the settings of the arm."""


def _with_file(spec: str) -> str:
    """`rule_name`, after the name of its file."""
    name = rule_name(spec)
    return name if name == spec else f"{Path(spec[: -len(name) - 1]).stem}:{name}"


_NAMES: tuple[Callable[[str], str], ...] = (rule_name, _with_file, str)
"""The possible names of a rule, shortest first."""


def named_rules(specs: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """`specs` by names that differ from each other and from those `taken`.

    A class in a file has its own name; if that is not unique, the file's name comes first
    (v1:Mine), or its whole path. Raises `ConfigError` if two specs are the same rule, or a spec is
    only the name of a built-in rule.
    """
    named: dict[str, str] = {}
    for place, spec in enumerate(specs):
        for earlier in specs[:place]:
            if identity(earlier) == identity(spec):
                raise ConfigError(
                    f"rule = {spec!r} is not allowed: it is the same rule as {earlier!r}; name each"
                    " rule once"
                )
        free = (
            name(spec)
            for name in _NAMES
            if sum(name(other) == name(spec) for other in specs) == 1
            and name(spec) not in {*taken, *named}
        )
        found = next(free, None)
        if found is None:
            raise ConfigError(
                f"rule = {spec!r} is not allowed: the built-in rule of that name is always included"
            )
        named[found] = spec
    return named


def _held(folder: Path) -> dict[str, Any] | None:
    """The settings of the arm that has results in a folder."""
    return read_json(folder / ARM, dict[str, Any]) if (folder / ARM).exists() else None


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two arms have the same settings, in whatever spelling of their parts."""
    return meaning(arm_run(RunConfig(), one)) == meaning(arm_run(RunConfig(), other))


def settings_text(settings: Mapping[str, Any]) -> str:
    """The settings of an arm: of a credit rule alone its spec."""
    return (
        settings["credit"] if settings.keys() == {"method", "credit"} else difference("", settings)
    )


def results_folder(rule: str | Arm, root: Path = Path("runs")) -> Path:
    """`root`/rule-NAME for an arm or a rule's spec; if another rule's results are there, with its
    file's name, or its path.
    """
    names = [name(rule) for name in _NAMES] if isinstance(rule, str) else [rule.name]
    settings = credit_arms([rule])[rule_name(rule)] if isinstance(rule, str) else rule.settings
    folders = [root / ("rule-" + re.sub(r"[^\w.=,-]+", "_", name).strip("_")) for name in names]

    def free(folder: Path) -> bool:
        held = _held(folder)
        return held is None or _same(held, settings)

    return next(filter(free, folders), folders[-1])


def known_arm(rule: str | Arm, folder: Path) -> Arm:
    """The arm `rule`, or that of a rule's spec, with the spellings of a folder's results if they
    have runs of it.

    Raises `ConfigError` if they have runs of another arm, or of this one before a file of its parts
    was changed; or if the name is that of a baseline.
    """
    if isinstance(rule, str):
        named_rules([rule], BASELINES)
    name, settings = (
        ("", credit_arms([rule])[rule_name(rule)])
        if isinstance(rule, str)
        else (rule.name, rule.settings)
    )
    held, instead = (
        _held(folder),
        f"choose another --out, or delete {TUNING} and {RESULTS} in {folder} to start again",
    )
    if held is not None and not _same(held, settings):
        raise ConfigError(
            f"results: {folder} holds runs of another rule, {settings_text(held)}: {instead}"
        )
    for file in (ResultsFile(folder / place, own=held or {}) for place in (TUNING, RESULTS)):
        if any(config_id(file.settings(line)) != line["id"] for line in file.unchecked()):
            raise ConfigError(
                f"results: {folder} holds runs of {settings_text(settings)} from before its file"
                f" was changed: {instead}"
            )
    settings = held or settings
    if isinstance(rule, str):
        (name,) = named_rules([settings["credit"]], BASELINES)
    return own_arm(name, settings)


def keep_arm(folder: Path, arm: Arm) -> None:
    """Write the settings of the arm whose results the folder will hold."""
    write_json(folder / ARM, dict(arm.settings))
