"""The text in images, as RapidOCR reads it, against the text of the prompt."""

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowrl.core.errors import RewardError
from flowrl.core.types import Prompt
from flowrl.rewards.ocr import OCR, quoted_text, target_text, text_score
from flowrl.run.parts.registry import build


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('"ONE" above “New York”', "ONE New York"),
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
        ("Helo World", "Hello World", 0.9, 0.9),
        ("", "Hello", 0.0, 0.0),
        ("OPEN 24", "OPEN", 0.5, 1.0),
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
