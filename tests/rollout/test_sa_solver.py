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
from flowrl.worlds.base import world

PROMPTS = [world("mixture").parse(f"towards {angle} degrees") for angle in (0, 90, 180)]


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
        scheduler._step_index, scheduler.model_outputs = number, clean[:number]
        corrected = state
        if number == 2:
            given = dict(last_sample=start, last_noise=noise, this_sample=state)
            corrected = scheduler.stochastic_adams_moulton_update(
                clean[number], **given, order=2, tau=level
            )
        start, scheduler.model_outputs = corrected, clean[: number + 1]
        expected = scheduler.stochastic_adams_bashforth_update(
            clean[number], sample=start, noise=noise, order=min(number + 1, 2), tau=level
        )
        state = solver.step(number, (state - clean[number]) / times[number], state)
        torch.testing.assert_close(state, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(solver.step(3, (state - clean[3]) / times[3], state), clean[3])


def test_it_samples_what_the_released_code_samples(tmp_path):
    """AWM's trajectories without noise, of which the recording has the times and the finished
    latents.
    """
    released = Recorded("awm", tmp_path)
    recording, policy, condition = released.recording, released.policy, released.condition
    recorded, expected = recording.tensors("sampling"), recording.tensors("inputs")["x0"]
    schedule, noise = policy.schedule(14), recording.inputs["init_noise"]
    assert torch.equal(schedule.network_timesteps, recorded["timesteps"])
    assert torch.equal(sa_schedule(schedule).times, recorded["sigmas"])
    given = policy, Multistep("sa"), schedule, condition, noise, torch.Generator(), Groups(2, 4)
    sampled = rollout(*given).trajectories.images_latent
    each = condition.take(torch.arange(8) // 4)
    for latents in (sampled, solve(policy, schedule, each, noise, Usage(), solver="sa")):
        torch.testing.assert_close(latents, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tau", [0.4, 1.5])
def test_the_noise_keeps_the_law_of_the_data(tau):
    """N(0.5, 0.3^2) by its exact velocity. 50,000 samples: standard errors of mean and std are
    0.0013 and 0.0009; false alarms in 1 of 10,000 at 4 of them.
    """
    generator, schedule = torch.Generator().manual_seed(0), sa_schedule(uniform_schedule(100))
    x = torch.randn(50_000, generator=generator)
    solver = SASolver(schedule.times, tau, lambda x: torch.randn(x.shape, generator=generator))
    for number, t in enumerate(schedule.times[:-1].tolist()):
        variance = (1 - t) ** 2 * 0.09 + t**2
        clean = 0.5 + (1 - t) * 0.09 / variance * (x - (1 - t) * 0.5)
        x = solver.step(number, (x - clean) / t, x)
    assert abs(float(x.mean()) - 0.5) < 0.0054 and abs(float(x.std()) - 0.3) < 0.0038


def test_the_noise_is_the_rollouts_own(mixture_policy):
    """A function of the generator's state and the sample's number: not of chunks, batches or the
    global generator.
    """
    generator, before = torch.Generator(), torch.random.get_rng_state()
    noise = Groups(3, 4).noise(mixture_policy.latent_shape, torch.Generator().manual_seed(0))

    def sampled(first=0, count=3, tau=0.4, seed=1, max_batch=1024):
        part = Groups(3, 4).part(first, count)
        condition = mixture_policy.encode(PROMPTS[first : first + count])
        start, sampler = noise[4 * first : 4 * (first + count)], Multistep("sa", tau=tau)
        given = mixture_policy, sampler, mixture_policy.schedule(8), condition, start
        result = rollout(*given, generator.manual_seed(seed), part, max_batch=max_batch)
        return result.trajectories.states

    complete, close = sampled(), dict(atol=1e-6, rtol=0)
    state = generator.get_state()
    for first, count in ((0, 1), (1, 2)):
        part = sampled(first, count)
        torch.testing.assert_close(part, complete[first : first + count], **close)
        assert torch.equal(generator.get_state(), state)
    torch.testing.assert_close(sampled(max_batch=5), complete, **close)
    assert not torch.allclose(sampled(seed=2), complete, atol=1e-2)
    assert not torch.allclose(sampled(tau=0.0), complete, atol=1e-2)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_grid_is_that_of_the_released_code():
    grid = shifted_schedule(6, 3.0)
    changed = sa_schedule(grid)
    assert float(changed.times[0]) == pytest.approx(0.999)
    assert changed.times[-2] == changed.times[-3] / 2
    torch.testing.assert_close(changed.times[1:-2], grid.times[1:-2])
    torch.testing.assert_close(changed.network_timesteps, 1000 * changed.times[:-1])
    timesteps = torch.tensor([990.0, 880.0, 740.0, 490.0])
    changed = sa_schedule(Schedule(shifted_schedule(4, 3.0).times, timesteps))
    assert torch.equal(changed.network_timesteps[1:3], timesteps[1:3])
    assert sa_schedule(uniform_schedule(1)).times.tolist() == pytest.approx([0.999, 0.0])


@pytest.mark.parametrize("options", [("dpm++", 0.4), ("sa", -1.0)])
def test_only_sa_has_noise(options):
    with pytest.raises(ConfigError, match=r"Multistep\.tau = .* is not allowed"):
        Multistep(*options)
