"""The comparison behind the golden runs finds every difference, and no other."""

import json
import shutil

import golden
import pytest
import torch
from golden_cases import Job, cases
from safetensors.torch import save_file

RANDOM = torch.Generator().manual_seed(0).get_state()
ROWS = [{"iteration": 0, "loss": 0.5, "seconds": 1.0}, {"iteration": 1, "loss": float("nan"), "evaluation": {"reward": 0.25}}]
TENSORS = {"weight.a": torch.tensor([1.0, 2.0, float("nan")]), "generator": RANDOM}


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
    result = compared(rows=[{**ROWS[0], "seconds": 9.0, "phases": {"rollout": 3.0}, "warnings": [{"text": "Slow"}]}, ROWS[1]])
    assert result.verdict == "equal" and result.files == 2
    assert result.numbers == 5 + 3 + len(RANDOM)


def test_a_number_that_moved_by_its_last_bit_is_found(compared):
    result = compared(rows=[{**ROWS[0], "loss": 0.5 + 2**-53}, ROWS[1]])
    (one,) = result.differences
    assert (one.key, one.count) == ("case/run/metrics.jsonl:0/loss", 1)
    assert one.absolute == 2**-53 and one.relative == pytest.approx(2**-52) and result.verdict == "DIFFERENT"


@pytest.mark.parametrize(
    ("tensor", "count", "absolute"),
    [
        (torch.tensor([1.0, 2.5, float("nan")]), 1, 0.5),
        (torch.tensor([1.0, float("nan"), 3.0]), 2, float("inf")),
        (torch.tensor([1.0, 2.0, float("nan")], dtype=torch.float64), 3, None),
        (torch.tensor([1.0, 2.0]), 3, None),
    ],
    ids=["value", "nan", "dtype", "shape"],
)
def test_elements_that_differ_are_counted_and_measured(compared, tensor, count, absolute):
    (one,) = compared(tensors={**TENSORS, "weight.a": tensor}).differences
    assert (one.key, one.count) == ("case/run/weights.safetensors:weight.a", count)
    assert one.absolute == absolute or (absolute is None and one.absolute != one.absolute)


def test_another_state_of_a_generator_is_found(compared):
    (one,) = compared(tensors={**TENSORS, "generator": torch.Generator().manual_seed(1).get_state()}).differences
    assert one.key == "case/run/weights.safetensors:generator"


def test_what_one_side_lacks_is_a_difference(compared):
    assert len(keys(compared(rows=ROWS[:1]).differences)) == 3
    assert keys(compared(rows=[*ROWS, {"new": 1}]).differences) == ["case/run/metrics.jsonl:2/new"]
    assert keys(compared(name="other").differences) == ["case/run/weights.safetensors", "case/run/other.safetensors"]


def test_nothing_to_compare_is_no_success(tmp_path):
    assert golden.compare_folders(tmp_path, tmp_path, "case").verdict == "FAILED"


def test_renamed_things_are_compared_under_their_new_names(compared, monkeypatch):
    monkeypatch.setattr(golden, "METRICS", {"loss": "total_loss", "evaluation/reward": "heldout/score"})
    monkeypatch.setattr(golden, "TENSORS", {r"^weight\.": "parameters."})
    monkeypatch.setattr(golden, "FILES", {"weights": "averaged"})
    rows = [{"iteration": 0, "total_loss": 0.5}, {"iteration": 1, "total_loss": float("nan"), "heldout": {"score": 0.5}}]
    result = compared(rows=rows, tensors={"parameters.a": TENSORS["weight.a"], "generator": RANDOM}, name="averaged")
    assert keys(result.differences) == ["case/run/metrics.jsonl:1/heldout/score"] and result.files == 2


def test_only_what_is_meant_is_excused(compared, monkeypatch):
    monkeypatch.setattr(golden, "MEANT", {"case/*/metrics.jsonl:*/loss": "another reduction"})
    rows = [{**ROWS[0], "loss": 0.75}, ROWS[1]]
    assert compared(rows=rows).verdict == "equal, but for what is meant"
    result = compared(rows=rows, tensors={**TENSORS, "weight.a": torch.zeros(3)})
    assert result.verdict == "DIFFERENT" and keys(result.differences) == ["case/run/weights.safetensors:weight.a"]


def test_commands_use_the_names_of_their_side():
    job = Job("run", {"lr": 0.1, "overlap_rewards": True, "heldout_rewards": ("a", "b")})
    words = ["--out", "out", "--lr", "0.1", "--overlap-rewards", "--heldout-rewards", "a", "b"]
    assert job.arguments("out", {}) == ["train", *words]
    assert job.arguments("out", {"lr": "learning_rate"})[3:5] == ["--learning-rate", "0.1"]


def test_names_of_runs_are_unique(tmp_path):
    names = [job.name for jobs in cases(tmp_path).values() for job in jobs]
    assert len(set(names)) == len(names)
