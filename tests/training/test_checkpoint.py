"""Checkpoints: whatever kills a run, at whatever moment, a complete one can be read and the run
ends with the same numbers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from failing_disk import DiedError, FailingDisk
from safetensors.torch import save
from small_run import SMALL, numbers

from flowrl.cli.main import main
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.distributed import Distributed
from flowrl.testing.tiny import tiny_flux, tiny_sd3
from flowrl.training.build import trained_policy
from flowrl.training.checkpoint import (
    Checkpoint,
    Checkpoints,
    restore_training_state,
    training_state,
)
from flowrl.training.config import preset
from flowrl.training.run import Run


def checkpoint(done):
    return Checkpoint(
        {"weight": torch.full((3,), float(done))},
        {"done": done, "rows": [{"iteration": done, "x": float("nan")}]},
    )


def complete(found):
    """The iteration of a checkpoint that `checkpoint` has made, all of which must belong to it."""
    done = found.values["done"]
    assert torch.equal(found.tensors["weight"], checkpoint(done).tensors["weight"])
    assert found.values["rows"][0]["iteration"] == done
    return done


# --- the folder
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_few_are_kept_in_order_beyond_six_digits(tmp_path, keep):
    kept = Checkpoints(tmp_path, keep)
    iterations = (10, 20, 999_999, 1_000_000)
    for done in iterations:
        kept.save(checkpoint(done), done)
        assert complete(kept.load()) == done
    left = [f"{done:06d}" for done in iterations[-keep:]]
    assert kept.names() == left and len(list(kept.folder.iterdir())) == keep
    assert [complete(kept.load(name)) for name in left] == list(map(int, left))
    message = f"no checkpoint 000011 in .*; there are {', '.join(left)}"
    with pytest.raises(CheckpointError, match=message):
        kept.load("000011")


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def edit(path, before, after):
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after))


DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "one bit": lambda file: file.write_bytes(flipped(file.read_bytes())),
    "half a header": lambda file: file.write_bytes(file.read_bytes()[:40]),
    "empty": lambda file: file.write_bytes(b""),
    "tensors alone": lambda file: file.write_bytes(save({"weight": torch.zeros(3)})),
    "another position": lambda file: edit(file, rb"\"done\": 20", rb"\"done\": 21"),
    "another name": lambda file: edit(file, b'"weight"', b'"height"'),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "another version": lambda file: edit(file, b"checkpoint-4", b"checkpoint-5"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_offered(tmp_path, kind):
    kept = Checkpoints(tmp_path / "a run", keep=2)
    for done in (10, 20):
        kept.save(checkpoint(done), done)
    DAMAGE[kind](kept.path("000020"))
    words = r"000020.*Checkpoint 000010 is complete.*flowrl train --resume '.*a run' --from 000010$"
    with pytest.raises(CheckpointError, match=words):
        kept.load()
    assert complete(kept.load("000010")) == 10
    kept.path("000010").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"000020.*no earlier one.*keep_checkpoints"):
        kept.load()


def parameters_and(optimizer):
    """Two parameters, their averages, and an optimizer of them."""
    parameters = {
        "a.b": torch.nn.Parameter(torch.ones(4)),
        "c": torch.nn.Parameter(torch.ones(2, 3)),
    }
    return parameters, [torch.zeros(4), torch.full((2, 3), 0.5)], optimizer(parameters.values())


def test_weights_averages_and_moments_are_restored_and_share_no_memory():
    """A parameter without a gradient has no moments, and neither has a new optimizer."""
    training, other = parameters_and(torch.optim.AdamW), parameters_and(torch.optim.AdamW)
    untrained = training_state(*training)

    def step(some, *names):
        parameters, _, optimizer = some
        optimizer.zero_grad()
        sum((parameters[name] ** 2).sum() for name in names).backward()
        optimizer.step()

    for _ in range(3):
        step(training, "a.b")
    restore_training_state(training_state(*training), *other, Distributed())
    assert [other[0][name] in other[2].state for name in ("a.b", "c")] == [True, False]
    for _ in range(2):
        for some in (training, other):
            step(some, "a.b", "c")
        first, second = training_state(*training), training_state(*other)
        assert first.values == second.values and first.tensors.keys() == second.tensors.keys()
        for name, tensor in first.tensors.items():
            assert torch.equal(tensor, second.tensors[name]), name
    restore_training_state(untrained, *other, Distributed())
    assert not other[2].state
    incomplete = Checkpoint({"weight.a.b": torch.ones(4)}, {})
    with pytest.raises(ConfigError, match=r"no weight.c of shape \(2, 3\)"):
        restore_training_state(incomplete, *other, Distributed())


class Counting(torch.optim.Optimizer):
    """State as an 8-bit optimizer has it: a plain number, bytes, and a table for each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["state1"] = torch.arange(4, dtype=torch.uint8) + state["step"]
            state["qmap1"] = torch.full((2,), 0.1 * state["step"])


def test_numbers_and_bytes_of_an_optimizer_are_restored():
    training, other = parameters_and(Counting), parameters_and(Counting)
    for _ in range(3):
        training[2].step()
    state = training_state(*training)
    numbers = {"optimizer.step.a.b": 3, "optimizer.step.c": 3}
    assert json.loads(json.dumps(state.values)) == {"optimizer": numbers}
    restore_training_state(state, *other, Distributed())
    for parameter in other[0].values():
        restored = other[2].state[parameter]
        assert restored["step"] == 3 and isinstance(restored["step"], int)
        assert restored["qmap1"].tolist() == pytest.approx([0.3, 0.3])
        assert restored["state1"].tolist() == [3, 4, 5, 6]


# --- a failing disk
# -------------------------------------------------------------------------------------------------


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
        assert complete(kept.load()) in possible
        for name in kept.names():
            complete(kept.load(name))
        kept.save(checkpoint(4), 4)  # which removes what was left
        assert complete(kept.load()) == 4 and len(kept.names()) == keep
        assert sorted(path.stem for path in kept.folder.iterdir()) == kept.names()
    assert operation > 6


# --- resuming
# --------------------------------------------------------------------------------------------------


def test_a_run_resumes_from_the_previous_checkpoint_if_the_last_is_damaged(tmp_path, capsys):
    out = tmp_path / "run"
    Run(SMALL.replace(iterations=4, keep_checkpoints=3), out).execute()
    expected, names = numbers(out), Checkpoints(out).names()
    assert names == ["000002", "000003", "000004"]
    DAMAGE["one bit"](Checkpoints(out).path("000004"))
    (out / "done.json").unlink()
    resume = ["train", "--resume", str(out)]
    assert main(resume) == 2
    assert "Checkpoint 000003 is complete" in capsys.readouterr().err.replace("\n", " ")
    assert main([*resume, "--from", "000009"]) == 2
    assert main(["train", "--out", str(tmp_path / "other"), "--from", "000003"]) == 2
    assert "given with --resume only" in capsys.readouterr().err.replace("\n", " ")
    for start in ("000003", "000002"):  # the second time of a finished run
        assert main([*resume, "--from", start]) == 0
        assert numbers(out) == expected and Checkpoints(out).names() == names


CHANGES = {
    "later rows": lambda text: text + '{"iteration": 2}\n{"iteration": 3, "half',
    "cut": lambda text: text[: len(text) // 2],
    "edited": lambda text: text.replace('"reward_mean": 0', '"reward_mean": 1', 1),
    "a row less": lambda text: text.partition("\n")[2],
}


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ("later rows", dict(method="tp-grpo", checkpoint_every=2)),
        ("cut", dict(method="average", credit="moving-average-gain")),
        ("edited", dict(credit="value-tracker", method="tracker")),
        ("a row less", {}),
    ],
)
def test_a_paused_run_resumes_to_the_same_numbers_whatever_its_metrics(tmp_path, change, settings):
    config = SMALL.replace(iterations=4, **settings)
    folder, pauses = tmp_path / "run", iter([False, True])
    assert Run(config, tmp_path / "uninterrupted").execute()
    assert not Run(config, folder, stop=lambda: next(pauses)).execute()
    metrics = folder / "metrics.jsonl"
    metrics.write_text(CHANGES[change](metrics.read_text()))
    assert Run(config, folder).execute(resume=True)
    assert numbers(folder) == numbers(tmp_path / "uninterrupted")
    states = [Checkpoints(tmp_path / name).load() for name in ("run", "uninterrupted")]
    for name, tensor in states[0].tensors.items():
        assert torch.equal(tensor, states[1].tensors[name]), name
    trained_policy(folder)


NURSERY = """
import json, os, random, select, signal, sys, time
from pathlib import Path

import torch

from flowrl.training.checkpoint import Checkpoints
from flowrl.training.build import make_world, policy_options
from flowrl.training.config import RunConfig
from flowrl_compare.results import load_run
from flowrl.training.run import Run

torch.set_num_threads(1)
values, out, kills, seed, longest, pauses = json.loads(sys.argv[1])
config, out, draw = RunConfig.from_dict(values, trust=True), Path(out), random.Random(seed)
make_world(config).policy(policy_options(config))  # what every child needs is imported once


def child(folder, resume):
    ours, theirs = os.pipe()
    identity = os.fork()
    if identity == 0:
        os.write(theirs, b"0\\n")
        report = lambda state: "iteration" in state and os.write(theirs, b"%d\\n" % state["iteration"])
        Run(config, folder, report, lambda: pauses and folder.name != "whole").execute(resume)
        os._exit(0)
    os.close(theirs)
    return identity, ours


def ended(identity, ours):
    _, status = os.waitpid(identity, 0)
    told = os.read(ours, 65536).split()
    os.close(ours)
    return status, int(told[-1]) if told else 0


assert ended(*child(out / "whole", False)) == (0, config.iterations)
killed, runs = [], 0
while len(killed) < kills:
    folder, resume = out / f"run{runs}", False
    while not (folder / "done.json").exists():
        identity, ours = child(folder, resume)
        if len(killed) < kills:
            select.select([ours], [], [])
            time.sleep(draw.uniform(0, longest))
            os.kill(identity, signal.SIGKILL)
        status, told = ended(identity, ours)
        names = Checkpoints(folder).names()
        assert not names or Checkpoints(folder).load().values["done"] == int(names[-1])
        assert (int(names[-1]) if names else 0) >= told - 1, (names, told)
        if (folder / "metrics.jsonl").exists():
            load_run(folder)
        if status:
            assert os.WTERMSIG(status) == signal.SIGKILL
            killed.append(int(names[-1]) if names else 0)
        resume = (folder / "config.json").exists()
    runs += 1
print(json.dumps({"runs": runs, "killed": killed}))
"""


def kill(config, out, kills, longest, pauses=False):
    """Run `config` in `out`/whole, and killed `kills` times at random moments in `out`/run0 and,
    where that ends, run1 ...; with `pauses` it also pauses after every iteration.
    """
    given = json.dumps([config.as_dict(), str(out), kills, 20261121, longest, pauses])
    done = subprocess.run(
        [sys.executable, "-c", NURSERY, given],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_twenty_random_moments_a_run_loses_at_most_an_iteration(tmp_path):
    report = kill(SMALL.replace(iterations=12), tmp_path, kills=20, longest=0.25)
    assert len(report["killed"]) == 20
    expected = numbers(tmp_path / "whole")
    for number in range(report["runs"]):
        assert numbers(tmp_path / f"run{number}") == expected
        assert not list((tmp_path / f"run{number}").glob("*.tmp"))


REWARD = """
class Redness:
    def score(self, images, prompts):
        return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd3", "flux"])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_paused_and_killed_diffusers_models_resume_to_the_same_bits(tmp_path, family):
    {"sd3": tiny_sd3, "flux": tiny_flux}[family]().save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "prompts.txt").write_text("a red fox\na red car\na red hat\n")
    config = preset("tiny").apply(
        model=str(tmp_path / "model"),
        prompts=str(tmp_path / "prompts.txt"),
        reward=f"{tmp_path}/reward.py:Redness",
        resolution=16,
        max_sequence_length=24,
        lora_rank=2,
        iterations=3,
        checkpoint_every=1,
        device="cpu",
        dtype="float32",
        minibatches=2,
        eval_samples=2,
        learning_rate=0.01,
    )
    assert len(kill(config, tmp_path, kills=2, longest=1.0, pauses=True)["killed"]) == 2
    assert numbers(tmp_path / "run0") == numbers(tmp_path / "whole")
    adapter = Path("lora") / "pytorch_lora_weights.safetensors"
    assert (tmp_path / "run0" / adapter).read_bytes() == (tmp_path / "whole" / adapter).read_bytes()
