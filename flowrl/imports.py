"""Importing large packages."""

import gc
from importlib import import_module


def import_modules(*names: str) -> None:
    """Import modules without garbage collection, which frees almost no memory during imports.

    In the process of a command, which has called `gc.freeze`, later collections ignore these
    objects, too.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            import_module(name)
    finally:
        if gc.get_freeze_count():
            gc.freeze()
        if collected:
            gc.enable()
