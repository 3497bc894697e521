"""The pages of the claims: answers, symbols, tables and figures, from complete, partial and missing
runs.
"""

import re

import numpy as np
import pytest
from bench_lines import FAST, SLOW, fake_line
from flowrl_bench.arms import ARMS
from flowrl_bench.catalogue import CLAIMS, PRIMARY, RETIRED
from flowrl_bench.claims import SEEDS, Claim
from flowrl_bench.claims_details import details_page
from flowrl_bench.claims_page import Inputs, changed_table, claims_page, read_inputs
from flowrl_bench.digest import config_id
from flowrl_bench.evidence import column
from flowrl_bench.leads import LARGER, LEADS, UNIFORM
from flowrl_bench.main_comparison import answers, arms_of, choice, lead_table
from flowrl_bench.page import Document, Image, Table
from flowrl_bench.results_file import ResultsFile, SamplesFile, joined, make_line
from flowrl_bench.suite import needed
from flowrl_bench.tables import MISSING, by_task, compared, judge_all, judge_together, levels
from flowrl_bench.verdicts import BETTER, GAINS, SECONDARY, Compare
from loading import ROOT
from matplotlib.figure import Figure

from flowrl.core.errors import ConfigError
from flowrl.training.config import RunConfig

RESULTS = ROOT / "benchmarks/results/claims.jsonl"
A, B, C = (
    {"arm": "uniform"},
    {"arm": "uniform", "learning_rate": 1e-3},
    {"arm": "uniform", "learning_rate": 2e-3},
)
STAMP = {
    "golden": [],
    "code": "c",
    "rules": "r",
    "commit": "1",
    "versions": {"python": "3"},
    "hardware": "one core of 2 (AMD EPYC)",
}


def made(claim, world, curves, seeds, cost=None):
    """Lines of a claim's runs with made-up learning curves by arm; a hundredth of reward tells the
    seeds apart. `cost`: network evaluations per update.
    """
    lines = {}
    for arm, _, seed, config in claim.configs(world, seeds):
        line = fake_line(
            [0.0, *(r + 0.002 * (seed % 10) for r in curves[arm][1:])],
            nfe=(cost or {}).get(arm, 100.0),
        )
        lines[config_id(config)] = {**make_line(config, line, "-", made=STAMP), **line}
    return lines


def main_lines(curve, world="mixture", cost=None):
    """Lines of the main comparison in a world: the arm's learning curve by its name."""
    lines = {}
    for claim in LEADS:
        if world in claim.worlds:
            curves = {arm: curve(arm) for arm in claim.arms}
            lines |= made(claim, world, curves, tuple(range(100, 108)), cost)
    return lines


def judged_pair(rule, first, second, **more):
    """A claim about arm "a" with the first curve and arm "b" with the second, judged."""
    claim = Claim("c", "A beats b.", "-", "-", {"a": A, "b": B}, rule, **more)
    world = "shapes" if claim.tasks else "mixture"
    seeds = tuple(range(5))
    case = compared(claim, world, made(claim, world, {"a": first, "b": second}, seeds), seeds)
    judge_together([case], [case])
    return case


def judged_of(lines):
    return judge_all({claim.id: claim for claim in LEADS}, lines)


LEADS_B = Compare("a", "b")


def test_a_known_winner_is_better_and_chosen():
    runs = main_lines(lambda arm: FAST if arm == "branch-grpo" else SLOW)
    judged = judged_of(runs)
    arms = arms_of(judged, "mixture")
    assert list(arms)[:2] == [UNIFORM, "branch-grpo"] and set(arms) == set(ARMS)
    rows = {row[0]: row for row in lead_table(arms, "mixture").rows}
    lead = r"\+0\.1\d\d \[0\.\d+,\s0\.\d+\]"
    update, evaluation, second = rows["branch-grpo"][3:6]
    assert re.fullmatch(rf"▲\s{lead}", evaluation)
    assert re.fullmatch(lead, update) and re.fullmatch(lead, second)  # secondary: no verdict
    assert rows["turning points"][4].startswith("=")
    assert rows["uniform"][3:6] == ("-",) * 3 and rows["uniform"][1] == "8"
    assert choice(arms).name == "branch-grpo"
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in answers(judged)]
    assert "Of 9 methods: 1 better, 8 no difference." in lines[0]
    assert (
        "2-D world: branch-grpo, which is better per evaluation and collapsed in 0 of 8" in lines[3]
    )
    assert all("Image world: runs to be made." in line for line in lines)
    # a control without runs hides no other arm
    controls = {k for k, run in runs.items() if run["config"]["rollout"]["group_size"] == 29}
    fewer = arms_of(judged_of({k: runs[k] for k in runs.keys() - controls}), "mixture")
    assert set(ARMS) - set(fewer) == {LARGER} and choice(fewer).name == "branch-grpo"
    heads = [lead_table(group, "shapes").head for group in (arms, fewer)]
    assert heads[0][5] == "minus uniform, per SD3.5-Medium second"
    assert heads[0][:-1] == heads[1]


def test_papers_rules_that_lead_and_a_rule_that_costs_more():
    """Ahead per update and behind per evaluation, so not taken."""
    papers = ("stepwise gains", "turning points")
    costs = dict.fromkeys(papers, 300.0)
    lines = main_lines(lambda arm: FAST if arm in papers else SLOW, cost=costs)
    text = [line.replace("\N{NO-BREAK SPACE}", " ") for line in answers(judged_of(lines))]
    assert "2-D world: stepwise gains: worse; turning points: worse" in text[0]
    assert "2-D world: uniform credit, because no method leads it per evaluation" in text[3]


def test_a_collapse_is_visible_and_not_taken():
    lines = main_lines(lambda arm: [0.0, 0.9, 0.95, 0.7] if arm == "tree-grpo" else SLOW)
    arms = arms_of(judged_of(lines), "mixture")
    row = next(row for row in lead_table(arms, "mixture").rows if row[0] == "tree-grpo")
    assert row[6].split() == ["8", "of", "8"] and row[4].startswith("▲")
    assert choice(arms) is None


def test_full_pages(tmp_path):
    """Every claim has a row, and a section of the details."""
    lines = {}
    for claim in CLAIMS.values():
        for world in claim.worlds:
            curves = {arm: FAST if arm == "turning points" else SLOW for arm in claim.arms}
            lines = made(claim, world, curves, tuple(range(100, 105))) | lines
    inputs = Inputs(judge_all(CLAIMS, lines), lines, tmp_path / "claims.jsonl")
    page, details = claims_page(inputs), details_page(inputs)
    written = page.write(tmp_path, "claims", "claims")
    written += details.write(tmp_path / "claims", "details")
    text, _, details_text, _ = (path.read_text() for path in written)
    for claim in CLAIMS.values():
        assert f"\n### {claim.id}\n" in details_text and claim.primary.words() in details_text
        assert claim in LEADS or f"(claims/details.md#{claim.id}) | {claim.says} |" in text
    assert MISSING not in text.partition("## What survives")[0]
    images = {block.name for block in (*page.blocks, *details.blocks) if isinstance(block, Image)}
    names = {"leads-mixture", "leads-shapes", "survival-mixture", "curves-shapes", "frontier"}
    assert names <= images


@pytest.mark.slow
def test_the_published_runs_are_those_of_the_present_claims():
    """A changed arm or default would leave published runs without a claim, or ask for
    others.
    """
    runs = {**needed(CLAIMS, "all", SEEDS), **needed(RETIRED, "all", SEEDS)}
    assert ResultsFile(RESULTS).read(runs, any_code=True)


@pytest.mark.slow
def test_the_published_page_is_generated():
    """No comparison has two verdicts, none outside the primary families has one, and `GAINS` is
    what the lines say.
    """
    samples = SamplesFile(RESULTS.with_name("claims-samples.json")).read()
    lines = joined(ResultsFile(RESULTS).read(any_code=True), samples)
    judged = judge_all(CLAIMS, lines)
    page = claims_page(read_inputs(judged, lines, RESULTS)).markdown("claims")
    assert page == (ROOT / "docs/claims.md").read_text()
    verdicts = {}
    for case in judged:
        for rule, comparison in zip(case.claim.rules, case.comparisons, strict=True):
            if comparison is not None:
                world, measure, *runs = case.claim.outcome(case.world, rule)
                key = (world, measure, frozenset(runs))
                verdicts.setdefault(key, set()).add(comparison.verdict)
    assert all(len(words) == 1 for words in verdicts.values())
    decided = [key for key, words in verdicts.items() if words != {SECONDARY}]
    assert len(decided) <= sum(map(len, PRIMARY.values())) + 2  # and the self-tests
    for (world, task), gain in GAINS.items():
        assert (gain.start, gain.best) == pytest.approx(gained(lines, world, task), abs=6e-5)


def test_changed_verdicts():
    """Of the same arms: by the same measure, or in the same claim."""
    case = judged_pair(LEADS_B, FAST, SLOW)
    outcome = list(case.claim.outcome("mixture", LEADS_B))
    row = {"claim": "d", "measure": "area", "verdict": "holds", "outcome": outcome}
    rows = [row, {**row, "measure": "nfe"}, {**row, "claim": "c", "measure": "collapse"}]
    (changed,) = changed_table([case], rows).rows
    assert changed[2:] == ("holds (`d`); holds (`c`, collapse rate)", "better ▲")
    assert not changed_table([case], [{**row, "verdict": BETTER}]).rows


def test_one_verdict_per_outcome():
    """A secondary comparison that is another claim's primary outcome has its verdict, from one
    test in the family; other secondary comparisons have none.
    """
    arms = {"a": A, "b": B}
    first = Claim("first", "-", "-", "-", arms, LEADS_B)
    measures = (Compare("a", "b", "final"), LEADS_B)
    second = Claim("second", "-", "-", "-", arms, Compare("b", "a", "early"), measures)
    lines = made(first, "mixture", {"a": FAST, "b": SLOW}, tuple(range(100, 106)))
    primary = {"mixture": ("first",)}
    judged = judge_all({"first": first, "second": second}, lines, primary)
    words = [c.verdict if c else "" for case in judged for c in case.comparisons]
    assert words == [BETTER, SECONDARY, SECONDARY, BETTER]
    repeated = judge_all({"first": first, "again": first}, lines, {"mixture": ("first", "again")})
    assert repeated[0].primary == judged[0].primary  # not two tests in Holm's correction


def test_rules_use_the_seeds_of_their_own_arms():
    claim = Claim("c", "-", "-", "-", {"a": A, "b": B, "c": C}, LEADS_B, (Compare("a", "c"),))
    lines = made(claim, "mixture", {"a": FAST, "b": SLOW, "c": SLOW}, tuple(range(100, 108)))
    for arm, _, _, config in claim.configs("mixture", (105, 106, 107)):
        if arm == "c":
            del lines[config_id(config)]
    assert compared(claim, "mixture", lines).seeds == [8, 5]


def gained(lines, world, task):
    """Reward before training, and mean final reward of the best arm."""
    ends, starts = {}, []
    for line in lines.values():
        config = RunConfig.from_dict(line["config"])
        if (config.environment.world, config.environment.task) == (world, task):
            first, *_, last = column(line, "soft")
            starts.append(first)
            ends.setdefault(config_id(config.replace(seed=0)), []).append(last)
    return np.mean(starts), max(map(np.mean, ends.values()))


def test_tasks_alone_and_levels():
    judged = judged_pair(LEADS_B, FAST, SLOW, tasks=("compositional", "text"))
    assert [c.estimate.value for c in by_task(judged)] == pytest.approx([1.1 / 6] * 2)
    assert "a 0.487, b 0.303" in levels(judged)
    assert by_task(judged_pair(LEADS_B, FAST, SLOW)) == []


def test_texts_of_a_page_are_escaped(tmp_path):
    page = Document("A title")
    page.text("Before <any> section, `code`, [a link](other.md#part).")
    page.blocks += [Table(("what",), [("a | b",)], ("what",)), Table(("none", "yet"), [])]
    markdown, html = (path.read_text() for path in page.write(tmp_path, "page"))
    assert "| a / b |" in markdown and "&lt;any&gt;" in html and "<code>code</code>" in html
    assert '<a href="other.html#part">a link</a>' in html
    page.for_paper(tmp_path / "paper", [], [], "flowrl bench 50%")
    tex = (tmp_path / "paper" / "table.tex").read_text()
    assert "% flowrl bench 50%\n" in tex and "a | b \\\\\n" in tex and "none & yet \\\\" in tex


def test_a_page_replaces_its_own_files_only(tmp_path):
    """Before anything is written; figures of pages from before they were marked count as named
    by the page.
    """
    page = Document("Of a rule against the others", kind=" against the others")
    page.blocks.append(Image("curve", Figure((1, 1)), "A curve"))
    page.write(tmp_path, "page", "images")
    (tmp_path / "images" / "curve.png").write_bytes(b"an earlier figure")
    page.title = "Another rule against the others"
    markdown, html = page.write(tmp_path, "page", "images")[:2]
    page.blocks.append(Image("photo", Figure((1, 1)), "A photo"))
    for path in (markdown, html, tmp_path / "images" / "photo.png"):
        data = path.read_bytes() if path.exists() else None
        path.write_text("mine, against the others")
        before = markdown.read_bytes()
        with pytest.raises(ConfigError, match=rf"page = .*{path.name}.* is not allowed"):
            page.write(tmp_path, "page", "images")
        assert path.read_text() == "mine, against the others" and markdown.read_bytes() == before
        if data is not None:
            path.write_bytes(data)
