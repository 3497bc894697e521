"""SA-Solver: the released code's samples, diffusers' coefficients, the law of a Gaussian, and where
its noise comes from.
"""

import pytest
import torch
from diffusers.schedulers.scheduling_sasolver import SASolverScheduler
from recorded_forward import Recorded

from flowrl.core.errors import ConfigError
from flowrl.core.types import Schedule
from flowrl.flow import shifted_schedule, uniform_schedule
from flowrl.rollout import Groups, Usage, rollout, solve
from flowrl.samplers import Multistep
from flowrl.samplers.multistep import SASolver, sa_schedule
from flowrl.worlds.base import PolicyOptions, world

PROMPTS = [world("mixture").parse(f"towards {angle} degrees") for angle in (0, 90, 180)]


def test_it_samples_what_the_released_code_samples(tmp_path):
    """AWM's trajectories without noise, of which the recording has the times and the finished
    latents.
    """
    found = Recorded("awm", tmp_path)
    recording, policy = found.recording, found.policy
    recorded, expected = recording.tensors("sampling"), recording.tensors("inputs")["x0"]
    schedule, noise = policy.schedule(14), recording.inputs["init_noise"]
    torch.testing.assert_close(schedule.network_timesteps, recorded["timesteps"], atol=0, rtol=0)
    torch.testing.assert_close(sa_schedule(schedule).times, recorded["sigmas"], atol=0, rtol=0)
    condition, generator = found.condition, torch.Generator()
    path = rollout(
        policy, Multistep("sa"), schedule, condition, noise, generator, Groups(2, 4)
    ).trajectories
    torch.testing.assert_close(path.images_latent, expected, atol=1e-5, rtol=0)
    evaluated = solve("sa", policy, schedule, condition.take(torch.arange(8) // 4), noise, Usage())
    torch.testing.assert_close(evaluated, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tau", [0.0, 0.4])
def test_a_step_has_the_coefficients_of_diffusers(tau):
    """Predictor and corrector of one step, from given clean estimates and noise."""
    times = torch.tensor([0.8, 0.7, 0.55, 0.4, 0.0], dtype=torch.float64)
    x, noise, *clean = torch.randn(
        6, 5, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    scheduler = SASolverScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    scheduler.sigmas, level = times, torch.tensor(tau, dtype=torch.float64)
    solver, state, start = SASolver(times, tau, lambda x: noise), x, x
    for number in range(3):
        moved = solver.step(number, (state - clean[number]) / times[number], state)
        scheduler._step_index, scheduler.model_outputs, start_before = number, clean[:number], start
        start = state
        if number >= 2:
            start = scheduler.stochastic_adams_moulton_update(
                clean[number],
                last_sample=start_before,
                last_noise=noise,
                this_sample=state,
                order=2,
                tau=level,
            )
        scheduler.model_outputs = clean[: number + 1]
        order = min(number + 1, 2)
        expected = scheduler.stochastic_adams_bashforth_update(
            clean[number], sample=start, noise=noise, order=order, tau=level
        )
        torch.testing.assert_close(moved, expected, atol=1e-6, rtol=0)
        state = moved
    torch.testing.assert_close(solver.step(3, (state - clean[3]) / times[3], state), clean[3])


def gaussian_end(tau: float, steps: int, count: int) -> torch.Tensor:
    """Samples of N(0.5, 0.3^2) by its exact velocity."""
    generator, schedule = torch.Generator().manual_seed(0), sa_schedule(uniform_schedule(steps))
    x = torch.randn(count, generator=generator)
    solver = SASolver(schedule.times, tau, lambda x: torch.randn(x.shape, generator=generator))
    for number, t in enumerate(schedule.times[:-1].tolist()):
        variance = (1 - t) ** 2 * 0.09 + t**2
        clean = 0.5 + (1 - t) * 0.09 / variance * (x - (1 - t) * 0.5)
        x = solver.step(number, (x - clean) / t, x)
    return x


@pytest.mark.parametrize("tau", [0.4, 1.5])
def test_the_noise_keeps_the_law_of_the_data(tau):
    """100,000 samples: standard errors of mean and std are 0.0010 and 0.0007; false alarms in 1 of
    10,000 at 4 of them.
    """
    end = gaussian_end(tau, 100, 100_000)
    assert abs(float(end.mean()) - 0.5) < 0.004 and abs(float(end.std()) - 0.3) < 0.003


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def sampled(first=0, count=3, tau=0.4, seed=1, max_batch=1024):
    policy, groups, generator = world("mixture").policy(PolicyOptions()), Groups(3, 4), seeded(seed)
    part, condition = groups.part(first, count), policy.encode(PROMPTS[first : first + count])
    noise = part.noise(policy.latent_shape, seeded(0))
    given = policy, Multistep("sa", tau=tau), policy.schedule(8), condition, noise, generator, part
    return rollout(*given, max_batch=max_batch).trajectories.states, generator.get_state()


def test_the_noise_is_the_rollouts_own():
    """A function of the generator's state and the sample's number: not of chunks, batches or the
    global generator.
    """
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    complete, state = sampled()
    assert torch.equal(torch.random.get_rng_state(), before)
    for first, count in ((0, 1), (1, 2), (2, 1)):
        part, left = sampled(first, count)
        torch.testing.assert_close(part, complete[first : first + count], atol=1e-6, rtol=0)
        assert torch.equal(left, state)
    torch.testing.assert_close(sampled(max_batch=5)[0], complete, atol=1e-6, rtol=0)
    assert not torch.allclose(sampled(seed=2)[0], complete, atol=1e-2)
    silent, untouched = sampled(tau=0.0)
    assert torch.equal(untouched, torch.Generator().manual_seed(1).get_state())
    assert not torch.allclose(silent, complete, atol=1e-2)


def test_the_grid_is_that_of_the_released_code():
    changed = sa_schedule(shifted_schedule(6, 3.0))
    assert (
        float(changed.times[0]) == pytest.approx(0.999)
        and changed.times[-2] == changed.times[-3] / 2
    )
    torch.testing.assert_close(changed.times[1:-2], shifted_schedule(6, 3.0).times[1:-2])
    torch.testing.assert_close(changed.network_timesteps, 1000 * changed.times[:-1])
    told = torch.tensor([990.0, 880.0, 740.0, 490.0])
    given = Schedule(shifted_schedule(4, 3.0).times, told)
    assert sa_schedule(given).network_timesteps.tolist()[1:3] == told.tolist()[1:3]
    assert sa_schedule(uniform_schedule(1)).times.tolist() == pytest.approx([0.999, 0.0])
    assert bool((sa_schedule(uniform_schedule(5000)).times.diff() < 0).all())


@pytest.mark.parametrize("options", [("dpm++", 0.4), ("sa", -1.0)])
def test_only_sa_has_noise(options):
    with pytest.raises(ConfigError, match=r"Multistep\.tau = .* is not allowed"):
        Multistep(*options)
