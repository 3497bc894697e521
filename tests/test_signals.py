"""Ctrl-C, SIGTERM and SIGHUP while Python imports, around the last line of a command, and until its
process ends; readers of the output that end before the command.
"""

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from functools import partial
from unittest.mock import Mock

import psutil
import pytest
from loading import ROOT
from small_run import MIXTURE, TINY_RUN, rows_of

from flowrl.cli.main import main
from flowrl.compare.arms import method_arms
from flowrl.compare.comparison import CompareConfig
from flowrl.run.checkpoint import Checkpoints
from flowrl.run.signals import (
    APART,
    STOPPING,
    ignore_stops,
    on_repeated_stop,
    on_stop,
    same_handlers,
)

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs signals"),
    pytest.mark.usefixtures("hangup"),
]

CONFIG = TINY_RUN.replace(iterations=2)
OPTIONS = f"{MIXTURE} --iterations 2".split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULE, _, FUNCTION = PROJECT["scripts"]["flowrl"].partition(":")
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
UNDER_NOHUP = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
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


def outcomes(*commands, **settings):
    """Output, errors and exit codes of Python with these arguments, run side by side."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
    processes = [subprocess.Popen([sys.executable, *words], **options) for words in commands]
    return [(*process.communicate(timeout=120), process.returncode) for process in processes]


@pytest.mark.parametrize("start", [CONSOLE, AS_MODULE], ids=["console script", "python -m"])
def test_an_interrupt_while_flowrl_imports_is_one_line(start):
    modules = ("flowrl.run.signals", "flowrl.cli.main", "pydantic", "tyro", "flowrl.cli.lookup")
    scripts = [["-c", INTERRUPT.format(name) + start] for name in modules]
    for name, outcome in zip(modules, outcomes(*scripts), strict=True):
        assert outcome == ("", "flowrl: interrupted\n", 130), name


def test_a_command_that_is_complete_ends_with_its_own_exit_code():
    """Also if a thread of a user's part keeps the process from ending: there the signal ends it at
    once, but not SIGHUP under nohup.
    """
    scripts = [
        ["-c", script.format(int(number), "time.sleep(200)") + CONSOLE]
        for script in (AT_EXIT, IN_A_THREAD)
        for number in STOPPING
    ]
    wait = IN_A_THREAD.format(int(signal.SIGHUP), "print('went on')") + CONSOLE
    for shown, errors, code in (ends := outcomes(*scripts, ["-c", UNDER_NOHUP + wait])):
        assert (shown.startswith("flowrl 0."), errors, code) == (True, "", 0)
    went_on = [shown.endswith("went on\n") for shown, _, _ in ends]
    assert went_on == [False] * len(scripts) + [True]


def test_a_run_under_nohup_is_not_stopped_by_a_closed_terminal():
    stops = "from flowrl.run.signals import on_stop\nwith on_stop(print):\n"
    code = f"import os\n{UNDER_NOHUP}\n{stops}    os.kill(os.getpid(), signal.SIGHUP)"
    assert outcomes(["-c", code]) == [("", "", 0)]


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_command_whose_reader_has_ended_is_silent(unbuffered):
    """The exit code is that of SIGPIPE, but an error keeps its own."""
    read, write = os.pipe()
    os.close(read)
    commands = [["-m", "flowrl", *words] for words in (["--help"], ["parts"], ["bench", "--help"])]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    assert outcomes(*commands, stdout=write, env=env) == [(None, "", 141)] * 3
    failed = outcomes(["-c", FAILS], stdout=write, env=env)
    assert failed == [(None, "flowrl: error: wrong\n", 2)]
    os.close(write)


def test_a_closed_output_is_no_error_but_another_broken_pipe_is(tmp_path, capsys, monkeypatch):
    command = [sys.executable, "-m", "flowrl", "parts"]
    shell = ["sh", "-c", '"$@" >&-', "sh", *command]
    done = subprocess.run(shell, stderr=subprocess.PIPE, check=True)
    assert done.stderr == b""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for error, line in (
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "unexpected error: BrokenPipeError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 GB"), "error: out of memory"),
    ):
        monkeypatch.setattr("flowrl.cli.main.run_command", Mock(side_effect=error))
        assert main(["parts"]) == 1 and capsys.readouterr().err.startswith(f"flowrl: {line}")


class Signalling(io.StringIO):
    """Standard output; `number` arrives as soon as a line with `text` is there."""

    text, number = "", 0

    def write(self, text):
        count = super().write(text)
        if self.text in text:
            signal.raise_signal(self.number)
        return count


@pytest.fixture
def shown_with(monkeypatch):
    """Exit code and output lines of a command at which a signal arrives when it prints a text; the
    handlers must be as before.
    """

    def run(text, number, *command):
        before, out = [signal.getsignal(each) for each in STOPPING], Signalling()
        out.text, out.number = text, number
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            code = main(command)
        assert [signal.getsignal(each) for each in STOPPING] == before
        return code, out.getvalue().splitlines()

    return run


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("text", ["Comparing", "Writing the report", "Finished", "Paused"])
def test_a_comparison_pauses_until_its_last_line_and_is_then_complete(
    text, number, tmp_path, monkeypatch, shown_with
):
    (tmp_path / "config.json").write_text("{}")
    compared = CompareConfig(CONFIG, method_arms(("flow-grpo",)), (0,))
    # the report first: its module imports the other names
    monkeypatch.setattr("flowrl.compare.report.write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("flowrl.compare.comparison.load_compare", lambda path, trust: compared)
    monkeypatch.setattr("flowrl.compare.comparison.compare", lambda *_, **__: text != "Paused")
    monkeypatch.setattr("flowrl.compare.results.load_comparison", lambda folder: None)
    monkeypatch.setattr("flowrl.compare.results.summarise", lambda comparison: [])
    code, lines = shown_with(text, number, "compare", "--resume", str(tmp_path))
    if text == "Finished":
        assert code == 0 and lines[-1].startswith("Finished in ")
    else:
        command = f"flowrl compare --resume {tmp_path}"
        assert (code, lines[-1]) == (130, f"Paused; nothing is lost. Continue with: {command}")
    assert sum(line.startswith(("Paused", "Finished")) for line in lines) == 1


def test_a_comparison_that_is_stopped_before_its_first_run_does_not_say_how_to_resume(
    tmp_path, shown_with
):
    out = tmp_path / "out"
    code, lines = shown_with("Comparing", signal.SIGTERM, "compare", *OPTIONS, "--out", str(out))
    assert (code, lines[-1]) == (130, "Stopped before the first run; nothing was written.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("text", ["iteration   1", "iteration   2", "Proxy", "Done", "Paused"])
def test_a_training_pauses_until_its_last_iteration_and_then_ends_as_usual(
    text, number, tmp_path, monkeypatch, shown_with
):
    monkeypatch.setattr("flowrl.run.report.card.finish_run", lambda folder: ["Proxy"])
    if text == "Paused":
        monkeypatch.setattr("flowrl.run.job.Run.execute", lambda *_: False)
    out = tmp_path / "out"
    code, lines = shown_with(text, number, "train", *OPTIONS, "--out", str(out))
    if text in ("iteration   1", "Paused"):
        command = f"flowrl train --resume {out}"
        assert (code, lines[-1]) == (130, f"Paused; nothing is lost. Continue with: {command}")
    else:
        assert code == 0 and (out / "done.json").exists()
        assert lines[-1].startswith("Done. Weights and metrics in")


HANGS = """
import ctypes, re, time
def locked():
    lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    while True: library.pthread_mutex_lock(lock)
WAYS = {
    "in Python": lambda: time.sleep(3600),
    "with the lock of Python": lambda: re.match("(a+)+$", 60 * "a" + "b"),
    "outside Python": locked,
}
def count(part, limit):
    part.calls += 1
    if part.calls == limit:
        print("HANGS", flush=True)
        WAYS["CHOSEN"]()
class Score:
    calls = 0
    def score(self, images, prompts):
        count(Score, 20)
        return images.flatten(1).mean(1)
class Heldout(Score):
    score = lambda self, images, prompts: count(Heldout, 5) or images.flatten(1).mean(1)
class Load(Score):
    load = lambda self: count(Load, 1)
class Pool(Score):
    on_cpu = True
    score = lambda self, images, prompts: count(Pool, 15) or images.flatten(1).mean(1)
class Watch:
    fields, calls = (), 0
    observe = lambda self, record: count(Watch, 3)
"""
PLACES = {
    "score": "--reward {}:Score",
    "pool": "--reward {}:Pool --overlap-rewards true --chunk 1",
    "load": "--reward {}:Load",
    "held-out reward": "--heldout-rewards {}:Heldout",
    "observer": "--observe {}:Watch",
}
ELSEWHERE = [pytest.param(place, "in Python", marks=pytest.mark.slow) for place in [*PLACES][2:]]


@pytest.mark.satellite
@pytest.mark.parametrize(
    ("place", "way"),
    [
        ("score", "outside Python"),
        pytest.param("score", "with the lock of Python", marks=pytest.mark.slow),
        pytest.param("pool", "with the lock of Python", marks=pytest.mark.slow),
        *ELSEWHERE,
    ],
)
def test_a_second_signal_ends_a_part_that_hangs(place, way, tmp_path):
    """The first one has saved the last complete iteration, and no process is left."""
    file, out = tmp_path / "hangs.py", tmp_path / "out"
    file.write_text(HANGS.replace("CHOSEN", way))
    options = f"{MIXTURE} --iterations 40 {PLACES[place].format(file)} --out {out}".split()
    command = [sys.executable, "-u", "-m", "flowrl", "train", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert "HANGS\n" in iter(process.stdout.readline, "")
        time.sleep(0.2)  # until the part waits
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline().startswith("Stopping after this iteration")
        time.sleep(APART + 0.2)
        saved, started = Checkpoints(out).newest, time.monotonic()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        killer = threading.Timer(20, process.kill)
        killer.start()
        shown = process.communicate()[0]
        killer.cancel()
        assert (process.returncode, time.monotonic() - started < 5) == (130, True)
    assert not psutil.wait_procs(children, timeout=5)[1]
    if place == "load":
        assert "Load.load did not return. There is no checkpoint yet." in shown
        return
    iteration = rows_of(out)[-1]["iteration"]
    assert iteration % 10 and saved == f"{iteration:06d}"
    assert Checkpoints(out).load(saved).values["done"] == iteration
    assert f"did not return. Checkpoint {saved} is kept. Continue with: flowrl train" in shown


def test_signals_that_a_launcher_repeats_count_once():
    counts = list[str]()
    actions = [partial(counts.append, name) for name in ("save", "leave")]
    with on_stop(lambda _: None), on_repeated_stop(*actions):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.05)
    assert counts == ["save"]


def test_stops_stay_ignored_after_a_block_but_not_after_main():
    before, caught = signal.getsignal(signal.SIGTERM), []
    with on_stop(caught.append):
        signal.raise_signal(signal.SIGTERM)
    assert caught == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before
    with same_handlers():
        with on_stop(caught.append):
            ignore_stops()
        signal.raise_signal(signal.SIGTERM)
    assert len(caught) == 1 and signal.getsignal(signal.SIGTERM) is before
