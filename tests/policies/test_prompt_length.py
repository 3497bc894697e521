"""Prompts that are cut at an encoder's number of tokens."""

import re

import pytest
from family_cases import CASES

from flowrl.core.types import Prompt
from flowrl.policies import load_policy

WORDS = " ".join(f"w{i}" for i in range(59))
PROMPTS = [Prompt(f"{WORDS} cat"), Prompt(f"{WORDS} dog"), Prompt("a fox")]
LINES = {
    "sd3": [
        "text_encoder, text_encoder_2: 2 of 3 .* 40 tokens: ",
        "text_encoder_3: 2 of 3 .* 24 t",
    ],
    "flux": ["text_encoder: 2 of 3 .* 40 tokens: ", "text_encoder_2: 2 of 3 .* 24 tokens .max_seq"],
    "qwen-image": ["text_encoder: 2 of 3 .* 24 tokens"],
    "wan": ["text_encoder: 2 of 3 .* 24 tokens"],
}


@pytest.mark.parametrize("name", CASES)
def test_every_family_says_once_a_run_how_many_prompts_are_cut(
    name, tmp_path, monkeypatch, caplog, capfd
):
    """Also if the embeddings are found on disk, and instead of what the libraries print."""
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    CASES[name].make().save_pretrained(tmp_path / "model")
    for _ in range(2):
        policy = load_policy(str(tmp_path / "model"), CASES[name].options)
        caplog.clear()
        capfd.readouterr()
        for some in (PROMPTS, PROMPTS, PROMPTS[:1]):
            policy.warm(some)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == len(LINES[name])
        for line, pattern in zip(said, LINES[name], strict=True):
            assert re.search(pattern, line), line
            assert "the last words read are 'w0 w1 w2 w3" in line
        printed = capfd.readouterr()
        assert "w7 w8 w9" not in printed.out + printed.err.replace(said[0], "")


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_that_just_fits_is_not_cut(name, caplog):
    """The special tokens count; 24 tokens are less than the 40 of CLIP."""
    size = {"qwen-image": 24}.get(name, 23)
    policy = CASES[name].policy()
    policy.warm([Prompt("x" * size)])
    assert caplog.records == []
    policy.warm([Prompt("x" * (size + 1))])
    assert len(caplog.records) == 1
