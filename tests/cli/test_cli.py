"""The command line as its user meets it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import flowrl
from flowrl.cli.main import COMMANDS, main, plugins
from flowrl.methods import METHODS
from flowrl.training.results import load_comparison, summarise

RULE = """
from dataclasses import dataclass
import torch
from flowrl.probes import NoProbe

@dataclass(frozen=True)
class LastStepsOnly:
    probe: NoProbe = NoProbe()

    def assign(self, values, decisions):
        final = values[..., -1]
        scores = (final - final.mean(1, keepdim=True)) / (final.std(1, keepdim=True) + 1e-4)
        return scores[..., None] * (decisions.step >= 2)
"""


def test_a_comparison_with_a_rule_of_the_users_own(tmp_path, capsys):
    rule, out = tmp_path / "my_rules.py", tmp_path / "out"
    rule.write_text(RULE)
    arguments = [
        "compare",
        "--preset",
        "tiny",
        "--seeds",
        "0",
        "--out",
        str(out),
        "--credit",
        f"{rule}:LastStepsOnly",
    ]
    assert main([*arguments, "--workers", "2"]) == 0
    shown = capsys.readouterr().out
    for method in ("flow-grpo", "stepwise-flow-grpo", "tp-grpo", "LastStepsOnly"):
        assert method in shown
    for name in (
        "config.json",
        "report.html",
        "curves.png",
        "samples.png",
        "trajectory.png",
        "summary.json",
        "table.txt",
    ):
        assert (out / name).stat().st_size > 0, name
    page = (out / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(http|//|file)""", page)
    assert page.count('src="data:image/png;base64,') == 5
    lines = (out / "runs" / "tp-grpo-seed0" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 1, 2]
    assert len(summarise(load_comparison(out))) == 4
    again = tmp_path / "again"
    assert (
        main(
            [
                "compare",
                "--config",
                str(out / "config.json"),
                "--out",
                str(again),
                "--workers",
                "1",
                "--trust",
            ]
        )
        == 0
    )
    for method in ("flow-grpo", "LastStepsOnly"):
        rewards = [
            [
                json.loads(line).get("reward_mean")
                for line in (f / "runs" / f"{method}-seed0" / "metrics.jsonl").open()
            ]
            for f in (out, again)
        ]
        assert rewards[0] == rewards[1]
    picture = tmp_path / "grid.png"
    run = out / "runs" / "flow-grpo-seed0"
    assert (
        main(
            [
                "sample",
                "--weights",
                str(run),
                "--count",
                "2",
                "--num-steps",
                "3",
                "--out",
                str(picture),
            ]
        )
        == 0
    )
    assert picture.stat().st_size > 1000


def test_train_resumes_and_repeats(tmp_path):
    out = tmp_path / "run"
    options = ["--preset", "tiny", "--world", "mixture", "--task", "direction"]
    assert main(["train", *options, "--method", "tp-grpo", "--out", str(out)]) == 0
    assert main(["train", "--resume", str(out)]) == 0
    assert (
        main(["train", "--config", str(out / "config.json"), "--out", str(tmp_path / "two")]) == 0
    )
    assert main(["train", "--config", str(out / "config.json"), "--out", str(out)]) == 2
    first, second = ((f / "weights.safetensors").read_bytes() for f in (out, tmp_path / "two"))
    assert first == second


@pytest.mark.slow
def test_ctrl_c_pauses_a_comparison_and_resume_ends_it(tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    options = [
        "--preset",
        "tiny",
        "--world",
        "mixture",
        "--task",
        "direction",
        "--iterations",
        "60",
        "--seeds",
        "0",
    ]
    options += ["--eval-every", "20", "--methods", "flow-grpo", "tp-grpo"]
    command = [sys.executable, "-m", "flowrl", "compare", *options, "--out", str(out)]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, text=True
    )
    metrics = out / "runs" / "flow-grpo-seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        metrics.exists() and metrics.read_text().count("\n") > 3
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in shown
    assert main(["compare", "--resume", str(out)]) == 0
    assert main(["compare", *options, "--out", str(whole)]) == 0
    for name in ("flow-grpo-seed0", "tp-grpo-seed0"):
        a, b = ((f / "runs" / name / "weights.safetensors").read_bytes() for f in (out, whole))
        assert a == b


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "--methods", "ppo"], "unknown method 'ppo'; allowed: flow-grpo"),
        (["compare", "--task", "poetry"], "compositional, text, preference"),
        (["compare", "--world", "mars"], "mixture, shapes"),
        (["compare", "--num-steps", "-3"], "steps = -3"),
        (
            ["compare", "--group-size", "1"],
            "group_size = 1 is not allowed; allowed: a whole number, 2 or more",
        ),
        (["compare", "--noise-level", "-1"], "noise_level = -1.0"),
        (["compare", "--preset", "huge"], "default, long, tiny"),
        (["compare", "--credit", "none.py:Rule"], "none.py does not exist"),
        (["compare", "--resume", "nowhere"], "nowhere/config.json does not exist"),
        (["compare", "--methods", "flow-grpo", "flow-grpo"], "each method once"),
        (["train", "--config", "none.json"], "none.json does not exist"),
        (
            ["train", "--config", "none.yaml", "--learning-rate", "1"],
            "without --learning-rate: repeat it as it was; --preset FILE.yaml takes changes",
        ),
        (
            ["train", "--resume", "nowhere", "--iterations", "9", "--learning-rate", "1"],
            "without --iterations, --learning-rate",
        ),
        (["train", "--processes", "2"], "given with --plan only"),
        (
            ["train", "--world", "mixture", "--device", "gpu"],
            "device = 'gpu' is not allowed; allowed: cpu, cuda",
        ),
        (["train", "--device", "cuda:99"], "device = 'cuda:99' is not allowed"),
        (
            ["train", "--learning-rate", "inf"],
            "learning_rate = inf is not allowed; allowed: a number above 0",
        ),
        (["train", "--weight-decay", "-1"], "weight_decay = -1.0"),
        (["sample", "--prompts", "a green dog"], "unknown word 'a'"),
        (["sample", "--weights", "nowhere"], "must be the folder of a finished run"),
        (["pretrain", "--updates", "0"], "updates = 0"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    arguments, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("flowrl: error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return values", "returned shape"),
        ("return values[..., 1:] * float('nan')", "not finite"),
        ("return 3", "returned a int"),
        ("return values[5]", "rules.py, line 5) failed"),
        ("raise RuntimeError('no schedule')", "no schedule"),
    ],
)
def test_a_broken_rule_is_refused_before_anything_is_written(
    body, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    head = (
        "from flowrl.probes import NoProbe\nclass Bad:\n    probe = NoProbe()\n    def assign(self,"
        " values, decisions):\n"
    )
    code = f"{head}        {body}\n"
    (tmp_path / "rules.py").write_text(code)
    assert main(["compare", "--credit", "rules.py:Bad"]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_help_is_there_for_everything(capsys):
    for name in [*COMMANDS, *plugins()]:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert f"flowrl {name}" in shown
        assert not [
            text
            for text in ("{None}", "(default: None)", "(default: '')", "(default: )")
            if text in shown
        ]
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in [*COMMANDS, "bench", "pretrain", "serve-reward"])


@pytest.mark.parametrize("command", ["compare", "train"])
def test_the_help_names_every_method(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out.replace("│", " ")))
    assert set(METHODS) <= words


def test_version_and_environment(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"flowrl {flowrl.__version__}\n"
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("torch", "Python", "CPU cores")) and "CUDA" not in shown
    assert main(["env", "--devices"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("torch threads", "CUDA", "CPU cores"))
    assert main(["trian"]) == 2 and "did you mean 'train'?" in capsys.readouterr().err


def test_the_help_shows_the_defaults_of_the_chosen_world(capsys):
    for arguments, default in (
        ([], "0.004"),
        (["--world", "mixture"], "0.02"),
        (["--preset", "long"], "0.003"),
    ):
        with pytest.raises(SystemExit):
            main(["train", *arguments, "--help"])
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert f"--learning-rate FLOAT Initial learning rate. (default: {default})" in text


def test_what_is_on_or_off_needs_no_word():
    import tyro

    from flowrl.cli.options import changes, options_with
    from flowrl.cli.runs import TrainOptions
    from flowrl.training.config import RunConfig

    def given(words, base=RunConfig()):
        start = options_with(TrainOptions, base)
        return changes(
            tyro.cli(TrainOptions, args=words, default=start, config=(tyro.conf.OmitArgPrefixes,)),
            base,
        )

    assert given(["--compile", "--learning-rate", "1"]) == {"compile": True, "learning_rate": 1.0}
    assert given(["--no-offload"], RunConfig.of(offload=True)) == {"offload": False}
    found = given(["--heldout-rewards", "soft", "--gradient-checkpointing"])
    assert found == {"gradient_checkpointing": True, "heldout_rewards": ("soft",)}
    assert given(
        [
            "--betas",
            "0.9",
            "0.999",
            "--lora-targets",
            "attn.to_q",
            "ff.net.2",
            "--drop-zero-advantages",
        ]
    ) == {
        "betas": (0.9, 0.999),
        "lora_targets": ("attn.to_q", "ff.net.2"),
        "drop_zero_advantages": True,
    }
    assert given([]) == {} and given(["--seed", "0"]) == {}
    with pytest.raises(SystemExit):
        given(["--compile", "perhaps"])


def test_a_file_in_the_place_of_the_runs_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert (
        main(
            [
                "train",
                "--preset",
                "tiny",
                "--world",
                "mixture",
                "--task",
                "direction",
                "--out",
                str(tmp_path / "file"),
            ]
        )
        == 2
    )
    assert "a folder that may be new; this is a file" in capsys.readouterr().err


def test_a_run_that_breaks_says_how_to_go_on(tmp_path, capsys):
    (tmp_path / "reward.py").write_text(
        "class Breaks:\n    calls = 0\n    def score(self, images, prompts):\n        Breaks.calls"
        " += 1\n        assert Breaks.calls < 5, 'the server has gone'\n        return"
        " images.flatten(1).mean(1)\n"
    )
    options = [
        "--preset",
        "tiny",
        "--world",
        "mixture",
        "--task",
        "direction",
        "--checkpoint-every",
        "1",
        "--eval-every",
        "9",
    ]
    options += [
        "--iterations",
        "9",
        "--reward",
        f"{tmp_path}/reward.py:Breaks",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(["train", *options]) == 1
    printed = capsys.readouterr()
    assert "is kept. Go on with: flowrl train --resume" in printed.out
    place = (
        f"Breaks.score ({tmp_path}/reward.py, line 5) failed: AssertionError: the server has gone"
    )
    assert printed.err == f"flowrl: error: {place}\n"
