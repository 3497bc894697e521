"""`flowrl bench rule` and `flowrl bench microscope`: names, results folders, what is refused, and the files that are written."""

import json
from pathlib import Path

import flowrl_bench.rule as bench
import pytest
from flowrl_bench.document import Document
from flowrl_bench.inspection import RULES
from flowrl_bench.measure import CURVE, PHASES, TOTALS
from flowrl_bench.records import make_line
from flowrl_bench.rule import RIVAL_SPECS, RIVALS, bench_rule, rule_claims, rule_page
from flowrl_bench.rule_names import identity, named_rules, results_folder
from flowrl_bench.runner import Suite

from flowrl.cli import main
from flowrl.errors import ConfigError, CreditError

RULE = """
from dataclasses import dataclass
from flowrl.types import NoProbe

@dataclass(frozen=True)
class {name}:
    scale: float = 1.0
    probe = NoProbe()
    def assign(self, rewards, schedule):
        steps = rewards.shape[-1] - 1
        centred = rewards[..., -1:] - rewards[..., -1:].mean(1, keepdim=True)
        return self.scale * centred.repeat(1, 1, {steps})
"""


def rule_file(path: Path, name: str = "Mine", steps: str = "steps") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RULE.format(name=name, steps=steps))
    return path


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
        monkeypatch.setattr(bench, "inspect", lambda *_: [])
        monkeypatch.setattr(bench, "peak_memory", lambda *_: [])
        monkeypatch.setattr(bench, "rule_page", lambda *_: Document("No page"))
        monkeypatch.setattr(
            bench, "rule_claims", lambda *rule: {key: rule_claims(*rule)[key] for key in ("beats-uniform", "steps")}
        )

    def bench(self, spec: str, seeds: int = 2, out: Path | None = None) -> int:
        """How many runs were made."""
        made = 0

        def execute(suite: Suite) -> bool:
            nonlocal made
            done = suite.ledger.read(suite.allowed)
            for key, config in suite.runs.items():
                if key not in done:
                    suite.ledger.append(line_of(config))
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
        assert results_folder("./v1.py:Mine", RIVAL_SPECS) == Path("runs/rule-Mine")

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
        lines = [{**json.loads(text), "code": "0", "commit": "0123abc"} for text in results.read_text().splitlines()]
        results.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(ConfigError, match=r"other code of flowrl .commit 0123abc.: choose another --out, or delete"):
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
        with pytest.raises(ConfigError, match="workers = -1 is not allowed: 0"):
            bench_rule("weighted", 2, None, lambda _: True, lambda *_: None, -1)


class TestMicroscopeCommand:
    def test_results_and_page_go_where_they_are_told(self, tmp_path: Path, monkeypatch, capsys) -> None:
        seen = []

        def rows(config, workers, _) -> list[dict]:
            seen.append(config)
            measured = {"value": 0.5, "low": 0.4, "high": 0.6}
            numbers = dict.fromkeys(("correlation", "sign", "bias"), measured)
            row = {"kind": "credit", "iteration": 10, "noise": 0.0, "nfe_per_trajectory": 10.0, **numbers, "steps": [0]}
            return [{**row, "rule": name, "spec": spec, "per_step": [numbers]} for name, spec in config.rules.items()]

        monkeypatch.setattr("flowrl_bench.inspection.inspect", rows)
        monkeypatch.chdir(tmp_path)
        mine = [rule_file(tmp_path / "v1.py"), rule_file(tmp_path / "sub" / "v2.py")]
        told = ["--out", "results/looked.json", "--page", "docs", "--noise", "0", "--iterations", "10", "--seed", "3"]
        assert main(["bench", "microscope", "--rules", *(f"{path}:Mine" for path in mine), *told]) == 0
        kept = json.loads(Path("results/looked.json").read_text())
        assert {"command", "commit", "versions", "hardware", "code", "seed", "seeds", "config", "rows"} <= set(kept)
        assert kept["seeds"] == {"training": 3, "looks": [3], "continuations": [10], "truth": 4, "gradients": 1003}
        assert {row["rule"] for row in kept["rows"]} == {*RULES, "v1:Mine", "v2:Mine"}
        assert seen[0].noises == (0.0,)
        page = Path("docs/microscope.md").read_text()
        assert kept["commit"] in page and "](microscope/credit.png)" in page and Path("docs/microscope.html").exists()
        assert {path.name for path in Path("docs/microscope").iterdir()} == {"credit.png", "steps.png"}
        assert "looked.json" in capsys.readouterr().out
        assert main(["bench", "microscope", "--noise", "0", "--iterations", "10"]) == 0
        assert {path.name for path in Path("runs/microscope").iterdir()} == {
            "microscope.json", "microscope.md", "microscope.html", "microscope",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("told", "message"),
        [
            (["--noise", "-0.1"], "noises = (0.0, -0.1) is not allowed"),
            (["--batches", "2"], "batches = 2 is not allowed: 3 or more"),
            (["--workers", "-1"], "workers = -1 is not allowed"),
            (["--rules", "uniform"], "rule = 'uniform' is not allowed"),
            (["--rules", "my.py:Mine"], "rule 'Mine': Mine.assign returned shape"),
        ],
    )
    def test_errors_are_one_line(self, tmp_path: Path, monkeypatch, capsys, told: list[str], message: str) -> None:
        monkeypatch.chdir(tmp_path)
        rule_file(tmp_path / "my.py", steps="(steps + 1)")
        assert main(["bench", "microscope", *told]) == 2
        assert message in capsys.readouterr().err
        assert not Path("runs").exists()
