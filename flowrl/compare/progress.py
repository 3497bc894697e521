"""Progress of a comparison, and the results at the end."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from flowrl.cli.progress import clock, warning_text
from flowrl.core.errors import FlowrlError
from flowrl.run.parts.registry import shadowed
from flowrl.run.parts.trust import own_text
from flowrl.run.results import reward_text

if TYPE_CHECKING:
    from flowrl.compare.comparison import CompareConfig

T = TypeVar("T")


def _bars(console: Console) -> Progress:
    """Bars on a terminal, which the caller refreshes; in a pipe only the times."""
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
        BarColumn(10),
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(overflow="fold")),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
        # The mean since the start: one iteration may take longer than any shorter period.
        speed_estimate_period=math.inf,
    )


class Display:
    """Progress of a comparison: bars on a terminal, otherwise lines at iterations 1, 5, 10, ... of
    a run.
    """

    def __init__(self, config: "CompareConfig", out: Path, console: Console | None = None) -> None:
        from flowrl.compare.comparison import planned_cost, run_label

        self.config, self.out, self.console = config, out, console or Console()
        self.jobs, arms, self.costs = config.jobs(), config.arm_of(), config.costs()
        self.runs = {arm: [name for name in arms if arms[name] == arm] for arm in config.arms}
        self.labels = {name: run_label(arms[name], job.seed) for name, job in self.jobs.items()}
        self.resumed = (out / "config.json").exists()
        self.states = {name: _recorded(out / "runs" / name) for name in self.jobs}
        self.printed = {name: self._mark(name) for name in self.jobs}
        self.warned = set[tuple[str, str]]()
        self.bars = _bars(self.console)
        for arm in config.arms:
            self.bars.add_task(arm, total=self._iterations(arm), text="")
        # Iterations of costly arms count for more.
        self.forwards = {
            arm: planned_cost(self.costs[arm], job) for arm, job in config.examples().items()
        }
        works = [self._iterations(arm) * self.forwards[arm] for arm in config.arms]
        self.all = self.bars.add_task("all runs", total=sum(works), text="")

    def _iterations(self, arm: str) -> int:
        return sum(self.jobs[name].iterations for name in self.runs[arm])

    def _mark(self, name: str) -> tuple[bool, bool, int]:
        """A line is printed when this changes: at the end, and at iterations 1, 5, 10, ..."""
        state = self.states[name]
        ended = state["phase"] in ("done", "paused", "failed")
        return ended, state["iteration"] > 0, state["iteration"] // 5

    def start(self) -> None:
        """Print what is compared, the costs of an iteration, and where the results go."""
        from flowrl.compare.results import difference

        arms, usual = self.config.examples(), self.config.run.typed()
        first = next(iter(arms.values()))
        tasks = [config.environment for config in arms.values()]
        rewards = list(dict.fromkeys(task.sources.text or task.reward_form for task in tasks))
        self.say(
            f"Comparing {', '.join(arms)} on {first.policy.model or first.environment.subject} "
            f"({' and '.join(rewards)} reward{'s' if len(rewards) > 1 else ''}), seeds "
            f"{', '.join(map(str, self.config.seeds))}{own_text(c.flat() for c in arms.values())}"
        )
        for arm, config in arms.items():
            given, plan, size = self.config.arms[arm], self.costs[arm], config.rollout
            changed = {name: value for name, value in given.items() if value != usual[name]}
            cost = f"{plan.nfe:,} + {plan.train_nfe:,}" if plan else "an unknown number of"
            passes = f", {self.forwards[arm]:,.0f} forward equivalents" if plan else ""
            self.say(
                f"{arm}: {config.iterations} iterations of {size.groups} x {size.group_size}"
                f" samples, each {cost} network evaluations (sampling and probes + update){passes}"
                f"{'; ' * bool(difference(arm, changed))}{difference(arm, changed)}"
            )
        for text in shadowed():
            self.say(f"Warning: {text}")
        self.say(f"Results in {self.out}; Ctrl-C pauses; --resume continues")

    def say(self, text: str) -> None:
        """Print a line as it is: the terminal breaks it, so that a command in it can be copied."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def during(self, work: Callable[[], T]) -> T:
        """Show progress while `work` runs."""
        finished = False
        try:
            with self.bars:
                result = work()
            finished = bool(result)
        finally:
            if not finished:
                self.say(f"{self._count()} iterations done")
        return result

    def watch(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Show the state of all runs; called about twice a second."""
        for name, state in states.items():
            # A run that continues reports no iteration before its first one is complete.
            iteration = max(self.states[name]["iteration"], state.get("iteration", 0))
            self.states[name] |= {**state, "iteration": iteration}
            for text in filter(None, (state.get("changed"), state.get("slow"))):
                if (name, text) not in self.warned:
                    self.say(f"{self.labels[name]}: {text}")
                    self.warned.add((name, text))
            texts = state.get("warning", "").splitlines()
            for kind, text in zip(state.get("kinds") or texts, texts, strict=False):
                if (name, kind) not in self.warned and kind != "collapse":
                    self.say(warning_text(text, self.labels[name]))
                self.warned.add((name, kind))
        done = 0
        for task, (arm, names) in zip(self.bars.tasks, self.runs.items(), strict=False):
            reached = sum(map(self._done, names))
            self.bars.update(task.id, completed=reached, text=self._text(names))
            done += reached * self.forwards[arm]
        self.bars.update(self.all, completed=done)
        self.bars.update(self.all, text=self._overall())
        self.bars.refresh()
        for name in () if self.console.is_terminal else states:
            if self._mark(name) != self.printed[name]:
                self.printed[name] = self._mark(name)
                count = f"{self.states[name]['iteration']:3d}/{self.jobs[name].iterations}"
                phase = (
                    f"{self.labels[name]:28s} {self.states[name]['phase']:10s} iteration {count}"
                )
                self.say(f"{phase}  {self._text([name])}  {self._overall()}")

    def _text(self, names: list[str]) -> str:
        """How far the runs are: finished seeds, means of the rewards, evaluations of rollouts."""
        states = [self.states[name] for name in names]
        kinds = Counter(state["phase"] for state in states)
        kinds["fell back"] = sum((name, "collapse") in self.warned for name in names)
        texts = [f"{kinds['done']}/{len(names)} done"] if len(names) > 1 else []
        texts += [f"{kinds[k]} {k}" for k in ("paused", "failed", "fell back") if kinds[k]]
        for key, label in (("reward", "reward"), ("heldout", "held out")):
            values = [state[key] for state in states if key in state]
            if values:
                texts.append(f"{label} {reward_text(statistics.fmean(values), values)}")
        return ", ".join([*texts, f"rollout NFE {sum(s.get('nfe_total', 0) for s in states):,}"])

    def _overall(self) -> str:
        task = self.bars.tasks[-1]
        times = f"{clock(task.elapsed)} elapsed, left: {clock(task.time_remaining)}"
        return f"{self._count()} iterations, {times}"

    def _count(self) -> str:
        """Iterations of all runs that are done, of how many."""
        return f"{sum(map(self._done, self.jobs))}/{sum(map(self._iterations, self.runs))}"

    def _done(self, name: str) -> int:
        """Iterations that need no more time: all of a run that an observer stopped."""
        state = self.states[name]
        return self.jobs[name].iterations if state["phase"] == "done" else state["iteration"]

    def finish(self) -> str:
        """Write the report and print the results table; returns the last line to print."""
        from flowrl.compare.report import collapse_text, print_table, write_report
        from flowrl.compare.results import load_comparison, summarise
        from flowrl.compare.sweep import Sweep

        self.say("Writing the report ...")
        report, comparison = write_report(self.out), load_comparison(self.out)
        summaries = summarise(comparison)
        print_table(summaries, self.console)
        if collapse_text(summaries) and not self.config.points:
            self.say(f"{collapse_text(summaries)}; try a lower --learning-rate")
        self.say(f"All columns: {self.out / 'table.txt'}")
        if self.config.points:
            for text in Sweep(comparison).best_texts():
                self.say(text)
            self.say(f"Runs as a table: {self.out / 'sweep.csv'}; best settings: best-*.yaml")
        since = " since it was resumed" if self.resumed else ""
        return f"Finished in {clock(self.bars.tasks[-1].elapsed)}{since}. Report: {report}"


def _recorded(folder: Path) -> dict[str, Any]:
    """The state of a run before it starts or continues: what its rows up to the checkpoint say."""
    from flowrl.run.checkpoint import Checkpoints
    from flowrl.run.records import load_run

    kept = int(Checkpoints(folder).newest or 0)
    state: dict[str, Any] = {"phase": "waiting", "iteration": 0}
    try:
        run = load_run(folder)
    except FlowrlError:
        return state
    # Later rows are of iterations that will be computed again.
    for row in run.rows:
        if run.finished or row["iteration"] <= kept:
            state |= {"iteration": row["iteration"], "nfe_total": row["nfe_total"]}
            state |= {"reward": row["reward_mean"]} if "reward_mean" in row else {}
            state |= {"heldout": row["evaluation"]["reward"]} if row["evaluation"] else {}
    return state
