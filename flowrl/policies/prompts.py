"""Prompt embeddings computed once, kept off the accelerator, and brought back when a network call needs them."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.errors import ConfigError

Encode = Callable[[Sequence[str]], Sequence[Mapping[str, Tensor]]]
"""From texts to one mapping of named tensors per text, without a prompt axis."""


@dataclass
class PromptCache:
    """Rows of embeddings under integer numbers, so that a `Condition` carries a number per sample instead of megabytes.

    `encode` embeds the texts that are new. The rows of the latest call stay on `device`; all others wait in main memory, at most
    `limit` of them (those used longest ago go first, never those of the latest call). `hits` and `misses` count texts.
    """

    encode: Encode
    device: torch.device
    limit: int
    hits: int = 0
    misses: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)
    _far: "OrderedDict[int, dict[str, Tensor]]" = field(default_factory=OrderedDict)
    _near: dict[int, int] = field(default_factory=dict)
    _table: dict[str, Tensor] = field(default_factory=dict)
    _next: int = 0

    def numbers(self, texts: Sequence[str]) -> Tensor:
        """The numbers of `texts`, int64 [prompt], on the device; texts seen for the first time are embedded."""
        new = [text for text in dict.fromkeys(texts) if text not in self._numbers]
        self.misses += len(new)
        self.hits += len(texts) - len(new)
        for text, row in zip(new, self.encode(new) if new else (), strict=True):
            self._numbers[text], self._texts[self._next] = self._next, text
            self._far[self._next] = {name: tensor.detach().cpu() for name, tensor in row.items()}
            self._next += 1
        chosen = [self._numbers[text] for text in texts]
        for number in chosen:
            self._far.move_to_end(number)
        self._forget(set(chosen))
        self._near, self._table = {}, {}
        self._bring(list(dict.fromkeys(chosen)))
        return torch.tensor(chosen, device=self.device)

    def rows(self, numbers: Tensor) -> dict[str, Tensor]:
        """The embeddings under `numbers` [sample]: every tensor gets the axis [sample] in front, on the device."""
        wanted = numbers.tolist()
        self._bring([number for number in dict.fromkeys(wanted) if number not in self._near])
        index = torch.tensor([self._near[number] for number in wanted], device=self.device)
        return {name: table.index_select(0, index) for name, table in self._table.items()}

    def _bring(self, numbers: Sequence[int]) -> None:
        """Append rows to the tables on the device."""
        if not numbers:
            return
        missing = [number for number in numbers if number not in self._far]
        if missing:
            raise ConfigError(
                f"prompt {missing[0]} was dropped from the cache while its condition was still used; "
                f"cached_prompts = {self.limit} must be larger than the prompts in use at a time"
            )
        start = len(self._near)
        self._near |= {number: start + i for i, number in enumerate(numbers)}
        for name in self._far[numbers[0]]:
            fresh = torch.stack([self._far[number][name] for number in numbers]).to(self.device)
            self._table[name] = torch.cat([self._table[name], fresh]) if name in self._table else fresh

    def _forget(self, keep: set[int]) -> None:
        for number in list(self._far):
            if len(self._far) <= self.limit:
                return
            if number not in keep:
                del self._far[number]
                del self._numbers[self._texts.pop(number)]
