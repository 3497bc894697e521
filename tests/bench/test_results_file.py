"""What a results file promises: every line is what it says it is, none is lost or mixed with other
code's; and what a line is bound to: the golden run, the settings, and the user's own files.
"""

import os
import sys
from pathlib import Path

import pytest
from bench_lines import small_line, small_run
from loading import ROOT

from flowrl.bench import results_file
from flowrl.bench.digest import code_digest, config_id, golden_run, rules_digest, same_golden
from flowrl.bench.results_file import (
    ResultsFile,
    make_line,
    require_unchanged,
    stamp,
)
from flowrl.core.errors import ConfigError
from flowrl.methods import METHODS
from flowrl.run.config import RunConfig

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def file(tmp_path):
    file = ResultsFile(tmp_path / "results.jsonl")
    for seed in (0, 1):
        file.append(small_line(seed))
    return file


def seeds(file):
    return [line["seed"] for line in file.read().values()]


def test_a_line_keeps_what_was_so_before_its_run():
    line = make_line(small_run(), {}, "-", "an id", {**stamp(), "code": "before"})
    assert (line["id"], line["code"], line["rules"]) == ("an id", "before", rules_digest())


def test_code_that_changes_during_a_run_is_noticed(monkeypatch):
    config = small_run()
    require_unchanged(config, config_id(config), code_digest())
    monkeypatch.setattr(results_file, "code_digest_now", lambda: "0123456789abcdef")
    with pytest.raises(ConfigError, match=r"the code in .* changed during the run"):
        require_unchanged(config, config_id(config), code_digest())


def test_code_or_libraries_with_another_golden_run_are_refused(file, monkeypatch):
    golden = results_file.golden_run()
    monkeypatch.setattr(results_file, "golden_run", lambda: (golden[0] + 1, *golden[1:]))
    with pytest.raises(
        ConfigError, match=r"line 1 .* different numbers in the golden run \(.* torch"
    ):
        file.read()
    assert len(file.read(any_code=True)) == 2
    file.append(small_line(2))
    with pytest.raises(ConfigError, match=r"line 3 .* golden run"):
        file.read(any_code=True)


def test_other_settings_are_refused(file):
    with pytest.raises(ConfigError, match=r"not part of this suite \(flow-grpo, seed 1\)"):
        file.read({config_id(small_run(0)): None})


def test_an_archive_is_not_written():
    with pytest.raises(ConfigError, match=r"r.jsonl.xz' is not allowed; allowed: its name without"):
        ResultsFile(Path("r.jsonl.xz"))


def test_a_changed_line_is_refused(file):
    text = file.path.read_text()
    file.path.write_text(text.replace('"learning_rate": 0.02', '"learning_rate": 0.03', 1))
    with pytest.raises(ConfigError, match=r"line 1 .* does not contain the settings"):
        file.read()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "is not a run: '3'"),
        ('{"format": 3}', "lacks id, code, golden"),
        ('{"id": "x"}', "has format None"),
        ('{"format": 1}', "has format 1; allowed: 3"),
        ("", "is not JSON"),
    ],
)
def test_foreign_lines_are_one_clear_error(file, text, message):
    file.path.write_text(f"{text}\n" + file.path.read_text())
    for any_code in (False, True):
        with pytest.raises(ConfigError, match=rf"line 1 of .*results\.jsonl {message}"):
            file.read(any_code=any_code)


def test_a_whole_last_line_without_its_line_break_is_kept(file):
    file.path.write_bytes(file.path.read_bytes()[:-1])
    assert seeds(file) == [0, 1]
    file.append(small_line(2))
    assert seeds(file) == [0, 1, 2]


@pytest.mark.parametrize("tail", [b'{"format": 3, "id"', b"\0\0\0\0", "é".encode()[:1]])
def test_a_torn_last_line_is_cut_off_and_the_others_stay(file, tail, monkeypatch):
    content = file.path.read_bytes()
    file.path.write_bytes(content + tail)
    assert seeds(file) == [0, 1]
    monkeypatch.setattr(
        Path, "write_bytes", lambda *_: pytest.fail("the whole file is written anew")
    )
    file.append(small_line(2))
    assert file.path.read_bytes().startswith(content) and seeds(file) == [0, 1, 2]


def test_a_full_disk_takes_no_line_away(file, monkeypatch):
    content, write = file.path.read_bytes(), os.write

    def full(handle, data):
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return write(handle, data[:50] if len(data) > 100 else data[:10])

    file.path.write_bytes(content + b"torn")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        file.append(small_line(2))
    monkeypatch.undo()
    assert file.path.read_bytes() == content


@pytest.mark.parametrize("name", ["verdict-points.jsonl", "verdict-images.jsonl", "tuning.jsonl"])
def test_committed_results_are_read_under_their_ids(name):
    lines = ResultsFile(RESULTS / name).unchecked()
    assert len(lines) > 100
    for line in lines[::50]:
        assert config_id(RunConfig.from_dict(line["config"], trust=True)) == line["id"]


# The golden run and the id of a configuration

MINE = "from flowrl.credit import Uniform\n\n\nclass Mine(Uniform):\n    pass\n"


def test_golden_runs_agree_up_to_rounding():
    numbers = golden_run()
    assert len(numbers) == 3 * len(METHODS) and same_golden(numbers, numbers)
    assert same_golden(numbers, [value + 5e-5 for value in numbers])
    assert not same_golden(numbers, [*numbers[:-1], numbers[-1] + 1e-2])
    assert same_golden(numbers, numbers[:-3])  # from before the last method was added
    assert not same_golden(numbers, numbers[:-1])


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / f"mine_{tmp_path.name}.py"
    path.write_text(MINE)
    yield path
    sys.modules.pop(path.stem, None)


@pytest.mark.parametrize(
    "spec",
    [
        "{path}:Mine",
        "{stem}:Mine",
        "weighted(weights=noise, rule='{path}:Mine')",
        "weighted(weights=noise, rule='{stem}:Mine')",
    ],
)
def test_files_of_rules_are_part_of_the_id(module, spec):
    config = small_run(credit=spec.format(path=module, stem=module.stem))
    before = config_id(config)
    module.write_text(MINE + "\n    # another rule\n")
    after = config_id(config)
    assert before != after
    module.write_text(MINE)
    assert config_id(config) == before
