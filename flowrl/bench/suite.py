"""Parallel runs with one line of the results file each; runs in the file are not repeated. Studies
search for settings first, and report the time that is left.
"""

import json
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.bench.arms import world_label
from flowrl.bench.digest import config_id
from flowrl.bench.evidence import column
from flowrl.bench.measurements import CURVE, measure
from flowrl.bench.results_file import (
    ResultsFile,
    make_line,
    require_same_code,
    require_unchanged,
    run_in_words,
    stamp,
)
from flowrl.bench.tune import Search, tune
from flowrl.core.errors import ConfigError
from flowrl.core.options import Workers
from flowrl.run.config import RunConfig
from flowrl.run.costs import COUNTS
from flowrl.run.io import file_lock
from flowrl.run.jobs import run_jobs
from flowrl.run.parts.trust import trust_option
from flowrl.run.workers import Worker, worker_count

Progress = Callable[[int, int, Mapping[str, Any]], None]
"""Called with (runs in the file, all runs, the line of the run that has just finished)."""
BATCH = 8
"""Most runs of a process, which warms up for a second or two; workers of a cluster stay warm."""


@dataclass(frozen=True)
class Suite:
    """Runs by id, and the file they go to. `allowed`: the runs that the file may hold; `command`
    names the lock's holder.
    """

    runs: Mapping[str, RunConfig]
    file: ResultsFile
    allowed: Mapping[str, Any]
    command: str

    def execute(self, workers: Workers = 0, progress: Progress | None = None) -> bool:
        """Compute the missing runs, low seeds first; False if paused.

        Ctrl-C stops immediately: finished runs are in the file, and the next call repeats the
        interrupted ones. Raises the `FlowrlError` of a run that failed, after the others have
        stopped; also if the code changed during a run, or another process writes the file.
        """
        with file_lock(self.file.path, self.command):
            done = self.file.read(self.allowed)
            missing = {key: config for key, config in self.runs.items() if key not in done}
            if not missing:
                return True
            in_file = len(self.runs) - len(missing)

            def received(keys: tuple[str, ...], line: dict[str, Any]) -> None:
                nonlocal in_file
                self.file.append(line)
                in_file += 1
                if progress:
                    progress(in_file, len(self.runs), line)

            made = stamp()
            ordered = sorted(missing, key=lambda key: missing[key].seed)
            size = 1
            if isinstance(workers, int):  # two batches per process, or more
                size = max(1, min(BATCH, len(missing) // (2 * worker_count(workers, len(missing)))))
            batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
            jobs = {
                tuple(keys): ([(missing[k], k, self.redo_command(k)) for k in keys], made)
                for keys in batches
            }
            run_jobs(
                _run,
                jobs,
                workers,
                finished=lambda keys, _: None,
                received=received,
                describe=lambda keys: f"the run {run_in_words(self.runs[keys[0]])}",
            )
            return in_file == len(self.runs)

    def redo_command(self, key: str) -> str:
        """The command that repeats a run from its line, in the current folder if the file is below
        it; other paths that it names must lead to the same files.
        """
        path = self.file.path.resolve()
        with suppress(ValueError):
            path = path.relative_to(Path.cwd())
        words = ["flowrl", "bench", "redo", key, "--out", str(path)]
        option = trust_option(self.runs[key].flat()) if key in self.runs else ""
        return shlex.join(words) + option


def make_missing(
    runs: Mapping[str, RunConfig],
    file: ResultsFile,
    command: str,
    workers: Workers,
    label: Callable[[str], str],
    say: Callable[[str], None],
) -> bool:
    """Make those of `runs`, by id, that the file lacks, and say each one's `label` with the time
    left; False if Ctrl-C paused it. Other lines of the file stay.
    """
    known = file.read()
    pace = Pace(len(runs.keys() - known.keys()))
    if pace.missing:
        say(f"{pace.missing} runs remain ({file.path}); press Ctrl-C to pause")

    def finished(done: int, count: int, line: Mapping[str, Any]) -> None:
        say(f"{done}/{count} {label(line['id'])}; {pace.finished()}")

    allowed = {**dict.fromkeys(known), **runs}
    return Suite(runs, file, allowed, command).execute(workers, finished)


def _run(
    worker: Worker,
    batch: Sequence[tuple[RunConfig, str, str]],
    made: dict[str, Any],
) -> None:
    """Send a line per run, given with its id and command, until a pause."""
    require_same_code(made["code"])
    sent = {line["id"] for line in worker.sent}
    for config, key, command in batch:
        if key in sent:
            continue
        if (measured := measure(config, worker.stopped, lenient=True)) is None:
            return
        require_unchanged(config, key, made["code"])
        worker.send(make_line(config, measured, command, key, made))


@dataclass
class Pace:
    """Jobs that are `missing` when the work begins."""

    missing: int
    done: int = 0

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    def finished(self) -> str:
        """Count a job; the time that the others need, in words."""
        self.done += 1
        per_job = (time.monotonic() - self._started) / self.done
        return f"about {duration(per_job * (self.missing - self.done))} left"


def duration(seconds: float) -> str:
    """ "40 seconds", "12 minutes" or "3.5 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def execute_study(
    searches: Sequence[Search],
    tuning: ResultsFile,
    runs: Callable[[], Iterable[tuple[str, RunConfig | None]]],
    results: ResultsFile,
    command: str,
    workers: Workers,
    say: Callable[[str], None],
) -> bool:
    """Make the missing runs of the searches, then those of `runs`, and report each with the time
    left; False if Ctrl-C paused it.

    `runs` has a label for every run, and None in place of a run whose search is not finished.
    """
    lines, known = tuning.unchecked(), results.read()
    searching = sum(search.budget - len(search.scores(lines)) for search in searches)
    waiting = sum(run is None or config_id(run) not in known for _, run in runs())
    if not searching and not waiting:
        return True
    folder, total = results.path.parent, sum(search.budget for search in searches)
    say(f"{searching + waiting} runs remain (results: {folder}); press Ctrl-C to pause")
    pace = Pace(searching + waiting)

    def searched(line: Mapping[str, Any], done: int) -> None:
        values = ", ".join(f"{knob.replace('_', ' ')} {v:g}" for knob, v in line["values"].items())
        run = f"{world_label(line['world'])}, {line['arm']}, {values}, seed {line['seed']}"
        say(f"search {done}/{total} {run}: {line['score']:.3f}; {pace.finished()}")

    if searching and not tune(searches, tuning.path, command, workers, searched):
        return False
    named = {config_id(run): (label, run) for label, run in runs() if run is not None}

    def finished(done: int, count: int, line: Mapping[str, Any]) -> None:
        say(f"{done}/{count} {named[line['id']][0]}, seed {line['seed']}; {pace.finished()}")

    made = {key: run for key, (_, run) in named.items()}
    allowed = {**{line.get("id", ""): None for line in results.unchecked()}, **made}
    return Suite(made, results, allowed, command).execute(workers, finished)


EARLY, ROUNDING, TOLERANCE = 0.25, 1e-3, 0.05
"""A repeated run is the same run on another processor if the first quarter of its evaluations
agrees to `ROUNDING` and the last one to `TOLERANCE`: rounding errors grow in training. Between an
AMD EPYC and an Intel Xeon the final reward of 30 runs in the 2-D world differed by 0.016 (root mean
square; Flow-GRPO 0.0003, Stepwise-Flow-GRPO 0.027, TP-GRPO 0.0055), of one by more than 0.05.
"""


COUNTED = (*COUNTS, "calls", "trajectories")


@dataclass(frozen=True)
class Repeat:
    """A repeated run: the numbers that differ (seconds do not count), the largest difference,
    infinite for a non-number, the largest difference in reward of the first quarter of the
    evaluations, and that of the last.
    """

    differing: tuple[str, ...]
    largest: float
    early: float
    final: float
    counts: bool = True
    """Whether the numbers of evaluations and calls agree, which no rounding changes."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differing

    @property
    def close(self) -> bool:
        """Whether another processor's rounding explains the differences."""
        return self.counts and self.early <= ROUNDING and self.final <= TOLERANCE


def redo(key: str, file: ResultsFile) -> Repeat:
    """Repeat the run of the line with id `key` with the current code, and compare all that was
    measured.

    `ConfigError`: no such line.
    """
    lines = file.read(any_code=True)
    if key not in lines:
        raise ConfigError(f"redo = {key!r} is not allowed; allowed: an id in {file.path}")
    repeated = json.loads(json.dumps(measure(file.settings(lines[key]))))
    old, new = _named({name: lines[key].get(name, ...) for name in repeated}), _named(repeated)
    differences = dict(_differences(old, new))
    early, final = gaps(column(lines[key], "soft"), column(repeated, "soft"))
    counts = not any(name.rpartition(".")[2] in COUNTED for name in differences)
    return Repeat(tuple(differences), max(differences.values(), default=0.0), early, final, counts)


def gaps(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """The largest difference of two curves of rewards in the first quarter of the evaluations, and
    that of the last one.
    """
    each = [abs(a - b) for a, b in zip(old, new, strict=False)] or [math.inf]
    return max(each[: max(1, round(EARLY * len(each)))]), each[-1]


def _named(run: dict[str, Any]) -> dict[str, Any]:
    """A run's numbers with the curve's columns by name."""
    return {**run, "curve": [dict(zip(CURVE, row, strict=False)) for row in run["curve"]]}


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(name, size) of the differences between two nested structures of numbers, except seconds. NaN
    equals NaN only.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            if name not in ("seconds", "phases"):
                yield from _differences(
                    old.get(name, ...), new.get(name, ...), f"{path}.{name}".lstrip(".")
                )
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(a, b, f"{path}[{index}]")
    elif isinstance(old, int | float) and isinstance(new, int | float):
        if old != new and not (math.isnan(old) and math.isnan(new)):
            size = abs(old - new)
            yield path, math.inf if math.isnan(size) else size
    elif old != new:
        yield path, math.inf
