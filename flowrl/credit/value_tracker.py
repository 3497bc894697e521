"""Uniform credit relative to a value per prompt that is kept across iterations."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.credit.table import STD_EPSILON, require_clamp, require_nodes
from flowrl.errors import CreditError, require
from flowrl.options import checked_options
from flowrl.probes import NoProbe, Probe
from flowrl.types import NodeTable, Prompt, Schedule, StepTable, checked


class Tracked(NamedTuple):
    """Weighted rewards of one prompt: the sum of their weights, their mean and their population variance."""

    weight: float
    mean: float
    variance: float

    def merged(self, new: "Tracked", decay: float) -> "Tracked":
        """With the rewards of a further visit, after the weights so far were multiplied by `decay`."""
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
    """A = (R_T - v_p) / (s_p + 1e-4) at every step, clamped to +-`clamp`; v_p and s_p are tracked over the visits of prompt p.

    v_p = sum_k w_k sum_m R_{k,m} / sum_k w_k M_k after the visits k = 1..n with M_k samples each, the present one included, with
    w_k = decay^(n-k); s_p^2 is the population variance with the same weights. With `decay` = 1, v_p is the running mean of
    the prompt; below 1, an exponential moving average without the bias towards its start; with 0 it is the mean of the group,
    and the rule is `Uniform`, as it always is at a prompt's first visit. With `std` = "batch", s_p is the root mean square of
    all deviations R_T - v_p of the table instead.

    A group of equal rewards, or of one member, gets credit from the second visit on, relative to earlier rewards of the prompt.
    The baseline lags behind a policy that improves, and the advantages of a group then have a mean above 0.

    A rule with memory, in checkpoints: it is keyed by the prompt's text (a hash of 64 bits), so that the order of prompts does
    not matter; groups of equal prompts in one table count as one visit. It grows by 32 bytes in a checkpoint, and by about 300
    in main memory, for every distinct prompt.

    Sources: SuperFlow (arXiv 2512.17951), which uses a value tracked per prompt as baseline; DDPO (arXiv 2305.13301), whose code
    has mean and std over each prompt's last rewards, the present ones included. Raises `ConfigError` for a bad field,
    `CreditError` if a reward R_T is not finite.
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

    @checked
    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step] as at the first visit of as many different prompts, which are not remembered."""
        return self._advantages(rewards, range(len(rewards)), {})

    @checked
    def assign_prompts(self, rewards: NodeTable, prompts: Sequence[Prompt], schedule: Schedule | None = None) -> StepTable:
        """Advantages [prompt, member, step] of these prompts, after their rewards have moved the memory."""
        if len(prompts) != len(rewards):
            raise CreditError(f"ValueTracker got {len(prompts)} prompts for a table of {len(rewards)}")
        return self._advantages(rewards, [text_key(prompt.text) for prompt in prompts], self.memory)

    def _advantages(self, rewards: NodeTable, keys: Sequence[Hashable], memory: dict[Hashable, Tracked]) -> StepTable:
        """Move the `memory` of the prompts `keys`, then compare with it."""
        require_nodes(rewards, [rewards.shape[-1] - 1], "ValueTracker", self.probe)
        final, rows = rewards[..., -1].double(), {}
        for row, key in enumerate(keys):
            rows.setdefault(key, []).append(row)
        for key, chosen in rows.items():
            seen = tracked(final[chosen].flatten())
            memory[key] = memory[key].merged(seen, self.decay) if key in memory else seen
        values = torch.tensor([memory[key] for key in keys], dtype=torch.float64).to(final.device)
        deviations = final - values[:, 1, None]
        std = values[:, 2, None].sqrt() if self.std == "prompt" else deviations.square().mean().sqrt()
        scores = deviations / (std + STD_EPSILON)
        scores = scores if self.clamp is None else scores.clamp(-self.clamp, self.clamp)
        return scores[..., None].repeat(1, 1, rewards.shape[-1] - 1).to(rewards.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """The texts' hashes [prompt] and weight, mean and variance [prompt, 3]; empty before the first visit."""
        if not self.memory:
            return {}
        statistics = torch.tensor(list(self.memory.values()), dtype=torch.float64)
        return {"prompts": torch.tensor(list(self.memory), dtype=torch.int64), "statistics": statistics}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.memory = {}
        if "prompts" in state:
            rows = zip(state["prompts"].tolist(), state["statistics"].tolist(), strict=True)
            self.memory = {key: Tracked(*numbers) for key, numbers in rows}


def tracked(values: Tensor) -> Tracked:
    """The statistics of one visit's rewards [sample], each of weight 1; exact for equal values of any size."""
    first = values[0]
    mean = first + (values - first).mean()
    return Tracked(float(len(values)), float(mean), float((values - mean).square().mean()))


def text_key(text: str) -> int:
    """A hash of a prompt's text, a number of 64 bits with sign."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
