"""Checkpoints and weights: whatever kills a run, at whatever moment, a complete one can be read and
the run ends with the same numbers; any change of a file is one message.
"""

import json
import shutil

import pytest
import torch
from failing_disk import DiedError, FailingDisk
from safetensors.torch import load_file, save, save_file
from small_run import SMALL, error_of, flowrl_, numbers

from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.run.checkpoint import (
    EARLIER,
    Checkpoint,
    Checkpoints,
    load_weights,
    restore_training_state,
    save_weights,
    training_state,
)
from flowrl.run.distributed import Distributed
from flowrl.run.job import Run
from flowrl.run.trained import trained_policy


def checkpoint(done):
    rows = [{"iteration": done, "x": float("nan")}]
    return Checkpoint({"weight": torch.full((3,), float(done))}, {"done": done, "rows": rows})


def read(kept, name=""):
    """The iteration of the named or the newest checkpoint, all of which must belong to it."""
    stored = kept.load(name or kept.newest)
    done = stored.values["done"]
    assert torch.equal(stored.tensors["weight"], checkpoint(done).tensors["weight"])
    assert stored.values["rows"][0]["iteration"] == done
    return done


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_few_are_kept_in_order_beyond_six_digits(tmp_path, keep):
    kept = Checkpoints(tmp_path, keep)
    iterations = (10, 20, 999_999, 1_000_000)
    for done in iterations:
        kept.save(checkpoint(done), done)
        assert read(kept) == done
    left = [f"{done:06d}" for done in iterations[-keep:]]
    assert kept.names() == left and len(list(kept.folder.iterdir())) == keep
    assert [read(kept, name) for name in left] == list(map(int, left))
    message = f"no checkpoint 000011 in .*; available: {', '.join(left)}"
    with pytest.raises(CheckpointError, match=message):
        kept.load("000011")


def edit(path, before, after):
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after))


DAMAGE = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "one bit": lambda file: edit(file, file.read_bytes()[-1:], b"?"),
    "half a header": lambda file: file.write_bytes(file.read_bytes()[:40]),
    "empty": lambda file: file.write_bytes(b""),
    "tensors alone": lambda file: file.write_bytes(save({"weight": torch.zeros(3)})),
    "another position": lambda file: edit(file, rb"\"done\": 20", rb"\"done\": 21"),
    "another name": lambda file: edit(file, b'"weight"', b'"height"'),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "another version": lambda file: edit(file, b"checkpoint-5", b"checkpoint-3"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_offered(tmp_path, kind):
    kept = Checkpoints(tmp_path / "a run", keep=2)
    for done in (10, 20):
        kept.save(checkpoint(done), done)
    DAMAGE[kind](kept.path("000020"))
    advice = r"000020.*Checkpoint 000010 is complete.*--resume '.*a run' --from 000010$"
    with pytest.raises(CheckpointError, match=advice):
        read(kept)
    assert read(kept, "000010") == 10
    kept.path("000010").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"000020.*no earlier one.*keep_checkpoints"):
        read(kept)


def parameters_and(optimizer):
    """Two parameters, their averages, and an optimizer of them."""
    parameters = {
        "a.b": torch.nn.Parameter(torch.ones(4)),
        "c": torch.nn.Parameter(torch.ones(2, 3)),
    }
    return parameters, [torch.zeros(4), torch.full((2, 3), 0.5)], optimizer(parameters.values())


class Counting(torch.optim.Optimizer):
    """State as an 8-bit optimizer has it: a plain number, bytes, and a table for each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["state1"] = torch.arange(4, dtype=torch.uint8) + state["step"]
                state["qmap1"] = torch.full((2,), 0.1 * state["step"])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, Counting])
def test_weights_averages_and_moments_are_restored_and_share_no_memory(optimizer):
    """A parameter without a gradient has no moments, and neither has a new optimizer."""
    training, other = parameters_and(optimizer), parameters_and(optimizer)
    untrained = training_state(*training)

    def step(some, *names):
        parameters, _, optimizer = some
        optimizer.zero_grad()
        sum((parameters[name] ** 2).sum() for name in names).backward()
        optimizer.step()

    for _ in range(3):
        step(training, "a.b")
    state = training_state(*training)
    values = json.loads(json.dumps(state.values))
    restore_training_state(Checkpoint(state.tensors, values), *other, Distributed())
    assert [other[0][name] in other[2].state for name in ("a.b", "c")] == [True, False]
    for _ in range(2):
        for some in (training, other):
            step(some, "a.b", "c")
        first, second = training_state(*training), training_state(*other)
        assert first.values == second.values
        torch.testing.assert_close(first.tensors, second.tensors, rtol=0, atol=0)
    restore_training_state(untrained, *other, Distributed())
    assert not other[2].state
    incomplete = Checkpoint({"weight.a.b": torch.ones(4)}, {})
    with pytest.raises(ConfigError, match=r"no weight.c of shape \(2, 3\)"):
        restore_training_state(incomplete, *other, Distributed())


@pytest.mark.parametrize("mode", ["error", "full", "before", "after", "half"])
@pytest.mark.parametrize(("keep", "iteration"), [(1, 3), (1, 2), (2, 3)])
def test_whatever_operation_of_a_save_fails_a_complete_checkpoint_is_left(
    tmp_path, mode, keep, iteration
):
    """The fault moves through all operations of the third save, of a new iteration or of one whose
    checkpoint exists.
    """
    operation, fired = 0, True
    while fired:
        operation += 1
        kept = Checkpoints(tmp_path / f"{operation}", keep)
        for done in (1, 2):
            kept.save(checkpoint(done), done)
        with pytest.MonkeyPatch.context() as patch:
            disk, possible = FailingDisk(patch, mode, operation), (3,)
            try:
                kept.save(checkpoint(3), iteration)
            except (OSError, DiedError):
                possible = (2, 3)
            fired = disk.fired
        assert read(kept) in possible
        for name in kept.names():
            read(kept, name)
        kept.save(checkpoint(4), 4)  # which removes what was left
        assert read(kept) == 4 and len(kept.names()) == keep
        assert sorted(path.stem for path in kept.folder.iterdir()) == kept.names()
    assert operation > 6


def test_a_run_resumes_from_the_previous_checkpoint_if_the_last_is_damaged(tmp_path, capsys):
    out = tmp_path / "run"
    Run(SMALL.replace(iterations=4, keep_checkpoints=3), out).execute()
    expected, names = numbers(out), Checkpoints(out).names()
    assert names == ["000002", "000003", "000004"]
    DAMAGE["cut"](Checkpoints(out).path("000004"))
    (out / "done.json").unlink()
    resume = f"train --resume {out}"
    assert "Checkpoint 000003 is complete" in error_of(resume, capsys)
    assert flowrl_(f"{resume} --from 000009") == 2
    assert "only with --resume" in error_of(f"train --out {out}2 --from 000003", capsys)
    for start in ("000003", "000002"):  # the second time of a finished run
        assert flowrl_(f"{resume} --from {start}") == 0
        assert numbers(out) == expected and Checkpoints(out).names() == names


def test_a_changed_or_missing_line_of_metrics_is_refused(tmp_path):
    folder = tmp_path / "run"
    assert not Run(SMALL, folder, stop=lambda: True).execute()
    metrics = folder / "metrics.jsonl"
    text = metrics.read_text()
    edited = text.replace('"reward_mean": 0', '"reward_mean": 1', 1)
    for change in (edited, text[:-9], text.partition("\n")[2], ""):
        metrics.write_text(change)
        with pytest.raises(CheckpointError, match=r"metrics.jsonl is missing or was changed"):
            Run(SMALL, folder).execute(resume=True)
    metrics.unlink()
    with pytest.raises(CheckpointError, match=r"restore the file, or start a new run"):
        Run(SMALL, folder).execute(resume=True)


@pytest.mark.parametrize(
    ("settings", "earlier"),
    [
        (dict(method="tp-grpo", checkpoint_every=2), False),
        (dict(method="average", credit="moving-average-gain"), True),
        (dict(credit="value-tracker", method="tracker"), False),
    ],
)
def test_a_paused_run_resumes_to_the_same_numbers(tmp_path, settings, earlier, monkeypatch):
    """A crash leaves later rows of metrics, and a cut one; a checkpoint of an earlier version holds
    the rows itself.
    """
    config = SMALL.replace(iterations=4, **settings)
    folder, pauses = tmp_path / "run", iter([False, True])
    assert Run(config, tmp_path / "uninterrupted").execute()
    assert not Run(config, folder, stop=lambda: next(pauses)).execute()
    metrics = folder / "metrics.jsonl"
    if earlier:
        kept = Checkpoints(folder)
        state, rows = kept.load(kept.newest), map(json.loads, metrics.read_text().splitlines())
        values = {name: value for name, value in state.values.items() if name != "metrics"}
        monkeypatch.setattr("flowrl.run.checkpoint.FORMAT", EARLIER)
        kept.save(Checkpoint(state.tensors, {**values, "rows": [*rows]}), int(kept.newest))
        monkeypatch.undo()
        metrics.unlink()
    else:
        with metrics.open("a") as file:
            file.write('{"iteration": 2}\n{"iteration": 3, "half')
    assert Run(config, folder).execute(resume=True)
    assert numbers(folder) == numbers(tmp_path / "uninterrupted")
    runs = [Checkpoints(tmp_path / name) for name in ("run", "uninterrupted")]
    resumed, expected = (kept.load(kept.newest).tensors for kept in runs)
    torch.testing.assert_close(resumed, expected, rtol=0, atol=0)


# The weights of a finished run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    Run(SMALL, folder).execute()
    return folder


CHANGES = {
    "no hash": lambda path: save_file(load_file(path), path),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "empty": lambda path: path.write_bytes(b""),
    "another run's": lambda path: save_weights(
        path, {name: tensor[:1] for name, tensor in load_file(path).items()}
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_weights_are_one_message(kind, finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    CHANGES[kind](run / "weights.safetensors")
    with pytest.raises(CheckpointError):
        trained_policy(run)
    error = error_of(f"sample --weights {run} --out {tmp_path}/new.png", capsys)
    assert str(run) in error and error.count("\n") == 1
    assert not (tmp_path / "new.png").exists()


def test_every_flipped_bit_is_found(tmp_path):
    """Also the same bytes under another shape or type."""
    path = tmp_path / "weights.safetensors"
    tensors = {"a": torch.arange(4.0).view(2, 2), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_weights(path, tensors)
    assert torch.equal(load_weights(path)["a"], tensors["a"])
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    changed = [content.replace(b"[2,2]", b"[4,1]"), content.replace(b'"BF16"', b'"F16" ')]
    for bit in range(8 * header, 8 * len(content)):
        data = bytearray(content)
        data[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(data))
    for data in changed:
        assert data != content
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="does not match its own hash"):
            load_weights(path)
