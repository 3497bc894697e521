"""What run folders contain: rows of metrics, and how far a run is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.reading import read_bytes, read_json


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


def holds(folder: Path, entries: Sequence[str]) -> bool:
    """Whether config.json in `folder` was written by flowrl and has one of `entries`: "algorithm"
    for a run, "arms" (in earlier versions "methods") for a comparison.
    """
    try:
        return not read_json(folder / "config.json", dict[str, Any]).keys().isdisjoint(entries)
    except ConfigError:
        return False


def has_progress(folder: Path) -> bool:
    """Whether the run in `folder` has an iteration, a checkpoint or a saved failure, which a new
    run would overwrite.
    """
    metrics = folder / "metrics.jsonl"
    return (
        any((folder / "checkpoints").glob("*"))
        or any((folder / name).exists() for name in ("failure", "done.json"))
        # row 0 is the untrained model's
        or (metrics.exists() and read_bytes(metrics).count(b"\n") > 1)
    )


def short(spec: str) -> str:
    """Label of a reward spec in figures and tables: without folders and without options longer than
    24 characters.
    """
    head, bracket, rest = spec.partition("(")
    options = bracket and (rest if len(rest) <= 24 else "...)")
    return head.rpartition("/")[2] + bracket + options
