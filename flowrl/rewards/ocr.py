"""Recognised text (OCR), compared with the text that the prompt requests."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from flowrl.core.errors import RewardError
from flowrl.core.options import Whole, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.contract import require_packages
from flowrl.rewards.images import Images, to_pillow

QUOTED = re.compile(r'"([^"]+)"|„([^“”]+)[“”]|“([^”]+)”|«([^»]+)»|「([^」]+)」')
"""The marks of the form "released"."""
PAIRS = '"" “” „“” ”” «» »«» ‹› ›‹› 「」 『』 ｢｣ ﹁﹂ ﹃﹄ ＂＂ 〝〞〟 ❝❞'  # noqa: RUF001
DOUBLE = {pair[0]: pair[1:] for pair in PAIRS.split()}
"""The marks that close a quotation by the mark that opens it."""
SINGLE = {pair[0]: pair[1:] for pair in ("''", "‘’", "‚‘’", "＇＇")}  # noqa: RUF001
"""Those that are apostrophes, too."""
OUTSIDE_WORDS = (*SINGLE, "”", "»", "›")  # noqa: RUF001
"""Marks that do not open a quotation right after a letter or digit."""


@checked_options
@dataclass(frozen=True)
class OCR:
    """max(0, 1 - N_e / N_ref), N_e the edit distance between recognised and target text, N_ref the
    target's length.

    The target is the text in quotation marks in the prompt (`quoted_text`), or else the field
    "text" of its metadata, or else the text in single quotation marks. Recognised passages are
    joined from top to bottom. The recogniser is RapidOCR (PP-OCR, Latin and Chinese script,
    Apache-2.0), whose package contains its models, so nothing is downloaded.

    `score` raises `RewardError` for a prompt without a target or with empty quotation marks, and
    `ConfigError` if RapidOCR is not installed. Source: Flow-GRPO (arXiv 2505.05470), visual text
    rendering.

    Args:
        form: "exact": white space, case and Unicode's compatible forms are ignored, and a
            superfluous letter costs as much as a missing one. "released": as in Flow-GRPO's public
            code, an image that contains the target scores 1 regardless of other text, only the
            first text in quotation marks counts (single ones do not), and only spaces and case are
            ignored.
        confidence: passages recognised with a lower confidence are left out, in [0, 1]. The
            released code keeps all passages from PaddleOCR 2, which drops those below 0.5.
        side: images whose shorter side has fewer pixels are enlarged for the detector, 32 or more;
            smaller values are faster and miss small letters.
        threads: number of threads; 0: as many as torch, one per core or one in a process of a pool.

    Raises:
        ConfigError: a field is out of range.
    """

    form: Literal["exact", "released"] = "exact"
    confidence: Annotated[float, Ge(0), Le(1)] = 0.5
    side: Annotated[int, Ge(32)] = 736
    threads: Whole = 0
    on_cpu: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("rapidocr", "onnxruntime")

    def refuses(self, prompt: Prompt) -> str:
        """Why `score` raises an error for `prompt`; "" if it does not."""
        try:
            target_text(prompt, self.form)
        except RewardError as error:
            return str(error)
        return ""

    def load(self) -> Any:
        """The recogniser, loaded at the first call."""
        require_packages(self)
        threads = self.threads or torch.get_num_threads()
        return _engine(self.confidence, self.side, threads)

    @torch.no_grad()
    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [0, 1]."""
        targets = [target_text(prompt, self.form) for prompt in prompts]
        pairs = zip(self.read(images), targets, strict=True)
        return torch.tensor([text_score(text, target, self.form) for text, target in pairs])

    def read(self, images: Images) -> list[str]:
        """The recognised text of each image."""
        engine = self.load()
        blue_first = [np.asarray(image)[..., ::-1].copy() for image in to_pillow(images)]
        return [" ".join(engine(array).txts or ()) for array in blue_first]


def quoted_text(prompt: str, marks: Mapping[str, str] = DOUBLE) -> str:
    """The texts in quotation marks, joined by spaces: "...", “...”, „...“, ”...”, «...», »...«,
    ‹...›, 「...」, 『...』, their full-width and vertical forms, or other `marks`. Of nested
    quotations the outer one is the text, with the marks within it.

    Raises `RewardError` for empty quotation marks.
    """
    texts, start = list[str](), 0
    while start < len(prompt):
        end = _closing(prompt, start, marks)
        if end:
            texts.append(prompt[start + 1 : end])
            if not texts[-1].strip():
                raise RewardError(
                    f"ocr: the quotation marks {prompt[start : end + 1]} in the prompt {prompt!r}"
                    " are empty; put the text to render between them"
                )
        start = max(start, end) + 1
    return " ".join(texts)


def _closing(prompt: str, start: int, marks: Mapping[str, str]) -> int:
    """The index of the mark that closes the one at `start`; 0 if there is none. A single mark right
    before a letter or digit does not close: it is an apostrophe.
    """
    opening, depth = prompt[start], 0
    before = prompt[max(0, start - 1) : start]
    if opening not in marks or (opening in OUTSIDE_WORDS and _in_word(before)):
        return 0
    for end in range(start + 1, len(prompt)):
        mark = prompt[end]
        if mark in marks[opening]:
            apostrophe = mark in SINGLE.values() and _in_word(prompt[end + 1 : end + 2])
            depth -= not apostrophe
            if depth < 0:
                return end
        else:
            depth += mark == opening
    return 0


def _in_word(character: str) -> bool:
    """Whether a character is a letter of a script with apostrophes, or a digit."""
    return character.isalnum() and character < "\u2e80"  # then follow the scripts of East Asia


def target_text(prompt: Prompt, form: str = "exact") -> str:
    """The text that an image of `prompt` should contain. Raises `RewardError` if there is none."""
    given = str(prompt.metadata.get("text", ""))
    if form == "released":
        match = QUOTED.search(prompt.text)
        text = match[match.lastindex or 0] if match else given
    else:
        text = quoted_text(prompt.text) or given or quoted_text(prompt.text, SINGLE)
    if not _plain(text):
        raise RewardError(
            f"ocr: the prompt {prompt.text!r} has no text to render; put it in quotation marks"
        )
    return text


def text_score(read: str, target: str, form: str = "exact") -> float:
    """max(0, 1 - edit distance / length of `target`) in a `form` of `OCR`."""
    if form == "released":
        read, target = (text.replace(" ", "").lower() for text in (read, target))
        if target in read:
            return 1.0
    else:
        read, target = _plain(read), _plain(target)
    return max(0.0, 1 - Levenshtein.distance(read, target) / len(target))


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


@lru_cache(maxsize=2)
def _engine(confidence: float, side: int, threads: int) -> Any:
    """The recogniser, built once per setting."""
    rapidocr: Any = import_module("rapidocr")
    limits = {"Global.text_score": confidence, "Det.limit_side_len": side}
    pools = [f"EngineConfig.onnxruntime.{pool}_op_num_threads" for pool in ("intra", "inter")]
    return rapidocr.RapidOCR(
        params={"Global.log_level": "critical", **limits, **dict.fromkeys(pools, threads)}
    )
