"""The page of a run, or of several side by side: curves, samples, warnings, changes of settings,
and the commands that continue, evaluate and export it.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flowrl.core.errors import FlowrlError
from flowrl.run.checkpoint import Checkpoints, to_resume
from flowrl.run.io import write_bytes
from flowrl.run.logging import scalars
from flowrl.run.reading import read_bytes, read_text
from flowrl.run.records import RunRecord, load_run
from flowrl.run.report.pages import render
from flowrl.run.report.style import INK, SOFT, clean, colour, png
from flowrl.run.results import changes_of, decimals, short
from flowrl.run.saved import best_checkpoint

HELD_OUT = "held-out reward"
FIXED = {
    "training reward": "reward_mean",
    HELD_OUT: "evaluation/reward",
    "KL to the base model": "kl",
    "KL to the sampling policy": "approx_kl",
    "clipped share": "clip_fraction",
    "std of rewards within a group": "group_std",
    "gradient norm": "grad_norm",
    "seconds of an iteration": "seconds",
}
"""Panels by label: the metric as `flowrl.run.logging.scalars` names it."""
COLUMNS = 3
Curves = Mapping[str, Mapping[int, float]]


def curves_of(run: RunRecord) -> dict[str, dict[int, float]]:
    """Every number in a run's rows by its name, then by iteration."""
    curves: dict[str, dict[int, float]] = {}
    for row in run.rows:
        for name, value in scalars(row).items():
            curves.setdefault(name, {})[row["iteration"]] = value
    return curves


def panels_of(curves: Sequence[Curves]) -> dict[str, str]:
    """The metrics to draw by label: those of `FIXED` that a run has, the parts of its reward, and
    what its evaluations measured.
    """
    known = dict.fromkeys(name for run in curves for name in run)
    chosen = {label: name for label, name in FIXED.items() if name in known}
    order = [("evaluation/heldout/", "held out: "), ("evaluation/", ""), ("parts/", "part: ")]
    shown = {"evaluation/reward", "evaluation/seconds"}
    for prefix, label in order:
        for name in known:
            if name.startswith(prefix) and name not in shown:
                shown.add(name)
                chosen.setdefault(label + short(name.removeprefix(prefix)), name)
    return chosen


def curve_figure(runs: Mapping[str, RunRecord]) -> Figure:
    """A panel per metric with a line per run; a dotted line at each change of settings, and a star
    at the best held-out reward.
    """
    curves = {name: curves_of(run) for name, run in runs.items()}
    panels = panels_of(list(curves.values()))
    lines = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(11, 2.5 * lines + 0.4), layout="constrained")
    cells = figure.subplots(lines, COLUMNS, squeeze=False).flatten()
    for axes, (label, metric) in zip(cells, panels.items(), strict=False):
        for name, found in curves.items():
            if metric in found:
                _draw(axes, found[metric], colour(name, list(runs)), name, label == HELD_OUT)
        for run in runs.values():
            for iteration, _ in changes_of(run.rows):
                axes.axvline(iteration - 0.5, color=SOFT, linestyle=":", linewidth=1)
        axes.set_title(label, fontsize=9.5, loc="left", color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        clean(axes)
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    if len(runs) > 1:
        handles = cells[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper left", ncols=3, frameon=False)
    return figure


def _draw(axes: Axes, values: Mapping[int, float], shade: str, name: str, star: bool) -> None:
    finite = {x: y for x, y in values.items() if math.isfinite(y)}
    x, y = list(finite), list(finite.values())
    sparse = len(x) < 2 or x[-1] - x[0] > len(x) - 1
    style = {"marker": "o", "markersize": 3.5} if sparse else {}
    axes.plot(x, y, color=shade, linewidth=1.6, label=name, **style)
    if star and y:
        best = max(range(len(y)), key=y.__getitem__)
        axes.plot(x[best], y[best], "*", color=shade, markersize=11)


def _summary(run: RunRecord) -> list[tuple[str, str]]:
    """What a reader wants first: state, held-out reward at the start, now and at best."""
    last, total = run.rows[-1], run.settings.get("iterations", "?")
    kept = Checkpoints(run.folder)
    facts = [
        ("state", f"{run.state}, iteration {last['iteration']} of {total}"),
        ("checkpoints", kept.listed()),
    ]
    rewards = [(row["evaluation"]["reward"], row["iteration"]) for row in run.evaluations]
    if rewards:
        digits = decimals(*(value - rewards[0][0] for value, _ in rewards))
        named = {"start": rewards[0], "now": rewards[-1], "best": max(rewards)}
        text = ", ".join(f"{n} {v:.{digits}f} (iteration {i})" for n, (v, i) in named.items())
        facts.insert(1, (HELD_OUT, text))
    facts.append(("training", f"{last['seconds_total']:,.0f} s, {_images(run):,.0f} images"))
    return facts


def _images(run: RunRecord) -> float:
    return sum(row.get("trajectories", 0) for row in run.rows if row["iteration"] > 0)


def _commands(folder: Path) -> list[tuple[str, str]]:
    """What can be done with a run now."""
    commands = [("continue", to_resume(folder))]
    try:
        name = f"{folder}@{'best' if best_checkpoint(folder) else ''}"
    except FlowrlError:
        name = str(folder)
    commands += [("evaluate", f"flowrl evaluate --weights {name}")]
    return [
        *commands,
        ("sample", f"flowrl sample --weights {name}"),
        ("export", f"flowrl export {name}"),
    ]


def _warnings(run: RunRecord) -> list[tuple[int, str]]:
    return [(row["iteration"], w["text"]) for row in run.rows for w in row.get("warnings", ())]


def run_page(folders: Sequence[Path]) -> str:
    """The HTML page of the runs in `folders`, in any state: self-contained, without scripts."""
    runs = {_label(folder, folders): load_run(folder) for folder in folders}
    strips = {
        name: (read_bytes(path), _prompts(run.folder))
        for name, run in runs.items()
        if (path := run.folder / "samples" / "over-time.png").exists()
    }
    return render(
        "run.html.j2",
        runs=runs,
        curves=png(curve_figure(runs), dpi=110),
        summaries={name: _summary(run) for name, run in runs.items()},
        changes={name: changes_of(run.rows) for name, run in runs.items()},
        warnings={name: _warnings(run) for name, run in runs.items()},
        commands={name: _commands(run.folder) for name, run in runs.items()},
        strips=strips,
    )


def _label(folder: Path, folders: Sequence[Path]) -> str:
    same = [other for other in folders if other.name == folder.name]
    return str(folder) if len(same) > 1 else folder.resolve().name


def _prompts(folder: Path) -> list[str]:
    path = folder / "samples" / "prompts.txt"
    return read_text(path).splitlines() if path.exists() else []


def run_table(folders: Sequence[Path]) -> str:
    """All numbers of the runs in `folders` as CSV: a line per run and iteration."""
    runs = {_label(folder, folders): load_run(folder) for folder in folders}
    rows = [(name, scalars(row)) for name, run in runs.items() for row in run.rows]
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *columns])
    writer.writerows([name, *(row.get(key, "") for key in columns)] for name, row in rows)
    return text.getvalue()


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Write the page, and beside it the numbers as CSV."""
    page: Any = run_page(folders)
    write_bytes(out, page.encode())
    write_bytes(out.with_suffix(".csv"), run_table(folders).encode())
