"""Checks of shapes: `@checked` compares the arguments of a public function of the method with their
annotations (jaxtyping, beartype).

``FLOWRL_TYPECHECK=0`` in the environment turns the checks off, and so does jaxtyping's
``JAXTYPING_DISABLE=1``.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from beartype import BeartypeConf, beartype
from beartype.door import is_bearable
from jaxtyping import TypeCheckError, jaxtyped

from flowrl.core.errors import ArgumentError

Target = TypeVar("Target", bound=Callable[..., Any])

CHECKS_ON = (
    os.environ.get("FLOWRL_TYPECHECK", "1") != "0"
    and os.environ.get("JAXTYPING_DISABLE", "0") != "1"
)
_RULES = BeartypeConf(is_pep484_tower=True)  # integers are numbers


def checked(target: Target) -> Target:
    """Decorator of a function, or of a data class for its fields. An argument of another type or
    shape than annotated raises `ArgumentError` with its name, its shape and what is allowed.
    """
    if not CHECKS_ON:
        return target
    if isinstance(target, type):
        of: Any = target
        of.__init__ = checked(of.__init__)
        return of
    compared = jaxtyped(typechecker=beartype(conf=_RULES))(target)

    @functools.wraps(target)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return compared(*arguments, **options)
        except TypeCheckError as error:
            given = inspect.signature(target).bind(*arguments, **options).arguments
            raise ArgumentError(_problem(target, given, error)) from error

    return call  # pyright: ignore


def _problem(function: Any, given: Mapping[str, Any], error: Exception) -> str:
    """The first argument that does not fit, in one line."""
    name, hints = function.__qualname__.removesuffix(".__init__"), get_type_hints(function)
    with jaxtyped("context"):  # axes keep the sizes of the arguments before
        for key, value in given.items():
            hint = hints.get(key, Any)
            if not is_bearable(value, hint, conf=_RULES):
                axes = re.search(r"are as follows\.\n(.+)", str(error))
                allowed = getattr(hint, "__name__", hint)
                words = f"{name}: {key} = {_shown(value)} is not allowed; allowed: {allowed}"
                return words + (f" with {axes[1]}" if axes else "")
    return f"{name}: {str(error).splitlines()[0]}"


def _shown(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{value!r:.200}" if shape is None else f"{dtype} {[*shape]}"
