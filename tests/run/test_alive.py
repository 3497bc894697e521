"""What a run says after its first iteration, on constructed and on real iterations."""

import json
import subprocess
import sys

import pytest
import torch
from small_run import SMALL, flowrl_, model_files, plain, rows_of, trained, words

from flowrl.core.prompt import Prompt
from flowrl.run.alive import (
    FirstIteration,
    Movement,
    ReadMetadata,
    average_line,
    block,
    fields_line,
    gradient_line,
    groups_line,
    heldout_line,
    ratio_line,
    update_line,
)
from flowrl.run.build import make_trainer
from flowrl.run.config import preset
from flowrl.run.job import Run

LORA = [f"{layer}.lora_{part}.weight" for layer in "pq" for part in "AB"]


def moved(start=(1, 0, 1, 0), live=(0, 1, 0, 1), average=(0, 0.01, 0, 0.01), gradient=(0, 1, 0, 1)):
    tables = (torch.tensor(part, dtype=torch.float64) for part in (start, live, average, gradient))
    return Movement(*tables)


@pytest.mark.parametrize(
    ("names", "movement", "steps", "text", "advice"),
    [
        (LORA, moved(), 1, "2 of 4 trained tensors; 2 follow when the weights after them", False),
        (LORA, moved(gradient=(1, 1, 1, 1)), 4, "4 of 4 trained tensors", False),
        (LORA, moved(), 4, "2 of 4 trained tensors; none in p.lora_A.weight, q.lora_A", True),
        # a last layer of zeros
        (
            ["a", "b"],
            moved((1, 0), (0, 1), (0, 1), (0, 1)),
            1,
            "1 of 2 trained tensors; 1 f",
            False,
        ),
        (["a", "b"], moved((1, 0), (0, 1), (0, 1), (0, 1)), 2, "none in a", True),
        # it began from another LoRA, so B is not 0
        (LORA, moved(start=(1, 1, 1, 1)), 1, "none in p.lora_A.weight, q.lora_A.weight", True),
        (
            LORA,
            moved(gradient=(0, float("nan"), 0, 0)),
            1,
            "0 of 4 trained tensors; none in p.lora_A",
            True,
        ),
        (
            [f"layer{i}" for i in range(30)],
            moved((1,) * 30, (1,) * 30, (1,) * 30, (1,) * 28 + (0,) * 2),
            4,
            "28 of 30 trained tensors; none in layer28, layer29",
            False,
        ),
        (
            [f"layer{i}" for i in range(5)],
            moved((1,) * 5, (1,) * 5, (1,) * 5, (1,) + (0,) * 4),
            4,
            "none in layer1, layer2 and 2 more",
            True,
        ),
    ],
)
def test_tensors_without_a_gradient(names, movement, steps, text, advice):
    line = gradient_line(names, movement, steps)
    assert text in line.text and bool(line.warning) == advice


def test_the_update():
    line = update_line(moved(start=(16, 0, 9, 0), live=(0, 0.16, 0, 0.09)))
    assert line.text == "the weights have moved by 0.5, 0.1 of their norm" and not line.warning
    assert update_line(moved(live=(0, 0, 0, 0))).warning.startswith("update: the weights have not")


def test_an_average_that_hides_the_training():
    line = average_line(moved(), 0.987, 12)
    start = "has followed 10.0% of the update; it keeps 85% of the start at the end (optimizer steps: 12)"
    assert line.text.startswith(start) and "use ema_decay 0.77 or less" in line.warning
    assert 0.77**12 < 0.05 < 0.79**12
    assert not average_line(moved(), 0.987, 600).warning
    assert average_line(moved(), 0.0, 12) is None
    resumed = average_line(moved(average=(float("nan"),) * 4), 0.5, 2)
    assert resumed.text == "keeps 25% of the start at the end (optimizer steps: 2)"


def test_other_lines():
    assert (
        ratio_line({"ratio_noise": 1e-5}, 1e-4).text
        == "its noise is 1e-05, 0.1 of the clip of 0.0001"
    )
    assert ratio_line({"ratio_noise": 1e-5}, None) is None and ratio_line({}, 0.1) is None
    assert groups_line({"zero_spread_groups": 0.25}).text == "25% of the groups have equal rewards"
    a, b, c = map(Prompt, "abc")
    assert heldout_line([a, b], [c], True).text == "none of the 1 prompts is also trained on"
    both = heldout_line([a, b], [b, c, b], True)
    assert "1 of 2 prompts are also trained on, such as 'b'" in both.warning
    assert not heldout_line([a], [a], False).warning
    lines = [both, groups_line({})]
    shown = block(lines).splitlines()
    assert shown[0] == "after the first iteration:"
    assert [row[0] for row in shown[1:]] == ["!", " "]
    assert fields_line([]) is None and "fields a, b of" in fields_line(["a", "b"]).text


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda m: m["a"], {"a"}),
        (lambda m: m.get("b", 0), {"b"}),
        (lambda m: "a" in m, {"a"}),
        (lambda m: [*m], {"a", "b"}),
        (lambda m: dict(m), {"a", "b"}),
        (lambda m: {**m}, {"a", "b"}),
        (lambda m: json.dumps(m), {"a", "b"}),
        (lambda m: m == {"a": 1, "b": 2}, set()),
        (lambda m: len(m), set()),
    ],
)
def test_metadata_know_what_is_read(read, expected):
    metadata = ReadMetadata({"a": 1, "b": 2})
    metadata.read = set()
    assert read(metadata) == read({"a": 1, "b": 2})
    assert metadata.read == expected


@pytest.mark.parametrize("change", [{}, {"world": "shapes", "task": "compositional"}])
def test_the_numbers_are_the_same_and_the_norms_those_of_the_tensors(change):
    config = SMALL.replace(**change)
    plainly, trainer = make_trainer(config), make_trainer(config)
    start = [parameter.detach().clone() for parameter in trainer.parameters.values()]
    first = FirstIteration(trainer)
    row = trainer.iteration()
    movement, unread = first.ended(row.experience.prompts)
    # the reward of the plane reads only the words; that of the shapes reads the request
    assert unread == ([] if change else ["angle"])
    assert plain(row) == plain(plainly.iteration())
    tables = zip(start, trainer.parameters.values(), trainer.average, strict=True)
    for i, (before, live, average) in enumerate(tables):
        moment = trainer.optimizer.state[live]["exp_avg"]
        expected = [before, live - before, average - before, moment]
        for name, tensor in zip(("start", "live", "average", "gradient"), expected, strict=True):
            square = float(tensor.detach().double().square().sum())
            assert float(getattr(movement, name)[i]) == pytest.approx(square, rel=1e-6)
    assert trained(trainer)[0] == trained(plainly)[0]
    assert all(type(prompt.metadata) is not ReadMetadata for prompt in trainer.prompts.prompts)


def said(config, folder, **options):
    """The blocks and the kinds of the warnings of a run."""
    shown = []
    Run(config, folder, shown.append, **options).execute(resume=folder.exists())
    kinds = [kind for state in shown for kind in state.get("kinds", ())]
    return [state["alive"] for state in shown if "alive" in state], kinds


def test_a_resumed_run_has_the_rows_of_one_that_was_not_interrupted(tmp_path):
    config = SMALL.replace(iterations=3, ema_decay=0.99)
    stops = iter([False, True])
    blocks, kinds = said(config, tmp_path / "parts", stop=lambda: next(stops))
    assert len(blocks) == 1 and kinds.count("alive") == 1
    assert "! average" in blocks[0] and "has followed" in blocks[0]
    blocks, kinds = said(config, tmp_path / "parts")
    assert len(blocks) == 1 and "alive" not in kinds and "has followed" not in blocks[0]
    said(config, tmp_path / "whole")
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    assert "ema_decay" in str(rows_of(tmp_path / "whole")[1]["warnings"])


def test_a_model_with_long_prompts_and_unread_fields(tmp_path, capsys):
    files = model_files(tmp_path)
    prompts = [{"prompt": "a red fox " * 30, "count": 3, "tag": "x"}, {"prompt": "a dog"}]
    lines = "".join(json.dumps(row) + "\n" for row in prompts)
    (tmp_path / "prompts.jsonl").write_text(lines)
    (tmp_path / "heldout.txt").write_text("a dog\na cat")
    (tmp_path / "reward.py").write_text(
        "class Redness:\n"
        "    def score(self, images, prompts):\n"
        "        counts = [prompt.metadata.get('count', 0) for prompt in prompts]\n"
        "        return images[:, 0].mean((1, 2))\n"
    )
    files |= {"prompts": tmp_path / "prompts.jsonl", "heldout_prompts": tmp_path / "heldout.txt"}
    sizes = dict(iterations=1, groups=2, group_size=2, num_steps=2, eval_samples=2, eval_steps=1)
    options = words(**files, **sizes, minibatches=1, out=tmp_path / "out", tracker="none")
    assert flowrl_(" ".join(["train", *options])) == 0
    shown = capsys.readouterr().out
    start = "  after the first iteration:\n    gradient  14 of 30 trained tensors; 14 follow"
    assert start in shown
    assert "! tokens" in shown and "1 of 3 prompts are cut at 40 tokens" in shown
    assert "cut at 24 tokens (max_sequence_length)" in shown
    assert "! held out  1 of 2 prompts are also trained on, such as 'a dog'" in shown
    assert "has read the fields tag of the prompts" in shown
    assert "Warning: held out: 1 of 2" in shown


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["false", "true"])
def test_several_processes(sharded, tmp_path):
    """Also with sharded weights: the same norms as of one process."""
    import os

    config = preset("tiny").apply(iterations=1, ema_decay=0.99)
    (alone,), _ = said(config, tmp_path / "alone")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = f"--preset tiny --iterations 1 --ema-decay 0.99 --out {tmp_path}/out --device cpu"
    command += ["-m", "flowrl", "train", *options.split()]
    environment = os.environ | {"ACCELERATE_USE_FSDP": sharded}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in alone.splitlines():
        assert line in done.stdout
