"""The benchmark suite: statistics, verdict rules, the ledger, the runner, and what the suite must see (planted rules)."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_lines import FAST, FLAT, SLOW, fake_evidence, fake_line
from flowrl_bench import records
from flowrl_bench.catalogue import CLAIMS
from flowrl_bench.claims import Claim, make_run
from flowrl_bench.evidence import MEASURES, NEVER, Evidence
from flowrl_bench.inspection import MicroscopeConfig
from flowrl_bench.measure import CURVE, measure
from flowrl_bench.negative_controls import FreshNoiseFault
from flowrl_bench.records import Ledger, config_hash, make_line
from flowrl_bench.rule import bench_rule, ranking, rule_claims, rule_page
from flowrl_bench.runner import Suite, evidence, needed, redo
from flowrl_bench.verdicts import (
    ALIKE,
    BETTER,
    FAILS,
    HOLDS,
    UNDECIDED,
    WORSE,
    Above,
    Alike,
    All,
    Answer,
    Beats,
    Best,
    Needs,
    NoWorse,
    WidensBy,
)

from flowrl.cli import main
from flowrl.credit import RandomCredit, TurningPoint
from flowrl.diagnostics.statistics import (
    Estimate,
    bootstrap,
    difference,
    improvement,
    interquartile_mean,
    level,
    profile,
    widening,
)
from flowrl.errors import ConfigError
from flowrl.testing import credit_contract
from flowrl.training.build import make_method

test_random_credit = credit_contract(RandomCredit(), without=("pays_the_better_member", "treats_prompts_alike"))


class TestStatistics:
    def test_interquartile_mean_by_hand(self) -> None:
        assert float(interquartile_mean(np.array([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -50.0]))) == pytest.approx(3.5)
        assert float(interquartile_mean(np.array([1.0, 2.0, 6.0]))) == pytest.approx(3.0)  # a quarter of three is none

    def test_widening(self) -> None:
        assert widening([10]) == pytest.approx(2.2622 / 1.95996 * math.sqrt(10 / 9), rel=1e-4)
        assert widening([3]) == pytest.approx(4.3027 / 1.95996 * math.sqrt(1.5), rel=1e-4)
        assert widening([3, 3, 3]) < widening([3])
        assert math.isinf(widening([1]))

    @pytest.mark.parametrize("sizes", [(10,), (3,), (4, 4)])
    def test_intervals_cover(self, sizes: tuple[int, ...]) -> None:
        """Nominal 95%. With a true coverage of 95%, 87% or less of 150 has probability 2e-4."""
        covered = 0
        for seed in range(150):
            generator = np.random.default_rng(seed)
            a = [generator.normal(0.3, 1, size) for size in sizes]
            b = [generator.normal(0.0, 1, size) for size in sizes]
            found = _quick_difference(a, b, seed)
            covered += found.low <= 0.3 <= found.high
        assert covered / 150 > 0.87

    def test_pairing_takes_out_what_seeds_share(self) -> None:
        generator = np.random.default_rng(0)
        shared = generator.normal(0, 1, 10)
        a, b = shared + 0.1 + generator.normal(0, 0.02, 10), shared
        found = difference([a], [b])
        assert 0 < found.low < 0.1 < found.high < 0.2
        with pytest.raises(ConfigError, match="same seeds"):
            difference([a], [b[:5]])

    def test_probability_of_improvement_by_hand(self) -> None:
        a, b = np.array([1.0, 3.0]), np.array([2.0, 1.0])
        assert improvement([a], [b]).value == pytest.approx((0 + 0.5 + 1 + 1) / 4)
        assert improvement([a, a], [a, a - 5]).value == pytest.approx((0.5 + 1) / 2)
        sure = improvement([a + 9], [b])
        assert (sure.value, sure.low, sure.high) == (1.0, 1.0, 1.0)

    def test_one_seed_says_nothing(self) -> None:
        found = level([np.array([0.7])])
        assert found.value == 0.7 and math.isinf(found.low) and math.isinf(found.high)

    def test_strata_are_resampled_by_themselves(self) -> None:
        """Between tasks of 0 and 100 without spread there is nothing to doubt; pooled, there would be."""
        found = level([np.zeros(4), np.full(4, 100.0)])
        assert found.low == found.high == found.value == pytest.approx(50.0)

    def test_profile(self) -> None:
        assert profile([np.array([0.2, 0.6]), np.array([0.9, 0.9])], [0.0, 0.5, 0.95]).tolist() == [1.0, 0.75, 0.0]


def _quick_difference(a: list[np.ndarray], b: list[np.ndarray], seed: int) -> Estimate:
    gaps = [x - y for x, y in zip(a, b, strict=True)]

    def statistic(*index: np.ndarray, axis: int = -1) -> np.ndarray:
        return interquartile_mean(np.concatenate([g[i] for g, i in zip(gaps, index, strict=True)], axis=-1), axis)

    return bootstrap(statistic, [len(g) for g in gaps], seed, draws=200)


class TestEvidence:
    def test_measures_by_hand(self) -> None:
        found = fake_evidence(2, slow=SLOW, fast=FAST)

        def one(arm: str, name: str, baseline: str = "") -> float:
            return float(found.values(arm, name, baseline)[0][0])

        assert one("slow", "area") == pytest.approx(0.4)
        assert one("fast", "final") == pytest.approx(0.7)
        assert one("fast", "strict area") == pytest.approx(0.3)
        assert one("slow", "drop") == 0.0
        assert one("fast", "updates", "slow") == pytest.approx(2 / 3)  # 0.6 after 2 of 3
        assert one("slow", "updates", "slow") == pytest.approx(1.0)
        assert one("slow", "updates", "fast") == NEVER  # it never gets to 0.7
        assert one("fast", "nfe", "slow") == pytest.approx(2 / 3)
        assert one("fast", "reward at equal nfe", "slow") == pytest.approx(0.55)  # after 1.5 iterations
        assert one("fast", "early gains") == pytest.approx(2.0)
        assert one("fast", "turning points over null") == pytest.approx(0.5)
        assert one("fast", "quality at equal reward", "slow") == pytest.approx(-0.54)
        with pytest.raises(ConfigError, match="no arm"):
            found.values("other", "area")

    def test_every_measure_reads_a_real_line(self) -> None:
        line = {**tiny_line("uniform", 0), "samples": fake_line(SLOW)["samples"]}
        line["gains"] = [[0.2, 0.1, 0.1], [0.1, 0.1, 0.1]]
        found = Evidence({"a": {"direction": [line, line]}}, (0, 1))
        for name in MEASURES:
            assert np.isfinite(found.values("a", name, "a")[0]).all(), name


class TestVerdicts:
    @pytest.mark.parametrize(
        ("rule", "verdict"),
        [
            (Beats("fast", "slow"), HOLDS),
            (Beats("slow", "fast"), FAILS),
            (Beats("slow", "slow"), FAILS),  # no difference is less than `least`
            (Beats("slow", "fast", "drop"), FAILS),
            (NoWorse("slow", "slow"), HOLDS),
            (NoWorse("flat", "slow"), FAILS),
            (Alike(("slow", "slow")), HOLDS),
            (Alike(("slow", "slow", "fast")), FAILS),
            (Needs("fast", "slow"), HOLDS),
            (Needs("fast", "slow", at_most=0.5), FAILS),
            (Needs("flat", "slow"), FAILS),
            (Best("fast", ("slow", "flat")), HOLDS),
            (Best("slow", ("fast", "flat")), FAILS),
            (Above("slow", "early gains"), HOLDS),
            (Above("slow", "early gains", 3.0), FAILS),
            (WidensBy("fast", "flat", "slow", "flat"), HOLDS),
            (WidensBy("slow", "flat", "fast", "flat"), FAILS),
            (All((Beats("fast", "slow"), Beats("slow", "flat"))), HOLDS),
            (All((Beats("fast", "slow"), Beats("flat", "slow"))), FAILS),
            (Answer(("fast",), "slow"), BETTER),
            (Answer(("flat",), "slow"), WORSE),
            (Answer(("slow",), "slow"), ALIKE),
        ],
        ids=lambda x: str(x)[:60],
    )
    def test_clear_cases(self, rule, verdict: str) -> None:
        found = rule.judge(fake_evidence(slow=SLOW, fast=FAST, flat=FLAT))
        assert found.verdict == verdict
        assert found.main in found.comparisons and rule.words()

    @pytest.mark.parametrize(
        "rule",
        [
            Beats("fast", "slow"),
            NoWorse("slow", "fast"),
            Alike(("fast", "slow")),
            Needs("fast", "slow"),
            Best("fast", ("slow",)),
            Answer(("fast",), "slow"),
            WidensBy("fast", "slow", "slow", "fast"),
            All((Beats("fast", "slow"),)),
        ],
        ids=lambda x: type(x).__name__,
    )
    def test_few_noisy_seeds_decide_nothing(self, rule) -> None:
        assert rule.judge(fake_evidence(3, spread=0.6, slow=SLOW, fast=FAST)).verdict == UNDECIDED

    def test_one_seed_decides_nothing(self) -> None:
        assert Beats("fast", "slow").judge(fake_evidence(1, slow=SLOW, fast=FAST)).verdict == UNDECIDED

    def test_less_is_better_where_it_is(self) -> None:
        found = Beats("steady", "falling", "drop").judge(fake_evidence(steady=[0, 0.5, 0.5], falling=[0, 0.9, 0.3]))
        assert found.verdict == HOLDS and found.main.estimate.value == pytest.approx(0.6)


def arms_of(rule) -> set[str]:
    """The arms that a rule speaks of."""
    if isinstance(rule, All):
        return set().union(*(arms_of(part) for part in rule.rules))
    found: set[str] = set()
    for name, value in dataclasses.asdict(rule).items():
        if name in ("arm", "than", "of", "other", "other_than"):
            found.add(value)
        elif name in ("arms", "others"):
            found |= set(value)
    return found


class TestCatalogue:
    @pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
    def test_rules_speak_of_arms_that_exist(self, claim: Claim) -> None:
        assert arms_of(claim.rule) <= set(claim.arms)
        assert claim.asks or claim.id == "planted" or "arXiv" in claim.source
        for world in claim.worlds:
            for _, _, _, config in claim.configs(world, (0,)):
                make_method(config)

    def test_arms_of_a_claim_are_different_runs(self) -> None:
        for claim in CLAIMS.values():
            hashes = [config_hash(config) for _, _, _, config in claim.configs("mixture", (0,))]
            assert len(set(hashes)) == len(hashes), claim.id

    def test_shared_runs_are_made_once(self) -> None:
        two = {key: CLAIMS[key] for key in ("stepwise-updates", "stepwise-cost")}
        assert len(needed(two, "mixture", {"mixture": (0, 1), "shapes": ()})) == 4
        assert len(needed(two, "all", {"mixture": (0,), "shapes": (0,)})) == 2 + 2 * 3


SMALL = {
    "iterations": 2,
    "groups": 2,
    "group_size": 3,
    "eval_every": 1,
    "eval_samples": 6,
    "eval_steps": 4,
    "num_steps": 5,
    "window": "0:3",
}


def tiny(arm: str, seed: int, **changes):
    credit = {} if arm == "uniform" else {"credit": "random"}
    return make_run("mixture", "direction", seed, {**SMALL, **credit, **changes})


def tiny_line(arm: str, seed: int) -> dict:
    config = tiny(arm, seed)
    found = measure(config)
    assert found is not None
    return make_line(config, found, "a command")


TINY = Claim(
    "tiny", "Uniform beats random.", "Nobody, arXiv 0", "1", {"uniform": SMALL, "random": {**SMALL, "credit": "random"}},
    Beats("uniform", "random"),
)  # fmt: skip


class TestRuns:
    def test_the_same_run_gives_the_same_numbers(self) -> None:
        first, second = tiny_line("random", 3), tiny_line("random", 3)
        seconds = CURVE.index("seconds")
        for a, b in zip(first["curve"], second["curve"], strict=True):
            assert [x for i, x in enumerate(a) if i != seconds] == [x for i, x in enumerate(b) if i != seconds]
        assert first["id"] == second["id"]

    def test_a_stopped_run_leaves_nothing(self) -> None:
        assert measure(tiny("uniform", 0), lambda: True) is None

    def test_a_line_says_where_it_comes_from(self) -> None:
        line = tiny_line("uniform", 0)
        assert {"id", "code", "rules", "commit", "versions", "hardware", "seed", "command", "config"} <= set(line)
        assert json.loads(json.dumps(line)) == line
        assert [row[0] for row in line["curve"]] == [0, 1, 2]
        assert line["totals"]["nfe"] == 2 * 6 * 5

    def test_errors_of_the_reward_are_only_seen_in_training(self) -> None:
        clean, noisy = measure(tiny("uniform", 0)), measure(tiny("uniform", 0, reward_noise=0.5))
        assert clean is not None and noisy is not None
        assert clean["curve"][0] == noisy["curve"][0]
        assert clean["curve"][2][4] != noisy["curve"][2][4]
        with pytest.raises(ConfigError, match="reward_noise"):
            tiny("uniform", 0, reward_noise=-1.0)

    def test_fresh_noise_spoils_only_the_first_node(self) -> None:
        table = torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(0))

        class Shown:
            probe = TurningPoint().probe

            def assign(self, rewards, schedule=None):
                self.rewards = rewards
                return rewards.diff(dim=-1)

        shown = Shown()
        FreshNoiseFault(shown).assign(table)
        assert torch.equal(shown.rewards[..., 1:], table[..., 1:])
        assert torch.equal(shown.rewards[..., 0].sort(1).values, table[..., 0].sort(1).values)
        assert not torch.equal(shown.rewards[..., 0], table[..., 0])


class TestLedger:
    @pytest.fixture
    def ledger(self, tmp_path: Path) -> Ledger:
        ledger = Ledger(tmp_path / "results.jsonl")
        for seed in (0, 1):
            ledger.append(tiny_line("uniform", seed))
        return ledger

    def test_lines_come_back(self, ledger: Ledger) -> None:
        lines = ledger.read()
        assert [line["seed"] for line in lines.values()] == [0, 1]
        assert set(lines) == {config_hash(tiny("uniform", seed)) for seed in (0, 1)}

    def test_other_code_is_refused(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(records, "code_hash", lambda: "0123456789abcdef")
        with pytest.raises(ConfigError, match="made by other code"):
            ledger.read()
        assert len(ledger.read(any_code=True)) == 2
        ledger.append(tiny_line("uniform", 2))
        with pytest.raises(ConfigError, match=r"line 3 .* other code"):
            ledger.read(any_code=True)

    def test_other_settings_are_refused(self, ledger: Ledger) -> None:
        with pytest.raises(ConfigError, match="not part of this suite"):
            ledger.read({config_hash(tiny("uniform", 0)): None})

    def test_a_changed_line_is_refused(self, ledger: Ledger) -> None:
        ledger.path.write_text(ledger.path.read_text().replace('"lr": 0.02', '"lr": 0.03', 1))
        with pytest.raises(ConfigError, match=r"line 1 .* does not hold the settings"):
            ledger.read()

    def test_a_torn_last_line_is_made_again(self, ledger: Ledger) -> None:
        text = ledger.path.read_text()
        ledger.path.write_text(text[:-40])
        assert [line["seed"] for line in ledger.read().values()] == [0]
        ledger.append(tiny_line("uniform", 1))
        assert ledger.path.read_text().count("\n") == 2 and len(ledger.read()) == 2
        ledger.path.write_text(text[:40] + "\n" + text)
        with pytest.raises(ConfigError, match=r"line 1 .* is not JSON"):
            ledger.read()

    def test_a_run_can_be_made_again_from_its_line(self, ledger: Ledger) -> None:
        key = next(iter(ledger.read()))
        assert redo(key, ledger).same
        line = ledger.read()[key]
        line["curve"][2][CURVE.index("soft")] += 0.25
        ledger.path.write_text(json.dumps(line) + "\n")
        again = redo(key, ledger)
        assert not again.same and again.largest == pytest.approx(0.25)
        with pytest.raises(ConfigError, match="redo"):
            redo("nothing", ledger)

    def test_a_users_file_is_part_of_the_id(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.py"
        path.write_text("from flowrl.credit import Uniform as Mine\n")
        config = tiny("uniform", 0, credit=f"{path}:Mine")
        before = config_hash(config)
        path.write_text("from flowrl.credit import Weighted as Mine\n")
        assert config_hash(config) != before


def test_the_code_hash_covers_what_runs_depend_on() -> None:
    """Training code is seen, pages are not."""
    root = records.PACKAGE
    names = {p.relative_to(root).as_posix() for p in root.rglob("*.py")}
    seen = {name for name in names if not records.unseen(name)}
    assert {"training/trainer.py", "credit/uniform.py", "rollout/rollout.py", "builtin.py", "worlds/mixture.py"} <= seen
    assert not any(name.startswith(("bench/", "plots/")) for name in seen)
    for name in (*records.SEEN_ANYWAY, *records.RULES):
        assert (root / name).is_file()
    for name in records.UNSEEN:
        assert (root / name).exists(), name


class TestRunner:
    def suite(self, path: Path) -> Suite:
        runs = needed({"tiny": TINY}, "mixture", {"mixture": (0, 1)})
        return Suite(runs, Ledger(path / "results.jsonl"), runs)

    def test_runs_resumes_and_pauses(self, tmp_path: Path) -> None:
        suite, seen = self.suite(tmp_path), []
        assert suite.runs and not suite.execute(1, minutes=0)
        assert suite.ledger.read() == {}

        def interrupt(done: int, total: int, line) -> None:
            seen.append((done, total))
            raise KeyboardInterrupt

        assert not suite.execute(1, interrupt)
        kept = suite.ledger.path.read_text()
        assert seen == [(1, 4)] and 1 <= kept.count("\n") < 4
        order = []
        assert suite.execute(1, lambda done, total, line: order.append(line["seed"]))
        assert suite.ledger.path.read_text().startswith(kept)
        assert order == sorted(order)
        assert set(suite.ledger.read(suite.allowed)) == set(suite.runs)
        assert suite.execute(1, interrupt)  # nothing is left to do
        found = evidence(TINY, "mixture", suite.ledger.read(), (0, 1))
        assert found is not None and found.seeds == (0, 1)

    def test_incomplete_seeds_are_left_out(self) -> None:
        lines = {line["id"]: line for line in (tiny_line("uniform", 0), tiny_line("random", 0), tiny_line("uniform", 1))}
        found = evidence(TINY, "mixture", lines, (0, 1, 2))
        assert found is not None and found.seeds == (0,)
        assert evidence(TINY, "mixture", {}, (0, 1)) is None


def test_planted_rules_are_ranked_first_and_last() -> None:
    """True advantages (Monte Carlo values) must lead every rule, and random credit must trail, by the whole interval.

    What is known to be better is found to be better; a suite that could not see this could see nothing.
    """
    short = {
        "iterations": 10, "eval_every": 1, "groups": 12, "group_size": 12, "eval_samples": 48, "eval_steps": 10, "num_steps": 5,
        "window": "0:3", "learning_rate": 4e-2,
    }  # fmt: skip
    arms = {
        "true": {"credit": "stepwise-gain(probe='continuation:6')"},
        "uniform": {},
        "turning points": {"method": "tp-grpo"},
        "random": {"credit": "random"},
    }  # fmt: skip
    seeds = (0, 1, 2)
    runs = {
        name: {"direction": [measure(make_run("mixture", "direction", seed, {**short, **arm})) for seed in seeds]}
        for name, arm in arms.items()
    }
    found = Evidence(runs, seeds)  # type: ignore[arg-type]
    levels = {name: level(found.values(name, "area")).value for name in arms}
    order = sorted(levels, key=lambda name: -levels[name])
    assert order[0] == "true" and order[-1] == "random"
    assert Beats("true", "uniform").judge(found).verdict == HOLDS
    assert Beats("uniform", "random").judge(found).verdict == HOLDS
    assert Beats("random", "true").judge(found).verdict == FAILS


class TestCommands:
    def test_list(self, capsys) -> None:
        assert main(["bench", "claims", "--list"]) == 0
        shown = capsys.readouterr().out
        assert all(f"{key}: " in shown for key in CLAIMS)

    def test_errors_are_one_line(self, capsys, tmp_path: Path) -> None:
        assert main(["bench", "claims", "--only", "nothing"]) == 2
        assert "only = 'nothing' is not allowed" in capsys.readouterr().err
        assert main(["bench", "rule", "nothing", "--out", str(tmp_path)]) == 2
        assert "unknown credit rule 'nothing'" in capsys.readouterr().err
        assert main(["bench", "microscope", "--noise", "0.1", "--iterations", "-1"]) == 2
        assert "iterations" in capsys.readouterr().err

    def test_judge_without_runs_writes_an_empty_page(self, tmp_path: Path, capsys) -> None:
        out = ["--out", str(tmp_path / "none.jsonl"), "--page", str(tmp_path / "page")]
        assert main(["bench", "claims", "--judge", *out]) == 0
        assert "no runs yet" in capsys.readouterr().out
        assert "No run has finished yet" in (tmp_path / "page" / "claims.md").read_text()


def test_the_page_of_a_rule_ranks_it(tmp_path: Path) -> None:
    claims = rule_claims("mine", "weighted")
    lines = {}
    level_of = {"uniform": 0.2, "stepwise gains": 0.4, "turning points": 0.3, "random": 0.0, "mine": 0.35}
    for claim in claims.values():
        assert arms_of(claim.rule) <= set(claim.arms)
        for arm, _, seed, config in claim.configs("mixture", (0, 1, 2)):
            rewards = [0.0, 0.1, level_of.get(arm, 0.25) + 0.001 * seed]
            lines[config_hash(config)] = {**make_line(config, fake_line(rewards), "-")}
    order = [rank.name for rank in ranking(claims, lines, (0, 1, 2))]
    assert order[:3] == ["stepwise gains", "mine", "turning points"] and order[-1] == "random"
    page = rule_page("mine", "weighted", claims, lines, (0, 1, 2), [], [{"world": "mixture", "arm": "mine", "peak_mib": 321.0}])
    text = page.write(tmp_path, "rule")[0].read_text()
    assert "`weighted` is number 2 of 6 by mean reward over training" in text
    assert "321" in text and "It beats uniform credit. | holds here" in text
    assert "It beats stepwise gains. | does not hold here" in text


def test_a_rule_goes_through_everything(tmp_path: Path) -> None:
    """Runs (made up here), microscope (tiny), memory (measured) and page, in one call; a paused suite still leaves a page."""

    def made_up(suite: Suite) -> bool:
        for config in suite.runs.values():
            suite.ledger.append(make_line(config, fake_line(FAST if config.algorithm.credit == "weighted" else SLOW), "-"))
        return True

    look = MicroscopeConfig(
        rules={"uniform": "uniform"}, iterations=(0,), noise_at=0, noises=(0.0,), members=2, continuations=2, batches=3,
        gradient_members=2, truth_batches=2,
    )  # fmt: skip
    assert not bench_rule("weighted", 2, tmp_path / "paused", lambda suite: False, lambda *_: None)
    assert "No seed is complete yet" in (tmp_path / "paused" / "rule.md").read_text()
    assert bench_rule("weighted", 2, tmp_path / "done", made_up, lambda *_: None, 1, look)
    text = (tmp_path / "done" / "rule.md").read_text()
    assert "`weighted` is number 1 of 6" in text and "rule-steps.png" in text
    memory = next(line for line in text.splitlines() if line.startswith("| 2-D world | weighted |")).split("|")[-2]
    assert float(memory) > 100  # MiB: torch alone is more
    with pytest.raises(ConfigError, match="unknown credit rule"):
        bench_rule("nothing", 2, tmp_path / "none", lambda suite: True, lambda *_: None)
