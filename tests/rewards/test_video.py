"""Rewards of videos: means over chosen frames, motion, and images to show videos by."""

import pytest
import torch

from flowrl.errors import ConfigError, RewardContractError, RewardError
from flowrl.registry import build
from flowrl.rewards import OCR, FrameMean, FunctionReward, JPEGIncompressibility, Motion, WeightedSum, stills
from flowrl.rewards.video import chosen_frames
from flowrl.testing import reward_contract
from flowrl.types import Prompt


def videos():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(4, 5, 3, 8, 8, generator=generator), [Prompt(f"video {i}") for i in range(4)]


BRIGHT = FunctionReward(lambda images, prompts: images.mean((1, 2, 3)) + torch.tensor([float(p.text[-1]) for p in prompts]))

test_frame_mean = reward_contract(FrameMean(BRIGHT, 2), videos)
test_frame_mean_of_jpegs = reward_contract(FrameMean(JPEGIncompressibility(), "all"), videos)
test_frame_mean_of_images = reward_contract(FrameMean(JPEGIncompressibility()))
test_motion = reward_contract(Motion(), videos)
test_a_sum = reward_contract(WeightedSum({"look": FrameMean(BRIGHT, "first"), "motion": Motion()}, {"motion": 2.0}), videos)


@pytest.mark.parametrize(
    ("frames", "count", "chosen"),
    [
        ("first", 5, [0]), ("middle", 5, [2]), ("middle", 4, [1]), ("last", 5, [4]), ("all", 3, [0, 1, 2]), (1, 5, [2]),
        (2, 5, [0, 4]), (3, 5, [0, 2, 4]), (9, 33, [0, 4, 8, 12, 16, 20, 24, 28, 32]), (8, 3, [0, 1, 2]), ("all", 1, [0]),
        (3, 1, [0]),
    ],
)  # fmt: skip
def test_frames_are_chosen(frames, count, chosen):
    """Nine of 33 are every fourth, as Flow-GRPO's video OCR reads."""
    assert chosen_frames(frames, count) == chosen
    images = torch.rand(2, count, 3, 4, 4)
    red = FunctionReward(lambda images, prompts: images[:, 0].mean((1, 2)))
    expected = images[:, chosen, 0].mean((1, 2, 3))
    torch.testing.assert_close(FrameMean(red, frames).score(images, [Prompt("a"), Prompt("b")]), expected)


def test_every_frame_has_its_videos_prompt_and_an_invalid_frame_makes_the_video_invalid():
    images, prompts = videos()
    assert FrameMean(BRIGHT, 3).score(images, prompts).sub(images[:, [0, 2, 4]].flatten(1).mean(1)).tolist() == pytest.approx(
        [0, 1, 2, 3], abs=1e-6
    )
    marks = torch.tensor([1.0, 1.0, 1.0, torch.nan, 1.0, 1.0, 1.0, 1.0])
    judge = FunctionReward(lambda images, prompts: marks, marks_invalid=True)
    reward = FrameMean(judge, 2)
    assert reward.marks_invalid and reward.score(images, prompts).isnan().tolist() == [False, True, False, False]
    assert not FrameMean(BRIGHT).marks_invalid


def test_motion_by_hand():
    images = torch.zeros(2, 3, 3, 2, 2)
    images[0, 1], images[1, 2] = 1.0, 0.5
    assert Motion().score(images, [Prompt("a")] * 2).tolist() == [1.0, 0.25]
    assert Motion().score(images[:, :1].expand(-1, 4, -1, -1, -1), [Prompt("a")] * 2).tolist() == [0.0, 0.0]


def test_stills_are_the_first_middle_and_last_frame_side_by_side():
    images = torch.arange(5.0).view(1, 5, 1, 1, 1).expand(2, 5, 3, 4, 6)
    shown = stills(images)
    assert shown.shape == (2, 3, 4, 18) and shown[0, 0, 0].tolist() == [0.0] * 6 + [2.0] * 6 + [4.0] * 6
    assert stills(images[:, :2]).shape == (2, 3, 4, 12) and stills(images[:, :1]).shape == (2, 3, 4, 6)
    assert stills(images[:, 0]) is not None and torch.equal(stills(images[:, 0]), images[:, 0])


def test_names_and_options():
    built = build("reward", "frame-mean(reward='jpeg-incompressibility(quality=50)', frames=3)")
    assert built == FrameMean(JPEGIncompressibility(50), 3) and build("reward", "motion") == Motion()
    spec = "weighted-sum(models={'look': 'frame-mean(reward=pickscore, frames=3)', 'motion': 'motion'}, weights={'motion': 10})"
    assert build("reward", spec).models["look"].frames == 3
    for frames, said in ((0, "frames = 0"), ("second", "frames = 'second' .*first, middle, last, all")):
        with pytest.raises(ConfigError, match=said):
            FrameMean(BRIGHT, frames)
    with pytest.raises(ConfigError, match=r"frame-mean needs reward"):
        build("reward", "frame-mean")


@pytest.mark.parametrize("reward", [JPEGIncompressibility(), OCR()])
def test_a_reward_of_images_names_the_way_to_score_videos(reward):
    with pytest.raises(RewardError, match=r"scores images, and got videos \[4, 5, 3, 8, 8\]; frame-mean"):
        reward.score(videos()[0], [Prompt('a sign "OPEN"')] * 4)


def test_wrong_input_is_refused():
    images, prompts = videos()
    with pytest.raises(RewardError, match="motion scores videos of two frames or more"):
        Motion().score(images[:, 0], prompts)
    with pytest.raises(RewardContractError, match=r"FunctionReward of frame-mean returned shape \(1,\) for 8 images"):
        FrameMean(FunctionReward(lambda images, prompts: images.new_zeros(1)), 2).score(images, prompts)
