"""Help of options: from the strings below a command's fields, and without defaults that mean "not
given".
"""

import ast
import dataclasses
import inspect
import textwrap
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, get_args

import tyro

ARGUMENT: Any = type(tyro.conf.arg(help=""))


def with_help(command: type) -> Any:
    """`command`, a data class, with the string below each field as the help of its option; so too
    in its groups and subcommands.

    tyro keeps the break before an indented line of such a string, so that a terminal shows lines
    that end early.
    """
    for kind in command.__mro__:
        if dataclasses.is_dataclass(kind):
            _describe(kind)
    for item in dataclasses.fields(command):
        union = next(iter(get_args(item.type)), None)  # Annotated[one subcommand | another]
        for inside in (item.default_factory, *get_args(union)):
            if isinstance(inside, type) and dataclasses.is_dataclass(inside):
                with_help(inside)
    return command


def _describe(kind: type) -> None:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError):
        return
    hints, lines = kind.__annotations__, body.body if isinstance(body, ast.ClassDef) else []
    for node, below in pairwise(lines):
        name = (
            node.target.id
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            else ""
        )
        text = (
            below.value.value
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            else None
        )
        if (
            isinstance(text, str)
            and name in hints
            and not any(isinstance(extra, ARGUMENT) for extra in get_args(hints[name])[1:])
        ):
            hints[name] = Annotated[hints[name], argument(text, hints[name])]


def argument(text: str, annotation: Any) -> Any:
    """tyro's description of an option; None and the empty string, which mean that it was not given,
    are not shown as its default.

    The value of an option that may be None is shown by the name of its other type.
    """
    if get_args(annotation) and hasattr(annotation, "__metadata__"):  # Annotated[type, its range]
        annotation = get_args(annotation)[0]
    kinds = [_plain(kind) for kind in get_args(annotation) if kind is not NoneType]
    metavar = (
        kinds[0].__name__.upper() if NoneType in get_args(annotation) and len(kinds) == 1 else None
    )
    return tyro.conf.arg(help=" ".join(text.split()), metavar=metavar, help_behavior_hint=_default)


def _plain(kind: Any) -> type:
    return get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def _default(value: str) -> str:
    return f"(default: {value})" if value.strip() not in ("None", "''", "") else ""
