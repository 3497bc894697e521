"""Progress display of commands, and the results table at the end."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowrl.commands.remaining import Remaining, duration, work_of
from flowrl.workers import worker_count

if TYPE_CHECKING:
    from flowrl.training.compare import CompareConfig
    from flowrl.training.config import RunConfig

T = TypeVar("T")

SYMBOLS = {"done": "✓", "failed": "✗", "paused": "‖", "waiting": "·", "running": "▶"}
SEEDS_SHOWN = 8
"""Seeds of a method up to which each has a symbol of its own in the live table."""
BAR_FROM = 100
"""Columns of a terminal from which the live table has bars."""


class Display:
    """Progress of a comparison: a live table on a terminal, otherwise lines at iterations 1, 5, 10, ... of a run."""

    def __init__(self, config: "CompareConfig", out: Path, workers: int = 0, console: Console | None = None) -> None:
        from flowrl.training.checkpoint import Checkpoints
        from flowrl.training.compare import start_order

        self.config, self.started, self.jobs = config, time.monotonic(), config.jobs()
        self.console = console or Console()
        self.live: Live | None = None
        checkpoints = {name: Checkpoints(out / "runs" / name).names() for name in self.jobs}
        self.kept = {name: int(names[-1]) for name, names in checkpoints.items() if names}
        works, methods = {name: work_of(self.jobs[name]) for name in start_order(self.jobs)}, self._methods()
        self.remaining = Remaining(works, methods, worker_count(workers, len(works)), self.kept)
        self.printed: dict[str, int] = {}
        self.warned: dict[str, str] = {}

    def _methods(self) -> dict[str, str]:
        """The method of every run, in the order of the configuration."""
        return {name: job.algorithm.method for name, job in self.jobs.items()}

    def start(self, out: Path) -> None:
        """Print what is compared and where the results go."""
        run = self.config.run
        self.say(
            f"Comparing {', '.join(self.config.names())} on {run.environment.world}/{run.environment.task} "
            f"({run.environment.reward_form} reward), "
            f"seeds {', '.join(map(str, self.config.seeds))}: "
            f"{run.iterations} iterations of {run.rollout.groups} x {run.rollout.group_size} samples"
        )
        self.say(f"Results in {out}; Ctrl-C pauses; --resume continues")

    def say(self, text: str) -> None:
        """Print one line; a terminal breaks it between words."""
        self.console.print(text, highlight=False, soft_wrap=not self.console.is_terminal, markup=False)

    def during(self, work: Callable[[], T]) -> T:
        """Show progress while `work` runs."""
        if not self.console.is_terminal:
            return work()
        waiting = {name: {"phase": "waiting"} for name in self.jobs}
        with Live(self.table(waiting), console=self.console, auto_refresh=False, transient=True) as self.live:
            return work()

    def watch(self, states: dict[str, dict[str, Any]]) -> None:
        """Show the state of all runs; called about twice a second."""
        for name, state in states.items():
            if state["phase"] != "waiting":
                self.remaining.began(name)
            if state.get("iteration", 0):
                self.remaining.reached(name, state["iteration"])
            if state["phase"] in ("done", "paused", "failed"):
                self.remaining.ended(name)
            if state.get("warning", "") != self.warned.get(name, ""):
                self.warned[name] = state["warning"]
                self.say(warning_text(state["warning"], name))
        if self.live is not None:
            self.live.update(self.table(states), refresh=True)
        elif not self.console.is_terminal:
            self._lines(states)

    def _done(self, name: str, state: Mapping[str, Any]) -> int:
        """Iterations that the run has completed, those of its checkpoint included."""
        return self.jobs[name].iterations if state["phase"] == "done" else state.get("iteration", 0) or self.kept.get(name, 0)

    def _overall(self, states: Mapping[str, Mapping[str, Any]]) -> str:
        done = sum(self._done(name, state) for name, state in states.items())
        return (
            f"{done}/{sum(job.iterations for job in self.jobs.values())} iterations, left: {duration(self.remaining.seconds())}"
        )

    def _lines(self, states: dict[str, dict[str, Any]]) -> None:
        for name, state in states.items():
            step, ended = state.get("iteration", 0), state["phase"] in ("done", "paused", "failed")
            last = self.printed.get(name, 0)
            if last >= 0 and (ended or (step > 0 and last == 0) or step // 5 > last // 5):
                self.printed[name] = -1 if ended else step
                numbers = f"reward {state.get('reward', float('nan')):.3f}  NFE {state.get('nfe_total', 0):>9,d}"
                count = f"iteration {self._done(name, state):3d}/{self.jobs[name].iterations}"
                self.say(f"{name:28s} {state['phase']:10s} {count}  {numbers}  {self._overall(states)}")

    def table(self, states: Mapping[str, Mapping[str, Any]]) -> Group:
        """A row per method: the state of its seeds, iterations, rewards as means over the seeds, and network evaluations."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        table.add_column("method", no_wrap=True, overflow="ellipsis", vertical="bottom")
        table.add_column("seeds", no_wrap=True, vertical="bottom")
        wide = self.console.width >= BAR_FROM
        for name in ("iterations", *([""] if wide else []), "training\nreward", "held-out\nreward", "NFE"):
            table.add_column(name, justify="right", vertical="bottom")
        methods = self._methods()
        for method in dict.fromkeys(methods.values()):
            runs = {name: state for name, state in states.items() if methods[name] == method}
            done = sum(self._done(name, state) for name, state in runs.items())
            total = sum(self.jobs[name].iterations for name in runs)
            bar = [ProgressBar(total, done, width=20)] if wide else []
            numbers = [_mean(runs, "reward"), _mean(runs, "heldout"), f"{sum(s.get('nfe_total', 0) for s in runs.values()):,}"]
            table.add_row(escape(method), _symbols(runs.values()), f"{done}/{total}", *bar, *numbers)
        elapsed = f"{_clock(time.monotonic() - self.started)} elapsed"
        key = "  ".join(f"{symbol} {name}" for name, symbol in SYMBOLS.items() if name in map(_kind, states.values()))
        return Group(table, Text(f"{self._overall(states)}, {elapsed}"), Text(key, style="dim"))

    def finish(self, out: Path) -> str:
        """Write the report and print the results table; returns the last line to print."""
        from flowrl.plots.report import print_table, write_report
        from flowrl.training.results import load_comparison, summarise

        self.say("Writing the report ...")
        report = write_report(out)
        print_table(summarise(load_comparison(out)), self.console)
        return f"Finished in {_clock(time.monotonic() - self.started)}. Report: {report}"


def _kind(state: Mapping[str, Any]) -> str:
    """The key in `SYMBOLS` of a run's phase."""
    return state["phase"] if state["phase"] in SYMBOLS else "running"


def _symbols(states: Any) -> str:
    """A symbol per seed, or their numbers if there are many."""
    kinds = [_kind(state) for state in states]
    if len(kinds) <= SEEDS_SHOWN:
        return " ".join(SYMBOLS[kind] for kind in kinds)
    return " ".join(f"{symbol}{kinds.count(kind)}" for kind, symbol in SYMBOLS.items() if kind in kinds)


def _mean(runs: Mapping[str, Mapping[str, Any]], key: str) -> str:
    values = [state[key] for state in runs.values() if key in state]
    return f"{statistics.fmean(values):.3f}" if values else "-"


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def warning_text(warnings: str, run: str = "") -> str:
    """A line per warning."""
    return "\n".join(f"Warning{f' ({run})' if run else ''}: {text}" for text in warnings.splitlines())


def train_line(out: Path, config: "RunConfig") -> Callable[[dict[str, Any]], None]:
    """Progress of a single run: one line per iteration, with its evaluation if there is one."""
    started, remaining = time.monotonic(), Remaining({"": work_of(config)}, {"": ""})
    remaining.began("")

    def show(state: dict[str, Any]) -> None:
        if "warning" in state:
            print(warning_text(state["warning"]), flush=True)
        if "iteration" not in state:
            return
        remaining.reached("", state["iteration"])
        row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        elapsed = _clock(time.monotonic() - started)
        line = (
            f"iteration {row['iteration']:3d}/{config.iterations}  reward {row['reward_mean']:.3f}  NFE {row['nfe_total']:>9,d}"
        )
        line += f"  {elapsed}, left: {duration(remaining.seconds())}" if row["iteration"] < config.iterations else f"  {elapsed}"
        if row["evaluation"]:
            strict = row["evaluation"].get("strict")
            line += f"  held out: reward {row['evaluation']['reward']:.3f}" + ("" if strict is None else f", strict {strict:.3f}")
            line += _heldout(row["evaluation"])
        print(line, flush=True)

    return show


def _heldout(evaluation: dict[str, Any]) -> str:
    """The held-out rewards and the diversity of an evaluation."""
    from flowrl.training.results import short

    found = {short(name): value for name, value in evaluation.get("heldout", {}).items() if name != "strict"}
    if "diversity" in evaluation:
        found["diversity"] = evaluation["diversity"]
    return "".join(f", {name} {'failed' if value is None else f'{value:.3f}'}" for name, value in found.items())
