"""Loading a policy from a model's folder, a single file, or a name on the Hugging Face Hub."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flowrl.core.errors import require
from flowrl.core.policy_options import PolicyOptions
from flowrl.core.processes import Processes
from flowrl.core.types import Prompt
from flowrl.policies.families import Family, negatives
from flowrl.policies.pipeline import DTYPES, PipelinePolicy
from flowrl.policies.prompt_length import quiet
from flowrl.run.models.embedded import EmbeddingsFolder, TextFiles
from flowrl.run.models.hub import find_source
from flowrl.run.models.prompt_cache import DiskStore
from flowrl.run.models.sources import Source
from flowrl.run.models.weights import given_weights
from flowrl.run.reading import reading


def load_policy(
    model: str, options: PolicyOptions = PolicyOptions(), family: Family | None = None
) -> PipelinePolicy:
    """A policy from a diffusers pipeline.

    Weights are read from safetensors only. Frozen weights get `options.dtype`, and those of the
    image decoder float32.

    Args:
        model: folder of the pipeline, its name on the Hub (from the local cache, or downloaded), or
            a single .safetensors file with the transformer (`options.original` has the rest).
        options: sizes, device, dtype, guidance, adapter and memory settings.
        family: the model family; None for the one of the pipeline's class.

    Returns:
        The policy.

    Raises:
        ConfigError: the model does not exist, is not complete, no family supports it, or its class
            is not known.
    """
    source = find_source(model, options.original, family)
    with reading(source.subject):
        return _load(source, options)


def embed_prompts(
    model: str,
    options: PolicyOptions,
    prompts: Sequence[Prompt],
    processes: Processes = Processes(),
    report: Callable[[dict[str, Any]], None] = lambda state: None,
) -> None:
    """Embed the `prompts` that are not stored, before a policy is loaded: text encoders and
    transformer are never on the device together. `load_policy` finds the embeddings.

    No action if other programs cannot find them (`embedded.TextFiles`), or if a frozen adapter may
    have a part for the text encoders; the policy embeds the prompts then. All of `processes` must
    call this.

    Args:
        model: as in `load_policy`.
        options: those of the policy.
        prompts: the prompts.
        processes: they divide the prompts.
        report: as in `PromptEmbeddings.warm`.

    Raises:
        ConfigError: as `load_policy`.
    """
    source = find_source(model, options.original)
    tokens = options.max_sequence_length or source.family.text_tokens
    place = _text_files(source, options, tokens).place
    if options.frozen or place is None:
        return
    needed = [*prompts, *negatives(source.family, prompts, options.negative_prompt)]
    store = DiskStore(lambda: place, 1)
    store.prepare()
    if not any(processes.gather(store.missing([prompt.key for prompt in needed]))):
        return
    plain = dict(adapter="", attention_backend="", quantize="none", gradient_checkpointing=False)
    bare = replace(options, **plain, fixed=True, compile=False, load_to="meta", guidance_scale=1.0)
    with reading(source.subject):
        _load(source, bare).prompts.warm(needed, processes, report)


def _text_files(source: Source, options: PolicyOptions, tokens: int) -> TextFiles:
    """What determines embeddings; the image decoder encodes reference images."""
    precision = f"-{options.decode_dtype}" if source.family.images[1] else ""
    return TextFiles(source, options.dtype + precision, tokens)


def _load(source: Source, options: PolicyOptions) -> PipelinePolicy:
    dtypes = {"default": DTYPES[options.dtype], "vae": torch.float32}
    dtypes["transformer"] = torch.float32 if options.trained == "full" else dtypes["default"]
    family, index, quantizing = source.family, source.index, quantization(options)
    tokens = options.max_sequence_length or family.text_tokens
    files = _text_files(source, options, tokens)
    place = files.place
    # a frozen adapter may have a part for the text encoders
    lazy = not options.frozen
    encoders = [part for part in family.encoders if index.get(part, [None])[0]]
    # the single file, or the variant of the folder's weights
    origins = {p: source.file if p in source.in_file else source.variant(p) for p in encoders}
    networks = {"vae": _complete(source, "vae", dtypes["vae"])}
    dtypes["transformer_2"] = dtypes["default"]
    for part in ("transformer", "transformer_2"):
        if part in source.parts:
            networks[part] = (
                source.without_weights(part)
                if options.load_to == "meta"
                else _complete(source, part, dtypes[part], quantizing)
            )
    settings = {"use_safetensors": True, "dtype": dtypes}
    pipe = source.kind.from_pretrained(
        source.folder, **settings, **networks, **dict.fromkeys(encoders)
    )

    def load_encoders() -> dict[str, Any]:
        parts = {p: value for p, value in pipe.components.items() if p not in encoders}
        loaded = dict[str, Any]()
        with reading(source.subject):
            for origin in {*origins.values()}:
                some = [part for part in encoders if origins[part] == origin]
                given = parts | {part: None for part in encoders if part not in some}
                if isinstance(origin, Path):
                    config = str(source.folder)
                    given |= {"config": config, "dtype": dtypes["default"]}
                    made = source.kind.from_single_file(str(origin), **given)
                else:
                    given |= {"variant": origin, **settings}
                    made = source.kind.from_pretrained(source.folder, **given)
                loaded |= {part: made.components[part] for part in some}
        return loaded

    def unchanged_encoders() -> dict[str, Any]:
        loaded = load_encoders()
        embeddings.require_same()
        return loaded

    def stored() -> Path | None:
        return place if lazy and files.place == place else None

    if not lazy:
        pipe.register_modules(**load_encoders())
    embeddings = EmbeddingsFolder(pipe, family, stored)
    store = DiskStore(embeddings, options.prompt_cache)
    loader = unchanged_encoders if lazy else None
    return PipelinePolicy(pipe, family, options, loader, store, **given_weights(pipe, options))


def quantization(options: PolicyOptions) -> Any:
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


def _complete(source: Source, part: str, dtype: torch.dtype, quantizing: Any = None) -> Any:
    """A network of the pipeline with every weight from its files; diffusers would fill missing
    weights with random numbers, or leave them on meta.
    """
    kind = source.part(part)
    settings = {"quantization_config": quantizing} if quantizing else {}
    if part in source.in_file:
        # diffusers would round the layers that the class keeps in float32; the policy does not
        kept = getattr(kind, "_keep_in_fp32_modules", None) and not quantizing
        settings["torch_dtype"] = torch.float32 if kept else dtype
        with quiet():
            network = kind.from_single_file(
                str(source.file), config=str(source.folder), subfolder=part, **settings
            )
        missing = [name for name, tensor in network.state_dict().items() if tensor.is_meta]
    else:
        network, info = kind.from_pretrained(
            source.folder,
            subfolder=part,
            variant=source.variant(part),
            use_safetensors=True,
            torch_dtype=dtype,
            output_loading_info=True,
            **settings,
        )
        missing = info["missing_keys"]
    subject = f"model: missing weights of the {part} in {source.model!r}"
    require(not missing, subject, missing[:3], "none")
    return network
