"""Rewards in a pool of processes: the same numbers, errors by type and text, no process is left."""

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor as Executor

import pytest
import torch
from seeded import rand
from small_run import TINY_RUN
from worker_jobs import have_ended, runs

from flowrl.core.errors import ConfigError, PartError, RewardError
from flowrl.core.types import Prompt
from flowrl.rewards import Clipped, FunctionReward, GroupSum, JPEGIncompressibility, WinRate
from flowrl.rewards.contract import load_reward, marks_invalid
from flowrl.run.build import make_trainer
from flowrl.run.config import preset
from flowrl.run.parts.registry import build
from flowrl.run.reward_pool import pooled

ON_CPU = """
import os, signal
from flowrl.core.errors import RewardError
class Mean:
    on_cpu = marks_invalid = True
    def load(self):
        if os.path.exists(__file__ + ".lost"): raise OSError("no weights")
    def score(self, images, prompts):
        text = prompts[0].text
        if text == "refused": raise RewardError("mean: refused")
        if text == "broken": raise KeyError("broken")
        if text == "killed": os.kill(os.getpid(), signal.SIGKILL)
        means = images.flatten(1).mean(1).double()
        return means * 0 + os.getpid() if text == "process" else means.square()
"""


def in_pool(tmp_path):
    """A reward of a user's file, and the same in a pool."""
    (tmp_path / "mean.py").write_text(ON_CPU)
    reward = build("reward", f"{tmp_path}/mean.py:Mean")
    return reward, pooled(reward)


def test_a_pool_has_the_numbers_of_this_process(tmp_path):
    reward, pool = in_pool(tmp_path)
    pool._pool.processes = 1  # pieces of two, and the last of one
    images, prompts = rand(9, 3, 16, 16), [Prompt("a")] * 9
    assert torch.equal(pool.score(images, prompts), reward.score(images, prompts))
    assert os.getpid() not in pool.score(images, [Prompt("process")] * 9)
    size = JPEGIncompressibility()
    parts = {"win": WinRate(Clipped(size, high=0.7)), "mean": reward, "size": size}
    parts["here"] = FunctionReward(lambda images, prompts: images.flatten(1).amax(1))
    total = GroupSum(parts, {"mean": 0.3})
    groups = images.unflatten(0, (3, 3)), prompts[:3]
    together = pooled(total)
    assert together.models["here"] is parts["here"] and marks_invalid(together)
    assert torch.equal(together.score_groups(*groups), total.score_groups(*groups))
    assert together.models["mean"]._pool is together.models["size"]._pool
    assert pooled(parts["here"]) is parts["here"]
    config = TINY_RUN.replace(reward=f"{tmp_path}/mean.py:Mean", overlap_rewards=True, chunk=1)
    assert isinstance(make_trainer(config).reward, type(pool))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("refused", RewardError, "^mean: refused$"),
        ("broken", PartError, r"Mean.score \(.*mean.py, line 11\) failed: KeyError: 'broken'"),
        ("killed", RewardError, "a process that computes Mean was killed"),
    ],
)
def test_errors_in_a_pool_have_their_type_and_text(text, error, message, tmp_path):
    pool = in_pool(tmp_path)[1]
    for _ in range(2 if text == "killed" else 1):
        with pytest.raises(error, match=message):
            pool.score(rand(2, 3, 4, 4), [Prompt(text)] * 2)


def test_a_pool_that_breaks_during_a_call_is_started_again(tmp_path, monkeypatch):
    """Its pipes are closed then, so that the next process cannot be started."""
    reward, pool = in_pool(tmp_path)
    images, prompts, submit, failed = rand(2, 3, 4, 4), [Prompt("x")] * 2, Executor.submit, []

    def breaking(self, *given):
        if not failed:
            failed.append(self)
            raise OSError(9, "Bad file descriptor")
        return submit(self, *given)

    monkeypatch.setattr(Executor, "submit", breaking)
    assert torch.equal(pool.score(images, prompts), reward.score(images, prompts)) and failed


def test_weights_are_read_before_the_model(tmp_path):
    """Also by the processes of a pool; the model does not exist."""
    reward, pool = in_pool(tmp_path)
    (tmp_path / "mean.py.lost").touch()
    for part in (reward, pool):
        with pytest.raises(ConfigError, match=r"Mean.load\(\) failed: OSError: no weights"):
            load_reward(part)
    (tmp_path / "prompts.txt").write_text("a red fox")
    spec = f"clipped(reward='{tmp_path}/mean.py:Mean')"
    files = dict(model="no-such-model", prompts=f"{tmp_path}/prompts.txt", reward=spec)
    config = preset("tiny").apply(**files, device="cpu")
    with pytest.raises(ConfigError, match=r"Mean.load\(\) failed"):
        make_trainer(config)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_pool_ends_with_its_killed_parent(tmp_path):
    in_pool(tmp_path)
    program = f"""
import torch
from flowrl.core.types import Prompt
from flowrl.run.parts.registry import build
from flowrl.run.reward_pool import pooled
pool = pooled(build("reward", "{tmp_path}/mean.py:Mean"))
print(int(pool.score(torch.zeros(1, 3, 2, 2), [Prompt("process")])), flush=True)
input()
"""
    command = [sys.executable, "-c", program]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as process:
        worker = process.stdout.readline().strip()
        assert runs(worker)
        process.kill()
    assert have_ended(worker)
