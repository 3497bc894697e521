"""The comparison behind the golden runs finds every difference, and no other."""

import json
import math
import shutil

import golden
import golden_sides
import pytest
import torch
from golden_cases import METHODS, POINTS, cases, runs
from safetensors.torch import save_file

from flowrl.credit.table import zscore
from flowrl.methods import METHODS as ALL_METHODS
from flowrl.training import trainer

RANDOM = torch.Generator().manual_seed(0).get_state()
ROWS = [
    {"iteration": 0, "loss": 0.5, "seconds": 1.0},
    {"iteration": 1, "loss": math.nan, "evaluation": {"reward": 0.25}},
]
TENSORS = {"weight.a": torch.tensor([1.0, 2.0, math.nan]), "generator": RANDOM}


def write(folder, rows=ROWS, tensors=TENSORS, name="weights"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file(tensors, folder / f"{name}.safetensors")


@pytest.fixture
def compared(tmp_path):
    """Compares the usual contents with what `write` is given."""

    def compare(**changes):
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        write(tmp_path / "old" / "run")
        write(tmp_path / "new" / "run", **changes)
        return golden.compare_folders(tmp_path / "old", tmp_path / "new", "case")

    return compare


def keys(found):
    return [one.key for one in found]


def test_equal_content_is_equal_whatever_the_clock_said(compared):
    clock = {"seconds": 9.0, "phases": {"rollout": 3.0}, "warnings": [{"text": "Slow"}]}
    result = compared(rows=[{**ROWS[0], **clock}, ROWS[1]])
    assert result.verdict == "equal" and result.files == 2
    assert result.numbers == 5 + 3 + len(RANDOM)


def test_a_number_that_moved_by_its_last_bit_is_found(compared):
    result = compared(rows=[{**ROWS[0], "loss": 0.5 + 2**-53}, ROWS[1]])
    (one,) = result.differences
    assert (one.key, one.count) == ("case/run/metrics.jsonl:0/loss", 1)
    assert one.absolute == 2**-53 and one.relative == pytest.approx(2**-52)
    assert result.verdict == "DIFFERENT"


@pytest.mark.parametrize(
    ("tensor", "count", "absolute"),
    [
        (torch.tensor([1.0, 2.5, math.nan]), 1, 0.5),
        (torch.tensor([1.0, math.nan, 3.0]), 2, math.inf),
        (torch.tensor([1.0, 2.0, math.nan], dtype=torch.float64), 3, None),
        (torch.tensor([1.0, 2.0]), 3, None),
    ],
    ids=["value", "nan", "dtype", "shape"],
)
def test_elements_that_differ_are_counted_and_measured(compared, tensor, count, absolute):
    (one,) = compared(tensors={**TENSORS, "weight.a": tensor}).differences
    assert (one.key, one.count) == ("case/run/weights.safetensors:weight.a", count)
    assert one.absolute == absolute or (absolute is None and one.absolute != one.absolute)


def test_what_one_side_lacks_is_a_difference(compared):
    assert len(keys(compared(rows=ROWS[:1]).differences)) == 3
    assert keys(compared(rows=[*ROWS, {"new": 1}]).differences) == ["case/run/metrics.jsonl:2/new"]
    lacking = [f"case/run/{name}.safetensors" for name in ("weights", "other")]
    assert keys(compared(name="other").differences) == lacking


def test_nothing_to_compare_is_no_success(tmp_path):
    assert golden.compare_folders(tmp_path, tmp_path, "case").verdict == "FAILED"


def test_only_what_is_meant_is_excused(compared, monkeypatch):
    monkeypatch.setattr(golden_sides, "MEANT", {"case/*/metrics.jsonl:*/loss": "another reduction"})
    rows = [{**ROWS[0], "loss": 0.75}, ROWS[1]]
    assert compared(rows=rows).verdict == "equal, but for what is meant"
    result = compared(rows=rows, tensors={**TENSORS, "weight.a": torch.zeros(3)})
    assert result.verdict == "DIFFERENT"
    assert keys(result.differences) == ["case/run/weights.safetensors:weight.a"]


def test_every_method_runs_in_both_worlds(tmp_path):
    for world in ("mixture", "shapes"):
        found = [job for kind in ("uniform", "rules") for job in cases(tmp_path)[f"{kind}-{world}"]]
        assert set(ALL_METHODS) <= {job.settings["method"] for job in found}


@pytest.fixture
def tables(tmp_path, monkeypatch, capsys):
    """The tables of both iterations of a training on the 2-D world."""
    for owner, name in (
        (trainer, "minibatch_rows"),
        (trainer.Trainer, "loss_batches"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    found = []
    golden_sides.observe_current(lambda iteration, tables: found.append((iteration, tables)))

    def train(**settings):
        from flowrl.cli.main import main

        (job,) = runs(POINTS, {"run": settings})
        words = golden_sides.in_current_terms(job).arguments(str(tmp_path / "run"))
        assert main(words) == 0
        assert [iteration for iteration, _ in found] == [1, 2]
        return [tables for _, tables in found]

    return train


def test_advantages_follow_from_the_tables_of_an_iteration(tables):
    for one in tables(**METHODS["flow-grpo"]):
        shape = (*one["rewards"].shape, int(one["drawn"].any(0).sum()))
        assert shape[-1] == 4 and one["weights"].shape == shape and bool((one["weights"] > 0).all())
        scores = zscore(one["rewards"][..., None], over=("member",), clamp=5.0)
        assert torch.equal(one["advantages"], scores.expand(shape))
        assert torch.equal(one["values"][..., -1], one["rewards"])
        assert float(one["weights"].sum()) == pytest.approx(POINTS["minibatches"])
