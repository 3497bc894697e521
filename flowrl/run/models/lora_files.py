"""LoRA files of all programs, read as one form: matrices A and B by layer, with the scale in B."""

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.policies.families import text_to_image
from flowrl.run.models.lora_formats import LAYERS, families_of, from_format
from flowrl.run.reading import read_json, reading

_LOG = logging.getLogger(__name__)
METADATA = "lora_adapter_metadata"
"""diffusers' entry in the metadata of a LoRA file: the settings of PEFT's LoRA as JSON."""
FOREIGN = ("dora_scale", "lokr_", "hada_", "lora_magnitude_vector")
"""Parts of the names of other adapters than LoRA: DoRA, LoKr, LoHa."""
TEXT_ENCODER = re.compile(r"(lora_te\d*_[^.]+)\.")
"""A layer of a text encoder in kohya's files."""
MATRIX = re.compile(r"(.+?)\.(?:lora_A|lora_down|lora\.down)(?:\.default)?\.weight")


@dataclass(frozen=True)
class Lora:
    """A LoRA, W x + B A x, of a transformer.

    Args:
        tensors: A [rank, in] and B [out, rank] as "LAYER.lora_A.weight" and "LAYER.lora_B.weight",
            float32, by the names of diffusers' layers; alpha / rank is in B.
        others: what the file has besides, such as matrices for text encoders, by diffusers' names.
    """

    tensors: dict[str, Tensor]
    others: dict[str, Tensor] = field(default_factory=dict)

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of every layer."""
        ends = ".lora_A.weight"
        return {n.removesuffix(ends): len(t) for n, t in self.tensors.items() if n.endswith(ends)}

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of every layer."""
        a, b = ({n: self.tensors[f"{n}.lora_{x}.weight"].shape for n in self.ranks} for x in "AB")
        return {layer: (b[layer][0], a[layer][1]) for layer in a}

    def times(self, weight: float) -> "Lora":
        """This LoRA with its product B A multiplied by `weight`."""
        tensors, others = (
            {n: t * weight if "lora_B" in n else t for n, t in part.items()}
            for part in (self.tensors, self.others)
        )
        return Lora(tensors, others)

    @property
    def named(self) -> dict[str, Tensor]:
        """All tensors as in a file of diffusers: those of the transformer begin with
        "transformer.".
        """
        return {
            f"transformer.{name}": tensor for name, tensor in self.tensors.items()
        } | self.others


def lora_of_run(tensors: Mapping[str, Tensor], scale: float) -> Lora:
    """The LoRA of a run from its trained weights by parameter (`SavedWeights.tensors`); `scale` is
    its alpha / rank.
    """
    named = {name.replace(".default.", "."): tensor.float() for name, tensor in tensors.items()}
    return Lora({n: t * scale if "lora_B" in n else t for n, t in named.items()})


def read_lora(path: Path, pipeline: Any, option: str = "weights") -> Lora:
    """The LoRA in the file `path`. Of kohya's files, layers of text encoders are left out with a
    warning.

    Args:
        path: a safetensors file of diffusers, PEFT, kohya's scripts or ComfyUI
            (`lora_formats.LAYERS`), or what else diffusers' `lora_state_dict` converts.
        pipeline: the class of the diffusers pipeline that it is for.
        option: the name of the option, for errors.

    Raises:
        CheckpointError: the file cannot be read, is no LoRA, or is one of another kind.
    """
    with reading(path, CheckpointError), safe_open(path, "pt") as file:
        header = file.metadata() or {}
        raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    raw = _without_text_encoders(raw, f"{option}: {path}")
    foreign = [name for name in raw if any(part in name for part in FOREIGN)]
    layers = {found[1] for found in map(MATRIX.fullmatch, raw) if found}
    if foreign or not layers:
        first = (foreign or sorted(raw) or ["nothing"])[0]
        raise CheckpointError(
            f"{option}: {path} holds {first}; allowed: a LoRA, with matrices lora_A and lora_B, or"
            " lora_down and lora_up"
        )
    raw = _scaled(raw, layers, _settings(path, header))
    if (known := from_format(raw, pipeline.__name__)) is not None:
        return Lora({name: tensor.float() for name, tensor in known.items()})
    families, kind = families_of(raw), text_to_image(pipeline.__name__)
    if families and kind in LAYERS and kind not in families:
        raise CheckpointError(
            f"{option}: {path} is a LoRA for {' or '.join(families)}; allowed: one for {kind}"
        )
    named = {_diffusers_name(name): tensor for name, tensor in raw.items()}
    named = {n: t for n, t in named.items() if not re.fullmatch(r"transformer\..*\.alpha", n)}
    with reading(path, CheckpointError):
        named = pipeline.lora_state_dict(named)
    ours = {n: t for n, t in named.items() if n.startswith("transformer.")}
    others = {n: t for n, t in named.items() if n not in ours}
    tensors = {n.removeprefix("transformer."): t.float() for n, t in ours.items()}
    unknown = [n for n in others if not n.startswith("text_encoder")]
    unknown += [n for n in tensors if not re.search(r"\.lora_[AB]\.weight$", n)]
    if not tensors or unknown:
        first = (unknown or [*others])[0]
        raise CheckpointError(f"{option}: {path} is no LoRA for the transformer of {kind}: {first}")
    return Lora(tensors, others)


def _without_text_encoders(raw: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The tensors of a file without those for text encoders in kohya's names; a warning is logged
    of them. Raises `CheckpointError` if nothing is left.
    """
    layers = {name: found[1] for name in raw if (found := TEXT_ENCODER.match(name))}
    left = {name: tensor for name, tensor in raw.items() if name not in layers}
    if layers:
        first = min(layers.values())
        text = f"{len({*layers.values()})} layers of text encoders, such as {first}"
        if not left:
            raise CheckpointError(f"{source} has only {text}; allowed: a LoRA for a transformer")
        _LOG.warning("Warning: %s has %s: they are left out", source, text)
    return left


def _diffusers_name(name: str) -> str:
    """The name of a matrix in diffusers, of one in PEFT or of one with A and B as in kohya's files;
    others remain.
    """
    name = re.sub(r"^base_model\.model\.(transformer\.)?", "transformer.", name)
    if name.startswith("transformer."):
        name = re.sub(r"\.lora[._]down\.weight$", ".lora_A.weight", name)
        name = re.sub(r"\.lora[._]up\.weight$", ".lora_B.weight", name)
    return name


def _settings(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """PEFT's settings of a LoRA, from the metadata of the file or from the folder of PEFT."""
    beside = path.parent / "adapter_config.json"
    if path.name == "adapter_model.safetensors" and beside.exists():
        return read_json(beside, dict[str, Any], CheckpointError)
    with suppress(ValueError, ConfigError):
        values = json.loads(header.get(METADATA, "{}"))
        return {name.removeprefix("transformer."): value for name, value in values.items()}
    return {}


def _scaled(
    raw: Mapping[str, Tensor], layers: set[str], settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a file with alpha / rank in B, under PEFT's or kohya's names without alphas
    that change anything.

    The alpha of a layer is its own tensor, or that of the `settings`, or its rank.
    """
    ranks = {found[1]: len(raw[name]) for name in raw if (found := MATRIX.fullmatch(name))}
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    scaled: dict[str, Tensor] = {}
    for name, tensor in raw.items():
        layer = next((x for x in layers if name.startswith(f"{x}.")), "")
        if name == f"{layer}.alpha":
            if any("lora_down" in n or "lora.down" in n for n in raw if n.startswith(f"{layer}.")):
                scaled[name] = tensor.new_tensor(float(ranks[layer]))
            continue
        scaled[name] = tensor
        if layer and re.search(r"lora_B|lora_up|lora\.up", name):
            rank = ranks[layer]
            own = raw.get(f"{layer}.alpha")
            usual = next((patterns[p] for p in patterns if layer.endswith(p)), None)
            usual = usual or settings.get("lora_alpha") or rank
            alpha = float(usual if own is None else own)
            divisor = rank**0.5 if settings.get("use_rslora") else rank
            scaled[name] = tensor.float() * (alpha / divisor)
    return scaled
