"""Learning rates over the iterations: closed forms, as in diffusers, and the same after a resume."""

import json
import math

import pytest
from small_run import MIXTURE, SMALL, error_of, rows_of

from flowrl.core.errors import ConfigError
from flowrl.run.build import make_trainer
from flowrl.run.config import RunConfig, load_config, preset
from flowrl.run.job import Run
from flowrl.run.optim import learning_rate_of


def rates(iterations, **settings):
    config = RunConfig.of(learning_rate=3e-3, iterations=iterations, **settings)
    rate = learning_rate_of(config.optim, iterations)
    return [rate(done) / 3e-3 for done in range(iterations)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda n: 1.0),
        ({"warmup": 3}, lambda n: min(1.0, (n + 1) / 4)),
        ({"lr_schedule": "linear"}, lambda n: 1 - n / 10),
        ({"lr_schedule": "linear", "final_learning_rate": 0.2}, lambda n: 1 - 0.8 * n / 10),
        ({"lr_schedule": "cosine"}, lambda n: (1 + math.cos(math.pi * n / 10)) / 2),
        (
            {"lr_schedule": "cosine", "final_learning_rate": 0.1, "warmup": 2},
            lambda n: (
                (n + 1) / 3 if n < 2 else 0.1 + 0.9 * (1 + math.cos(math.pi * (n - 2) / 8)) / 2
            ),
        ),
    ],
)
def test_closed_forms(settings, expected):
    found = rates(10, **settings)
    assert found == pytest.approx([expected(n) for n in range(10)], rel=1e-12)
    assert min(found) > 0


def earlier_rate(start, end, iterations):
    """The formula until format 4."""
    return [start * (end + (1 - end) * (1 - done / iterations)) for done in range(iterations)]


def test_rates_of_earlier_runs(tmp_path):
    """To 1.0, which was the default, bit by bit; otherwise within the rounding of one division."""
    values = {"format": "flowrl-run-4", **RunConfig.of(learning_rate=1e-3).as_dict()}
    for name in ("lr_schedule", "warmup"):
        del values["optim"][name]
    for name in ("on_reward_error", "reward_timeout"):
        del values["environment"][name]
    for end in (1.0, 0.2):
        values["optim"]["final_learning_rate"] = end
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = load_config(tmp_path / "config.json")
        assert (config.optim.lr_schedule, config.optim.warmup) == ("linear", 0)
        rate, before = learning_rate_of(config.optim, 75), earlier_rate(1e-3, end, 75)
        found = [rate(done) for done in range(75)]
        assert found == (before if end == 1 else pytest.approx(before, rel=4e-16))


def test_the_preset_long_decays_as_before():
    config = preset("long").apply()
    rate = learning_rate_of(config.optim, config.iterations)
    found = [rate(done) for done in range(75)]
    assert found == pytest.approx(earlier_rate(3e-3, 0.2, 75), rel=4e-16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"final_learning_rate": 0.2}, "final_learning_rate = 0.2 .* lr_schedule linear or cosine"),
        ({"lr_schedule": "polynomial"}, "constant, linear, cosine"),
        ({"warmup": 12, "iterations": 12}, r"warmup = 12 .* below iterations \(12\)"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.of(**settings)


def test_the_command_line(tmp_path, capsys):
    line = f"train {MIXTURE} --out {tmp_path}/out --final-learning-rate 0.5"
    assert "final_learning_rate = 0.5" in error_of(line, capsys)


def test_a_resume_has_the_rates_of_an_undisturbed_run(tmp_path):
    config = SMALL.replace(iterations=5, lr_schedule="cosine", warmup=1)
    Run(config, tmp_path / "whole").execute()
    stops = iter([False, True])
    Run(config, tmp_path / "parts", stop=lambda: next(stops)).execute()
    Run(config, tmp_path / "parts").execute(resume=True)
    whole, parts = rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts")
    assert whole == parts
    rate = learning_rate_of(config.optim, 5)
    assert [row["learning_rate"] for row in whole[1:]] == [rate(done) for done in range(5)]


def test_the_optimizer_has_the_rate():
    trainer = make_trainer(SMALL.replace(lr_schedule="linear", iterations=2))
    for expected in (1.0, 0.5):
        trainer.iteration()
        assert trainer.optimizer.param_groups[0]["lr"] == expected * SMALL.optim.learning_rate
