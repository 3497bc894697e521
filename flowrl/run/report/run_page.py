"""The page of a run, or of several side by side: state, curves, images, warnings, settings with
their origin, costs, and the commands that continue, evaluate and export it.
"""

import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.core.errors import FlowrlError
from flowrl.run.checkpoint import Checkpoints, to_resume
from flowrl.run.ended import recorded_error
from flowrl.run.io import write_bytes
from flowrl.run.origins import read_origins
from flowrl.run.parts.trust import trust_option
from flowrl.run.reading import read_bytes
from flowrl.run.records import RunRecord, load_run
from flowrl.run.report.pages import render
from flowrl.run.report.run_curves import HELD_OUT, panels_of
from flowrl.run.report.run_images import OverTime, Sample, extremes, samples_over_time
from flowrl.run.results import BEST, best_apart, changes_of, decimals
from flowrl.run.saved import best_of
from flowrl.run.table import columns_of, csv_text, scalars

PAGE = "report.html"
"""The page in a run's folder."""
REFRESH = 30
"""Seconds after which a browser loads the page of a run in progress again."""
NOISE_OVER = 20
"""Iterations over which the noise scale is a mean."""
Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class Setting:
    """A setting of a run with its value and its origin; that of a default may be empty."""

    name: str
    value: str
    origin: str

    @property
    def chosen(self) -> bool:
        """Whether the setting has another origin than a default."""
        return bool(self.origin) and not self.origin.startswith("default")


@dataclass(frozen=True)
class RunView:
    """What the page shows of a run, besides its curves."""

    run: RunRecord
    state: str
    summary: Facts
    changes: list[tuple[int, str]]
    samples: list[OverTime]
    strip: bytes
    extremes_of: int
    extremes: list[Sample]
    warnings: list[tuple[int, str]]
    settings: list[Setting]
    costs: Facts
    commands: Facts

    @property
    def running(self) -> bool:
        """Whether the run is in progress."""
        return self.state == RUNNING


RUNNING = "running"


def run_page(folders: Sequence[Path], running: Collection[Path] = ()) -> str:
    """The HTML page of the runs in `folders`, in any state: self-contained, without scripts. A
    browser loads it again while a run is in progress.

    Args:
        folders: the folders of the runs.
        running: those of them in progress.
    """
    views = {
        _label(folder, folders): _view(load_run(folder), folder in running) for folder in folders
    }
    return render(
        "run.html.j2",
        views=views,
        panels=panels_of([view.run for view in views.values()]),
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        refresh=REFRESH * any(view.running for view in views.values()),
        differences=_differences(views) if len(views) > 1 else {},
    )


def _view(run: RunRecord, running: bool) -> RunView:
    state, (extremes_of, worst) = _state(run, running), extremes(run)
    samples, strip = samples_over_time(run), run.folder / "samples" / "over-time.png"
    return RunView(
        run,
        state,
        _summary(run, state),
        changes_of(run.rows),
        samples,
        read_bytes(strip) if not samples and strip.exists() else b"",  # of an earlier version
        extremes_of,
        worst,
        [(row["iteration"], w["text"]) for row in run.rows for w in row.get("warnings", ())],
        _settings(run),
        _costs(run),
        _commands(run),
    )


def _state(run: RunRecord, running: bool) -> str:
    """Whether the run is in progress, or how it has ended."""
    if running and not run.finished:
        return RUNNING
    if run.finished or run.rows[-1].get("stopped"):
        return run.state
    error = recorded_error(run.folder)
    return f"stopped by an error: {error}" if error else "not running: paused, or killed"


def _summary(run: RunRecord, state: str) -> Facts:
    """What a reader wants first: state, held-out reward at the start, now and at best."""
    last, total = run.rows[-1], run.settings.get("iterations", "?")
    facts = [("state", state), ("iteration", f"{last['iteration']} of {total}")]
    rewards = [(row["evaluation"]["reward"], row["iteration"]) for row in run.evaluations]
    if rewards:
        digits = decimals(*(value - rewards[0][0] for value, _ in rewards))
        named = {"start": rewards[0], "now": rewards[-1], "best": max(rewards)}
        text = ", ".join(f"{n} {v:.{digits}f} (iteration {i})" for n, (v, i) in named.items())
        facts.append((HELD_OUT, text))
    if exported := last.get("exported"):
        facts.append(("result", f"the weights of iteration {exported}"))
    if best := best_apart(run.folder):
        text = f"{BEST}/ has the weights of iteration {best}, the best evaluation"
        facts.append(("result", f"the weights of iteration {last['iteration']}; {text}"))
    if scale := _noise_scale(run):
        facts.append(("noise scale", scale))
    return [*facts, ("checkpoints", Checkpoints(run.folder).listed())]


def _noise_scale(run: RunRecord) -> str:
    """The prompts of an update whose gradient has as much noise as signal, by the last iterations;
    "" if too few of them know it.
    """
    known = [row for row in run.rows[-NOISE_OVER:] if "gradient_noise" in row]
    groups, updates = (run.settings.get(name) for name in ("groups", "minibatches"))
    if 2 * len(known) < NOISE_OVER or not groups or not updates:
        return ""
    signal, noise = (sum(row[f"gradient_{name}"] for row in known) for name in ("signal", "noise"))
    own = groups / updates
    scale = f"{own * noise / signal:.2g} prompts" if signal > 0 else "the noise hides the signal"
    return f"{scale}, an update has {own:g} (the last {len(known)} iterations)"


def _costs(run: RunRecord) -> Facts:
    """What the run has computed, and the seconds of its phases."""
    rows, last = [row for row in run.rows if row["iteration"] > 0], run.rows[-1]
    images = sum(row.get("trajectories", 0) for row in rows)
    calls, update = last.get("reward_calls_total", 0), last.get("train_nfe_total", 0)
    seconds = dict[str, float]()
    for row in rows:
        for phase, spent in row.get("phases", {}).items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    total = last["seconds_total"]
    phases = [f"{name} {s:,.1f} ({s / total:.0%})" for name, s in seconds.items() if total]
    tried = [row["evaluation"].get("seconds", 0.0) for row in run.evaluations]
    facts = [
        ("images", f"{images:,.0f} for training, {calls:,.0f} scores"),
        ("network evaluations", f"{last['nfe_total']:,.0f} of rollouts, {update:,.0f} of updates"),
        ("seconds of training", ": ".join(filter(None, (f"{total:,.1f}", ", ".join(phases))))),
        ("seconds of evaluations", f"{sum(tried):,.1f} ({len(tried)} evaluations)"),
        ("device", str(run.settings.get("device", "?"))),
    ]
    return facts + _failures(run.rows)


def _failures(rows: Sequence[Mapping[str, Any]]) -> Facts:
    """Calls of rewards that failed, and samples without a score, also of evaluations."""
    failed = dict[str, int]()
    counts = [*rows, *(row["evaluation"] for row in rows if row.get("evaluation"))]
    for row in counts:
        for name, count in row.get("reward_errors", {}).items():
            failed[name] = failed.get(name, 0) + count
    skipped = sum(row.get("skipped", 0) for row in counts)
    invalid = sum(row.get("invalid", 0) for row in rows)
    facts = [("failed reward calls", ", ".join(f"{name} {n:,}" for name, n in failed.items()))]
    facts += [("skipped samples", f"{skipped:,}" if skipped else "")]
    facts += [("invalid samples", f"{invalid:,}" if invalid else "")]
    return [(label, text) for label, text in facts if text]


def _settings(run: RunRecord) -> list[Setting]:
    """All settings with their origin."""
    values = {"seed": run.seed, **run.settings}
    origins = read_origins(run.folder, values)
    return [Setting(n, _text(value), origins.get(n, "")) for n, value in values.items()]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _differences(views: Mapping[str, RunView]) -> dict[str, list[str]]:
    """The settings in which the runs differ: their values in the order of the runs."""
    settings = [{one.name: one.value for one in view.settings} for view in views.values()]
    names = dict.fromkeys(name for values in settings for name in values)
    rows = {name: [values.get(name, "") for values in settings] for name in names}
    return {name: row for name, row in rows.items() if len({*row}) > 1}


def _commands(run: RunRecord) -> Facts:
    """What can be done with a run now."""
    name, trust = shlex.quote(str(run.folder)), trust_option(run.settings)
    with suppress(FlowrlError):
        best_of(run)
        name = shlex.quote(f"{run.folder}@best")
    return [
        ("continue", to_resume(run.folder)),
        ("evaluate", f"flowrl evaluate --weights {name}{trust}"),
        ("sample", f"flowrl sample --weights {name}{trust}"),
        ("export", f"flowrl export {name}"),
    ]


def _label(folder: Path, folders: Sequence[Path]) -> str:
    same = [other for other in folders if other.name == folder.name]
    return str(folder) if len(same) > 1 else folder.resolve().name


def run_table(folders: Sequence[Path]) -> str:
    """All numbers of the runs in `folders` as CSV: a line per run and iteration."""
    runs = {_label(folder, folders): load_run(folder) for folder in folders}
    rows = [(name, scalars(row)) for name, run in runs.items() for row in run.rows]
    columns = columns_of(row for _, row in rows)
    lines = [[name, *(row.get(key, "") for key in columns)] for name, row in rows]
    return csv_text([["run", *columns], *lines])


def write_page(page: str, out: Path) -> None:
    """Write a page atomically."""
    write_bytes(out, page.encode())
