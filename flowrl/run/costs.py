"""Costs of runs in forward equivalents: the formula by which runs are compared at equal cost."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flowrl.core.forward import Guidance, guidance_passes
from flowrl.run.results import scoring_seconds

__all__ = [
    "COUNTS",
    "RATE",
    "REWARD_FLOPS",
    "SHAPES",
    "STATED",
    "STATED_NAME",
    "WORLDS",
    "Parts",
    "Prices",
    "cumulated",
    "measured_prices",
    "prices_of",
]

COUNTS = ("nfe", "probe_nfe", "train_nfe", "gradient_nfe", "decodes", "reward_calls")
"""Counts of an iteration in metrics.jsonl: network evaluations of the rollout, those of them for
probes, network evaluations of the update, those of them with a gradient, decoded latents and scored
images.
"""


@dataclass(frozen=True)
class Parts:
    """The cost of a run by its parts, in forward equivalents."""

    sampling: float
    probes: float
    update: float
    decodes: float
    rewards: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return sum(vars(self).values())

    def scaled(self, factor: float) -> "Parts":
        """Every part times `factor`."""
        return Parts(**{name: factor * value for name, value in vars(self).items()})


GRADIENT, CHECKPOINTED = 3.0, 4.0
"""Cost of a forward pass with its backward pass, without and with gradient checkpointing, in
forward passes: for weights that are all trained. A LoRA needs no gradients of the frozen weights.
"""


@dataclass(frozen=True)
class Prices:
    """Costs of network evaluations, a decoded latent and a reward call, in forward passes of the
    network for one latent.

    Args:
        source: where `decode` and `reward` come from.
        decode: cost of a decoded latent.
        reward: cost of a scored image.
        seconds: seconds of a forward pass of a stated model; NaN if there is none.
        gradient: cost of a forward pass with its backward pass.
        passes: forward passes of an evaluation, 2 with classifier-free guidance.
        gradient_passes: those of an evaluation with a gradient through which the gradient flows.
    """

    source: str = ""
    decode: float = 0.0
    reward: float = 0.0
    seconds: float = math.nan
    gradient: float = GRADIENT
    passes: float = 1.0
    gradient_passes: float = 1.0

    @staticmethod
    def of_policy(policy: Mapping[str, Any]) -> "Prices":
        """The prices of a run with these settings of the policy, as in its config.json."""
        own, train = policy.get("guidance_scale", 1.0), policy.get("train_guidance_scale") or None
        passes, guided = guidance_passes(own), Guidance(train).scales(own)[0] != 1
        half = guided and policy.get("guidance_gradient") == "prompt"
        gradient = CHECKPOINTED if policy.get("gradient_checkpointing") else GRADIENT
        return Prices(
            gradient=gradient, passes=passes, gradient_passes=passes / 2 if half else passes
        )

    def update(self, train_nfe: float, gradient_nfe: float) -> float:
        """The cost of an update's evaluations, of which `gradient_nfe` have a gradient."""
        return self.passes * train_nfe + (self.gradient - 1) * self.gradient_passes * gradient_nfe

    def parts(self, counts: Mapping[str, Any]) -> Parts:
        """The cost of work with these `COUNTS`:

        sampling + probes + update without gradients + `gradient` x update with gradients
        + decodes x `decode` + reward calls x `reward`.

        Records of older versions lack some counts. Their probes are part of sampling, every
        evaluation of their update has a gradient, and every scored image was decoded.
        """
        nfe, train, calls = (counts.get(n, 0) for n in ("nfe", "train_nfe", "reward_calls"))
        probes = counts.get("probe_nfe", 0)
        return Parts(
            sampling=self.passes * (nfe - probes),
            probes=self.passes * probes,
            update=self.update(train, counts.get("gradient_nfe", train)),
            decodes=self.decode * counts.get("decodes", calls),
            rewards=self.reward * calls,
        )


SHAPES = {"forward": 8_396_800, "decode": 3_178_496, "reward": 1_333_248}
"""FLOPs of the shapes world for one image: its `SD3Transformer2DModel` with a merged LoRA, the cell
decoder, and the verifier. Counted by ``python benchmarks/flops.py``, as all FLOPs here: of matrix
products, convolutions and attention, where a multiplication and an addition count as two.
"""
WORLDS = {
    "mixture": Prices("2-D world: points need no decoder, and their reward is a formula"),
    "shapes": Prices(
        "shapes world: counted FLOPs of the cell decoder and the verifier",
        SHAPES["decode"] / SHAPES["forward"],
        SHAPES["reward"] / SHAPES["forward"],
    ),
}
"""Prices of the built-in worlds, without guidance."""
REWARD_FLOPS = {
    "pickscore": 381_681_664_000,
    "hpsv2.1": 381_681_664_000,
    "hpsv3": 12_183_551_344_640,
    "image-reward": 137_779_544_064,
    "clipscore": 14_777_163_776,
    "aesthetic": 162_025_537_536,
    "geneval": 666_598_207_488,
}
"""FLOPs of a score with its prompt, by the rewards with a network
(``python benchmarks/flops.py --rewards``). That of hpsv3 is for 800 tokens, that of geneval for one
object with a colour; without a colour it is 105,582,170,112.
"""
SD35_MEDIUM = {
    "forward": 2_442_642_604_032,
    "gradient": 5_259_447_582_720,
    "decode": 2_514_971_787_264,
}
"""FLOPs of SD3.5-Medium for a latent of 512 x 512 pixels: forward pass, forward with backward pass
of a LoRA of rank 32 without gradient checkpointing, and its VAE's decoder.
"""
RATE = 200e12
"""Assumed sustained FLOP/s of one NVIDIA H100 in bfloat16, a fifth of its peak without sparsity."""


STATED = Prices(
    "SD3.5-Medium at 512 x 512 pixels: counted FLOPs",
    SD35_MEDIUM["decode"] / SD35_MEDIUM["forward"],
    REWARD_FLOPS["pickscore"] / SD35_MEDIUM["forward"],
    gradient=SD35_MEDIUM["gradient"] / SD35_MEDIUM["forward"],
    passes=2,
    gradient_passes=2,
    seconds=SD35_MEDIUM["forward"] / RATE,
)
"""The stated model of budgets in seconds: with classifier-free guidance in sampling and update,
images scored by PickScore (CLIP-H), and seconds at `RATE`.
"""
STATED_NAME = "SD3.5-Medium"


def prices_of(config: Mapping[str, Any], measured: Prices | None = None) -> Prices:
    """The prices of a run.

    Args:
        config: its settings, as in config.json.
        measured: prices of a decode and of a score outside the built-in worlds; default: 0.

    Returns:
        The prices.
    """
    world = config.get("environment", {}).get("world", "mixture")
    base = WORLDS.get(world, measured or Prices("decodes and reward calls are not counted"))
    own = Prices.of_policy(config.get("policy", {}))
    return replace(
        base, gradient=own.gradient, passes=own.passes, gradient_passes=own.gradient_passes
    )


def measured_prices(rows: Iterable[Mapping[str, Any]], passes: float = 1.0) -> Prices | None:
    """The price of decoding and scoring an image, from the seconds of the phases of `rows` of
    metrics.jsonl; None if they lack seconds or counts.
    """
    rows = [row for row in rows if row["iteration"] > 0]
    phases = [row.get("phases", {}) for row in rows]
    sampling = sum(part.get("rollout", 0.0) for part in phases)
    scoring = sum(map(scoring_seconds, phases))
    nfe, calls = (sum(row.get(name, 0) for row in rows) for name in ("nfe", "reward_calls"))
    if min(nfe, calls, sampling, scoring) <= 0:
        return None
    both = (scoring / calls) / (sampling / (nfe * passes))
    return Prices("decoding and scoring together, by seconds measured in these runs", reward=both)


def cumulated(counts: Iterable[Mapping[str, Any]], prices: Prices) -> list[Parts]:
    """The cost so far at every row of `counts`."""
    sums, costs = dict.fromkeys((field.name for field in fields(Parts)), 0.0), list[Parts]()
    for row in counts:
        for name, value in vars(prices.parts(row)).items():
            sums[name] += value
        costs.append(Parts(**sums))
    return costs
