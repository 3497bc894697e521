"""Prompt embeddings: computed once, stored in main memory or on disk, and moved to the device when
a network call needs them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowrl.core.errors import ConfigError

Encode = Callable[[Sequence[str]], Iterable[Mapping[str, Tensor]]]
"""From texts to one mapping of named tensors per text, without a prompt axis; an iterator that
embeds one text at a time.
"""


@dataclass
class PromptCache:
    """Embeddings by integer number, so that a `Condition` carries a number per sample instead of
    megabytes.

    `encode` embeds new texts; no text is embedded twice. The first `limit` embeddings are stored in
    main memory, later ones in a temporary folder (`TMPDIR`), which is deleted at the end. Those of
    the latest call are also on `device`, padded with zeros at the end of their first axis to a
    common length, floating-point tensors in `dtype`. Raises `ConfigError` if the folder cannot be
    written.
    """

    encode: Encode
    device: torch.device
    limit: int
    dtype: torch.dtype
    _stored: dict[str, dict[str, Tensor] | Path] = field(default_factory=dict)
    _folder: TemporaryDirectory[str] | None = None
    _on_device: frozenset[int] = frozenset()

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """The numbers of `texts`; new texts are embedded."""
        self.warm(texts)
        order = {text: number for number, text in enumerate(self._stored)}
        numbers = [order[text] for text in texts]
        self._bring(frozenset(numbers))
        return numbers

    def warm(self, texts: Sequence[str]) -> None:
        """Embed those of `texts` that are new, in one call of `encode`."""
        new = [text for text in dict.fromkeys(texts) if text not in self._stored]
        for text, row in zip(new, self.encode(new) if new else (), strict=True):
            tensors = {name: tensor.detach().cpu() for name, tensor in row.items()}
            full = len(self._stored) >= self.limit
            self._stored[text] = self._on_disk(tensors) if full else tensors

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
        stored = list(self._stored.values())
        chosen = [stored[number] for number in numbers]
        rows = [load_file(row) if isinstance(row, Path) else row for row in chosen]
        self._table = {}
        for name in rows[0]:
            table = pad_sequence([row[name] for row in rows], batch_first=True)
            dtype = self.dtype if table.is_floating_point() else None
            self._table[name] = table.to(self.device, dtype)
        places = torch.zeros(len(stored), dtype=torch.int64)
        places[list(numbers)] = torch.arange(len(numbers))
        self._places, self._on_device = places.to(self.device), numbers

    def _on_disk(self, tensors: Mapping[str, Tensor]) -> Path:
        """Write an embedding, and return its file."""
        self._folder = self._folder or TemporaryDirectory(
            prefix="flowrl-prompts-", ignore_cleanup_errors=True
        )
        path = Path(self._folder.name, f"{len(self._stored)}.safetensors")
        try:
            # safetensors refuses views of a larger storage
            copies = {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
            save_file(copies, path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"prompt_cache = {self.limit}: further prompts cannot be written to {path.parent}"
                f" ({error}); set TMPDIR to a folder with more room, or a larger prompt_cache"
            ) from error
        return path
