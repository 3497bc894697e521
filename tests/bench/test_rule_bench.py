"""A rule of your own against tuned baselines: its name and folder, what is refused, the runs, their
time, verdicts and page.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import flowrl_bench.rule_bench as module
import numpy as np
import pytest
from bench_lines import SMALL, fake_line, here, rule_file
from flowrl_bench import rule_plan, tune
from flowrl_bench.arms import ARMS, SHORT, Arm, own_arm, tuned
from flowrl_bench.evidence import Evidence
from flowrl_bench.measurements import measure
from flowrl_bench.microscope import RULES
from flowrl_bench.results_file import make_line
from flowrl_bench.rule_bench import Bench, bench_rule
from flowrl_bench.rule_names import identity, named_rules, results_folder
from flowrl_bench.rule_page import World, judged, sentence
from flowrl_bench.rule_plan import (
    FULL,
    PROBES,
    QUICK,
    Clock,
    Cost,
    Key,
    Part,
    make_parts,
    makespan,
)
from flowrl_bench.suite import Suite
from flowrl_bench.verdicts import ALIKE, BETTER, UNDECIDED, WORSE

from flowrl.core.errors import ConfigError, CreditError


class TestNames:
    def test_a_rule_is_called_by_its_class(self) -> None:
        assert named_rules(["a/v1.py:Mine", "weighted", "package.module:Other"], RULES) == {
            "Mine": "a/v1.py:Mine",
            "weighted": "weighted",
            "package.module:Other": "package.module:Other",
        }

    def test_one_class_in_two_files(self) -> None:
        specs = ["v1.py:Mine", "sub/v2.py:Mine", "sub/v2.py:Mine(scale=2)"]
        assert list(named_rules(specs)) == ["v1:Mine", "v2:Mine", "Mine(scale=2)"]
        assert list(named_rules(["a/v.py:Mine", "b/v.py:Mine"])) == ["a/v.py:Mine", "b/v.py:Mine"]
        assert list(named_rules(["v1:Mine", "v1.py:Mine", "b/v2.py:Mine"])) == [
            "v1:Mine",
            "v1.py:Mine",
            "v2:Mine",
        ]

    def test_a_class_that_is_called_like_a_built_in_rule(self) -> None:
        assert named_rules(["x.py:uniform"], RULES) == {"x:uniform": "x.py:uniform"}

    @pytest.mark.parametrize(
        "specs", [["uniform"], ["weighted", "weighted"], ["x.py:Mine", "./x.py:Mine"]]
    )
    def test_what_cannot_be_told_apart_is_refused(self, specs: list[str]) -> None:
        with pytest.raises(ConfigError, match=r"rule = .* is not allowed"):
            named_rules(specs, RULES)

    def test_identity(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        spellings = ("my.py:Mine", "./my.py:Mine", f"{tmp_path}/sub/../my.py:Mine")
        assert len({identity(spec) for spec in spellings}) == 1
        others = ("my.py:Mine(scale=2)", "my.py:Other", "sub/my.py:Mine", "weighted")
        assert len({identity(spec) for spec in (*spellings, *others)}) == 5


class TestPlan:
    @pytest.mark.parametrize("part", [*FULL.values(), *QUICK.values()])
    def test_all_arms_have_the_same_budget_and_seeds(self, part: Part) -> None:
        """Everything is equal but the method and what was tuned; no search and no other result has
        the seeds.
        """
        rule = replace(ARMS["stepwise gains"], name="mine")
        arms = part.arms(rule, tuned(part.world, "uniform"))
        assert set(arms) == {*part.baselines, "mine"} and part.numbers == tuple(
            range(200, 200 + part.seeds)
        )
        for place in range(part.seeds):
            left = []
            for runs in arms.values():
                flat = runs[place].flat()
                tuned_names = ("method", "credit", "clip_range", "learning_rate", "noise_level")
                left.append(
                    {name: value for name, value in flat.items() if name not in tuned_names}
                )
            assert all(one == left[0] for one in left)
        for name in part.baselines:
            assert {arms[name][0].flat()[knob] for knob in tuned(part.world, name)} == set(
                tuned(part.world, name).values()
            )

    def test_options(self) -> None:
        assert [(p.world, p.budget, p.seeds) for p in make_parts()] == [
            ("mixture", 12, 20),
            ("shapes", 6, 8),
        ]
        assert [(p.world, p.budget, p.seeds) for p in make_parts(True)] == [
            ("mixture", 6, 8),
            ("shapes", 0, 4),
        ]
        assert make_parts(True, "shapes", 4, 3) == [Part("shapes", 3, 4, ("uniform",))]
        for options, name in (({"seeds": 1}, "seeds"), ({"budget": -2}, "budget")):
            with pytest.raises(ConfigError, match=f"{name} = .* is not allowed"):
                make_parts(**options)
        with pytest.raises(ConfigError, match="unknown world 'x'"):
            make_parts(world="x")


class TestTime:
    @pytest.mark.parametrize("speed", [0.85, 1.0, 1.2])
    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_the_estimate_is_within_a_quarter(self, workers: int, speed: float) -> None:
        """Simulated: every run takes its cost times the machine's `speed` times noise of 20%, from
        the first run on; the estimate is updated on the way, and ends at 0.
        """
        generator = np.random.default_rng(7)
        cost = {
            ("mixture", "uniform"): 3.0,
            ("mixture", "mine"): 4.0,
            ("shapes", "uniform"): 45.0,
            ("shapes", "mine"): 70.0,
        }
        searches = {"mixture": [2.0] * 12, "shapes": [55.0] * 6}
        keys: list[Key] = [(world, arm, seed) for seed in range(200, 208) for world, arm in cost]
        clock = Clock(
            {k: list(v) for k, v in searches.items()},
            {key: cost[key[0], key[1]] for key in keys},
            workers,
        )

        def took(seconds: float) -> float:
            return seconds * speed * float(generator.lognormal(0.0, 0.2))

        chains = [[took(seconds) for seconds in chain] for chain in searches.values()]
        runs = {key: took(cost[key[0], key[1]]) for key in keys}
        first = makespan([sum(chain) for chain in chains], min(workers, 2))
        total = first + makespan(list(runs.values()), workers)
        assert clock.seconds() == pytest.approx(total, rel=0.25)
        for world in searches:
            for _ in searches[world]:
                clock.searched(world)
        assert clock.seconds(first) == pytest.approx(total - first, rel=0.2)
        elapsed = first
        for key in keys:
            clock.finished(key)
            elapsed += runs[key] / workers
            assert abs(clock.seconds(elapsed) - (total - elapsed)) < 0.25 * total
        assert clock.seconds(elapsed) == 0.0


def world_of(
    spread: float = 0.0,
    seeds: int = 8,
    seed: int = 0,
    world: str = "mixture",
    nfe: float = 100.0,
    **arms: float,
) -> World:
    """Arms whose reward rises at once to a level with noise of `spread` per run; evaluations of
    "mine" cost `nfe`.
    """
    generator = np.random.default_rng(seed)
    part = replace(FULL[world], seeds=seeds)
    runs = {}
    for arm, level in arms.items():
        lines = [
            fake_line(
                [level + spread * float(generator.normal())] * 5, nfe if arm == "mine" else 100.0
            )
            for _ in range(seeds)
        ]
        runs[arm.replace("_", " ")] = {part.task: lines}
    part = replace(part, baselines=tuple(arm for arm in runs if arm != "mine"))
    return World(part, Evidence(runs, part.numbers), {arm: {"learning_rate": 0.02} for arm in runs})


class TestFindings:
    def test_a_known_effect_is_found(self) -> None:
        (found,) = judged(
            "mine",
            [world_of(0.01, uniform=0.4, stepwise_gains=0.6, turning_points=0.501, mine=0.5)],
        )
        sizes = {(f.baseline, f.budget): f.comparison.size for f in found.findings}
        assert {sizes["uniform", b] for b in ("updates", "evaluations", "seconds")} == {BETTER}
        assert {sizes["stepwise gains", b] for b in ("updates", "evaluations", "seconds")} == {
            WORSE
        }
        assert {sizes["turning points", b] for b in ("updates", "evaluations", "seconds")} == {
            ALIKE
        }
        assert len(sizes) == 9

    def test_a_copy_of_uniform_is_neither_better_nor_worse(self) -> None:
        """Family-wise error 5%: of 60 pages of a rule that is no different from the baselines, 8 or
        more with a better or worse has a probability below 0.02.
        """
        false = 0
        for seed in range(60):
            worlds = [world_of(0.05, seed=2 * seed, uniform=0.5, turning_points=0.5, mine=0.5)]
            worlds.append(world_of(0.05, 4, 2 * seed + 1, "shapes", uniform=0.5, mine=0.5))
            false += any(
                f.comparison.size in (BETTER, WORSE)
                for world in judged("mine", worlds)
                for f in world.findings
            )
        assert false < 8

    @pytest.mark.parametrize(
        ("level", "spread", "words"),
        [(0.5, 0.01, BETTER), (0.3, 0.01, WORSE), (0.4, 0.001, ALIKE), (0.41, 0.1, UNDECIDED)],
    )
    def test_the_sentence_for_each_outcome(self, level: float, spread: float, words: str) -> None:
        (found,) = judged("mine", [world_of(spread, seed=1, uniform=0.4, mine=level)])
        text = sentence("mine", found)
        against = f"mine against uniform: {words} at equal updates, evaluations and seconds."
        assert text.startswith(f"2-D world, 8 seeds. {against}")
        power = re.search(
            r"Differences in mean reward of 0\.\d{3}.* would have been found with a probability of"
            r" 80%\.$",
            text,
        )
        assert bool(power) == (words == UNDECIDED)


TINY = {name: value for name, value in SMALL.items() if name != "arm"} | {"eval_samples": 18}


class TestFolder:
    """Whole comparisons of tiny runs in the 2-D world, in this process."""

    @pytest.fixture(autouse=True)
    def tiny(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(rule_plan.LENGTH, "mixture", TINY)
        monkeypatch.setitem(SHORT, "mixture", TINY)
        monkeypatch.setitem(PROBES, "mixture", {"iterations": 1, "eval_samples": 18})
        monkeypatch.setattr(tune, "run_jobs", here)
        monkeypatch.setattr("flowrl_bench.results_file.golden_run", lambda: (1.0,))  # else seconds
        monkeypatch.setattr(
            module, "costs", lambda arms, workers: dict.fromkeys(arms, Cost(1.0, 0.0))
        )
        self.made: list[str] = []
        self.most = 1000

        def execute(suite: Suite, workers: int = 0, progress: Callable = lambda *_: None) -> bool:
            done = suite.file.read(suite.allowed)
            for key, config in suite.runs.items():
                if key not in done and len(self.made) >= self.most:
                    return False
                if key not in done:
                    line = make_line(config, measure(config), "-", key)  # type: ignore[arg-type]
                    suite.file.append(line)
                    self.made.append(key)
                    progress(len(self.made), len(suite.runs), line)
            return True

        monkeypatch.setattr(Suite, "execute", execute)

    def bench(
        self,
        spec: str | Arm,
        seeds: int = 2,
        out: Path | None = None,
        budget: int = 0,
        say: Callable = lambda _: None,
    ) -> int:
        """How many runs of the results were made."""
        before = len(self.made)
        finished = bench_rule(spec, [Part("mixture", budget, seeds)], out, 1, say=say)
        assert finished == (len(self.made) < self.most)
        return len(self.made) - before

    def test_a_copy_of_uniform_has_its_numbers(self, tmp_path: Path) -> None:
        (tmp_path / "my.py").write_text(
            "from flowrl.credit import Uniform\n\n\nclass Copy(Uniform):\n    pass\n"
        )
        said: list[str] = []
        assert self.bench("my.py:Copy", say=said.append) == 2 * 4
        text = "\n".join(said)
        row = next(line for line in text.splitlines() if line.startswith("uniform "))
        assert row.count("+0.000 no difference") >= 2
        assert "8 runs to make in runs/rule-Copy: about 28 seconds; Ctrl-C pauses" in text
        assert self.bench("my.py:Copy") == 0 and self.bench("my.py:Copy", 3) == 4

    def test_an_arm_with_a_loss_of_its_own(self, tmp_path: Path) -> None:
        """It runs in a folder of its name, found again by other spellings of its parts, and by no
        other settings.
        """
        (tmp_path / "my.py").write_text(
            "from flowrl.losses import ClippedLoss\n\n\nclass Copy(ClippedLoss):\n    pass\n"
        )
        said: list[str] = []
        arm = own_arm("copy", {"loss": "my.py:Copy(kl='without_delta')"})
        assert set(arm.knobs) == {"learning_rate", "clip_range", "noise_level"}
        assert self.bench(arm, budget=2, say=said.append) == 2 * 4
        lines = [
            json.loads(text)
            for text in Path("runs/rule-copy/results.jsonl").read_text().splitlines()
        ]
        losses = [line["config"]["algorithm"]["loss"] for line in lines]
        assert losses.count("my.py:Copy(kl='without_delta')") == 2 and losses.count("") == 6
        page = Path("runs/rule-copy/rule.md").read_text()
        assert (
            "The rule is `loss=my.py:Copy(kl='without_delta')`" in page and "microscope" not in page
        )
        assert (
            self.bench(
                own_arm("copy", {"loss": f"{tmp_path}/my.py:Copy(kl=without_delta)"}), budget=2
            )
            == 0
        )
        with pytest.raises(
            ConfigError, match=r"another rule, loss=my\.py:Copy\(.*\): choose another --out"
        ):
            self.bench(own_arm("copy", {"loss": "my.py:Copy"}), budget=2)
        with (tmp_path / "my.py").open("a") as file:
            file.write("# changed\n")
        with pytest.raises(ConfigError, match=r"before its file was changed: choose another --out"):
            self.bench(arm, budget=2)

    def test_search_pause_and_resume(self, tmp_path: Path) -> None:
        rule_file(tmp_path / "my.py")
        self.most = 3
        assert self.bench("my.py:Mine", budget=3) == 3
        tuning = Path("runs/rule-Mine/tuning.jsonl").read_text()
        assert tuning.count("\n") == 3 and not Path("runs/rule-Mine/rule.md").exists()
        self.most = 1000
        assert self.bench("./my.py:Mine", budget=3) == 5
        assert Path("runs/rule-Mine/tuning.jsonl").read_text() == tuning
        best = Bench("my.py:Mine", [Part("mixture", 3, 2)]).values(Part("mixture", 3, 2))
        lines = [
            json.loads(text)
            for text in Path("runs/rule-Mine/results.jsonl").read_text().splitlines()
        ]
        mine = [
            line["config"]["algorithm"]
            for line in lines
            if line["config"]["algorithm"]["credit"] == "my.py:Mine"
        ]
        assert (
            best is not None
            and len(mine) == 2
            and {run["clip_range"] for run in mine} == {best["clip_range"]}
        )
        assert "Not tuned" not in Path("runs/rule-Mine/rule.md").read_text()

    def test_two_rules_of_one_name_have_folders_of_their_own(self, tmp_path: Path) -> None:
        for place in ("v1.py", "sub/v2.py", "other/v2.py"):
            rule_file(tmp_path / place)
            assert self.bench(f"{place}:Mine") == 8
        names = {"rule-Mine", "rule-v2_Mine", "rule-other_v2.py_Mine"}
        assert {folder.name for folder in Path("runs").iterdir()} == names
        assert self.bench(f"{tmp_path}/sub/v2.py:Mine") == 0
        assert results_folder("./v1.py:Mine") == Path("runs/rule-Mine")

    def test_an_edited_rule_says_what_to_do(self, tmp_path: Path) -> None:
        """Also if only its search has runs."""
        rule_file(tmp_path / "my.py")
        self.most = 0
        bench_rule("my.py:Mine", [Part("mixture", 1, 2)], None, 1, say=lambda _: None)
        assert not Path("runs/rule-Mine/results.jsonl").exists()
        self.most = 1000
        with (tmp_path / "my.py").open("a") as file:
            file.write("# changed\n")
        with pytest.raises(
            ConfigError,
            match=r"before its file was changed: choose another --out, or delete tuning.jsonl and",
        ):
            self.bench("my.py:Mine")
        assert self.bench("my.py:Mine", out=tmp_path / "anew") > 0

    def test_other_code_and_another_rule_say_what_to_do(self, tmp_path: Path) -> None:
        rule_file(tmp_path / "my.py")
        rule_file(tmp_path / "other.py")
        self.bench("my.py:Mine", out=tmp_path / "out")
        with pytest.raises(
            ConfigError, match=r"another rule, my.py:Mine: choose another --out, or delete"
        ):
            self.bench("other.py:Mine", out=tmp_path / "out")
        results = tmp_path / "out" / "results.jsonl"
        lines = [
            {**json.loads(text), "golden": [0.0], "commit": "0123abc"}
            for text in results.read_text().splitlines()
        ]
        results.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(
            ConfigError, match=r"other numbers in the golden run .*0123abc.*choose another --out"
        ):
            self.bench("my.py:Mine", out=tmp_path / "out")

    def test_a_broken_rule_is_refused_before_any_run(self, tmp_path: Path) -> None:
        rule_file(tmp_path / "my.py", steps="(steps + 1)")
        with pytest.raises(
            CreditError,
            match=r"Mine.assign returned .*not floating point of shape .prompt, member, decision.",
        ):
            self.bench("my.py:Mine")
        assert not Path("runs").exists()
