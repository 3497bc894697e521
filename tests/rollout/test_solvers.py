"""Samples of the ODE and of SA-Solver: the exact flow of a Gaussian, the released code, the law of
the noise, and batches of decoded images.
"""

import math
from dataclasses import replace

import pytest
import torch
from parity import DATA
from parity_recording import Recording, below
from parity_replay import base_config, peft_name, recorded_policy
from rollouts import DIRECTIONS
from safetensors.torch import load_file
from seeded import randn, seeded
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.types import Condition
from flowrl.flow import shifted_schedule, uniform_schedule
from flowrl.flow.mixture import GaussianMixture
from flowrl.rollout import (
    SOLVERS,
    Groups,
    ImageBatch,
    Usage,
    initial_noise,
    rollout,
    sample_images,
    solve,
)
from flowrl.run.build import make_world
from flowrl.run.worlds import world
from flowrl.samplers import Multistep
from flowrl.samplers.multistep import SASolver, sa_schedule

MEAN, STD, ROWS = torch.tensor([0.7, -1.2]), 0.7, 100
GAUSSIAN = GaussianMixture(MEAN[None], STD, torch.ones(1))
NOISE = randn(ROWS, 2)
CONDITION = Condition({"none": torch.zeros(ROWS, 1)})
TEXTS = ("three red circles", "two blue squares", "one green triangle")
PROMPTS = [world("shapes").parse(text) for text in TEXTS] * 2


class Exact:
    """The velocity of a flow as a policy, and the times at which it was evaluated."""

    device = torch.device("cpu")

    def __init__(self, network=GAUSSIAN.velocity):
        self.network, self.times = network, []

    def frozen(self):
        return torch.no_grad()

    def velocity(self, latent, timestep, condition):
        self.times.append(float(timestep[0]))
        return self.network(latent, timestep / 1000)


def end(solver, schedule, policy=None, usage=None, max_batch=1024):
    given = schedule, CONDITION, NOISE, usage or Usage(), max_batch
    return solve(policy or Exact(), *given, solver)


@pytest.mark.parametrize(
    ("solver", "order"),
    [("euler", 1.0), ("heun", 2.05), ("dpm++", 1.6), ("unipc", 2.1), ("sa", 1.5)],
)
def test_orders_of_convergence(solver, order):
    """Slopes of log error against log steps from 20 to 80 steps, as measured: DPM-Solver++ is not
    monotone in the number of steps, and SA-Solver takes pure noise as a state at 0.999.
    """
    # the flow moves the quantiles of the noise to those of the data
    errors = [
        float((end(solver, uniform_schedule(steps)) - MEAN - STD * NOISE).square().mean().sqrt())
        for steps in (20, 80)
    ]
    assert math.log(errors[0] / errors[1], 4) == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize(
    ("solver", "nodes"),
    [("heun", [0, 1, 1, 2, 2, 3, 3]), ("dpm++", [0, 1, 2, 3]), ("unipc", [0, 1, 2, 3])],
)
def test_the_network_is_told_the_schedules_own_timesteps(solver, nodes):
    """Pure noise is t = 1, whatever time the solver calculates with."""
    for timesteps in ([1000.0, 900.0, 750.0, 500.0], [990.0, 880.0, 740.0, 490.0]):
        policy = Exact()
        end(solver, replace(shifted_schedule(4), timesteps=torch.tensor(timesteps)), policy)
        assert policy.times == [timesteps[node] for node in nodes]


@pytest.mark.parametrize("solver", SOLVERS)
def test_evaluations_are_counted_and_chunks_do_not_matter(solver):
    usage, schedule = Usage(), shifted_schedule(6)
    complete = end(solver, schedule, usage=usage)
    calls = 11 if solver == "heun" else 6
    assert (usage.calls, usage.nfe) == (calls, ROWS * calls)
    assert_close(complete, end(solver, schedule, max_batch=33))


def test_it_samples_what_the_released_code_samples(tmp_path):
    """AWM's trajectories without noise, of which the recording has the times and the finished
    latents.
    """
    (recording,) = Recording.every(DATA.parent / "golden_forward", "awm")
    config = base_config(recording, tmp_path)
    policy, prompts = recorded_policy(recording, config, []), make_world(config).prompts
    common = load_file(recording.folder / "common" / "inputs.safetensors")
    for name, parameter in policy.trainable().items():
        parameter.data.copy_(below(common, "lora_current")[peft_name(name)])
    condition = policy.encode(prompts("prompts", "train"))
    recorded, expected = recording.tensors("sampling"), recording.tensors("inputs")["x0"]
    schedule, noise = policy.schedule(14), recording.inputs["init_noise"]
    assert torch.equal(schedule.network_timesteps, recorded["timesteps"])
    assert torch.equal(sa_schedule(schedule).times, recorded["sigmas"])
    given = policy, Multistep("sa"), schedule, condition, noise, torch.Generator(), Groups(2, 4)
    sampled = rollout(*given).trajectories.images_latent
    each = condition.take(torch.arange(8) // 4)
    for latents in (sampled, solve(policy, schedule, each, noise, Usage(), solver="sa")):
        assert_close(latents, expected, atol=1e-5, rtol=0)
    assert sa_schedule(uniform_schedule(1)).times.tolist() == pytest.approx([0.999, 0.0])


@pytest.mark.parametrize("tau", [0.4, 1.5])
def test_the_noise_keeps_the_law_of_the_data(tau):
    """N(0.5, 0.3^2) by its exact velocity. 50,000 samples: standard errors of mean and std are
    0.0013 and 0.0009; false alarms in 1 of 10,000 at 4 of them.
    """
    generator, schedule = seeded(), sa_schedule(uniform_schedule(100))
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
    before = torch.random.get_rng_state()
    noise = Groups(3, 4).noise(mixture_policy.latent_shape, seeded())

    def sampled(first=0, tau=0.4, max_batch=1024):
        part, generator = Groups(3, 4).part(first, 3 - first), seeded(1)
        condition, sampler = mixture_policy.encode(DIRECTIONS[first:]), Multistep("sa", tau=tau)
        given = mixture_policy.schedule(8), condition, noise[4 * first :], generator, part
        path = rollout(mixture_policy, sampler, *given, max_batch=max_batch).trajectories
        return path.states, generator.get_state()

    (complete, state), (chunk, left) = sampled(), sampled(1, max_batch=5)
    assert_close(chunk, complete[1:], atol=1e-6, rtol=0)
    assert torch.equal(left, state)
    quiet, untouched = sampled(tau=0.0)
    assert not torch.allclose(quiet, complete, atol=1e-2)
    assert torch.equal(untouched, seeded(1).get_state())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_batches_are_the_samples_of_the_solver_decoded(shapes_policy, solver):
    """Up to rounding: prompts are encoded batch by batch."""
    noise = initial_noise(shapes_policy, len(PROMPTS), seed=3)
    schedule, condition = shapes_policy.schedule(4), shapes_policy.encode(PROMPTS)
    expected = solve(shapes_policy, schedule, condition, noise, Usage(), 4, solver)
    batches = list(sample_images(shapes_policy, PROMPTS, noise, 4, solver, max_batch=4))
    assert [len(batch.images) for batch in batches] == [4, 2]
    images = ImageBatch.cat(batches)
    assert_close(images.latents, expected, atol=1e-4, rtol=0)
    assert images.prompts == PROMPTS
    decoded = torch.cat([shapes_policy.decode(part) for part in images.latents.split(4)])
    assert torch.equal(images.images, decoded)
    assert torch.equal(images[2:5].images, decoded[2:5]) and images[2:5].prompts == PROMPTS[2:5]


def test_noise_depends_on_seed_and_count_alone(mixture_policy):
    expected = randn(3, 2, 1, 1, seed=20240)
    assert torch.equal(initial_noise(mixture_policy, 3), expected)
    assert not torch.equal(initial_noise(mixture_policy, 3, seed=1), expected)


def test_noise_may_be_drawn_lazily(mixture_policy):
    prompts = [DIRECTIONS[1]] * 5
    noise, drawn = initial_noise(mixture_policy, 5), []
    latents = (drawn.append(1) or latent for latent in noise)
    next(sample_images(mixture_policy, prompts, latents, 3, max_batch=2))
    assert len(drawn) == 2, "a batch draws its own latents only"


@pytest.mark.parametrize(
    ("noise", "options", "words"),
    [(2, {}, "noise = 2"), (3, {"max_batch": 0}, "max_batch = 0"), (3, {"solver": "rk4"}, "'rk4'")],
)
def test_what_is_wrong_is_named(mixture_policy, noise, options, words):
    latents = initial_noise(mixture_policy, noise)
    with pytest.raises(ConfigError, match=words):
        list(sample_images(mixture_policy, DIRECTIONS, latents, 2, **options))
