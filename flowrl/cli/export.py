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

from flowrl.core.errors import CheckpointError, ConfigError, require

if TYPE_CHECKING:
    from flowrl.run.config import RunConfig
    from flowrl.run.export import ToExport
    from flowrl.run.saved import SavedWeights


OTHER_FILES = (".ckpt", ".bin", ".pt", ".pth", ".sft", ".gguf")
"""Endings of files of weights that are not written."""


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
    """A new folder for the weights and, of a run, their card; or for a LoRA a file,
    NAME.safetensors.
    """
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
    name on the Hub. For weights that are not a run's and a base that is a single file: the
    pipeline that it was trained from.
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
        from flowrl.run.export import EXPORT, ToExport, base_of
        from flowrl.run.io import write_json
        from flowrl.run.models.base import HUB_NAME, describe_base, pipeline_class
        from flowrl.run.saved import find_weights
        from flowrl.run.verify import largest_difference

        is_file = self.out.suffix == ".safetensors"
        folder = "the name of a folder: a card and several files are written"
        out = str(self.out)
        require(not (is_file and (self.push or self.format == "merged")), "out", out, folder)
        fits = self.out.suffix.lower() not in OTHER_FILES
        require(fits, "out", out, "the name of a folder, or of a file NAME.safetensors")
        self.require_same_format()
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
        base = (
            describe_base(model, self.base_model)
            if config is None
            else base_of(config, self.model, self.base_model)
        )
        source = ToExport(saved, config, base, pipeline_class(model, base))
        verb = "Replaced" if is_file and self.out.exists() else "Wrote"
        with self.place(is_file):
            written = self.merge(source) if self.format == "merged" else self.convert(source)
            if self.verify and config is not None:
                moved = config.replace(model=model)
                print(largest_difference(saved, moved, written, self.format))
            if not is_file:
                self.card(source, written)
                write_json(self.out / EXPORT, source.facts() | {"format": self.format})
        card = "" if is_file or config is None else " and its card, README.md"
        print(f"{verb} {written}{card}, from {saved}")
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

    def require_same_format(self) -> None:
        """Raise `ConfigError` if `out` is an earlier export in another format, whose files would
        remain beside the new ones.
        """
        from flowrl.run.export import EXPORT, made_export
        from flowrl.run.reading import read_json

        if made_export(self.out):
            before = read_json(self.out / EXPORT, dict[str, str]).get("format")
            need = f"a new folder: this one is an export with --format {before}"
            require(before == self.format, "out", str(self.out), need)

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

    @property
    def torch_dtype(self) -> Any:
        """The type of the weights; None without the option."""
        import torch

        return getattr(torch, self.dtype) if self.dtype else None

    def convert(self, source: "ToExport") -> Path:
        """Write a LoRA and read it back."""
        import torch

        from flowrl.run.export import check_lora, lora_file, notes
        from flowrl.run.io import write_bytes
        from flowrl.run.saved import LORA_FILE

        assert self.format != "merged"
        lora, kind = source.lora(), source.pipeline
        file, name = self.out, f"{self.out.resolve().name}.safetensors"
        if file.suffix != ".safetensors":
            file = file / (LORA_FILE if self.format == "diffusers" else name)
        given = source.facts(), self.torch_dtype or torch.float32
        write_bytes(file, lora_file(lora, self.format, kind.__name__, *given))
        try:
            check_lora(file, lora, kind)
        except CheckpointError:
            file.unlink()
            raise
        for line in notes(lora, kind.__name__, self.format, source.config):
            print(line)
        return file

    def merge(self, source: "ToExport") -> Path:
        """Write the base model with the trained weights."""
        from flowrl.run.export import first_weights, full_weights, notes
        from flowrl.run.models.merged import write_merged
        from flowrl.run.models.weights import frozen_loras

        base, config = source.base.folder, source.config
        if base is None:
            raise ConfigError(
                "format = 'merged' is not allowed; allowed: a LoRA's format, because the base model"
                " is a single file, or --model FOLDER with a pipeline"
            )
        if not source.is_lora:
            write_merged(
                self.out, base, weights=full_weights(source.weights), dtype=self.torch_dtype
            )
            return self.out
        loras = [source.lora()]
        for line in notes(loras[0], source.pipeline.__name__):
            print(line)
        weights = {}
        if config is not None:
            loras += frozen_loras(config.policy, source.pipeline).values()
            weights = first_weights(config)
        texts = sum(len(lora.others) for lora in loras)
        require(not texts, "format", "merged", f"another: {texts} matrices are of text encoders")
        write_merged(self.out, base, loras, weights, self.torch_dtype)
        return self.out

    def card(self, source: "ToExport", written: Path) -> None:
        """Write the model card of weights of a run."""
        from flowrl.run.report.card import Exported, card_text, write_beside

        if source.config is not None:
            file = "" if self.format in ("diffusers", "merged") else written.name
            what = Exported(source.weights, self.format, file, source.base)
            run = source.weights.path
            write_beside(self.out, card_text(run, source.config, what), run)


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
