"""Measurements that reveal reward hacking: held-out rewards and diversity."""

import math

import pytest
import torch
from flowrl_bench.pretrain_pairs import render
from flowrl_rewards.clip import ClipFeatures, ClipNetwork
from seeded import rand
from small_run import TINY_RUN, rows_of
from tiny_rewards import tiny_clip

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.types import Prompt
from flowrl.parts.registry import build
from flowrl.rewards import NoisyReward
from flowrl.rewards.diversity import (
    LatentFeatures,
    PixelFeatures,
    group_features,
    pairwise_diversity,
)
from flowrl.training.build import make_world
from flowrl.training.evaluation import evaluate, make_heldout_metrics
from flowrl.training.run import Run
from flowrl.worlds.mixture import DensityReward, ring
from flowrl.worlds.scene import object_class, parse
from flowrl.worlds.verifier import ShapesQuality

MIXTURE = TINY_RUN.replace(iterations=4, eval_every=2, checkpoint_every=2)


def test_diversity_of_known_points():
    points = torch.tensor(
        [[[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, 1.0], [1.0, 3.0]]]
    )
    assert pairwise_diversity(points).tolist() == pytest.approx([(3 + 4 + 5) / 3, (0 + 2 + 2) / 3])
    with pytest.raises(ConfigError, match="members = 1"):
        pairwise_diversity(points[:, :1])


@pytest.mark.parametrize(
    ("features", "expected"), [(PixelFeatures(), [1.0, 0.0]), (LatentFeatures(), [0.0, 2.0])]
)
def test_features_are_of_pixels_or_latents(features, expected):
    images = torch.tensor([0.0, 1.0, 0.0, 0.0]).view(4, 1, 1, 1).expand(4, 3, 4, 4)
    latents = torch.tensor([0.0, 0.0, 3.0, 1.0]).view(4, 1, 1, 1)
    vectors = group_features(features, images, latents, (2, 2))
    assert pairwise_diversity(vectors).tolist() == pytest.approx(expected)


def test_clip_features_are_those_of_transformers(tmp_path):
    """The same class, a picture at a time; distance sqrt(2 - 2 cos)."""
    folder = str(tiny_clip(tmp_path / "clip"))
    images = rand(4, 3, 40, 40)
    features = build("features", f"clip(model='{folder}')", device="cpu")
    assert features == ClipFeatures(folder)
    diversity = pairwise_diversity(group_features(features, images, images, (2, 2)))
    encoder = ClipNetwork(folder, batch=64)
    rows = torch.cat([encoder.images(image[None]) for image in images])
    cosines = (rows[::2] * rows[1::2]).sum(1)
    assert torch.allclose(diversity.float(), (2 - 2 * cosines).sqrt(), atol=1e-4)


def test_qualities_of_shapes():
    """From 0 to 1: above 0.9 or below 0.2."""
    cells = torch.zeros(2, 16, dtype=torch.long)
    cells[0, [0, 3]] = object_class("red", "circle")
    scene, empty = render(cells)

    def score(quality, image, prompt):
        return float(ShapesQuality(quality).score(image[None], [parse(prompt).prompt()]))

    for quality, image, prompt, high in (
        ("clarity", scene, "two red circles", True),
        ("clarity", empty, "two red circles", True),
        ("clarity", rand(3, 64, 64), "two red circles", False),
        ("palette", scene, "two red circles", True),
        ("palette", empty, "two red circles", False),
        ("palette", scene, "two blue circles", False),
        ("balance", scene, "two red circles", True),
    ):
        found = score(quality, image, prompt)
        assert 0.9 <= found <= 1.0 if high else 0.0 <= found <= 0.2, (quality, prompt)
    with pytest.raises(RewardError, match=r"palette: the prompt 'text \"K72\"' names no colour"):
        score("palette", scene, 'text "K72"')
    with pytest.raises(ConfigError, match="one of palette, balance, clarity"):
        ShapesQuality("beauty")


def test_density_of_points():
    angle = torch.tensor(math.pi / 8)
    points = torch.stack([*ring().means[:2], 2 * torch.stack([angle.cos(), angle.sin()])])
    scores = DensityReward().score(points.view(3, 2, 1, 1), [Prompt("towards 0 degrees")] * 3)
    alone = math.log(1 / 8) - math.log(2 * math.pi * 0.25**2)
    between = alone + math.log(2) - (4 * math.sin(math.pi / 16)) ** 2 / (2 * 0.25**2)
    assert scores.tolist() == pytest.approx([alone, alone, between], abs=1e-3)
    with pytest.raises(RewardError, match="are needed, one per prompt"):
        DensityReward().score(torch.zeros(1, 3, 4, 4), [Prompt("p")])


def test_measuring_changes_no_number_of_the_run(tmp_path):
    """Weights, training and evaluation are bit for bit those of a run without."""
    plain, full = tmp_path / "plain", tmp_path / "full"
    Run(MIXTURE, plain).execute()
    measures = dict(heldout_rewards=("density", "strict"), diversity="latents")
    Run(MIXTURE.replace(**measures), full).execute()
    first, second = ((run / "weights.safetensors").read_bytes() for run in (plain, full))
    assert first == second
    for row, other in zip(rows_of(plain), rows_of(full), strict=True):
        if scores := other["evaluation"]:
            proxy, heldout = scores.pop("proxy"), scores.pop("heldout")
            assert proxy == pytest.approx(scores["reward"], abs=1e-6)
            assert heldout["strict"] == scores["strict"]
            assert heldout["density"] < 0 < scores.pop("diversity")
        assert row == other


def test_the_proxy_has_the_errors_of_training(mixture_policy):
    errors = dict(reward_noise=0.5, reward_bias=2.0, seed=3)
    config = MIXTURE.replace(heldout_rewards=("density",), **errors)
    world = make_world(config)
    metrics = make_heldout_metrics(config, world)
    given = mixture_policy, world, "direction", "soft", 6, 2
    measured = evaluate(*given, keep=6, heldout_metrics=metrics)
    noisy = NoisyReward(world.reward("soft"), std=0.5, bias=2.0, seed=3)
    expected = float(noisy.score(measured.images, measured.prompts).mean())
    assert measured.row["proxy"] == pytest.approx(expected)
    assert abs(expected - measured.row["reward"]) > 0.01
