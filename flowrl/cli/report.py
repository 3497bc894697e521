"""The results table, and self-contained HTML reports of comparisons and of evaluated weights."""

import io
import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flowrl.cli.figures import curves, phases, proxy_and_heldout
from flowrl.cli.image_grids import NOTICEABLE, base_and_trained, samples, shows_points, trajectory
from flowrl.cli.pages import render
from flowrl.cli.style import MOST_TOGETHER, colour, png
from flowrl.io import write_bytes, write_json
from flowrl.training.presets import MODEL_ONLY
from flowrl.training.results import (
    ArmSummary,
    Comparison,
    Mean,
    load_comparison,
    short,
    summarise,
    summary_values,
)
from flowrl.training.weight_comparison import WeightComparison

Row = tuple[str, Callable[[ArmSummary], str]]
REWARD_ROWS: tuple[Row, ...] = (
    ("final reward", lambda s: s.final.text()),
    ("minus the baseline", lambda s: _lead(s)),
    ("collapsed seeds", lambda s: f"{s.collapsed} of {s.seeds}"),
    ("lowest of a seed", lambda s: f"{s.worst:.3f}"),
    ("final strict success", lambda s: s.final_strict.text()),
    ("reward before", lambda s: f"{s.base.mean:.3f}"),
    ("seeds", lambda s: str(s.seeds)),
)
TO_BASELINE_ROWS: tuple[Row, ...] = (
    ("iterations to baseline", lambda s: _reached(s.to_baseline_iterations, ".1f")),
    ("NFE to baseline", lambda s: _reached(s.to_baseline_nfe, ",.0f")),
    ("seconds to baseline", lambda s: _reached(s.to_baseline_seconds, ".0f")),
)
COST_ROWS: tuple[Row, ...] = (
    ("NFE/trajectory", lambda s: f"{s.nfe_per_trajectory:.1f}"),
    ("network calls/iteration", lambda s: f"{s.calls_per_iteration:.0f}"),
    ("reward calls/trajectory", lambda s: f"{s.rewards_per_trajectory:.1f}"),
    ("s/iteration: rollout", lambda s: f"{s.seconds_rollout:.2f}"),
    ("s/iteration: reward", lambda s: f"{s.seconds_reward:.2f}"),
    ("s/iteration: update", lambda s: f"{s.seconds_update:.2f}"),
)
"""Rows of the results tables: the label, and the cell of an arm."""
PRINTED = (
    "final reward",
    "minus the baseline",
    "collapsed seeds",
    "NFE to baseline",
    "lowest of a seed",
)
"""Columns that are printed; the last ones are left out if the terminal is too narrow, all but
`LEAST_PRINTED`.
"""
LEAST_PRINTED = 3
LEAST_ARM = 12
"""Columns of a terminal that names of arms get at least; longer ones take several lines."""


def _reached(value: float | None, digits: str) -> str:
    return "not reached" if value is None else f"{value:{digits}}"


UNDECIDED = "○"
VERDICTS = {
    "▲": "above the baseline",
    "▼": "below it",
    UNDECIDED: "undecided: the 95% interval contains 0",
}
"""Symbols of a lead: of its interval, not of its mean."""


def verdict(lead: Mean) -> str:
    """The symbol of `VERDICTS` for a difference from the baseline, "" without an interval or for
    the baseline itself.
    """
    if math.isnan(lead.half) or (lead.mean == 0 and lead.half == 0):
        return ""
    return "▲" if lead.mean > lead.half else "▼" if lead.mean < -lead.half else UNDECIDED


def _lead(summary: ArmSummary) -> str:
    """The mean lead with its interval and the symbol of the verdict; empty for the baseline."""
    lead = summary.lead
    return f"{lead.text(sign=True)} {verdict(lead)}".rstrip() if lead.mean or lead.half > 0 else ""


def result_blocks(summaries: Sequence[ArmSummary]) -> dict[str, list[tuple[str, list[str]]]]:
    """The results tables by their titles, as lists of columns: the label, and a cell per arm."""
    names = dict.fromkeys(name for summary in summaries for name in summary.heldout)
    heldout: list[Row] = [
        (name, lambda s, name=name: s.heldout[name].text() if name in s.heldout else "-")
        for name in names
    ]
    blocks: dict[str, Sequence[Row]] = {
        "Rewards": REWARD_ROWS,
        "Proxy and held-out metrics": heldout,
        "Cost until the baseline is reached": TO_BASELINE_ROWS,
        "Cost of an iteration": COST_ROWS,
    }
    return {
        title: [(name, list(map(cell, summaries))) for name, cell in rows]
        for title, rows in blocks.items()
        if rows
    }


def table_rows(summaries: Sequence[ArmSummary]) -> list[tuple[str, list[str]]]:
    """All columns of the results: the label, and a cell per arm."""
    return [column for columns in result_blocks(summaries).values() for column in columns]


def print_table(summaries: Sequence[ArmSummary], console: Console) -> None:
    """Print the most important results as one table with a row per arm, what its symbols mean, and
    the settings in which the arms differ.

    ± is half the width of a 95% interval. Columns at the right are left out if the terminal is too
    narrow.

    Args:
        summaries: the arms' results.
        console: where to print.
    """
    found = {name: cells for name, cells in table_rows(summaries) if any(cells)}
    names = [name for name in PRINTED if name in found]
    left = max([len("arm"), *(len(summary.arm) for summary in summaries)])

    def room() -> int:
        return console.width - 2 - sum(_column_width(name, found[name]) + 2 for name in names)

    while room() < left and len(names) > LEAST_PRINTED:
        names.pop()
    console.print(
        _table(
            summaries, [(name, found[name]) for name in names], max(LEAST_ARM, min(left, room()))
        )
    )
    for line in [*_symbols_used([found[name] for name in names]), *_differences(summaries)]:
        console.print(line, highlight=False, markup=False)


def _table(
    summaries: Sequence[ArmSummary], columns: Sequence[tuple[str, Sequence[str]]], left: int
) -> Table:
    """A row per arm, whose names have `left` characters on a line."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("arm", overflow="fold", vertical="bottom", max_width=left)
    for name, cells in columns:
        heading = textwrap.fill(
            name, _column_width(name, cells), break_long_words=False, break_on_hyphens=False
        )
        table.add_column(escape(heading), justify="right", no_wrap=True, vertical="bottom")
    for row, summary in enumerate(summaries):
        table.add_row(escape(summary.arm), *(escape(cells[row]) for _, cells in columns))
    return table


def _symbols_used(columns: Sequence[Sequence[str]]) -> list[str]:
    """A line on the symbols of `VERDICTS` that occur in the cells; none if there are none."""
    text = " ".join(cell for cells in columns for cell in cells)
    used = [f"{symbol} {meaning}" for symbol, meaning in VERDICTS.items() if symbol in text]
    return ["; ".join(used)] if used else []


def _differences(summaries: Sequence[ArmSummary]) -> list[str]:
    """A line per arm on the settings in which arms differ; none for a method by its own name."""
    return [f"{summary.arm}: {summary.difference}" for summary in summaries if summary.difference]


def _column_width(name: str, cells: Sequence[str]) -> int:
    """The column width in characters for one-line cells below a heading that may break between
    words.
    """
    return max(map(len, [*name.split(), *cells]))


def table_text(summaries: Sequence[ArmSummary]) -> str:
    """All results as plain text in one table, with a line per arm however long."""
    columns = table_rows(summaries)
    left = max([len("arm"), *(len(summary.arm) for summary in summaries)])
    width = left + 4 + sum(_column_width(name, cells) + 4 for name, cells in columns)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(_table(summaries, columns, left))
    lines = [
        *console.export_text().splitlines(),
        *_symbols_used([cells for _, cells in columns]),
        INTERVALS,
        *_differences(summaries),
    ]
    return "\n".join(map(str.rstrip, lines)).strip("\n") + "\n"


INTERVALS = "±: half of the 95% interval over seeds (Student's t)"


def collapse_text(summaries: Sequence[ArmSummary]) -> str:
    """The arms with collapsed seeds, "" if there are none: "Collapsed: tp-grpo 2 of 3 seeds"."""
    found = [
        f"{s.arm} {s.collapsed} of {s.seeds} seed{'s' if s.seeds > 1 else ''}"
        for s in summaries
        if s.collapsed
    ]
    return f"Collapsed: {', '.join(found)}" if found else ""


MACHINE_SPREAD = {"mixture": 0.009, "shapes": 0.009}
"""Difference of the mean final reward of three seeds between an AMD EPYC and an Intel Xeon, by
world: the root mean square over the three papers' methods, from 30 runs in two dimensions and from
the default comparison of images.
"""


def headline(comparison: Comparison, summaries: Sequence[ArmSummary]) -> str:
    """The result in a few sentences: every arm's difference in final reward from the baseline, and
    its reliability.

    Args:
        comparison: the comparison.
        summaries: the arms' results.

    Returns:
        The text.
    """
    if not summaries:
        return "No run has been evaluated yet."
    base = next((s for s in summaries if s.arm == comparison.baseline), summaries[0])
    several = min(summary.seeds for summary in summaries) > 1
    what = (
        "The held-out reward"
        if comparison.metric == ("reward",)
        else (
            "The arms are trained on different rewards. The held-out"
            f" {short(comparison.metric[-1])}"
        )
    )
    texts = [f"{what} of {_named(base)} changes from {base.base.mean:.3f} to {base.final.text()}"]
    others = [summary for summary in summaries if summary is not base]
    for other in others if len(others) < MOST_TOGETHER else ():
        gap = other.lead.mean
        end = f"{_named(other)} ends {abs(gap):.3f} {'above' if gap >= 0 else 'below'} it"
        if several and not math.isnan(other.lead.half):
            end += f" (95% interval {gap - other.lead.half:+.3f} to {gap + other.lead.half:+.3f})"
        texts.append(end)
    if len(others) >= MOST_TOGETHER and several:
        groups = {
            symbol: [s.arm for s in others if verdict(s.lead) == symbol] for symbol in VERDICTS
        }
        names = {symbol: ", ".join(some) if some else "none" for symbol, some in groups.items()}
        texts.append(f"above it by the 95% intervals: {names['▲']}")
        texts += [f"below it: {names['▼']}", f"not distinguishable from it: {names[UNDECIDED]}"]
    seeds = f"{base.seeds} seeds." if several else "With one seed, the interval is unknown."
    return (
        f"{'; '.join(texts)}."
        f" {seeds}{_machine(comparison, [s.lead.mean for s in summaries if s is not base])}"
    )


def _named(summary: ArmSummary) -> str:
    """The name of an arm with the settings in which it differs."""
    return f"{summary.arm} ({summary.difference})" if summary.difference else summary.arm


def _machine(comparison: Comparison, leads: Sequence[float]) -> str:
    """A caveat if the leads are so small that another processor may change them; else ""."""
    spread = MACHINE_SPREAD.get(comparison.config["run"]["environment"]["world"], 0.0)
    if all(abs(lead) >= spread for lead in leads):
        return ""
    return f" A difference below {spread:g} may also come from the rounding of another processor."


NUMBERS = ("noise_level", "clip_range")
"""Settings that are the method's if they are 0."""


def write_report(folder: Path) -> Path:
    """Write summary.json, table.txt, the figures (PNG) and report.html of the comparison in
    `folder`; returns the page's path.
    """
    comparison = load_comparison(folder)
    summaries, config = summarise(comparison), comparison.config
    shared = comparison.shared
    algorithm = shared["algorithm"]
    images = (
        {name: png(figure) for name, figure in _figures(comparison).items() if figure is not None}
        if summaries
        else {}
    )
    for name, image in images.items():
        write_bytes(folder / f"{name}.png", image)
    write_json(folder / "summary.json", summary_values(summaries))
    write_bytes(folder / "table.txt", table_text(summaries).encode())
    page = render(
        "report.html.j2",
        comparison=comparison,
        run=shared,
        headline=headline(comparison, summaries),
        unfinished=len(config["arms"]) * len(config["seeds"])
        - sum(run.finished for run in comparison.runs),
        colours={summary.arm: colour(summary.arm, list(config["arms"])) for summary in summaries},
        blocks=result_blocks(summaries) if summaries else {},
        model_only=() if shared["environment"]["world"] == "model" else MODEL_ONLY,
        of_methods=[
            name
            for name, value in algorithm.items()
            if value == "" or (name in NUMBERS and not value)
        ],
        verdicts=VERDICTS,
        points=shows_points(comparison),
        every=shared["evaluation"]["eval_every"],
        many=len(summaries) > MOST_TOGETHER,
        images=images,
        noticeable=NOTICEABLE,
        narrow={
            name: png(figure, NARROW_DPI)
            for name, figure in _narrow(comparison, images).items()
            if figure is not None
        },
    )
    write_bytes(folder / "report.html", page.encode())
    return folder / "report.html"


def _figures(comparison: Comparison) -> dict[str, Figure | None]:
    runs = {arm: comparison.of(arm) for arm in comparison.arms}
    return {
        "curves": curves(comparison),
        "strict": curves(comparison, "strict"),
        "samples": samples(comparison),
        "trajectory": trajectory(comparison),
        "phases": phases(comparison),
        "proxy": proxy_and_heldout(runs),
    }


NARROW_DPI = 170


def _narrow(comparison: Comparison, drawn: Collection[str]) -> dict[str, Figure | None]:
    """Figures of the page on a phone instead of those of the same names in `drawn`; the others are
    scaled.
    """
    found: dict[str, Callable[[], Figure | None]] = {
        "curves": lambda: curves(comparison, narrow=True),
        "strict": lambda: curves(comparison, "strict", narrow=True),
        "trajectory": lambda: trajectory(comparison, narrow=True),
        "phases": lambda: phases(comparison, narrow=True),
    }
    found |= (
        {"samples": lambda: samples(comparison, narrow=True)} if shows_points(comparison) else {}
    )
    return {name: draw() for name, draw in found.items() if name in drawn}


def write_evaluation(found: WeightComparison, folder: Path, html: bool) -> None:
    """Write evaluation.json and grid.png, and report.html with the scores, the images and the
    prompts with the largest changes.

    Args:
        found: the comparison of weights.
        folder: the folder for the files.
        html: write report.html.
    """
    image = png(base_and_trained(found), dpi=120)
    write_bytes(folder / "grid.png", image)
    write_json(folder / "evaluation.json", found.values())
    if html:
        page = render(
            "evaluation.html.j2", found=found, image=image, changes=largest_changes(found)
        )
        write_bytes(folder / "report.html", page.encode())


def largest_changes(found: WeightComparison, count: int = 5) -> list[tuple[str, str]]:
    """The prompts with the largest gains and losses by the first reward.

    Args:
        found: the comparison of weights.
        count: number of prompts with gains, and with losses.

    Returns:
        Pairs (prompt, formatted change).
    """
    name = next(iter(found.scores))
    change = (
        found.trained.scores[name].nanmean(1) - found.base.scores[name].nanmean(1)
    ).nan_to_num(0.0)
    order = change.argsort(descending=True).tolist()
    chosen = dict.fromkeys([*order[:count], *order[-count:]])
    return [(found.prompts[i], f"{float(change[i]):+.4f}") for i in chosen]
