"""Measured runs."""

import random

import numpy as np
import pytest
import torch
from bench_lines import small_run
from flowrl_bench.evidence import column
from flowrl_bench.measurements import measure, reproducible
from flowrl_bench.rules import RandomCredit
from flowrl_testing import credit_contract

from flowrl.core.errors import TrainingError
from flowrl.trainer import Trainer

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
