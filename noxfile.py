"""Development targets, shared by contributors, `.ci/run` and the GitHub workflow. `nox -l` lists
them.

All sessions run in the active environment. Install the project there first:

    pip install -e ".[dev,tutorials,docs]" -c constraints.txt

By default nox would create one environment per session and install torch in each. Only `wheel`
creates an environment. Arguments after `--` are passed to the tool that a session runs, as in `nox
-s tests -- -k golden`.
"""

import os
import tempfile
import tomllib
import zipfile
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROGRAMS = "Scripts" if os.name == "nt" else "bin"

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests"]
# tests run in two processes; one thread each keeps their sums reproducible
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@nox.session
def format(session: nox.Session) -> None:
    """Fix what ruff can fix, and format."""
    session.run("ruff", "check", "--fix", ".", *session.posargs)
    session.run("ruff", "format", ".")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and import contracts."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with basedpyright."""
    session.run("basedpyright", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the fast tests of the library."""
    session.run(
        "python", "-m", "pytest", "-n", "2", "-m", "not slow and not satellite", *session.posargs
    )


@nox.session
def satellites(session: nox.Session) -> None:
    """Run the fast tests of the satellites and of the site, and the longest of the library."""
    session.run(
        "python", "-m", "pytest", "-n", "2", "-m", "satellite and not slow", *session.posargs
    )


@nox.session
def records(session: nox.Session) -> None:
    """Repeat one run of one record, which the commit's hash chooses."""
    commit = session.run("git", "rev-parse", "HEAD", silent=True, external=True)
    session.run("python", "benchmarks/records.py", "--redo", str(commit).strip())


@nox.session
def slow(session: nox.Session) -> None:
    """Run the slow tests."""
    session.run("python", "-m", "pytest", "-n", "2", "-m", "slow", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    session.run(
        "sphinx-build",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "docs",
        "docs/_build/html",
        *session.posargs,
    )


@nox.session
def tutorials(session: nox.Session) -> None:
    """Execute every lesson and compare the result with the stored notebooks."""
    session.run("python", "tutorials/build.py", "--check", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the packages, install the wheel into a fresh environment outside the clone, and run a
    tiny comparison there.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # the sdist, then the wheel from it
        session.run("python", "-m", "build", "--outdir", str(work / "dist"))
        (built,) = (work / "dist").glob("*.whl")
        missing = sorted(packaged_files() - set(zipfile.ZipFile(built).namelist()))
        if missing:
            session.error(f"{built.name} lacks {', '.join(missing)}")
        compare_elsewhere(session, work, str(built), "constraints.txt")


@nox.session
def lowest(session: nox.Session) -> None:
    """Install the lowest versions that pyproject.toml allows into a fresh environment, and run a
    tiny comparison there.
    """
    with tempfile.TemporaryDirectory() as folder:
        compare_elsewhere(session, Path(folder), str(ROOT), "constraints-lowest.txt")


def compare_elsewhere(session: nox.Session, work: Path, package: str, constraints: str) -> None:
    """Install `package` into a new environment in `work`, and run `flowrl compare --preset tiny`
    there.
    """
    programs, alone = work / "venv" / PROGRAMS, {"PYTHONPATH": None}
    session.run("python", "-m", "venv", str(work / "venv"))
    with session.chdir(work):
        python, flowrl = str(programs / "python"), str(programs / "flowrl")
        session.run(
            python, "-m", "pip", "install", "-q", package, "-c", str(ROOT / constraints), env=alone
        )
        session.run(
            flowrl, "compare", "--preset", "tiny", "--seeds", "0", "--out", "run", env=alone
        )
    report = work / "run" / "report.html"
    if not report.is_file() or report.stat().st_size == 0:
        session.error("flowrl compare wrote no report.html")


def packaged_files() -> set[str]:
    """Names that the wheel must contain: every file of its packages, data files included."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    packages = [ROOT / name for name in settings["packages"]]
    files = [
        (file, package.parent)
        for package in packages
        for file in package.rglob("*")
        if file.is_file()
    ]
    return {
        file.relative_to(parent).as_posix()
        for file, parent in files
        if "__pycache__" not in file.parts
    }
