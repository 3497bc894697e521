"""The parts of a model in the folder of a pipeline and in a single file. All checks here read JSON
and the headers of safetensors files, no weights.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from flowrl.core.errors import ConfigError
from flowrl.policies.families import Family
from flowrl.run.reading import PICKLED, read_bytes, read_json, reading

WEIGHTS = re.compile(r"(?:diffusion_pytorch_model|model)(?:\.(\w+?))?(?:-\d+-of-\d+)?\.safetensors")
"""A file of weights, and its variant."""
PREFIXES = {
    "AutoencoderKL": ("first_stage_model.", "vae."),
    "CLIPTextModel": ("text_encoders.clip",),
    "CLIPTextModelWithProjection": ("text_encoders.clip",),
    "T5EncoderModel": ("text_encoders.t5xxl.",),
}
"""First characters of the names of a part's weights in a single file, by the part's class."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """A pipeline's files.

    Args:
        model: the model as given.
        folder: the folder of the pipeline; with a single file, that of its configs and other parts.
        index: entries of model_index.json.
        name: class of the pipeline.
        kind: this class.
        family: its model family.
        file: the single file.
    """

    model: str
    folder: Path
    index: Mapping[str, Any]
    name: str
    kind: Any
    family: Family
    file: Path | None = None

    @property
    def subject(self) -> str:
        """The subject of messages."""
        return f"model: the {self.name} in {self.model!r}"

    @cached_property
    def parts(self) -> list[str]:
        """The networks of the pipeline; a text encoder may be absent."""
        named = ("transformer", "transformer_2", "vae", *self.family.encoders)
        return [part for part in named if (self.index.get(part) or [None])[0]]

    @cached_property
    def in_file(self) -> list[str]:
        """The networks that the single file contains."""
        if self.file is None:
            return []
        names, found = [*header(self.file)], ["transformer"]
        for part in self.parts:
            starts = PREFIXES.get(str(self.index[part][1]), ())
            loads = part == "vae" or hasattr(self.kind, "from_single_file")
            if starts and loads and any(name.startswith(starts) for name in names):
                found.append(part)
        return found

    def part(self, name: str) -> Any:
        """The class of a part."""
        library, kind = self.index[name]
        return getattr(import_module(library), kind)

    def variant(self, part: str) -> str | None:
        """The variant of a part's weights, as in "fp16"; None for those without one, which are
        preferred.

        Raises `ConfigError` for a part without weights in safetensors files, or with a shard that
        is missing.
        """
        names = sorted(path.name for path in (self.folder / part).glob("*"))
        found = [form for form in map(WEIGHTS.fullmatch, names) if form]
        if not found:
            raise ConfigError(f"{self.subject} {_lacking(self, part, names)}")
        variant = None if any(form[1] is None for form in found) else found[0][1]
        suffix = f".{variant}" if variant else ""
        for path in (self.folder / part).glob(f"*.safetensors.index{suffix}.json"):
            with reading(path):
                shards = {str(name) for name in json.loads(read_bytes(path))["weight_map"].values()}
            missing = sorted(shards - {*names})
            # a folder may have an index beside a complete file
            if missing and not all(form[0] not in shards for form in found):
                text = f"{len(missing)} of {len(shards)} shards of the {part}, such as"
                raise ConfigError(f"{self.subject} lacks {text} {missing[0]}; {_again(self.model)}")
        return variant

    def check(self) -> None:
        """Raise `ConfigError` unless all networks have weights, and the transformer and what is in
        the single file those of their configs.
        """
        for part in self.parts:
            if part not in self.in_file:
                self.variant(part)
        if self.can_be_on_meta:
            self._check_shapes("transformer")
            if "vae" in self.in_file:  # in folders, diffusers renames some of its older weights
                self._check_shapes("vae")

    def _check_shapes(self, part: str) -> None:
        with reading(self.subject):
            expected, given = self.expected(part), self.shapes(part)
        if given is None:
            return
        if missing := sorted(expected.keys() - given.keys()):
            raise ConfigError(
                f"{self.subject}: {len(missing)} of {len(expected)} weights of the {part} are"
                f" missing, such as {missing[0]}; allowed: none"
            )
        if wrong := [name for name in expected if given[name] != expected[name]]:
            both = f"{given[wrong[0]]} in the file, {expected[wrong[0]]} by its config.json"
            raise ConfigError(f"{self.subject}: {wrong[0]} of the {part} is {both}")

    @property
    def can_be_on_meta(self) -> bool:
        """Whether transformer and image decoder can be made of their config.json, as diffusers'."""
        return all(hasattr(self.part(name), "load_config") for name in ("transformer", "vae"))

    def on_meta(self) -> Any:
        """The pipeline with transformer and image decoder on meta, without text encoders."""
        made = [part for part in self.parts if part not in self.family.encoders]
        networks = {part: self.without_weights(part) for part in made}
        absent = dict.fromkeys(part for part in self.parts if part not in networks)
        logging: Any = import_module("diffusers.utils.logging")
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with reading(self.subject):
                return self.kind.from_pretrained(self.folder, **networks, **absent)
        finally:
            if shown:
                logging.enable_progress_bar()

    def without_weights(self, part: str) -> Any:
        """A network on meta. Its buffers are computed, as by diffusers: those that are not in its
        files exist nowhere else.
        """
        kind = self.part(part)
        with import_module("accelerate").init_empty_weights(include_buffers=False):
            return kind.from_config(kind.load_config(self.folder, subfolder=part))

    def expected(self, part: str) -> Shapes:
        """The shapes of a network's weights by its config.json."""
        return {n: tuple(t.shape) for n, t in self.without_weights(part).state_dict().items()}

    def shapes(self, part: str) -> Shapes | None:
        """The shapes of a network's weights in its files, under diffusers' names; None if they are
        quantised.
        """
        config = read_json(self.folder / part / "config.json")
        if config.get("quantization_config"):
            return None
        if part in self.in_file and self.file is not None:
            return self._converted(part)
        suffix = self.variant(part)
        paths = [(path, WEIGHTS.fullmatch(path.name)) for path in (self.folder / part).iterdir()]
        found = [header(path) for path, form in paths if form and form[1] == suffix]
        return {name: shape for one in found for name, shape in one.items()}

    def _converted(self, part: str) -> Shapes:
        """The shapes of the single file under diffusers' names, by diffusers' own conversion of
        tensors on meta.
        """
        loaders: Any = import_module("diffusers.loaders.single_file_model")
        kind, given = self.part(part), header(self.file or Path())
        expected = self.expected(part)
        if expected.keys() <= given.keys():
            return given
        name = loaders._get_single_file_loadable_mapping_class(kind)
        convert = loaders.SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
        tensors = {n: torch.empty(shape, device="meta") for n, shape in given.items()}
        try:
            made = convert(checkpoint=tensors, config=kind.load_config(self.folder, subfolder=part))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{self.subject} is no {kind.__name__} that diffusers converts ({reason:.150}); its"
                f" first weights are {', '.join([*given][:3])}"
            ) from error
        return {n: tuple(tensor.shape) for n, tensor in made.items()}


def header(path: Path) -> Shapes:
    """The shapes of the tensors in a safetensors file; reads its header only. Raises `ConfigError`
    for another file.
    """
    with reading(path), safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _lacking(source: Source, part: str, names: list[str]) -> str:
    """What is wrong with a part without weights that are read, and what to do."""
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        code = (
            f"from diffusers import {source.name} as P;"
            f" P.from_pretrained({source.model!r}, use_safetensors=False).save_pretrained('NEW')"
        )
        return (
            f"has the weights of its {part} in {part}/{pickled[0]} only, a format that can contain"
            f" code; allowed: safetensors. If you trust it: python -c {shlex.quote(code)}"
        )
    if not (source.folder / part).is_dir():
        return f"has no folder {part}, which its model_index.json names; {_again(source.model)}"
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    only = f", only {', '.join(others[:2])}" if others else ""
    expected = "model.safetensors or diffusion_pytorch_model.safetensors, also in shards"
    return f"has no weights of its {part}{only}; expected {expected}; {_again(source.model)}"


def _again(model: str) -> str:
    """How to complete a model."""
    if Path(model).exists():
        return "is the download complete? (hf download NAME --local-dir FOLDER completes it)"
    return f"complete the download: hf download {model}"
