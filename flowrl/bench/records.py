"""Finished runs as lines of a file, and the hashes that keep different runs apart."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import flowrl
from flowrl.errors import ConfigError
from flowrl.training.config import RunConfig

FORMAT = 1
PACKAGE = Path(flowrl.__file__).parent
UNSEEN = (
    "bench", "plots", "commands", "testing", "diagnostics", "course", "prompts", "display.py", "cli.py", "__main__.py",
    "models.py", "rewards", "training/compare.py", "training/pretrain.py", "training/results.py", "training/checkpoint.py",
    "training/run.py", "training/rows.py", "training/guards.py", "training/memory.py", "training/failure.py",
    "training/beside.py", "training/plan.py", "training/card.py", "training/tracking.py", "training/pictures.py",
    "training/showcase.py",
    "worlds/shapes/quality.py", "policies/adapters.py", "policies/architectures.py", "policies/compiled.py", "policies/family.py",
    "policies/flux.py", "policies/load.py", "policies/options.py", "policies/pipeline.py", "policies/prompts.py",
    "policies/sd3.py", "policies/shared.py", "policies/tiny.py",
)  # fmt: skip
"""Rooms and modules that no run of the built-in worlds passes through: they may change without making the runs void."""
SEEN_ANYWAY = ("bench/measure.py", "bench/faults.py", "rewards/noisy.py")
RULES = ("bench/claims.py", "bench/catalogue.py", "bench/verdicts.py", "bench/evidence.py", "bench/statistics.py")


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def unseen(path: str) -> bool:
    """Whether a file (relative to the package) or the room it lies in is one of `UNSEEN`."""
    return any(path == name or path.startswith(f"{name}/") for name in UNSEEN)


@cache
def code_hash() -> str:
    """Of all sources and built-in weights that a run's numbers depend on."""
    files = [p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".safetensors") and "__pycache__" not in p.parts]
    chosen = [p for p in files if not unseen(p.relative_to(PACKAGE).as_posix())]
    return _digest([*chosen, *(PACKAGE / name for name in SEEN_ANYWAY)])


@cache
def rules_hash() -> str:
    """Of the claims, their verdict rules and the statistics; a line says under which ones it was made."""
    return _digest(PACKAGE / name for name in RULES)


@cache
def config_hash(config: RunConfig) -> str:
    """Of every setting of a run, the seed included, and of the file that a rule of the user's own stands in.

    Settings at their default are left out, so that a setting added later does not rename old runs.
    """
    usual = RunConfig().as_dict()
    values = json.dumps({name: value for name, value in config.as_dict().items() if value != usual[name]}, sort_keys=True)
    head = config.credit.partition("(")[0].rpartition(":")[0]
    own = hashlib.sha256(Path(head).read_bytes()).hexdigest() if head.endswith(".py") and Path(head).is_file() else ""
    return hashlib.sha256(f"{values}{own}".encode()).hexdigest()[:16]


@cache
def provenance() -> dict[str, Any]:
    """Where and with what a line was made: commit, versions, hardware."""
    packages = ("torch", "scipy", "diffusers", "flowrl-lab")
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


def make_line(config: RunConfig, found: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The line of a finished run."""
    return {
        "format": FORMAT,
        "id": config_hash(config),
        "code": code_hash(),
        "rules": rules_hash(),
        "seed": config.seed,
        "command": command,
        **provenance(),
        "config": config.as_dict(),
        **found,
    }


@dataclass(frozen=True)
class Ledger:
    """The results file: one JSON line per run, appended and flushed as runs finish."""

    path: Path

    def read(self, allowed: Mapping[str, Any] | None = None, any_code: bool = False) -> dict[str, dict[str, Any]]:
        """Lines by id. Raises `ConfigError` for lines of other code, of settings outside `allowed` (None: any), or changed lines.

        With `any_code`, lines of older code may be read (to judge them, or to make one again), if all are of the same.
        A half-written last line (the machine was switched off) is ignored, and will be made again.
        """
        found: dict[str, dict[str, Any]] = {}
        texts = self.path.read_text().splitlines() if self.path.exists() else []
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                if number == len(texts):
                    break
                raise ConfigError(f"results: line {number} of {self.path} is not JSON: {error}") from error
            code = next(iter(found.values()), line).get("code") if any_code else code_hash()
            self._require_same(line, number, allowed, code)
            found[line["id"]] = line
        return found

    def _require_same(self, line: dict[str, Any], number: int, allowed: Mapping[str, Any] | None, code: str | None) -> None:
        where = f"results: line {number} of {self.path}"
        if line.get("format") != FORMAT:
            raise ConfigError(f"{where} has format {line.get('format')!r}; allowed: {FORMAT}")
        if line["code"] != code:
            raise ConfigError(
                f"{where} was made by other code ({line['code']}, commit {line['commit']}; expected {code}): results of "
                f"different code are not mixed; choose another --out, go back to that commit, or only --judge the file"
            )
        if config_hash(RunConfig.from_dict(line["config"])) != line["id"]:
            raise ConfigError(
                f"{where} does not hold the settings that its id {line['id']} was made from (or its rule's file changed)"
            )
        if allowed is not None and line["id"] not in allowed:
            raise ConfigError(
                f"{where} has settings that are not part of this suite ({line['config']['method']}, seed {line['seed']}): "
                f"results of different settings are not mixed; choose another --out"
            )

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line and force it to the disk; a torn last line is completed by a line break first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
        if torn:
            kept = self.path.read_bytes()
            self.path.write_bytes(kept[: kept.rfind(b"\n") + 1])
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
