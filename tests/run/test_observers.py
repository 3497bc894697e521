"""Observers, the tables of a run's samples, and the record that `Trainer.iteration` returns."""

import csv
import gc
import json
import math
import re
import weakref
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from safetensors import safe_open
from small_run import MIXTURE, SMALL, error_of, flowrl_, rows_of
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, PartError
from flowrl.core.experience import FIELDS, LARGER, Actions, Decisions, Record
from flowrl.core.prompt import Prompt
from flowrl.run.build import make_trainer
from flowrl.run.job import Run
from flowrl.run.observers import SaveExperience
from flowrl.run.stop_rules import Budget, StopOnCollapse

RUN = SMALL.replace(iterations=4, eval_every=4)


class Watch:
    """Keeps what it sees, and returns the actions of a function of the record."""

    def __init__(self, fields=FIELDS, act=lambda record: None):
        self.fields, self.act, self.seen = fields, act, []

    def observe(self, record):
        self.seen.append(record)
        return self.act(record)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without observers."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    assert Run(RUN, folder).execute()
    return folder


def weights_of(folder):
    return (folder / "weights.safetensors").read_bytes()


def warnings_of(rows, kind):
    warnings = [(row["iteration"], entry) for row in rows for entry in row.get("warnings", ())]
    return [(iteration, entry["text"]) for iteration, entry in warnings if entry["kind"] == kind]


def paused_after(iteration):
    """A function `stop` of a run."""
    calls = iter(range(1, 99))
    return lambda: next(calls) == iteration


@pytest.mark.parametrize(
    ("rewards", "spread", "best", "stops"),
    [
        ((0.5, 0.8, 0.55), 0.1, 1, True),
        ((0.8, 0.5), 0.1, 1, True),  # the untrained model was best
        ((0.5, 0.8, 0.1, None), 0.1, None, False),  # nothing new
        # the scales of PickScore, HPSv2.1 and CLIPScore
        ((21, 23, 17), 1.5, 1, True),
        ((0.28, 0.30, 0.33, 0.24), 0.02, 2, True),
        ((0.8, 0.9, 0.65), 0.1, 1, True),
        ((-2.0, -1.0, -1.25), 0.1, 1, False),  # a quarter of the gain
        ((-2.0, -1.0, -1.35), 0.1, 1, True),
        ((21, 21.02, 21.01, 20.8), 1.5, 1, False),  # a steady reward: 0.15 standard deviations
    ],
)
def test_a_collapse_is_a_fall_by_a_part_of_the_gain(rewards, spread, best, stops):
    *history, last = [
        {"iteration": i, "evaluation": reward and {"reward": reward}, "reward_std": spread}
        for i, reward in enumerate(rewards)
    ]
    actions = StopOnCollapse(drop=0.3).observe(Record(len(history), metrics=last, history=history))
    assert bool(actions and actions.stop) == stops and (actions and actions.best) == best


def test_a_budget_counts_time_or_work():
    for limits, nfe, seconds, stops in (
        ({"nfe": 100}, 99, 10.0**9, False),
        ({"nfe": 100}, 100, 0.0, True),
        ({"seconds": 2.5}, 10**9, 2.4, False),
        ({"nfe": 100, "seconds": 2.5}, 0, 2.5, True),
        ({"hours": 1}, 0, 3590.0, True),  # with the seconds of two evaluations
        ({"hours": 1}, 0, 3580.0, False),
        ({"forwards": 100}, 48, 0.0, True),  # (18 + 48) + 2 x (6 + 2 x 6)
        ({"forwards": 103}, 48, 0.0, False),
    ):
        history = [
            {"iteration": 0, "evaluation": {"seconds": 7.0}},
            {"iteration": 1, "nfe": 18, "train_nfe": 6, "gradient_nfe": 6, "evaluation": None},
        ]
        metrics = {"nfe_total": nfe, "seconds_total": seconds, "evaluation": {"seconds": 7.0}}
        metrics |= {"nfe": nfe, "train_nfe": 6, "gradient_nfe": 6}
        record = Record(2, metrics=metrics, history=history)
        assert bool(Budget(**limits).observe(record)) == stops, (limits, nfe)
    with pytest.raises(ConfigError, match="is not allowed"):
        Budget()


def test_an_observer_sees_the_record_of_every_iteration(tmp_path):
    watch, cheap = Watch(), Watch(("values",))
    assert Run(RUN, tmp_path / "run", observers=(watch, cheap)).execute()
    trainer, exactly = make_trainer(RUN), dict(rtol=0, atol=0, equal_nan=True)
    trainer.recorded = LARGER
    for record in watch.seen:
        iteration = trainer.iteration()
        seen = iteration.experience
        assert record.prompts == seen.prompts
        made = iteration.credit.advantages, iteration.weights
        assert_close((record.advantages, record.weights), made, **exactly)
        for name in ("values", "log_probs", "condition.tensors", "trajectories.states"):
            assert_close(*map(attrgetter(name), (record, seen)), **exactly)
        assert record.metrics["reward_mean"] == iteration["reward_mean"]
        assert [row["iteration"] for row in record.history] == list(range(record.iteration))
    assert [record.iteration for record in cheap.seen] == [1, 2, 3, 4]
    with pytest.raises(AttributeError, match=r"no log_probs: .* add 'log_probs'"):
        _ = cheap.seen[0].log_probs


def test_a_record_is_a_copy_and_is_not_kept(monkeypatch):
    """A policy may keep its embeddings."""
    trainer = make_trainer(RUN)
    condition = trainer.policy.encode(trainer.prompts.upcoming(2))
    before = condition.tensors["direction"].clone()
    monkeypatch.setattr(trainer.policy, "encode", lambda prompts: condition)
    assert all(getattr(trainer.iteration().experience, name) is None for name in LARGER)
    trainer.recorded = ("condition",)
    experience = trainer.iteration().experience
    assert experience.trajectories is None
    experience.condition.tensors["direction"].zero_()
    assert torch.equal(condition.tensors["direction"], before)
    kept = weakref.ref(experience)
    del experience
    gc.collect()
    assert kept() is None


def test_observers_act_without_changing_the_run(plain, tmp_path):
    reports, out = [], tmp_path / "run"

    def act(record):
        torch.manual_seed(0)
        record.metrics.clear()
        record.condition.tensors["direction"].zero_()
        metrics = {"spread": record.values[..., -1].std(), "none": math.nan}
        return Actions(warn="look\nhere", metrics=metrics)

    first, second = Watch(act=act), Watch((), lambda record: Actions(metrics={"one": 1}))
    assert Run(RUN, out, reports.append, observers=(first, second)).execute()
    assert weights_of(out) == weights_of(plain)
    _, *rows = rows_of(out)
    for row, usual, record in zip(rows, rows_of(plain, ("warnings",))[1:], first.seen, strict=True):
        assert usual.items() <= row.items()
        assert row["Watch/spread"] == float(record.values[..., -1].std())
        assert row["Watch/none"] is None and row["Watch#2/one"] == 1
    assert warnings_of(rows, "Watch") == [(i, "look here") for i in (1, 2, 3, 4)]
    assert sum(state.get("warning") == "look here" for state in reports) == 4


FAILING = """
from flowrl.core.experience import Actions

class Fails:
    fields = ("values",)
    def observe(self, record):
        if record.iteration > 1:
            {}
        return Actions(metrics={{"mean": record.values[..., -1].mean()}})
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return 1 / 0", r"Fails\.observe \(.*mine\.py, line 8\) failed: ZeroDivisionError"),
        ("return {'mean': 1.0}", r"observer Fails: it returned a dict, not Actions or None"),
        ("return record.advantages", r"AttributeError: .*add 'advantages'"),
    ],
)
def test_an_exception_is_one_warning_or_with_strict_the_end(line, message, tmp_path):
    (tmp_path / "mine.py").write_text(FAILING.format(line))
    config = RUN.replace(observe=(f"{tmp_path}/mine.py:Fails",))
    run = Run(config, tmp_path / "run", stop=paused_after(2))
    assert not run.execute() and run.execute(resume=True)
    rows = rows_of(tmp_path / "run")
    ((iteration, text),) = warnings_of(rows, "Fails failed")
    assert iteration == 2 and re.search(message, text), text
    assert [row["iteration"] for row in rows if "Fails/mean" in row] == [1]
    with pytest.raises(PartError, match=message):
        Run(config.replace(strict=True), tmp_path / "strict").execute()


@pytest.mark.parametrize("fields", ["values", ("rewards",)])
def test_unknown_fields_are_refused_before_the_run(fields, tmp_path):
    with pytest.raises(ConfigError, match=r"fields of observer Watch = .* allowed: a tuple with"):
        Run(RUN, tmp_path / "run", observers=(Watch(fields),)).execute()
    assert not (tmp_path / "run").exists()


PARTS = """
from flowrl.credit import Uniform
from flowrl.losses import ClippedLoss
from flowrl.samplers import FlowSDE
from flowrl.worlds.mixture import DirectionReward

class Metrics:
    calls = 0
    def metrics(self):
        Metrics.calls += 1
        return {"calls": self.calls}

class Rule(Metrics, Uniform): pass
class Loss(Metrics, ClippedLoss): pass
class Kernel(Metrics, FlowSDE): pass
class Reward(Metrics, DirectionReward):
    def metrics(self):
        assert self.calls < 2, "enough"
        return super().metrics()
"""


def test_parts_may_have_metrics(tmp_path):
    file = tmp_path / "parts.py"
    file.write_text(PARTS)
    chosen = {"credit": "Rule", "loss": "Loss", "sampler": "Kernel", "reward": "Reward"}
    config = RUN.replace(**{setting: f"{file}:{name}" for setting, name in chosen.items()})
    assert Run(config, tmp_path / "run").execute()
    rows = rows_of(tmp_path / "run")[1:]
    for kind in ("credit", "loss", "sampler"):
        assert [row[f"{kind}/calls"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("reward/calls") for row in rows] == [1, 2, None, None]
    ((_, text),) = warnings_of(rows, "reward failed")
    assert text.startswith("reward: Reward.metrics (") and "AssertionError: enough" in text


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("0.5", r"credit: Rule\.metrics\(\) = 0\.5 "),
        ("{'mean': '0.5'}", r"credit: Rule\.metrics\(\): 'mean' = '0\.5' "),
        ("{3: 1.0}", r"credit: Rule\.metrics\(\): 3 = 1\.0 "),
        ("{f'mean_{Metrics.calls}': 1.0}", r"names \['mean_2'\], but before \['mean_1'\]"),
    ],
)
def test_metrics_of_a_part_are_numbers_by_the_same_names(metrics, message, tmp_path):
    file = tmp_path / "parts.py"
    file.write_text("import torch\n" + PARTS.replace('{"calls": self.calls}', metrics))
    run = Run(RUN.replace(credit=f"{file}:Rule"), tmp_path / "run")
    with pytest.raises(PartError, match=message):
        run.execute()
    # a run that fails in its first iteration leaves no files
    assert (tmp_path / "run").exists() == ("names" in message)


def test_a_stopped_run_ends_like_a_finished_one(plain, tmp_path):
    config, out = RUN.replace(checkpoint_every=9), tmp_path / "run"
    stopping = Watch((), lambda record: Actions(stop="enough" * (record.iteration >= 2)))

    def resumed(*observers, start=""):
        assert Run(config, out, observers=observers).execute(resume=True, start=start)
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def done():
        return json.loads((out / "done.json").read_text())

    assert Run(config, out, observers=(stopping, Watch(()))).execute()
    assert done() == {"iterations": 2, "stopped": "Watch: enough"}
    last = rows_of(out)[-1]
    assert (last["iteration"], last["stopped"]) == (2, "Watch: enough") and last["evaluation"]
    assert Run(config.replace(iterations=2), tmp_path / "short").execute()
    for file in ("weights.safetensors", "samples.safetensors", "trajectory.safetensors"):
        assert (out / file).read_bytes() == (tmp_path / "short" / file).read_bytes()

    before = resumed(stopping)
    (out / "done.json").unlink()  # killed after the checkpoint
    (out / "weights.safetensors").unlink()
    assert resumed(stopping) == before

    resumed(start="000002")  # without the observer
    assert done() == {"iterations": 4} and len(rows_of(out)) == 5
    assert weights_of(out) == weights_of(plain)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_stop_for_collapse_ends_with_the_best_evaluated_checkpoint(keep, tmp_path):
    """The files are those of a run that ends there, also if the process dies before it has written
    them.
    """
    scores = {2: 0.5, 4: 0.9, 6: 0.8, 8: -2.0}

    def act(record):
        if not record.metrics["evaluation"]:
            return None
        record.metrics["evaluation"]["reward"] = scores[record.iteration]
        for row in record.history:
            if row["evaluation"]:
                row["evaluation"]["reward"] = scores.get(row["iteration"], 0.1)
        return StopOnCollapse(0.3).observe(record)

    given = dict(eval_every=2, checkpoint_every=1, keep_checkpoints=keep)
    config, out = RUN.replace(iterations=12, **given), tmp_path / "run"
    watch, reports = Watch(("metrics", "history"), act), []
    assert Run(config, out, reports.append, observers=(watch,)).execute()
    assert Run(RUN.replace(iterations=4, **given), tmp_path / "short").execute()
    names = sorted(path.stem for path in (out / "checkpoints").iterdir())
    assert names == {1: ["000004", "000008"], 2: ["000004", "000007", "000008"]}[keep]
    done = json.loads((out / "done.json").read_text())
    assert (done["iterations"], done["exported"]) == (8, 4)
    assert "fell to -2.000 from its best, 0.900 (it began at 0.100)" in done["stopped"]
    (text,) = [state["warning"] for state in reports if "stopped" in state.get("kinds", ())]
    assert text.endswith("; the weights and samples of the run are those of iteration 4")
    files = "weights.safetensors", "samples.safetensors", "samples.json", "trajectory.json"
    for name in files:
        assert (out / name).read_bytes() == (tmp_path / "short" / name).read_bytes()
    for name in (*files, "done.json"):
        (out / name).unlink()
    assert Run(config, out, observers=(watch,)).execute(resume=True)
    for name in files:
        assert (out / name).read_bytes() == (tmp_path / "short" / name).read_bytes()
    assert json.loads((out / "done.json").read_text()) == done


@pytest.mark.parametrize("best", [0, 2, "last"])
def test_the_best_iteration_is_one_that_was(best, tmp_path):
    watch = Watch((), lambda record: Actions(best=best))
    run = Run(RUN.replace(strict=True), tmp_path / "run", observers=(watch,))
    with pytest.raises(
        PartError, match=r"best = .* is not allowed; allowed: (iterations 1 to 1|a)"
    ):
        run.execute()


class Keeps:
    """Counts the iterations, and keeps the checkpoints of two of them."""

    fields, count = (), torch.zeros(())

    def observe(self, record):
        self.count = self.count + 1
        return Actions(keep=record.iteration in (2, 3), metrics={"count": self.count})

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_kept_checkpoints_stay(tmp_path):
    config, out = RUN.replace(iterations=6, checkpoint_every=100), tmp_path / "run"
    for resume, newest in ((False, 4), (True, 6)):
        run = Run(config, out, stop=paused_after(4), observers=(Keeps(),))
        assert run.execute(resume) == resume
        names = sorted(path.stem for path in (out / "checkpoints").iterdir())
        assert names == ["000002", "000003", f"00000{newest}"]
    _, *rows = rows_of(out)
    assert [row["iteration"] for row in rows if row.get("kept")] == [2, 3]
    assert [row["Keeps/count"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_tables_of_samples(tmp_path):
    """Odd prompts, a sample that could not be judged, and a composite reward."""
    values = torch.tensor([[[0.25, 0.5], [0.1, torch.nan]], [[0.3, -1.5], [0.2, 1 / 3]]])
    valid, decisions = values[..., -1].isfinite(), Decisions.like(values)
    decisions = replace(decisions, mask=decisions.mask & valid[..., None])
    advantages = torch.tensor([[[1.0], [0.0]], [[-0.75], [0.75]]])
    tables = {"values": values, "valid": valid, "advantages": advantages}
    tables["weights"] = decisions.mask.float()
    prompts = [Prompt('a "red", thing'), Prompt("zwei\nZeilen é")]
    others = dict(prompts=prompts, parts={"pick": 2 * values}, decisions=decisions)
    saved, path = SaveExperience(tmp_path, 2), tmp_path / "experience" / "000004.csv"
    saved.observe(Record(3))
    saved.observe(Record(4, **tables, **others))
    assert {*path.parent.iterdir()} == {path, path.with_suffix(".safetensors")}
    with open(path, newline="", encoding="utf-8") as file:
        rows = ["|".join(row) for row in csv.reader(file)]
    assert rows == [
        "iteration|prompt|member|text|valid|reward|part_pick|advantage_0|weight_0",
        '4|0|0|a "red", thing|True|0.5|1|1|1',
        '4|0|1|a "red", thing|False|||0|0',
        "4|1|0|zwei\nZeilen é|True|-1.5|-3|-0.75|1",
        "4|1|1|zwei\nZeilen é|True|0.333333343|0.666666687|0.75|1",  # enough for float32
    ]
    with safe_open(path.with_suffix(".safetensors"), "pt") as file:
        axes = json.loads(file.metadata()["axes"])
        for name, table in (tables | {"mask": decisions.mask, "part.pick": 2 * values}).items():
            assert len(axes[name].split()) == table.ndim
            assert_close(file.get_tensor(name), table, rtol=0, atol=0, equal_nan=True)


def test_a_run_saves_every_other_iteration_and_overwrites_after_a_resume(tmp_path):
    config = RUN.replace(save_experience=2, checkpoint_every=1, keep_checkpoints=9)
    out, folder = tmp_path / "run", tmp_path / "run" / "experience"
    assert Run(config, out).execute()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert {path.stem for path in before} == {"000002", "000004"}
    (folder / "000004.csv").write_text("damaged")
    (folder / "000009.csv").touch()
    assert Run(config, out).execute(resume=True, start="000002")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert not Run(config, out, stop=lambda: True).execute(resume=True, start="000001")
    assert {path.stem for path in folder.iterdir()} == {"000002"}


def test_observers_from_the_command_line(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FAILING.format("return Actions(stop='enough')"))
    spec, out = f"{tmp_path}/mine.py:Fails", tmp_path / "run"
    options = f"{MIXTURE} --iterations 3 --save-experience 1 --out {out}"
    assert flowrl_(f"train {options} --observe {spec} 'stop-on-collapse(drop=0.9)'") == 0
    assert "stopped after iteration 2 of 3 by Fails: enough" in capsys.readouterr().out
    assert list(json.loads((out / "code.json").read_text())) == [f"observe: {spec}"]
    assert "--trust" in error_of(f"train --resume {out}", capsys)
