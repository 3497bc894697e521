"""The short runs that lessons train: what they count, and that they repeat."""

import torch
from flowrl_course.batches import sample_groups
from flowrl_course.runs import learn, start

from flowrl.credit import StepwiseGain, Uniform
from flowrl.probes import Completion, Tweedie


def test_counts_of_a_run():
    """12 x 8 trajectories of 10 steps, of which 5 are trained; a trained pair counts as three
    forward passes.
    """
    run = learn(iterations=3, eval_every=2)
    assert run.iterations.tolist() == [0, 2, 3]
    assert run.sampled.tolist() == [0, 1920, 2880]
    assert run.trained.tolist() == [0, 960, 1440]
    assert torch.equal(run.work, run.sampled + 3 * run.trained)
    assert run.points.shape == (3, 96, 2) and 0 < run.clipped < 1


def test_a_rule_brings_its_own_noise_sharing():
    """The rule's attribute decides unless `initial_noise` is set; with shared noise, node 0 of a
    group is evaluated once.
    """
    rule = StepwiseGain(probe=Tweedie())
    assert start(rule=rule).groups.shared_noise
    assert not start(rule=rule, initial_noise="independent").groups.shared_noise
    assert not start(rule=Uniform()).groups.shared_noise
    assert start(rule=Uniform(), initial_noise="shared").groups.shared_noise
    assert start("stepwise-flow-grpo").groups.shared_noise
    assert learn(rule=rule, iterations=1).sampled[-1] == 9 * 96 + 12


def test_a_state_has_one_completion():
    """The first question of the quiz on TP-GRPO: before decision 0 the members of a group share
    their state, and after it they do not.
    """
    trainer = start()
    drawn = sample_groups(
        trainer.policy,
        trainer.reward,
        trainer.prompts.prompts[:3],
        4,
        trainer.draw_sampler(),
        Completion(),
        shared_noise=True,
    )
    spread = drawn.values.std(1)  # [prompt, decision+1]
    assert (spread[:, 0] < 1e-6).all() and (spread[:, [1, -1]] > 1e-3).all()
