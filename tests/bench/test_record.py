"""Records: fresh seeds, the level of the test, what a record is, and the command."""

import math
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import records
from hypothesis import given
from hypothesis import strategies as st
from loading import ROOT

from flowrl.bench import record
from flowrl.bench.contest import CONTESTS, Contest
from flowrl.bench.record import (
    FLOW_GRPO,
    Recorded,
    Try,
    fresh_seeds,
    merged,
    over_flow_grpo,
    read_tries,
    standing,
    text_of,
)
from flowrl.bench.verdict_runs import POINTS
from flowrl.cli.main import main
from flowrl.compare.arms import load_arms
from flowrl.core.errors import ConfigError
from flowrl.run.io import write_bytes

CONTEST = CONTESTS["points"]


def arriving(task, share, spread=0.0, seeds=10, collapsed=0):
    """Runs that rise linearly and reach the target at a `share` of Flow-GRPO's cost, seed i at
    1 + spread (i - mean i) of it; the last `collapsed` ones fall at their end.
    """
    target, cost = CONTEST.targets[task], CONTEST.costs[task]
    factors = 1 + spread * (np.arange(seeds) - (seeds - 1) / 2)
    places = np.linspace(0, 2, 25)
    rewards = target * places / (share * factors[:, None])
    rewards[len(rewards) - collapsed :, -1] = 0.0
    return Recorded(np.tile(cost * places, (seeds, 1)).tolist(), rewards.tolist())


def made(name="mine", share=0.5, against="searched Flow-GRPO", other=1.0, number=1, **runs):
    """A try whose runs arrive at shares of Flow-GRPO's cost."""
    return Try(
        **{"format": 1, "world": "points", "name": name, "why": "a test", "settings": {}},
        **{"search_runs": 3, "files": {}, "against": against, "against_settings": {}},
        **{"number": number, "date": "2026-01-01", "commit": "c", "seeds": [*range(10)]},
        **{"versions": {}, "hardware": ""},
        runs={task: arriving(task, share, **runs) for task in CONTEST.tasks},
        against_runs={task: arriving(task, other, 0.02) for task in CONTEST.tasks},
    )


@given(st.floats(0.1, 1.8))
def test_the_cost_of_straight_lines(share):
    """All seeds alike: the ratio is known and the interval a point."""
    ratio = over_flow_grpo(CONTEST, {task: arriving(task, share).curves for task in CONTEST.tasks})
    assert ratio.value == pytest.approx(share, rel=1e-6)
    assert ratio.high - ratio.low < 1e-6


def test_what_a_record_is():
    assert made().accepted
    assert made().against_ratio.value == pytest.approx(0.5, rel=0.01)
    assert not made(share=1.02).accepted
    assert not made(share=0.99, spread=0.1).accepted  # cheaper, but by chance
    fallen = made(collapsed=1)
    assert fallen.collapsed == (4, 0) and not fallen.accepted
    # a record that does not arrive counts as arriving at the end, 2 here
    late = made(other=3.0)
    assert late.accepted and late.before.startswith("at most 0.2")
    assert late.against_ratio.value == pytest.approx(0.5 / 2, rel=0.03)
    assert not made(share=3.0, other=3.0).accepted
    # the same runs: a later try needs more
    close = made(share=0.94, spread=0.03)
    assert close.accepted and not replace(close, number=40).accepted
    assert "0.50 [0.50, 0.50] of Flow-GRPO's cost" in made().line
    assert made().line.endswith("a new record") and fallen.line.endswith("no record")
    # the first one needs no test
    first = made("searched Flow-GRPO", share=1.2, against=FLOW_GRPO)
    assert first.accepted and not replace(first, name="another").accepted


def test_levels_of_all_tries_sum_to_five_percent():
    known = made()
    levels = [replace(known, number=number).level for number in range(1, 2001)]
    assert levels == sorted(levels, reverse=True)
    assert 0.05 > sum(levels) > 0.05 - 0.05 * 6 / math.pi**2 / 1999
    assert levels[0] == pytest.approx(0.0304, abs=1e-4)


def test_equal_arms_are_records_no_more_often_than_the_level_says():
    """150 pairs of equal arms, ten seeds with spread and noise; 3.0% are allowed, and chance adds
    three standard deviations.
    """
    random, found, tries = np.random.default_rng(0), 0, 150

    def noisy(known):
        slopes, noise = random.normal(1, 0.1, (10, 1)), random.normal(0, 0.012, (10, 25))
        return replace(known, rewards=(np.array(known.rewards) * slopes + noise).tolist())

    usual = {task: arriving(task, 0.8) for task in ("default", "strict")}
    for _ in range(tries):
        runs = [{task: noisy(known) for task, known in usual.items()} for _ in range(2)]
        attempt = replace(made(), runs=runs[0], against_runs=runs[1])
        found += attempt.against_ratio.high < 1
    level = made().level
    assert found / tries <= level + 3 * math.sqrt(level * (1 - level) / tries)


def test_a_file_is_read_as_it_was_written(tmp_path):
    first = made(against=FLOW_GRPO)
    path = tmp_path / "points" / "mine.json"
    write_bytes(path, text_of(first).encode())
    assert read_tries(tmp_path, "points") == [first]
    assert max(map(len, path.read_text().splitlines())) > 100  # a line per run


def test_the_record_that_stands(tmp_path):
    assert read_tries(tmp_path, "points") == [] and standing([]) is None
    tries = [
        made("searched Flow-GRPO", share=1.1, against=FLOW_GRPO),
        made("b", share=1.1),
        made("a", number=2),
        made("c", against="a", other=0.5),
        made("d", against="a", other=0.5, share=0.3, number=2),
    ]
    for known in tries:
        write_bytes(tmp_path / "points" / f"{known.name}.json", text_of(known).encode())
    read = read_tries(tmp_path, "points")
    assert [known.name for known in read] == ["searched Flow-GRPO", "b", "a", "c", "d"]
    record_ = standing(read)
    assert record_ is not None and record_.name == "d"
    (tmp_path / "points" / "a.json").unlink()
    with pytest.raises(ConfigError, match=r"'c', 'd'.*a record that is in the folder"):
        read_tries(tmp_path, "points")


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with an arm of two settings."""
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    (tmp_path / "arm.yaml").write_text("arms:\n  half: {groups: 8}\n")
    return tmp_path


def test_seeds_are_a_function_of_commit_and_files(repository):
    arm = repository / "arm.yaml"
    with pytest.raises(ConfigError, match="allowed: committed files"):
        merged([arm])
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "arm")
    commit = merged([arm])
    seeds = fresh_seeds(commit, [arm])
    assert len(set(seeds)) == 10 and record.FIRST_SEED <= min(seeds) <= max(seeds) < 2**31
    assert fresh_seeds(commit, [arm]) == seeds
    assert not set(fresh_seeds("0" * 40, [arm])) & set(seeds)
    (repository / "other").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "other")
    assert merged([arm]) == commit
    arm.write_text("arms:\n  half: {groups: 6}\n")
    assert not set(fresh_seeds(commit, [arm])) & set(seeds)
    with pytest.raises(ConfigError, match="allowed: committed files"):
        merged([arm])


RULE = """
from flowrl.core.experience import Decisions
class Half:
    from flowrl.probes import NoProbe
    probe = NoProbe()
    def assign(self, values, decisions):
        reward = values[..., -1:]
        return ((reward - reward.mean(1, keepdim=True)) / 2).expand(decisions.mask.shape)
"""


@pytest.mark.slow
def test_the_command(repository, monkeypatch, capsys):
    """Two tries of a contest of an iteration with one task: the second one against the record."""
    short = Contest({"default": POINTS["default"]}, {"default": 0.2}, CONTEST.settings, 1, 2)
    monkeypatch.setitem(record.CONTESTS, "points", short)
    monkeypatch.setattr(record, "SEEDS", 2)
    monkeypatch.setattr(record, "QUICK_TASKS", {"points": ("default",)})
    command = ["bench", "record", "arm.yaml", "--world", "points", "--workers", "1"]
    assert main([*command, "--quick"]) == 0
    assert "collapsed  half" in capsys.readouterr().out
    assert main([*command, "--quick", "--whole"]) == 0
    assert "collapsed  half" in capsys.readouterr().out
    assert main([*command, "--whole"]) == 2
    assert "only with --quick" in capsys.readouterr().err
    (repository / "wrong.yaml").write_text("arms: {half: {groups: 2}, mine: {credit: no.py:Rule}}")
    assert main([*command[:2], "wrong.yaml", *command[3:], "--quick", "--trust"]) == 2
    captured = capsys.readouterr()
    assert f"{repository}/no.py does not exist" in captured.err and not captured.out
    assert main(command) == 2
    assert "why" in capsys.readouterr().err
    command += ["--why", "fewer prompts"]
    assert main(command) == 2
    assert "committed" in capsys.readouterr().err
    git(repository, "add", "arm.yaml")
    git(repository, "commit", "-qm", "arm")
    assert main(command) == 0
    (first,) = read_tries(repository / "benchmarks/records", "points")
    assert (first.name, first.against, first.number) == ("half", FLOW_GRPO, 1)
    assert first.line in capsys.readouterr().out
    assert main(command) == 2  # the name is taken
    (repository / "rule.py").write_text(RULE)
    (repository / "arm.yaml").write_text("arms:\n  mine: {credit: rule.py:Half}\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "mine")
    assert main(command) == 2
    assert "--trust" in capsys.readouterr().err
    assert main([*command, "--trust"]) == 0
    second = read_tries(repository / "benchmarks/records", "points")[-1]
    record_ = standing([first])
    assert second.against == (record_.name if record_ else FLOW_GRPO)
    assert set(second.files) == {"rule.py"} and not set(second.seeds) & set(first.seeds)


@pytest.mark.satellite
@pytest.mark.parametrize("world", CONTESTS)
def test_seeds_and_settings_of_the_tries_are_those_of_their_files(world):
    files = sorted((ROOT / "benchmarks/records/arms").glob("*.yaml"))
    entered = {
        (name, path): arm for path in files for name, arm in load_arms(path, trust=True).items()
    }
    for known in read_tries(ROOT / "benchmarks/records", world):
        assert any(
            name == known.name
            and arm == known.settings
            and fresh_seeds(known.commit, [path, *(ROOT / file for file in known.files)])
            == tuple(known.seeds)
            for (name, path), arm in entered.items()
        )


def test_a_file_of_another_format_is_refused(tmp_path):
    other = text_of(made()).replace('"format": 1', '"format": 2')
    write_bytes(tmp_path / "points" / "mine.json", other.encode())
    with pytest.raises(ConfigError, match="format"):
        read_tries(tmp_path, "points")


@pytest.mark.satellite
def test_the_page_is_made_from_the_files():
    assert records.page() == (ROOT / "docs/records.md").read_text()
