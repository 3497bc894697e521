"""Options of parts and commands: types and ranges as annotated, checked in one place.

Parts are checked at construction, from Python and from a spec (`checked_options`), commands after
parsing (`check_ranges`). Ranges are those of `annotated_types`, as in ``Annotated[int, Ge(1)]``.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt
from beartype import BeartypeConf
from beartype.door import is_bearable

from flowrl.core.errors import MAX_SEED, ConfigError

C = TypeVar("C", bound=type)

Count = Annotated[int, Ge(1), Le(10**9)]
Whole = Annotated[int, Ge(0), Le(10**9)]
Seed = Annotated[int, Ge(0), Le(MAX_SEED)]
Workers = Annotated[int, Ge(0), Le(1024)]
Positive = Annotated[float, Gt(0), Lt(math.inf)]
NonNegative = Annotated[float, Ge(0), Lt(math.inf)]
Fraction = Annotated[float, Gt(0), Le(1)]
Share = Annotated[float, Ge(0), Le(1)]

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}
TOWER = BeartypeConf(is_pep484_tower=True)


def words(kind: Any, bounds: Sequence[Any] = ()) -> str:
    """Words for values of type `kind` within `bounds`, for a message."""
    kind, bounds = split(kind) if get_origin(kind) is Annotated else (kind, bounds)
    if get_origin(kind) is Literal:
        return ("one of " if len(get_args(kind)) > 1 else "") + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        first, *more = get_args(kind)
        return "a list of texts" if first is str else f"{len(more) + 1} values, each {words(first)}"
    if kind not in WORDS and type(None) in get_args(kind):
        return " or ".join(
            [words(one) for one in get_args(kind) if one is not type(None)] + ["None"]
        )
    if get_origin(kind) is Union:
        return " or ".join(words(one) for one in get_args(kind))
    return (WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}") + _range(bounds)


def _range(bounds: Sequence[Any]) -> str:
    low = next((b for b in bounds if isinstance(b, Ge | Gt)), None)
    high = next((b for b in bounds if isinstance(b, Le | Lt)), None)
    if isinstance(low, Ge) and isinstance(high, Le) and float(str(high.le)) >= 1e5:
        return f", {low.ge} or more (at most {high.le})"
    if low is not None and high is not None:
        left = f"[{low.ge}" if isinstance(low, Ge) else f"({low.gt}"
        return f" in {left}, {f'{high.le}]' if isinstance(high, Le) else f'{high.lt})'}"
    if low is not None:
        return f", {low.ge} or more" if isinstance(low, Ge) else f" above {low.gt}"
    return ""


def split(kind: Any) -> tuple[Any, Sequence[Any]]:
    """A type and the bounds that its annotation adds."""
    return (get_args(kind)[0], get_args(kind)[1:]) if get_origin(kind) is Annotated else (kind, ())


def fits(value: Any, kind: Any) -> bool:
    """Whether `value` is of type `kind`: integers are numbers, Booleans are neither, and NaN is not
    a number.
    """
    if get_origin(kind) is Mapping:  # the part checks its entries
        return isinstance(value, Mapping)
    if isinstance(value, bool) or (isinstance(value, float) and math.isnan(value)):
        return (
            isinstance(value, bool)
            and is_bearable(value, kind)
            and not is_bearable(2, kind, conf=TOWER)
        )
    return is_bearable(value, kind, conf=TOWER)


def within(value: Any, bounds: Sequence[Any]) -> bool:
    """Whether `value` is within all `bounds`."""
    compared = {
        Ge: lambda b: value >= b.ge,
        Gt: lambda b: value > b.gt,
        Le: lambda b: value <= b.le,
        Lt: lambda b: value < b.lt,
    }
    return all(compared[type(bound)](bound) for bound in bounds if type(bound) in compared)


def allowed(value: Any, hint: Any) -> bool:
    """Whether `value` is of the type and within the bounds that `hint` annotates."""
    kind, bounds = split(hint)
    if get_origin(kind) in (Union, UnionType):
        return any(allowed(value, one) for one in get_args(kind))
    return fits(value, kind) and within(value, bounds)


def checked_options(part: C) -> C:
    """Class decorator: building `part` with an option of another type than annotated, or outside
    its annotated range, raises `ConfigError` with the option, its value and what is allowed.
    """
    build, hints = cast(Any, part).__init__, {}
    signature = inspect.signature(build)

    @functools.wraps(build)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        if not hints:
            hints.update(get_type_hints(build, include_extras=True))
        for name, value in list(
            signature.bind_partial(self, *arguments, **options).arguments.items()
        )[1:]:
            if name in hints and not allowed(value, hints[name]):
                raise ConfigError(
                    f"{part.__name__}.{name} = {value!r:.200} is not allowed; allowed:"
                    f" {words(hints[name])}"
                )
        build(self, *arguments, **options)

    cast(Any, part).__init__ = __init__
    return part


def check_ranges(command: Any) -> None:
    """Raise `ConfigError` for a number in a parsed command, or in a command within it, that is
    outside its annotated range.
    """
    hints = get_type_hints(type(command), include_extras=True)
    for item in fields(command):
        value, (kind, bounds) = getattr(command, item.name), split(hints[item.name])
        members = [split(one) for one in (kind, *get_args(kind))]
        found = [(one, limits or bounds) for one, limits in members if one in (int, float)]
        for number in value if isinstance(value, tuple) else (value,):
            if is_dataclass(number):
                check_ranges(number)
            elif isinstance(number, int | float) and found:
                one, limits = found[0]
                if math.isnan(number) or not within(number, limits):
                    raise ConfigError(
                        f"{item.name} = {number!r} is not allowed; allowed: {words(one, limits)}"
                    )


__all__ = [
    "WORDS",
    "Count",
    "Fraction",
    "NonNegative",
    "Positive",
    "Seed",
    "Share",
    "Whole",
    "Workers",
    "check_ranges",
    "checked_options",
    "fits",
    "split",
    "within",
    "words",
]
