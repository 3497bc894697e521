"""`flowrl prompts`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Le

from flowrl.core.errors import require
from flowrl.core.options import Seed
from flowrl.parts.prompts import (
    compositional_prompts,
    image_prompts,
    load_prompts,
    text_prompts,
    write_prompts,
)


@dataclass(frozen=True)
class Prompts:
    """Make a file of prompts for `flowrl train --model`, or check one.

    Examples: flowrl prompts compositional --count 500 --file prompts.jsonl

    flowrl prompts check --file prompts.jsonl
    """

    kind: tyro.conf.Positional[Literal["compositional", "text", "images", "check"]]
    """compositional (GenEval's requests), text (texts in quotation marks, for OCR), images (general
    prompts) or check (summarise a file).
    """
    file: Path = Path("prompts.jsonl")
    """The file to write, or to check: .jsonl, text with a prompt a line, or a dataset,
    as in hf(name=NAME, split=..., column=...).
    """
    count: Annotated[int, Ge(1), Le(10**6)] = 500
    """How many prompts to make."""
    seed: Seed = 0
    """Other seeds give other prompts."""

    def main(self) -> int:
        """Write or check."""
        if self.kind != "check":
            require(
                self.file.suffix == ".jsonl", "file", str(self.file), "a name that ends in .jsonl"
            )
            makers = {
                "compositional": compositional_prompts,
                "text": text_prompts,
                "images": image_prompts,
            }
            write_prompts(self.file, makers[self.kind](self.count, self.seed))
        found = load_prompts(self.file)
        kinds = sorted({str(prompt.metadata.get("tag", "")) for prompt in found.prompts} - {""})
        kinds_text = f" ({', '.join(kinds)})" if kinds else ""
        print(f"{self.file}: {len(found.prompts)} prompts{kinds_text}")
        for remark in found.remarks:
            print(remark)
        return 0
