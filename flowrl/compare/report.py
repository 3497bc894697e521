"""The results table, and self-contained HTML reports of comparisons and of evaluated weights."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flowrl.compare.bounds import bound_of
from flowrl.compare.conclusion import VERDICTS, cannot_show, shows, untuned, verdict
from flowrl.compare.figures import (
    NOTICEABLE,
    curves,
    samples,
    shows_points,
    trajectory,
    value_quality,
)
from flowrl.compare.paper import FOLDER, write_paper
from flowrl.compare.results import (
    ArmSummary,
    Comparison,
    Mean,
    evaluation_rows,
    load_comparison,
    summarise,
    summary_values,
)
from flowrl.compare.sweep import Sweep
from flowrl.run.costs import RATE, STATED, STATED_NAME, Parts
from flowrl.run.io import write_bytes, write_json
from flowrl.run.presets import MODEL_ONLY
from flowrl.run.report.figures import MOST_TOGETHER, proxy_and_heldout
from flowrl.run.report.pages import render
from flowrl.run.report.style import colour, png

__all__ = ["write_report"]

MOST_DRAWN = 24
"""Arms up to which the figures with a row per arm are drawn."""
Cells = dict[str, Callable[[ArmSummary], str]]


def _ratio(axis: str, summary: ArmSummary) -> str:
    """The cost until the baseline's result as a multiple of the baseline's own; 1 for itself."""
    ratio = summary.to_baseline[axis].ratio if axis in summary.to_baseline else None
    if ratio is None:
        return "-"
    return "1" if ratio.value == ratio.low == ratio.high == 1 else ratio.text()


def _cost(axis: str, digits: str, summary: ArmSummary) -> str:
    """The same cost, and the ratio in parentheses."""
    if axis not in summary.to_baseline:
        return "-"
    cost = summary.to_baseline[axis].cost
    return f"{'not reached' if cost is None else f'{cost:{digits}}'} ({_ratio(axis, summary)})"


def _heldout(name: str, summary: ArmSummary) -> str:
    return summary.heldout[name].text() if name in summary.heldout else "-"


def _part(name: str, summary: ArmSummary) -> str:
    return f"{getattr(summary.cost, name):.1f}"


BLOCKS: dict[str, Cells] = {
    "Rewards": {
        "final reward": lambda s: s.final.text(),
        "minus the baseline": lambda s: _lead(s.lead),
        "cost until equal": partial(_ratio, "forwards"),
        "collapsed seeds": lambda s: f"{s.collapsed} of {s.seeds}",
        "lowest of a seed": lambda s: f"{s.worst:.3f}",
        "final strict success": lambda s: s.final_strict.text(),
        "reward before": lambda s: f"{s.base.mean:.3f}",
        "seeds": lambda s: str(s.seeds),
    },
    "Proxy and held-out metrics": {},  # those of the comparison
    "Cost until the baseline's result": {
        "updates": partial(_cost, "iteration", ".1f"),
        "forward equivalents": partial(_cost, "forwards", ",.0f"),
        "seconds": partial(_cost, "seconds_total", ".1f"),
        f"{STATED_NAME} seconds": partial(_cost, "stated_seconds", ",.0f"),
    },
    "Cost of a trajectory in forward equivalents": {
        "in all": lambda s: f"{s.cost.total:.1f}",
        **{name: partial(_part, name) for name in vars(Parts(0, 0, 0, 0, 0))},
    },
    "Cost of an iteration": {
        "NFE/trajectory": lambda s: f"{s.nfe_per_trajectory:.1f}",
        "network calls/iteration": lambda s: f"{s.calls_per_iteration:.0f}",
        "reward calls/trajectory": lambda s: f"{s.rewards_per_trajectory:.1f}",
        "s/iteration: rollout": lambda s: f"{s.seconds_rollout:.2f}",
        "s/iteration: reward": lambda s: f"{s.seconds_reward:.2f}",
        "s/iteration: update": lambda s: f"{s.seconds_update:.2f}",
    },
}
"""Columns of the results tables: the label, and the cell of an arm."""
PRINTED = ("final reward", "minus the baseline", "cost until equal", "collapsed seeds")
"""Columns that are printed; the last one only if the terminal is wide enough."""
RATIO = (
    "cost until equal: forward equivalents until the arm's mean curve reaches the baseline's final"
    " reward, divided by the baseline's own until then; > 2.00: not reached when its runs ended, at"
    " 2.00; [1.50, -]: the interval has no upper end"
)
INTERVALS = "±: half of the 95% interval over seeds (Student's t)"


def _lead(lead: Mean) -> str:
    """The mean lead with its interval and verdict; empty for the baseline."""
    return f"{lead.text(sign=True)} {verdict(lead)}".rstrip() if lead.mean or lead.half > 0 else ""


def result_blocks(summaries: Sequence[ArmSummary]) -> dict[str, list[tuple[str, list[str]]]]:
    """The results tables by their titles, as lists of columns: the label, and a cell per arm."""
    names = dict.fromkeys(name for summary in summaries for name in summary.heldout)
    heldout: Cells = {name: partial(_heldout, name) for name in names}
    return {
        title: [(name, list(map(cell, summaries))) for name, cell in columns.items()]
        for title, columns in {**BLOCKS, "Proxy and held-out metrics": heldout}.items()
        if columns
    }


def table_rows(summaries: Sequence[ArmSummary]) -> list[tuple[str, list[str]]]:
    """All columns of the results: the label, and a cell per arm."""
    return [column for columns in result_blocks(summaries).values() for column in columns]


def print_table(summaries: Sequence[ArmSummary], console: Console) -> None:
    """Print the most important results as one table with a row per arm, what its symbols mean, and
    the settings in which the arms differ.

    Args:
        summaries: the arms' results.
        console: where to print.
    """
    columns = dict(table_rows(summaries))
    names = PRINTED if console.width >= 90 else PRINTED[:3]
    _print(summaries, [(name, columns[name]) for name in names], console)


def table_text(summaries: Sequence[ArmSummary]) -> str:
    """All results as plain text in one table, with a line per arm however long."""
    console = Console(width=10_000, file=io.StringIO())
    _print(summaries, table_rows(summaries), console)
    lines = [*console.file.getvalue().splitlines(), INTERVALS]  # pyright: ignore
    return "\n".join(map(str.rstrip, lines)).strip("\n") + "\n"


def _print(
    summaries: Sequence[ArmSummary],
    columns: Sequence[tuple[str, Sequence[str]]],
    console: Console,
) -> None:
    """A table with a row per arm; below it the symbols that occur, and the arms' settings."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("arm", overflow="fold", vertical="bottom")
    for name, cells in columns:  # cells are never broken, a wider heading after its first word
        wide = len(name) > max(map(len, cells), default=0)
        heading = name.replace(" ", "\n", 1) if wide else name
        table.add_column(escape(heading), justify="right", no_wrap=True, vertical="bottom")
    for row, summary in enumerate(summaries):
        table.add_row(*map(escape, (summary.arm, *(cells[row] for _, cells in columns))))
    console.print(table)
    text = str([cells for _, cells in columns])
    legend = "; ".join(f"{symbol} {words}" for symbol, words in VERDICTS.items() if symbol in text)
    settings = [f"{s.arm}: {s.difference}" for s in summaries if s.difference]
    for line in filter(None, [legend, RATIO, *settings]):
        console.print(line, highlight=False, markup=False)


def collapse_text(summaries: Sequence[ArmSummary]) -> str:
    """The arms with collapsed seeds, "" if there are none: "Collapsed: tp-grpo 2 of 3 seeds"."""
    arms = [f"{s.arm} {s.collapsed} of {s.seeds} seeds" for s in summaries if s.collapsed]
    return f"Collapsed: {', '.join(arms)}" if arms else ""


def write_report(folder: Path) -> Path:
    """Write summary.json, table.txt, the figures (PNG), report.html and the folder paper of the
    comparison in `folder`, and the files of a sweep (`flowrl.compare.sweep`); returns the page's
    path.
    """
    comparison = load_comparison(folder)
    summaries, config = summarise(comparison), comparison.config
    shared, arms = comparison.shared, list(config["arms"])
    sweep = Sweep(comparison) if config.get("points") else None
    drawn = _figures(comparison, sweep) if summaries else {}
    figures = {name: figure for name, figure in drawn.items() if figure is not None}
    images = {name: png(figure) for name, figure in figures.items()}
    narrow = "curves" in images and curves(comparison, narrow=True)
    for name, image in images.items():
        write_bytes(folder / f"{name}.png", image)
    if sweep:
        sweep.write(folder)
    write_json(folder / "summary.json", summary_values(summaries))
    write_bytes(folder / "table.txt", table_text(summaries).encode())
    names = ("arm", [summary.arm for summary in summaries])
    tables = {title: [names, *block] for title, block in result_blocks(summaries).items()}
    runs = [run.settings for run in comparison.runs]
    rows = evaluation_rows(comparison)
    write_paper(folder / FOLDER, rows, tables, figures, runs, config.get("command", ""))
    finished = sum(run.finished for run in comparison.runs)
    # 0 stands for the method's own number
    of_methods = [
        name for name in ("noise_level", "clip_range") if not shared["algorithm"].get(name)
    ]
    page = render(
        "report.html.j2",
        "flowrl.compare",
        comparison=comparison,
        run=shared,
        shows=shows(comparison, summaries),
        cannot_show=cannot_show(comparison, summaries),
        untuned=untuned(comparison),
        unfinished=len(arms) * len(config["seeds"]) - finished,
        colours={summary.arm: colour(summary.arm, arms) for summary in summaries},
        blocks=result_blocks(summaries) if summaries else {},
        priced=summaries[0].priced if summaries else "",
        stated=STATED.source,
        rate=f"{RATE / 1e12:.0f}",
        leave_out=[
            *("method", "credit", *of_methods),
            *(() if shared["environment"]["world"] == "model" else MODEL_ONLY),
        ],
        verdicts=VERDICTS,
        points=shows_points(comparison),
        every=shared["evaluation"]["eval_every"],
        many=len(summaries) > MOST_TOGETHER,
        images=images,
        narrow=png(narrow) if narrow else b"",
        best=". ".join([*sweep.best_texts(), ""]) if sweep else "",
        noticeable=NOTICEABLE,
        bound=bound_of(comparison),
    )
    write_bytes(folder / "report.html", page.encode())
    return folder / "report.html"


def _figures(comparison: Comparison, sweep: Sweep | None) -> dict[str, Figure | None]:
    drawn = {"sweep": sweep.figure() if sweep else None}
    if len(comparison.arms) > MOST_DRAWN:
        return drawn
    return drawn | {
        "curves": curves(comparison),
        "strict": curves(comparison, "strict"),
        "samples": samples(comparison),
        "trajectory": trajectory(comparison),
        "values": value_quality(comparison),
        "proxy": proxy_and_heldout({arm: comparison.of(arm) for arm in comparison.arms}),
    }
