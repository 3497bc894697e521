"""Does the picture show the text that the prompt asks for?"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import ConfigError, RewardError, require
from flowrl.rewards.images import to_bytes, to_colours
from flowrl.text import edit_distance, quoted_text
from flowrl.types import Prompt


@dataclass(frozen=True)
class OCR:
    """max(0, 1 - N_e / N_ref), N_e the edit distance between the text read and the text asked for, N_ref the latter's length.

    The text asked for is what the prompt puts in quotation marks, or the entry "text" of its metadata where there are none. Both
    are compared without spaces and in lower case. With `anywhere`, a picture that contains the text scores 1 whatever else it
    says, as in Flow-GRPO's public code; without it, a superfluous letter costs as much as a missing one. Passages are read from
    top to bottom and joined; those that the reader is less sure of than `confidence` are left out.

    The reader is RapidOCR (PP-OCR's detector and recogniser, Latin and Chinese script, Apache-2.0); its models are inside the
    package on PyPI, so nothing is downloaded. Pictures whose shorter side has fewer than `side` pixels are enlarged for the
    detector: less is faster and misses small letters. `threads` = 0: as many as there are cores.

    Source: Flow-GRPO (arXiv 2505.05470), visual text rendering. Raises `RewardError` for a prompt that asks for no text,
    `ConfigError` where the reader is not installed.
    """

    anywhere: bool = False
    confidence: float = 0.5
    side: int = 736
    threads: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.confidence <= 1, "confidence", self.confidence, "in [0, 1]")
        require(self.side >= 32, "side", self.side, "32 pixels or more")
        require(self.threads >= 0, "threads", self.threads, "0 (all cores) or more")

    @torch.no_grad()
    def score(self, images: Float[Tensor, "sample channel height width"], prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample] in [0, 1]."""
        wanted = [wanted_text(prompt) for prompt in prompts]
        found = self.read(images)
        return torch.tensor([text_score(f, w, self.anywhere) for f, w in zip(found, wanted, strict=True)])

    def read(self, images: Float[Tensor, "sample channel height width"]) -> list[str]:
        """What the reader finds in each picture."""
        engine = _engine(self.confidence, self.side, self.threads)
        blue_first = to_bytes(to_colours(images)).flip(-1).numpy()
        return [" ".join(engine(array).txts or ()) for array in blue_first]


def wanted_text(prompt: Prompt) -> str:
    """The text that `prompt` asks for. Raises `RewardError` where there is none."""
    text = quoted_text(prompt.text) or str(prompt.metadata.get("text", ""))
    if not _plain(text):
        raise RewardError(
            f'ocr: the prompt {prompt.text!r} asks for no text; put it in quotation marks, as in a sign that says "OPEN"'
        )
    return text


def text_score(found: str, wanted: str, anywhere: bool = False) -> float:
    """max(0, 1 - edit distance / length of `wanted`), without spaces and in lower case. `anywhere`: 1 where contained."""
    found, wanted = _plain(found), _plain(wanted)
    if anywhere and wanted in found:
        return 1.0
    return max(0.0, 1 - edit_distance(found, wanted) / len(wanted))


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


@lru_cache(maxsize=2)
def _engine(confidence: float, side: int, threads: int) -> Any:
    """The reader, built once per setting."""
    try:
        rapidocr: Any = import_module("rapidocr")
        import_module("onnxruntime")
    except ImportError as error:
        raise ConfigError('ocr: the reader is not installed: pip install -e ".[rewards]"') from error
    count = threads or -1
    return rapidocr.RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.text_score": confidence,
            "Det.limit_side_len": side,
            "EngineConfig.onnxruntime.intra_op_num_threads": count,
            "EngineConfig.onnxruntime.inter_op_num_threads": count,
        }
    )
