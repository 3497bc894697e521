"""Progress display of commands, and the results table at the end."""

import json
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowrl.cli.remaining import Remaining, duration, work_of
from flowrl.core.errors import FlowrlError
from flowrl.parts.registry import shadowed
from flowrl.parts.trust import own_text
from flowrl.workers import worker_count

if TYPE_CHECKING:
    from flowrl.training.compare import CompareConfig
    from flowrl.training.config import RunConfig

T = TypeVar("T")

SYMBOLS = {"done": "✓", "failed": "✗", "paused": "‖", "waiting": "·", "running": "▶"}
FELL = "!"
"""Mark of a run whose reward has fallen back (`flowrl.training.monitors.collapse`)."""
COMMAND = re.compile(r"(?:^|(?<=: ))flowrl [a-z].*$")
"""The part of a line to be copied into a shell."""
LEAST_ARM = 12
"""Columns of a terminal that names of arms get at least; longer ones take several lines."""
SEEDS_SHOWN = 8
"""Seeds of an arm up to which each has a symbol of its own in the live table."""
BAR, BAR_FROM = 20, 100
"""Columns of a bar, and of a terminal from which the live table has bars."""


class Display:
    """Progress of a comparison: a live table on a terminal, otherwise lines at iterations 1, 5, 10,
    ... of a run.
    """

    def __init__(
        self, config: "CompareConfig", out: Path, workers: int = 0, console: Console | None = None
    ) -> None:
        from flowrl.training.checkpoint import Checkpoints
        from flowrl.training.compare import run_label, start_order

        self.config, self.started, self.jobs = config, time.monotonic(), config.jobs()
        self.console = console or Console()
        self.live: Live | None = None
        checkpoints = {name: Checkpoints(out / "runs" / name).names() for name in self.jobs}
        self.kept = {name: int(names[-1]) for name, names in checkpoints.items() if names}
        works, self.arms = (
            {name: work_of(self.jobs[name]) for name in start_order(self.jobs)},
            config.arm_of(),
        )
        self.remaining = Remaining(works, self.arms, worker_count(workers, len(works)), self.kept)
        self.labels = {
            name: run_label(self.arms[name], job.seed) for name, job in self.jobs.items()
        }
        self.resumed = (out / "config.json").exists()
        self.recorded = {
            name: _recorded(out / "runs" / name, self.kept.get(name, 0)) for name in self.jobs
        }
        self.states: Mapping[str, Mapping[str, Any]] = {}
        self.printed: dict[str, int] = {}
        self.warned = set[tuple[str, str]]()
        self.fell = set[str]()

    def start(self, out: Path) -> None:
        """Print what is compared, the costs of an iteration, and where the results go."""
        from flowrl.training.results import difference

        run, arms = self.config.run, self.config.examples()
        first = next(iter(arms.values()))
        rewards = dict.fromkeys(
            config.environment.reward or config.environment.reward_form for config in arms.values()
        )
        sizes = {arm: _size(config) for arm, config in arms.items()}
        equal = len(set(sizes.values())) == 1
        self.say(
            f"Comparing {', '.join(arms)} on {first.policy.model or first.environment.subject} "
            f"({' and '.join(rewards)} reward{'s' if len(rewards) > 1 else ''}), "
            f"seeds {', '.join(map(str, self.config.seeds))}: "
            f"{sizes[next(iter(arms))] if equal else 'arms of different sizes'}"
            f"{own_text(job.flat() for job in self.jobs.values())}"
        )
        for arm, settings in self.config.arms.items():
            found = difference(
                arm, {name: value for name, value in settings.items() if value != run.flat()[name]}
            )
            if found:
                self.say(f"{arm}: {found}")
        costs = []
        for arm, plan in self.config.costs().items():
            cost = "unknown" if plan is None else f"{plan.nfe:,} + {plan.train_nfe:,}"
            costs.append(f"{arm} {cost}{'' if equal else f' ({sizes[arm]})'}")
        self.say(
            f"Network evaluations of an iteration, sampling and probes + update: {'; '.join(costs)}"
        )
        for text in shadowed():
            self.say(f"Warning: {text}")
        self.say(f"Results in {out}; Ctrl-C pauses; --resume continues")

    def say(self, text: str) -> None:
        """Print a line; on a terminal it is broken between words, and a command begins a line and
        is not broken.
        """
        for line in _fitted(text, self.console.width) if self.console.is_terminal else [text]:
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def during(self, work: Callable[[], T]) -> T:
        """Show progress while `work` runs."""
        finished = False
        try:
            result = self._live(work) if self.console.is_terminal else work()
            finished = bool(result)
        finally:
            if self.states and not finished:
                self.say(f"{self._count(self.states)} iterations done")
        return result

    def _live(self, work: Callable[[], T]) -> T:
        waiting = {name: {"phase": "waiting"} for name in self.jobs}
        with Live(
            self.table(waiting), console=self.console, auto_refresh=False, transient=True
        ) as self.live:
            return work()

    def watch(self, states: dict[str, dict[str, Any]]) -> None:
        """Show the state of all runs; called about twice a second."""
        self.states = states
        for name, state in states.items():
            if state["phase"] != "waiting":
                self.remaining.began(name)
            if state.get("iteration", 0):
                self.remaining.reached(name, state["iteration"])
            if state["phase"] in ("done", "paused", "failed"):
                self.remaining.ended(name)
            for kind, text in _warnings(state):
                if kind == "collapse":
                    self.fell.add(name)
                elif (name, kind) not in self.warned:
                    self.warned.add((name, kind))
                    self.say(warning_text(text, self.labels[name]))
        if self.live is not None:
            self.live.update(self.table(states), refresh=True)
        elif not self.console.is_terminal:
            self._lines(states)

    def _done(self, name: str, state: Mapping[str, Any]) -> int:
        """Iterations that the run has completed, those of its checkpoint included."""
        return (
            self.jobs[name].iterations
            if state["phase"] == "done"
            else state.get("iteration", 0) or self.kept.get(name, 0)
        )

    def _overall(self, states: Mapping[str, Mapping[str, Any]]) -> str:
        return f"{self._count(states)} iterations, left: {duration(self.remaining.seconds())}"

    def _count(self, states: Mapping[str, Mapping[str, Any]]) -> str:
        """Iterations of all runs that are done, of how many."""
        done = sum(self._done(name, state) for name, state in states.items())
        return f"{done}/{sum(job.iterations for job in self.jobs.values())}"

    def _lines(self, states: dict[str, dict[str, Any]]) -> None:
        for name, state in states.items():
            step, ended = state.get("iteration", 0), state["phase"] in ("done", "paused", "failed")
            last = self.printed.get(name, 0)
            if last >= 0 and (ended or (step > 0 and last == 0) or step // 5 > last // 5):
                self.printed[name] = -1 if ended else step
                known = {**self.recorded[name], **state}
                reward = f"{known['reward']:.3f}" if "reward" in known else "-"
                numbers = f"reward {reward:>5s}  NFE {known.get('nfe_total', 0):>9,d}"
                count = (
                    f"iteration {step or self._done(name, state):3d}/{self.jobs[name].iterations}"
                )
                line = (
                    f"{self.labels[name]:28s} {state['phase']:10s} {count}  {numbers} "
                    f" {self._overall(states)}"
                )
                self.say(f"{line}, reward fell back" if name in self.fell else line)

    def table(self, states: Mapping[str, Mapping[str, Any]]) -> Group:
        """A row per arm: the state of its seeds, iterations, rewards as means over the seeds, and
        network evaluations.
        """
        heads = ("seeds", "iterations", "training\nreward", "held-out\nreward", "NFE")
        rows = dict[str, list[str]]()
        bars = dict[str, ProgressBar]()
        for arm in self.config.arms:
            runs = {
                name: self.recorded[name] | dict(state)
                for name, state in states.items()
                if self.arms[name] == arm
            }
            done = sum(self._done(name, state) for name, state in runs.items())
            total = sum(self.jobs[name].iterations for name in runs)
            numbers = [
                _mean(runs, "reward"),
                _mean(runs, "heldout"),
                f"{sum(s.get('nfe_total', 0) for s in runs.values()):,}",
            ]
            rows[arm] = [_symbols(runs, self.fell), f"{done}/{total}", *numbers]
            bars[arm] = ProgressBar(total, done, width=BAR)
        widths = [
            max(map(len, [*head.split("\n"), *cells]))
            for head, *cells in zip(heads, *rows.values(), strict=True)
        ]
        wide = self.console.width >= BAR_FROM
        room = self.console.width - sum(width + 2 for width in widths) - 2 - (BAR + 2) * wide
        table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        table.add_column("arm", overflow="fold", vertical="bottom", max_width=max(LEAST_ARM, room))
        for place, head in enumerate(heads):
            table.add_column(
                head, justify="right" if place else "left", no_wrap=True, vertical="bottom"
            )
            if place == 1 and wide:
                table.add_column("", vertical="bottom")
        for arm, cells in rows.items():
            table.add_row(escape(arm), *cells[:2], *([bars[arm]] if wide else []), *cells[2:])
        elapsed = f"{_clock(time.monotonic() - self.started)} elapsed"
        key = [
            f"{symbol} {name}"
            for name, symbol in SYMBOLS.items()
            if name in map(_kind, states.values())
        ]
        key += [f"{FELL} reward fell back"] if self.fell else []
        return Group(
            table, Text(f"{self._overall(states)}, {elapsed}"), Text("  ".join(key), style="dim")
        )

    def finish(self, out: Path) -> str:
        """Write the report and print the results table; returns the last line to print."""
        from flowrl.cli.report import collapse_text, print_table, write_report
        from flowrl.training.results import load_comparison, summarise

        self.say("Writing the report ...")
        report = write_report(out)
        summaries = summarise(load_comparison(out))
        print_table(summaries, self.console)
        if collapse_text(summaries):
            self.say(f"{collapse_text(summaries)}; try a lower --learning-rate")
        self.say(f"All columns: {out / 'table.txt'}")
        since = " since it was resumed" if self.resumed else ""
        return f"Finished in {_clock(time.monotonic() - self.started)}{since}. Report: {report}"


def _size(config: "RunConfig") -> str:
    count = f"{config.iterations} iteration{'s' if config.iterations > 1 else ''}"
    return f"{count} of {config.rollout.groups} x {config.rollout.group_size} samples"


def _fitted(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` columns, broken between words; a command (`COMMAND`) is a
    line of its own.
    """
    lines = list[str]()
    for line in text.splitlines():
        command = COMMAND.search(line) if len(line) > width else None
        head = line[: command.start()].rstrip() if command else line
        lines += textwrap.wrap(head, width, break_long_words=False, break_on_hyphens=False)
        lines += [command.group()] if command else []
    return lines


def _recorded(folder: Path, kept: int) -> dict[str, Any]:
    """What a continued run has reached, as its messages call it; `kept` iterations if it is not
    finished.
    """
    from flowrl.training.results import load_run

    try:
        run = load_run(folder)
    except FlowrlError:
        return {}
    rows = [row for row in run.rows if run.finished or row["iteration"] <= kept]
    rewards, heldout = (
        [row[key] for row in rows if row.get(key) is not None]
        for key in ("reward_mean", "evaluation")
    )
    found: dict[str, Any] = {"nfe_total": rows[-1]["nfe_total"]} if rows else {}
    found |= {"reward": rewards[-1]} if rewards else {}
    return found | ({"heldout": heldout[-1]["reward"]} if heldout else {})


def _warnings(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The kinds and texts of a run's latest warnings; a text without a kind is its own."""
    text = state.get("warning", "")
    texts, kinds = text.splitlines(), state.get("kinds", ())
    return list(zip(kinds, texts, strict=True)) if len(kinds) == len(texts) else [(text, text)]


def _kind(state: Mapping[str, Any]) -> str:
    """The key in `SYMBOLS` of a run's phase."""
    return state["phase"] if state["phase"] in SYMBOLS else "running"


def _symbols(runs: Mapping[str, Mapping[str, Any]], fell: Set[str]) -> str:
    """A symbol per seed with a mark for those whose reward fell back, or their numbers if there are
    many.
    """
    kinds = {name: _kind(state) for name, state in runs.items()}
    if len(kinds) <= SEEDS_SHOWN:
        return " ".join(SYMBOLS[kind] + FELL * (name in fell) for name, kind in kinds.items())
    counts = [
        f"{symbol}{list(kinds.values()).count(kind)}"
        for kind, symbol in SYMBOLS.items()
        if kind in kinds.values()
    ]
    return " ".join([*counts, *([f"{FELL}{len(fell & set(runs))}"] if fell & set(runs) else [])])


def _mean(runs: Mapping[str, Mapping[str, Any]], key: str) -> str:
    values = [state[key] for state in runs.values() if key in state]
    return f"{statistics.fmean(values):.3f}" if values else "-"


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return (
        f"{minutes}:{rest:02d}"
        if minutes < 60
        else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
    )


def warning_text(warnings: str, run: str = "") -> str:
    """A line per warning."""
    return "\n".join(
        f"Warning{f' ({run})' if run else ''}: {text}" for text in warnings.splitlines()
    )


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
            f"iteration {row['iteration']:3d}/{config.iterations}  reward {row['reward_mean']:.3f} "
            f" NFE {row['nfe_total']:>9,d}"
        )
        line += (
            f"  {elapsed}, left: {duration(remaining.seconds())}"
            if row["iteration"] < config.iterations
            else f"  {elapsed}"
        )
        if row["evaluation"]:
            strict = row["evaluation"].get("strict")
            line += f"  held out: reward {row['evaluation']['reward']:.3f}" + (
                "" if strict is None else f", strict {strict:.3f}"
            )
            line += _heldout(row["evaluation"])
        print(line, flush=True)

    return show


def _heldout(evaluation: dict[str, Any]) -> str:
    """The held-out rewards and the diversity of an evaluation."""
    from flowrl.training.results import short

    found = {
        short(name): value
        for name, value in evaluation.get("heldout", {}).items()
        if name != "strict"
    }
    if "diversity" in evaluation:
        found["diversity"] = evaluation["diversity"]
    return "".join(
        f", {name} {'failed' if value is None else f'{value:.3f}'}" for name, value in found.items()
    )
