"""`flowrl pretrain`: reproduces the shipped weights of the image worlds
(`flowrl.worlds.pretraining`).
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from flowrl.cli.progress import clock
from flowrl.core.errors import require
from flowrl.core.options import Count, Seed
from flowrl.run.io import require_new_file
from flowrl.run.reading import read_bytes


@dataclass(frozen=True)
class Pretrain:
    """Reproduce the built-in weights of the image worlds (one core is enough; shapes: about 50
    minutes, edits: about 12).
    """

    world: Literal["shapes", "edits"] = "shapes"
    """The world; "edits" continues from the built-in weights of "shapes"."""
    out: Path | None = None
    """Where to write the weights [default: WORLD.safetensors]; a card with their hash is written
    next to them.
    """
    updates: Count | None = None
    """Optimiser steps of the base model [default: as for the shipped weights]."""
    seed: Seed = 0
    threads: Annotated[int, Ge(1), Le(1024)] = 1
    """Number of threads. The last digits of the weights depend on it; the shipped weights were made
    with one thread.
    """

    def main(self) -> int:
        """Train the autoencoder and the base model; write weights and card."""
        from flowrl.cli.options import typed_command
        from flowrl.worlds.built_in import base_network, weights_path
        from flowrl.worlds.pretraining import EDITS, PretrainConfig, pretrain_to_file

        edits = self.world == "edits"
        config = replace(EDITS if edits else PretrainConfig(), seed=self.seed)
        if self.updates is not None:
            config = replace(config, updates=self.updates)
        out = self.out or Path(f"{self.world}.safetensors")
        require(not out.is_dir(), "out", str(out), "a file; this is a folder")
        card = out.with_suffix(".json")
        require_new_file(
            out, lambda data: hashlib.sha256(data).hexdigest().encode() in read_bytes(card)
        )
        require_new_file(card, lambda data: b'"sha256"' in data)
        base = base_network(weights_path()) if edits else None
        pretrain_to_file(config, out, self.threads, _print_progress(), typed_command(), base)
        print(f"Wrote {out} and {card}; use them with --base-weights {out}")
        return 0


def _print_progress() -> Callable[[str, int, int, float], None]:
    """Print every report with the remaining time."""
    started: dict[str, float] = {}

    def show(phase: str, update: int, updates: int, loss: float) -> None:
        began = started.setdefault(phase, time.monotonic())
        left = (time.monotonic() - began) / update * (updates - update)
        remaining = clock(left if update > 1 else None)
        print(f"{phase}: {update}/{updates}  loss {loss:.4f}  time left {remaining}", flush=True)

    return show
