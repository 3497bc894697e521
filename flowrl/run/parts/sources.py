"""The docstring of a definition, read from its module's source without an import, so that a list of
parts does not need torch.
"""

import ast
import inspect
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def summary(place: str) -> str:
    """The first paragraph of the documentation of ``package.module:name`` in one line, or "" if the
    source does not have it.

    `name` is a class, a function, or a value with a string below it.
    """
    module, _, name = place.partition(":")
    try:
        return first_paragraph(_documented(module).get(name, ""))
    except (ValueError, OSError, SyntaxError):
        return ""


def first_paragraph(documentation: str) -> str:
    """The first paragraph of a docstring in one line."""
    return " ".join(documentation.partition("\n\n")[0].split())


@cache
def _documented(module: str) -> dict[str, str]:
    """The docstrings of all definitions in a module, by name."""
    package, *inside = module.split(".")
    # Only the top-level package is looked up: finding a submodule imports its packages.
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).parent.joinpath(*inside)
    files = (path.with_suffix(".py"), path / "__init__.py") if inside else (Path(spec.origin),)
    file = next((file for file in files if file.suffix == ".py" and file.is_file()), None)
    body = ast.parse(file.read_text(encoding="utf-8")).body if file else []
    documented: dict[str, str] = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        match node, following:
            case ast.ClassDef() | ast.FunctionDef(), _:
                documented[node.name] = ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(
                value=ast.Constant(value=str() as text)
            ):
                documented[name] = inspect.cleandoc(text)
    return documented
