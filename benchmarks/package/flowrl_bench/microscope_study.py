"""The microscope's study: sessions in parallel, one line of the results file per cell; existing
cells are not made again.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.core.options import Workers
from flowrl.io import file_lock
from flowrl.parts.registry import files_of
from flowrl.parts.specs import parse_spec
from flowrl.reading import is_kind
from flowrl.workers import Worker, run_jobs
from flowrl_bench import ceilings
from flowrl_bench.digest import (
    PACKAGES,
    RENAMED,
    code_digest,
    golden_run,
    same_golden,
)
from flowrl_bench.microscope import FORMS, NOISES, Cell, Size, cells, session
from flowrl_bench.results_file import ResultsFile, hardware, provenance, require_same_code

FORMAT = 1
Line = dict[str, Any]
Session = tuple[str, int, str]
"""(world, look, method): cells that share a training run."""


@dataclass(frozen=True)
class Study:
    """All cells of `sizes` (by world) for `rules`, and the results file they go to."""

    sizes: Mapping[str, Size]
    rules: Mapping[str, str]
    path: Path
    command: str = "flowrl bench microscope"

    def settings(self, world: str) -> str:
        """A digest of all settings but the look that determine a world's numbers: the size, and the
        rules with the user's files.
        """
        size = {name: value for name, value in asdict(self.sizes[world]).items() if name != "looks"}
        files = [
            path.read_bytes()
            for spec in self.rules.values()
            for path in files_of("credit", parse_spec(spec, "credit"), trust=True)
            if not path.is_relative_to(PACKAGES["flowrl_bench"])
        ]
        digests = [hashlib.sha256(data).hexdigest() for data in files]
        text = json.dumps(
            [
                size,
                {name: RENAMED.get(spec, spec) for name, spec in self.rules.items()},
                digests,
                FORMS,
                NOISES,
                ceilings.LEVELS,
                ceilings.FOLDS,
                ceilings.DRAWS,
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def sessions(self) -> dict[Session, list[Cell]]:
        """All cells by session, world by world, one look before the next."""
        by_session: dict[Session, list[Cell]] = {}
        for world, size in self.sizes.items():
            for look in range(size.looks):
                for cell in cells(world, look):
                    by_session.setdefault((world, look, cell.method), []).append(cell)
        return by_session

    def read(self) -> dict[str, Line]:
        """Lines by the key of their cell, including looks beyond those of this study.

        Raises `ConfigError` for a line that the microscope did not write, of other settings, or of
        code with other numbers (by the golden run); a torn last line is ignored.
        """
        lines: dict[str, Line] = {}
        settings: dict[str, str] = {}
        for number, line in enumerate(read_lines(self.path), 1):
            world, location = line["cell"]["world"], f"out: line {number} of {self.path}"
            if world not in self.sizes:
                continue
            settings.setdefault(world, self.settings(world))
            if line["settings"] != settings[world]:
                raise ConfigError(
                    f"{location} was measured with different rules or sizes: choose another --out"
                )
            if not same_golden(line["golden"], golden_run()):
                raise ConfigError(
                    f"{location} was made by code or libraries that give different numbers: choose"
                    " another --out"
                )
            lines[Cell(**line["cell"]).key] = line
        return lines

    def execute(
        self,
        workers: Workers = 0,
        progress: Callable[[int, int, Line], None] = lambda done, total, line: None,
    ) -> bool:
        """Compute the missing cells; False if Ctrl-C paused it. `progress(done, total, line)`
        counts cells.
        """
        with file_lock(self.path, self.command):
            done, total = self.read(), sum(map(len, self.sessions().values()))
            missing = {
                key: [cell for cell in selected if cell.key not in done]
                for key, selected in self.sessions().items()
            }
            jobs = {
                key: (key[2], selected, self.sizes[key[0]], dict(self.rules), code_digest())
                for key, selected in missing.items()
                if selected
            }
            if not jobs:
                return True
            made = {
                "code": code_digest(),
                "golden": list(golden_run()),
                **provenance(),
                "command": self.command,
            }
            stamps = {
                world: {"format": FORMAT, "settings": self.settings(world), **made}
                for world in self.sizes
            }
            count = total - sum(map(len, missing.values()))

            def received(key: Session, line: Line) -> None:
                nonlocal count
                ResultsFile(self.path).append({**stamps[key[0]], **line})
                count += 1
                progress(count, total, line)

            return run_jobs(
                _session,
                jobs,
                workers,
                finished=_nothing,
                received=received,
                describe=lambda key: f"the cells {key}",
            )


def _nothing(key: Any, result: Any) -> None:
    """Lines arrive as messages."""


def _session(
    worker: Worker,
    method: str,
    selected: list[Cell],
    size: Size,
    rules: Mapping[str, str],
    code: str,
) -> None:
    require_same_code(code)
    sent = [line["cell"] for line in worker.sent]
    selected = [cell for cell in selected if asdict(cell) not in sent]
    for line in session(method, selected, size, rules) if selected else ():
        worker.send({**line, "hardware": hardware()})
        if worker.stopped():
            return


ENTRIES: dict[str, Any] = {
    "cell": dict[str, Any],
    "settings": str,
    "golden": list[float],
    "code": str,
    "commit": str,
    "command": str,
    "hardware": str,
    "versions": dict[str, str],
    "seconds": float,
    "rows": list[dict[str, Any]],
}
"""The entries of a line."""


def read_lines(path: Path) -> list[Line]:
    """The lines of a results file and its archive, in order; none if there is neither. Raises `ConfigError` for a
    file of another kind.
    """
    if path.is_dir():
        raise ConfigError(f"out = {str(path)!r} is not allowed: a folder; allowed: a file")
    lines, texts = list[Line](), ResultsFile(path).texts()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(texts) and (not text or text.startswith(b'{"format": ')):
                break  # nothing, or torn
            raise ConfigError(f"out: line {number} of {path} is not JSON: {error}") from error
        valid = isinstance(line, dict) and line.get("format") == FORMAT
        if not valid or not all(
            name in line and is_kind(line[name], kind) for name, kind in ENTRIES.items()
        ):
            raise ConfigError(
                f"out: line {number} of {path} is not a cell of `flowrl bench microscope`; choose"
                " another --out"
            )
        lines.append(line)
    return lines


def check_out(path: Path) -> None:
    """Raise `ConfigError` unless `path` is new or a results file of the microscope."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"out = {str(path)!r} is not allowed; allowed: a file NAME.jsonl")
    read_lines(path)
