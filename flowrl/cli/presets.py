"""`flowrl presets`."""

import shutil
import textwrap
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import tyro

from flowrl.cli.layout import columns, wrapped
from flowrl.parts.settings import grouped, settings_text
from flowrl.training.config import RunConfig, preset
from flowrl.training.presets import (
    PRESETS,
    Combined,
    combinations,
    combine,
    published,
    published_values,
    shipped,
)


@dataclass(frozen=True)
class Presets:
    """List the presets, or print the settings of one next to the published values and their
    sources.

    Examples: flowrl presets

    flowrl presets sd3.5-medium,tp-grpo,ocr

    flowrl presets sd3.5-medium,tp-grpo,ocr,exact --yaml > mine.yaml

    accelerate launch --config_file "$(flowrl presets --accelerate ddp)" --num_processes 8 -m flowrl
    train ...
    """

    name: tyro.conf.Positional[str] = ""
    """A preset: one name, or a model, a method and a task separated by commas, and `exact`. Left
    out: list all.
    """
    yaml: bool = False
    """Print YAML that `flowrl train --config` and `--preset` take."""
    accelerate: Literal["ddp", "fsdp2", "zero2"] | None = None
    """Print the path of a file for `accelerate launch --config_file`: ddp (every process has all
    weights), fsdp2 or zero2 (weights are sharded).
    """

    def main(self) -> int:
        """Print."""
        if self.accelerate:
            print(
                Path(str(resources.files("flowrl") / "data" / "launch" / f"{self.accelerate}.yaml"))
            )
            return 0
        if not self.name:
            print(listing(columns()))
            return 0
        found = combine(self.name, RunConfig)
        if self.yaml:
            print(preset_text(found))
        elif self.name in PRESETS:  # those of the built-in worlds have no published counterpart
            print(
                f"# {self.name}, for the world shapes",
                settings_text(grouped(RunConfig, preset(self.name).apply().flat())),
                sep="\n",
            )
        else:
            print(published_text(found, self.name, shutil.get_terminal_size().columns))
        return 0


def listing(width: int | None) -> str:
    """All presets with what is known of their cost."""
    lines = ["For the built-in worlds: " + ", ".join(PRESETS)]
    for kind, files in shipped().items():
        lines += ["", f"{kind}:"]
        for name in files:
            about = combine(name, RunConfig).pieces[0].about
            lines += wrapped(f"{name}: {about['summary']}", width, 2)
            facts = {
                key.replace("_", " "): text
                for key, text in about.items()
                if key not in ("summary", "notes")
            }
            for key, text in [*facts.items(), *(("note", text) for text in about.get("notes", ()))]:
                lines += wrapped(f"{key}: {text}", width, 6)
    end = (
        (
            f"A model, a method and a task combine, separated by commas, to {len(combinations())}"
            f" presets for `flowrl train --preset`, as in {combinations()[0]} or"
            f" {combinations()[-1]}. Each also exists with `,exact`, in flowrl's own definitions."
        ),
        (
            "`flowrl presets NAME` prints the settings of one next to the published values, with"
            " --yaml as a file for --preset."
        ),
    )
    return "\n".join([*lines, *(line for text in end for line in ["", *wrapped(text, width)])])


SIDE_BY_SIDE = 130
"""Columns of a terminal from which sources and reasons have a column of their own."""


def published_text(found: Combined, name: str, width: int) -> str:
    """A table of the settings: ours, the published value, where it is published, and why ours
    differs; the sources below.
    """
    order = list(RunConfig().flat())
    rows = sorted(published(found), key=lambda row: order.index(row.setting))
    wide = width >= SIDE_BY_SIDE
    sizes = (22, 25, 25, width - 78) if wide else (22, 25, 25)
    same = sum(row.same for row in rows)
    form = (
        "flowrl's exact definitions"
        if "exact" in name.split(",")
        else "definitions as released (NAME,exact has flowrl's own)"
    )
    lines = [
        *textwrap.wrap(f"{name}: {same} of {len(rows)} settings as published; {form}", width),
        "",
    ]
    lines += _cells(
        ("setting", "flowrl", "published", "same, or why not; where published")[: len(sizes)], sizes
    )
    for row in rows:
        why = row.why or "not published"
        said = "same" if row.same else why if row.value is None else f"differs: {why}"
        note = f"{said} [{row.where}]" if row.where else said
        cells = (
            row.setting,
            _value(row.ours),
            "-" if row.value is None else _value(row.value),
            note,
        )
        lines += _cells(cells[: len(sizes)], sizes)
        lines += (
            []
            if wide
            else textwrap.wrap(note, width - 4, initial_indent="    ", subsequent_indent="    ")
        )
    used = {row.where.partition(":")[0] for row in rows}
    sources = [
        f"{key}: {text}" for key, text in published_values()["sources"].items() if key in used
    ]
    return "\n".join(
        [
            *lines,
            *([""] if sources else []),
            *(line for text in sources for line in textwrap.wrap(text, width)),
        ]
    )


def _cells(cells: tuple[str, ...], sizes: tuple[int, ...]) -> list[str]:
    """One row of a table, its cells wrapped to the columns' `sizes`."""
    wrapped = [textwrap.wrap(cell, size) for cell, size in zip(cells, sizes, strict=True)]
    return [
        "  ".join(f"{part:{size}s}" for part, size in zip(parts, sizes, strict=True)).rstrip()
        for parts in zip_longest(*wrapped, fillvalue="")
    ]


def _value(value: Any) -> str:
    """A setting as one writes it in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(_value, value)) if isinstance(value, tuple) else str(value)


def preset_text(found: Combined) -> str:
    """YAML with a comment at every setting that says which piece it comes from, and what the pieces
    say of themselves above.
    """
    lines = []
    for piece in found.pieces:
        lines += [f"# {piece.name}: {piece.about.get('summary', piece.origin)}"]
        lines += [
            f"#   {key.replace('_', ' ')}: {text}"
            for key, text in piece.about.items()
            if key not in ("summary", "notes")
        ]
        lines += [f"#   note: {text}" for text in piece.about.get("notes", ())]
    text = settings_text(grouped(RunConfig, found.settings)).splitlines()
    width = max(map(len, text))
    for line in text:
        origin = found.origins.get(line.strip().partition(":")[0], "")
        lines.append(f"{line:{width}s}  # {origin}" if origin else line)
    return "\n".join(lines)
