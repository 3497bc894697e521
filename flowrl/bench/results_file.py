"""Results: one JSON line per run. A file does not mix code with different numbers."""

import json
import lzma
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowrl.bench.digest import (
    PACKAGE,
    code_digest,
    code_digest_now,
    config_id,
    golden_run,
    own_files,
    rules_digest,
    same_golden,
)
from flowrl.core.errors import ConfigError, FlowrlError, require
from flowrl.run.config import RunConfig
from flowrl.run.parts.plugins import versions
from flowrl.run.parts.trust import require_trust
from flowrl.run.reading import is_kind, parse_json, read_bytes, reading
from flowrl.run.workers import usable_cores

FORMAT = 3
"""The format of a line."""
ENTRIES: dict[str, Any] = {
    "id": str,
    "code": str,
    "golden": list[float],
    "rules": str,
    "commit": str,
    "command": str,
    "hardware": str,
    "seed": int,
    "versions": dict[str, str],
    "config": dict[str, Any],
    "curve": list[list[float | None]],
    "totals": dict[str, float],
    "phases": dict[str, float],
}
"""The entries of a line, besides `gains`, which may be null."""
Lines = Mapping[str, Mapping[str, Any]]


@cache
def provenance() -> dict[str, Any]:
    """Commit, versions and hardware of a line."""
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version(), "scipy": version("scipy"), **versions()},
        "hardware": hardware(),
    }


@cache
def hardware() -> str:
    """The processor of this machine."""
    return f"one core of {usable_cores()} ({_processor()})"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(PACKAGE), *words], capture_output=True, text=True
        ).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return (
            commit
            + ("+changes" if commit and git("status", "--porcelain", "--", str(PACKAGE)) else "")
            or "unknown"
        )
    except OSError:
        return "unknown"


def _processor() -> str:
    """The processor's name, with family and model if the system has them: rounding may differ
    between models of one name.
    """
    try:
        pairs = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        return platform.machine()
    entries = {name.strip(): value.strip() for name, _, value in reversed(pairs)}
    kind = [
        f"{word} {entries[entry]}"
        for entry, word in (("cpu family", "family"), ("model", "model"))
        if entry in entries
    ]
    return ", ".join([entries.get("model name", platform.machine()), *kind])


def stamp() -> dict[str, Any]:
    """Digests of the code and the rules, and the provenance; taken before the run."""
    return {
        "code": code_digest(),
        "golden": list(golden_run()),
        "rules": rules_digest(),
        **provenance(),
    }


def require_same_code(code: str) -> None:
    """Raise `ConfigError` if this process, perhaps on another machine, has code of another digest
    than `code`, that of the process that started the study.
    """
    if code_digest() != code:
        raise ConfigError(
            f"the code on {platform.node()} in {PACKAGE} differs from that of the"
            " process that started the study: install the same commit on all workers"
        )


def run_in_words(config: RunConfig) -> str:
    """A run in messages."""
    return f"{config.algorithm.method} (seed {config.seed}, {config.environment.world})"


def require_unchanged(config: RunConfig, key: str, code: str) -> None:
    """Raise `ConfigError` if the user's files or the project's code have changed since the
    beginning of a run.
    """
    if config_id(config) != key:
        names = ", ".join(map(str, own_files(config))) or "a file of its parts"
        changed = f"{names} changed or was deleted"
    elif code_digest_now() != code:
        changed = f"the code in {PACKAGE} changed"
    else:
        return
    raise ConfigError(
        f"{changed} during the run {run_in_words(config)}, so its version is unknown. The run was"
        " discarded: start again"
    )


def make_line(
    config: RunConfig,
    measured: Mapping[str, Any],
    command: str,
    key: str = "",
    made: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The line of a run that has finished on this machine; `key`, `made`: its id and `stamp` from
    before the run, by default the current ones.
    """
    head = {
        "format": FORMAT,
        "id": key or config_id(config),
        "seed": config.seed,
        "command": command,
    }
    made = {**(made or stamp()), "hardware": hardware()}
    return {**head, **made, "config": config.as_dict(), **measured}


@dataclass(frozen=True)
class ResultsFile:
    """One JSON line per run, appended and flushed as runs finish. Writers hold its lock
    (`flowrl.run.io.file_lock`). Lines in PATH.xz, if it exists, come before those in PATH.
    """

    path: Path
    trust: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)
    """Settings of an arm or a world that the user has named, which lines may contain. With `trust`
    lines may contain any code.
    """

    def __post_init__(self) -> None:
        allowed = "its name without .xz: lines of the archive are read before those of the file"
        require(self.path.suffix != ".xz", "out", str(self.path), allowed)

    def read(
        self, allowed: Mapping[str, Any] | None = None, any_code: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Lines by id. Raises `ConfigError` for lines of code with other numbers (by the golden
        run), of settings outside `allowed` (None: any), or changed lines.

        With `any_code`, lines of such code may be read (to judge them, or to repeat one) if all
        have the same golden run. A half-written last line (after a power cut) is ignored; its run
        is made again.
        """
        lines: dict[str, dict[str, Any]] = {}
        with reading(self.path):
            texts = self.texts()
        for number, text in enumerate(texts, 1):
            line, error = _parsed(text)
            if number == len(texts) and error:
                break  # what follows the last line break is nothing, or torn
            location = f"results: line {number} of {self.path}"
            if error:
                raise ConfigError(f"{location} is not JSON: {error}")
            _require_whole(line, location)
            first = next(iter(lines.values()), line)
            _require_same_numbers(line, location, first["golden"] if any_code else golden_run())
            self._require_settings(line, location, allowed)
            lines[line["id"]] = line
        return lines

    def settings(self, line: Mapping[str, Any]) -> RunConfig:
        """The settings of a line. Raises `ConfigError` for those that do not exist, and for code
        that is not trusted.
        """
        config = RunConfig.from_dict(line["config"], trust=True)
        kept = {name: v for name, v in config.typed().items() if v not in self.own.values()}
        require_trust(kept, self.path, self.trust)
        return config

    def _require_settings(
        self, line: Mapping[str, Any], location: str, allowed: Mapping[str, Any] | None
    ) -> None:
        """Raise `ConfigError` unless its settings are those of its id and belong to this suite."""
        try:
            key = config_id(self.settings(line))
        except (FlowrlError, TypeError, ValueError) as error:
            raise ConfigError(f"{location} has settings that cannot be read: {error}") from error
        if key != line["id"]:
            raise ConfigError(
                f"{location} does not contain the settings of its id {line['id']} (or a file of its"
                " parts changed)"
            )
        if allowed is not None and key not in allowed:
            method = line["config"].get("algorithm", {}).get("method")
            raise ConfigError(
                f"{location} has settings that are not part of this suite ({method}, seed"
                f" {line['seed']}): results of different settings are not mixed; choose another"
                " --out"
            )

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line and force it to the disk; a torn last line is cut off first, and a failed
        write leaves nothing.

        Raises `ConfigError` if the file cannot be written (a full disk): the lines before are as
        they were.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        end = -1
        try:
            handle = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644
            )
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
            raise ConfigError(
                f"results: {self.path} cannot be written: {error.strerror}; earlier lines"
                " are complete"
            ) from error

    def _mended(self, handle: int) -> int:
        """The position of the next line, after completing the last line's break or cutting off a
        torn line.
        """
        tail = read_bytes(self.path).rpartition(b"\n")[2]
        if tail and _parsed(tail)[1]:
            os.truncate(handle, os.fstat(handle).st_size - len(tail))
        elif tail:
            os.write(handle, b"\n")
        return os.fstat(handle).st_size

    def unchecked(self) -> list[dict[str, Any]]:
        """The lines that are JSON objects, whatever they contain (`read` reports errors in the
        others).
        """
        with reading(self.path):
            texts = self.texts()
        return [line for line in (_parsed(text)[0] for text in texts) if isinstance(line, dict)]

    def texts(self) -> list[bytes]:
        """Lines of the archive PATH.xz (published runs, never written here), then of the file."""
        archive = self.path.with_name(f"{self.path.name}.xz")
        older = lzma.decompress(read_bytes(archive)) if archive.exists() else b""
        return (older + (read_bytes(self.path) if os.path.lexists(self.path) else b"")).split(b"\n")


def _parsed(text: bytes) -> tuple[Any, str]:
    """A line's value, or the error in it."""
    try:
        return parse_json(text), ""
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        return None, str(error)


def _require_whole(line: Any, location: str) -> None:
    """Raise `ConfigError` unless it is a line of this format with every entry."""
    if not isinstance(line, dict):
        raise ConfigError(
            f"{location} is not a run: {str(line)[:40]!r}; allowed: a JSON object as written by"
            " `flowrl bench`"
        )
    if line.get("format") != FORMAT:
        raise ConfigError(f"{location} has format {line.get('format')!r:.60}; allowed: {FORMAT}")
    missing = [
        name for name, kind in ENTRIES.items() if name not in line or not is_kind(line[name], kind)
    ]
    if missing:
        raise ConfigError(
            f"{location} lacks {', '.join(missing)}; allowed: a line as written by `flowrl bench`"
        )


def _require_same_numbers(line: Mapping[str, Any], location: str, golden: Any) -> None:
    """Raise `ConfigError` unless the line's golden run is the same: code may change between runs as
    long as the numbers do not.
    """
    if not same_golden(line["golden"], golden):
        versions = ", ".join(f"{name} {number}" for name, number in line["versions"].items())
        raise ConfigError(
            f"{location} was made by code or libraries that give different numbers in the golden"
            f" run ({line['code']}, commit {line['commit']}, {versions}): such results are not"
            " mixed; choose another --out, or return to that commit"
        )
