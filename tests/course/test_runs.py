"""The code of the lessons: short runs, the chain in one dimension, a formula of lesson 13, and
figures of recorded runs, whose numbers are those of the pages.
"""

import math

import matplotlib.pyplot as plt
import pytest
import torch
from flowrl_course import recorded
from flowrl_course.batches import sample_groups
from flowrl_course.chain import walk
from flowrl_course.runs import learn, start
from loading import ROOT

from flowrl.credit import (
    StepwiseGain,
    Uniform,
    gains,
    process_rewards,
    reward_to_go,
    turning_points,
)
from flowrl.flow import uniform_schedule
from flowrl.probes import Completion, Tweedie
from flowrl.run.parts.coverage import coverage
from flowrl.samplers import FlowSDE, Windowed
from flowrl.worlds.mixture import WIDTH, ring


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


# The chain on which the course shows the bias of TP-GRPO's choice of credit

VALUES, SCORES = walk(400_000, seed=1)
TABLE = VALUES[:, None]
CREDITS = {
    "R": VALUES[:, -1:].expand(-1, 5),
    "to go": reward_to_go(TABLE)[:, 0],
    "gain": gains(TABLE)[:, 0],
    "turning points": process_rewards(TABLE, turning_points(TABLE))[:, 0],
}


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        ("R", [0.236] * 5),
        ("to go", [0.236] * 5),
        ("gain", [0.236] * 5),
        ("turning points", [0.315, 0.285, 0.271, 0.260, 0.236]),
    ],
)
def test_only_a_choice_by_later_draws_changes_the_expected_gradient(credit, expected):
    """E[psi_k A_k] of every decision. Golden values: two million paths; here 4.5 standard errors,
    1 false alarm in 7,000 runs of the test.
    """
    samples = SCORES * CREDITS[credit]
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - torch.tensor(expected)).abs() < 4.5 * error + 5e-4).all()


def test_the_added_credit_is_half_of_the_luck_in_the_direction_of_the_gain():
    """E[1[g F > 0] F | z_1] = sign(g) E|F| / 2 at decision 0, because E[F | z_1] = 0."""
    gain, luck = CREDITS["gain"][:, 0], VALUES[:, -1] - VALUES[:, 1]
    added = (CREDITS["turning points"][:, 0] - gain) * gain.sign()
    assert float(added.mean()) == pytest.approx(float(luck.abs().mean()) / 2, rel=0.02)


def test_the_page_of_tp_grpo_has_these_numbers():
    """The gradients, and those of decision 0 after the normalisation."""
    page = (ROOT / "docs/papers/tp-grpo.md").read_text()
    assert "0.236" in page and "0.315, 0.285, 0.271, 0.260 and 0.236" in page
    for name, shown in (("gain", 0.979), ("turning points", 0.849)):
        credit = CREDITS[name][:, 0]
        normalised = (SCORES[:, 0] * credit).mean() / credit.std()
        assert float(normalised) == pytest.approx(shown, abs=0.005) and str(shown) in page


# Figures of recorded runs


@pytest.fixture(autouse=True)
def no_windows(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    yield
    plt.close("all")


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ("final reward", lambda: recorded.measured("train-short", 1)),
        ("images: better,", lambda: recorded.measured("stepwise-updates", 0, "shapes")),
        ("ratio of updates", lambda: recorded.measured("tp-beats-uniform", 1)),
        ("without it", lambda: recorded.cosine("TurningPoint, no first step")),
    ],
)
def test_a_number_is_that_of_the_table(before, value):
    results = [row.result for paper in coverage().values() for row in paper.rows]
    assert any(f"{before} {value()}" in result for result in results)


def test_figures_have_a_line_per_arm_and_a_dot_per_setting():
    recorded.curves({"steps": ("train-short", "forwards")})
    assert [line.get_label() for line in plt.gca().get_lines()] == ["10 steps", "40 steps"]
    recorded.dots({"noise": ("tp-noise", "area")})
    assert [text.get_text() for text in plt.gca().get_yticklabels()][:2] == [
        "noise 0.7",
        "noise 0.4",
    ]
    assert len(plt.gca().get_lines()) == 10  # an interval and a dot each
    recorded.search("uniform")
    assert [cell.get_title() for cell in plt.gcf().get_axes()] == ["Search, 2-D", "Search, images"]


def test_both_targets_have_one_covariance_at_the_noise_level_of_the_reverse_process():
    """Lesson 13: the covariance of the reward with the target of a transition is
    -a^2/(1 + a^2/2) t/(1 - t) grad V*, with that of the finished sample
    -t/(1 - t) grad E[R | x_t]; the two agree for a = sqrt 2.
    """
    data, centre, time = ring(), torch.tensor([2.0, 0.0]), 0.7
    state, times = torch.tensor([[0.35, 0.85]]), torch.tensor([time])
    good = data.tilted(centre, WIDTH)
    leaf = state.clone().requires_grad_()
    ratio = (good.log_marginal(leaf, times) - data.log_marginal(leaf, times)).exp()
    expected = data.expected_bump(centre, WIDTH) * ratio
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    finished = (expected * (good.velocity(state, times) - data.velocity(state, times))).detach()[0]
    torch.testing.assert_close(finished, -time / (1 - time) * gradient[0], rtol=1e-3, atol=1e-3)

    def transition(level, steps=70, count=40_000):
        generator, grid = torch.Generator().manual_seed(0), uniform_schedule(steps)
        sampler, x = Windowed(FlowSDE(level), range(steps - 1)), state.repeat(count, 1)
        first = torch.zeros_like(x)
        for step in range(round(0.3 * steps), steps):
            velocity = data.velocity(x, grid.times[step].expand(count))
            gaussian = sampler.transition(x, velocity, grid, torch.full((count,), step))
            noise = torch.randn(count, 2, generator=generator)
            x = gaussian.mean + gaussian.std[:, None] * noise
            if step == round(0.3 * steps):
                first = -gaussian.std[:, None] * noise * steps / (1 + level**2 / 2)
        reward = torch.exp(-(x - centre).square().sum(-1) / (2 * WIDTH**2))
        return ((reward - reward.mean())[:, None] * first).mean(0)

    assert float((transition(math.sqrt(2)) - finished).norm()) < 0.06  # four standard errors
    assert float((transition(0.7) - finished).norm()) > 0.12
