"""Every warning fires where it should and is silent where it should be; a loss that is not finite
says where it broke.
"""

import json
import math
import pickle
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

from flowrl.cli.main import main
from flowrl.cli.progress import warning_text
from flowrl.core.errors import TrainingError
from flowrl.core.experience import Credit
from flowrl.core.types import Gaussian, LossBatch, Prompt
from flowrl.losses import ClippedLoss
from flowrl.rewards import FunctionReward
from flowrl.rollout.batches import MicroBatch
from flowrl.samplers import FixedWindow, FlowSDE
from flowrl.testing.tiny import TINY as TINY_MODEL
from flowrl.testing.tiny import tiny_sd3_policy
from flowrl.training import build
from flowrl.training.build import make_method, make_reward, make_world, policy_options, trial_stds
from flowrl.training.config import preset
from flowrl.training.memory import Peak, largest_batch, memory, memory_notices, predicted_bytes
from flowrl.training.monitors import (
    EVERY,
    KINDS,
    Limits,
    collapse,
    kl_runaway,
    limits_of,
    notices,
    ratio_noise,
    step_share,
    zero_spread,
)
from flowrl.training.nonfinite import NonFiniteCheck, NonFiniteError, culprit
from flowrl.training.run import Run
from flowrl.training.trainer import Trainer

TINY = preset("tiny").apply(world="mixture", iterations=4)


def rows(count=1, **columns):
    """Metrics rows 1, 2, ...; a column is a list, or a number for all of them."""
    count = max([count, *(len(values) for values in columns.values() if isinstance(values, list))])
    made = []
    for i in range(count):
        row = {
            "iteration": i + 1,
            "reward_mean": 0.5,
            "reward_std": 0.2,
            "zero_spread_groups": 0.0,
            "approx_kl": 1e-3,
        }
        made.append(
            row
            | {
                name: values[i] if isinstance(values, list) else values
                for name, values in columns.items()
            }
        )
    return made


# --- warnings
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fires"),
    [
        ([0.6, 0.7, 0.8], True),
        ([0.0, 1.0, 1.0], True),
        ([1.0, 1.0], False),
        ([0.5, 0.5, 0.5], False),
        ([1.0, 0.1, 0.1], False),
    ],
)
def test_groups_of_equal_rewards(values, fires):
    found = zero_spread(rows(zero_spread_groups=values), Limits())
    assert (found is not None) == fires
    assert found is None or ("reward_form soft" in found.text and "%" in found.text)


def test_a_rule_that_remembers_prompts_is_warned_only_if_all_groups_are_equal():
    found = {
        credit: limits_of(trainer(TINY.replace(credit=credit))).zero_spread
        for credit in ("uniform", "value-tracker")
    }
    assert found == {"uniform": 0.5, "value-tracker": 1.0}


@pytest.mark.parametrize(
    ("noise", "clip", "fires"),
    [
        (2e-4, 1e-4, True),
        (2.1e-5, 1e-5, True),
        (9e-5, 1e-4, False),
        (1.0, None, False),
        (None, 1e-4, False),
        (0.0, 1e-5, False),
    ],
)
def test_the_ratio_off_one_before_any_update(noise, clip, fires):
    made = rows(1) if noise is None else rows(ratio_noise=[noise])
    found = ratio_noise(made, Limits(clip=clip))
    assert (found is not None) == fires
    if noise == 2.1e-5:
        assert (
            "off by up to 2.1e-05, more than the clip of 1.0e-05" in found.text
            and "clip_range 7e-05 or more" in found.text
        )


@pytest.mark.parametrize(
    ("noise", "dtype", "float16_works", "remedy"),
    [
        (5e-4, "bfloat16", True, "Use dtype float16"),
        (5e-4, "bfloat16", False, "Use dtype float32 or clip_range"),  # FLUX, or a CPU
        # float16's would still be too much
        (2e-3, "bfloat16", True, "Use dtype float32 or clip_range"),
        (5e-4, "float16", True, "Use dtype float32 or clip_range"),
        (5e-4, "float32", True, "Use clip_range"),
    ],
)
def test_the_remedy_for_rounding_is_one_that_helps(noise, dtype, float16_works, remedy):
    limits = Limits(clip=1e-4, dtype=dtype, float16_works=float16_works)
    found = ratio_noise(rows(ratio_noise=[noise], ratio_noise_mean=1e-5), limits)
    assert found is not None and remedy in found.text and "(mean 1.0e-05)" in found.text


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([[0.0, 0.05, 0.95, 0.0]] * 3, r"step 2 \(the first is 0\) has 95% of"),
        (
            [[0.0004, 0.001, 0.9985, 0.0]] * 3,
            r"has 99\.85% of the policy term's squared gradient.*trained_steps 0:2",
        ),
        ([[0.01, 0.98, 0.01, 0.0]] * 3, r"Leave it out \(another window\)"),
        ([[0.0, 0.05, 0.95, 0.0]] * 2, None),  # too early to say
        ([[0.2, 0.2, 0.6, 0.0]] * 3, None),
        # by chance
        ([[0.0, 0.05, 0.95, 0.0], [0.0, 0.95, 0.05, 0.0], [0.0, 0.05, 0.95, 0.0]], None),
        ([[0.0, 0.0, 1.0, 0.0]] * 3, None),  # a window of one step
        ([[0.0, 0.0, 0.0, 0.0]] * 3, None),  # all advantages are 0
    ],
)
def test_one_step_with_nearly_all_of_the_gradient(shares, words):
    found = step_share(rows(step_shares=shares), Limits())
    assert (found is None) == (words is None)
    assert words is None or re.search(words, found.text)


@pytest.mark.parametrize(
    ("loss", "fires"),
    [("clipped", True), ("clipped(log_prob=released_cps)", False), ("grpo-guard", False)],
)
def test_cps_down_to_a_tiny_time_trains_one_step(loss, fires):
    """The shapes world's grid ends at 0.001, 0: with the exact density the step to 0.001 has nearly
    all of the gradient.
    """
    run = trainer(preset("tiny").apply(sampler="cps", window=":", loss=loss))
    made = [run.iteration() for _ in range(3)]
    assert (made[0]["step_shares"][2] > 0.999) == fires and made[0]["step_shares"][3] == 0
    assert ["step-share" for _ in range(fires)] == [
        notice.kind for notice in notices(made, Limits()) if notice.kind == "step-share"
    ]


def test_a_step_share_is_warned_of_once():
    made = []
    for row in rows(50, step_shares=[[0.05, 0.95]] * 50):
        made.append(
            row | {"warnings": [notice.as_dict() for notice in notices([*made, row], Limits())]}
        )
    assert [row["iteration"] for row in made if row["warnings"]] == [3]


@pytest.mark.parametrize(
    ("columns", "fires"),
    [
        ({"approx_kl": [0.02] * 10 + [0.12, 0.14, 0.17]}, "to the policy that sampled"),
        ({"approx_kl": [0.036, 0.32, 0.11, 0.031]}, "to the policy that sampled"),
        # large, but not much larger than before
        ({"approx_kl": [0.05] * 10 + [0.12, 0.14, 0.17]}, None),
        ({"approx_kl": [1e-4] * 10 + [5e-3] * 3}, None),  # much larger, but small
        ({"approx_kl": [0.02] * 10 + [0.25, 0.01, 0.01]}, None),  # one bad iteration
        ({"kl": [0.4] * 20 + [0.97, 1.3, 1.4]}, "to the base model"),
        ({"kl": [0.05 * i for i in range(40)]}, None),  # a steady departure
        ({"kl": [1.5, 1.5, 1.5]}, None),  # nothing to compare with
    ],
)
def test_a_kl_that_runs_away(columns, fires):
    found = kl_runaway(rows(**columns), Limits())
    assert (found is None) == (fires is None)
    assert found is None or fires in found.text


def evaluated(values):
    return [{"evaluation": {"reward": value}} for value in values]


@pytest.mark.parametrize(
    ("made", "fires"),
    [
        (
            rows(reward_mean=[0.2, 0.4, 0.6, 0.8, 0.9, 0.9, 0.9, 0.6, 0.3, 0.2], reward_std=0.1),
            "training",
        ),
        (
            rows(reward_mean=[0.2, 0.4, 0.6, 0.8, 0.9, 0.9, 0.9, 0.8, 0.8, 0.7], reward_std=0.1),
            None,
        ),
        (
            rows(reward_mean=[0.5, 0.56, 0.44, 0.53, 0.47, 0.5, 0.56, 0.47, 0.44, 0.47]),
            None,
        ),  # chance: no more than the spread allows
        # from the start downwards
        (rows(reward_mean=[0.7, 0.3, 0.1, 0.1, 0.1, 0.1], reward_std=0.1), "training"),
        ([*evaluated([0.2]), *rows(4), *evaluated([0.9, 0.4])], "held-out"),
        ([*evaluated([0.2]), *rows(4), *evaluated([0.9, 0.6])], None),
        ([*evaluated([0.50]), *rows(4), *evaluated([0.51, 0.49])], None),
        ([*evaluated([0.5]), *rows(2)], None),
    ],
)
def test_a_reward_that_falls_back(made, fires):
    found = collapse(made, Limits(prompts=16))
    assert (found is None) == (fires is None)
    assert found is None or f"the {fires} reward has fallen back" in found.text


def test_flat_noise_is_no_collapse():
    """50 flat runs of 100 iterations with 4 prompts, all variance of the reward between prompts: no
    warning at any iteration.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        made = rows(reward_mean=(0.5 + 0.2 / 2 * torch.randn(100, generator=generator)).tolist())
        assert not any(collapse(made[:end], Limits(prompts=4)) for end in range(1, 101))


def test_a_warning_comes_again_only_after_a_while_also_in_a_resumed_run():
    made = []
    for row in rows(50, zero_spread_groups=1.0):
        made.append(row)
        found = notices([{"iteration": 0, "evaluation": {"reward": 0.5}}, *made], Limits())
        if found:
            row["warnings"] = [notice.as_dict() for notice in found]
        made = json.loads(json.dumps(made))
    assert [row["iteration"] for row in made if "warnings" in row] == [3, 3 + EVERY, 3 + 2 * EVERY]
    assert (
        {said["kind"] for row in made for said in row.get("warnings", ())}
        == {"zero-spread"}
        <= set(KINDS)
    )
    assert notices([{"iteration": 0, "evaluation": {"reward": 0.5}}], Limits()) == []


@pytest.mark.parametrize("method", ["flow-grpo", "tp-grpo"])
def test_a_usual_run_warns_of_nothing(tmp_path, method):
    said = []
    Run(preset("default").apply(world="mixture", method=method), tmp_path, said.append).execute()
    assert not [state for state in said if "warning" in state]
    assert "warnings" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_run_that_collapses_says_so(tmp_path):
    said = []
    Run(
        preset("default").apply(world="mixture", clip_range=0.2, seed=1), tmp_path, said.append
    ).execute()
    assert any("reward has fallen back" in state["warning"] for state in said if "warning" in state)


CONSTANT = """
import torch

class Constant:
    def score(self, images, prompts):
        return torch.full((len(images),), 0.25)
"""


def test_warnings_reach_the_console_and_the_metrics(tmp_path, capsys):
    (tmp_path / "constant.py").write_text(CONSTANT)
    out = tmp_path / "run"
    options = ["--preset", "tiny", "--world", "mixture", "--task", "direction", "--iterations", "5"]
    assert (
        main(["train", *options, "--reward", f"{tmp_path}/constant.py:Constant", "--out", str(out)])
        == 0
    )
    printed = capsys.readouterr().out
    assert printed.count("Warning: 100% of the groups have equal rewards") == 1
    made = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [len(row.get("warnings", ())) for row in made] == [0, 0, 0, 1, 0, 0]
    assert made[3]["warnings"][0]["kind"] == "zero-spread"
    assert (
        warning_text("one\ntwo", "run-seed0")
        == "Warning (run-seed0): one\nWarning (run-seed0): two"
    )


@pytest.mark.parametrize(("dtype", "fires"), [("bfloat16", True), ("float32", False)])
def test_half_precision_under_a_tiny_clip(dtype, fires):
    """The adapter's second matrices begin at 0: from the second iteration on bfloat16 shows."""
    run = trainer(preset("tiny").apply(dtype=dtype, clip_range=1e-5))
    made = [run.iteration(), run.iteration()]
    assert made[0]["ratio_noise"] < 1e-6
    assert (made[1]["ratio_noise"] > 1e-5) == fires
    assert ["ratio-noise" for _ in range(fires)] == [
        notice.kind for notice in notices(made, Limits(clip=1e-5))
    ]


@pytest.mark.parametrize(("dtype", "fires"), [("bfloat16", True), ("float32", False)])
def test_another_attention_kernel_under_guidance(dtype, fires, monkeypatch):
    """The update's attention rounds its result only once, as the kernels of GPUs differ between
    batch sizes. In bfloat16 a ratio then moves by more than TP-GRPO's clip, in float32 it does not.
    """
    policy = tiny_sd3_policy(replace(TINY_MODEL, dtype=dtype, guidance_scale=4.5))
    config = preset("tiny").apply(
        num_steps=5, groups=2, group_size=3, minibatches=2, dtype=dtype, clip_range=1e-5
    )
    method = replace(make_method(config), sampler=FlowSDE(0.7), window=FixedWindow(stop=-1))
    red = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)))
    run, usual = (
        Trainer(policy, method, red, [Prompt("a dog"), Prompt("a fox")], config),
        functional.scaled_dot_product_attention,
    )

    def exact(query, key, value, **options):
        with torch.autocast("cpu", enabled=False):
            return usual(*(tensor.double() for tensor in (query, key, value)), **options).to(
                query.dtype
            )

    run.on_phase = lambda phase: (
        phase == "update" and monkeypatch.setattr(functional, "scaled_dot_product_attention", exact)
    )
    row = run.iteration()
    assert (
        0 < row["ratio_noise_mean"] <= row["ratio_noise"] and (row["ratio_noise"] > 1e-5) == fires
    )
    assert ["ratio-noise" for _ in range(fires)] == [
        notice.kind for notice in notices([row], limits_of(run))
    ]
    if fires:
        # float16 is for GPUs
        assert "Use dtype float32 or clip_range" in notices([row], limits_of(run))[0].text


# --- memory
# --------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 10**9),
    st.integers(1, 10**8),
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 10**10),
)
def test_the_largest_batch_fits_and_the_next_does_not(base, slope, first, more, room):
    small, large = (
        Peak(first, base + slope * first),
        Peak(first + more, base + slope * (first + more)),
    )
    fits = largest_batch(small, large, room)
    assert fits is not None and fits >= 0
    assert fits == 0 or predicted_bytes(small, large, fits) <= room * (1 + 1e-9)
    assert predicted_bytes(small, large, fits + 1) > room * (1 - 1e-9)


def test_memory_by_hand():
    small, large = Peak(2, 10 * 10**9), Peak(4, 14 * 10**9)  # 6 GB + 2 GB each
    assert largest_batch(small, large, 40e9) == 17
    assert memory("micro_batch", 17, small, large, 40e9) is None
    found = memory("micro_batch", 24, small, large, 40e9)
    assert found is not None
    assert (
        found.text == "micro_batch 24 will need about 54.0 GB of GPU memory, and 40.0 GB are there:"
        " micro_batch 17 fits"
    )
    assert "micro_batch 12 fits" in memory("micro_batch", 24, small, large, 40e9, later=10e9).text
    assert "not even 1 fits" in memory("micro_batch", 24, small, large, 7e9).text
    flat = Peak(4, 10 * 10**9)
    assert largest_batch(small, flat, 11e9) is None and largest_batch(small, flat, 9e9) == 0
    assert memory("max_batch", 10**6, small, flat, 11e9) is None


def trainer(config=TINY, **changes):
    world, method = make_world(config), replace(make_method(config), **changes)
    return Trainer(
        world.policy(policy_options(config)),
        method,
        make_reward(config),
        world.prompts(config.environment.task, "train"),
        config,
    )


def test_measuring_memory_changes_nothing_and_names_what_fits():
    run, other = (
        trainer(TINY.replace(micro_batch=100, max_batch=6)),
        trainer(TINY.replace(micro_batch=100, max_batch=6)),
    )
    # 1 + n GB with a gradient, n / 2 GB without
    peaks = iter([3 * 10**9, 5 * 10**9, 10**9, 2 * 10**9])

    def peak(work, device):
        work()
        return next(peaks)

    (found,) = memory_notices(run, peak, lambda: 11.2e9)
    assert (
        "micro_batch 100 will need about 101.0 GB" in found.text
        and "micro_batch 10 fits" in found.text
    )
    assert all(parameter.grad is None for parameter in run.parameters)
    first, second = run.iteration(), other.iteration()
    assert first["loss"] == second["loss"] and first["reward_mean"] == second["reward_mean"]

    def too_much(work, device):
        raise torch.OutOfMemoryError

    assert [notice.text.split(" will")[0] for notice in memory_notices(run, too_much)] == [
        "micro_batch 100",
        "max_batch 6",
    ]


def test_a_gpu_that_is_full_before_the_first_measurement_is_told_too(monkeypatch):
    import flowrl.training.memory as measured

    def too_much(trainer, batch, train):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(measured, "velocities", too_much)
    assert [notice.kind for notice in memory_notices(trainer())] == ["memory", "memory"]
    words = "ran out: CUDA out of memory. Tried to allocate 2.00 GiB. Take a smaller micro_batch"
    with pytest.raises(TrainingError, match=words), measured.out_of_memory():
        too_much(None, 1, True)


# --- losses that are not finite
# -------------------------------------------------------------------------------------


def batch(**changes):
    """Four rows, the last one of weight 0 and broken."""
    values = torch.arange(8.0).view(4, 2)
    values[3] = math.nan
    std = torch.full((4,), 0.5)
    parts = {
        "new": Gaussian(values.clone(), std),
        "behaviour": Gaussian(values.clone(), std),
        "next_node": values.clone(),
        "advantages": torch.ones(4),
        "weight": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "delta": torch.full((4,), 0.1),
        "sample": torch.arange(4),
        "group": torch.zeros(4).long(),
        "step": torch.zeros(4).long(),
        "time": torch.ones(4),
        "reference": Gaussian(values.clone(), std),
    }
    return LossBatch(**{**parts, **changes})


def broken(value, row=1):
    values = torch.arange(8.0).view(4, 2)
    values[row] = value
    return values


STD = torch.full((4,), 0.5)


@pytest.mark.parametrize(
    ("changes", "term"),
    [
        ({"advantages": torch.tensor([1.0, math.nan, 1.0, 1.0])}, "advantage"),
        ({"next_node": broken(math.inf)}, "sampled latent"),
        ({"behaviour": Gaussian(broken(math.nan), STD)}, "velocity of the rollout"),
        ({"new": Gaussian(broken(math.nan), STD)}, "velocity of the network"),
        ({"reference": Gaussian(broken(math.inf), STD)}, "velocity of the reference"),
        # far from the next node: exp overflows
        ({"behaviour": Gaussian(broken(100.0), STD)}, "ratio"),
        ({"reference": Gaussian(broken(1e25), STD)}, "KL"),
    ],
)
def test_the_term_that_broke_is_found(changes, term):
    found = culprit(batch(**changes))
    assert found.term == term and found.bad.tolist() == [False, True, False, False]


def test_without_a_broken_term_it_is_the_loss_itself():
    found = culprit(batch())
    assert found.term == "loss" and found.bad.tolist() == [True, True, True, False]
    assert culprit(batch(reference=None)).term == "loss"


def test_a_process_names_the_prompts_of_its_own_samples():
    batches = SimpleNamespace(
        of=lambda sample, column: batch(), origin=lambda sample, column: (column, column)
    )
    record, credit = SimpleNamespace(values=torch.zeros(2, 4, 2)), Credit(torch.zeros(2, 4, 1))
    check = NonFiniteCheck(
        1, [Prompt("first"), Prompt("second")], record, credit, ClippedLoss(), batches, first=4
    )
    with pytest.raises(NonFiniteError, match="Prompts: 'second'"):
        check.losses(
            [{"loss": math.nan}], [MicroBatch(torch.arange(4), torch.zeros(4).long(), 1.0)]
        )


def test_a_network_that_breaks_in_the_update_is_named_with_step_and_prompt(tmp_path):
    run = trainer()
    late = run.schedule.network_timesteps[2]
    velocity, phase = run.policy.velocity, []
    run.on_phase = phase.append

    def breaking(latent, timestep, condition):
        found = velocity(latent, timestep, condition)
        return (
            torch.where((timestep == late).view(-1, 1, 1, 1), math.nan, found)
            if phase[-1] == "update"
            else found
        )

    run.policy.velocity = breaking
    before = [p.detach().clone() for p in run.parameters]
    with pytest.raises(
        NonFiniteError,
        match=(
            r"iteration 1: the loss is nan, because the velocity of the network .* step 2;.*towards"
        ),
    ) as caught:
        run.iteration()
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters, strict=True))
    saved = pickle.loads(pickle.dumps(caught.value)).saved(tmp_path / "failure")
    assert str(tmp_path / "failure") in str(saved)
    values = json.loads((tmp_path / "failure" / "failure.json").read_text())
    assert (values["term"], values["denoising_steps"], values["iteration"]) == (
        "velocity of the network",
        [2],
        1,
    )
    assert len(values["prompts"]) == TINY.rollout.groups and all(
        row["step"] == 2 for row in values["rows"]
    )
    tensors = load_file(tmp_path / "failure" / "failure.safetensors")
    assert tensors["values"].shape == (2, 3, 3) and tensors["advantages"].shape == (2, 3, 2)
    row, decision = values["rows"][0], 1  # the steps 1 and 2 are drawn
    prompt = values["prompts"].index(row["prompt"])
    assert tensors["advantages"][prompt, row["member"], decision] == pytest.approx(row["advantage"])


@dataclass(frozen=True)
class InfiniteGradient:
    """A finite loss whose gradient is not, at the step with the larger noise."""

    above: float
    clip_range: float = 0.1
    needs_reference: bool = False
    trains_zero_advantages: bool = False
    unit: str = "transition"

    def loss(self, batch):
        result = ClippedLoss().loss(batch)
        noisy = batch.new.mean[batch.new.std > self.above]
        return replace(result, loss=result.loss + (0 * noisy).abs().sqrt().sum())


def test_a_gradient_that_is_not_finite_names_step_and_parameter(tmp_path):
    stds = trial_stds(TINY)
    first, second = stds[stds > 0].tolist()
    assert first > second
    run = trainer(loss=InfiniteGradient((first + second) / 2))
    with pytest.raises(
        NonFiniteError,
        match=r"the gradient norm is nan, the gradient of .* is not finite, at denoising step 1;",
    ) as caught:
        run.iteration()
    assert caught.value.values["term"] == "gradient" and caught.value.values["denoising_steps"] == [
        1
    ]
    assert (
        set(caught.value.values["parameters"]) <= set(run.names)
        and caught.value.values["parameters"]
    )


def test_a_run_that_breaks_leaves_a_dump_and_can_be_resumed(tmp_path, monkeypatch):
    config = TINY.replace(checkpoint_every=1)
    Run(config, tmp_path / "whole").execute()
    make = build.run_method

    @dataclass(frozen=True)
    class BreaksLater(ClippedLoss):
        def loss(self, batch):
            found = super().loss(batch)
            return (
                replace(found, loss=found.loss * math.nan)
                if batch.new.mean.requires_grad and len(told) > 2
                else found
            )

    told = []

    def breaking(config):
        method = make(config)
        return replace(method, loss=BreaksLater(clip_range=method.loss.clip_range))

    monkeypatch.setattr(build, "run_method", breaking)

    def report(state):
        if "iteration" in state:
            told.extend([state["iteration"]] * 2)

    with pytest.raises(NonFiniteError, match=r"iteration 3: the loss is nan.*are in .*failure"):
        Run(config, tmp_path / "run", report).execute()
    assert json.loads((tmp_path / "run" / "failure" / "failure.json").read_text())["term"] == "loss"
    monkeypatch.setattr(build, "run_method", make)
    assert Run(config, tmp_path / "run").execute(resume=True)
    first, second = (
        (tmp_path / name / "weights.safetensors").read_bytes() for name in ("whole", "run")
    )
    assert first == second
