"""The order of the training prompts."""

import copy
from collections.abc import Sequence

import torch

from flowrl.core.errors import require
from flowrl.core.prompt import Prompt


class PromptStream:
    """Prompts in shuffled passes, reproducible from seed and position.

    Args:
        prompts: the training prompts.
        seed: seed of the order.

    Raises:
        ConfigError: there are no prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        require(bool(prompts), "prompts", prompts, "a non-empty list")
        self.prompts = list(prompts)
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        while len(self.order) < count:
            self.order += torch.randperm(len(self.prompts), generator=self.generator).tolist()
        chosen, self.order = self.order[:count], self.order[count:]
        return [self.prompts[i] for i in chosen]

    def upcoming(self, count: int) -> list[Prompt]:
        """The distinct prompts among the next `count`, in order; the position does not change."""
        ahead = copy.copy(self)
        ahead.generator, ahead.order = self.generator.clone_state(), list(self.order)
        return list({prompt.text: prompt for prompt in ahead.take(count)}.values())
