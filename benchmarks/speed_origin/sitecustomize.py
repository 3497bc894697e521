"""Imported by every Python process that speed.py starts: a flowrl module from a tree other than
FLOWRL_TREE ends the process.
"""

import os
import sys
from importlib.machinery import PathFinder

TREE = os.environ["FLOWRL_TREE"]
OURS = ("flowrl", "flowrl_bench", "flowrl_course", "flowrl_rewards")


class Origin:
    """The first finder, so that no editable installation comes before it. Forks inherit it, other
    processes import it anew.
    """

    @staticmethod
    def find_spec(name, path=None, target=None):
        """The module's place on `sys.path`, checked; None for packages of others."""
        if name.partition(".")[0] not in OURS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if spec.origin is not None and not os.path.realpath(spec.origin).startswith(TREE + os.sep):
            print(
                f"{name} is imported from {spec.origin}, not from {TREE}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(97)
        return spec


sys.meta_path.insert(0, Origin)
