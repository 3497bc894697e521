"""Parts by name: built-in parts, plug-ins, and classes in a user's file; `flowrl.run.parts.specs`
describes the notation.

A package adds parts by entry points in the groups ``flowrl.credit``, ``flowrl.probes``,
``flowrl.samplers``, ``flowrl.windows``, ``flowrl.rewards``, ``flowrl.losses``, ``flowrl.features``,
``flowrl.times``, ``flowrl.worlds`` and ``flowrl.observers``, each a class (or a function) that
builds the part from keyword options.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, get_type_hints

from flowrl.core.errors import ConfigError, FlowrlError, part_errors, require
from flowrl.run.parts.kinds import KINDS as KINDS
from flowrl.run.parts.kinds import Kind as Kind
from flowrl.run.parts.plugins import package_of, plugin
from flowrl.run.parts.settings import unknown
from flowrl.run.parts.sources import first_paragraph, summary
from flowrl.run.parts.specs import NESTED, Spec, parse_spec
from flowrl.run.reading import read_bytes

__all__ = [
    "Kind",
    "available",
    "build",
    "check_part",
    "check_spec",
    "files_of",
    "find_maker",
    "options_of",
    "summary_of",
]

Maker = Callable[..., Any]
USER_MODULE = "flowrl_user_"
"""Begin of the names of the modules in users' files."""


@contextmanager
def _named(work: str) -> Iterator[None]:
    """A context whose `work` runs code of others; what it raises is a `ConfigError`."""
    try:
        yield
    except FlowrlError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{work} failed: {type(error).__name__}: {error}") from error


def build(kind: str, spec: str, **defaults: Any) -> Any:
    """The part that a spec describes.

    Args:
        kind: a name of `KINDS`.
        spec: name, file or module of the part, with options (see `flowrl.run.parts.specs`).
        **defaults: options for parts that have them, unless `spec` sets them.

    Returns:
        The part.

    Raises:
        ConfigError: the name or an option is unknown, a file is missing, the part raises, or it is
            of another kind.
    """
    parsed = parse_spec(spec, kind)
    head, maker = parsed.name, find_maker(kind, parsed)
    if head not in KINDS[kind].built_in:
        _check_maker(kind, head, maker)
    parameters, given = _parameters(maker), parsed.options
    if parameters is None:  # it takes any option
        options = {name: _nested(name, value, defaults) for name, value in given.items()}
    else:
        options = _options(f"{kind}: {head}", parameters, given, defaults)
    with _named(f"{kind}: building {spec}"):
        part = maker(**options)
    with part_errors():
        check_part(kind, part, head)
    return part


def check_spec(kind: str, spec: str) -> None:
    """Raise `ConfigError` for a spec whose name or option is unknown; builds nothing."""
    parsed = parse_spec(spec, kind)
    parameters = _parameters(find_maker(kind, parsed))
    if parameters is not None:
        _require_known(f"{kind}: {parsed.name}", parameters, parsed.options)


def _require_known(part: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if extra := sorted(given.keys() - known.keys()):
        allowed = ", ".join(known) or "none"
        raise ConfigError(f"{part} has no option {', '.join(extra)}; allowed: {allowed}")


def _options(
    part: str,
    parameters: Mapping[str, inspect.Parameter],
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """The options of a part from its spec and the defaults, checked by name."""
    _require_known(part, parameters, given)
    options = {name: value for name, value in defaults.items() if name in parameters}
    options |= {name: _nested(name, value, defaults) for name, value in given.items()}
    for name, value in options.items():
        inside = [part or 0 for part in value.values()] if isinstance(value, dict) else [value]
        wrong = [each for each in inside if isinstance(each, list | tuple | int | float)]
        is_number = type(parameters[name].default) in (int, float)
        fits = name not in NESTED or is_number or not wrong
        require(fits, f"{part}: {name}", value, "a part: NAME, NAME(option=value) or a file")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise ConfigError(f"{part} needs {name}, as in {part.split()[-1]}({name}=...)")
        is_number = type(parameter.default) in (int, float)
        value = options.get(name)
        require(not (is_number and isinstance(value, str)), f"{part}: {name}", value, "a number")
    return options


def _nested(name: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    """The value of an option; specs of other parts are built, and rewards within a reward get its
    defaults.
    """
    kind = NESTED.get(name)
    if kind is None:
        return value
    inherited = defaults if kind == "reward" else {}
    if isinstance(value, dict):
        return {key: _nested(name, inside, defaults) for key, inside in value.items()}
    if kind == "probe" and value is None:  # the bare word none
        value = "none"
    return build(kind, value, **inherited) if isinstance(value, str) else value


def check_part(kind: str, part: Any, name: str = "") -> None:
    """Check that an object is a part of some kind.

    Args:
        kind: a name of `KINDS`.
        part: the object.
        name: its name in the message; empty for that of its class.

    Raises:
        ConfigError: it lacks a member of the kind's protocols, which the message names if there is
            one protocol; a method is none or takes other arguments; or its probe or its optional
            methods are not what they must be.
    """
    name = f"{kind}: {name or type(part).__name__}"
    fits = [item for item in KINDS[kind].protocol_types() if isinstance(part, item)]
    if not fits:
        raise ConfigError(f"{name} {_lacking(kind, lambda member: hasattr(part, member))}")
    for member in _members(fits[0], (types.FunctionType,)):
        if member != "__call__":  # of any callable
            arguments = [*inspect.signature(getattr(fits[0], member)).parameters][1:]
            if kind == "credit":
                arguments += _record(part)
            _check_method(f"{name}.{member}", getattr(part, member), arguments)
    for member, arguments in OPTIONAL.items():
        if hasattr(part, member):
            _check_method(f"{name}.{member}", getattr(part, member), arguments)
    states = [member for member in ("state_dict", "load_state_dict") if hasattr(part, member)]
    if len(states) == 1:
        need = "define both state_dict and load_state_dict, or neither"
        raise ConfigError(f"{name} has only {states[0]}; {need}")
    if kind != "credit":
        return
    if states:
        from flowrl.run.parts.state import state_of  # here, since lists of parts do without torch

        state_of(name, part, ConfigError)
    is_probe = isinstance(part.probe, KINDS["probe"].protocol_types())
    need = "an instance of a class derived from flowrl.probes.Probe, such as NoProbe()"
    require(is_probe, f"{name}.probe", part.probe, need)
    for member in ("reads", "reads_fields", "shared_noise"):  # nothing reads them
        declared = "declared in the rule's `needs` (flowrl.core.experience.Needs)"
        require(not hasattr(part, member), f"{name}.{member}", getattr(part, member, ""), declared)


def _record(rule: Any) -> list[str]:
    """The third argument of `assign` for a rule that needs fields of the record."""
    from flowrl.core.experience import needs_of  # here, since lists of parts do without torch

    return ["record"] if needs_of(rule).fields else []


OPTIONAL: dict[str, list[str]] = {
    "state_dict": [],
    "load_state_dict": ["state"],
    "metrics": [],
    "refuses": ["prompt"],
}
"""Optional methods of a part, and the arguments that each takes."""


def _check_method(name: str, method: Any, arguments: list[str]) -> None:
    """Raise `ConfigError` unless `method` can be called with these arguments."""
    need = f"a method ({', '.join(arguments)})"
    require(callable(method), name, method, need)
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{name} must be {need}: {error}") from error
    except ValueError:  # a built-in function without a signature
        return


def _lacking(kind: str, has: Callable[[str], bool]) -> str:
    """Words for what an object or a class lacks to be a part of this kind."""
    entry, (first, *others) = KINDS[kind], KINDS[kind].protocol_types()
    missing = [] if others else [f"`{name}`" for name in _members(first) if not has(name)]
    names = f", and has no {', '.join(missing)}" if missing else ""
    return f"is not a {entry.noun}; it needs {entry.needs}{names}"


def _members(protocol: type, kinds: tuple[type, ...] = (property, types.FunctionType)) -> list[str]:
    """Names of a protocol's methods and properties."""
    members = {
        name: None
        for base in protocol.__mro__
        for name, value in vars(base).items()
        if isinstance(value, kinds)
    }
    return [name for name in members if name == "__call__" or not name.startswith("_")]


def _check_maker(kind: str, head: str, maker: Any) -> None:
    """Raise `ConfigError` unless `maker` is a class with the methods of `kind`, or a function
    annotated to return one.

    This check comes before any call, so a name such as ``os:system`` is not executed.
    """
    made = maker.func if isinstance(maker, partial) else maker
    if inspect.isfunction(made):
        try:
            made = get_type_hints(made).get("return")
        except (NameError, TypeError):  # annotations that cannot be resolved
            made = None
    bases = made.__mro__ if isinstance(made, type) else ()
    names = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    methods = (_members(p, (types.FunctionType,)) for p in KINDS[kind].protocol_types())
    if not bases or not any(names.issuperset(required) for required in methods):
        lacking = _lacking(kind, names.__contains__ if bases else lambda name: True)
        form = "write a class, or a function annotated to return one"
        raise ConfigError(f"{kind}: {head} {lacking}; {form}")


def available(kind: str) -> dict[str, str]:
    """The names of a kind that `build` accepts, each with its source: "flowrl", or the package
    whose plug-in it is.
    """
    points = entry_points(group=KINDS[kind].group)
    plugins = {point.name: package_of(point) for point in points}
    return plugins | dict.fromkeys(KINDS[kind].built_in, "flowrl")


def shadowed() -> list[str]:
    """A line per plug-in that has the name of a built-in part, which is used in its place."""
    return [
        f"{package_of(point)} offers a {entry.noun} {point.name!r} ({point.value}), which is never"
        f" used by this name, that of a built-in one: use {point.value}, or rename it"
        for entry in KINDS.values()
        for point in entry_points(group=entry.group)
        if point.name in entry.built_in
    ]


def options_of(kind: str, name: str) -> dict[str, Any]:
    """The options of a part and their defaults (`inspect.Parameter.empty` if there is none).

    Args:
        kind: a name of `KINDS`.
        name: a name of `available`, or of a class in a file or a module.

    Returns:
        Defaults by name of the option.

    Raises:
        ConfigError: the name is unknown, or the part cannot be imported.
    """
    parameters = _parameters(find_maker(kind, Spec(name, {})))
    return {} if parameters is None else {n: p.default for n, p in parameters.items()}


def summary_of(kind: str, name: str) -> str:
    """The first line of a part's documentation; the part is imported only if its source does not
    have it.

    Args:
        kind: a name of `KINDS`.
        name: a name of `available`.

    Returns:
        The line; empty without documentation.

    Raises:
        ConfigError: the name is unknown, or its plug-in cannot be loaded.
    """
    point = None if name in KINDS[kind].built_in else plugin(KINDS[kind].group, name, kind)
    documented = summary(KINDS[kind].built_in[name] if point is None else point.value)
    return documented or first_paragraph(documentation_of(kind, name))


def documentation_of(kind: str, name: str) -> str:
    """A part's whole documentation."""
    return inspect.getdoc(_by_name(kind, name)) or ""


def find_maker(kind: str, spec: Spec) -> Any:
    """The class or function that builds the part; `build` calls it. No other place imports what a
    spec names.

    Args:
        kind: a name of `KINDS`.
        spec: the parsed spec.

    Returns:
        What the spec names, which is not called.

    Raises:
        ConfigError: the class or function cannot be found or imported.
    """
    if ":" not in spec.name and spec.file is None:
        return _by_name(kind, spec.name)
    place, _, name = spec.name.rpartition(":")
    if spec.file is not None and not spec.file.is_file():
        raise ConfigError(f"{kind}: the file {spec.file.absolute()} does not exist")
    with _named(f"{kind}: importing {place}"):
        module = file_module(spec.file) if spec.file else importlib.import_module(place)
    if not hasattr(module, name):
        classes = [n for n, v in vars(module).items() if isinstance(v, type)]
        raise ConfigError(
            f"{kind}: {place} has no class {name!r}; its classes: {', '.join(classes)}"
        )
    return getattr(module, name)


def files_of(kind: str, spec: Spec) -> list[Path]:
    """The files that define a part: its own, or that of a module's or a plug-in's class and the
    module's.

    Args:
        kind: a name of `KINDS`.
        spec: the parsed spec.

    Returns:
        The files; empty for a built-in part, or if no Python source is found.
    """
    if spec.file is not None:
        return [spec.file]
    if spec.name in KINDS[kind].built_in:
        return []
    try:
        maker = find_maker(kind, spec)
        maker = maker.func if isinstance(maker, partial) else maker
        # A module's own file counts too; a plug-in's name may be that of an unrelated module.
        module = spec.name.partition(":")[0] if ":" in spec.name else maker.__module__
        files = (inspect.getsourcefile(maker), getattr(sys.modules[module], "__file__", None))
    except Exception:  # a third party's module may raise anything
        return []
    return [Path(file) for file in dict.fromkeys(files) if file]


def file_module(path: Path) -> ModuleType:
    """The module in a user's file, imported anew. Its folder is on the import path, as that of a
    script. Raises `ConfigError` if it imports a neighbour of a name that another file has already.
    """
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"{USER_MODULE}{path.stem}_{place}", path)
    assert spec is not None and spec.loader is not None  # of a name that ends in .py
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    for name in _imports(path):
        near = [path.parent / f"{name}.py", path.parent / name / "__init__.py"]
        known = getattr(sys.modules.get(name), "__file__", None)
        if (
            known
            and any(map(os.path.exists, near))
            and Path(known).resolve() not in map(Path.resolve, near)
        ):
            raise ConfigError(
                f"{path} imports {name}, a name that {known} has already; rename one of them"
            )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _imports(path: Path) -> set[str]:
    """The first names of the modules that a Python file imports."""
    names = set[str]()
    for node in ast.walk(ast.parse(read_bytes(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _by_name(kind: str, name: str) -> Maker:
    """A built-in maker, else the plug-in of that name; a name that two packages declare is an
    error.
    """
    entry = KINDS[kind]
    if place := entry.built_in.get(name):
        with _named(f"{kind} {name!r}: loading {place}"):
            return resolve_name(place)
    point = plugin(entry.group, name, kind)
    if point is None:
        if name.endswith(".py"):
            raise ConfigError(f"{kind}: name the class in the file, as in {name}:MyClass")
        message = unknown(name, available(kind), entry.noun)
        raise ConfigError(f"{message}, or path/to/file.py:Class")
    with _named(f"{kind} {name!r}: loading its plug-in {package_of(point)} ({point.value})"):
        return point.load()


def _parameters(maker: Maker) -> dict[str, inspect.Parameter] | None:
    """The maker's options; None if it takes any, or cannot be inspected."""
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
