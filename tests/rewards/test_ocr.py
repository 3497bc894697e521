"""The text in images, as RapidOCR reads it, against the text of the prompt."""

# ruff: noqa: RUF001

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from flowrl.core.errors import RewardError
from flowrl.core.types import Prompt
from flowrl.rewards.ocr import DOUBLE, OCR, quoted_text, target_text, text_score
from flowrl.run.parts.registry import build


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('"ONE" above “New York”', "ONE New York"),
        ("ein Schild „Bäckerei“ neben „Bar”", "Bäckerei Bar"),
        ("一块写着「茶」的牌子", "茶"),
        ("une enseigne « Café »", " Café "),
        ("the dog's bone", ""),
        ("ett »Kafé», ett ”Apotek” och ein »Hotel«", "Kafé Apotek Hotel"),
        ("‹A›, 『茶』, ＂Ｂ＂, 〝酒〟 and ｢C｣", "A 茶 Ｂ 酒 C"),
        ("a sign “say “hi” twice” and 「a「b」c」", "say “hi” twice a「b」c"),
        ("a 5” board that says “OPEN”, 7” wide", "OPEN"),
        ('a sign "DON\'T" and an open " mark', "DON'T"),
    ],
)
def test_quoted_text(prompt, text):
    assert quoted_text(prompt) == text


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("a sign that says 'OPEN'", "OPEN"),
        ("the dogs' sign says 'DON'T PANIC', doesn't it?", "DON'T PANIC"),
        ("a sign ‘don’t walk’, the fox’s", "don’t walk"),
        ("写着'开放'的牌子", "开放"),
        ("a sign 'no \"x\" here'", "x"),  # double marks first
        ("don't and won't", ""),
    ],
)
def test_single_marks_count_if_there_is_no_other_text(prompt, text):
    if text:
        assert target_text(Prompt(prompt)) == text
    else:
        with pytest.raises(RewardError, match="has no text to render"):
            target_text(Prompt(prompt))
    expected = text if text == "x" else "Y"
    assert target_text(Prompt(prompt, {"text": "Y"})) == expected


WORDS = st.text("aZ9 é茶'’.", min_size=1).filter(str.strip)
PAIRS = [(opening, closing) for opening in DOUBLE for closing in DOUBLE[opening]]


@given(st.lists(st.tuples(WORDS, st.sampled_from(PAIRS), WORDS), max_size=4), WORDS)
def test_every_quotation_of_a_prompt_is_found(parts, end):
    prompt = "".join(f"{before} {a}{text}{b}" for before, (a, b), text in parts) + f" {end}"
    assert quoted_text(prompt) == " ".join(text for _, _, text in parts)


@given(st.lists(st.tuples(WORDS, st.sampled_from(['""', "“”", "«»", "„“", "「」"]), WORDS)), WORDS)
def test_the_released_form_reads_the_first_of_these_as_before(parts, end):
    prompt = "".join(f"{before} {a}{text}{b}" for before, (a, b), text in parts) + f" {end}"
    first = parts[0][2] if parts else "Y"
    assert target_text(Prompt(prompt, {"text": "Y"}), "released") == first


@pytest.mark.parametrize("empty", ['""', "“ ”", "「」"])
def test_empty_marks_are_refused(empty):
    prompt = Prompt(f'a sign {empty} beside "OPEN"')
    with pytest.raises(
        RewardError, match=f"the quotation marks {empty} in the prompt .* are empty"
    ):
        target_text(prompt)
    assert empty in OCR().refuses(prompt)


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
