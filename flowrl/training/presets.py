"""Preset files: a model, a method and a task that combine to a run, as in ``sd3.5-medium,tp-grpo,ocr``, and what is published.

Clips, KL weights and rules of the method files are the published ones, with the definitions of the code that they were released
with. ``sd3.5-medium,tp-grpo,ocr,exact`` has flowrl's definitions and translated numbers.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.reading import load_document
from flowrl.settings import read_settings

KINDS = ("models", "methods", "tasks", "definitions")
"""The folders of preset files, in the order in which their settings are laid over each other."""


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "long": {"iterations": 75, "learning_rate": 3e-3, "final_learning_rate": 0.2},
    "tiny": {
        "iterations": 2, "groups": 2, "group_size": 3, "num_steps": 4, "eval_every": 1, "eval_samples": 4,
        "eval_steps": 4, "window": "1:2",
    },
}  # fmt: skip
"""Changes to the defaults, by name, for the built-in worlds."""

WORLD_DEFAULTS: dict[str, dict[str, Any]] = {
    "shapes": {"eval_every": 2, "eval_samples": 384, "eval_steps": 10, "eval_solver": "dpm++"},
    "mixture": {
        "task": "direction", "learning_rate": 2e-2, "iterations": 40, "window": "0:5", "eval_every": 2, "eval_samples": 384,
    },
}  # fmt: skip
"""Changes to the defaults by world. Ten steps of DPM-Solver++ score images like twenty Euler steps (soft reward .744 and .751
before training, 384 samples) in half of the time."""

MODEL_DEFAULTS: dict[str, Any] = {
    "world": "model", "task": "prompts", "reward_form": "reward", "num_steps": 10, "window": "all-but-last", "minibatches": 2,
    "learning_rate": 3e-4, "clip_range": 1e-4, "lora_rank": 32, "lora_alpha": 64.0, "ema_decay": 0.987,
    "betas": (0.9, 0.999), "groups": 4, "group_size": 24, "micro_batch": 8, "max_batch": 16, "iterations": 300, "eval_every": 20,
    "eval_samples": 32, "eval_steps": 40, "gradient_checkpointing": True,
}  # fmt: skip
"""Steps, mini-batches, AdamW, clip, LoRA and group size as Flow-GRPO has them for SD3.5-Medium (arXiv 2505.05470); an average
that decays by 0.987 every update, its 0.9 every 8; 4 groups per iteration for one GPU instead of its 48."""


MODEL_ONLY = (
    "prompts", "heldout_prompts", "resolution", "width", "num_frames", "guidance_scale", "negative_prompt", "guidance_gradient",
    "tuning", "adapter", "frozen_adapters", "lora_targets", "prompt_cache", "decode_batch", "decode_dtype", "attention_backend",
    "max_sequence_length", "gradient_checkpointing", "train_guidance_scale", "reference_guidance_scale",
)  # fmt: skip
"""Settings that mean nothing on a built-in world."""


def accelerator_defaults(device: str = "cuda", planned: bool = False) -> dict[str, Any]:
    """Where and in which batches a model trains by default if its `device` is a GPU; empty without CUDA, unless the run is only
    `planned`: for a machine with a GPU."""
    import torch

    if not (planned or torch.cuda.is_available()):
        return {}
    sizes = {"micro_batch": "auto", "max_batch": "auto"} if device.startswith("cuda") else {}
    return {"device": "cuda", "dtype": "bfloat16", **sizes}


@dataclass(frozen=True)
class Piece:
    """One preset: its name, where it comes from (a folder's name, "built-in" or "file"), its settings, and those for the case
    that other named pieces (separated by commas) are chosen too. `about` is what its file says: gpus, memory, notes ..."""

    name: str
    origin: str
    settings: dict[str, Any]
    when: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Combined:
    """Pieces laid over each other: the settings, and which piece each comes from."""

    pieces: tuple[Piece, ...]
    settings: dict[str, Any]
    origins: dict[str, str]


@cache
def shipped() -> dict[str, dict[str, Path]]:
    """The files inside the package by folder and name."""
    root = Path(str(resources.files("flowrl") / "presets"))
    return {kind: {path.stem: path for path in sorted((root / kind).glob("*.yaml"))} for kind in KINDS}


def combinations() -> list[str]:
    """The names of all model,method,task presets; each exists with ",exact" too."""
    return [",".join(names) for names in product(*(shipped()[kind] for kind in KINDS[:3]))]


def combine(name: str, schema: type) -> Combined:
    """The presets `name` lists, separated by commas: shipped files by name, names of `PRESETS`, or paths of .yaml files.

    Model, method, task and definition files are laid over each other in this order, then the settings that they have for each
    other, then built-in presets and files of the user's own in the order given. Raises `ConfigError` for an unknown name or two
    of a kind.
    """
    pieces = [_piece(part.strip(), schema) for part in name.split(",")]
    for kind in KINDS:
        same = [piece.name for piece in pieces if piece.origin == kind]
        if len(same) > 1:
            raise ConfigError(f"preset: {' and '.join(same)} are both {kind}; take one")
    ordered = sorted(pieces, key=lambda piece: KINDS.index(piece.origin) if piece.origin in KINDS else len(KINDS))
    settings, origins = {}, {}
    for layer in _layers(ordered):
        settings |= layer.settings
        origins |= dict.fromkeys(layer.settings, layer.name)
    return Combined(tuple(ordered), settings, origins)


def _layers(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces' settings in the order in which they overrule each other."""
    chosen = {piece.name for piece in pieces}
    files = [piece for piece in pieces if piece.origin in KINDS]
    crossed = [
        Piece(f"{piece.name} with {other}", piece.origin, settings)
        for piece in files
        for other, settings in piece.when.items()
        if set(other.split(",")) <= chosen
    ]
    return [*files, *crossed, *(piece for piece in pieces if piece.origin not in KINDS)]


def _piece(name: str, schema: type) -> Piece:
    if name in PRESETS:
        return Piece(name, "built-in", PRESETS[name])
    kind, path = next(((kind, files[name]) for kind, files in shipped().items() if name in files), ("file", Path(name)))
    if kind != "file" or path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"preset: the file {name} does not exist")
        found = read_settings(path, schema)
        return Piece(name, kind, found.settings, found.when, found.about)
    lists = [", ".join(PRESETS), *(", ".join(files) for files in shipped().values())]
    known = [*PRESETS, *(stem for files in shipped().values() for stem in files)]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ConfigError(
        f"unknown preset {name!r}{hint}; allowed: {'; '.join(lists)}; several separated by commas, as in {combinations()[-1]}; "
        "or a .yaml file"
    )


@dataclass(frozen=True)
class Published:
    """A setting and its published value (None: not published), where that is published, and why ours differs, if it does."""

    setting: str
    ours: Any
    value: Any
    where: str
    why: str

    @property
    def same(self) -> bool:
        """Whether ours is the published value."""
        return self.ours == self.value


def published(found: Combined) -> list[Published]:
    """All settings of `found` next to what is published for its pieces (``presets/published.yaml``).

    Entries of the file hold for all combinations that contain the pieces they name; later ones overrule earlier ones. Settings of
    the user's own files differ because of that file.
    """
    chosen, known, reasons, unpublished = {piece.name for piece in found.pieces}, {}, {}, ""
    for entry in published_values()["entries"]:
        if set(filter(None, entry["for"].split(","))) <= chosen:
            known |= {name: (*values, entry.get("source", "")) for name, values in entry.get("values", {}).items()}
            reasons |= entry.get("why", {})
            unpublished = entry.get("unpublished", unpublished)
    own = {piece.name for piece in found.pieces if piece.origin not in KINDS}
    rows = []
    for name, ours in found.settings.items():
        value, place, source = known.get(name, (None, "", ""))
        ours, value = (tuple(v) if isinstance(v, list) else v for v in (ours, value))
        why = reasons.get(name, unpublished if value is None else "")
        why = f"set by {found.origins[name]}" if found.origins[name] in own else why
        rows.append(Published(name, ours, value, f"{source}: {place}" if place else "", "" if ours == value else why))
    return rows


@cache
def published_values() -> dict[str, Any]:
    """The content of ``presets/published.yaml``: `sources` by short name, and `entries` of published values and reasons."""
    return load_document(Path(str(resources.files("flowrl") / "presets" / "published.yaml")))[0]
