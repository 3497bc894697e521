"""Importing large packages."""

import gc
from importlib import import_module


def import_modules(*names: str) -> None:
    """Import modules without garbage collection, which finds next to nothing while the objects of modules are made.

    In the process of a command, which has called `gc.freeze`, later collections leave these objects out as well.
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
