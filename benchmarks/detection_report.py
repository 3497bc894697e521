"""Tables and figures of `detection.py`, from its record."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from flowrl_compare.style import COLOURS, INK, clean, save

from flowrl.io import write_bytes

WORLDS = {"mixture": "2-D world", "shapes": "shapes world"}
ENOUGH = 60
"""Calls below which a bin is not drawn."""


def report(record: dict[str, Any], page: Path, figures: Path) -> None:
    """Write the tables, without a title, and the figures."""
    write_bytes(page, tables(record).encode())
    save(calls(record), figures / "calls.png", dpi=130)
    save(real_calls(record), figures / "real-calls.png", dpi=130)


def tables(record: dict[str, Any]) -> str:
    """Markdown."""
    z = z_scores(record)
    iterations = ", ".join(
        f"{count} iterations ({WORLDS[world]})" for world, count in record["iterations"].items()
    )
    seeds = ", ".join(map(str, record["seeds"]))
    made = (
        f"Made by `{record['command']}`; commit {record['commit']}; {record['hardware']}; seeds"
        f" {seeds}; {len(record['seeds']) * record['prompts'] * record['members']} trajectories per"
        f" world, window and stage; {record['draws']} draws of the noise; after {iterations}."
        f" Measured / predicted. All {len(z)} pairs of numbers: mean square of z"
        f" {np.mean(z**2):.2f}, largest |z| {np.max(abs(z)):.1f}."
    )
    parts = [made]
    for consistent, title in ((True, "Consistent rule"), (False, "Plain rule")):
        rows = [row for row in record["rows"] if row["consistent"] == consistent]
        parts += [f"### {title}", compared(rows)]
    kept = [row for row in record["criteria"] if row["window"] == "0:9"]
    parts += [
        "### Criterion",
        criterion(kept),
        "### Calls by their smallest difference",
        bins(record),
    ]
    return "\n\n".join(parts) + "\n"


def z_scores(record: dict[str, Any]) -> Any:
    """(measured - predicted) / standard error of every number that varies between draws."""
    rows = record["rows"]
    pairs = [
        (row["measured"][k] - row["predicted"][k], row["error"][k])
        for row in rows
        for k in row["error"]
    ]
    return np.array([difference / error for difference, error in pairs if error > 0])


def compared(rows: list[dict[str, Any]]) -> str:
    """One line per world, window, stage and noise."""
    lines = [
        (
            "| world | window | stage | noise | true turning points | called | of these false |"
            " missed | bias at turning points | variance / increments' |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{row['measured']['called']:.3f} / {row['predicted']['called']:.3f}"]
        kinds = [row["measured"], row["predicted"]]
        cells.append(" / ".join(f"{100 * kind['false'] / kind['called']:.1f}%" for kind in kinds))
        cells.append(" / ".join(f"{100 * kind['missed'] / row['turns']:.1f}%" for kind in kinds))
        cells.append(
            " / ".join(
                f"{100 * kind['bias at turns'] / row['reward at turns']:.1f}%" for kind in kinds
            )
        )
        cells.append(" / ".join(f"{kind['variance'] / row[VARIANCE]:.3f}" for kind in kinds))
        place = (
            WORLDS[row["world"]],
            row["window"],
            row["stage"],
            f"{row['noise']:g}",
            f"{row['turns']:.3f}",
        )
        lines.append(f"| {' | '.join((*place, *cells))} |")
    return "\n".join(lines)


VARIANCE = "increments' variance"


def criterion(rows: list[dict[str, Any]]) -> str:
    """One line per world, window, stage, noise and confidence."""
    lines = [
        (
            "| world | window | stage | noise | rule | called | of these false | missed per"
            " trajectory | rms error / noise | correlation |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    names = {"None": "no criterion", "increments": "increments alone"}
    for row in rows:
        place = (WORLDS[row["world"]], row["window"], row["stage"], f"{row['noise']:g}")
        rule = names.get(row["confidence"], f"confidence {row['confidence']}")
        false = f"{100 * row['false'] / row['called']:.0f}%" if row["called"] > 0.002 else "-"
        correlation = f"{row['correlation']:.3f}"
        numbers = (
            f"{row['called']:.3f}",
            false,
            f"{row['missed']:.3f}",
            f"{row['rms error / noise']:.2f}",
            correlation,
        )
        lines.append(f"| {' | '.join((*place, rule, *numbers))} |")
    return "\n".join(lines)


def bins(record: dict[str, Any]) -> str:
    """Fractions of real calls by smallest difference, and the flat prior's."""
    edges = record["edges"]
    heads = [
        f"{edges[k]:g} to {edges[k + 2]:g}" if k + 2 < len(edges) else f"{edges[k]:g} and more"
        for k in STARTS
    ]
    lines = [
        f"| smallest difference / noise | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for row in record["calibration"]:
        name = f"{WORLDS[row['world']]}, {row['stage']}, noise {row['noise']:g}"
        for kind, label in (("real", "real"), ("flat prior", "flat prior")):
            cells = []
            for start in STARTS:
                calls = np.array(row["calls"][start : start + 2])
                values = np.nan_to_num(np.array(row[kind][start : start + 2], float))
                cells.append(
                    f"{(calls * values).sum() / calls.sum():.2f}" if calls.sum() >= ENOUGH else "-"
                )
            lines.append(f"| {name}: {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


STARTS = range(0, 17, 2)
"""First bins of the table's wider bins."""


def calls(record: dict[str, Any]) -> Any:
    """Densities of calls over the noise, of both worlds before training."""
    figure = plt.figure(figsize=(9, 3.6), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    for place, world in zip(panels, WORLDS, strict=True):
        densities(place, record, world)
    panels[0].set_ylabel("turning points per trajectory")
    return figure


def densities(axes: Any, record: dict[str, Any], world: str) -> None:
    """Called and real turning points over the noise: predicted (lines) and measured (points)."""
    (row,) = (row for row in record["curves"] if row["world"] == world and row["stage"] == "before")
    noise, called = np.array(row["noise"]), np.array(row["called"])
    real = called - np.array(row["false"])
    axes.fill_between(noise, 0, real, color=COLOURS["tp-grpo"], alpha=0.35, linewidth=0)
    axes.fill_between(
        noise, real, called, color=COLOURS["stepwise-flow-grpo"], alpha=0.22, linewidth=0
    )
    axes.plot(noise, called, color=INK, linewidth=2)
    axes.axhline(row["turns"], color=INK, linewidth=1, linestyle="--")
    for other in record["rows"]:
        wanted = (world, "0:9", "before", True)
        if (other["world"], other["window"], other["stage"], other["consistent"]) == wanted:
            measured = other["measured"]
            axes.plot(
                [other["noise"]] * 2,
                [measured["called"], measured["called"] - measured["false"]],
                "o",
                color=INK,
                markersize=5,
            )
    axes.set_xscale("log")
    axes.set_xlim(noise[0], noise[-1])
    axes.set_ylim(0, 1.9)
    axes.set_xlabel("standard deviation of the reward's noise")
    axes.set_title(
        f"{WORLDS[world]}: a step changes the reward by {row['mean |d|']:.2f}", fontsize=11
    )
    axes.text(0.0035, 0.45, "real calls")
    axes.text(0.95, 0.95, "false calls", ha="right")
    axes.text(0.0035, row["turns"] - 0.04, "without noise", va="top", fontsize=9)
    axes.text(0.95, 1.72, "pure noise: 1.6", ha="right", fontsize=9)
    axes.axhline(1.6, color=INK, linewidth=1, linestyle=":")
    clean(axes)


def real_calls(record: dict[str, Any]) -> Any:
    """The fraction of real calls by the smallest difference that decides them, and the flat prior's
    expectation.
    """
    figure = plt.figure(figsize=(9, 3.6), layout="constrained")
    axes: Any = figure.subplots()
    edges = np.array(record["edges"])
    middle = edges + 0.125
    colours = {"mixture": COLOURS["flow-grpo"], "shapes": COLOURS["stepwise-flow-grpo"]}
    for row in record["calibration"]:
        calls = np.array(row["calls"])
        shown = (calls >= ENOUGH) & (np.arange(len(calls)) < len(calls) - 1)
        style = "-" if row["noise"] == 0.1 else "--"
        fill = colours[row["world"]] if row["stage"] == "before" else "white"
        name = f"{WORLDS[row['world']]}, {row['stage']}, {row['noise']:g}"
        axes.plot(
            middle[shown],
            np.array(row["real"], float)[shown],
            style,
            color=colours[row["world"]],
            marker="o",
            markersize=4,
            markerfacecolor=fill,
            linewidth=1.2,
            label=name,
        )
        if row["world"] == "shapes" and row["stage"] == "before" and row["noise"] == 0.1:
            axes.plot(
                middle[shown],
                np.array(row["flat prior"], float)[shown],
                color=INK,
                linewidth=2,
                label="flat prior",
            )
    axes.axvline(2, color="#8a8f98", linewidth=1, linestyle=":")
    axes.axhline(0.5, color="#8a8f98", linewidth=1, linestyle=":")
    axes.set_ylim(0, 1)
    axes.set_xlim(0, 4)
    axes.set_xlabel("smallest deciding |difference| / noise")
    axes.set_ylabel("fraction of calls that are real")
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    clean(axes)
    return figure
