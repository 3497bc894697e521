"""What a ratio is made of: clips in other dimensions, each step's share of the gradient, and
rounding before any update.

    python benchmarks/ratio.py              # about ten minutes on one core: everything
    python benchmarks/ratio.py --report     # table and figures again, from results/ratio.json

Shares are those of the squared norm of dL/dv on policy with equal advantages: (b / std)^2 per step
for the Gaussian log-density, (b std)^2 for the released form of CPS and (b / Delta)^2 for
GRPO-Guard, where b is the factor of v in the transition's mean. They are computed from the
library's samplers and grids.

Rounding is measured on a network with random weights, the depth of SD3.5-Medium (24 blocks, the
first 13 with a second attention, normalised queries and keys), its latents at 512 pixels (d =
65,536) and 4 heads of 16; its output is scaled to a root mean square of 1. The same pairs are
evaluated twice, the second time with other kernels: linear layers sum in 4 parts, and attention
rounds once. So do the kernels of a GPU differ between batch sizes, and between sampling and
training.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from flowrl_compare.style import save
from flowrl_testing.tiny import TINY, tiny_flux, tiny_sd3
from ratio_report import PRECISIONS, report, rounding_figure, shares_figure
from torch import Tensor
from torch.nn import functional
from translation import steps_of

from flowrl.core.protocols import Sampler
from flowrl.core.types import Prompt, Schedule
from flowrl.flow.gaussian import log_prob, log_prob_without_constants, sample
from flowrl.io import write_json
from flowrl.policies import DTYPES, SD3, Flux, PipelinePolicy
from flowrl.samplers import CPS, DDIMSDE, DanceSDE, FixedWindow, FlowSDE, Windowed, windowed
from flowrl.worlds.base import PolicyOptions, world

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "ratio.json"
FIGURES = HERE.parent / "docs" / "reading-the-ratio"
DIMENSIONS = {
    "SD3.5 and FLUX at 1024 px": 262144,
    "SD3.5 and FLUX at 512 px": 65536,
    "shapes world": 128,
    "2-D world": 2,
}
CLIPS = (1e-5, 1e-4)
ALL, ALL_BUT_LAST = FixedWindow(), FixedWindow(stop=-1)
SAMPLERS: dict[str, tuple[Sampler, FixedWindow, tuple[str, ...]]] = {
    "Flow-SDE 0.7, all steps": (FlowSDE(0.7), ALL, ("exact", "guard")),
    "Flow-SDE 0.7, all but last": (FlowSDE(0.7), ALL_BUT_LAST, ("exact", "guard")),
    "Dance-SDE 0.3, all but last": (DanceSDE(0.3), ALL_BUT_LAST, ("exact", "guard")),
    "CPS 0.7": (CPS(0.7), ALL, ("exact", "released", "guard")),
    "CPS 0.8": (CPS(0.8), ALL, ("exact", "released", "guard")),
    "DDIM-SDE 0.7": (DDIMSDE(0.7), ALL, ("exact", "guard")),
}
"""Kernels, their windows, and the forms of the log-probability that they are trained with: the
exact one first.
"""


# --- clips
# --------------------------------------------------------------------------------------------------


def clips() -> list[dict[str, Any]]:
    """c sqrt(d) is kept: the clip at other sizes, the KL per element K = c^2 d / 2 at which a
    ratio's spread is the clip, and the density ratio e^(c d) of the whole latent at the clip.
    """
    made = []
    for published in CLIPS:
        for name, d in DIMENSIONS.items():
            c = published * (65536 / d) ** 0.5
            made.append(
                {
                    "published": published,
                    "latent": name,
                    "d": d,
                    "clip": c,
                    "kl": c * c * d / 2,
                    "log_density": c * d,
                }
            )
    return made


# --- shares
# --------------------------------------------------------------------------------------------------


def grids() -> dict[str, Schedule]:
    """The schedules of the models and of the built-in worlds, from their own schedulers."""
    sd3 = PipelinePolicy(tiny_sd3(), SD3(), replace(TINY, tuning="nothing"))
    # 1,024 tokens, as 512 px
    flux = PipelinePolicy(
        tiny_flux(), Flux(), replace(TINY, tuning="nothing", height=128, width=128)
    )
    pipe = flux.pipe
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    flux.family.set_timesteps(scheduler, 6, (1024, pipe.transformer.config.in_channels), pipe)
    return {
        "SD3, 10 steps": sd3.schedule(10),
        "FLUX at 512 px, 6 steps": Schedule(scheduler.sigmas.float()),
        "shapes world, 10 steps": world("shapes").policy(PolicyOptions()).schedule(10),
        "2-D world, 10 steps": world("mixture").policy(PolicyOptions()).schedule(10),
    }


def shares(sampler: Sampler, schedule: Schedule, form: str) -> list[float]:
    """Each step's share of the squared norm of dL/dv, on policy and with equal advantages."""
    steps = steps_of(sampler, schedule)
    weight = {"exact": 1 / steps.std, "released": steps.std, "guard": 1 / steps.delta}[form]
    squares = torch.where(
        steps.std > 0, (steps.slope * weight).square(), torch.zeros_like(steps.std)
    )
    return (squares / squares.sum()).tolist()


def all_shares() -> dict[str, Any]:
    """By grid: its times, and by sampler the stds and the shares of every form."""

    def of(sampler: Sampler, schedule: Schedule, forms: tuple[str, ...]) -> dict[str, list[float]]:
        return {"std": steps_of(sampler, schedule).std.tolist()} | {
            form: shares(sampler, schedule, form) for form in forms
        }

    return {
        grid: {
            "times": schedule.times.tolist(),
            "samplers": {
                name: of(
                    windowed(kernel, window, schedule.steps, torch.Generator()), schedule, forms
                )
                for name, (kernel, window, forms) in SAMPLERS.items()
            },
        }
        for grid, schedule in grids().items()
    }


# --- rounding
# --------------------------------------------------------------------------------------------------


def deep_policy(dtype: str) -> PipelinePolicy:
    """The network of the module's docstring, in a tiny pipeline."""
    pipe = tiny_sd3()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe.transformer = SD3Transformer2DModel(
            sample_size=64,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=24,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=64,
            pooled_projection_dim=64,
            pos_embed_max_size=64,
            qk_norm="rms_norm",
            dual_attention_layers=tuple(range(13)),
        )
    with torch.no_grad():
        for parameter in (pipe.transformer.proj_out.weight, pipe.transformer.proj_out.bias):
            parameter.div_(0.63)  # the root mean square of its output
    return PipelinePolicy(
        pipe,
        SD3(),
        replace(TINY, height=128, width=128, dtype=dtype, guidance_scale=4.5, tuning="nothing"),
    )


@contextmanager
def other_kernels(dtype: torch.dtype) -> Iterator[None]:
    """Linear layers sum in 4 parts in float32 and round once; so does attention."""
    linear, attention = functional.linear, functional.scaled_dot_product_attention

    def parted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, weight = x.to(dtype).float(), weight.to(dtype).float()
        with torch.autocast("cpu", enabled=False):
            parts = [linear(a, b) for a, b in zip(x.chunk(4, -1), weight.chunk(4, -1), strict=True)]
            return (sum(parts[1:], parts[0]) + (0 if bias is None else bias.to(dtype).float())).to(
                dtype
            )

    def rounded_once(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            query, key, value = (tensor.to(dtype).float() for tensor in (query, key, value))
            return attention(query, key, value, **options).to(dtype)

    functional.linear, functional.scaled_dot_product_attention = (
        parted,
        rounded_once,
    )  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        functional.linear, functional.scaled_dot_product_attention = (
            linear,
            attention,
        )  # pyright: ignore[reportAttributeAccessIssue]


RATIOS: dict[str, tuple[Sampler, Callable[..., Tensor], float]] = {
    "Flow-SDE 0.7, exact": (Windowed(FlowSDE(0.7), range(9)), log_prob, 1e-4),
    "CPS 0.7, exact": (CPS(0.7), log_prob, 1e-5),
    "CPS 0.7, released": (CPS(0.7), log_prob_without_constants, 1e-5),
}
"""Sampler, log-probability, and the published clip."""


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def rounding(dtype: str, guidance: float, samples: int) -> dict[str, Any]:
    """On-policy log-ratios [step][sample] of `RATIOS`, and their means that the velocity's
    difference e between the kernels (its root mean square) predicts: -(b e)^2 / (2 std^2), or -(b
    e)^2 for the released form.
    """
    policy = deep_policy(dtype)
    schedule, condition = policy.schedule(10), policy.encode([Prompt("a fox")])
    generator = torch.Generator().manual_seed(0)
    sizes: dict[str, Any] = {"velocity": [], "difference": [], **{name: [] for name in RATIOS}}
    with torch.no_grad(), policy.guided(guidance):
        for i in range(schedule.steps - 1):
            t, step, pairs = schedule.times[i], torch.tensor([i]), []
            for _ in range(samples):
                x0, noise = (
                    torch.randn(1, *policy.latent_shape, generator=generator) for _ in range(2)
                )
                x = (1 - t) * x0 + t * noise
                old = policy.velocity(x, schedule.network_timesteps[step], condition)
                with other_kernels(DTYPES[dtype]):
                    new = policy.velocity(x, schedule.network_timesteps[step], condition)
                pairs.append((x, old, new))
            sizes["velocity"].append(statistics.fmean(rms(old) for _, old, _ in pairs))
            sizes["difference"].append(statistics.fmean(rms(new - old) for _, old, new in pairs))
            for name, (sampler, density, _) in RATIOS.items():
                ratios = []
                for x, old, new in pairs:
                    behaviour, policy_now = (
                        sampler.transition(x, v, schedule, step) for v in (old, new)
                    )
                    taken = sample(behaviour, generator)
                    ratios.append(float(density(policy_now, taken) - density(behaviour, taken)))
                sizes[name].append(ratios)
    for name, (sampler, density, _) in RATIOS.items():
        steps = steps_of(sampler, schedule)
        factor = steps.std**-2 / 2 if density is log_prob else torch.ones_like(steps.std)
        moved = (steps.slope[:-1] * torch.tensor(sizes["difference"], dtype=torch.float64)).square()
        sizes[f"{name}, predicted"] = (-moved * factor[:-1]).tolist()
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples", type=int, default=2, help="pairs per step, precision and guidance"
    )
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.report:
        began = time.monotonic()
        rounded = {}
        for dtype in PRECISIONS:
            for guidance in (1.0, 4.5):
                rounded[f"{dtype}, guidance {guidance:g}"] = rounding(
                    dtype, guidance, options.samples
                )
                print(
                    f"{dtype}, guidance {guidance:g}: {time.monotonic() - began:.0f} s", flush=True
                )
        record = {
            "command": "python benchmarks/ratio.py",
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "hardware": f"one core of {platform.machine()}",
            "samples": options.samples,
            "clips": clips(),
            "shares": all_shares(),
            "published_clips": {name: clip for name, (_, _, clip) in RATIOS.items()},
            "rounding": rounded,
        }
        write_json(RESULTS, record)
    record = json.loads(RESULTS.read_text())
    RESULTS.with_suffix(".md").write_text(report(record))
    first = dict(list(record["shares"].items())[:1])
    save(shares_figure(first), FIGURES / "steps.png", 110)
    save(shares_figure(record["shares"]), FIGURES / "shares.png", 110)
    save(rounding_figure(record), FIGURES / "rounding.png", 110)
    print(report(record))


if __name__ == "__main__":
    main()
