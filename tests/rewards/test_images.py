"""Rewards that run for real: JPEG sizes and reading text, on rendered pictures."""

import io

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from flowrl.errors import ConfigError, RewardError
from flowrl.registry import build
from flowrl.rewards.images import JPEGCompressibility, JPEGIncompressibility, to_bytes, to_pillow
from flowrl.rewards.ocr import OCR, target_text, text_score
from flowrl.testing import reward_contract
from flowrl.text import quoted_text
from flowrl.types import Prompt


def picture(text, size=(320, 160), height=36):
    """Dark blue text on a light ground, [3, height, width]."""
    image = Image.new("RGB", size, (240, 230, 200))
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", height)
    ImageDraw.Draw(image).text((20, 50), text, fill=(20, 30, 90), font=font)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def flat_and_busy():
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.full((3, 64, 64), 0.5), torch.rand(3, 64, 64, generator=generator)])


def test_bytes_round_and_clamp():
    levels = torch.tensor([0.0, 0.4999 / 255, 0.5001 / 255, 1.0, 1.7, -3.0]).view(1, 1, 1, 6)
    assert to_bytes(levels).flatten().tolist() == [0, 0, 1, 255, 255, 0]


def test_channels_stay_in_their_order():
    red = torch.zeros(1, 3, 2, 2)
    red[:, 0] = 1
    assert to_pillow(red)[0].getpixel((0, 0)) == (255, 0, 0)
    assert to_pillow(torch.full((1, 1, 2, 2), 0.2))[0].getpixel((1, 1)) == (51, 51, 51)


def test_jpeg_size_is_that_of_the_file():
    images = flat_and_busy()
    sizes = JPEGIncompressibility().score(images, [Prompt("x")] * 2)
    file = io.BytesIO()
    Image.fromarray((images[1] * 255).round().byte().permute(1, 2, 0).numpy()).save(file, format="JPEG", quality=95)
    assert float(sizes[1]) == pytest.approx(len(file.getvalue()) / 1000)
    assert float(sizes[1]) > 3 * float(sizes[0])
    assert torch.equal(JPEGCompressibility().score(images, [Prompt("x")] * 2), -sizes)
    assert float(JPEGIncompressibility(50).score(images, [Prompt("x")] * 2)[1]) < 0.6 * float(sizes[1])


def test_jpeg_quality_is_checked():
    with pytest.raises(ConfigError, match="quality = 100 is not allowed; allowed: 1 to 95"):
        build("reward", "jpeg-compressibility(quality=100)")


test_jpeg_compressibility = reward_contract(lambda: build("reward", "jpeg-compressibility"))
test_jpeg_incompressibility = reward_contract(lambda: build("reward", "jpeg-incompressibility(quality=75)"))


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
    ("found", "wanted", "exact", "released"),
    [
        ("Hello World", "hello world", 1.0, 1.0),
        ("HelloWorld", "Hello World", 1.0, 1.0),
        ("Helo World", "Hello World", 0.9, 0.9),
        ("", "Hello", 0.0, 0.0),
        ("OPEN 24", "OPEN", 0.5, 1.0),
        ("something else altogether", "OPEN", 0.0, 0.0),
        ("O\tPEN", "OPEN", 1.0, 0.75),
    ],
)
def test_text_score(found, wanted, exact, released):
    """The released form finds a text anywhere, and ignores spaces and case only."""
    assert text_score(found, wanted) == pytest.approx(exact)
    assert text_score(found, wanted, "released") == pytest.approx(released)


def test_the_released_form_wants_the_first_text_only():
    prompt = Prompt('"ONE" above "TWO"', {"text": "THREE"})
    assert (target_text(prompt), target_text(prompt, "released")) == ("ONE TWO", "ONE")
    assert target_text(Prompt("a sign", {"text": "THREE"}), "released") == "THREE"
    with pytest.raises(ConfigError, match="form = 'loose' is not allowed; allowed: one of exact, released"):
        OCR(form="loose")


@given(st.text(max_size=12), st.text(alphabet="abcXYZ 19", min_size=1, max_size=12).filter(str.strip))
def test_text_score_lies_between_0_and_1(found, wanted):
    score = text_score(found, wanted)
    assert 0 <= score <= 1
    assert (score == 1) == ("".join(found.casefold().split()) == "".join(wanted.casefold().split())) or not found.isascii()
    assert text_score(wanted, wanted) == 1


def test_a_prompt_without_text_is_refused():
    with pytest.raises(RewardError, match="has no text to render"):
        OCR().score(torch.zeros(1, 3, 8, 8), [Prompt("a fox")])


class TestReader:
    """The real reader with its real models, offline."""

    @pytest.fixture(autouse=True)
    def _reader(self):
        pytest.importorskip("rapidocr")
        pytest.importorskip("onnxruntime")

    def test_reads_what_is_drawn(self):
        texts = ["Hello World", "OPEN 24", "K72", ""]
        images = torch.stack([picture(text) for text in texts])
        wanted = ['"Hello World"', '"OPEN"', '"K27"', '"nothing"']
        reader = build("reward", "ocr(threads=1, side=160)")
        assert [text.replace(" ", "") for text in reader.read(images)] == ["HelloWorld", "OPEN24", "K72", ""]
        scores = reader.score(images, [Prompt(f"a sign that says {text}") for text in wanted])
        assert torch.allclose(scores, torch.tensor([1.0, 0.5, 1 / 3, 0.0]))
        assert float(OCR(form="released", threads=1).score(images[1:2], [Prompt('the word "OPEN", not "SHUT"')])) == 1.0

    def test_keeps_the_contract(self):
        from flowrl.testing import check_reward

        images = torch.stack([picture(text, (128, 96), 32) for text in ("ABC", "cat")])
        found = check_reward(OCR(side=96, threads=1), (images, [Prompt('"ABC"'), Prompt('"cut"')]))
        assert found.ok, found
