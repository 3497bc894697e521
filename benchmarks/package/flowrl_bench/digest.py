"""Identification of results: digests of code and settings, a golden run, and the user's files.

The code's digest covers the syntax trees of all top-level definitions in the modules that a run can
import. Docstrings, comments, formatting, the names of modules and the order of definitions do not
count, so a definition can move to another module. The golden run is two iterations of every method:
it shows whether a change of the code, or of a library, changed numbers.
"""

import ast
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from inspect import getsource
from pathlib import Path
from typing import Any

import flowrl
from flowrl.core.errors import ConfigError
from flowrl.methods import METHODS
from flowrl.parts.registry import files_of
from flowrl.parts.specs import parse_spec
from flowrl.training.config import RunConfig, preset
from flowrl_bench.measurements import CURVE, measure
from flowrl_bench.older_windows import STEPS, to_older

PACKAGES = {"flowrl": Path(flowrl.__file__).parent, "flowrl_bench": Path(__file__).parent}
RUN = tuple(
    f"flowrl_bench.{name}" for name in ("measurements", "negative_controls", "probes", "rules")
)
"""Modules from which the imports of a run are followed."""
RENAMED = {
    "turning-point-variant(where=random)": "turning-point(where=random)",
    "turning-point-variant(where='none')": "turning-point(where='none')",
    "turning-point-variant(min_size=0.1)": "turning-point(min_size=0.1)",
    "turning-point-variant(confidence=1.0)": "turning-point(confidence=1.0)",
}
"""Credit rules and their spelling in older results, whose ids remain valid."""
RULES = (
    "arms",
    "claims",
    "catalogue",
    "leads",
    "open_questions",
    "verdicts",
    "evidence",
    "statistics",
)
"""Modules of this package that decide on verdicts, with `flowrl_compare.statistics`."""
GOLDEN: dict[str, Any] = {
    "world": "mixture",
    "iterations": 2,
    "groups": 2,
    "group_size": 12,
    "num_steps": 8,
    "eval_every": 2,
    "eval_samples": 18,
}
ONE_STEP = "weighted(weights=noise, rule=\"sibling-relative(probe='comb(branches=6, count=1)')\")"
"""The rule of the arms called tempflow-grpo: 6 draws at one drawn step. The method now draws 6 at
every step.
"""
MEASURED = {"tempflow-grpo": {"credit": ONE_STEP, "groups": 16}}
"""Settings with which a method runs here, where its own have changed since the first results."""
GOLDEN_COLUMNS = ("nfe", "train_nfe", "soft")
WITHOUT_EFFECT = ("overlap_rewards",)
"""Settings that change how long a run takes, and none of its numbers."""
TOLERANCE = 1e-4
"""Two golden runs are the same if their numbers differ by at most this, relative to 1 or to the
number: processors differ.
"""


def _without_names(node: ast.AST) -> Any:
    """A syntax tree as nested tuples, without docstrings and without the names of the project's
    modules.
    """
    if isinstance(node, ast.ImportFrom | ast.Import):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        ours = (module or node.names[0].name).partition(".")[0] in PACKAGES
        names = [(item.name, item.asname) for item in node.names]
        return (
            [pair for pair in names if pair[1] not in (None, pair[0])] if ours else (module, names)
        )
    found: list[Any] = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            kept = [item for item in value if not _is_text(item)]
            found += (
                [
                    (
                        name,
                        [
                            _without_names(item) if isinstance(item, ast.AST) else item
                            for item in kept
                        ],
                    )
                ]
                if kept
                else []
            )
        elif value is not None:  # empty fields differ between versions of Python
            found.append(
                (name, _without_names(value) if isinstance(value, ast.AST) else repr(value))
            )
    return found


def _is_text(node: Any) -> bool:
    """Whether a statement is a docstring (of a module, a class, a function or an attribute)."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _statements(tree: ast.Module) -> Iterator[Any]:
    """A module's top-level statements; an import counts name by name, and `__all__` does not
    count.
    """
    for node in tree.body:
        exports = isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        )
        if isinstance(node, ast.Import | ast.ImportFrom):
            for item in node.names:
                single = (
                    ast.Import([item])
                    if isinstance(node, ast.Import)
                    else ast.ImportFrom(node.module, [item], 0)
                )
                yield _without_names(single) or None
        elif not exports and not _is_text(node):
            yield _without_names(node)


@cache
def definitions(source: str) -> frozenset[str]:
    """Digests of the top-level statements of a module."""
    found = (statement for statement in _statements(ast.parse(source)) if statement is not None)
    return frozenset(hashlib.sha256(repr(statement).encode()).hexdigest() for statement in found)


@cache
def _imports(source: str) -> tuple[str, ...]:
    """Names of modules that a source may import, wherever the statement is."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= dict.fromkeys(
                (node.module, *(f"{node.module}.{item.name}" for item in node.names))
            )
    return tuple(found)


def _file(module: str) -> Path | None:
    """The file of one of the project's modules; None for a name that is none."""
    package, *rest = module.split(".")
    if package not in PACKAGES or not rest:
        return None
    place = PACKAGES[package].joinpath(*rest)
    return next(
        (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None
    )


def imported(roots: Iterable[str] = RUN) -> set[Path]:
    """The files of the project's modules that `roots` can import, directly or through others, and
    their own.
    """
    found: set[Path] = set()
    waiting = list(roots)
    while waiting:
        path = _file(waiting.pop())
        if path is not None and path not in found:
            found.add(path)
            waiting += _imports(path.read_text())
    return found


def _digest(paths: Iterable[Path], data: Iterable[Path] = ()) -> str:
    parts = {digest for path in paths for digest in definitions(path.read_text())}
    parts |= {hashlib.sha256(path.read_bytes()).hexdigest() for path in data}
    return hashlib.sha256("".join(sorted(parts)).encode()).hexdigest()[:16]


def code_digest_now() -> str:
    """The digest of all definitions and built-in weights that a run depends on, from the current
    files.
    """
    return _digest(imported(), (PACKAGES["flowrl"] / "data").glob("*.safetensors"))


@cache
def code_digest() -> str:
    """`code_digest_now` at the first call in this process."""
    return code_digest_now()


@cache
def rules_digest() -> str:
    """The digest of the claims, their verdict rules and the statistics."""
    names = [f"flowrl_bench.{name}" for name in RULES] + ["flowrl_compare.statistics"]
    return _digest(path for path in map(_file, names) if path is not None)


def functions_digest(functions: Iterable[Callable[..., Any]], *others: str) -> str:
    """The digest of some functions, by the same rules, and of other texts."""
    parts = [digest for function in functions for digest in definitions(getsource(function))]
    return hashlib.sha256("".join([*sorted(parts), *others]).encode()).hexdigest()[:16]


@cache
def golden_run() -> tuple[float, ...]:
    """Final score and evaluation counts of every method's golden run; about five seconds."""
    numbers: list[float] = []
    for method in METHODS:
        found = measure(
            preset("default").apply(**{**MEASURED.get(method, {}), **GOLDEN, "method": method})
        )
        assert found is not None
        row = dict(zip(CURVE, found["curve"][-1], strict=True))
        numbers += [round(float(row[name]), 6) for name in GOLDEN_COLUMNS]
    return tuple(numbers)


def same_golden(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two golden runs gave the same numbers, up to the rounding of another processor."""
    close = (
        math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for a, b in zip(one, other, strict=False)
    )
    return len(one) == len(other) and all(close)


def config_id(config: RunConfig) -> str:
    """The digest of every setting of a run, including the seed, and of the current files of the
    user's parts.

    Settings at their default and groups do not count, so a new setting or group does not rename old
    runs; nor do settings that change no number (`WITHOUT_EFFECT`). Two spellings of a slice are the
    same window.
    """
    files = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in own_files(config))
    return hashlib.sha256(f"{_changed(config)}{files}".encode()).hexdigest()[:16]


OLDER_DEFAULTS = {
    "sampler": "flow-sde",
    "noise_level": 0.7,
    "window": "2:5",
    "trained_steps": "all",
    "loss": "clipped",
    "clip_range": 2e-3,
}
"""Defaults of the older format, for settings whose default is now the method's value."""
OWN_KERNELS = {"dance-grpo": "dance-sde", "branch-grpo": "dance-sde"}
"""Kernels of methods that the older format did not use unless a setting named them."""


@cache
def _changed(config: RunConfig) -> str:
    default, chosen = RunConfig().flat() | OLDER_DEFAULTS, _spelled(config)
    counted = {
        name: value
        for name, value in chosen.items()
        if value != default[name] and name not in WITHOUT_EFFECT
    }
    return json.dumps(counted, sort_keys=True)


def _spelled(config: RunConfig) -> dict[str, Any]:
    """The settings of a run as the older format wrote them, so that the ids of older results remain
    valid.
    """
    settings = config.flat()
    own, credit = OWN_KERNELS.get(settings["method"], "flow-sde"), settings["credit"]
    settings["sampler"] = settings["sampler"] or own
    if settings["noise_level"] == 0:
        settings["noise_level"] = {"flow-sde": 0.7, "dance-sde": 0.3}.get(settings["sampler"], 0.0)
    settings["loss"] = settings["loss"] or "clipped"
    spelled = {"random": "random(seed=None)", "random(seed=0)": "random"}
    if settings["method"] in MEASURED:
        spelled |= {ONE_STEP: "", "": "own"}
    settings["credit"] = (spelled | RENAMED).get(credit, credit)
    settings["method"] = RENAMED.get(settings["method"], settings["method"])
    return settings | {name: to_older(name, settings[name]) for name in STEPS}


def own_files(config: RunConfig) -> list[Path]:
    """The files with the run's world, rule, reward, sampler and loss, and their parts, unless the
    code's digest has them.

    For `path/to/file.py:Class` that file; for `package.module:Class` and a plug-in's name the file
    that defines the class, and the module's own. Not covered: what these files import or read, and
    classes without Python source.
    """
    algorithm, reward = config.algorithm, config.environment.reward
    chosen = {kind: getattr(algorithm, kind) for kind in ("credit", "sampler", "window", "loss")}
    world = {} if config.environment.world == "model" else {"world": config.environment.world}
    specs = {**chosen, "reward": reward, **world}
    files = dict.fromkeys(path for kind, spec in specs.items() for path in _files(kind, spec))
    return [path for path in files if path.is_file() and path.resolve() not in _covered()]


@cache
def _covered() -> frozenset[Path]:
    """The files of the code's digest, as of the first call in this process."""
    return frozenset(path.resolve() for path in imported())


@cache
def _files(kind: str, spec: str) -> tuple[Path, ...]:
    """Files of a part and of the parts in its options; none if the spec cannot be read."""
    try:
        parsed = parse_spec(spec, kind)
    except ConfigError:
        return ()
    inner = [path for nested in parsed.nested() for path in _files(*nested)]
    return (*files_of(kind, parsed), *inner)
