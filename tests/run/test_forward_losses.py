"""Forward-process losses in the trainer: rows and their credit, network calls, copies, samplers."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from rollouts import rolled
from seeded import seeded
from small_run import TINY_RUN, trained, trainer_of, weights
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Decisions
from flowrl.core.types import Schedule
from flowrl.rollout import ForwardObjective, Groups, Rows
from flowrl.rollout.forward import credited, finite_difference, training_noise
from flowrl.run.build import make_method
from flowrl.samplers import FlowSDE, Multistep, Windowed

CONFIG = TINY_RUN.replace(
    groups=3,
    group_size=4,
    num_steps=10,
    iterations=4,
    minibatches=2,
    learning_rate=1e-3,
    window=":-1",
    credit="uniform(std=batch, clamp=none)",
)
NFT = "diffusion-nft(decay={})"
DRAWN = "dgpo(beta_dpo=1.0, times=steps(count=4, steps=5), clip=none, noise={})"
SOLVERS = {
    "diffusion-nft": "multistep",
    "awm": "ode",
    "dgpo(beta_dpo=1.0)": "multistep(solver=unipc)",
}


def trainer_for(loss, **changes):
    """A trainer whose network differs from the base model."""
    trainer = trainer_of(CONFIG.replace(loss=loss, **changes))
    for parameter in trainer.parameters.values():
        torch.nn.init.normal_(parameter, std=0.1, generator=seeded())
    for copy in trainer.copies.by_name.values():
        copy.values = [parameter.detach().clone() for parameter in trainer.parameters.values()]
    return trainer


@pytest.mark.parametrize(
    ("loss", "draws", "networks"),
    [
        (NFT.format("(0, 0.2, 0.5)"), 9, [2, 3]),  # at first the copy equals the weights
        ("awm", 6, [2, 3]),
        (DRAWN.format("group-all-times"), 4, [2, 2]),
    ],
)
def test_network_evaluations_are_those_of_the_networks_that_differ(loss, draws, networks):
    rows, _ = trained(trainer_for(loss, minibatches=1, kl_weight=0.1))
    assert [row["train_nfe"] for row in rows] == [12 * draws * count for count in networks]


def test_trajectories_are_sampled_with_the_copy_that_the_loss_declares():
    trainer = trainer_for(NFT.format("(3, 0.2, 0.5)"))
    sampled, collect = [], trainer.collector.collect
    trainer.collector.collect = lambda *given: sampled.append(weights(trainer)) or collect(*given)
    for iteration in range(4):  # up to optimizer step 3 the decay is 0
        current = weights(trainer)
        copy = torch.cat([value.flatten() for value in trainer.copies.by_name["old"].values])
        trainer.iteration()
        assert torch.equal(sampled[-1], copy) and torch.equal(copy, current) == (iteration < 2)


@pytest.mark.parametrize("noise", ["each", "group", "group-all-times"])
def test_noise_does_not_depend_on_the_part_of_the_groups(noise):
    loss = trainer_for(DRAWN.format(noise)).method.loss
    groups, device = Groups(5, 3), torch.device("cpu")
    every = training_noise(loss, groups, (2, 1), 4, 9, device)
    assert torch.equal(every[6:12], training_noise(loss, groups.part(2, 2), (2, 1), 4, 9, device))
    by_member = every.view(5, 3, 4, 2)
    assert torch.equal(by_member[:, 0], by_member[:, 1]) == (noise != "each")
    assert torch.equal(by_member[:, :, 0], by_member[:, :, 1]) == (noise == "group-all-times")


def objective_of(trainer, sampler):
    """The loss on a rollout with random advantages and weights, which are returned as well."""
    prompts, schedule, generator = trainer.prompts.take(3), trainer.schedule, torch.Generator()
    options = dict(steps=schedule, sampler=sampler, prompts=prompts, generator=generator)
    result = rolled(trainer.policy, **options)[0]
    path, valid = result.trajectories, torch.ones(3, 4, dtype=torch.bool)
    decisions = Decisions.of(path.schedule, path.stds, path.tree, valid)
    credit = torch.rand(2, 3, 4, len(decisions), generator=generator)
    given = trainer.policy, trainer.method.loss, result, decisions, *credit, sampler, schedule
    objective = ForwardObjective(*given, generator, copies=trainer.copies.by_name)
    return objective, *(table.flatten(0, 1) for table in credit)


@pytest.mark.parametrize("sampler", [Windowed(FlowSDE(0.7), range(2, 5)), Multistep()], ids=repr)
def test_a_row_takes_the_credit_of_the_last_decision_above_its_time(sampler):
    """Above the first decision that of the first; without decisions that of the initial noise."""
    trainer = trainer_for("awm(times=stratified(count=3))")
    objective, advantages, weights = objective_of(trainer, sampler)
    sample = torch.arange(12).repeat(3)
    batch = objective.batch(Rows.of(sample, torch.arange(3).repeat_interleave(12)))
    above = objective.decisions.time >= batch.time[:, None] - 1e-6
    decision = (above.sum(1) - 1).clamp(min=0)
    assert len(decision.unique()) > 1 or objective.decisions.step.tolist() == [-1]
    assert torch.equal(batch.advantages, advantages[sample, decision])
    assert torch.equal(batch.weight, weights[sample, decision])


def test_own_states_are_those_that_the_trajectory_has_passed():
    trainer = trainer_for("diffusion-nft(noise=path)")
    objective, *_ = objective_of(trainer, trainer.draw_sampler())
    for draw in range(3):
        batch = objective.batch(Rows.of(torch.arange(12), torch.full((12,), draw)))
        steps = credited(batch.time, trainer.schedule.times[:-1])
        states = objective.images + batch.time.view(-1, 1, 1, 1) * batch.target
        passed = objective.rollout.trajectories.nodes[torch.arange(12), steps]
        assert_close(states, passed, atol=1e-5, rtol=1e-4)


def test_finite_differences_pull_along_the_difference_from_the_group():
    trainer = trainer_for("awm(noise=difference)")
    objective, *_ = objective_of(trainer, trainer.draw_sampler())
    batch = objective.batch(Rows.of(torch.arange(12), torch.zeros(12).long()))
    path = objective.rollout.trajectories
    images = path.images_latent.view(3, 4, -1)
    d = (images - images.mean(1, keepdim=True)).flatten(0, 1)
    steps = credited(batch.time, trainer.schedule.times[:-1])
    then = path.velocities[torch.arange(12), steps].flatten(1)
    assert_close(batch.target.flatten(1), then - d / (d.square().mean(1, keepdim=True) + 1e-6))
    pair, counts = torch.tensor([[1.0], [4.0], [9.0]]), torch.tensor([True, True, False])
    assert_close(finite_difference(pair, counts, 3)[:2], torch.tensor([[-1.5], [1.5]]) / 2.250001)
    assert not finite_difference(torch.ones(2, 3), counts[:2], 2).any()


@dataclass(frozen=True)
class Halved(Multistep):
    """A solver on half of the steps."""

    def grid(self, schedule):
        return Schedule(schedule.times[::2])


def test_a_grid_of_another_length_is_one_error():
    trainer = trainer_for("diffusion-nft")
    trainer.method = replace(trainer.method, sampler=Halved())
    message = r"Halved.grid = .* is not allowed; allowed: a Schedule of 10 steps"
    with pytest.raises(ConfigError, match=message):
        trainer.iteration()


@pytest.mark.parametrize("sampler", [*SOLVERS.values(), "multistep(solver=sa, tau=0.4)"])
def test_a_deterministic_sampler_is_for_forward_losses_and_credit_of_images(sampler):
    forward = CONFIG.replace(loss="diffusion-nft", sampler=sampler)
    make_method(forward)
    message = f"sampler = {sampler!r} is not allowed; allowed: a stochastic sampler: the loss needs"
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_method(CONFIG.replace(sampler=sampler))
    for rule in ("stepwise-gain", "weighted(rule=stepwise-gain)", "turning-point"):
        config = forward.replace(credit=rule)
        message = rf"credit = .* such as uniform: {re.escape(sampler)} draws no transition"
        with pytest.raises(ConfigError, match=message):
            make_method(config)
        make_method(config.replace(sampler="flow-sde"))
