"""The command line as its user meets it."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
import tyro
from small_run import error_of, flowrl_, write_rows

import flowrl
from flowrl.cli.main import COMMANDS, plugins
from flowrl.cli.options import LONGEST_NAME, changes, options_with, run_name
from flowrl.cli.progress import times_left, train_line
from flowrl.cli.train import TrainOptions
from flowrl.methods import METHODS
from flowrl.run.config import RunConfig
from flowrl.run.parts.coverage import coverage

MODEL = "train --model m --prompts text[0:2] --reward jpeg-compressibility"


def shown(line, capsys):
    """The output of a command that is complete, or of its help."""
    with suppress(SystemExit):
        assert flowrl_(line) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compare --methods ppo", "methods = 'ppo' is not allowed; allowed: flow-grpo"),
        ("compare --world mars", "edits, mixture, points, shapes"),
        ("compare --group-size 1", "group_size = 1 is not allowed; allowed: a whole number"),
        ("compare --credit none.py:Rule", "none.py does not exist"),
        ("train --resume '' --iterations 9", "resume: . is no run"),
        ("train --processes 2", "only with --plan"),
        ("train --card L4", "card = 'L4' is not allowed; allowed: only with --plan"),
        ("train --plan --card RTX", "card = 'RTX' is not allowed; allowed: one of B200"),
        ("train --device cuda:99", "device = 'cuda:99' is not allowed"),
        ("train --learning-rate inf", "learning_rate = inf is not allowed; allowed: a number"),
        ("sample --prompts 'a green dog'", "allowed: 1 to 5 words"),
        ("sample --weights nowhere", "nowhere does not exist; allowed: the folder of a run"),
        ("trian", "did you mean 'train'?"),
        ("parts cliped", "did you mean 'clipped'?"),
        ("prompts check --file /dev/zero", "/dev/zero is a pipe, a device or a folder"),
        ("bench redo 0 --out none.jsonl", "redo = '0' is not allowed"),
        ("sample --world mixture --prompts 'towards 1e400 degrees'", "prompt"),
        ("pretrain --out ''", "out = "),
        ("train --reward \"weighted-sum(models={'a': [1]})\" --out new", "reward"),
        (f"train --credit 'uniform(x={'-' * 5000}1)'", "credit"),
        ("compare --arm '[/]: nope=1'", "[/]"),
        ("explain uniform --out no/../x.png", "out = 'no/../x.png' is not allowed"),
        (f"evaluate --weights {'y' * 999}", "weights: yyy"),
        ("compare --arm 'a: reward=weighted-sum(x=6)'", "weighted-sum has no option x"),
        ("compare --out=a\0b", "out = '--out=a"),
        ("evaluate --weights A --weights B", "given twice; allowed: once, as in --weights A B"),
        ("train --lora-targets a --lora_targets=b", "once, as in --lora-targets A B"),
        ("train --offload --no-offload", "--no-offload is given twice"),
        ("compare --credit uniform --credit A", "once, as in --credit A B"),
        ("bench rule --arm a: --arm b:", "--arm is given twice"),
        ("bench tune --arm a: --arm b: --world mars", "unknown world 'mars'"),
        (f"{MODEL} --preset tp-grpo --method flow-grpo", "'flow-grpo' is not allowed; allowed: tp"),
        (
            "compare --preset tp-grpo --seeds none",
            "method = 'flow-grpo' is not allowed; allowed: tp-grpo, whose",
        ),
        (f"{MODEL} --tuning full --adapter a/", "adapter = 'a/' is not allowed; allowed: left out"),
        (
            "train --adapter a",
            "'a' is not allowed; allowed: left out without a `model`; add --model",
        ),
        (f"{MODEL} --tuning full --lora-targets typo", "left out without tuning lora"),
        (
            f"{MODEL} --negative-prompt x",
            "left out without a guidance_scale or eval_guidance above 1",
        ),
        (f"{MODEL} --guidance-scale 2 --num-steps 5 --trained-steps 0:8", "schedule's 5 steps"),
        ("train --model m --prompts text[0:2]", "a model has none of its own"),
        (
            "train --model nowhere/at-all --prompts text[0:2] --reward jpeg-compressibility",
            "neither a folder nor among the downloaded models",
        ),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(line, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = error_of(line, capsys)
    assert words in error and error.startswith("flowrl: error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "settings of the world; `flowrl compare` starts from the tuned ones: {}"),
        ("--settings published", "settings of the method, as published; .*: --window 0:5 {}"),
        ("--clip-range 0.06 --noise-level 1.37", None),
        ("--credit uniform", None),
    ],
)
def test_a_run_says_which_settings_it_has_and_those_of_a_comparison(words, line, tmp_path, capsys):
    small = "--iterations 1 --groups 2 --group-size 2 --eval-samples 2"
    assert flowrl_(f"train --world mixture {small} {words} --out {tmp_path}/run") == 0
    shown = " ".join(capsys.readouterr().out.split())
    tuned = "--clip-range 0.06 --noise-level 1.37"
    assert re.search(line.format(tuned), shown) if line else "tuned" not in shown


@pytest.mark.parametrize("name", [*COMMANDS, *plugins()])
def test_help_names_the_command_and_fits_the_terminal(name, capsys, monkeypatch):
    """Not broken where the source breaks its lines, without defaults that mean "not given"."""
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(f"{name} --help", capsys)
    assert f"flowrl {name}" in text and not re.search(r"None|default: (''|\))", text)
    assert max(map(len, re.split(" -{9}", text)[1].splitlines())) <= 80
    if name in ("compare", "train"):
        assert set(METHODS) <= set(re.findall(r"[\w-]+", text.replace("│", " ")))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_described_by_its_parts_and_their_formulas(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(f"parts {name}", capsys).rpartition(f"{name}: method")[2]
    method, lines = METHODS[name](), text.splitlines()
    assert max(map(len, lines)) <= 80
    for label, part in (
        ("sampler", method.sampler),
        ("rule", method.credit),
        ("loss", method.loss),
    ):
        (line,) = (n for n, line in enumerate(lines) if line.startswith(f"  {label:9}  "))
        assert type(part).__name__ in lines[line]
        block = " ".join(text.split(lines[line])[1].split("\n  ")[1:4])
        assert len(block) > 40  # its formula
    assert "  members    start from" in text


def test_lists_fit_the_terminal_and_a_part_is_described(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for line in ("", "--help", "-h", "parts", "parts tp-grpo", "presets"):
        text = shown(line, capsys)
        assert max(map(len, text.splitlines())) <= 80 and "train" in text + line, line
    assert shown("--version", capsys) == f"flowrl {flowrl.__version__}\n"
    assert "CUDA" not in shown("env", capsys) and "CUDA" in shown("env --devices", capsys)
    text = shown("parts clipped", capsys)
    assert "clipped: loss, --loss clipped" in text and "clipped: reward, --reward clipped" in text
    assert "  clip_range = 0.0001  c in (0, 1)" in text and "*mean* over" in text
    text = shown("parts awm", capsys)  # a loss and a method
    assert "awm: loss, --loss awm" in text and "awm: method, --method awm. AWM, arXiv" in text
    for row in coverage()["awm"].rows:
        assert row.item in text and row.published in " ".join(text.split())
    for name in ("ddp", "fsdp2", "zero2", "hsdp"):
        path = Path(shown(f"presets --accelerate {name}", capsys).strip())
        assert "distributed_type" in path.read_text()
    monkeypatch.setenv("COLUMNS", "200")
    assert "a folder with a transformer, or a name on the Hub" in shown("evaluate --help", capsys)


@pytest.mark.parametrize(
    ("start", "default"), [("", "0.004"), ("--world mixture", "0.02"), ("--preset long", "0.003")]
)
def test_the_help_shows_the_defaults_of_the_chosen_world(start, default, capsys):
    text = " ".join(shown(f"train {start} --help", capsys).replace("│", " ").split())
    assert f"--learning-rate FLOAT Learning rate after the warm-up. (default: {default})" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--seed 0", {}),
        ("--compile True --learning-rate 1", {"compile": True, "learning_rate": 1.0}),
        ("--no-offload", {"offload": False}),
        ("--window 1:3 --clip-range 0 --width 0 --initial-noise auto", {"window": "1:3"}),
        ("--compile auto --micro-batch auto", {"compile": None, "micro_batch": None}),
        ("--chunk 2 --overlap-rewards true", {"chunk": 2, "overlap_rewards": True}),
        ("--betas 0.9 0.999", {"betas": (0.9, 0.999)}),
        ("--lora-targets attn.to_q ff.net.2", {"lora_targets": ("attn.to_q", "ff.net.2")}),
    ],
)
def test_options_that_differ_from_the_start_are_changes(words, expected):
    base = RunConfig.of(offload=True)
    start, config = options_with(TrainOptions, base), (tyro.conf.OmitArgPrefixes,)
    options = tyro.cli(TrainOptions, args=words.split(), default=start, config=config)
    assert changes(options, base) == expected


def test_the_time_left_includes_evaluations(tmp_path, capsys):
    """Iterations of 2 s, evaluations of 10 s after every third iteration and the last, also if the
    run is resumed; gains of 2e-5 have digits.
    """
    config = RunConfig.of(iterations=10, eval_every=3)
    rows = []
    for i in range(10):
        evaluation = {"reward": 0.5 + 1e-5 * i, "seconds": 10.0} if i % 3 == 0 else None
        row = {"iteration": i, "evaluation": evaluation, "seconds_total": 2.0 * i, "seconds": 2.0}
        rows.append(row | {"reward_mean": 0.25, "nfe_total": 7})
    shown = train_line(tmp_path, config)
    for i in (1, 2, 3, 4):
        write_rows(tmp_path, rows[: i + 1])
        shown({"iteration": i})
    train_line(tmp_path, config)({"iteration": 4})
    *_, third, fourth, resumed = capsys.readouterr().out.splitlines()
    # 7 iterations, and the evaluations after 6, 9 and 10
    assert "0:00:26, left: 0:00:44" in third and "held out: reward 0.500030" in third
    assert "0:00:28, left: 0:00:42" in fourth and fourth == resumed
    assert [times_left(done, 10, 3) for done in (0, 8, 9, 10)] == [4, 2, 1, 0]
    assert times_left(3, 9, 3) == 2


def test_runs_are_named_by_what_differs():
    base = RunConfig()
    assert run_name(base, base) == "flow-grpo,compositional,seed=0"
    changed = base.replace(method="tp-grpo", task="text", learning_rate=1e-4, checkpoint_every=2)
    assert run_name(changed, base) == "tp-grpo,text,learning_rate=0.0001,seed=0"
    more = {"reward": "/a b/my.py:R(x=1)", "num_steps": 20, "window": ":", "minibatches": 2}
    more |= {"betas": (0.9, 0.999), "groups": 3, "group_size": 5, "eval_every": 3}
    name = run_name(base.replace(**more), base)
    assert len(name) <= LONGEST_NAME + 10 and "reward=my.py_R_x=1" in name
    assert name.endswith("more,seed=0") and not set(name) & set("/:() ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "precision"), [("", "float16 on cuda"), ("--dtype float32", "float32 on cuda")]
)
def test_a_plan_counts_in_the_precision_of_a_gpu(words, precision, capsys):
    text = shown(f"train --preset sd3.5-medium,tp-grpo,ocr --plan {words}", capsys)
    assert text.splitlines()[0].endswith(precision)
    assert f"in {precision.split()[0]}, not measured" in text
