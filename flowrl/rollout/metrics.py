"""Metrics of an iteration: seconds by phase, statistics of its rewards, and means of the loss's
metrics.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.experience import Credit, Experience
from flowrl.core.forward import ForwardBatch
from flowrl.core.types import LossBatch, LossResult
from flowrl.flow import log_prob

Row = dict[str, Any]


class Clock:
    """Seconds by phase; `on_phase` is called with the name of every new phase."""

    def __init__(self, on_phase: Callable[[str], None], phase: str) -> None:
        self.phases: dict[str, float] = {}
        self.on_phase, self.phase, self.last = on_phase, phase, time.perf_counter()

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self.stop()
        self.phase = phase
        self.on_phase(phase)

    def stop(self) -> None:
        """Add the time since the last call to the current phase."""
        if torch.cuda.is_initialized():  # something of this process runs on a GPU
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now - self.last
        self.last = now


def reward_metrics(values: Tensor) -> Row:
    """Statistics of the finished images' rewards, and of the gains if every column was scored;
    without invalid samples.

    `values` is [prompt, member, decision+1].
    """
    valid = values[..., -1].isfinite()
    groups = [group[kept] for group, kept in zip(values[..., -1], valid, strict=True) if kept.any()]
    spread = torch.stack([group.std(unbiased=False) for group in groups])
    values = values[valid]
    final = values[..., -1]
    metrics: Row = {
        "reward_mean": float(final.mean()),
        "reward_std": float(final.std()) if final.numel() > 1 else 0.0,
        "group_std": float(spread.mean()),
        "zero_spread_groups": float((spread < 1e-6).float().mean()),
    }
    if bool(values.isfinite().all()):
        metrics["mean_abs_gain"] = values.diff(dim=-1).abs().mean(0).tolist()
    return metrics


def source_metrics(experience: Experience) -> Row:
    """The mean reward of each source, and its share of groups with equal rewards; nothing for
    prompts of one source.
    """
    names = [prompt.source for prompt in experience.prompts]
    if len({*names}) < 2:
        return {}
    final = experience.values[..., -1]
    equal = final.nan_to_num(-torch.inf).amax(1) - final.nan_to_num(torch.inf).amin(1) < 1e-6
    rows = {name: torch.tensor([name == other for other in names]) for name in sorted({*names})}
    return {
        "sources": {name: float(final[row].nanmean()) for name, row in rows.items()},
        "zero_spread_sources": {
            name: float(equal[row].float().mean()) for name, row in rows.items()
        },
    }


def gradient_noise(first: float, share: float, whole: float) -> Row:
    """Signal |G|^2 and noise N, the trace of the covariance, of a mini-batch's gradient with mean
    G, from |g_s|^2 = `first` of its first micro-batch with share s of its weights, and |g|^2 =
    `whole`.

    E|g|^2 = |G|^2 + N and E|g_s|^2 = |G|^2 + N / s if the samples are independent. Noise that a
    prompt's samples share counts partly as signal. Each is noisy: divide means over 20 iterations
    or more. Source: arXiv 1812.06162, Appendix A.1.
    """
    noise = (first - whole) / (1 / share - 1)
    return {"gradient_signal": whole - noise, "gradient_noise": noise}


def credit_metrics(experience: Experience, credit: Credit) -> Row:
    """The mean size of the advantages, and the mean score of every component of the reward."""
    row: Row = {"abs_advantage": float(credit.advantages[experience.decisions.mask].abs().mean())}
    if experience.parts:
        tables = experience.parts.items()
        row["parts"] = {name: float(table[..., -1].nanmean()) for name, table in tables}
    return row


def step_gradients(
    result: LossResult, batch: LossBatch | ForwardBatch, step: Tensor, steps: int
) -> Tensor:
    """Per step, the sum over its rows of the squared norm of d(policy term) / d(velocity), shape
    [steps].

    This is the backward pass of the policy term, without the penalty and without a loss scale, up
    to the network's output. It is exact for any loss and sampler, takes a few element-wise
    operations on latents, and does not synchronise. For a loss without a separate policy term, this
    is the gradient of the whole loss. Call it before `backward`.
    """
    term = result.loss if result.policy_term is None else result.policy_term
    squares = torch.zeros(steps, dtype=torch.float64, device=step.device)
    if batch.velocity is not None:
        (gradient,) = torch.autograd.grad(
            term, batch.velocity, retain_graph=True, allow_unused=True
        )
        if gradient is not None:
            squares.index_add_(0, step, gradient.double().flatten(1).square().sum(1))
    return squares


BY_STEP = ("log_prob_noise", "node_mean", "node_rms")
"""Names of the means of `step_sums`."""


@torch.no_grad()
def step_sums(batch: LossBatch | ForwardBatch, steps: int) -> Tensor:
    """Per step, the sum over a batch's transitions of their weights, and of weight times |log p -
    log p_old|, the mean of the node after the transition and its mean square [4, steps]; zeros for
    a forward-process loss. It does not synchronise.
    """
    sums = torch.zeros(4, steps, dtype=torch.float64, device=batch.weight.device)
    if isinstance(batch, LossBatch):
        node = batch.next_node.flatten(1)
        change = log_prob(batch.new, batch.next_node) - log_prob(batch.behaviour, batch.next_node)
        columns = [torch.ones_like(node[:, 0]), change.abs(), node.mean(1), node.square().mean(1)]
        rows = torch.where(batch.weight > 0, batch.weight * torch.stack(columns), 0.0)
        sums.index_add_(1, batch.step, rows.double())
    return sums


class LossMetrics:
    """Means of the loss and its metrics over all evaluated rows of an iteration, and the largest
    "ratio_deviation".

    `add` takes a micro-batch's result without waiting for the device, `take` fetches all of a
    mini-batch at once, and `merge` adds the mini-batch's rows of all processes.

    "ratio_noise" and "ratio_noise_mean" are the largest and the mean |ratio - 1| of the first
    mini-batch: the policy has not changed yet, so only rounding changes a ratio from 1.
    By step, for transitions and of the first mini-batch, too: "log_prob_noise", the mean |log p -
    log p_old|, which rounding alone makes differ from 0; "node_mean" and "node_rms", mean and root
    mean square of the latents after the step. 0 at steps without rows.
    "step_shares" [step] is each step's fraction of the policy term: the sum of `step_gradients`
    over the rows and updates of the iteration, divided by its sum over steps (0 if there is no
    gradient).
    """

    def __init__(self, steps: int) -> None:
        self.means: Row = {}
        self.merged, self.steps = 0, steps
        self._squares = [0.0] * steps
        self._sums = [0.0] * 4 * steps
        self._names: list[str] = []
        self._pending: list[tuple[float, Tensor]] = []
        self._part, self._norm, self._share = list[Tensor](), 0.0, 0.0

    def add(
        self,
        weight: float,
        result: LossResult,
        batch: LossBatch | ForwardBatch,
        step: Tensor,
        evaluated: float = 1.0,
    ) -> None:
        """Add a micro-batch's loss and metrics, before its backward pass.

        `weight` is its fraction of the iteration's weights, and `step` the rows' steps; a
        micro-batch of weight 0 is ignored. `evaluated` is the fraction of its mini-batch's weights
        over which the means are taken.
        """
        if weight > 0:
            named = {"loss": result.loss, **result.metrics}
            self._names = list(named)
            means = torch.stack([value.detach().double().reshape(()) for value in named.values()])
            squares = weight**2 * step_gradients(result, batch, step, self.steps)
            first = [step_sums(batch, self.steps).flatten()] if self.merged == 0 else []
            self._pending.append((weight / evaluated, torch.cat([means, squares, *first])))

    def take(self) -> list[Row]:
        """One row per micro-batch since the last call: "weight", "loss", the loss's metrics and the
        steps' "squares" of gradients; in the first mini-batch also "sums", those of `step_sums`.
        """
        weights, count = [weight for weight, _ in self._pending], len(self._names)
        columns = [v for _, v in self._pending]
        both = [*columns, *self._part]
        fetched = torch.cat(both).tolist() if both else []
        if self._part:
            self._norm = fetched.pop()
        width = len(fetched) // max(1, len(columns))
        values = [fetched[i * width : (i + 1) * width] for i in range(len(columns))]
        self._pending, self._part = [], []
        end = count + self.steps
        return [
            {
                "weight": weight,
                "squares": row[count:end],
                "sums": row[end:],
                **dict(zip(self._names, row, strict=False)),
            }
            for weight, row in zip(weights, values, strict=True)
        ]

    def merge(self, rows: Sequence[Sequence[Row]]) -> None:
        """Add the rows of one mini-batch, process by process."""
        means, total = self.means, 0
        for row in (row for part in rows for row in part):
            weight, squares, sums = row.pop("weight"), row.pop("squares"), row.pop("sums")
            total += weight
            if sums:
                self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)]
            self._squares = [a + b for a, b in zip(self._squares, squares, strict=True)]
            for key, value in row.items():
                if key == "ratio_deviation":
                    means[key] = max(means.get(key, 0.0), value)
                else:
                    means[key] = means.get(key, 0.0) + value * weight
        if self.merged == 0 and "ratio_deviation" in means:
            means["ratio_noise"] = means["ratio_deviation"]
        if self.merged == 0 and "ratio_distance" in means:
            means["ratio_noise_mean"] = means["ratio_distance"] / total
        counts = self._sums[: self.steps]
        if self.merged == 0 and any(counts):
            for place, name in enumerate(BY_STEP, 1):
                column = self._sums[place * self.steps : (place + 1) * self.steps]
                pairs = zip(column, counts, strict=True)
                means[name] = [value / (count or 1.0) for value, count in pairs]
            means["node_rms"] = [math.sqrt(square) for square in means["node_rms"]]
        means["step_shares"] = [square / (sum(self._squares) or 1.0) for square in self._squares]
        self.merged += 1

    def add_part(self, parameters: Iterable[Tensor], share: float, scale: Tensor) -> None:
        """Note the gradient of the first micro-batch, with `share` of the evaluated weights of its
        mini-batch and a loss scaled by `scale`, for `gradient_noise`; no action if it has none.
        """
        if share == 0:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._part = [nn.utils.get_total_norm(gradients).double().reshape(1) / (share * scale)]
        self._share = share

    def add_norm(self, norm: float) -> None:
        """Add the norm of a mini-batch's gradient before the clip."""
        if self._share > 0 and "grad_norm" not in self.means:
            self.means |= gradient_noise(self._norm**2, self._share, norm**2)
        self.means["grad_norm"] = norm
