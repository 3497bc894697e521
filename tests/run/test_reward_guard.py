"""Rewards that fail: repeated, skipped within bounds, and counted; never a score of 0."""

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from seeded import rand
from small_run import MIXTURE, SMALL, TINY_RUN, flowrl_, rows_of

from flowrl.core.errors import ConfigError, PartError, RewardContractError, RewardError
from flowrl.core.processes import Processes
from flowrl.core.protocols import GroupReward
from flowrl.core.types import Prompt
from flowrl.rewards import Clipped, FunctionReward, GroupSum, NoisyReward, WeightedSum, WinRate
from flowrl.rewards.contract import is_remote, load_reward, marks_invalid
from flowrl.rollout.values import score
from flowrl.run.build import make_trainer
from flowrl.run.checkpoint import Checkpoints
from flowrl.run.job import Run
from flowrl.run.monitors import Limits, notices
from flowrl.run.reward_guard import Retry, RewardGuard, Skip, Stop, choice_of, failures_text, within
from flowrl.run.reward_pool import pooled

ONE = Processes()
DARK, BRIGHT = torch.zeros(3, 4, 4), torch.ones(3, 4, 4)


@dataclass
class Mean:
    """The mean, which fails for white images and at the calls `failing`."""

    failing: tuple[int, ...] = ()
    error: Exception = RuntimeError("away")
    calls: int = 0

    def score(self, images, prompts):
        self.calls += 1
        if self.calls - 1 in self.failing or bool((images == 1).flatten(1).all(1).any()):
            raise self.error
        return images.flatten(1).mean(1)


class Pair(Mean):
    """Two components, whose total would hide a missing score."""

    def parts(self, images, prompts):
        mean = Mean.score(self, images, prompts)
        return {"mean": mean, "size": mean * 0 + 1}

    def total(self, parts):
        return torch.where(parts["mean"] > 0.5, parts["size"], 0.0)

    def score(self, images, prompts):
        return self.total(self.parts(images, prompts))


def guarded(reward, choice=Skip(0, 0), timeout=0.0):
    guard = RewardGuard(choice, timeout)
    return guard.around(reward), guard


def batch(*bright):
    """Five images, some of them white."""
    images = rand(5, 3, 4, 4)
    images[list(bright)] = BRIGHT
    return images, [Prompt("a")] * 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stop", Stop()),
        ("retry", Retry(3, 2.0)),
        ("retry(times=5, pause=0.5)", Retry(5, 0.5)),
        ("skip(times=0, share=0.1, in_a_row=7)", Skip(0, 2.0, 0.1, 7)),
        ("ignore", "allowed: stop, retry"),
        ("stop(times=1)", "allowed: stop, retry"),
        ("retry(share=0.5)", "allowed: stop, retry"),
        ("retry(times=0)", "on_reward_error: Retry.times = 0 .* 1 or more"),
        ("skip(share=0)", r"on_reward_error: Skip.share = 0 .* in \(0, 1\]"),
    ],
)
def test_the_setting(text, expected):
    if not isinstance(expected, str):
        assert choice_of(text) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        make_trainer(SMALL.replace(on_reward_error=text))


def test_by_default_the_reward_is_the_same_object():
    reward = WeightedSum({"a": Mean()})
    assert guarded(reward, Stop())[0] is reward
    assert type(make_trainer(SMALL).reward).__module__.startswith("flowrl.worlds")


def test_a_call_is_repeated_and_counted():
    reward, guard = guarded(Mean((0, 1, 3)), Retry(2, 0))
    given = batch()
    expected = Mean().score(*given)
    for failed in (2, 1):
        assert torch.equal(score(reward, *given).total, expected)
        counts = guard.taken(5, ONE, invalid=0)
        text = "Mean.score: RuntimeError: away"
        assert counts == {"reward_errors": {"Mean": failed}, "reward_error": text}
    assert guard.taken(5, ONE) == {}
    assert not marks_invalid(reward)


def test_a_call_that_fails_every_time_ends_a_run_with_the_counts():
    reward, _ = guarded(Mean((0, 1, 2)), Retry(2, 0))
    with pytest.raises(
        RewardError,
        match=r"Mean.score failed 3 times. .*: Mean 3; the last: .*: RuntimeError: away",
    ):
        score(reward, *batch())


@pytest.mark.parametrize("where", ["sample", "sum", "noise", "clip"])
def test_only_the_samples_that_fail_are_left_out(where):
    mean, images = Mean(), batch(1, 4)
    reward = {
        "sample": mean,
        "sum": WeightedSum({"mean": mean, "other": Mean((99,))}, {"mean": 0.0}),
        "noise": NoisyReward(mean, 0.1),
        "clip": Clipped(mean, 0.0, 0.3),
    }[where]
    alone = Mean().score(images[0][[0, 2, 3]], images[1][:3])
    safe, guard = guarded(reward)
    assert marks_invalid(safe)
    found = score(safe, *images).total
    assert found.isnan().tolist() == [False, True, False, False, True]
    if where == "sample":
        assert torch.equal(found[[0, 2, 3]], alone)
    counts = guard.taken(5, ONE, invalid=2)
    assert counts["skipped"] == 2
    assert {*counts["reward_errors"]} == ({"mean", "other"} if where == "sum" else {"Mean"})


def test_the_total_of_components_never_hides_a_missing_one():
    reward, _ = guarded(Pair())
    found = score(reward, *batch(0))
    assert found.invalid.tolist() == [True, False, False, False, False]
    assert found.total[1:].tolist() == Pair().score(*(part[1:] for part in batch(0))).tolist()
    with pytest.raises(RewardError, match="Pair has not scored any sample yet"):
        score(guarded(Pair())[0], *(part[:1] for part in batch(0)))


def test_a_reward_of_groups_loses_whole_groups():
    class Compares:
        evaluation = Mean()

        def score_groups(self, images, prompts):
            if bool((images == 1).all(-1).any()):
                raise RuntimeError("away")
            return images.flatten(2).mean(2)

    images = rand(6, 3, 4, 4)
    images[3] = BRIGHT
    reward, guard = guarded(Compares())
    assert isinstance(reward, GroupReward) and marks_invalid(reward)
    assert type(reward.evaluation).__name__ == "Mean"
    found = score(reward, images, [Prompt("a")] * 3).total
    assert found.isnan().tolist() == [False, False, True, True, False, False]
    assert guard.taken(6, ONE, invalid=2)["skipped"] == 2
    # of a sum with a win rate, the sample alone
    total, guard = guarded(GroupSum({"win": WinRate(Mean()), "groups": Compares()}, {"groups": 0}))
    assert score(total, images, [Prompt("a")] * 3).total.isnan().tolist() == found.isnan().tolist()
    assert {*guard.failures} == {"win", "groups"}


def test_bounds_end_a_run_with_the_counts():
    reward, guard = guarded(Mean(), Skip(0, 0, 0.2, 3))
    with pytest.raises(RewardError, match=r"the last of 4 calls in a row .* in_a_row=3\)"):
        score(reward, *batch(0, 1, 2))
    reward, guard = guarded(Mean(), Skip(0, 0, 0.2, 3))
    score(reward, *batch(0, 3))
    message = (
        r"2 of 5 samples were skipped, more .*share=0.2\).*: Mean 3; the last: Mean.score: Run"
    )
    with pytest.raises(RewardError, match=message):
        guard.taken(5, ONE, invalid=2)
    reward, guard = guarded(Mean())
    score(reward, *(part[:1] for part in batch(0)))
    message = r"nothing left. Failed calls .* Mean 1; the last: Mean.score: Runt"
    with pytest.raises(RewardError, match=message), guard.explained():
        raise RewardError("nothing left")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RewardContractError("shape"), RewardContractError),
        (ConfigError("no weights"), ConfigError),
        (OSError(28, "No space left on device"), OSError),
    ],
)
def test_some_errors_always_stop(error, kind):
    mean = Mean((0,), error)
    with pytest.raises(kind):
        score(guarded(mean)[0], *batch())
    assert mean.calls == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "short", "list"])
def test_a_broken_contract_is_not_a_failure(bad):
    def function(images, prompts):
        scores = images.flatten(1).mean(1)
        if isinstance(bad, float):
            scores[0] = bad
        return {"short": scores[1:], "list": scores.tolist()}.get(bad, scores)

    reward, guard = guarded(FunctionReward(function))
    with pytest.raises(RewardContractError, match=r"FunctionReward.score returned"):
        score(reward, *batch())
    assert not guard.failures


def test_wrappers_keep_what_others_look_for():
    class Remote(Mean):
        remote, loaded = True, False

        def load(self):
            self.loaded = True

        def refuses(self, prompt):
            return "no"

    remote = Remote()
    reward, _ = guarded(WeightedSum({"a": remote}), Retry())
    load_reward(reward)
    assert remote.loaded and is_remote(reward)
    assert type(reward.models["a"]).__name__ == "Remote"


def test_a_call_that_takes_too_long():
    ended, mean = threading.Event(), Mean()

    class Slow:
        calls = 0

        def score(self, images, prompts):
            self.calls += 1
            if self.calls == 2:
                ended.wait(20)
            return mean.score(images, prompts).requires_grad_(torch.is_grad_enabled())

    reward, guard = guarded(Slow(), Retry(1, 0), timeout=0.5)
    given, began = batch(), time.monotonic()
    expected = Mean().score(*given)
    for _ in range(2):
        found = reward.score(*given)
        assert torch.equal(found, expected) and not found.requires_grad
    assert time.monotonic() - began < 10
    text = "Slow.score did not return within 0.5 s (reward_timeout)"
    assert guard.taken(5, ONE) == {"reward_errors": {"Slow": 1}, "reward_error": text}
    ended.set()
    with pytest.raises(PartError, match=r"Mean.score \(.*\) failed: RuntimeError: away"):
        score(guarded(Mean((0,)), Stop(), timeout=5)[0], *given)
    assert within(5, "", lambda: torch.get_num_threads()) == torch.get_num_threads()


HANGS = """
import os, time
class Hangs:
    on_cpu = True
    def score(self, images, prompts):
        path = __file__ + ".hang"
        if os.path.exists(path):
            os.remove(path)
            time.sleep(1000)
        return images.flatten(1).mean(1)
"""


def test_a_hanging_process_of_a_pool_is_replaced(tmp_path):
    from flowrl.run.parts.registry import build

    (tmp_path / "hangs.py").write_text(HANGS)
    reward, guard = guarded(
        pooled(build("reward", f"{tmp_path}/hangs.py:Hangs")), Retry(1, 0), timeout=20.0
    )
    load_reward(reward)
    guard.timeout = 3.0
    given, executor = batch(), reward.reward._pool._executor
    processes = [*executor._processes.values()]
    (tmp_path / "hangs.py.hang").touch()
    guard.timeout, began = 1.0, time.monotonic()
    reward.score(*given)
    assert time.monotonic() - began < 30
    assert guard.failures == {"Hangs": 1}
    for process in processes:
        process.join(5)
        assert not process.is_alive()


FLAKY = """
import random
DICE = random.Random(5)
class Score:
    def score(self, images, prompts):
        if DICE.random() < 0.05:
            raise RuntimeError("the judge is away")
        return images.flatten(1).mean(1)
class Always:
    calls = 0
    def score(self, images, prompts):
        self.calls += 1
        if self.calls > 5:
            raise RuntimeError("gone")
        return images.flatten(1).mean(1)
class Bright:
    def score(self, images, prompts):
        means = images.flatten(1).mean(1)
        if bool((means > 1.2).any()):
            raise RuntimeError("too bright")
        return means
"""


@pytest.mark.satellite
def test_a_reward_that_fails_1_in_20_calls_finishes_with_the_count(tmp_path, capsys):
    (tmp_path / "flaky.py").write_text(FLAKY)
    command = (
        f"train {MIXTURE} --iterations 40 --eval-every 40 --no-trial --reward {tmp_path}/flaky.py:"
    )
    choice = "--on-reward-error 'skip(times=1, pause=0)'"
    assert flowrl_(f"{command}Score --out {tmp_path}/out {choice}") == 0
    rows = rows_of(tmp_path / "out")
    failed = sum(row.get("reward_errors", {}).get("Score", 0) for row in rows)
    assert failed > 0
    assert (
        f"Failed calls of the reward: Score {failed}; 0 of 240 samples" in capsys.readouterr().out
    )
    # stopped by another one after five iterations, and continued
    assert flowrl_(f"{command}Always --out {tmp_path}/stopped {choice}") == 2
    shown = capsys.readouterr()
    assert "the last of 4 calls in a row" in shown.err and "Always.score: Runt" in shown.err
    assert "checkpoint 000005 is kept" in shown.out
    assert (
        flowrl_(f"train --resume {tmp_path}/stopped --on-reward-error retry --iterations 8 --trust")
        == 0
    )
    assert rows_of(tmp_path / "stopped")[-1]["iteration"] == 8


def test_skipped_samples_do_not_train(tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    config = TINY_RUN.replace(
        reward=f"{tmp_path}/flaky.py:Bright",
        on_reward_error="skip(times=0, pause=0, share=0.9, in_a_row=6)",
        iterations=3,
        groups=4,
        group_size=6,
    )
    shown = []
    assert Run(config, tmp_path / "out", shown.append).execute()
    rows = rows_of(tmp_path / "out")[1:]
    assert any(row.get("skipped") for row in rows)
    for row in rows:
        assert row["invalid"] == row.get("skipped", 0)
    assert sum("reward-errors" in str(row.get("warnings")) for row in rows) == 1
    assert any("samples were skipped: Bright.score" in state.get("warning", "") for state in shown)


def test_the_warning_and_the_sum():
    row = {"iteration": 3, "trajectories": 96, "skipped": 3, "reward_error": "Score.score: E: x"}
    row["reward_errors"] = {"Score": 4}
    (notice,) = notices([row], Limits())
    assert notice.kind == "reward-errors"
    assert notice.text == "3 of 96 samples were skipped: Score.score: E: x"
    heldout = {**row, "skipped": 0, "evaluation": {"reward": 1.0, "skipped": 2}}
    assert notices([heldout], Limits(samples=8))[0].text.startswith("2 of 8 held-out samples")
    assert not notices([{**row, "skipped": 0}], Limits())
    heldout["evaluation"]["reward_errors"] = {"Score": 1, "Other": 2}
    assert failures_text([row, heldout]) == (
        "Failed calls of the reward: Score 9, Other 2; 3 of 192 samples were skipped"
    )
    assert failures_text([{"trajectories": 3, "evaluation": None}]) == ""


@pytest.mark.slow
def test_two_processes_count_together(tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    options = f"{MIXTURE} --iterations 6 --groups 4 --group-size 6 --out {tmp_path}/out --no-trial"
    options += f" --trust --reward {tmp_path}/flaky.py:Bright --on-reward-error"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "flowrl", "train", *options.split()]
    choice = "skip(times=0, pause=0, share=0.9, in_a_row=9)"
    done = subprocess.run([*command, choice], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert any(row.get("skipped") for row in rows)
    assert all(row["invalid"] == row.get("skipped", 0) for row in rows[1:])
    assert "samples were skipped" in done.stdout


@pytest.mark.slow
def test_ctrl_c_works_while_a_call_hangs_in_its_thread(tmp_path):
    (tmp_path / "hangs.py").write_text(
        "import time\n"
        "class Hangs:\n"
        "    calls = 0\n"
        "    def score(self, images, prompts):\n"
        "        self.calls += 1\n"
        "        if self.calls == 4:\n"
        "            print('HANGS', flush=True)\n"
        "            time.sleep(1000)\n"
        "        return images.flatten(1).mean(1)\n"
    )
    out = tmp_path / "out"
    options = f"{MIXTURE} --iterations 40 --no-trial --reward {tmp_path}/hangs.py:Hangs --out {out}"
    command = [sys.executable, "-u", "-m", "flowrl", "train", *options.split()]
    command += ["--reward-timeout", "8", "--on-reward-error", "retry(times=1, pause=0)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert "HANGS\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("Stopping after this iteration")
        shown = process.communicate(timeout=60)[0]
        assert process.returncode == 130 and "nothing is lost" in shown
    assert Checkpoints(out).newest == "000004"
    assert rows_of(out)[-1]["reward_errors"] == {"Hangs": 1}
