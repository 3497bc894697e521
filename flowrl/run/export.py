"""Trained weights as files for other programs: LoRAs, and the base model with a LoRA folded in."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from flowrl import __version__
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.run.build import METHOD_FILE
from flowrl.run.config import RunConfig
from flowrl.run.io import write_bytes
from flowrl.run.models.base import BaseModel, describe_base
from flowrl.run.models.load import family_of
from flowrl.run.models.lora_files import Lora, lora_of_run, read_lora
from flowrl.run.models.lora_formats import Format, to_format
from flowrl.run.reading import read_json, reading
from flowrl.run.results import without_folders
from flowrl.run.saved import SavedWeights, find_weights

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
ARCHITECTURES = {
    "StableDiffusion3Pipeline": ("stable-diffusion-3/lora", "networks.lora_sd3"),
    "FluxPipeline": ("flux-1/lora", "networks.lora_flux"),
    "QwenImagePipeline": ("Qwen-Image/lora", "networks.lora_qwen_image"),
    "WanPipeline": ("wan2.1/lora", "networks.lora_wan"),
}
"""By pipeline: the architecture in Stability AI's model specification, as sd-scripts and
musubi-tuner write it (`library/sai_model_spec.py`), and the module that loads the LoRA there.
"""


@dataclass(frozen=True)
class Zeros:
    """Of a LoRA's `layers`, the number without effect (B = 0)."""

    layers: int
    without_effect: int

    @property
    def line(self) -> str:
        """One line, or ""."""
        if not self.without_effect:
            return ""
        if self.without_effect == self.layers:
            return f"Warning: B = 0 in all {self.layers} layers: the LoRA changes nothing"
        return f"{self.without_effect} of {self.layers} layers have B = 0 and change nothing"


def zeros(lora: Lora) -> Zeros:
    """How many layers of `lora` have no effect."""
    idle = [layer for layer in lora.ranks if not lora.tensors[f"{layer}.lora_B.weight"].any()]
    return Zeros(len(lora.ranks), len(idle))


def export_facts(
    base: BaseModel,
    config: RunConfig | None = None,
    run: Path | None = None,
    iteration: int = 0,
    live: bool = False,
) -> dict[str, str]:
    """What the header of an exported file says: the base model and, of weights of a run, how they
    were trained and how to sample with them. Without paths and dates, so that equal weights give
    equal files.

    Args:
        base: the base model.
        config: the settings of the run; None for other weights.
        run: its folder.
        iteration: the iteration of the weights.
        live: they are not averaged.
    """
    facts = {
        "version": __version__,
        "base_model": base.name,
        "base_model_license": base.licence_name,
    }
    if config is not None and run is not None:
        policy, evaluation = config.policy, config.evaluation
        path = run / METHOD_FILE
        parts = read_json(path, dict[str, str]) if path.is_file() else {}
        facts |= {
            "method": config.algorithm.method,
            "reward": without_folders(str(config.environment.reward or "")),
            "iteration": str(iteration),
            "weights": "live" if live else "average",
            "resolution": f"{policy.width or policy.resolution}x{policy.resolution}",
            "frames": str(policy.num_frames),
            "guidance_scale": f"{policy.guidance_scale:g}",
            "negative_prompt": policy.negative_prompt,
            "solver": evaluation.eval_solver,
            "steps": str(evaluation.eval_steps),
            "train_steps": str(config.rollout.num_steps),
            "train_sampler": without_folders(parts.get("sampler", "")),
            "prompt_tokens": prompt_tokens(config, base),
            "frozen_adapters": without_folders(policy.frozen_adapters or ""),
        }
    return {f"flowrl.{name}": value for name, value in facts.items() if value}


def prompt_tokens(config: RunConfig, base: BaseModel) -> str:
    """The length of prompts of a run; "" if it is the default of a family that is not known."""
    given = config.policy.max_sequence_length
    if given is None and base.pipeline:
        given = family_of(base.pipeline).text_tokens
    return str(given or "")


def iteration_of(weights: SavedWeights) -> int:
    """The iteration of a run's weights."""
    if weights.checkpoint:
        return int(weights.checkpoint)
    ended = read_json(weights.path / "done.json", dict[str, Any])
    return int(ended.get("exported", ended["iterations"]))


def saved_lora(
    weights: SavedWeights, config: RunConfig | None, pipeline: Any, option: str = "weights"
) -> Lora:
    """The LoRA of saved weights. Raises `CheckpointError` if they are none."""
    if weights.kind == "lora":
        return read_lora(weights.path, pipeline, option)
    if weights.kind == "run" and config is not None and config.policy.tuning == "lora":
        policy = config.policy
        return lora_of_run(weights.tensors(), policy.lora_alpha / policy.lora_rank)
    raise CheckpointError(f"{option}: {weights} are all weights of a transformer, and not a LoRA")


def frozen_loras(config: RunConfig, pipeline: Any) -> dict[str, Lora]:
    """The LoRAs on which a run was trained, by their names."""
    loras: dict[str, Lora] = {}
    for number, spec in enumerate(
        filter(None, (config.policy.frozen_adapters or "").split(",")), 1
    ):
        name, _, path = spec.strip().rpartition("=")
        file = find_weights(path, option="frozen_adapters").path
        loras[name or f"frozen{number}"] = read_lora(file, pipeline, "frozen_adapters")
    return loras


def transformer_weights(weights: SavedWeights) -> dict[str, Tensor]:
    """All weights of a trained transformer, by the names in diffusers' files."""
    if weights.kind == "run":
        return weights.tensors()
    tensors: dict[str, Tensor] = {}
    for path in sorted(weights.path.glob("*.safetensors")):
        with reading(path, CheckpointError):
            tensors |= load_file(path)
    return tensors


def write_lora(
    path: Path,
    lora: Lora,
    form: Format,
    pipeline: str,
    facts: Mapping[str, str] = {},
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a LoRA as one safetensors file, atomically.

    Args:
        path: the file, or a folder, which gets diffusers' name of a LoRA.
        lora: the LoRA.
        form: the program that is to read it. kohya's gets the matrices of the transformer only.
        pipeline: name of the class of the pipeline.
        facts: `export_facts`, for the header.
        dtype: type of the matrices; alphas are float32.

    Returns:
        The file.

    Raises:
        ConfigError: the program's names of a layer are not known.
        CheckpointError: a matrix is not finite.
    """
    file = path if path.suffix == ".safetensors" else path / DIFFUSERS_FILE
    named = to_format(lora.tensors, form, pipeline)
    if form != "kohya":
        named |= lora.others
    named = {
        name: tensor.detach().cpu().to(dtype if tensor.ndim else tensor.dtype).contiguous()
        for name, tensor in named.items()
    }
    for name, tensor in named.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name} has values that are not finite in {dtype}")
    spec = _model_spec(lora, form, pipeline, facts) if facts else {}
    write_bytes(file, _sorted(save(named, {"format": "pt", **facts, **spec})))
    return file


def _sorted(data: bytes) -> bytes:
    """A safetensors file with its metadata in alphabetical order: safetensors' own order differs
    between calls.
    """
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _model_spec(
    lora: Lora, form: Format, pipeline: str, facts: Mapping[str, str]
) -> dict[str, str]:
    """The entries that other programs show: Stability AI's specification, and kohya's."""
    architecture, module = ARCHITECTURES.get(pipeline, ("", ""))
    base, ranks = facts.get("flowrl.base_model", ""), set(lora.ranks.values())
    spec = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": architecture,
        "modelspec.implementation": "diffusers",
        "modelspec.title": f"{base.rpartition('/')[2]} {facts.get('flowrl.method', '')}".strip(),
        "modelspec.resolution": facts.get("flowrl.resolution", ""),
        "modelspec.license": facts.get("flowrl.base_model_license", ""),
    }
    if form == "kohya":
        rank = str(*ranks) if len(ranks) == 1 else "Dynamic"
        spec |= {
            "ss_network_module": module,
            "ss_network_dim": rank,
            "ss_network_alpha": rank,
            "ss_sd_model_name": base,
            "ss_resolution": facts.get("flowrl.resolution", ""),
        }
    return {name: value for name, value in spec.items() if value}


def write_run_lora(
    folder: Path, config: RunConfig, run: Path, tensors: Mapping[str, Tensor], iteration: int
) -> Path:
    """Write the LoRA of the run in the folder `run` for diffusers: its averaged weights `tensors`
    by parameter, after `iteration`. Returns the file in `folder`.
    """
    policy, base = config.policy, describe_base(config.policy.model or "")
    lora = lora_of_run(tensors, policy.lora_alpha / policy.lora_rank)
    facts = export_facts(base, config, run, iteration)
    return write_lora(folder, lora, "diffusers", base.pipeline, facts)


def check_base(layers: Mapping[str, tuple[int, int]], base: Path) -> None:
    """Raise `CheckpointError` unless the base model has all `layers` with these numbers of outputs
    and inputs; only the headers of its files are read, and nothing is checked without files.
    """
    shapes: dict[str, list[int]] = {}
    for path in (base / "transformer").glob("*.safetensors"):
        with reading(path, CheckpointError), safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for layer, shape in layers.items() if shapes else ():
        found = shapes.get(f"{layer}.weight")
        if found != [*shape]:
            theirs = f"is {found} there" if found else "is not there"
            raise CheckpointError(
                f"weights: they belong to another model than {base}: {layer}.weight of {[*shape]}"
                f" {theirs}"
            )


def check_lora(file: Path, lora: Lora, pipeline: Any) -> None:
    """Raise `CheckpointError` unless the written `file` reads back with all layers of `lora` that
    have an effect, all finite.
    """
    found = read_lora(file, pipeline)
    wanted = {
        layer for layer in lora.ranks if lora.tensors[f"{layer}.lora_B.weight"].any()
    } or lora.ranks.keys()
    if lost := sorted(wanted - found.ranks.keys()):
        raise CheckpointError(f"{file} has no matrices of {len(lost)} layers, such as {lost[0]}")
    if any(not tensor.isfinite().all() for tensor in found.tensors.values()):
        raise CheckpointError(f"{file} has values that are not finite")


def write_merged(
    folder: Path,
    base: Path,
    change: Sequence[Lora] | Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Write a pipeline in diffusers' form whose transformer has the trained weights; the files of
    the other parts are copied.

    Args:
        folder: the new folder.
        base: the folder of the base model.
        change: LoRAs, whose products B A are added in float32 and rounded once; or all weights of
            the transformer.
        dtype: type of the transformer's weights; None for that of the base model's.

    Raises:
        ConfigError: the base model has no transformer in safetensors format.
        CheckpointError: a trained layer is not in the base model, or has another shape.
    """
    index = read_json(base / "model_index.json", dict[str, Any])
    parts = [name for name, entry in index.items() if isinstance(entry, list) and entry[0]]
    for part in [name for name in parts if name != "transformer" and (base / name).is_dir()]:
        shutil.copytree(base / part, folder / part, dirs_exist_ok=True)
    for path in (base / "model_index.json", *base.glob("LICENSE*")):
        shutil.copyfile(path, folder / path.name)
    shards = sorted((base / "transformer").glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"model: {base / 'transformer'} has no *.safetensors file")
    (folder / "transformer").mkdir(exist_ok=True)
    for path in (base / "transformer").glob("*.json"):
        shutil.copyfile(path, folder / "transformer" / path.name)
    left = _names(change)
    for shard in shards:
        with reading(shard, CheckpointError):
            tensors = load_file(shard)
        for name in sorted(tensors.keys() & left):
            tensors[name] = _changed(name, tensors[name], change)
        if dtype is not None:
            tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        write_bytes(folder / "transformer" / shard.name, save(tensors, {"format": "pt"}))
        left = left - tensors.keys()
    if left:
        raise CheckpointError(
            f"model: {len(left)} trained layers are not in {base}, such as {min(left)}"
        )


def _names(change: Sequence[Lora] | Mapping[str, Tensor]) -> set[str]:
    if isinstance(change, Mapping):
        return set(change)
    return {f"{layer}.weight" for lora in change for layer in lora.ranks}


def _changed(name: str, weight: Tensor, change: Sequence[Lora] | Mapping[str, Tensor]) -> Tensor:
    """The trained weight in the type of the base model's."""
    if isinstance(change, Mapping):
        new = change[name].float()
    else:
        new, layer = weight.float(), name.removesuffix(".weight")
        for lora in change:
            if layer in lora.ranks:
                down, up = (lora.tensors[f"{layer}.lora_{x}.weight"] for x in "AB")
                new = new + _product(name, weight, down, up)
    if new.shape != weight.shape:
        raise CheckpointError(f"{name} is {[*new.shape]}, {[*weight.shape]} in the base model")
    return new.to(weight.dtype).contiguous()


def _product(name: str, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    if weight.shape != (len(up), down.shape[1]):
        both = f"{[len(up), down.shape[1]]}, {[*weight.shape]} in the base model"
        raise CheckpointError(f"{name} is {both}: the LoRA belongs to another one")
    return up.float() @ down.float()


EXPORT = "export.json"
"""What was exported, in a folder that `flowrl export` has written."""


def made_export(folder: Path) -> bool:
    """Whether `flowrl export` has written the content of `folder`."""
    try:
        return "flowrl.version" in read_json(folder / EXPORT, dict[str, str])
    except ConfigError:
        return False


def made_file(data: bytes) -> bool:
    """Whether `flowrl export` has written the safetensors file with the content `data`."""
    try:
        size = int.from_bytes(data[:8], "little")
        return "flowrl.version" in json.loads(data[8 : 8 + size])["__metadata__"]
    except (ValueError, KeyError, TypeError):
        return False
