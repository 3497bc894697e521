"""Windows of the older format: their conversion, and the old reading of every committed text
against the new one.
"""

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from bench_lines import small_run
from flowrl_bench.digest import config_id
from flowrl_bench.results_file import ResultsFile, make_line

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.io import write_json
from flowrl.parts.registry import build
from flowrl.parts.settings import settings_text
from flowrl.samplers import trained_steps
from flowrl.training.arms import method_arms
from flowrl.training.compare import CompareConfig, load_compare
from flowrl.training.config import RunConfig, load_config, preset
from flowrl.training.format import FORMAT, OLDER, from_older, to_older

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json*"))
PRESETS = sorted((ROOT / "flowrl" / "presets").rglob("*.yaml"))
OTHERS = [
    ("window", text)
    for text in (
        "all",
        "all-but-last",
        "0:1",
        "2:5",
        "9:1",
        "random:3",
        "random:2:5",
        "random:3:0.5",
        "random:2:6:0.5",
        "random:2:0.5:6",
        "sliding:4",
        "sliding:4:2",
        "sliding:4:1:25",
    )
] + [
    ("trained_steps", text)
    for text in ("all", "all-but-last", "0:8", "3:20", "random:0.6", "random:1")
]


def committed() -> set[tuple[str, str]]:
    """Setting and text of every window in results files, in the older format, and in preset files,
    in the present one.
    """
    found = set[tuple[str, str]]()
    for path in RESULTS:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        found |= set(re.findall(r'"(window|trained_steps)": "([^"]+)"', text))
    for path in PRESETS:
        texts = re.findall(
            r'\b(window|trained_steps): \[?"([^",]+(?:\([^)]*\))?)"', path.read_text()
        )
        found |= {
            (name, to_older(name, text))
            for name, text in texts
            if not text.startswith("random(fraction=0.6), drawn")
        }
    return found


def read_in_the_older_format(
    setting: str, text: str, count: int, generator: torch.Generator, iteration: int
) -> Sequence[int]:
    """The steps, as the version before slices read the text."""
    kind, *numbers = {"all": f"0:{count}", "all-but-last": f"0:{count - 1}"}.get(text, text).split(
        ":"
    )
    if kind == "random" and setting == "trained_steps":
        order = torch.randperm(count, generator=generator)
        return sorted(order[: max(1, int(float(numbers[0]) * count))].tolist())
    if kind == "random":
        size, high = int(numbers[0]), next((int(n) for n in numbers[1:] if "." not in n), count)
        ratio = next((float(n) for n in numbers[1:] if "." in n), None)
        chances = (ratio or 1.0) ** torch.arange(high - size + 1)
        uniform = ratio is None
        start = (
            torch.randint(0, high - size + 1, (), generator=generator)
            if uniform
            else chances.multinomial(1, generator=generator)
        )
    elif kind == "sliding":
        size, stride, every = (*map(int, numbers), 1, 1)[:3]
        starts = [*range(0, count - size, stride), count - size]
        start = starts[iteration // every % len(starts)]
    else:
        start, size = int(kind), int(numbers[0])
    return [step for step in range(int(start), int(start) + size) if step < count]


def read_now(
    setting: str, text: str, count: int, generator: torch.Generator, iteration: int
) -> Sequence[int]:
    if setting == "trained_steps":
        return trained_steps(text, torch.ones(count), generator).tolist()
    return list(build("window", text).steps(count, generator, iteration))


@pytest.mark.parametrize(("setting", "text"), sorted(committed() | set(OTHERS)))
def test_every_text_selects_the_same_steps_as_before(setting: str, text: str) -> None:
    new = from_older(setting, text)
    assert to_older(setting, new) == text
    for iteration in (0, 1, 30, 100):
        states = [torch.Generator().manual_seed(iteration) for _ in range(2)]
        before = read_in_the_older_format(setting, text, 20, states[0], iteration)
        assert read_now(setting, new, 20, states[1], iteration) == before
        assert torch.equal(states[0].get_state(), states[1].get_state())


def test_committed_texts_are_found() -> None:
    assert {
        ("window", "2:5"),
        ("window", "random:2:5"),
        ("trained_steps", "all-but-last"),
    } <= committed()


def test_committed_results_are_those_of_the_converted_settings() -> None:
    """Steps of every line, and the id of every twentieth."""
    for name in ("claims.jsonl", "claims-default-settings.jsonl", "tuning.jsonl"):
        path = ROOT / "benchmarks" / "results" / name
        archive = path.with_name(f"{name}.gz")
        data = gzip.decompress(archive.read_bytes()) if archive.exists() else path.read_bytes()
        texts, lines = data.splitlines(), ResultsFile(path).unchecked()
        assert len(texts) == len(lines) > 100
        for number, (text, line) in enumerate(zip(texts, lines, strict=True)):
            older, count = (
                json.loads(text)["config"]["algorithm"],
                line["config"]["rollout"]["num_steps"],
            )
            for setting in older.keys() & {"window", "trained_steps"}:
                before = read_in_the_older_format(
                    setting, older[setting], count, torch.Generator(), 0
                )
                assert (
                    read_now(
                        setting, line["config"]["algorithm"][setting], count, torch.Generator(), 0
                    )
                    == before
                )
            if number % 20 == 0:
                assert config_id(RunConfig.from_dict(line["config"], trust=True)) == line["id"]


def test_a_line_of_the_older_format_is_found_under_its_id(tmp_path: Path) -> None:
    """And two spellings of a window have one id, another window has another."""
    made = {"code": "", "golden": [1.0], "rules": "", "commit": "", "versions": {}, "hardware": ""}
    line = make_line(
        small_run(), {"curve": [], "totals": {}, "phases": {}, "gains": None}, "-", made=made
    )
    assert (line["format"], line["config"]["algorithm"]["window"]) == (3, "0:3")
    older = {**line, "format": 2, "config": json.loads(json.dumps(line["config"]))}
    older["config"]["algorithm"] |= {"window": "1:3", "trained_steps": "all"}
    older["id"] = config_id(small_run(window="1:4"))
    (tmp_path / "r.jsonl").write_text(json.dumps(older) + "\n")
    (found,) = ResultsFile(tmp_path / "r.jsonl").read(any_code=True).values()
    assert found["config"]["algorithm"]["window"] == "1:4" and found["id"] == config_id(
        small_run(window="1:4")
    )
    ids = [
        config_id(small_run(window=text)) for text in (":3", "0:3", "1:3", "random(size=3)", "-3:")
    ]
    assert ids[0] == ids[1] == line["id"] and len(set(ids)) == 4
    (tmp_path / "r.jsonl").write_text(json.dumps({**older, "format": 1}) + "\n")
    with pytest.raises(ConfigError, match="has format 1; allowed: 2 or 3"):
        ResultsFile(tmp_path / "r.jsonl").read(any_code=True)


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "mine.yaml"])
def test_files_of_the_older_format_are_converted_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = preset("tiny").apply(
        world="mixture", window="random(size=2, high=3)", trained_steps="random(fraction=0.5)"
    )
    values = json.loads(json.dumps(expected.as_dict()))
    values["algorithm"] |= {"window": "random:2:3", "trained_steps": "random:0.5"}
    path = tmp_path / name
    if name == "config.json":
        write_json(path, {"format": OLDER, **values})
    elif name == "config.yaml":  # written by a run, without an entry "format"
        path.write_text(
            settings_text(
                values,
                "All settings of this run; repeat it with: flowrl train --config config.yaml",
            )
        )
    else:
        path.write_text(settings_text({"format": OLDER, **values}))
    assert load_config(path) == load_config(path) == expected
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and str(path) in told
    assert (
        "window random:2:3 is now random(size=2, high=3), trained_steps random:0.5 is now"
        " random(fraction=0.5)" in told
    )
    if path.suffix == ".yaml":
        assert preset(str(path)).apply() == expected


def test_a_file_without_a_format_has_slices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("algorithm: {window: 2:5}\n")
    assert load_config(path).algorithm.window == "2:5"
    path.write_text(f"format: {OLDER}\nalgorithm: {{window: 2:5}}\n")
    assert load_config(path).algorithm.window == "2:7"
    path.write_text(f"format: {FORMAT}\nalgorithm: {{window: all}}\n")
    with pytest.raises(
        ConfigError,
        match=r"window = 'all' is not allowed; allowed: ':', which replaces this older spelling",
    ):
        load_config(path)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("setting", "text", "new"),
    [
        ("window", "all-but-last", "':-1'"),
        ("window", "random:3:0.5", r"'random\(size=3, geometric=0.5\)'"),
        ("window", "sliding:4:1:25", r"'sliding\(size=4, stride=1, every=25\)'"),
        ("trained_steps", "random:0.6", r"'random\(fraction=0.6\)'"),
    ],
)
def test_older_words_are_refused_with_the_new_ones(setting: str, text: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = '{text}' is not allowed; allowed: {new}"):
        RunConfig.of(**{setting: text})


def test_a_run_of_the_older_format_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the numbers of the run that was not interrupted."""
    settings = [
        "--preset",
        "tiny",
        "--world",
        "mixture",
        "--iterations",
        "2",
        "--window",
        "1:3",
        "--device",
        "cpu",
    ]
    assert main(["train", *settings, "--out", str(tmp_path / "whole")]) == 0
    assert (
        main(
            [
                "train",
                *settings,
                "--out",
                str(tmp_path / "run"),
                "--checkpoint-every",
                "1",
                "--keep-checkpoints",
                "2",
            ]
        )
        == 0
    )
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["format"], config["algorithm"]["window"]) == (FORMAT, "1:3")
    config["format"] = OLDER
    config["algorithm"] |= {"window": "1:2", "trained_steps": "all"}
    write_json(tmp_path / "run" / "config.json", config)
    (tmp_path / "run" / "done.json").unlink()
    capsys.readouterr()
    assert main(["train", "--resume", str(tmp_path / "run"), "--from", "000001"]) == 0
    assert "window 1:2 is now 1:3" in capsys.readouterr().err
    rows = [
        [
            json.loads(line)["evaluation"]["reward"]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("whole", "run")
    ]
    assert rows[0] == rows[1]


def test_a_comparison_of_the_older_format_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = preset("tiny").apply(world="mixture", window="0:3")
    config = CompareConfig(
        run, method_arms(("flow-grpo",)) | {"tp-grpo": {"method": "tp-grpo", "window": "1:3"}}, (0,)
    )
    values = json.loads(json.dumps(config.as_dict()))
    write_json(tmp_path / "config.json", values)
    assert load_compare(tmp_path / "config.json") == config
    assert capsys.readouterr().err == ""
    del values["format"]  # there was none
    values["run"]["algorithm"] |= {"window": "0:3", "trained_steps": "all"}
    del values["arms"]
    values |= {
        "methods": ["flow-grpo", "tp-grpo"],
        "credit": [],
        "method_settings": {"tp-grpo": {"window": "1:2"}},
    }
    write_json(tmp_path / "config.json", values)
    assert load_compare(tmp_path / "config.json") == config
    assert "window 1:2 is now 1:3" in capsys.readouterr().err
