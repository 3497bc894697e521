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
from flowrl.core.prompt import Prompt

Row = Mapping[str, Tensor]
Encode = Callable[[Sequence[Prompt]], Iterable[Row]]
"""From prompts to one mapping of named tensors per prompt, without a prompt axis; an iterator that
embeds a few prompts at a time.
"""
REPORT_EVERY = 10.0
"""Seconds between two reports of progress."""


class Store(Protocol):
    """Embeddings by `Prompt.key`. `flowrl.run.models.prompt_cache.DiskStore` is on disk."""

    def prepare(self) -> str:
        """Called before the other methods whenever prompts are embedded or looked up; returns the
        store's place in words.
        """
        ...

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` without an embedding."""
        ...

    def require_room(self, size: float) -> None:
        """Raise an error unless `size` GB can be stored."""
        ...

    def get(self, key: str) -> Row | None:
        """The embedding of `key`; None if it is missing or damaged."""
        ...

    def put(self, key: str, row: Row) -> None:
        """Store the embedding of `key`."""
        ...


@dataclass
class MemoryStore:
    """All embeddings in main memory."""

    rows: dict[str, Row] = field(default_factory=dict)

    def prepare(self) -> str:
        """No action."""
        return "main memory"

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` without an embedding."""
        return [key for key in keys if key not in self.rows]

    def require_room(self, size: float) -> None:
        """No action."""

    def get(self, key: str) -> Row | None:
        """The embedding of `key`, if it is known."""
        return self.rows.get(key)

    def put(self, key: str, row: Row) -> None:
        """Store the embedding of `key`."""
        self.rows[key] = row


@dataclass
class PromptEmbeddings:
    """Embeddings by integer number, so that a `Condition` carries a number per sample instead of
    megabytes.

    `encode` embeds new prompts, and the result is put into `store`; one that is damaged or deleted
    there is made again. Those of the latest call are on `device`, padded with zeros at the end of
    their first axis to a common length. Floating-point tensors have `dtype`.
    """

    encode: Encode
    device: torch.device
    dtype: torch.dtype
    store: Store = field(default_factory=MemoryStore)
    _numbers: dict[str, int] = field(default_factory=dict)
    _prompts: list[Prompt] = field(default_factory=list)
    _on_device: frozenset[int] = frozenset()

    def numbers(self, prompts: Sequence[Prompt]) -> list[int]:
        """The numbers of `prompts`; new ones are embedded."""
        self.warm(prompts)
        numbers = [self._numbers[prompt.key] for prompt in prompts]
        self._bring(frozenset(numbers))
        return numbers

    def warm(
        self,
        prompts: Sequence[Prompt],
        processes: Processes = Processes(),
        report: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> None:
        """Embed those of `prompts` that are not stored. Processes that lack the same ones divide
        them, so all of `processes` must call this with the same prompts.

        `report` is called with {"phase": "prompts", "prompts": a line of progress}.
        """
        place = self.store.prepare()
        new = {p.key: p for p in prompts if p.key not in self._numbers}
        missing = self.store.missing([*new])
        # again if processes do not see what the others have stored
        while any(lacking := processes.gather(missing)):
            peers = [rank for rank, other in enumerate(lacking) if other == missing]
            share = missing[peers.index(processes.rank) :: len(peers)]
            with processes.shared_errors():
                reported = -REPORT_EVERY
                for done, row in enumerate(self._embedded([new[key] for key in share]), 1):
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
        self._numbers |= {key: n for n, key in enumerate(new, len(self._numbers))}
        self._prompts += new.values()

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
        needed = [self._prompts[number] for number in numbers]
        stored = {prompt.key: self.store.get(prompt.key) for prompt in needed}
        lost = [prompt for prompt in needed if stored[prompt.key] is None]
        stored |= zip([prompt.key for prompt in lost], self._embedded(lost), strict=True)
        rows: list[Any] = [stored[prompt.key] for prompt in needed]
        self._table = {}
        for name in rows[0]:
            table = pad_sequence([row[name] for row in rows], batch_first=True)
            self._table[name] = table.to(self.device)
        places = torch.zeros(len(self._prompts), dtype=torch.int64)
        places[list(numbers)] = torch.arange(len(numbers))
        self._places, self._on_device = places.to(self.device), numbers

    def _embedded(self, prompts: Sequence[Prompt]) -> Iterator[Row]:
        """Embed and store `prompts`, one after the other."""
        for prompt, given in zip(prompts, self.encode(prompts) if prompts else (), strict=True):
            # a copy, not a view of a batch
            row = {
                name: tensor.detach()
                .to("cpu", self.dtype if tensor.is_floating_point() else None)
                .clone(memory_format=torch.contiguous_format)
                for name, tensor in given.items()
            }
            if not is_finite(row):
                what = f"the text encoder's embedding of {prompt.text!r} has values that are not"
                raise TrainingError(f"{what} finite; use bfloat16 or float32, or check its weights")
            self.store.put(prompt.key, row)
            yield row


def is_finite(row: Row) -> bool:
    """Whether all values of an embedding are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in row.values())
