"""Progress display of commands, and the results table at the end."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

if TYPE_CHECKING:
    from flowrl.training.compare import CompareConfig

T = TypeVar("T")


class Display:
    """Progress of a comparison: a live table on a terminal, otherwise one line per five iterations of a run."""

    def __init__(self, config: "CompareConfig") -> None:
        self.console = Console()
        self.names = list(config.jobs())
        self.iterations = {name: job.iterations for name, job in config.jobs().items()}
        self.config = config
        self.started = time.monotonic()
        self.printed: dict[str, int] = {}
        self.warned: dict[str, str] = {}
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(40), TextColumn("{task.fields[note]}"))
        self.task = self.bar.add_task("all runs", total=sum(self.iterations.values()), note="")
        self.live: Live | None = None

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
        """Print one line."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def during(self, work: Callable[[], T]) -> T:
        """Show progress while `work` runs."""
        if not self.console.is_terminal:
            return work()
        with Live(console=self.console, refresh_per_second=4) as live:
            self.live = live
            try:
                return work()
            finally:
                self.live = None

    def watch(self, states: dict[str, dict[str, Any]]) -> None:
        """Show the state of all runs; called about twice a second."""
        for name, state in states.items():
            if state.get("warning", "") != self.warned.get(name, ""):
                self.warned[name] = state["warning"]
                self.say(warning_text(state["warning"], name))
        done = sum(self._progress(name, state) for name, state in states.items())
        note = f"{done:.0f}/{sum(self.iterations.values())} iterations, time left {_clock(self._time_left(states))}"
        self.bar.update(self.task, completed=done, note=note)
        if self.live is not None:
            self.live.update(Group(self.bar, self._table(states)))
            return
        for name, state in states.items():
            step, ended = state.get("iteration", 0), state.get("phase") in ("done", "paused")
            last = self.printed.get(name, 0)
            if last >= 0 and (ended or step >= last + 5):
                self.printed[name] = -1 if ended else step
                self.say(
                    f"{name:28s} {state.get('phase', ''):10s} iteration {step:3d}/{self.iterations[name]}  "
                    f"reward {state.get('reward', float('nan')):.3f}  NFE {state.get('nfe_total', 0):>9,d}  {note}"
                )

    def _progress(self, name: str, state: dict[str, Any]) -> float:
        return self.iterations[name] if state.get("phase") == "done" else state.get("iteration", 0)

    def _time_left(self, states: dict[str, dict[str, Any]]) -> float | None:
        """Remaining seconds, from each method's measured seconds per iteration and the number of active runs."""
        measured: dict[str, list[float]] = {}
        for name, state in states.items():
            if state.get("iteration", 0) > 0 and "seconds" in state:
                measured.setdefault(name.rpartition("-seed")[0], []).append(state["seconds"] / state["iteration"])
        if not measured:
            return None
        means = {method: sum(values) / len(values) for method, values in measured.items()}
        unknown = max(means.values())
        left, active = 0.0, 0
        for name, state in states.items():
            if state.get("phase") not in ("done", "paused"):
                left += (self.iterations[name] - state.get("iteration", 0)) * means.get(name.rpartition("-seed")[0], unknown)
                active += state.get("phase") != "waiting"
        return left / max(1, active)

    def _table(self, states: dict[str, dict[str, Any]]) -> Table:
        table = Table(box=None, padding=(0, 2))
        for column in ("run", "phase"):
            table.add_column(column)
        for column in ("iteration", "reward", "NFE"):
            table.add_column(column, justify="right")
        for name, state in states.items():
            reward = f"{state['reward']:.3f}" if "reward" in state else ""
            progress = f"{state.get('iteration', 0)}/{self.iterations[name]}"
            table.add_row(name, state.get("phase", ""), progress, reward, f"{state.get('nfe_total', 0):,}")
        return table

    def finish(self, out: Path) -> None:
        """Write the report and print the results table."""
        from flowrl.plots.report import print_table, write_report
        from flowrl.training.results import load_comparison, summarise

        self.say("Writing the report ...")
        report = write_report(out)
        print_table(summarise(load_comparison(out)), self.console)
        self.say(f"Finished in {_clock(time.monotonic() - self.started)}. Report: {report}")


def _clock(seconds: float | None) -> str:
    """Minutes and seconds, or "unknown"."""
    return "unknown" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def warning_text(warnings: str, run: str = "") -> str:
    """A line per warning."""
    return "\n".join(f"Warning{f' ({run})' if run else ''}: {text}" for text in warnings.splitlines())


def train_line(out: Path) -> Callable[[dict[str, Any]], None]:
    """Progress of a single run: one line per iteration, with its evaluation if there is one."""
    started = time.monotonic()

    def show(state: dict[str, Any]) -> None:
        if "warning" in state:
            print(warning_text(state["warning"]), flush=True)
        if "iteration" not in state:
            return
        row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        elapsed = _clock(time.monotonic() - started)
        line = f"iteration {row['iteration']:3d}  reward {row['reward_mean']:.3f}  NFE {row['nfe_total']:>9,d}  {elapsed}"
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
