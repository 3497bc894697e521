"""The laboratory's variants of the 2-D world, and pretraining of the shapes world."""

import json

import pytest
import torch
from seeded import randn

from flowrl.run.worlds import world
from flowrl.testing import check_world
from flowrl.worlds import mixture
from flowrl.worlds.built_in import PolicyOptions
from flowrl.worlds.points import Points, data
from flowrl.worlds.pretraining import PretrainConfig, pretrain_to_file


@pytest.mark.parametrize("world", [Points(), Points(16)])
def test_worlds_keep_their_promises(world):
    findings = check_world(world)
    assert findings.ok and not findings.marked("advice"), str(findings)


def test_further_coordinates_are_independent_of_the_modes():
    """The base flow moves the plane as in two dimensions, and each other coordinate as N(0, s^2)
    alone.
    """
    x, t = randn(50, 5), torch.linspace(0, 1, 50)
    velocity, ring = data(5).velocity(x, t), mixture.ring()
    torch.testing.assert_close(velocity[:, :2], ring.velocity(x[:, :2], t))
    variance = (1 - t).square() * ring.std**2 + t.square()
    alone = (t - (1 - t) * ring.std**2) / variance
    torch.testing.assert_close(velocity[:, 2:], alone[:, None] * x[:, 2:], rtol=1e-4, atol=1e-4)


SHORT = PretrainConfig(
    updates=2, batch=4, warmup=1, careless_updates=1, pairs=40, variants=2, autoencoder_updates=2
)


def test_weights_are_reproducible_and_fit_the_world(tmp_path):
    phases, cards = [], []
    for name in ("first", "second"):
        path = tmp_path / f"{name}.safetensors"
        report = lambda phase, *numbers: phases.append(phase)  # noqa: E731
        pretrain_to_file(SHORT, path, torch.get_num_threads(), report, "flowrl pretrain")
        cards.append(json.loads(path.with_suffix(".json").read_text()))
    assert cards[0] == cards[1] and cards[0]["config"]["updates"] == 2
    assert list(dict.fromkeys(phases)) == ["autoencoder", "base model", "careless captions"]
    policy = world("shapes").policy(PolicyOptions(base_weights=str(path)))
    condition = policy.encode([world("shapes").parse("three red circles")])
    given = torch.zeros(1, *policy.latent_shape), torch.tensor([500.0]), condition
    assert policy.velocity(*given).isfinite().all()
