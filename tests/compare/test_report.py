"""Reports: numbers of the results, figures for any values, colours, escaped and self-contained
pages, lazy imports.
"""

import csv
import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from seeded import seeded
from small_run import TINY_RUN, write_rows

from flowrl.compare.arms import method_arms
from flowrl.compare.comparison import CompareConfig
from flowrl.compare.conclusion import cannot_show, shows, untuned, verdict
from flowrl.compare.figures import curves, trajectory
from flowrl.compare.paper import ARXIV, bibliography, references
from flowrl.compare.report import collapse_text, table_rows, table_text, write_report
from flowrl.compare.results import (
    Comparison,
    Mean,
    collapsed,
    evaluation_noise,
    load_comparison,
    run_folder,
    summarise,
)
from flowrl.compare.tuned import tuned_arms
from flowrl.core.errors import ConfigError
from flowrl.core.prompt import Prompt
from flowrl.methods import METHODS
from flowrl.run.config import preset
from flowrl.run.io import write_json
from flowrl.run.presets import MODEL_ONLY, method_overrides, tuned
from flowrl.run.records import RunRecord, mean_curve
from flowrl.run.report.figures import image_grid, proxy_and_heldout
from flowrl.run.report.pages import inline, markdown_code
from flowrl.run.report.style import PALE, colour, marker, save, spread_labels
from flowrl.run.report.weight_comparison import (
    SamplingSettings,
    ScoredImages,
    WeightComparison,
    write_evaluation,
)

EVIL = '<script>alert("1")</script>'
REMOTE = re.compile(r"""(src|href|url)\s*[=(]\s*["']?(http|//|file)""")
FIGURES = ("curves", "strict", "samples", "trajectory", "values", "proxy")


def record(method, seed, rewards, heldout=None):
    rows = []
    counts = {"nfe": 100, "calls": 10, "reward_calls": 20, "train_nfe": 40, "trajectories": 10}
    counts["phases"] = {"rollout": 1.0, "reward": 0.5, "update": 0.5}
    for i, reward in enumerate(rewards):
        evaluation = {"reward": reward, "strict": reward / 2} | (heldout or {})
        totals = {"nfe_total": 100 * i, "seconds_total": 2.0 * i}
        rows.append({"iteration": i, "evaluation": evaluation, **totals, **counts})
    return RunRecord(method, seed, Path(), tuple(rows), True)


def comparison(**rewards):
    """A comparison of arms with the rewards of each of their seeds."""
    runs = [record(a, seed, r) for a, seeds in rewards.items() for seed, r in enumerate(seeds)]
    run = {"environment": {"world": "shapes", "reward_form": "soft"}}
    config = {"arms": {arm: {} for arm in rewards}, "seeds": [0, 1], "run": run}
    return Comparison(Path(), config, tuple(runs))


def test_summary_numbers_worked_out_by_hand():
    base, fast = summarise(
        comparison(base=[[0.4, 0.5, 0.6], [0.4, 0.6, 0.8]], fast=[[0.4, 0.8, 0.8], [0.4, 0.8, 0.7]])
    )
    t = 12.7062  # of 1 degree of freedom
    assert vars(base.final) == pytest.approx({"mean": 0.7, "half": t * 0.1}, rel=1e-4)
    assert base.lead == Mean(0.0, 0.0) and base.worst == 0.6
    # +0.2, -0.1
    assert vars(fast.lead) == pytest.approx({"mean": 0.05, "half": t * 0.15}, rel=1e-4)
    assert (base.collapsed, fast.collapsed, fast.worst) == (0, 0, 0.7)
    axes = ("iteration", "forwards", "seconds_total")
    assert [fast.to_baseline[axis].cost for axis in axes] == pytest.approx(
        [0.75, 0.75 * (100 + 3 * 40), 1.5]
    )
    assert base.to_baseline["iteration"].cost == pytest.approx(2.0)
    assert fast.to_baseline["forwards"].ratio.value == pytest.approx(0.75 / 2)
    assert (fast.nfe_per_trajectory, fast.rewards_per_trajectory) == (10, 2)


STEADY = {
    "pickscore": (21.0, 2.0, 1.0),
    "hps": (0.28, 0.05, 0.03),
    "clip": (0.80, 0.10, 0.08),
    "geneval": (0.63, 0.27, 0.45),
}
"""Start, gain, and standard deviation of an image's reward."""


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("pickscore", (21.0, 21.5, 22.0, 22.4, 23.0, 22.7, 17.0)),
        ("pickscore", (21.0, 23.0, 17.0)),
        ("hps", (0.28, 0.30, 0.31, 0.33, 0.33, 0.24)),
        ("clip", (0.80, 0.84, 0.90, 0.89, 0.65)),
        ("geneval", (0.63, 0.80, 0.90, 0.88, 0.50)),
        ("geneval", (0.63, 0.60, 0.20)),  # it never gained
    ],
)
def test_a_collapse_has_no_unit(name, rewards):
    noise = evaluation_noise(STEADY[name][2], 64)
    assert collapsed(rewards, noise) and not collapsed(rewards[:-1], noise)
    for scale, shift in ((1e-3, 0.0), (1e3, -500.0)):
        moved = [scale * reward + shift for reward in rewards]
        assert collapsed(moved, scale * noise) and not collapsed(moved[:-1], scale * noise)


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("samples", [32, 192])
def test_a_steady_run_seldom_counts_as_collapsed(name, samples):
    """20 evaluations with independent noise, judged after each: at most 5% of the runs."""
    start, gain, std = STEADY[name]
    generator = np.random.default_rng(samples)
    curves = start + gain * np.linspace(0, 1, 20)
    curves = curves + generator.normal(0, std / samples**0.5, (400, 20))
    noise = evaluation_noise(std, samples)
    alarms = [any(collapsed(c[:n], noise) for n in range(2, 21)) for c in curves]
    assert np.mean(alarms) <= 0.05


def test_a_collapse_loses_half_of_the_gain_and_more_than_the_usual_changes():
    assert collapsed([0.4, 0.9, 0.64]) and not collapsed([0.4, 0.9, 0.66])
    # it fell by 0.2 before, on its way to the best
    assert not collapsed([0.4, 0.7, 0.5, 0.9, 0.35]) and collapsed([0.4, 0.7, 0.7, 0.9, 0.35])
    assert collapsed([0.2, 0.9, 0.95, 0.96, 0.3])  # a steep rise is no noise
    assert not collapsed([0.5]) and not collapsed([0.5, 0.5])
    runs = comparison(base=[[0.1, 0.5], [0.1, 0.6]], fast=[[0.1, 0.9, 0.2], [0.1, 0.9]])
    assert collapse_text(summarise(runs)) == "Collapsed: fast 1 of 2 seeds"
    assert collapse_text(summarise(comparison(base=[[0.1, 0.5]]))) == ""


def test_means_over_seeds_use_the_iterations_of_all_runs():
    """A metric that failed in one evaluation of one seed is left out of the mean there, and no
    other point moves.
    """
    runs = [record("a", 0, [0.1, 0.2, 0.3]), record("a", 1, [0.3, 0.4, 0.5])]
    for run, values in zip(runs, ((1.0, None, 3.0), (2.0, 2.5, 5.0)), strict=True):
        for row, value in zip(run.rows, values, strict=True):
            row["evaluation"]["heldout"] = {"ocr": value}
    assert mean_curve(runs, "iteration", "heldout", "ocr") == ([0.0, 2.0], [1.5, 4.0])
    assert mean_curve(runs, "seconds_total", "heldout", "ocr") == ([0.0, 4.0], [1.5, 4.0])
    assert mean_curve(runs, "nfe_total", "missing") == ([], [])
    rows = table_rows(summarise(replace(comparison(a=[]), runs=tuple(runs))))
    assert ("held out: ocr", ["1.500 to 4.000 ± 12.706"]) in rows


BASE = [[0.1, 0.5], [0.1, 0.6]]
LEAD = [[0.1, 0.9], [0.1, 0.98]]


@pytest.mark.parametrize(
    ("arms", "shown", "open_questions"),
    [
        (
            {"base": BASE, "low": [[0.1, 0.2]] * 2, "fast": LEAD},
            "fast ends 0.390 above base (95% interval +0.263 to +0.517); low cannot be told apart"
            " from it; base goes from 0.100 to 0.550 ± 0.635.",
            "which of base and low is ahead (2 seeds leave differences of up to 0.985 possible)"
            " or how far the arms would get at tuned settings.",
        ),
        (
            {"base": BASE, "fast": LEAD},
            "fast ends 0.390 above base (95% interval +0.263 to +0.517); base goes from 0.100 to"
            " 0.550 ± 0.635.",
            "how far the arms would get at tuned settings.",
        ),
        (
            {"base": BASE, "other": BASE[::-1], "third": BASE[::-1]},
            "other and third cannot be told apart from base; base goes from 0.100 to 0.550 ± 0.635.",
            "which of base, other and third is ahead (2 seeds leave differences of up to 1.271"
            " possible) or how far",
        ),
        (
            {"base": BASE[:1], "fast": LEAD[:1]},
            "fast ends 0.400 above base; base goes from 0.100 to 0.500.",
            "whether a difference is chance (one seed) or how far",
        ),
        (
            {"base": BASE, "fast": [[0.1, 0.9, 0.2], [0.1, 0.9, 0.9]]},
            "fast cannot be told apart from base; base goes from 0.100 to 0.550 ± 0.635 and fast"
            " collapsed in 1 of 2 seeds.",
            "which of base and fast is ahead (2 seeds leave differences of up to 3.812 possible),"
            " how often runs collapse (1 of 4 did), the order at equal cost (fast has 2.0 times the"
            " network evaluations of base) or how far",
        ),
        ({"base": BASE}, "base goes from 0.100 to 0.550 ± 0.635.", "how far the arms would get"),
        (
            {"base": BASE} | {f"fast{n}": [[0.1, 0.9 + n], [0.1, 1.0 + n]] for n in range(5)},
            "fast4 ends 4.400 above base (95% interval +4.400 to +4.400), fast3 ends 3.400 above it"
            " (95% interval +3.400 to +3.400), fast2 ends 2.400 above it (95% interval +2.400 to"
            " +2.400) and 2 more; base goes",
            "how far the arms",
        ),
    ],
)
def test_the_two_sentences_are_those_of_the_results(arms, shown, open_questions):
    runs = comparison(**arms)
    assert shows(runs, summarise(runs)).startswith(f"In held-out reward, {shown}")
    assert cannot_show(runs, summarise(runs)).startswith(
        f"The comparison cannot show {open_questions}"
    )


def test_equal_costs_with_unequal_updates_leave_the_order_after_updates_open():
    runs = comparison(base=[[0.1, 0.3, 0.5], [0.1, 0.3, 0.6]], fast=LEAD)
    for run in runs.of("fast"):
        for row in run.rows:
            row.update(nfe=200, train_nfe=80)
    text = cannot_show(runs, summarise(runs))
    assert "the order after equal updates (base has 2.0 times the updates of fast)" in text


def test_every_tuned_method_counts_as_tuned_and_a_part_or_number_of_its_own_does_not(tmp_path):
    for world, arms in tuned().items():
        run, methods = preset("default").apply(world=world), [a["method"] for a in arms.values()]
        given = method_arms([*filter(None, dict.fromkeys(methods))])
        given |= {"other loss": {"loss": "gspo"}, "larger": {"group_size": 24}}
        given |= {"slow": {"learning_rate": 0.001}, "rsm untuned": {"method": "dance-grpo"}}
        changed, _ = tuned_arms(run, given, {})
        for arm, settings in changed.items():
            if "method" in settings:
                needed = method_overrides("default", world, settings["method"])
                changed[arm] = {**needed, **settings}
        runs = [
            replace(record(arm, 0, [0.1]), config=json.loads(json.dumps(config.as_dict())))
            for arm, config in CompareConfig(run, changed, (0,)).examples().items()
        ]
        compared = Comparison(tmp_path, {"arms": changed, "run": {}}, tuple(runs))
        assert untuned(compared) == ["other loss", "larger", "slow", "rsm untuned"]


def test_the_table_has_every_lead_with_its_interval():
    summaries = summarise(comparison(base=BASE, fast=LEAD))
    lines = table_text(summaries).splitlines()
    (row,) = (line for line in lines if line.startswith(" fast "))
    assert all(cells[1] in row for _, cells in table_rows(summaries))
    assert lines[-3] == "▲ above the baseline" and "○" not in "".join(lines)


def test_dashed_lines_are_the_baselines_end_and_narrow_panels_form_a_column():
    runs = comparison(base=[[0.1, 0.5]], fast=[[0.1, 0.9, 0.9]])
    for narrow, across in ((False, [0, 1, 2]), (True, [0, 0, 0])):
        figure = curves(runs, narrow=narrow)
        dashed = [
            [line.get_xydata()[0] for line in axes.lines if line.get_linestyle() == "--"]
            for axes in figure.axes
        ]
        assert [len(lines) for lines in dashed] == [1, 2, 2]
        assert [(a[0], b[1]) for a, b in dashed[1:]] == [(220, 0.5), (2.0, 0.5)]
        assert all("(" in axes.get_xlabel() for axes in figure.axes)
        columns = [axes.get_subplotspec().colspan.start for axes in figure.axes]
        assert columns == across


@pytest.mark.parametrize(
    ("mean", "half", "symbol"),
    [(0.1, 0.05, "▲"), (-0.1, 0.05, "▼"), (0.1, 0.2, "○"), (0.1, float("nan"), ""), (0, 0, "")],
)
def test_a_verdict_is_that_of_the_interval(mean, half, symbol):
    assert verdict(Mean(mean, half)) == symbol


def test_a_report_can_be_written_before_any_run_has_finished(tmp_path):
    arms = method_arms(("flow-grpo", "dense-grpo", "tp-grpo"))
    config = CompareConfig(preset("tiny").apply(), arms, (0,), command=EVIL)
    write_json(tmp_path / "config.json", config.as_dict())
    page = write_report(tmp_path).read_text()
    assert "No run has been evaluated yet" in page and "<script>" not in page
    folder = tmp_path / "runs" / "flow-grpo-seed0"
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config.jobs()["flow-grpo-seed0"].as_dict())
    lines = [json.dumps(row) for row in record("flow-grpo", 0, [0.4, 0.5]).rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"iteration": 2, "re']))
    assert "3 runs have not finished" in write_report(tmp_path).read_text()


def comparison_folder(folder, names, **config):
    """Files as `flowrl compare` writes them, with values chosen by hand."""
    values = CompareConfig(TINY_RUN, method_arms(("flow-grpo",)), (0, 1), command=EVIL).as_dict()
    values |= {"arms": method_arms(names), "hardware": EVIL, **config}
    write_json(folder / "config.json", values)
    for number, (name, seed) in enumerate(itertools.product(names, (0, 1))):
        run = folder / "runs" / run_folder(name, seed)
        run.mkdir(parents=True)
        heldout = {"heldout": {f"mine.py:{EVIL}": 0.3}}
        rows = record(name, seed, [0.4, 0.5 + number / 100], heldout).rows
        rows[-1]["value_r2"] = [None, 0.1, 0.2]
        if number == 1:
            rows[-1]["stopped"] = f"budget: {EVIL}"
        write_rows(run, rows)
        write_trajectory(run, [0.5, 0.4, 0.3, 0.45, 0.6])
        samples = {"reward_before": [0.1, 0.2], "reward_after": [0.3, 0.1]}
        samples["prompts"] = ["towards 0 degrees", EVIL]
        config = TINY_RUN.replace(method=name, seed=seed).as_dict()
        for file, content in {"config": config, "samples": samples, "done": {}}.items():
            write_json(run / f"{file}.json", content)
        points = {side: torch.rand(2, 2, 1, 1) for side in ("before", "after")}
        save_file(points, run / "samples.safetensors")
        save_file({"images": torch.rand(5, 2, 1, 1)}, run / "trajectory.safetensors")


def write_trajectory(folder, rewards):
    values = {"rewards": rewards, "members": [rewards, rewards[::-1]]}
    write_json(folder / "trajectory.json", values | {"prompt": "p", "chosen": 0})


def test_the_report_contains_every_run_escapes_every_value_and_loads_nothing(tmp_path):
    names = ["flow-grpo", "tp-grpo", EVIL, "mine.py:Rule"]
    described = {"mine.py:Rule": f"Gains of {EVIL}", EVIL: ""}
    comparison_folder(tmp_path, names, descriptions=described, preset=EVIL, versions={EVIL: EVIL})
    page = write_report(tmp_path).read_text()
    assert not REMOTE.search(page)
    assert "<script" not in page and page.count("&lt;script&gt;alert(") > 15
    for number, (name, seed) in enumerate(itertools.product(names, (0, 1))):
        name = name if name != EVIL else "&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;"
        row = page.split(f"<tr><td>{name}</td><td>{seed}</td>")[1].split("</tr>")[0]
        state = "stopped by budget: &lt;script&gt;" if number == 1 else "finished</td>"
        assert f"<td>{0.5 + number / 100:.3f}</td>" in row and f"<td>{state}" in row
    assert page.count('src="data:image/png;base64,') == len(FIGURES)
    assert page.count('srcset="data:image/png;base64,') == 1
    first = page.split("</section>")[0]
    assert "<b>In held-out reward, " in first and "</b> The comparison cannot show " in first
    assert first.index("<figure") < first.index("minus the baseline") < first.index("tuned here")
    assert all((tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in FIGURES)
    paper = tmp_path / "paper"
    rows = list(csv.DictReader((paper / "results.csv").open()))
    last = {(row["arm"], row["seed"]): float(row["evaluation.reward"]) for row in rows}
    ends = [0.5 + number / 100 for number in range(8)]
    assert last == dict(zip(itertools.product(names, "01"), ends, strict=True))
    assert all(row[f"evaluation.heldout.mine.py:{EVIL}"] == "0.3" for row in rows)
    tex = (paper / "table.tex").read_text()
    assert tex.count(r"\bottomrule") == tex.count(r"\toprule") > 3 and "script$>$alert" in tex
    assert "arxiv-2602.06422" in (paper / "references.bib").read_text()
    for name in FIGURES:
        assert (paper / f"{name}.pdf").read_bytes()[:4] == b"%PDF"
        assert b"<svg" in (paper / f"{name}.svg").read_bytes()[:1000]
    assert "An observer stopped 1 of 8 runs early" in page
    assert "<b>mine.py:Rule</b>: Gains of &lt;script" in page
    settings = set(re.findall("<span>([a-z_]+)</span>", page))
    # 0: the method's
    assert not settings & {*MODEL_ONLY, "noise_level"} and "num_steps" in settings


def test_every_method_and_built_in_part_cites_known_papers():
    cited = {paper for compose in METHODS.values() for paper in ARXIV.findall(compose.__doc__)}
    assert cited <= bibliography().keys()
    text = references([{"method": "value-grpo"}, {"method": "awm", "credit": "mine.py:Rule"}])
    assert set(ARXIV.findall(text)) >= {"1506.02438", "2505.05470", "2509.25050"}
    nested = references([{"credit": "weighted(rule=depth-relative)"}])
    assert {"2508.04324", "2509.06040"} <= set(ARXIV.findall(nested))
    assert "2602.06422" not in text + nested


def test_the_trajectory_is_the_one_that_changes_most_and_flat_ones_have_no_turning_points(tmp_path):
    comparison_folder(tmp_path, ["flow-grpo", "tp-grpo"])
    runs = load_comparison(tmp_path)
    flat = [0.999, 0.998, 0.9995, 0.999, 1.0]

    def drawn(values):
        for run in runs.runs:
            chosen = (run.arm, run.seed) == ("flow-grpo", 1)
            write_trajectory(run.folder, values if chosen else flat)
        figure = trajectory(runs)
        return figure, [text.get_text() for text in figure.legends[0].get_texts()]

    figure, labels = drawn([0.1, 0.05, 0.9, 0.1, 0.1])
    assert figure.get_suptitle() == 'Trajectory of flow-grpo, seed 1, after training: "p"'
    assert "turning point" not in labels  # no trend
    assert "turning point" in drawn([0.1, 0.05, 0.9, 0.85, 0.95])[1]
    figure, labels = drawn(flat)
    assert "turning point" not in labels
    assert all(np.ptp(axes.get_ylim()) >= 0.0999 for axes in figure.axes)


def weight_comparison(channels, size):
    generator = seeded()
    shapes = (3, 2), (2, channels, size, size)
    drawn = ([torch.rand(shape, generator=generator) for shape in shapes] for _ in range(2))
    base, trained = (ScoredImages({EVIL: scores}, shown) for scores, shown in drawn)
    facts = {"command": EVIL, "guidance": 1.5, "resolution": None}
    how = SamplingSettings(steps=3, count=2)
    return WeightComparison({"base": base, EVIL: trained}, ("a fox", EVIL, "a hat"), how, facts)


@pytest.mark.parametrize(("channels", "size", "kind"), [(3, 8, "images"), (2, 1, "samples")])
def test_the_page_of_an_evaluation(channels, size, kind, tmp_path):
    """Numbers as in evaluation.json, escaped, self-contained; gains first."""
    compared = weight_comparison(channels, size)
    write_evaluation(compared, tmp_path, html=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.json", "grid.png"]
    write_evaluation(compared, tmp_path, html=True)
    page, score = (tmp_path / "report.html").read_text(), compared.scores[EVIL]
    write_evaluation(compared, tmp_path, html=False)
    assert not (tmp_path / "report.html").exists()
    assert "<script" not in page and not REMOTE.search(page)
    for value in (f"{score.base:.4f}", f"{score.difference:+.4f}", f"{score.low:+.4f} to "):
        assert value in page
    assert f"3 prompts, 2 {kind} per prompt" in " ".join(page.split())
    assert page.count("data:image/png;base64,") == 1
    base, trained = (side.scores[EVIL] for side in compared.sides.values())
    change = (trained - base).mean(1).tolist()
    shown = re.findall(r"<td>([+-]0\.\d{4})</td></tr>", page)
    assert shown == [f"{value:+.4f}" for value in sorted(change, reverse=True)]


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.1, 0.9, 0.5], [0.9]])
@pytest.mark.parametrize("count", [1, 7])
def test_figures_can_be_drawn_whatever_the_values(rewards, count):
    names = [f"rule {i}" for i in range(count)]
    runs = comparison(**{name: [rewards] for name in names})
    for run in runs.runs:
        for row in run.rows:
            row["evaluation"]["diversity"] = 0.5
    proxy = proxy_and_heldout({name: runs.of(name) for name in names})
    for figure in (curves(runs), curves(runs, "strict"), proxy):
        figure.savefig(os.devnull, format="png", dpi=50)
        if count > 4:  # a row per arm, whose curve lies above the grey ones
            grey = [line.get_color() == PALE for line in figure.axes[0].lines]
            assert grey[:count] == [True] * (count - 1) + [False]
            assert figure.axes[0].get_title() == names[0]
    assert curves(runs, "missing") is None
    heights = spread_labels([rewards[-1]] * count, 0.0, 1.0, 0.075)
    assert min(heights) >= -1e-9 and max(heights) <= 1 + 1e-9
    assert len({round(height, 6) for height in heights}) == count


def test_a_change_of_settings_is_a_labelled_line_in_the_figure_of_a_single_run():
    run = record("mine", 0, [0.1, 0.2, 0.3, 0.4], {"heldout": {"other": 0.5}})
    run.rows[2]["changed"] = {"learning_rate": [0.1, 0.01], "prompts": ["$a", "x" * 80]}
    for runs, lines in (([run], 1), ([run, record("mine", 1, [0.1])], 0)):
        figure = proxy_and_heldout({"mine": runs})
        assert figure is not None
        figure.savefig(os.devnull, format="png", dpi=50)
        for axes in figure.axes:
            drawn = [line for line in axes.lines if line.get_linestyle() == "-."]
            assert [line.get_xydata()[0, 0] for line in drawn] == [1.5] * lines
            assert [text.get_text() for text in axes.texts] == [
                "learning_rate 0.1 -> 0.01, prompts '$a' -> ..."
            ] * lines


def test_files_that_cannot_be_written_are_named(tmp_path):
    grid = image_grid(torch.rand(2, 3, 3, 8, 8), torch.rand(2, 3), [Prompt("a"), Prompt("b")])
    save(grid, tmp_path / "new" / "grid.png")
    assert len(grid.axes) == 6 and (tmp_path / "new" / "grid.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"grid\.xyz cannot be written"):
        save(grid, tmp_path / "grid.xyz")


def test_code_and_emphasis_in_texts():
    text = inline(f"`code` of *stress* {EVIL}")
    assert "<code>code</code> of <em>stress</em>" in text and "<script" not in text
    assert inline("2 * 3 * 4 and `a<b`") == "2 * 3 * 4 and <code>a&lt;b</code>"
    assert markdown_code("plain") == "`plain`" and markdown_code("a`b\nc``d") == "``` a`b c``d ```"


def test_eight_methods_have_markers_and_colours_of_their_own():
    names = ["flow-grpo", "stepwise-flow-grpo", "tp-grpo", "dance-grpo", "a", "b", "c", "d"]
    assert len({marker(name, names) for name in names}) == 8
    assert len({colour(name, names) for name in names}) == 8
