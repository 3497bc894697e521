"""The names of a credit rule and the folder of its results, chosen so that no two rules share one."""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.specs import identity
from flowrl.training.compare import rule_name
from flowrl_bench.digest import config_id
from flowrl_bench.results_file import ResultsFile

TUNING, RESULTS = "tuning.jsonl", "results.jsonl"
"""The files of a rule's folder that hold runs."""


def _with_file(spec: str) -> str:
    """`rule_name`, after the name of its file."""
    name = rule_name(spec)
    return name if name == spec else f"{Path(spec[: -len(name) - 1]).stem}:{name}"


_NAMES: tuple[Callable[[str], str], ...] = (rule_name, _with_file, str)
"""The possible names of a rule, shortest first."""


def named_rules(specs: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """`specs` by names that differ from each other and from those `taken`.

    A class in a file has its own name; if that is not unique, the file's name comes first (v1:Mine), or its whole path. Raises
    `ConfigError` if two specs are the same rule, or a spec is only the name of a built-in rule.
    """
    named: dict[str, str] = {}
    for place, spec in enumerate(specs):
        for earlier in specs[:place]:
            if identity(earlier) == identity(spec):
                raise ConfigError(f"rule = {spec!r} is not allowed: it is the same rule as {earlier!r}; name each rule once")
        free = (
            name(spec)
            for name in _NAMES
            if sum(name(other) == name(spec) for other in specs) == 1 and name(spec) not in {*taken, *named}
        )
        found = next(free, None)
        if found is None:
            raise ConfigError(f"rule = {spec!r} is not allowed: the built-in rule of that name is always included")
        named[found] = spec
    return named


def _specs(folder: Path) -> list[str]:
    """The rules that have runs in a folder, as their lines spell them; lines of baselines name a method and no rule."""
    lines = [line for name in (TUNING, RESULTS) for line in ResultsFile(folder / name).unchecked()]
    specs = (line.get("config", {}).get("algorithm", {}).get("credit") for line in lines)
    return list(dict.fromkeys(spec for spec in specs if spec))


def results_folder(spec: str, root: Path = Path("runs")) -> Path:
    """`root`/rule-NAME; if another rule's results are there, with the file's name too, or its whole path."""
    folders = [root / ("rule-" + re.sub(r"[^\w.=,-]+", "_", name(spec)).strip("_")) for name in _NAMES]

    def free(folder: Path) -> bool:
        return all(identity(other) == identity(spec) for other in _specs(folder))

    return next(filter(free, folders), folders[-1])


def known_spelling(spec: str, folder: Path) -> str:
    """The spelling of the rule `spec` in a folder's results; `spec` itself if they have no runs of it.

    Raises `ConfigError` if they have runs of another rule, or of this one before its file was changed.
    """
    instead = f"choose another --out, or delete {TUNING} and {RESULTS} in {folder} to start again"
    for known in _specs(folder):
        if identity(known) != identity(spec):
            raise ConfigError(f"results: {folder} holds runs of another rule, {known}: {instead}")
        for name in (TUNING, RESULTS):
            file = ResultsFile(folder / name, rule=known)
            mine = [line for line in file.unchecked() if line["config"]["algorithm"]["credit"] == known]
            if any(config_id(file.settings(line)) != line["id"] for line in mine):
                raise ConfigError(f"results: {folder} holds runs of {spec} from before its file was changed: {instead}")
        return known
    return spec
