"""Makes the 2-D numbers and settings of the pages about papers, and the numbers of the first result,
again, by the command on each page.

    python benchmarks/documented.py            # a few minutes; rewrites what differs
    python benchmarks/documented.py --check    # changes nothing; exit status 1 if a number differs

Runs `flowrl compare --world mixture --seeds 0 1 2` with the methods of all pages at once: a
method's numbers do not depend on the methods compared with it. They depend on the kind of processor
(docs/papers/index.md).
"""

import argparse
import dataclasses
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowrl.compare.command import Compare
from flowrl.compare.report import result_blocks
from flowrl.compare.results import ArmSummary, load_comparison, summarise
from flowrl.run.presets import of_method

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = re.compile(
    r"^flowrl compare --world mixture --methods (?P<methods>[\w -]+) --seeds 0 1 2$", re.MULTILINE
)
SENTENCE = re.compile(
    r"raises the held-out reward from .+? network evaluations per trajectory .+? for the update",
    re.DOTALL,
)
SETTINGS = re.compile(r"^# two dimensions.*$", re.MULTILINE)
"""The comment above the command."""
ROW = re.compile(r"^\| (?P<method>[\w-]+) \| \d.*\|$", re.MULTILINE)
FIRST_RESULT = ("final reward", "minus the baseline", "cost until equal", "collapsed seeds")
"""Columns of the table in docs/start/first-result.md."""


def sentence(summary: ArmSummary) -> str:
    """The result of a method, as the page of its paper states it."""
    collapsed = f"{summary.collapsed} of {summary.seeds} runs" if summary.collapsed else "no run"
    return (
        f"raises the held-out reward from {summary.base.mean:.3f} to {summary.final.text()} (mean"
        f" and half of the 95% interval, {summary.seeds} seeds; lowest seed {summary.worst:.3f};"
        f" {collapsed} collapsed)\nwith {summary.nfe_per_trajectory:.1f} network evaluations per"
        f" trajectory for sampling and probes and {summary.train_nfe_per_trajectory:.1f} for the"
        " update"
    )


def settings() -> dict[str, str]:
    """By method, the comment above its command: the settings that the command gives the method."""
    usual = Compare.defaults(["--world", "mixture"])
    compared = dataclasses.replace(usual, methods=tuple(methods())).configuration()
    comments = dict[str, str]()
    for method, given in compared.arms.items():
        source = "tuned" if of_method("mixture", method) else "not tuned, as flow-grpo"
        values = ", ".join(f"{name}={value}" for name, value in given.items() if name != "method")
        comments[method] = f"# two dimensions, {source}: {values}"
    return comments


def methods() -> list[str]:
    """The methods of all pages; flow-grpo first."""
    return [*dict.fromkeys(["flow-grpo", *papers().values()])]


def papers() -> dict[Path, str]:
    """The method of every page that has the command: the last one that the command names."""
    commands = {
        page: COMMAND.search(page.read_text()) for page in sorted((DOCS / "papers").glob("*.md"))
    }
    return {page: command["methods"].split()[-1] for page, command in commands.items() if command}


def renewed(summaries: Mapping[str, ArmSummary]) -> dict[Path, str]:
    """Every page with the numbers of `summaries`."""
    comments = settings()
    pages = {
        page: SETTINGS.sub(
            lambda _, method=method: comments[method],
            SENTENCE.sub(sentence(summaries[method]), page.read_text()),
        )
        for page, method in papers().items()
    }
    first = DOCS / "start" / "first-result.md"
    names = [*map(str, dict.fromkeys(match["method"] for match in ROW.finditer(first.read_text())))]
    columns = dict(
        column
        for block in result_blocks([summaries[name] for name in names]).values()
        for column in block
    )
    cells = {
        name: [columns[column][number] for column in FIRST_RESULT]
        for number, name in enumerate(names)
    }
    pages[first] = ROW.sub(
        lambda row: _row([row["method"], *cells[row["method"]]]), first.read_text()
    )
    return pages


def _row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def main() -> int:
    """Run the comparison and compare or rewrite the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, print what differs")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/comparison"
        seeds = ["--seeds", "0", "1", "2"]
        command = ["compare", "--world", "mixture", "--methods", *methods(), *seeds, "--out", out]
        subprocess.run([sys.executable, "-m", "flowrl", *command], check=True)
        summaries = {summary.arm: summary for summary in summarise(load_comparison(Path(out)))}
    changed = {page: text for page, text in renewed(summaries).items() if text != page.read_text()}
    for page, text in changed.items():
        for old, new in zip(page.read_text().splitlines(), text.splitlines(), strict=True):
            if old != new:
                print(f"{page.relative_to(DOCS)}\n- {old}\n+ {new}")
        if not check:
            page.write_text(text)
    print(f"{len(papers()) + 1} pages: {len(changed)} differ")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
