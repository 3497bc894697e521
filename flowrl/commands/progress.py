"""Progress display of commands, and the results table at the end."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:
    from flowrl.training.compare import CompareConfig

T = TypeVar("T")


class Display:
    """Progress of a comparison: a live bar per run on a terminal, otherwise one line per five iterations of a run."""

    def __init__(self, config: "CompareConfig") -> None:
        self.config, self.started = config, time.monotonic()
        self.iterations = {name: job.iterations for name, job in config.jobs().items()}
        self.console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        self.bars = Progress(*columns, console=self.console, speed_estimate_period=3600.0, auto_refresh=False)
        self.all = self.bars.add_task("all runs", total=sum(self.iterations.values()), note="")
        self.runs = {name: self.bars.add_task(escape(name), total=total, note="") for name, total in self.iterations.items()}
        self.printed: dict[str, int] = {}
        self.warned: dict[str, str] = {}

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
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def during(self, work: Callable[[], T]) -> T:
        """Show progress while `work` runs."""
        with self.bars if self.console.is_terminal else nullcontext():
            return work()

    def watch(self, states: dict[str, dict[str, Any]]) -> None:
        """Show the state of all runs; called about twice a second."""
        done = {name: total if states[name]["phase"] == "done" else states[name].get("iteration", 0)
                for name, total in self.iterations.items()}  # fmt: skip
        left = self.bars.tasks[0].time_remaining
        self.bars.update(self.all, completed=sum(done.values()), note=f"time left {_clock(left)}")
        note = f"{sum(done.values())}/{sum(self.iterations.values())} iterations, time left {_clock(left)}"
        for name, state in states.items():
            if state.get("warning", "") != self.warned.get(name, ""):
                self.warned[name] = state["warning"]
                self.say(warning_text(state["warning"], name))
            step, ended, last = state.get("iteration", 0), state["phase"] in ("done", "paused"), self.printed.get(name, 0)
            numbers = f"reward {state.get('reward', float('nan')):.3f}  NFE {state.get('nfe_total', 0):>9,d}"
            self.bars.update(self.runs[name], completed=done[name], note=f"{state['phase']:10s} {numbers}")
            if not self.console.is_terminal and last >= 0 and (ended or step >= last + 5):
                self.printed[name] = -1 if ended else step
                self.say(f"{name:28s} {state['phase']:10s} iteration {step:3d}/{self.iterations[name]}  {numbers}  {note}")
        self.bars.refresh()

    def finish(self, out: Path) -> str:
        """Write the report and print the results table; returns the last line to print."""
        from flowrl.plots.report import print_table, write_report
        from flowrl.training.results import load_comparison, summarise

        self.say("Writing the report ...")
        report = write_report(out)
        print_table(summarise(load_comparison(out)), self.console)
        return f"Finished in {_clock(time.monotonic() - self.started)}. Report: {report}"


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
