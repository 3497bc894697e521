"""What a resume says of settings and prompts that have changed since the start of the run."""

import json
import re
import shutil

import pytest
from small_run import (
    MIXTURE,
    SMALL,
    edit,
    error_of,
    flowrl_,
    model_files,
    numbers,
    trainer_of,
    words,
)

from flowrl.cli.main import main
from flowrl.rollout.groups import PromptStream
from flowrl.run.checkpoint import restore_trainer, trainer_state
from flowrl.run.job import Run
from flowrl.run.parts.prompts import read_prompts
from flowrl.run.saved import find_weights

OPTIONS = f"{MIXTURE} --groups 2 --eval-every 1 --checkpoint-every 1 --keep-checkpoints 9"


@pytest.mark.satellite
@pytest.mark.parametrize("edited", [True, False])
def test_a_finished_run_continues_with_more_iterations(edited, tmp_path, capsys):
    for name, iterations in (("short", 2), ("long", 4)):
        assert flowrl_(f"train {OPTIONS} --iterations {iterations} --out {tmp_path}/{name}") == 0
    out = tmp_path / "short"
    assert flowrl_(f"train --resume {out}") == 0
    assert "ended after iteration 2 (--iterations N continues it to N)" in capsys.readouterr().out
    if edited:
        edit(out, iterations=4)
    assert flowrl_(f"train --resume {out}{'' if edited else ' --iterations 4'}") == 0
    assert "changed settings: iterations 2 -> 4" in capsys.readouterr().out
    assert numbers(out) == numbers(tmp_path / "long")
    assert json.loads((out / "done.json").read_text()) == {"iterations": 4}


@pytest.mark.satellite
def test_changed_settings_are_named_or_refused_if_they_have_no_effect(tmp_path, capsys):
    out = tmp_path / "run"
    assert flowrl_(f"train {OPTIONS} --iterations 3 --out {out}") == 0
    edit(out, learning_rate=0.001)
    error = error_of(f"train --resume {out}", capsys)
    assert "ended after iteration 3 " in error and "learning_rate 0.02 -> 0.001" in error
    assert "--change" in error_of(f"train --resume {out} --from 000002", capsys)
    assert flowrl_(f"train --resume {out} --from 000002 --change") == 0
    assert "changed settings: learning_rate 0.02 -> 0.001" in capsys.readouterr().out
    edit(out, iterations=1)
    assert "--from" in error_of(f"train --resume {out}", capsys)
    (out / "done.json").unlink()  # as of a run that was paused
    assert "iterations = 1 is not allowed; allowed: 3 or more" in error_of(
        f"train --resume {out}", capsys
    )
    (out / "config.yaml").write_text("{")  # what has changed is unknown
    assert flowrl_(f"train --resume {out} --from 000001") == 0


@pytest.mark.satellite
@pytest.mark.parametrize(("lines", "said"), [(4, "3 recorded iterations"), (2, "1 rec"), (1, "")])
def test_a_run_without_a_checkpoint_says_what_it_replaces(lines, said, tmp_path, capsys):
    out = tmp_path / "run"
    assert flowrl_(f"train {OPTIONS} --iterations 3 --out {out}") == 0
    expected, metrics = numbers(out), out / "metrics.jsonl"
    (out / "done.json").unlink()
    shutil.rmtree(out / "checkpoints")
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:lines]))
    capsys.readouterr()
    assert flowrl_(f"train --resume {out}") == 0
    before = " ".join(capsys.readouterr().out.partition("iteration 1/3")[0].split())
    line = "has no checkpoint: the run begins again at iteration 1 and replaces its"
    assert (f"{out} {line} {said}" in before) == bool(said) and ("again" in before) == bool(said)
    assert numbers(out) == expected


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished run of three iterations with all its checkpoints, and a comparison's folder."""
    root = tmp_path_factory.mktemp("kept")
    assert flowrl_(f"train {OPTIONS} --iterations 3 --out {root}/run") == 0
    for name in ("arms", "export"):
        (root / name).mkdir()
    (root / "arms" / "config.json").write_text('{"arms": {}}')
    return root


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --resume {0}/none", "resume: {0}/none does not exist; allowed: a folder that"),
        ("train --resume {0}/none@best", "resume: {0}/none@best does not exist; allowed: a folder"),
        ("train --resume {0}/export", "resume: {0}/export is no run; allowed: a folder that"),
        ("train --resume {0}/run@best", "allowed: flowrl train --resume {0}/run --from best"),
        (
            "train --resume {0}/run/checkpoints/000002.safetensors",
            "allowed: flowrl train --resume {0}/run --from 000002",
        ),
        ("train --resume {0}/arms", "allowed: flowrl compare --resume {0}/arms"),
        ("compare --resume {0}/run", "allowed: flowrl train --resume {0}/run"),
        ("compare --resume {0}/none", "resume: {0}/none does not exist; allowed: a folder"),
        ("train --resume {0}/run --from 4", "from: no checkpoint '000004' in {0}/run; allowed:"),
        ("train --resume {0}/run --from bst", "best, last or one of 000001, 000002, 000003"),
    ],
)
def test_what_cannot_be_resumed_names_the_command_that_can(line, said, kept, capsys):
    """Before anything is printed or written."""
    assert flowrl_(line.format(kept)) == 2
    shown = capsys.readouterr()
    assert said.format(kept) in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.satellite
@pytest.mark.parametrize("name", ["best", "last", "2", "000002"])
def test_a_resume_begins_at_a_checkpoint_by_each_of_its_names(name, kept, tmp_path, capsys):
    run = shutil.copytree(kept / "run", tmp_path / "run")
    done = int(find_weights(f"{run}@{name}").checkpoint)
    rows = numbers(run)[0]
    capsys.readouterr()
    assert flowrl_(f"train --resume {run} --from {name}") == 0
    trained = re.findall(r"iteration +(\d)/3", capsys.readouterr().out)
    assert trained == [str(iteration) for iteration in range(done + 1, 4)]
    assert numbers(run)[0] == rows


def test_a_run_that_an_observer_stopped_says_how_it_continues(tmp_path, capsys):
    out = tmp_path / "run"
    assert flowrl_(f"train {OPTIONS} --iterations 4 --observe 'budget(nfe=1)' --out {out}") == 13
    capsys.readouterr()
    assert flowrl_(f"train --resume {out}") == 13
    assert "ended after iteration 1 (it was stopped by budget" in capsys.readouterr().out
    edit(out, iterations=6)
    assert "--from: 000001" in error_of(f"train --resume {out}", capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline, its prompts and its reward."""
    return model_files(tmp_path_factory.mktemp("model"))


FIVE = "a red fox\na red car\na red hat\na red cat\na red cow\n"


@pytest.mark.satellite
@pytest.mark.parametrize("heldout", ["", "kept", "changed"])
def test_changed_prompts_are_refused_or_taken(heldout, model, tmp_path, capsys):
    """Also if fewer are left than the order in the checkpoint has; evaluations keep theirs."""
    train, held, out = tmp_path / "mine.txt", tmp_path / "held.txt", tmp_path / "run"
    files = {"prompts": train} | ({"heldout_prompts": held} if heldout else {})
    for path in files.values():
        path.write_text(FIVE)
    given = model | files | {"preset": "tiny", "groups": 2, "iterations": 2, "tracker": "none"}
    assert main(["train", *words(**given, eval_samples=4, out=out)]) == 0
    texts = json.loads((out / "samples.json").read_text())["prompts"]
    edit(out, iterations=4)
    train.write_text("a red fox\na blue fox\n")
    held.write_text(FIVE.replace("red", "blue") if heldout == "changed" else FIVE)
    again = f"train --resume {out} --trust"
    error = error_of(again, capsys)
    assert f"prompts {train} (5 prompts at the start, 2 now)" in error
    assert (f"heldout_prompts {held}" in error) == (heldout == "changed")
    assert "--change, which" in error_of(f"{again} --changed-prompts", capsys)
    assert flowrl_(f"{again} --change") == 0
    assert f"changed prompts: prompts {train} (5" in capsys.readouterr().out
    assert json.loads((out / "samples.json").read_text())["prompts"] == texts
    assert [prompt.text for prompt in read_prompts(out / "prompts.jsonl")] == [
        "a red fox",
        "a blue fox",
    ]
    # the new prompts and the held-out ones are now those of the run
    edit(out, iterations=5)
    assert flowrl_(again) == 0
    train.unlink()
    options = f"--trust --limit 2 --out {tmp_path}/evaluated"
    assert flowrl_(f"evaluate --weights {out} {options}") == 0
    scores = json.loads((tmp_path / "evaluated" / "evaluation.json").read_text())
    assert scores["prompts"] == 2
    assert flowrl_(f"sample --weights {out} --trust --count 1 --out {tmp_path}/x.png") == 0


def test_an_order_of_other_prompts_is_not_continued():
    """A process may die between the first iteration on changed prompts and its checkpoint."""
    trainer, other = trainer_of(SMALL), trainer_of(SMALL)
    trainer.iteration()
    state = trainer_state(trainer)
    other.prompts = PromptStream(trainer.prompts.prompts[:3], 0)
    restore_trainer(other, state)
    assert len(state.values["order"]) > 3 and other.prompts.order == []
    assert len(other.prompts.take(4)) == 4


@pytest.mark.satellite
@pytest.mark.parametrize("compiled", [True, False])
def test_a_run_says_that_it_compiles_before_it_does(compiled, tmp_path):
    states = []

    def report(state):
        states.append(state)
        if state.get("phase") == "evaluation":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run(SMALL.replace(compile=compiled), tmp_path / "run", report).execute()
    notes = [state["note"] for state in states if "note" in state]
    assert len(notes) == compiled and all("compiling the network" in note for note in notes)


@pytest.mark.satellite
def test_prompts_that_a_run_holds_out_stay_held_out(model, tmp_path, capsys):
    """Also if the training prompts change; a run that did not hold any out still does not."""
    train, out = tmp_path / "mine.txt", tmp_path / "run"
    train.write_text("\n".join(f"a red fox {number}" for number in range(20)))
    given = model | {"prompts": train, "preset": "tiny", "groups": 2, "iterations": 1}
    assert main(["train", *words(**given, tracker="none", eval_samples=4, out=out)]) == 0
    assert "8 prompts are held out of training for evaluations, which" in capsys.readouterr().out
    held = (out / "heldout-prompts.jsonl").read_text()
    edit(out, iterations=2)
    assert flowrl_(f"train --resume {out} --trust") == 0
    train.write_text("\n".join(f"a red fox {number}" for number in range(60)))
    edit(out, iterations=3)
    assert f"prompts {train} (12 prompts at the start, 52" in error_of(
        f"train --resume {out} --trust", capsys
    )
    assert flowrl_(f"train --resume {out} --trust --change") == 0
    assert (out / "heldout-prompts.jsonl").read_text() == held
    assert len((out / "prompts.jsonl").read_text().splitlines()) == 52
