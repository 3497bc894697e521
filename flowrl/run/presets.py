"""Preset files: a model, a method and a task that combine to a run, as in
``sd3.5-medium,tp-grpo,ocr``, and published values.

Clips, KL weights and rules of the method files are the published ones, with the definitions of the
released code. ``sd3.5-medium,tp-grpo,ocr,exact`` has flowrl's definitions and translated numbers.
The option `--method` does not read these files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, require
from flowrl.run.format import require_format
from flowrl.run.parts.settings import SettingsFile, options_text, read_settings, unknown
from flowrl.run.reading import load_document

KINDS = ("models", "methods", "records", "tasks", "definitions")
"""The folders of preset files, in the order in which they are applied; later settings override
earlier ones. A record takes the place of a method.
"""
RECORD = "record"
"""The name of the newest record."""


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "long": {
        "iterations": 75,
        "learning_rate": 3e-3,
        "lr_schedule": "linear",
        "final_learning_rate": 0.2,
    },
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

_SHAPES = {
    "window": "2:7",
    "clip_range": 2e-3,
    "eval_every": 2,
    "eval_samples": 384,
    "eval_steps": 10,
    "eval_solver": "dpm++",
}
WORLD_DEFAULTS: dict[str, dict[str, Any]] = {
    "shapes": _SHAPES,
    "edits": {**_SHAPES, "task": "recolour", "eval_samples": 144},
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
needs no torch. The window is for methods without one of their own (`OWN_WINDOWS`); the clip
replaces that of every method, which `--settings published` restores. Ten steps of
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
    "chunk": "auto",
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


OWN_WINDOWS = ("branch-grpo", "granular-grpo", "tree-grpo", "fdfo")
"""Methods whose published window is another than all steps but the last; that of a world or a
preset does not replace it.
"""


def world_defaults(world: Any) -> dict[str, Any]:
    """Changes to the defaults in a world: those of `WORLD_DEFAULTS`, or of a user's world (a spec
    or an object) its first task and form and its own `defaults`. Raises `ConfigError` if the world
    cannot be built, or its defaults name a world or a model.
    """
    if isinstance(world, str) and world in WORLD_DEFAULTS:
        return WORLD_DEFAULTS[world]
    from flowrl.run.worlds import world as build_world

    built = build_world(world)
    defaults = dict(getattr(built, "defaults", {}))
    fits = not {"world", "model"} & defaults.keys()
    require(fits, f"defaults of world {built.name}", defaults, "neither world nor model")
    return {"task": built.tasks[0], "reward_form": built.forms[0], **defaults}


@cache
def tuned() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """The settings that `flowrl compare` starts from in the built-in worlds (data/tuned.json).

    By world and arm: its `method` ("" for a rule that is not a method), the tuned `values`, and the
    `settings` of a run with them. Within a world every arm was tuned with the same number of runs
    (`flowrl bench tune`); a run of the oracle's search scores its mean reward over training, even
    if its last reward is lower.
    """
    return json.loads((resources.files("flowrl") / "data" / "tuned.json").read_text())


def of_method(world: str, method: str) -> dict[str, Any] | None:
    """The tuned settings of a method in a world; None if it was not tuned there."""
    for arm in tuned().get(world, {}).values():
        if arm["method"] == method:
            return {name: value for name, value in arm["settings"].items() if name != "method"}
    return None


def tuned_text(world: Any, chosen: Mapping[str, Any], source: str) -> str:
    """Which settings a run in a built-in world starts from, and the tuned ones that differ from
    the `chosen` settings; "" for a method without tuned settings.
    """
    values = (of_method(str(world), chosen["method"]) or {}) if not chosen["credit"] else {}
    other = {name: value for name, value in values.items() if chosen[name] != value}
    others = f"`flowrl compare` starts from the tuned ones: {options_text(other)}"
    return f"settings of the {source}; {others}" if other else ""


METHOD_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "world": {
        "tempflow-grpo": {"groups": 6, "group_size": 30},
        "rsm": {"groups": 6, "group_size": 30},
        "fdfo": {"groups": 96, "group_size": 2, "minibatches": 1},
        "v-grpo": {"minibatches": 1},
        "epg": {"minibatches": 1},
    },
    "model": {
        "tempflow-grpo": {"group_size": 54},
        "rsm": {"group_size": 30},
        "fdfo": {"group_size": 2},
    },
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
        "rsm": {
            "credit": "sibling-relative(probe=comb(branches=(1, 3), weight=step))",
            "group_size": 4,
        },
        "fdfo": {"group_size": 2, "minibatches": 1},
    },
}
"""Changes that a method's groups, trees and times need: in the built-in worlds, in others and for
models, or for the preset tiny.
"""


def method_overrides(
    preset: str, world: Any, method: str, published: bool = False
) -> dict[str, Any]:
    """The changes that a `method` needs to the settings of a built-in `preset` in a `world` (or
    "model"): with `published` its published window and clip. A preset that contains a file needs
    none.
    """
    names = preset.split(",")
    if not set(names) <= set(PRESETS):
        return {}
    key = "world" if str(world) in WORLD_DEFAULTS else "model"
    changes = dict(METHOD_SETTINGS["tiny" if "tiny" in names else key].get(method, {}))
    if published:
        changes["clip_range"] = None  # the method's
    if published or method in OWN_WINDOWS:
        changes = {"window": None, **changes}
    return changes


MODEL_ONLY = (
    "original",
    "prompts",
    "heldout_prompts",
    "hold_out",
    "resolution",
    "width",
    "sizes",
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
    "decode_tiling",
    "quantize",
    "decode_dtype",
    "attention_backend",
    "max_sequence_length",
    "gradient_checkpointing",
    "train_guidance_scale",
    "reference_guidance_scale",
    "eval_resolution",
    "eval_guidance",
)
"""Settings of a model only."""


@dataclass(frozen=True)
class Piece:
    """One preset: its `name`, its `kind` (a folder of `KINDS`, "built-in" or "file"), and the
    content of its file.
    """

    name: str
    kind: str
    file: SettingsFile


@dataclass(frozen=True)
class Combined:
    """Combined presets: the resulting `settings`, and for each of them its preset (`origins`)."""

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
    """The names of all model,method,task presets; each exists with ",exact" too. Models that edit
    images go with the tasks of edits, others with the other tasks (`edits` in their files).
    """
    kinds = ("models", "methods", "tasks")
    files = [path for kind in kinds for path in shipped()[kind].values()]
    edits = {path.stem for path in files if "edits" in load_document(path)[0]["about"]}
    every = product(*(shipped()[kind] for kind in kinds))
    return [",".join((m, by, t)) for m, by, t in every if (m in edits) == (t in edits)]


def combine(name: str, schema: type) -> Combined:
    """Combine presets.

    Model, method, task and definition files are applied in this order, then the settings that they
    have for each other, then built-in presets and the user's files in the given order.

    `name`: shipped files by name, names of `PRESETS`, or paths of .yaml files, separated by commas;
    `schema`: class of the settings. Raises `ConfigError` if a name is unknown, or if two presets
    are of one kind.
    """
    pieces = [_piece(part.strip(), schema) for part in name.split(",")]
    files = [piece for kind in KINDS for piece in pieces if piece.kind == kind]
    for first, second in pairwise(files):
        need = f"one of {first.kind}: {first.name} or {second.kind}: {second.name}"
        both = {first.kind, second.kind} == {"methods", "records"}
        require(first.kind != second.kind and not both, "preset", name, need)
    others = [piece for piece in pieces if piece not in files]
    chosen = {piece.name for piece in pieces}
    layers = [(piece.name, piece.file.settings) for piece in files]
    for piece in files:
        for other, settings in piece.file.when.items():
            if set(other.split(",")) <= chosen:
                layers.append((f"{piece.name} with {other}", settings))
    layers += [(piece.name, piece.file.settings) for piece in others]
    settings, origins = {}, {}
    for origin, changes in layers:
        settings |= changes
        origins |= dict.fromkeys(changes, origin)
    if is_of_task("heldout_prompts", origins) and not is_of_task("prompts", origins):
        del settings["heldout_prompts"], origins["heldout_prompts"]
    return Combined((*files, *others), settings, origins)


def is_of_task(setting: str, origins: Mapping[str, str]) -> bool:
    """Whether a setting comes from a shipped task. Held-out prompts of a task belong to its
    training prompts: with other ones, a run evaluates on these.
    """
    return origins.get(setting) in shipped()["tasks"]


def require_method(preset: str, method: str) -> None:
    """Raise `ConfigError` if the `preset` has the file of another method than `method`: the run
    would have the credit, sampler and loss of one method and the name of the other.
    """
    for name in map(str.strip, preset.split(",")):
        files = {**shipped()["methods"], **shipped()["records"]}
        if (path := files.get(shipped_name(name))) is not None:
            method_of_file = load_document(path)[0]["settings"]["algorithm"]["method"]
            others = f"for another method, name it in --preset, or leave {name} out there"
            own = f"{method_of_file}, whose credit, sampler and loss the preset sets; {others}"
            require(method == method_of_file, "method", method, own)


def shipped_name(name: str) -> str:
    """The name of a shipped file: of `RECORD`, that of the newest record."""
    return max(shipped()["records"]) if name == RECORD else name


def _piece(name: str, schema: type) -> Piece:
    name = shipped_name(name)
    if name in PRESETS:
        return Piece(name, "built-in", SettingsFile(PRESETS[name], {}, {}))
    kind = next((kind for kind, files in shipped().items() if name in files), "file")
    path = shipped().get(kind, {}).get(name, Path(name))
    if path.suffix not in (".yaml", ".yml"):
        known = [*PRESETS, RECORD, *(stem for files in shipped().values() for stem in files)]
        raise ConfigError(f"{unknown(name, known, 'preset')}; or a .yaml file")
    read = _read if kind == "file" else _read_shipped
    return Piece(name, kind, read(path, schema))


def _read(path: Path, schema: type) -> SettingsFile:
    require_format(path, load_document(path)[0])
    return read_settings(path, schema)


_read_shipped = cache(_read)
"""Shipped files do not change."""


@dataclass(frozen=True)
class Published:
    """A setting with its value here (`ours`), the published `value` (None: not published), its
    source (`where`), and the reason for a difference (`why`; "" if the values are the same).
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
    users = {piece.name for piece in combined.pieces if piece.kind not in KINDS}
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
