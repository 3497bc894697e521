"""Some of the kills of benchmarks/kills.py."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from kills import missed, tried
from kills_subject import Kill, Subject, session

from flowrl.io import folder_lock

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "ways", "codes"),
    [
        (
            "train",
            [("checkpoint", "SIGKILL", "process"), ("evaluation", "SIGTERM", "group")],
            [-signal.SIGKILL, 130],
        ),
        ("compare", [("evaluation", "SIGHUP", "group"), ("report", "SIGTERM", "process")], None),
    ],
)
def test_a_command_that_is_killed_twice_ends_with_the_same_numbers(command, ways, codes, tmp_path):
    kills = [Kill(command, *way) for way in ways]
    results = tried({command: kills}, tmp_path, 0)
    assert [result.kill for result in results] == kills and not missed(kills, results)
    assert all(not result.problems and result.resumed_the_same for result in results), results
    assert codes is None or [result.code for result in results] == codes


CHILD = """
import sys, time
for _ in range(400):
    with open(sys.argv[1], "a") as file:
        file.write("x")
    time.sleep(0.02)
"""
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])"


def test_the_judge_sees_orphans_and_second_writers(tmp_path, monkeypatch):
    monkeypatch.setattr("kills_subject.GONE", 0.5)
    out = tmp_path / "out"
    out.mkdir()
    subject = Subject("train", out, random.Random(0))
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(out / "metrics.jsonl")], start_new_session=True
    )
    try:
        process.wait(30)
        assert len(session(process.pid)) == 1
        time.sleep(0.2)
        assert subject.second_writers(process.pid) == [
            "1 orphans",
            "out was written without its lock",
        ]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    with folder_lock(out):
        assert subject.second_writers(process.pid) == ["out is still locked"]
