"""How far samplers are from the data with few steps, when the velocity is exact.

    python benchmarks/few_steps.py        # ten seconds; results/few-steps.json and the figure

For Gaussian data the velocity is linear, so the variance of the samples has a closed recursion: a
point (the variance that is left), a narrow Gaussian (variance 0.01) and a wide one (1), as a share
of the data's variance. For the ring of eight Gaussians in the plane: 20,000 samples with one seed,
their mean squared distance from the nearest mode over that of the data. Even grids; Flow-SDE's last
step follows the ODE, as published.
"""

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from flowrl.core.protocols import Sampler
from flowrl.flow import GaussianMixture, sample, uniform_schedule
from flowrl.run.io import write_json
from flowrl.run.report.style import COLOURS, INK, SOFT, clean, save
from flowrl.samplers import CPS, ODE, ExponentialSDE, FlowSDE, Windowed

ROOT = Path(__file__).parents[1]
STEPS = (4, 6, 8, 10, 20, 40, 640)
SHOWN = STEPS[:-1]
COUNT = 20_000
SHADES = dict(
    zip(
        ("ODE", "Flow-SDE 0.7", "CPS 0.7", "exponential 0.7", "exponential 1.41"),
        (INK, *list(COLOURS.values())[:4]),
        strict=True,
    )
)


def kernels(steps: int) -> dict[str, Sampler]:
    """The samplers by name."""
    return {
        "ODE": ODE(),
        "Flow-SDE 0.7": Windowed(FlowSDE(0.7), range(steps - 1)),
        "CPS 0.7": CPS(0.7),
        "exponential 0.7": ExponentialSDE(0.7),
        "exponential 1.41": ExponentialSDE(2**0.5),
    }


def variance(kernel: Sampler, steps: int, data: float) -> float:
    """The variance of the samples of N(0, `data`)."""
    schedule, step = uniform_schedule(steps), torch.arange(steps)
    x, t = torch.ones(steps, 1), schedule.times[:-1, None]
    slope = (t - (1 - t) * data) / ((1 - t).square() * data + t.square())
    transition, now = kernel.transition(x, slope, schedule, step), 1.0
    for factor, noise in zip(transition.mean[:, 0].tolist(), transition.std.tolist(), strict=True):
        now = factor**2 * now + noise**2
    return now


def spread(points: torch.Tensor, ring: GaussianMixture) -> float:
    """The mean squared distance of points from the nearest mode, over that of the data."""
    nearest = torch.cdist(points, ring.means).amin(1).square().mean()
    return float(nearest) / (2 * ring.std**2)


def ring_spread(kernel: Sampler, steps: int, ring: GaussianMixture) -> float:
    """`spread` of samples."""
    generator, schedule = torch.Generator().manual_seed(0), uniform_schedule(steps)
    x = torch.randn(COUNT, 2, generator=generator)
    for index in range(steps):
        step = torch.full((COUNT,), index)
        velocity = ring.velocity(x, schedule.times[step])
        x = sample(kernel.transition(x, velocity, schedule, step), generator)
    return spread(x, ring)


def measured() -> dict[str, Any]:
    """The numbers by data, sampler and number of steps."""
    ring, found = GaussianMixture.ring(), dict[str, Any]()
    for steps in STEPS:
        for name, kernel in kernels(steps).items():
            ratios = {
                "point": variance(kernel, steps, 0.0),
                "narrow": variance(kernel, steps, 0.01) / 0.01,
                "wide": variance(kernel, steps, 1.0),
            }
            if steps in SHOWN:
                ratios["ring"] = ring_spread(kernel, steps, ring)
            for data, ratio in ratios.items():
                found.setdefault(data, {}).setdefault(name, {})[str(steps)] = round(ratio, 4)
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """The figure."""
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    titles = {
        "narrow": "narrow Gaussian, variance over the data's",
        "wide": "wide Gaussian, variance over the data's",
        "ring": "ring of eight, spread of a mode over the data's",
    }
    for axes, (data, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for name, values in found[data].items():
            axes.plot(
                SHOWN, [values[str(n)] for n in SHOWN], "o-", color=SHADES[name], ms=3.5, label=name
            )
        axes.axhline(1.0, color=SOFT, linewidth=1, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(SHOWN, [str(n) for n in SHOWN])
        axes.minorticks_off()
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("steps")
        clean(axes)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def main() -> None:
    """Measure, print and draw."""
    found = measured()
    write_json(ROOT / "benchmarks" / "results" / "few-steps.json", found)
    for data, rows in found.items():
        print(f"{data:18s}" + "".join(f"{steps:>8s}" for steps in rows["ODE"]))
        for name, values in rows.items():
            print(f"  {name:16s}" + "".join(f"{value:8.3f}" for value in values.values()))
    draw(found, ROOT / "docs" / "models" / "few-steps.png")


if __name__ == "__main__":
    main()
