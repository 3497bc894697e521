"""Reports a loss or gradient that is not finite: which term, at which denoising step, for which
prompts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from flowrl.core.errors import TrainingError
from flowrl.core.experience import Credit, Experience
from flowrl.core.forward import ForwardBatch
from flowrl.core.protocols import ForwardLoss, PolicyLoss
from flowrl.core.types import LossBatch, Prompt
from flowrl.flow.gaussian import kl, log_prob
from flowrl.io import write_bytes, write_json
from flowrl.rollout.batches import ForwardBatches, LossBatches, MicroBatch, checked_loss

LISTED = 64
"""Largest number of rows that a dump lists."""
ADVICE = {
    "advantage": "Look at the reward model and the credit rule",
    "sampled latent": (
        "The rollout went out of range: use bfloat16 instead of float16, or a smaller noise_level"
    ),
    "velocity of the rollout": (
        "The rollout went out of range: use bfloat16 instead of float16, or a lower learning_rate"
    ),
    "velocity of the network": (
        "The last update broke the network: lower learning_rate, or use bfloat16 instead of float16"
    ),
    "velocity of the old": (
        "The copy of the weights is broken: lower learning_rate, or use bfloat16 instead of float16"
    ),
    "velocity of the average": (
        "The copy of the weights is broken: lower learning_rate, or use bfloat16 instead of float16"
    ),
    "velocity of the reference": "The base model overflows: use bfloat16 instead of float16",
    "ratio": (
        "The policy moved too far from the one that sampled: lower learning_rate or minibatches, or"
        " raise the noise level"
    ),
    "KL": (
        "The policy moved too far from the base model: lower learning_rate, or raise the noise"
        " level"
    ),
    "loss": "Lower learning_rate, or raise the noise level",
    "gradient": "Lower learning_rate, or use bfloat16 instead of float16",
}


class NonFiniteError(TrainingError):
    """A `TrainingError` with data for a report.

    Args:
        message: text of the error.
        values: plain values.
        tensors: tensors by name.
    """

    def __init__(self, message: str, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().__init__(message)
        self.values, self.tensors = values, tensors

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.values, self.tensors)  # for pickling between processes

    def saved(self, folder: Path) -> "NonFiniteError":
        """Write failure.json and failure.safetensors to `folder`; returns the error with a further
        sentence about them.
        """
        write_json(folder / "failure.json", self.values)
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()
        }
        write_bytes(folder / "failure.safetensors", save(tensors))
        return NonFiniteError(
            f"{self}. Prompts, rewards and advantages are in {folder}", self.values, self.tensors
        )


@dataclass(frozen=True)
class NonFiniteCheck:
    """Raises `NonFiniteError` for non-finite values of one iteration; the weights are then those of
    the last complete update.

    Args:
        iteration: number of the iteration.
        prompts: the prompts [prompt].
        experience: the record of the iteration.
        credit: the rule's credit.
        loss: the loss.
        batches: makes the loss's batches, to compute a broken term again.
        first: index, among all samples, of the first sample that this process rolled out.
    """

    iteration: int
    prompts: Sequence[Prompt]
    experience: Experience
    credit: Credit
    loss: PolicyLoss | ForwardLoss
    batches: LossBatches | ForwardBatches
    first: int

    def losses(self, rows: Sequence[Mapping[str, float]], minibatch: Sequence[MicroBatch]) -> None:
        """Check the loss of every micro-batch in `rows`; the first one that is not finite is
        recomputed to find the broken term.
        """
        for row, micro in zip(rows, minibatch, strict=False):
            if not math.isfinite(row["loss"]):
                with torch.no_grad():
                    found = culprit(self.batches.of(micro.sample, micro.column))
                bad = found.bad.to(micro.sample.device)
                count = f"{int(bad.sum())} of {len(bad)} rows"
                cause = (
                    ""
                    if found.term == "loss"
                    else f", because the {found.term} is not finite in {count},"
                )
                what = f"the loss is {row['loss']}{cause}"
                raise self._error(
                    what, found.term, row["loss"], micro.sample[bad], micro.column[bad]
                )

    def gradient(
        self, norm: float, minibatch: Sequence[MicroBatch], trained: Mapping[str, Tensor]
    ) -> None:
        """Check the gradient `norm` of the mini-batch with respect to the parameters `trained`.

        Only if `norm` is not finite, the gradient of every row is recomputed separately, to find
        steps, samples and parameters.
        """
        if math.isfinite(norm):
            return
        bad: list[tuple[int, int]] = []
        names: list[str] = []
        rows = [
            row
            for micro in minibatch
            if micro.weight > 0
            for row in zip(micro.sample, micro.column, strict=True)
        ]
        for sample, column in rows:
            loss = checked_loss(self.loss, self.batches.of(sample[None], column[None])).loss
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            broken = [
                name
                for name, g in zip(trained, found, strict=True)
                if g is not None and not bool(g.isfinite().all())
            ]
            names += [name for name in broken if name not in names]
            bad += [(int(sample), int(column))] if broken else []
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        where = (
            f"the gradient of {', '.join(names[:4])}{more} is not finite"
            if names
            else "the gradient of every row is finite, but the sum is not"
        )
        chosen = bad or [(int(sample), int(column)) for sample, column in rows]
        samples, columns = (
            torch.tensor([row[i] for row in chosen], dtype=torch.long) for i in (0, 1)
        )
        what = f"the gradient norm is {norm}, {where},"
        raise self._error(what, "gradient", norm, samples, columns, names)

    def _error(
        self,
        what: str,
        term: str,
        value: float,
        sample: Tensor,
        column: Tensor,
        parameters: Sequence[str] = (),
    ) -> NonFiniteError:
        advantages = self.credit.advantages
        members, flat = advantages.shape[1], advantages.flatten(0, 1)
        step, decision = (index.tolist() for index in self.batches.origin(sample, column))
        rows = list(zip((sample + self.first).tolist(), step, decision, strict=True))
        steps = sorted(set(step))
        texts = sorted(
            {self.prompts[row[0] // members].text for row in rows}
            or {prompt.text for prompt in self.prompts}
        )
        shown = ", ".join(map(repr, texts[:8])) + (
            f" and {len(texts) - 8} more" if len(texts) > 8 else ""
        )
        at_steps = (
            f" at denoising step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
            if steps
            else ""
        )
        message = (
            f"iteration {self.iteration}: {what}{at_steps}; the weights are those of the last"
            f" update. Prompts: {shown}. {ADVICE[term]}"
        )
        values = {
            "iteration": self.iteration,
            "term": term,
            "value": str(value),
            "denoising_steps": steps,
            "parameters": list(parameters),
            "prompts": [prompt.text for prompt in self.prompts],
            "bad_rows": len(rows),
            "rows": [
                {
                    "prompt": self.prompts[i // members].text,
                    "member": i % members,
                    "step": j,
                    "advantage": float(flat[i, k]),
                }
                for i, j, k in rows[:LISTED]
            ],
        }
        return NonFiniteError(
            message, values, {"values": self.experience.values, "advantages": advantages}
        )


@dataclass(frozen=True)
class Culprit:
    """The first term that is not finite.

    Args:
        term: name of the term.
        bad: mask of the pairs in which it is not finite [sample].
    """

    term: str
    bad: Tensor


def culprit(batch: LossBatch | ForwardBatch) -> Culprit:
    """The first non-finite term in the order of computation; "loss", with all pairs, if all terms
    are finite.
    """
    if isinstance(batch, ForwardBatch):
        others = {"old": batch.old, "average": batch.average, "reference": batch.reference}
        copies = {
            f"velocity of the {name}": value for name, value in others.items() if value is not None
        }
        target = {"advantage": batch.advantages, "sampled latent": batch.target}
        return _first_broken(
            {**target, **copies, "velocity of the network": batch.new}, batch.weight > 0
        )
    counts = (batch.weight > 0) & (batch.behaviour.std > 0)
    terms: dict[str, Tensor] = {
        "advantage": batch.advantages,
        "sampled latent": batch.next_node,
        "velocity of the rollout": batch.behaviour.mean,
        "velocity of the network": batch.new.mean,
    }
    if batch.reference is not None:
        terms["velocity of the reference"] = batch.reference.mean
    with torch.no_grad():
        terms["ratio"] = (
            log_prob(batch.new, batch.next_node) - log_prob(batch.behaviour, batch.next_node)
        ).exp()
        if batch.reference is not None:
            terms["KL"] = kl(batch.new, batch.reference)
    return _first_broken(terms, counts)


def _first_broken(terms: Mapping[str, Tensor], counts: Tensor) -> Culprit:
    for term, values in terms.items():
        bad = (
            counts & ~torch.isfinite(values).flatten(1).all(1)
            if values.ndim > 1
            else counts & ~torch.isfinite(values)
        )
        if bool(bad.any()):
            return Culprit(term, bad)
    return Culprit("loss", counts)
