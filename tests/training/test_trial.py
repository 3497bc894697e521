"""The trial of the user's own parts before a run: faults stop it, and parts that work do not."""

import re
from pathlib import Path
from typing import Any

import pytest
from flowrl_compare.comparison import CompareConfig, compare

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.parts.registry import KINDS
from flowrl.training.build import check
from flowrl.training.config import preset
from flowrl.training.run import Run
from flowrl.training.trial import try_parts

MINE = """
from dataclasses import replace
import torch
from flowrl.credit import Uniform, zscore
from flowrl.losses import ClippedLoss
from flowrl.probes import Completion, NoProbe
from flowrl.samplers import FixedWindow, FlowSDE
from flowrl.core.types import Gaussian, LossResult

class Ascent(ClippedLoss):
    def loss(self, batch):
        result = super().loss(batch)
        return LossResult(-result.loss, result.metrics)

class Biased(FlowSDE):
    def transition(self, latent, velocity, schedule, step):
        found = super().transition(latent, velocity, schedule, step)
        return Gaussian(found.mean + 0.05, found.std)

class Upside(Uniform):
    def assign(self, values, decisions):
        return -super().assign(values, decisions)

class Zeros:
    probe = NoProbe()

    def assign(self, values, decisions):
        return torch.zeros(decisions.mask.shape)

class Drawn(FixedWindow):
    def steps(self, count, generator, iteration):
        return [1 + int(torch.rand(()) > 0.7)]

class Careless(Completion):
    def estimate(self, run):
        found = super().estimate(run)
        return {node: replace(one, latents=one.latents + one.latents.mean(0)) for node, one in found.items()}

class Unmasked(Uniform):
    def assign(self, values, decisions):
        return zscore(values[..., -1:], over=("member",)).expand(decisions.mask.shape).clone()

class Fine:
    def score(self, images, prompts):
        return images.flatten(1).mean(1)

class Centred(Fine):
    def score(self, images, prompts):
        scores = super().score(images, prompts)
        return scores - scores.mean()

class Sorted(Fine):
    def score(self, images, prompts):
        return super().score(images, prompts).sort().values

class Noisy(Fine):
    def score(self, images, prompts):
        return super().score(images, prompts) + torch.randn(len(images))

class Ranks:
    evaluation = Fine()

    def score_groups(self, images, prompts):
        return images.flatten(2).mean(2).argsort(1).argsort(1).float()

class Leaking(Ranks):
    def score_groups(self, images, prompts):
        scores = images.flatten(2).mean(2)
        return scores - scores.mean()
"""
TINY = preset("tiny").apply(world="mixture", task="direction", groups=3, group_size=4)
FAULTS = [
    ("loss", "Ascent", "Ascent.*'starts_along_the_advantage'.*is pushed the wrong way"),
    ("sampler", "Biased", "Biased.*'moves_along_the_path'.*instead of"),
    ("credit", "Upside", "Upside.*'pays_the_better_member'.*Is a sign wrong"),
    ("credit", "gdpo(rule={})", "Upside.*'pays_the_better_member'"),
    ("credit", "stepwise-gain(probe={})", "Careless.*'does_not_depend_on_chunks'.*the value table"),
    ("window", "Drawn", "Drawn.*'draws_reproducibly'.*second call"),
    ("reward", "Centred", "Centred.*depends on the batch.*expected: the same within"),
    ("reward", "clipped(reward={}, low=-9, high=9)", "Centred.*depends on the batch"),
    ("reward", "Sorted", "Sorted.*depends on the batch"),
    ("reward", "Leaking", "Leaking.*depends on the batch.*check_group_reward"),
]
NESTED = {"gdpo": "Upside", "stepwise-gain": "Careless", "clipped": "Centred"}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def spec_of(mine: Path, part: str) -> str:
    return (
        part.format(f"{mine}:{NESTED[part.partition('(')[0]]}")
        if "{}" in part
        else f"{mine}:{part}"
    )


@pytest.mark.parametrize(("setting", "part", "message"), FAULTS)
def test_a_faulty_part_stops_the_run_before_anything_is_written(
    setting: str, part: str, message: str, mine: Path, tmp_path: Path
) -> None:
    config, out = TINY.replace(**{setting: spec_of(mine, part)}), tmp_path / "out"
    with pytest.raises(
        ConfigError, match=rf"(?s)^{setting}: .*{message}.*--no-trial \(trial=False"
    ):
        Run(config, out).execute()
    assert not out.exists()
    assert Run(config, out, trial=False).execute()


@pytest.mark.parametrize(
    ("setting", "part"),
    [("loss", "Ascent"), ("reward", "Centred"), ("heldout-rewards", "Centred")],
)
def test_a_faulty_part_stops_a_comparison(
    setting: str, part: str, mine: Path, tmp_path: Path, capsys
) -> None:
    command = [
        "compare",
        "--preset",
        "tiny",
        "--world",
        "mixture",
        "--task",
        "direction",
        "--seeds",
        "0",
        "--methods",
        "flow-grpo",
    ]
    command += [
        f"--{setting}",
        spec_of(mine, part),
        "--workers",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{part} failed the trial" in error and "--no-trial" in error
    assert not (tmp_path / "out").exists()
    assert main([*command, "--no-trial"]) == 0


def test_a_rule_that_pays_nothing_is_a_warning(mine: Path) -> None:
    """It may pay other decisions than those that are tried."""
    notes: list[str] = []
    try_parts([TINY.replace(credit=f"{mine}:Zeros")], notes.append)
    assert any("Zeros" in note and "rising from 0 to 1 gets 0" in note for note in notes), notes


def test_a_random_reward_is_a_warning(mine: Path, tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    assert Run(TINY.replace(reward=f"{mine}:Noisy"), tmp_path / "out", said.append).execute()
    warnings = [state["warning"] for state in said if "trial" in state.get("kinds", ())]
    assert len(warnings) == 1 and "the reward is random" in warnings[0]


@pytest.mark.parametrize("reward", ["Fine", "Ranks"])
def test_a_reward_that_works_is_not_stopped(reward: str, mine: Path, tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    assert Run(TINY.replace(reward=f"{mine}:{reward}"), tmp_path / "out", said.append).execute()
    assert not any("trial" in state.get("kinds", ()) for state in said)


def test_the_trial_changes_no_number(mine: Path, tmp_path: Path) -> None:
    """Also of a reward that draws from PyTorch's generator."""
    import torch

    rewards = []
    for trial in (True, False):
        torch.manual_seed(0)
        Run(TINY.replace(reward=f"{mine}:Noisy"), tmp_path / str(trial), trial=trial).execute()
        rewards.append((tmp_path / str(trial) / "weights.safetensors").read_bytes())
    assert rewards[0] == rewards[1]


SPECIAL = {
    "RandomWindow": "(size=2)",
    "SlidingWindow": "(size=2)",
    "FixedWindow": "(start=1, stop=3)",
    "Weighted": "(rule=uniform)",
}
ROLES = {
    "ODE": "awm",
    "Multistep": "awm",
    "AWM": "awm",
    "DGPO": "dgpo",
    "DiffusionNFT": "diffusion-nft",
}
BUILT_IN = [
    (kind, made)
    for kind in ("loss", "sampler", "window", "credit", "probe")
    for made in KINDS[kind].built_in.values()
]


@pytest.mark.parametrize(("kind", "made"), BUILT_IN)
def test_no_built_in_part_is_stopped(kind: str, made: str, tmp_path: Path) -> None:
    """Each as if it were the user's: imported by a file."""
    module, name = made.split(":")
    (tmp_path / "mine.py").write_text(f"from {module} import {name}\n")
    spec = f"{tmp_path}/mine.py:{name}{SPECIAL.get(name, '')}"
    if kind == "probe":
        rule = (
            "sibling-relative"
            if name in ("Branch", "Comb")
            else "uniform"
            if name == "NoProbe"
            else "stepwise-gain"
        )
        spec = f"{rule}(probe={spec})"
    setting = "credit" if kind == "probe" else kind
    config = TINY.replace(method=ROLES.get(name, "flow-grpo"), num_steps=10, window="2:5")
    config = config.replace(**{setting: spec})
    if "relative" in spec or "BackedUp" in spec or "Pruned" in spec:
        config = config.replace(group_size=8 if "Comb" not in spec and "Depth" not in spec else 12)
    check(config)
    said: list[str] = []
    try_parts([config], said.append)
    assert all(name == "RandomCredit" or "not tried" in text for text in said), said


def test_parts_that_are_built_in_are_not_tried(monkeypatch) -> None:
    monkeypatch.setattr("flowrl.training.trial._try_part", lambda *arguments: pytest.fail("tried"))
    try_parts(
        [
            TINY,
            TINY.replace(credit="gdpo(rule=stepwise-gain)", loss="gspo", window="random(size=1)"),
        ]
    )


def test_checks_that_do_not_fit_into_the_time_are_named(mine: Path) -> None:
    said: list[str] = []
    try_parts(
        [TINY.replace(credit=f"{mine}:Upside", loss=f"{mine}:Ascent")], said.append, seconds=0.0
    )
    assert len(said) == 2 and all(
        re.search(r"(\d+) of \1 promises were not tried", text) for text in said
    )


def test_a_rule_for_whole_groups_gets_a_warning(mine: Path) -> None:
    said: list[str] = []
    try_parts([TINY.replace(credit=f"{mine}:Unmasked")], said.append)
    assert len(said) == 1 and re.search(
        r"not kept: reads_nothing_outside_the_mask.*check_credit", said[0]
    )


def test_a_part_of_several_runs_is_tried_once(mine: Path, monkeypatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(
        "flowrl.training.trial._try_part", lambda config, name, *rest: tried.append(name)
    )
    rule = TINY.replace(credit=f"{mine}:Upside")
    try_parts([rule, rule.replace(seed=1), TINY])
    assert len(tried) == 1


def test_a_comparison_says_what_was_not_tried(mine: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("flowrl.training.trial.SECONDS", 0.0)
    monkeypatch.setattr(
        "flowrl_compare.comparison.try_parts",
        lambda jobs, warn: warn("loss: 3 of 3 promises were not tried"),
    )
    seen: list[str] = []
    config = CompareConfig(TINY, {"base": {}}, (0,))
    compare(
        config,
        tmp_path / "out",
        workers=1,
        watch=lambda states: seen.extend(s.get("warning", "") for s in states.values()),
    )
    assert "loss: 3 of 3 promises were not tried" in seen
