"""`flowrl export`: trained weights as files for diffusers, ComfyUI and kohya's scripts, or merged
into the base model.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from flowrl.core.errors import ConfigError, require

if TYPE_CHECKING:
    from flowrl.run.config import RunConfig
    from flowrl.run.models.base import BaseModel
    from flowrl.run.models.lora_files import Lora
    from flowrl.run.saved import SavedWeights


@dataclass(frozen=True)
class Export:
    """Write trained weights for other programs: of a run in any state, or of any LoRA.

    Examples: flowrl export runs/mine --out mine

    flowrl export runs/mine@best --format comfyui --out ComfyUI/models/loras/mine.safetensors

    flowrl export kohya.safetensors --model stabilityai/stable-diffusion-3.5-medium --out converted
    """

    weights: tyro.conf.Positional[str]
    """The folder of a run (RUN), a checkpoint of it (RUN@000010, RUN@best, RUN@last), or a LoRA:
    file, folder or name on the Hub.
    """
    out: Path
    """A new folder for the weights and their card; or for a LoRA a file, NAME.safetensors."""
    format: Literal["diffusers", "comfyui", "kohya", "merged"] = "diffusers"
    """diffusers, comfyui or kohya (sd-scripts, musubi-tuner, Forge): a LoRA with the names of this
    program; merged: the base model in diffusers' form with the trained weights.
    """
    live: bool = False
    """The weights of a checkpoint themselves, and not their average."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights [default: float32; merged: the base model's]."""
    model: str = ""
    """The base model of weights that are not a run's, or the new place of a run's: a folder or a
    name on the Hub.
    """
    base_model: str = ""
    """The base model's name on the Hub, for the card, if it was a local folder."""
    verify: bool = False
    """Load the base model, and compare an image of the run with one of the written file."""
    push: str = ""
    """Upload the folder to this repository on the Hub (OWNER/NAME), public if it is new, with the
    token of `hf auth login`.
    """
    trust: bool = False
    """With --verify: run code that the settings of the run name, and use their addresses and keys.
    """

    def main(self) -> int:
        """Read, write, check, and upload if that was typed."""
        import torch

        from flowrl.run.export import EXPORT, export_facts, iteration_of
        from flowrl.run.io import write_json
        from flowrl.run.models.base import HUB_NAME, describe_base, pipeline_class
        from flowrl.run.saved import find_weights

        is_file = self.out.suffix == ".safetensors"
        folder = "the name of a folder: a card and several files are written"
        require(not (is_file and (self.push or self.format == "merged")), "out", self.out, folder)
        named = not self.push or bool(HUB_NAME.fullmatch(self.push))
        require(named, "push", self.push, "the name of a repository: OWNER/NAME")
        off = bool(self.push) and os.environ.get("HF_HUB_OFFLINE", "0") != "0"
        require(not off, "HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE"), "0 with --push")
        saved = find_weights(self.weights, self.live)
        config = self.settings(saved)
        of_run = "only for the weights of a run"
        require(not self.verify or config is not None, "verify", True, of_run)
        require(not self.push or config is not None, "push", self.push, of_run)
        model = self.model or (config.policy.model if config else "") or ""
        base = describe_base(model, self.base_model)
        pipeline = pipeline_class(model, base)
        facts = export_facts(base)
        if config is not None:
            facts = export_facts(base, config, saved.path, iteration_of(saved), saved.live)
        dtype = getattr(torch, self.dtype) if self.dtype else None
        with self.place(is_file):
            if self.format == "merged":
                written = self.merge(saved, config, pipeline, base, dtype)
            else:
                written = self.convert(saved, config, pipeline, base, facts, dtype)
            if self.verify and config is not None:
                print(self.verified(saved, config, written))
            if not is_file:
                if config is not None:
                    self.card(saved, config, base, written)
                write_json(self.out / EXPORT, facts | {"format": self.format})
        print(f"Wrote {written}{'' if is_file or config is None else ' and its card, README.md'}")
        if self.push:
            print(f"Uploaded to {push_folder(self.out, self.push)}")
        return 0

    def settings(self, saved: "SavedWeights") -> "RunConfig | None":
        """The settings of the run; None for weights that are not a run's."""
        from flowrl.run.build import METHOD_FILE
        from flowrl.run.config import load_config

        if saved.kind != "run":
            need = "the base model of the weights: --model FOLDER or --model OWNER/NAME"
            require(bool(self.model), "model", self.model, need)
            return None
        # without an image, nothing that the settings name is run or contacted
        is_read = not self.verify and (saved.path / METHOD_FILE).is_file()
        config = load_config(saved.path / "config.json", self.trust or is_read)
        if not config.policy.model:
            raise ConfigError(
                f"weights: {self.weights} is a run of the built-in world"
                f" {config.environment.world}, which other programs do not know; allowed: runs of"
                " a model"
            )
        return config

    @contextmanager
    def place(self, is_file: bool) -> Iterator[None]:
        """Within this context the results are written."""
        from flowrl.run.export import made_export, made_file
        from flowrl.run.io import new_folder, require_new_file

        if is_file:
            require_new_file(self.out, made_file)
            yield
        else:
            with new_folder(self.out, "export", made_export, lambda: False):
                yield

    def convert(
        self,
        saved: "SavedWeights",
        config: "RunConfig | None",
        pipeline: Any,
        base: "BaseModel",
        facts: dict[str, str],
        dtype: Any,
    ) -> Path:
        """Write a LoRA and read it back."""
        import torch

        from flowrl.run.export import check_base, check_lora, lora_file, notes, saved_lora
        from flowrl.run.io import write_bytes
        from flowrl.run.saved import LORA_FILE

        assert self.format != "merged"
        lora = saved_lora(saved, config, pipeline)
        if base.folder is not None:
            check_base(lora.shapes, base.folder)
        file, name = self.out, f"{self.out.resolve().name}.safetensors"
        if file.suffix != ".safetensors":
            file = file / (LORA_FILE if self.format == "diffusers" else name)
        kind = pipeline.__name__
        write_bytes(file, lora_file(lora, self.format, kind, facts, dtype or torch.float32))
        check_lora(file, lora, pipeline)
        print("".join(f"{line}\n" for line in notes(lora, self.format, config)), end="")
        return file

    def merge(
        self,
        saved: "SavedWeights",
        config: "RunConfig | None",
        pipeline: Any,
        base: "BaseModel",
        dtype: Any,
    ) -> Path:
        """Write the base model with the trained weights."""
        from flowrl.run.export import (
            first_weights,
            full_weights,
            notes,
            saved_lora,
            write_merged,
        )
        from flowrl.run.models.weights import frozen_loras

        assert base.folder is not None
        is_lora = config.policy.tuning == "lora" if config else saved.kind == "lora"
        if not is_lora:
            write_merged(self.out, base.folder, weights=full_weights(saved), dtype=dtype)
            return self.out
        loras: list[Lora] = [saved_lora(saved, config, pipeline)]
        print("".join(f"{line}\n" for line in notes(loras[0])), end="")
        loras += frozen_loras(config.policy, pipeline).values() if config else ()
        texts = sum(len(lora.others) for lora in loras)
        require(not texts, "format", "merged", f"another: {texts} matrices are of text encoders")
        weights = first_weights(config) if config else {}
        write_merged(self.out, base.folder, loras, weights, dtype)
        return self.out

    def verified(self, saved: "SavedWeights", config: "RunConfig", written: Path) -> str:
        """The largest difference of a pixel between an image of the run's policy and one of plain
        diffusers with the written file. Raises `CheckpointError` if they differ.
        """
        from flowrl.run.verify import largest_difference

        model = self.model or config.policy.model
        return largest_difference(saved, config.replace(model=model), written, self.format)

    def card(
        self, saved: "SavedWeights", config: "RunConfig", base: "BaseModel", written: Path
    ) -> None:
        """Write the model card."""
        from flowrl.run.report.card import Exported, card_text, write_beside

        file = "" if self.format in ("diffusers", "merged") else written.name
        what = Exported(saved, self.format, file, base)
        write_beside(self.out, card_text(saved.path, config, what), saved.path)


def push_folder(folder: Path, name: str) -> str:
    """Upload a folder to the repository `name` on the Hub, which is made if necessary; its address.
    Raises `ConfigError` with what to do if the Hub refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=[".lock*"])
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(
            f"push: {folder} is complete, but the upload to {name} failed ({reason}); log in with"
            " hf auth login, and check that the name is yours"
        ) from error
    return str(address)
