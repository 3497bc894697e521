"""A method's name means the same in Python, in settings, in presets and in comparisons."""

from dataclasses import replace

import pytest
from small_run import flowrl_

from flowrl.core.errors import ConfigError
from flowrl.methods import METHODS, with_options
from flowrl.samplers import CPS, FixedWindow
from flowrl.training.build import run_method
from flowrl.training.config import RunConfig, preset
from flowrl.training.presets import METHOD_SETTINGS, OWN_WINDOWS, WORLD_DEFAULTS
from flowrl.worlds.base import world as named_world

NUMBERS = {"clip_range": 0.01, "kl_weight": 0.0}
WORLDS_AND_METHODS = [(world, name) for world in WORLD_DEFAULTS for name in METHODS]


@pytest.mark.parametrize("name", METHODS)
def test_settings_without_further_words_are_the_method(name):
    method, published = run_method(RunConfig.of(method=name)), METHODS[name]()
    assert replace(method, loss=published.loss) == published
    assert with_options(method.loss, **NUMBERS) == with_options(published.loss, **NUMBERS)


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


def test_changes_for_a_method_belong_to_methods():
    assert {name for table in METHOD_SETTINGS.values() for name in table} <= set(METHODS)


def test_a_setting_replaces_a_part_of_the_method():
    parts = dict(sampler="cps", noise_level=0.4, window="1:4", loss="gspo", clip_range=0.02)
    config = RunConfig.of(method="dance-grpo", **parts)
    method = run_method(config)
    assert method.sampler == CPS(0.4) and method.window == FixedWindow(1, 4)
    assert method.loss.clip_range == 0.02 and method.shared_noise
    assert not run_method(config.replace(initial_noise="independent")).shared_noise
    assert run_method(RunConfig.of(method="dance-grpo", noise_level=0.5)).sampler.noise_level == 0.5
    with pytest.raises(ConfigError, match="a forward-process loss with awm"):
        run_method(RunConfig.of(method="awm", loss="clipped"))


def test_the_plan_shows_which_parts_are_the_methods(capsys):
    for options, shown in (
        ("--method tempflow-grpo --kl-weight 0.1", "sampler flow-sde(noise_level=0.7) [method]"),
        ("--settings published", "window :-1 [method]"),
    ):
        assert flowrl_(f"train --world mixture {options} --plan") == 0
        assert shown in " ".join(capsys.readouterr().out.split())
