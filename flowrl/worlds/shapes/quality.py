"""Qualities of a picture that its task's verifier does not score, for measuring beside the reward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from flowrl.errors import RewardError, require
from flowrl.types import Prompt
from flowrl.worlds.shapes.scene import OBJECTS, Request, request_of
from flowrl.worlds.shapes.verifier import looks, read

QUALITIES = ("palette", "balance", "clarity")


@dataclass(frozen=True)
class ShapesQuality:
    """One quality of pictures [sample, 3, 64, 64], in [0, 1].

    palette: share of the painted area in the colours that the prompt names (`verifier.looks`, which scores them for the task
    "preference"); a prompt that names none raises `RewardError`. balance: mirror symmetry, as there; does not read the prompt.
    clarity: how close the cells are to what the world draws, 1 where every cell is a clean object, glyph or empty
    (`verifier.read`); does not read the prompt, and an empty picture is clear.
    """

    quality: str

    def __post_init__(self) -> None:
        require(self.quality in QUALITIES, "quality", self.quality, f"one of {', '.join(QUALITIES)}")

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        if self.quality == "clarity":
            return read(images).clarity
        requests = [_as_look(request_of(prompt)) for prompt in prompts]
        if self.quality == "palette" and not all(request.colours for request in requests):
            text = next(p.text for p, r in zip(prompts, requests, strict=True) if not r.colours)
            raise RewardError(f"palette: the prompt {text!r} names no colour")
        return looks(images, requests)[self.quality]


def _as_look(request: Request) -> Request:
    """The request as one for a look: its colours, and a mood, which these two qualities do not read."""
    colours = request.colours or tuple(dict.fromkeys(OBJECTS[k - 1][0] for k in request.objects))
    return replace(request, colours=colours, mood=request.mood or "calm")
