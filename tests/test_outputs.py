"""What flowrl did not make is never written over, outputs are tried before the work, a failed start
leaves nothing, and locks name their holder.
"""

import json
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest
from small_run import MIXTURE, TINY_RUN, error_of, flowrl_

from flowrl.compare.arms import method_arms
from flowrl.compare.comparison import CompareConfig, compare
from flowrl.core.errors import ConfigError, PartError
from flowrl.run.io import file_lock, new_folder, require_new_file, write_json
from flowrl.run.job import Run

EVALUATE = "evaluate --weights run --limit 1 --num-steps 2"
REWARD = """
class Late:
    def score(self, images, prompts):
        if len(images) >= LEAST:
            raise KeyError("out of memory")
        return images.flatten(1).mean(1)
"""
# Commands that end with the option of their output, which is one of these to them
OUTPUTS = {
    f"train {MIXTURE} --out": "comparison run run/evaluation notes file file/x notes/mine.txt .",
    f"compare {MIXTURE} --out": "comparison run run/evaluation notes file file/x .",
    f"{EVALUATE} --out": "comparison run notes file file/x .",
    "sample --prompts 'three red circles' --count 1 --num-steps 1 --out": "mine.png x.mine run"
    f" run/samples.json file/x.png {'x' * 300}.png",
    "explain uniform --out": f"mine.png file/x.png {'x' * 300}.png",
    "prompts text --count 2 --file": "mine.jsonl prompts.jsonl file/x.jsonl run",
    "pretrain --updates 1 --out": "run/weights.safetensors file/x.safetensors run /dev/full",
    "bench tune flow-grpo --save": "/ /dev/full file/x mine.jsonl",
    "bench tune flow-grpo --out": "mine.jsonl file/x.jsonl run",
    "bench rule --arm 'a: clip_range=0.3' --out": "notes file/x .",
    "bench verdict --run images --images": "mine.jsonl file file/x.jsonl run",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One of every kind of folder and file."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        run(f"compare {MIXTURE} --methods flow-grpo --seeds 0 --workers 1 --out comparison")
        run(f"train {MIXTURE} --out run", EVALUATE, "prompts text --count 3 --file prompts.jsonl")
    for path in ("notes/mine.txt", "file", "mine.png", "mine.jsonl"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text("mine")
    return root


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*lines):
    for line in lines:
        assert flowrl_(line) == 0


@pytest.mark.parametrize(
    ("command", "taken"), [(c, taken) for c, names in OUTPUTS.items() for taken in names.split()]
)
def test_nothing_of_others_is_written_over(command, taken, made, monkeypatch, capsys):
    """One error before the work (minutes for `pretrain`), and every byte is as
    it was.
    """
    monkeypatch.chdir(made)
    before, error = contents(made), error_of(f"{command} {taken}", capsys)
    assert error.startswith("flowrl: error: ") and error.count("\n") == 1
    assert taken.split("/")[0][:20] in error and contents(made) == before


def test_an_evaluation_of_others_is_not_written_over(made, tmp_path, capsys):
    """In the default folder, which is inside the run."""
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(made / "run", run, ignore=shutil.ignore_patterns("evaluation"))
    for folder in (other, run / "evaluation"):
        write_json(folder / "evaluation.json", {"mine": 1})
    command, before = f"evaluate --weights {run} --limit 1 --num-steps 1", contents(tmp_path)
    assert "evaluation' is not allowed; allowed: a new folder, or" in error_of(command, capsys)
    assert contents(tmp_path) == before
    shutil.rmtree(run / "evaluation")
    (run / "evaluation").symlink_to(other)
    assert "evaluation is a symbolic link" in error_of(command, capsys)
    assert contents(other).items() <= before.items() and len([*other.iterdir()]) == 1


def test_what_the_same_command_has_made_is_replaced(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample, explain, prompts = (
        line for line in OUTPUTS if line.split()[0] in ("sample", "explain", "prompts")
    )
    evaluate = EVALUATE.replace("run", str(made / "run"))
    lines = [f"{sample} s.png", f"{explain} e.png", f"{prompts} p.jsonl", f"{evaluate} --out e"]
    run(*lines, *lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "e.png", "p.jsonl", "s.png"]


@pytest.mark.parametrize("least", [4, 6])
def test_a_start_that_fails_leaves_nothing_and_does_not_block_the_next(least, tmp_path):
    """In the evaluation of 4 samples before training, or in the first iteration, of 6."""
    (tmp_path / "reward.py").write_text(REWARD.replace("LEAST", str(least)))
    out = tmp_path / "new" / "deep" / "out"
    bad = TINY_RUN.replace(reward=f"{tmp_path}/reward.py:Late")
    compared = CompareConfig(bad, method_arms(("flow-grpo",)), (0,))
    for start in (Run(bad, out).execute, lambda: compare(compared, out, workers=1)):
        with pytest.raises(Exception, match="out of memory"):
            start()
        assert not (tmp_path / "new").exists()
    out.mkdir(parents=True)
    with pytest.raises(Exception, match="out of memory"):
        Run(bad, out).execute()
    assert list(out.iterdir()) == []
    assert Run(TINY_RUN, out).execute()


def test_a_start_that_was_killed_may_be_repeated_but_an_iteration_is_kept(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_json(out / "config.json", TINY_RUN.as_dict())
    (out / "metrics.jsonl").write_text('{"iteration": 0}\n')

    def stop(state):
        if state.get("iteration") == 1:
            raise KeyError("later")

    with pytest.raises(PartError, match="later"):
        Run(TINY_RUN, out, report=stop).execute()
    assert (out / "metrics.jsonl").read_text().count("\n") == 2
    message = "a folder without a run; to continue a run, use --resume"
    with pytest.raises(ConfigError, match=message):
        Run(TINY_RUN, out).execute()
    assert Run(TINY_RUN, out).execute(resume=True)


def test_a_new_folder_is_removed_with_its_new_content_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").write_text("mine")
    for folder in (tmp_path / "a" / "b", tmp_path / "kept"):
        made = new_folder(folder, "run", lambda folder: True, lambda: False)
        with suppress(ZeroDivisionError), made:
            (folder / "inner").mkdir()
            raise ZeroDivisionError
    require_new_file(tmp_path / "deep" / "er" / "x.png")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "mine"]


DIES = """
import os, pathlib, sys
from flowrl.run.io import file_lock

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
