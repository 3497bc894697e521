"""The trainer: it learns, it is reproducible, it resumes to the same numbers, and it says what is
wrong.
"""

import json
from dataclasses import dataclass, replace

import pytest
import torch

from flowrl.core.errors import ConfigError, CreditError, RewardError, TrainingError
from flowrl.core.experience import Credit, Decisions, Experience
from flowrl.core.types import Prompt
from flowrl.credit import GDPO, SiblingRelative, Uniform, Weighted
from flowrl.flow import uniform_schedule
from flowrl.flow.mixture import GaussianMixture
from flowrl.losses import GSPO, ClippedLoss
from flowrl.methods import named_method
from flowrl.parts.prompt_stream import PromptStream
from flowrl.parts.registry import build
from flowrl.probes import Branch, NoProbe
from flowrl.rewards import FunctionReward, WeightedSum
from flowrl.rollout import minibatch_rows, transition_weights
from flowrl.rollout.batches import Rows
from flowrl.samplers import RandomWindow
from flowrl.training.build import (
    check,
    make_method,
    make_world,
    policy_options,
    trained_policy,
    trial_stds,
)
from flowrl.training.checkpoint import PER_PARAMETER, load_checkpoint
from flowrl.training.config import RunConfig, preset
from flowrl.training.evaluation import evaluate
from flowrl.training.run import Run
from flowrl.training.trainer import Trainer
from flowrl.worlds.base import world

TINY = preset("tiny").apply(world="mixture", task="direction", iterations=4, checkpoint_every=2)


def trainer(config=TINY, method=None, reward=None):
    chosen = make_world(config)
    policy = chosen.policy(policy_options(config))
    return Trainer(
        policy,
        method or make_method(config),
        reward or chosen.reward(config.environment.reward_form),
        chosen.prompts(config.environment.task, "train"),
        config,
    )


@pytest.mark.parametrize("name", ["flow-grpo", "stepwise-flow-grpo", "tp-grpo"])
def test_every_method_learns_the_two_dimensional_world(name):
    config = preset("default").apply(world="mixture", method=name, iterations=25)
    run = trainer(config)
    scores = []
    for _ in range(2):
        with run.averaged():
            scores.append(
                evaluate(run.policy, world("mixture"), "direction", "soft", 240, 20).scores["soft"]
            )
        for _ in range(25 * (len(scores) == 1)):
            run.iteration()
    assert scores[0] == pytest.approx(
        GaussianMixture.ring().expected_bump(torch.tensor([2.0, 0.0]), 1.0), abs=0.06
    )
    assert scores[1] > scores[0] + 0.15


def weights(run):
    return [p.detach().clone() for p in run.parameters]


def test_same_seed_same_weights_and_another_seed_others():
    runs = [trainer(TINY.replace(seed=seed)) for seed in (0, 0, 1)]
    rows = [[run.iteration()["reward_mean"] for _ in range(2)] for run in runs]
    assert rows[0] == rows[1] != rows[2]
    assert all(torch.equal(a, b) for a, b in zip(weights(runs[0]), weights(runs[1]), strict=True))


def test_the_micro_batch_does_not_change_the_update():
    big, small = trainer(TINY.replace(micro_batch=1000)), trainer(TINY.replace(micro_batch=3))
    shares = [run.iteration()["step_shares"] for run in (big, small)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-4) and sum(shares[0]) == pytest.approx(1)
    assert [share > 0 for share in shares[0]] == [std > 0 for std in trial_stds(TINY)]
    for a, b in zip(weights(big), weights(small), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)


def test_first_update_is_on_policy_and_updates_split_the_trajectories():
    row = trainer(TINY.replace(minibatches=1)).iteration()
    assert row["ratio_deviation"] < 1e-5
    assert row["train_nfe"] == 2 * 3 * 2  # prompts x members x stochastic steps
    assert trainer(TINY.replace(minibatches=3)).iteration()["train_nfe"] == 2 * 3 * 2


def test_kl_to_the_reference_is_zero_at_the_start_and_grows():
    run = trainer(TINY.replace(kl_weight=0.1, learning_rate=1e-2))
    kls = [run.iteration()["kl"] for _ in range(4)]
    assert kls[0] < kls[-1]


def test_equal_rewards_change_nothing_but_weight_decay():
    flat = FunctionReward(lambda images, prompts: torch.ones(len(images)))
    run = trainer(TINY.replace(weight_decay=0.0), reward=flat)
    before = weights(run)
    row = run.iteration()
    assert row["zero_spread_groups"] == 1.0 and row["grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))


def test_components_are_logged_and_credited_one_by_one():
    """A component of a thousand times the scale drowns the other under uniform credit of the sum,
    not under GDPO.
    """

    def along(direction):
        return FunctionReward(lambda images, prompts: images.flatten(1)[:, direction])

    both = WeightedSum({"small": along(0), "large": along(1)}, {"large": 1000.0})
    run = trainer(TINY, method=named_method("gdpo", credit="gdpo"), reward=both)
    seen = {}
    whole = run.method.credit.credit

    def watch(experience):
        seen.update(experience.parts)
        return whole(experience)

    object.__setattr__(run.method.credit, "credit", watch)
    row = run.iteration()
    assert set(seen) == set(row["parts"]) == {"small", "large"}
    assert row["reward_mean"] == pytest.approx(
        row["parts"]["small"] + 1000 * row["parts"]["large"], rel=1e-4
    )
    assert row["reward_calls"] == 2 * 3  # a composite reward is evaluated once
    values, decisions = seen["small"], Decisions.like(seen["small"])
    record = Experience(
        [Prompt("a"), Prompt("b")], values, decisions, torch.ones(2, 3).bool(), {"small": values}
    )
    small = GDPO(batch=False).credit(record).advantages
    torch.testing.assert_close(Uniform().assign(values, decisions), small)
    assert trainer(TINY, reward=both).iteration()["parts"].keys() == {"small", "large"}


def test_a_random_window_is_drawn_once_per_iteration():
    config = TINY.replace(window="random(size=2)")
    run = trainer(config)
    assert run.method.window == RandomWindow(2)
    steps = {tuple(run.draw_sampler().steps) for _ in range(40)}  # pyright: ignore[reportAttributeAccessIssue]
    assert steps == {(0, 1), (1, 2), (2, 3)}
    run.iteration()


class Stop:
    """Asks to pause after a number of iterations."""

    def __init__(self, after):
        self.calls, self.after = 0, after

    def __call__(self):
        self.calls += 1
        return self.calls == self.after


@pytest.mark.parametrize(
    ("name", "credit"),
    [
        ("flow-grpo", ""),
        ("tp-grpo", ""),
        ("average", "moving-average-gain"),
        ("tracker", "value-tracker"),
    ],
)
def test_a_paused_run_resumes_to_the_same_numbers(tmp_path, name, credit):
    config = TINY.replace(method=name, credit=credit, minibatches=2)
    assert Run(config, tmp_path / "whole").execute()
    assert not Run(config, tmp_path / "parts", stop=Stop(3)).execute()
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 4, "half')  # killed while writing
    assert Run(config, tmp_path / "parts").execute(resume=True)
    rows = [
        [json.loads(line) for line in (tmp_path / part / "metrics.jsonl").read_text().splitlines()]
        for part in ("whole", "parts")
    ]
    assert (
        [row["iteration"] for row in rows[0]]
        == [row["iteration"] for row in rows[1]]
        == [0, 1, 2, 3, 4]
    )
    for a, b in zip(*rows, strict=True):
        drop = {"seconds", "seconds_total", "phases", "evaluation"}
        assert {k: v for k, v in a.items() if k not in drop} == {
            k: v for k, v in b.items() if k not in drop
        }
        if a["evaluation"]:
            assert a["evaluation"]["reward"] == b["evaluation"]["reward"]
    first, second = (
        load_checkpoint(tmp_path / part / "checkpoints" / "000004.safetensors")
        for part in ("whole", "parts")
    )
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    trained_policy(tmp_path / "parts")


def test_shapes_world_trains_in_bfloat16_with_float32_transitions(tmp_path):
    config = preset("tiny").apply(iterations=1, dtype="bfloat16", task="text")
    Run(config, tmp_path).execute()
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["grad_norm"] > 0
    saved = load_checkpoint(tmp_path / "checkpoints" / "000001.safetensors").tensors
    assert saved["weight." + next(iter(trainer(config).names))].dtype == torch.float32


def two_iterations(run):
    rows = [run.iteration(), run.iteration()]
    for row in rows:
        row.pop("seconds"), row.pop("phases")
    return rows, [tensor.clone() for tensor in (*run.parameters, *run.average)]


DGPO_LOSS = "dgpo(beta_dpo=1.0, clip=none, decay=(0, 0.1, 0.3), sample_from=1, times=steps(count=2, steps=3))"
SAVED = {
    "flow-grpo": {"window": "random(size=2)", "kl_weight": 0.1},
    "diffusion-nft": {"method": "diffusion-nft"},
    "nft, late copy": {"loss": "diffusion-nft(decay=(1, 0.3, 0.6))"},
    "awm": {"method": "awm", "loss": "awm(decay=(0, 0.1, 0.3), times=stratified(count=2))"},
    "dgpo": {"loss": DGPO_LOSS},
    "moving average": {"credit": "moving-average-gain", "method": "gain"},
    "value tracker": {"credit": "value-tracker", "method": "tracker"},
    "float16": {"world": "shapes", "task": "text", "dtype": "float16"},
}


@pytest.mark.parametrize("name", SAVED)
def test_a_state_is_a_snapshot_of_all_that_the_next_iterations_need(name):
    """This trainer and a fresh one repeat two iterations to the bit; the state stays as taken."""
    config = TINY.replace(iterations=20, **SAVED[name])
    run = trainer(config)
    run.iteration()
    state = run.state()
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    values = json.dumps(state.values)
    rows, tensors_after = two_iterations(run)
    assert rows[0]["grad_norm"] > 0
    for other in (run, trainer(config)):
        assert all(torch.equal(state.tensors[name], tensor) for name, tensor in tensors.items())
        assert json.dumps(state.values) == values
        other.restore(state)
        again, tensors_again = two_iterations(other)
        assert again == rows and all(map(torch.equal, tensors_again, tensors_after))
    if run.copies.by_name:
        with pytest.raises(ConfigError, match="another run, loss or model"):
            run.restore(trainer().state())


def test_only_a_state_to_keep_is_copied():
    """On the CPU a checkpoint that is written at once holds the memory of the trainer."""
    run = trainer(TINY.replace(method="diffusion-nft"))
    run.iteration()
    moments = [value for values in run.optimizer.state.values() for value in values.values()]
    live = (*run.parameters, *run.average, *run.copies.by_name["old"].values, *moments)
    places = {tensor.data_ptr() for tensor in live}
    for copied in (True, False):
        large = {n: t for n, t in run.state(copied).tensors.items() if n.startswith(PER_PARAMETER)}
        assert len(large) == len(places)
        assert {t.data_ptr() in places for t in large.values()} == {not copied}


def test_failures_name_the_cause_and_leave_the_weights_alone():
    with pytest.raises(RewardError, match="not finite"):
        trainer(
            reward=FunctionReward(lambda images, prompts: torch.full((len(images),), float("inf")))
        ).iteration()

    @dataclass(frozen=True)
    class Broken:
        needs_reference: bool = False
        trains_zero_advantages: bool = False
        unit: str = "transition"

        def loss(self, batch):
            result = ClippedLoss().loss(batch)
            return replace(result, loss=result.loss * float("nan"))

    run = trainer(method=replace(make_method(TINY), loss=Broken()))
    before = weights(run)
    with pytest.raises(TrainingError, match=r"iteration 1: the loss is nan.*towards"):
        run.iteration()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 1}, "group_size = 1 is not allowed; allowed: a whole number, 2 or more"),
        ({"num_steps": -1}, "num_steps = -1"),
        ({"iterations": 0}, "iterations"),
        ({"sampler": "ode"}, "log-probabilities"),
        ({"noise_level": -1.0}, "noise_level"),
        ({"sampler": "euler"}, "flow-sde"),
        ({"world": "mars"}, "mixture, shapes"),
        ({"task": "poetry"}, "compositional, text, preference"),
        ({"reward_form": "fuzzy"}, "strict, graded, soft"),
        ({"window": "8:17"}, "within the schedule's 10 steps"),
        ({"window": "some"}, "unknown window 'some'; allowed: fixed, random, sliding"),
        ({"dtype": "int8"}, "float32"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"ema_decay": 1.0}, "ema"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(changes, words):
    with pytest.raises(ConfigError, match=words):
        check(RunConfig.of(**changes))


def test_prompts_come_in_shuffled_passes():
    stream = PromptStream([Prompt(str(i)) for i in range(5)], seed=0)
    taken = [p.text for p in stream.take(7)] + [p.text for p in stream.take(3)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == list("01234")
    with pytest.raises(ConfigError, match="empty"):
        PromptStream([], seed=0)


def test_upcoming_prompts_are_those_that_come():
    stream = PromptStream([Prompt(str(i % 4)) for i in range(6)], seed=3)
    stream.take(2)
    ahead = [p.text for p in stream.upcoming(9)]
    assert ahead == list(dict.fromkeys(p.text for p in stream.take(9)))


def test_no_network_call_of_a_run_is_larger_than_it_may_be(tmp_path, monkeypatch):
    """Evaluations and the trajectory shown at the end included."""
    from flowrl.policies.mixture import MixturePolicy

    sizes, plain = [], MixturePolicy.velocity
    monkeypatch.setattr(
        MixturePolicy,
        "velocity",
        lambda self, x, *more: sizes.append(len(x)) or plain(self, x, *more),
    )
    assert Run(TINY.replace(max_batch=5, micro_batch=4, iterations=1), tmp_path).execute()
    assert max(sizes) == 5


class HalfOfTheGroups:
    """Advantages of uniform credit in every second group, and at every second decision; 0
    elsewhere.
    """

    probe = NoProbe()

    def assign(self, values, decisions):
        found = Uniform().assign(values, decisions).clone()
        found[::2] = 0
        found[..., 1::2] = 0
        return found


def zero_rows_run(monkeypatch, evaluated, credit, **changes):
    """Metrics of two iterations and the weights after them; `evaluated`: rows of advantage 0 are,
    as well.
    """
    config = TINY.replace(
        **{
            "groups": 4,
            "group_size": 4,
            "minibatches": 2,
            "micro_batch": 7,
            "learning_rate": 1e-3,
            **changes,
        }
    )
    with monkeypatch.context() as patch:
        if evaluated:
            patch.setattr(Rows, "without_zeros", lambda rows, advantages: rows)
        run = trainer(config, replace(make_method(config), credit=credit))
        rows = [run.iteration() for _ in range(2)]
    return rows, torch.cat([parameter.detach().flatten() for parameter in run.parameters])


@pytest.mark.parametrize("loss", ["clipped", "grpo-guard", "flow-dppo", "policy-gradient"])
@pytest.mark.parametrize("credit", [HalfOfTheGroups(), SiblingRelative(probe=Branch((2, 2)))])
def test_rows_of_advantage_0_are_not_evaluated_and_nothing_changes(loss, credit, monkeypatch):
    """The gradient is the same up to the order of its sums, its mean is over all rows, and the
    metrics are over the others.
    """
    (every, expected), (few, found) = (
        zero_rows_run(monkeypatch, evaluated, credit, loss=loss, window=":-1")
        for evaluated in (True, False)
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert all(
        one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        for one, other in zip(every, few, strict=True)
    )
    assert [row["zero_rows"] for row in every] == [0, 0] and all(
        row["zero_rows"] > 0 for row in few
    )
    assert few[0]["ratio_mean"] == pytest.approx(1.0, abs=0.01)
    if isinstance(credit, HalfOfTheGroups):
        saved = [
            one["train_nfe"] - other["train_nfe"] for one, other in zip(every, few, strict=True)
        ]
        assert saved == [row["zero_rows"] for row in few]
    for row, other in zip(every, few, strict=True):
        assert other["step_shares"] == pytest.approx(row["step_shares"], abs=1e-5)


def test_rows_of_advantage_0_are_evaluated_for_the_penalty(monkeypatch):
    (every, expected), (few, found) = (
        zero_rows_run(monkeypatch, evaluated, HalfOfTheGroups(), kl_weight=0.1)
        for evaluated in (True, False)
    )
    assert torch.equal(found, expected) and [row["zero_rows"] for row in few] == [0, 0]
    assert [row["train_nfe"] for row in few] == [row["train_nfe"] for row in every]


def test_without_any_advantage_the_optimizer_steps_as_before(monkeypatch):
    """Weight decay and momentum go on."""

    class Nothing(HalfOfTheGroups):
        def assign(self, values, decisions):
            return torch.zeros_like(super().assign(values, decisions))

    (_, expected), (few, found) = (
        zero_rows_run(monkeypatch, evaluated, Nothing(), weight_decay=0.1)
        for evaluated in (True, False)
    )
    assert torch.equal(found, expected) and [row["train_nfe"] for row in few] == [2, 2]


# --- losses of whole trajectories
# ------------------------------------------------------------------------------------

SEQUENCES = TINY.replace(
    groups=4,
    group_size=4,
    num_steps=6,
    window="0:5",
    minibatches=2,
    learning_rate=0.05,
    loss="gspo",
    clip_range=0.003,
)


@dataclass(frozen=True)
class ByStep:
    """GSPO that accepts an advantage per step; without `row_terms` unless given."""

    inner: GSPO = GSPO(clip_range=0.003)
    needs_reference: bool = False
    trains_zero_advantages: bool = False
    unit: str = "trajectory"

    def loss(self, batch):
        return self.inner.loss(batch)


class PooledByStep(ByStep):
    def row_terms(self, batch):
        return self.inner.row_terms(batch)


def sequences_run(method=None, **changes):
    run = trainer(SEQUENCES.replace(**changes), method)
    rows = [run.iteration() for _ in range(3)]
    return rows, torch.cat([parameter.detach().flatten() for parameter in run.parameters])


@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_trajectories_may_be_spread_over_micro_batches_and_chunks(kl_weight):
    """Micro-batches of fewer than 5 transitions take a second pass for the means of trajectories,
    and train the same.
    """
    expected_rows, expected = sequences_run(micro_batch=1000, kl_weight=kl_weight)
    assert sum(row["clip_fraction"] for row in expected_rows) > 0.05
    cases = (
        dict(micro_batch=1),
        dict(micro_batch=3),
        dict(micro_batch=7),
        dict(micro_batch=3, chunk=1, offload=True),
    )
    for changes in cases:
        rows, found = sequences_run(kl_weight=kl_weight, **changes)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        for row, other in zip(rows, expected_rows, strict=True):
            assert row["clip_fraction"] == pytest.approx(other["clip_fraction"], abs=1e-6)
            assert row["train_nfe"] == other["train_nfe"] * (2 if changes["micro_batch"] < 5 else 1)
    _, other_loss = sequences_run(micro_batch=1000, kl_weight=kl_weight, loss="clipped")
    assert float((other_loss - expected).abs().max()) > 1e-3


def test_a_loss_of_one_advantage_refuses_credit_by_step_when_it_is_built_and_in_the_iteration():
    with pytest.raises(
        CreditError,
        match="GSPO needs one advantage per trajectory, but those of TurningPoint differ by up to",
    ):
        make_method(SEQUENCES.replace(method="tp-grpo"))
    method = make_method(SEQUENCES)
    with pytest.raises(
        CreditError, match="GSPO needs one advantage per trajectory, but those of Weighted differ"
    ):
        trainer(SEQUENCES, replace(method, credit=Weighted("noise"))).iteration()
    # a single step
    make_method(SEQUENCES.replace(method="tp-grpo", trained_steps="random(fraction=0.2)"))
    with pytest.raises(CreditError, match="of HalfOfTheGroups differ"):
        trainer(SEQUENCES, replace(method, credit=HalfOfTheGroups())).iteration()


def test_trajectories_of_advantage_0_are_left_out_as_a_whole(monkeypatch):
    """With zeros at some steps of a trajectory, the others have a gradient that depends on the
    whole trajectory.
    """
    method = replace(
        make_method(SEQUENCES.replace(loss="clipped")),
        credit=HalfOfTheGroups(),
        loss=PooledByStep(),
    )
    for micro_batch in (1000, 3):
        rows, found = sequences_run(method, micro_batch=micro_batch)
        assert [row["zero_rows"] for row in rows] == [2 * 4 * 5] * 3
        with monkeypatch.context() as patch:
            patch.setattr(Rows, "without_zeros", lambda rows, advantages: rows)
            rows, expected = sequences_run(method, micro_batch=micro_batch)
        assert [row["zero_rows"] for row in rows] == [0] * 3
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("unit", ["trajectory", "group"])
@pytest.mark.parametrize("weight", ["leaf", "edge"])
def test_units_of_trees_stay_whole(unit, weight):
    tree = Branch((2, 1, 2), weight=weight).tree(6, [0, 1, 2, 3, 4], 4, False, torch.Generator())
    stds = torch.tensor([0.5] * 5 + [0.0])
    decisions = Decisions.of(uniform_schedule(6), stds, tree, torch.ones(2, 4, dtype=torch.bool))
    weights = transition_weights(Credit(torch.ones(decisions.mask.shape)), decisions).flatten(0, 1)
    found = minibatch_rows(torch.arange(8).chunk(2), weights, tree, unit)
    for k, one in enumerate(found):
        key = one.sample if unit == "trajectory" else one.sample // 4 * 10 + one.column
        rest = (
            found[1 - k].sample
            if unit == "trajectory"
            else found[1 - k].sample // 4 * 10 + found[1 - k].column
        )
        assert (
            len(key.unique()) == len(key.unique_consecutive()) and not torch.isin(key, rest).any()
        )
        assert all(len(piece) <= 6 for piece in one.pieces(6))
    assert sum(map(len, found)) == 8 * 5
    edges = 2 * (2 + 2 + 4 + 4 + 4)
    assert sum(one.total for one in found) == pytest.approx(edges if weight == "edge" else 8 * 5)


def test_the_trust_region_of_the_penalty_acts_at_advantage_0():
    loss, credit = build("loss", "kl-penalty"), HalfOfTheGroups()
    rows, weights = sequences_run(replace(make_method(SEQUENCES), loss=loss, credit=credit))
    assert [row["zero_rows"] for row in rows] == [0] * 3
    assert bool(weights.isfinite().all()) and rows[-1]["approx_kl"] > 0
