"""Evaluation: several processes divide the samples and the held-out metrics, and all get what one
process computes; measurements that reveal reward hacking.
"""

import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from seeded import rand
from small_run import TINY_RUN, rows_of
from tiny_rewards import tiny_clip
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.types import Prompt
from flowrl.rewards import FunctionReward, NoisyReward
from flowrl.rewards.clip import ClipFeatures, ClipNetwork
from flowrl.rewards.diversity import (
    LatentFeatures,
    PixelFeatures,
    group_features,
    pairwise_diversity,
)
from flowrl.rollout import EVALUATION_SEED, ImageBatch, initial_noise, sample_images, score
from flowrl.run.build import make_world
from flowrl.run.distributed import Distributed
from flowrl.run.evaluation import (
    DIVERSITY_SEED,
    HeldoutMetrics,
    evaluate,
    make_heldout_metrics,
)
from flowrl.run.job import Run
from flowrl.run.parts.registry import build
from flowrl.run.worlds import world
from flowrl.worlds.built_in import PolicyOptions
from flowrl.worlds.mixture import DensityReward, ring
from flowrl.worlds.pretrain_pairs import render
from flowrl.worlds.scene import object_class, parse
from flowrl.worlds.verifier import ShapesQuality

WORLD = world("mixture")


@dataclass
class Exchange:
    """What the threads exchange."""

    size: int
    slots: list = field(default_factory=list)

    def __post_init__(self):
        self.slots, self.barrier = [None] * self.size, threading.Barrier(self.size)


class Threads(Distributed):
    """Threads in the place of processes: `gather` without a network."""

    def __init__(self, rank, exchange):
        super().__init__(rank, exchange.size)
        object.__setattr__(self, "exchange", exchange)

    def any(self, flag):
        return any(self.gather(flag))

    def gather(self, value):
        self.exchange.slots[self.rank] = value
        self.exchange.barrier.wait(60)
        values = list(self.exchange.slots)
        self.exchange.barrier.wait(60)
        return values


def evaluated(policy, count, metrics, distributed):
    options = dict(keep=5, reward=WORLD.reward("strict"), heldout_metrics=metrics)
    given = (policy, WORLD, "direction", "soft", count, 5)
    return evaluate(*given, **options, distributed=distributed)


def by_threads(size, policy, count, metrics):
    exchange = Exchange(size)
    threads = [Threads(rank, exchange) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(partial(evaluated, policy, count, metrics), threads))


@pytest.mark.parametrize(("size", "count"), [(2, 9), (3, 2)])
def test_processes_divide_the_samples_and_the_heldout_metrics(mixture_policy, size, count):
    rows = []

    def mean_x(images, prompts):
        rows.append(len(images))
        return images[:, 0, 0, 0]

    rewards = {"density": WORLD.qualities["density"](), "x": FunctionReward(mean_x)}
    errors = NoisyReward(FunctionReward(lambda images, prompts: 0 * images[:, 0, 0, 0]), 0.3, 0.5)
    metrics = HeldoutMetrics(rewards, PixelFeatures(), errors, prompts=5, samples=3)
    alone = evaluated(mixture_policy, count, metrics, Distributed())
    assert {"proxy", "heldout", "diversity"} < alone.row.keys() and rows == [count]
    rows.clear()
    for evaluation in by_threads(size, mixture_policy, count, metrics):
        assert evaluation.prompts == alone.prompts
        assert_close(evaluation.images, alone.images)
        assert_close(evaluation.image_scores, alone.image_scores)
        for key in alone.row.keys() - {"seconds"}:
            assert evaluation.row[key] == pytest.approx(alone.row[key], abs=1e-5), key
    assert sum(rows) == count and max(rows) == -(-count // size), "each sample is scored once"


def test_a_heldout_reward_that_fails_in_one_process_is_left_out_in_all(mixture_policy, caplog):
    def fails(images, prompts):
        if threading.current_thread().name.endswith("_1"):
            raise RuntimeError("the card is on fire")
        return images[:, 0, 0, 0]

    rewards = {
        "broken": FunctionReward(fails),
        "invalid": FunctionReward(lambda images, _: images[:, 0, 0, 0] / 0 * 0, True),
        "density": WORLD.qualities["density"](),
    }
    results = by_threads(2, mixture_policy, 4, HeldoutMetrics(rewards))
    assert caplog.text.count("broken could not be measured and is left out: PartError") == 1
    assert "invalid marked all 4 samples invalid" in caplog.text
    for evaluation in results:
        scores = evaluation.row["heldout"]
        assert scores["density"] < 0 and scores["broken"] is scores["invalid"] is None


class LiveRows:
    """Rows of tensors whose memory is still in use, and the most so far."""

    def __init__(self):
        self.now = self.most = 0

    def add(self, tensor):
        self.now += len(tensor)
        self.most = max(self.most, self.now)
        weakref.finalize(tensor.untyped_storage(), self.drop, len(tensor))
        return tensor

    def drop(self, rows):
        self.now -= rows


@pytest.mark.parametrize("name", ["mixture", "shapes"])
def test_an_evaluation_has_one_batch_in_memory_and_measures_what_all_at_once_would(
    name, monkeypatch
):
    """Bit for bit: scores, images, held-out rewards and diversity of 5 samples in batches of 2."""
    count, steps, batch = 5, 2, 2
    here, task = world(name), "direction" if name == "mixture" else "compositional"
    policy, quality = here.policy(PolicyOptions()), "density" if name == "mixture" else "clarity"
    heldout, rewards = here.prompts(task, "heldout"), {quality: here.qualities[quality]()}

    def all_at_once(prompts, seed):
        noise = initial_noise(policy, len(prompts), seed)
        return ImageBatch.cat(sample_images(policy, prompts, noise, steps, max_batch=batch))

    prompts = [heldout[i % len(heldout)] for i in range(count)]
    images = all_at_once(prompts, EVALUATION_SEED).images
    repeated = all_at_once([prompt for prompt in heldout[:2] for _ in range(3)], DIVERSITY_SEED)
    features = group_features(LatentFeatures(), repeated.images, repeated.latents, (2, 3))

    def scores(reward):
        return score(reward, images, prompts).total

    live, decode, encode = LiveRows(), policy.decode, policy.encode
    decoded, conditions = LiveRows(), LiveRows()

    def watched_encode(prompts):
        condition = encode(prompts)
        conditions.add(*condition.tensors.values())
        return condition

    watched_decode = lambda latent: decoded.add(decode(live.add(latent)).clone())  # noqa: E731
    monkeypatch.setattr(policy, "encode", watched_encode)
    monkeypatch.setattr(policy, "decode", watched_decode)
    metrics = HeldoutMetrics(rewards, LatentFeatures(), prompts=2, samples=3)
    given = (policy, here, task, "soft", count, steps, batch)
    evaluation = evaluate(*given, keep=3, heldout_metrics=metrics)
    assert decoded.most == live.most == conditions.most == batch and decoded.now == live.now == 0
    forms = {form: float(scores(here.reward(form)).nanmean()) for form in here.forms}
    assert evaluation.scores == forms and evaluation.row["proxy"] == forms["soft"]
    assert torch.equal(evaluation.image_scores, scores(here.reward("soft"))[:3])
    assert torch.equal(evaluation.images, images[:3])
    assert evaluation.row["heldout"] == {quality: float(scores(rewards[quality]).nanmean())}
    assert evaluation.row["diversity"] == float(pairwise_diversity(features).nanmean())


# Held-out rewards and diversity

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
            share, spread = scores["strict"], scores.pop("spread")  # of zeros and ones
            assert spread["strict"] == pytest.approx((share * (1 - share)) ** 0.5, abs=1e-6)
            assert spread["reward"] == pytest.approx(spread["proxy"], abs=1e-6)
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
