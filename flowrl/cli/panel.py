"""A live panel of a run in progress, on a terminal."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

import psutil
import torch
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flowrl.cli.progress import Progress, Series, clock, said_text
from flowrl.run.watch import PHASES
from flowrl.run.workers import launch_rank

if TYPE_CHECKING:
    from flowrl.run.config import RunConfig

LEAST = (70, 24)
"""Columns and lines that the panel needs."""
LONGEST = 40
"""Characters of a model's name with its folders."""
NO_BREAK = "\u00a0"
BARS = "▁▂▃▄▅▆▇█"
SHORT = {"rollout": "sampling", "decode": "decoding"}
"""Phases whose name in a table is not that of metrics.jsonl."""


def fits_terminal() -> bool:
    """Whether standard output is a terminal on which the panel can be drawn."""
    out, variables = sys.stdout, os.environ
    if not out.isatty() or variables.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    if any(map(variables.get, ("CI", "JPY_PARENT_PID"))):  # a cell of a notebook is none
        return False
    size = Console().size
    return (out.encoding or "").lower().startswith("utf") and (
        size.width >= LEAST[0] and size.height >= LEAST[1]
    )


def sparkline(series: Series, first: int, last: int, width: int) -> str:
    """The trend of a reward from iteration `first` to `last` in at most `width` characters: the
    mean of the values in each part of this range, or the one before if a part has none.
    """
    count = min(width, last - first + 1)
    parts = [list[float]() for _ in range(count)]
    for iteration, value in zip(series.iterations, series.values, strict=True):
        parts[max(0, iteration - first) * count // (last - first + 1)].append(value)
    means, before = list[float](), series.values[0]
    for part in parts:
        before = sum(part) / len(part) if part else before
        means.append(before)
    low, high, top = min(means), max(means), len(BARS) - 1
    return "".join(BARS[round((m - low) / (high - low) * top) if high > low else 0] for m in means)


@dataclass
class Trend:
    """A `sparkline` as wide as its column, from the first to the last of the `shown` iterations."""

    series: Series
    shown: tuple[int, int]
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self.series, *self.shown, options.max_width), self.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)


def facts(texts: Mapping[str, str], styles: Mapping[str, str] = MappingProxyType({})) -> Text:
    """Labels with their values on one line, which is broken only between them."""
    parts = [
        Text.assemble((f"{name} ".replace(" ", NO_BREAK), "dim"), (value, styles.get(name, "")))
        for name, value in ((name, text.replace(" ", NO_BREAK)) for name, text in texts.items())
    ]
    return Text("   ").join(parts)


def seconds_text(seconds: float) -> str:
    """Seconds in about three digits."""
    return f"{seconds:.{2 if seconds < 10 else 1 if seconds < 100 else 0}f} s"


def memory_texts() -> dict[str, str]:
    """The memory of this process, and the largest use of its GPU so far."""
    texts = {"memory": f"{psutil.Process().memory_info().rss / 1e9:.1f} GB"}
    if torch.cuda.is_initialized():
        texts["GPU peak"] = f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
    return texts


@contextmanager
def shown_run(
    out: Path, config: "RunConfig", every: int, panels: list["RunPanel"]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A context with a function of a run's events, which shows them: in a panel, which is added to
    `panels`, or in lines (`train_line`) if the output is not a terminal that fits.
    """
    from flowrl.cli.progress import train_line
    from flowrl.run.build import method_parts

    if not fits_terminal() or launch_rank() > 0:
        yield train_line(out, config, every)
        return
    subject = config.policy.model or config.environment.subject
    if len(subject) > LONGEST:
        subject = subject.rstrip("/").rpartition("/")[2]
    clip = float(method_parts(config).get("clip_range", "nan"))
    title = f"{config.algorithm.method} on {subject}, seed {config.seed}"
    panels.append(RunPanel(Progress(out, config), title, clip))
    with panels[-1] as panel:
        yield panel


class RunPanel:
    """A context in which a run is shown. Call it with the run's events; what is printed meanwhile
    appears above the panel.

    Args:
        progress: the state of the run, which this updates.
        title: the method and what it trains.
        clip: the loss's clip range; NaN: none.
        console: the terminal.
    """

    def __init__(
        self,
        progress: Progress,
        title: str,
        clip: float = math.nan,
        console: Console | None = None,
    ) -> None:
        self.progress, self.title, self.clip, self.ended = progress, title, clip, ""
        self.console = console or Console()
        self.spinner = Spinner("dots", style="cyan")
        self.live = Live(
            console=self.console,
            get_renderable=self.render,
            refresh_per_second=4,
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )

    def __call__(self, state: dict[str, Any]) -> None:
        """Take an event of the run, or how it has "ended"."""
        self.ended = state.get("ended", self.ended)
        self.progress.update(state)
        text = said_text({name: value for name, value in state.items() if name != "slow"})
        if text:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> "RunPanel":
        self.live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close("failed" if error else self.ended)

    def close(self, ended: str = "stopped") -> None:
        """Leave the last state on the terminal, with how the run `ended`; also from another
        thread.
        """
        self.ended = ended
        self.live.stop()

    def render(self) -> RenderableType:
        """The panel now."""
        parts = [self._bar(), self._rewards(), self._loss(), self._work(), self._status()]
        return Panel(
            Group(*(part for part in parts if part is not None)),
            title=Text(self.title, "bold"),
            title_align="left",
            subtitle=Text(str(self.progress.out), "dim"),
            subtitle_align="right",
            border_style="dim",
            box=box.ROUNDED,
            padding=(0, 1),
        )

    def _bar(self) -> RenderableType:
        progress, waited = self.progress, self._waited()
        left = progress.left()
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        bar = ProgressBar(progress.total, progress.done, complete_style="green")
        times = f"{clock(progress.elapsed() + waited)}"
        if left is not None and not self.ended:
            times += f", left {clock(max(0.0, left - waited))}"
        row.add_row(Text(f"iteration {progress.done}/{progress.total}", "bold"), bar, times)
        return row

    def _waited(self) -> float:
        """Seconds since the last row, while the run is in progress."""
        return 0.0 if self.ended else self.progress.now() - self.progress.lasting

    def _rewards(self) -> RenderableType | None:
        rewards = dict(self.progress.rewards())
        if not rewards:
            return None
        table = Table(box=None, expand=True, padding=(0, 1, 0, 0), pad_edge=False)
        for name in ("reward", "now", "start", "best", "at"):
            table.add_column(name, justify="left" if name == "reward" else "right", no_wrap=True)
        table.add_column("trend", ratio=1, no_wrap=True)
        for name in ("training", "held out"):
            if series := rewards.pop(name, None):
                table.add_row(*self._reward(name, series))
        others = {name: self._change(name, series) for name, series in rewards.items()}
        return Group(Text(), table, *([facts(others)] if others else []))

    def _reward(self, name: str, series: Series) -> list[RenderableType]:
        text, values = self.progress.reward_text, series.values
        now, start, best = values[-1], values[0], series.best
        style = "green" if now > start else "red" if now < start else ""
        return [
            name,
            Text(text(name, now), f"bold {style}"),
            text(name, start),
            text(name, values[best]),
            Text(f"{series.iterations[best]}", "dim"),
            Trend(series, self._shown(), style or "dim"),
        ]

    def _shown(self) -> tuple[int, int]:
        """The first and the last iteration of the trends."""
        rewards = self.progress.rewards().values()
        first = min(series.iterations[0] for series in rewards)
        return max(first, min(1, self.progress.done)), self.progress.done

    def _change(self, name: str, series: Series) -> str:
        start, now = (self.progress.reward_text(name, series.values[i]) for i in (0, -1))
        return f"{start} → {now}" if len(series.values) > 1 else now

    def _loss(self) -> RenderableType | None:
        row, texts = self.progress.row, dict[str, str]()
        if "kl" in row:
            texts["KL"] = f"{row['kl']:.2g}"
        if "approx_kl" in row:
            texts["KL of update"] = f"{row['approx_kl']:.2g}"
        if "clip_fraction" in row:
            texts["clipped"] = f"{row['clip_fraction']:.0%}"
        if "ratio_noise" in row:
            clip = "" if math.isnan(self.clip) else f" of clip {self.clip:.2g}"
            texts["ratio noise"] = f"{row['ratio_noise']:.1g}{clip}"
        noisy = row.get("ratio_noise", 0.0) > self.clip
        lines = [facts(texts, {"ratio noise": "red"} if noisy else {})] if texts else []
        if looks := row.get("images"):
            labels = {"brightness": "brightness", "contrast": "contrast"}
            labels["diversity"] = "diversity in groups"
            shown = {labels[name]: f"{looks[name]:.2f}" for name in labels if name in looks}
            lines.append(facts({**shown, "constant": f"{looks.get('constant', 0):.0%}"}))
        return Group(*lines)

    def _work(self) -> RenderableType | None:
        """Seconds by phase with their shares, beside rates and memory."""
        phases = self.progress.phases()
        evaluation = phases.pop("evaluation", None)
        if not phases:
            return None
        whole = sum(phases.values()) or 1.0
        left = Table.grid(padding=(0, 1), expand=True)
        for justify in ("left", "right", "right"):
            left.add_column(justify=justify, no_wrap=True)
        left.add_column(ratio=1)
        for name, seconds in phases.items():
            share = seconds / whole
            bar = ProgressBar(1.0, share, complete_style="cyan", finished_style="cyan")
            left.add_row(SHORT.get(name, name), seconds_text(seconds), f"{share:.0%}", bar)
        if evaluation is not None:
            every = self.progress.config.evaluation.eval_every
            text = Text(f"every {every} iterations", "dim")
            left.add_row("evaluation", seconds_text(evaluation), "", text)
        seconds = self.progress.iteration_seconds
        numbers = {
            "iteration": seconds_text(seconds),
            "images": f"{self.progress.row['trajectories'] / max(seconds, 1e-9):.3g}/s",
            **memory_texts(),
        }
        right = Table.grid(padding=(0, 1))
        right.add_column(style="dim")
        right.add_column(justify="right")
        for name, text in numbers.items():
            right.add_row(name, text)
        both = Table.grid(padding=(0, 3), expand=True)
        both.add_column(ratio=1)
        both.add_column()
        both.add_row(left, right)
        return Group(Text(), both, Text())

    def _status(self) -> RenderableType:
        progress = self.progress
        if self.ended:
            return Text(self.ended, "bold red" if self.ended == "failed" else "bold")
        seconds = int(progress.now() - progress.since)
        name = PHASES.get(progress.phase, progress.phase)
        text = Text(progress.slow, "yellow") if progress.slow else Text(f"{name}, {seconds} s")
        row = Table.grid(padding=(0, 1))
        self.spinner.text = ""
        row.add_row(self.spinner, text)
        lines = [
            Text(f"! {at}: {warning}", "yellow", no_wrap=True, overflow="ellipsis")
            for at, warning in progress.warnings
        ]
        return Group(row, *lines)
