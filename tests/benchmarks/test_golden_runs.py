"""The comparison behind the golden runs finds every difference, and no other."""

import math

import golden
import pytest
import torch
from safetensors.torch import save_file
from seeded import seeded
from small_run import write_rows

from flowrl.methods import METHODS

RANDOM = seeded().get_state()
ROWS = [
    {"iteration": 0, "loss": 0.5, "seconds": 1.0},
    {"iteration": 1, "loss": math.nan, "evaluation": {"reward": 0.25}},
]
TENSORS = {"weight.a": torch.tensor([1.0, 2.0, math.nan]), "generator": RANDOM}


@pytest.fixture
def compared(tmp_path):
    """The verdict on the usual content and on content with changes."""

    def write(name, rows=ROWS, tensors=TENSORS, file="weights"):
        folder = tmp_path / name
        folder.mkdir()
        write_rows(folder, rows)
        save_file(tensors, folder / f"{file}.safetensors")
        (folder / "finished").touch()
        return folder

    return lambda **changes: golden.verdict(write("old"), write("new", **changes))


def weight(*values, **options):
    return {"tensors": {**TENSORS, "weight.a": torch.tensor(values, **options)}}


CLOCK = {"seconds": 9.0, "phases": {"rollout": 3.0}, "warnings": [{"text": "Slow"}]}
KEY = "weights.safetensors:weight.a"


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({}, []),
        ({"rows": [{**ROWS[0], **CLOCK}, ROWS[1]]}, []),
        ({"rows": [{**ROWS[0], "loss": 0.5 + 2**-53}, ROWS[1]]}, ["metrics.jsonl:0/loss: 0.5 ->"]),
        (weight(1.0, 2.5, math.nan), [f"{KEY}: 1 of 3 elements, by at most 5.0e-01"]),
        (weight(1.0, math.nan, 3.0), [f"{KEY}: 2 of 3 elements"]),
        (weight(1.0, 2.0, math.nan, dtype=torch.float64), [f"{KEY}: torch.float32 (3,) ->"]),
        (weight(1.0, 2.0), [f"{KEY}: torch.float32 (3,) -> torch.float32 (2,)"]),
        ({"rows": ROWS[:1]}, ["metrics.jsonl:1/"] * 3),
        ({"rows": [*ROWS, {"new": 1}]}, ["metrics.jsonl:2/new: only in the working tree"]),
        ({"file": "other"}, ["weights.safetensors"] * 2 + ["other.safetensors"] * 2),
    ],
)
def test_every_difference_is_found_and_no_other(compared, changes, differing):
    word, differences = compared(**changes)
    assert word == ("DIFFERENT" if differing else "equal, 7 values")
    assert len(differences) == len(differing)
    for text, start in zip(sorted(differences), sorted(differing), strict=True):
        assert text.startswith(start)


def test_a_failed_run_or_nothing_to_compare_is_no_success(tmp_path):
    assert golden.verdict(tmp_path, tmp_path)[0] == "FAILED"
    (tmp_path / "finished").touch()
    assert golden.verdict(tmp_path, tmp_path)[0] == "FAILED"


def test_every_method_runs_in_both_worlds():
    assert {
        f"{world}-{name}" for world in ("mixture", "shapes") for name in METHODS
    } <= golden.CASES.keys()
