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
        file = _file_of(module)
        return "" if file is None else first_paragraph(_documented(file).get(name, ""))
    except (ValueError, OSError, SyntaxError):
        return ""


def first_paragraph(documentation: str) -> str:
    """The first paragraph of a docstring in one line."""
    return " ".join(documentation.partition("\n\n")[0].split())


def _file_of(module: str) -> Path | None:
    """The Python file of a module, found from its top-level package, because finding a submodule
    imports its packages.
    """
    package, *inside = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent.joinpath(*inside)
    files = (place.with_suffix(".py"), place / "__init__.py") if inside else (Path(spec.origin),)
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


@cache
def _documented(file: Path) -> dict[str, str]:
    """The docstrings of all definitions in a file, by name."""
    found: dict[str, str] = {}
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif (
            isinstance(node, ast.Assign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            text = inspect.cleandoc(str(following.value.value))
            found |= {target.id: text for target in node.targets if isinstance(target, ast.Name)}
    return found
