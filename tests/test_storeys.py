"""What import-linter does not see: names in strings, scripts, lessons, and what the method imports
from other packages.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from loading import ROOT

STOREYS = {
    "method": ("core", "flow", "samplers", "probes", "credit", "losses", "rewards", "policies"),
    "run": ("run", "worlds", "serving", "cli"),
    "lab": ("compare", "testing", "bench"),
}
METHOD = (*STOREYS["method"], "rollout", "methods.py", "trainer.py", "weights.py", "nonfinite.py")
TABLES = {"flowrl/run/parts/kinds.py", "flowrl/cli/main.py", "flowrl/__init__.py"}
"""Where later storeys are named in strings: parts by name, commands, and the names of `flowrl`."""
MACHINERY = {"yaml", "tyro", "pydantic", "argparse", "filelock", "jinja2", "rich", "matplotlib"}


def files(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Path and syntax tree of every Python file in `folders`, which may be files."""
    for folder in folders:
        place = ROOT / folder
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for node in nodes
        for alias in node.names
    ]
    return {name.partition(".")[0] for name in names}


def test_later_storeys_are_named_in_two_tables_only():
    later = re.compile(r"flowrl\.(worlds|serving|cli|compare|testing|bench)[\w.]*(:\w+)?")
    places = {f"flowrl/{name}" for name in (*METHOD, "run")}
    named = [
        (path, node.value)
        for path, tree in files(*places, "flowrl/cli")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if later.fullmatch(node.value) and path not in TABLES
    ]
    assert named == []


def test_the_method_imports_no_machinery():
    found = {
        path: wrong
        for path, tree in files(*(f"flowrl/{name}" for name in METHOD))
        if (wrong := imported(tree) & MACHINERY)
    }
    assert found == {}


def test_scripts_do_without_the_course_and_lessons_without_scripts():
    scripts = {Path(path).stem for path, _ in files("benchmarks")}
    for path, tree in files("benchmarks", "docs", ".ci", "tests/bench"):
        assert "flowrl_course" not in imported(tree), path
    for path, tree in files("tutorials/package", "tutorials/source", "tutorials/capstone"):
        assert not imported(tree) & (scripts - {"documented"}), path
