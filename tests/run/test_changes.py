"""Changes of a run's settings when it is resumed: free ones, those with consent, those refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_run import MIXTURE, edit, error_of, flowrl_, model_files, numbers, rows_of, words

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.run.config import RunConfig, load_config, preset
from flowrl.run.job import Run
from flowrl.run.parts.settings import options_text, owners
from flowrl.run.results import changes_of, comparable, untrained_of
from flowrl.run.saved import best_checkpoint
from flowrl.run.started import FIXED, FREE, changed_settings, require_resumable

OPTIONS = f"{MIXTURE} --groups 2 --eval-every 1 --checkpoint-every 1 --keep-checkpoints 9"
RATE = {"learning_rate": [0.02, 0.001]}


@pytest.fixture
def run(tmp_path):
    """A run of two iterations that has finished."""
    assert flowrl_(f"train {OPTIONS} --iterations 2 --out {tmp_path}/run") == 0
    return tmp_path / "run"


def pause(folder):
    """Make a finished run one that was paused."""
    (folder / "done.json").unlink()


def changed(folder):
    """The recorded changes by iteration."""
    rows = rows_of(folder)
    return {row["iteration"]: row["changed"] for row in rows if "changed" in row}


def test_every_setting_is_in_one_class():
    names = {*owners(RunConfig)}
    assert len({*FREE}) == len(FREE) and not {*FREE} & {*FIXED}
    assert {*FREE} | {*FIXED} < names


def test_the_guide_lists_the_settings_of_each_class():
    page = Path(__file__).parents[2] / "docs" / "guides" / "resume.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    free, change, fixed = ({*re.findall(r"`(\w+)`", row)} for row in rows)
    assert free == {*FREE} and fixed == {*FIXED}
    assert change - {"Run"} < {*owners(RunConfig)} - free - fixed


def other(name, value):
    """Another value of a setting as JSON, which is checked only after the comparison."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, value[0] if value else "x"]
    return value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", sorted(owners(RunConfig)))
def test_a_setting_is_free_or_needs_consent_or_is_refused(name, tmp_path, monkeypatch):
    """All settings, whatever their values: only the comparison matters."""
    values = json.loads(json.dumps(RunConfig().typed()))

    class Other(RunConfig):
        def typed(self):
            return values | {name: other(name, values[name])}

    monkeypatch.setattr("flowrl.run.started.load_config", lambda path, trust: RunConfig())
    kind = "free" if name in FREE else "fixed" if name in FIXED else "consent"
    kind = {"device": "fixed"}.get(name, kind)  # CPU to another kind
    for change in (False, True):
        need = "a resume cannot change" if kind == "fixed" else "--change"
        if kind == "free" or (kind == "consent" and change):
            assert require_resumable(tmp_path, Other(), "", change) == ""
        else:
            with pytest.raises(ConfigError, match=need) as caught:
                require_resumable(tmp_path, Other(), "", change)
            assert f"{name} {values[name]!r} -> " in str(caught.value)
            option = name.replace("_", "-")
            assert any(f"--{no}{option} " in str(caught.value) for no in ("", "no-"))


@pytest.mark.parametrize("edited", [True, False])
def test_free_settings_change_without_a_word_and_without_a_record(edited, run, tmp_path, capsys):
    free = {"iterations": 4, "max_batch": 64, "checkpoint_every": 2}
    assert flowrl_(f"train {OPTIONS} --iterations 4 --out {tmp_path}/long") == 0
    if edited:
        edit(run, **free)
    options = "" if edited else options_text(free)
    assert flowrl_(f"train --resume {run} {options}") == 0
    assert "max_batch 512 -> 64" in capsys.readouterr().out
    assert numbers(run) == numbers(tmp_path / "long") and changed(run) == {}
    assert load_config(run / "config.json").logging.checkpoint_every == 2


def test_the_old_end_of_an_extended_run_is_evaluated(tmp_path):
    """All else is that of a run with the larger number from its start."""
    options = OPTIONS.replace("--eval-every 1", "--eval-every 4")
    for name, iterations in (("short", 3), ("long", 8)):
        assert flowrl_(f"train {options} --iterations {iterations} --out {tmp_path}/{name}") == 0
    short, long = tmp_path / "short", tmp_path / "long"
    assert flowrl_(f"train --resume {short} --iterations 8") == 0
    mine, theirs = rows_of(short), rows_of(long)
    assert mine[3].pop("evaluation") and not theirs[3].pop("evaluation")
    assert mine == theirs
    assert numbers(short)[1:] == numbers(long)[1:]


@pytest.mark.parametrize("edited", [True, False])
def test_a_change_needs_consent_and_is_recorded_once(edited, run, capsys):
    again = f"train --resume {run} --iterations 4"
    if edited:
        edit(run, learning_rate=0.001)
    options = "" if edited else "--learning-rate 0.001"
    error = error_of(f"{again} {options}", capsys)
    assert "learning_rate 0.02 -> 0.001: the numbers" in error
    assert f"--preset {run}/config.yaml --iterations 4 --learning-rate 0.001" in error
    assert flowrl_(f"{again} {options} --change") == 0
    assert "iterations 2 -> 4, learning_rate 0.02 -> 0.001" in capsys.readouterr().out
    assert changed(run) == {3: RATE}
    assert changes_of(rows_of(run)) == [(3, "learning_rate 0.02 -> 0.001")]
    # it is now the setting of the run
    assert flowrl_(f"train --resume {run} --iterations 5") == 0
    assert changed(run) == {3: RATE}
    assert flowrl_(f"train --resume {run} --iterations 6 --learning-rate 0.02 --change") == 0
    assert changed(run) == {3: RATE, 6: {"learning_rate": [0.001, 0.02]}}


def test_an_edit_of_config_yaml_changes_nothing_and_says_where_to_edit(run, capsys):
    """Settings that need consent, free ones, and one that is refused."""
    path = run / "config.yaml"
    for again, code in ((f"train --resume {run}", 0), (f"train --resume {run} --iterations 3", 0)):
        text = path.read_text()
        for name, value in {"learning_rate": 0.5, "max_batch": 7, "seed": 9}.items():
            text, count = re.subn(rf"(\b{name}): .*", rf"\1: {value}", text)
            assert count == 1
        path.write_text(text)
        capsys.readouterr()
        assert flowrl_(again) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert "changed settings: iterations 2 -> 3 " in shown
    unread = "a resume does not read config.yaml:"
    assert f"{unread} seed 9 -> 0, max_batch 7 -> 512, learning_rate 0.5 -> 0.02. Edit" in shown
    assert changed(run) == {} and load_config(path).optim.learning_rate == 0.02


def test_a_change_that_no_checkpoint_has_is_undone_without_consent(run):
    edit(run, learning_rate=0.001)
    path = run / "config.yaml"  # a start with this setting was killed before its first checkpoint
    path.write_text(re.sub(r"(learning_rate): .*", r"\1: 0.001", path.read_text()))
    assert flowrl_(f"train --resume {run} --iterations 3 --learning-rate 0.02") == 0
    assert changed(run) == {} and load_config(path).optim.learning_rate == 0.02


def test_a_change_survives_kills(run):
    """Before the first row with it, after it, and when the run returns to a state before it."""
    config = load_config(run / "config.json").replace(learning_rate=0.001, iterations=6)

    def die(at):
        def report(state):
            if state.get("phase") == "rollout" and len(rows_of(run)) == at:
                raise KeyboardInterrupt

        return report

    for at in (3, 4):
        settings = config.replace(checkpoint_every=9)
        with pytest.raises(KeyboardInterrupt):
            Run(settings, run, die(at), change=True).execute(resume=True)
        for path in sorted((run / "checkpoints").iterdir())[2:]:
            path.unlink()  # which a process that is killed has not written
    assert changed(run) == {3: RATE}
    assert flowrl_(f"train --resume {run}") == 0  # the consent has been given
    assert changed(run) == {3: RATE} and len(rows_of(run)) == 7
    assert flowrl_(f"train --resume {run} --from 000001") == 0
    assert changed(run) == {2: RATE}
    assert flowrl_(f"train --resume {run} --from 000001 --learning-rate 0.02 --change") == 0
    assert changed(run) == {}  # as at the checkpoint


def test_the_samples_before_training_have_the_score_of_the_end(run):
    """Also if a kill undoes the change of what is scored, and on the way back before it."""
    config = load_config(run / "config.json")
    config = config.replace(reward_form="strict", iterations=4, checkpoint_every=9)

    def die(state):
        if state.get("phase") == "rollout":
            raise KeyboardInterrupt

    def scores():
        return json.loads((run / "samples.json").read_text())["reward_before"]

    soft = scores()
    with pytest.raises(KeyboardInterrupt):
        Run(config, run, die, change=True).execute(resume=True)
    (run / "checkpoints" / "000003.safetensors").unlink(missing_ok=True)
    assert flowrl_(f"train --resume {run}") == 0
    assert {*scores()} <= {0.0, 1.0} and "untrained" in rows_of(run)[3]
    assert flowrl_(f"train --resume {run} --from 000001 --reward-form soft --change") == 0
    assert scores() == soft and changed(run) == {}
    assert not any("untrained" in row for row in rows_of(run))


def test_a_changed_run_computes_as_one_with_its_settings(run, tmp_path):
    """From the checkpoint on, also on the way back."""
    plain = f"train {OPTIONS} --iterations 4 --out {tmp_path}/plain"
    assert flowrl_(plain) == 0
    assert flowrl_(f"train --resume {run} --learning-rate 0.001 --iterations 4 --change") == 0
    assert rows_of(run)[3]["reward_mean"] == rows_of(tmp_path / "plain")[3]["reward_mean"]
    assert rows_of(run)[4]["reward_mean"] != rows_of(tmp_path / "plain")[4]["reward_mean"]
    assert flowrl_(f"train --resume {run} --learning-rate 0.02 --from 000002 --change") == 0
    assert changed(run) == {} and numbers(run) == numbers(tmp_path / "plain")


def test_a_decaying_rate_follows_the_new_length_and_says_so(tmp_path):
    out = tmp_path / "run"
    schedule = "--lr-schedule cosine --final-learning-rate 0.5"
    assert flowrl_(f"train {OPTIONS} --iterations 2 {schedule} --out {out}") == 0
    assert flowrl_(f"train --resume {out} --iterations 4") == 0
    assert changed(out) == {3: {"iterations": [2, 4]}}


def test_a_paused_run_ends_no_earlier_than_its_next_iteration(tmp_path, capsys):
    """Whose last iteration would have no evaluation."""
    out, asked = tmp_path / "run", []
    run = (
        preset("tiny").apply(world="mixture", task="direction").replace(eval_every=9, iterations=9)
    )
    assert not Run(run, out, stop=lambda: bool(asked.append(0)) or len(asked) == 3).execute()
    error = error_of(f"train --resume {out} --iterations 3", capsys)
    assert "iterations = 3 is not allowed; allowed: 4 or more" in error
    assert flowrl_(f"train --resume {out} --iterations 4") == 0
    assert rows_of(out)[-1]["iteration"] == 4 and rows_of(out)[-1]["evaluation"]


FIXED_CASES = {
    "--method tp-grpo": ("method 'flow-grpo' -> 'tp-grpo' (it belongs to the method", "start"),
    "--num-steps 5": ("num_steps 4 -> 5 (it belongs", "start"),
    "--seed 1": ("seed 0 -> 1 (a run reads it only before", "start"),
    "--optimizer adamw-8bit": ("optimizer 'adamw' -> 'adamw-8bit' (the checkpoint", ""),
    "--device cuda": ("device 'cpu' -> 'cuda' (random generators", "start"),
    "--world shapes --task text": ("world 'mixture' -> 'shapes' (the trained weights belong", ""),
}


@pytest.mark.parametrize("options", FIXED_CASES)
@pytest.mark.parametrize("consent", ["", " --change"])
def test_what_cannot_change_says_why_and_what_to_type(options, consent, run, capsys):
    text, weights = FIXED_CASES[options]
    before = sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file())
    error = error_of(f"train --resume {run} --iterations 3 {options}{consent}", capsys)
    assert f"{run}: a resume cannot change" in error and text in error
    command = error.rpartition("flowrl train ")[2].strip()
    assert options.split(" --")[0] in command and "--iterations 3" in command
    assert (f"--start-from {run}@last" in command) == bool(weights)
    if weights and "cuda" not in options and not consent:  # what the error says works
        assert flowrl_(f"train {command.replace('--out NEW', f'--out {run}/../new')}") == 0
        assert f"begins with the weights, averages and moments of {run}@" in capsys.readouterr().out
    after = sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file())
    assert [p for p in before if p[0].name != ".lock"] == [p for p in after if p[0].name != ".lock"]


def test_an_edit_of_a_fixed_setting_is_refused(run, capsys):
    for name, value in {"method": "tp-grpo", "seed": 3}.items():
        text = (run / "config.json").read_text()
        edit(run, iterations=4, **{name: value})
        error = error_of(f"train --resume {run} --change", capsys)
        assert f"a resume cannot change {name} " in error
        (run / "config.json").write_text(text)
    assert flowrl_(f"train --resume {run}") == 0


def test_options_of_the_command_that_name_another_run_are_refused(run, capsys):
    for option in ("--out elsewhere", "--preset long", "--settings published", "--config x.yaml"):
        error = error_of(f"train --resume {run} {option}", capsys)
        assert error.endswith("left out with --resume, which sets it\n")
    assert "nothing in this run uses it" in error_of(
        f"train --resume {run} --strict --iterations 3", capsys
    )


def test_consent_without_a_resume_is_refused(tmp_path, capsys):
    error = error_of(f"train {OPTIONS} --out {tmp_path}/new --change", capsys)
    assert "change = True is not allowed; allowed: only with --resume" in error


def test_a_refused_change_leaves_the_samples(run, capsys):
    before = (run / "before.safetensors").read_bytes()
    again = f"train --resume {run} --from 000002 --eval-samples 3 --change"
    assert "iterations = 1 is not" in error_of(f"{again} --iterations 1", capsys)
    assert (run / "before.safetensors").read_bytes() == before
    assert flowrl_(f"{again} --iterations 3") == 0
    samples = json.loads((run / "samples.json").read_text())
    assert [len(samples[name]) for name in ("prompts", "reward_before")] == [3, 3]


def test_rewards_are_compared_with_those_since_their_change():
    rows: list[Any] = [{"iteration": i} for i in range(4)]
    rows[1]["changed"] = {"learning_rate": [1, 2]}
    assert comparable(rows) == rows
    rows[2]["changed"] = {"reward": [None, "x"]}
    assert comparable(rows) == rows[2:]


SCORES = """
class Level:
    def __init__(self, level: float = 0.0):
        self.level = level

    def score(self, images, prompts):
        return images.flatten(1).mean(1) + self.level
"""


def test_another_reward_begins_a_new_scale(run, tmp_path, capsys):
    """No collapse is seen in it, the samples before training have the new score, and its code needs
    no consent for what the file has.
    """
    (tmp_path / "mine.py").write_text(SCORES)
    reward = f"{tmp_path}/mine.py:Level"
    observe = "--observe 'stop-on-collapse(drop=0.1)'"
    given = f"train --resume {run} --change {observe} --reward '{reward}(level={{}})'"
    assert flowrl_(f"{given.format(5)} --iterations 3") == 0
    before = json.loads((run / "samples.json").read_text())["reward_before"]
    assert min(before) > 3
    assert "--trust" in error_of(f"train --resume {run} --iterations 4", capsys)
    assert flowrl_(f"{given.format(-5)} --iterations 4") == 0
    assert max(json.loads((run / "samples.json").read_text())["reward_before"]) < -3
    rows = rows_of(run)
    assert rows[3]["evaluation"]["reward"] > 3 and rows[4]["evaluation"]["reward"] < -3
    assert not any("stopped" in row or "warnings" in row for row in rows[3:])
    assert best_checkpoint(run) == "000004"
    means = [untrained_of(rows[:end])["reward"] for end in (3, 4, 5)]
    assert means[0] == rows[0]["evaluation"]["reward"]
    assert means[1] > 3 and abs(means[1] - means[2] - 10) < 1e-4
    assert [iteration for iteration, _ in changes_of(rows)] == [3, 4]


def test_settings_whose_last_start_is_unknown_are_compared_with_the_checkpoint(run, capsys):
    pause(run)
    edit(run, learning_rate=0.001, iterations=3)
    (run / "config.yaml").unlink()
    assert changed_settings(run, load_config(run / "config.json")) == {}
    text = (run / "config.json").read_text()
    edit(run, num_steps=5)
    assert "a resume cannot change num_steps 4 -> 5" in error_of(f"train --resume {run}", capsys)
    (run / "config.json").write_text(text)
    assert flowrl_(f"train --resume {run}") == 0
    assert "recorded with iteration 3: learning_rate 0.02 -> 0.001" in capsys.readouterr().out
    assert changed(run) == {3: RATE}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline, its prompts and its reward."""
    return model_files(tmp_path_factory.mktemp("model"))


@pytest.mark.satellite
def test_prompts_of_a_model_change_with_consent(model, tmp_path, capsys):
    """Both kinds; of other held-out prompts the samples before training are drawn again."""
    out, train, held = tmp_path / "run", tmp_path / "train.txt", tmp_path / "held.txt"
    train.write_text("a red fox\na red car\n")
    held.write_text("a blue fox\na blue car\na blue cat\n")
    given = model | {"preset": "tiny", "groups": 2, "iterations": 1, "tracker": "none"}
    assert main(["train", *words(**given, eval_samples=4, out=out)]) == 0
    first = json.loads((out / "samples.json").read_text())
    again = f"train --resume {out} --trust"
    assert "--change" in error_of(f"{again} --iterations 2 --prompts {train}", capsys)
    assert flowrl_(f"{again} --iterations 2 --prompts {train} --change") == 0
    assert changed(out) == {2: {"prompts": [[model["prompts"]], [str(train)]]}}
    kept = json.loads((out / "samples.json").read_text())
    assert kept["prompts"] == first["prompts"]
    assert kept["reward_before"] == first["reward_before"]
    assert flowrl_(f"{again} --iterations 3 --heldout-prompts {held} --change") == 0
    assert changed(out)[3]["heldout_prompts"][1] == [str(held)]
    now = json.loads((out / "samples.json").read_text())
    assert set(now["prompts"]) == {*held.read_text().splitlines()}
    assert now["reward_before"] != first["reward_before"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "held.txt").write_text("a green fox\n")  # a moved file has its old content
    error = error_of(f"{again} --iterations 4 --heldout-prompts {elsewhere}/held.txt", capsys)
    assert f"heldout_prompts {elsewhere}/held.txt (3 prompts at the start, 1 now)" in error
    train.write_text("a red dog\n")
    assert flowrl_(f"{again} --iterations 4 --change") == 0
    assert changed(out)[4] == {"prompts": [str(train), f"{train} with other content"]}
    assert [*changed(out)] == [2, 3, 4]
    moved, elsewhere = tmp_path / "moved", Path(model["model"]).name
    shutil.copytree(model["model"], moved / elsewhere)
    assert flowrl_(f"{again} --iterations 5 --model {moved / elsewhere}") == 0
    assert 5 not in changed(out)
    error = error_of(f"{again} --iterations 6 --model elsewhere/other", capsys)
    assert "(the trained weights belong to it). Begin a new run: flowrl" in error
    error = error_of(f"{again} --iterations 6 --lora-rank 2", capsys)
    assert "lora_rank 32 -> 2 (the trained weights are" in error
    assert f"--lora-rank 2 --adapter {out}@last --out NEW --trust" in error
    card = (out / "README.md").read_text()
    assert "- from iteration 3: `heldout_prompts " in card and f"{tmp_path}" not in card
    assert "- from iteration 4: `prompts 'train.txt' -> 'train.txt with other content'`" in card
