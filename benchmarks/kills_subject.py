"""One training or comparison of kills.py: started, killed in a phase, judged, and resumed to its
end.
"""

import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowrl_compare.results import load_run

from flowrl.core.errors import FlowrlError
from flowrl.io import folder_lock
from flowrl.training.checkpoint import Checkpoints

SETTINGS = (
    "--preset tiny --world mixture --task direction --iterations 12 --checkpoint-every 2"
    " --eval-every 2 --eval-samples 1500"
)
COMMANDS = {
    "train": SETTINGS,
    "torchrun": f"{SETTINGS} --groups 5",
    "compare": f"{SETTINGS} --methods flow-grpo dance-grpo --seeds 0 1 --workers 2",
}
"""torchrun: `flowrl train` on two processes, three prompts on one and two on the other."""
LAUNCHER = (
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node",
    "2",
    "-m",
    "flowrl",
    "train",
)
PHASES = {
    "train": ("evaluation", "checkpoint", "any", "results"),
    "torchrun": ("evaluation", "checkpoint", "any", "results"),
    "compare": ("evaluation", "checkpoint", "any", "report"),
}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")
DAMAGE = (
    ("checkpoints", "link"),
    ("metrics.jsonl", "pipe"),
    ("config.json", "pipe"),
    ("before.safetensors", "link"),
    ("config.yaml", "pipe"),
    ("weights.safetensors", "pipe"),
    ("metrics.jsonl", "link"),
)
"""What a killed run's folder must not contain: a link to a file or folder of the undisturbed run, or
a pipe. For a comparison, in the folder of its first run.
"""
GONE = 5.0
"""Seconds after a command's end within which its last process must be gone."""
PATIENCE = 120.0
"""Seconds after which a command counts as hanging."""


@dataclass(frozen=True)
class Kill:
    """A signal to be sent."""

    command: str
    phase: str
    signal: str
    target: str


@dataclass
class Killed:
    """What followed a kill: `problems` is empty if all was well."""

    kill: Kill
    code: int | None
    seconds: float
    """From the signal to the end of the last process."""
    unfinished: int
    """Temporary files left behind, which nothing may read."""
    problems: list[str] = field(default_factory=list)
    resumed_the_same: bool = False
    damage: str = ""
    """What the folder was damaged with after its last kill."""


def runs_of(command: str, out: Path) -> list[Path]:
    """The folders of the single runs in `out`."""
    return (
        [out]
        if command != "compare"
        else sorted(path for path in out.glob("runs/*") if path.is_dir())
    )


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state not in "ZX":
                pids.append(int(path.parent.name))
    return pids


def files_of(out: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of every file except locks."""
    stats = {}
    for path in out.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.name.startswith(".lock"):
                stats[str(path.relative_to(out))] = (path.stat().st_size, path.stat().st_mtime_ns)
    return stats


def numbers(run: Path) -> tuple[str, bytes]:
    """What must not depend on kills: the weights, and all metrics but seconds."""

    def timeless(value: object) -> object:
        if isinstance(value, dict):
            return {
                key: timeless(entry)
                for key, entry in value.items()
                if key not in ("seconds", "seconds_total", "phases")
            }
        return value

    rows = [timeless(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return json.dumps(rows), (run / "weights.safetensors").read_bytes()


class Subject:
    """One training or comparison that is killed and resumed in `out`; `seconds` is how long it
    takes undisturbed.
    """

    def __init__(self, command: str, out: Path, draw: random.Random, seconds: float = 0.0) -> None:
        self.command, self.out, self.draw, self.seconds = command, out, draw, seconds
        self.log = out.with_name(f"{out.name}.log")

    def start(self, arguments: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start it, or resume it if it has begun; or run another flowrl command."""
        resumed = (self.out / "config.json").exists()
        words = (
            ["--resume", str(self.out)]
            if resumed
            else [*COMMANDS[self.command].split(), "--out", str(self.out)]
        )
        if resumed and self.command == "compare":
            words += ["--workers", "2"]
        module = LAUNCHER if self.command == "torchrun" else ("flowrl", self.command)
        command = ("flowrl", *arguments) if arguments else (*module, *words)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def living(self, leader: int) -> list[int]:
        """The living processes of a command: of its session, and those that torchrun has started
        in sessions of their own.
        """
        pids = set(session(leader))
        for path in Path("/proc").glob("[0-9]*/cmdline") if self.command == "torchrun" else ():
            with contextlib.suppress(OSError):
                if os.fsencode(self.out) in path.read_bytes().split(b"\0"):
                    pids.add(int(path.parent.name))
        return sorted(pids)

    def due(self, phase: str, process: subprocess.Popen[bytes]) -> bool:
        """Wait for a moment in `phase`; False if the process ended first."""
        before, start, changes = files_of(self.out), time.monotonic(), self.draw.randint(1, 4)
        moment = start + self.draw.uniform(0, self.seconds)

        def reached() -> bool:
            nonlocal before, changes
            if phase == "any":
                return time.monotonic() > moment
            if phase == "checkpoint":
                return any(
                    path.name.endswith(".tmp")
                    for run in runs_of(self.command, self.out)
                    for path in _checkpoints(run)
                )
            if phase == "report":  # it is drawn once all runs are done
                return (
                    sum((run / "done.json").exists() for run in runs_of(self.command, self.out))
                    == 4
                )
            files = files_of(self.out)
            changed = {Path(name) for name, state in files.items() if before.get(name) != state}
            if phase == "evaluation":
                changes -= any(path.name == "metrics.jsonl" for path in changed)
                before = files
                return changes <= 0
            return any(
                len(path.parts) == 1 and path.name.startswith(("samples", "trajectory", "weights"))
                for path in changed
            )

        while not reached():
            if process.poll() is not None or time.monotonic() > start + PATIENCE:
                return False
            time.sleep(0.0005 if phase == "checkpoint" else 0.003)
        time.sleep(
            {"evaluation": self.draw.uniform(0, 0.1), "report": self.draw.uniform(0, 1.0)}.get(
                phase, 0.0
            )
        )
        return process.poll() is None

    def kill(self, kill: Kill) -> Killed | None:
        """Start or resume it and send the signal; None if it ended before the phase."""
        process = self.start()
        try:
            if not self.due(kill.phase, process):
                return (
                    None
                    if self.ended(process) == 0
                    else Killed(kill, process.returncode, 0, 0, [self.said()])
                )
            began = time.monotonic()
            number = getattr(signal, kill.signal)
            if self.command != "torchrun":
                send = os.killpg if kill.target == "group" else os.kill
                send(process.pid, number)
            else:
                everyone = self.living(process.pid)
                # a killed launcher cannot end its processes, so one of these is killed instead
                victim = max(everyone) if kill.signal == "SIGKILL" else process.pid
                for pid in everyone if kill.target == "group" else [victim]:
                    os.kill(pid, number)
            code = self.ended(process)
            result = Killed(kill, code, 0, 0)
            result.problems += self.second_writers(process.pid)
            result.seconds = time.monotonic() - began
            result.unfinished = sum(name.endswith(".tmp") for name in files_of(self.out))
            result.problems += [*self.wrong_exit(kill, code), *self.damaged()]
            return result
        finally:
            for pid in self.living(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def ended(self, process: subprocess.Popen[bytes]) -> int | None:
        """The exit code; None if it hangs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(PATIENCE)
        return None

    def said(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-800:]

    def second_writers(self, leader: int) -> list[str]:
        """Wait until all processes are gone. Each folder is locked as soon as it can be; nothing may
        change after that.
        """
        deadline, locked, problems = (
            time.monotonic() + GONE,
            dict[Path, dict[str, tuple[int, int]]](),
            list[str](),
        )
        with contextlib.ExitStack() as locks:
            while True:
                orphans = self.living(leader)
                folders = {self.out, *runs_of(self.command, self.out)}
                for folder in folders - locked.keys():
                    with contextlib.suppress(FlowrlError):
                        if folder.exists():
                            locks.enter_context(folder_lock(folder))
                            locked[folder] = (
                                files_of(folder)
                                if folder != self.out or self.command != "compare"
                                else {}
                            )
                # a process that is gone may not have closed its files yet
                is_free = all(folder in locked or not folder.exists() for folder in folders)
                if (not orphans and is_free) or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            problems += [f"{len(orphans)} orphans"] if orphans else []
            for folder in {self.out, *runs_of(self.command, self.out)}:
                if folder.exists() and folder not in locked:
                    problems.append(f"{folder.name} is still locked")
                elif locked.get(folder) and files_of(folder) != locked[folder]:
                    problems.append(f"{folder.name} was written without its lock")
        return problems

    def wrong_exit(self, kill: Kill, code: int | None) -> Iterator[str]:
        """A command that is asked to stop exits with 130 and says how to resume, or has just been
        completed. Before its work begins, while Python imports, a signal may end it like any
        process.
        """
        number, output = getattr(signal, kill.signal), self.said()
        flat = " ".join(output.split())
        if self.command == "torchrun":  # its code and its traceback are its own
            if code is None or (code == 0 and not (self.out / "done.json").exists()):
                yield f"exit code {code}: {output}"
            if "unexpected error" in output:
                yield f"unexpected error: {output}"
            return
        early, done = (
            flat in ("", "flowrl: interrupted"),
            "done.json" if self.command == "train" else "report.html",
        )
        allowed = (
            {-number}
            if kill.signal == "SIGKILL"
            else {130, 0} | ({-number} if early else set[int]())
        )
        if code not in allowed:
            yield f"exit code {code}: {output}"
        if code == 0 and not (self.out / done).exists():
            yield f"exit code 0, but no {done}: {output}"
        if "Traceback" in output:
            yield f"traceback: {output}"
        begun = (self.out / "config.json").exists()
        if (
            code == 130
            and begun
            and not early
            and f"--resume {shlex.quote(str(self.out))}" not in flat
        ):
            yield f"does not say how to resume: {output}"

    def damaged(self) -> Iterator[str]:
        """Checkpoints and runs that cannot be read."""
        for run in runs_of(self.command, self.out):
            try:
                checkpoints = Checkpoints(run)
                for name in checkpoints.names():
                    checkpoints.load(name)
                if (run / "metrics.jsonl").exists():
                    load_run(run)
            except (FlowrlError, OSError, ValueError) as error:
                yield f"{run.name}: {error}"

    def refuses(self, name: str, kind: str, other: Path) -> list[str]:
        """Put a link to a file of `other`, or a pipe, in place of the file `name`; a command that
        would use it must name it and change nothing. Then the file is put back.
        """
        folder = (runs_of(self.command, self.out) or [self.out])[0]
        theirs = runs_of(self.command, other)[0]
        path, aside = folder / name, self.out.with_name(f"{self.out.name}-aside")
        resumed = ["compare" if self.command == "compare" else "train", "--resume", str(self.out)]
        commands = {
            "config.yaml": ["train", "--config", str(path), "--out", f"{self.out}-new"],
            "weights.safetensors": ["sample", "--weights", str(folder), "--out", f"{aside}.png"],
        }
        if os.path.lexists(path):
            os.rename(path, aside)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(theirs / name)
        before = files_of(self.out), files_of(other)
        process = self.start(commands.get(name, resumed))
        code, problems = self.ended(process), list[str]()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if code != 2 or name.partition(".")[0] not in self.said():
            problems.append(f"{name} as a {kind}: exit code {code}: {self.said()}")
        if (files_of(self.out), files_of(other)) != before:
            problems.append(f"{name} as a {kind}: files were changed")
        if os.path.lexists(path):
            path.unlink()
        if os.path.lexists(aside):
            os.rename(aside, path)
        return problems

    def completed(self) -> list[str]:
        """Resume it to its end; the problems then, apart from the numbers."""
        process = self.start()
        code = self.ended(process)
        problems = self.second_writers(process.pid)
        if code != 0:
            problems.append(f"resumed with exit code {code}: {self.said()}")
        elif self.command == "compare" and not (self.out / "report.html").stat().st_size:
            problems.append("no report")
        return problems + [f"left {name}" for name in files_of(self.out) if name.endswith(".tmp")]


def _checkpoints(run: Path) -> list[Path]:
    try:
        return list((run / "checkpoints").iterdir())
    except OSError:
        return []
