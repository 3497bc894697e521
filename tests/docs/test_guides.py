"""The parts that the guides and recipes show keep the promises that the guides tell to check."""

import json
import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from loading import ROOT
from small_run import TINY_RUN, rows_of

from flowrl import preset
from flowrl.cli.main import main
from flowrl.run.build import make_trainer, policy_options
from flowrl.run.plan import known_architecture
from flowrl.testing import (
    check_credit,
    check_forward_loss,
    check_loss,
    check_probe,
    check_reward,
    check_sampler,
    check_solver,
    check_world,
)

GUIDES = ROOT / "docs" / "guides"


def python_blocks(guide):
    page = (GUIDES / f"{guide}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("guide", "name", "check"),
    [
        ("credit-rule", "LargestGain", check_credit),
        ("loss", "TanhLoss", check_loss),
        ("forward-loss", "WeightedRegression", check_forward_loss),
        ("sampler", "Jitter", check_sampler),
        ("sampler", "AdamsBashforth", check_solver),
        ("reward", "Sharpness", check_reward),
        ("world", "World", check_world),
        ("extend", "DiscountedSiblings", check_credit),
        ("extend", "TwoSteps", check_probe),
        ("cheap-values", "Linear", check_probe),
    ],
)
def test_a_guides_part_keeps_its_promises(guide, name, check, tmp_path):
    (block,) = [text for text in python_blocks(guide) if f"class {name}" in text]
    file = block.splitlines()[0].removeprefix("# ")
    if name != "DiscountedSiblings":  # no command of its page trains with this rule
        page = (GUIDES / f"{guide}.md").read_text()
        assert f"{file}:{name}" in page, "commands use the file's name"
    (tmp_path / file).write_text(block)
    findings = check(runpy.run_path(str(tmp_path / file))[name]())
    assert findings.ok, str(findings)


def test_the_observers_of_the_guide_run(tmp_path, monkeypatch):
    """The page's file, command and Python, in the order of the page; the command with the smallest
    settings, to the end.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    observers, table, *rest = python_blocks("observe")
    (tmp_path / "my_observers.py").write_text(observers)
    (command,) = re.findall(
        r"^```bash\nflowrl (.*?)^```", (GUIDES / "observe.md").read_text(), re.DOTALL | re.MULTILINE
    )
    command = command.replace("\\\n", " ").replace("40", "12").replace("patience=3", "patience=99")
    assert main([*shlex.split(command), "--preset", "tiny", "--strict"]) == 0
    rows = rows_of(Path("runs/observed"))
    assert rows[1]["AdvantageByDecision/decision_0"] > 0 and len(rows) == 13
    for block in rest:
        exec(block, {})
    assert Path("runs/in-python/experience/000001.csv").exists()
    pytest.importorskip("pandas")
    names = {}
    exec(table, names)
    assert len(names["samples"]) == rows[1]["trajectories"] and len(names["by_decision"]) == 2


def test_the_page_by_hand_computes_what_the_trainer_does():
    (block,) = python_blocks("by-hand")
    names = {}
    exec(block, names)
    rows = re.findall(
        r"^\| `(.*?)` \|.*\| ([\d, ]+) \|$", (GUIDES / "by-hand.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 10
    for name, shape in rows:
        value, expected = eval(name, names), json.loads(f"[{shape}]")
        assert list(getattr(value, "shape", None) or [len(value)]) == expected, name
    sizes = dict(window="2:7", num_steps=10, groups=3, group_size=4, initial_noise="independent")
    config = TINY_RUN.replace(credit="stepwise-gain", **sizes)
    trainer = make_trainer(config)
    trainer.generator.manual_seed(0)
    trainer.prompts.take = lambda count: names["prompts"][:count]
    iteration = trainer.iteration()
    assert torch.equal(iteration.experience.values, names["experience"].values)
    assert torch.equal(iteration.credit.advantages, names["credit"].advantages)
    assert torch.equal(iteration.weights, names["weights"])


def test_sizes_of_embeddings_are_those_of_the_plan():
    page = (GUIDES / "fine-tune.md").read_text()
    rows = re.findall(
        r"^\| `([\w.-]+)` \| (\d+) \| ([\d.]+) MB \| (\d+) GB \|$", page, re.MULTILINE
    )
    assert len(rows) == 6
    for model, tokens, size, stored in rows:
        config = preset(f"{model},flow-grpo,pickscore").apply(dtype="bfloat16")
        size_of_one = known_architecture(config).embedding(policy_options(config))
        assert config.policy.max_sequence_length == int(tokens), model
        assert f"{size_of_one / 1e6:.1f}" == size and f"{25 * size_of_one / 1e6:.0f}" == stored, (
            model
        )


def test_the_page_of_presets_names_them_all():
    files = (ROOT / "flowrl" / "presets").glob("*/*.yaml")
    text = (ROOT / "docs" / "presets.md").read_text()
    kinds = {file.stem: file.parent.name for file in files}
    names = {name for name, kind in kinds.items() if kind not in ("definitions", "records")}
    first = text.split("\n\n")[1]
    assert len(names) > 20 and set(re.findall(r"`([\w.-]+)`", first)) == names | {"exact"}
    assert all(f"`{name}`" in text for name, kind in kinds.items() if kind == "records")


def test_the_guides_metrics_are_entries_of_rows(tmp_path):
    """Those that a short run has, or that the code names as text."""
    page = (GUIDES / "watching-a-run.md").read_text()
    table = page.partition("## Metrics")[2].partition("## Warnings")[0]
    columns = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    names = {name for column in columns for name in re.findall(r"`(\w+)`", column)}
    assert {"zero_rows", "stopped"} < names and len(names) > 40
    options = "--preset tiny --world mixture --kl-weight 0.1"
    assert main(["train", *options.split(), "--out", str(tmp_path / "run")]) == 0
    known = {name for row in rows_of(tmp_path / "run") for name in row}
    code = "".join(path.read_text() for path in (ROOT / "flowrl").rglob("*.py"))
    assert not {name for name in names - known if f'"{name}"' not in code}


# Recipes, with a fake of SLURM


@pytest.mark.parametrize(("code", "started"), [(0, False), (130, True), (1, True)])
def test_the_slurm_script_starts_or_resumes_and_queues_a_paused_run_again(code, started, tmp_path):
    script = ROOT / "docs" / "recipes" / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    for name in ("srun", "scontrol"):
        status = code if name == "srun" else 0
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@"\nexit {status}\n')
        (tmp_path / name).chmod(0o755)
    run = tmp_path / "runs" / "ocr"
    if started:
        run.mkdir(parents=True)
        (run / "config.json").touch()
    given = dict(SUBMIT_DIR=tmp_path, JOB_ID=7, JOB_USER="me", CPUS_PER_TASK=12)
    slurm = {f"SLURM_{name}": str(value) for name, value in given.items()}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script], env=slurm | path, capture_output=True, text=True)
    assert done.returncode == code and not done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("srun --kill-on-bad-exit=1 python -m flowrl train ")
    assert first.endswith(f"train --resume {run}" if started else f" --out {run}")
    assert rest == (["scontrol requeue 7"] if code == 130 else [])
