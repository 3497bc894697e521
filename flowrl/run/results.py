"""What run folders contain: rows of metrics, and how far a run is."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, require
from flowrl.run.reading import read_bytes, read_json

BEST = "best"
"""Folder in a run's folder with the weights of its best iteration."""


@dataclass(frozen=True)
class _Scores:
    reward: float
    heldout: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsRow:
    """The entries of every line of metrics.jsonl: the `iteration` (0: the untrained model), network
    evaluations (`nfe_total`) and training seconds (`seconds_total`) so far, the scores of the
    `evaluation` if there was one, the number of `trajectories`, [before, after] by setting if a
    resume `changed` settings before this iteration, and the scores of the `untrained` model if they
    changed with the settings.
    """

    iteration: int
    nfe_total: float
    seconds_total: float
    evaluation: _Scores | None = None
    trajectories: float = 1.0
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    untrained: _Scores | None = None


SCORED = (
    *("reward", "reward_form", "heldout_prompts", "hold_out"),
    *("eval_samples", "eval_steps", "eval_solver"),
    *("guidance_scale", "eval_guidance", "negative_prompt", "max_sequence_length"),
)
"""Settings on which the scores of an evaluation depend, besides the weights."""
TRAINED_ON = ("prompts", "reward_noise", "reward_bias")
"""Further settings on which the rewards of the training samples depend."""


def changes_text(changed: Mapping[str, Sequence[Any]]) -> str:
    """Changed settings on one line, as in "iterations 12 -> 24"."""
    return ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())


def changes_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """The changes of settings in the `rows` of a run: the first iteration with the new ones, and
    these as text.
    """
    return [(row["iteration"], changes_text(row["changed"])) for row in rows if "changed" in row]


def untrained_of(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The evaluation of the untrained model with the settings at the end of `rows`."""
    again = [row["untrained"] for row in rows if "untrained" in row]
    return again[-1] if again else rows[0]["evaluation"]


def comparable(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The last of `rows`, whose rewards are on one scale: those since the last change of what is
    scored, or all.
    """
    scored = {*SCORED, *TRAINED_ON}
    starts = [index for index, row in enumerate(rows) if scored & {*row.get("changed", ())}]
    return rows[starts[-1] :] if starts else rows


def scoring_seconds(phases: Mapping[str, float]) -> float:
    """The seconds of decoding and scoring among the `phases` of an iteration; in rows of older
    versions, and if scoring overlaps the rollout, "reward" contains both.
    """
    return phases.get("decode", 0.0) + phases.get("reward", 0.0)


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


def stopped_by(folder: Path) -> str:
    """By which observer the finished run in `folder` was stopped, and why, as in "budget: ..."; ""
    for a run that has trained to its end.
    """
    return read_json(folder / "done.json", dict[str, Any]).get("stopped", "")


def best_apart(folder: Path) -> int:
    """The iteration of the weights in best/ of a finished run; 0 if it has none."""
    path = folder / "done.json"
    return read_json(path, dict[str, Any]).get(BEST, 0) if path.is_file() else 0


def best_named(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """By observer, the best iteration that it named last."""
    best: dict[str, int] = {}
    for row in rows:
        best |= row.get("best", {})
    return best


def require_no_run(folder: Path) -> None:
    """Raise `ConfigError` if `folder` has a run that a new one would overwrite."""
    need = "a folder without a run; to continue a run, use --resume"
    require(not has_progress(folder), "out", str(folder), need)


def decimals(*changes: float, least: int = 3) -> int:
    """The decimals of numbers that differ by the largest of `changes`: `least`, or as many as give
    it two significant digits (9 at most).
    """
    largest = max((abs(change) for change in changes if math.isfinite(change)), default=0.0)
    return min(9, max(least, 1 - math.floor(math.log10(largest)))) if largest else least


def reward_text(value: float | None, among: Iterable[float] = ()) -> str:
    """A reward with the digits that fit its size: three significant ones of the largest of `among`
    (the rewards with which it is compared), four from 1 on, and two of their largest difference, as
    in "0.500020", "21.34" or "1,234,567". Below 1e-6 and from 1e9 on with an exponent; "failed" for
    None.
    """
    if value is None:
        return "failed"
    if not math.isfinite(value):
        return str(value)
    known = [other for other in (value, *among) if math.isfinite(other)]
    level, change = max(map(abs, known)), max(known) - min(known)
    if not level:
        return f"{value:.3f}"
    size = math.floor(math.log10(level))
    digits = 3 if size < 0 else 4
    if change > 1e-7 * level:  # not by rounding in float32
        digits = min(9, max(digits, 2 + size - math.floor(math.log10(change))))
    if not 1e-6 <= level < 1e9:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


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
