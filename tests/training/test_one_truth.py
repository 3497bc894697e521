"""A method's name means the same in Python, in settings, in presets and in comparisons."""

from dataclasses import replace

import pytest
import torch
from flowrl_compare.command import Compare

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.core.protocols import ForwardLoss
from flowrl.methods import METHODS, with_options
from flowrl.samplers import CPS, FixedWindow
from flowrl.training.build import method_parts, run_method
from flowrl.training.config import RunConfig, preset
from flowrl.training.presets import METHOD_SETTINGS, OWN_WINDOWS, WORLD_DEFAULTS, shipped
from flowrl.worlds.base import world as named_world

NUMBERS = {"clip_range": 0.01, "kl_weight": 0.0}
WORLDS_AND_METHODS = [(world, name) for world in WORLD_DEFAULTS for name in METHODS]
REASONS = {
    ("tp-grpo", "sampler"): "the released script samples with CPS; here comparisons share Flow-SDE",
    ("granular-grpo", "window"): "the first half of 16 steps; the method has that of 10",
}
"""Differences between a method and its preset with flowrl's definitions."""


@pytest.mark.parametrize("name", METHODS)
def test_settings_without_further_words_are_the_method(name):
    found, published = run_method(RunConfig.of(method=name)), METHODS[name]()
    assert replace(found, loss=published.loss) == published
    assert with_options(found.loss, **NUMBERS) == with_options(published.loss, **NUMBERS)


@pytest.mark.parametrize(("world", "name"), WORLDS_AND_METHODS)
def test_worlds_change_no_part_but_the_listed_window_and_the_clip(world, name):
    """With published settings not even the window."""
    method = METHODS[name]()
    start, stop = map(int, WORLD_DEFAULTS[world]["window"].split(":"))
    windows = {True: method.window, False: FixedWindow(start, stop)}
    if name in OWN_WINDOWS:
        windows[False] = method.window
    for published, window in windows.items():
        used = run_method(preset("default").apply(world=world, method=name, published=published))
        assert replace(used, loss=method.loss, window=method.window) == method
        assert type(used.loss) is type(method.loss) and used.window == window
        if published and hasattr(method.loss, "clip_range"):
            expected = method.loss.clip_range * (65_536 / named_world(world).elements) ** 0.5
            assert used.loss.clip_range == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in shipped()["methods"] if name in METHODS])
def test_presets_with_exact_definitions_agree_or_have_a_reason(name):
    published = METHODS[name]()
    config = preset(f"sd3.5-medium,{name},geneval,exact").apply()
    found, steps = run_method(config), config.rollout.num_steps
    generator = torch.Generator().manual_seed(0)
    windows = [
        list(one.window.steps(steps, generator.manual_seed(0))) for one in (found, published)
    ]
    agrees = {
        "sampler": found.sampler == published.sampler,
        "window": windows[0] == windows[1] or isinstance(published.loss, ForwardLoss),
        "loss": type(found.loss) is type(published.loss),
        "initial_noise": found.shared_noise == published.shared_noise,
    }
    assert {part for part, same in agrees.items() if not same} == {
        p for n, p in REASONS if n == name
    }


def test_changes_for_a_method_belong_to_methods():
    assert {name for table in METHOD_SETTINGS.values() for name in table} <= set(METHODS)


def test_a_comparison_gives_every_arm_its_own_parts():
    methods = ("flow-grpo", "dance-grpo", "tempflow-grpo")
    config = replace(Compare.defaults([]), methods=methods, seeds=(0,)).configuration()
    jobs = {job.algorithm.method: job for job in config.jobs().values()}
    parts = {name: method_parts(job) for name, job in jobs.items()}
    assert config.parts() == parts  # the report prints them
    assert parts["flow-grpo"]["sampler"] == "flow-sde(noise_level=0.7)"
    assert parts["dance-grpo"]["sampler"] == "dance-sde(noise_level=0.3)"
    sizes = {name: job.rollout.group_size for name, job in jobs.items()}
    assert sizes["tempflow-grpo"] == 30 and sizes["flow-grpo"] == 12


def test_a_setting_replaces_a_part_of_the_method():
    config = RunConfig.of(
        method="dance-grpo",
        sampler="cps",
        noise_level=0.4,
        window="1:4",
        loss="gspo",
        clip_range=0.02,
    )
    found = run_method(config)
    assert found.sampler == CPS(0.4) and found.window == FixedWindow(1, 4)
    assert found.loss.clip_range == 0.02 and found.shared_noise
    assert not run_method(config.replace(initial_noise="independent")).shared_noise
    assert run_method(RunConfig.of(method="dance-grpo", noise_level=0.5)).sampler.noise_level == 0.5
    with pytest.raises(ConfigError, match="a forward-process loss with awm"):
        run_method(RunConfig.of(method="awm", loss="clipped"))


def test_the_plan_shows_where_values_come_from(capsys):
    options = ["--world", "mixture", "--method", "tempflow-grpo", "--kl-weight", "0.1", "--plan"]
    assert main(["train", "--preset", "tiny", *options]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for words in (
        "sampler flow-sde(noise_level=0.7) [method]",
        "window 1:3 (steps 1-2 of 4) [preset tiny]",
        "[tiny, for tempflow-grpo]",
        "clip_range 0.002 [world mixture]",
        "kl_weight 0.1 [option]",
    ):
        assert words in told
    assert main(["train", "--settings", "published", "--world", "mixture", "--plan"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "window :-1 (steps 0-8 of 10) [method]" in told and "clip_range 0.0181 [method]" in told
