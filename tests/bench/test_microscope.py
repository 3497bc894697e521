"""The microscope: its session, its page and its command."""

import dataclasses
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_lines import rule_file
from flowrl_bench.gradients import policy_gradients
from flowrl_bench.microscope import EQUAL_NFE, RULES, MicroscopeConfig, microscope_jobs, run_microscope, settings_by_stage
from flowrl_bench.microscope_page import microscope_page
from flowrl_bench.true_advantage import Look, compare_credit, true_advantages

from flowrl.cli import main
from flowrl.credit import StepwiseGain
from flowrl.errors import ConfigError, CreditError
from flowrl.registry import build
from flowrl.rewards import NoisyReward
from flowrl.training.build import make_method
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer

SMALL_LOOK = MicroscopeConfig(
    run=preset("default").apply(world="mixture", groups=3, group_size=3, num_steps=4, window="all-but-last"),
    rules={"gains": "stepwise-gain", "values": "stepwise-gain(probe='continuation:2')", "random": "random"},
    iterations=(0, 1),
    noises=(0.0, 0.5),
    noise_stage=1,
    group_size=3,
    continuations=4,
    batches=3,
    gradient_group_size=2,
    truth_batches=3,
)


MADE = {
    "command": "flowrl bench microscope --groups-per-prompt 1", "seconds": 1.0, "cpu_seconds": 2.0, "seed": 0,
    "commit": "0123abc", "versions": {"torch": "9.9"}, "hardware": "one core of 2", "code": "0f",
}  # fmt: skip


def test_a_session_covers_rules_stages_and_noise(tmp_path) -> None:
    seen = []
    rows = run_microscope(SMALL_LOOK, 1, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(list(microscope_jobs(SMALL_LOOK))),) * 2
    credit = {(r["rule"], r["iteration"], r["noise"]) for r in rows if r["kind"] == "credit"}
    assert credit == {(rule, *at) for rule in SMALL_LOOK.rules for at in ((0, 0.0), (1, 0.0), (1, 0.5))}
    gradient = {(r["rule"], r["iteration"], r["noise"]) for r in rows if r["kind"] == "gradient"}
    assert gradient == {key for key in credit if key[0] != "values"}
    assert all(len(r["per_step"]) == 3 and r["steps"] == [0, 1, 2] for r in rows if r["kind"] == "credit")
    page = microscope_page(rows, 1, MADE).write(tmp_path, "microscope", "microscope")[0].read_text()
    for name in ("credit", "steps", "gradient", "training", "noise"):
        assert (tmp_path / "microscope" / f"{name}.png").stat().st_size > 10_000
        assert f"](microscope/{name}.png)" in page
    assert page.count("| gains |") == 6
    assert "flowrl bench microscope --groups-per-prompt 1" in page and "0123abc" in page and "torch 9.9" in page


def test_noise_reaches_the_rule_and_not_the_truth() -> None:
    """A session's rows with noise are those of credit from noisy rewards against the truth from clean ones."""
    config = replace(SMALL_LOOK, rules={"gains": "stepwise-gain"}, run=SMALL_LOOK.run.replace(reward_form="strict"))
    setting = settings_by_stage(config)[1]
    look = Look(setting, config.group_size, config.seed)
    truth = true_advantages(setting, look.trajectories(True), config.continuations, config.seeds()["continuations"][0])
    for row in run_microscope(config, 1):
        if row["iteration"] == 1:
            credit = look.credit(StepwiseGain(), True, NoisyReward(setting.reward, row["noise"]))
            expected = compare_credit(credit.advantages, truth, seed=config.seed).overall
            assert {name: row[name] for name in dataclasses.asdict(expected)} == dataclasses.asdict(expected)


@pytest.mark.slow
def test_the_number_of_workers_changes_no_number(tmp_path) -> None:
    """Two processes of one thread against this one, which has more threads; one of the rules draws from the global generators."""
    config = replace(SMALL_LOOK, rules={"gains": "stepwise-gain", "dice": f"{written(tmp_path, DICE)}:Dice"}, noises=(0.0,))
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        alone = run_microscope(config, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002 (what was drawn before is of no account)
    assert run_microscope(config, 2) == alone
    assert len({row["correlation"]["value"] for row in alone if row["kind"] == "credit"}) == 4  # other dice at every stage


def test_evaluations_are_counted_as_the_trainer_counts_them() -> None:
    rules = {"uniform": "uniform", "gains": "stepwise-gain(lam=1, probe=completion)"}
    config = replace(SMALL_LOOK, rules=rules, iterations=(0,), noise_stage=0, noises=(0.0,))
    setting = settings_by_stage(config)[0]
    run = config.run.replace(method="flow-grpo", group_size=config.gradient_group_size, groups=len(setting.prompts))
    trained = Trainer(setting.policy, make_method(run), setting.reward, setting.prompts, run).iteration()
    rows = {row["rule"]: row for row in run_microscope(config, 1) if row["kind"] == "gradient"}
    row = rows["uniform"]
    assert (row["nfe_per_batch"], row["train_nfe_per_batch"]) == (trained["nfe"], trained["train_nfe"])
    assert rows["gains"]["train_nfe_per_batch"] == trained["train_nfe"] < rows["gains"]["nfe_per_batch"]
    assert rows["gains"]["signal_to_noise"] > 0.2
    for row in rows.values():
        batches = EQUAL_NFE / (row["nfe_per_batch"] + row["train_nfe_per_batch"])
        assert row["signal_to_noise_at_equal_nfe"] == pytest.approx(row["signal_to_noise"] * math.sqrt(batches))


BROKEN = """
import torch
from flowrl.probes import NoProbe

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
from flowrl.probes import NoProbe

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
    config = replace(SMALL_LOOK, rules={"x": spec}, iterations=(0,), noise_stage=0, noises=(0.0,))
    with pytest.raises(CreditError, match=f"Mine.assign.*{message}"):
        run_microscope(config, 1)
    setting = settings_by_stage(config)[0]
    with pytest.raises(CreditError, match=f"Mine.assign.*{message}"):
        policy_gradients(setting, build("credit", spec), 1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": {"x": "nothing"}}, "unknown credit rule"),
        ({"noise_stage": 7}, "noise_stage"),
        ({"noises": (0.5,)}, "noises"),
        ({"iterations": ()}, "noise_stage|iterations"),
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
        run_microscope(SMALL_LOOK, -1)


def test_a_reward_in_steps_has_credit_but_no_gradient(tmp_path) -> None:
    config = replace(SMALL_LOOK, run=SMALL_LOOK.run.replace(reward_form="strict"))
    assert {kind for kind, *_ in microscope_jobs(config)} == {"credit"}
    rows = run_microscope(config, 1)
    microscope_page(rows, 1, MADE).write(tmp_path, "microscope", "microscope")
    assert not (tmp_path / "microscope" / "gradient.png").exists()
    assert (tmp_path / "microscope" / "noise.png").exists()


class TestMicroscopeCommand:
    def test_results_and_page_go_where_they_are_told(self, tmp_path: Path, monkeypatch, capsys) -> None:
        seen = []

        def rows(config, workers, _) -> list[dict]:
            seen.append(config)
            measured = {"value": 0.5, "low": 0.4, "high": 0.6}
            numbers = dict.fromkeys(("correlation", "sign", "bias"), measured)
            row = {"kind": "credit", "iteration": 10, "noise": 0.0, "nfe_per_trajectory": 10.0, **numbers, "steps": [0]}
            return [{**row, "rule": name, "spec": spec, "per_step": [numbers]} for name, spec in config.rules.items()]

        monkeypatch.setattr("flowrl_bench.microscope.run_microscope", rows)
        monkeypatch.chdir(tmp_path)
        mine = [rule_file(tmp_path / "v1.py"), rule_file(tmp_path / "sub" / "v2.py")]
        told = ["--out", "results/looked.json", "--page", "docs", "--noise", "0", "--iterations", "10", "--seed", "3"]
        assert main(["bench", "microscope", "--rules", *(f"{path}:Mine" for path in mine), *told]) == 0
        kept = json.loads(Path("results/looked.json").read_text())
        assert {"command", "commit", "versions", "hardware", "code", "seed", "seeds", "config", "rows"} <= set(kept)
        assert kept["seeds"] == {"training": 3, "groups": [3], "continuations": [10], "truth": 4, "gradients": 1003}
        assert {row["rule"] for row in kept["rows"]} == {*RULES, "v1:Mine", "v2:Mine"}
        assert seen[0].noises == (0.0,)
        page = Path("docs/microscope.md").read_text()
        assert kept["commit"] in page and "](microscope/credit.png)" in page and Path("docs/microscope.html").exists()
        assert {path.name for path in Path("docs/microscope").iterdir()} == {"credit.png", "steps.png"}
        assert "looked.json" in capsys.readouterr().out
        assert main(["bench", "microscope", "--noise", "0", "--iterations", "10"]) == 0
        assert {path.name for path in Path("runs/microscope").iterdir()} == {
            "microscope.json", "microscope.md", "microscope.html", "microscope",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("told", "message"),
        [
            (["--noise", "-0.1"], "noise = -0.1 is not allowed: a number, 0 or more"),
            (["--batches", "2"], "batches = 2 is not allowed: a whole number, 3 or more (at most 1000000)"),
            (["--workers", "-1"], "workers = -1 is not allowed"),
            (["--rules", "uniform"], "rule = 'uniform' is not allowed"),
            (["--rules", "my.py:Mine"], "rule 'Mine': Mine.assign returned shape"),
        ],
    )
    def test_errors_are_one_line(self, tmp_path: Path, monkeypatch, capsys, told: list[str], message: str) -> None:
        monkeypatch.chdir(tmp_path)
        rule_file(tmp_path / "my.py", steps="(steps + 1)")
        assert main(["bench", "microscope", *told]) == 2
        assert message in capsys.readouterr().err
        assert not Path("runs").exists()
