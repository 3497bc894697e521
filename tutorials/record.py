"""Write flowrl_course/recorded.json: what lessons 5 to 7 show of the recorded runs of the claims.

    python tutorials/record.py

Calls the functions of `flowrl_course.recorded` that read these runs with the arguments of the
lessons, and stores their numbers: estimates with intervals, and the points of each curve.
"""

import ast
import json
import lzma
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flowrl_bench.evidence import AXES, MEASURES, column, spent
from flowrl_compare.statistics import mean
from flowrl_course import recorded

HERE = Path(__file__).parent
LESSONS = ("05_flow_grpo", "06_stepwise_flow_grpo", "07_tp_grpo")


def digits(values: Any, count: int = 5) -> Any:
    """Numbers with `count` significant digits."""
    if isinstance(values, list | tuple | np.ndarray):
        return [digits(value, count) for value in values]
    return float(f"{float(values):.{count}g}")


def estimate(one: Any) -> list[float]:
    """Value, lower and upper end of the interval."""
    return digits([one.value, one.low, one.high])


def curve(claim: str, axis: str, world: str) -> dict[str, Any]:
    """By arm: budgets, mean rewards, and the ends of their intervals."""
    judged = recorded.case(claim, world)
    assert judged is not None and judged.evidence is not None
    arms = {}
    for arm, runs in judged.evidence.runs.items():
        budget, rewards = (
            np.array([[of(line) for line in task] for task in runs.values()]).mean(axis=0)
            for of in (partial(spent, axis=axis), partial(column, name="soft"))
        )
        estimates = [mean(values) for values in rewards.T]
        ends = [[getattr(e, end) for e in estimates] for end in ("low", "high")]
        arms[arm] = digits([budget.mean(axis=0), rewards.mean(axis=0), *ends])
    return {"budget": AXES[axis], "arms": arms}


def dots(claim: str, measure: str, world: str) -> dict[str, Any]:
    """By arm: the estimate of a measure."""
    judged, of = recorded.case(claim, world), MEASURES[measure].of
    assert judged is not None and judged.evidence is not None and of is not None
    arms = {
        arm: estimate(
            mean(np.mean([[of(line) for line in task] for task in runs.values()], axis=0))
        )
        for arm, runs in judged.evidence.runs.items()
    }
    return {"measure": MEASURES[measure].label, "arms": arms}


def searches(arm: str) -> dict[str, list[list[float]]]:
    """By world: noise level and reward of every run of the search for an arm's settings."""
    with lzma.open(recorded.RESULTS / "tuning.jsonl.xz", "rt") as file:
        runs = [run for run in map(json.loads, file) if run["arm"] == arm]
    return {
        world: [
            digits([run["values"]["noise_level"], run["score"]])
            for run in runs
            if run["world"] == world
        ]
        for world in ("mixture", "shapes")
    }


class Calls:
    """Stands for `recorded` in the lessons' cells, and stores what they ask for."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {
            kind: {} for kind in ("measured", "cosine", "curves", "dots", "search")
        }

    def measured(self, claim: str, rule: int = 0, world: str = "mixture") -> str:
        judged = recorded.case(claim, world)
        one = judged.comparisons[rule] if judged else None
        if one is not None:
            self.found["measured"][f"{claim} {rule} {world}"] = {
                "estimate": digits([one.estimate.value, one.estimate.low, one.estimate.high]),
                "difference": bool(one.difference),
            }
        return ""

    def cosine(self, rule: str) -> str:
        row = json.loads((recorded.RESULTS / "bias.json").read_text())["results"][rule]
        self.found["cosine"][rule] = digits([row["cosine"], *row["cosine_interval"]])
        return ""

    def table(self, *rows: Any) -> None:
        pass

    def curves(self, claims: Any, world: str = "mixture") -> None:
        for claim, axis in claims.values():
            self.found["curves"][f"{claim} {axis} {world}"] = curve(claim, axis, world)

    def dots(self, claims: Any, world: str = "mixture") -> None:
        for claim, measure in claims.values():
            self.found["dots"][f"{claim} {measure} {world}"] = dots(claim, measure, world)

    def search(self, arm: str) -> None:
        self.found["search"][arm] = searches(arm)


def main() -> None:
    """Execute the cells that show recorded runs."""
    calls = Calls()
    for lesson in LESSONS:
        cells = (HERE / "source" / f"{lesson}.py").read_text().split("\n# %%")
        for cell in cells:
            code = cell.partition("\n")[2]
            if "recorded." in code and "[markdown]" not in cell.partition("\n")[0]:
                if any(
                    isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(code).body
                ):
                    continue
                exec(code, {"recorded": calls, "measured": calls.measured, "cosine": calls.cosine})
    target = HERE / "package" / "flowrl_course" / "recorded.json"
    text = json.dumps(calls.found, separators=(",", ":"), ensure_ascii=False)
    target.write_text(text.replace('},"', '},\n"') + "\n", encoding="utf-8")
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
