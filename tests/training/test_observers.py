"""Observers, the tables of a run's samples, and the record that `Trainer.iteration` returns."""

import csv
import gc
import json
import math
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from small_run import SMALL

from flowrl.core.errors import ConfigError, PartError
from flowrl.core.experience import FIELDS, LARGER, Actions, Credit, Decisions, Record
from flowrl.core.prompt import Prompt
from flowrl.credit import Uniform
from flowrl.parts.registry import build
from flowrl.rollout import transition_weights
from flowrl.training.build import make_trainer
from flowrl.training.observers import Budget, SaveExperience, StopOnCollapse
from flowrl.training.run import Run

RUN = SMALL.replace(iterations=4, eval_every=4)


class Watch:
    """Keeps what it sees, and returns the actions of a function of the record."""

    def __init__(self, fields=FIELDS, act=lambda record: None):
        self.fields, self.act, self.seen = fields, act, []

    def observe(self, record):
        self.seen.append(record)
        return self.act(record)


class Counts:
    """Remembers the sum of all mean rewards."""

    fields = ("metrics",)

    def __init__(self):
        self.total = torch.zeros(())

    def observe(self, record):
        self.total += record.metrics["reward_mean"]
        return Actions(metrics={"total": self.total})

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"].clone()


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluated(*rewards: float | None) -> list[dict]:
    return [{"evaluation": reward if reward is None else {"reward": reward}} for reward in rewards]


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """NaN equals NaN."""
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rewards", "stops"),
    [
        ((0.5, 0.8, 0.57), False),
        ((0.5, 0.8, 0.55), True),
        ((0.8, 0.5), True),  # the untrained model was best
        ((0.5, 0.8, None), False),
        ((0.5, 0.8, 0.1, None), False),  # nothing new
        ((-2.0, -1.0, -1.25), False),
        ((-2.0, -1.0, -1.35), True),
        ((0.5,), False),
    ],
)
def test_a_collapse_is_a_fall_from_the_best_evaluation(rewards: tuple, stops: bool) -> None:
    *history, last = evaluated(*rewards)
    actions = StopOnCollapse(drop=0.3).observe(Record(len(history), metrics=last, history=history))
    assert bool(actions and actions.stop) == stops


def test_a_budget_counts_evaluations_or_seconds() -> None:
    def stops(evaluations: int, elapsed: float, **options) -> bool:
        record = Record(1, metrics={"nfe_total": evaluations, "seconds_total": elapsed})
        return (
            build(
                "observer", f"budget({', '.join(f'{n}={v}' for n, v in options.items())})"
            ).observe(record)
            is not None
        )

    assert [stops(nfe, 0.0, nfe=100) for nfe in (99, 100, 101)] == [False, True, True]
    assert [stops(10**9, seconds, seconds=2.5) for seconds in (2.4, 2.5)] == [False, True]
    assert stops(100, 0.0, nfe=100, seconds=60) and not stops(99, 59.0, nfe=100, seconds=60)
    for options in ({}, {"nfe": -1}, {"seconds": -1.0}):
        with pytest.raises(ConfigError, match=r"nfe|seconds"):
            Budget(**options)
    with pytest.raises(ConfigError, match="drop = 0 "):
        StopOnCollapse(drop=0)


def test_an_observer_sees_the_record_of_every_iteration(tmp_path: Path) -> None:
    watch, cheap = Watch(), Watch(("values",))
    assert Run(RUN, tmp_path / "run", observers=(watch, cheap)).execute()
    trainer = make_trainer(RUN)
    trainer.recorded = LARGER
    for record in watch.seen:
        iteration = trainer.iteration()
        experience = iteration.experience
        assert record.iteration == iteration["iteration"]
        assert record.prompts == experience.prompts and equal(record.values, experience.values)
        assert torch.equal(record.advantages, iteration.credit.advantages) and torch.equal(
            record.weights, iteration.weights
        )
        assert (
            torch.equal(record.log_probs, experience.log_probs)
            and record.log_probs.isfinite().all()
        )
        assert torch.equal(record.trajectories.states, experience.trajectories.states)
        assert torch.equal(
            record.condition.tensors["direction"], experience.condition.tensors["direction"]
        )
        assert record.metrics["reward_mean"] == iteration["reward_mean"]
        assert [row["iteration"] for row in record.history] == list(range(record.iteration))
    assert [record.iteration for record in cheap.seen] == [1, 2, 3, 4]
    with pytest.raises(
        AttributeError,
        match=r"no log_probs: the observer declares fields = \('values',\); add 'log_probs'",
    ):
        _ = cheap.seen[0].log_probs
    with pytest.raises(AttributeError, match=r"no rewards$"):
        _ = cheap.seen[0].rewards


def test_larger_fields_exist_on_request_only() -> None:
    trainer = make_trainer(RUN)
    assert all(getattr(trainer.iteration().experience, name) is None for name in LARGER)
    trainer.recorded = ("log_probs",)
    experience = trainer.iteration().experience
    assert (
        experience.log_probs is not None
        and experience.trajectories is None
        and experience.condition is None
    )


def test_a_rule_receives_the_fields_that_it_reads_and_no_others() -> None:
    received = []

    class Reads(Uniform):
        reads_fields = ("log_probs",)

        def credit(self, experience):
            received.append([name for name in LARGER if getattr(experience, name) is not None])
            return Credit(self.assign(experience.values, experience.decisions))

    trainer = make_trainer(RUN)
    trainer.method = replace(trainer.method, credit=Reads())
    assert trainer.iteration().experience.log_probs is None, (
        "a caller who keeps the results keeps no large tensors"
    )
    trainer.recorded = ("trajectories",)
    assert trainer.iteration().experience.trajectories is not None
    assert received == [["log_probs"], ["log_probs"]]


def test_a_recorded_condition_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may keep its embeddings."""
    trainer = make_trainer(RUN)
    stored = trainer.policy.encode(trainer.prompts.upcoming(2))
    monkeypatch.setattr(trainer.policy, "encode", lambda prompts: stored)
    trainer.recorded, before = ("condition",), stored.tensors["direction"].clone()
    recorded = trainer.iteration().experience.condition.tensors["direction"]
    assert torch.equal(recorded, before)
    recorded.zero_()
    assert torch.equal(stored.tensors["direction"], before)


def test_an_iteration_is_its_metrics_with_a_record_that_the_trainer_does_not_keep() -> None:
    trainer = make_trainer(RUN)
    trainer.recorded = LARGER
    iteration = trainer.iteration()
    assert iteration["iteration"] == 1 and json.loads(json.dumps(iteration)) == dict(iteration)
    prompts, members, columns = iteration.experience.values.shape
    assert (
        iteration.credit.advantages.shape
        == iteration.weights.shape
        == (prompts, members, columns - 1)
    )
    expected = transition_weights(iteration.credit, iteration.experience.decisions)
    assert torch.equal(iteration.weights, expected)
    states = weakref.ref(iteration.experience.trajectories.states)
    del iteration
    gc.collect()
    assert states() is None


def test_a_run_keeps_one_record_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, alive = [], []
    trainer_type = type(make_trainer(RUN))
    whole = trainer_type.iteration

    def iteration(self):
        gc.collect()
        alive.append(sum(record() is not None for record in records))
        found = whole(self)
        records.append(weakref.ref(found.experience))
        return found

    monkeypatch.setattr(trainer_type, "iteration", iteration)
    assert Run(RUN.replace(save_experience=1), tmp_path / "run").execute()
    assert alive == [0, 0, 0, 0]


def test_observers_do_not_change_a_run(tmp_path: Path) -> None:
    def act(record):
        torch.manual_seed(0)
        record.metrics.clear()
        record.condition.tensors["direction"].zero_()
        return Actions(keep=True, metrics={"one": 1})

    assert Run(RUN, tmp_path / "plain").execute()
    assert Run(RUN, tmp_path / "observed", observers=(Watch(act=act), Counts())).execute()
    files = [
        (tmp_path / name / "weights.safetensors").read_bytes() for name in ("plain", "observed")
    ]
    assert files[0] == files[1]
    for plain, observed in zip(
        rows_of(tmp_path / "plain"), rows_of(tmp_path / "observed"), strict=True
    ):
        assert plain.keys() <= observed.keys() and plain.get("reward_mean") == observed.get(
            "reward_mean"
        )


def test_actions_are_in_the_row_and_reported(tmp_path: Path) -> None:
    said = []

    def act(record):
        return Actions(
            warn="look\nhere",
            metrics={"spread": record.values[..., -1].std(), "none": math.nan, "count": 3},
        )

    first, second = Watch(("values",), act), Watch((), lambda record: Actions(metrics={"one": 1}))
    assert Run(RUN, tmp_path / "run", said.append, observers=(first, second)).execute()
    rows = rows_of(tmp_path / "run")[1:]
    for record, row in zip(first.seen, rows, strict=True):
        assert (
            row["Watch/spread"] == float(record.values[..., -1].std()) and row["Watch/none"] is None
        )
        assert row["Watch/count"] == 3 and row["Watch#2/one"] == 1
        assert {"kind": "Watch", "text": "look here"} in row["warnings"]
    assert sum(state.get("warning") == "look here" for state in said) == 4


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
        (
            "return 1 / 0",
            r"Fails\.observe \(.*mine\.py, line 8\): ZeroDivisionError: division by zero",
        ),
        ("raise SystemExit('bye')", r"Fails\.observe \(.*mine\.py, line 8\): SystemExit: bye"),
        (
            "return Actions(stop=True)",
            (
                r"Fails\.observe \(.*mine\.py, line 8\): ConfigError: Actions.stop = True is not"
                r" allowed"
            ),
        ),
        (
            "return {'mean': 1.0}",
            r"observer Fails: it returned a dict, not flowrl\.experience\.Actions or None",
        ),
        (
            "return Actions(metrics={'mean': 'high'})",
            r"observer Fails: ValueError: could not convert string to float",
        ),
        ("record.values.zero_()", r"observer Fails: Fails\.observe changed its input"),
        (
            "return record.advantages.mean()",
            r"Fails\.observe \(.*mine\.py, line 8\): AttributeError: .*add 'advantages'",
        ),
    ],
)
def test_an_exception_is_one_warning_or_with_strict_the_end(
    line: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FAILING.format(line))
    config = RUN.replace(observe=(f"{tmp_path}/mine.py:Fails",))
    stops = iter([False, True, False, False])  # paused after iteration 2
    run = Run(config, tmp_path / "run", stop=lambda: next(stops))
    assert not run.execute() and run.execute(resume=True)
    rows = rows_of(tmp_path / "run")
    said = [
        (row["iteration"], one["text"])
        for row in rows
        for one in row.get("warnings", ())
        if one["kind"] == "Fails failed"
    ]
    assert len(said) == 1 and said[0][0] == 2
    assert re.search(message, said[0][1]), said[0][1]
    assert [row["iteration"] for row in rows if "Fails/mean" in row] == [1]
    with pytest.raises(PartError, match=message):
        Run(config.replace(strict=True), tmp_path / "strict").execute()


@pytest.mark.parametrize("fields", ["values", ("rewards",)])
def test_unknown_fields_are_refused_before_the_run(fields, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"fields of observer Watch = .* is not allowed; allowed: a tuple with some of metrics, "
        ),
    ):
        Run(RUN, tmp_path / "run", observers=(Watch(fields),)).execute()
    assert not (tmp_path / "run").exists()


PARTS = """
from dataclasses import dataclass
from flowrl.credit import Uniform
from flowrl.losses import ClippedLoss
from flowrl.samplers import FlowSDE
from flowrl.worlds.mixture import DirectionReward

@dataclass(frozen=True)
class Rule(Uniform):
    def metrics(self):
        return {"baseline": 0.5}

@dataclass(frozen=True)
class Loss(ClippedLoss):
    def metrics(self):
        return {"rows": 7}

@dataclass(frozen=True)
class Kernel(FlowSDE):
    def metrics(self):
        return {"level": self.noise_level}

class Reward(DirectionReward):
    calls = 0
    def score(self, images, prompts):
        self.calls += 1
        return super().score(images, prompts)
    def metrics(self):
        return {"calls": self.calls, **({"bad": 1 / 0} if self.calls > 2 else {})}
"""


def test_parts_may_have_metrics(tmp_path: Path) -> None:
    file = tmp_path / "parts.py"
    file.write_text(PARTS)
    chosen = {"credit": "Rule", "loss": "Loss", "sampler": "Kernel", "reward": "Reward"}
    config = RUN.replace(**{setting: f"{file}:{name}" for setting, name in chosen.items()})
    # which would score some images again
    assert Run(config, tmp_path / "run", trial=False).execute()
    rows = rows_of(tmp_path / "run")[1:]
    assert all(
        (row["credit/baseline"], row["loss/rows"], row["sampler/level"]) == (0.5, 7, 0.7)
        for row in rows
    )
    assert [row.get("reward/calls") for row in rows] == [1, 2, None, None]
    (warning,) = [
        one["text"]
        for row in rows
        for one in row.get("warnings", ())
        if one["kind"] == "reward failed"
    ]
    assert (
        warning.startswith("metrics of reward, Reward.metrics (") and "ZeroDivisionError" in warning
    )


def stop_at(iteration: int, **others) -> Watch:
    return Watch(
        (), lambda record: Actions(stop="enough" if record.iteration >= iteration else "", **others)
    )


def test_a_stopped_run_ends_like_a_finished_one(tmp_path: Path) -> None:
    config, out, said = RUN.replace(checkpoint_every=9), tmp_path / "run", []
    assert Run(
        config, out, said.append, observers=(stop_at(2), Watch((), lambda record: None))
    ).execute()
    assert json.loads((out / "done.json").read_text()) == {
        "iterations": 2,
        "stopped": "Watch: enough",
    }
    rows = rows_of(out)
    assert (
        len(rows) == 3
        and rows[-1]["stopped"] == "Watch: enough"
        and rows[-1]["evaluation"]["reward"] is not None
    )
    assert any(
        state.get("warning") == "stopped after iteration 2 of 4 by Watch: enough" for state in said
    )
    assert Run(config.replace(iterations=2), tmp_path / "short").execute()
    for file in ("weights.safetensors", "samples.safetensors", "trajectory.safetensors"):
        assert (out / file).read_bytes() == (tmp_path / "short" / file).read_bytes()

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert Run(config, out, observers=(stop_at(2),)).execute(resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before

    (out / "done.json").unlink()  # killed after the checkpoint
    (out / "weights.safetensors").unlink()
    assert Run(config, out, observers=(stop_at(2),)).execute(resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before

    # without the observer, and from there by name
    assert Run(config, out).execute(resume=True, start="000002")
    assert (
        json.loads((out / "done.json").read_text()) == {"iterations": 4} and len(rows_of(out)) == 5
    )
    assert Run(config, tmp_path / "whole").execute()
    assert (out / "weights.safetensors").read_bytes() == (
        tmp_path / "whole" / "weights.safetensors"
    ).read_bytes()


def test_a_stop_in_the_last_iteration_changes_nothing(tmp_path: Path) -> None:
    assert Run(RUN, tmp_path / "run", observers=(stop_at(4),)).execute()
    assert json.loads((tmp_path / "run" / "done.json").read_text()) == {"iterations": 4}


def test_a_budget_of_the_settings_stops_a_run_and_is_built_again_at_resume(tmp_path: Path) -> None:
    once = 2 * 2 * 3  # prompts x members x steps
    config = RUN.replace(observe=(f"budget(nfe={2 * once + 1})",), checkpoint_every=1)
    run = Run(config, tmp_path / "run", stop=lambda: True)
    assert not run.execute()
    assert Run(
        RUN.from_dict(json.loads((tmp_path / "run" / "config.json").read_text())), tmp_path / "run"
    ).execute(resume=True)
    done = json.loads((tmp_path / "run" / "done.json").read_text())
    assert done == {
        "iterations": 3,
        "stopped": f"budget: {3 * once} network evaluations, of {2 * once + 1} allowed",
    }


def test_kept_checkpoints_stay(tmp_path: Path) -> None:
    config, out = (
        RUN.replace(iterations=6, checkpoint_every=100, keep_checkpoints=1),
        tmp_path / "run",
    )
    observers = (Watch((), lambda record: Actions(keep=record.iteration in (2, 3))),)
    stops = iter([False, False, False, True, False, False])
    run = Run(config, out, stop=lambda: next(stops), observers=observers)
    assert not run.execute()
    assert sorted(path.stem for path in (out / "checkpoints").iterdir()) == [
        "000002",
        "000003",
        "000004",
    ]
    assert run.execute(resume=True)
    assert sorted(path.stem for path in (out / "checkpoints").iterdir()) == [
        "000002",
        "000003",
        "000006",
    ]
    assert [row["iteration"] for row in rows_of(out) if row.get("kept")] == [2, 3]


def test_an_observer_with_memory_survives_a_resume(tmp_path: Path) -> None:
    assert Run(RUN, tmp_path / "whole", observers=(Counts(),)).execute()
    stops = iter([False, True, False, False])
    assert not Run(RUN, tmp_path / "run", stop=lambda: next(stops), observers=(Counts(),)).execute()
    assert Run(RUN, tmp_path / "run", stop=lambda: next(stops), observers=(Counts(),)).execute(
        resume=True
    )
    totals = [
        [row["Counts/total"] for row in rows_of(tmp_path / name)[1:]] for name in ("whole", "run")
    ]
    assert totals[0] == totals[1] and len(set(totals[0])) == 4
    assert Run(RUN, tmp_path / "run", observers=(Counts(),)).execute(resume=True, start="000004")


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_tables_of_samples(tmp_path: Path) -> None:
    """Odd prompts, a sample that could not be judged, and a composite reward."""
    values = torch.tensor([[[0.25, 0.5], [0.1, torch.nan]], [[0.3, -1.5], [0.2, 1 / 3]]])
    valid = values[..., -1].isfinite()
    decisions = Decisions.like(values)
    decisions = replace(decisions, mask=decisions.mask & valid[..., None])
    advantages = torch.tensor([[[1.0], [0.0]], [[-0.7], [0.7]]])
    prompts = [Prompt('a "red", thing'), Prompt("zwei\nZeilen é")]
    tables = {
        "prompts": prompts,
        "values": values,
        "parts": {"pick": 2 * values},
        "valid": valid,
        "decisions": decisions,
    }
    record = Record(4, **tables, advantages=advantages, weights=decisions.mask.float())
    saved = SaveExperience(tmp_path, 2)
    saved.observe(Record(3))
    saved.observe(record)
    assert sorted(path.name for path in (tmp_path / "experience").iterdir()) == [
        "000004.csv",
        "000004.safetensors",
    ]
    rows = read_table(tmp_path / "experience" / "000004.csv")
    columns = [
        "iteration",
        "prompt",
        "member",
        "text",
        "reward",
        "valid",
        "part_pick",
        "advantage_0",
        "weight_0",
    ]
    assert [list(row) for row in rows] == [columns] * 4
    assert [row["text"] for row in rows] == [prompts[0].text] * 2 + [prompts[1].text] * 2
    assert [(row["prompt"], row["member"]) for row in rows] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    assert [row["reward"] for row in rows] == ["0.5", "", "-1.5", "0.333333343"]
    assert torch.tensor(float(rows[3]["reward"])) == values[1, 1, -1], "digits enough for float32"
    assert [row["valid"] for row in rows] == ["True", "False", "True", "True"]
    assert [row["part_pick"] for row in rows][:2] == ["1", ""] and [
        row["weight_0"] for row in rows
    ] == ["1", "0", "1", "1"]
    assert [float(row["advantage_0"]) for row in rows] == pytest.approx([1.0, 0.0, -0.7, 0.7])
    with safe_open(tmp_path / "experience" / "000004.safetensors", "pt") as file:
        axes = json.loads(file.metadata()["axes"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert axes.keys() == tensors.keys()
    assert all(tensor.ndim == len(axes[name].split()) for name, tensor in tensors.items())
    assert equal(tensors["values"], values) and torch.equal(tensors["valid"], valid)
    assert torch.equal(tensors["advantages"], advantages) and torch.equal(
        tensors["mask"], decisions.mask
    )
    assert (
        axes["part.pick"] == axes["values"] == "prompt member decision+1"
        and axes["step"] == "decision"
    )


def test_a_run_saves_every_other_iteration_and_overwrites_after_a_resume(tmp_path: Path) -> None:
    config, out = (
        RUN.replace(save_experience=2, checkpoint_every=1, keep_checkpoints=9),
        tmp_path / "run",
    )
    watch = Watch()
    assert Run(config, out, observers=(watch,)).execute()
    folder = out / "experience"
    assert sorted(path.name for path in folder.glob("*.csv")) == ["000002.csv", "000004.csv"]
    record = watch.seen[3]
    rows = read_table(folder / "000004.csv")
    assert [float(row["reward"]) for row in rows] == pytest.approx(
        record.values[..., -1].flatten().tolist(), rel=1e-8
    )
    assert [float(row["advantage_1"]) for row in rows] == pytest.approx(
        record.advantages[..., 1].flatten().tolist(), rel=1e-8
    )
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "000004.csv").write_text("damaged")
    shutil.copy(folder / "000002.csv", folder / "000009.csv")
    assert Run(config, out).execute(resume=True, start="000002")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    stopping = Run(config, out, stop=lambda: True)
    assert not stopping.execute(resume=True, start="000001")
    assert {path.stem for path in folder.iterdir()} == {"000002"}


def test_observers_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from flowrl.cli.main import main

    (tmp_path / "mine.py").write_text(FAILING.format("return Actions(stop='enough')"))
    spec, out = f"{tmp_path}/mine.py:Fails", tmp_path / "run"
    small = [
        "--preset",
        "tiny",
        "--world",
        "mixture",
        "--task",
        "direction",
        "--iterations",
        "3",
        "--out",
        str(out),
    ]
    assert (
        main(
            [
                "train",
                *small,
                "--observe",
                spec,
                "stop-on-collapse(drop=0.9)",
                "--save-experience",
                "1",
            ]
        )
        == 0
    )
    assert "stopped after iteration 2 of 3 by Fails: enough" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["logging"]["observe"] == [
        spec,
        "stop-on-collapse(drop=0.9)",
    ]
    assert list(json.loads((out / "code.json").read_text())) == [f"observe: {spec}"]
    assert main(["train", "--resume", str(out)]) == 2 and "--trust" in capsys.readouterr().err
    assert main(["train", *small[:-1], str(tmp_path / "new"), "--observe", "nothing"]) == 2
    assert (
        "unknown observer 'nothing'; allowed: budget, stop-on-collapse" in capsys.readouterr().err
    )
    assert not (tmp_path / "new").exists()
