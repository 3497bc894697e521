"""Evaluation: several processes divide the samples and the held-out metrics, and all get what one
process computes.
"""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from flowrl.distributed import Distributed
from flowrl.rewards import FunctionReward, NoisyReward
from flowrl.rewards.diversity import (
    LatentFeatures,
    PixelFeatures,
    group_features,
    pairwise_diversity,
)
from flowrl.rollout import EVALUATION_SEED, ImageBatch, initial_noise, sample_images, score
from flowrl.training.evaluation import DIVERSITY_SEED, HeldoutMetrics, evaluate
from flowrl.worlds.base import PolicyOptions, world

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

    def __init__(self, rank: int, exchange: Exchange):
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
    heldout = here.prompts(task, "heldout")
    prompts = [heldout[i % len(heldout)] for i in range(count)]

    def all_at_once(prompts, seed):
        noise = initial_noise(policy, len(prompts), seed)
        return ImageBatch.cat(sample_images(policy, prompts, noise, steps, max_batch=batch))

    together = all_at_once(prompts, EVALUATION_SEED)
    repeated = all_at_once([prompt for prompt in heldout[:2] for _ in range(3)], DIVERSITY_SEED)
    features = group_features(LatentFeatures(), repeated.images, repeated.latents, (2, 3))
    expected = {
        form: score(here.reward(form), together.images, prompts).total for form in here.forms
    }
    density = score(here.qualities[quality](), together.images, prompts).total

    images, latents, conditions = LiveRows(), LiveRows(), LiveRows()
    decode, encode = policy.decode, policy.encode

    def watched_encode(prompts):
        condition = encode(prompts)
        conditions.add(*condition.tensors.values())
        return condition

    watched_decode = lambda latent: images.add(decode(latents.add(latent)).clone())  # noqa: E731
    monkeypatch.setattr(policy, "encode", watched_encode)
    monkeypatch.setattr(policy, "decode", watched_decode)
    rewards = {quality: here.qualities[quality]()}
    metrics = HeldoutMetrics(rewards, LatentFeatures(), prompts=2, samples=3)
    given = (policy, here, task, "soft", count, steps, batch)
    evaluation = evaluate(*given, keep=3, heldout_metrics=metrics)
    assert images.most == latents.most == conditions.most == batch
    assert images.now == latents.now == 0
    assert evaluation.scores == {form: float(values.nanmean()) for form, values in expected.items()}
    assert torch.equal(evaluation.image_scores, expected["soft"][:3])
    assert torch.equal(evaluation.images, together.images[:3])
    assert evaluation.row["proxy"] == evaluation.scores["soft"]
    assert evaluation.row["heldout"] == {quality: float(density.nanmean())}
    assert evaluation.row["diversity"] == float(pairwise_diversity(features).nanmean())
