"""The full-size benchmark at tiny size, and its parts: the pipelines, the meter, what counts as a
failure.
"""

import json

import full_size
import pytest
import torch
from full_size_train import PhaseMeter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method", "evaluations"), [("tiny-sd3", "flow-grpo", 4), ("tiny-flux", "tp-grpo", 6)]
)
def test_the_whole_path_at_tiny_size(model, method, evaluations, tmp_path, capsys):
    """Written, trained, killed, resumed with the same numbers, exported, drawn by plain diffusers,
    and counted.
    """
    code = full_size.main(
        ["--model", model, "--methods", method, "--threads", "1", "--out", str(tmp_path)]
    )
    report = json.loads((tmp_path / f"full_size-{model}.json").read_text())
    assert (code, report["failures"], report["resumed_equals_killed"]) == (0, [], True), (
        capsys.readouterr().out
    )
    killed, resumed = report["runs"]
    assert (killed["end"], resumed["end"]) == ("killed", "resumed")
    assert [run["phases"][0]["phase"] for run in report["runs"]] == ["load", "load"]
    assert sum(phase["phase"] == "rollout" for phase in killed["phases"]) == 2
    assert [line["phase"] for line in report["memory"]] == ["rollout", "reward", "update"]
    assert f"{evaluations} network evaluations" in "\n".join(report["plan"][method])
    assert all(abs(line["error"]) < 0.5 for line in report["memory"])  # of a megabyte


def test_the_meter_counts_phases_and_kills_after_an_iteration(tmp_path, monkeypatch):
    """4 MB stay, 8 MB come and go in the second phase."""
    killed = []
    monkeypatch.setattr("os.kill", lambda *given: killed.append(given))
    meter = PhaseMeter(tmp_path / "report.json", kill_after=2)
    with meter.counter:
        meter.record({"phase": "rollout"})
        kept = torch.ones(2**20)
        meter.record({"phase": "update"})
        torch.ones(2**21).sum()
        meter.record({"iteration": 1})
        assert not killed
        meter.record({"iteration": 2})
    assert len(killed) == 1 and len(kept) == 2**20
    report = json.loads((tmp_path / "report.json").read_text())
    rollout, update, *_ = report["phases"]
    assert (report["end"], update["phase"]) == ("killed", "update")
    assert update["held"] - rollout["held"] == pytest.approx(4 * 2**20, abs=100)
    assert update["peak"] - update["held"] == pytest.approx(8 * 2**20, abs=100)
