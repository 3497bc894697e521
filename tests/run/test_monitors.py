"""Every warning fires where it should and is silent where it should be; a loss that is not finite
says where it broke.
"""

import json
import math
import pickle
import re
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from loss_rows import loss_rows
from seeded import seeded
from small_run import CASES, MIXTURE, TINY_RUN, flowrl_, rows_of, trainer_of, weights

from flowrl.core.experience import Credit
from flowrl.core.types import Gaussian, Prompt
from flowrl.losses import ClippedLoss
from flowrl.nonfinite import NonFiniteCheck, NonFiniteError, culprit
from flowrl.rollout import Rows
from flowrl.run.build import make_method
from flowrl.run.config import preset
from flowrl.run.job import Run
from flowrl.run.monitors import CHECKS, EVERY, Limits, collapse, limits_of, notices

TINY = TINY_RUN.replace(iterations=4)


def rows(count=1, **columns):
    """Metrics rows 1, 2, ...; a column is a list, or a number for all of them."""
    usual = {"reward_mean": 0.5, "reward_std": 0.1} | columns
    count = max([count, *(len(values) for values in columns.values() if isinstance(values, list))])
    filled = {name: v if isinstance(v, list) else [v] * count for name, v in usual.items()}
    table = zip(*filled.values(), strict=True)
    return [
        {"iteration": i, **dict(zip(usual, row, strict=True))} for i, row in enumerate(table, 1)
    ]


# --- warnings


SHARES = [[0.0, 0.05, 0.95, 0.0]] * 3


@pytest.mark.parametrize(
    ("kind", "columns", "text"),
    [
        ("zero-spread", {"zero_spread_groups": [0.0, 1.0, 1.0]}, "67% of the groups"),
        ("zero-spread", {"zero_spread_groups": [1.0, 1.0]}, None),
        ("zero-spread", {"zero_spread_groups": [0.5, 0.5, 0.5]}, None),
        ("zero-spread", {"zero_spread_groups": [1.0, 0.1, 0.1, 0.1]}, None),
        (
            "ratio-noise",
            {"ratio_noise": [2.1e-5]},
            r"up to 2\.1e-05, .* clip_range 6\.3e-05 or more",
        ),
        ("ratio-noise", {"ratio_noise": [9e-6]}, None),
        ("step-share", {"step_shares": SHARES}, r"step 2 .* has 95% .*from trained_steps"),
        ("step-share", {"step_shares": [*SHARES[:2], [0.0, 0.95, 0.05, 0.0]]}, None),  # by chance
        ("step-share", {"step_shares": [[0.0, 0.0, 1.0, 0.0]] * 3}, None),  # of one step
        ("kl", {"approx_kl": [0.02] * 10 + [0.12, 0.14, 0.17]}, "to the policy that sampled"),
        ("kl", {"approx_kl": [0.036, 0.32, 0.11, 0.031]}, "to the policy that sampled"),
        ("kl", {"kl": [0.4] * 20 + [0.97, 1.3, 1.4]}, "to the base model"),
        # large, but not much larger than before, and the other way round
        ("kl", {"approx_kl": [0.05] * 10 + [0.12, 0.14, 0.17]}, None),
        ("kl", {"approx_kl": [0.02] * 10 + [0.25, 0.01, 0.01]}, None),  # one bad iteration
        ("kl", {"kl": [1.5, 1.5, 1.5]}, None),  # nothing to compare with
        ("collapse", {"reward_mean": [0.2, 0.6, 0.8, 0.9, 0.9, 0.9, 0.6, 0.3, 0.2]}, "training"),
        ("collapse", {"reward_mean": [0.2, 0.6, 0.8, 0.9, 0.9, 0.9, 0.8, 0.8, 0.7]}, None),
        ("collapse", {"reward_mean": [0.7, 0.3, 0.1, 0.1, 0.1, 0.1]}, "training"),  # from the start
        ("collapse", {"evaluation": [0.2, None, 0.9, 0.4]}, "held-out"),
        ("collapse", {"evaluation": [0.2, None, 0.9, 0.6]}, None),
    ],
)
def test_every_warning_has_its_condition(kind, columns, text):
    if "evaluation" in columns:
        scores = columns["evaluation"]
        columns = {"evaluation": [score and {"reward": score} for score in scores]}
    warning = CHECKS[kind](rows(**columns), Limits(clip=1e-5, prompts=16))
    assert bool(warning) == (text is not None)
    assert text is None or re.search(text, warning)


def test_the_noise_of_ratios_names_its_step_and_the_guidance():
    """sqrt(4.5^2 + 3.5^2) = 5.70."""
    columns = {"ratio_noise": [4.7e-4], "log_prob_noise": [[0.0, 1e-5, 3e-4, 0.0]]}
    text = CHECKS["ratio-noise"](rows(**columns), Limits(clip=1e-5, guidance=4.5))
    assert re.search(r"most at step 2 .* Guidance of 4\.5 .* 5\.7 times .* less guidance", text)
    assert "uidance" not in CHECKS["ratio-noise"](rows(**columns), Limits(clip=1e-5))
    run = trainer_of(TINY)
    run.policy = SimpleNamespace(guided=None, guidance_scale=3.0)
    assert limits_of(run, TINY).guidance == 3.0


def test_a_rule_that_remembers_prompts_is_warned_only_if_all_groups_are_equal():
    limits = {
        credit: limits_of(trainer_of(TINY.replace(credit=credit)), TINY).zero_spread
        for credit in ("uniform", "value-tracker")
    }
    assert limits == {"uniform": 0.5, "value-tracker": 1.0}


def test_flat_noise_is_no_collapse():
    """15 flat runs of 100 iterations with 4 prompts, all variance of the reward between prompts: no
    warning at any iteration.
    """
    generator = seeded()
    for _ in range(15):
        rewards = (0.5 + 0.2 / 2 * torch.randn(100, generator=generator)).tolist()
        made = rows(reward_mean=rewards, reward_std=0.2)
        assert not any(collapse(made[:end], Limits(prompts=4)) for end in range(1, 101))


def test_a_reward_that_compares_samples_has_no_collapse():
    fallen = rows(reward_mean=[0.2, 0.9] * 10 + [0.1] * 20, reward_std=0.1)
    limits = limits_of(trainer_of(TINY.replace(**CASES["win rates"])), TINY)
    assert collapse(fallen, Limits()) and limits.compared and not collapse(fallen, limits)


def test_a_warning_comes_again_only_after_a_while_also_in_a_resumed_run():
    made = [{"iteration": 0, "evaluation": {"reward": 0.5}}]
    for row in rows(50, zero_spread_groups=1.0):
        warnings = [asdict(notice) for notice in notices([*made, row], Limits())]
        made = json.loads(json.dumps([*made, row | {"warnings": warnings}]))
    assert [row["iteration"] for row in made if row.get("warnings")] == [
        3 + k * EVERY for k in range(3)
    ]
    assert {warning["kind"] for warning in made[3]["warnings"]} == {"zero-spread"}
    assert notices(made[:1], Limits()) == []


CONSTANT = """
class Constant:
    def score(self, images, prompts):
        return 0 * images.flatten(1).mean(1)
"""


def test_warnings_reach_the_console_and_the_metrics(tmp_path, capsys):
    (tmp_path / "constant.py").write_text(CONSTANT)
    out, reward = tmp_path / "run", f"{tmp_path}/constant.py:Constant"
    assert flowrl_(f"train {MIXTURE} --iterations 5 --reward {reward} --out {out}") == 0
    assert capsys.readouterr().out.count("Warning: 100% of the groups have equal rewards") == 1
    kinds = [[warning["kind"] for warning in row.get("warnings", ())] for row in rows_of(out)]
    assert kinds == [[], ["alive"], [], ["zero-spread"], [], []]  # no tensor has a gradient


@pytest.mark.parametrize(("dtype", "fires"), [("bfloat16", True), ("float32", False)])
def test_half_precision_under_a_tiny_clip(dtype, fires):
    """The adapter's second matrices begin at 0: from the second iteration on bfloat16 shows."""
    run = trainer_of(preset("tiny").apply(dtype=dtype, clip_range=1e-5))
    made = [run.iteration(), run.iteration()]
    assert made[0]["ratio_noise"] < 1e-6 < made[1]["grad_norm"]
    assert {parameter.dtype for parameter in run.parameters.values()} == {torch.float32}
    assert (made[1]["ratio_noise"] > 1e-5) == fires
    kinds = [notice.kind for notice in notices(made, limits_of(run, TINY))]
    assert kinds == ["ratio-noise"] * fires


# --- losses that are not finite


STD = torch.full((4,), 0.5)


def broken(value, row=1):
    """Four rows of two numbers; the last one, of weight 0, is NaN, and one more is `value`."""
    values = torch.arange(8.0).view(4, 2)
    values[3], values[row] = math.nan, value
    return values


def batch(**changes):
    usual, weight = broken(2.0), torch.tensor([1.0, 1.0, 1.0, 0.0])
    every = dict.fromkeys(("new", "behaviour", "reference"), Gaussian(usual, STD))
    return loss_rows(**{**every, "next_node": usual, "weight": weight, **changes})


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
        ({"reference": None}, "loss"),
    ],
)
def test_the_term_that_broke_is_found(changes, term):
    name, bad = culprit(batch(**changes))
    assert name == term
    assert bad.tolist() == [term == "loss", True, term == "loss", False]


def test_a_process_names_the_prompts_of_its_own_samples():
    columns = torch.arange(4).expand(4, 4)
    objective = SimpleNamespace(
        batch=lambda rows: batch(),
        place=lambda sample, column: (sample - 4, column),
        steps=columns,
        decided=0 * columns,
    )
    prompts, rows = [Prompt("first"), Prompt("second")], torch.arange(4)
    record = SimpleNamespace(values=torch.zeros(2, 4, 2), prompts=prompts)
    check = NonFiniteCheck.__new__(NonFiniteCheck)
    NonFiniteCheck.__init__(check, 1, record, Credit(torch.zeros(2, 4, 1)), objective)
    with pytest.raises(NonFiniteError, match="Prompts: 'second'"):
        check.losses([{"loss": math.nan}], [Rows.of(rows + 4, 0 * rows)])


def fails(run, message):
    """The values of the error of an iteration that fails; the weights stay as they are."""
    before = weights(run)
    with pytest.raises(NonFiniteError, match=message) as caught:
        run.iteration()
    assert torch.equal(weights(run), before)
    return pickle.loads(pickle.dumps(caught.value)).values


def test_a_network_that_breaks_in_the_update_is_named_with_step_and_prompt():
    run = trainer_of(TINY)
    late = run.schedule.network_timesteps[2]
    velocity, phase = run.policy.velocity, []
    run.on_phase = phase.append

    def breaking(latent, timestep, condition):
        result, late_rows = velocity(latent, timestep, condition), (timestep == late)
        return result.where(~late_rows.view(-1, 1, 1, 1) | (phase[-1] != "update"), math.nan)

    run.policy.velocity = breaking
    term = "velocity of the network"
    values = fails(run, rf"iteration 1: the loss is nan, because the {term} .* step 2;.*towards")
    assert (values["term"], values["denoising_steps"], values["iteration"]) == (term, [2], 1)
    assert {row["prompt"] for row in values["rows"]} == set(values["prompts"])
    assert all(math.isfinite(row["reward"] + row["advantage"]) for row in values["rows"])


@dataclass(frozen=True)
class InfiniteGradient(ClippedLoss):
    """A finite loss whose gradient is not."""

    def loss(self, batch):
        result = super().loss(batch)
        return replace(result, loss=result.loss + (0 * batch.new.mean).abs().sqrt().sum())


def test_a_gradient_that_is_not_finite_is_reported_with_the_rows_of_its_mini_batch():
    run = trainer_of(TINY, replace(make_method(TINY), loss=InfiniteGradient(clip_range=0.1)))
    values = fails(
        run, r"the gradient norm is nan at denoising step \d, \d; .* last update\. Prompts"
    )
    assert values["term"] == "gradient" and values["bad_rows"] == len(values["rows"]) > 1


BREAKS = """
from dataclasses import replace
from flowrl.losses import ClippedLoss

class Breaks(ClippedLoss):
    def loss(self, batch):
        result = super().loss(batch)
        return replace(result, loss=result.loss * float("nan"))
"""


def test_a_run_that_breaks_leaves_a_dump(tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS)
    config = TINY.replace(loss=f"{tmp_path}/breaks.py:Breaks")
    with pytest.raises(NonFiniteError, match=r"iteration 1: the loss is nan.*are in .*failure"):
        Run(config, tmp_path / "run", trial=False).execute()
    assert json.loads((tmp_path / "run" / "failure" / "failure.json").read_text())["term"] == "loss"
