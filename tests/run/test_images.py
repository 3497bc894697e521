"""Statistics of training images, their best and worst, and warnings of drift."""

import math

import pytest
import torch
from hacked_images import HACKED, honest
from small_run import flowrl_, rows_of

from flowrl.core.processes import Processes
from flowrl.core.types import Prompt
from flowrl.run.images import NAMES, SHOWN, IterationImages, statistics
from flowrl.run.monitors import WINDOW, Limits, drifted, notices

MEMBERS = 4


def of(images):
    latents = torch.full((len(images), 4, 8, 8), 2.0)
    return dict(zip(NAMES, statistics(images, latents).unbind(1), strict=True))


def seen(batches, shows=False):
    """What an iteration says of batches of images; the reward is the number of the image."""
    images, count = IterationImages(shows), 0
    for batch in batches:
        numbers = torch.arange(count, count + len(batch)).float()
        prompts = [Prompt(f"prompt {int(n) // MEMBERS}") for n in numbers]
        images.add(batch, torch.ones(len(batch), 3), prompts, numbers)
        count += len(batch)
    return images.collected(Processes(), MEMBERS)


def test_statistics_of_known_images():
    half = torch.zeros(1, 3, 64, 64)
    half[:, :, :, 32:] = 1.0
    found = of(half)
    assert found["brightness"].item() == 0.5 and found["contrast"].item() == 0.5
    assert found["saturation"].item() == 0.0 and found["constant"].item() == 0.0
    assert found["detail"].item() == pytest.approx(1 / 63 / 2, abs=1e-6)  # one edge of 63
    assert found["latent_rms"].item() == 2.0
    red = torch.zeros(1, 3, 64, 64)
    red[:, 0] = 1.0
    assert of(red)["saturation"].item() == 1.0 and of(red)["constant"].item() == 1.0
    patch = torch.rand(2, 3, 16, 16)
    assert of(patch.repeat(1, 1, 4, 4))["repetition"].tolist() == pytest.approx([1.0, 1.0])
    assert (of(torch.rand(8, 3, 64, 64))["repetition"] < 0.2).all()


def test_a_video_has_the_mean_of_its_frames():
    video = torch.rand(2, 5, 3, 32, 32)
    latents = torch.rand(2, 4, 8, 8)
    frames = [statistics(video[:, f], latents) for f in range(5)]
    assert torch.allclose(statistics(video, latents), torch.stack(frames).mean(0), atol=1e-6)


def test_batches_do_not_matter_and_points_are_no_images():
    images = torch.rand(12, 3, 32, 32)
    whole, parts = seen([images]), seen(images.split(5))
    assert whole[0] == pytest.approx(parts[0], abs=1e-6)
    assert seen([torch.rand(12, 2, 1, 1)]) == ({}, [], [])


def test_diversity_is_the_deviation_within_groups():
    """Members at +-d around their group's colour have a deviation of d; groups do not count."""
    base = torch.rand(3, 1, 3, 1, 1) * 0.5 + 0.2
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0]).view(1, MEMBERS, 1, 1, 1)
    images = (base + 0.1 * signs).expand(3, MEMBERS, 3, 32, 32).flatten(0, 1)
    assert seen([images])[0]["diversity"] == pytest.approx(0.1, abs=1e-6)


def test_the_best_and_the_worst_images_are_kept():
    images = torch.linspace(0, 1, 24).view(24, 1, 1, 1).expand(24, 3, 16, 16)
    _, best, worst = seen(images.split(7), shows=True)
    assert [shown.sample for shown in best] == [23, 22, 21, 20][:SHOWN]
    assert [shown.sample for shown in worst] == [0, 1, 2, 3][:SHOWN]
    assert [shown.reward for shown in best] == [23.0, 22.0, 21.0, 20.0][:SHOWN]
    assert best[0].prompt == "prompt 5" and best[0].image.unique().tolist() == [255]
    few = IterationImages(shows=True)
    scores = torch.tensor([math.nan, 2.0, math.nan, 1.0])
    few.add(images[:4], torch.ones(4, 3), [Prompt("p")] * 4, scores)
    _, best, worst = few.collected(Processes(), MEMBERS)
    assert [s.sample for s in best] == [1, 3] and [s.sample for s in worst] == [3, 1]


def drift_rows(before, after):
    """Rows of five iterations with images of `before`, then three with those of `after`."""
    tables = [seen([make()])[0] for make in [before] * 5 + [after] * WINDOW]
    return [{"iteration": i, "images": table} for i, table in enumerate(tables, 1)]


@pytest.mark.satellite
@pytest.mark.parametrize("side", [64, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", HACKED)
def test_hacked_images_are_drift(kind, side):
    generator = torch.Generator().manual_seed(0)

    def usual():
        return honest(24, MEMBERS, side, generator)

    def after():
        return HACKED[kind](usual(), generator)

    assert drifted(drift_rows(usual, after)), kind
    rows = drift_rows(usual, after)
    limits = Limits()
    assert "drift" in [notice.kind for notice in notices(rows, limits)]
    assert not drifted(rows[:5])


@pytest.mark.satellite
@pytest.mark.parametrize("side", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_honest_images_are_no_drift(side):
    """Twenty starts of a run with other images in each iteration."""
    generator = torch.Generator().manual_seed(1)

    def usual():
        return honest(12, MEMBERS, side, generator)

    for _ in range(20):
        assert drifted(drift_rows(usual, usual)) == ""


def test_a_run_writes_the_statistics(tmp_path):
    assert flowrl_(f"train --preset tiny --world shapes --iterations 2 --out {tmp_path}/run") == 0
    for row in rows_of(tmp_path / "run")[1:]:
        assert {*row["images"]} == {*NAMES, "diversity"}
        assert 0 <= row["images"]["brightness"] <= 1
    text = f"train --preset tiny --world mixture --iterations 1 --out {tmp_path}/points"
    assert flowrl_(text) == 0 and "images" not in rows_of(tmp_path / "points")[1]
