"""Settings of the older format: their conversion, and the ids of committed results."""

import json
from pathlib import Path

import pytest
from bench_lines import small_run
from flowrl_bench.digest import config_id
from flowrl_bench.older_windows import to_older
from flowrl_bench.results_file import ResultsFile, make_line
from flowrl_compare.arms import method_arms
from flowrl_compare.comparison import CompareConfig, load_compare

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.io import write_json
from flowrl.parts.registry import build
from flowrl.parts.settings import settings_text
from flowrl.training.config import RunConfig, load_config, preset
from flowrl.training.format import COMMENT, FORMAT, OLDER, from_older

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TINY = ["--preset", "tiny", "--world", "mixture", "--iterations", "2", "--window", "1:3"]


@pytest.mark.parametrize(
    ("setting", "older", "new"),
    [
        ("window", "all", ":"),
        ("window", "all-but-last", ":-1"),
        ("window", "2:5", "2:7"),
        ("window", "random:3", "random(size=3)"),
        ("window", "random:2:5", "random(size=2, high=5)"),
        ("window", "random:3:0.5", "random(size=3, geometric=0.5)"),
        ("window", "random:2:6:0.5", "random(size=2, high=6, geometric=0.5)"),
        ("window", "random:2:0.5:6", "random(size=2, geometric=0.5, high=6)"),
        ("window", "sliding:4", "sliding(size=4)"),
        ("window", "sliding:4:1:25", "sliding(size=4, stride=1, every=25)"),
        ("window", "my.py:Window", "my.py:Window"),
        ("trained_steps", "3:20", "3:23"),
        ("trained_steps", "random:0.6", "random(fraction=0.6)"),
    ],
)
def test_every_text_is_converted(setting: str, older: str, new: str) -> None:
    assert from_older(setting, older) == new
    assert to_older(setting, new) == older


@pytest.mark.parametrize("name", ["claims.jsonl", "claims-default-settings.jsonl", "tuning.jsonl"])
def test_committed_results_are_read_under_their_ids(name: str) -> None:
    """Every window of their lines can be built; the id of every twentieth line."""
    lines = ResultsFile(RESULTS / name).unchecked()
    assert len(lines) > 100
    windows = {line["config"]["algorithm"].get("window", "") for line in lines} - {""}
    assert all(list(build("window", text).steps(20, None, 0)) for text in windows if ":" in text)
    for line in lines[::20]:
        assert config_id(RunConfig.from_dict(line["config"], trust=True)) == line["id"]


def test_a_line_of_the_older_format_is_found_under_its_id(tmp_path: Path) -> None:
    """And two spellings of a window have one id, another window has another."""
    made = {"code": "", "golden": [1.0], "rules": "", "commit": "", "versions": {}, "hardware": ""}
    measured = {"curve": [], "totals": {}, "phases": {}, "gains": None}
    line = make_line(small_run(), measured, "-", made=made)
    assert (line["format"], line["config"]["algorithm"]["window"]) == (3, "0:3")
    older = {**line, "format": 2, "config": json.loads(json.dumps(line["config"]))}
    older["config"]["algorithm"] |= {"window": "1:3", "trained_steps": "all"}
    older["id"] = config_id(small_run(window="1:4"))
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(older) + "\n")
    (found,) = ResultsFile(path).read(any_code=True).values()
    assert (found["config"]["algorithm"]["window"], found["id"]) == ("1:4", older["id"])
    ids = [config_id(small_run(window=text)) for text in (":3", "0:3", "1:3", "random(size=3)")]
    assert ids[0] == ids[1] == line["id"] and len(set(ids)) == 3
    path.write_text(json.dumps({**older, "format": 1}) + "\n")
    with pytest.raises(ConfigError, match="has format 1; allowed: 2 or 3"):
        ResultsFile(path).read(any_code=True)


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "mine.yaml"])
def test_files_of_the_older_format_are_converted_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"window": "random(size=2, high=3)", "trained_steps": "random(fraction=0.5)"}
    expected = preset("tiny").apply(world="mixture", **changes)
    values, path = json.loads(json.dumps(expected.as_dict())), tmp_path / name
    values["algorithm"] |= {"window": "random:2:3", "trained_steps": "random:0.5"}
    if name == "config.json":
        write_json(path, {"format": OLDER, **values})
    elif name == "config.yaml":  # written by a run, without an entry "format"
        path.write_text(settings_text(values, f"{COMMENT}: flowrl train"))
    else:
        path.write_text(settings_text({"format": OLDER, **values}))
    assert load_config(path) == load_config(path) == expected
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and str(path) in told


def test_a_file_without_a_format_has_slices(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for head, stop in (("", 5), (f"format: {FORMAT}\n", 5), (f"format: {OLDER}\n", 7)):
        path.write_text(f"{head}algorithm: {{window: 2:5}}\n")
        assert load_config(path).algorithm.window == f"2:{stop}"
    path.write_text("format: flowrl-run-9\n")
    with pytest.raises(ConfigError, match="format = 'flowrl-run-9' is not allowed"):
        load_config(path)
    path.write_text("members: 12\nlr: 0.1\n")
    with pytest.raises(ConfigError, match=r"format = 'flowrl 0\.1' is not allowed"):
        load_config(path)


def test_a_run_of_the_older_format_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the numbers of the run that was not interrupted."""
    out, keep = tmp_path / "run", ["--checkpoint-every", "1", "--keep-checkpoints", "2"]
    assert main(["train", *TINY, *keep, "--out", str(out)]) == 0
    before = (out / "weights.safetensors").read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["format"], config["algorithm"]["window"]) == (FORMAT, "1:3")
    config["algorithm"] |= {"window": "1:2", "trained_steps": "all"}
    write_json(out / "config.json", {**config, "format": OLDER})
    (out / "weights.safetensors").unlink()
    assert main(["train", "--resume", str(out), "--from", "000001"]) == 0
    assert "window 1:2 is now 1:3" in capsys.readouterr().err
    assert (out / "weights.safetensors").read_bytes() == before


def test_a_comparison_of_the_older_format_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = preset("tiny").apply(world="mixture", window="0:3"), tmp_path / "config.json"
    arms = method_arms(("flow-grpo",)) | {"tp-grpo": {"method": "tp-grpo", "window": "1:3"}}
    config = CompareConfig(run, arms, (0,))
    values = json.loads(json.dumps(config.as_dict()))
    write_json(path, values)
    assert load_compare(path) == config and capsys.readouterr().err == ""
    del values["format"], values["arms"]  # there were none
    values["run"]["algorithm"] |= {"window": "0:3", "trained_steps": "all"}
    values |= {"methods": list(arms), "method_settings": {"tp-grpo": {"window": "1:2"}}}
    write_json(path, values)
    assert load_compare(path) == config
    assert "window 1:2 is now 1:3" in capsys.readouterr().err
