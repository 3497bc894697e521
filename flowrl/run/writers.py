"""What a run writes about itself while it goes on: its tracker, images, page and table, and what a
user adds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowrl.core.errors import PartError, is_disk_error, part_call
from flowrl.run.config import RunConfig
from flowrl.run.evaluation import Evaluation
from flowrl.run.strips import Strips
from flowrl.run.table import Table
from flowrl.run.trackers import Tracker, chosen_tracker

SHARE = 0.02
"""Largest fraction of a run's time for its page."""


class Writer(Protocol):
    """Writes about a run, in the main process."""

    def row(self, row: Mapping[str, Any], evaluation: Evaluation | None) -> None:
        """Called after `row` was appended to metrics.jsonl, with its evaluation if it has one."""
        ...

    def finish(self) -> None:
        """Called at the end of a run, at a pause, and after an error that ends the run."""
        ...


class Page:
    """Writes report.html (`flowrl.run.report.run_page`): at the first row of a start or resume, at
    evaluations, unless it has taken more than `SHARE` of the time since the start, and at the end.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._began, self._seconds = folder, time.perf_counter(), 0.0
        self._written = False

    def row(self, row: Mapping[str, Any], evaluation: Evaluation | None) -> None:
        """Write the page of the run in progress, if it is due."""
        affordable = self._seconds <= SHARE * (time.perf_counter() - self._began)
        if not self._written or (evaluation is not None and affordable):
            self._write(running=True)

    def finish(self) -> None:
        """Write the page of the run as it has ended or paused."""
        self._write(running=False)

    def _write(self, running: bool) -> None:
        from flowrl.run.report.run_page import PAGE, run_page, write_page

        started = time.perf_counter()
        write_page(run_page([self.folder], [self.folder] * running), self.folder / PAGE)
        self._seconds += time.perf_counter() - started
        self._written = True


class Writers:
    """The writers of a run: the built-in ones, then those of the user.

    If the page or a writer of the user raises an exception, the run continues with one warning per
    writer, unless the setting `strict` is set; a full disk ends the run.

    Args:
        config: the run.
        folder: its folder.
        rows: its rows so far.
        page: whether it has a page.
        others: the user's writers.
        warn: called with the kind of a warning and its text.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        rows: Sequence[Mapping[str, Any]],
        page: bool,
        others: Sequence[Writer],
        warn: Callable[[str, str], None],
    ) -> None:
        self.strict, self.warn, self._warned = config.logging.strict, warn, set[int]()
        own: list[Writer] = [Table(folder, rows)]
        if chosen_tracker(config) != "none":
            own.append(Tracker(config, folder, rows))
        if page or config.policy.model:
            own.append(Strips(folder, rows[-1]["iteration"] if rows else -1))
        guarded = [*([Page(folder)] if page else []), *others]
        self._writers = [*((one, False) for one in own), *((one, True) for one in guarded)]

    def row(self, row: Mapping[str, Any], evaluation: Evaluation | None) -> None:
        """Call all writers with a row."""
        self._call("row", row, evaluation)

    def finish(self) -> None:
        """Finish all writers, also after an exception of one of them, which is then raised."""
        self._call("finish")

    def _call(self, method: str, *arguments: Any) -> None:
        failed: Exception | None = None
        for number, (writer, guarded) in enumerate(self._writers):
            name = type(writer).__name__
            try:
                with part_call(f"{name}.{method}"):
                    getattr(writer, method)(*arguments)
            except (Exception, SystemExit) as error:
                is_foreseen = guarded and not is_disk_error(error)
                text = f"writer {name}: {error}"
                if is_foreseen and not self.strict:
                    self._warn_once(number, f"{name} failed", text)
                else:
                    failed = failed or _raised(error, text if is_foreseen else "")
        if failed is not None:
            raise failed

    def _warn_once(self, number: int, kind: str, text: str) -> None:
        if number not in self._warned:
            self._warned.add(number)
            self.warn(kind, f"{text} (shown once)")


def _raised(error: BaseException, text: str) -> Exception:
    """`error`, or a `PartError` with `text` that it caused."""
    if not text and isinstance(error, Exception):
        return error
    raised = PartError(text or str(error))
    raised.__cause__ = error
    return raised
