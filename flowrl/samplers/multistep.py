"""Multistep solvers of the probability-flow ODE or SDE: diffusers' schedulers, and SA-Solver on the
grid of AWM's released code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import NonNegative, checked_options
from flowrl.core.types import Schedule

NEAREST_TO_NOISE = 1.0 - 1e-5
"""Largest time of diffusers' solvers, whose half log signal-to-noise ratio is infinite at t = 1.
The network still gets t = 1; the first step treats pure noise as a state at this time. diffusers'
own grids start at 0.999, which leaves an error that no number of steps removes.
"""
FIRST_TIME = 0.999
"""SA-Solver's time of the first node; at t = 1 the half log signal-to-noise ratio is infinite."""
NOISY_TIMES = (0.3, 0.9)
"""A step of SA-Solver is stochastic if its end is within these times."""


@checked_options
@dataclass(frozen=True)
class Multistep:
    """`MultistepSolver` by DPM-Solver++ of order 2, UniPC or SA-Solver.

    The first two are diffusers' schedulers. SA-Solver (`SASolver`) uses the grid `sa_schedule`.

    Sources: arXiv 2211.01095, 2302.04867 and 2309.05019. DiffusionNFT (arXiv 2509.16117) and DGPO
    (arXiv 2510.08425) sample by DPM-Solver++, AWM (arXiv 2509.25050) by SA-Solver.

    Args:
        solver: "dpm++" (DPM-Solver++), "unipc" (UniPC) or "sa" (SA-Solver).
        tau: noise of SA-Solver on steps that end at times in [0.3, 0.9] (AWM's noise_level); 0: the
            ODE, as for the other solvers.

    Raises:
        ConfigError: `tau` is negative or infinite, or above 0 with another solver.
    """

    solver: Literal["dpm++", "unipc", "sa"] = "dpm++"
    tau: NonNegative = 0.0

    def __post_init__(self) -> None:
        allowed = f"0 with solver {self.solver}: only sa has noise"
        require(self.solver == "sa" or self.tau == 0, "Multistep.tau", self.tau, allowed)

    def grid(self, schedule: Schedule) -> Schedule:
        """`sa_schedule` for "sa", otherwise `schedule`."""
        return sa_schedule(schedule) if self.solver == "sa" else schedule

    def solution(
        self, schedule: Schedule, draw: Callable[[Tensor], Tensor] = torch.randn_like
    ) -> Callable[[int, Tensor, Tensor], Tensor]:
        """The steps of one solution on the times of `schedule`, a grid from `grid`."""
        times = schedule.times.cpu()
        if self.solver == "sa":
            return SASolver(times, self.tau, draw).step
        from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
        from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

        kind = DPMSolverMultistepScheduler if self.solver == "dpm++" else UniPCMultistepScheduler
        scheduler = kind(
            use_flow_sigmas=True, prediction_type="flow_prediction", final_sigmas_type="zero"
        )
        scheduler.set_timesteps(schedule.steps)
        scheduler.sigmas = times.clamp(max=NEAREST_TO_NOISE)
        return scheduler_steps(scheduler, times[:-1])


def scheduler_steps(scheduler: Any, times: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
    """The steps of a diffusers scheduler with its own sigmas; `times` [evaluation] name them."""
    # Distinct timesteps and a start at the first; otherwise a scheduler looks steps up by their
    # value.
    scheduler.timesteps = times * 1000.0
    scheduler.set_begin_index(0)

    def step(number: int, velocity: Tensor, x: Tensor) -> Tensor:
        return scheduler.step(velocity, scheduler.timesteps[number], x, return_dict=False)[0]

    return step


def sa_schedule(schedule: Schedule) -> Schedule:
    """`schedule` with two other times: the first is 0.999, and the last before 0 is half of the one
    before it.

    The second change keeps the last steps short in log signal-to-noise ratio: a scheduler with a
    shift ends at about 0.009, and the extrapolation over the step to that time is unstable. The
    network receives the new times. Source: AWM's code (arXiv 2509.25050, commit be51372).
    """
    times, timesteps = schedule.times.clone(), schedule.network_timesteps.clone()
    if schedule.steps >= 2:
        times[-2] = times[-3] / 2
    times[0] = torch.maximum(times.new_tensor(FIRST_TIME), (1 + times[1]) / 2)
    changed = times[:-1] != schedule.times[:-1]
    return replace(
        schedule, times=times, timesteps=torch.where(changed, 1000.0 * times[:-1], timesteps)
    )


class SASolver:
    """One solution on `times` [point], descending to 0; `draw(x)` gives standard normal noise of
    the shape of x.

    With lambda = log((1-t) / t), h = lambda_t - lambda_s, k = 1 + tau^2 and clean estimates x0_s =
    x_s - s v_s, the state at t is

        (t/s) exp(-tau^2 h) x_s + (1-t) [(1 - exp(-k h)) x0_s + (k h^2 / 2) D] + t sqrt(1 - exp(-2
        tau^2 h)) eps.

    The predictor uses the slope D between the clean estimates at s and at the point before; D = 0
    at the first point. Once v_t is known at the predicted state, the corrector repeats the step
    with the slope between s and t and the same eps; the state at the second point is not corrected.
    The clean estimate at the last point before 0 is the result. tau is constant on times in [0.3,
    0.9] and 0 elsewhere; eps is drawn for steps with tau > 0 only. With tau = 0 this is a solver of
    the ODE.

    Source: SA-Solver (arXiv 2309.05019), data prediction with the rescaled coefficients of its
    Appendix D, as in AWM's code. diffusers' SASolverScheduler has the same coefficients, but takes
    tau at the beginning of a step, corrects the second point and draws its own noise.
    """

    def __init__(self, times: Tensor, tau: float, draw: Callable[[Tensor], Tensor]) -> None:
        self.times, self.tau, self.draw = times, tau, draw
        # once: a number of the device makes the host wait for it
        self._points: list[float] = times.tolist()

    def step(self, number: int, velocity: Tensor, x: Tensor) -> Tensor:
        """The predicted state at point `number` + 1, from the predicted state x at point `number`
        and the velocity there.
        """
        clean = x - self.times[number] * velocity
        if number == len(self._points) - 2:
            return clean
        slope = torch.zeros_like(x)
        if number >= 1:
            slope = (clean - self._clean) / self._length(number - 1)
        if number >= 2:  # the corrector repeats the step before, with the noise of that step
            x = self._moved(number - 1, self._clean, slope)
        self._start, self._clean = x, clean
        self._noise = self.draw(x) if self._tau(number) > 0 else None
        return self._moved(number, clean, slope)

    def _moved(self, number: int, clean: Tensor, slope: Tensor) -> Tensor:
        """The step from point `number`, whose corrected state is `_start`."""
        s, t = self._points[number], self._points[number + 1]
        h, noisy = self._length(number), self._tau(number) ** 2
        weight = -math.expm1(-(1 + noisy) * h)
        moved = t / s * math.exp(-noisy * h) * self._start + (1 - t) * (
            weight * clean + (1 + noisy) * h**2 / 2 * slope
        )
        if self._noise is None:
            return moved
        return moved + t * math.sqrt(-math.expm1(-2 * noisy * h)) * self._noise

    def _length(self, number: int) -> float:
        """h of the step from point `number`."""
        s, t = self._points[number], self._points[number + 1]
        return math.log(s / (1 - s)) - math.log(t / (1 - t))

    def _tau(self, number: int) -> float:
        low, high = NOISY_TIMES
        return self.tau if low <= self._points[number + 1] <= high else 0.0
