"""Measurements that reveal reward hacking: held-out rewards and diversity, and the figure of proxy
against held-out rewards.
"""

import math

import pytest
import torch
from flowrl_bench.pretrain_pairs import render
from flowrl_compare.results import load_run
from flowrl_rewards.clip import ClipFeatures, ClipNetwork
from tiny_rewards import tiny_clip

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.types import Prompt
from flowrl.parts.registry import build
from flowrl.rewards import FunctionReward, NoisyReward
from flowrl.rewards.diversity import (
    LatentFeatures,
    PixelFeatures,
    group_features,
    pairwise_diversity,
)
from flowrl.rollout import ImageBatch
from flowrl.training.build import make_world
from flowrl.training.config import preset
from flowrl.training.evaluation import make_heldout_metrics
from flowrl.training.run import Run
from flowrl.worlds.mixture import DensityReward, ring
from flowrl.worlds.scene import object_class, parse
from flowrl.worlds.verifier import ShapesQuality

FAILING = """
class Failing:
    def score(self, images, prompts):
        raise RuntimeError("the card is on fire")

class Marks:
    marks_invalid = True
    def score(self, images, prompts):
        scores = images.flatten(1).mean(1)
        return scores.where(scores > 0, float("nan"))
"""


# --- diversity
# --------------------------------------------------------------------------------------------------


def test_diversity_of_known_points():
    points = torch.tensor(
        [[[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, 1.0], [1.0, 3.0]]]
    )
    assert pairwise_diversity(points).tolist() == pytest.approx([(3 + 4 + 5) / 3, (0 + 2 + 2) / 3])
    with pytest.raises(ConfigError, match="members = 1"):
        pairwise_diversity(points[:, :1])


@pytest.mark.parametrize("members", [2, 3])
def test_diversity_is_unbiased_whatever_the_size_of_a_group(members):
    """E|X - X'| = 2 / sqrt(pi) for standard normals; false alarms once in 10^6 (4.9 standard
    errors).
    """
    features = torch.randn(20_000, members, 1, generator=torch.Generator().manual_seed(members))
    found = pairwise_diversity(features)
    gap = abs(float(found.mean()) - 2 / math.sqrt(math.pi))
    assert gap < 4.9 * float(found.std()) / math.sqrt(len(found)) < 0.05


def test_features():
    black, white = torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 4, 4)
    images = torch.cat([black, white, black, black])
    assert pairwise_diversity(
        group_features(PixelFeatures(), images, images[:, :1], (2, 2))
    ).tolist() == pytest.approx([1.0, 0.0])
    latents = torch.tensor([0.0, 0.0, 3.0, 1.0]).view(4, 1, 1, 1)
    assert pairwise_diversity(
        group_features(LatentFeatures(), images, latents, (2, 2))
    ).tolist() == pytest.approx([0.0, 2.0])


def test_clip_features_are_those_of_transformers(tmp_path):
    """The same class, a picture at a time; distance sqrt(2 - 2 cos)."""
    folder = str(tiny_clip(tmp_path / "clip"))
    images = torch.rand(4, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    features = build("features", f"clip(model='{folder}')", device="cpu")
    assert features == ClipFeatures(folder)
    found = pairwise_diversity(group_features(features, images, images, (2, 2)))
    encoder = ClipNetwork(folder, batch=64)
    rows = torch.cat([encoder.images(image[None]) for image in images])
    cosines = (rows[::2] * rows[1::2]).sum(1)
    assert torch.allclose(found.float(), (2 - 2 * cosines).sqrt(), atol=1e-4) and bool(
        (found > 0).all()
    )


# --- held-out rewards of the built-in worlds
# ------------------------------------------------------------------------


def test_qualities_of_shapes():
    cells = torch.zeros(2, 16, dtype=torch.long)
    cells[0, [0, 3]] = object_class("red", "circle")
    images, prompts = render(cells), [parse("two red circles").prompt()] * 2
    assert ShapesQuality("clarity").score(images, prompts).tolist() == pytest.approx(
        [1.0, 1.0], abs=0.05
    )
    palette = ShapesQuality("palette").score(images, prompts)
    assert palette[0] > 0.9 and palette[1] == 0.0
    blue = [parse("two blue circles").prompt()] * 2
    assert ShapesQuality("palette").score(images, blue)[0] < 0.1
    assert ShapesQuality("balance").score(images, prompts)[0] > 0.9
    noise = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert bool((ShapesQuality("clarity").score(noise, prompts) < 0.2).all())
    with pytest.raises(RewardError, match=r"palette: the prompt 'text \"K72\"' names no colour"):
        ShapesQuality("palette").score(images, [parse('text "K72"').prompt()] * 2)
    with pytest.raises(ConfigError, match="one of palette, balance, clarity"):
        ShapesQuality("beauty")


def test_density_of_points():
    points = torch.cat(
        [ring().means[:2], torch.tensor([[2 * math.cos(math.pi / 8), 2 * math.sin(math.pi / 8)]])]
    )
    found = DensityReward().score(points.view(3, 2, 1, 1), [Prompt("towards 0 degrees")] * 3)
    alone = math.log(1 / 8) - math.log(2 * math.pi * 0.25**2)
    between = alone + math.log(2) - (4 * math.sin(math.pi / 16)) ** 2 / (2 * 0.25**2)
    assert found.tolist() == pytest.approx([alone, alone, between], abs=1e-3)
    with pytest.raises(RewardError, match="are needed, one per prompt"):
        DensityReward().score(torch.zeros(1, 3, 4, 4), [Prompt("p")])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"world": "mixture", "heldout_rewards": ("jpeg-compressibility",)},
            "a reward of points",
        ),
        ({"world": "mixture", "heldout_rewards": ("clarity",)}, "unknown reward 'clarity'"),
        ({"heldout_rewards": ("ocr(speed=1)",)}, "has no option speed"),
        ({"diversity": "pixel"}, "unknown feature space 'pixel'.*did you mean 'pixels'"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused_before_the_run(changes, told, tmp_path):
    config = preset("tiny").apply(**changes)
    with pytest.raises(ConfigError, match=told):
        make_heldout_metrics(config, make_world(config))
    with pytest.raises(ConfigError, match=told):
        Run(config, tmp_path / "run").execute()
    assert not (tmp_path / "run").exists()


# --- in a run
# --------------------------------------------------------------------------------------------------


def mixture_run(folder, **changes):
    config = preset("tiny").apply(
        world="mixture", iterations=4, eval_every=2, checkpoint_every=2, **changes
    )
    Run(config, folder).execute()
    return load_run(folder)


def test_measuring_changes_no_number_of_the_run(tmp_path):
    """Weights, training and evaluation are bit for bit those of a run without."""
    plain = mixture_run(tmp_path / "plain")
    full = mixture_run(
        tmp_path / "full", heldout_rewards=("density", "strict"), diversity="latents"
    )
    assert (tmp_path / "plain/weights.safetensors").read_bytes() == (
        tmp_path / "full/weights.safetensors"
    ).read_bytes()
    for one, other in zip(plain.rows, full.rows, strict=True):
        for row in (one, other):
            for timed in ("seconds", "seconds_total", "phases"):
                row.pop(timed, None)
            if row["evaluation"]:
                row["evaluation"].pop("seconds")
        if other["evaluation"]:
            found = other["evaluation"]
            assert set(found) - set(one["evaluation"]) == {"proxy", "heldout", "diversity"}
            assert found["proxy"] == pytest.approx(found["reward"], abs=1e-6)
            assert (
                found["heldout"]["strict"] == found["strict"]
                and found["heldout"]["density"] < 0 < found["diversity"]
            )
            other["evaluation"] = {name: found[name] for name in one["evaluation"]}
        assert one == other


def test_the_proxy_has_the_errors_of_training(tmp_path):
    found = mixture_run(
        tmp_path / "run", heldout_rewards=("density",), reward_bias=10.0
    ).evaluations[-1]["evaluation"]
    assert abs(found["proxy"] - found["reward"]) > 0.01
    config = preset("tiny").apply(
        world="mixture", heldout_rewards=("density",), reward_bias=2.0, reward_noise=0.5, seed=3
    )
    metrics = make_heldout_metrics(config, make_world(config))
    assert metrics is not None
    points, scores = torch.randn(6, 2, 1, 1), torch.rand(6)
    scores[4] = float("nan")
    prompts = [Prompt("towards 0 degrees")] * 6
    expected = (
        NoisyReward(FunctionReward(lambda i, p: scores, True), 0.5, 2.0, 3)
        .score(points, prompts)[~scores.isnan()]
        .mean()
    )
    measured = metrics.with_errors(ImageBatch(points, points, prompts), scores)
    assert float(measured.nanmean()) == pytest.approx(float(expected))


def test_a_failure_is_not_kept_for_other_runs(tmp_path, caplog):
    """The untrained model's evaluation is shared between the runs of a comparison, unless something
    in it failed.
    """
    (tmp_path / "mine.py").write_text(FAILING)
    config = preset("tiny").apply(world="mixture", heldout_rewards=(f"{tmp_path}/mine.py:Failing",))
    Run(config, tmp_path / "a", shared=tmp_path).execute()
    assert "the card is on fire" in caplog.text
    assert not list(tmp_path.glob("untrained-*"))
    Run(config.replace(heldout_rewards=("density",)), tmp_path / "b", shared=tmp_path).execute()
    Run(config.replace(heldout_rewards=("strict",)), tmp_path / "c", shared=tmp_path).execute()
    assert len(list(tmp_path.glob("untrained-*.json"))) == 2


# --- the figure
# --------------------------------------------------------------------------------------------------
