"""A rule of your own against tuned baselines: its name and folder, what is refused, the runs, their
time, verdicts and page.
"""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_lines import SMALL, fake_line, here, rule_file
from loading import ROOT, load

from flowrl.bench import rule_plan, tune
from flowrl.bench.arms import ARMS, SHORT, own_arm, tuned
from flowrl.bench.evidence import Evidence
from flowrl.bench.judging import ALIKE, BETTER, UNDECIDED, WORSE
from flowrl.bench.measurements import CURVE, measure
from flowrl.bench.record import Runner
from flowrl.bench.results_file import make_line
from flowrl.bench.rule_bench import Bench, bench_rule, own_name
from flowrl.bench.rule_headroom import CANNOT, TELLS, UNCLEAR
from flowrl.bench.rule_page import World, judged, sentence
from flowrl.bench.rule_plan import FULL, QUICK, Part
from flowrl.bench.suite import Suite
from flowrl.compare import bounds
from flowrl.compare.bounds import Bound
from flowrl.compare.target import CostRatio
from flowrl.core.errors import ConfigError
from flowrl.credit import StepwiseGain, credit_of
from flowrl.run.parts.registry import build
from flowrl.testing.credit import CreditContract


@pytest.mark.parametrize(
    ("spec", "name"),
    [("a/v1.py:Mine", "Mine"), ("weighted", "weighted"), ("x.py:uniform", "x.py:uniform")],
)
def test_a_rule_is_called_by_its_class_unless_a_baseline_is(spec, name):
    assert own_name(spec) == name


def test_a_baseline_is_no_rule_of_ones_own():
    with pytest.raises(ConfigError, match=r"rule = .* is not allowed"):
        own_name("uniform")


@pytest.mark.parametrize("part", [*FULL.values(), *QUICK.values()])
def test_all_arms_have_the_same_budget_and_seeds(part):
    """Everything is equal but the method and what was tuned; no search and no other result has
    the seeds.
    """
    rule = replace(ARMS["stepwise gains"], name="mine")
    arms = part.arms(rule, tuned(part.world, "uniform"))
    assert set(arms) == {*part.baselines, "mine"}
    assert part.numbers == tuple(range(200, 200 + part.seeds))
    searched = {"method", "credit", "clip_range", "learning_rate", "noise_level"}
    for runs in zip(*arms.values(), strict=True):
        first, *others = (run.flat() for run in runs)
        assert all(first[name] == s[name] for s in others for name in s.keys() - searched)
    for name in part.baselines:
        assert tuned(part.world, name).items() <= arms[name][0].flat().items()


def world_of(spread=0.0, seed=0, nfe=100.0, **arms):
    """Arms whose reward rises at once to a level with noise of `spread` per run; evaluations of
    "mine" cost `nfe`.
    """
    generator, part, runs = np.random.default_rng(seed), replace(FULL["mixture"], seeds=8), {}
    for arm, level in arms.items():
        levels = level + spread * generator.normal(size=8)
        cost = nfe if arm == "mine" else 100.0
        runs[arm.replace("_", " ")] = [fake_line([r] * 5, cost) for r in levels]
    part = replace(part, baselines=tuple(arm for arm in runs if arm != "mine"))
    return World(part, Evidence(runs, part.numbers), {arm: {"learning_rate": 0.02} for arm in runs})


BUDGETS = ("updates", "evaluations", "stated seconds")


def test_a_known_effect_is_found_at_every_budget():
    levels = {"uniform": 0.4, "stepwise_gains": 0.6, "turning_points": 0.501, "mine": 0.5}
    (judgement,) = judged("mine", [world_of(0.01, **levels)])
    expected = {"uniform": BETTER, "stepwise gains": WORSE, "turning points": ALIKE}
    assert {(f.baseline, f.budget): f.comparison.verdict for f in judgement.findings} == {
        (baseline, budget): size for baseline, size in expected.items() for budget in BUDGETS
    }


@pytest.mark.parametrize(
    ("level", "spread", "size"),
    [(0.5, 0.01, BETTER), (0.3, 0.01, WORSE), (0.4, 0.001, ALIKE), (0.41, 0.1, UNDECIDED)],
)
def test_the_sentence_for_each_outcome(level, spread, size):
    (judgement,) = judged("mine", [world_of(spread, seed=1, uniform=0.4, mine=level)])
    text = sentence("mine", judgement)
    verdict = f"mine against uniform: {size} at equal updates, evaluations and stated seconds."
    assert text.startswith(f"2-D world, 8 seeds. {verdict}")
    power = r"Differences in mean reward of 0\.\d{3}.* with a probability of 80%\.$"
    assert bool(re.search(power, text)) == (size == UNDECIDED)


@pytest.mark.parametrize(
    ("lead", "spread", "label"),
    [(0.1, 0.001, TELLS), (0.02, 0.001, CANNOT), (0.06, 0.001, UNCLEAR), (0.1, 0.2, UNCLEAR)],
)
def test_what_a_world_can_tell(lead, spread, label):
    """Pairs of one seed, in whatever order; the rule itself is no part of it."""
    world = world_of(0.1, uniform=0.4, mine=0.9)
    levels = world.evidence.values("uniform", "area")
    noise = spread * np.array([-1, 1] * 4)
    exact = dict(zip(world.part.numbers, levels + lead + noise, strict=True)) | {999: 0.0}
    curves = [[level] * 5 for level in reversed(exact.values())]
    bound = Bound(range(5), curves, list(reversed(exact)), "-")
    headroom = replace(world, bound=bound).headroom("mine")
    assert (headroom.label, headroom.seeds) == (label, 8)
    assert headroom.lead.value == pytest.approx(lead)
    assert ("CANNOT" in replace(world, bound=bound).tells("mine")) == (label == CANNOT)
    falls = Bound(range(5), [[1.0, *curve[1:]] for curve in curves], bound.seeds, "-")
    assert falls.collapsed and replace(world, bound=falls).headroom("mine").label != CANNOT


def test_a_small_lead_of_a_baseline_shows_no_small_headroom():
    world = world_of(0.001, uniform=0.4, stepwise_gains=0.401, turning_points=0.3, mine=0.9)
    headroom = world.headroom("mine")
    assert (headroom.arm, headroom.label) == ("stepwise gains", UNCLEAR)
    assert "`--bound` does" in world.tells("mine")


def test_a_cheaper_rule_with_the_same_curve_leads_per_budget_alone():
    world = world_of(uniform=0.4, mine=0.4, nfe=90.0)
    for line in (run for runs in world.evidence.runs.values() for run in runs):
        for i, row in enumerate(line["curve"]):
            row[CURVE.index("soft")] = 0.2 * i
    (judgement,) = judged("mine", [world])
    leads = {f.budget: f.comparison.estimate.value for f in judgement.findings}
    assert leads == pytest.approx({"updates": 0, "evaluations": 0.04, "stated seconds": 0.04})


TINY = {name: value for name, value in SMALL.items() if name != "arm"} | {"eval_samples": 18}


def lines_in(folder):
    return [json.loads(text) for text in (Path(folder) / "results.jsonl").read_text().splitlines()]


class TestFolder:
    """Whole comparisons of tiny runs in the 2-D world, in this process."""

    @pytest.fixture(autouse=True)
    def tiny(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(rule_plan.LENGTH, "mixture", TINY)
        monkeypatch.setitem(SHORT, "mixture", TINY)
        monkeypatch.setattr(tune, "run_jobs", here)
        monkeypatch.setattr(
            "flowrl.bench.results_file.golden_run", lambda: (1.0,) * 3
        )  # else seconds
        self.made = []
        self.most = 1000

        def execute(suite, workers=0, progress=lambda *_: None):
            done = suite.file.read(suite.allowed)
            for key, config in suite.runs.items():
                if key not in done and len(self.made) >= self.most:
                    return False
                if key not in done:
                    line = make_line(config, measure(config), "-", key)
                    suite.file.append(line)
                    self.made.append(key)
                    progress(len(self.made), len(suite.runs), line)
            return True

        monkeypatch.setattr(Suite, "execute", execute)

    def bench(self, spec, seeds=2, out=None, budget=0, say=lambda _: None, bound=False):
        """How many runs of the results were made."""
        before = len(self.made)
        finished = bench_rule(spec, [Part("mixture", budget, seeds, bound=bound)], out, 1, say=say)
        assert finished == (len(self.made) < self.most)
        return len(self.made) - before

    def test_a_copy_of_uniform_has_its_numbers(self, tmp_path):
        (tmp_path / "my.py").write_text(
            "from flowrl.credit import Uniform\n\n\nclass Copy(Uniform):\n    pass\n"
        )
        output = []
        assert self.bench("my.py:Copy", say=output.append) == 2 * 4
        text = "\n".join(output)
        row = next(line for line in text.splitlines() if line.startswith("uniform "))
        assert row.count("+0.000 undecided") >= 2  # a verdict needs five seeds
        assert "8 runs remain (results: runs/rule-Copy); press Ctrl-C to pause" in text
        paper = Path("runs/rule-Copy/rule-paper")
        rows = list(csv.DictReader((paper / "results.csv").open()))
        curves = {
            arm: [(row["seed"], row["soft"]) for row in rows if row["arm"] == arm]
            for arm in ("uniform", "Copy")
        }
        assert curves["Copy"] == curves["uniform"]
        assert {row["seed"] for row in rows} == {"200", "201"}
        assert "uniform &" in (paper / "table.tex").read_text()
        assert (paper / "rule-mixture.pdf").read_bytes().startswith(b"%PDF")
        assert self.bench("my.py:Copy") == 0 and self.bench("my.py:Copy", 3) == 4
        (paper / "table.tex").write_text("mine")
        with pytest.raises(ConfigError, match=r"page = .*table\.tex"):
            self.bench("my.py:Copy", 3)

    def test_exact_credit_is_made_on_demand_unless_it_is_shipped(self, monkeypatch):
        page = Path("runs/rule-weighted/rule.md")
        assert self.bench("weighted") == 2 * 4
        assert "No curve of exact credit was computed" in page.read_text()
        assert self.bench("weighted", bound=True) == 2
        assert "exact credit minus uniform credit is" in page.read_text()
        table = (page.parent / "rule-paper" / "table.tex").read_text()
        assert "& exact credit &" in table and "Headroom" in table
        assert self.bench("weighted") == 0 and "Dashed: exact credit" in page.read_text()
        run = Part("mixture", 0, 2).exact()[0].typed()
        curves = {"iterations": [0, 1], "curves": [[0, 1]] * 2, "seeds": [200, 201]}
        entry = {"settings": run, "command": "shipped by", **curves}
        monkeypatch.setattr(bounds, "shipped", lambda: [entry])
        assert self.bench("weighted", out=Path("new"), bound=True) == 2 * 4
        assert "made by `shipped by`" in Path("new/rule.md").read_text()

    def test_an_arm_with_a_loss_of_its_own(self, tmp_path):
        """It runs in a folder of its name, also under other spellings of its parts, but not with
        other settings.
        """
        (tmp_path / "my.py").write_text(
            "from flowrl.losses import ClippedLoss\n\n\nclass Copy(ClippedLoss):\n    pass\n"
        )
        spec = "my.py:Copy(kl='without_delta')"
        arm = own_arm("copy", {"loss": spec})
        assert set(arm.knobs) == {"learning_rate", "clip_range", "noise_level"}
        assert self.bench(arm) == 2 * 4
        losses = [line["config"]["algorithm"]["loss"] for line in lines_in("runs/rule-copy")]
        assert losses.count(spec) == 2 and losses.count("") == 6
        assert f"The rule is `loss={spec}`" in Path("runs/rule-copy/rule.md").read_text()
        same = own_arm("copy", {"loss": f"{tmp_path}/my.py:Copy(kl=without_delta)"})
        assert self.bench(same) == 0
        with pytest.raises(ConfigError, match=r"another rule, loss=my\.py:Copy\(.*another --out"):
            self.bench(own_arm("copy", {"loss": "my.py:Copy"}))

    def test_search_pause_and_resume(self, tmp_path):
        rule_file(tmp_path / "my.py")
        self.most = 3
        assert self.bench("my.py:Mine", budget=3) == 3
        tuning = Path("runs/rule-Mine/tuning.jsonl").read_text()
        assert tuning.count("\n") == 3 and not Path("runs/rule-Mine/rule.md").exists()
        self.most = 1000
        assert self.bench("./my.py:Mine", budget=3) == 5
        assert Path("runs/rule-Mine/tuning.jsonl").read_text() == tuning
        best = Bench("my.py:Mine", [Part("mixture", 3, 2)]).values(Part("mixture", 3, 2))
        settings = [line["config"]["algorithm"] for line in lines_in("runs/rule-Mine")]
        clips = [run["clip_range"] for run in settings if run["credit"] == "my.py:Mine"]
        assert clips == [best["clip_range"]] * 2
        page = Path("runs/rule-Mine/rule.md").read_text()
        figure = Path("runs/rule-Mine/rule-paper/rule-mixture-search.pdf")
        assert "Not tuned" not in page and figure.exists()
        (row,) = re.findall(r"\| .* \| yes \|", page.partition("tried:")[2])
        assert row.startswith("| " + " | ".join(f"{value:g}" for value in best.values()))

    def test_results_of_another_rule_or_code_are_refused(self, tmp_path):
        """Also if only the search has runs; the message says what to do."""
        mine = rule_file(tmp_path / "my.py")
        rule_file(tmp_path / "other.py")
        out = tmp_path / "out"
        with pytest.raises(ConfigError, match=r"out = .* this one contains other files"):
            self.bench("my.py:Mine", out=tmp_path)
        self.bench("my.py:Mine", out=out)
        with pytest.raises(ConfigError, match=r"another rule, my.py:Mine: choose another --out"):
            self.bench("other.py:Mine", out=out)
        changed = [line | {"golden": [0.0], "commit": "0123abc"} for line in lines_in(out)]
        text = "".join(json.dumps(line) + "\n" for line in changed)
        (out / "results.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"golden run .*0123abc.*choose another --out"):
            self.bench("my.py:Mine", out=out)
        self.most = 0
        bench_rule("my.py:Mine", [Part("mixture", 1, 2)], None, 1, say=lambda _: None)
        self.most = 1000
        mine.write_text(mine.read_text() + "# changed\n")
        with pytest.raises(ConfigError, match=r"its file changed: .* or delete tuning.jsonl"):
            self.bench("my.py:Mine")


# The capstone of the course (tutorials/capstone/grade.py)

grading = load("tutorials/capstone/grade.py")
STARTER = ROOT / "tutorials/capstone"
PREDICTED = {"updates": "better", "evaluations": "better", "difference": [0.05, 0.15]}
WORSE_THAN_UNIFORM = dict.fromkeys(PREDICTED, "worse") | {"difference": [-0.15, -0.05]}


def points(prediction, level, spread=0.01, original=True):
    """The points earned by subject, of a rule whose reward is `level` against uniform credit's 0.4."""
    (world,) = judged("mine", [world_of(spread, uniform=0.4, mine=level)])
    rows = grading.comparison("mine", world, prediction, original)
    return {row.subject: row.earned for row in rows}


@pytest.mark.parametrize(
    ("change", "level", "lost"),
    [
        ({}, 0.5, set()),
        ({"updates": "no difference"}, 0.5, {"verdict at equal updates"}),
        ({"evaluations": "worse"}, 0.5, {"verdict at equal evaluations"}),
        ({"difference": [0.11, 0.15]}, 0.5, {"size of the difference"}),
        ({"difference": [-0.5, 0.5]}, 0.5, {"size of the difference"}),
        (WORSE_THAN_UNIFORM, 0.3, {"learning"}),
    ],
)
def test_points_reward_the_prediction_then_the_result(change, level, lost):
    earned = points({**PREDICTED, **change}, level)
    assert {subject for subject, number in earned.items() if not number} == lost


@pytest.mark.parametrize(("level", "spread"), [(0.4, 0.001), (0.41, 0.1)])
def test_no_difference_and_undecided_are_one_prediction(level, spread):
    for word in ("no difference", "undecided"):
        earned = points({**PREDICTED, "updates": word, "evaluations": word}, level, spread)
        assert earned["verdict at equal updates"] == earned["verdict at equal evaluations"] == 10


def test_the_starter_rule_keeps_the_contract_and_is_not_original():
    starter, gains = build("credit", f"{STARTER / 'my_rule.py'}:MyRule"), StepwiseGain()
    assert [row.earned for row in grading.contract(starter)] == [10, 0]
    assert [row.earned for row in grading.contract(gains)] == [10, 5]


FACTORS = """
import torch
from dataclasses import dataclass
from flowrl.credit import Uniform
from flowrl.probes import NoProbe, Probe

@dataclass(frozen=True)
class MyRule:
    probe: Probe = NoProbe()

    def assign(self, values, decisions):
        factors = torch.where(torch.arange(len(decisions)) % 2 == 0, 1.3, 0.7)
        return Uniform().assign(values, decisions) * factors
"""


def submission(folder, text):
    """A folder with this rule and a prediction that fits a rule without effect."""
    folder.mkdir()
    (folder / "my_rule.py").write_text(text)
    (folder / "prediction.yaml").write_text(
        "hypothesis: none\nupdates: no difference\nevaluations: undecided\n"
        "difference: [-0.05, 0.05]\n"
    )
    return folder


def test_factors_on_uniform_credit_earn_at_most_30_points(tmp_path):
    """With the best predictions, at any level."""
    rule = build(
        "credit", f"{submission(tmp_path / 'mine', FACTORS)}/my_rule.py:MyRule", trust=True
    )
    rows = grading.contract(rule)
    assert [row.earned for row in rows] == [10, 0]
    rows.append(grading.control_points(None))
    known, best = sum(row.earned for row in rows), []
    for level, prediction in ((0.5, PREDICTED), (0.3, WORSE_THAN_UNIFORM)):
        for original in (False, True):
            best.append(known + sum(points(prediction, level, original=original).values()))
    assert best == [25, 55, 15, 45]


def test_the_control_credits_as_uniform_credit_and_as_strongly_as_the_rule():
    control = load("tutorials/capstone/control.py").Control(StepwiseGain())
    assert control.probe == StepwiseGain().probe
    assert grading.alike(control) == pytest.approx(1.0)
    record = CreditContract(StepwiseGain()).records()[0]
    own, rule = (credit_of(part, record).advantages for part in (control, StepwiseGain()))
    sizes = (table.square().mean((0, 1)) for table in (own, rule))
    torch.testing.assert_close(next(sizes), next(sizes))
    assert not own.isclose(rule).any()


def test_a_prediction_is_fixed_by_its_hash(tmp_path):
    folder = submission(tmp_path / "mine", FACTORS)
    digest = grading.committed(folder)
    assert (folder / "prediction.sha256").read_text() == f"{digest}  prediction.yaml\n"
    assert grading.committed(folder) == digest
    with (folder / "prediction.yaml").open("a") as file:
        file.write("# better\n")
    with pytest.raises(ConfigError, match="that of the first grading"):
        grading.committed(folder)


def test_the_table_has_a_row_per_submission_and_the_hash_of_its_prediction(tmp_path, monkeypatch):
    ranking = load("tutorials/capstone/table.py")
    folder, ratio = submission(tmp_path / "mine", FACTORS), CostRatio(0.5, 0.4, 0.6)

    def ranked(arms, records, runner):
        assert arms == {str(folder): {"credit": f"{folder}/my_rule.py:MyRule"}}
        each = {"default": ratio, "noise-0.3": ratio}
        return [("known (the record)", ratio, each, 0), (str(folder), ratio, each, 1)]

    monkeypatch.setattr(ranking, "ranked", ranked)
    runner = Runner("points", tmp_path / "runs", "table.py", 1)
    head, _, record, row = ranking.table([folder], tmp_path, runner).splitlines()
    assert "| default | noise-0.3 | collapsed |" in head
    text = "0.50 [0.40, 0.60]"
    assert record == f"| known (the record) | {text} | {text} | {text} | 0 |  |"
    digest = grading.committed(folder)[:8]
    assert row == f"| {folder} | {text} | {text} | {text} | 1 | {digest} |"


@pytest.mark.slow
def test_only_a_rule_that_is_more_than_factors_is_compared_with_its_control(tmp_path, capsys):
    part = grading.Part("mixture", 0, 2, ("uniform",), first_seed=123_456)
    weighted = FACTORS.replace("* factors", "* (1 + values[..., -1:])")  # more for good samples
    for name, text in (("factors", FACTORS), ("weighted", weighted)):
        folder = submission(tmp_path / name, text)
        table = grading.grade(folder, part, workers=1)
        printed = capsys.readouterr().out.splitlines()
        assert printed[0] == f"SHA-256 of the prediction: {grading.committed(folder)}"
        (earned,) = re.findall(r"^\| sum \| (\d+) of 80", table, re.MULTILINE)
        assert (int(earned) <= 30) == (name == "factors")
        assert ("is its own control" in table) == (name == "factors")
        runs = list(folder.glob("grade-123456/control.jsonl"))
        assert len(runs) == (name == "weighted")
        assert all(len(path.read_text().splitlines()) == 2 for path in runs)


def test_an_empty_prediction_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="updates"):
        grading.predicted(STARTER / "prediction.yaml")
    text = "hypothesis: early\nupdates: better\nevaluations: worse\ndifference: [0.2, 0.1]\n"
    (tmp_path / "prediction.yaml").write_text(text)
    with pytest.raises(ConfigError, match="the smaller first"):
        grading.predicted(tmp_path / "prediction.yaml")


def test_the_seeds_begin_at_the_first_seed():
    part = replace(grading.Part("mixture", 0, 3), first_seed=123_456)
    assert part.numbers == (123_456, 123_457, 123_458)
    assert [run.seed for run in part.exact()] == list(part.numbers)
