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


def whole_content(found):
    """What a checkpoint of `checkpoint` holds, if it is all of one piece."""
    done = found.values["done"]
    assert torch.equal(found.tensors["weight"], checkpoint(done).tensors["weight"])
    assert found.values["rows"][0]["iteration"] == done
    return done


# --- the folder
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(1, ["000040"]), (3, ["000020", "000030", "000040"])])
def test_the_newest_few_are_kept(tmp_path, keep, left):
    kept = Checkpoints(tmp_path, keep)
    for done in (10, 20, 30, 40):
        kept.save(checkpoint(done), done)
        assert whole_content(kept.load()) == done
    assert kept.names() == left == sorted(path.stem for path in kept.folder.iterdir())
    assert [whole_content(kept.load(name)) for name in left] == [int(name) for name in left]
    with pytest.raises(
        CheckpointError, match=f"no checkpoint 000011 in .*; there are {', '.join(left)}"
    ):
        kept.load("000011")


def test_names_stay_in_order_beyond_six_digits(tmp_path):
    kept = Checkpoints(tmp_path, 2)
    for done in (999_999, 1_000_000):
        kept.save(checkpoint(done), done)
    assert kept.names() == ["999999", "1000000"] and whole_content(kept.load()) == 1_000_000


DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "one bit": lambda file: file.write_bytes(flipped(file.read_bytes())),
    "half a header": lambda file: file.write_bytes(file.read_bytes()[:40]),
    "binary": lambda file: file.write_bytes(b"\xff\x00\xfe"),
    "empty": lambda file: file.write_bytes(b""),
    "tensors alone": lambda file: file.write_bytes(save({"weight": torch.zeros(3)})),
    "another position": lambda file: edit(file, rb"\"done\": 20", rb"\"done\": 21"),
    "another row": lambda file: edit(file, rb"\"iteration\": 20", rb"\"iteration\": 21"),
    "another name": lambda file: edit(file, b'"weight"', b'"height"'),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def edit(path, before, after):
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after))


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_offered(tmp_path, kind):
    kept = Checkpoints(tmp_path / "a run", keep=2)
    for done in (10, 20):
        kept.save(checkpoint(done), done)
    DAMAGE[kind](kept.path("000020"))
    words = r"000020.*Checkpoint 000010 is complete.*flowrl train --resume '.*a run' --from 000010$"
    with pytest.raises(CheckpointError, match=words):
        kept.load()
    assert whole_content(kept.load("000010")) == 10
    kept.path("000010").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"000020.*no earlier one.*keep_checkpoints"):
        kept.load()


def test_a_checkpoint_of_another_version_is_refused_by_its_format(tmp_path):
    kept = Checkpoints(tmp_path)
    kept.save(checkpoint(7), 7)
    edit(kept.path("000007"), b"flowrl-checkpoint-4", b"flowrl-checkpoint-5")
    words = (
        r"000007.safetensors was written by another version of flowrl \(format"
        r" 'flowrl-checkpoint-5'"
    )
    with pytest.raises(CheckpointError, match=words):
        kept.load()
    (kept.folder / "000010").mkdir()
    (kept.folder / "000010" / "checkpoint.json").write_text("{}")
    with pytest.raises(
        CheckpointError,
        match=r"000010 was written by another version .*'flowrl-checkpoint-3 or older'",
    ):
        kept.names()


def parameters_and(optimizer):
    """Two parameters, their averages, and an optimizer of them."""
    parameters = {
        "a.b": torch.nn.Parameter(torch.ones(4)),
        "c": torch.nn.Parameter(torch.ones(2, 3)),
    }
    return parameters, [torch.zeros(4), torch.full((2, 3), 0.5)], optimizer(parameters.values())


def test_weights_averages_and_moments_come_back_and_share_no_memory():
    """Also the state of a parameter that had no gradient yet: none."""
    parameters, average, optimizer = parameters_and(torch.optim.AdamW)
    assert training_state(parameters, average, optimizer).tensors.keys() == {
        f"{k}.{n}" for k in ("weight", "average") for n in parameters
    }
    for _ in range(3):
        optimizer.zero_grad()
        (parameters["a.b"] ** 2).sum().backward()
        optimizer.step()
    state = training_state(parameters, average, optimizer)
    others, means, other = parameters_and(torch.optim.AdamW)
    restore_training_state(state, others, means, other, Distributed())
    assert parameters["c"] not in optimizer.state and others["c"] not in other.state
    for _ in range(2):
        for some, one in ((parameters, optimizer), (others, other)):
            one.zero_grad()
            sum((p**2).sum() for p in some.values()).backward()
            one.step()
        again = [
            training_state(*each)
            for each in ((parameters, average, optimizer), (others, means, other))
        ]
        assert (
            again[0].values == again[1].values
            and again[0].tensors.keys() == again[1].tensors.keys()
        )
        assert all(
            torch.equal(again[0].tensors[name], again[1].tensors[name]) for name in again[0].tensors
        )
    restore_training_state(
        training_state(*parameters_and(torch.optim.AdamW)), others, means, other, Distributed()
    )
    assert not other.state  # of a checkpoint before the first step
    with pytest.raises(ConfigError, match=r"no weight.c of shape \(2, 3\)"):
        restore_training_state(
            Checkpoint({"weight.a.b": torch.ones(4)}, {}), others, means, other, Distributed()
        )


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


def test_numbers_and_bytes_of_an_optimizer_come_back():
    parameters, average, optimizer = parameters_and(Counting)
    for _ in range(3):
        optimizer.step()
    state = training_state(parameters, average, optimizer)
    assert json.loads(json.dumps(state.values)) == {
        "optimizer": {"optimizer.step.a.b": 3, "optimizer.step.c": 3}
    }
    others, means, other = parameters_and(Counting)
    restore_training_state(state, others, means, other, Distributed())
    for name in parameters:
        found = other.state[others[name]]
        assert found["step"] == 3 and isinstance(found["step"], int)
        assert found["qmap1"].tolist() == pytest.approx([0.3, 0.3])
        assert found["state1"].tolist() == [3, 4, 5, 6]


# --- a failing disk
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("mode", ["error", "full", "before", "after", "half"])
@pytest.mark.parametrize("again", [False, True])
def test_whatever_operation_of_a_save_fails_a_complete_checkpoint_is_left(
    tmp_path, mode, keep, again
):
    """The fault moves through all operations of the third save, of a new iteration or of one that
    is there already.
    """
    at, fired = 0, True
    while fired:
        at += 1
        kept = Checkpoints(tmp_path / f"{at}", keep)
        for done in (1, 2):
            kept.save(checkpoint(done), done)
        iteration = 2 if again else 3
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, mode, at)
            try:
                kept.save(checkpoint(3), iteration)
                saved = True
            except (OSError, DiedError):
                saved = False
            fired = disk.fired
        assert whole_content(kept.load()) in ((3,) if saved else (2, 3))
        for name in kept.names():
            whole_content(kept.load(name))
        kept.save(checkpoint(4), 4)  # and it goes on, and cleans up
        assert whole_content(kept.load()) == 4
        assert sorted(path.stem for path in kept.folder.iterdir()) == kept.names()
        assert len(kept.names()) == keep
    assert at > 6


# --- resuming
# --------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_the_previous_checkpoint_where_the_last_is_damaged(tmp_path, capsys):
    out = tmp_path / "run"
    config = SMALL.replace(iterations=4, keep_checkpoints=3)
    Run(config, out).execute()
    expected = numbers(out)
    assert Checkpoints(out).names() == ["000002", "000003", "000004"]
    DAMAGE["one bit"](Checkpoints(out).path("000004"))
    (out / "done.json").unlink()
    assert main(["train", "--resume", str(out)]) == 2
    assert "Checkpoint 000003 is complete" in capsys.readouterr().err.replace("\n", " ")
    assert main(["train", "--resume", str(out), "--from", "000009"]) == 2
    assert main(["train", "--out", str(tmp_path / "other"), "--from", "000003"]) == 2
    assert "given with --resume only" in capsys.readouterr().err.replace("\n", " ")
    assert main(["train", "--resume", str(out), "--from", "000003"]) == 0
    assert numbers(out) == expected
    assert main(["train", "--resume", str(out), "--from", "000002"]) == 0  # also of a finished run
    assert numbers(out) == expected and Checkpoints(out).names() == ["000002", "000003", "000004"]


@pytest.mark.parametrize(
    ("tamper", "noted"),
    [
        (lambda text: text.replace('"reward_mean": 0', '"reward_mean": 1', 1), True),
        (lambda text: text.replace("{", "", 1), True),
        (lambda text: "".join(text.splitlines(keepends=True)[1:]), True),
        (lambda text: text + '{"iteration": 3, "half', False),
        (lambda text: text[: len(text) // 2], False),
        (lambda text: "", False),
    ],
)
def test_metrics_that_were_tampered_with_come_back_from_the_checkpoint(tmp_path, tamper, noted):
    config = SMALL.replace(iterations=3)
    Run(config, tmp_path / "whole").execute()
    assert not Run(
        config, tmp_path / "run", stop=lambda: (tmp_path / "run" / "checkpoints").exists()
    ).execute()
    metrics, said = tmp_path / "run" / "metrics.jsonl", []
    text = metrics.read_text()
    metrics.write_text(tamper(text))
    assert Run(config, tmp_path / "run", said.append).execute(resume=True)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    warnings = [state["warning"] for state in said if "warning" in state]
    assert len(warnings) == noted and all(
        "is not what the checkpoint recorded" in warning for warning in warnings
    )
    assert (tmp_path / "run" / "metrics.damaged.jsonl").exists() == noted


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
def test_killed_at_twenty_random_moments_a_run_loses_nothing_but_the_iteration_under_way(tmp_path):
    told = kill(SMALL.replace(iterations=12), tmp_path, kills=20, longest=0.25)
    assert len(told["killed"]) == 20
    expected = numbers(tmp_path / "whole")
    for number in range(told["runs"]):
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
