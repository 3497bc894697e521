"""Parallel runs with one line of the results file each; runs in the file are not repeated."""

import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl_compare.costs import COUNTS

from flowrl.core.errors import ConfigError
from flowrl.core.options import Workers
from flowrl.io import file_lock, write_json
from flowrl.parts.trust import trust_option
from flowrl.reading import read_json
from flowrl.training.config import RunConfig
from flowrl.workers import Worker, run_jobs
from flowrl_bench.arms import TASKS
from flowrl_bench.claims import Arm, Claim, make_run
from flowrl_bench.digest import code_digest, config_id
from flowrl_bench.evidence import Evidence, column
from flowrl_bench.measurements import CURVE, measure, observe_run, peak_memory
from flowrl_bench.results_file import (
    OWN_RULES,
    Lines,
    ResultsFile,
    SamplesFile,
    make_line,
    provenance,
    require_same_code,
    require_unchanged,
    stamp,
)
from flowrl_bench.verdicts import FEWEST

Progress = Callable[[int, int, Mapping[str, Any]], None]
"""Called with (runs in the file, all runs, the line of the run that has just finished)."""
BATCH = 8
"""Runs of a process, which takes a second or two to warm up; workers of a cluster remain warm."""
QUICK_QUESTIONS = ("random-points", "increments-alone", "point-density")
"""Open questions of the quick suite, which has all claims."""


def quick(claims: Mapping[str, Claim]) -> dict[str, Claim]:
    """The claims of the quick suite: the papers' claims and `QUICK_QUESTIONS`."""
    return {key: claim for key, claim in claims.items() if not claim.asks or key in QUICK_QUESTIONS}


def needed(
    claims: Mapping[str, Claim], world: str, seeds: Mapping[str, tuple[int, ...]]
) -> dict[str, RunConfig]:
    """All runs that the claims need, by id; a run that several claims share appears once. `world`:
    its name, or "all".
    """
    runs: dict[str, RunConfig] = {}
    for claim in claims.values():
        for name in claim.worlds:
            if world in ("all", name):
                for _, _, _, config in claim.configs(name, seeds[name]):
                    runs.setdefault(config_id(config), config)
    return runs


def needed_samples(
    claims: Mapping[str, Claim], seeds: Mapping[str, tuple[int, ...]]
) -> dict[str, RunConfig]:
    """The runs whose stochastic samples decide a claim, by id."""
    runs = {}
    for claim in claims.values():
        for arm, _, _, config in claim.configs("mixture", seeds["mixture"]):
            if arm in claim.samples:
                runs[config_id(config)] = config
    return runs


def describe(config: RunConfig) -> str:
    """A run in words."""
    return f"the run {config.algorithm.method} (seed {config.seed}, {config.environment.world})"


@dataclass(frozen=True)
class Suite:
    """Runs by id, and the file they go to. `allowed`: the runs that the file may hold; `command`
    names the lock's holder.
    """

    runs: Mapping[str, RunConfig]
    file: ResultsFile
    allowed: Mapping[str, Any]
    command: str = "flowrl bench claims"

    def execute(
        self, workers: Workers = 0, progress: Progress | None = None, minutes: float = math.inf
    ) -> bool:
        """Compute the missing runs, low seeds first; False if paused.

        Ctrl-C stops immediately: finished runs are in the file, and the next call repeats the
        interrupted ones. After `minutes` no run is started, and the current ones are finished.
        Raises the `FlowrlError` of a run that failed, after the others have stopped; also if the
        code changed during a run, or another process writes the file.
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

            made, deadline = stamp(), time.time() + 60 * minutes
            ordered = sorted(missing, key=lambda key: missing[key].seed)
            size = BATCH if isinstance(workers, int) else 1
            batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
            jobs = {
                tuple(keys): ([(missing[k], k, self.redo_command(k)) for k in keys], made, deadline)
                for keys in batches
            }
            run_jobs(
                _run,
                jobs,
                workers,
                finished=lambda keys, _: None,
                received=received,
                seconds=60 * minutes,
                describe=lambda keys: describe(self.runs[keys[0]]),
            )
            return in_file == len(self.runs)

    def redo_command(self, key: str) -> str:
        """The command that repeats a run from its line, if the paths that it names lead to the same
        files.
        """
        words = ["flowrl", "bench", "claims", "--out", str(self.file.path), "--redo", key]
        option = trust_option(self.runs[key].flat(), OWN_RULES) if key in self.runs else ""
        return shlex.join(words) + option


def _run(
    worker: Worker,
    batch: Sequence[tuple[RunConfig, str, str]],
    made: dict[str, Any],
    deadline: float,
) -> None:
    """Send a line per run, given with its id and command, until the deadline or a pause."""
    require_same_code(made["code"])
    sent = {line["id"] for line in worker.sent}
    for config, key, command in batch:
        if key in sent:
            continue
        if time.time() >= deadline:
            return
        if (measured := measure(config, worker.stopped, lenient=True)) is None:
            return
        require_unchanged(config, key, made["code"])
        worker.send(make_line(config, measured, command, key, made))


def complete_samples(
    file: SamplesFile,
    runs: Mapping[str, RunConfig],
    workers: Workers,
    progress: Callable[[int, int], None],
) -> bool:
    """Observe the runs that are missing in the file; False if it was paused."""
    if not runs:
        return True
    with file_lock(file.path, "samples of flowrl bench claims"):
        rows = file.read()
        missing = {key: (config,) for key, config in runs.items() if key not in rows}
        total = len(rows) + len(missing)

        def finished(key: str, row: dict[str, Any]) -> None:
            rows[key] = row
            file.write(rows)
            progress(len(rows), total)

        return not missing or run_jobs(
            observe_run,
            missing,
            workers,
            finished=finished,
            describe=lambda key: describe(runs[key]),
        )


def arm_memory(worlds: Sequence[str], arms: Mapping[str, Arm]) -> list[dict[str, Any]]:
    """Peak memory in MiB per world and arm, one process after the other."""
    runs = {
        (world, name): make_run(world, TASKS[world][0], 0, changes)
        for world in worlds
        for name, changes in arms.items()
    }
    return [
        {"world": world, "arm": name, "peak_mib": peak_memory(config)}
        for (world, name), config in runs.items()
    ]


@dataclass(frozen=True)
class _Memory:
    rows: list[dict[str, Any]]
    code: str = ""


def kept_memory(path: Path, arms: Mapping[str, Arm] | None, code: str = "") -> list[dict[str, Any]]:
    """The peak memory rows in the file at `path`; if it is missing or of other code, those of
    `arms`, measured now, if given.

    `code`: the digest that the file must have; default: that of this code.
    """
    if path.exists():
        stored: _Memory = read_json(path, _Memory)
        if stored.code == (code or code_digest()):
            return stored.rows
    if arms is None:
        return []
    rows = arm_memory(list(TASKS), arms)
    write_json(path, {"code": code_digest(), **provenance(), "rows": rows})
    return rows


@dataclass(frozen=True)
class Runs:
    """The runs of a claim in a world by arm, task and seed."""

    lines: Mapping[str, Mapping[str, Mapping[int, Mapping[str, Any]]]]

    def evidence(self, arms: Sequence[str] = ()) -> Evidence | None:
        """The seeds that all tasks of the `arms` (default: all arms) have; None for fewer than
        `FEWEST`.
        """
        chosen = {arm: self.lines[arm] for arm in arms or self.lines}
        cells = [cell for tasks in chosen.values() for cell in tasks.values()]
        seeds = tuple(sorted(set.intersection(*(set(cell) for cell in cells))))
        if len(seeds) < FEWEST:
            return None
        runs = {
            arm: {task: [cell[s] for s in seeds] for task, cell in tasks.items()}
            for arm, tasks in chosen.items()
        }
        return Evidence(runs, seeds)


def claim_runs(claim: Claim, world: str, lines: Lines, seeds: tuple[int, ...]) -> Runs:
    """The claim's finished runs in a world (with samples, if it needs them)."""
    runs: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {arm: {} for arm in claim.arms}
    for arm, task, seed, config in claim.configs(world, seeds):
        line = lines.get(config_id(config))
        cell = runs[arm].setdefault(task, {})
        if line is not None and ("samples" in line or arm not in claim.samples):
            cell[seed] = line
    return Runs(runs)


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
    differences = dict(_differences(old, _known(old, new)))
    pairs = zip(column(lines[key], "soft"), column(repeated, "soft"), strict=False)
    gaps = [abs(old - new) for old, new in pairs] or [math.inf]
    early = max(gaps[: max(1, round(EARLY * len(gaps)))])
    counts = not any(name.rpartition(".")[2] in COUNTED for name in differences)
    return Repeat(
        tuple(differences), max(differences.values(), default=0.0), early, gaps[-1], counts
    )


def _named(run: dict[str, Any]) -> dict[str, Any]:
    """A run's numbers with the curve's columns by name."""
    return {**run, "curve": [dict(zip(CURVE, row, strict=False)) for row in run["curve"]]}


def _known(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` without the counts that lines of older versions lack."""
    first = old["curve"][0] if old["curve"] else {}
    curve = [
        {n: v for n, v in row.items() if n in first or n not in COUNTS} for row in new["curve"]
    ]
    totals = {n: v for n, v in new["totals"].items() if n in old["totals"] or n not in COUNTS}
    return {**new, "curve": curve, "totals": totals}


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
