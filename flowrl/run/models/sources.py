"""Where the parts of a model are: in the folder of a pipeline, in a single file, or on the Hub. All
checks here read JSON and the headers of safetensors files, no weights.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from flowrl.core.errors import ConfigError, require
from flowrl.policies.families import FAMILIES, Family
from flowrl.run.parts.plugins import plugin
from flowrl.run.reading import read_bytes, read_json, reading

WEIGHTS = re.compile(r"(?:diffusion_pytorch_model|model)(?:\.(\w+?))?(?:-\d+-of-\d+)?\.safetensors")
"""A file of weights, and its variant."""
VARIANTS = "fp16", "bf16"
"""The variants that are tried on the Hub."""
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
        named = ("transformer", "vae", *self.family.encoders)
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
        """Raise `ConfigError` unless all networks have weights, and the transformer those of its
        config.
        """
        for part in self.parts:
            if part not in self.in_file:
                self.variant(part)
        if not self.can_be_on_meta:
            return
        with reading(self.subject):
            expected, given = self.expected("transformer"), self.shapes("transformer")
        if given is not None and (missing := sorted(expected.keys() - given.keys())):
            raise ConfigError(
                f"{self.subject}: {len(missing)} of {len(expected)} weights of the transformer are"
                f" missing, such as {missing[0]}; allowed: none"
            )
        wrong = [name for name in expected if given and given[name] != expected[name]]
        if given and wrong:
            both = f"{given[wrong[0]]} in the file, {expected[wrong[0]]} by its config.json"
            raise ConfigError(f"{self.subject}: {wrong[0]} of the transformer is {both}")

    @property
    def can_be_on_meta(self) -> bool:
        """Whether transformer and image decoder can be made of their config.json, as diffusers'."""
        return all(hasattr(self.part(name), "load_config") for name in ("transformer", "vae"))

    def on_meta(self) -> Any:
        """The pipeline with transformer and image decoder on meta, without text encoders."""
        networks = {part: self.without_weights(part) for part in ("transformer", "vae")}
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


def family_of(pipeline: str) -> Family:
    """The family of a diffusers pipeline class. Raises `ConfigError` that lists the available
    ones.
    """
    if pipeline in FAMILIES:
        return FAMILIES[pipeline]()
    if point := plugin("flowrl.families", pipeline, "model family"):
        with reading(f"model family {pipeline} ({point.value})"):
            family = point.load()()
            require(isinstance(family, Family), "family", type(family).__name__, "a Family")
            return family
    known = ", ".join([*FAMILIES, *entry_points(group="flowrl.families").names])
    raise ConfigError(
        f"model: {pipeline} is not supported; supported pipelines: {known};"
        " docs/model-families.md shows how to add one"
    )


def find_source(
    model: str, original: str | None = None, family: Family | None = None, download: bool = True
) -> Source:
    """The files of a model; those on the Hub are downloaded unless `download` is False.

    Args:
        model: folder of a pipeline, name of one on the Hub, or a single .safetensors file.
        original: folder or name of the pipeline that has the configs of a single file.
        family: the model family; None for the one of the pipeline's class.
        download: whether files may be downloaded.

    Returns:
        The files; classes are those of diffusers.

    Raises:
        ConfigError: the model does not exist, is not complete, has another form, or contains code.
    """
    file = Path(model) if Path(model).is_file() else None
    if file is None:
        require(not original, "original", original, "none unless model is a single file")
        return _pipeline(model, "model", family, download)
    if file.suffix != ".safetensors":
        raise ConfigError(
            f"model: {model!r} is a single file of another format; allowed: a .safetensors file."
            " Other formats may contain code, or are quantised"
        )
    if not original:
        raise ConfigError(
            f"model: {model!r} is a single file; add --original FOLDER, the folder of the diffusers"
            " pipeline that it was trained from (or its name on the Hub), for the configs and the"
            " parts that the file does not contain"
        )
    _require_plain(file)
    source = replace(_pipeline(original, "original", family, download), model=model, file=file)
    loads = hasattr(source.part("transformer"), "from_single_file")
    kind = source.part("transformer").__name__
    require(loads, "model", model, f"a folder: diffusers reads no single file of a {kind}")
    return source


def _pipeline(model: str, setting: str, family: Family | None, download: bool) -> Source:
    diffusers: Any = import_module("diffusers")
    try:
        local = {} if download else {"local_files_only": True}
        index = dict(diffusers.DiffusionPipeline.load_config(model, **local))
        name = str(index.pop("_class_name"))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{setting}: {not_found(model, error)}") from error
    family = family or family_of(name)
    own = import_module(type(family).__module__)
    kind: Any = getattr(diffusers, name, None) or getattr(own, name, None)
    require(kind is not None, setting, name, f"a pipeline of diffusers or of {own.__name__}")
    _require_data_only(model, index, type(family).__module__.partition(".")[0])
    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = _downloaded(kind, model, **local)
        except OSError as error:
            raise ConfigError(f"{setting}: {not_found(model, error)}") from error
    for path in folder.glob("**/*.py"):
        raise ConfigError(f"{setting}: {path} is code; a model's folder must contain data only")
    return Source(model, folder, index, name, kind, family)


def _downloaded(kind: Any, model: str, **local: Any) -> Path:
    """The folder of a pipeline on the Hub; a variant if there are no other weights."""
    try:
        return Path(kind.download(model, use_safetensors=True, **local))
    except OSError as error:
        if "(variant=None)" not in str(error):  # diffusers names the weights that it looked for
            raise
        for variant in VARIANTS:
            with suppress(OSError):
                return Path(kind.download(model, use_safetensors=True, variant=variant, **local))
        raise


def header(path: Path) -> Shapes:
    """The shapes of the tensors in a safetensors file; reads its header only. Raises `ConfigError`
    for another file.
    """
    with reading(path), safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _require_plain(path: Path) -> None:
    """Raise `ConfigError` for weights in 8 or 4 bits, whose scales diffusers would leave out."""
    with reading(path), safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            kind = str(file.get_slice(name).get_dtype())
            allowed = f"weights in F32, F16 or BF16 ({name} in {path} is {kind})"
            require(not kind.startswith(("F8", "I8", "U8")), "model", path.name, allowed)


def _lacking(source: Source, part: str, names: list[str]) -> str:
    """What is wrong with a part without weights that are read, and what to do."""
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".ckpt", ".pth"))]
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


def _causes(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def not_found(model: str, error: Exception) -> str:
    """What is wrong with a model that has no model_index.json, and what to do."""
    path, reason = Path(model), " ".join(str(error).split())[:200]
    allowed = "allowed: the folder of a pipeline, its name on the Hub, or a .safetensors file"
    if path.is_dir():
        hint = ""
        if (path / "transformer").is_dir() or (path / "config.json").is_file():
            hint = "; it may be a part of a pipeline, whose folder is one level up"
        return (
            f"{model!r} is a folder without a readable model_index.json ({reason}){hint}; {allowed}"
        )
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
        return f"{model!r} does not exist; {allowed}"
    page = f"https://huggingface.co/{model}"
    access = f"accept it on {page} and set a token (hf auth login, or HF_TOKEN)"
    if import_module("huggingface_hub").constants.HF_HUB_OFFLINE:
        return (
            f"{model!r} is neither a folder nor among the downloaded models; downloads are off: set"
            f" HF_HUB_OFFLINE=0, or download the model first (hf download {model}). If it has a"
            f" licence, {access}"
        )
    if any(type(cause).__name__ == "GatedRepoError" for cause in _causes(error)):
        return f"the licence of {model!r} is not accepted by this account: {access}"
    return (
        f"{model!r} is no folder and cannot be read from the Hub ({reason}); check its name and the"
        f" connection to huggingface.co. If it has a licence, {access}"
    )


def _require_data_only(model: str, index: Mapping[str, Any], package: str) -> None:
    """Raise `ConfigError` for a component that is no model, scheduler or tokenizer of diffusers,
    transformers or `package`.

    diffusers imports whatever library model_index.json names, and any Python file next to a
    component.
    """
    diffusers, transformers = import_module("diffusers"), import_module("transformers")
    kinds: Any = (
        diffusers.ModelMixin,
        diffusers.SchedulerMixin,
        transformers.PreTrainedModel,
        transformers.PreTrainedTokenizerBase,
        transformers.ImageProcessingMixin,
        transformers.FeatureExtractionMixin,
        transformers.ProcessorMixin,
    )
    for name, value in index.items():
        if not isinstance(value, list | tuple) or list(value) == [None, None]:
            continue
        library, component = (*map(str, value), "", "")[:2]
        known = library.partition(".")[0] in ("diffusers", "transformers", package)
        module = import_module(library) if known and find_spec(library) else None
        kind = getattr(module, component, None)
        if not (isinstance(kind, type) and issubclass(kind, kinds)):
            raise ConfigError(
                f"model: {name} in the model_index.json of {model!r} is {library:.60}."
                f"{component:.60}; allowed: a model, scheduler or tokenizer of diffusers,"
                f" transformers or {package}"
            )
