"""Reports a loss or gradient that is not finite: which term, at which denoising step, for which
prompts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import TrainingError
from flowrl.core.experience import Credit, Experience
from flowrl.core.forward import ForwardBatch
from flowrl.core.types import LossBatch
from flowrl.flow.gaussian import kl, log_prob
from flowrl.rollout import Objective, Rows

LISTED = 64
"""Largest number of rows that failure.json lists."""
ADVICE = {
    "gradient of the reward": "Look at the reward model, or use decode_dtype float32",
    "advantage": "Look at the reward model and the credit rule",
    "sampled latent": "Use bfloat16 instead of float16, or a smaller noise_level",
    "ratio": "Lower learning_rate or minibatches, or raise noise_level",
    "KL": "Lower learning_rate, or raise noise_level",
}
"""What to do, by the term that is not finite; of other terms a network has overflowed."""
OVERFLOW = "Lower learning_rate, or use bfloat16 instead of float16"


class NonFiniteError(TrainingError):
    """A `TrainingError` with plain `values` for a report."""

    def __init__(self, message: str, values: dict[str, Any]) -> None:
        super().__init__(message)
        self.values = values

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.values)  # for pickling between processes


@dataclass(frozen=True)
class NonFiniteCheck:
    """Raises `NonFiniteError` for non-finite values of one iteration; the weights are then those of
    the last complete update.

    Args:
        iteration: number of the iteration.
        experience: the record of the iteration.
        credit: the rule's credit.
        objective: makes the loss's batches, to compute a broken term again.
    """

    iteration: int
    experience: Experience
    credit: Credit
    objective: Objective

    def losses(self, losses: Sequence[Mapping[str, float]], minibatch: Sequence[Rows]) -> None:
        """Raise the error for the first micro-batch whose loss, in `losses`, is not finite; it is
        recomputed to find the broken term.
        """
        for row, rows in zip(losses, minibatch, strict=False):  # padding is last, without a loss
            if not math.isfinite(row["loss"]):
                with torch.no_grad():
                    term, bad = culprit(self.objective.batch(replace(rows, states=None)))
                bad, what = bad.to(rows.sample.device), f"the loss is {row['loss']}"
                if term != "loss":
                    what += f", because the {term} is not finite in {int(bad.sum())} rows,"
                raise self._error(what, term, [(rows.sample[bad], rows.column[bad])])

    def gradient(self, norm: float, minibatch: Sequence[Rows]) -> None:
        """Raise the error for a gradient whose `norm` is not finite; it is blamed on all rows of
        the mini-batch.
        """
        every = [(rows.sample, rows.column) for rows in minibatch]
        raise self._error(f"the gradient norm is {norm}", "gradient", every)

    def _error(
        self, what: str, term: str, places: Sequence[tuple[Tensor, Tensor]]
    ) -> NonFiniteError:
        """The error with the rows at `places`, pairs of samples and columns."""
        objective, entries = self.objective, list[list[int]]()
        for sample, column in places:
            place = objective.place(sample, column)
            table = sample, objective.steps[place], objective.decided[place]
            entries += torch.stack(table, 1).tolist()
        experience = self.experience
        rows = []
        for sample, step, decision in entries:
            prompt, member = divmod(sample, experience.values.shape[1])
            rows.append(
                {
                    "prompt": experience.prompts[prompt].text,
                    "member": member,
                    "step": step,
                    "reward": float(experience.values[prompt, member, -1]),
                    "advantage": float(self.credit.advantages[prompt, member, decision]),
                }
            )
        steps = sorted({row["step"] for row in rows})
        prompts = sorted({row["prompt"] for row in rows})
        message = (
            f"iteration {self.iteration}: {what} at denoising step {', '.join(map(str, steps))};"
            " the weights are those of the last update. Prompts:"
            f" {', '.join(map(repr, prompts[:8]))}. {ADVICE.get(term, OVERFLOW)}"
        )
        values = {
            "iteration": self.iteration,
            "term": term,
            "denoising_steps": steps,
            "prompts": prompts,
            "bad_rows": len(rows),
            "rows": rows[:LISTED],
        }
        return NonFiniteError(message, values)


def culprit(batch: LossBatch | ForwardBatch) -> tuple[str, Tensor]:
    """The first non-finite term in the order of computation, and a mask of the rows in which it is
    not finite [sample]; "loss" and all rows that count if all terms are finite.
    """
    terms: dict[str, Tensor | None] = {"advantage": batch.advantages}
    counts = batch.weight > 0
    if isinstance(batch, ForwardBatch):
        terms["sampled latent"] = batch.target
        for name in ("old", "average", "reference"):
            terms[f"velocity of the {name}"] = getattr(batch, name)
        terms["velocity of the network"] = batch.new
        terms["gradient of the reward"] = batch.slope
    else:
        counts &= batch.behaviour.std > 0
        reference, node = batch.reference, batch.next_node
        terms |= {
            "sampled latent": node,
            "velocity of the rollout": batch.behaviour.mean,
            "velocity of the network": batch.new.mean,
            "velocity of the reference": reference and reference.mean,
            "ratio": (log_prob(batch.new, node) - log_prob(batch.behaviour, node)).exp(),
            "KL": reference and kl(batch.new, reference),
        }
    for term, values in terms.items():
        if values is not None:
            bad = counts & ~values.isfinite().reshape(len(counts), -1).all(1)
            if bool(bad.any()):
                return term, bad
    return "loss", counts
