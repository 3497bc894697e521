"""A rule of your own: its name, its results folder, what is refused, the ranking, and the page."""

import json
from pathlib import Path

import flowrl_bench.rule_ranking as bench
import pytest
from bench_lines import FAST, SLOW, arms_of, fake_line, rule_file
from flowrl_bench.digest import config_id
from flowrl_bench.measurements import CURVE, PHASES, TOTALS
from flowrl_bench.microscope import RULES, MicroscopeConfig
from flowrl_bench.page import Document
from flowrl_bench.results_file import make_line
from flowrl_bench.rule_ranking import (
    RIVALS,
    bench_rule,
    identity,
    named_rules,
    ranking,
    results_folder,
    rule_claims,
    rule_page,
)
from flowrl_bench.suite import Suite

from flowrl.cli import main
from flowrl.errors import ConfigError, CreditError


class TestNames:
    def test_a_rule_is_called_by_its_class(self) -> None:
        assert named_rules(["a/v1.py:Mine", "weighted", "package.module:Other"], RULES) == {
            "Mine": "a/v1.py:Mine", "weighted": "weighted", "package.module:Other": "package.module:Other",
        }  # fmt: skip

    def test_one_class_in_two_files(self) -> None:
        specs = ["v1.py:Mine", "sub/v2.py:Mine", "sub/v2.py:Mine(scale=2)"]
        assert list(named_rules(specs)) == ["v1:Mine", "v2:Mine", "Mine(scale=2)"]
        assert list(named_rules(["a/v.py:Mine", "b/v.py:Mine"])) == ["a/v.py:Mine", "b/v.py:Mine"]
        assert list(named_rules(["v1:Mine", "v1.py:Mine", "b/v2.py:Mine"])) == ["v1:Mine", "v1.py:Mine", "v2:Mine"]

    def test_a_class_that_is_called_like_a_built_in_rule(self) -> None:
        assert named_rules(["x.py:uniform"], RULES) == {"x:uniform": "x.py:uniform"}

    @pytest.mark.parametrize("specs", [["uniform"], ["weighted", "weighted"], ["x.py:Mine", "./x.py:Mine"]])
    def test_what_cannot_be_told_apart_is_refused(self, specs: list[str]) -> None:
        with pytest.raises(ConfigError, match=r"rule = .* is not allowed"):
            named_rules(specs, RULES)

    def test_identity(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        spellings = ("my.py:Mine", "./my.py:Mine", f"{tmp_path}/sub/../my.py:Mine")
        assert len({identity(spec) for spec in spellings}) == 1
        others = ("my.py:Mine(scale=2)", "my.py:Other", "sub/my.py:Mine", "weighted")
        assert len({identity(spec) for spec in (*spellings, *others)}) == 5


def test_a_rule_does_not_run_against_itself(tmp_path: Path, capsys) -> None:
    for name in RIVALS:
        with pytest.raises(ConfigError, match="name of the rule"):
            rule_claims(name, "weighted")
    for spec in ("uniform", "random"):
        assert main(["bench", "rule", spec, "--out", str(tmp_path)]) == 2
        assert f"rule = '{spec}' is not allowed" in capsys.readouterr().err
    claims = rule_claims("x:uniform", "x.py:uniform")
    arms = claims["beats-uniform"].arms
    assert arms["uniform"] == {"method": "flow-grpo"} and arms["x:uniform"] == {"credit": "x.py:uniform"}


def line_of(config) -> dict:
    curve = [[i, 10.0 * i, 5.0 * i, float(i), *[0.1 * i] * 4, 0.0, 1.0] for i in (0, 2, 4)]
    assert len(curve[0]) == len(CURVE)
    found = {
        "curve": curve,
        "totals": {**dict.fromkeys(TOTALS, 10.0), "trajectories": 4},
        "phases": dict.fromkeys(PHASES, 0.1),
        "gains": None,
    }
    return make_line(config, found, "-")


class TestResults:
    """What lies in a folder is used where it can be, and else one sentence says what to do. What is run is made up."""

    @pytest.fixture(autouse=True)
    def made_up(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(bench, "run_microscope", lambda *_: [])
        monkeypatch.setattr(bench, "arm_memory", lambda *_: [])
        monkeypatch.setattr(bench, "rule_page", lambda *_: Document(f"No page{bench.TITLE}", kind=bench.TITLE))
        monkeypatch.setattr(
            bench, "rule_claims", lambda *rule: {key: rule_claims(*rule)[key] for key in ("beats-uniform", "steps")}
        )

    def bench(self, spec: str, seeds: int = 2, out: Path | None = None) -> int:
        """How many runs were made."""
        made = 0

        def execute(suite: Suite) -> bool:
            nonlocal made
            done = suite.file.read(suite.allowed)
            for key, config in suite.runs.items():
                if key not in done:
                    suite.file.append(line_of(config))
                    made += 1
            return True

        assert bench_rule(spec, seeds, out, execute, lambda *_: None, 1)
        return made

    def test_fewer_seeds_use_what_is_there(self, tmp_path: Path, monkeypatch) -> None:
        rule_file(tmp_path / "my.py")
        assert self.bench("my.py:Mine", 3) == 3 * 9
        with monkeypatch.context() as patch:
            patch.setattr(bench, "rule_page", rule_page)
            assert self.bench("my.py:Mine", 2) == 0
        page = Path("runs/rule-Mine/rule.md").read_text()
        costs = [line for line in page.splitlines() if line.startswith("| 2-D world |")]
        assert "2-D world, 2 seeds" in page and costs and all(line.split("|")[3].strip() == "2" for line in costs)
        assert self.bench("my.py:Mine", 4) == 9

    def test_another_spelling_of_the_path(self, tmp_path: Path) -> None:
        path = rule_file(tmp_path / "my.py")
        self.bench("my.py:Mine")
        assert self.bench("./my.py:Mine") == self.bench(f"{path}:Mine") == 0
        assert [folder.name for folder in Path("runs").iterdir()] == ["rule-Mine"]

    def test_two_rules_of_one_name_have_folders_of_their_own(self, tmp_path: Path) -> None:
        for place in ("v1.py", "sub/v2.py", "other/v2.py"):
            rule_file(tmp_path / place)
            assert self.bench(f"{place}:Mine") > 0
        names = {"rule-Mine", "rule-v2_Mine", "rule-other_v2.py_Mine"}
        assert {folder.name for folder in Path("runs").iterdir()} == names
        assert self.bench("sub/v2.py:Mine") == 0
        assert results_folder("./v1.py:Mine") == Path("runs/rule-Mine")

    def test_an_edited_rule_says_what_to_do(self, tmp_path: Path) -> None:
        rule_file(tmp_path / "my.py")
        self.bench("my.py:Mine")
        with (tmp_path / "my.py").open("a") as file:
            file.write("# changed\n")
        with pytest.raises(ConfigError, match=r"before its file was changed: choose another --out, or delete .*results.jsonl"):
            self.bench("my.py:Mine")
        assert self.bench("my.py:Mine", out=tmp_path / "anew") > 0

    def test_other_code_and_another_rule_say_what_to_do(self, tmp_path: Path) -> None:
        rule_file(tmp_path / "my.py")
        rule_file(tmp_path / "other.py")
        self.bench("my.py:Mine", out=tmp_path / "out")
        with pytest.raises(ConfigError, match=r"another rule, my.py:Mine: choose another --out, or delete"):
            self.bench("other.py:Mine", out=tmp_path / "out")
        results = tmp_path / "out" / "results.jsonl"
        lines = [
            {**json.loads(text), "golden": [0.0], "code": "0", "commit": "0123abc"} for text in results.read_text().splitlines()
        ]
        results.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(ConfigError, match=r"other numbers in the golden run .0, commit 0123abc, .*choose another --out"):
            self.bench("my.py:Mine", out=tmp_path / "out")

    def test_a_line_names_the_command_that_makes_it_again(self, tmp_path: Path) -> None:
        rule_file(tmp_path / "my.py")
        commands = []
        assert not bench_rule("my.py:Mine", 2, None, lambda suite: bool(commands.append(suite.command)), lambda *_: None)
        assert commands == ["flowrl bench claims --out runs/rule-Mine/results.jsonl"]

    @pytest.mark.parametrize(("steps", "message"), [("(steps + 1)", "not .prompt, member, step."), ("min(steps, 10)", "20")])
    def test_a_broken_rule_is_refused_before_any_run(self, tmp_path: Path, steps: str, message: str) -> None:
        """The second one breaks in the runs of 20 steps only."""
        rule_file(tmp_path / "my.py", steps=steps)
        with pytest.raises(CreditError, match=f"Mine.assign returned shape.*{message}"):
            self.bench("my.py:Mine")
        assert not Path("runs").exists()

    def test_workers(self) -> None:
        with pytest.raises(ConfigError, match="workers = -1 is not allowed: 1 or more, or 0"):
            bench_rule("weighted", 2, None, lambda _: True, lambda *_: None, -1)


def test_the_page_of_a_rule_ranks_it(tmp_path: Path) -> None:
    claims = rule_claims("mine", "weighted")
    lines = {}
    level_of = {"uniform": 0.2, "stepwise gains": 0.4, "turning points": 0.3, "random": 0.0, "mine": 0.35}
    for claim in claims.values():
        assert arms_of(claim.rule) <= set(claim.arms)
        for arm, _, seed, config in claim.configs("mixture", (0, 1, 2)):
            rewards = [0.0, 0.1, level_of.get(arm, 0.25) + 0.001 * seed]
            lines[config_id(config)] = {**make_line(config, fake_line(rewards), "-")}
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
            suite.file.append(make_line(config, fake_line(FAST if config.algorithm.credit == "weighted" else SLOW), "-"))
        return True

    look = MicroscopeConfig(
        rules={"uniform": "uniform"}, iterations=(0,), noise_stage=0, noises=(0.0,), group_size=2, continuations=2,
        batches=3, gradient_group_size=2, truth_batches=2,
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
