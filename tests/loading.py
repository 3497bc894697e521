"""Scripts of the repository that no package contains, imported by their paths."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load(script):
    """The module of the script at this path, relative to the root of the repository."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
