"""Prompt embeddings: computed once, stored in main memory, and moved to the device when a network call needs them."""

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
    """Embeddings under integer numbers, so that a `Condition` carries a number per sample instead of megabytes.

    `encode` embeds new texts. The embeddings of the latest call stay on `device` in `dtype` (None: unchanged), all others in main
    memory, at most `limit` of them; the least recently used are dropped first, never those of the latest call. `hits` and
    `misses` count texts.
    """

    encode: Encode
    device: torch.device
    limit: int
    dtype: torch.dtype | None = None
    hits: int = 0
    misses: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)
    _far: "OrderedDict[int, dict[str, Tensor]]" = field(default_factory=OrderedDict)
    _near: dict[int, int] = field(default_factory=dict)
    _table: dict[str, Tensor] = field(default_factory=dict)
    _places: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    _next: int = 0

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """The numbers of `texts`; new texts are embedded."""
        chosen = self._remember(texts)
        self._forget(set(chosen))
        self._near, self._table = {}, {}
        self._bring(list(dict.fromkeys(chosen)))
        return chosen

    def warm(self, texts: Sequence[str]) -> None:
        """Embed `texts` now, as many as `limit` allows, so that later calls find them in main memory."""
        self._remember(list(dict.fromkeys(texts))[: self.limit])
        self._forget(set(self._near))

    def _remember(self, texts: Sequence[str]) -> list[int]:
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
        return chosen

    def rows(self, numbers: Tensor, among: frozenset[int] = frozenset()) -> dict[str, Tensor]:
        """The embeddings under `numbers` [sample], a tensor on the device: every result gets the axis [sample] in front.

        `among` lists the numbers that may occur; if it is empty they are read from the device, which synchronises with it.
        """
        needed = among or frozenset(numbers.tolist())
        self._bring([number for number in sorted(needed) if number not in self._near])
        index = self._places[numbers]
        return {name: table.index_select(0, index) for name, table in self._table.items()}

    def __len__(self) -> int:
        return len(self._far)

    def _bring(self, numbers: Sequence[int]) -> None:
        """Append rows to the tables on the device."""
        if not numbers:
            return
        missing = [number for number in numbers if number not in self._far]
        if missing:
            raise ConfigError(
                f"prompt {missing[0]} was dropped from the cache while its condition was still used; "
                f"prompt_cache = {self.limit} must be larger than the prompts in use at a time"
            )
        start = len(self._near)
        self._near |= {number: start + i for i, number in enumerate(numbers)}
        for name in self._far[numbers[0]]:
            fresh = torch.stack([self._far[number][name] for number in numbers]).to(self.device, self.dtype)
            self._table[name] = torch.cat([self._table[name], fresh]) if name in self._table else fresh
        places = torch.zeros(self._next, dtype=torch.int64)
        places[list(self._near)] = torch.tensor(list(self._near.values()))
        self._places = places.to(self.device)

    def _forget(self, keep: set[int]) -> None:
        for number in list(self._far):
            if len(self._far) <= self.limit:
                return
            if number not in keep:
                del self._far[number]
                del self._numbers[self._texts.pop(number)]
