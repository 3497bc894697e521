"""Progress of a run: what it has done and how long it will take, and plain lines that show it."""

import json
import math
import statistics
import textwrap
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.run.reading import read_text
from flowrl.run.results import comparable, reward_text, short

if TYPE_CHECKING:
    from flowrl.run.config import RunConfig

RECENT = 50
"""Iterations over which seconds are averaged."""
LINES = 50
"""Lines of a long run, by default."""
SAID = ("note", "changed", "profile", "prompts", "alive", "slow")
"""Events of a run that are lines of text."""


def clock(seconds: float | None) -> str:
    """Hours, minutes and seconds; "unknown" for None."""
    return "unknown" if seconds is None else str(timedelta(seconds=int(seconds)))


def warning_text(warnings: str, run: str = "") -> str:
    """A line per warning."""
    head = f"Warning ({run})" if run else "Warning"
    return "\n".join(f"{head}: {text}" for text in warnings.splitlines())


def said_text(state: dict[str, Any]) -> str:
    """What an event of a run says, line by line; "" for one that only changes the state."""
    lines = [warning_text(state["warning"])] if "warning" in state else []
    said = [state[name] for name in SAID if name in state]
    return "\n".join([*lines, *(textwrap.indent(text, "  ") for text in said)])


def times_left(done: int, total: int, every: int) -> int:
    """How often something happens after iteration `done` that is due every `every` iterations, and
    at the last one.
    """
    return total // every - done // every + (total % every > 0 and done < total)


@dataclass(frozen=True)
class Series:
    """A reward over the iterations.

    Args:
        iterations: the iterations at which it was computed.
        values: its values there, without those that failed.
    """

    iterations: Sequence[int]
    values: Sequence[float]

    @property
    def best(self) -> int:
        """The index of the largest value."""
        return max(range(len(self.values)), key=self.values.__getitem__)


@dataclass
class Progress:
    """What a run has done, from its events (`flowrl.run.job.Report`) and its metrics.

    Args:
        out: the run's folder.
        config: its settings.
        now: a clock, in seconds.
    """

    out: Path
    config: "RunConfig"
    now: Callable[[], float] = time.monotonic
    rows: list[dict[str, Any]] = field(default_factory=list)
    phase: str = "loading"
    slow: str = ""
    warnings: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=3))

    def __post_init__(self) -> None:
        self.since = self.now()
        self.lasting = self.since  # since the last row
        self._read, self._began, self._resumed_at = 0, math.nan, -1
        self._saves, self._rewards, self._counted = list[float](), dict[str, Series](), 0

    def update(self, state: dict[str, Any]) -> None:
        """Take an event of the run."""
        if state.get("phase", self.phase) != self.phase:
            self._enter(state["phase"])
        self.slow = state.get("slow", self.slow)
        # before a resume has begun, metrics.jsonl may have rows that it will compute again
        begun = "warning" in state and not math.isnan(self._began)
        if begun or "iteration" in state or "heldout" in state:
            self._read_rows()
        if "warning" in state:
            self.warnings.extend((self.done, text) for text in state["warning"].splitlines())

    def _enter(self, phase: str) -> None:
        now = self.now()
        if self.phase == "saving":
            self._saves.append(now - self.since)
        self.phase, self.slow, self.since = phase, "", now
        if phase == "rollout" and math.isnan(self._began):
            self._read_rows()
            self._began, self._resumed_at = now, self.done

    def _read_rows(self) -> None:
        file = self.out / "metrics.jsonl"
        lines = read_text(file).splitlines() if file.exists() else []
        self.rows += map(json.loads, lines[self._read :])
        self._read, self.lasting = len(lines), self.now()

    @property
    def done(self) -> int:
        """Complete iterations."""
        return self.rows[-1]["iteration"] if self.rows else 0

    @property
    def total(self) -> int:
        """All iterations."""
        return self.config.iterations

    @property
    def row(self) -> dict[str, Any]:
        """The last iteration's row; empty before the first one."""
        return self.rows[-1] if self.done else {}

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations so far."""
        return [row["evaluation"] for row in self.rows if row["evaluation"]]

    def rewards(self) -> dict[str, Series]:
        """The "training" reward, the "held out" one and the further scores of evaluations by label,
        on one scale: since the last change of what is scored.
        """
        if self._rewards and self._counted == len(self.rows):
            return self._rewards
        found = dict[str, list[tuple[int, float]]]()
        for row in comparable(self.rows):
            evaluation = row["evaluation"] or {}
            scores = {"training": row.get("reward_mean"), "held out": evaluation.get("reward")}
            scores["strict"] = evaluation.get("strict")
            scores |= evaluation.get("sources", {}) | evaluation.get("heldout", {})
            scores["diversity"] = evaluation.get("diversity")
            for name, value in scores.items():
                if value is not None and math.isfinite(value):
                    found.setdefault(short(name), []).append((row["iteration"], value))
        self._counted = len(self.rows)
        self._rewards = {name: Series(*zip(*row, strict=True)) for name, row in found.items()}
        return self._rewards

    def reward_text(self, label: str, value: float | None) -> str:
        """A value of one of the `rewards` with the digits that fit it."""
        series = self.rewards().get(label)
        return reward_text(value, series.values if series else ())

    def phases(self) -> dict[str, float]:
        """Seconds of an iteration by phase, and of an evaluation; means of the last iterations."""
        recent = [row["phases"] for row in self._usual() if "phases" in row]
        names = dict.fromkeys(name for phases in recent for name in phases)
        order = [name for name in ("rollout", "decode", "reward", "update") if name in names]
        order += [name for name in names if name not in order]
        means = {
            name: statistics.fmean(phases.get(name, 0.0) for phases in recent) for name in order
        }
        return means | ({"evaluation": self.evaluation_seconds} if self.evaluations else {})

    @property
    def iteration_seconds(self) -> float:
        """Seconds of an iteration."""
        return _mean(self._usual(), "seconds")

    @property
    def evaluation_seconds(self) -> float:
        """Seconds of an evaluation; the first one of a run may compile the network."""
        evaluations = self.evaluations
        return _mean(evaluations[1:][-RECENT:] or evaluations, "seconds")

    def _usual(self) -> list[dict[str, Any]]:
        """The last iterations, without the first one of the run and of this start, which may have
        compiled the network.
        """
        rows = [row for row in self.rows if row["iteration"]]
        first = (1, self._resumed_at + 1)
        return [row for row in rows if row["iteration"] not in first][-RECENT:] or rows[-1:]

    def left(self) -> float | None:
        """Seconds from the last row to the end of the run; None before the first iteration.

        (iterations left) x (seconds of one, and what else it takes: observers, writers)
        + (evaluations left) x (seconds of one) + (checkpoints left) x (seconds of one)
        + after a resume, until its first iteration is complete, what the run's first one took
        longer than the others.
        """
        if not self.done:
            return None
        if "stopped" in self.row or self.done == self.total:
            return 0.0
        mean, done, total = self.iteration_seconds, self.done, self.total
        saves = statistics.fmean(self._saves) if self._saves else 0.0
        first = self.rows[1]["seconds"] if done == self._resumed_at else mean
        return (
            (total - done) * (mean + self._other())
            + times_left(done, total, self.config.evaluation.eval_every) * self.evaluation_seconds
            + times_left(done, total, self.config.logging.checkpoint_every) * saves
            + max(0.0, first - mean)
        )

    def _other(self) -> float:
        """Seconds per iteration of this start that are neither its own nor those of an evaluation
        or of a checkpoint.
        """
        count = self.done - self._resumed_at
        if math.isnan(self._began) or not count:
            return 0.0
        counted = sum(self._saves)
        for row in self.rows[-count:]:
            counted += row["seconds"] + (row["evaluation"] or {}).get("seconds", 0.0)
        return max(0.0, self.lasting - self._began - counted) / count

    def elapsed(self) -> float:
        """Seconds of all iterations and evaluations up to the last row."""
        total = self.rows[-1]["seconds_total"] if self.rows else 0.0
        return total + sum(evaluation["seconds"] for evaluation in self.evaluations)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows) if rows else 0.0


def train_line(out: Path, config: "RunConfig", every: int = 0) -> Callable[[dict[str, Any]], None]:
    """Progress of a single run in plain lines: what it says, and every `every` iterations one line;
    also after the first iteration, with an evaluation or a warning, and at the end.

    Args:
        out: the run's folder.
        config: its settings.
        every: iterations per line; 0: one, or in a run of more than 100 iterations as many as make
            about `LINES` lines.
    """
    progress, printed = Progress(out, config), 0
    total = config.iterations
    every = every or (1 if total <= 100 else math.ceil(total / LINES))

    def show(state: dict[str, Any]) -> None:
        nonlocal printed
        progress.update(state)
        if text := said_text(state):
            print(text, flush=True)
        row = progress.row
        if "iteration" not in state:
            return
        last = row["iteration"] == total or "stopped" in row
        due = row["iteration"] % every == 0 or row["evaluation"] or row.get("warnings")
        if due or last or not printed:
            printed += 1
            print(line_text(progress), flush=True)

    return show


def line_text(progress: Progress) -> str:
    """The last iteration on one line, with its evaluation if it has one."""
    row = progress.row
    line = (
        f"iteration {progress.done:3d}/{progress.total}"
        f"  reward {progress.reward_text('training', row['reward_mean'])}"
        f"  rollout NFE {row['nfe_total']:>9,}"
        f"  {clock(progress.elapsed())}, left: {clock(progress.left())}"
    )
    if not (evaluation := row["evaluation"]):
        return line
    scores = {"reward": evaluation["reward"], "strict": evaluation.get("strict")}
    named = evaluation.get("sources", {}) | evaluation.get("heldout", {})
    scores |= {short(name): score for name, score in named.items()}
    scores |= {"diversity": evaluation["diversity"]} if "diversity" in evaluation else {}
    texts = [
        f"{name} {progress.reward_text('held out' if name == 'reward' else name, score)}"
        for name, score in scores.items()
        if score is not None or name != "strict"
    ]
    return f"{line}  held out: {', '.join(texts)}"
