"""Locks that name their holder."""

import json
import subprocess
import sys

import pytest

from flowrl.core.errors import ConfigError
from flowrl.io import file_lock

DIES = """
import os, pathlib, sys
from flowrl.io import file_lock

lock = file_lock(pathlib.Path(sys.argv[1]), "x")
lock.__enter__()
os._exit(9)
"""


def test_a_lock_is_released_with_its_process(tmp_path):
    path = tmp_path / "results.jsonl"
    assert subprocess.run([sys.executable, "-c", DIES, str(path)]).returncode == 9
    assert (tmp_path / "results.jsonl.lock.json").exists()
    with file_lock(path, "the next"):
        assert json.loads((tmp_path / "results.jsonl.lock.json").read_text())["work"] == "the next"


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="cannot be locked"),
        file_lock(tmp_path / "file" / "results.jsonl", "x"),
    ):
        pass
