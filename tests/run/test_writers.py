"""One writer per folder, and none that outlives its parent; a disk that fills, or a process that
dies, at each operation: one error, nothing lost, and the next command goes on.
"""

import errno
import json
import os
import re
import subprocess
import sys

import pytest
from failing_disk import DiedError, FailingDisk
from small_run import MIXTURE, SMALL, TINY_RUN, flowrl_, numbers, words

from flowrl.cli.main import main
from flowrl.compare.arms import method_arms
from flowrl.compare.comparison import CompareConfig, compare
from flowrl.core.errors import ConfigError, DiskError
from flowrl.run.checkpoint import Checkpoints
from flowrl.run.config import load_config
from flowrl.run.io import folder_lock
from flowrl.run.job import Run
from flowrl.run.records import load_run
from flowrl.run.results import has_progress

SHORT = {"preset": "tiny", "world": "mixture", "task": "direction"}
LONG = words(**SHORT, iterations=500, eval_every=500)


def lines_of(run):
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_the_folder_of_a_run_or_a_comparison_has_one_writer(tmp_path):
    out = tmp_path / "out"
    comparison = CompareConfig(TINY_RUN, method_arms(("flow-grpo",)), (0,))
    message = rf"out is being written by process {os.getpid()} on .* \(`the first`, since 20"
    with folder_lock(out, "the first"):
        for resume in (False, True):
            with pytest.raises(ConfigError, match=message):
                Run(TINY_RUN, out).execute(resume)
            with pytest.raises(ConfigError, match=message):
                compare(comparison, out, resume)
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert Run(TINY_RUN, out).execute()


CODE = """
from dataclasses import dataclass
from flowrl.credit import Uniform

@dataclass(frozen=True)
class Mine(Uniform):
    scale: float = 1.0

    def assign(self, values, decisions):
        return self.scale * super().assign(values, decisions)
"""


def test_a_resume_after_the_code_has_changed_asks(tmp_path, capsys):
    """By name, for a part within another part; the flag goes on, and the new code is then the known
    one, so the next resume does not ask.
    """
    rules, out = tmp_path / "rules.py", tmp_path / "out"
    rules.write_text(CODE)
    config = TINY_RUN.replace(
        credit=f"weighted(weights=noise, rule='{rules}:Mine')",
        checkpoint_every=1,
        iterations=4,
    )
    resume = ["train", "--resume", str(out), "--trust"]
    assert not Run(config, out, stop=lambda: True).execute()
    assert list(json.loads((out / "code.json").read_text())) == [f"credit: {rules}:Mine"]
    rules.write_text(CODE.replace("scale: float = 1.0", "scale: float = 2.0"))
    message = (
        rf"code has changed since the run started: credit: {re.escape(str(rules))}:Mine\."
        r" Restore it, or .*--changed-code"
    )
    with pytest.raises(ConfigError, match=message):
        Run(config, out).execute(resume=True)
    assert main(resume) == 2 and re.search(message, capsys.readouterr().err)
    assert not Run(config, out, stop=lambda: True, changed_code=True).execute(resume=True)
    assert not Run(config, out, stop=lambda: True).execute(resume=True)
    assert main(resume) == 0
    rules.write_text(CODE + "# after the end\n")
    assert main(resume) == 0  # nothing is left to do


RULE = """
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from flowrl.credit import Uniform
@dataclass(frozen=True)
class Prints(Uniform):
    def assign(self, values, decisions):
        if multiprocessing.parent_process():
            with Path(__file__).with_name("prints").open("a") as file:
                file.write("begun ")
                print("credit", flush=True)
                file.write("ended ")
        return super().assign(values, decisions)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs pipes of POSIX")
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_run_whose_reader_ends_is_paused(command, tmp_path):
    """As in `flowrl train | head -3`: the iteration ends, and a checkpoint is written. Workers of a
    comparison may print too.
    """
    out, rule = tmp_path / "out", tmp_path / "rule.py"
    rule.write_text(RULE)
    words, runs = [command, *LONG, "--out", str(out), "--credit", f"{rule}:Prints"], [out]
    if command == "compare":
        words += ["--methods", "flow-grpo", "--seeds", "0", "--workers", "2"]
        runs = [out / "runs" / name for name in ("flow-grpo-seed0", "Prints-seed0")]
    arguments = [sys.executable, "-m", "flowrl", *words]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert any("/500" in line for line in process.stdout)
    process.stdout.close()
    assert (process.wait(60), process.stderr and process.stderr.read()) == (141, "")
    for run in runs:
        done = lines_of(run) - 1
        assert 0 < done < 500 and (run / "checkpoints" / f"{done:06d}.safetensors").exists()
    if command == "compare":
        prints = (tmp_path / "prints").read_text()
        assert prints.count("begun") == prints.count("ended") > 0


# A disk that fills, or a process that dies


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    Run(SMALL, folder).execute()
    return folder


def go_on(folder):
    """As the user would: --resume if there is something to resume, else the same command again."""
    begun = (folder / "config.json").exists()
    return Run(load_config(folder / "config.json") if begun else SMALL, folder).execute(
        resume=begun
    )


MODES = ("full", "before", "half")


@pytest.mark.satellite
@pytest.mark.parametrize(
    ("mode", "step"),
    [
        *zip(MODES, (3, 6, 6), strict=True),
        *(pytest.param(mode, 1, marks=pytest.mark.slow) for mode in MODES),
    ],
)
def test_a_disk_that_fails_at_any_operation_of_a_run_loses_nothing(
    tmp_path, uninterrupted, mode, step, monkeypatch
):
    """A full disk is one error; a process that dies before an operation or half way may leave
    temporary files in folders. The run goes on with the same numbers.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    operation, fired, expected = 1 - step, True, numbers(uninterrupted)
    while fired:
        operation += step
        folder, error = tmp_path / f"{operation}" / "run", None
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, mode, operation)
            try:
                Run(SMALL, folder).execute()
            except (OSError, DiedError, DiskError) as raised:
                error = raised
            fired = disk.fired
        if isinstance(error, DiskError):
            assert "No space left on device" in str(error) and error.exit_code == 1
            advice = f"flowrl train --resume {folder}" if (folder / "config.json").exists() else ""
            assert advice in str(error)
        assert error is None or mode != "full" or isinstance(error, DiskError)
        for name in Checkpoints(folder).names():
            Checkpoints(folder).load(name)
        if has_progress(folder):
            load_run(folder)
        assert go_on(folder)
        assert numbers(folder) == expected
        assert not list((folder.rglob if mode == "full" else folder.glob)("*.tmp"))
    assert operation > 60


def test_a_full_disk_is_one_clear_error_and_the_old_checkpoint_stays(tmp_path, capsys):
    out, real = tmp_path / "run", os.replace
    options = f"{MIXTURE} --iterations 4 --checkpoint-every 2 --out {out}"

    def full(source, target):
        if str(target).endswith("000004.safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device", str(source))
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert flowrl_(f"train {options}") == 1
    shown = capsys.readouterr()
    error = shown.err.replace("\n", " ")
    assert (
        f"No space left on device. Free some space, then run: flowrl train --resume {out}" in error
    )
    assert "checkpoint 000002 is kept" in shown.out
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["000002.safetensors"]
    assert flowrl_(f"train --resume {out}") == 0
    assert Checkpoints(out).names() == ["000004"]
