"""The trial of the user's own parts before a run: faults stop it, and parts that work do not."""

import re

import pytest
import torch
from small_run import MIXTURE, TINY_RUN, error_of, flowrl_

from flowrl.core.errors import ConfigError
from flowrl.run.job import Run
from flowrl.testing.trial import SECONDS, try_parts

MINE = """
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
        gaussian = super().transition(latent, velocity, schedule, step)
        return Gaussian(gaussian.mean + 0.05, gaussian.std)

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
        estimates = super().estimate(run)
        return {node: latents + latents.mean(0) for node, latents in estimates.items()}

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

class Darkens(Fine):
    def score(self, images, prompts):
        return super().score(images.mul_(0.5), prompts)

class Ranks:
    evaluation = Fine()

    def score_groups(self, images, prompts):
        return images.flatten(2).mean(2).argsort(1).argsort(1).float()

class Leaking(Ranks):
    def score_groups(self, images, prompts):
        scores = images.flatten(2).mean(2)
        return scores - scores.mean()
"""
TINY = TINY_RUN.replace(groups=3, group_size=4)
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
    ("reward", "Darkens", "Darkens.*changed its images in place"),
    ("reward", "Leaking", "Leaking.*depends on the batch.*check_group_reward"),
]
NESTED = {"gdpo": "Upside", "stepwise-gain": "Careless", "clipped": "Centred"}


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def spec_of(mine, part):
    nested = NESTED.get(part.partition("(")[0])
    return part.format(f"{mine}:{nested}") if nested else f"{mine}:{part}"


def notes_on(*configs, seconds=SECONDS):
    """The warnings of a trial."""
    notes = []
    try_parts(configs, notes.append, seconds)
    return notes


@pytest.mark.parametrize(("setting", "part", "message"), FAULTS)
def test_a_faulty_part_stops_the_run_before_anything_is_written(
    setting, part, message, mine, tmp_path
):
    config, out = TINY.replace(**{setting: spec_of(mine, part)}), tmp_path / "out"
    with pytest.raises(
        ConfigError, match=rf"(?s)^{setting}: .*{message}.*--no-trial \(trial=False"
    ):
        Run(config, out).execute()
    assert not out.exists()
    assert Run(config, out, trial=False).execute()


@pytest.mark.satellite
@pytest.mark.parametrize(("setting", "part"), [("loss", "Ascent"), ("heldout-rewards", "Centred")])
def test_a_faulty_part_stops_a_comparison(setting, part, mine, tmp_path, capsys):
    out = tmp_path / "out"
    options = f"{MIXTURE} --methods flow-grpo --seeds 0 --workers 1 --iterations 1 --out {out}"
    command = f"compare {options} --{setting} {spec_of(mine, part)}"
    error = error_of(command, capsys)
    assert error.count("\n") == 1 and f"{part} failed the trial" in error and "--no-trial" in error
    assert not out.exists()
    assert flowrl_(f"{command} --no-trial") == 0


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "Zeros",
            "Zeros.*rising from 0 to 1 gets a total credit of 0",
        ),  # it may pay other decisions
        ("Unmasked", "broken.*: reads_nothing_outside_the_mask.*check_credit"),
    ],
)
def test_what_matters_in_some_runs_only_is_a_warning(part, message, mine):
    notes = notes_on(TINY.replace(credit=f"{mine}:{part}"))
    assert any(re.search(message, note) for note in notes), notes


@pytest.mark.parametrize(("reward", "count"), [("Noisy", 1), ("Fine", 0), ("Ranks", 0)])
def test_only_a_random_reward_is_a_warning_and_the_trial_changes_no_number(
    reward, count, mine, tmp_path
):
    """Also of a reward that draws from PyTorch's generator."""
    states, weights = [], set()
    for trial in (True, False):
        torch.manual_seed(0)
        config, out = TINY.replace(reward=f"{mine}:{reward}"), tmp_path / str(trial)
        assert Run(config, out, states.append, trial=trial).execute()
        weights.add((out / "weights.safetensors").read_bytes())
    warnings = [state["warning"] for state in states if "trial" in state.get("kinds", ())]
    assert len(warnings) == count and all("the reward is random" in text for text in warnings)
    assert len(weights) == 1


def test_only_users_parts_are_tried_and_each_once(mine, monkeypatch):
    tried = []
    monkeypatch.setattr(
        "flowrl.testing.trial._try_part", lambda config, name, *rest: tried.append(name)
    )
    rule = TINY.replace(credit=f"{mine}:Upside")
    built_in = TINY.replace(credit="gdpo(rule=stepwise-gain)", loss="gspo")
    try_parts([rule, rule.replace(seed=1), TINY, built_in])
    assert len(tried) == 1


def test_checks_that_do_not_fit_into_the_time_are_named(mine):
    notes = notes_on(TINY.replace(credit=f"{mine}:Upside", loss=f"{mine}:Ascent"), seconds=0.0)
    assert len(notes) == 2
    assert all("not tried within 5 s: " in note for note in notes)
