"""Measured runs, alone and in parallel: resumable, one process per file, repeatable by their own
command.
"""

import json
import random
import shlex
import signal

import numpy as np
import pytest
import torch
from bench_lines import small_run

from flowrl.bench.digest import config_id
from flowrl.bench.evidence import column
from flowrl.bench.measurements import measure, reproducible
from flowrl.bench.results_file import ResultsFile, make_line
from flowrl.bench.rules import RandomCredit
from flowrl.bench.suite import Pace, Suite, redo
from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, TrainingError
from flowrl.testing import credit_contract
from flowrl.trainer import Trainer

MINE = "from flowrl.credit import Uniform\n\n\nclass Mine(Uniform):\n    pass\n"
EDITS_ITSELF = """
from pathlib import Path
from flowrl.credit import Uniform

class Mine(Uniform):
    def assign(self, values, decisions):
        Path(__file__).write_text(Path(__file__).read_text() + "#")
        return super().assign(values, decisions)
"""


def suite_of(path, *configs, command="a test", trust=False):
    runs = {config_id(config): config for config in configs}
    return Suite(runs, ResultsFile(path, trust), runs, command)


def test_runs_resumes_and_pauses(tmp_path):
    configs = [small_run(s, **more) for s in (0, 1, 2) for more in ({}, {"credit": "random"})]
    path, progress = tmp_path / "results.jsonl", []
    suite = suite_of(path, *configs)

    def interrupt(done, total, line):
        progress.append((done, total))
        signal.raise_signal(signal.SIGINT)

    assert not suite.execute(1, interrupt)
    text = path.read_text()
    assert progress == [(1, 6)] and 1 <= text.count("\n") < 6
    order = []
    assert suite.execute(1, lambda done, total, line: order.append(line["seed"]))
    assert path.read_text().startswith(text) and order == sorted(order)
    lines = suite.file.read(suite.allowed)
    assert set(lines) == set(suite.runs)
    assert suite.execute(1, interrupt)  # nothing is left to do
    assert redo(next(iter(lines)), suite.file).same  # made in a worker, repeated here


def test_a_file_that_is_edited_during_its_run_leaves_no_line(tmp_path):
    """The rule edits its own file when it is first called: what ran is not what would be hashed
    afterwards.
    """
    path = tmp_path / "mine.py"
    path.write_text(EDITS_ITSELF)
    suite = suite_of(tmp_path / "results.jsonl", small_run(credit=f"{path}:Mine"))
    with pytest.raises(ConfigError, match=r"mine\.py changed or was deleted during the run"):
        suite.execute(1)
    assert not suite.file.path.exists()


def test_the_stored_command_repeats_the_line(tmp_path, capsys):
    path = tmp_path / "a rule's file.py"
    path.write_text(MINE)
    config, out = small_run(credit=f"{path}:Mine"), tmp_path / "with spaces" / "results.jsonl"
    suite = suite_of(out, config, trust=True)
    (key,) = suite.runs
    suite.file.append(make_line(config, measure(config), suite.redo_command(key), key))
    (line,) = suite.file.read().values()
    words = shlex.split(line["command"])
    assert words[0] == "flowrl" and main(words[1:]) == 0
    assert f"{line['id']}: identical to the last digit" in capsys.readouterr().out
    line["totals"].update(nfe=1.0)
    out.write_text(json.dumps(line) + "\n")
    assert main(words[1:]) == 1
    assert "differs in 1 numbers (first: totals.nfe), by at most 29" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="redo = 'nothing' is not allowed"):
        redo("nothing", suite.file)


def test_the_time_left_follows_the_pace(monkeypatch):
    clock = iter((100.0, 160.0, 280.0, 280.0, 340.0))
    monkeypatch.setattr("flowrl.bench.suite.time.monotonic", lambda: next(clock))
    pace = Pace(missing=4)
    for left in ("3 minutes", "3 minutes", "60 seconds", "0 seconds"):
        assert pace.finished() == f"about {left} left"


# Measurements of one run

test_random_credit = credit_contract(
    RandomCredit(),
    without=("reads_nothing_outside_the_mask", "pays_the_better_member", "treats_prompts_alike"),
)
DRAWS = """
import random
import numpy
import torch
from flowrl.probes import NoProbe

class Mine:
    probe = NoProbe()

    def assign(self, values, decisions):
        drawn = torch.rand(decisions.mask.shape) - 0.5
        return drawn * (1 + random.random()) * (1 + numpy.random.rand())
"""


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def test_a_rules_draws_from_the_global_generators_depend_on_the_run(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(DRAWS)
    config = small_run(credit=f"{path}:Mine")
    curves = []
    for other in (1, 2):
        seed_everything(other)
        curves.append(measure(config)["curve"][-1][4:])
    other = measure(config.replace(seed=1))["curve"][-1][4:]
    assert curves[0] == curves[1] != other


def test_generators_and_threads_are_restored():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seed_everything(1)
        expected = torch.rand(2).tolist(), random.random(), float(np.random.rand())  # noqa: NPY002
        seed_everything(1)
        with reproducible("x"):
            assert torch.get_num_threads() == 1
            torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        assert (torch.rand(2).tolist(), random.random(), float(np.random.rand())) == expected  # noqa: NPY002
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_run_that_diverges_has_rewards_of_0_from_there_on(monkeypatch):
    """After the second of four iterations; its costs continue. Elsewhere the error is raised."""
    config = small_run().replace(iterations=4)
    whole, iteration = measure(config), Trainer.iteration

    def diverging(trainer):
        if trainer.done == 2:
            raise TrainingError("not finite")
        return iteration(trainer)

    monkeypatch.setattr(Trainer, "iteration", diverging)
    with pytest.raises(TrainingError):
        measure(config)
    line = measure(config, lenient=True)
    assert line["diverged"] == "not finite"
    found, expected = ([column(some, name) for name in ("reward", "nfe")] for some in (line, whole))
    assert [*found[0]] == [*expected[0][:3], 0.0, 0.0] and [*found[1]] == [*expected[1]]
