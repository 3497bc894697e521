"""What commands import before they do anything: counted, not timed."""

import json
import subprocess
import sys

import pytest

from flowrl.cli.main import COMMANDS, plugins

HEAVY = {"torch", "diffusers", "transformers", "peft", "accelerate", "jaxtyping", "matplotlib"}
HEAVY |= {"numpy", "scipy", "pandas"}
CODE = """
import contextlib, io, json, sys
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    from flowrl.cli.main import main
    main(sys.argv[1:])
print(json.dumps([len(shown.getvalue()), list(sys.modules)]))
"""
OURS = [name for name, point in plugins().items() if point.value.startswith("flowrl")]
LINES = [
    "",
    "--version",
    "env",
    "parts",
    "presets",
    "presets sd3.5-medium,tp-grpo,ocr,exact --yaml",
]
LINES += ["prompts check --file prompts.txt", *(f"{name} --help" for name in [*COMMANDS, *OURS])]


def heavy(line, folder):
    """The heavy packages that a command imports, which must print something."""
    (folder / "prompts.txt").write_text("a cat\n")
    command = [sys.executable, "-c", CODE, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    length, modules = json.loads(done.stdout)
    assert length > 10, done.stderr
    return HEAVY & set(modules)


@pytest.mark.parametrize("line", LINES)
def test_what_prints_and_ends_imports_nothing_heavy(line, tmp_path):
    assert heavy(line, tmp_path) == set()


def test_the_count_finds_what_is_imported(tmp_path):
    assert {"torch", "numpy", "jaxtyping"} <= heavy("parts --kind sampler", tmp_path)
