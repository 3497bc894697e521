"""Scripts of the repository that no package contains, imported by their paths; and the names that
programs import.
"""

import ast
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load(script):
    """The module of the script at this path, relative to the root of the repository."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_names(text, *packages):
    """Import what a program imports from these packages, though it may run in no test."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(packages):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
