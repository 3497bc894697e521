"""Installed packages: their versions, and their entry points (parts, model families and
commands). Once the package importlib_metadata is imported, its entry points take the place of the
standard library's.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from flowrl.core.errors import ConfigError


def plugin(group: str, name: str, noun: str) -> Any:
    """The entry point `name` of `group`; None if no package declares it.

    Raises `ConfigError` with the packages if several declare different objects; its message
    describes the name as a `noun`.
    """
    key = (group, name, *sys.path)
    if key in _found:
        return _found[key]
    points = list(entry_points(group=group, name=name))
    if len({point.value for point in points}) > 1:
        owners = ", ".join(sorted(package_of(point) for point in points))
        raise ConfigError(
            f"{noun} {name!r} is offered by several installed packages: {owners}; remove all"
            " but one"
        )
    if points:
        _found[key] = points[0]
    return points[0] if points else None


_found: dict[tuple[str, ...], Any] = {}
"""By group, name and search path: a lookup reads the files of all installed packages."""


def package_of(point: Any) -> str:
    """The name of the package that declares an entry point."""
    return point.dist.name if point.dist is not None else point.module


PACKAGES = ("flowrl-lab", "torch", "diffusers", "transformers", "peft")
"""The packages that a run's numbers depend on."""


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of installed `packages`; by default of those that the numbers depend on."""
    installed = {}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed
