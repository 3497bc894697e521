"""Arms of a comparison: what is refused, what is converted, and what reports say about them."""

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowrl.cli.main import main
from flowrl.cli.progress import Display
from flowrl.cli.report import headline, table_text, write_report
from flowrl.core.errors import ConfigError
from flowrl.training.arms import arm_run, credit_arms, load_arms, method_arms, parse_arm, together
from flowrl.training.compare import CompareConfig, load_compare
from flowrl.training.config import RunConfig, preset
from flowrl.training.format import current_comparison
from flowrl.training.plan import plan
from flowrl.training.results import load_comparison, run_folder, summarise, summary_values

TINY = preset("tiny").apply(world="mixture")
PARTS = """
from dataclasses import dataclass
from flowrl.losses import PolicyGradientLoss
from flowrl.samplers import FlowSDE

@dataclass(frozen=True)
class ReinforceKL(PolicyGradientLoss):
    pass

@dataclass(frozen=True)
class DecaySDE(FlowSDE):
    pass
"""


def configured(**arms: Mapping[str, Any]) -> CompareConfig:
    return CompareConfig(TINY, arms, (0,))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"clip_rang": 0.1},
            r"arm 'b': unknown setting 'clip_rang' \(did you mean 'clip_range'\?\)",
        ),
        (
            {"clip_range": "small"},
            r"arm 'b': clip_range = 'small' is not allowed; allowed: a number, 0 or more",
        ),
        (
            {"group_size": 2.5},
            r"arm 'b': group_size = 2.5 is not allowed; allowed: a whole number, 2 or more",
        ),
        ({"seed": 1}, r"arm 'b': seed = 1 is not allowed; allowed: left out"),
        ({"loss": "gspo("}, r"arm 'b': .*cannot be read"),
        ({}, r"arm = 'b' is not allowed; allowed: settings that differ from those of 'a'"),
        (
            {"group_size": 3},
            r"arm = 'b' is not allowed; allowed: settings that differ from those of 'a'",
        ),
        (
            {"world": "shapes", "task": "text"},
            r"arm 'b': world = 'shapes' is not allowed; allowed: 'mixture', as for 'a'",
        ),
        ({"eval_steps": 7}, r"arm 'b': eval_steps = 7 is not allowed; allowed: 4, as for 'a'"),
        (
            {"reward_form": "strict"},
            (
                r"heldout_rewards = \(\) is not allowed; allowed: one or more: arms .* different"
                r" rewards"
            ),
        ),
    ],
)
def test_what_an_arm_may_not_be(settings: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        configured(a={}, b=settings)


@pytest.mark.parametrize("name", ["", " a", "a\n", "\x1b[2J", "x" * 300])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"arm = .* is not allowed; allowed: a name"):
        configured(base={}, **{name: {"loss": "gspo"}})


def test_two_arms_never_share_a_folder() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"arm = 'A_B' is not allowed; allowed: a name whose folder is not that of 'a b',"
            r" a_b-seed0"
        ),
    ):
        configured(**{"a b": {}, "A_B": {"loss": "gspo"}})


def test_spellings_of_one_part_are_equal_settings() -> None:
    with pytest.raises(ConfigError, match="settings that differ from those of 'a'"):
        configured(a={"loss": "my.py:L(x=1)"}, b={"loss": "./my.py:L( x = 1 )"})
    configured(a={"loss": "my.py:L(x=1)"}, b={"loss": "my.py:L(x=2)"})


def test_an_unknown_part_is_an_error_of_its_arm() -> None:
    with pytest.raises(ConfigError, match=r"arm 'b': unknown loss 'gspx'.*did you mean 'gspo'"):
        configured(a={}, b={"loss": "gspx"}).jobs()


def test_a_method_has_its_own_credit_rule() -> None:
    run = TINY.replace(method="mine", credit="gdpo")
    assert arm_run(run, {"method": "tp-grpo"}).algorithm.credit == ""
    assert arm_run(run, {"loss": "gspo"}).algorithm.credit == "gdpo"
    assert arm_run(run, {"method": "other", "credit": "uniform"}).algorithm.credit == "uniform"


def test_arms_as_text() -> None:
    assert parse_arm("gspo: loss=my.py:GSPO(x=[1, 2]), clip_range=.1, window=1:3") == {
        "gspo": {"loss": "my.py:GSPO(x=[1, 2])", "clip_range": 0.1, "window": "1:3"}
    }
    assert parse_arm("base:") == {"base": {}} and parse_arm("a:loss=gspo") == {
        "a": {"loss": "gspo"}
    }
    for text in ("gspo", "loss=my.py:GSPO", ": loss=gspo"):
        with pytest.raises(
            ConfigError, match=r"arm = .* is not allowed; allowed: 'NAME: setting=value"
        ):
            parse_arm(text)
    with pytest.raises(ConfigError, match=r"arm 'a' = .*cannot be read"):
        parse_arm("a: loss")
    with pytest.raises(ConfigError, match="there are two arms of this name"):
        together(parse_arm("a:"), parse_arm("a: loss=gspo"))


def test_arms_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arms.yaml"
    path.write_text(
        "arms:\n  base:\n  gspo: {loss: gspo, learning_rate: 1e-3, window: 0:2, heldout_rewards:"
        " strict}\n"
    )
    assert load_arms(path) == {
        "base": {},
        "gspo": {
            "loss": "gspo",
            "learning_rate": 1e-3,
            "window": "0:2",
            "heldout_rewards": ("strict",),
        },
    }
    for text, told in (
        ("a: {}", "write 'arms:'"),
        (
            "arms:\n  a: {los: gspo}",
            r"arms.yaml, line 2: unknown setting 'los' \(did you mean 'loss'",
        ),
        (
            "arms:\n  a:\n    group_size: one",
            "arms.yaml, line 3: group_size = 'one' is not allowed",
        ),
        ("arms:\n  a: gspo", "line 2: a must hold lines"),
        ("arms: [a]", "arms must hold lines"),
        ("arms:\n  a: {}\n  a: {loss: gspo}", "arms.yaml"),
        (
            "arms:\n  a: {loss: evil.py:Evil}",
            "arms.yaml: loss names evil.py:Evil: code, which would run",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            load_arms(path)
    assert load_arms(path, trust=True) == {"a": {"loss": "evil.py:Evil"}}


def test_a_comparison_is_read_as_written(tmp_path: Path) -> None:
    config = configured(
        base={}, mine={"lora_alpha": 8.0, "betas": (0.5, 0.9), "heldout_rewards": ()}
    )
    (tmp_path / "config.json").write_text(json.dumps(config.as_dict()))
    assert load_compare(tmp_path / "config.json") == config
    assert list(config.as_dict()["arms"]) == ["base", "mine"]


def test_a_comparison_of_earlier_versions_has_arms() -> None:
    """The runs have the folders and settings that they had then."""
    values = {
        "format": "flowrl-run-3",
        "methods": ["flow-grpo", "branch-grpo", "Mine"],
        "credit": ["my.py:Mine"],
        "seeds": [0, 1],
        "baseline": "flow-grpo",
        "method_settings": {"branch-grpo": {"window": "", "group_size": 4}},
        "run": TINY.as_dict(),
    }
    config = CompareConfig.from_dict(values, trust=True)
    assert config.arms == {
        "flow-grpo": {"method": "flow-grpo"},
        "branch-grpo": {"method": "branch-grpo", "window": "", "group_size": 4},
        "Mine": {"method": "Mine", "credit": "my.py:Mine"},
    }
    assert list(config.arm_of()) == [
        run_folder(name, seed) for seed in (0, 1) for name in values["methods"]
    ]
    assert config.examples()["Mine"] == TINY.replace(method="Mine", credit="my.py:Mine")
    assert current_comparison(config.as_dict()) == config.as_dict()


def test_every_arm_needs_trust() -> None:
    values = configured(base={}, mine={"sampler": "evil.py:Evil"}).as_dict()
    with pytest.raises(ConfigError, match=r"sampler names evil\.py:Evil: code"):
        CompareConfig.from_dict(values).allowed()
    assert CompareConfig.from_dict(values, trust=True).arms["mine"] == {"sampler": "evil.py:Evil"}


def test_equal_cost_scales_the_iterations() -> None:
    run = TINY.replace(iterations=20)
    config = CompareConfig(
        run, {"base": {}, "tp": {"method": "tp-grpo"}, "small": {"groups": 1}}, (0,)
    )
    iterations = {arm: job.iterations for arm, job in config.equal_cost().examples().items()}
    passes = {arm: plan(job).passes for arm, job in config.examples().items()}
    assert (
        iterations["base"] == 20
        and iterations["small"] == 40
        and iterations["tp"] == round(20 * passes["base"] / passes["tp"])
    )
    assert 1 < iterations["tp"] < 20
    with pytest.raises(
        ConfigError, match="arm 'b': iterations = 3 is not allowed; allowed: left out"
    ):
        configured(a={}, b={"iterations": 3}).equal_cost()


def test_the_command_orders_methods_arms_and_credit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[CompareConfig] = []

    def kept(config: CompareConfig, *_: Any, **__: Any) -> bool:
        found.append(config)
        return False

    monkeypatch.setattr("flowrl.training.compare.compare", kept)
    (tmp_path / "arms.yaml").write_text("arms: {file: {kl_weight: 0.1}}")
    base = ["compare", "--world", "mixture", "--preset", "tiny", "--out", str(tmp_path / "out")]
    papers = ["flow-grpo", "stepwise-flow-grpo", "tp-grpo"]
    for options, arms in (
        ([], papers),
        (["--credit", "gdpo"], [*papers, "gdpo"]),
        (["--arm", "a: loss=gspo", "--arm", "base:"], ["a", "base"]),
        (
            ["--credit", "gdpo", "--arms", str(tmp_path / "arms.yaml"), "--arm", "base:"],
            ["base", "file", "gdpo"],
        ),
        (["--arm", "a: loss=gspo", "--methods", "tp-grpo"], ["tp-grpo", "a"]),
    ):
        assert main([*base, *options]) == 130
        assert list(found[-1].arms) == arms
    assert found[-1].arms == {"tp-grpo": {"method": "tp-grpo"}, "a": {"loss": "gspo"}}
    assert main([*base, "--arm", "tree: method=tree-grpo"]) == 130
    # what tiny needs
    assert found[-1].arms == {"tree": {"method": "tree-grpo", "window": "", "group_size": 4}}
    assert main([*base, "--arm", "tree: method=tree-grpo, group_size=8", "--window", "0:3"]) == 130
    assert (
        found[-1].arms == {"tree": {"method": "tree-grpo", "group_size": 8}}
        and found[-1].run.algorithm.window == "0:3"
    )
    assert main([*base, "--arm", "a:", "--arm", "a: loss=gspo"]) == 2


def test_reports_name_the_parts_in_which_arms_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.py").write_text(PARTS)
    out, loss, sampler = (
        tmp_path / "out",
        f"{tmp_path}/my.py:ReinforceKL",
        f"{tmp_path}/my.py:DecaySDE",
    )
    arm = f"uniform: loss={loss}, sampler={sampler}, group_size=6"
    options = [
        "--world",
        "mixture",
        "--preset",
        "tiny",
        "--seeds",
        "0",
        "--workers",
        "1",
        "--out",
        str(out),
    ]
    assert main(["compare", *options, "--arm", "base:", "--arm", arm]) == 0
    shown = capsys.readouterr().out
    assert f"uniform: loss={loss}, sampler={sampler}, group_size=6" in shown
    assert (
        "base 24 + 12 (2 iterations of 2 x 3 samples); uniform 48 + 24 (2 iterations of 2 x 6"
        " samples)" in shown
    )
    comparison = load_comparison(out)
    assert comparison.arms == ["base", "uniform"] and {
        run.folder.name for run in comparison.runs
    } == {
        "base-seed0",
        "uniform-seed0",
    }
    own = {"sampler": sampler, "loss": loss, "group_size": 6}
    assert comparison.differences == {
        "base": {"sampler": "", "loss": "", "group_size": 3},
        "uniform": own,
    }
    summaries = summarise(comparison)
    assert json.loads((out / "summary.json").read_text()) == summary_values(summaries)
    assert summary_values(summaries)[1]["settings"] == own
    words = f"sampler={sampler}, loss={loss}, group_size=6"
    assert f"uniform: {words}" in table_text(summaries) and f"uniform ({words}) ends " in headline(
        comparison, summaries
    )
    page = write_report(out).read_text()
    row = (
        page.split("The settings in which the arms differ")[1]
        .split("<tr><td>uniform</td>")[1]
        .split("</tr>")[0]
    )
    assert re.findall("<td>(.*?)</td>", row) == [sampler, loss, "6"]
    settings = page.split("<h2>Settings</h2>")[1]
    assert (
        "<span>group_size</span>" not in settings
        and "<span>groups</span><span>2</span>" in settings
    )


def test_settings_that_all_arms_set_alike_are_shown_as_shared(tmp_path: Path) -> None:
    config = configured(a={"groups": 7}, b={"groups": 7, "loss": "gspo"})
    (tmp_path / "config.json").write_text(json.dumps(config.as_dict()))
    row = {"iteration": 0, "evaluation": {"reward": 0.4}, "nfe_total": 0, "seconds_total": 0.0}
    for folder, job in config.jobs().items():
        (tmp_path / "runs" / folder).mkdir(parents=True)
        (tmp_path / "runs" / folder / "config.json").write_text(json.dumps(job.as_dict()))
        (tmp_path / "runs" / folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    comparison = load_comparison(tmp_path)
    assert (
        comparison.shared["rollout"]["groups"] == 7 and "loss" not in comparison.shared["algorithm"]
    )
    assert list(comparison.differences["b"]) == ["loss"]


def test_arms_with_different_rewards_are_compared_by_the_first_held_out_one(tmp_path: Path) -> None:
    run = TINY.replace(heldout_rewards=("strict",))
    config = CompareConfig(run, {"soft": {}, "graded": {"reward_form": "graded"}}, (0,))
    (tmp_path / "config.json").write_text(json.dumps(config.as_dict()))
    for name, reward, heldout in (("soft", 0.4, 0.3), ("graded", 0.9, 0.5)):
        folder = tmp_path / "runs" / f"{name}-seed0"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config.jobs()[folder.name].as_dict()))
        costs = dict.fromkeys(("nfe", "calls", "reward_calls", "train_nfe"), 1)
        rows = [
            {
                "iteration": i,
                "evaluation": {"reward": reward, "heldout": {"strict": heldout + i / 10}},
                **costs,
                "nfe_total": i,
                "seconds_total": i,
                "phases": dict.fromkeys(("rollout", "reward", "update"), 1),
            }
            for i in range(2)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = load_comparison(tmp_path)
    _, graded = summarise(comparison)
    assert graded.lead.mean == pytest.approx(0.2) and graded.base.mean == pytest.approx(0.5)
    assert "trained on different rewards. The held-out strict of soft" in headline(
        comparison, summarise(comparison)
    )
    file = io.StringIO()
    Display(config, tmp_path / "new", 1, Console(file=file, width=200)).start(tmp_path / "new")
    assert "(soft and graded rewards)" in file.getvalue()


def test_credit_and_method_arms() -> None:
    assert credit_arms(["a.py:Rule(x=1)", "gdpo"]) == {
        "Rule(x=1)": {"method": "Rule(x=1)", "credit": "a.py:Rule(x=1)"},
        "gdpo": {"method": "gdpo", "credit": "gdpo"},
    }
    with pytest.raises(
        ConfigError, match=r"a rule with a name of its own, which is not that of a\.py:Rule"
    ):
        credit_arms(["a.py:Rule", "b.py:Rule"])
    with pytest.raises(ConfigError, match="a rule with a name of its own"):
        credit_arms(["gdpo", "gdpo"])
    with pytest.raises(ConfigError, match="each method once"):
        method_arms(["awm", "awm"])
    assert RunConfig.of(method="gdpo", credit="gdpo") == arm_run(
        RunConfig(), credit_arms(["gdpo"])["gdpo"]
    )
