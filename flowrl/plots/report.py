"""The results table, and self-contained HTML reports of comparisons and of evaluated weights."""

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flowrl.diagnostics.weight_comparison import WeightComparison
from flowrl.io import write_bytes, write_json
from flowrl.plots.figures import curves, phases, proxy_and_heldout
from flowrl.plots.image_grids import base_and_trained, samples, trajectory
from flowrl.plots.pages import render
from flowrl.plots.style import MOST_TOGETHER, colour, png
from flowrl.training.results import Comparison, Mean, MethodSummary, load_comparison, summarise, summary_values

Row = tuple[str, Callable[[MethodSummary], str]]
ROWS: tuple[Row, ...] = (
    ("seeds", lambda s: str(s.seeds)),
    ("reward before", lambda s: f"{s.base.mean:.3f}"),
    ("final reward", lambda s: s.final.text()),
    ("minus the baseline", lambda s: _lead(s)),
    ("lowest of a seed", lambda s: f"{s.worst:.3f}"),
    ("collapsed seeds", lambda s: f"{s.collapsed} of {s.seeds}"),
    ("final strict success", lambda s: s.final_strict.text()),
    ("iterations to baseline", lambda s: _reached(s.to_baseline_iterations, ".1f")),
    ("NFE to baseline", lambda s: _reached(s.to_baseline_nfe, ",.0f")),
    ("seconds to baseline", lambda s: _reached(s.to_baseline_seconds, ".0f")),
    ("NFE/trajectory", lambda s: f"{s.nfe_per_trajectory:.1f}"),
    ("network calls/iteration", lambda s: f"{s.calls_per_iteration:.0f}"),
    ("reward calls/trajectory", lambda s: f"{s.rewards_per_trajectory:.1f}"),
    ("s/iteration: rollout", lambda s: f"{s.seconds_rollout:.2f}"),
    ("s/iteration: reward", lambda s: f"{s.seconds_reward:.2f}"),
    ("s/iteration: update", lambda s: f"{s.seconds_update:.2f}"),
)
"""Rows of the results table: the label, and the cell of a method. Held-out metrics follow the row of strict success."""


def _reached(value: float | None, digits: str) -> str:
    return "not reached" if value is None else f"{value:{digits}}"


UNDECIDED = "○"
VERDICTS = {"▲": "above the baseline", "▼": "below it", UNDECIDED: "undecided: the 95% interval contains 0"}
"""Symbols of a lead: of its interval, not of its mean."""


def verdict(lead: Mean) -> str:
    """The symbol of `VERDICTS` for a difference from the baseline, "" without an interval or for the baseline itself."""
    if math.isnan(lead.half) or (lead.mean == 0 and lead.half == 0):
        return ""
    return "▲" if lead.mean > lead.half else "▼" if lead.mean < -lead.half else UNDECIDED


def _lead(summary: MethodSummary) -> str:
    """The mean lead with its interval and the symbol of the verdict; empty for the baseline."""
    lead = summary.lead
    return f"{lead.text(sign=True)} {verdict(lead)}".rstrip() if lead.mean or lead.half > 0 else ""


COST = "iterations to baseline"
"""The first row of the results table on cost rather than on rewards."""
HELDOUT_AFTER = 7
"""Rows of the results table before the held-out metrics."""


def table_rows(summaries: Sequence[MethodSummary]) -> list[tuple[str, list[str]]]:
    """Rows of the results table: the label, and a cell per method."""
    names = dict.fromkeys(name for summary in summaries for name in summary.heldout)
    heldout: list[Row] = [(name, lambda s, name=name: s.heldout[name].text() if name in s.heldout else "-") for name in names]
    return [
        (name, [cell(summary) for summary in summaries])
        for name, cell in (*ROWS[:HELDOUT_AFTER], *heldout, *ROWS[HELDOUT_AFTER:])
    ]


def print_table(summaries: Sequence[MethodSummary], console: Console) -> None:
    """Print the results with a row per method, split into several tables if one is too wide.

    ± is half the width of a 95% interval.

    Args:
        summaries: the methods' results.
        console: where to print.
    """
    methods, columns = [summary.method for summary in summaries], table_rows(summaries)
    left = max([len("method"), *map(len, methods)])
    for block in _blocks([_column_width(name, cells) for name, cells in columns], console.width - left - 2):
        table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        table.add_column("method", no_wrap=True, vertical="bottom")
        for name, cells in (columns[i] for i in block):
            heading = textwrap.fill(name, _column_width(name, cells), break_long_words=False, break_on_hyphens=False)
            table.add_column(escape(heading), justify="right", no_wrap=True, vertical="bottom")
        for row, method in enumerate(methods):
            table.add_row(escape(method), *(escape(columns[i][1][row]) for i in block))
        console.print(table)


def _column_width(name: str, cells: Sequence[str]) -> int:
    """The column width in characters for one-line cells below a heading that may break between words."""
    return max(map(len, [*name.split(), *cells]))


def _blocks(widths: Sequence[int], space: int) -> list[list[int]]:
    """Columns in order, divided into as few blocks as fit in `space`, with a gap of two characters before each column."""
    blocks, used = list[list[int]](), space
    for index, width in enumerate(widths):
        if used + width + 2 > space or not blocks:
            blocks, used = [*blocks, []], 0
        blocks[-1].append(index)
        used += width + 2
    return blocks


def table_text(summaries: Sequence[MethodSummary]) -> str:
    """The results table as plain text, at most 120 columns wide."""
    console = Console(width=120, record=True, file=io.StringIO())
    print_table(summaries, console)
    return console.export_text()


MACHINE_SPREAD = {"mixture": 0.009, "shapes": 0.009}
"""Difference of the mean final reward of three seeds between an AMD EPYC and an Intel Xeon, by world: the root mean square over
the three papers' methods, from 30 runs in two dimensions and from the default comparison of images."""


def headline(comparison: Comparison, summaries: Sequence[MethodSummary]) -> str:
    """The result in a few sentences: every method's difference in final reward from the baseline, and its reliability.

    Args:
        comparison: the comparison.
        summaries: the methods' results.

    Returns:
        The text.
    """
    if not summaries:
        return "No run has been evaluated yet."
    base = next((s for s in summaries if s.method == comparison.baseline), summaries[0])
    several = min(summary.seeds for summary in summaries) > 1
    texts = [f"The held-out reward of {base.method} changes from {base.base.mean:.3f} to {base.final.text()}"]
    others = [summary for summary in summaries if summary is not base]
    for other in others if len(others) < MOST_TOGETHER else ():
        gap = other.lead.mean
        end = f"{other.method} ends {abs(gap):.3f} {'above' if gap >= 0 else 'below'} it"
        if several and not math.isnan(other.lead.half):
            end += f" (95% interval {gap - other.lead.half:+.3f} to {gap + other.lead.half:+.3f})"
        texts.append(end)
    if len(others) >= MOST_TOGETHER and several:
        counts = {symbol: [verdict(other.lead) for other in others].count(symbol) for symbol in VERDICTS}
        texts.append(
            f"of the {len(others)} other methods, {counts['▲']} end above it, {counts['▼']} below it, and {counts[UNDECIDED]} "
            "cannot be distinguished from it (95% intervals)"
        )
    seeds = f"{base.seeds} seeds." if several else "With one seed, the interval is unknown."
    return f"{'; '.join(texts)}. {seeds}{_machine(comparison, [s.lead.mean for s in summaries if s is not base])}"


def _machine(comparison: Comparison, leads: Sequence[float]) -> str:
    """A caveat if the leads are so small that another processor may change them; else ""."""
    spread = MACHINE_SPREAD.get(comparison.config["run"]["environment"]["world"], 0.0)
    if all(abs(lead) >= spread for lead in leads):
        return ""
    return f" A difference below {spread:g} may also come from the rounding of another processor."


def write_report(folder: Path) -> Path:
    """Write summary.json, table.txt, the figures (PNG) and report.html of the comparison in `folder`; returns the page's path."""
    comparison = load_comparison(folder)
    summaries, config = summarise(comparison), comparison.config
    images = {name: png(figure) for name, figure in _figures(comparison).items() if figure is not None} if summaries else {}
    for name, image in images.items():
        write_bytes(folder / f"{name}.png", image)
    write_json(folder / "summary.json", summary_values(summaries))
    write_bytes(folder / "table.txt", table_text(summaries).encode())
    page = render(
        "report.html.j2",
        comparison=comparison,
        headline=headline(comparison, summaries),
        unfinished=len(config["methods"]) * len(config["seeds"]) - sum(run.finished for run in comparison.runs),
        colours={summary.method: colour(summary.method, config["methods"]) for summary in summaries},
        blocks=_tables(summaries),
        verdicts=VERDICTS,
        points=config["run"]["environment"]["world"] == "mixture",
        every=config["run"]["evaluation"]["eval_every"],
        many=len(summaries) > MOST_TOGETHER,
        images=images,
    )
    write_bytes(folder / "report.html", page.encode())
    return folder / "report.html"


def _tables(summaries: Sequence[MethodSummary]) -> dict[str, list[tuple[str, list[str]]]]:
    """The columns of the page's tables by their titles: the label, and a cell per method."""
    rows = table_rows(summaries)
    rewards, cost = HELDOUT_AFTER, next(place for place, (name, _) in enumerate(rows) if name == COST)
    blocks = {"Rewards": rows[:rewards], "Proxy and held-out metrics": rows[rewards:cost], "Cost": rows[cost:]}
    return {title: columns for title, columns in blocks.items() if columns}


def _figures(comparison: Comparison) -> dict[str, Figure | None]:
    runs = {method: comparison.of(method) for method in comparison.methods}
    return {
        "curves": curves(comparison),
        "strict": curves(comparison, "strict"),
        "samples": samples(comparison),
        "trajectory": trajectory(comparison),
        "phases": phases(comparison),
        "proxy": proxy_and_heldout(runs),
    }


def write_evaluation(found: WeightComparison, folder: Path, html: bool) -> None:
    """Write evaluation.json and grid.png, and report.html with the scores, the images and the prompts with the largest changes.

    Args:
        found: the comparison of weights.
        folder: the folder for the files.
        html: write report.html.
    """
    image = png(base_and_trained(found), dpi=120)
    write_bytes(folder / "grid.png", image)
    write_json(folder / "evaluation.json", found.values())
    if html:
        page = render("evaluation.html.j2", found=found, image=image, changes=largest_changes(found))
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
    change = (found.trained.scores[name].nanmean(1) - found.base.scores[name].nanmean(1)).nan_to_num(0.0)
    order = change.argsort(descending=True).tolist()
    chosen = dict.fromkeys([*order[:count], *order[-count:]])
    return [(found.prompts[i], f"{float(change[i]):+.4f}") for i in chosen]
