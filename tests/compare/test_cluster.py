"""Jobs on a Dask cluster of two local worker processes: the numbers of the local pool, lost
workers, pauses, and what is refused.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import worker_jobs
from bench_lines import small_run
from distributed import LocalCluster
from small_run import TINY_RUN

from flowrl.bench.digest import config_id
from flowrl.bench.results_file import ResultsFile
from flowrl.bench.suite import Suite
from flowrl.compare import CompareConfig, compare
from flowrl.compare.comparison import _run_job
from flowrl.core.errors import ConfigError
from flowrl.run import cluster
from flowrl.run.jobs import run_jobs
from flowrl.run.parts.plugins import versions
from flowrl.run.workers import Worker, begin_worker


@pytest.fixture(scope="module")
def dask():
    options = dict(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with LocalCluster(**options, env={"PYTHONPATH": os.pathsep.join(sys.path)}) as workers:
        yield workers


def kill_a_worker(dask):
    os.kill(dask.workers[0].pid, signal.SIGKILL)


@pytest.mark.parametrize("plain", [False, True])
def test_results_and_messages_arrive_and_errors_have_their_words(dask, plain):
    """Also on an executor of `concurrent.futures` without a connection."""
    pool = dask.scheduler_address
    if plain:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(2, context, initializer=begin_worker)
    worker_jobs.described(pool)
    for kind, error in worker_jobs.ERRORS.items():
        worker_jobs.first_error(pool, kind, error, alone=plain)


def test_a_pause_passes_on_results_and_withdraws_what_waits(dask):
    results, started = {}, []

    def received(key, message):
        started.append(key)
        if len(started) == 2:
            signal.raise_signal(signal.SIGINT)

    named = dict(finished=results.__setitem__, received=received)
    jobs = dict.fromkeys("abcd", ())
    assert not run_jobs(worker_jobs.until_stopped, jobs, dask.scheduler_address, **named)
    assert results == dict.fromkeys(started, "stopped") and len(started) == 2


def test_jobs_that_wait_in_a_queue_are_withdrawn_when_the_time_is_up():
    class Queue(Executor):
        def submit(self, *call):
            return Future()

    results = {}
    named = dict(finished=results.__setitem__, seconds=0.1)
    assert not run_jobs(worker_jobs.describe, {"a": (1,)}, Queue(), **named) and results == {}


def test_jobs_end_with_a_killed_parent(dask, tmp_path):
    where = f"{tmp_path},{dask.scheduler_address}"
    parent = subprocess.Popen([sys.executable, worker_jobs.__file__, "cluster", where])
    for name, seconds in (("started", 60), ("ended", 30)):  # the job would take 60 s
        deadline = time.monotonic() + seconds
        while not (tmp_path / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.02)
        parent.kill()
        parent.wait()


def test_a_killed_worker_costs_one_repetition_and_no_line(dask, tmp_path):
    runs = {config_id(run): run for run in map(small_run, range(4))}
    file, done = ResultsFile(tmp_path / "runs.jsonl"), []

    def progress(count, total, line):
        done.append(line["id"])
        if count == 1:
            kill_a_worker(dask)

    assert Suite(runs, file, runs, "flowrl bench").execute(dask.scheduler_address, progress)
    assert sorted(done) == sorted(runs) == sorted(line["id"] for line in file.unchecked())


def test_a_comparison_has_the_bits_of_the_local_pool_also_after_a_loss(dask, tmp_path):
    run = TINY_RUN.replace(iterations=12, checkpoint_every=2, eval_every=6)
    config = CompareConfig(run, {"base": {}, "gspo": {"loss": "gspo"}}, seeds=(0,))
    assert compare(config, tmp_path / "here", workers=1)
    killed = []

    def watch(states):
        if not killed and any(state["iteration"] >= 3 for state in states.values()):
            killed.append(kill_a_worker(dask))

    assert compare(config, tmp_path / "there", workers=dask.scheduler_address, watch=watch)
    assert killed
    for name in config.jobs():
        here, there = (tmp_path / side / "runs" / name for side in ("here", "there"))
        for file in ("weights.safetensors", "samples.safetensors"):
            assert (here / file).read_bytes() == (there / file).read_bytes()


def test_a_folder_that_a_worker_does_not_share_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for out in (tmp_path, tmp_path / "elsewhere"):
        with pytest.raises(ConfigError, match="on a file system that all workers share"):
            _run_job(Worker(None, None), TINY_RUN, out / "runs" / "a", "digest", False, False)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("many", "workers = 'many' is not allowed; allowed: a number of processes, or a Dask"),
        ("none.json", "workers = 'none.json' is not allowed"),
        ("tcp://127.0.0.1:1", "workers = 'tcp://127.0.0.1:1': no scheduler answers"),
    ],
)
def test_schedulers_that_are_refused(scheduler, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "SECONDS", 0.1)
    with pytest.raises(ConfigError, match=message):
        run_jobs(worker_jobs.describe, {"a": (1,)}, scheduler, finished=lambda key, result: None)


@pytest.mark.parametrize(
    ("versions_here", "threads", "began", "message"),
    [
        ({"torch": "1.0"}, 1, 1e12, "has {'torch': .* install the same versions"),
        ({}, 2, 1e12, "has 2 threads; start it with --nthreads 1"),
        ({}, 1, 0.0, "has changed since the start of the Dask worker tcp://w"),
    ],
)
def test_workers_that_are_refused(versions_here, threads, began, message, monkeypatch):
    worker = SimpleNamespace(address="tcp://w", state=SimpleNamespace(nthreads=threads))
    monkeypatch.setattr(cluster, "get_worker", lambda: worker)
    process = SimpleNamespace(create_time=lambda: began)
    monkeypatch.setattr(cluster, "psutil", SimpleNamespace(Process=lambda: process))
    here = ({**versions(), **versions_here}, ".")
    with pytest.raises(ConfigError, match=message):
        cluster._on_worker(here, print, Worker(None, None))


def test_a_job_that_kills_its_workers_is_not_repeated_for_ever(dask):
    error = RuntimeError, "job bad failed: KilledWorker"
    worker_jobs.first_error(dask.scheduler_address, "killed", error, alone=True)
