"""Checks of arguments at every public call, from the annotations.

`flowrl/__init__.py` installs `check_imports`: in each module of flowrl, public functions, methods
and constructors that other code calls compare their arguments with their annotations, shapes of
tensors included, and raise an `ArgumentError` that names the argument. Such a call costs 1
microsecond more, 70 with shapes of several tensors, its first one milliseconds; a call within
flowrl, .3 microseconds. Properties and values that are assigned to attributes are not checked.
``FLOWRL_TYPECHECK=0`` (or jaxtyping's ``JAXTYPING_DISABLE=1``) in the environment leaves it out.
"""

import dataclasses
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import FrameType, FunctionType, ModuleType
from typing import Annotated, Any, get_args, get_type_hints

from flowrl.core.errors import OWN_PACKAGES, ArgumentError, FlowrlError

CHECKS_ON = (
    os.environ.get("FLOWRL_TYPECHECK", "1") != "0"
    and os.environ.get("JAXTYPING_DISABLE", "0") != "1"
)


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, value in [*vars(module).items()]:
            if getattr(value, "__module__", "") == module.__name__ and name[0] != "_":
                if _is_checked(value):
                    setattr(module, name, checked_call(value))
                elif isinstance(value, type):
                    _check_methods(value)


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in OWN_PACKAGES or package == "flowrl_course":  # it explains wrong answers
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (other.find_spec(name, path, target) for other in others)), None)
        if spec and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def check_imports() -> None:
    """Check the public calls of modules that are imported from now on."""
    if CHECKS_ON:
        sys.meta_path.insert(0, _Finder())


def _is_checked(value: Any) -> bool:
    """Whether a value is a function that a plain wrapper can stand for."""
    return isinstance(value, FunctionType) and not inspect.iscoroutinefunction(value)


def _check_methods(kind: type) -> None:
    if issubclass(kind, BaseException) or getattr(kind, "_is_protocol", False):
        return
    for name, value in [*vars(kind).items()]:
        bound = isinstance(value, classmethod | staticmethod)
        function = value.__func__ if bound else value
        # a constructor with a wrapper has `checked_options`
        bare = name == "__init__" and not hasattr(value, "__wrapped__")
        if (bare or name[0] != "_") and _is_checked(function):
            call = checked_call(function)
            setattr(kind, name, type(value)(call) if bound else call)


def checked_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which compares its arguments with its annotations."""
    checked: Any = None

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal checked
        caller = sys._getframe().f_back
        if caller is not None and caller.f_code is _REPLACE:  # the caller of `replace` counts
            caller = caller.f_back
        if caller is None or _package(caller) in OWN_PACKAGES:
            return function(*arguments, **options)
        # At the first call, since annotations may name what is defined later. Commands without
        # tensors, such as `flowrl parts`, do without the checkers: importing them takes .3 s.
        if checked is None and "jaxtyping" in sys.modules:
            checked = _checked(function)
        try:
            return (checked or function)(*arguments, **options)
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, FlowrlError) and not isinstance(error, ArgumentError):
                raise
            problem = _problem(function, arguments, options, error)
            if problem:
                raise ArgumentError(problem) from error
            raise

    return call


_REPLACE = dataclasses.replace.__code__


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def _hints(function: Any) -> dict[str, Any]:
    """The annotations; none if they name what is imported for type checkers only."""
    try:
        return get_type_hints(function, include_extras=True)
    except NameError:
        return {}


@functools.cache
def _rules(protocols: frozenset[Any]) -> Any:
    """beartype's settings: integers are numbers, and what stands for a protocol need not have the
    members that a call does not use, but one of them.
    """
    from beartype import BeartypeConf, BeartypeHintOverrides, vale

    is_: Any = vale.Is

    def resembles(protocol: Any) -> Any:
        """At least one of the protocol's members, and no number, text or list."""
        names = [name for name in dir(protocol) if name[0] != "_"]
        return is_[
            lambda value: (
                type(value).__module__ != "builtins" and any(hasattr(value, name) for name in names)
            )
        ]

    overrides: Any = {kind: Annotated[object, resembles(kind)] for kind in protocols}
    return BeartypeConf(
        is_pep484_tower=True,
        violation_param_type=ArgumentError,
        hint_overrides=BeartypeHintOverrides(overrides),  # pyright: ignore
    )


def _protocols(hints: Iterable[Any]) -> frozenset[Any]:
    """The protocols of flowrl among annotations, alone or in a union, list or mapping."""
    inner = [kind for hint in hints for kind in (hint, *get_args(hint))]
    return frozenset(
        kind
        for kind in inner
        if getattr(kind, "_is_protocol", False) and kind.__module__.startswith("flowrl")
    )


def _checked(function: Any) -> Any:
    """`function` with the checkers' comparison. They see no parameters in the wrapper of a
    decorator, as of `contextmanager` or `torch.no_grad`, and look at a generator's arguments when
    it starts; there the arguments are compared one by one.
    """
    if hasattr(function, "__wrapped__") or inspect.isgeneratorfunction(function):

        def checked(*arguments: Any, **options: Any) -> Any:
            problem = _problem(function, arguments, options, None)
            if problem:
                raise ArgumentError(problem)
            return function(*arguments, **options)

        return checked
    from beartype import beartype
    from jaxtyping import jaxtyped

    hints = _hints(function)
    typechecker: Any = beartype(conf=_rules(_protocols(hints.values())))
    if any("jaxtyping" in repr(hint) for hint in hints.values()):
        return jaxtyped(typechecker=typechecker)(function)
    return typechecker(function) if hints else function


def _problem(
    function: Any, arguments: Sequence[Any], options: dict[str, Any], error: Exception | None
) -> str:
    """What is wrong with the arguments of a call, by name; "" if nothing is."""
    from beartype.door import is_bearable
    from jaxtyping import jaxtyped

    name = function.__qualname__.removesuffix(".__init__")
    signature, hints = inspect.signature(function), _hints(function)
    try:
        given = signature.bind(*arguments, **options).arguments
    except TypeError as wrong:
        return f"{name}: {wrong}"
    with jaxtyped("context"):  # axes keep the sizes of the arguments before
        for key, value in given.items():
            single = signature.parameters[key].kind not in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            )
            hint = hints.get(key, Any) if single else Any
            lacking = isinstance(error, AttributeError) and error.obj is value and error.name
            fits = is_bearable(value, hint, conf=_rules(_protocols([hint])))
            if not fits or (lacking and _protocols([hint])):
                axes = re.search(r"are as follows\.\n(.+)", str(error))
                return (
                    f"{name}: {key} = {_shown(value)} is not allowed; allowed: "
                    f"{getattr(hint, '__name__', hint)}"
                    + (f"; it lacks {lacking}" if lacking else "")
                    + (f" with {axes[1]}" if axes else "")
                )
    return ""


def _shown(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{value!r:.200}" if shape is None else f"{dtype} {[*shape]}"
