"""Rules with a memory across iterations: a moving average of gains, and a value per prompt."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.experience import CreditTable, Decisions, Experience, Needs, ValueTable
from flowrl.core.options import Share, checked_options
from flowrl.core.prompt import Prompt
from flowrl.credit.table import (
    STD_EPSILON,
    Clamp,
    clamped,
    first_of,
    gain_columns,
    gains,
    last_column,
    masked_mean,
    require_columns,
    zscore,
)
from flowrl.probes import NoProbe, Probe, Substeps


@checked_options
@dataclass
class MovingAverageGain:
    """Credits a decision with its gain minus the running average of the gains at its time.

    A = Z(g_k - b_k) over members and decisions, g_k = V_{k+1} - V_k, b_k an exponential moving
    average of g_k.

    After every table b_k <- `decay` b_k + (1 - `decay`) mean(g_k), the mean over all prompts and
    members in the mask. The average is kept by the time of the decision; a time that was not seen
    before starts with its mean gain. Z(y) = (y - mean) / (std + 1e-4) per prompt. Subtracting the
    mean gain of a decision removes the larger credit that early decisions get only because they are
    early. A group of equal rewards gets exactly 0: such rewards contain no information about any
    decision, but the baseline would add some.

    `assign` updates the baseline; checkpoints contain it (`state_dict`), so a resumed run continues
    with the same values. It raises `CreditError` if a value that the credit reads is not finite.
    Source: the moving-average ablation of Stepwise-Flow-GRPO (arXiv 2603.28718).

    Args:
        decay: weight of the previous baseline, in [0, 1).
        clamp: largest absolute advantage; None for no clamp.
        probe: the probe that scores unfinished states.

    Raises:
        ConfigError: a field is out of range.
    """

    needs: ClassVar[Needs] = Needs(columns=gain_columns, shared_noise=True)

    decay: Annotated[float, Ge(0), Lt(1)] = 0.9
    clamp: Clamp = 5.0
    probe: Probe = Substeps(5)
    baseline: dict[float, float] = field(default_factory=dict, init=False, repr=False)

    @checked
    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """Advantages [prompt, member, decision] relative to the baseline of earlier tables; then
        updates the baseline.
        """
        require_columns(values, decisions, self)
        mask, increments, over = decisions.mask, gains(values), ("member", "decision")
        means: list[float] = masked_mean(increments, ("prompt", "member"), mask).flatten().tolist()
        times: list[float] = decisions.time.tolist()
        before = [self.baseline.get(time, mean) for time, mean in zip(times, means, strict=True)]
        relative = increments - increments.new_tensor(before)
        advantages = zscore(relative, over, clamp=self.clamp, mask=mask)
        counted = mask.any(0).any(0).tolist()
        for time, old, mean, counts in zip(times, before, means, counted, strict=True):
            if counts:
                self.baseline[time] = self.decay * old + (1.0 - self.decay) * mean
        # the baseline would credit a group of equal rewards, which says nothing about decisions
        read = gain_columns(mask)
        silent = ((values == first_of(values, over, read)) | ~read).all(-1).all(-1)
        return advantages.masked_fill(silent[:, None, None], 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """Times [n] and the baseline at each [n]."""
        columns = {"times": [*self.baseline], "baseline": [*self.baseline.values()]}
        return {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        times, baseline = state["times"].tolist(), state["baseline"].tolist()
        self.baseline = dict(zip(times, baseline, strict=True))


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


UNSEEN = Tracked(0.0, 0.0, 0.0)


@checked_options
@dataclass
class ValueTracker:
    """Credits every decision with the final reward, normalised by earlier rewards of its prompt.

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

    `assign` raises `CreditError` if a reward R is not finite. Sources: SuperFlow (arXiv
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

    needs: ClassVar[Needs] = Needs(fields=("prompts",))

    decay: Share = 0.9
    std: Literal["prompt", "batch"] = "prompt"
    clamp: Clamp = 5.0
    memory: dict[Hashable, Tracked] = field(default_factory=dict, init=False, repr=False)

    @property
    def probe(self) -> Probe:
        """Only finished images are scored."""
        return NoProbe()

    @checked
    def assign(
        self, values: ValueTable, decisions: Decisions, record: Experience | None = None
    ) -> CreditTable:
        """Advantages relative to the memory of the prompts, updated by their rewards. Without a
        record, every row is the first visit of a different prompt, and the memory is unchanged.
        """
        keys: Sequence[Hashable] = range(len(values))
        memory: dict[Hashable, Tracked] = {}
        if record is not None:
            keys, memory = [prompt_key(prompt) for prompt in record.prompts], self.memory
        members = decisions.mask.any(-1)
        require_columns(values, decisions, self, last_column(decisions.mask))
        final = values[..., -1].double()
        for key in dict.fromkeys(keys):  # groups of one prompt are one visit
            rows = [row for row, other in enumerate(keys) if other == key]
            rewards = final[rows][members[rows]]
            if len(rewards):
                memory[key] = memory.get(key, UNSEEN).merged(tracked(rewards), self.decay)
        known = [memory.get(key, UNSEEN) for key in keys]
        statistics = torch.tensor(known, dtype=torch.float64).to(final.device)
        deviations = final - statistics[:, 1, None]
        pooled = masked_mean(deviations.square(), ("prompt", "member"), members)
        std = (statistics[:, 2, None] if self.std == "prompt" else pooled).sqrt()
        scores = clamped(deviations / (std + STD_EPSILON), self.clamp)
        return scores[..., None].repeat(1, 1, len(decisions)).to(values.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """The texts' hashes [prompt] and weight, mean and variance [prompt, 3]."""
        return {
            "prompts": torch.tensor(list(self.memory), dtype=torch.int64),
            "statistics": torch.tensor(list(self.memory.values()), dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        rows = zip(state["prompts"].tolist(), state["statistics"].tolist(), strict=True)
        self.memory = {key: Tracked(*numbers) for key, numbers in rows}


def tracked(values: Tensor) -> Tracked:
    """The statistics of one visit's rewards [sample], each of weight 1; without rounding for equal
    values.
    """
    first = values[0]
    mean = first + (values - first).mean()
    return Tracked(float(len(values)), float(mean), float((values - mean).square().mean()))


def prompt_key(prompt: Prompt) -> int:
    """A signed 64-bit hash of what conditions the network, and of the prompt's source."""
    return text_key(prompt.key + f"\0{prompt.source}" * bool(prompt.source))


def text_key(text: str) -> int:
    """A signed 64-bit hash of a text."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
