"""Pretraining of the shapes world: the same weights every time, written with a card that the world
accepts.
"""

import json

import torch
from flowrl_bench.pretraining import PretrainConfig, pretrain_to_file

from flowrl.worlds.base import PolicyOptions, world

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
