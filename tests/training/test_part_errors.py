"""Parts of a user's that raise, exit, or break their contract in a run: one error that names the
part, the call and the place.
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrl.cli.main import main
from flowrl.core.errors import FlowrlError
from flowrl.training.config import preset
from flowrl.training.run import Run

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


@dataclass(frozen=True)
class Bad:
    kind: str
    line: str
    message: str
    """A regular expression."""


PLACE = r"\(.*part\.py, line \d+\) failed"
CASES = [
    *(
        Bad("credit", line, rf"assign.*{what}")
        for line, what in (
            ("return good.to('meta')", "device is meta"),
            ("return good.to_sparse()", "is sparse"),
            ("return None", "NoneType"),
            ("return good.to(torch.complex64)", "complex"),
            ("return good.numpy()", "ndarray"),
            ("return good.long()", "int64"),
            ("return good[:, :1]", "shape"),
            ("return good * float('nan')", "not finite"),
            ("return 1 / 0", "ZeroDivisionError"),
            ("decisions.std.zero_(); return good", "changed its input in place"),
            ("values.zero_(); return good", "changed its input in place"),
        )
    ),
    Bad("credit", "sys.exit(0)", rf"Part\.assign {PLACE}: SystemExit: 0"),
    *(
        Bad("reward", line, rf"score.*{what}")
        for line, what in (
            ("return good.to('meta')", "device is meta"),
            ("return good.to_sparse()", "is sparse"),
            ("return None", "NoneType"),
            ("return good.to(torch.complex64)", "complex"),
            ("return good.tolist()", "list"),
            ("return good[:-1]", "shape"),
            ("images.zero_(); return good", "changed its input in place"),
        )
    ),
    Bad("reward", "sys.exit(0)", rf"Part\.score {PLACE}: SystemExit: 0"),
    Bad("reward", "return {}['x']", rf"Part\.score {PLACE}: KeyError: 'x'"),
    *(
        Bad("loss", line, rf"Part\.loss returned.*{what}")
        for line, what in (
            ("return good.loss", "Tensor"),
            ("return None", "NoneType"),
            ("return dataclasses.replace(good, loss=1.0)", "LossResult"),
            (
                "return dataclasses.replace(good, loss=good.loss.detach())",
                "no scalar with a gradient",
            ),
            (
                "return dataclasses.replace(good, loss=good.loss.expand(3))",
                "no scalar with a gradient",
            ),
            ("return dataclasses.replace(good, loss=good.loss.to(torch.complex64))", "complex"),
            ("return dataclasses.replace(good, loss=good.loss.to('meta'))", "device is meta"),
        )
    ),
    Bad("loss", "batch.advantages.zero_(); return good", r"Part\.loss changed its input in place"),
    Bad("loss", "sys.exit(0)", rf"Part\.loss {PLACE}: SystemExit: 0"),
    Bad("loss", "raise KeyError('a')", rf"Part\.loss {PLACE}: KeyError: 'a'"),
    Bad("sampler", "return (good.mean, good.std)", r"Part\.transition returned a tuple"),
    Bad(
        "sampler",
        "return dataclasses.replace(good, mean=good.mean.to('meta'))",
        r"Part\.transition.*meta|expected device",
    ),
    Bad("sampler", "raise ValueError('no')", rf"Part\.transition {PLACE}: ValueError: no"),
    Bad("sampler", "sys.exit(0)", rf"Part\.transition {PLACE}: SystemExit: 0"),
    Bad("sampler", "latent.zero_(); return good", r"Part\.transition changed its input in place"),
]


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: f"{bad.kind}: {bad.line}")
def test_a_part_that_breaks_is_named(bad, tmp_path):
    (tmp_path / "part.py").write_text(HEAD + BASES[bad.kind].format(bad.line))
    part = {bad.kind: f"{tmp_path}/part.py:Part"}
    config = preset("tiny").apply(world="mixture", iterations=1, window="0:3", **part)
    with pytest.raises(FlowrlError) as caught:
        Run(config, tmp_path / "run", trial=False).execute()
    assert re.search(bad.message, str(caught.value)), str(caught.value)


def test_the_command_ends_with_1_and_one_line(tmp_path, capsys):
    (tmp_path / "part.py").write_text(HEAD + BASES["reward"].format("sys.exit(0)"))
    words = [
        "train",
        "--world",
        "mixture",
        "--preset",
        "tiny",
        "--reward",
        f"{tmp_path}/part.py:Part",
    ]
    assert main([*words, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(rf"flowrl: error: Part\.score {PLACE}: SystemExit: 0\n", said), said


def test_an_unforeseen_error_is_saved_and_not_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flowrl.cli.lookup.Env.main", partial(int, "x"))
    assert main(["env"]) == 1
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


def test_an_iteration_that_fails_in_its_rollout_loses_nothing(tmp_path):
    """The iterations before it are in a checkpoint, also where none was due, and the resumed run is
    the whole one's.
    """
    part = tmp_path / "part.py"
    config = preset("tiny").apply(
        world="mixture", iterations=6, eval_every=9, checkpoint_every=99, reward=f"{part}:Part"
    )
    part.write_text(FAILS.format(999))
    assert Run(config, tmp_path / "whole").execute()
    part.write_text(FAILS.format(4))
    with pytest.raises(FlowrlError, match="the server has gone"):
        Run(config, tmp_path / "run", trial=False).execute()
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(saved) == 1 and saved[0].startswith("000004")
    part.write_text(FAILS.format(999))
    assert Run(config, tmp_path / "run", changed_code=True).execute(resume=True)
    whole, again = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_comparison_survives_a_failing_run(tmp_path, capsys):
    rule = HEAD + BASES["credit"].format(
        "Part.calls = getattr(Part, 'calls', 0) + 1; assert Part.calls < 8, 'gone'; return good"
    )
    (tmp_path / "part.py").write_text(rule)
    words = [
        "compare",
        "--preset",
        "tiny",
        "--world",
        "mixture",
        "--methods",
        "flow-grpo",
        "--credit",
        f"{tmp_path}/part.py:Part",
    ]
    words += [
        "--seeds",
        "0",
        "--iterations",
        "9",
        "--workers",
        "1",
        "--no-trial",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert (
        "1 of 2 runs failed, and the others are complete" in said and "AssertionError: gone" in said
    )
    assert (tmp_path / "out" / "runs" / "flow-grpo-seed0" / "done.json").exists()
    (tmp_path / "part.py").write_text(rule.replace("< 8", "< 800"))
    assert (
        main(
            [
                "compare",
                "--resume",
                str(tmp_path / "out"),
                "--trust",
                "--changed-code",
                "--no-trial",
            ]
        )
        == 0
    )
