"""Progress of comparisons and of single runs, and the results at the end."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.run.reading import read_text

if TYPE_CHECKING:
    from flowrl.run.config import RunConfig


def clock(seconds: float | None) -> str:
    """Hours, minutes and seconds; "unknown" for None."""
    return "unknown" if seconds is None else str(timedelta(seconds=int(seconds)))


def warning_text(warnings: str, run: str = "") -> str:
    """A line per warning."""
    head = f"Warning ({run})" if run else "Warning"
    return "\n".join(f"{head}: {text}" for text in warnings.splitlines())


def evaluations_left(done: int, config: "RunConfig") -> int:
    """How many evaluations come after iteration `done`: every `eval_every` iterations, and the last
    one.
    """
    total, every = config.iterations, config.evaluation.eval_every
    return total // every - done // every + (total % every > 0 and done < total)


def train_line(out: Path, config: "RunConfig") -> Callable[[dict[str, Any]], None]:
    """Progress of a single run: lines while prompts are embedded, then one per iteration, with its
    evaluation if there is one.
    """
    from flowrl.run.results import decimals, short

    read, evaluations = 0, list[dict[str, Any]]()

    def show(state: dict[str, Any]) -> None:
        if "warning" in state:
            print(warning_text(state["warning"]), flush=True)
        for name in ("note", "changed", "profile", "prompts"):
            if name in state:
                print(f"  {state[name]}", flush=True)
        if "iteration" not in state:
            return
        nonlocal read
        lines = read_text(out / "metrics.jsonl").splitlines()
        rows, read = list(map(json.loads, lines[read:])), len(lines)
        evaluations.extend(row["evaluation"] for row in rows if row["evaluation"])
        row, first = rows[-1], evaluations[0]["reward"]
        done, seconds = row["iteration"], row["seconds_total"]
        left = seconds / done * (config.iterations - done)
        left += evaluations[-1]["seconds"] * evaluations_left(done, config)
        seconds += sum(evaluation["seconds"] for evaluation in evaluations)
        digits = decimals(evaluations[-1]["reward"] - first)
        line = (
            f"iteration {done:3d}/{config.iterations}  reward {row['reward_mean']:.{digits}f}  "
            f"rollout NFE {row['nfe_total']:>9,}  {clock(seconds)}, left: {clock(left)}"
        )
        if evaluation := row["evaluation"]:
            scores = {"strict": evaluation.get("strict"), **evaluation.get("heldout", {})}
            scores |= {"diversity": evaluation["diversity"]} if "diversity" in evaluation else {}
            line += f"  held out: reward {evaluation['reward']:.{digits}f}" + "".join(
                f", {short(name)} {'failed' if score is None else f'{score:.{digits}f}'}"
                for name, score in scores.items()
                if score is not None or name != "strict"
            )
        print(line, flush=True)

    return show
