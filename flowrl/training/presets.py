"""Preset files: a model, a method and a task that combine to a run, as in
``sd3.5-medium,tp-grpo,ocr``, and published values.

Clips, KL weights and rules of the method files are the published ones, with the definitions of the
released code. ``sd3.5-medium,tp-grpo,ocr,exact`` has flowrl's definitions and translated numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, require
from flowrl.parts.settings import read_settings, unknown
from flowrl.reading import load_document
from flowrl.training.format import require_format

KINDS = ("models", "methods", "tasks", "definitions")
"""The folders of preset files, in the order in which they are applied; later settings override
earlier ones.
"""


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "long": {"iterations": 75, "learning_rate": 3e-3, "final_learning_rate": 0.2},
    "tiny": {
        "iterations": 2,
        "groups": 2,
        "group_size": 3,
        "num_steps": 4,
        "eval_every": 1,
        "eval_samples": 4,
        "eval_steps": 4,
        "window": "1:3",
    },
}
"""Changes to the defaults, by name, for the built-in worlds."""

WORLD_DEFAULTS: dict[str, dict[str, Any]] = {
    "shapes": {
        "window": "2:7",
        "clip_range": 2e-3,
        "eval_every": 2,
        "eval_samples": 384,
        "eval_steps": 10,
        "eval_solver": "dpm++",
    },
    "mixture": {
        "task": "direction",
        "learning_rate": 2e-2,
        "iterations": 40,
        "window": "0:5",
        "clip_range": 2e-3,
        "eval_every": 2,
        "eval_samples": 384,
    },
}
"""Changes to the defaults by built-in world, here and not in `World.defaults`, so that the help
needs no torch. The window is for methods without one of their own (`OWN_WINDOWS`). Ten steps of
DPM-Solver++ give scores like twenty Euler steps in half the time (soft reward .744 and .751 before
training, 384 samples).
"""

MODEL_DEFAULTS: dict[str, Any] = {
    "world": "model",
    "task": "prompts",
    "reward_form": "reward",
    "num_steps": 10,
    "minibatches": 2,
    "learning_rate": 3e-4,
    "lora_rank": 32,
    "lora_alpha": 64.0,
    "ema_decay": 0.987,
    "betas": (0.9, 0.999),
    "groups": 4,
    "group_size": 24,
    "micro_batch": 8,
    "max_batch": 16,
    "iterations": 300,
    "eval_every": 20,
    "eval_samples": 32,
    "eval_steps": 40,
    "gradient_checkpointing": True,
}
"""Steps, mini-batches, AdamW, LoRA and group size of Flow-GRPO for SD3.5-Medium (arXiv 2505.05470).
The average decays by 0.987 per update, in Flow-GRPO by 0.9 every 8 updates. 4 groups per iteration
for one GPU, in Flow-GRPO 48.
"""


OWN_WINDOWS = ("branch-grpo", "granular-grpo", "tree-grpo")
"""Methods whose published window is another than all steps but the last; that of a world or a
preset does not replace it.
"""


def world_defaults(world: Any) -> dict[str, Any]:
    """Changes to the defaults in a world: those of `WORLD_DEFAULTS`, or the world's first task and
    form and its own `defaults`; none for "model".

    Args:
        world: the setting `world`: a spec, which is built, or an object.

    Returns:
        The settings.

    Raises:
        ConfigError: the world cannot be built, or its defaults name a world or a model.
    """
    if world == "model" or (isinstance(world, str) and world in WORLD_DEFAULTS):
        return WORLD_DEFAULTS.get(world, {})
    from flowrl.worlds.base import world as build_world

    built = build_world(world)
    defaults = dict(getattr(built, "defaults", {}))
    fits = not {"world", "model"} & defaults.keys()
    require(fits, f"defaults of world {built.name}", defaults, "neither world nor model")
    return {"task": built.tasks[0], "reward_form": built.forms[0], **defaults}


METHOD_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "shapes": {"tempflow-grpo": {"groups": 6, "group_size": 30}},
    "mixture": {"tempflow-grpo": {"groups": 6, "group_size": 30}},
    "model": {"tempflow-grpo": {"group_size": 54}},
    "tiny": {
        "awm": {"loss": "awm(times=stratified(count=2))"},
        "branch-grpo": {
            "credit": "depth-relative(scope=tree, std=sample, probe=branch(children=(1, 2)))",
            "group_size": 4,
        },
        "dgpo": {"loss": "dgpo(beta_dpo=1.0, sample_from=none, times=steps(count=2, steps=3))"},
        "granular-grpo": {"window": "0:2"},
        "tempflow-grpo": {
            "credit": "weighted(rule=sibling-relative(probe=comb(branches=2)))",
            "group_size": 4,
        },
        "tree-grpo": {"group_size": 4},
    },
}
"""Changes by world (others: those of model), or for the preset tiny, that a method's groups, trees
and times need.
"""


def method_overrides(
    preset: str, world: Any, method: str, published: bool = False
) -> dict[str, Any]:
    """The changes that a method needs to the settings of a built-in preset.

    Args:
        preset: name of the preset; a preset that contains a file needs none.
        world: the setting `world`, or "model".
        method: name of the method.
        published: use the method's published window and clip instead of those of the world.

    Returns:
        Settings.
    """
    names = preset.split(",")
    if not set(names) <= set(PRESETS):
        return {}
    key = "tiny" if "tiny" in names else str(world) if str(world) in METHOD_SETTINGS else "model"
    return {
        **({"window": ""} if published or method in OWN_WINDOWS else {}),
        **({"clip_range": 0.0} if published else {}),
        **METHOD_SETTINGS[key].get(method, {}),
    }


def origins(
    preset: str,
    schema: type,
    world: Any,
    method: str,
    chosen: Sequence[str],
    published: bool = False,
) -> dict[str, str]:
    """Where the settings of a run come from, by setting: the world's or models' defaults, presets,
    what the method needs of them, or an option.

    Args:
        preset: name of the preset.
        schema: class of the settings.
        world: the setting `world`, or "model".
        method: name of the method.
        chosen: settings that options set.
        published: as in `method_overrides`.

    Returns:
        Origins; settings without one have their default.
    """
    base = MODEL_DEFAULTS if world == "model" else world_defaults(world)
    label = "models" if world == "model" else f"world {getattr(world, 'name', world)}"
    pieces = combine(preset, schema).origins.items()
    overrides = method_overrides(preset, world, method, published)
    return {
        **dict.fromkeys(base, label),
        **{name: f"preset {piece}" for name, piece in pieces},
        **dict.fromkeys(overrides, f"{preset}, for {method}"),
        **dict.fromkeys(chosen, "option"),
    }


MODEL_ONLY = (
    "prompts",
    "heldout_prompts",
    "resolution",
    "width",
    "num_frames",
    "guidance_scale",
    "negative_prompt",
    "guidance_gradient",
    "tuning",
    "adapter",
    "frozen_adapters",
    "lora_targets",
    "prompt_cache",
    "decode_batch",
    "decode_dtype",
    "attention_backend",
    "max_sequence_length",
    "gradient_checkpointing",
    "train_guidance_scale",
    "reference_guidance_scale",
)
"""Settings of a model only."""


def accelerator_defaults(device: str = "cuda", planned: bool = False) -> dict[str, Any]:
    """Default device, precision and batches of a model on a GPU.

    Args:
        device: name of the device.
        planned: return them even without CUDA, to plan for another machine.

    Returns:
        Settings; empty without CUDA.
    """
    import torch

    if not (planned or torch.cuda.is_available()):
        return {}
    sizes = {"micro_batch": "auto", "max_batch": "auto"} if device.startswith("cuda") else {}
    return {"device": "cuda", "dtype": "bfloat16", **sizes}


@dataclass(frozen=True)
class Piece:
    """One preset.

    Args:
        name: name of the preset.
        origin: the folder's name, "built-in" or "file".
        settings: its settings.
        when: further settings by the name of another preset that is also chosen.
        about: facts in its file: gpus, memory, notes.
    """

    name: str
    origin: str
    settings: dict[str, Any]
    when: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Combined:
    """Combined presets.

    Args:
        pieces: the presets.
        settings: the resulting settings.
        origins: the preset of each setting.
    """

    pieces: tuple[Piece, ...]
    settings: dict[str, Any]
    origins: dict[str, str]


@cache
def shipped() -> dict[str, dict[str, Path]]:
    """The files inside the package by folder and name."""
    root = Path(str(resources.files("flowrl") / "presets"))
    return {
        kind: {path.stem: path for path in sorted((root / kind).glob("*.yaml"))} for kind in KINDS
    }


def combinations() -> list[str]:
    """The names of all model,method,task presets; each exists with ",exact" too."""
    return [",".join(names) for names in product(*(shipped()[kind] for kind in KINDS[:3]))]


def combine(name: str, schema: type) -> Combined:
    """Combine presets.

    Model, method, task and definition files are applied in this order, then the settings that they
    have for each other, then built-in presets and the user's files in the given order.

    Args:
        name: shipped files by name, names of `PRESETS`, or paths of .yaml files, separated by
            commas.
        schema: class of the settings.

    Returns:
        The settings, and the preset of each.

    Raises:
        ConfigError: a name is unknown, or two presets are of one kind.
    """
    pieces = [_piece(part.strip(), schema) for part in name.split(",")]
    files = [piece for kind in KINDS for piece in pieces if piece.origin == kind]
    for first, second in pairwise(files):
        fits = first.origin != second.origin
        require(fits, "preset", name, f"one of {first.origin}: {first.name} or {second.name}")
    others = [piece for piece in pieces if piece not in files]
    chosen = {piece.name for piece in pieces}
    layers = [
        *((piece.name, piece.settings) for piece in files),
        *(
            (f"{piece.name} with {other}", settings)
            for piece in files
            for other, settings in piece.when.items()
            if set(other.split(",")) <= chosen
        ),
        *((piece.name, piece.settings) for piece in others),
    ]
    settings, origins = {}, {}
    for origin, changes in layers:
        settings |= changes
        origins |= dict.fromkeys(changes, origin)
    return Combined((*files, *others), settings, origins)


def _piece(name: str, schema: type) -> Piece:
    if name in PRESETS:
        return Piece(name, "built-in", PRESETS[name])
    files = {
        stem: (kind, path) for kind, stems in shipped().items() for stem, path in stems.items()
    }
    kind, path = files.get(name, ("file", Path(name)))
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{unknown(name, [*PRESETS, *files], 'preset')}; or a .yaml file")
    require(path.is_file(), "preset", name, "a file that exists")
    require_format(path, load_document(path)[0])
    read = read_settings(path, schema)
    return Piece(name, kind, read.settings, read.when, read.about)


@dataclass(frozen=True)
class Published:
    """A setting with its published value.

    Args:
        setting: name of the setting.
        ours: its value here.
        value: the published value; None: not published.
        where: source of the published value.
        why: reason for a difference; "" if there is none.
    """

    setting: str
    ours: Any
    value: Any
    where: str
    why: str

    @property
    def same(self) -> bool:
        """Whether the value here is the published one."""
        return self.ours == self.value


def published(combined: Combined) -> list[Published]:
    """All settings of `combined` with the published values for its pieces
    (``presets/published.yaml``).

    An entry of the file applies to all combinations that contain the pieces it names; later entries
    override earlier ones. Settings from the user's files have that file as the reason for a
    difference.
    """
    chosen, known, reasons, unpublished = {piece.name for piece in combined.pieces}, {}, {}, ""
    for entry in published_values()["entries"]:
        if set(filter(None, entry["for"].split(","))) <= chosen:
            source = entry.get("source", "")
            known |= {name: (*value, source) for name, value in entry.get("values", {}).items()}
            reasons |= entry.get("why", {})
            unpublished = entry.get("unpublished", unpublished)
    users = {piece.name for piece in combined.pieces if piece.origin not in KINDS}
    rows = []
    for name, ours in combined.settings.items():
        value, place, source = known.get(name, (None, "", ""))
        ours, value = (tuple(v) if isinstance(v, list) else v for v in (ours, value))
        why = reasons.get(name, unpublished if value is None else "")
        if combined.origins[name] in users:
            why = f"set by {combined.origins[name]}"
        where = f"{source}: {place}" if place else ""
        rows.append(Published(name, ours, value, where, "" if ours == value else why))
    return rows


@cache
def published_values() -> dict[str, Any]:
    """The content of ``presets/published.yaml``: `sources` by short name, and `entries` of
    published values and reasons.
    """
    return load_document(Path(str(resources.files("flowrl") / "presets" / "published.yaml")))[0]
