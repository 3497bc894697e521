"""Two versions of the project next to each other: another commit's files, and what makes Python
import a tree's packages.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (".", "packages", "tutorials/package", "benchmarks/package")


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit as a temporary git worktree."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree").resolve()
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def environment(tree: Path) -> dict[str, str]:
    """The variables with which Python imports the packages of `tree`, on one thread and without the
    network. Ends the process if an installed flowrl comes before that of the tree.
    """
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(tree / package) for package in PACKAGES),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
    }
    words = [sys.executable, "-c", "import flowrl; print(flowrl.__file__)"]
    path = subprocess.run(
        words, env=variables, cwd=tree.parent, check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(path).resolve().is_relative_to(tree):
        raise SystemExit(f"flowrl was imported from {path}, not from {tree}")
    return variables
