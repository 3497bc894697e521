"""`flowrl bench record`: an arm's cost until Flow-GRPO's result, on seeds derived from its commit.

An official try runs the arm and the standing record on the same fresh seeds and writes one file.
The quick mode runs several arms on few seeds and ranks them.
"""

import hashlib
import json
import math
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowrl.bench.contest import CONTESTS, Contest
from flowrl.bench.digest import config_id, own_files
from flowrl.bench.evidence import curves, fell
from flowrl.bench.results_file import Lines, ResultsFile, provenance
from flowrl.bench.suite import make_missing
from flowrl.compare.target import CostRatio, Curves, cost_ratio
from flowrl.core.errors import ConfigError, require
from flowrl.core.options import Workers
from flowrl.run.build import check
from flowrl.run.config import RunConfig
from flowrl.run.io import write_bytes
from flowrl.run.parts.trust import require_trust
from flowrl.run.reading import read_bytes, read_json

SEEDS = 10
FIRST_SEED, LAST_SEED = 1_000_000, 2**31
"""Fresh seeds are between them; those of searches and of other results are lower."""
QUICK_SEEDS = (9040, 9041, 9042, 9043)
QUICK_TASKS = {"images": ("compositional", "preference"), "points": ("default", "noise-0.3")}
QUICK_SHARE = 0.5
"""The quick mode has two tasks, among them the hardest to reach, and a share of the budget."""
LEVEL = 0.05
"""Probability that any of an unlimited number of tries that are no cheaper becomes a record."""
Settings = Mapping[str, Any]
Key = tuple[str, str, int]
"""Arm, task and seed of a run."""
Numbers = list[list[float]]
"""Of each seed, a number per evaluation."""


@dataclass(frozen=True)
class Recorded:
    """The runs of an arm in one task: `costs` in seconds of the stated model and held-out
    `rewards`, [seed][evaluation].
    """

    costs: Numbers
    rewards: Numbers

    @property
    def curves(self) -> Curves:
        """The learning curves."""
        return Curves(np.array(self.costs), np.array(self.rewards))

    @property
    def collapsed(self) -> int:
        """The number of runs that fell."""
        return sum(map(fell, self.rewards))


@dataclass(frozen=True)
class Try:
    """A file of an official try, from whose curves everything else about it follows.

    Args:
        format: the format of the file.
        world: a name of `CONTESTS`.
        name: the arm's.
        why: one line on why it is cheap.
        settings: the arm's, in which it differs from the verdict's Flow-GRPO.
        search_runs: runs that the search for these settings took.
        files: SHA-256 of the files of the arm's own parts, by path.
        against: the name of the record that stood.
        against_settings: its settings.
        number: the try's number against this record, from 1.
        date: the day, YYYY-MM-DD.
        commit: the commit that merged the arm's file, of which the seeds are a function.
        seeds: the seeds.
        versions: of Python and the libraries.
        hardware: the processor.
        runs: by task, the arm's runs.
        against_runs: by task, the standing record's runs.
    """

    format: Literal[1]
    world: str
    name: str
    why: str
    settings: dict[str, Any]
    search_runs: int
    files: dict[str, str]
    against: str
    against_settings: dict[str, Any]
    number: int
    date: str
    commit: str
    seeds: list[int]
    versions: dict[str, str]
    hardware: str
    runs: dict[str, Recorded]
    against_runs: dict[str, Recorded]

    @property
    def contest(self) -> Contest:
        """The contest of its world."""
        return CONTESTS[self.world]

    def ratio(self, tasks: Sequence[str] = ()) -> CostRatio:
        """The cost until Flow-GRPO's result over Flow-GRPO's in the verdict, with the interval of
        this arm's seeds; the geometric mean over `tasks`, by default all.
        """
        chosen = {task: self.runs[task].curves for task in tasks or self.runs}
        return over_flow_grpo(self.contest, chosen)

    @property
    def against_ratio(self) -> CostRatio:
        """The cost over that of the standing record on the same seeds, with the two-sided interval
        whose upper end is the one-sided bound at `level`. A record that does not arrive counts as
        arriving at its last evaluation, in its favour.
        """
        pairs, targets = list[tuple[Curves, Curves]](), list[float]()
        for task, runs in self.runs.items():
            target, other = self.contest.targets[task], self.against_runs[task].curves
            ends = np.maximum(other.rewards[:, -1:], target)
            arriving = np.hstack([other.rewards[:, :-1], ends])
            pairs.append((runs.curves, Curves(other.costs, arriving)))
            targets.append(target)
        return cost_ratio(pairs, targets, 1 - 2 * self.level)

    @property
    def before(self) -> str:
        """`against_ratio` in words."""
        arrived = (
            math.isfinite(known.curves.cost(self.contest.targets[task]))
            for task, known in self.against_runs.items()
        )
        bound = "" if all(arrived) else "at most "
        return f"{bound}{self.against_ratio.text()}, {self.against}"

    @property
    def level(self) -> float:
        """Level of the test of the j-th try against a record: 0.05 x 6 / (pi^2 j^2), whose sum over
        all j is 0.05.
        """
        return LEVEL * 6 / (math.pi * self.number) ** 2

    @property
    def collapsed(self) -> tuple[int, int]:
        """The numbers of runs that fell, of the arm and of the standing record."""
        own, other = (
            sum(recorded.collapsed for recorded in runs.values())
            for runs in (self.runs, self.against_runs)
        )
        return own, other

    @property
    def accepted(self) -> bool:
        """Whether it is a record: the upper bound of its cost over that of the standing record is
        below 1, and no more runs fell. `BASELINE` is one by definition.
        """
        own, other = self.collapsed
        return self.name == BASELINE or (self.against_ratio.high < 1 and own <= other)

    @property
    def line(self) -> str:
        """What the command prints."""
        each = ", ".join(f"{task} {self.ratio([task]).text()}" for task in self.runs)
        own, other = self.collapsed
        judged = "a new record" if self.accepted else "no record"
        return (
            f"{self.name}: {self.ratio().text()} of Flow-GRPO's cost ({each});"
            f" over the record before on the same {len(self.seeds)} seeds: {self.before} (try"
            f" {self.number}, level {self.level:.2g});"
            f" runs that collapsed: {own}, of the record's {other}: {judged}"
        )


FLOW_GRPO, BASELINE = "Flow-GRPO of the verdict", "searched Flow-GRPO"
"""The names of what stands before the first record, and of the first record."""


def over_flow_grpo(contest: Contest, arm: Mapping[str, Curves]) -> CostRatio:
    """The cost of an arm, by its curves by task, until Flow-GRPO's result over Flow-GRPO's in the
    verdict: a fixed number, so the interval has the spread of these curves alone.
    """
    pairs, targets = list[tuple[Curves, Curves]](), list[float]()
    for task, own in arm.items():
        target, cost, seeds = contest.targets[task], contest.costs[task], len(own.rewards)
        fixed = Curves(np.tile([0.0, cost], (seeds, 1)), np.tile([0.0, target], (seeds, 1)))
        pairs.append((own, fixed))
        targets.append(target)
    return cost_ratio(pairs, targets)


def read_tries(folder: Path, world: str) -> list[Try]:
    """The tries in FOLDER/WORLD, oldest first: those against the same record are in the order of
    their numbers. `ConfigError`: a file cannot be read, or its record is missing.
    """
    files = sorted((folder / world).glob("*.json"))
    tries = [read_json(path, Try) for path in files]
    ordered, standing = list[Try](), FLOW_GRPO
    while True:
        round_ = sorted((t for t in tries if t.against == standing), key=lambda t: t.number)
        ordered += round_
        accepted = [t for t in round_ if t.accepted]
        if not accepted:
            break
        standing = accepted[-1].name
    lost = sorted({t.name for t in tries} - {t.name for t in ordered})
    require(not lost, "records", lost, "tries against a record that is in the folder, too")
    return ordered


def standing(tries: Sequence[Try]) -> Try | None:
    """The record; None before the first one."""
    return next((t for t in reversed(tries) if t.accepted), None)


def merged(files: Sequence[Path]) -> str:
    """The last commit that changed one of the files. `ConfigError`: they are not in a repository,
    or have changes that are not committed.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(files[0].resolve().parent), *words, "--"]
        paths = [str(path.resolve()) for path in files]
        done = subprocess.run([*command, *paths], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("log", "-1", "--format=%H")
    need = "committed files: the seeds are a function of the commit"
    names = ", ".join(map(str, files))
    require(bool(commit) and not git("status", "--porcelain"), "arm", names, need)
    return commit


def fresh_seeds(commit: str, files: Sequence[Path]) -> tuple[int, ...]:
    """`SEEDS` distinct seeds, a function of the commit and the content of the files alone."""
    digest = hashlib.sha256(commit.encode())
    for path in files:
        digest.update(read_bytes(path))
    seeds, count = dict[int, None](), 0
    while len(seeds) < SEEDS:
        word = hashlib.sha256(digest.digest() + count.to_bytes(4)).digest()
        seeds[FIRST_SEED + int.from_bytes(word[:8]) % (LAST_SEED - FIRST_SEED)] = None
        count += 1
    return tuple(seeds)


def parts_of(contest: Contest, settings: Settings) -> list[Path]:
    """The files of an arm's own parts."""
    return own_files(contest.run(next(iter(contest.tasks)), settings, 0))


def hashes(files: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of files by path."""
    return {path.as_posix(): hashlib.sha256(read_bytes(path)).hexdigest() for path in files}


@dataclass(frozen=True)
class Runner:
    """Makes the runs of arms; those in `folder` are not repeated.

    Args:
        world: a name of `CONTESTS`.
        folder: a file of results per arm.
        command: the command, for messages and the lock.
        workers: number of processes.
        say: called with each line of progress.
    """

    world: str
    folder: Path
    command: str
    workers: Workers = 0
    say: Callable[[str], None] = print

    def run(
        self,
        arms: Mapping[str, Settings],
        seeds: Sequence[int],
        tasks: Sequence[str],
        share: float = 1.0,
    ) -> dict[str, dict[str, Recorded]] | None:
        """The runs by arm and task, with a share of the budget; None if Ctrl-C paused them."""
        contest = CONTESTS[self.world]
        runs: dict[Key, RunConfig] = {
            (arm, task, seed): contest.run(task, settings, seed, share)
            for arm, settings in arms.items()
            for task in tasks
            for seed in seeds
        }
        for arm in arms:  # before the first one
            check(runs[arm, tasks[0], seeds[0]])
        by_id = {config_id(run): (key, run) for key, run in runs.items()}
        made = {key: run for key, (_, run) in by_id.items()}
        name = hashlib.sha256("".join(sorted(made)).encode()).hexdigest()[:8]
        file = ResultsFile(self.folder / f"{self.world}-{name}.jsonl", trust=True)

        def label(key: str) -> str:
            arm, task, seed = by_id[key][0]
            return f"{arm}, {task}, seed {seed}"

        if not make_missing(made, file, self.command, self.workers, label, self.say):
            return None
        lines = file.read()
        return {
            arm: {
                task: recorded(lines, [config_id(runs[arm, task, seed]) for seed in seeds])
                for task in tasks
            }
            for arm in arms
        }


def recorded(lines: Lines, ids: Sequence[str]) -> Recorded:
    """The curves of runs, in six digits."""
    found = curves([lines[key] for key in ids], "stated seconds", "reward")
    costs, rewards = (
        [[float(f"{value:.6g}") for value in row] for row in table.tolist()]
        for table in (found.costs, found.rewards)
    )
    return Recorded(costs, rewards)


def attempt(
    name: str,
    settings: Settings,
    arm_file: Path,
    records: Path,
    runner: Runner,
    why: str,
    search_runs: int,
    trust: bool,
) -> Try | None:
    """An official try; its file is RECORDS/WORLD/NAME.json. None if Ctrl-C paused it.

    `ConfigError`: the arm's files are not committed, the name is taken, or the standing record
    names code that is not trusted or has changed.
    """
    contest, path = CONTESTS[runner.world], records / runner.world / f"{name}.json"
    tries = read_tries(records, runner.world)
    fits = re.fullmatch(r"[\w.,=+-]+( [\w.,=+-]+)*", name) and name != FLOW_GRPO
    require(bool(fits), "arm", name, "a name of letters, digits, spaces and _ . , = + -")
    require(not path.exists(), "arm", name, f"a name that no try has; {path} exists")
    record = standing(tries)
    against, other = (record.name, record.settings) if record else (FLOW_GRPO, {})
    if record:
        require_trust(record.settings, records, trust)
        if hashes(parts_of(contest, record.settings)) != record.files:
            raise ConfigError(f"{', '.join(record.files)} changed since the record {record.name}")
    own = parts_of(contest, settings)
    files = [arm_file, *own]
    commit = merged(files)
    seeds = fresh_seeds(commit, files)
    made = runner.run({name: settings, against: other}, seeds, list(contest.tasks))
    if made is None:
        return None
    number = 1 + sum(t.against == against for t in tries)
    about = provenance()
    done = Try(
        1,
        runner.world,
        name,
        why,
        dict(settings),
        search_runs,
        hashes(own),
        against,
        dict(other),
        number,
        time.strftime("%Y-%m-%d"),
        commit,
        list(seeds),
        about["versions"],
        about["hardware"],
        made[name],
        made[against],
    )
    write_bytes(path, text_of(done).encode())
    return done


def text_of(done: Try) -> str:
    """A try as JSON, with a line per list of numbers."""
    text = json.dumps(done, default=vars, indent=1)
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


def ranked(
    arms: Mapping[str, Settings], records: Path, runner: Runner, whole: bool = False
) -> list[tuple[str, CostRatio, dict[str, CostRatio], int]] | None:
    """The quick mode: of the arms and the standing record, cheapest first, the name, the cost over
    Flow-GRPO's in the verdict, that of each task, and the number of runs that fell; None if Ctrl-C
    paused it. `whole`: on all tasks and with the whole budget.
    """
    contest = CONTESTS[runner.world]
    record = standing(read_tries(records, runner.world))
    beside = {f"{record.name} (the record)": record.settings} if record else {}
    tasks, share = QUICK_TASKS[runner.world], QUICK_SHARE
    if whole:
        tasks, share = tuple(contest.tasks), 1.0
    for settings in arms.values():  # before the first run
        check(contest.run(tasks[0], settings, 0))
    rows = list[tuple[str, CostRatio, dict[str, CostRatio], int]]()
    for arm, settings in {**beside, **arms}.items():  # a file each: other arms may follow later
        made = runner.run({arm: settings}, QUICK_SEEDS, tasks, share)
        if made is None:
            return None
        known = {task: made[arm][task].curves for task in tasks}
        each = {task: over_flow_grpo(contest, {task: known[task]}) for task in tasks}
        fallen = sum(made[arm][task].collapsed for task in tasks)
        rows.append((arm, over_flow_grpo(contest, known), each, fallen))
    return sorted(rows, key=lambda row: row[1].value)
