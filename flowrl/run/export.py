"""Trained weights as files for other programs: LoRAs, and the base model with a LoRA folded in."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from flowrl import __version__
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.policies.families import text_to_image
from flowrl.policies.lora import is_lora
from flowrl.run.build import METHOD_FILE
from flowrl.run.config import RunConfig
from flowrl.run.models.base import BaseModel, describe_base
from flowrl.run.models.hub import family_of
from flowrl.run.models.lora_files import Lora, lora_of_run, read_lora
from flowrl.run.models.lora_formats import BLOCK, Format, to_format
from flowrl.run.models.merged import check_base
from flowrl.run.reading import read_json, reading
from flowrl.run.results import without_folders
from flowrl.run.saved import SavedWeights, find_weights

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
class ToExport:
    """Saved weights, and what a file of them needs to know.

    Args:
        weights: the weights.
        config: the settings of their run; None for weights that are not a run's.
        base: the base model.
        pipeline: the class of its pipeline.
    """

    weights: SavedWeights
    config: RunConfig | None
    base: BaseModel
    pipeline: Any

    @property
    def is_lora(self) -> bool:
        """Whether they are a LoRA, and not all weights of a transformer."""
        return not self.weights.is_full

    def lora(self) -> Lora:
        """The LoRA. Raises `CheckpointError` if the weights are not a LoRA, belong to another base
        model, or have another rank than the settings, on which the scale depends.
        """
        if not self.is_lora:
            message = f"weights: {self.weights} are all weights of a transformer, and not a LoRA"
            raise CheckpointError(f"{message}; allowed: --format merged")
        if self.config is None:
            lora = read_lora(self.weights.path, self.pipeline)
        else:
            policy = self.config.policy
            lora = lora_of_run(self.weights.tensors(), policy.lora_alpha / policy.lora_rank)
            if wrong := {*lora.ranks.values()} - {policy.lora_rank}:
                raise CheckpointError(
                    f"weights: {self.weights} has matrices of rank {min(wrong)}, but lora_rank is"
                    f" {policy.lora_rank} in {self.weights.path / 'config.json'}; allowed: the"
                    f" settings of the training, which have lora_rank {min(wrong)}"
                )
        if self.base.folder is not None:
            check_base(lora.shapes, self.base.folder)
        return lora

    def facts(self) -> dict[str, str]:
        """`export_facts` of the weights."""
        if self.config is None:
            return export_facts(self.base)
        saved = self.weights
        return export_facts(self.base, self.config, saved.path, iteration_of(saved), saved.live)


UNUSED = {
    "StableDiffusion3Pipeline": r"attn\.(add_q_proj|to_add_out)|ff_context\..*",
    "QwenImagePipeline": r"attn\.(add_q_proj|to_add_out)|txt_mlp\..*",
}
"""By pipeline, the layers of the last block that compute only its text output, which is not used:
their gradient is 0.
"""


def notes(
    lora: Lora, pipeline: str, form: Format = "diffusers", config: RunConfig | None = None
) -> list[str]:
    """Lines about what a file of `lora` for a `pipeline` lacks: layers without effect, matrices for
    text encoders in kohya's format, and the weights on which the run with these settings was
    trained.
    """
    idle = [layer for layer in lora.ranks if not lora.tensors[f"{layer}.lora_B.weight"].any()]
    lines, count = list[str](), len(lora.ranks)
    if len(idle) == count:
        lines.append(f"Warning: B = 0 in all {count} layers: the LoRA changes nothing")
        idle = []
    last = max((int(found[0]) for layer in lora.ranks if (found := BLOCK.search(layer))), default=0)
    known = UNUSED.get(text_to_image(pipeline), "$")
    unused = re.compile(rf"transformer_blocks\.{last}\.({known})")
    expected = [layer for layer in idle if unused.fullmatch(layer)]
    if expected:
        why = "as expected: the image does not depend on the output"
        lines.append(f"B = 0, no change, in {', '.join(expected)} ({why})")
    if other := [layer for layer in idle if layer not in expected]:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        lines.append(f"Warning: B = 0, no change, in {', '.join(other[:3])}{more}")
    if lora.others and form == "kohya":
        lines.append(f"Warning: {len(lora.others)} matrices of text encoders are left out")
    beneath = [config.policy.frozen_adapters] if config else []
    if config and first_weights(config):
        beneath.append(config.policy.adapter)
    for text in filter(None, beneath):
        lines.append(f"Warning: the run was trained on top of {text}, which is not in the file")
    return lines


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
        policy, evaluation = config.as_evaluated().policy, config.evaluation
        path = run / METHOD_FILE
        parts = read_json(path, dict[str, str]) if path.is_file() else {}
        facts |= {
            "method": config.algorithm.method,
            "reward": without_folders(str(config.environment.sources.reward)),
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


def base_of(config: RunConfig, model: str = "", name: str = "") -> BaseModel:
    """The base model of a run, now in the folder `model` if that is given; `name`: see
    `describe_base`.
    """
    policy = config.policy
    return describe_base(model or policy.model or "", name, policy.original or "")


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


def full_weights(weights: SavedWeights) -> dict[str, Tensor]:
    """All weights of a transformer, by the names in diffusers' files; none of a LoRA."""
    if weights.kind == "run":
        tensors = weights.tensors()
        return {} if is_lora(tensors) else tensors
    tensors: dict[str, Tensor] = {}
    for path in sorted(weights.path.glob("*.safetensors")):
        with reading(path, CheckpointError):
            tensors |= load_file(path)
    return tensors


def first_weights(config: RunConfig) -> dict[str, Tensor]:
    """The weights of the transformer from which a run started, if they are not the base model's."""
    text = config.policy.adapter
    saved = find_weights(text, option="adapter") if text else None
    return full_weights(saved) if saved is not None and saved.kind != "lora" else {}


def lora_file(
    lora: Lora,
    form: Format,
    pipeline: str,
    facts: Mapping[str, str] = {},
    dtype: torch.dtype = torch.float32,
) -> bytes:
    """A LoRA as a safetensors file.

    Args:
        lora: the LoRA.
        form: the program that is to read it. kohya's gets the matrices of the transformer only.
        pipeline: name of the class of the pipeline.
        facts: `export_facts`, for the header.
        dtype: type of the matrices; alphas are float32.

    Returns:
        The content of the file; the same for the same arguments.

    Raises:
        ConfigError: the program's names of a layer are not known.
    """
    named = to_format(lora.tensors, form, pipeline)
    if form != "kohya":
        named |= lora.others
    named = {  # copies, because the parts of a fused layer share one A, which safetensors refuses
        name: tensor.detach()
        .to("cpu", dtype if tensor.ndim else tensor.dtype)
        .clone(memory_format=torch.contiguous_format)
        for name, tensor in named.items()
    }
    spec = _model_spec(lora, form, pipeline, facts) if facts else {}
    return _sorted(save(named, {"format": "pt", **facts, **spec}))


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
    architecture, module = ARCHITECTURES.get(text_to_image(pipeline), ("", ""))
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


def run_lora(config: RunConfig, run: Path, tensors: Mapping[str, Tensor], iteration: int) -> bytes:
    """The file of the LoRA of a run for diffusers.

    Args:
        config: its settings.
        run: its folder.
        tensors: its averaged weights after `iteration`, by parameter.
        iteration: the iteration.
    """
    policy, base = config.policy, base_of(config)
    lora = lora_of_run(tensors, policy.lora_alpha / policy.lora_rank)
    facts = export_facts(base, config, run, iteration)
    return lora_file(lora, "diffusers", base.pipeline, facts)


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
