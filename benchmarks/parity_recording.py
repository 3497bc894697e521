"""Recorded training iterations as files: tensors, sizes and settings, and the recorded model as a
folder of diffusers. tests/golden_iteration/README.md defines the format.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    StableDiffusion3Pipeline,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.testing.tiny import tiny_sd3

FACTOR = 8
"""Pixels per latent element."""
ZERO_GROUP = "zero_group"
WITHOUT_KL = "_beta0"
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Recording:
    """One method on one model: the case `case` of `folder`/`method`/meta.json, with the tensors in
    the same folder. `meta`: sizes and settings; those of this case under "case".
    """

    folder: Path
    method: str
    case: str
    meta: Mapping[str, Any]

    @staticmethod
    def every(folder: Path, method: str) -> "list[Recording]":
        """All cases of a method; recordings of forward-process losses have one, on the model
        "dual".
        """
        meta = json.loads((folder / method / "meta.json").read_text())
        cases = {"dual": {}} if "states" in meta else meta["cases"]
        metas = {case: {**meta, "case": settings} for case, settings in cases.items()}
        return [Recording(folder, method, case, one) for case, one in metas.items()]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Embeddings, initial noise and step noise, float32."""
        return {
            name: tensor.float()
            for name, tensor in load_file(self.model_folder / "inputs.safetensors").items()
        }

    @property
    def model_folder(self) -> Path:
        """The folder of models and embeddings: "common", or that of the recorded iterations next to
        this folder.
        """
        names = ("iteration", "golden_iteration") if "states" in self.meta else ()
        beside = [self.folder.parent / name / "common" for name in names]
        return next((place for place in beside if place.is_dir()), self.folder / "common")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of `name`.safetensors."""
        return load_file(self.folder / self.method / f"{name}.safetensors")

    def common(self, kind: str, suffix: str = "safetensors") -> Path:
        """A file of this case's model: `kind` is "model" or "lora"."""
        return self.model_folder / f"{kind}_{self.case.split('_')[0]}.{suffix}"

    @property
    def updates(self) -> Sequence[str]:
        """The names of the recorded updates, such as "off_policy"."""
        return list(self.meta["case"]["runs"])


@dataclass(frozen=True)
class RecordedUpdate:
    """What was recorded of the update `name`: `tables`, whose rows are the samples `kept`, and in
    `steps` gradients, norm and weights of every optimizer step. `rewards` [prompt, member,
    decision+1] and `order`, that of the kept samples, led to it.
    """

    name: str
    rewards: Tensor
    kept: Tensor
    order: Tensor
    tables: Tensors
    steps: Sequence[Tensors]

    @staticmethod
    def of(recording: Recording, name: str) -> "RecordedUpdate":
        """The update `name`; one without KL has the tables of the one with KL that it does not
        repeat.
        """
        every, credit = recording.tensors(f"update_{recording.case}"), recording.tensors("credit")
        tables: Any = below(every, name)
        if name.endswith(WITHOUT_KL):
            with_kl = below(every, name.removesuffix(WITHOUT_KL))
            kept = {key: t for key, t in with_kl.items() if "weights_after" not in key}
            tables = {**kept, **tables}
        steps = [
            below(tables, f"update{i}")
            for i in range(recording.meta["case"]["runs"][name]["updates"])
        ]
        rewards = tables.get("rewards", credit["rewards"])
        kept = torch.arange(recording.meta["prompts"] * recording.meta["members"])
        if name == ZERO_GROUP:
            kept = kept[credit[f"{ZERO_GROUP}_advantages_global_std"] != 0]
        order = kept[tables["perm"]] if "perm" in tables else kept
        return RecordedUpdate(
            name, value_table(rewards), kept, order, tables, steps if steps[0] else [tables]
        )


def below(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors called `prefix`/NAME, by NAME."""
    start = f"{prefix}/"
    return {key.removeprefix(start): tensors[key] for key in tensors if key.startswith(start)}


def value_table(rewards: Tensor) -> Tensor:
    """A table [prompt, member, decision+1]; rewards of the finished images alone are its last
    column.
    """
    return rewards if rewards.ndim == 3 else rewards[..., None]


def pipeline_folder(recording: Recording, work: Path) -> Path:
    """A folder in `work` with the recorded model as a diffusers pipeline, its LoRA and its
    prompts.
    """
    meta, folder = recording.meta, work / recording.case
    if folder.exists():
        return folder
    transformer = SD3Transformer2DModel(**json.loads(recording.common("model", "json").read_text()))
    transformer.load_state_dict(load_file(recording.common("model")))
    blocks: Any = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    # four blocks halve each side three times
    blocks |= {"block_out_channels": (4,) * 4, "norm_num_groups": 1}
    vae = AutoencoderKL(
        latent_channels=meta["latent"][0], scaling_factor=1.0, shift_factor=0.0, **blocks
    )
    # with tiny text encoders, which are not called
    parts = {**tiny_sd3().components, "transformer": transformer, "vae": vae}
    StableDiffusion3Pipeline(**parts).save_pretrained(folder)
    # a LoRA file without an alpha has (alpha / rank) B
    scale = meta["lora"]["lora_alpha"] / meta["lora"]["r"]
    lora = {
        key: scale * t if "lora_B" in key else t
        for key, t in load_file(recording.common("lora")).items()
    }
    save_file(
        {key.replace("base_model.model", "transformer"): t for key, t in lora.items()},
        folder / "lora.safetensors",
    )
    (folder / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(meta["prompts"])))
    return folder
