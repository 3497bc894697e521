"""Messages of libraries in a run's log file instead of on the terminal."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowrl.run.io import append_bytes

FILE = "log.txt"
OWN = "flowrl"
PRINT = ("transformers", "diffusers", "huggingface_hub", "datasets", "torch")
"""Libraries whose loggers have handlers of their own, which print."""


class LibraryLog(logging.Handler):
    """Appends warnings and errors of libraries to log.txt in a run's folder.

    Messages before the run has a folder are kept until then, and dropped if it gets none (in the
    other processes of a run, too). Those of flowrl also go to standard error.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.path: Path | None = None
        self.count, self._early = 0, list[str]()

    def __call__(self, state: dict[str, Any]) -> None:
        """Take an event of the run; write to log.txt from the one with its folder on."""
        if "folder" not in state:
            return
        self.path = Path(state["folder"]) / FILE
        early, self._early = self._early, []
        for text in early:
            self._write(text)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        if record.name.partition(".")[0] == OWN:
            print(record.getMessage(), file=sys.stderr, flush=True)
        else:
            self.count += 1
        self._write(self.format(record))

    def _write(self, text: str) -> None:
        if self.path is None:
            self._early.append(text)
            return
        try:
            append_bytes(self.path, f"{text}\n".encode(errors="replace"))
        except OSError:  # a full disk stops the run elsewhere
            self.count = 0


@contextmanager
def library_log() -> Iterator[LibraryLog]:
    """A context in which messages of libraries and Python's warnings go to the log, and progress
    bars of tqdm are not drawn. Warnings of flowrl itself are printed, each text once.
    """
    import tqdm

    log, root, bar = LibraryLog(), logging.getLogger(), tqdm.tqdm
    call, shown, drawn = logging.Logger.callHandlers, warnings.showwarning, bar.__init__
    package, said = str(Path(__file__).parents[1]), set[str]()

    def to_log(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] not in PRINT:
            call(logger, record)
        elif record.levelno >= log.level:
            log.handle(record)

    def warned(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any
    ) -> None:
        if filename.startswith(package):
            if str(message) not in said:  # the checks before a run read its files, too
                print(f"Warning: {message}", file=sys.stderr, flush=True)
            said.add(str(message))
        else:
            text = f"{filename}:{lineno}: {category.__name__}: {message}"
            logging.getLogger("py.warnings").warning("%s", text)

    def quiet(self: Any, *arguments: Any, **options: Any) -> None:
        drawn(self, *arguments, **{**options, "disable": True})

    root.addHandler(log)
    logging.Logger.callHandlers = to_log  # pyright: ignore
    warnings.showwarning, bar.__init__ = warned, quiet  # pyright: ignore
    try:
        yield log
    finally:
        root.removeHandler(log)
        logging.Logger.callHandlers = call
        warnings.showwarning, bar.__init__ = shown, drawn
