"""The full-size benchmark at tiny size, and its parts: the pipelines, the meter, what counts as a
failure.
"""

import json

import full_size
import pytest


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
    assert sum(phase["phase"] == "rollout" for phase in killed["phases"]) == 2
    assert f"{evaluations} network evaluations" in "\n".join(report["plan"][method])
    assert all(abs(line["error"]) < 0.5 for line in report["memory"])  # of a megabyte
