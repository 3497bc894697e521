"""`tutorials/nano_flow_grpo.py` computes what the trainer computes."""

import re
import sys
from pathlib import Path

import pytest
import torch
from loading import load
from torch import Tensor

from flowrl import flow, preset
from flowrl.flow import uniform_schedule
from flowrl.run.build import make_trainer
from flowrl.samplers import FlowSDE
from flowrl.worlds import mixture

TUTORIALS = Path(__file__).parents[2] / "tutorials"
CREDIT = {
    "uniform": "uniform",
    "gain": "stepwise-gain(probe=completion())",
    "turning point": "turning-point(balance=none)",
}
nano = load("tutorials/nano_flow_grpo.py")


def test_it_is_short_and_needs_only_torch():
    text = (TUTORIALS / "nano_flow_grpo.py").read_text()
    assert len(text.splitlines()) <= 200
    names = {*re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)}
    assert names - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("step", [0, 1, 4])
def test_the_sampler_step_and_its_log_probability_are_the_library_s(step):
    x, v, y = torch.randn(3, 6, 2, generator=torch.Generator().manual_seed(0))
    schedule, steps = uniform_schedule(10), torch.full((6,), step)
    expected = FlowSDE(0.7).transition(x, v, schedule, steps)
    kernel = nano.transition(x, v, nano.TIMES[step], nano.TIMES[step + 1], 0.7)
    torch.testing.assert_close(kernel.mean, expected.mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(kernel.stddev, expected.std[:, None].expand(6, 2))
    own, theirs = kernel.log_prob(y).mean(1), flow.log_prob(expected, y)
    torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)


def test_the_pretrained_velocity_is_exact():
    x, time = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.tensor(0.3)
    expected = mixture.ring().velocity(x, time.expand(6))
    torch.testing.assert_close(nano.pretrained(x, time), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("credit", CREDIT)
def test_two_iterations_are_those_of_the_trainer(credit, monkeypatch, request):
    """In float64, from equal parameters and draws: advantages, losses, clipped gradients."""
    args = nano.Settings(credit=credit, groups=3, members=4, updates=2, noise_level=0.1, clip=0.01)
    run = preset("default").apply(  # little noise: gradients large enough to be clipped
        world="mixture",
        method="flow-grpo",
        credit=CREDIT[credit],
        initial_noise="independent",
        groups=args.groups,
        group_size=args.members,
        minibatches=args.updates,
        clip_range=args.clip,
        noise_level=args.noise_level,
    )
    trainer, policy = make_trainer(run), nano.Policy()
    # the library computes in float32: in this test "float32" is float64
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    for parameter in (*trainer.parameters.values(), *policy.parameters()):
        parameter.data = parameter.data.double()
    trainer.average = [average.double() for average in trainer.average]
    request.addfinalizer(lambda single=torch.get_default_dtype(): torch.set_default_dtype(single))
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(nano, "TIMES", trainer.schedule.times.double())
    monkeypatch.setattr(nano, "ANGLES", nano.ANGLES.double())
    optimizer = torch.optim.AdamW(
        policy.parameters(), run.optim.learning_rate, (0.9, 0.99), 1e-8, 1e-4
    )
    gradients, expected = (
        recorded(made, made.param_groups[0]["params"]) for made in (optimizer, trainer.optimizer)
    )
    for _ in range(2):
        prompts = trainer.prompts.upcoming(args.groups)
        angles = torch.tensor([mixture.angle_of(prompt.text) for prompt in prompts]).deg2rad()
        generator = torch.Generator().manual_seed(0)
        generator.set_state(trainer.generator.get_state())
        theirs = list(trainer.parameters.values())
        for own, parameter in zip(policy.parameters(), theirs, strict=True):
            own.data.copy_(parameter.data)
        values, losses = nano.iteration(policy, optimizer, angles, args, generator)
        row = trainer.iteration()
        assert torch.equal(generator.get_state(), trainer.generator.get_state())
        own = nano.advantages(values, credit).expand(-1, -1, args.decisions)
        torch.testing.assert_close(own, row.credit.advantages, atol=1e-6, rtol=1e-6)
        assert sum(losses) / len(losses) == pytest.approx(row["policy_loss"], abs=1e-6)
        torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-6)


def recorded(optimizer, parameters):
    """A list that gets the gradients of every optimizer step."""
    gradients, step = list[list[Tensor]](), optimizer.step

    def record(*arguments):
        gradients.append([parameter.grad.clone() for parameter in parameters])
        return step(*arguments)

    optimizer.step = record
    return gradients


def test_before_the_first_update_the_clipped_gradient_is_that_of_reinforce():
    new = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.5])
    for loss in ("reinforce", "clip"):
        terms = nano.surrogate(new, new.detach(), advantage, nano.Settings(loss=loss))
        (gradient,) = torch.autograd.grad(terms.sum(), new)
        torch.testing.assert_close(gradient, -advantage)


@pytest.mark.parametrize("name", ["clip", "clip, gain", "clip, turning point"])
def test_the_reward_rises_and_stays(name):
    settings = nano.STAGES[name]
    settings = nano.Settings(credit=settings.credit, iterations=15)
    rewards = nano.train(settings, seed=0)
    assert rewards[0] < 0.25 < 0.9 < rewards[-1]
    assert rewards[-1] > max(rewards) - 0.03
