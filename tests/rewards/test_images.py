"""Rewards of images and videos that need no network: JPEG sizes, frames, motion."""

import io

import pytest
import torch
from seeded import rand

from flowrl.core.errors import ConfigError, RewardContractError, RewardError
from flowrl.core.types import Prompt
from flowrl.rewards import (
    FrameMean,
    FunctionReward,
    JPEGIncompressibility,
    Motion,
    WeightedSum,
    stills,
)
from flowrl.rewards.images import chosen_frames, to_bytes, to_pillow
from flowrl.run.parts.registry import build
from flowrl.testing import reward_contract

TWO = [Prompt("a"), Prompt("b")]


def test_bytes_round_and_clamp_and_channels_keep_their_order():
    levels = torch.tensor([0.0, 0.4999 / 255, 0.5001 / 255, 1.0, 1.7, -3.0]).view(1, 1, 1, 6)
    assert to_bytes(levels).flatten().tolist() == [0, 0, 1, 255, 255, 0]
    (colour,) = to_pillow(torch.tensor([1.0, 0.0, 0.2]).view(1, 3, 1, 1))
    (grey,) = to_pillow(torch.full((1, 1, 1, 1), 0.2))
    for value in (torch.nan, torch.inf):
        with pytest.raises(RewardError, match="images have values that are not finite"):
            to_bytes(torch.full((1, 3, 2, 2), value))
    assert (colour.getpixel((0, 0)), grey.getpixel((0, 0))) == ((255, 0, 51), (51, 51, 51))


def test_jpeg_size_is_that_of_the_file():
    images, file = videos()[0][:2, 0], io.BytesIO()
    sizes = JPEGIncompressibility().score(images, TWO)
    to_pillow(images)[1].save(file, format="JPEG", quality=95)
    assert sizes[1] == pytest.approx(len(file.getvalue()) / 1000)
    assert (JPEGIncompressibility(50).score(images, TWO) < sizes).all()
    with pytest.raises(ConfigError, match=r"quality = 100 .* in \[1, 95\]"):
        build("reward", "jpeg-compressibility(quality=100)")
    with pytest.raises(RewardError, match=r"scores images but got videos \[4, 5, 3, 8, 8\]"):
        JPEGIncompressibility().score(*videos())


test_jpeg_compressibility = reward_contract(lambda: build("reward", "jpeg-compressibility"))
test_jpeg_incompressibility = reward_contract(
    lambda: build("reward", "jpeg-incompressibility(quality=75)")
)


def videos():
    return rand(4, 5, 3, 8, 8), [Prompt(f"video {i}") for i in range(4)]


BRIGHT = FunctionReward(
    lambda images, prompts: (
        images.mean((1, 2, 3)) + torch.tensor([float(p.text[-1]) for p in prompts])
    )
)

test_frame_mean = reward_contract(FrameMean(BRIGHT, 2), videos())
test_a_sum = reward_contract(
    WeightedSum({"look": FrameMean(BRIGHT, 1), "motion": Motion()}, {"motion": 2.0}), videos()
)


@pytest.mark.parametrize(
    ("frames", "count", "chosen"),
    [
        ("all", 3, [0, 1, 2]),
        (1, 4, [1]),
        (3, 5, [0, 2, 4]),
        (9, 33, [0, 4, 8, 12, 16, 20, 24, 28, 32]),
        (8, 3, [0, 1, 2]),
    ],
)
def test_frames_are_chosen(frames, count, chosen):
    """Nine of 33 are every fourth, as Flow-GRPO's video OCR reads."""
    assert chosen_frames(frames, count) == chosen


def test_every_frame_has_its_videos_prompt_and_an_invalid_frame_makes_the_video_invalid():
    images, prompts = videos()
    expected = images[:, [0, 2, 4]].flatten(1).mean(1) + torch.arange(4)
    torch.testing.assert_close(FrameMean(BRIGHT, 3).score(images, prompts), expected)
    marks = torch.tensor([1.0, 1.0, 1.0, torch.nan, 1.0, 1.0, 1.0, 1.0])
    reward = FrameMean(FunctionReward(lambda images, prompts: marks, marks_invalid=True), 2)
    assert reward.score(images, prompts).isnan().tolist() == [False, True, False, False]
    with pytest.raises(RewardContractError, match="FunctionReward of frame-mean returned 1 of 8"):
        FrameMean(FunctionReward(lambda images, prompts: marks), 2).score(images, prompts)
    with pytest.raises(ConfigError, match=r"frames = 'second' .*all or"):
        FrameMean(BRIGHT, "second")


def test_motion_by_hand():
    images = torch.zeros(2, 3, 3, 2, 2)
    images[0, 1], images[1, 2] = 1.0, 0.5
    assert Motion().score(images, TWO).tolist() == [1.0, 0.25]
    with pytest.raises(RewardError, match="motion scores videos with two or more frames"):
        Motion().score(images[:, 0], TWO)


def test_stills_are_the_first_middle_and_last_frame_side_by_side():
    images = torch.arange(5.0).view(1, 5, 1, 1, 1).expand(1, 5, 3, 4, 2)
    assert stills(images)[0, 0].tolist() == [[0.0, 0.0, 2.0, 2.0, 4.0, 4.0]] * 4
    assert [stills(images[:, :count]).shape[-1] for count in (1, 2, 4)] == [2, 4, 6]
    assert torch.equal(stills(images[:, 0]), images[:, 0])
