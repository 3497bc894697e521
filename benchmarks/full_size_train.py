"""`flowrl train` while the bytes of its tensors and its seconds are counted by phase; a child
process of benchmarks/full_size.py.

    python benchmarks/full_size_train.py REPORT.json THREADS KILL_AFTER [options of flowrl train]

Two things differ from the command: it computes on THREADS threads, and the trajectory record at the
end has one member instead of twelve. With KILL_AFTER above 0 the process kills itself after that
iteration's line in metrics.jsonl, before its checkpoint.
"""

import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowrl.cli import main as cli
from flowrl.cli import progress
from flowrl.run.config import RunConfig
from flowrl.run.evaluation import write_trajectory
from flowrl.run.models.memory import StorageCounter

MEASURED = ("prompts", "evaluation", "rollout", "decode", "reward", "update")
"""Phases of a run that are measured; others count as part of the one before."""


@dataclass
class PhaseMeter:
    """Seconds and tensor bytes of a run's phases: the most at once, and what was there at the
    start.
    """

    file: Path
    kill_after: int = 0
    counter: StorageCounter = field(default_factory=lambda: StorageCounter("cpu"))
    phases: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def record(self, state: dict[str, Any]) -> None:
        """A report of the run: a phase begins, or an iteration has ended."""
        if state.get("phase") in MEASURED:
            self.begin(state["phase"])
        if "iteration" in state:
            self.begin("checkpoint")
            if state["iteration"] == self.kill_after:
                self.write("killed")
                os.kill(os.getpid(), signal.SIGKILL)

    def begin(self, name: str) -> None:
        """End the current phase and begin `name`."""
        now = time.perf_counter()
        if self.phases:
            last = self.phases[-1]
            processor = time.process_time() - last.pop("processor_start")
            last |= {
                "seconds": now - last.pop("start"),
                "processor": processor,
                "peak": self.counter.largest,
            }
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor):
                self.counter.add(item)
        self.counter.largest = self.counter.now
        clocks = {"start": time.perf_counter(), "processor_start": time.process_time()}
        self.phases.append({"phase": name, "held": self.counter.now, **clocks})

    def write(self, end: str) -> None:
        """Write what was counted."""
        self.begin("end")
        report = {
            "end": end,
            "seconds": time.perf_counter() - self.started,
            "processor": time.process_time(),
            "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "phases": self.phases[:-1],
        }
        self.file.write_text(json.dumps(report))


def main(file: str, threads: str, kill_after: str, *words: str) -> int:
    """Train; the exit code of the command."""
    meter = PhaseMeter(Path(file), int(kill_after))
    line = progress.train_line

    def watched(out: Path, config: RunConfig) -> Callable[[dict[str, Any]], None]:
        show = line(out, config)
        torch.set_num_threads(int(threads))

        def tell(state: dict[str, Any]) -> None:
            show(state)
            meter.record(state)

        return tell

    progress.train_line = watched
    write_trajectory.__defaults__ = (1,)
    meter.begin("load")
    with meter.counter:
        code = cli.main(["train", *words])
    meter.write("finished")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
