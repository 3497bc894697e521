"""Translates the released codes' clips and KL weights into flowrl's exact definitions, per sampler
and grid.

    python benchmarks/translation.py             # seconds; prints the tables of docs/presets.md

Model: an update changes the velocity by independent numbers of root mean square u per latent
element, equal at every step. Step i then moves the transition's mean by a_i u, with the slope a_i =
|d mean / d v|. With the step's std k_i and d latent elements, the exact log-ratio of a sampled node
is normal with mean -q and variance 2 q / d; q = (a_i u / k_i)^2 / 2 is the KL per element. Released
forms: CPS's log-probability is the exact one times 2 k_i^2; Flow-SDE's KL is the exact one times
Delta_i.

Rules. KL weight: the penalty, a mean over the trained steps, stays equal. Clip: at the u at which
the released form clips 20% of the pairs of the steps that both train, the exact form clips 20% too.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor

from flowrl.core.protocols import Sampler
from flowrl.core.types import Schedule
from flowrl.policies import resolution_shift
from flowrl.samplers import CPS, FlowSDE

ELEMENTS = 16 * 64 * 64
"""Elements of a latent of SD3.5, FLUX.1, Z-Image and Qwen-Image at 512 pixels."""
KLEIN_ELEMENTS = 128 * 32 * 32
"""Elements of a latent of FLUX.2 [klein] at 512 pixels."""
WAN_ELEMENTS = 16 * 9 * 30 * 52
"""Elements of a latent of Wan 2.1, of 33 frames of 240 x 416."""
WAN22_ELEMENTS = 16 * 2 * 60 * 104
"""Elements of a latent of Wan 2.2, of 5 frames of 480 x 832."""
SANA_ELEMENTS = 32 * 16 * 16
"""Elements of a latent of SANA at 512 pixels."""
CLIPPED = 0.2
"""Fraction of the pairs at which the clips are compared."""


def sd3_grid(steps: int = 10) -> Schedule:
    """The grid of SD3.5's scheduler (shift 3), which is also Wan's at 480p and below, and SANA's."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    return Schedule(torch.as_tensor(scheduler.sigmas, dtype=torch.float32))


def shifted_grid(steps: int, mu: float | None = None, **settings: Any) -> Schedule:
    """The grid of a scheduler with these settings, shifted by `mu`, or by the mu of 1,024 image
    tokens (512 pixels).
    """
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **settings)
    shift = resolution_shift(scheduler, 1024, 1.15) if mu is None else mu
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)  # pyright: ignore[reportArgumentType]
    return Schedule(torch.as_tensor(scheduler.sigmas, dtype=torch.float32))


def flux_grid() -> Schedule:
    """The grid of FLUX.1-dev's scheduler, shifted by the number of image tokens."""
    return shifted_grid(6, shift=3.0)


def klein_grid() -> Schedule:
    """The grid of FLUX.2 [klein]'s pipeline for 1,024 image tokens and 10 steps."""
    return shifted_grid(10, compute_empirical_mu(1024, 10))


def z_image_grid() -> Schedule:
    """The grid of Z-Image's pipeline, shifted by the number of image tokens as FLUX.1-dev's."""
    return shifted_grid(10)


def qwen_grid() -> Schedule:
    """The grid of Qwen-Image's scheduler, shifted by the number of image tokens and stretched to
    .02 before the last step.
    """
    return shifted_grid(10, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02)


@dataclass(frozen=True)
class Steps:
    """The model's numbers of each step: a = |d mean / d v|, std k, length Delta."""

    slope: Tensor
    std: Tensor
    delta: Tensor

    @property
    def kl(self) -> Tensor:
        """The exact KL per element at u = 1."""
        return (self.slope / self.std) ** 2 / 2

    def squares(self, trained: Sequence[int], released: bool = False) -> Tensor:
        """Squared gradient norms of the `trained` steps' policy terms (at equal advantages, on
        policy), up to one factor; `released`: with CPS's released log-probability.
        """
        scale = 2 * self.std**2 if released else torch.ones_like(self.std)
        return (self.kl * scale**2)[list(trained)]

    def shares(self, trained: Sequence[int], released: bool = False) -> Tensor:
        """Each step's share of the sum of `squares`."""
        return self.squares(trained, released) / self.squares(trained, released).sum()


def steps_of(sampler: Sampler, schedule: Schedule) -> Steps:
    """Slopes, stds and lengths of `sampler` on `schedule`, from its own transitions."""
    index, zero, unit = (
        torch.arange(schedule.steps),
        torch.zeros(schedule.steps, 1),
        torch.ones(schedule.steps, 1),
    )
    moved, still = (
        sampler.transition(zero, velocity, schedule, index) for velocity in (unit, zero)
    )
    slope = (moved.mean - still.mean).abs().flatten()
    return Steps(slope.double(), still.std.double(), schedule.deltas.double())


def clipped(
    steps: Steps,
    trained: Sequence[int],
    change: float,
    clip: float,
    released: bool,
    elements: int = ELEMENTS,
) -> list[float]:
    """The fraction of pairs whose log-ratio leaves +-`clip` at each trained step, for a velocity
    change u = `change`.
    """
    fractions = []
    for step in trained:
        scale = 2 * float(steps.std[step]) ** 2 if released else 1.0
        divergence = float(steps.kl[step]) * change**2
        log_ratio = NormalDist(-scale * divergence, scale * math.sqrt(2 * divergence / elements))
        fractions.append(log_ratio.cdf(-clip) + 1 - log_ratio.cdf(clip))
    return fractions


def bisect(rising: Callable[[float], float], target: float) -> float:
    """Where the rising function has the value `target`."""
    low, high = 1e-12, 1e3
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rising(middle) > target else (middle, high)
    return math.sqrt(low * high)


def exact_clip(
    steps: Steps,
    published: float,
    trained: Sequence[int],
    fraction: float = CLIPPED,
    elements: int = ELEMENTS,
) -> float:
    """The clip of the exact log-ratio that cuts as many pairs of `trained` as `published` cuts of
    the released CPS form.
    """
    change = bisect(lambda u: mean(clipped(steps, trained, u, published, True, elements)), fraction)
    return bisect(lambda c: -mean(clipped(steps, trained, change, c, False, elements)), -fraction)


def exact_kl_weight(
    steps: Steps, published: float, before: Sequence[int], after: Sequence[int], released: bool
) -> float:
    """The weight with which the exact KL, a mean over the steps `after`, is as large as the
    released one over `before`.
    """
    known = steps.kl * steps.delta if released else steps.kl
    return published * float(known[list(before)].mean() / steps.kl[list(after)].mean())


def policy_scale(steps: Steps, before: Sequence[int], after: Sequence[int]) -> float:
    """The gradient norm of the policy term, a mean over the steps `after`, over the released CPS
    form's over `before`.
    """
    exact, released = (
        steps.squares(after).sum().sqrt(),
        steps.squares(before, released=True).sum().sqrt(),
    )
    return float(exact / released) * len(before) / len(after)


def report(name: str, steps: Steps, trained: Sequence[int], released: bool) -> None:
    """One line per trained step; with `released`, the shares and the clip of the released CPS form
    too.
    """
    print(f"\n{name}: shares of the squared gradient norm of the policy term")
    print(
        "  step     std   slope   1/Delta  exact share"
        + "  released share  exact clip of 1e-5" * released
    )
    shares, theirs = steps.shares(trained), steps.shares(trained, released=True)
    for row, step in enumerate(trained):
        std, slope, delta = (
            float(values[step]) for values in (steps.std, steps.slope, steps.delta)
        )
        more = f"{theirs[row]:16.4f}{1e-5 / (2 * std**2):20.1e}" if released else ""
        print(f"  {step:4d} {std:7.4f} {slope:7.4f} {1 / delta:9.2f}{shares[row]:13.4f}{more}")


def main() -> int:
    """Print the tables and the translated numbers."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    flow, nine, four = steps_of(FlowSDE(0.7), sd3_grid()), range(9), range(4)
    grids = sd3_grid(), flux_grid(), klein_grid(), z_image_grid(), qwen_grid(), sd3_grid(20)
    cps, flux, klein, z_image, qwen, wan = (steps_of(CPS(0.7), grid) for grid in grids)
    # steps that the released code trains, and those that flowrl trains
    models = {
        "SD3.5": (cps, nine, range(8), ELEMENTS),
        "FLUX.1-dev": (flux, range(5), range(5), ELEMENTS),
        "FLUX.2 [klein]": (klein, nine, nine, KLEIN_ELEMENTS),
        "Z-Image": (z_image, nine, nine, ELEMENTS),
        "Qwen-Image": (qwen, nine, range(8), ELEMENTS),
        "Wan 2.1": (wan, range(19), range(18), WAN_ELEMENTS),
        "Wan 2.2": (cps, nine, range(8), WAN22_ELEMENTS),
        "SANA": (cps, nine, range(8), SANA_ELEMENTS),
    }
    flow_qwen = steps_of(FlowSDE(1.2), qwen_grid())
    report("SD3.5, 10 steps, Flow-SDE 0.7", flow, range(10), released=False)
    report("SD3.5, 10 steps, CPS 0.7", cps, nine, released=True)
    report("SD3.5, 10 steps, CPS 0.7, without step 8", cps, range(8), released=True)
    report("FLUX.1-dev, 6 steps, CPS 0.7", flux, range(5), released=True)
    report("FLUX.2 [klein], 10 steps, CPS 0.7", klein, nine, released=True)
    report("Z-Image, 10 steps, CPS 0.7", z_image, nine, released=True)
    report("Qwen-Image, 10 steps, Flow-SDE 1.2", flow_qwen, range(10), released=False)
    report("Qwen-Image, 10 steps, CPS 0.7", qwen, nine, released=True)
    report("Wan 2.1, 20 steps, CPS 0.7", wan, range(19), released=True)
    print("\nKL weights for the exact KL")
    for published, trained, where in (
        (0.04, nine, ""),
        (0.01, nine, ""),
        (0.01, four, " over steps 0-3"),
    ):
        weight = exact_kl_weight(flow, published, trained, trained, True)
        print(f"  SD3.5, Flow-SDE, {published:g} without Delta{where}: {weight:.2g}")
    for name, (steps, before, after, _) in models.items():
        if before != after:
            change = f"over steps 0-{before[-1]}, now over 0-{after[-1]}"
            weight = exact_kl_weight(steps, 1e-4, before, after, False)
            print(f"  {name}, CPS, 1e-4 {change}: {weight:.2g}")
    print("\nclips for the exact log-probability, 1e-5 as released (CPS)")
    for name, (steps, _, after, elements) in models.items():
        clips = ", ".join(
            f"{exact_clip(steps, 1e-5, after, fraction, elements):.2g} at {fraction:.0%}"
            for fraction in (0.05, 0.1, CLIPPED, 0.5)
        )
        print(f"  {name}, steps 0-{after[-1]}: {clips} of the pairs clipped")
    print("\ngradient norm of the policy term, exact over released (CPS)")
    scales = {name: policy_scale(*given[:3]) for name, given in models.items()}
    print("  " + ", ".join(f"{name} {scale:.1f}" for name, scale in scales.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
