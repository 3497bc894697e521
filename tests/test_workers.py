"""Worker processes: results, messages, Ctrl-C, errors, and how many there are."""

import os
import signal
import subprocess
import sys
import time

import pytest
import worker_jobs

from flowrl.core.errors import ConfigError
from flowrl.run.io import folder_lock
from flowrl.run.jobs import run_jobs
from flowrl.run.workers import MOST_WORKERS, usable_cores, worker_count


def test_results_and_messages_arrive_and_workers_have_one_thread():
    assert os.getpid() not in {result["process"] for result in worker_jobs.described(2).values()}


KILLED = RuntimeError, "the process of job bad was killed"


@pytest.mark.parametrize(("kind", "error"), {**worker_jobs.ERRORS, "killed": KILLED}.items())
def test_the_first_error_stops_all_jobs(kind, error):
    started = time.monotonic()
    worker_jobs.first_error(2, kind, error)
    assert time.monotonic() - started < 50


@pytest.mark.satellite
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers start anew")
def test_workers_are_forks_of_a_process_that_has_imported_the_modules():
    done = outcome("preload", "")
    assert done.stdout.split() == ["True", "True", "True"], done.stderr[-2000:]


def outcome(*words):
    """Of worker_jobs.py as a program with its own process group."""
    command = [sys.executable, worker_jobs.__file__, *words]
    named = dict(capture_output=True, text=True, timeout=300, start_new_session=True)
    return subprocess.run(command, **named)


@pytest.mark.satellite
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_killed_parent_and_leave_its_locks_free(tmp_path):
    process = subprocess.Popen([sys.executable, worker_jobs.__file__, "lock", str(tmp_path)])
    try:
        deadline = time.monotonic() + 120
        while len(workers := list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert len(workers) == 2 and worker_jobs.have_ended(*(file.stem for file in workers))
    with folder_lock(tmp_path):
        pass


def test_an_interrupt_in_a_callback_pauses_and_keeps_results():
    def interrupt(key, message):
        signal.raise_signal(signal.SIGINT)

    results = {}
    named = dict(finished=results.__setitem__, received=interrupt)
    assert not run_jobs(worker_jobs.until_stopped, {"a": (), "b": ()}, 1, **named)
    assert results == {"a": "stopped"}


@pytest.mark.satellite
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_an_interrupt_while_workers_start_is_a_pause():
    """Its job starts and is stopped at once, or does not start."""
    done = outcome("interrupt", "0.01")
    assert done.stdout.strip() in ("False {}", "False {'a': 'stopped'}"), done.stdout
    assert "Traceback" not in done.stderr, done.stderr[-2000:]


def test_no_job_starts_after_the_time_is_up():
    results = {}
    named = dict(finished=results.__setitem__, seconds=0)
    assert not run_jobs(worker_jobs.describe, {"a": (1,)}, 1, **named) and results == {}


def test_how_many():
    assert worker_count(0, 100) == min(usable_cores(), MOST_WORKERS)
    assert worker_count(3, 2) == 2 and worker_count(1, 0) == 1
    with pytest.raises(ConfigError, match="workers = -1 is not allowed; allowed: 1 or more, or 0"):
        worker_count(-1, 3)


AFFINITY = 6


def cores(tmp_path, monkeypatch, cgroup, files):
    """`usable_cores` of a process in these control groups, with an affinity of 6 cores."""
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: set(range(AFFINITY)), raising=False
    )
    (tmp_path / "cgroup").write_text(cgroup)
    for name, content in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(content)
    return usable_cores(tmp_path / "cgroup", tmp_path / "mounted")


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {}, AFFINITY),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, AFFINITY),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "10000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "900000 100000\n"}, AFFINITY),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "150000 50000\n"}, 3),
        # a container: the own group is what is mounted
        ("0::/a/b\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "what is this\n"}, AFFINITY),
    ],
)
def test_cores_are_those_of_affinity_and_quota(cgroup, files, expected, tmp_path, monkeypatch):
    assert cores(tmp_path, monkeypatch, cgroup, files) == expected


def test_cores_without_control_groups_or_affinity(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores(tmp_path / "none", tmp_path) == 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path / "none", tmp_path) == 1
