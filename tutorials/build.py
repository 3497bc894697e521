"""Makes the notebooks of the course from their sources, and proves that they are up to date.

    python tutorials/build.py              # all lessons: execute, write both versions
    python tutorials/build.py --only 01    # some lessons
    python tutorials/build.py --check      # write nothing; fail where a notebook or an output is stale

tutorials/source/NN_name.py (jupytext, percent format) is the source. tutorials/NN_name.ipynb has the solutions and stored
outputs; tutorials/student/NN_name.ipynb has starting cells, and each solution folded.
docs/writing-lessons.md describes the format.
"""

import argparse
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
LIMIT_SECONDS = 180
LIMIT_BYTES = 1_000_000
TOLERANCE = 0.05
ROLES = ("exercise", "solution", "explanation")
SETUP = """\
# Installs flowrl where it is missing: from the clone that holds this notebook, else from the package index.
import importlib.util
import pathlib

if importlib.util.find_spec("flowrl") is None:
    clone = [p for p in pathlib.Path.cwd().parents if (p / "flowrl").is_dir() and (p / "pyproject.toml").is_file()]
    target = f"-e {clone[0]}[tutorials]" if clone else "flowrl-lab[tutorials]"
    %pip install -q {target}"""

NOTE = (
    "> **How to work.** Replace the dots, then run the check below. Later cells may use your answer: to go on without one, "
    "copy the folded solution into the starting cell."
)

Notebook = nbformat.NotebookNode


def sources(only: list[str]) -> list[Path]:
    """Source files, all or those whose name starts with one of `only`."""
    found = [p for p in sorted((HERE / "source").glob("[0-9][0-9]_*.py")) if not only or p.name.startswith(tuple(only))]
    if not found:
        raise SystemExit(f"no lesson starts with {', '.join(only)}; there are {[p.name for p in (HERE / 'source').glob('*.py')]}")
    return found


def role(cell: Notebook) -> str | None:
    """exercise, solution or explanation; None for a plain cell."""
    return next((tag for tag in cell.metadata.get("tags", []) if tag in ROLES), None)


def read(source: Path) -> Notebook:
    """The source as a notebook, with the installing cell after the opening text."""
    notebook = jupytext.read(source)
    setup = nbformat.v4.new_code_cell(SETUP, metadata={"tags": ["hide-input"]})
    notebook.cells.insert(1, setup)
    return notebook


def finish(notebook: Notebook, name: str) -> Notebook:
    """The same cell ids and metadata every time."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells):
        cell.id = f"{name[:2]}-{index:03d}"
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if "hide-input" in tags:
            cell.metadata["jupyter"] = {"source_hidden": True}
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.get("outputs", []):
                if "execution_count" in output:
                    output["execution_count"] = None
                output.pop("metadata", None)
                if output.output_type in ("display_data", "execute_result"):
                    output["metadata"] = {}
    return notebook


def solved(source: Path) -> Notebook:
    """The version with solutions, without outputs."""
    notebook = read(source)
    notebook.cells = [cell for cell in notebook.cells if role(cell) != "exercise"]
    return finish(notebook, source.stem)


def student(source: Path) -> Notebook:
    """The version with starting cells; each solution and its explanation are folded where the explanation stands."""
    notebook, cells, held = read(source), [], []
    for cell in notebook.cells:
        if role(cell) == "solution":
            held.append(cell.source)
        elif role(cell) == "explanation":
            code = "\n\n".join(held)
            text = re.sub(r"^\*\*Why\.\*\*\s*", "", cell.source)
            folded = f"<details><summary><b>Solution</b></summary>\n\n```python\n{code}\n```\n\n{text}\n\n</details>"
            cells.append(nbformat.v4.new_markdown_cell(folded))
            held = []
        else:
            cells.append(cell)
    if held:
        raise SystemExit(f"{source.name}: a solution has no explanation cell after it:\n{held[0][:200]}")
    cells[0].source += f"\n\n{NOTE}"
    notebook.cells = cells
    return finish(notebook, source.stem)


def execute(notebook: Notebook, name: str) -> float:
    """Run a notebook in place, checks strict; returns the seconds that its process computed. Exits where a cell failed."""
    os.environ.update({"FLOWRL_COURSE": "strict", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"})
    notebook.cells.append(nbformat.v4.new_code_cell("import time\nprint(time.process_time())"))
    options = {"timeout": 5 * LIMIT_SECONDS, "kernel_name": "python3", "resources": {"metadata": {"path": str(HERE)}}}
    try:
        NotebookClient(notebook, **options).execute()
    except CellExecutionError as error:
        raise SystemExit(f"{name}: a cell failed\n{error}") from None
    seconds = float(notebook.cells.pop().outputs[0].text)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in _merged(cell.outputs) if o.get("name") != "stderr"]
    finish(notebook, name)
    return seconds


def _merged(outputs: list[Notebook]) -> list[Notebook]:
    """Neighbouring pieces of one stream joined: how a stream is cut depends on timing."""
    merged: list[Notebook] = []
    for output in outputs:
        if merged and output.output_type == "stream" == merged[-1].output_type and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(deepcopy(output))
    return merged


def text_of(cell: Notebook) -> str:
    """What a cell printed or returned, as text; pictures as one word each."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            parts.append(output.text)
        else:
            data = output.get("data", {})
            parts.append("<picture>" if any(kind.startswith("image/") for kind in data) else str(data.get("text/plain", "")))
    return "\n".join(parts)


def differs(old: str, new: str) -> str | None:
    """Where two outputs differ in more than the size of their numbers (`TOLERANCE`, relative or absolute); None if nowhere."""
    number = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
    if number.sub("#", old).split() != number.sub("#", new).split():
        return f"text {old[:200]!r} became {new[:200]!r}"
    for a, b in zip(number.findall(old), number.findall(new), strict=True):
        x, y = float(a.replace(",", "")), float(b.replace(",", ""))
        if abs(x - y) > TOLERANCE * max(1.0, abs(x)):
            return f"number {a} became {b}"
    return None


def stale(stored: Path, fresh: Notebook) -> list[str]:
    """What is out of date in the stored solved version."""
    if not stored.is_file():
        return [f"{stored.name} does not exist"]
    old = nbformat.read(stored, as_version=4)
    if [c.source for c in old.cells] != [c.source for c in fresh.cells]:
        return [f"{stored.name} was not made from the present source"]
    found = []
    for before, after in zip(old.cells, fresh.cells, strict=True):
        if "varies" in before.metadata.get("tags", []):
            continue
        problem = differs(text_of(before), text_of(after))
        if problem:
            found.append(f"{stored.name}, cell {before.id}: output is stale: {problem}")
    return found


def build(source: Path, check: bool) -> tuple[str, list[str]]:
    """One lesson: its line for the table, and what is wrong with it."""
    notebook, problems = solved(source), []
    exercises = sum(role(cell) == "exercise" for cell in read(source).cells)
    seconds = execute(notebook, source.stem)
    target, starting = HERE / f"{source.stem}.ipynb", HERE / "student" / f"{source.stem}.ipynb"
    size = len(nbformat.writes(notebook).encode())
    if seconds > LIMIT_SECONDS:
        problems.append(f"{source.stem} computes for {seconds:.0f} s; at most {LIMIT_SECONDS} are allowed")
    if size > LIMIT_BYTES:
        problems.append(f"{target.name} has {size:,} bytes; at most {LIMIT_BYTES:,} are allowed")
    if exercises < 3:
        problems.append(f"{source.stem} has {exercises} exercises; at least 3 are needed")
    beginning = nbformat.writes(student(source))
    if check:
        problems += stale(target, notebook)
        if not starting.is_file() or starting.read_text() != beginning:
            problems.append(f"student/{starting.name} was not made from the present source")
    else:
        starting.parent.mkdir(exist_ok=True)
        target.write_text(nbformat.writes(notebook))
        starting.write_text(beginning)
    return f"{source.stem:<28} {seconds:6.0f} s {exercises:4d} exercises {size / 1000:7.0f} kB", problems


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the notebooks of the course, or check that they are up to date.")
    parser.add_argument("--only", nargs="*", default=[], help="lessons by the beginning of their names, such as 01 04")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a notebook or an output is stale")
    parser.add_argument("--students", action="store_true", help="write the students' versions only, nothing is executed")
    parser.add_argument("--jobs", type=int, default=2, help="lessons at a time (one thread each)")
    options = parser.parse_args()
    if options.students:
        for source in sources(options.only):
            (HERE / "student" / f"{source.stem}.ipynb").write_text(nbformat.writes(student(source)))
        return
    problems: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for line, wrong in pool.map(lambda source: build(source, options.check), sources(options.only)):
            print(line, flush=True)
            problems += wrong
    for problem in problems:
        print(f"STALE OR WRONG: {problem}", file=sys.stderr)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
