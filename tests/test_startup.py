"""What commands import before they do anything: counted, not timed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli.main import COMMANDS, plugins

HEAVY = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "jaxtyping",
    "matplotlib",
    "numpy",
    "scipy",
    "pandas",
)
CODE = """
import contextlib, io, json, sys
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    from flowrl.cli.main import main
    main(sys.argv[2:])
print(json.dumps([len(shown.getvalue()), [name for name in json.loads(sys.argv[1]) if name in sys.modules]]))
"""
OURS = [name for name, point in plugins().items() if point.value.startswith("flowrl")]


def imported(*words: str) -> list[str]:
    """The heavy packages that a command imports, which must print something."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(HEAVY), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    length, found = json.loads(done.stdout)
    assert length > 10, done.stderr
    return found


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--help",
        "--version",
        "env",
        "parts",
        "presets",
        "presets sd3.5-medium,tp-grpo,ocr,exact --yaml",
    ],
)
def test_what_prints_and_ends_imports_nothing_heavy(line: str) -> None:
    assert imported(*line.split()) == []


@pytest.mark.parametrize("name", [*COMMANDS, *OURS])
def test_the_help_of_every_command_imports_nothing_heavy(name: str) -> None:
    assert imported(name, "--help") == []


def test_checking_prompts_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n")
    assert imported("prompts", "check", "--file", str(tmp_path / "prompts.txt")) == []


def test_the_count_finds_what_is_imported() -> None:
    assert {"torch", "numpy", "jaxtyping"} <= set(imported("parts", "--kind", "sampler"))
