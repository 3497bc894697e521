"""Packages whose names are imported at their first use."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that exports names of its modules without importing them.

    Args:
        package: name of the package.
        homes: the exported names by module, named within the package.

    Returns:
        A function of a name, which raises `AttributeError` for one that is not exported.
    """
    modules = {name: f"{package}.{module}" for module, names in homes.items() for name in names}

    def attribute(name: str) -> Any:
        if name in modules:
            return getattr(import_module(modules[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
