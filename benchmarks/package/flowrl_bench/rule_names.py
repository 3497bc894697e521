"""The names of credit rules and other arms, and the folders of their results."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl_compare.arms import arm_run, credit_arms, meaning, rule_name
from flowrl_compare.results import difference

from flowrl.core.errors import ConfigError, require
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


def named_rules(specs: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """`specs` by names that differ from each other and from those `taken`: that of its class if it
    is unique, else the whole spec.

    Raises `ConfigError` if two specs are the same rule, or a spec is only a name of `taken`.
    """
    names, known = [rule_name(spec) for spec in specs], set[str]()
    named: dict[str, str] = {}
    for spec, name in zip(specs, names, strict=True):
        unique = names.count(name) == 1 and name not in taken
        chosen = name if unique else spec
        allowed = "a rule that is named once, and not one that is always included"
        require(identity(spec) not in known and chosen not in taken, "rule", spec, allowed)
        known.add(identity(spec))
        named[chosen] = spec
    return named


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two arms have the same settings, in whatever spelling of their parts."""
    return meaning(arm_run(RunConfig(), one)) == meaning(arm_run(RunConfig(), other))


def settings_text(settings: Mapping[str, Any]) -> str:
    """The settings of an arm: of a credit rule alone its spec."""
    return (
        settings["credit"] if settings.keys() == {"method", "credit"} else difference("", settings)
    )


def results_folder(rule: str | Arm, root: Path = Path("runs")) -> Path:
    """`root`/rule-NAME for an arm or a rule's spec."""
    name = rule_name(rule) if isinstance(rule, str) else rule.name
    return root / ("rule-" + re.sub(r"[^\w.=,-]+", "_", name).strip("_"))


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
    path = folder / ARM
    held = read_json(path, dict[str, Any]) if path.exists() else None
    instead = f"choose another --out, or delete {TUNING} and {RESULTS} in {folder} to start again"
    if held is not None and not _same(held, settings):
        raise ConfigError(
            f"results: {folder} contains runs of another rule, {settings_text(held)}: {instead}"
        )
    for file in (ResultsFile(folder / place, own=held or {}) for place in (TUNING, RESULTS)):
        if any(config_id(file.settings(line)) != line["id"] for line in file.unchecked()):
            raise ConfigError(
                f"results: {folder} contains runs of {settings_text(settings)} from before its file"
                f" changed: {instead}"
            )
    settings = held or settings
    if isinstance(rule, str):
        (name,) = named_rules([settings["credit"]], BASELINES)
    return own_arm(name, settings)


def keep_arm(folder: Path, arm: Arm) -> None:
    """Write the settings of the arm whose results the folder will hold."""
    write_json(folder / ARM, dict(arm.settings))
