"""What the stochastic sampler draws, as claims about samplers and turning points are judged by it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flowrl_bench import samples
from flowrl_bench.catalogue import CLAIMS
from flowrl_bench.claims import make_run
from flowrl_bench.lock import held
from flowrl_bench.measure import log_density
from flowrl_bench.records import config_hash
from flowrl_bench.runner import evidence
from flowrl_bench.samples import Samples, joined, look, observe, observer, wanted

from flowrl.errors import ConfigError
from flowrl.training.build import make_method, make_reward, make_world, policy_options
from flowrl.training.trainer import Trainer

SMALL = {"iterations": 1, "groups": 2, "group_size": 3, "eval_samples": 6, "eval_steps": 4, "window": "all-but-last"}


def trainer_of(seed=0, **changes):
    config = make_run("mixture", "direction", seed, {**SMALL, **changes})
    world = make_world(config)
    policy = world.policy(policy_options(config))
    return Trainer(policy, make_method(config), make_reward(config), world.prompts(config.environment.task, "train"), config)


def test_every_seed_has_noise_of_its_own_and_a_sampling_error_that_shows():
    """The untrained policy is the same for all seeds: what differs is the sampling, as an interval over seeds must know."""
    found = torch.tensor([observe(trainer_of(seed), members=8)["quality"] for seed in range(8)])
    assert found.unique().numel() == 8
    error = 1.0 / (8 * 18) ** 0.5  # the log-density of a two-dimensional Gaussian's own samples has standard deviation 1
    assert 0.4 * error < float(found.std()) < 2.5 * error  # a standard deviation of 8: outside of it less than once in 1,000


def test_the_quality_of_a_fine_sampler_is_that_of_the_data():
    """Euler-Maruyama with 40 steps and the exact velocity; the false-alarm rate is that of 4 standard errors."""
    trainer = trainer_of(steps=40)
    data = trainer.policy.mixture.sample(20_000, torch.Generator().manual_seed(0)).reshape(-1, 2, 1, 1)
    error = 1.0 / (18 * 32) ** 0.5
    assert observe(trainer, members=32)["quality"] == pytest.approx(log_density(trainer.policy, data), abs=4 * error + 0.03)


def test_observing_changes_nothing():
    one, other = trainer_of(), trainer_of()
    observe(one, members=2)
    assert one.iteration()["loss"] == other.iteration()["loss"]


def test_samples_are_kept_joined_and_asked_for(tmp_path):
    claim = CLAIMS["point-density"]
    run = make_run("mixture", "direction", 0, {**claim.base, **claim.arms["turning points"]})
    assert list(wanted({"point-density": claim}, {"mixture": (0,)})) == [config_hash(run)]
    small = make_run("mixture", "direction", 0, SMALL)
    file, told = Samples(tmp_path / "samples.json"), []
    file.complete({"a": small}, 1, lambda done, total: told.append((done, total)))
    rows = file.read()
    assert told == [(1, 1)] and rows == {"a": look(small)}
    file.complete({"a": replace(small, seed=1)}, 1, lambda done, total: pytest.fail("looked at again"))
    line = {"curve": [[0.0] * 7 + [rows["a"]["final"], 0.0, 0.0]]}
    assert joined({"a": line, "b": line}, rows) == {"a": {**line, "samples": rows["a"]}, "b": line}
    other = {"curve": [[0.0] * 7 + [rows["a"]["final"] + 1e-7, 0.0, 0.0]]}
    with pytest.raises(ConfigError, match="delete the file of samples"):
        joined({"a": other}, rows)
    assert evidence(claim, "mixture", {config_hash(run): line}, (0,)) is None
    assert evidence(claim, "mixture", {config_hash(run): joined({"a": line}, rows)["a"]}, (0,)) is not None
    for text in ("{", json.dumps({"other": 1})):
        file.path.write_text(text)
        with pytest.raises(ConfigError, match=r"samples\.json does not hold"):
            file.read()


def test_samples_say_what_observed_them(tmp_path, monkeypatch):
    """Rows of another `observe` are refused by who reads them, and measured again by who may measure; they are never mixed."""
    file, told = Samples(tmp_path / "samples.json"), []
    small = make_run("mixture", "direction", 0, SMALL)
    file.complete({"a": small}, 1, lambda *_: None)
    kept = json.loads(file.path.read_text())
    for other in ({**kept, "observer": "0123456789abcdef"}, {name: value for name, value in kept.items() if name != "observer"}):
        file.path.write_text(json.dumps({**other, "rows": {"a": {"final": 0.0}, "b": {"final": 0.0}}}))
        with pytest.raises(ConfigError, match=r"samples\.json was observed by other code .* --look"):
            file.read()
    file.complete({"a": small}, 1, lambda done, total: told.append((done, total)))
    assert told == [(1, 1)] and json.loads(file.path.read_text()) == kept
    before = observer()
    monkeypatch.setattr(samples, "MEMBERS", 64)
    assert observer() != before
    with held(file.path, "another's work"), pytest.raises(ConfigError, match="another's work"):
        file.complete({"b": small}, 1, lambda *_: None)


def test_the_published_samples_were_observed_as_today():
    """Whoever changes `observe` measures them again."""
    assert len(Samples(Path(__file__).parents[2] / "benchmarks" / "results" / "claims-samples.json").read()) > 10


def test_only_the_plane_can_be_observed():
    trainer = trainer_of()
    trainer.policy = object()
    with pytest.raises(ConfigError, match="only the 2-D world"):
        observe(trainer)
