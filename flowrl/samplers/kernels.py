"""Transition kernels: pure functions from (node, velocity) to a Gaussian over the next node.

There are two forms of a stochastic mean; the kernels of a form differ in sigma. Below, t is the
time of a transition's start, s that of its end, and Delta = t - s.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import ConfigError, part_call
from flowrl.core.options import NonNegative, Share, checked_options
from flowrl.core.protocols import AnySampler, MultistepSolver, Sampler
from flowrl.core.types import Gaussian, Latents, Schedule, StepIndex, tensor_problem
from flowrl.flow import expand, noise_estimate, tweedie


@checked
def step_times(schedule: Schedule, step: StepIndex, device: torch.device) -> tuple[Tensor, Tensor]:
    """t and s of every sample, float32."""
    times = schedule.times.to(device=device, dtype=torch.float32)
    step = step.to(device)
    return times[step], times[step + 1]


@dataclass(frozen=True)
class ODE:
    """Deterministic sampling.

    Mean x - Delta v, std 0: no step is a decision. Source: flow matching (arXiv 2210.02747),
    Euler's method.
    """

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """Node `step + 1`: mean [sample, *latent] and std 0 [sample], float32."""
        t, s = step_times(schedule, step, latent.device)
        mean = latent.float() - expand(t - s, latent) * velocity.float()
        return Gaussian(mean=mean, std=torch.zeros_like(t))


def euler_maruyama(
    latent: Tensor, velocity: Tensor, t: Tensor, s: Tensor, sigma: Tensor
) -> Gaussian:
    """One step of the reverse SDE, std = sigma sqrt(Delta).

    Mean x (1 - sigma^2 Delta / (2t)) - v (1 + sigma^2 (1-t) / (2t)) Delta, which equals x - Delta v
    + (sigma^2 / 2) Delta score with score = -(x + (1-t) v) / t. Source: Flow-GRPO (arXiv
    2505.05470, section on ODE-to-SDE).
    """
    delta, half_rate = t - s, sigma.square() / (2.0 * t)
    keep = expand(1.0 - half_rate * delta, latent)
    drift = expand((1.0 + half_rate * (1.0 - t)) * delta, latent)
    mean = keep * latent.float() - drift * velocity.float()
    return Gaussian(mean=mean, std=sigma * delta.sqrt())


def coefficient_preserving(
    latent: Tensor,
    velocity: Tensor,
    t: Tensor,
    s: Tensor,
    sigma: Tensor,
    kept: Tensor | None = None,
) -> Gaussian:
    """Mean (1-s) x0_hat + sqrt(s^2 - sigma^2) eps_hat and std = sigma, for 0 <= sigma <= s; `kept`
    is the root, where rounding would lose it.

    With the noise of the draw, the coefficient of the noise is s again, so the sample has the
    interpolant's marginal. Source: CPS (arXiv 2509.05952), after DDIM (arXiv 2010.02502, equation
    12).
    """
    latent, velocity = latent.float(), velocity.float()
    clean, noise = tweedie(latent, velocity, t), noise_estimate(latent, velocity, t)
    if kept is None:
        # Not below 0, as by rounding if a compiler fuses the product and the difference.
        kept = (s.square() - sigma.square()).clamp(min=0.0).sqrt()
    mean = expand(1.0 - s, latent) * clean + expand(kept, latent) * noise
    return Gaussian(mean=mean, std=sigma)


@checked_options
@dataclass(frozen=True)
class FlowSDE:
    """Flow-GRPO's SDE: much noise early, little late.

    Euler-Maruyama step with sigma = a sqrt(t / (1-t)), a = `noise_level` >= 0, and std = sigma
    sqrt(Delta).

    At t = 1, where sigma is infinite, the denominator uses the grid's next time t_1 in place of t,
    as in the public code. The last step has a finite std, too; Flow-GRPO replaces it by an ODE step
    (window `:-1`).

    At finite Delta the step adds variance to the true marginal, visible as grain; `CPS` does not.
    The step from pure noise adds a^4/4 + a^2 Delta to a marginal variance of about 1, so a finer
    grid does not remove this error at that step. Later steps remove it: from t < 1 the kernel has
    weak order 1. Source: Flow-GRPO (arXiv 2505.05470) and its public code. Raises `ConfigError` for
    a negative or infinite noise level.
    """

    noise_level: NonNegative = 0.7

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """Node `step + 1`: mean [sample, *latent] and std [sample], float32."""
        t, s = step_times(schedule, step, latent.device)
        below_one = torch.where(t > 1.0 - 1e-6, s, t)
        sigma = self.noise_level * (t / (1.0 - below_one)).sqrt()
        return euler_maruyama(latent, velocity, t, s, sigma)


@checked_options
@dataclass(frozen=True)
class DanceSDE:
    """DanceGRPO's SDE: the same noise at every step.

    Euler-Maruyama step with a constant sigma = eta = `noise_level` >= 0 and std = eta sqrt(Delta).

    Source: DanceGRPO (arXiv 2505.07818) and its public code. Raises `ConfigError` for a negative or
    infinite noise level.
    """

    noise_level: NonNegative = 0.3

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """Node `step + 1`: mean [sample, *latent] and std [sample], float32."""
        t, s = step_times(schedule, step, latent.device)
        sigma = torch.full_like(t, self.noise_level)
        return euler_maruyama(latent, velocity, t, s, sigma)


@checked_options
@dataclass(frozen=True)
class CPS:
    """Coefficients-preserving sampling: the noise level of every node is exact.

    Mean (1-s) x0_hat + sqrt(s^2 - sigma^2) eps_hat and std = sigma = s sin(eta pi/2), eta =
    `noise_level` in [0, 1].

    s is the next time. Noise level 0 is the ODE; 1 replaces all the noise at every step. The last
    step (s = 0) has std 0 and is not a decision. Source: Wang & Yu 2025 (arXiv 2509.05952). Raises
    `ConfigError` for a noise level outside [0, 1].
    """

    noise_level: Share = 0.7

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """Node `step + 1`: mean [sample, *latent] and std [sample], float32."""
        t, s = step_times(schedule, step, latent.device)
        sigma = s * math.sin(self.noise_level * math.pi / 2.0)
        return coefficient_preserving(latent, velocity, t, s, sigma)


@checked_options
@dataclass(frozen=True)
class DDIMSDE:
    """Stepwise-Flow-GRPO's DDIM-inspired SDE: the noise level of every node is exact.

    Mean (1-s) x0_hat + sqrt(s^2 - sigma^2) eps_hat and std = sigma = a s sqrt(1-t), a =
    `noise_level` >= 0.

    s is the next time. Both ends are deterministic: the step from t = 1 and the step to s = 0 have
    std 0 and are not decisions. sigma is capped at s, at which all noise is fresh (reached only for
    a > 1). Source: Stepwise-Flow-GRPO (arXiv 2603.28718). Raises `ConfigError` for a negative or
    infinite noise level.
    """

    noise_level: NonNegative = 0.7

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """Node `step + 1`: mean [sample, *latent] and std [sample], float32."""
        t, s = step_times(schedule, step, latent.device)
        sigma = torch.minimum(self.noise_level * s * (1.0 - t).clamp(min=0.0).sqrt(), s)
        return coefficient_preserving(latent, velocity, t, s, sigma)


@checked_options
@dataclass(frozen=True)
class ExponentialSDE:
    """Flow-GRPO's SDE, solved exactly within a step for a clean estimate that stays as it is.

    Mean (1-s) x0_hat + s rho eps_hat and std = s sqrt(1 - rho^2), rho = (s (1-t) / (t
    (1-s)))^(a^2/2), a = `noise_level` >= 0.

    With x0_hat fixed, (x - (1-t) x0_hat) / t follows an Ornstein-Uhlenbeck process, and rho is its
    correlation between t and s, the integral of Flow-SDE's sigma. a = 0 is the ODE, and a = sqrt(2)
    the ancestral (DDPM) posterior. A step that is split keeps its rho. The step from t = 1 replaces
    all noise (unless a = 0), so members that share their initial noise share only x0_hat; the last
    step has std 0 and is not a decision. The noise level of every node is exact as with `CPS`, but
    with more steps the samples approach the data distribution, which those of `CPS` do not.

    Sources: the exponential integrator of SDE-DPM-Solver++ (arXiv 2211.01095) of order 1, whose
    noise is a = sqrt(2). Precise (arXiv 2605.23522) freezes the estimate too, with a schedule of
    noise that we have not read; so this is not its sampler. Raises `ConfigError` for a negative or
    infinite noise level.
    """

    noise_level: NonNegative = 0.7

    @checked
    def transition(
        self, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
    ) -> Gaussian:
        """Node `step + 1`: mean [sample, *latent] and std [sample], float32."""
        t, s = step_times(schedule, step, latent.device)
        log_rho = torch.zeros_like(t)
        if self.noise_level > 0:
            # -inf at t = 1 and at s = 0
            steps = s.log() + torch.log1p(-t) - t.log() - torch.log1p(-s)
            log_rho = 0.5 * self.noise_level**2 * steps
        std, kept = s * (-torch.expm1(2.0 * log_rho)).sqrt(), s * log_rho.exp()
        return coefficient_preserving(latent, velocity, t, s, std, kept)


@checked
def checked_transition(
    sampler: Sampler, latent: Latents, velocity: Latents, schedule: Schedule, step: StepIndex
) -> Gaussian:
    """The sampler's transition. Raises `ConfigError` unless it is a Gaussian with values and leaves
    its inputs unchanged.
    """
    call = f"{type(sampler).__name__}.transition"
    with part_call(call):
        gaussian = sampler.transition(latent, velocity, schedule, step)
    if not isinstance(gaussian, Gaussian):
        raise ConfigError(f"{call} returned a {type(gaussian).__name__}, not a Gaussian(mean, std)")
    problem = tensor_problem(gaussian.mean) or tensor_problem(gaussian.std)
    if problem:
        raise ConfigError(f"{call} returned a tensor that {problem}")
    return gaussian


def transition_stds(sampler: AnySampler, schedule: Schedule) -> Float[Tensor, " step"]:
    """The transition's std at every step of `schedule`, shape [step], on the schedule's device; 0 =
    not a decision.

    Evaluates the sampler's `transition` on zeros, so that the formula exists only once; 0 for a
    `MultistepSolver`.

    Args:
        sampler: the sampler; its std must not depend on the latent.
        schedule: the time grid.

    Returns:
        Standard deviations [step], float32.
    """
    if isinstance(sampler, MultistepSolver):
        return torch.zeros_like(schedule.deltas)
    zeros = torch.zeros_like(schedule.deltas)[:, None]
    steps = torch.arange(schedule.steps, device=zeros.device)
    return checked_transition(sampler, zeros, zeros, schedule, steps).std
