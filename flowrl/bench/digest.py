"""Identification of results: digests of code and settings, a golden run, and the user's files.

The code's digest covers the syntax trees of all source files. The golden run is two iterations of
every method: it shows whether a change of the code, or of a library, changed numbers.
"""

import ast
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import flowrl
import flowrl.run.costs
import flowrl.run.statistics
from flowrl.bench.measurements import CURVE, measure
from flowrl.core.errors import ConfigError
from flowrl.methods import METHODS
from flowrl.run.config import RunConfig, preset
from flowrl.run.parts.registry import files_of
from flowrl.run.parts.specs import parse_spec

PACKAGE = Path(flowrl.__file__).parent
RULES = ("arms", "evidence", "judging", "statistics", "verdict", "verdict_runs")
"""Modules of this package that decide on verdicts, with `costs` and `statistics` of
`flowrl.compare`.
"""
GOLDEN: dict[str, Any] = {
    "world": "mixture",
    "iterations": 2,
    "groups": 2,
    "group_size": 12,
    "num_steps": 8,
    "eval_every": 2,
    "eval_samples": 18,
}
GOLDEN_SIZES = {"rsm": {"group_size": 30}, "tempflow-grpo": {"group_size": 30}}
"""Changes to `GOLDEN` for methods that need groups of another size."""
GOLDEN_COLUMNS = ("nfe", "train_nfe", "soft")
WITHOUT_EFFECT = ("overlap_rewards",)
"""Settings that change how long a run takes, and none of its numbers."""
TOLERANCE = 1e-4
"""Two golden runs are the same if their numbers differ by at most this, relative to 1 or to the
number: processors differ.
"""


@cache
def _syntax(source: str) -> str:
    """A module's syntax tree as text, without comments and formatting."""
    return ast.dump(ast.parse(source))


def _digest(sources: Iterable[Path], data: Iterable[Path] = ()) -> str:
    parts = [_syntax(path.read_text()).encode() for path in sources]
    parts += [path.read_bytes() for path in data]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def code_digest_now() -> str:
    """The digest of the current source files, and of the built-in weights."""
    sources = sorted(PACKAGE.rglob("*.py"))
    return _digest(sources, sorted((PACKAGE / "data").glob("*.safetensors")))


@cache
def code_digest() -> str:
    """`code_digest_now` at the first call in this process."""
    return code_digest_now()


@cache
def rules_digest() -> str:
    """The digest of the questions, the rules of their verdicts and the statistics."""
    rules = [PACKAGE / "bench" / f"{name}.py" for name in RULES]
    shared = (flowrl.run.costs, flowrl.run.statistics)
    return _digest([*rules, *(Path(str(module.__file__)) for module in shared)])


@cache
def golden_run() -> tuple[float, ...]:
    """Final score and evaluation counts of every method's golden run; about five seconds."""
    numbers: list[float] = []
    for method in METHODS:
        sizes = GOLDEN | GOLDEN_SIZES.get(method, {})
        settings: dict[str, Any] = {**sizes, "method": method}
        result = measure(preset("default").apply(**settings))
        assert result is not None
        row = dict(zip(CURVE, result["curve"][-1], strict=True))
        numbers += [round(float(row[name]), 6) for name in GOLDEN_COLUMNS]
    return tuple(numbers)


def same_golden(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two golden runs gave the same numbers, up to the rounding of another processor, for
    the methods that both have: later ones are appended.
    """
    close = (
        math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for a, b in zip(one, other, strict=False)
    )
    count = len(GOLDEN_COLUMNS)
    aligned = len(one) > 0 and len(other) > 0 and len(one) % count == len(other) % count == 0
    return aligned and all(close)


def config_id(config: RunConfig) -> str:
    """The digest of every setting of a run, including the seed, and of the current files of the
    user's parts.

    Settings at their default and groups do not count, so a new setting or group does not rename
    runs; nor do settings that change no number (`WITHOUT_EFFECT`).
    """
    files = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in own_files(config))
    return hashlib.sha256(f"{_changed(config)}{files}".encode()).hexdigest()[:16]


@cache
def _changed(config: RunConfig) -> str:
    default = RunConfig().typed()
    counted = {
        name: value
        for name, value in config.typed().items()
        if value != default[name] and name not in WITHOUT_EFFECT
    }
    return json.dumps(counted, sort_keys=True)


def own_files(config: RunConfig) -> list[Path]:
    """The files with the run's world, rule, reward, sampler and loss, and their parts, unless the
    code's digest has them.

    For `path/to/file.py:Class` that file; for `package.module:Class` and a plug-in's name the file
    that defines the class, and the module's own. Not covered: what these files import or read, and
    classes without Python source.
    """
    algorithm, reward = config.algorithm, config.environment.sources.reward
    chosen = {kind: getattr(algorithm, kind) for kind in ("credit", "sampler", "window", "loss")}
    world = {} if config.environment.world == "model" else {"world": config.environment.world}
    specs = {**chosen, "reward": reward, **world}
    files = dict.fromkeys(path for kind, spec in specs.items() for path in _files(kind, spec or ""))
    ours = PACKAGE.resolve()
    return [path for path in files if path.is_file() and not path.resolve().is_relative_to(ours)]


@cache
def _files(kind: str, spec: str) -> tuple[Path, ...]:
    """Files of a part and of the parts in its options; none if the spec cannot be read."""
    try:
        parsed = parse_spec(spec, kind)
    except ConfigError:
        return ()
    inner = [path for nested in parsed.nested() for path in _files(*nested)]
    return (*files_of(kind, parsed), *inner)
