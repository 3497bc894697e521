"""Arms of a comparison: what is refused, what is converted, and what reports say about them."""

import io
import json
import re

import pytest
from rich.console import Console
from small_run import MIXTURE, TINY_RUN, flowrl_, write_rows

from flowrl.compare.arms import arm_run, credit_arms, load_arms, parse_arm, together
from flowrl.compare.bounds import bound_settings, shipped_bound
from flowrl.compare.comparison import CompareConfig, load_compare
from flowrl.compare.conclusion import shows
from flowrl.compare.progress import Display
from flowrl.compare.report import table_text, write_report
from flowrl.compare.results import load_comparison, summarise, summary_values
from flowrl.compare.tuned import tuned_arms
from flowrl.core.errors import ConfigError
from flowrl.run.config import preset
from flowrl.run.io import write_json
from flowrl.run.plan import plan
from flowrl.run.presets import tuned

PARTS = """
from flowrl.losses import PolicyGradientLoss
from flowrl.samplers import FlowSDE

class ReinforceKL(PolicyGradientLoss):
    pass

class DecaySDE(FlowSDE):
    pass
"""


def configured(**arms):
    return CompareConfig(TINY_RUN, arms, (0,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_rang": 0.1}, r"arm 'b': unknown setting .*did you mean 'clip_range'\?"),
        ({"clip_range": "small"}, r"arm 'b': clip_range = 'small' is not allowed"),
        ({"seed": 1}, r"arm 'b': seed = 1 is not allowed"),
        ({"loss": "gspo("}, r"arm 'b': .*cannot be read"),
        ({"group_size": 3}, r"arm = 'b' is not allowed; .* other than 'a' has"),
        ({"world": "shapes", "task": "text"}, r"world = \['mixture', 'shapes'\] is not allowed"),
        ({"eval_steps": 7}, r"eval_steps = \[4, 7\] is not allowed"),
        ({"reward_form": "strict"}, r"heldout_rewards = \(\) is not allowed"),
    ],
)
def test_what_an_arm_may_not_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        configured(a={}, b=settings)


@pytest.mark.parametrize("name", ["", " a", "a\n", "\x1b[2J", "x" * 300])
def test_names_that_are_refused(name):
    with pytest.raises(ConfigError, match=r"arm = .* is not allowed; allowed: a name"):
        configured(base={}, **{name: {"loss": "gspo"}})


@pytest.mark.parametrize(
    ("first", "second", "settings"),
    [
        ("a b", "A_B", ({}, {"loss": "gspo"})),
        ("a", "b", ({"loss": "my.py:L(x=1)"}, {"loss": "./my.py:L( x = 1 )"})),
        *(
            (*pair, [{"credit": rule} for rule in pair])
            for pair in (
                ("gdpo", "gdpo()"),
                (
                    "weighted(rule=uniform, weights='noise')",
                    "weighted(weights=noise, rule=uniform)",
                ),
                ("weighted(rule='gdpo( )')", "weighted(rule=gdpo)"),
                ("stepwise-gain(probe='substeps:5')", "stepwise-gain(probe='substeps(count=5)')"),
                ("stepwise-gain(normalise='a b')", "stepwise-gain(normalise='a_b')"),
                ("turning-point(x='A')", "turning-point(x='a')"),
            )
        ),
    ],
)
def test_two_arms_share_neither_a_folder_nor_their_settings(first, second, settings):
    with pytest.raises(ConfigError, match=r"arm = .* allowed: a folder and settings other than"):
        configured(**{first: settings[0], second: settings[1]})


def test_a_method_has_its_own_credit_rule():
    run = TINY_RUN.replace(method="mine", credit="gdpo")
    assert arm_run(run, {"method": "tp-grpo"}).algorithm.credit is None
    assert arm_run(run, {"loss": "gspo"}).algorithm.credit == "gdpo"
    assert arm_run(run, {"method": "other", "credit": "uniform"}).algorithm.credit == "uniform"


def test_arms_as_text():
    assert parse_arm("gspo: loss=my.py:GSPO(x=[1, 2]), clip_range=.1, window=1:3") == {
        "gspo": {"loss": "my.py:GSPO(x=[1, 2])", "clip_range": 0.1, "window": "1:3"}
    }
    assert parse_arm("base:") == {"base": {}}
    for text in ("gspo", "loss=my.py:GSPO", ": loss=gspo", "a: loss"):
        with pytest.raises(ConfigError, match=r"arm .*= .*(is not allowed|cannot be read)"):
            parse_arm(text)
    assert credit_arms(["a.py:Rule(x=1)", "gdpo"]) == {
        "Rule(x=1)": {"method": "Rule(x=1)", "credit": "a.py:Rule(x=1)"},
        "gdpo": {"method": "gdpo", "credit": "gdpo"},
    }
    for make in (
        lambda: together(parse_arm("a:"), parse_arm("a: loss=gspo")),
        lambda: credit_arms(["a.py:Rule", "b.py:Rule"]),
    ):
        with pytest.raises(ConfigError, match="a different name for each"):
            make()


def test_arms_in_a_file(tmp_path):
    path = tmp_path / "arms.yaml"
    path.write_text("arms:\n  base:\n  gspo: {loss: gspo, learning_rate: 1e-3, window: 0:2}\n")
    assert load_arms(path) == {
        "base": {},
        "gspo": {"loss": "gspo", "learning_rate": 1e-3, "window": "0:2"},
    }
    for text, message in (
        ("a: {}", "write 'arms:'"),
        ("arms:\n  a: {los: gspo}", "arms.yaml, line 2: unknown setting 'los'"),
        ("arms:\n  a: gspo", "line 2: a must contain lines"),
        ("arms:\n  a: {loss: evil.py:Evil}", "arms.yaml: loss names evil.py:Evil: it is code"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_arms(path)
    assert load_arms(path, trust=True) == {"a": {"loss": "evil.py:Evil"}}


def test_a_comparison_is_read_as_written(tmp_path):
    arms = {"lora_alpha": 8.0, "betas": (0.5, 0.9), "heldout_rewards": ()}
    config = configured(base={}, mine=arms)
    write_json(tmp_path / "config.json", config.as_dict())
    assert load_compare(tmp_path / "config.json") == config


def test_equal_cost_scales_the_iterations():
    arms = {"base": {}, "tp": {"method": "tp-grpo"}, "small": {"groups": 1}}
    config = CompareConfig(TINY_RUN.replace(iterations=20), arms, (0,))
    iterations = {arm: job.iterations for arm, job in config.equal_cost().examples().items()}
    plans = {arm: plan(job) for arm, job in config.examples().items()}
    costs = {arm: counts.nfe + 3 * counts.train_nfe for arm, counts in plans.items()}
    cheaper = round(20 * costs["base"] / costs["tp"])
    assert iterations == {"base": 20, "tp": cheaper, "small": 40} and 1 < cheaper < 20
    with pytest.raises(ConfigError, match="arm 'b': iterations = 3 is not allowed"):
        configured(a={}, b={"iterations": 3}).equal_cost()


def test_the_command_orders_methods_arms_and_credit(tmp_path, monkeypatch):
    compared = []
    keep = lambda config, *_, **__: compared.append(config)  # noqa: E731
    monkeypatch.setattr("flowrl.compare.comparison.compare", keep)
    (tmp_path / "arms.yaml").write_text("arms: {file: {kl_weight: 0.1}}")

    def arms_of(options=""):
        assert flowrl_(f"compare {MIXTURE} --out {tmp_path}/out {options}") == 130
        return compared[-1].arms

    papers = ["flow-grpo", "stepwise-flow-grpo", "tp-grpo"]
    assert list(arms_of()) == papers
    assert list(arms_of("--credit gdpo")) == [*papers, "gdpo"]
    mixed = arms_of(f"--credit gdpo --arms {tmp_path}/arms.yaml --arm base:")
    assert list(mixed) == ["base", "file", "gdpo"]
    mixed = arms_of("--arm 'a: loss=gspo' --methods tp-grpo")
    assert list(mixed.items()) == [("tp-grpo", {"method": "tp-grpo"}), ("a", {"loss": "gspo"})]
    # of what the preset needs for the method, what no option sets
    tree = {"method": "tree-grpo", "group_size": 8}
    assert arms_of("--arm 't: method=tree-grpo, group_size=8' --window 0:3") == {"t": tree}
    tree |= {"window": None, "group_size": 4}
    assert arms_of("--arm 't: method=tree-grpo'") == {"t": tree}


def test_reports_name_the_parts_in_which_arms_differ(tmp_path, capsys):
    (tmp_path / "my.py").write_text(PARTS)
    out, file = tmp_path / "out", f"{tmp_path}/my.py"
    settings = {"sampler": f"{file}:DecaySDE", "loss": f"{file}:ReinforceKL", "group_size": 6}
    words = ", ".join(f"{name}={value}" for name, value in settings.items())
    arms = f"--arm base: --arm 'uniform: {words}' --seeds 0 --workers 1"
    assert flowrl_(f"compare {MIXTURE} {arms} --out {out}") == 0
    shown = capsys.readouterr().out
    assert words in shown
    assert "base: 2 iterations of 2 x 3 samples, each 24 + 12 network evaluations" in shown
    comparison = load_comparison(out)
    assert {run.folder.name for run in comparison.runs} == {"base-seed0", "uniform-seed0"}
    assert comparison.differences["uniform"] == settings
    assert comparison.differences["base"] == {"sampler": "", "loss": "", "group_size": 3}
    summaries = summarise(comparison)
    assert json.loads((out / "summary.json").read_text()) == summary_values(summaries)
    assert f"uniform: {words}" in table_text(summaries)
    assert "uniform ends " in shows(comparison, summaries)
    page = write_report(out).read_text()
    table = page.split("Settings in which the arms differ")[1]
    row = table.split("<tr><td>uniform</td>")[1].split("</tr>")[0]
    assert re.findall("<td>(.*?)</td>", row) == [*map(str, settings.values()), "no"]
    shared = page.split("<h2>Settings</h2>")[1]
    assert "<span>group_size</span>" not in shared
    assert "<span>groups</span><span>2</span>" in shared


def written(folder, config, scores):
    """A comparison whose runs have two evaluations: reward, and a held-out strict score."""
    write_json(folder / "config.json", config.as_dict())
    costs = dict.fromkeys(("nfe", "calls", "reward_calls", "train_nfe"), 1)
    costs["phases"] = dict.fromkeys(("rollout", "reward", "update"), 1)
    for name, job in config.jobs().items():
        run, (reward, strict) = folder / "runs" / name, scores[config.arm_of()[name]]
        write_json(run / "config.json", job.as_dict())
        rows = []
        for i in range(2):
            evaluation = {"reward": reward, "heldout": {"strict": strict + i / 10}}
            totals = dict.fromkeys(("iteration", "nfe_total", "seconds_total"), i)
            rows.append({"evaluation": evaluation, **totals, **costs})
        write_rows(run, rows)


def test_arms_with_different_rewards_are_compared_by_the_first_held_out_one(tmp_path):
    run = TINY_RUN.replace(heldout_rewards=("strict",))
    config = CompareConfig(run, {"soft": {}, "graded": {"reward_form": "graded"}}, (0,))
    written(tmp_path, config, {"soft": (0.4, 0.3), "graded": (0.9, 0.5)})
    comparison = load_comparison(tmp_path)
    _, graded = summarise(comparison)
    assert graded.lead.mean == pytest.approx(0.2) and graded.base.mean == pytest.approx(0.5)
    shown = shows(comparison, summarise(comparison))
    words = "In held-out strict (the arms are trained on different rewards), graded"
    assert shown.startswith(words)
    file = io.StringIO()
    Display(config, tmp_path / "new", Console(file=file, width=200)).start()
    assert "(soft and graded rewards)" in file.getvalue()


def test_tuned_settings_lie_below_an_arms_own():
    """A method has those found for it; everything else those of uniform credit, as far as it reads
    them, and is named. Settings of all arms win.
    """
    run = preset("default").apply(world="mixture", learning_rate=0.01)
    given = {
        "flow-grpo": {"method": "flow-grpo"},
        "tp-grpo": {"method": "tp-grpo"},
        "mine": {"loss": "gspo", "noise_level": 0.9},
        "dance": {"method": "dance-grpo"},
        "awm": {"method": "awm"},
    }
    arms, untuned = tuned_arms(run, given, {"learning_rate": 0.01})
    assert untuned == ["mine", "dance"]
    clips = {name: row["values"].get("clip_range") for name, row in tuned()["mixture"].items()}
    assert arms["flow-grpo"]["clip_range"] == arms["mine"]["clip_range"] == clips["uniform"]
    assert arms["tp-grpo"]["clip_range"] == clips["turning points"]
    assert arms["mine"]["noise_level"] == 0.9 and "learning_rate" not in arms["mine"]
    CompareConfig(run, arms, (0,)).require_read(["learning_rate"])
    own_window = bound_settings("mixture", {"window": ":"})
    assert bound_settings("mixture").keys() - own_window == {"window"}
    elsewhere = preset("default").apply(model="some-model")
    with pytest.raises(ConfigError, match="settings = 'tuned' is not allowed"):
        tuned_arms(elsewhere, given, {})


def test_a_shipped_bound_is_for_exactly_its_settings():
    run = preset("default").apply(world="mixture")
    bound = shipped_bound(run.typed())
    assert bound is not None and len(bound.curves) >= 5
    assert bound.rewards[-1] > bound.rewards[0] + 0.3
    others = dict(iterations=20, reward_noise=0.3, window=":-1", learning_rate=0.01, loss="gspo")
    for name, value in others.items():
        assert shipped_bound(run.replace(**{name: value}).typed()) is None
    assert shipped_bound(run.replace(seed=7, max_batch=64).typed()) == bound
