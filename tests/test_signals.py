"""Ctrl-C, SIGTERM and SIGHUP while Python imports, around the last line of a command, and until its
process ends.

Readers of the output that end before the command.
"""

import errno
import io
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flowrl.cli.main import main
from flowrl.signals import STOPPING, ignore_stops, on_stop
from flowrl.training.arms import method_arms
from flowrl.training.compare import CompareConfig
from flowrl.training.config import preset

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs signals"),
    pytest.mark.usefixtures("hangup"),
]

CONFIG = preset("tiny").apply(world="mixture", task="direction")
OPTIONS = ["--preset", "tiny", "--world", "mixture", "--task", "direction"]
MODULE, _, FUNCTION = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())[
    "project"
]["scripts"]["flowrl"].partition(":")
CONSOLE = f"from {MODULE} import {FUNCTION}\nsys.exit({FUNCTION}())"
AS_MODULE = "import runpy\nrunpy.run_module('flowrl', run_name='__main__', alter_sys=True)"
INTERRUPT = """
import signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["flowrl", "env"]
"""


def python(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("start", [CONSOLE, AS_MODULE], ids=["console script", "python -m"])
def test_an_interrupt_while_flowrl_imports_is_one_line(start: str) -> None:
    modules = (
        "flowrl.signals",
        "flowrl.cli.main",
        "flowrl.parts.settings",
        "pydantic",
        "tyro",
        "flowrl.cli.env",
    )
    processes = {name: python(INTERRUPT.format(name) + start) for name in modules}
    for name, process in processes.items():
        assert (*process.communicate(timeout=120), process.returncode) == (
            "",
            "flowrl: interrupted\n",
            130,
        ), name


AT_EXIT = """
import atexit, signal, sys
atexit.register(signal.raise_signal, {})
sys.argv = ["flowrl", "--version"]
"""
IN_A_THREAD = """
import os, signal, sys, threading, time
def wait():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    time.sleep(0.2)  # until the main thread waits for this one
    os.kill(os.getpid(), {})
    {}
threading.Thread(target=wait).start()
sys.argv = ["flowrl", "--version"]
"""


def test_a_command_that_is_complete_ends_with_its_own_exit_code() -> None:
    """Also if a thread of a user's part keeps the process from ending: there the signal ends it at
    once.
    """
    scripts = [
        script.format(int(number), "time.sleep(200)") + CONSOLE
        for script in (AT_EXIT, IN_A_THREAD)
        for number in STOPPING
    ]
    for script, process in {script: python(script) for script in scripts}.items():
        shown, errors = process.communicate(timeout=120)
        assert (shown.startswith("flowrl 0."), errors, process.returncode) == (True, "", 0), script


@pytest.mark.parametrize(("number", "shown"), [("SIGHUP", "went on\n"), ("SIGTERM", "")])
def test_under_nohup_a_hangup_does_not_end_a_wait_for_threads(number: str, shown: str) -> None:
    start = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
    wait = "time.sleep(1); print('went on')"
    process = python(start + IN_A_THREAD.format(int(getattr(signal, number)), wait) + CONSOLE)
    out, errors = process.communicate(timeout=120)
    assert (out.partition("\n")[2], errors, process.returncode) == (shown, "", 0)


def test_under_nohup_a_hangup_stops_no_block() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    caught: list[int] = []
    with on_stop(caught.append):
        signal.raise_signal(signal.SIGHUP)
    assert caught == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def without_reader(*words: str, **settings: Any) -> subprocess.Popen[str]:
    """Python with the arguments `words`, in a pipe whose reader has ended."""
    read, write = os.pipe()
    os.close(read)
    options = {"stdout": write, "stderr": subprocess.PIPE, "text": True, **settings}
    process = subprocess.Popen([sys.executable, *words], **options)
    os.close(write)
    return process


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_command_whose_reader_has_ended_is_silent(unbuffered: str) -> None:
    """The exit code is that of SIGPIPE; tyro exits after a help text, the other commands return."""
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    commands = [["--help"], ["parts"], ["bench", "--help"]]
    processes = [without_reader("-m", "flowrl", *words, env=env) for words in commands]
    for words, process in zip(commands, processes, strict=True):
        assert (*process.communicate(timeout=120), process.returncode) == (None, "", 141), words


FAILS = f"""
import sys
import flowrl.cli.main
from flowrl.core.errors import ConfigError
def fail(arguments):
    try:
        raise ConfigError("wrong")
    finally:
        print("some output", flush=True)
flowrl.cli.main.run_command = fail
{CONSOLE}"""


def test_an_error_without_a_reader_keeps_its_message_and_exit_code() -> None:
    process = without_reader("-c", FAILS)
    assert (process.communicate(timeout=120)[1], process.returncode) == (
        "flowrl: error: wrong\n",
        2,
    )
    process = without_reader("-c", FAILS, stderr=subprocess.STDOUT)
    assert process.wait(120) == 2


def test_another_broken_pipe_is_an_error(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lost = BrokenPipeError(errno.EPIPE, "Broken pipe")
    monkeypatch.setattr("flowrl.cli.main.run_command", Mock(side_effect=lost))
    assert main(["parts"]) == 1
    assert capsys.readouterr().err.startswith("flowrl: unexpected error: BrokenPipeError")


def test_a_closed_output_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m flowrl parts >&-"
    process = subprocess.run(command, shell=True, stderr=subprocess.PIPE)
    assert (process.stderr, process.returncode) == (b"", 0)


class Signalling(io.StringIO):
    """Standard output; `number` arrives as soon as a line with `text` is there."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__()
        self.text, self.number = text, number

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.text in text:
            signal.raise_signal(self.number)
        return count


def shown_with(text: str, number: int, command: list[str], monkeypatch) -> tuple[int, str]:
    """Exit code and output of a command at which `number` arrives; the handlers must be as
    before.
    """
    before, out = [signal.getsignal(each) for each in STOPPING], Signalling(text, number)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        code = main(command)
    assert [signal.getsignal(each) for each in STOPPING] == before
    return code, out.getvalue()


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("text", ["Comparing", "Writing the report", "Finished", "Paused"])
def test_a_comparison_pauses_until_its_last_line_and_is_then_complete(
    text: str, number: int, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    compared = CompareConfig(CONFIG, method_arms(("flow-grpo",)), (0,))
    # the report first: its module imports the other names
    monkeypatch.setattr("flowrl.cli.report.write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("flowrl.training.compare.load_compare", lambda path, trust: compared)
    monkeypatch.setattr("flowrl.training.compare.compare", lambda *_, **__: text != "Paused")
    monkeypatch.setattr("flowrl.training.results.load_comparison", lambda folder: None)
    monkeypatch.setattr("flowrl.training.results.summarise", lambda comparison: [])
    code, shown = shown_with(text, number, ["compare", "--resume", str(out)], monkeypatch)
    last = shown.splitlines()[-1]
    if text == "Finished":
        assert (code, last.partition(" in ")[0]) == (0, "Finished") and last.endswith("report.html")
    else:
        assert (code, last) == (
            130,
            f"Paused; nothing is lost. Go on with: flowrl compare --resume {out}",
        )
    assert sum(line.startswith(("Paused", "Finished")) for line in shown.splitlines()) == 1


def test_a_comparison_that_is_stopped_before_its_first_run_does_not_say_how_to_resume(
    tmp_path, monkeypatch
) -> None:
    command = ["compare", *OPTIONS, "--out", str(tmp_path / "out")]
    code, shown = shown_with("Comparing", signal.SIGTERM, command, monkeypatch)
    assert (code, shown.splitlines()[-1]) == (
        130,
        "Stopped before the first run; nothing was written.",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("text", ["iteration   2", "Proxy and held-out", "Done"])
def test_a_training_whose_last_iteration_is_done_ends_as_usual(
    text: str, number: int, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("flowrl.cli.runs._draw_proxy", lambda out: out / "proxy.png")
    command = ["train", *OPTIONS, "--iterations", "2", "--out", str(tmp_path / "out")]
    code, shown = shown_with(text, number, command, monkeypatch)
    assert code == 0 and (tmp_path / "out" / "done.json").exists()
    assert shown.splitlines()[-1].startswith("Done. Weights and metrics in")


@pytest.mark.parametrize("text", ["iteration   1", "Paused"])
def test_the_line_before_is_a_pause(text: str, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    if text == "Paused":
        monkeypatch.setattr("flowrl.training.run.Run.execute", lambda *_: False)
    command = ["train", *OPTIONS, "--iterations", "2", "--out", str(out)]
    code, shown = shown_with(text, signal.SIGINT, command, monkeypatch)
    assert (code, shown.splitlines()[-1]) == (
        130,
        f"Paused; nothing is lost. Go on with: flowrl train --resume {out}",
    )


def test_stops_stay_ignored_after_a_block_but_not_after_main() -> None:
    before, caught = signal.getsignal(signal.SIGTERM), []
    with on_stop(caught.append):
        signal.raise_signal(signal.SIGTERM)
    assert caught == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before
    try:
        with on_stop(caught.append):
            ignore_stops()
        signal.raise_signal(signal.SIGTERM)
        assert len(caught) == 1
    finally:
        for number, handler in zip(
            STOPPING, (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL), strict=True
        ):
            signal.signal(number, handler)
