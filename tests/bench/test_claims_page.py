"""The pages of the claims: answers, symbols, tables and figures, from complete, partial and missing
runs.
"""

import re
from collections.abc import Callable, Mapping

import pytest
from bench_lines import FAST, SLOW, fake_line
from flowrl_bench.arms import ARMS
from flowrl_bench.catalogue import CLAIMS
from flowrl_bench.claims import SEEDS, Claim
from flowrl_bench.claims_details import details_page
from flowrl_bench.claims_page import Inputs, cell, claims_page, default_lines, read_calibration
from flowrl_bench.digest import config_id
from flowrl_bench.leads import LEADS, UNIFORM
from flowrl_bench.main_comparison import answers, arms_of, choice, lead_table
from flowrl_bench.page import Document, Image, Table
from flowrl_bench.results_file import ResultsFile, SamplesFile, joined, make_line
from flowrl_bench.suite import needed
from flowrl_bench.tables import MISSING, Judged, by_task, judge_all, judge_together, levels
from flowrl_bench.verdicts import BETTER, FAILS, HOLDS, Compare
from loading import ROOT
from matplotlib.figure import Figure

from flowrl.core.errors import ConfigError

A, B, C = (
    {"arm": "uniform"},
    {"arm": "uniform", "learning_rate": 1e-3},
    {"arm": "uniform", "learning_rate": 2e-3},
)
FALLEN = [0.0, 0.6, 0.7, 0.1]
STAMP = {
    "golden": [],
    "code": "c",
    "rules": "r",
    "commit": "1",
    "versions": {"python": "3"},
    "hardware": "one core of 2 (AMD EPYC)",
}


def made(
    claim: Claim,
    world: str,
    curves: Mapping[str, list[float]],
    seeds: tuple[int, ...],
    cost: Mapping[str, float] | None = None,
) -> dict[str, dict]:
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


def compared(
    curve: Callable[[str], list[float]],
    world: str = "mixture",
    cost: Mapping[str, float] | None = None,
) -> dict[str, dict]:
    """Lines of the main comparison in a world: the arm's learning curve by its name."""
    lines = {}
    for claim in LEADS:
        if world in claim.worlds:
            lines |= made(
                claim, world, {arm: curve(arm) for arm in claim.arms}, tuple(range(100, 108)), cost
            )
    return lines


def judged_pair(rule, first: list[float], second: list[float], **more) -> Judged:
    """A claim about arm "a" with the first curve and arm "b" with the second, judged."""
    claim = Claim("c", "A beats b.", "-", "-", {"a": A, "b": B}, rule, **more)
    world = "shapes" if claim.tasks else "mixture"
    lines = made(claim, world, {"a": first, "b": second}, (0, 1, 2))
    return Judged(claim, world, lines, (0, 1, 2))


def judged_of(lines: Mapping[str, dict]) -> list[Judged]:
    judged = [Judged(claim, world, lines) for claim in LEADS for world in claim.worlds]
    judge_together(judged)
    return judged


LEADS_B = Compare("a", "b", expects=BETTER)


def test_a_known_winner_is_better_and_chosen():
    judged = judged_of(compared(lambda arm: FAST if arm == "branch-grpo" else SLOW))
    arms = arms_of(judged, "mixture")
    assert list(arms)[:2] == [UNIFORM, "branch-grpo"] and set(arms) == set(ARMS)
    rows = {row[0]: row for row in lead_table(arms).rows}
    lead = re.compile(r"▲\s\+0\.1\d\d \[0\.\d+,\s0\.\d+\]")
    assert all(lead.fullmatch(text) for text in rows["branch-grpo"][3:6])
    assert all(text.startswith("=") for text in rows["turning points"][3:6])
    assert rows["uniform"][3:6] == ("-",) * 3 and rows["uniform"][1] == "8"
    assert choice(arms).name == "branch-grpo"
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in answers(judged)]
    assert "branch-grpo has the largest lead (▲ +0.1" in lines[0]
    assert "Of all 13 methods, 1 leads, 12 do not differ" in lines[0]
    assert "2-D world: branch-grpo (▲ +0.1" in lines[4] and "collapsed runs: 0 of 8" in lines[4]
    assert all("Image world: too few runs yet." in line for line in lines)


def test_papers_rules_that_lead_and_a_rule_that_costs_more():
    """Ahead per update and behind per evaluation, so not taken."""
    papers = ("stepwise gains", "turning points")
    lines = compared(
        lambda arm: FAST if arm in papers else SLOW, cost=dict.fromkeys(papers, 1000.0)
    )
    text = [line.replace("\N{NO-BREAK SPACE}", " ") for line in answers(judged_of(lines))]
    assert "2-D world: stepwise gains lead (▲ +0.1" in text[0]
    assert "Of all 13 methods, 2 lead, 11" in text[0]
    assert "2-D world: stepwise gains trail (▼ -0.2" in text[1]
    assert "2-D world: uniform credit, because no method leads it per evaluation" in text[4]


def test_a_collapse_is_visible_and_not_taken():
    lines = compared(lambda arm: [0.0, 0.9, 0.95, 0.7] if arm == "dgpo" else SLOW)
    arms = arms_of(judged_of(lines), "mixture")
    row = next(row for row in lead_table(arms).rows if row[0] == "dgpo")
    assert row[6].split() == ["8", "of", "8"] and row[3].startswith("▲")
    assert choice(arms) is None


def test_full_pages(tmp_path):
    """Answers and a figure come first, then tables; every claim has a row and a section of the
    details.
    """
    lines: dict[str, dict] = {}
    for claim in CLAIMS.values():
        for world in claim.worlds:
            curves = {arm: FAST if arm == "turning points" else SLOW for arm in claim.arms}
            lines = made(claim, world, curves, (100, 101, 102)) | lines
    inputs = Inputs(judge_all(CLAIMS, lines), lines, tmp_path / "claims.jsonl")
    page, details = claims_page(inputs), details_page(inputs)
    kinds = [block.kind for block in page.blocks]
    assert kinds[:2] == ["items", "image"] and kinds.index("image") < kinds.index("table")
    written = page.write(tmp_path, "claims", "claims")
    written += details.write(tmp_path / "claims", "details")
    text, html, details_text, details_html = (path.read_text() for path in written)
    for claim in CLAIMS.values():
        assert f"\n### {claim.id}\n" in details_text and claim.rule.words() in details_text
        row = f"| [{claim.id}](claims/details.md#{claim.id}) | {claim.says} |"
        assert claim in LEADS or row in text
    assert '<a href="claims/details.html#tuning">tuning</a>' in html
    assert '<h3 id="tuning">' in details_html
    assert MISSING not in text.partition("## What survives")[0]
    images = {block.name for block in (*page.blocks, *details.blocks) if isinstance(block, Image)}
    names = {"leads-mixture", "leads-shapes", "survival-mixture", "curves-shapes", "frontier"}
    assert names <= images


@pytest.mark.slow
def test_the_published_runs_are_those_of_the_present_claims():
    """A changed arm or default would leave published runs without a claim, or ask for
    others.
    """
    wanted = needed(CLAIMS, "all", SEEDS)
    assert ResultsFile(ROOT / "benchmarks/results/claims.jsonl").read(wanted, any_code=True)


@pytest.mark.slow
def test_the_published_page_is_generated():
    path = ROOT / "benchmarks/results/claims.jsonl"
    samples = SamplesFile(path.with_name("claims-samples.json")).read()
    lines = joined(ResultsFile(path).read(any_code=True), samples)
    defaults = ResultsFile(default_lines(path)).read(any_code=True)
    inputs = Inputs(judge_all(CLAIMS, lines), lines, path, defaults, read_calibration(path))
    assert claims_page(inputs).markdown("claims") == (ROOT / "docs/claims.md").read_text()


@pytest.mark.parametrize(
    ("rule", "first", "second", "text", "label"),
    [
        (LEADS_B, FAST, SLOW, "✓ holds here, +0.18 [+0.18, +0.18]", HOLDS),
        (LEADS_B, SLOW, FAST, "✗ does not hold here, -0.18", FAILS),
        (LEADS_B, SLOW, SLOW, "✗ does not hold here, +0.00", FAILS),
        (Compare("a", "b", "updates", BETTER), FAST, SLOW, "✓ holds here, ratio 0.", HOLDS),
    ],
)
def test_cells_have_symbols(rule, first, second, text, label):
    judged = judged_pair(rule, first, second)
    assert cell(judged).startswith(text) and judged.label == label


def test_tasks_alone_and_levels():
    judged = judged_pair(LEADS_B, FAST, SLOW, tasks=("compositional", "text"))
    alone = by_task(judged)
    assert [c.text.rpartition(", ")[2] for c in alone] == ["compositional alone", "text alone"]
    assert all(c.estimate.value == pytest.approx(1.1 / 6) for c in alone)
    text = "Mean reward over training: a 0.485, b 0.302; before training 0.000."
    assert levels(judged) == text
    assert by_task(judged_pair(LEADS_B, FAST, SLOW)) == []


def test_documents_say_the_same_twice(tmp_path):
    page = Document("A title")
    page.text("Before <any> section, `code`, [a link](other.md#part).")
    page.items(["first", "second"])
    page.heading("One")
    page.blocks.append(Table(("what", "x"), [("a | b", "1"), ("good", "2")], ("what",)))
    markdown, html = (path.read_text() for path in page.write(tmp_path, "page"))
    assert markdown == (
        "# A title\n\nBefore <any> section, `code`, [a link](other.md#part).\n\n"
        "1. first\n2. second\n\n"
        "## One\n\n| what | x |\n| --- | --- |\n| a / b | 1 |\n| good | 2 |\n"
    )
    assert "&lt;any&gt;" in html and "<code>code</code>" in html
    assert '<a href="other.html#part">a link</a>' in html
    assert html.count("<section>") == html.count("</section>") <= 1
    assert "<ol><li>first</li><li>second</li></ol>" in html


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
