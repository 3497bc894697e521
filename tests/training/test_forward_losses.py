"""Forward-process losses in the trainer: rows, units, copies of the weights and checkpoints."""

import re

import pytest
import torch

from flowrl.credit import StepwiseGain, Uniform
from flowrl.errors import ConfigError
from flowrl.flow import DrawnSteps, StratifiedTimes
from flowrl.forward import Decay
from flowrl.losses import AWM, DGPO, ClippedLoss, DiffusionNFT
from flowrl.methods import Method, named_method
from flowrl.probes import Branch, Tweedie
from flowrl.rollout.forward_batch import ForwardBatches, step_of, training_noise
from flowrl.rollout.rollout import Groups
from flowrl.samplers import ODE, AllButLast, FlowSDE, Multistep
from flowrl.training.build import make_method, make_trainer
from flowrl.training.config import RunConfig, preset
from flowrl.training.plan import plan
from flowrl.training.trainer import Trainer
from flowrl.worlds.base import PolicyOptions, world

PROMPTS = [world("mixture").parse(f"towards {angle} degrees") for angle in (0, 90, 180)]
REWARD = world("mixture").reward("soft")
CONFIG = preset("tiny").apply(
    world="mixture", task="direction", groups=3, group_size=4, num_steps=6, iterations=4, minibatches=2, learning_rate=1e-3
)
BATCH = Uniform(std="batch", clamp=None)
LOSSES = {
    "nft": DiffusionNFT(kl_weight=0.1, decay=(0, 0.2, 0.5)),
    "nft, late copy": DiffusionNFT(decay=(3, 0.2, 0.5)),
    "awm": AWM(kl_weight=0.1, times=StratifiedTimes(3)),
    "awm, all times of a sample": AWM(ratio="sum_first", times=StratifiedTimes(4)),
    "dgpo": DGPO(beta_dpo=1.0, times=DrawnSteps(3, 5), decay=(1, 0.3, 0.5), sample_from=2),
    "dgpo, one noise": DGPO(beta_dpo=1.0, times=DrawnSteps(4, 5), clip=None, noise="group-all-times"),
    "nft, own states": DiffusionNFT(noise="path"),
}
SAMPLERS = {
    "nft": Multistep(), "awm": ODE(), "awm, all times of a sample": Multistep("sa", tau=0.4), "dgpo": Multistep("unipc"),
}  # fmt: skip


def trainer_for(case, config=CONFIG, credit=BATCH, reward=REWARD):
    method = Method(case, SAMPLERS.get(case, AllButLast(FlowSDE(0.7))), credit, LOSSES[case])
    policy = world("mixture").policy(PolicyOptions())
    for name, parameter in policy.trainable().items():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return Trainer(policy, method, reward, PROMPTS, config)


def trained(trainer, iterations=3):
    rows = [trainer.iteration() for _ in range(iterations)]
    return rows, torch.cat([parameter.detach().flatten() for parameter in trainer.parameters])


@pytest.mark.parametrize("case", LOSSES)
def test_neither_micro_batches_nor_chunks_change_what_is_trained(case):
    """Micro-batches of 3 are smaller than a group of 4 and than the times of a sample: their means take a pass of their own."""
    _, expected = trained(trainer_for(case))
    for changes in (dict(micro_batch=3), dict(micro_batch=9), dict(chunk=1, offload=True), dict(max_batch=5, chunk=2)):
        _, found = trained(trainer_for(case, CONFIG.replace(**changes)))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", LOSSES)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(case):
    _, expected = trained(trainer_for(case), 4)
    first, second = trainer_for(case), trainer_for(case)
    trained(first, 2)
    second.restore(first.state())
    assert torch.equal(trained(second, 2)[1], expected)
    for name, copy in first.copies.by_name.items():
        assert copy.state().values == {f"copy.{name}.current": copy.is_current}


def test_network_evaluations_are_those_of_the_networks_that_differ():
    counts = {}
    for case in ("nft", "awm", "dgpo, one noise"):
        rows, _ = trained(trainer_for(case, CONFIG.replace(minibatches=1)), 2)
        counts[case] = [row["train_nfe"] for row in rows]
    samples = 12
    # The copy equals the weights in the first iteration; then it lags: current + reference (+ copy).
    assert counts["nft"] == [samples * 5 * 2, samples * 5 * 3]
    assert counts["awm"][1] >= counts["awm"][0]
    assert counts["dgpo, one noise"] == [samples * 4 * 2, samples * 4 * 2]


def test_the_plan_counts_them_too():
    for loss, draws, networks in (("diffusion-nft", 9, 3), ("awm", 6, 4), ("dgpo", 4, 3)):
        config = RunConfig.of(world="mixture", task="direction", loss=loss, kl_weight=0.1, credit="uniform(std=batch,clamp=none)")
        found, samples = plan(config), config.rollout.groups * config.rollout.group_size
        assert (found.pairs, found.train_nfe) == (samples * draws, samples * draws * networks)
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
    assert step_of(schedule.times[:-1], schedule).tolist() == list(range(5))
    between = (schedule.times[:-1] + schedule.times[1:]) / 2
    assert step_of(between, schedule).tolist() == list(range(5))


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
        assert torch.equal(by_member[:, :, 0], by_member[:, :, 1]) == (loss.noise == "group-all-times")


def batches_of(trainer, advantages):
    groups, generator = trainer.groups, torch.Generator().manual_seed(0)
    noise = groups.noise(trainer.policy.latent_shape, generator)
    condition = trainer.policy.encode(PROMPTS)
    from flowrl.rollout import rollout

    result = rollout(trainer.policy, trainer.method.sampler, trainer.schedule, condition, noise, generator, groups)
    times = trainer.method.loss.times.draw(trainer.schedule, groups.samples, generator)
    return ForwardBatches(trainer.policy, trainer.method.loss, result, condition, advantages, times, 1, trainer.copies.by_name)


def test_credit_per_step_weights_the_times_that_a_step_passes():
    trainer = trainer_for("awm")
    advantages = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    batches = batches_of(trainer, advantages)
    sample, draw = torch.arange(12), torch.zeros(12, dtype=torch.long)
    batch = batches.of(sample, draw)
    steps = step_of(batch.time, trainer.schedule)
    assert torch.equal(batch.advantages, advantages[sample, steps])
    with torch.no_grad():
        x = batches.images + batch.time.view(-1, 1, 1, 1) * batch.target  # x_t = x_0 + t (eps - x_0)
        expected = trainer.policy.velocity(x, 1000 * batch.time, trainer.policy.encode(PROMPTS).repeat(4))
    torch.testing.assert_close(batch.new, expected)


def test_own_states_are_those_that_the_trajectory_has_passed():
    trainer = trainer_for("nft, own states")
    batches = batches_of(trainer, torch.zeros(12, 6))
    for draw in range(3):
        batch = batches.of(torch.arange(12), torch.full((12,), draw))
        steps = step_of(batch.time, trainer.schedule)
        states = batches.images + batch.time.view(-1, 1, 1, 1) * batch.target
        torch.testing.assert_close(states, batches.rollout.trajectories.nodes[torch.arange(12), steps], atol=1e-5, rtol=1e-4)


def test_own_states_of_a_tree_are_refused():
    trainer = trainer_for("nft, own states", credit=Uniform(probe=Branch(2)), config=CONFIG.replace(group_size=32))
    with pytest.raises(ConfigError, match='noise = "path" is not allowed on branched trajectories'):
        trainer.iteration()


def test_credit_rules_with_probes_combine_with_a_forward_loss():
    trainer = trainer_for("nft, late copy", credit=StepwiseGain(probe=Tweedie()))
    rows, weights = trained(trainer)
    assert bool(weights.isfinite().all()) and rows[0]["grad_norm"] > 0


def test_a_deterministic_sampler_serves_forward_losses_only():
    given = dict(world="mixture", task="direction", credit="uniform(std=batch)")
    for sampler in ("ode", "multistep", "multistep(solver=unipc)", "multistep(solver=sa, tau=0.4)"):
        method = make_method(RunConfig.of(**given, loss="diffusion-nft", sampler=sampler))
        assert isinstance(method.loss, DiffusionNFT)
    for sampler in ("ode", "multistep", "multistep(solver=sa, tau=0.4)"):
        message = f"sampler = {sampler!r} is not allowed; allowed: a stochastic sampler: the loss needs log-probabilities"
        with pytest.raises(ConfigError, match=re.escape(message)):
            make_method(RunConfig.of(**given, sampler=sampler))


def test_named_methods_have_losses_of_their_own():
    """The plain default is the method's own loss with the run's KL weight; an explicit forward loss replaces it."""
    expected = {"diffusion-nft": DiffusionNFT(kl_weight=0.2), "awm": AWM(kl_weight=0.2),
                "dgpo": DGPO(beta_dpo=1.0, sample_from=None, kl_weight=0.2)}  # fmt: skip
    for name, loss in expected.items():
        config = RunConfig.of(world="mixture", task="direction", method=name, kl_weight=0.2)
        method = make_method(config)
        assert (method.name, method.loss, method.credit, method.shared_noise) == (name, loss, BATCH, False)
        stepwise = make_method(config.replace(credit="stepwise-gain"))
        assert (stepwise.loss, stepwise.credit) == (loss, StepwiseGain())
        assert make_method(config.replace(loss="awm(power=0.5)")).loss == AWM(power=0.5, kl_weight=0.2)
        assert named_method(name).sampler == (Multistep("sa", tau=0.4) if name == "awm" else Multistep())


@pytest.mark.parametrize("loss", ["clipped(kl=without_delta)", "grpo-guard", "policy-gradient"])
def test_a_policy_loss_with_a_forward_process_method_is_one_error(loss):
    config = RunConfig.of(world="mixture", task="direction", method="dgpo", loss=loss)
    with pytest.raises(ConfigError, match=r"^loss = .* is not allowed; allowed: a forward-process loss with dgpo"):
        make_method(config)
    with pytest.raises(ConfigError, match=r"loss of awm = 'ClippedLoss' is not allowed"):
        named_method("awm", loss=ClippedLoss())


@pytest.mark.parametrize("name", ["diffusion-nft", "awm", "dgpo"])
def test_named_methods_learn(name):
    """The mean reward of the last iterations is well above that of the first ones (mixture, 16 iterations)."""
    config = preset("default").apply(world="mixture", method=name, groups=8, minibatches=4)
    trainer = make_trainer(config)
    rewards = [trainer.iteration()["reward_mean"] for _ in range(16)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
