"""Loading a policy from a model's folder, or from its name on the Hugging Face Hub."""

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flowrl.core.errors import ConfigError, require
from flowrl.core.policy_options import PolicyOptions
from flowrl.policies.families import FAMILIES, Family
from flowrl.policies.pipeline import DTYPES, PipelinePolicy
from flowrl.run.models.embedded import EmbeddingsFolder, TextFiles
from flowrl.run.models.prompt_cache import DiskStore
from flowrl.run.models.weights import given_weights
from flowrl.run.parts.plugins import plugin
from flowrl.run.reading import reading


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


def load_policy(
    model: str, options: PolicyOptions = PolicyOptions(), family: Family | None = None
) -> PipelinePolicy:
    """A policy from a diffusers pipeline.

    Weights are read from safetensors only. Frozen weights get `options.dtype`, and those of the
    image decoder float32.

    Args:
        model: folder of the pipeline, or its name on the Hub (from the local cache, or downloaded).
        options: sizes, device, dtype, guidance, adapter and memory settings.
        family: the model family; None for the one of the pipeline's class.

    Returns:
        The policy.

    Raises:
        ConfigError: the model does not exist, no family supports it, or its class is not known.
    """
    diffusers: Any = import_module("diffusers")
    try:
        index = dict(diffusers.DiffusionPipeline.load_config(model))
        name = str(index.pop("_class_name"))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"model: {_not_found(model, error)}") from error
    family = family or family_of(name)
    own = import_module(type(family).__module__)
    kind: Any = getattr(diffusers, name, None) or getattr(own, name, None)
    require(kind is not None, "model", name, f"a pipeline of diffusers or of {own.__name__}")
    _require_data_only(model, index, type(family).__module__.partition(".")[0])
    subject = f"model: the {name} in {model!r}"
    dtypes = {"default": DTYPES[options.dtype], "vae": torch.float32}
    dtypes["transformer"] = torch.float32 if options.trained == "full" else dtypes["default"]
    settings = {"use_safetensors": True, "dtype": dtypes}
    with reading(subject):
        folder = model if Path(model).is_dir() else kind.download(model, use_safetensors=True)
        _require_no_variant(subject, Path(folder), name, index)
        tokens = options.max_sequence_length or family.text_tokens
        files = TextFiles(Path(folder), index, kind, family, options.dtype, tokens)
        place = files.place
        networks = {"vae": _complete(folder, "vae", index["vae"], dtypes["vae"])}
        part, given = index["transformer"], (dtypes["transformer"], _quantization(options))
        networks["transformer"] = (
            _without_weights(folder, part)
            if options.load_to == "meta"
            else _complete(folder, "transformer", part, *given)
        )
        # a frozen adapter may have a part for the text encoders
        lazy = not options.frozen
        absent = [part for part in family.encoders if lazy and index.get(part, [None])[0]]
        pipe = kind.from_pretrained(folder, **settings, **networks, **dict.fromkeys(absent))

    def load_encoders() -> dict[str, Any]:
        parts = {part: value for part, value in pipe.components.items() if part not in absent}
        with reading(subject):
            loaded = kind.from_pretrained(folder, **settings, **parts).components
        embeddings.require_same()
        return {part: loaded[part] for part in absent}

    def stored() -> Path | None:
        return place if lazy and files.place == place else None

    embeddings = EmbeddingsFolder(pipe, family, stored)
    store = DiskStore(embeddings, options.prompt_cache)
    encoders = load_encoders if lazy else None
    return PipelinePolicy(pipe, family, options, encoders, store, **given_weights(pipe, options))


def _not_found(model: str, error: Exception) -> str:
    """What is wrong with a model that has no model_index.json, and what to do."""
    path, reason = Path(model), " ".join(str(error).split())[:200]
    if path.is_file():
        convert = 'PIPELINE.from_single_file(FILE).save_pretrained("FOLDER")'
        return (
            f"{model!r} is a single file; allowed: the folder of a pipeline. Convert it with"
            f" diffusers: {convert}, where PIPELINE is its class, as StableDiffusion3Pipeline"
        )
    allowed = "allowed: the folder of a pipeline, or a name on the Hub"
    if path.is_dir():
        return f"{model!r} is a folder without a readable model_index.json ({reason}); {allowed}"
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
        return f"{model!r} does not exist; {allowed}"
    if import_module("huggingface_hub").constants.HF_HUB_OFFLINE:
        return (
            f"{model!r} is neither a folder nor among the downloaded models; downloads are off: set"
            f" HF_HUB_OFFLINE=0, or download the model first (hf download {model})"
        )
    return (
        f"{model!r} is no folder and cannot be read from the Hub ({reason}); check its name and the"
        f" connection to huggingface.co. If its licence must be accepted, do so on"
        f" https://huggingface.co/{model} and set a token (hf auth login, or HF_TOKEN)"
    )


VARIANT = re.compile(r"(diffusion_pytorch_model|model)\.(\w+)(-\d+-of-\d+)?\.safetensors")


def _require_no_variant(
    subject: str, folder: Path, pipeline: str, index: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` for a part whose weights are a variant only, such as fp16."""
    for part in index:
        names = [path.name for path in (folder / part).glob("*.safetensors")]
        found = [form for form in map(VARIANT.fullmatch, names) if form]
        if found and len(found) == len(names):
            variant = found[0][2]
            convert = f'{pipeline}.from_pretrained(FOLDER, variant="{variant}")'
            raise ConfigError(
                f"{subject} has weights of the variant {variant!r} only ({part}/{names[0]}); save"
                f" them without one: {convert}.save_pretrained(NEW)"
            )


def _quantization(options: PolicyOptions) -> Any:
    """diffusers' configuration of `options.quantize`; None for no quantisation. Raises
    `ConfigError` if the package that it needs is missing.
    """
    if options.quantize == "none":
        return None
    diffusers: Any = import_module("diffusers")
    packages = {"int8": "torchao", "nf4": "bitsandbytes"}
    package = packages[options.quantize]
    missing = f"with the package {package}: pip install {package}"
    require(find_spec(package) is not None, "quantize", options.quantize, missing)
    on_gpu = options.quantize == "int8" or options.device != "cpu"
    require(on_gpu, "quantize", options.quantize, "int8 on the CPU")
    if options.quantize == "int8":
        return diffusers.TorchAoConfig(import_module("torchao.quantization").Int8WeightOnlyConfig())
    compute = DTYPES[options.dtype]
    return diffusers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
    )


def _complete(
    model: str, part: str, entry: Sequence[str], dtype: torch.dtype, quantization: Any = None
) -> Any:
    """A network of the pipeline with every weight from its files; diffusers would fill missing
    weights with random numbers.
    """
    library, kind = entry
    settings = {"quantization_config": quantization} if quantization else {}
    network, info = getattr(import_module(library), kind).from_pretrained(
        model,
        subfolder=part,
        use_safetensors=True,
        torch_dtype=dtype,
        output_loading_info=True,
        **settings,
    )
    missing = info["missing_keys"]
    require(not missing, f"model: missing weights of the {part} in {model!r}", missing[:3], "none")
    return network


def _without_weights(model: str, entry: Sequence[str]) -> Any:
    """The transformer with weights on meta. Its buffers are computed, as by diffusers: those that
    are not in its files exist nowhere else.
    """
    library, name = entry
    kind = getattr(import_module(library), name)
    with import_module("accelerate").init_empty_weights(include_buffers=False):
        return kind.from_config(kind.load_config(model, subfolder="transformer"))


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
    for path in Path(model).glob("**/*.py"):
        raise ConfigError(f"model: {path} is code; a model's folder must contain data only")
