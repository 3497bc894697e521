"""Help of options from the strings below a command's fields, without the line breaks and indents of its source."""

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Annotated, Any, get_args

import tyro

ARGUMENT: Any = type(tyro.conf.arg(help=""))


def with_help(command: type) -> Any:
    """`command`, a data class, with the string below each field as the help of its option.

    tyro keeps the break before an indented line of such a string, so that a terminal shows lines that end early.
    """
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(command))).body[0]
    except (OSError, TypeError, SyntaxError):
        return command
    hints, lines = command.__annotations__, body.body if isinstance(body, ast.ClassDef) else []
    for node, below in pairwise(lines):
        name = node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        own = name in hints and any(isinstance(extra, ARGUMENT) for extra in get_args(hints[name])[1:])
        if isinstance(text, str) and name in hints and not own:
            hints[name] = Annotated[hints[name], tyro.conf.arg(help=" ".join(text.split()))]
    return command
