"""The programs of benchmarks/ import names that exist, though most of them run in no test."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "benchmarks"
OURS = ("flowrl", *(path.stem for path in ROOT.glob("*.py")))


@pytest.mark.parametrize("script", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_a_program_imports_names_that_exist(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(OURS):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
