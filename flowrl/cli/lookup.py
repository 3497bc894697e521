"""`flowrl parts`, `flowrl presets`, `flowrl prompts` and `flowrl env`: commands that look up or
write a text, and import no torch.
"""

import inspect
import os
import platform
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Le

from flowrl.cli.terminal import fitted, printable
from flowrl.core.errors import ConfigError, FlowrlError, require
from flowrl.core.options import Seed
from flowrl.run.config import RunConfig, preset
from flowrl.run.parts.coverage import LEGEND, coverage
from flowrl.run.parts.plugins import PACKAGES, versions
from flowrl.run.parts.prompts import GENERATORS, read_prompts, write_prompts
from flowrl.run.parts.registry import (
    KINDS,
    available,
    documentation_of,
    options_of,
    shadowed,
    summary_of,
)
from flowrl.run.parts.settings import grouped, settings_text, unknown
from flowrl.run.presets import (
    PRESETS,
    Combined,
    Piece,
    combinations,
    combine,
    published,
    published_values,
    shipped,
)
from flowrl.run.workers import usable_cores

OPTIONS = {"features": "diversity", "probe": "credit", "times": "loss", "observer": "observe"}
"""Kinds of parts whose option of `flowrl train` has another name; a probe and training times are
options of parts.
"""
WITHIN = {"probe": "credit 'RULE(probe={})'", "times": "loss 'LOSS(times={})'"}
MORE_PACKAGES = ("accelerate", "safetensors", "jaxtyping", "tyro", "pydantic", "numpy")


@dataclass(frozen=True)
class Parts:
    """List all parts by kind, including plug-ins, or describe a part or a method.

    Examples: flowrl parts

    flowrl parts turning-point

    flowrl parts tp-grpo
    """

    name: tyro.conf.Positional[str] = ""
    """The part to describe: prints its documentation, and its options with their defaults. Of a
    method: its parts with their formulas, what its paper reports, and what flowrl has of it. If
    omitted, all parts are listed, one per line.
    """
    kind: str = ""
    """List only parts of this kind, with their options: credit, probe, sampler, window, loss,
    reward, features, observer, times, world, or all.
    """

    def main(self) -> int:
        """Print the list, or one part."""
        known = ("", "all", *KINDS)
        require(self.kind in known, "kind", self.kind, f"one of {', '.join(KINDS)}, all")
        fits = not self.name or self.kind != "all"
        require(fits, "kind", self.kind, "left out with a name: it is looked up in all kinds")
        kinds = (self.kind,) if self.kind in KINDS else tuple(KINDS)
        lines = described(self.name, kinds) if self.name else self._list(kinds)
        print("\n".join(lines))
        return 0

    def _list(self, kinds: tuple[str, ...]) -> Iterator[str]:
        """A line per part, and below it its options if a kind is chosen."""
        for kind in kinds:
            yield f"{kind} (--{OPTIONS.get(kind, kind)})"
            for name, origin in sorted(available(kind).items()):
                try:
                    text = summary_of(kind, name)
                    options = options_of(kind, name) if self.kind else {}
                except FlowrlError as error:
                    text, options = f"unusable, {error}", {}
                yield fitted(f"  {_title(name, origin)}: {text}", 4)
                if options:
                    values = ", ".join(f"{n}={_shown(v)}" for n, v in options.items())
                    yield fitted(f"      {values}", 6)
        if not self.kind:
            yield "method (--method)"
            yield from (f"  {name}: {paper.title}" for name, paper in coverage().items())
        yield from (f"\nWarning: {text}" for text in shadowed())
        yield "\nTo describe a part with its options, or a method: flowrl parts NAME"


def described(name: str, kinds: tuple[str, ...]) -> Iterator[str]:
    """The documentation and the options of every part of `kinds` that is called `name`, and the
    rows of the method of this name if all kinds are looked up. Raises `ConfigError` if there is
    none.
    """
    methods = coverage() if len(kinds) == len(KINDS) else {}
    parts = {part for kind in kinds for part in available(kind)} | set(methods)
    if name not in parts:
        raise ConfigError(unknown(name, parts, "part"))
    for kind in kinds:
        if name not in available(kind):
            continue
        option = WITHIN.get(kind, f"{OPTIONS.get(kind, kind)} {{}}").format(name)
        yield f"{_title(name, available(kind)[name])}: {KINDS[kind].noun}, --{option}\n"
        text, meanings = _arguments(documentation_of(kind, name))
        options = options_of(kind, name)
        yield fitted(f"{text}\n\n{'Options and defaults:' if options else 'No options.'}")
        for choice, value in options.items():
            yield fitted(f"  {choice} = {_shown(value)}  {meanings.get(choice, '')}".rstrip(), 6)
        yield ""
    if name in methods:
        yield from covered(name)


def covered(method: str) -> Iterator[str]:
    """The rows of a method, and how to read them."""
    yield fitted(f"{method}: method, --method {method}. {coverage()[method].title}")
    yield ""
    yield from composition(method)
    for row in coverage()[method].rows:
        yield fitted(row.item, 2)
        for label in ("published", "flowrl", "result"):
            if text := getattr(row, label).replace("`", ""):
                yield fitted(f"  {label:9}  {text}", 13)
    yield ""
    yield fitted(re.sub("[*`]", "", LEGEND))


def composition(method: str) -> Iterator[str]:
    """What a method is composed of: its own words, which say where it differs from the paper, and
    each part with its options and formula.
    """
    from flowrl.methods import METHODS  # imports torch

    made = METHODS[method]()
    yield fitted(f"{inspect.getdoc(METHODS[method])}\n")
    noise = {0.0: "their own noise", 1.0: "the same noise"}.get(
        made.shared_noise, f"noise of which {made.shared_noise:.4g} of the variance is common"
    )
    parts = {"sampler": made.sampler, "window": made.window, "rule": made.credit}
    parts |= {"probe": made.credit.probe, "loss": made.loss}
    for label, part in parts.items():
        yield fitted(f"  {label:9}  {part!r}", 13)
        paragraphs = (inspect.getdoc(type(part)) or "").split("\nArgs:")[0].split("\n\n")
        if label in ("sampler", "rule", "loss"):
            yield fitted(
                f"             {' '.join(paragraphs[min(1, len(paragraphs) - 1)].split())}", 13
            )
    yield f"  {'members':9}  start from {noise}\n"


def _arguments(text: str) -> tuple[str, dict[str, str]]:
    """A docstring without its section Args, and the meaning of every argument in this section."""
    head, _, rest = text.partition("\nArgs:\n")
    section, _, tail = rest.partition("\n\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return f"{head}\n{tail}", {name: " ".join(meaning.split()) for name, meaning in entries}


def _title(name: str, origin: str) -> str:
    return name if origin == "flowrl" else f"{name}  [{origin}]"


def _shown(value: Any) -> str:
    return "(required)" if value is inspect.Parameter.empty else repr(value)


@dataclass(frozen=True)
class Presets:
    """List the presets, compare one with the published values, print it as YAML, or locate a
    configuration file for Accelerate.

    Examples: flowrl presets

    flowrl presets sd3.5-medium,tp-grpo,ocr

    flowrl presets sd3.5-medium,tp-grpo,ocr,exact --yaml > mine.yaml

    accelerate launch --config_file "$(flowrl presets --accelerate ddp)" --num_processes 8 -m flowrl
    train ...
    """

    name: tyro.conf.Positional[str] = ""
    """A preset: one name, or a model, a method and a task separated by commas, optionally with
    `exact`. If omitted, all presets are listed.
    """
    yaml: bool = False
    """Print the preset as YAML for `flowrl train --config` or `--preset`."""
    accelerate: Literal["ddp", "fsdp2", "zero2", "hsdp"] | None = None
    """Print the path of a file for `accelerate launch --config_file`: ddp (every process holds all
    weights), fsdp2 or zero2 (weights are sharded), or hsdp (weights are sharded within each node).
    """

    def main(self) -> int:
        """Print."""
        only = not self.accelerate or not (self.yaml or self.name)
        require(only, "accelerate", self.accelerate, "used alone: it prints a path, not a preset")
        if self.accelerate:
            print(resources.files("flowrl") / "data" / "launch" / f"{self.accelerate}.yaml")
        elif not self.name:
            print("\n".join(preset_list()))
        elif self.yaml:
            print("\n".join(preset_lines(combine(self.name, RunConfig))))
        elif self.name in PRESETS:  # those of the built-in worlds have no published counterpart
            print(settings_text(preset(self.name).apply().as_dict(), f"{self.name}, world shapes"))
        else:
            print("\n".join(published_lines(combine(self.name, RunConfig), self.name)))
        return 0


def _about(piece: Piece) -> Iterator[str]:
    """The facts in a preset's file, such as its memory, and its notes."""
    for key, value in piece.file.about.items():
        texts = value if key == "notes" else [value] if key != "summary" else []
        yield from (f"{key.replace('_', ' ').removesuffix('s')}: {text}" for text in texts)


def preset_list() -> Iterator[str]:
    """All presets with what is known of their cost."""
    yield fitted(f"For the built-in worlds: {', '.join(PRESETS)}")
    for kind, files in shipped().items():
        yield f"\n{kind}:"
        for name in files:
            piece = combine(name, RunConfig).pieces[0]
            yield fitted(f"  {name}: {piece.file.about['summary']}", 6)
            yield from (fitted(f"      {line}", 6) for line in _about(piece))
    names = combinations()
    yield fitted(
        f"\nA model, a method and a task, separated by commas, form one of {len(names)} presets for"
        f" `flowrl train --preset`, for example {names[0]} or {names[-1]}. Append `,exact` for"
        " flowrl's own definitions."
    )
    yield fitted(
        "\n`flowrl presets NAME` compares the settings of a preset with the published values;"
        " with --yaml it prints a file for --preset."
    )


def published_lines(combined: Combined, name: str) -> Iterator[str]:
    """A line per setting: ours, the published value, why ours differs, and where it is published;
    the sources below.
    """
    order = list(RunConfig().flat())
    rows = sorted(published(combined), key=lambda row: order.index(row.setting))
    same, exact = sum(row.same for row in rows), "exact" in name.split(",")
    form = "flowrl's exact definitions" if exact else "as released (NAME,exact: flowrl's own)"
    yield fitted(f"{name}: {same} of {len(rows)} settings as published; definitions: {form}\n")
    columns = "{:26s}  {:26s}  {}"
    yield columns.format("setting", "flowrl", "published")
    for row in rows:
        why = row.why or "not published"
        note = "same" if row.same else why if row.value is None else f"differs: {why}"
        place = f" [{row.where}]" if row.where else ""
        yield fitted(columns.format(row.setting, _plain(row.ours), _plain(row.value)), 4)
        yield fitted(f"    {note}{place}", 4)
    used = {row.where.partition(":")[0] for row in rows}
    for key, text in published_values()["sources"].items():
        if key in used:
            yield fitted(f"\n{key}: {text}")


def _plain(value: Any) -> str:
    """A setting as it is written in YAML; "-" for None."""
    if isinstance(value, tuple):
        return ", ".join(map(_plain, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "-" if value is None else text.lower() if isinstance(value, bool) else text


def preset_lines(combined: Combined) -> Iterator[str]:
    """YAML with a comment at every setting that says which piece it comes from, and what the pieces
    say of themselves above.
    """
    for piece in combined.pieces:
        yield f"# {piece.name}: {piece.file.about.get('summary', piece.kind)}"
        yield from (f"#   {line}" for line in _about(piece))
    for line in settings_text(grouped(RunConfig, combined.settings)).splitlines():
        origin = combined.origins.get(line.strip().partition(":")[0])
        yield f"{line:40s}  # {origin}" if origin else line


@dataclass(frozen=True)
class Prompts:
    """Generate a prompt file for `flowrl train --model`, or check one.

    Examples: flowrl prompts compositional --count 500 --file prompts.jsonl

    flowrl prompts check --file prompts.jsonl
    """

    kind: tyro.conf.Positional[Literal["compositional", "text", "images", "check"]]
    """compositional (prompts in the style of GenEval), text (prompts with quoted text, for OCR),
    images (general prompts), or check (summarise a file).
    """
    file: Path = Path("prompts.jsonl")
    """The .jsonl file to write, or the prompts to check: a .jsonl file, a text file with one prompt
    per line, or a dataset, as in hf(name=NAME, split=..., column=...).
    """
    count: Annotated[int, Ge(1), Le(10**6)] = 500
    """Number of prompts to generate."""
    seed: Seed = 0
    """Seed of the generated prompts."""

    def main(self) -> int:
        """Write or check."""
        if self.kind in GENERATORS:
            allowed = "a name that ends in .jsonl"
            require(self.file.suffix == ".jsonl", "file", str(self.file), allowed)
            write_prompts(self.file, GENERATORS[self.kind](self.count, self.seed))
        else:
            given, usual = (self.count, self.seed), (Prompts.count, Prompts.seed)
            require(given == usual, "count, seed", given, "left out: a check generates no prompts")
        with warnings.catch_warnings(record=True) as remarks:
            warnings.simplefilter("always")
            prompts = read_prompts(self.file)
        kinds = {str(prompt.metadata.get("tag", "")) for prompt in prompts} - {""}
        tags = f" ({', '.join(map(printable, sorted(kinds)))})" if kinds else ""
        print(f"{self.file}: {len(prompts)} prompts{tags}")
        for remark in remarks:
            print(f"Warning: {remark.message}")
        return 0


@dataclass(frozen=True)
class Env:
    """Print the versions and CPU cores that a bug report needs; with --devices, also the GPUs."""

    devices: bool = False
    """Also print torch's threads and the GPUs; importing torch takes a second or more."""

    def main(self) -> int:
        """Print one fact per line."""
        facts = versions((*PACKAGES, *MORE_PACKAGES)) | {
            "Python": platform.python_version(),
            "system": platform.platform(),
            "CPU cores": f"{usable_cores()} of {os.cpu_count()}",
        }
        if self.devices:
            import torch

            is_cuda = torch.cuda.is_available()
            facts["torch threads"] = str(torch.get_num_threads())
            facts["CUDA"] = str(torch.version.cuda) if is_cuda else "no"
            for number in range(torch.cuda.device_count() if is_cuda else 0):
                gpu = torch.cuda.get_device_properties(number)
                facts[f"cuda:{number}"] = f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB"
        print("\n".join(f"{name:14s} {value}" for name, value in facts.items()))
        return 0
