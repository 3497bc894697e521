"""What is known of a base model without loading it: its name on the Hub, its pipeline and its
licence.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from flowrl.core.errors import ConfigError
from flowrl.run.models.hub import family_of
from flowrl.run.reading import read_json, read_text

HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
LICENCE = ("license", "license_name", "license_link")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")


@dataclass(frozen=True)
class BaseModel:
    """A base model.

    Args:
        name: its name on the Hub; "" for a folder that does not record it.
        pipeline: the class of its pipeline; "" if it is not on this machine.
        licence: the entries of its card about its licence, such as "license" and "license_name".
        folder: the folder on this machine; None for a name that was not downloaded, or a single
            file.
    """

    name: str
    pipeline: str = ""
    licence: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def licence_name(self) -> str:
        """The licence on one line; "" if the card has none."""
        return self.licence.get("license_name") or self.licence.get("license", "")


def describe_base(model: str, name: str = "", original: str = "") -> BaseModel:
    """The base model of a run, without loading it.

    Args:
        model: a folder; a name on the Hub, which is looked up in the local cache only; or a file
            with a transformer.
        name: its name on the Hub. Without it, that in model_index.json or in the header of
            README.md.
        original: of a file, the model whose other parts are used; its pipeline is the file's.
    """
    folder = _local(model)
    if folder is None and original:
        return BaseModel(name, describe_base(original).pipeline)
    index, card = ({}, {}) if folder is None else (_index(folder), _card(folder))
    parent = card.get("base_model")
    stated = parent[0] if isinstance(parent, list) and parent else parent
    recorded = name or _hub_name(str(index.get("_name_or_path", ""))) or _hub_name(model)
    licence = {key: str(card[key]) for key in LICENCE if card.get(key)}
    name = recorded or _hub_name(str(stated or ""))
    return BaseModel(name, str(index.get("_class_name", "")), licence, folder)


def pipeline_class(model: str, base: BaseModel) -> Any:
    """The class of the pipeline of `base`, described from `model`. Raises `ConfigError` if it is
    not on this machine or not supported.
    """
    if not base.pipeline:
        raise ConfigError(
            f"model: {model} has no readable model_index.json on this machine; allowed with"
            " --model: the folder of a pipeline, or the name of one that was downloaded"
        )
    own = import_module(type(family_of(base.pipeline)).__module__)
    return getattr(import_module("diffusers"), base.pipeline, None) or getattr(own, base.pipeline)


def _local(model: str) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    if not HUB_NAME.fullmatch(model):
        return None
    found = import_module("huggingface_hub").try_to_load_from_cache(model, "model_index.json")
    return Path(found).parent if isinstance(found, str) else None


def _index(folder: Path) -> dict[str, Any]:
    path = folder / "model_index.json"
    try:
        return read_json(path, dict[str, Any]) if path.is_file() else {}
    except ConfigError:
        return {}


def _card(folder: Path) -> dict[str, Any]:
    """The YAML header of README.md."""
    path = folder / "README.md"
    try:
        found = re.match(r"---\n(.*?)\n---", read_text(path), re.S) if path.is_file() else None
        values = yaml.safe_load(found[1]) if found else {}
    except (ConfigError, yaml.YAMLError):
        values = {}
    return values if isinstance(values, dict) else {}


def _hub_name(text: str) -> str:
    """`text` if it is a name on the Hub, or the name that a folder in the Hub's cache is for."""
    if cached := CACHED.search(text):
        return f"{cached[1]}/{cached[2]}"
    return text if HUB_NAME.fullmatch(text) and not Path(text).exists() else ""
