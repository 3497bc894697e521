"""Killed at twelve moments and resumed, a run and a comparison end with the same numbers."""

import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from small_run import numbers

pytestmark = pytest.mark.slow

SIZE = [
    "--preset",
    "tiny",
    "--world",
    "mixture",
    "--iterations",
    "12",
    "--eval-every",
    "2",
    "--checkpoint-every",
    "2",
]
COMMANDS = {
    "train": ["train", *SIZE],
    "compare": ["compare", *SIZE, "--seeds", "0", "1", "--workers", "2"],
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ENDS = {signal.SIGKILL: -9, signal.SIGTERM: 130, signal.SIGINT: 130}


def start(words):
    command = [sys.executable, "-m", "flowrl", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def runs(command, out):
    return [out] if command == "train" else sorted((out / "runs").iterdir())


@cache
def undisturbed(command, folder):
    """Seconds of the command, and the numbers of its runs."""
    out, began = Path(folder) / f"{command}-whole", time.monotonic()
    process = start([*COMMANDS[command], "--out", str(out)])
    assert process.wait(300) == 0, process.stderr.read()
    return time.monotonic() - began, [numbers(run) for run in runs(command, out)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("moment", range(6))
@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_command_resumes_to_the_same_numbers(command, moment, folder, tmp_path):
    """Killed at (moment + 2) / 8 of the undisturbed time, by each signal in turn. A command that was
    faster has ended; one that had not begun is started again.
    """
    seconds, expected = undisturbed(command, folder)
    out, number = tmp_path / "out", SIGNALS[moment % 3]
    process = start([*COMMANDS[command], "--out", str(out)])
    time.sleep(seconds * (moment + 2) / 8)
    process.send_signal(number)
    code, error = process.wait(60), process.stderr.read()
    assert code in (0, ENDS[number], -number), error
    if code:
        begun = (out / "config.json").exists()
        again = (
            [command, "--resume", str(out)] if begun else [*COMMANDS[command], "--out", str(out)]
        )
        process = start(again)
        assert process.wait(300) == 0, process.stderr.read()
    assert [numbers(run) for run in runs(command, out)] == expected
