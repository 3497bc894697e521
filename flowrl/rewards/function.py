"""Any Python callable as a reward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from flowrl.types import Prompt


@dataclass(frozen=True)
class FunctionReward:
    """Wraps `function(images, prompts) -> [sample]`; images are [sample, channel, height, width] in [0, 1].

    `marks_invalid`: NaN among its scores means that a sample cannot be judged and is left out (`protocols.RewardModel`).
    """

    function: Callable[[Tensor, Sequence[Prompt]], Tensor]
    marks_invalid: bool = False

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The function's own scores; the rollout checks their shape and that they are finite."""
        return self.function(images, prompts)
