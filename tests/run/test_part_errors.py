"""Parts of a user's that raise, exit, or break their contract in a run: one error that names the
part, the call and the place.
"""

import re
from functools import partial
from pathlib import Path

import pytest
from small_run import MIXTURE, TINY_RUN, flowrl_, numbers

from flowrl.core.errors import FlowrlError
from flowrl.run.checkpoint import Checkpoints
from flowrl.run.job import Run

HEAD = """
import dataclasses, sys
import torch
from flowrl.losses import ClippedLoss
from flowrl.samplers import FlowSDE
from flowrl.probes import NoProbe
"""
BASES = {
    "credit": """
class Part:
    probe = NoProbe()
    def assign(self, values, decisions):
        final = values[..., -1:]
        good = (final - final.mean(1, keepdim=True)).expand(-1, -1, len(decisions)).clone()
        {}
""",
    "reward": """
class Part:
    def score(self, images, prompts):
        good = images.mean((1, 2, 3))
        {}
""",
    "loss": """
class Part:
    needs_reference, trains_zero_advantages, unit = False, False, "transition"
    def loss(self, batch):
        good = ClippedLoss().loss(batch)
        {}
""",
    "sampler": """
class Part:
    def transition(self, latent, velocity, schedule, step):
        good = FlowSDE().transition(latent, velocity, schedule, step)
        {}
""",
}


PLACE = r"\(.*part\.py, line \d+\) failed"
CASES = {
    "credit": {
        "return good.to('meta')": "assign.*device is meta",
        "sys.exit(0)": rf"Part\.assign {PLACE}: SystemExit: 0",
    },
    "reward": {
        "return good.tolist()": "score.*list",
        "return good[:-1]": "score.*shape",
        "return {}['x']": rf"Part\.score {PLACE}: KeyError: 'x'",
    },
    "loss": {
        "return good.loss": r"Part\.loss returned.*Tensor",
        "return dataclasses.replace(good, loss=good.loss.detach())": "not a scalar with a gradient",
        "return dataclasses.replace(good, loss=good.loss.expand(3))": "not a scalar with a gradient",
        "return dataclasses.replace(good, loss=good.loss.to('meta'))": "device is meta",
    },
    "sampler": {
        "return (good.mean, good.std)": r"Part\.transition returned a tuple",
        "return dataclasses.replace(good, mean=good.mean.to('meta'))": "meta|expected device",
    },
}
TINY = TINY_RUN.replace(iterations=1, window="0:3")


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [(kind, *case) for kind, lines in CASES.items() for case in lines.items()],
)
def test_a_part_that_breaks_is_named(kind, line, message, tmp_path):
    (tmp_path / "part.py").write_text(HEAD + BASES[kind].format(line))
    config = TINY.replace(**{kind: f"{tmp_path}/part.py:Part"})
    with pytest.raises(FlowrlError, match=message):
        Run(config, tmp_path / "run", trial=False).execute()


def test_an_unforeseen_error_is_saved_and_not_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flowrl.cli.lookup.Env.main", partial(int, "x"))
    assert flowrl_("env") == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said and "unexpected error: ValueError" in said
    path = re.search(r"The traceback is in (\S+);", said)
    assert path and "Traceback" in Path(path[1]).read_text()


FAILS = """
class Part:
    calls = 0
    def score(self, images, prompts):
        Part.calls += 1
        if Part.calls > {}:
            raise OSError("the server has gone")
        return images.flatten(1).mean(1)
"""


def test_an_iteration_that_fails_in_its_rollout_loses_nothing(tmp_path, capsys):
    """The iterations before it are in a checkpoint, also if none was due, and the resumed run has
    the numbers of an uninterrupted one.
    """
    part, out = tmp_path / "part.py", tmp_path / "run"
    options = f"{MIXTURE} --window 0:3 --iterations 6 --eval-every 9 --checkpoint-every 99"
    command = f"train {options} --reward {part}:Part --no-trial --out {tmp_path}"
    part.write_text(FAILS.format(999))
    assert flowrl_(f"{command}/uninterrupted") == 0
    part.write_text(FAILS.format(4))
    capsys.readouterr()
    assert flowrl_(f"{command}/run") == 1
    printed, place = capsys.readouterr(), f"Part.score ({part}, line 7) failed"
    assert "is kept. Continue with: flowrl train --resume" in printed.out
    assert printed.err == f"flowrl: error: {place}: OSError: the server has gone\n"
    assert Checkpoints(out).names() == ["000004"]
    part.write_text(FAILS.format(999))
    assert flowrl_(f"train --resume {out} --trust --changed-code") == 0
    assert numbers(out) == numbers(tmp_path / "uninterrupted")


@pytest.mark.satellite
def test_a_comparison_survives_a_failing_run(tmp_path, capsys):
    rule = HEAD + BASES["credit"].format(
        "Part.calls = getattr(Part, 'calls', 0) + 1; assert Part.calls < 5, 'gone'; return good"
    )
    part, out = tmp_path / "part.py", tmp_path / "out"
    part.write_text(rule)
    options = f"{MIXTURE} --methods flow-grpo --credit {part}:Part --seeds 0 --iterations 5"
    assert flowrl_(f"compare {options} --workers 1 --no-trial --out {out}") == 1
    error = capsys.readouterr().err
    assert "1 of 2 runs failed, and the others are complete" in error
    assert "AssertionError: gone" in error
    assert (out / "runs" / "flow-grpo-seed0" / "done.json").exists()
    part.write_text(rule.replace("< 5", "< 800"))
    assert flowrl_(f"compare --resume {out} --trust --changed-code --no-trial") == 0
