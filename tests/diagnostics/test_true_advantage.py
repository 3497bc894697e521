"""The microscope: true advantages against exact ones, and what it says of rules whose credit is known.

z-scores are held to |z| < 5 (a correct estimator fails one of 400 with probability 2e-4); seeds are fixed.
"""

import dataclasses
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from flowrl_bench.inspection import EQUAL_NFE, MicroscopeConfig, inspect, jobs, settings_of
from flowrl_bench.microscope_page import microscope_document

from flowrl.credit import StepwiseGain
from flowrl.diagnostics.gradient import Setting, alignment, policy_gradients
from flowrl.diagnostics.true_advantage import LEAST_RELIABILITY, Look, TrueAdvantages, compare_credit, true_advantages
from flowrl.errors import ConfigError, CreditError
from flowrl.flow.mixture import GaussianMixture
from flowrl.flow import uniform_schedule
from flowrl.policies.mixture import MixturePolicy
from flowrl.registry import build
from flowrl.rewards.combine import NoisyReward, pseudo_normal
from flowrl.rollout import attach_stds
from flowrl.samplers import AllButLast, FlowSDE, Window
from flowrl.training.build import make_method
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer
from flowrl.types import Continuation, Prompt
from flowrl.worlds.mixture import WIDTH, DirectionReward, angle_of, target

PROMPTS = [Prompt(f"towards {angle} degrees") for angle in (0, 100, 200)]


def gaussian_setting(sampler=None, steps: int = 6) -> Setting:
    """One mode: the velocity is affine in x, so that the finished point given any node is exactly Gaussian."""
    one = GaussianMixture(torch.tensor([[1.2, 0.4]]), 0.6, torch.ones(1))
    policy = MixturePolicy(one, angle_of)
    return Setting(policy, sampler or AllButLast(FlowSDE(0.7)), uniform_schedule(steps), DirectionReward("soft"), PROMPTS)


def exact_values(setting: Setting, nodes: torch.Tensor, members: int) -> torch.Tensor:
    """V [sample, node] in closed form: x_T | x_j ~ N(a x_j + b, s^2 I), and E exp(-|x_T - y|^2 / (2 w^2)) of a Gaussian."""
    schedule = attach_stds(setting.schedule, setting.sampler)
    condition = setting.policy.encode(PROMPTS[:1]).repeat(2)
    corners = torch.stack([torch.zeros(2, 1, 1), torch.ones(2, 1, 1)])
    goals = torch.tensor([target(prompt) for prompt in PROMPTS for _ in range(members)])
    slope, offset, variance = 1.0, torch.zeros(2), 0.0
    columns = []
    for node in reversed(range(schedule.steps + 1)):
        if node < schedule.steps:
            velocity = setting.policy.velocity(corners, schedule.network_timesteps[node].expand(2), condition)
            step = setting.sampler.transition(corners, velocity, schedule, torch.full((2,), node))
            mean = step.mean.flatten(1).detach()
            own = float((mean[1] - mean[0])[0])
            offset = slope * mean[0] + offset
            variance += slope**2 * float(step.std[0]) ** 2
            slope *= own
        gap = (slope * nodes[:, node].flatten(1) + offset - goals).square().sum(1)
        total = WIDTH**2 + variance
        columns.append(WIDTH**2 / total * torch.exp(-gap / (2 * total)))
    return torch.stack(columns[::-1], 1)


@pytest.mark.parametrize("sampler", [AllButLast(FlowSDE(0.7)), Window(FlowSDE(1.0), 1, 3)], ids=["all but last", "window"])
def test_true_advantages_are_the_exact_ones_of_a_gaussian(sampler) -> None:
    setting, members = gaussian_setting(sampler), 12
    result = Look(setting, members, seed=3).trajectories(shared_noise=False)
    found = true_advantages(setting, result, continuations=400, seed=5)
    values = exact_values(setting, result.trajectories.nodes, members).view(3, members, -1)
    exact = values.diff(dim=-1)
    steps = list(found.steps)
    quiet = [i for i in range(6) if i not in steps]
    assert float(exact[..., quiet].abs().max()) < 1e-5  # nothing is decided there
    assert bool((found.values[..., quiet] == 0).all()) and bool((found.errors[..., quiet] == 0).all())
    z = (found.values - exact)[..., steps] / found.errors[..., steps]
    assert float(z.abs().max()) < 5
    assert float(z.square().mean()) == pytest.approx(1.0, abs=0.35)  # the stated errors are the real ones
    last = steps[-1]
    torch.testing.assert_close(found.state_values[..., last + 1], values[..., last + 1], atol=1e-5, rtol=1e-4)
    assert bool((found.state_errors[..., last + 1] == 0).all())


def test_the_mean_of_an_advantage_given_its_node_is_0() -> None:
    """From one shared node the first step's advantages average to 0 over members."""
    setting = gaussian_setting()
    result = Look(setting, 400, seed=1).trajectories(shared_noise=True)
    exact = exact_values(setting, result.trajectories.nodes, 400).view(3, 400, -1).diff(dim=-1)[..., 0]
    error = exact.std(1) / math.sqrt(400)
    assert float((exact.mean(1) / error).abs().max()) < 4


def test_gains_of_the_continuation_probe_are_true_advantages() -> None:
    """The probe by which a rule can ask for V itself, against the closed form."""
    setting, members = gaussian_setting(), 12
    look = Look(setting, members, seed=3)
    plain = look.trajectories(shared_noise=False)
    probed = look.trajectories(False, Continuation(200))
    torch.testing.assert_close(probed.trajectories.nodes, plain.trajectories.nodes)
    exact = exact_values(setting, plain.trajectories.nodes, members).view(3, members, -1).diff(dim=-1)

    class Values:
        probe = Continuation(200)

        def assign(self, rewards, schedule):
            return rewards.diff(dim=-1)

    credit = look.credit(Values(), False)
    steps = attach_stds(setting.schedule, setting.sampler).stochastic
    assert float((credit.advantages - exact)[..., steps].std()) < 0.035
    assert float(torch.corrcoef(torch.stack([credit.advantages[..., steps].flatten(), exact[..., steps].flatten()]))[0, 1]) > 0.9
    assert credit.nfe_per_trajectory == 6 + 200 * (6 + 5 + 4 + 3 + 2)
    with pytest.raises(ConfigError):
        Continuation(0)


@pytest.fixture(scope="module")
def known() -> tuple[torch.Tensor, TrueAdvantages]:
    """Exact advantages of many groups, and a noisy estimate of them with known errors."""
    generator = torch.Generator().manual_seed(0)
    exact = 0.3 * torch.randn(60, 10, 4, generator=generator)
    errors = torch.full_like(exact, 0.2)
    found = exact + 0.2 * torch.randn(exact.shape, generator=generator)
    state = torch.zeros(60, 10, 5)
    return exact, TrueAdvantages(found, errors, state, state, (0, 1, 2, 3))


def test_the_noise_of_the_truth_is_taken_out(known) -> None:
    exact, truth = known
    report = compare_credit(exact * 7, truth).overall
    assert report.raw_correlation == pytest.approx(0.3 / math.hypot(0.3, 0.2), abs=0.02)
    assert report.correlation.value == pytest.approx(1.0, abs=0.03)
    assert report.correlation.high - report.correlation.low < 0.04
    drowned = dataclasses.replace(truth, errors=torch.full_like(truth.errors, 9.0))
    faint = exact + 3.0 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(2))
    found = compare_credit(faint, drowned).overall
    assert 0.03 < found.raw_correlation < 0.2 and found.reliability == LEAST_RELIABILITY
    assert found.correlation.value == pytest.approx(found.raw_correlation / math.sqrt(LEAST_RELIABILITY))  # and no further
    assert report.reliability == pytest.approx(truth.reliability, abs=1e-3)
    assert report.sign.value > 0.95 and 0.2 < report.resolved < 0.5
    assert report.bias.value < 0.05


def test_useless_and_opposite_credit_are_seen(known) -> None:
    exact, truth = known
    noise = compare_credit(torch.randn(exact.shape, generator=torch.Generator().manual_seed(9)), truth).overall
    assert noise.correlation.low < 0 < noise.correlation.high and noise.sign.low < 0.5 < noise.sign.high
    against = compare_credit(-exact, truth).overall
    assert against.correlation.high < -0.9 and against.sign.high < 0.05
    nothing = compare_credit(torch.zeros_like(exact), truth).overall
    assert nothing.correlation.value == 0 and nothing.sign.value == 0.5


def test_what_a_step_is_paid_whatever_happens_is_the_bias(known) -> None:
    exact, truth = known
    pay = torch.tensor([0.6, 0.0, 0.0, 0.0])
    report = compare_credit(exact + pay, truth)
    expected = math.sqrt(0.6**2 / 4) / math.sqrt(0.3**2 + float(pay.var(unbiased=False)))
    assert report.overall.bias.value == pytest.approx(expected, abs=0.04)
    assert report.per_step[0].bias.value == pytest.approx(2.0, abs=0.15)
    assert report.per_step[1].bias.value < 0.1
    assert report.per_step[0].correlation.value > 0.95  # a constant does not hurt within a step
    assert report.overall.correlation.value < 0.85


def test_intervals_cover(known) -> None:
    """Of 40 independent data sets about 95% of the intervals hold the true correlation 0.8; 32 or fewer has probability 1e-3."""
    covered = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        exact = torch.randn(30, 8, 3, generator=generator)
        credit = 0.8 * exact + 0.6 * torch.randn(exact.shape, generator=generator)
        found = exact + 0.5 * torch.randn(exact.shape, generator=generator)
        state = torch.zeros(30, 8, 4)
        truth = TrueAdvantages(found, torch.full_like(exact, 0.5), state, state, (0, 1, 2))
        report = compare_credit(credit, truth, draws=400, seed=seed).overall
        covered += report.correlation.low <= 0.8 <= report.correlation.high
    assert covered >= 33


def test_a_noisy_reward_is_a_function_of_the_picture() -> None:
    images = torch.rand(5000, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    noise = pseudo_normal(images, 1)
    assert abs(float(noise.mean())) < 5 / math.sqrt(5000) and float(noise.std()) == pytest.approx(1.0, abs=0.05)
    assert float((noise**4).mean()) == pytest.approx(3.0, abs=0.5)
    torch.testing.assert_close(pseudo_normal(images.flip(0), 1).flip(0), noise)
    nearby = pseudo_normal(images + 1e-3, 1)
    assert abs(float(torch.corrcoef(torch.stack([noise, nearby]))[0, 1])) < 0.08
    assert not torch.equal(pseudo_normal(images, 2), noise)


def test_a_noisy_reward_adds_what_it_says() -> None:
    points = torch.randn(200, 2, 1, 1, generator=torch.Generator().manual_seed(0))
    prompts = [PROMPTS[0]] * 200
    clean = DirectionReward().score(points, prompts)
    torch.testing.assert_close(NoisyReward(DirectionReward()).score(points, prompts), clean)
    noisy = NoisyReward(DirectionReward(), std=0.2, bias=0.5).score(points, prompts)
    rest = noisy - clean - 0.5 * points.flatten(1).mean(1)
    assert float(rest.std()) == pytest.approx(0.2, abs=0.04)
    for bad in (-0.1, math.inf):
        with pytest.raises(ConfigError):
            NoisyReward(DirectionReward(), std=bad)


def test_stepwise_credit_is_closer_to_the_truth_than_its_opposite() -> None:
    setting = gaussian_setting()
    look = Look(setting, 12)
    truth = true_advantages(setting, look.trajectories(True), 200)
    credit = look.credit(StepwiseGain(), True)
    assert compare_credit(credit.advantages, truth).overall.correlation.low > 0.6
    with pytest.raises(ConfigError, match="continuations"):
        true_advantages(setting, look.trajectories(True), 1)


SMALL_LOOK = MicroscopeConfig(
    run=preset("default").apply(world="mixture", groups=3, group_size=3, num_steps=4, window="all-but-last"),
    rules={"gains": "stepwise-gain", "values": "stepwise-gain(probe='continuation:2')", "random": "random"},
    iterations=(0, 1),
    noises=(0.0, 0.5),
    noise_at=1,
    members=3,
    continuations=4,
    batches=3,
    gradient_members=2,
    truth_batches=3,
)


MADE = {
    "command": "flowrl bench microscope --looks 1", "seconds": 1.0, "cpu_seconds": 2.0, "seed": 0, "commit": "0123abc",
    "versions": {"torch": "9.9"}, "hardware": "one core of 2", "code": "0f",
}  # fmt: skip


def test_a_session_covers_rules_stages_and_noise(tmp_path) -> None:
    seen = []
    rows = inspect(SMALL_LOOK, 1, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(list(jobs(SMALL_LOOK))),) * 2
    credit = {(r["rule"], r["iteration"], r["noise"]) for r in rows if r["kind"] == "credit"}
    assert credit == {(rule, *at) for rule in SMALL_LOOK.rules for at in ((0, 0.0), (1, 0.0), (1, 0.5))}
    gradient = {(r["rule"], r["iteration"], r["noise"]) for r in rows if r["kind"] == "gradient"}
    assert gradient == {key for key in credit if key[0] != "values"}
    assert all(len(r["per_step"]) == 3 and r["steps"] == [0, 1, 2] for r in rows if r["kind"] == "credit")
    page = microscope_document(rows, 1, MADE).write(tmp_path, "microscope", "microscope")[0].read_text()
    for name in ("credit", "steps", "gradient", "training", "noise"):
        assert (tmp_path / "microscope" / f"{name}.png").stat().st_size > 10_000
        assert f"](microscope/{name}.png)" in page
    assert page.count("| gains |") == 6
    assert "flowrl bench microscope --looks 1" in page and "0123abc" in page and "torch 9.9" in page


def test_noise_reaches_the_rule_and_not_the_truth() -> None:
    """A session's rows with noise are those of credit from noisy rewards against the truth from clean ones."""
    config = replace(SMALL_LOOK, rules={"gains": "stepwise-gain"}, run=SMALL_LOOK.run.replace(reward_form="strict"))
    setting = settings_of(config)[1]
    look = Look(setting, config.rollout.group_size, config.seed)
    truth = true_advantages(setting, look.trajectories(True), config.continuations, config.seeds()["continuations"][0])
    for row in inspect(config, 1):
        if row["iteration"] == 1:
            credit = look.credit(StepwiseGain(), True, NoisyReward(setting.reward, row["noise"]))
            expected = compare_credit(credit.advantages, truth, seed=config.seed).overall
            assert {name: row[name] for name in dataclasses.asdict(expected)} == dataclasses.asdict(expected)


def test_the_number_of_workers_changes_no_number(tmp_path) -> None:
    """Two processes of one thread against this one, which has more threads; one of the rules draws from the global generators."""
    config = replace(SMALL_LOOK, rules={"gains": "stepwise-gain", "dice": f"{written(tmp_path, DICE)}:Dice"}, noises=(0.0,))
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []
        alone = inspect(config, 1, lambda *_: seen.append(torch.get_num_threads()))
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002 (what was drawn before is of no account)
    assert inspect(config, 2) == alone
    assert len({row["correlation"]["value"] for row in alone if row["kind"] == "credit"}) == 4  # other dice at every stage


def test_evaluations_are_counted_as_the_trainer_counts_them() -> None:
    rules = {"uniform": "uniform", "gains": "stepwise-gain(lam=1, probe=completion)"}
    config = replace(SMALL_LOOK, rules=rules, iterations=(0,), noise_at=0, noises=(0.0,))
    setting = settings_of(config)[0]
    run = config.run.replace(method="flow-grpo", group_size=config.gradient_members, groups=len(setting.prompts))
    trained = Trainer(setting.policy, make_method(run), setting.reward, setting.prompts, run).iteration()
    rows = {row["rule"]: row for row in inspect(config, 1) if row["kind"] == "gradient"}
    row = rows["uniform"]
    assert (row["nfe_per_batch"], row["train_nfe_per_batch"]) == (trained["nfe"], trained["train_nfe"])
    assert rows["gains"]["train_nfe_per_batch"] == trained["train_nfe"] < rows["gains"]["nfe_per_batch"]
    assert rows["gains"]["signal_to_noise"] > 0.2
    for row in rows.values():
        batches = EQUAL_NFE / (row["nfe_per_batch"] + row["train_nfe_per_batch"])
        assert row["signal_to_noise_at_equal_nfe"] == pytest.approx(row["signal_to_noise"] * math.sqrt(batches))


BROKEN = """
import torch
from flowrl.types import NoProbe

class Mine:
    probe = NoProbe()
    def assign(self, rewards, schedule):
        steps = rewards.shape[-1] - 1
        found = (rewards[..., -1:] - rewards[..., -1:].mean(1, keepdim=True)).repeat(1, 1, steps)
        BREAK
        return found
"""
DICE = """
import random
import numpy as np
import torch
from flowrl.types import NoProbe

class Dice:
    probe = NoProbe()
    def assign(self, rewards, schedule):
        return torch.rand(rewards[..., 1:].shape) + random.random() + np.random.rand()
"""


def written(folder, code: str):
    path = folder / "my_rules.py"
    path.write_text(code)
    return path


BREAKS = {
    "found = rewards": "not \\[prompt, member, step\\]",
    "found = found * float('nan')": "not finite",
    "found[0, 99]": "failed on a table of .*IndexError",
    "found = None": "NoneType",
}


@pytest.mark.parametrize(("how", "message"), BREAKS.items())
def test_a_broken_rule_is_refused_before_the_session(tmp_path, how: str, message: str) -> None:
    spec = f"{written(tmp_path, BROKEN.replace('BREAK', how))}:Mine"
    with pytest.raises(CreditError, match=f"rule 'x': Mine.assign.*{message}"):
        replace(SMALL_LOOK, rules={"x": spec})


@pytest.mark.parametrize(("how", "message"), BREAKS.items())
def test_a_rule_that_breaks_on_real_rewards_only_is_refused(tmp_path, how: str, message: str) -> None:
    """The rule is fine on the random table (two prompts) and breaks on the session's 18."""
    spec = f"{written(tmp_path, BROKEN.replace('BREAK', f'if len(rewards) > 2: {how}'))}:Mine"
    config = replace(SMALL_LOOK, rules={"x": spec}, iterations=(0,), noise_at=0, noises=(0.0,))
    with pytest.raises(CreditError, match=f"Mine.assign.*{message}"):
        inspect(config, 1)
    setting = gaussian_setting()
    with pytest.raises(CreditError, match=f"Mine.assign.*{message}"):
        policy_gradients(setting, build("credit", spec), 1, 2)


def test_a_comparison_refuses_what_is_no_credit(known) -> None:
    exact, truth = known
    for bad in (torch.cat([exact, exact[..., :1]], -1), exact[:1], exact[..., 0], exact.log()):
        with pytest.raises(ConfigError, match="credit"):
            compare_credit(bad, truth)


def test_an_alignment_needs_three_batches_and_bears_silence() -> None:
    truths = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) + 5
    with pytest.raises(ConfigError, match="batches = 2"):
        alignment(truths[:2], truths)
    with pytest.raises(ConfigError, match="truth = 1"):
        alignment(truths, truths[:1])
    found = alignment(truths[:3], truths)
    assert all(map(math.isfinite, (*found.cosine_interval, *found.scale_interval)))
    assert alignment(torch.zeros(3, 6), truths).signal_to_noise == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": {"x": "nothing"}}, "unknown credit rule"),
        ({"noise_at": 7}, "noise_at"),
        ({"noises": (0.5,)}, "noises"),
        ({"iterations": ()}, "noise_at|iterations"),
        ({"continuations": 1}, "continuations"),
        ({"batches": 2}, "batches = 2 is not allowed: 3 or more"),
        ({"noises": (0.0, -0.1)}, "noises.*0 or more"),
        ({"noises": (0.0, math.nan)}, "noises.*finite"),
        ({"noises": (0.0, 0.5, 0.5)}, "noises.*each once"),
        ({"iterations": (1, 1)}, "iterations.*each once"),
        ({"run": preset("default").apply()}, "mixture"),
    ],
)
def test_a_session_says_what_is_wrong(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL_LOOK, **changes)
    with pytest.raises(ConfigError, match="workers = -1 is not allowed"):
        inspect(SMALL_LOOK, -1)


def test_a_reward_in_steps_has_credit_but_no_gradient(tmp_path) -> None:
    config = replace(SMALL_LOOK, run=SMALL_LOOK.run.replace(reward_form="strict"))
    assert {kind for kind, *_ in jobs(config)} == {"credit"}
    rows = inspect(config, 1)
    microscope_document(rows, 1, MADE).write(tmp_path, "microscope", "microscope")
    assert not (tmp_path / "microscope" / "gradient.png").exists()
    assert (tmp_path / "microscope" / "noise.png").exists()
