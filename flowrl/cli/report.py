"""`flowrl report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from flowrl.core.errors import require


@dataclass(frozen=True)
class Report:
    """Write a page about a run in any state, or about several side by side, and their numbers as
    CSV.

    Examples: flowrl report runs/mine

    flowrl report runs/mine runs/other --out both.html
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders of runs; a checkpoint (RUN@best) names its run."""
    out: Path | None = None
    """The page to write; its numbers are in a .csv file beside it [default: report.html in the
    folder of the run, or of several in the current folder].
    """

    def main(self) -> int:
        """Draw and write."""
        from flowrl.run.io import is_locked, require_new_file, write_bytes
        from flowrl.run.report.run_page import run_page, run_table, write_page
        from flowrl.run.saved import run_folder

        require(self.runs != (), "runs", self.runs, "one or more folders of runs")
        folders = list(dict.fromkeys(run_folder(text) for text in self.runs))
        single = folders[0] / "report.html"
        out = self.out or (single if len(folders) == 1 else Path("report.html"))
        require(out.suffix == ".html", "out", str(out), "a name that ends in .html")
        require_new_file(out, is_page)
        running = [folder for folder in folders if is_locked(folder)]
        write_page(run_page(folders, running), out)
        write_bytes(out.with_suffix(".csv"), run_table(folders).encode())
        print(f"Wrote {out} and {out.with_suffix('.csv')}")
        return 0


def is_page(data: bytes) -> bool:
    """Whether `data` is a page of this package."""
    return data.startswith(b"<!doctype html>") and b'class="facts"' in data
