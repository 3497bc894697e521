"""Rewards of images and videos that need no weights: JPEG sizes, text that is read, frames,
motion.
"""

import io

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowrl.core.errors import ConfigError, RewardContractError, RewardError
from flowrl.core.types import Prompt
from flowrl.parts.registry import build
from flowrl.rewards import (
    OCR,
    FrameMean,
    FunctionReward,
    JPEGIncompressibility,
    Motion,
    WeightedSum,
    stills,
)
from flowrl.rewards.images import (
    chosen_frames,
    quoted_text,
    target_text,
    text_score,
    to_bytes,
    to_pillow,
)
from flowrl.testing import reward_contract

TWO = [Prompt("a"), Prompt("b")]


def test_bytes_round_and_clamp_and_channels_keep_their_order():
    levels = torch.tensor([0.0, 0.4999 / 255, 0.5001 / 255, 1.0, 1.7, -3.0]).view(1, 1, 1, 6)
    assert to_bytes(levels).flatten().tolist() == [0, 0, 1, 255, 255, 0]
    assert to_pillow(torch.tensor([1.0, 0.0, 0.2]).view(1, 3, 1, 1))[0].getpixel((0, 0)) == (
        255,
        0,
        51,
    )
    assert to_pillow(torch.full((1, 1, 2, 2), 0.2))[0].getpixel((1, 1)) == (51, 51, 51)


def test_jpeg_size_is_that_of_the_file():
    noise = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    images, file = torch.stack([torch.full((3, 64, 64), 0.5), noise]), io.BytesIO()
    plain, detailed = JPEGIncompressibility().score(images, TWO).tolist()
    array = (noise * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(array).save(file, format="JPEG", quality=95)
    assert detailed == pytest.approx(len(file.getvalue()) / 1000) and detailed > 3 * plain
    assert float(JPEGIncompressibility(50).score(images, TWO)[1]) < 0.6 * detailed
    with pytest.raises(ConfigError, match=r"quality = 100 .* in \[1, 95\]"):
        build("reward", "jpeg-compressibility(quality=100)")
    with pytest.raises(RewardError, match=r"got videos \[4, 5, 3, 8, 8\]; frame-mean"):
        JPEGIncompressibility().score(*videos())


test_jpeg_compressibility = reward_contract(lambda: build("reward", "jpeg-compressibility"))
test_jpeg_incompressibility = reward_contract(
    lambda: build("reward", "jpeg-incompressibility(quality=75)")
)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('a sign that says "OPEN"', "OPEN"),
        ("a sign that says “New York”", "New York"),
        ('"ONE" above "TWO"', "ONE TWO"),
        ("ein Schild „Bäckerei“ neben „Bar”", "Bäckerei Bar"),
        ("一块写着「茶」的牌子", "茶"),
        ("une enseigne « Café »", " Café "),
        ("the dog's bone", ""),
    ],
)
def test_quoted_text(prompt, text):
    assert quoted_text(prompt) == text


@pytest.mark.parametrize(
    ("read", "target", "exact", "released"),
    [
        ("HelloWorld", "hello world", 1.0, 1.0),
        ("Helo World", "Hello World", 0.9, 0.9),
        ("", "Hello", 0.0, 0.0),
        ("OPEN 24", "OPEN", 0.5, 1.0),
        ("something else altogether", "OPEN", 0.0, 0.0),
        ("O\tPEN", "OPEN", 1.0, 0.75),
        ("\ufb01sh", "fish", 1.0, 0.5),  # a ligature
        ("\uff2f\uff30\uff25\uff2e", "OPEN", 1.0, 0.0),  # full-width letters
    ],
)
def test_text_score(read, target, exact, released):
    """The released form finds a text anywhere, and ignores spaces and case only."""
    assert text_score(read, target) == pytest.approx(exact)
    assert text_score(read, target, "released") == pytest.approx(released)


def test_targets_of_a_prompt():
    prompt = Prompt('"ONE" above "TWO"', {"text": "THREE"})
    assert (target_text(prompt), target_text(prompt, "released")) == ("ONE TWO", "ONE")
    assert target_text(Prompt("a sign", {"text": "THREE"}), "released") == "THREE"
    with pytest.raises(RewardError, match="has no text to render"):
        OCR().score(torch.zeros(1, 3, 8, 8), [Prompt("a fox")])


def drawn(text, size=(320, 160), height=36):
    """Dark blue text on a light ground, [3, height, width]."""
    image = Image.new("RGB", size, (240, 230, 200))
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", height)
    ImageDraw.Draw(image).text((20, 50), text, fill=(20, 30, 90), font=font)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def test_the_real_reader_reads_what_is_drawn():
    pytest.importorskip("rapidocr")
    images = torch.stack([drawn(text) for text in ("Hello World", "OPEN 24", "K72", "")])
    reader = build("reward", "ocr(threads=1, side=160)")
    read = [text.replace(" ", "") for text in reader.read(images)]
    assert read == ["HelloWorld", "OPEN24", "K72", ""]
    wanted = [Prompt(f'a "{text}" sign') for text in ("Hello World", "OPEN", "K27", "nothing")]
    scores = reader.score(images, wanted)
    assert torch.allclose(scores, torch.tensor([1.0, 0.5, 1 / 3, 0.0]))
    released = build("reward", "ocr(form=released, threads=1, side=160)")
    assert float(released.score(images[1:2], [Prompt('the word "OPEN", not "SHUT"')])) == 1.0


def videos():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(4, 5, 3, 8, 8, generator=generator), [Prompt(f"video {i}") for i in range(4)]


BRIGHT = FunctionReward(
    lambda images, prompts: (
        images.mean((1, 2, 3)) + torch.tensor([float(p.text[-1]) for p in prompts])
    )
)

test_frame_mean = reward_contract(FrameMean(BRIGHT, 2), videos)
test_a_sum = reward_contract(
    WeightedSum({"look": FrameMean(BRIGHT, "first"), "motion": Motion()}, {"motion": 2.0}), videos
)


@pytest.mark.parametrize(
    ("frames", "count", "chosen"),
    [
        ("first", 5, [0]),
        ("middle", 5, [2]),
        ("middle", 4, [1]),
        ("last", 5, [4]),
        ("all", 3, [0, 1, 2]),
        (1, 5, [2]),
        (3, 5, [0, 2, 4]),
        (9, 33, [0, 4, 8, 12, 16, 20, 24, 28, 32]),
        (8, 3, [0, 1, 2]),
        (3, 1, [0]),
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
    with pytest.raises(ConfigError, match=r"frames = 'second' .*first, middle, last, all or"):
        FrameMean(BRIGHT, "second")


def test_motion_by_hand():
    images = torch.zeros(2, 3, 3, 2, 2)
    images[0, 1], images[1, 2] = 1.0, 0.5
    assert Motion().score(images, TWO).tolist() == [1.0, 0.25]
    with pytest.raises(RewardError, match="motion scores videos of two frames or more"):
        Motion().score(images[:, 0], TWO)


def test_stills_are_the_first_middle_and_last_frame_side_by_side():
    images = torch.arange(5.0).view(1, 5, 1, 1, 1).expand(2, 5, 3, 4, 6)
    shown = stills(images)
    assert (
        shown.shape == (2, 3, 4, 18)
        and shown[0, 0, 0].tolist() == [0.0] * 6 + [2.0] * 6 + [4.0] * 6
    )
    assert [stills(images[:, :count]).shape[-1] for count in (1, 2, 4)] == [6, 12, 18]
    assert torch.equal(stills(images[:, 0]), images[:, 0])
