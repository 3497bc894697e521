"""Options of parts and commands: types and ranges as annotated, checked in one place.

Parts are checked at construction, from Python and from a spec (`checked_options`), commands after
parsing (`check_ranges`). Ranges are those of `annotated_types`, as in ``Annotated[int, Ge(1)]``.
"""

import functools
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from flowrl.core.errors import MAX_SEED, require

C = TypeVar("C", bound=type)

Count = Annotated[int, Ge(1), Le(10**9)]
Whole = Annotated[int, Ge(0), Le(10**9)]
Seed = Annotated[int, Ge(0), Le(MAX_SEED)]
Workers = Annotated[int, Ge(0), Le(1024)] | str
"""A number of processes, 0: one per usable core; or the address of a cluster."""
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Gt(0), Le(1)]
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class Unset:
    """In the annotation of an option that may be None, "not set": the value that means the same on
    the command line and in files, where None cannot be written.
    """

    typed: Any


Text = Annotated[str | None, Unset("")]
"""A text; None, in files empty, if it is not set."""

NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "None",
}


def words(kind: Any, bounds: tuple[Any, ...] = ()) -> str:
    """Words for values of type `kind` within `bounds`, for a message."""
    kind, bounds = split(kind, bounds)
    origin, members = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ("one of " if len(members) > 1 else "") + ", ".join(map(str, members))
    if origin is tuple:
        return "a list of texts" if members[0] is str else f"values, each {words(members[0])}"
    if origin in (Union, UnionType):
        unset = [str(bound.typed) for bound in bounds if isinstance(bound, Unset)]
        kept = [member for member in members if not unset or member is not NoneType]
        texts = [words(member, bounds) for member in kept]
        return " or ".join([*texts, *(text for text in unset if text and text not in texts[0])])
    return NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}") + _range(kind, bounds)


def _range(kind: Any, bounds: Sequence[Any]) -> str:
    low = next((b for b in bounds if isinstance(b, Ge | Gt)), None)
    high = next((b for b in bounds if isinstance(b, Le | Lt)), None)
    if kind not in (int, float) or low is None:
        return ""
    above = f", {low.ge} or more" if isinstance(low, Ge) else f" above {low.gt}"
    if high is None:
        return above
    if isinstance(high, Le) and float(str(high.le)) >= 1e5:
        return f"{above} (at most {high.le})"
    left = f"[{low.ge}" if isinstance(low, Ge) else f"({low.gt}"
    return f" in {left}, " + (f"{high.le}]" if isinstance(high, Le) else f"{high.lt})")


@functools.cache
def split(kind: Any, bounds: tuple[Any, ...] = ()) -> tuple[Any, tuple[Any, ...]]:
    """A type, and the bounds of its annotation or else `bounds`."""
    return (
        (get_args(kind)[0], get_args(kind)[1:]) if get_origin(kind) is Annotated else (kind, bounds)
    )


def allowed(value: Any, hint: Any, bounds: tuple[Any, ...] = ()) -> bool:
    """Whether `value` is of the type and within the bounds that `hint` annotates.

    Integers are numbers, Booleans are neither, and numbers are finite.
    """
    kind, bounds = split(hint, bounds)
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(allowed(value, member, bounds) for member in members)
    if origin is Sequence or (origin is tuple and members[-1] is Ellipsis):
        return isinstance(value, origin) and all(
            allowed(item, members[0], bounds) for item in value
        )
    if origin is Mapping:  # the part checks its entries
        return isinstance(value, Mapping)
    if isinstance(kind, type) and kind not in NAMES:
        return isinstance(value, kind)
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in members)
    if origin is not None:
        return isinstance(value, origin)
    plain = Real if kind is float else kind
    if not isinstance(value, plain) or (isinstance(value, bool) and kind is not bool):
        return False
    if kind in (int, float):
        return math.isfinite(value) and all(_within(value, bound) for bound in bounds)
    return True


def _within(value: float, bound: Any) -> bool:
    """Whether a number is within one bound of `annotated_types`."""
    low, high = getattr(bound, "ge", -math.inf), getattr(bound, "le", math.inf)
    above, below = getattr(bound, "gt", -math.inf), getattr(bound, "lt", math.inf)
    return low <= value <= high and (isinstance(bound, Ge | Le) or above < value < below)


def checked_options(part: C) -> C:
    """Class decorator: building `part` with an option of another type than annotated, or outside
    its annotated range, raises `ConfigError` with the option, its value and what is allowed.
    """
    constructor: Any = part
    build, hints = constructor.__init__, {}
    signature = inspect.signature(build)

    @functools.wraps(build)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        if not hints:  # at the first call: annotations may name classes that are defined later
            hints.update(get_type_hints(build, include_extras=True))
        given = signature.bind_partial(self, *arguments, **options).arguments
        for name in given.keys() & hints.keys():
            if not allowed(given[name], hints[name]):
                require(False, f"{part.__name__}.{name}", given[name], words(hints[name]))
        build(self, *arguments, **options)

    constructor.__init__ = __init__
    return part


def check_ranges(command: Any) -> None:
    """Raise `ConfigError` for a number given in a parsed command, or in a command within it, that
    is outside its annotated range.
    """
    hints = get_type_hints(type(command), include_extras=True)
    for item in fields(command):
        value = getattr(command, item.name)
        if is_dataclass(value):
            check_ranges(value)
            continue
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, PurePath):
                longest = max((len(os.fsencode(part)) for part in text.parts), default=0)
                require(longest < 256, item.name, text, "names of at most 255 bytes")
        if value != item.default:
            require(allowed(value, hints[item.name]), item.name, value, words(hints[item.name]))
