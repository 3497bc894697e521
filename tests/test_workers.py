"""Worker processes: results, messages, Ctrl-C, errors, and how many there are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import worker_jobs

from flowrl.errors import ConfigError
from flowrl.workers import MOST_WORKERS, run_jobs, worker_count


def ignore(*_) -> None:
    pass


def test_results_and_messages_arrive_and_workers_have_one_thread() -> None:
    messages, found, calls = [], {}, []
    jobs = {"a": (1,), "b": (2,), "c": (3,)}

    def received(key: str, message: str) -> None:
        messages.append((key, len(message), key in found))

    completed = run_jobs(
        worker_jobs.describe, jobs, 2, finished=found.__setitem__, received=received, watch=lambda: calls.append(len(found))
    )
    assert completed and {key: value["argument"] for key, value in found.items()} == {"a": 1, "b": 2, "c": 3}
    assert {value["threads"] for value in found.values()} == {1}
    assert os.getpid() not in {value["process"] for value in found.values()}
    assert sorted(messages) == [(key, length, False) for key in jobs for length in (7, 200_000)]  # all before the results
    assert calls[-1] == 3


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("flowrl", ConfigError, "^the job's own words$"),
        ("other", RuntimeError, r"job bad failed: ValueError\('what went wrong'\)"),
        ("killed", RuntimeError, "was killed .* while these jobs ran: job long, job bad"),
    ],
)
def test_the_first_error_stops_all_jobs(kind: str, error: type, message: str) -> None:
    """The other job would take a minute."""
    started = time.monotonic()
    jobs = {"long": ("none",), "bad": (kind,), "never": ("none",)}
    with pytest.raises(error, match=message):
        run_jobs(worker_jobs.fail, jobs, 2, finished=ignore, describe=lambda key: f"job {key}")
    assert time.monotonic() - started < 50


def test_an_interrupt_in_a_callback_pauses_and_keeps_results() -> None:
    def interrupt(key: str, message: str) -> None:
        raise KeyboardInterrupt

    found = {}
    assert not run_jobs(worker_jobs.until_stopped, {"a": (), "b": ()}, 1, finished=found.__setitem__, received=interrupt)
    assert found == {"a": "stopped"}


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_an_interrupt_while_workers_start_is_a_pause() -> None:
    """0.2 s after the process exists, the worker is importing torch; the job then never starts."""
    words = [sys.executable, str(Path(worker_jobs.__file__)), "0.2"]
    found = subprocess.run(words, capture_output=True, text=True, start_new_session=True, timeout=300)
    assert found.stdout.strip() == "False {} worker_jobs.py" and "Traceback" not in found.stderr, found.stderr[-2000:]


def test_no_job_starts_after_the_time_is_up() -> None:
    found = {}
    assert not run_jobs(worker_jobs.describe, {"a": (1,)}, 1, finished=found.__setitem__, seconds=0)
    assert found == {}


def test_how_many() -> None:
    assert worker_count(0, 100) == min(os.cpu_count() or 1, MOST_WORKERS) and worker_count(3, 2) == 2 and worker_count(1, 0) == 1
    with pytest.raises(ConfigError, match="workers = -1 is not allowed: 1 or more, or 0"):
        worker_count(-1, 3)
