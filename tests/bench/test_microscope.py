"""The microscope: its cells, the results file, numbers over looks, its page and its command."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flowrl_bench import microscope
from flowrl_bench.ceilings import LEVELS, ceiling, with_values
from flowrl_bench.continuations import Look, true_advantages
from flowrl_bench.exact import exact_advantages
from flowrl_bench.microscope import Cell, Size, cells, run_of, session
from flowrl_bench.microscope_numbers import jackknife, row_of
from flowrl_bench.microscope_study import Study
from flowrl_bench.true_advantage import compare_credit, credit_sums

from flowrl.core.errors import ConfigError
from flowrl.parts.registry import build
from flowrl.rewards import NoisyReward
from flowrl.training.build import make_trainer, make_world

SMALL = Size(2, 3, 0, {"during": 1, "after": 2}, 3, 2, looks=2, run={"groups": 2, "group_size": 3})
GAINS = {"stepwise gains": "stepwise-gain", "random": "random", "uniform": "uniform"}
BEFORE, SHARED = (Cell("mixture", "", "before", noise, 0) for noise in ("independent", "shared"))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Both looks of the 2-D world, made in this process."""
    study = Study({"mixture": SMALL}, GAINS, tmp_path_factory.mktemp("microscope") / "m.jsonl")
    assert study.execute(1)
    return study


def plain(line):
    """Without what depends on the time."""
    return json.loads(json.dumps({**line, "seconds": 0}))


@pytest.mark.parametrize("count", [0, 8], ids=["exact", "continuations"])
def test_rows_are_those_of_a_comparison_step_by_step(count):
    """The same numbers from `Look.credit` and `compare_credit`, under both rewards, with noise,
    on both kinds; ceilings are those of the rule on the true values.
    """
    rule, run = build("credit", "stepwise-gain"), run_of("mixture", "", 0, SMALL)
    for cell in (BEFORE, SHARED):
        (line,) = session(cell.method, [cell], replace(SMALL, continuations=count), GAINS)
        shared, trainer = cell.noise == "shared", make_trainer(run)
        setting = microscope.setting_of(cell, trainer.policy, trainer.draw_sampler(), SMALL)
        look = Look(setting, 3, 10_000, SMALL.max_batch)
        for form, noise in (("soft", 0.0), ("strict", 0.0), ("soft", 0.3)):
            reward, walked = make_world(run).reward(form), look.trajectories(shared)
            rewarded = replace(setting, reward=reward)
            truth = exact_advantages(rewarded, walked, (), microscope.GRID)[0]
            if count:
                truth = true_advantages(rewarded, walked, count, 20_000)
            credit = look.credit(rule, shared, NoisyReward(reward, noise) if noise else reward)
            report = compare_credit(credit.advantages, truth)
            row = row_of(line, form, "stepwise gains", noise)
            assert row["correlation"] == pytest.approx(report.overall.correlation.value, abs=1e-5)
            assert row["nfe"] == pytest.approx(credit.nfe_per_trajectory)
            sums = credit_sums(credit.advantages, truth).sum((0, 1)).tolist()
            assert np.allclose(row["sums"], sums, rtol=1e-6)
            expected = [step.correlation.value for step in report.per_step]
            assert np.allclose(row["steps"], expected, atol=1e-3)
            if not noise:
                levels = torch.tensor(row["ceiling"], dtype=torch.float64)
                assert len(levels) == (len(LEVELS) if count else 1)
            if not (count or noise):
                record = setting.experience(walked, reward=reward)
                best = with_values(rule, record, truth.state_values)
                exact = compare_credit(best, truth).overall.correlation.value
                assert ceiling(levels) == pytest.approx(exact, abs=1e-6) and exact > 0.5


def test_a_cell_does_not_depend_on_the_cells_before():
    """A session that begins at the last stage gives the same numbers as a whole one."""
    selected = [cell for cell in cells("mixture", 0) if cell.method == "tp-grpo"]
    lines = [plain(line) for line in session("tp-grpo", selected, SMALL, GAINS)]
    assert [plain(line) for line in session("tp-grpo", selected[-1:], SMALL, GAINS)] == lines[-1:]


def test_resumption_gives_the_same_lines(study, tmp_path):
    """After a loss of half of the lines and in the middle of another, only these are made
    again.
    """
    texts = study.path.read_bytes().splitlines(keepends=True)
    path = tmp_path / "half.jsonl"
    path.write_bytes(b"".join(texts[: len(texts) // 2]) + texts[len(texts) // 2][:50])
    resumed, made = replace(study, path=path), []
    assert resumed.execute(1, lambda done, total, line: made.append((done, total)))
    assert made == [(n, len(texts)) for n in range(len(texts) // 2 + 1, len(texts) + 1)]
    rows = [{k: plain(line)["rows"] for k, line in s.read().items()} for s in (resumed, study)]
    assert rows[0] == rows[1]
    assert path.read_bytes().startswith(b"".join(texts[: len(texts) // 2]))
    assert resumed.execute(1, lambda done, total, line: pytest.fail("nothing is missing"))


@pytest.mark.parametrize(
    "changes",
    [
        {"rules": {**GAINS, "more": "weighted"}},
        {"sizes": {"mixture": replace(SMALL, continuations=8)}},
    ],
    ids=["rules", "sizes"],
)
def test_lines_of_other_settings_are_refused(study, changes):
    with pytest.raises(ConfigError, match="different rules or sizes"):
        replace(study, **changes).read()


def test_the_jackknife_of_a_mean_is_its_t_interval():
    values = np.random.default_rng(0).normal(size=7).tolist()
    interval = jackknife(lambda chosen: float(np.mean(chosen)), values)
    reach = 2.4469 * np.std(values, ddof=1) / math.sqrt(7)
    expected = np.mean(values), np.mean(values) + reach
    assert (interval.value, interval.high) == pytest.approx(expected, rel=1e-4)
