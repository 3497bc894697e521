"""New runs that begin with the weights, averages and moments of another one (`start_from`)."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from small_run import (
    MIXTURE,
    SMALL,
    error_of,
    flowrl_,
    model_files,
    numbers,
    plain,
    rows_of,
    trainer_of,
    words,
)

from flowrl.cli.main import main
from flowrl.run.begin import load_start
from flowrl.run.checkpoint import Checkpoints, load_weights, save_checkpoint, trainer_state
from flowrl.run.config import load_config
from flowrl.run.format import ADDED, FORMAT
from flowrl.run.job import Run

OPTIONS = f"{MIXTURE} --groups 2 --eval-every 1 --checkpoint-every 1 --keep-checkpoints 9"
FORWARD = dict(method="diffusion-nft", loss="diffusion-nft(decay=(0, 0.2, 0.5))")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two iterations."""
    out = tmp_path_factory.mktemp("start") / "run"
    assert flowrl_(f"train {OPTIONS} --iterations 2 --out {out}") == 0
    return out


@pytest.mark.parametrize("name", ["", "@last", "@best", "@000001", "@1"])
@pytest.mark.parametrize("method", [{}, FORWARD])
def test_a_trainer_begins_with_weights_averages_and_moments_alone(name, method, run):
    """Also one of another method, whose copies of the weights are then those of the start."""
    rewards = [row["evaluation"]["reward"] for row in rows_of(run)[1:]]
    best = f"{1 + rewards.index(max(rewards)):06d}"
    checkpoint = {"": "000002", "@last": "000002", "@best": best}.get(name, "000001")
    there = Checkpoints(run).load(checkpoint)
    settings = SMALL.replace(start_from=f"{run}{name}", learning_rate=0.5, seed=5, **method)
    trainer, new = trainer_of(settings), trainer_state(trainer_of(settings))
    load_start(trainer, settings)
    state = trainer_state(trainer)
    for key, tensor in state.tensors.items():
        prefix, _, rest = key.partition(".")
        if prefix in ("weight", "average", "optimizer"):
            assert torch.equal(tensor, there.tensors[key])
        elif prefix == "copy":
            assert torch.equal(tensor, there.tensors[f"weight.{rest.partition('.')[2]}"])
        else:
            assert torch.equal(tensor, new.tensors[key])
    assert any(key.startswith("copy.") for key in state.tensors) == bool(method)
    assert any(key.startswith("optimizer.exp_avg.") for key in state.tensors)
    for key in ("done", "order", "optimizer_steps"):
        assert state.values[key] == new.values[key]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    trainer.iteration()


@pytest.mark.parametrize("method", ["flow-grpo", "tp-grpo"])
def test_a_run_begins_where_another_one_ended(method, run, tmp_path, capsys):
    out, again = tmp_path / "new", tmp_path / "again"
    options = f"{OPTIONS} --method {method} --iterations 2 --start-from {run}@last"
    assert flowrl_(f"train {options} --out {out}") == 0
    assert (
        f"begins with the weights, averages and moments of {run}@00000" in capsys.readouterr().out
    )
    first, last = rows_of(out)[0], rows_of(run)[-1]
    assert first["evaluation"] == plain(last["evaluation"])
    assert first["iteration"] == 0 and rows_of(out)[-1]["nfe_total"] == last["nfe_total"] * (
        rows_of(out)[1]["nfe"] / last["nfe"]
    )
    assert flowrl_(f"train --config {out}/config.yaml --out {again}") == 0
    assert numbers(again) == numbers(out)
    error = error_of(f"train --resume {out} --start-from {run}@1 --iterations 3", capsys)
    assert "a resume cannot change start_from" in error and f"--start-from {run}@1" in error


def test_a_killed_run_begins_again_and_a_resumed_one_does_not(run, tmp_path):
    first = shutil.copytree(run, tmp_path / "first")
    given = load_config(run / "config.json").replace(start_from=str(first), checkpoint_every=2)
    assert Run(given, tmp_path / "whole").execute()

    def die(state):
        if state.get("iteration") == 1:
            raise KeyboardInterrupt

    out = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        Run(given, out, die).execute()
    assert not Checkpoints(out).newest
    assert flowrl_(f"train --resume {out}") == 0
    assert numbers(out) == numbers(tmp_path / "whole")
    shutil.rmtree(first)
    assert flowrl_(f"train --resume {out} --iterations 3") == 0


@pytest.mark.parametrize(
    ("start", "options", "message"),
    [
        ("{run}", "--world shapes --task text", "has world 'mixture', this run has 'shapes'"),
        ("{run}", "--optimizer adamw-8bit", "has optimizer 'adamw', this run has 'adamw-8bit'"),
        ("{run}@000007", "", "no checkpoint '000007'"),
        (
            "{run}/nothing",
            "",
            "is not allowed; allowed: a run or one of its checkpoints (RUN, RUN@000010",
        ),
        (
            "someone/lora",
            "",
            "is not allowed; allowed: a run or one of its checkpoints (RUN, RUN@000010",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    start, options, message, run, tmp_path, capsys
):
    out, given = tmp_path / "new", "--preset tiny" if "--world" in options else MIXTURE
    start = start.format(run=run)
    error = error_of(f"train {given} {options} --start-from {start} --out {out}", capsys)
    assert message in error and error.count("\n") == 1
    assert not out.exists()


def test_weights_of_another_world_have_other_names(run, tmp_path):
    """As of a user's worlds under one name."""
    values = Checkpoints(run).load("000002")
    tensors = {name.replace("weight.", "weight.other."): t for name, t in values.tensors.items()}
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_bytes((run / "config.json").read_bytes())
    (out / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    save_checkpoint(out / "checkpoints" / "000002.safetensors", type(values)(tensors, {}))
    config = load_config(run / "config.json").replace(start_from=str(out))
    with pytest.raises(Exception, match=r"has other trained weights, as in .*: none there"):
        Run(config, tmp_path / "new").execute()
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run of one iteration of a tiny pipeline, and the settings of its files."""
    folder = tmp_path_factory.mktemp("model")
    given = model_files(folder) | {"preset": "tiny", "groups": 2, "iterations": 1}
    given |= {"tracker": "none", "eval_samples": 2, "lora_rank": 4}
    assert main(["train", *words(**given, out=folder / "run")]) == 0
    return folder / "run", given


def test_a_run_of_a_model_begins_with_another_size_and_method_but_not_with_another_lora(
    model, tmp_path, capsys
):
    run, given = model
    given = given | {"start_from": run}
    for changed, message in (
        ({"lora_rank": 8}, "has lora_rank 4, this run has 8"),
        ({"lora_alpha": 2.0}, "has lora_alpha"),
        ({"tuning": "full", "lora_rank": None}, "tuning 'lora', this run has 'full'"),
        ({"lora_targets": "attn.to_q"}, "has other trained weights, as in"),
    ):
        options = {name: value for name, value in (given | changed).items() if value is not None}
        assert main(["train", *words(**options, out=tmp_path / "no")]) == 2
        error = capsys.readouterr().err
        assert message in error and f"--adapter {run}" in error
    out = tmp_path / "larger"
    larger = given | {"resolution": 32, "method": "tp-grpo", "num_steps": 5}
    assert main(["train", *words(**larger, out=out)]) == 0
    moments = Checkpoints(out).load("000001").tensors
    steps = {float(moments[name]) for name in moments if name.startswith("optimizer.step.")}
    before = Checkpoints(run).load("000001").tensors
    already = {float(before[name]) for name in before if name.startswith("optimizer.step.")}
    assert steps == {2 * already.pop()}


@pytest.mark.parametrize("earlier", ADDED)
def test_a_run_folder_of_an_earlier_format_resumes(earlier, run, tmp_path):
    """Its files lack the settings that were added since, and its checkpoints have no settings."""
    options = OPTIONS.replace("--keep-checkpoints 9", "--keep-checkpoints 1")
    assert flowrl_(f"train {options} --iterations 4 --out {tmp_path}/long") == 0
    out = tmp_path / "old"
    assert flowrl_(f"train {options} --iterations 2 --out {out}") == 0
    values = json.loads((out / "config.json").read_text())
    formats = [*ADDED]
    added = {name for each in formats[formats.index(earlier) :] for name in ADDED[each]}
    for group in values.values():
        for name in added & {*group} if isinstance(group, dict) else ():
            del group[name]
    values["optim"]["final_learning_rate"] = 1.0  # the default at that time; now auto
    for name in ("config.json", "config.yaml"):
        (out / name).write_text(json.dumps({**values, "format": earlier}))
    saved = Checkpoints(out).load("000002")
    del saved.values["settings"]
    save_checkpoint(out / "checkpoints" / "000002.safetensors", saved)
    assert flowrl_(f"train --resume {out} --iterations 3 --kl-weight 0.5 --change") == 0
    assert rows_of(out)[3]["changed"] == {"kl_weight": [0.0, 0.5]}
    assert json.loads((out / "config.json").read_text())["format"] == FORMAT
    assert plain(rows_of(out)[2]) == plain(rows_of(tmp_path / "long")[2])


def in_two_processes(sharded, *command):
    """Run a command of flowrl in two processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, *launcher, "-m", "flowrl", *map(str, command)]
    environment = os.environ | {"ACCELERATE_USE_FSDP": sharded}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["false", "true"])
def test_several_processes_begin_with_the_weights_of_one_and_change(sharded, model, tmp_path):
    run, given = model
    given, change = given | {"start_from": run}, {"iterations": 2, "change": True, "trust": True}
    change |= {"learning_rate": 1e-5, "eval_samples": 3}
    for name in ("one", "two"):
        first = ["train", *words(**given, out=tmp_path / name)]
        then = ["train", *words(resume=tmp_path / name, **change)]
        for command in (first, then):
            if name == "two":
                in_two_processes(sharded, *command)
            else:
                assert main(command) == 0
    one, two = (load_weights(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 2e-6
    moments = [Checkpoints(tmp_path / name).load("000002").tensors for name in ("one", "two")]
    names = [name for name in moments[0] if name.startswith("optimizer.step.")]
    assert names and all(torch.equal(*(m[name] for m in moments)) for name in names)
    changes = [rows_of(tmp_path / name)[2]["changed"] for name in ("one", "two")]
    assert changes[0] == changes[1] and changes[0]["eval_samples"] == [2, 3]
