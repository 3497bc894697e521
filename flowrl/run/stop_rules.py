"""The built-in observers: rules that stop a run, and the one that keeps its best weights."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.core.errors import require
from flowrl.core.experience import Actions, Record
from flowrl.core.options import Count, Fraction, NonNegative, Whole, checked_options
from flowrl.run.costs import Prices
from flowrl.run.monitors import drifted, fallen, heldout_value, sacrificed
from flowrl.run.results import comparable, reward_text
from flowrl.run.statistics import COLLAPSE, HACKED, evaluation_noise, flat


@checked_options
@dataclass(frozen=True)
class StopOnCollapse:
    """Stops the run when the held-out reward has collapsed (`flowrl.run.statistics.collapsed`): it
    has lost more than `drop` of its gain, best - start, and more than chance explains. The run then
    ends with the best evaluated checkpoint. After a change of what is scored (`flowrl train
    --resume --change`), the gain is that since the change.

    Args:
        drop: the fraction of the gain, in (0, 1].
        eval_samples: held-out samples per evaluation; without this option, those of the run.
    """

    drop: Fraction = COLLAPSE
    eval_samples: Count = 192
    fields = ("metrics", "history")

    def observe(self, record: Record) -> Actions | None:
        """Compare the evaluation, if there is one, with the best so far."""
        if not (rows := _evaluated(record)):
            return None
        rewards = [row["evaluation"]["reward"] for row in rows if row["evaluation"]]
        spread = statistics.median([row["reward_std"] for row in rows if "reward_std" in row])
        text = fallen(rewards, evaluation_noise(spread, self.eval_samples), self.drop)
        stop = f"the held-out reward fell to {text}" if text else ""
        return Actions(stop, best=_best(rows, "reward"))


@checked_options
@dataclass(frozen=True)
class StopOnHacking:
    """Stops the run when a held-out reward falls while the trained one rises
    (`flowrl.run.statistics.hacked`), or with `images` when the training images have drifted
    (`flowrl.run.monitors.DRIFT`). The run then ends with the checkpoint at which the held-out
    reward was best, the first one if there are several.

    Args:
        evaluations: successive evaluations in which this must be so.
        images: stop at a drift of the images, too.
        eval_samples: held-out samples per evaluation; without this option, those of the run.
        heldout: the held-out rewards of the run.
    """

    evaluations: Count = HACKED
    images: bool = False
    eval_samples: Count = 192
    heldout: tuple[str, ...] = ()
    fields = ("metrics", "history")

    def __post_init__(self) -> None:
        allowed = "with heldout_rewards, or as stop-on-hacking(images=true)"
        require(bool(self.heldout) or self.images, "observer", "stop-on-hacking", allowed)

    def observe(self, record: Record) -> Actions | None:
        """Look at the evaluations so far, and at the training images."""
        rows = comparable([*record.history, record.metrics])
        text = drifted(rows) if self.images else ""
        stop = f"the training images have changed: {text}" if text else ""
        if record.metrics.get("evaluation"):
            stop = sacrificed(rows, self.eval_samples, self.evaluations) or stop
        return Actions(stop, best=_best(rows, self.heldout[0] if self.heldout else "reward"))


@checked_options
@dataclass(frozen=True)
class StopOnPlateau:
    """Stops the run when its held-out reward no longer rises (`flowrl.run.statistics.flat`). The
    run then ends with its best evaluated checkpoint.

    Args:
        evaluations: evaluations without a better one.
        least: the rise that counts as one, as a share of the gain before them.
    """

    evaluations: Count = 8
    least: Fraction = 0.02
    fields = ("metrics", "history")

    def observe(self, record: Record) -> Actions | None:
        """Compare the last evaluations with those before."""
        if not (rows := _evaluated(record)):
            return None
        rewards = [row["evaluation"]["reward"] for row in rows if row["evaluation"]]
        stop = ""
        if flat(rewards, self.evaluations, self.least):
            bests = max(rewards[: -self.evaluations]), max(rewards[-self.evaluations :])
            before, late = (reward_text(value, (*bests, rewards[0])) for value in bests)
            stop = (
                f"the best held-out reward of the last {self.evaluations} evaluations is"
                f" {late}, and {before} before them"
            )
        return Actions(stop, best=_best(rows, "reward"))


@checked_options
@dataclass(frozen=True)
class KeepBest:
    """Keeps the checkpoint with the highest mean of one reward in evaluations, and at the end of
    the run its weights, next to the last ones.

    Args:
        score: "reward" for the trained one on held-out prompts, or another of `scores`.
        scores: names of scores of an evaluation; without this option, those of the run.
    """

    score: str = "reward"
    scores: tuple[str, ...] = ("reward",)
    fields = ("metrics", "history")

    def __post_init__(self) -> None:
        allowed = f"one of {', '.join(dict.fromkeys(self.scores))}"
        require(self.score in self.scores, "keep-best: score", self.score, allowed)

    def observe(self, record: Record) -> Actions | None:
        """Name the best evaluation so far."""
        if not (rows := _evaluated(record)):
            return None
        return Actions(best=_best(rows, self.score))


def _evaluated(record: Record) -> Sequence[Mapping[str, Any]]:
    """The rows so far with rewards on one scale, if the last one has an evaluation."""
    if not record.metrics.get("evaluation"):
        return []
    return comparable([*record.history, record.metrics])


def _best(rows: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """The iteration, one with a checkpoint, whose evaluation has the highest score `name`."""
    scores = {
        row["iteration"]: score
        for row in rows
        if row["iteration"] > 0 and row.get("evaluation")
        if (score := heldout_value(row["evaluation"], name)) is not None
    }
    return max(scores, key=scores.__getitem__) if scores else None


@checked_options
@dataclass(frozen=True)
class Budget:
    """Stops the run after an amount of time or work; a resumed run continues to count.

    Args:
        hours: hours of training and of evaluations; 0 = no limit.
        seconds: seconds of training (`seconds_total`), without evaluations on held-out prompts; 0 =
            no limit.
        nfe: network evaluations of sampling and probes (`nfe_total`), each counted once, without
            those of the update; 0 = no limit.
        forwards: cost in forward equivalents (`flowrl.run.costs`); 0 = no limit.
        prices: the prices of these; without this option, those of the run.
    """

    hours: NonNegative = 0.0
    seconds: NonNegative = 0.0
    nfe: Whole = 0
    forwards: NonNegative = 0.0
    prices: Prices = Prices()
    fields = ("metrics", "history")

    def __post_init__(self) -> None:
        limits = self.hours, self.seconds, self.nfe, self.forwards
        allowed = "above 0, or seconds, nfe or forwards above 0"
        require(sum(limits) > 0, "hours", self.hours, allowed)

    def observe(self, record: Record) -> Actions | None:
        """Compare the totals so far with the limits."""
        rows = [*record.history, record.metrics]
        seconds = record.metrics["seconds_total"]
        evaluated = sum(row["evaluation"]["seconds"] for row in rows if row.get("evaluation"))
        spent = {
            "network evaluations of rollouts": (record.metrics["nfe_total"], self.nfe),
            "seconds": (seconds, self.seconds),
            "hours": ((seconds + evaluated) / 3600, self.hours),
        }
        if self.forwards:
            cost = sum(self.prices.parts(row).total for row in rows)
            spent["forward equivalents"] = cost, self.forwards
        for name, (used, limit) in spent.items():
            if 0 < limit <= used:
                text = f"{used:,.2f}" if name == "hours" else f"{used:,.0f}"
                return Actions(stop=f"{text} {name}, of {limit:,g} allowed")
        return None


EXIT_CODES = {
    "stop-on-collapse": 10,
    "stop-on-hacking": 11,
    "stop-on-plateau": 12,
    "budget": 13,
}
"""What `flowrl train` returns for a run that a built-in observer has stopped."""
STOPPED = 14
"""What it returns if another observer has."""


def exit_code(stopped: str) -> int:
    """The exit code of a run by the reason in its done.json, "OBSERVER: text"; 0 for none."""
    name = stopped.partition(":")[0].partition("#")[0]
    return EXIT_CODES.get(name, STOPPED) if stopped else 0
