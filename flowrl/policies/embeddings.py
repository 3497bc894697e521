"""Prompt embeddings: computed once, stored, and moved to the device when a network call needs
them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowrl.core.errors import TrainingError
from flowrl.core.processes import Processes

Row = Mapping[str, Tensor]
Encode = Callable[[Sequence[str]], Iterable[Row]]
"""From texts to one mapping of named tensors per text, without a prompt axis; an iterator that
embeds a few texts at a time.
"""
REPORT_EVERY = 10.0
"""Seconds between two reports of progress."""


class Store(Protocol):
    """Embeddings by text. `flowrl.run.models.prompt_cache.DiskStore` is on disk."""

    def prepare(self) -> str:
        """Called before the other methods whenever texts are embedded or looked up; returns the
        store's place in words.
        """
        ...

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Those of `texts` without an embedding."""
        ...

    def require_room(self, size: float) -> None:
        """Raise an error unless `size` GB can be stored."""
        ...

    def get(self, text: str) -> Row | None:
        """The embedding of `text`; None if it is missing or damaged."""
        ...

    def put(self, text: str, row: Row) -> None:
        """Store the embedding of `text`."""
        ...


@dataclass
class MemoryStore:
    """All embeddings in main memory."""

    rows: dict[str, Row] = field(default_factory=dict)

    def prepare(self) -> str:
        """No action."""
        return "main memory"

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Those of `texts` without an embedding."""
        return [text for text in texts if text not in self.rows]

    def require_room(self, size: float) -> None:
        """No action."""

    def get(self, text: str) -> Row | None:
        """The embedding of `text`, if it is known."""
        return self.rows.get(text)

    def put(self, text: str, row: Row) -> None:
        """Store the embedding of `text`."""
        self.rows[text] = row


@dataclass
class PromptEmbeddings:
    """Embeddings by integer number, so that a `Condition` carries a number per sample instead of
    megabytes.

    `encode` embeds new texts, which are put into `store`; one that is damaged or deleted there is
    made again. Those of the latest call are on `device`, padded with zeros at the end of their
    first axis to a common length. Floating-point tensors have `dtype`.
    """

    encode: Encode
    device: torch.device
    dtype: torch.dtype
    store: Store = field(default_factory=MemoryStore)
    _numbers: dict[str, int] = field(default_factory=dict)
    _on_device: frozenset[int] = frozenset()

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """The numbers of `texts`; new texts are embedded."""
        self.warm(texts)
        numbers = [self._numbers[text] for text in texts]
        self._bring(frozenset(numbers))
        return numbers

    def warm(
        self,
        texts: Sequence[str],
        processes: Processes = Processes(),
        report: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> None:
        """Embed those of `texts` that are not stored. Processes that lack the same texts divide
        them, so all of `processes` must call this with the same texts.

        `report` is called with {"phase": "prompts", "prompts": a line of progress}.
        """
        place = self.store.prepare()
        new = [text for text in dict.fromkeys(texts) if text not in self._numbers]
        missing = self.store.missing(new)
        # again if processes do not see what the others have stored
        while any(lacking := processes.gather(missing)):
            peers = [rank for rank, other in enumerate(lacking) if other == missing]
            share = missing[peers.index(processes.rank) :: len(peers)]
            with processes.shared_errors():
                reported = -REPORT_EVERY
                for done, row in enumerate(self._embedded(share), 1):
                    size = sum(tensor.nbytes for tensor in row.values()) * len(missing) / 1e9
                    if done == 1:
                        self.store.require_room(size)
                    if done == len(share) or time.monotonic() - reported >= REPORT_EVERY:
                        reported = time.monotonic()
                        line = f"{done:,} of {len(share):,} prompts embedded"
                        if len(peers) > 1:
                            line += f" by each of {len(peers)} processes"
                        line += f" ({len(missing):,} new ones, {size:,.2f} GB in {place})"
                        report({"phase": "prompts", "prompts": line})
            missing = self.store.missing(missing)
        self._numbers |= {text: n for n, text in enumerate(new, len(self._numbers))}

    def rows(self, numbers: Tensor, among: frozenset[int] = frozenset()) -> dict[str, Tensor]:
        """The embeddings under `numbers` [sample], a tensor on the device; every result has
        [sample] as its first axis.

        `among` lists the numbers that may occur. If it is empty, they are read from the device,
        which synchronises with it.
        """
        needed = among or frozenset(numbers.tolist())
        if not needed <= self._on_device:  # a condition of an earlier call
            self._bring(self._on_device | needed)
        index = self._places[numbers]
        return {name: table.index_select(0, index) for name, table in self._table.items()}

    def _bring(self, numbers: frozenset[int]) -> None:
        """Fill the tables on the device."""
        known = list(self._numbers)
        texts = [known[number] for number in numbers]
        stored = {text: self.store.get(text) for text in texts}
        lost = [text for text, row in stored.items() if row is None]
        stored |= dict(zip(lost, self._embedded(lost), strict=True))
        rows: list[Any] = [stored[text] for text in texts]
        self._table = {}
        for name in rows[0]:
            table = pad_sequence([row[name] for row in rows], batch_first=True)
            self._table[name] = table.to(self.device)
        places = torch.zeros(len(known), dtype=torch.int64)
        places[list(numbers)] = torch.arange(len(numbers))
        self._places, self._on_device = places.to(self.device), numbers

    def _embedded(self, texts: Sequence[str]) -> Iterator[Row]:
        """Embed and store `texts`, one after the other."""
        for text, given in zip(texts, self.encode(texts) if texts else (), strict=True):
            # a copy, not a view of a batch
            row = {
                name: tensor.detach()
                .to("cpu", self.dtype if tensor.is_floating_point() else None)
                .clone(memory_format=torch.contiguous_format)
                for name, tensor in given.items()
            }
            if not is_finite(row):
                what = f"the text encoder's embedding of {text!r} has values that are not finite"
                raise TrainingError(f"{what}; use bfloat16 or float32, or check its weights")
            self.store.put(text, row)
            yield row


def is_finite(row: Row) -> bool:
    """Whether all values of an embedding are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in row.values())
