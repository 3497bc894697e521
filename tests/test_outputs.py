"""What flowrl did not make is never written over, outputs are tried before the work, and a failed
start leaves nothing.
"""

import json
from pathlib import Path

import pytest

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, PartError
from flowrl.io import new_folder, require_new_file
from flowrl.training.arms import method_arms
from flowrl.training.compare import CompareConfig, compare
from flowrl.training.config import preset
from flowrl.training.run import Run

TINY = ["--preset", "tiny", "--world", "mixture", "--task", "direction"]
CONFIG = preset("tiny").apply(world="mixture", task="direction")
REWARD = """
class Late:
    def score(self, images, prompts):
        if len(images) >= LEAST:
            raise KeyError("out of memory")
        return images.flatten(1).mean(1)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """One of every kind of folder and file."""
    root = tmp_path_factory.mktemp("made")
    options = ["--methods", "flow-grpo", "--seeds", "0", "--workers", "1"]
    assert main(["compare", *TINY, *options, "--out", str(root / "comparison")]) == 0
    assert main(["train", *TINY, "--out", str(root / "run")]) == 0
    assert (
        main(["evaluate", "--weights", str(root / "run"), "--limit", "1", "--num-steps", "2"]) == 0
    )
    assert main(["prompts", "text", "--count", "3", "--file", str(root / "prompts.jsonl")]) == 0
    (root / "notes").mkdir()
    (root / "notes" / "mine.txt").write_text("mine")
    (root / "file").write_text("mine")
    return root


def content(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


FOLDERS = {
    "train": (
        ["train", *TINY],
        ["comparison", "run", "run/evaluation", "notes", "file", "file/x", "notes/mine.txt"],
    ),
    "compare": (
        ["compare", *TINY],
        ["comparison", "run", "run/evaluation", "notes", "file", "file/x"],
    ),
    "evaluate": (
        ["evaluate", "--weights", "run", "--limit", "1"],
        ["comparison", "run", "notes", "file", "file/x"],
    ),
}
FILES = {
    "sample": [
        "sample",
        "--prompts",
        "three red circles",
        "--count",
        "1",
        "--num-steps",
        "1",
        "--out",
    ],
    "explain": ["explain", "uniform", "--out"],
    "prompts": ["prompts", "text", "--count", "2", "--file"],
    "pretrain": ["pretrain", "--updates", "1", "--out"],
    "microscope": ["bench", "microscope", "--out"],
    "claims": ["bench", "claims", "--page"],
    "rule": ["bench", "rule", "weighted", "--out"],
}
TAKEN = {
    "sample": ["mine.png", "run/samples.json", "file/x.png", "run", "x.mine", "x" * 300 + ".png"],
    "explain": ["mine.png", "file/x.png", "x" * 300 + ".png"],
    "prompts": ["mine.jsonl", "prompts.jsonl", "file/x.jsonl", "run"],
    "pretrain": ["mine.safetensors", "run/weights.safetensors", "file/x.safetensors", "run"],
    "microscope": [
        "run/config.json",
        "mine.jsonl",
        "file",
        "file/x.jsonl",
        "run",
        "notes/pages/m.jsonl",
        "notes/html/m.jsonl",
    ],
    "claims": ["file", "notes/pages", "notes/html"],
    "rule": ["notes/pages", "notes/html"],
}
CASES = [(name, taken) for name, (_, others) in FOLDERS.items() for taken in [*others, "."]]
CASES += [(name, taken) for name, others in TAKEN.items() for taken in others]


@pytest.mark.parametrize(("name", "taken"), CASES)
def test_nothing_of_others_is_written_over(
    name: str, taken: str, made: Path, monkeypatch, capsys
) -> None:
    """One error before the work (minutes for `pretrain` and the microscope), and every byte is as
    it was.
    """
    monkeypatch.chdir(made)
    for path in ("mine.png", "mine.jsonl", "mine.json", "mine.safetensors"):
        (made / path).write_text("mine")
    for kind in ("microscope", "claims", "rule"):
        for folder, page in (("pages", f"{kind}.md"), ("html", f"{kind}.html")):
            (made / "notes" / folder).mkdir(exist_ok=True)
            (made / "notes" / folder / page).write_text("mine")
    before = content(made)
    command = [*FOLDERS[name][0], "--out"] if name in FOLDERS else FILES[name]
    assert main([*command, taken]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        (
            "flowrl: error: out",
            "flowrl: error: file",
            "flowrl: error: page",
            f"flowrl: error: {taken} cannot be locked",
        )
    ), error
    assert error.count("\n") == 1 and taken.split("/")[0][:20] in error
    assert content(made) == before


def test_what_the_same_command_has_made_is_replaced(
    made: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sample = [*FILES["sample"], "sample.png"]
    assert (
        main(sample)
        == main(sample)
        == main([*FILES["explain"], "e.png"])
        == main([*FILES["explain"], "e.png"])
        == 0
    )
    assert main([*FILES["prompts"], "p.jsonl"]) == main([*FILES["prompts"], "p.jsonl"]) == 0
    again = [
        "evaluate",
        "--weights",
        str(made / "run"),
        "--limit",
        "1",
        "--num-steps",
        "2",
        "--out",
        "e",
    ]
    assert main(again) == main(again) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "e",
        "e.png",
        "p.jsonl",
        "sample.png",
    ]


@pytest.mark.parametrize("least", [4, 6])
def test_a_start_that_fails_leaves_nothing_and_does_not_block_the_next(
    least: int, tmp_path: Path
) -> None:
    """In the evaluation of 4 samples before training, or in the first iteration, of 6."""
    (tmp_path / "reward.py").write_text(REWARD.replace("LEAST", str(least)))
    out = tmp_path / "new" / "deep" / "out"
    bad = CONFIG.replace(reward=f"{tmp_path}/reward.py:Late")
    with pytest.raises(Exception, match="out of memory"):
        Run(bad, out).execute()
    assert not (tmp_path / "new").exists()
    with pytest.raises(Exception, match="out of memory"):
        compare(CompareConfig(bad, method_arms(("flow-grpo",)), (0,)), out, workers=1)
    assert not (tmp_path / "new").exists()
    out.mkdir(parents=True)
    with pytest.raises(Exception, match="out of memory"):
        Run(bad, out).execute()
    assert list(out.iterdir()) == []
    assert Run(CONFIG, out).execute()


def test_a_start_that_was_killed_may_be_repeated(tmp_path: Path) -> None:
    """Of a run without an iteration only the settings are there."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(CONFIG.as_dict()))
    (out / "metrics.jsonl").write_text('{"iteration": 0}\n')
    assert Run(CONFIG, out).execute()
    with pytest.raises(ConfigError, match=r"out = .* a folder without a run; --resume"):
        Run(CONFIG, out).execute()


def test_an_iteration_is_never_thrown_away(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(state: dict) -> None:
        if state.get("iteration") == 1:
            raise KeyError("later")

    with pytest.raises(PartError, match="later"):
        Run(CONFIG, out, report=stop).execute()
    assert (out / "metrics.jsonl").read_text().count("\n") == 2
    assert Run(CONFIG, out).execute(resume=True)


def test_new_folders_and_files_in_python(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        with new_folder(folder, "run", lambda folder: True, lambda: False):
            (folder / "inner").mkdir()
            (folder / "inner" / "x").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").write_text("mine")
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["mine"]
    require_new_file(tmp_path / "deep" / "er" / "x.png")
    assert not (tmp_path / "deep").exists()
    with pytest.raises(ConfigError, match=r"out: .*x\.png cannot be written: "):
        require_new_file(tmp_path / "kept" / "mine" / "x.png")
    if Path("/proc/self").is_dir():
        with pytest.raises(ConfigError, match=r"cannot be (written|locked|used)"):
            fail(Path("/proc/self/x"))
