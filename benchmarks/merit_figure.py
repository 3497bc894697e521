"""Figure of `merit.py`, from its record."""

from typing import Any

from flowrl_bench.merit_page import NAMES
from flowrl_compare.style import COLOURS, INK, clean
from matplotlib.figure import Figure

PROBE, TREE = COLOURS["stepwise-flow-grpo"], COLOURS["flow-grpo"]
ROWS = {
    "flow-grpo": (INK, "Flow-GRPO: no probe, no tree"),
    "gains, Tweedie": (PROBE, "probe, 1 substep"),
    "gains, Substeps(2)": (PROBE, "probe, 2 substeps"),
    "gains, Substeps(3)": (PROBE, "probe, 3 substeps"),
    "stepwise-flow-grpo": (PROBE, "probe, 5 substeps (the paper's)"),
    "gains, Substeps(5), every second node": (PROBE, "probe, 5, every second state"),
    "gains, Completion": (PROBE, "probe, all remaining steps"),
    "branch-grpo": (TREE, "tree, BranchGRPO"),
    "tree-grpo": (TREE, "tree, TreeGRPO"),
    "tempflow-grpo": (TREE, "tree, TempFlow-GRPO"),
    "granular-grpo": (TREE, "tree, Granular-GRPO"),
}
"""Colours and labels of the rows that are drawn, from the top."""


def credit_figure(record: dict[str, Any]) -> Figure:
    """A panel per world: correlation with the true advantage before and after training, and the
    evaluations of a trajectory.
    """
    cells = {(cell["world"], cell["stage"]): cell["rows"] for cell in record["cells"]}
    worlds = list(dict.fromkeys(world for world, _ in cells))
    drawn = Figure(figsize=(10, 4), layout="constrained")
    panels: Any = drawn.subplots(1, len(worlds), sharey=True, squeeze=False)[0]
    for axes, world in zip(panels, worlds, strict=True):
        for stage, shift in (("before", -0.16), ("after", 0.16)):
            rows = {row["row"]: row for row in cells[world, stage]}
            for i, (name, (colour, _)) in enumerate(ROWS.items()):
                found = rows[name]["correlation"]
                errors = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
                face = colour if stage == "after" else "white"
                axes.errorbar(
                    found["value"],
                    i + shift,
                    xerr=errors,
                    fmt="o",
                    color=colour,
                    markerfacecolor=face,
                    markersize=5,
                    elinewidth=1,
                )
                if stage == "after":
                    axes.text(1.04, i, f"{rows[name]['nfe']:.0f}", ha="right", va="center")
        axes.text(1.04, -0.9, "evaluations", ha="right", va="center", fontsize=9)
        axes.set(title=NAMES[world], xlabel="correlation with the true advantage", xlim=(0, 1.05))
        clean(axes)
    labels = [label for _, label in ROWS.values()]
    panels[0].set_yticks(range(len(ROWS)), labels)
    panels[0].set_ylim(len(ROWS) - 0.5, -1.4)
    return drawn
