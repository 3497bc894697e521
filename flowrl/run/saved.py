"""Saved weights, by what a user types: a run in any state, a checkpoint of it, a LoRA of any
program, a transformer, or a name on the Hub.
"""

import json
import os
import re
import shlex
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.run.checkpoint import LORA_FILE, Checkpoints, load_tensors, load_weights, to_resume
from flowrl.run.io import is_locked
from flowrl.run.reading import PICKLED, read_json
from flowrl.run.records import RunRecord, load_run, without_groups
from flowrl.run.results import best_named, comparable, holds

LORA_FILES = (LORA_FILE, "adapter_model.safetensors")
"""Names of LoRA files in a folder: diffusers' and PEFT's. Any other name must be the only one."""
KINDS = (
    "the folder of a run (RUN), a checkpoint of it (RUN@000010, RUN@best, RUN@last), a LoRA (file"
    " or folder), a folder with a transformer, or a name on the Hub (OWNER/NAME or"
    " OWNER/NAME/FILE.safetensors)"
)
HUB_NAME = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)(?:/([\w./-]+\.safetensors))?")


@dataclass(frozen=True)
class SavedWeights:
    """Weights on the disk.

    Args:
        kind: what `path` is: the folder of a run, a LoRA (its file), or the folder of a transformer
            in diffusers' form.
        path: the folder or the file.
        checkpoint: of a run, the name of its checkpoint; "" for the weights of its end.
        live: of a run's checkpoint, the weights themselves and not their average.
    """

    kind: Literal["run", "lora", "transformer"]
    path: Path
    checkpoint: str = ""
    live: bool = False

    def __str__(self) -> str:
        at = f"@{self.checkpoint}" if self.checkpoint else ""
        return f"{self.path}{at}{' (live)' if self.live else ''}"

    def setting(self, name: str) -> Any:
        """A setting in the config.json of a run."""
        config = read_json(self.path / "config.json", dict[str, Any], CheckpointError)
        return without_groups(config).get(name)

    @property
    def is_full(self) -> bool:
        """Whether these are all weights of a transformer, and no LoRA."""
        of_run = self.kind == "run" and self.setting("tuning") == "full"
        return self.kind == "transformer" or of_run

    def tensors(self) -> dict[str, Tensor]:
        """The trained weights of a run by the names of its parameters. Raises `CheckpointError` if
        the file is missing or damaged, with the name of a complete checkpoint.
        """
        checkpoints, prefix = Checkpoints(self.path), "weight." if self.live else "average."
        try:
            if not self.checkpoint:
                return load_weights(self.path / "weights.safetensors")
            return load_tensors(checkpoints.path(self.checkpoint), prefix)
        except CheckpointError as error:
            if not (complete := checkpoints.complete(before=self.checkpoint)):
                raise
            text = f"Checkpoint {complete} is complete: {self.path}@{complete}"
            raise CheckpointError(f"{error}. {text}") from error


def find_weights(text: str | Path, live: bool = False, option: str = "weights") -> SavedWeights:
    """The weights that `text` names (`KINDS`); a run that has not ended has those of its newest
    checkpoint.

    Args:
        text: what the user typed.
        live: use a run's weights and not their average.
        option: the name of the option, for errors.

    Raises:
        CheckpointError: there are no such weights; nothing has been loaded.
    """
    place = Path(text)
    is_there = os.path.exists(place)  # also False for a name that is too long
    head, at, name = str(text).rpartition("@")
    if at and not is_there and holds(Path(head), "algorithm"):
        return _of_run(Path(head), name, live, option)
    if holds(place, "algorithm"):
        return _of_run(place, "", live, option)
    if place.name == "weights.safetensors" and holds(place.parent, "algorithm"):
        return _of_run(place.parent, "", live, option)
    if is_there and place.parent.name == "checkpoints" and place.is_file():
        return _of_run(place.parent.parent, place.stem, live, option)
    if live:
        raise CheckpointError(f"{option}: {text} is no run, so it has no live weights")
    if not is_there and (hub := HUB_NAME.fullmatch(str(text))):
        place = _downloaded(hub[1], hub[2] or "", option)
    if holds(place, "arms"):
        runs = sorted(str(path.parent) for path in place.glob("runs/*/config.json"))
        such = f", such as {runs[0]}" if runs else ""
        raise CheckpointError(f"{option}: {text} is a comparison; allowed: one of its runs{such}")
    for folder in (place / "transformer", place):
        if _is_transformer(folder):
            return SavedWeights("transformer", folder)
    return SavedWeights("lora", _lora_file(place, str(text), option))


def run_folder(text: str, option: str = "runs") -> Path:
    """The folder of the run that `text` names, RUN or RUN@CHECKPOINT; it needs no weights yet."""
    for place in (Path(text), Path(text.rpartition("@")[0])):
        if holds(place, "algorithm"):
            return place
    raise CheckpointError(f"{option}: {text:.200} is no run; allowed: the folder of a run")


def best_checkpoint(run: Path) -> str:
    """The checkpoint of `run` that the first of its observers with a best one names; without such
    an observer that with the highest held-out reward, among those that were evaluated and are kept,
    since the last change of what is scored. Raises `CheckpointError` if there is none.
    """
    return best_of(load_run(run))


def best_of(run: RunRecord) -> str:
    """The `best_checkpoint` of a run that has been read."""
    kept, rows = Checkpoints(run.folder).names(), comparable(run.rows)
    named = f"{next(iter(best_named(run.rows).values()), 0):06d}"
    if named in kept:
        return named
    rewards = {
        f"{row['iteration']:06d}": row["evaluation"]["reward"]
        for row in rows
        if row.get("evaluation")
    }
    evaluated = [name for name in kept if name in rewards]
    if not evaluated:
        raise CheckpointError(
            f"{run.folder} has no checkpoint that was evaluated (checkpoints:"
            f" {', '.join(kept) or 'none'}; evaluated: {', '.join(rewards)})"
        )
    return max(evaluated, key=rewards.__getitem__)


def checkpoint_name(run: Path, text: str, option: str) -> str:
    """The name of the checkpoint of `run` that a user calls `text`: best, last ("" too), or its
    number, as in 4 or 000004. Raises `CheckpointError` if there is none.
    """
    checkpoints = Checkpoints(run)
    if not checkpoints.newest:
        advice = "" if is_locked(run) else f"; continue it with: {to_resume(run)}"
        raise CheckpointError(
            f"{option}: the run in {run} has no checkpoint yet; it writes one every"
            f" checkpoint_every iterations, and when it pauses{advice}"
        )
    if text == "best":
        return best_checkpoint(run)
    name = checkpoints.newest if text in ("", "last") else text
    name = f"{int(name):06d}" if name.isdecimal() else name
    if name not in checkpoints.names():
        raise CheckpointError(
            f"{option}: no checkpoint {name!r} in {run}; allowed: best, last or one of"
            f" {checkpoints.listed()}"
        )
    return name


def _of_run(run: Path, name: str, live: bool, option: str) -> SavedWeights:
    done = run / "done.json"
    if not name and done.exists():
        if not live:
            file = run / "weights.safetensors"
            if not file.exists():
                raise CheckpointError(
                    f"{option}: {file} is missing, though the run has ended; allowed: its newest"
                    f" checkpoint, {run}@last"
                )
            return SavedWeights("run", run)
        ended = read_json(done, dict[str, Any])
        name = f"{ended.get('exported', ended['iterations']):06d}"
    return SavedWeights("run", run, checkpoint_name(run, name, option), live)


def _is_transformer(folder: Path) -> bool:
    """Whether `folder` has the config of a transformer of diffusers."""
    try:
        kind = str(read_json(folder / "config.json", dict[str, Any]).get("_class_name", ""))
    except ConfigError:
        return False
    return "Transformer" in kind


def _lora_file(place: Path, text: str, option: str) -> Path:
    """The LoRA in the file or folder `place`."""
    if not os.path.exists(place):
        raise CheckpointError(f"{option}: {text:.200} does not exist; allowed: {KINDS}")
    is_weights = place.suffix == ".safetensors"
    files = [place] if is_weights and place.is_file() else sorted(place.glob("*.safetensors"))
    named = [file for file in files if file.name in LORA_FILES]
    files = named[:1] or files
    if len(files) == 1 and files[0].suffix == ".safetensors":
        return files[0]
    inside = [place] if place.is_file() else sorted(place.iterdir())
    if not files and (pickled := [file for file in inside if file.suffix in PICKLED]):
        raise CheckpointError(f"{option}: {pickled[0]} {_to_convert(pickled[0])}")
    names = ", ".join(file.name for file in files[:4])
    found = f"holds {names}" if files else f"holds no weights ({_content(place)})"
    raise CheckpointError(f"{option}: {text} {found}; allowed: {KINDS}")


def _to_convert(file: Path) -> str:
    """What a pickle is, and the command that converts the tensors in it."""
    old, new = (json.dumps(str(path)) for path in (file, file.with_suffix(".safetensors")))
    code = (
        "import torch; from safetensors.torch import save_file;"
        f' w = torch.load({old}, "cpu", weights_only=True); w = w.get("state_dict", w);'
        ' save_file({k: v.contiguous().clone() for k, v in w.items() if hasattr(v, "clone")},'
        f" {new})"
    )
    what = "is a pickle, which can contain code; allowed: safetensors"
    return f"{what}; convert it: python -c {shlex.quote(code)}"


def _content(place: Path) -> str:
    """What is in a folder, for an error."""
    if place.is_file():
        return "a file that is not in safetensors format"
    names = sorted(path.name for path in place.iterdir())
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5) or "empty"


def _downloaded(name: str, file: str, option: str) -> Path:
    """The folder or the file of a repository on the Hub, from the local cache or downloaded."""
    hub: Any = import_module("huggingface_hub")
    try:
        if file:
            return Path(hub.hf_hub_download(name, file))
        patterns = [*LORA_FILES, "adapter_config.json", "transformer/*"]
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        off = import_module("huggingface_hub.constants").HF_HUB_OFFLINE
        advice = (
            "downloads are off: set HF_HUB_OFFLINE=0"
            if off
            else "check its name, its licence and your token (hf auth login)"
        )
        raise CheckpointError(
            f"{option}: {name} is no file or folder, and it is not among the downloaded weights"
            f" ({type(error).__name__}); {advice}. Allowed: {KINDS}"
        ) from error
