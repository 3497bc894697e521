"""Reports a loss or gradient that is not finite: which term, at which denoising step, for which
prompts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import TrainingError
from flowrl.core.experience import Credit, Experience
from flowrl.core.forward import ForwardBatch
from flowrl.core.types import LossBatch, Prompt
from flowrl.flow.gaussian import kl, log_prob
from flowrl.rollout.batches import ForwardBatches, LossBatches, MicroBatch

LISTED = 64
"""Largest number of rows that failure.json lists."""
ADVICE = {
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
        prompts: the prompts [prompt].
        experience: the record of the iteration.
        credit: the rule's credit.
        batches: makes the loss's batches, to compute a broken term again.
        first: index, among all samples, of the first sample that this process rolled out.
    """

    iteration: int
    prompts: Sequence[Prompt]
    experience: Experience
    credit: Credit
    batches: LossBatches | ForwardBatches
    first: int

    def losses(self, rows: Sequence[Mapping[str, float]], minibatch: Sequence[MicroBatch]) -> None:
        """Check the loss of every micro-batch in `rows`; the first one that is not finite is
        recomputed to find the broken term.
        """
        for row, micro in zip(rows, minibatch, strict=False):  # padding comes last, without a row
            if not math.isfinite(row["loss"]):
                with torch.no_grad():
                    term, bad = culprit(self.batches.of(micro.sample, micro.column))
                bad, what = bad.to(micro.sample.device), f"the loss is {row['loss']}"
                if term != "loss":
                    what += f", because the {term} is not finite in {int(bad.sum())} rows,"
                raise self._error(what, term, [(micro.sample[bad], micro.column[bad])])

    def gradient(self, norm: float, minibatch: Sequence[MicroBatch]) -> None:
        """Check the gradient's `norm`; one that is not finite is blamed on all rows of the
        mini-batch.
        """
        if not math.isfinite(norm):
            every = [(micro.sample, micro.column) for micro in minibatch]
            raise self._error(f"the gradient norm is {norm}", "gradient", every)

    def _error(
        self, what: str, term: str, places: Sequence[tuple[Tensor, Tensor]]
    ) -> NonFiniteError:
        """The error with the rows at `places`, pairs of samples and columns."""
        tables = [(sample, *self.batches.origin(sample, column)) for sample, column in places]
        entries = [entry for table in tables for entry in torch.stack(table, 1).tolist()]
        rows = []
        for sample, step, decision in entries:
            prompt, member = divmod(sample + self.first, self.experience.values.shape[1])
            rows.append(
                {
                    "prompt": self.prompts[prompt].text,
                    "member": member,
                    "step": step,
                    "reward": float(self.experience.values[prompt, member, -1]),
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
