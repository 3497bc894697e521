"""Where a model is: the folder of a pipeline, a single file with the folder of its configs, or a
name on the Hub.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import SequenceMatcher
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from safetensors import safe_open

from flowrl.core.errors import ConfigError, require
from flowrl.policies.families import FAMILIES, Family
from flowrl.run.models.sources import Source
from flowrl.run.parts.plugins import plugin
from flowrl.run.reading import reading

VARIANTS = "fp16", "bf16"
"""The variants that are tried on the Hub."""


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
        " docs/model-families.md shows how to add one, a family in six functions"
        f"{_nearest(pipeline)}"
    )


def _nearest(pipeline: str) -> str:
    """The family to copy from: most classes in common with an unsupported pipeline, then the name
    most like it; "" if no class is in common.
    """
    own = _classes(pipeline)
    common = {name: sorted(own & _classes(name)) for name in FAMILIES}
    alike = {name: SequenceMatcher(None, pipeline, name).ratio() for name in FAMILIES}
    name = max(FAMILIES, key=lambda name: (len(common[name]), alike[name]))
    same = f"; the nearest is {FAMILIES[name].__name__}, with the same {', '.join(common[name])}"
    return same if common[name] else ""


def _classes(pipeline: str) -> set[str]:
    """The classes of text encoders, transformer and image decoder that a pipeline of diffusers
    takes; none if diffusers does not have it.
    """
    kind = getattr(import_module("diffusers"), pipeline, None)
    hints = signature(kind.__init__).parameters.values() if kind else ()
    found = {name for hint in hints for name in re.findall(r"\w+", str(hint.annotation))}
    parts = "Transformer", "Autoencoder", "Model"
    return {n for n in found if any(part in n for part in parts) and "Vision" not in n}


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
    for part in ("transformer", "vae"):
        fits = (index.get(part) or [None])[0] is not None
        require(fits, setting, model, f"a pipeline whose model_index.json has a {part}")
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


def _require_plain(path: Path) -> None:
    """Raise `ConfigError` for weights in 8 or 4 bits, whose scales diffusers would leave out."""
    with reading(path), safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            kind = str(file.get_slice(name).get_dtype())
            allowed = f"weights in F32, F16 or BF16 ({name} in {path} is {kind})"
            require(not kind.startswith(("F8", "I8", "U8")), "model", path.name, allowed)


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
    if import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
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
