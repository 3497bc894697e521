"""A world of the user's, the one of docs/guides/world.md: from the command line, as a plug-in and
as a Python object; and the world of a model.
"""

import json
import math
import re
import runpy
from pathlib import Path

import pytest
from small_run import error_of, flowrl_, model_files

from flowrl import Run, preset
from flowrl.losses import ClippedLoss
from flowrl.run.build import make_world, run_method
from flowrl.run.config import RunConfig
from flowrl.run.worlds import world
from flowrl.worlds import World

PAGE = Path(__file__).parents[2] / "docs/guides/world.md"
(CODE,) = re.findall(r"```python\n(# my_world\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
CODE = CODE.replace("range(1000)", "range(20)")  # a worse base model, in less time
OWN = "my_world.py:World"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_world.py").write_text(CODE)
    return tmp_path


def with_class(name, body):
    """The spec of a class in other.py that changes the world of the page."""
    Path("other.py").write_text(
        f"{CODE.partition('if __name__')[0]}\n\nclass {name}(World):\n    {body}\n"
    )
    return f"other.py:{name}"


def test_the_settings_start_from_the_worlds_defaults(capsys):
    run = preset("default").apply(world=OWN)
    assert (run.environment.task, run.environment.reward_form) == ("hours", "near")
    assert (run.iterations, run.optim.learning_rate) == (20, 1e-3)
    loss = run_method(run).loss
    assert isinstance(loss, ClippedLoss) and loss.clip_range == pytest.approx(
        1e-4 * math.sqrt(65_536 / 2)
    )
    assert preset("default").apply(world=OWN, method="tempflow-grpo").rollout.group_size == 54
    with pytest.raises(SystemExit):
        flowrl_(f"compare --world {OWN} --help")
    assert "(default: hours)" in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_run_is_resumed_with_trust_and_evaluated(capsys):
    config = preset("tiny").apply(world=OWN, heldout_rewards=("hit",))
    assert not Run(config, Path("run"), stop=lambda: True).execute()
    assert "add --trust" in error_of("train --resume run", capsys)
    assert flowrl_("train --resume run --trust") == 0
    assert flowrl_("evaluate --weights run --trust") == 0
    assert flowrl_(f'sample --world {OWN} --num-steps 2 --prompts "2 o\'clock" --out base.png') == 0
    scores = json.loads(Path("run/evaluation/evaluation.json").read_text())["scores"]
    assert set(scores) == {"near", "hit"} and Path("base.png").exists()


def test_a_changed_file_is_another_world():
    before = world(OWN)
    assert world(OWN) is before
    Path("my_world.py").write_text(CODE.replace('name = "clock"', 'name = "changed"'))
    assert world(OWN).name == "changed"


@pytest.mark.parametrize("how", ["name", "object"])
def test_a_python_object_is_the_same_world_as_its_name(how, tmp_path):
    mine = runpy.run_path("my_world.py")["World"]()
    assert isinstance(mine, World)
    config = preset("tiny").apply(world=OWN if how == "name" else mine)
    assert config.environment.task == "hours"
    assert Run(config, tmp_path / "run").execute()
    recorded = json.loads((tmp_path / "run/config.json").read_text())["environment"]
    assert recorded["world"].startswith(OWN if how == "name" else "clock [object of ")
    # the folder of an object has its name and class only
    trusted = "--trust" * (how == "name")
    assert flowrl_(f"sample --weights run --out a.png {trusted}") == 2 * (how != "name")


def refused(capsys, options):
    error = error_of(f"train {options} --out run", capsys)
    assert (
        not Path("run").exists() and error.startswith("flowrl: error: ") and error.count("\n") == 1
    )
    return error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("parse = None", "has no `parse`"),
        ("tasks = 'hours'", "world: Other: tasks: "),
        ("elements = 3", "elements of world clock = 3 is not allowed; allowed: 2, for"),
        ("defaults = {'learning_rat': 1}", "unknown setting 'learning_rat'"),
        ("policy = lambda self, options: torch.nn.Linear(1, 1)", "policy of world clock"),
        ("prompts = lambda self, task, part: ['1']", "train prompts of world clock = ['1']"),
    ],
)
def test_what_is_wrong_with_a_world_is_said_in_one_line(body, words, capsys):
    spec = with_class("Other", body)
    if body.startswith("parse"):
        code = CODE.replace("def parse", "def parsed").replace("class World", "class Other")
        Path("other.py").write_text(code)
    assert words in refused(capsys, f"--preset tiny --world {spec}")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--world nope", "unknown world 'nope'; allowed: edits, mixture, points, shapes"),
        (f"--world {OWN} --task=x", "task of world clock = 'x' is not allowed"),
        (f"--world {OWN} --reward-form=x", "reward_form = 'x' is not allowed"),
        (f"--world {OWN} --guidance-scale=2", "left out without a `model`"),
        ("--world model", "model if `model` is given"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_in_one_line(more, words, capsys):
    assert words in refused(capsys, more)


def test_an_exception_in_a_world_names_the_line(capsys):
    spec = with_class("Other", "def policy(self, options): raise ValueError('no network')")
    assert flowrl_(f"train --preset tiny --world {spec} --out run") == 1
    error = capsys.readouterr().err
    assert "Other.policy" in error and "other.py, line" in error and "no network" in error


def test_held_out_prompts_have_their_own_file(tmp_path):
    files = model_files(tmp_path, ("# prompts", "a red fox", "", "  a red car  ", "a red hat"))
    (tmp_path / "held.jsonl").write_text('{"prompt": "two cats", "count": 2}\n')
    config = preset("default").apply(**files, heldout_prompts=f"{tmp_path}/held.jsonl")
    world = make_world(config)
    training = [prompt.text for prompt in world.prompts("prompts", "train")]
    assert training == ["a red fox", "a red car", "a red hat"]
    (held,) = world.prompts("prompts", "heldout")
    assert (held.text, held.metadata) == ("two cats", {"count": 2})
    assert world.reward("reward") is world.reward("reward")
    loss = run_method(config).loss
    assert isinstance(loss, ClippedLoss) and loss.clip_range == 1e-4
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict())), trust=True) == config
