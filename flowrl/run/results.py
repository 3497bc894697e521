"""What run folders contain: rows of metrics, and how far a run is."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.run.reading import read_bytes, read_json


@dataclass(frozen=True)
class _Scores:
    reward: float
    heldout: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsRow:
    """The entries of every line of metrics.jsonl: the `iteration` (0: the untrained model), network
    evaluations (`nfe_total`) and training seconds (`seconds_total`) so far, the scores of the
    `evaluation` if there was one, and the number of `trajectories`.
    """

    iteration: int
    nfe_total: float
    seconds_total: float
    evaluation: _Scores | None = None
    trajectories: float = 1.0


def holds(folder: Path, entry: str) -> bool:
    """Whether config.json in `folder` has the `entry`: "algorithm" for a run, "arms" for a
    comparison.
    """
    try:
        return entry in read_json(folder / "config.json", dict[str, Any])
    except ConfigError:
        return False


def has_progress(folder: Path) -> bool:
    """Whether the run in `folder` has an iteration, a checkpoint or a saved failure, which a new
    run would overwrite.
    """
    metrics = folder / "metrics.jsonl"
    if any((folder / "checkpoints").glob("*")) or (folder / "failure").exists():
        return True
    # row 0 is the untrained model's
    return metrics.exists() and read_bytes(metrics).count(b"\n") > 1


def decimals(*changes: float, least: int = 3) -> int:
    """The decimals of numbers that differ by the largest of `changes`: `least`, or as many as give
    it two significant digits (9 at most).
    """
    largest = max((abs(change) for change in changes if math.isfinite(change)), default=0.0)
    return min(9, max(least, 1 - math.floor(math.log10(largest)))) if largest else least


def short(spec: str) -> str:
    """Label of a reward spec in figures and tables: without folders and without options longer than
    24 characters.
    """
    head, bracket, rest = spec.partition("(")
    options = bracket and (rest if len(rest) <= 24 else "...)")
    return head.rpartition("/")[2] + bracket + options


def without_folders(text: str) -> str:
    """`text` with every path reduced to its last part, since the card is read on other machines."""
    return re.sub(r"(?<![\w.-])(?:~|\.{1,2})?(?:/[\w.-]+)+/(?=[\w.-])", "", text)
