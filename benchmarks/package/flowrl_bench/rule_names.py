"""What rules are called where several stand side by side, and which results belong to which rule."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.training.compare import rule_name
from flowrl.training.config import RunConfig
from flowrl_bench.records import code_hash, config_hash


def identity(spec: str) -> tuple[str, ...]:
    """What the spellings of one rule share: for a class in a file the file's resolved path, the class and the options."""
    head, mark, options = spec.strip().partition("(")
    path, _, name = head.rpartition(":")
    return (str(Path(path).resolve()), name, mark + options) if path.endswith(".py") else (spec.strip(),)


def _with_file(spec: str) -> str:
    """`rule_name`, with the file's name before it."""
    name = rule_name(spec)
    return name if name == spec else f"{Path(spec[: -len(name) - 1]).stem}:{name}"


_CALLED: tuple[Callable[[str], str], ...] = (rule_name, _with_file, str)
"""What a rule may be called, shortest first."""


def named_rules(specs: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """`specs` by names that differ from each other and from those `taken`.

    A class in a file has its own name; where that is not enough, its file's name before it (v1:Mine), and then its whole path.
    Raises `ConfigError` where two specs are one rule, or where a spec is nothing but the name of a built-in rule.
    """
    named: dict[str, str] = {}
    for place, spec in enumerate(specs):
        for earlier in specs[:place]:
            if identity(earlier) == identity(spec):
                raise ConfigError(f"rule = {spec!r} is not allowed: it is the same rule as {earlier!r}, and each is named once")
        free = (
            called(spec)
            for called in _CALLED
            if sum(called(other) == called(spec) for other in specs) == 1 and called(spec) not in {*taken, *named}
        )
        name = next(free, None)
        if name is None:
            raise ConfigError(f"rule = {spec!r} is not allowed: a built-in rule of that name stands beside it anyway")
        named[name] = spec
    return named


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file that can be read, unchecked."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # `Ledger.read` speaks of it, unless it is a half-written last line
        found.append(line)
    return found


def _specs(lines: Sequence[Mapping[str, Any]], rivals: Collection[str]) -> list[str]:
    """The rules that the lines are of, besides the `rivals`."""
    found = dict.fromkeys(line["config"]["credit"] for line in lines)
    return [spec for spec in found if spec and spec not in rivals]


def results_folder(spec: str, rivals: Collection[str], root: Path = Path("runs")) -> Path:
    """`root`/rule-NAME, or where another rule's results lie there, with the file's name too, or its whole path."""

    folders = [root / ("rule-" + re.sub(r"[^\w.=,-]+", "_", called(spec)).strip("_")) for called in _CALLED]

    def free(folder: Path) -> bool:
        others = _specs(lines_of(folder / "results.jsonl"), rivals)
        return all(identity(other) == identity(spec) for other in others)

    return next(filter(free, folders), folders[-1])


def known_as(spec: str, path: Path, rivals: Collection[str]) -> str:
    """How the results in `path` spell the rule `spec`; `spec` itself where they have none of it.

    Raises `ConfigError` that says what to do where they were made by other code, by the rule before its file was changed, or by
    another rule.
    """
    lines = lines_of(path)
    instead = f"choose another --out, or delete {path} to begin anew"
    for line in lines:
        if line.get("code") != code_hash():
            raise ConfigError(f"results: {path} was made by other code of flowrl (commit {line.get('commit')}): {instead}")
    for known in _specs(lines, rivals):
        if identity(known) != identity(spec):
            raise ConfigError(f"results: {path} holds runs of another rule, {known}: {instead}")
        mine = [line for line in lines if line["config"]["credit"] == known]
        if any(config_hash(RunConfig.from_dict(line["config"])) != line["id"] for line in mine):
            raise ConfigError(f"results: {path} holds runs of {spec} from before its file was changed: {instead}")
        return known
    return spec
