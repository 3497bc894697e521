"""Uniform credit relative to a value per prompt, tracked across iterations."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.experience import Credit, CreditTable, Decisions, Experience, ValueTable
from flowrl.core.options import checked_options
from flowrl.credit.table import (
    STD_EPSILON,
    last_column,
    masked_mean,
    require_clamp,
    require_columns,
)
from flowrl.probes import NoProbe, Probe


class Tracked(NamedTuple):
    """Weighted rewards of one prompt: the sum of their weights, their mean and their population
    variance.
    """

    weight: float
    mean: float
    variance: float

    def merged(self, new: "Tracked", decay: float) -> "Tracked":
        """The statistics including the rewards `new` of a further visit; the earlier weights are
        multiplied by `decay` first.
        """
        old = decay * self.weight
        if old == 0.0:
            return new
        weight, gap = old + new.weight, new.mean - self.mean
        mean = self.mean + gap * (new.weight / weight)
        inside = (old * self.variance + new.weight * new.variance) / weight
        return Tracked(weight, mean, inside + gap * gap * (old / weight) * (new.weight / weight))


@checked_options
@dataclass
class ValueTracker:
    """Every decision gets the final reward, normalised by what its prompt scored on earlier visits.

    A = (R - v_p) / (s_p + 1e-4) at every decision, clamped to +-`clamp`; v_p and s_p are tracked
    over the visits of prompt p.

    After the visits k = 1..n with M_k samples each in the mask, including the current one, v_p =
    sum_k w_k sum_m R_{k,m} / sum_k w_k M_k with w_k = decay^(n-k); s_p^2 is the population variance
    with the same weights. At a prompt's first visit the rule equals `Uniform`.

    From the second visit on, a group of equal rewards, or of one member, gets credit relative to
    earlier rewards of the prompt. The baseline lags behind a policy that improves, so the
    advantages of a group then have a mean above 0.

    The memory is keyed by a 64-bit hash of the prompt's text, so the order of prompts has no
    effect; groups of equal prompts in one table count as one visit. Every distinct prompt adds 32
    bytes to a checkpoint and about 300 bytes in main memory.

    Both methods raise `CreditError` if a reward R is not finite. Sources: SuperFlow (arXiv
    2512.17951), with a value tracked per prompt as baseline; DDPO (arXiv 2305.13301), whose code
    has mean and std over each prompt's last rewards, including the current ones.

    Args:
        decay: in [0, 1]. 1: v_p is the prompt's running mean; below 1: an exponential moving
            average without initial bias; 0: the group's mean, as in `Uniform`.
        std: "prompt", or "batch": s_p is the root mean square of all deviations R - v_p of the
            table.
        clamp: largest absolute advantage; None for no clamp.

    Raises:
        ConfigError: a field is out of range.
    """

    decay: float = 0.9
    std: Literal["prompt", "batch"] = "prompt"
    clamp: float | None = 5.0
    memory: dict[Hashable, Tracked] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        require(0.0 <= self.decay <= 1.0, "ValueTracker.decay", self.decay, "in [0, 1]")
        require_clamp("ValueTracker", self.clamp)

    @property
    def probe(self) -> Probe:
        """Only finished images are scored."""
        return NoProbe()

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages if every row is the first visit of a different prompt; the memory is
        unchanged.
        """
        return self._advantages(values, decisions, range(len(values)), {})

    def credit(self, experience: Experience) -> Credit:
        """Advantages relative to the memory of the prompts, updated by their rewards."""
        keys = [text_key(prompt.text) for prompt in experience.prompts]
        return Credit(self._advantages(experience.values, experience.decisions, keys, self.memory))

    def _advantages(
        self,
        values: ValueTable,
        decisions: Decisions,
        keys: Sequence[Hashable],
        memory: dict[Hashable, Tracked],
    ) -> CreditTable:
        """Update the `memory` of the prompts `keys`, then compare with it."""
        members = decisions.mask.any(-1)
        require_columns(values, decisions, self, last_column(decisions.mask))
        final, rows = values[..., -1].double(), {}
        for row, key in enumerate(keys):
            rows.setdefault(key, []).append(row)
        for key, chosen in rows.items():
            rewards = final[chosen][members[chosen]]
            if len(rewards):
                seen = tracked(rewards)
                memory[key] = memory[key].merged(seen, self.decay) if key in memory else seen
        known = [memory.get(key, Tracked(0.0, 0.0, 0.0)) for key in keys]
        statistics = torch.tensor(known, dtype=torch.float64).to(final.device)
        deviations = final - statistics[:, 1, None]
        pooled = masked_mean(deviations.square(), ("prompt", "member"), members)
        std = (statistics[:, 2, None] if self.std == "prompt" else pooled).sqrt()
        scores = deviations / (std + STD_EPSILON)
        scores = scores if self.clamp is None else scores.clamp(-self.clamp, self.clamp)
        return scores[..., None].repeat(1, 1, len(decisions)).to(values.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """The texts' hashes [prompt] and weight, mean and variance [prompt, 3]; empty before the
        first visit.
        """
        if not self.memory:
            return {}
        statistics = torch.tensor(list(self.memory.values()), dtype=torch.float64)
        return {
            "prompts": torch.tensor(list(self.memory), dtype=torch.int64),
            "statistics": statistics,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.memory = {}
        if "prompts" in state:
            rows = zip(state["prompts"].tolist(), state["statistics"].tolist(), strict=True)
            self.memory = {key: Tracked(*numbers) for key, numbers in rows}


def tracked(values: Tensor) -> Tracked:
    """The statistics of one visit's rewards [sample], each of weight 1; without rounding for equal
    values.
    """
    first = values[0]
    mean = first + (values - first).mean()
    return Tracked(float(len(values)), float(mean), float((values - mean).square().mean()))


def text_key(text: str) -> int:
    """A signed 64-bit hash of a prompt's text."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
