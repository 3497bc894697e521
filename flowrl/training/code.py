"""What a run's own parts were made of: the hashes of their files, recorded at the start and compared when the run goes on."""

import hashlib
import json
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.io import write_json
from flowrl.registry import files_of
from flowrl.training.config import RunConfig
from flowrl.training.trust import OWN_PACKAGES, parts_in

NAME = "code.json"


def code_of(config: RunConfig) -> dict[str, str]:
    """SHA-256 by "setting: part" for parts in files, in modules and of plug-ins; flowrl's own have none.

    What these files import or read is not covered.
    """
    own = {Path(__file__).resolve().parents[1]}
    found: dict[str, str] = {}
    for setting, kind, spec in parts_in(config.flat()):
        if spec.name.partition(":")[0].partition(".")[0] in OWN_PACKAGES:
            continue
        files = [path.resolve() for path in files_of(kind, spec)]
        data = [path.read_bytes() for path in files if path.is_file() and own.isdisjoint(path.parents)]
        if data:
            found[f"{setting}: {spec.name}"] = hashlib.sha256(b"".join(data)).hexdigest()
    return found


def record_code(folder: Path, config: RunConfig) -> None:
    """Write code.json to the run's folder, if the run has parts of that kind."""
    found = code_of(config)
    if found or (folder / NAME).exists():
        write_json(folder / NAME, found)


def check_code(folder: Path, config: RunConfig, changed_code: bool) -> None:
    """Raise `ConfigError` that names the parts whose code is not as it was; with `changed_code` record the new code instead."""
    try:
        recorded = json.loads((folder / NAME).read_text())
        recorded = recorded if isinstance(recorded, dict) else {}
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / NAME} cannot be read: {error}") from error
    found = code_of(config)
    changed = [name for name in recorded if found.get(name) != recorded[name]]
    if changed and not changed_code:
        raise ConfigError(
            f"{folder}: code has changed since the run was started: {'; '.join(changed)}. Bring it back, or go on with the new "
            "code: add --changed-code (changed_code=True in Python)"
        )
    record_code(folder, config)
