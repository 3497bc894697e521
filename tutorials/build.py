"""Builds the notebooks of the course from their sources, and checks that they are up to date.

    python tutorials/build.py              # all lessons: execute, write both versions
    python tutorials/build.py --only 01    # some lessons
    python tutorials/build.py --text       # only prose changed: keep outputs, write all versions
    python tutorials/build.py --check      # write nothing; fail if a notebook or an output is stale

tutorials/source/NN_name.py (jupytext, percent format) is the source. tutorials/NN_name.ipynb has
the solutions and stored outputs; tutorials/student/NN_name.ipynb has starting cells, the outputs of
other cells than exercises and predictions, and each hint and solution folded;
tutorials/colab/NN_name.ipynb is the student's version without outputs, with a first cell that
installs flowrl.
tutorials/package/flowrl_course/solutions.json has the solutions by check, which replace missing
answers. CONTRIBUTING.md describes the format.
"""

import argparse
import base64
import io
import json
import os
import re
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

HERE = Path(__file__).parent
LIMIT_SECONDS = 180
LIMIT_BYTES = 1_000_000
TOLERANCE = 0.02
ROLES = ("exercise", "hint", "solution", "explanation", "expected")
NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"
RANGE = rf"{NUMBER}\.\.{NUMBER}"
NOTE = (
    "> **How to work.** Replace the dots, then run the check below. If it fails, it says what is"
    " wrong with the result; run the check again for the cause, and once more for the remedy. A"
    " hint and the solution are folded below it. Until your answer is correct, later cells use the"
    " solution, so you can skip an exercise."
)
SHARP = "--InlineBackend.figure_formats=retina"
"""Argument of the kernel: figures have two pixels per point, and the notebook stores the width in
points.
"""
SETUP = '# Installs flowrl in this Colab session.\n%pip install -q "flowrl-lab @ git+{address}"'

Notebook = nbformat.NotebookNode


def sources(only: list[str]) -> list[Path]:
    """Source files, all or those whose name starts with one of `only`."""
    chosen = [
        p
        for p in sorted((HERE / "source").glob("[0-9][0-9]_*.py"))
        if not only or p.name.startswith(tuple(only))
    ]
    if not chosen:
        raise SystemExit(
            f"no lesson starts with {', '.join(only)}; there are"
            f" {[p.name for p in (HERE / 'source').glob('*.py')]}"
        )
    return chosen


def role(cell: Notebook) -> str | None:
    """One of `ROLES`; None for a plain cell."""
    return next((tag for tag in cell.metadata.get("tags", []) if tag in ROLES), None)


def read(source: Path) -> Notebook:
    """The source as a notebook.

    The text of an `expected` cell becomes the metadata entry "expected" of the code cell before it;
    a line ``{symbols: t; x_t}`` becomes the rows of docs/reference/notation.md for these symbols.
    """
    notebook, cells = jupytext.read(source), []
    for cell in notebook.cells:
        cell.source = re.sub(
            r"^\{symbols: (.*)\}$", lambda line: symbols(line[1]), cell.source, flags=re.MULTILINE
        )
        if role(cell) in ("hint", "explanation") and (
            heading := re.search(r"^#{1,6} .*", cell.source, re.MULTILINE)
        ):
            raise SystemExit(
                f"{source.name}: a heading in a folded cell; begin a new Markdown cell with it:"
                f"\n{heading[0]}"
            )
        if role(cell) != "expected":
            cells.append(cell)
        elif cells and cells[-1].cell_type == "code" and role(cells[-1]) is None:
            cells[-1].metadata["expected"] = cell.source
        else:
            raise SystemExit(
                f"{source.name}: an expected output must follow its code cell:\n{cell.source[:200]}"
            )
    notebook.cells = cells
    return notebook


def symbols(names: str) -> str:
    """The table of some symbols, separated by semicolons, from the page of the notation.

    A name is what a row begins with, without dollar signs, up to the first equality sign.
    """
    head, line, *rows = re.findall(
        r"^\|.*\|$", (HERE.parent / "docs/reference/notation.md").read_text(), re.MULTILINE
    )
    known = {re.split(r" \||,? *=", row[2:])[0].replace("$", "").strip(): row for row in rows}
    chosen = [name.replace("$", "").strip() for name in names.split(";")]
    if unknown := [name for name in chosen if name not in known]:
        raise SystemExit(f"docs/reference/notation.md has no {unknown}; it has {list(known)}")
    return "\n".join([head, line, *(known[name] for name in chosen)])


def finish(notebook: Notebook, name: str) -> Notebook:
    """The same cell ids and metadata every time."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
                "name": "python3",
            },
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
                width = output.pop("metadata", {}).get("image/png", {}).get("width")
                if output.output_type in ("display_data", "execute_result"):
                    output["metadata"] = {"image/png": {"width": width}} if width else {}
    return notebook


def solved(source: Path) -> Notebook:
    """The version with solutions, without outputs."""
    notebook = read(source)
    notebook.cells = [cell for cell in notebook.cells if role(cell) != "exercise"]
    return finish(notebook, source.stem)


def expected_outputs(source: Path) -> list[str | None]:
    """The expected output of every cell of the version with solutions; None if the cell has
    none.
    """
    return [
        cell.metadata.get("expected") for cell in read(source).cells if role(cell) != "exercise"
    ]


def folded(title: str, text: str) -> Notebook:
    """A Markdown cell with a title that opens the text."""
    return nbformat.v4.new_markdown_cell(
        f"<details><summary><b>{title}</b></summary>\n\n{text}\n\n</details>"
    )


def student(source: Path) -> Notebook:
    """The version with starting cells; after each check the hint is folded, then the solution with
    its explanation.
    """
    notebook, cells, hints, held = read(source), [], [], []
    for cell in notebook.cells:
        if role(cell) == "solution":
            held.append(cell.source)
        elif role(cell) == "hint":
            hints.append(re.sub(r"^\*\*Hint\.\*\*\s*", "", cell.source))
        elif role(cell) == "explanation":
            code = "\n\n".join(held)
            text = re.sub(r"^\*\*Why\.\*\*\s*", "", cell.source)
            cells += [folded("Hint", hint) for hint in hints]
            cells.append(folded("Solution", f"```python\n{code}\n```\n\n{text}"))
            hints, held = [], []
        else:
            cells.append(cell)
    if held or hints:
        raise SystemExit(
            f"{source.name}: a hint or solution has no explanation cell after"
            f" it:\n{(hints + held)[0][:200]}"
        )
    cells[0].source += f"\n\n{NOTE}"
    notebook.cells = cells
    return finish(notebook, source.stem)


SOLUTIONS = HERE / "package/flowrl_course/solutions.json"


def solutions(source: Path) -> dict[str, str]:
    """The solution of each exercise of a lesson, by check, such as "lesson_03.check_kl"."""
    found, held = {}, ""
    for cell in read(source).cells:
        if role(cell) == "solution":
            held += cell.source + "\n"
        elif held and (call := re.match(r"lesson\.(check_\w+)\(", cell.source)):
            found[f"lesson_{source.name[:2]}.{call[1]}"] = held
        elif role(cell) == "explanation":
            held = ""
    return found


def stored_solutions() -> dict[str, str]:
    """The solutions of all lessons, as stored for the checks."""
    return json.loads(SOLUTIONS.read_text()) if SOLUTIONS.is_file() else {}


def address() -> str:
    """The repository's address, from pyproject.toml."""
    return tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["urls"][
        "Repository"
    ]


def colab(source: Path) -> Notebook:
    """The student's version with a first code cell that installs flowrl."""
    notebook = student(source)
    notebook.cells.insert(1, nbformat.v4.new_code_cell(SETUP.format(address=address())))
    return finish(notebook, source.stem)


def with_outputs(source: Path) -> Notebook:
    """The student's version with stored outputs, so that the figures are there before anything has
    run: not of exercises and checks, nor of the cells up to the next heading after a prediction,
    which show what is to be predicted.
    """
    notebook, stored = student(source), HERE / f"{source.stem}.ipynb"
    cells = nbformat.read(stored, as_version=4).cells if stored.is_file() else []
    outputs = {cell.source: cell.outputs for cell in cells if cell.cell_type == "code"}
    predicted = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and re.search(r"^#+ ", cell.source, re.MULTILINE):
            predicted = "kind: prediction" in cell.source
        shown = role(cell) is None and "lesson.check" not in cell.source and not predicted
        if cell.cell_type == "code" and shown:
            cell.outputs = deepcopy(outputs.get(cell.source, []))
    return finish(notebook, source.stem)


BEGINNINGS = {"student": with_outputs, "colab": colab}
"""The versions that begin without answers, by folder."""


def execute(notebook: Notebook, name: str, checks: str = "strict") -> float:
    """Run a notebook in place; returns the CPU seconds of its process. Exits if a cell fails; with
    strict checks also if a check does.
    """
    environment = os.environ | {
        "FLOWRL_COURSE": checks,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
    }
    notebook.cells.append(nbformat.v4.new_code_cell("import time\nprint(time.process_time())"))
    options = {
        "timeout": 5 * LIMIT_SECONDS,
        "kernel_name": "python3",
        "resources": {"metadata": {"path": str(HERE)}},
    }
    try:
        NotebookClient(notebook, extra_arguments=[SHARP], **options).execute(env=environment)
    except CellExecutionError as error:
        raise SystemExit(f"{name}: a cell failed\n{error}") from None
    seconds = float(notebook.cells.pop().outputs[0].text)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in _merged(cell.outputs) if o.get("name") != "stderr"]
            for data in (
                output.data for output in cell.outputs if "image/png" in output.get("data", {})
            ):
                data["image/png"] = in_palette(data["image/png"])
    finish(notebook, name)
    return seconds


def in_palette(png: str) -> str:
    """A figure, a PNG file in base64, in 256 colours: a third of the size, with errors of at most
    6% of a channel.
    """
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        small = image.convert("RGB").quantize(
            256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    file = io.BytesIO()
    small.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _merged(outputs: list[Notebook]) -> list[Notebook]:
    """Adjacent pieces of one stream joined: where a stream is cut depends on timing."""
    merged: list[Notebook] = []
    for output in outputs:
        if (
            merged
            and output.output_type == "stream" == merged[-1].output_type
            and output.name == merged[-1].name
        ):
            merged[-1].text += output.text
        else:
            merged.append(deepcopy(output))
    return merged


def text_of(cell: Notebook) -> str:
    """What a cell printed or returned, as text; images as one word each."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            parts.append(output.text)
        else:
            data = output.get("data", {})
            parts.append(
                "<image>"
                if any(kind.startswith("image/") for kind in data)
                else str(data.get("text/plain", ""))
            )
    return "\n".join(parts)


def differs(expected: str, output: str) -> str | None:
    """How an output differs from the expected one; None if it does not.

    The texts must be equal except for white space. A number must be inside its range if `expected`
    gives one as `low..high`. Otherwise integers must be equal, and other numbers and percentages
    within `TOLERANCE` (relative) or a unit of the last digit.
    """
    wanted, got = (
        list(re.finditer(f"{RANGE}|{NUMBER}", expected)),
        list(re.finditer(NUMBER, output)),
    )
    if re.sub(f"{RANGE}|{NUMBER}", "#", expected).split() != re.sub(NUMBER, "#", output).split():
        return f"text {expected[:200]!r} became {output[:200]!r}"
    for a, b in zip(wanted, got, strict=True):
        low, high = _limits(a[0], percent=expected[a.end() : a.end() + 1] == "%")
        if not low <= _value(b[0]) <= high:
            line = output[output.rfind("\n", 0, b.start()) + 1 :].partition("\n")[0]
            return f"{b[0]} instead of {a[0]} in the line {line.strip()!r}"
    return None


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _limits(expected: str, percent: bool) -> tuple[float, float]:
    """The lowest and the highest number that agree with an expected number or range."""
    if ".." in expected:
        low, high = expected.split("..")
        return _value(low), _value(high)
    value, (mantissa, _, exponent) = _value(expected), expected.partition("e")
    decimals = len(mantissa.partition(".")[2])
    exact = not decimals and not exponent and not percent
    unit = 10.0 ** (int(exponent or 0) - decimals)
    allowed = 0.0 if exact else 1.001 * max(unit, TOLERANCE * abs(value))
    return value - allowed, value + allowed


def unexpected(name: str, notebook: Notebook, expected: list[str | None]) -> list[str]:
    """The outputs of a notebook that differ from their cell's expected output."""
    pairs = [
        (cell, text)
        for cell, text in zip(notebook.cells, expected, strict=True)
        if text is not None
    ]
    differing = [(cell, differs(text, text_of(cell))) for cell, text in pairs]
    return [
        f"{name}, cell {cell.id}: unexpected output: {problem}"
        for cell, problem in differing
        if problem
    ]


def stale(stored: Path, fresh: Notebook, expected: list[str | None]) -> list[str]:
    """What is out of date in the stored version with solutions; `fresh` is that version executed
    now.
    """
    if not stored.is_file():
        return [f"{stored.name} does not exist"]
    old = nbformat.read(stored, as_version=4)
    if [c.source for c in old.cells] != [c.source for c in fresh.cells]:
        return [f"{stored.name} was not built from the present source"]
    outdated = unexpected(f"{stored.name} as stored", old, expected)
    for before, after, text in zip(old.cells, fresh.cells, expected, strict=True):
        if text is None and "varies" not in before.metadata.get("tags", []):
            problem = differs(text_of(before), text_of(after))
            if problem:
                outdated.append(f"{stored.name}, cell {before.id}: output is stale: {problem}")
    return outdated


def write_solutions(lessons: list[Path]) -> None:
    """Replace the solutions of some lessons among the stored ones."""
    prefixes = tuple(f"lesson_{source.name[:2]}." for source in lessons)
    kept = {key: code for key, code in stored_solutions().items() if not key.startswith(prefixes)}
    for source in lessons:
        kept |= solutions(source)
    SOLUTIONS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def write_beginnings(source: Path) -> None:
    """Write the versions without answers."""
    for folder, version in BEGINNINGS.items():
        (HERE / folder).mkdir(exist_ok=True)
        (HERE / folder / f"{source.stem}.ipynb").write_text(nbformat.writes(version(source)))


def stale_beginnings(source: Path) -> list[str]:
    """Which of the versions without answers, or solutions, do not match the source."""
    differing = solutions(source).items() - stored_solutions().items()
    stored = {folder: HERE / folder / f"{source.stem}.ipynb" for folder in BEGINNINGS}
    return [
        f"{SOLUTIONS.name} does not have the present solution of {key}"
        for key, _ in sorted(differing)
    ] + [
        f"{folder}/{path.name} was not built from the present source"
        for folder, path in stored.items()
        if not path.is_file() or path.read_text() != nbformat.writes(BEGINNINGS[folder](source))
    ]


def retext(source: Path) -> None:
    """Write all versions with the stored outputs; exits if a code cell differs from the stored
    one.
    """
    notebook, target = solved(source), HERE / f"{source.stem}.ipynb"
    stored = [
        cell for cell in nbformat.read(target, as_version=4).cells if cell.cell_type == "code"
    ]
    for new, old in zip_longest(
        [cell for cell in notebook.cells if cell.cell_type == "code"], stored
    ):
        if new is None or old is None or new.source != old.source:
            raise SystemExit(
                f"{source.name}: a code cell changed, so execute the"
                f" lesson:\n{(new or old).source[:200]}"
            )
        new.outputs = old.outputs
    target.write_text(nbformat.writes(finish(notebook, source.stem)))
    write_beginnings(source)


def build(source: Path, check: bool) -> tuple[str, list[str]]:
    """Build or check one lesson; returns its line for the table and its problems."""
    notebook, expected = solved(source), expected_outputs(source)
    exercises = sum(role(cell) == "exercise" for cell in read(source).cells)
    seconds = execute(notebook, source.stem)
    problems = unexpected(source.name, notebook, expected)
    target = HERE / f"{source.stem}.ipynb"
    size = len(nbformat.writes(notebook).encode())
    if seconds > LIMIT_SECONDS:
        problems.append(
            f"{source.stem} computes for {seconds:.0f} s; at most {LIMIT_SECONDS} are allowed"
        )
    if size > LIMIT_BYTES:
        problems.append(f"{target.name} has {size:,} bytes; at most {LIMIT_BYTES:,} are allowed")
    if exercises < 3:
        problems.append(f"{source.stem} has {exercises} exercises; at least 3 are needed")
    if check:
        problems += stale(target, notebook, expected) + stale_beginnings(source)
        execute(student(source), f"{source.stem} without answers", checks="shown")
    else:
        target.write_text(nbformat.writes(notebook))
        write_beginnings(source)
    return (
        f"{source.stem:<28} {seconds:6.0f} s {exercises:4d} exercises {size / 1000:7.0f} kB",
        problems,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Build the notebooks of the course, or check that they are up to date."
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="lessons by the beginning of their names, such as 01 04",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if a notebook or an output is stale",
    )
    parser.add_argument(
        "--students",
        action="store_true",
        help="write the versions without answers only; execute nothing",
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="write all versions with the stored outputs; fails if code changed",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="lessons executed at a time (one thread each)"
    )
    options = parser.parse_args()
    lessons = sources(options.only)
    if not options.check:
        write_solutions(lessons)
    if options.students or options.text:
        for source in lessons:
            (retext if options.text else write_beginnings)(source)
        return
    problems: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for line, wrong in pool.map(lambda source: build(source, options.check), lessons):
            print(line, flush=True)
            problems += wrong
    for problem in problems:
        print(f"STALE OR WRONG: {problem}", file=sys.stderr)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
