"""Progress of comparisons and of single runs, and the results at the end."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.reading import read_text

if TYPE_CHECKING:
    from flowrl.training.config import RunConfig


def clock(seconds: float | None) -> str:
    """Hours, minutes and seconds; "unknown" for None."""
    return "unknown" if seconds is None else str(timedelta(seconds=int(seconds)))


def warning_text(warnings: str, run: str = "") -> str:
    """A line per warning."""
    head = f"Warning ({run})" if run else "Warning"
    return "\n".join(f"{head}: {text}" for text in warnings.splitlines())


def train_line(out: Path, config: "RunConfig") -> Callable[[dict[str, Any]], None]:
    """Progress of a single run: lines while prompts are embedded, then one per iteration, with its
    evaluation if there is one.
    """
    from flowrl.training.results import short

    def show(state: dict[str, Any]) -> None:
        if "warning" in state:
            print(warning_text(state["warning"]), flush=True)
        for name in ("note", "profile", "prompts"):
            if name in state:
                print(f"  {state[name]}", flush=True)
        if "iteration" not in state:
            return
        row = json.loads(read_text(out / "metrics.jsonl").splitlines()[-1])
        done, seconds = row["iteration"], row["seconds_total"]
        left = seconds / done * (config.iterations - done) if done else None
        line = (
            f"iteration {done:3d}/{config.iterations}  reward {row['reward_mean']:.3f}  "
            f"rollout NFE {row['nfe_total']:>9,}  {clock(seconds)}, left: {clock(left)}"
        )
        if evaluation := row["evaluation"]:
            scores = {"strict": evaluation.get("strict"), **evaluation.get("heldout", {})}
            scores |= {"diversity": evaluation["diversity"]} if "diversity" in evaluation else {}
            line += f"  held out: reward {evaluation['reward']:.3f}" + "".join(
                f", {short(name)} {'failed' if score is None else f'{score:.3f}'}"
                for name, score in scores.items()
                if score is not None or name != "strict"
            )
        print(line, flush=True)

    return show
