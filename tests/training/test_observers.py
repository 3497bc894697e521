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
from small_run import SMALL, words

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, PartError
from flowrl.core.experience import FIELDS, LARGER, Actions, Credit, Decisions, Record
from flowrl.core.prompt import Prompt
from flowrl.credit import Uniform
from flowrl.training.build import make_trainer
from flowrl.training.observers import Budget, SaveExperience, StopOnCollapse
from flowrl.training.run import Run
from flowrl.training.trainer import Trainer

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


def warnings_of(rows: list[dict], kind: str) -> list[tuple[int, str]]:
    said = [(row["iteration"], one) for row in rows for one in row.get("warnings", ())]
    return [(iteration, one["text"]) for iteration, one in said if one["kind"] == kind]


def done(folder: Path) -> dict:
    return json.loads((folder / "done.json").read_text())


def paused_after(iteration: int):
    """A function `stop` of a run."""
    calls = iter(range(1, 99))
    return lambda: next(calls) == iteration


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """NaN equals NaN."""
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rewards", "stops"),
    [
        ((0.5, 0.8, 0.55), True),
        ((0.8, 0.5), True),  # the untrained model was best
        ((0.5, 0.8, 0.1, None), False),  # nothing new
        ((-2.0, -1.0, -1.25), False),
        ((-2.0, -1.0, -1.35), True),
    ],
)
def test_a_collapse_is_a_fall_from_the_best_evaluation(rewards: tuple, stops: bool) -> None:
    *history, last = [{"evaluation": reward and {"reward": reward}} for reward in rewards]
    actions = StopOnCollapse(drop=0.3).observe(Record(len(history), metrics=last, history=history))
    assert bool(actions and actions.stop) == stops


def test_a_budget_counts_evaluations_or_seconds() -> None:
    def stops(budget: Budget, nfe: int, seconds: float) -> bool:
        metrics = {"nfe_total": nfe, "seconds_total": seconds}
        return budget.observe(Record(1, metrics=metrics)) is not None

    assert [stops(Budget(nfe=100), nfe, 0.0) for nfe in (99, 100, 101)] == [False, True, True]
    assert [stops(Budget(seconds=2.5), 10**9, s) for s in (2.4, 2.5)] == [False, True]
    both = Budget(nfe=100, seconds=60.0)
    assert stops(both, 100, 0.0) and not stops(both, 99, 59.0)
    with pytest.raises(ConfigError, match="is not allowed"):
        Budget()


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
        assert torch.equal(record.advantages, iteration.credit.advantages)
        assert torch.equal(record.weights, iteration.weights)
        assert torch.equal(record.log_probs, experience.log_probs)
        assert torch.equal(record.trajectories.states, experience.trajectories.states)
        directions = [one.condition.tensors["direction"] for one in (record, experience)]
        assert torch.equal(*directions)
        assert record.metrics["reward_mean"] == iteration["reward_mean"]
        assert [row["iteration"] for row in record.history] == list(range(record.iteration))
    assert [record.iteration for record in cheap.seen] == [1, 2, 3, 4]
    with pytest.raises(AttributeError, match=r"no log_probs: .* add 'log_probs'"):
        _ = cheap.seen[0].log_probs


def test_larger_fields_exist_for_those_who_request_them() -> None:
    received = []

    class Reads(Uniform):
        reads_fields = ("log_probs",)

        def credit(self, experience):
            received.append([name for name in LARGER if getattr(experience, name) is not None])
            return Credit(self.assign(experience.values, experience.decisions))

    trainer = make_trainer(RUN)
    assert all(getattr(trainer.iteration().experience, name) is None for name in LARGER)
    trainer.method = replace(trainer.method, credit=Reads())
    # a caller who keeps the results keeps no large tensors
    assert trainer.iteration().experience.log_probs is None
    trainer.recorded = ("trajectories",)
    experience = trainer.iteration().experience
    assert experience.trajectories is not None and experience.condition is None
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


def test_a_run_keeps_one_record_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, alive, usual = [], [], Trainer.iteration

    def iteration(self):
        gc.collect()
        alive.append(sum(record() is not None for record in records))
        result = usual(self)
        records.append(weakref.ref(result.experience))
        return result

    monkeypatch.setattr(Trainer, "iteration", iteration)
    assert Run(RUN.replace(iterations=2, save_experience=1), tmp_path / "run").execute()
    assert alive == [0, 0]


def test_observers_do_not_change_a_run(tmp_path: Path) -> None:
    def act(record):
        torch.manual_seed(0)
        record.metrics.clear()
        record.condition.tensors["direction"].zero_()
        return Actions(keep=True, metrics={"one": 1})

    runs = [tmp_path / name for name in ("plain", "observed")]
    assert Run(RUN, runs[0]).execute()
    assert Run(RUN, runs[1], observers=(Watch(act=act), Counts())).execute()
    plain, observed = ((run / "weights.safetensors").read_bytes() for run in runs)
    assert plain == observed
    for plain, observed in zip(*map(rows_of, runs), strict=True):
        assert plain.keys() <= observed.keys()
        assert plain.get("reward_mean") == observed.get("reward_mean")


def test_actions_are_in_the_row_and_reported(tmp_path: Path) -> None:
    said = []

    def act(record):
        metrics = {"spread": record.values[..., -1].std(), "none": math.nan}
        return Actions(warn="look\nhere", metrics=metrics)

    first, second = Watch(("values",), act), Watch((), lambda record: Actions(metrics={"one": 1}))
    assert Run(RUN, tmp_path / "run", said.append, observers=(first, second)).execute()
    rows = rows_of(tmp_path / "run")[1:]
    spreads = [float(record.values[..., -1].std()) for record in first.seen]
    assert [row["Watch/spread"] for row in rows] == spreads
    assert all(row["Watch/none"] is None and row["Watch#2/one"] == 1 for row in rows)
    assert warnings_of(rows, "Watch") == [(i, "look here") for i in (1, 2, 3, 4)]
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
        ("return 1 / 0", r"Fails\.observe \(.*mine\.py, line 8\) failed: ZeroDivisionError"),
        ("return {'mean': 1.0}", r"observer Fails: it returned a dict, not Actions or None"),
        ("record.values.zero_()", r"observer Fails: Fails\.observe changed its input"),
        ("return record.advantages", r"AttributeError: .*add 'advantages'"),
    ],
)
def test_an_exception_is_one_warning_or_with_strict_the_end(
    line: str, message: str, tmp_path: Path
) -> None:
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
def test_unknown_fields_are_refused_before_the_run(fields, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fields of observer Watch = .* allowed: a tuple with"):
        Run(RUN, tmp_path / "run", observers=(Watch(fields),)).execute()
    assert not (tmp_path / "run").exists()


PARTS = """
from flowrl.credit import Uniform
from flowrl.losses import ClippedLoss
from flowrl.samplers import FlowSDE
from flowrl.worlds.mixture import DirectionReward

class Rule(Uniform):
    def metrics(self):
        return {"baseline": 0.5}

class Loss(ClippedLoss):
    def metrics(self):
        return {"rows": 7}

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
    numbers = [(row["credit/baseline"], row["loss/rows"], row["sampler/level"]) for row in rows]
    assert numbers == [(0.5, 7, 0.7)] * 4
    assert [row.get("reward/calls") for row in rows] == [1, 2, None, None]
    ((_, text),) = warnings_of(rows, "reward failed")
    assert "Reward.metrics (" in text and "ZeroDivisionError" in text


def stop_at(iteration: int) -> Watch:
    return Watch((), lambda record: Actions(stop="enough" if record.iteration >= iteration else ""))


def test_a_stopped_run_ends_like_a_finished_one(tmp_path: Path) -> None:
    config, out, said = RUN.replace(checkpoint_every=9), tmp_path / "run", []

    def resumed(*observers, start=""):
        assert Run(config, out, observers=observers).execute(resume=True, start=start)
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    assert Run(config, out, said.append, observers=(stop_at(2), Watch(()))).execute()
    assert done(out) == {"iterations": 2, "stopped": "Watch: enough"}
    last = rows_of(out)[-1]
    assert (last["iteration"], last["stopped"]) == (2, "Watch: enough") and last["evaluation"]
    told = "stopped after iteration 2 of 4 by Watch: enough"
    assert any(state.get("warning") == told for state in said)
    assert Run(config.replace(iterations=2), tmp_path / "short").execute()
    for file in ("weights.safetensors", "samples.safetensors", "trajectory.safetensors"):
        assert (out / file).read_bytes() == (tmp_path / "short" / file).read_bytes()

    before = resumed(stop_at(2))
    (out / "done.json").unlink()  # killed after the checkpoint
    (out / "weights.safetensors").unlink()
    assert resumed(stop_at(2)) == before

    # without the observer, and from there by name
    resumed(start="000002")
    assert done(out) == {"iterations": 4} and len(rows_of(out)) == 5
    assert Run(config, tmp_path / "all").execute()
    weights = [(run / "weights.safetensors").read_bytes() for run in (out, tmp_path / "all")]
    assert weights[0] == weights[1]


def test_kept_checkpoints_stay(tmp_path: Path) -> None:
    config, out = RUN.replace(iterations=6, checkpoint_every=100), tmp_path / "run"
    observers = (Watch((), lambda record: Actions(keep=record.iteration in (2, 3))),)
    run = Run(config, out, stop=paused_after(4), observers=observers)
    for resume, newest in ((False, 4), (True, 6)):
        assert run.execute(resume) == resume
        names = sorted(path.stem for path in (out / "checkpoints").iterdir())
        assert names == ["000002", "000003", f"00000{newest}"]
    assert [row["iteration"] for row in rows_of(out) if row.get("kept")] == [2, 3]


def test_an_observer_with_memory_survives_a_resume(tmp_path: Path) -> None:
    stop = paused_after(2)
    assert Run(RUN, tmp_path / "whole", observers=(Counts(),)).execute()
    assert not Run(RUN, tmp_path / "run", stop=stop, observers=(Counts(),)).execute()
    assert Run(RUN, tmp_path / "run", observers=(Counts(),)).execute(resume=True)
    first, second = (
        [row["Counts/total"] for row in rows_of(tmp_path / name)[1:]] for name in ("whole", "run")
    )
    assert first == second and len(set(first)) == 4


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_tables_of_samples(tmp_path: Path) -> None:
    """Odd prompts, a sample that could not be judged, and a composite reward."""
    values = torch.tensor([[[0.25, 0.5], [0.1, torch.nan]], [[0.3, -1.5], [0.2, 1 / 3]]])
    valid, decisions = values[..., -1].isfinite(), Decisions.like(values)
    decisions = replace(decisions, mask=decisions.mask & valid[..., None])
    tables = {
        "prompts": [Prompt('a "red", thing'), Prompt("zwei\nZeilen é")],
        "values": values,
        "parts": {"pick": 2 * values},
        "valid": valid,
        "decisions": decisions,
        "advantages": torch.tensor([[[1.0], [0.0]], [[-0.75], [0.75]]]),
        "weights": decisions.mask.float(),
    }
    saved, folder = SaveExperience(tmp_path, 2), tmp_path / "experience"
    saved.observe(Record(3))
    saved.observe(Record(4, **tables))
    assert sorted(path.name for path in folder.iterdir()) == ["000004.csv", "000004.safetensors"]
    rows = read_table(folder / "000004.csv")
    texts = [prompt.text for prompt in tables["prompts"]]
    assert {name: [row[name] for row in rows] for name in rows[0]} == {
        "iteration": ["4"] * 4,
        "prompt": ["0", "0", "1", "1"],
        "member": ["0", "1", "0", "1"],
        "text": [texts[0], texts[0], texts[1], texts[1]],
        "reward": ["0.5", "", "-1.5", "0.333333343"],  # digits enough for float32
        "valid": ["True", "False", "True", "True"],
        "part_pick": ["1", "", "-3", "0.666666687"],
        "advantage_0": ["1", "0", "-0.75", "0.75"],
        "weight_0": ["1", "0", "1", "1"],
    }
    with safe_open(folder / "000004.safetensors", "pt") as file:
        axes = json.loads(file.metadata()["axes"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: tensor.ndim for name, tensor in tensors.items()} == {
        name: len(names.split()) for name, names in axes.items()
    }
    for name in ("values", "valid", "advantages", "weights"):
        assert equal(tensors[name].float(), tables[name].float())
    assert torch.equal(tensors["mask"], decisions.mask) and axes["step"] == "decision"
    assert axes["part.pick"] == axes["values"] == "prompt member decision+1"


def test_a_run_saves_every_other_iteration_and_overwrites_after_a_resume(tmp_path: Path) -> None:
    config = RUN.replace(save_experience=2, checkpoint_every=1, keep_checkpoints=9)
    out, watch = tmp_path / "run", Watch()
    assert Run(config, out, observers=(watch,)).execute()
    folder, record = out / "experience", watch.seen[3]
    assert sorted(path.name for path in folder.glob("*.csv")) == ["000002.csv", "000004.csv"]
    rows = read_table(folder / "000004.csv")
    for name, table in (
        ("reward", record.values[..., -1]),
        ("advantage_1", record.advantages[..., 1]),
    ):
        numbers = [float(row[name]) for row in rows]
        assert numbers == pytest.approx(table.flatten().tolist(), rel=1e-8)
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
    (tmp_path / "mine.py").write_text(FAILING.format("return Actions(stop='enough')"))
    spec, out = f"{tmp_path}/mine.py:Fails", tmp_path / "run"
    small = words(preset="tiny", world="mixture", task="direction", iterations=3)
    options = ["--observe", spec, "stop-on-collapse(drop=0.9)", *words(save_experience=1, out=out)]
    assert main(["train", *small, *options]) == 0
    assert "stopped after iteration 2 of 3 by Fails: enough" in capsys.readouterr().out
    assert list(json.loads((out / "code.json").read_text())) == [f"observe: {spec}"]
    assert main(["train", "--resume", str(out)]) == 2 and "--trust" in capsys.readouterr().err
    unknown = words(observe="nothing", out=tmp_path / "new")
    assert main(["train", *small, *unknown]) == 2
    assert "unknown observer 'nothing'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
