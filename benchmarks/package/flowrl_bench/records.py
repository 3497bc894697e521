"""Finished runs as lines of a file, and the hashes that keep different runs apart."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import flowrl
from flowrl.errors import ConfigError, FlowrlError
from flowrl.training.config import RunConfig
from flowrl_bench.digest import sources

FORMAT = 1
PACKAGE = Path(flowrl.__file__).parent
UNSEEN = (
    "bench", "plots", "commands", "testing", "diagnostics", "course", "prompts", "display.py", "cli.py", "__main__.py",
    "models.py", "rewards", "training/compare.py", "training/pretrain.py", "training/results.py", "training/checkpoint.py",
    "training/run.py", "training/rows.py", "training/guards.py", "training/memory.py", "training/failure.py",
    "training/beside.py", "training/plan.py", "training/card.py", "training/tracking.py", "training/pictures.py",
    "training/showcase.py",
    "worlds/shapes/quality.py", "policies/architectures.py", "policies/compiled.py", "policies/family.py",
    "policies/flux.py", "policies/load.py", "policies/options.py", "policies/pipeline.py", "policies/prompts.py",
    "policies/sd3.py", "policies/shared.py", "policies/tiny.py",
)  # fmt: skip
"""Rooms and modules that no run of the built-in worlds passes through: they may change without making the runs void."""
SEEN_ANYWAY = ("bench/measure.py", "bench/faults.py", "rewards/noisy.py")
RULES = ("bench/claims.py", "bench/catalogue.py", "bench/verdicts.py", "bench/evidence.py", "bench/statistics.py")


ENTRIES: dict[str, type | tuple[type, ...]] = {
    "id": str, "code": str, "rules": str, "commit": str, "command": str, "hardware": str, "seed": int, "versions": dict,
    "config": dict, "curve": list, "totals": dict, "phases": dict,
}  # fmt: skip
"""What every line holds, besides `gains`, which may be null."""


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def unseen(path: str) -> bool:
    """Whether a file (relative to the package) or the room it lies in is one of `UNSEEN`."""
    return any(path == name or path.startswith(f"{name}/") for name in UNSEEN)


def code_hash_now() -> str:
    """Of all sources and built-in weights that a run's numbers depend on, as they lie on the disk now."""
    files = [p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".safetensors") and "__pycache__" not in p.parts]
    chosen = [p for p in files if not unseen(p.relative_to(PACKAGE).as_posix())]
    return _digest([*chosen, *(PACKAGE / name for name in SEEN_ANYWAY)])


@cache
def code_hash() -> str:
    """`code_hash_now` at the first call in this process."""
    return code_hash_now()


@cache
def rules_hash() -> str:
    """Of the claims, their verdict rules and the statistics; a line says under which ones it was made."""
    return _digest(PACKAGE / name for name in RULES)


def config_hash(config: RunConfig) -> str:
    """Of every setting of a run, the seed included, and of the files that parts of the user's own stand in, as they are now.

    Settings at their default are left out, so that a setting added later does not rename old runs. `flowrl_bench.digest` says
    which files count, and which do not: what the user's files import.
    """
    own = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in _own(config))
    return hashlib.sha256(f"{_settings(config)}{own}".encode()).hexdigest()[:16]


def _own(config: RunConfig) -> list[Path]:
    """The files of a run's parts that are not in the code's hash."""
    return [path for path in sources(config) if not _covered(path.resolve())]


def _covered(path: Path) -> bool:
    if not path.is_relative_to(PACKAGE.resolve()):
        return False
    name = path.relative_to(PACKAGE.resolve()).as_posix()
    return name in SEEN_ANYWAY or not unseen(name)


@cache
def _settings(config: RunConfig) -> str:
    usual = RunConfig().as_dict()
    return json.dumps({name: value for name, value in config.as_dict().items() if value != usual[name]}, sort_keys=True)


@cache
def provenance() -> dict[str, Any]:
    """Where and with what a line was made: commit, versions, hardware."""
    packages = ("torch", "scipy", "diffusers", "peft", "flowrl-lab")
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "hardware": f"one core of {os.cpu_count()} ({_processor()})",
    }  # fmt: skip


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + ("+changes" if commit and git("status", "--porcelain", "--", str(PACKAGE)) else "") or "unknown"
    except OSError:
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.machine()


def stamp() -> dict[str, Any]:
    """By what code, under which rules and where a line is made: taken before the run."""
    return {"code": code_hash(), "rules": rules_hash(), **provenance()}


def require_unchanged(config: RunConfig, key: str, code: str) -> None:
    """Raises `ConfigError` where the files of the user's own, or this package's, are no longer those that a run began with."""
    if config_hash(config) != key:
        names = ", ".join(map(str, _own(config))) or "a file of its parts"
        changed = f"{names} changed or went away"
    elif code_hash_now() != code:
        changed = f"the code in {PACKAGE} changed"
    else:
        return
    raise ConfigError(
        f"{changed} while the run {config.algorithm.method} (seed {config.seed}, {config.environment.world}) was made: "
        f"nobody can say which version "
        f"made it, so it was not kept; start again"
    )


def make_line(
    config: RunConfig, found: Mapping[str, Any], command: str, key: str = "", made: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The line of a finished run; `key`, `made`: its id and `stamp` from before the run, by default today's."""
    return {
        "format": FORMAT,
        "id": key or config_hash(config),
        "seed": config.seed,
        "command": command,
        **(made or stamp()),
        "config": config.as_dict(),
        **found,
    }


@dataclass(frozen=True)
class Ledger:
    """The results file: one JSON line per run, appended and flushed as runs finish. Appending locks it (`flowrl_bench.lock`)."""

    path: Path

    def read(self, allowed: Mapping[str, Any] | None = None, any_code: bool = False) -> dict[str, dict[str, Any]]:
        """Lines by id. Raises `ConfigError` for lines of other code, of settings outside `allowed` (None: any), or changed lines.

        With `any_code`, lines of older code may be read (to judge them, or to make one again), if all are of the same.
        A half-written last line (the machine was switched off) is ignored, and will be made again.
        """
        found: dict[str, dict[str, Any]] = {}
        texts = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        for number, text in enumerate(texts, 1):
            line, error = _parsed(text)
            if number == len(texts) and error:
                break  # what follows the last line break is nothing, or torn
            where = f"results: line {number} of {self.path}"
            if error:
                raise ConfigError(f"{where} is not JSON: {error}")
            _require_whole(line, where)
            code = next(iter(found.values()), line)["code"] if any_code else code_hash()
            _require_same(line, where, allowed, code)
            found[line["id"]] = line
        return found

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line and force it to the disk; a torn last line is cut off first, and nothing of one that fails is left.

        Raises `ConfigError` where the file cannot be written (a full disk): the lines before are as they were.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        end = -1
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
            try:
                end = self._mended(handle)
                rest = (json.dumps(line) + "\n").encode()
                while rest:
                    rest = rest[os.write(handle, rest) :]
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            if end >= 0:
                with suppress(OSError):
                    os.truncate(self.path, end)
            raise ConfigError(f"results: {self.path} cannot be written: {error.strerror}; the lines before are whole") from error

    def _mended(self, handle: int) -> int:
        """Where the next line begins: a whole last line gets its line break, a torn one is cut off."""
        tail = self.path.read_bytes().rpartition(b"\n")[2]
        if tail and _parsed(tail)[1]:
            os.truncate(handle, os.fstat(handle).st_size - len(tail))
        elif tail:
            os.write(handle, b"\n")
        return os.fstat(handle).st_size


def _parsed(text: bytes) -> tuple[Any, str]:
    """A line's value, or what is wrong with it."""
    try:
        return json.loads(text), ""
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        return None, str(error)


def _require_whole(line: Any, where: str) -> None:
    """A line of this format with every entry."""
    if not isinstance(line, dict):
        raise ConfigError(f"{where} is no run but {str(line)[:40]!r}; allowed: a JSON object as `flowrl bench` writes it")
    if line.get("format") != FORMAT:
        raise ConfigError(f"{where} has format {line.get('format')!r}; allowed: {FORMAT}")
    missing = [name for name in ENTRIES if not isinstance(line.get(name), ENTRIES[name])]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; allowed: a line as `flowrl bench` writes it")


def _require_same(line: dict[str, Any], where: str, allowed: Mapping[str, Any] | None, code: str) -> None:
    """Of this code, of the settings that its id says, and of this suite."""
    if line["code"] != code:
        raise ConfigError(
            f"{where} was made by other code ({line['code']}, commit {line['commit']}; expected {code}): results of "
            f"different code are not mixed; choose another --out, go back to that commit, or only --judge the file"
        )
    try:
        key = config_hash(RunConfig.from_dict(line["config"]))
    except (FlowrlError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} has settings that cannot be read: {error}") from error
    if key != line["id"]:
        raise ConfigError(
            f"{where} does not hold the settings that its id {line['id']} was made from (or a file of its parts changed)"
        )
    if allowed is not None and key not in allowed:
        raise ConfigError(
            f"{where} has settings that are not part of this suite ({line['config'].get('method')}, seed {line['seed']}): "
            f"results of different settings are not mixed; choose another --out"
        )
