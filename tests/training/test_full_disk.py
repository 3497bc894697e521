"""A disk that fills, or a process that dies, at each operation: one error, nothing lost, and the
next command goes on.
"""

import errno
import os

import pytest
from failing_disk import DiedError, FailingDisk
from flowrl_compare.results import load_run
from small_run import MIXTURE, SMALL, flowrl_, numbers

from flowrl.core.errors import DiskError
from flowrl.training.checkpoint import Checkpoints
from flowrl.training.config import load_config
from flowrl.training.results import has_progress
from flowrl.training.run import Run


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
