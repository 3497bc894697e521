"""Run README.md's code blocks in order, each install line in a fresh environment, as its readers
would.

    python .ci/readme.py FOLDER          # FOLDER: new; it gets a clean clone and the environments
    python .ci/readme.py --list          # what would run

Bash blocks run line by line. A Python block whose first line is a comment with a file's name
becomes that file; others are run. A marker above a block changes what CI runs there; at most four
are allowed, and all are printed:

    <!-- ci: skip: REASON -->                    leaves the block out
    <!-- ci: add OPTIONS: REASON -->             appends options to the block's last command
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"((?:^<!-- ci:[^\n]*-->\n)*)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!-- ci: (skip|add ([^:]+)): (\S.*?) -->")
MOST_MARKERS = 4
AIM_MINUTES = 25


@dataclass(frozen=True)
class Block:
    """A code block, the commands that CI runs of it, and the marker above it with its reason."""

    language: str
    text: str
    marker: str = ""
    reason: str = ""

    @property
    def commands(self) -> list[str]:
        """Bash commands, without comments."""
        return [] if self.marker == "skip" else self.all_commands

    @property
    def all_commands(self) -> list[str]:
        """As `commands`, of skipped blocks too."""
        if self.language == "python":
            name = re.match(r"# (\S+\.py)\n", self.text)
            file = name.group(1) if name else "readme_example.py"
            written = f"cat > {file} <<'END_OF_BLOCK'\n{self.text}END_OF_BLOCK"
            return [written] if name else [written, f"python {file}"]
        joined = self.text.replace("\\\n", " ").splitlines()
        lines = [
            line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined) if line
        ]
        if self.marker.startswith("add"):
            lines[-1] += self.marker.removeprefix("add")
        return lines


def blocks(text: str) -> list[Block]:
    """The bash and Python blocks of a page. Raises `ValueError` for a marker that cannot be read or
    stands elsewhere.
    """
    code_blocks = []
    for above, language, body in BLOCK.findall(text):
        markers = MARKER.findall(above)
        if len(markers) != above.count("<!-- ci:") or len(markers) > 1:
            raise ValueError(
                "one marker per block, <!-- ci: skip: REASON --> or <!-- ci: add OPTIONS: REASON"
                f" -->: {above}"
            )
        marker, _, reason = markers[0] if markers else ("", "", "")
        if language in ("bash", "python"):
            code_blocks.append(Block(language, body, marker, reason))
        elif marker:
            raise ValueError(f"a marker above a block that CI does not run: {above}")
    marked = [block for block in code_blocks if block.marker]
    if len(marked) != text.count("<!-- ci:"):
        raise ValueError("a marker `<!-- ci:` does not stand directly above a code block")
    if len(marked) > MOST_MARKERS:
        raise ValueError(
            f"{len(marked)} blocks are reduced or skipped; at most {MOST_MARKERS} are allowed"
        )
    return code_blocks


def describe(code_blocks: list[Block]) -> str:
    """What is skipped or reduced, with the reasons."""
    lines = [
        f"  {command}\n    {block.marker}: {block.reason}"
        for block in code_blocks
        if block.marker
        for command in (block.all_commands if block.marker == "skip" else block.commands[-1:])
    ]
    return "\n".join(["skipped or reduced:", *(lines or ["  nothing"])])


def run(command: str, folder: Path, environment: Path) -> float:
    """Run a bash command in `folder` with the programs of `environment`; its seconds. Raises
    `SystemExit` if it fails.
    """
    print(f"== README: {command.splitlines()[0]}", flush=True)
    variables = {
        **{
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        },
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    began = time.monotonic()
    status = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, stdin=subprocess.DEVNULL, check=False
    ).returncode
    if status:
        raise SystemExit(f"README: exit status {status}: {command}")
    return time.monotonic() - began


def main() -> None:
    """Run all blocks, or list them."""
    code_blocks = blocks((ROOT / "README.md").read_text())
    print(describe(code_blocks), flush=True)
    if sys.argv[1:] == ["--list"]:
        print("\n".join(command for block in code_blocks for command in block.commands))
        return
    work = Path(sys.argv[1]).resolve()
    clone, environments = work / "clone", 0
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    seconds: dict[str, float] = {}
    for command in (command for block in code_blocks for command in block.commands):
        if "pip install" in command:
            environments += 1
            subprocess.run(
                [sys.executable, "-m", "venv", str(work / f"environment-{environments}")],
                check=True,
            )
        if not environments:
            raise SystemExit(f"README: a command before the first install line: {command}")
        seconds[command.splitlines()[0]] = run(command, clone, work / f"environment-{environments}")
    print("seconds of the README's commands:")
    for command, spent in seconds.items():
        print(f"  {spent:6.0f}  {command}")
    total = sum(seconds.values()) / 60
    print(f"  {total:6.1f} minutes in all (aim: at most {AIM_MINUTES} on 2 free cores)")


if __name__ == "__main__":
    main()
