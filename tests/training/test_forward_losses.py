"""Forward-process losses in the trainer: rows, units, copies of the weights and checkpoints."""

import re
from dataclasses import replace

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Credit, Decisions
from flowrl.core.forward import Decay
from flowrl.credit import Uniform
from flowrl.flow import DrawnSteps, StratifiedTimes
from flowrl.losses import AWM, DGPO, DiffusionNFT
from flowrl.methods import Method
from flowrl.rollout import rollout
from flowrl.rollout.batches import ForwardBatches, credited, training_noise
from flowrl.rollout.rollout import Groups
from flowrl.samplers import ODE, FixedWindow, FlowSDE, Multistep, Windowed
from flowrl.training.build import make_method
from flowrl.training.config import RunConfig, preset
from flowrl.training.plan import plan
from flowrl.training.trainer import Trainer
from flowrl.worlds.base import PolicyOptions, world

PROMPTS = [world("mixture").parse(f"towards {angle} degrees") for angle in (0, 90, 180)]
REWARD = world("mixture").reward("soft")
CONFIG = preset("tiny").apply(
    world="mixture",
    task="direction",
    groups=3,
    group_size=4,
    num_steps=6,
    iterations=4,
    minibatches=2,
    learning_rate=1e-3,
)
BATCH = Uniform(std="batch", clamp=None)
LOSSES = {
    "nft": DiffusionNFT(kl_weight=0.1, decay=(0, 0.2, 0.5)),
    "nft, late copy": DiffusionNFT(decay=(3, 0.2, 0.5)),
    "awm": AWM(kl_weight=0.1, times=StratifiedTimes(3)),
    "awm, all times of a sample": AWM(ratio="sum_first", times=StratifiedTimes(4)),
    "dgpo": DGPO(beta_dpo=1.0, times=DrawnSteps(3, 5), decay=(1, 0.3, 0.5), sample_from=2),
    "dgpo, one noise": DGPO(
        beta_dpo=1.0, times=DrawnSteps(4, 5), clip=None, noise="group-all-times"
    ),
    "nft, own states": DiffusionNFT(noise="path"),
}
SAMPLERS = {
    "nft": Multistep(),
    "awm": ODE(),
    "awm, all times of a sample": Multistep("sa", tau=0.4),
    "dgpo": Multistep("unipc"),
}


def trainer_for(case, config=CONFIG, credit=BATCH, reward=REWARD):
    method = Method(
        case, SAMPLERS.get(case, FlowSDE(0.7)), FixedWindow(stop=-1), credit, LOSSES[case]
    )
    policy = world("mixture").policy(PolicyOptions())
    for name, parameter in policy.trainable().items():
        torch.nn.init.normal_(
            parameter, std=0.1, generator=torch.Generator().manual_seed(len(name))
        )
    return Trainer(policy, method, reward, PROMPTS, config)


def trained(trainer, iterations=3):
    rows = [trainer.iteration() for _ in range(iterations)]
    return rows, torch.cat([parameter.detach().flatten() for parameter in trainer.parameters])


@pytest.mark.parametrize("case", LOSSES)
def test_neither_micro_batches_nor_chunks_change_what_is_trained(case):
    """Micro-batches of 3 are smaller than a group of 4 and than the times of a sample: their means
    take a pass of their own.
    """
    _, expected = trained(trainer_for(case))
    for changes in (
        dict(micro_batch=3),
        dict(micro_batch=9),
        dict(chunk=1, offload=True),
        dict(max_batch=5, chunk=2),
    ):
        _, found = trained(trainer_for(case, CONFIG.replace(**changes)))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_network_evaluations_are_those_of_the_networks_that_differ():
    counts = {}
    for case in ("nft", "awm", "dgpo, one noise"):
        rows, _ = trained(trainer_for(case, CONFIG.replace(minibatches=1)), 2)
        counts[case] = [row["train_nfe"] for row in rows]
    samples = 12
    # The copy equals the weights in the first iteration; then it lags: current + reference (+
    # copy).
    assert counts["nft"] == [samples * 5 * 2, samples * 5 * 3]
    assert counts["awm"][1] >= counts["awm"][0]
    assert counts["dgpo, one noise"] == [samples * 4 * 2, samples * 4 * 2]


def test_the_plan_counts_them_too():
    for loss, draws, networks in (("diffusion-nft", 9, 3), ("awm", 6, 4), ("dgpo", 4, 3)):
        config = RunConfig.of(
            world="mixture",
            task="direction",
            loss=loss,
            kl_weight=0.1,
            credit="uniform(std=batch,clamp=none)",
        )
        found, samples = plan(config), config.rollout.groups * config.rollout.group_size
        assert (found.rows, found.train_nfe) == (samples * draws, samples * draws * networks)
    split = config.replace(micro_batch=config.rollout.group_size - 1)
    assert plan(split).train_nfe == 2 * found.train_nfe


def test_trajectories_are_sampled_with_the_copy_that_the_loss_wants():
    trainer = trainer_for("nft, late copy")
    seen, original = [], trainer.collector.collect

    def watched(*given):
        seen.append([parameter.detach().clone() for parameter in trainer.parameters])
        return original(*given)

    trainer.collector.collect = watched
    trained(trainer, 4)
    behaviour = trainer.copies.by_name["old"]
    assert trainer.copies.steps == 8
    # Up to step 3 the decay is 0: the copy is the weights themselves. From then on it lags.
    assert Decay(*LOSSES["nft, late copy"].decay).at(8) == 0.5
    last = torch.cat([value.flatten() for value in behaviour.values])
    now = torch.cat([parameter.detach().flatten() for parameter in trainer.parameters])
    assert not torch.equal(last, now)
    sampled = torch.cat([value.flatten() for value in seen[-1]])
    assert not torch.equal(sampled, now)


def test_times_belong_to_the_step_that_passes_them():
    schedule = world("mixture").policy(PolicyOptions()).schedule(5)
    assert credited(schedule.times[:-1], schedule.times[:-1]).tolist() == list(range(5))
    between = (schedule.times[:-1] + schedule.times[1:]) / 2
    assert credited(between, schedule.times[:-1]).tolist() == list(range(5))


def test_noise_does_not_depend_on_the_part_of_the_groups():
    for case in LOSSES:
        loss, groups = LOSSES[case], Groups(5, 3)
        if loss.noise == "path":
            continue
        whole = training_noise(loss, groups, (2, 1), 4, 9, torch.device("cpu"))
        part = training_noise(loss, groups.part(2, 2), (2, 1), 4, 9, torch.device("cpu"))
        assert torch.equal(whole[6:12], part)
        by_member = whole.view(5, 3, 4, 2)
        assert torch.equal(by_member[:, 0], by_member[:, 1]) == (loss.noise != "each")
        assert torch.equal(by_member[:, :, 0], by_member[:, :, 1]) == (
            loss.noise == "group-all-times"
        )


def batches_of(trainer):
    """The batches of a rollout with random advantages and weights, which are returned as well."""
    groups, generator = trainer.groups, torch.Generator().manual_seed(0)
    noise = groups.noise(trainer.policy.latent_shape, generator)
    condition = trainer.policy.encode(PROMPTS)
    result = rollout(
        trainer.policy,
        trainer.draw_sampler(),
        trainer.schedule,
        condition,
        noise,
        generator,
        groups,
    )
    times = trainer.method.loss.times.draw(trainer.schedule, groups.samples, generator)
    path, valid = result.trajectories, torch.ones(3, 4, dtype=torch.bool)
    decisions = Decisions.of(path.schedule, path.stds, path.tree, valid)
    advantages, weights = torch.rand(2, 12, len(decisions), generator=generator)
    made = ForwardBatches(
        trainer.policy,
        trainer.method.loss,
        result,
        condition,
        advantages,
        weights,
        times,
        decisions,
        1,
        trainer.copies.by_name,
    )
    return made, advantages, weights


def decision_before(time, decisions):
    """The last decision that is not below the time, in a loop."""
    found = 0
    for k, start in enumerate(decisions.time.tolist()):
        if start >= time - 1e-6:
            found = k
    return found


@pytest.mark.parametrize(
    "sampler", [FlowSDE(0.7), Windowed(FlowSDE(0.7), range(2, 5)), ODE(), Multistep()], ids=repr
)
def test_a_row_takes_the_credit_of_the_last_decision_above_its_time(sampler):
    """Above the first decision it is that of the first; without decisions the initial noise is the
    only one.
    """
    trainer = trainer_for("awm")
    trainer.method = replace(trainer.method, sampler=sampler)
    batches, advantages, weights = batches_of(trainer)
    sample, draw = torch.arange(12).repeat(3), torch.arange(3).repeat_interleave(12)
    batch = batches.of(sample, draw)
    expected = torch.tensor(
        [decision_before(time, batches.decisions) for time in batch.time.tolist()]
    )
    assert torch.equal(batch.advantages, advantages[sample, expected])
    assert torch.equal(batch.weight, weights[sample, expected])
    if isinstance(sampler, ODE | Multistep):
        assert batches.decisions.step.tolist() == [-1] and not expected.any()
    else:
        assert len(expected.unique()) > 1
    with torch.no_grad():
        # x_t = x_0 + t (eps - x_0)
        x = batches.images + batch.time.view(3, 12, 1, 1, 1)[0] * batch.target[:12]
        expected = trainer.policy.velocity(
            x, 1000 * batch.time[:12], trainer.policy.encode(PROMPTS).repeat(4)
        )
    torch.testing.assert_close(batch.new[:12], expected)


def test_rows_at_above_and_below_the_times_of_decisions():
    decisions = Decisions.like(torch.zeros(1, 2, 4), times=(0.8, 0.5, 0.2))
    times = torch.tensor([[1.0, 0.81, 0.8, 0.79], [0.5, 0.499, 0.2, 0.01]])
    assert credited(times, decisions.time).tolist() == [[0, 0, 0, 0], [1, 1, 2, 2]]


def test_own_states_are_those_that_the_trajectory_has_passed():
    trainer = trainer_for("nft, own states")
    batches, _, _ = batches_of(trainer)
    for draw in range(3):
        batch = batches.of(torch.arange(12), torch.full((12,), draw))
        steps = credited(batch.time, trainer.schedule.times[:-1])
        states = batches.images + batch.time.view(-1, 1, 1, 1) * batch.target
        torch.testing.assert_close(
            states,
            batches.rollout.trajectories.nodes[torch.arange(12), steps],
            atol=1e-5,
            rtol=1e-4,
        )


class Recorded(Uniform):
    """Uniform credit that keeps the record; its log-probabilities are read."""

    reads_fields = ("log_probs", "trajectories", "condition")

    def credit(self, experience):
        object.__setattr__(self, "seen", experience)
        return Credit(self.assign(experience.values, experience.decisions))


@pytest.mark.parametrize("case", ["nft", "awm", "dgpo"])
def test_without_drawn_transitions_the_initial_noise_is_the_only_decision(case):
    """DPM-Solver++, the ODE and UniPC: one decision, which no transition's log-probability belongs
    to.
    """
    rule, sampler = Recorded(), Multistep() if case == "nft" else SAMPLERS[case]
    trainer = trainer_for(case, credit=rule)
    trainer.method = replace(trainer.method, sampler=sampler)
    row = trainer.iteration()
    decisions, seen = rule.seen.decisions, rule.seen
    assert [
        table.tolist() for table in (decisions.step, decisions.time, decisions.delta, decisions.std)
    ] == [
        [-1],
        [1.0],
        [0.0],
        [1.0],
    ]
    assert (
        bool(decisions.mask.all())
        and seen.values.shape == (3, 4, 2)
        and bool(seen.values[..., 0].isnan().all())
    )
    assert seen.log_probs.shape == (3, 4, 1) and bool(seen.log_probs.isnan().all())
    assert seen.trajectories.states.shape[:2] == (3, 4 * 7) and len(seen.condition) == 3
    assert row["grad_norm"] > 0


@pytest.mark.parametrize("credit", ["stepwise-gain", "tp-grpo", "weighted(rule='stepwise-gain')"])
@pytest.mark.parametrize("sampler", ["multistep", "ode", "multistep(solver=sa, tau=0.4)"])
def test_rules_of_decisions_are_refused_by_name_where_nothing_is_drawn(credit, sampler):
    config = RunConfig.of(
        world="mixture",
        task="direction",
        loss="diffusion-nft",
        credit="" if credit == "tp-grpo" else credit,
    )
    config = config.replace(sampler=sampler, **({"method": credit} if credit == "tp-grpo" else {}))
    name = {"stepwise-gain": "StepwiseGain", "tp-grpo": "TurningPoint"}.get(credit, "Weighted")
    message = (
        f"credit = {name!r} is not allowed; allowed: one that credits the image, such as uniform:"
        f" {sampler} draws no"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_method(config)
    make_method(config.replace(sampler="flow-sde"))


def test_a_deterministic_sampler_serves_forward_losses_only():
    given = dict(world="mixture", task="direction", credit="uniform(std=batch)")
    for sampler in ("ode", "multistep", "multistep(solver=unipc)", "multistep(solver=sa, tau=0.4)"):
        method = make_method(RunConfig.of(**given, loss="diffusion-nft", sampler=sampler))
        assert isinstance(method.loss, DiffusionNFT)
    for sampler in ("ode", "multistep", "multistep(solver=sa, tau=0.4)"):
        message = (
            f"sampler = {sampler!r} is not allowed; allowed: a stochastic sampler: the loss needs"
            " log-probabilities"
        )
        with pytest.raises(ConfigError, match=re.escape(message)):
            make_method(RunConfig.of(**given, sampler=sampler))
