"""Reports: numbers of the results table, figures for any values, escaped and self-contained pages,
lazy imports.
"""

import json
import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path

import numpy as np
import pytest
import torch
from jinja2 import UndefinedError
from safetensors.torch import save_file

from flowrl.cli.figures import curves, phases
from flowrl.cli.image_grids import image_grid, trajectory
from flowrl.cli.pages import inline, markdown_code, render
from flowrl.cli.report import (
    collapse_text,
    headline,
    table_rows,
    table_text,
    write_evaluation,
    write_report,
)
from flowrl.cli.style import save, spread_labels
from flowrl.training.arms import credit_arms, method_arms
from flowrl.training.compare import CompareConfig, run_label
from flowrl.training.config import preset
from flowrl.training.presets import MODEL_ONLY
from flowrl.training.results import (
    Comparison,
    Mean,
    RunRecord,
    collapsed,
    load_comparison,
    mean_curve,
    mean_of,
    run_folder,
    summarise,
)
from flowrl.training.weight_comparison import (
    SamplingSettings,
    ScoredImages,
    WeightComparison,
    compare_scores,
)

RULES = '''
from dataclasses import dataclass
from flowrl.credit import Uniform
from flowrl.probes import NoProbe
@dataclass(frozen=True)
class Own(Uniform):
    """Gains, doubled.

    More of them.
    """
    a: float = 1.0
@dataclass(frozen=True)
class Bare:
    probe = NoProbe()
    def assign(self, values, decisions):
        return values[..., 1:] * 0
'''
EVIL = '<script>alert("1")</script>'
REMOTE = re.compile(r"""(src|href|url)\s*[=(]\s*["']?(http|//|file)""")


def record(method, seed, rewards, seconds=2.0, finished=True):
    rows = []
    for i, reward in enumerate(rewards):
        totals = {
            "nfe_total": 100 * i,
            "seconds_total": seconds * i,
            "reward_calls_total": 0,
            "train_nfe_total": 0,
        }
        row = {"iteration": i, "evaluation": {"reward": reward, "strict": reward / 2}, **totals}
        if i:
            row |= {
                "nfe": 100,
                "calls": 10,
                "reward_calls": 20,
                "train_nfe": 40,
                "trajectories": 10,
            }
            row["phases"] = {"rollout": 1.0, "reward": 0.5, "update": 0.5}
        rows.append(row)
    return RunRecord(method, seed, None, tuple(rows), finished)  # pyright: ignore[reportArgumentType]


def test_summary_numbers_worked_out_by_hand():
    runs = (
        record("base", 0, [0.4, 0.5, 0.6]),
        record("base", 1, [0.4, 0.6, 0.8]),
        record("fast", 0, [0.4, 0.8, 0.8]),
        record("fast", 1, [0.4, 0.8, 0.7]),
    )
    config = {
        "arms": {"base": {}, "fast": {}},
        "seeds": [0, 1],
        "run": {"environment": {"world": "shapes"}},
    }
    base, fast = summarise(Comparison(Path("."), config, runs))
    # t of 1 degree
    assert base.final.mean == pytest.approx(0.7) and base.final.half == pytest.approx(
        12.7062 * 0.1, rel=1e-4
    )
    assert base.lead == Mean(0.0, 0.0) and base.worst == 0.6
    # +0.2, -0.1
    assert fast.lead.mean == pytest.approx(0.05) and fast.lead.half == pytest.approx(
        12.7062 * 0.15, rel=1e-4
    )
    assert (base.collapsed, fast.collapsed) == (0, 0) and fast.worst == 0.7
    assert base.to_baseline_iterations == pytest.approx(2.0)
    assert fast.to_baseline_iterations == pytest.approx(0.75)
    assert fast.to_baseline_nfe == pytest.approx(75) and fast.to_baseline_seconds == pytest.approx(
        1.5
    )
    assert (
        fast.nfe_per_trajectory == 10
        and fast.rewards_per_trajectory == 2
        and fast.seconds_reward == 0.5
    )
    assert mean_of([]).text() == "-" and mean_of([0.5]).text() == "0.500"
    assert mean_curve([], "iteration") == ([], [])


def test_a_collapse_ends_far_below_the_best_or_below_the_start():
    assert collapsed([0.4, 0.9, 0.79]) and not collapsed([0.4, 0.9, 0.81])
    assert collapsed([0.4, 0.41, 0.37]) and not collapsed([0.4, 0.41, 0.39])


def test_means_over_seeds_use_the_iterations_of_all_runs():
    """A metric that failed in one evaluation of one seed is left out of the mean there, and no
    other point moves.
    """
    first, second = record("a", 0, [0.1, 0.2, 0.3]), record("a", 1, [0.3, 0.4, 0.5], seconds=4.0)
    for run, values in ((first, (1.0, None, 3.0)), (second, (2.0, 2.5, 5.0))):
        for row, value in zip(run.rows, values, strict=True):
            row["evaluation"]["heldout"] = {"ocr": value}
    assert mean_curve([first, second], "iteration", "heldout", "ocr") == ([0.0, 2.0], [1.5, 4.0])
    assert mean_curve([first, second], "seconds_total", "heldout", "ocr") == (
        [0.0, 6.0],
        [1.5, 4.0],
    )
    assert mean_curve([first, second], "nfe_total", "missing") == ([], [])
    (summary,) = summarise(
        Comparison(Path("."), {"arms": {"a": {}}, "seeds": [0, 1], "run": {}}, (first, second))
    )
    assert summary.heldout["held out: ocr"].text() == "1.500 to 4.000 ± 12.706"
    assert ("held out: ocr", ["1.500 to 4.000 ± 12.706"]) in table_rows(
        [summary]
    ) and "held out: ocr" in table_text([summary])


def test_the_headline_has_intervals_and_the_machine_spread():
    config = {
        "arms": {"base": {}, "fast": {}},
        "seeds": [0, 1],
        "run": {"environment": {"world": "shapes"}},
    }
    finals = {("base", 0): 0.5, ("base", 1): 0.6, ("fast", 0): 0.9, ("fast", 1): 0.98}
    runs = [record(name, seed, [0.1, final]) for (name, seed), final in finals.items()]
    comparison = Comparison(Path("."), config, tuple(runs))
    text = headline(comparison, summarise(comparison))
    assert "base changes from 0.100 to 0.550 ± 0.635; fast ends 0.390 above it" in text
    assert text.endswith("(95% interval +0.263 to +0.517). 2 seeds.")
    single = Comparison(Path("."), config, (runs[0], runs[2]))
    text = headline(single, summarise(single))
    assert text.endswith("fast ends 0.400 above it. With one seed, the interval is unknown.")
    near = Comparison(
        Path("."),
        config,
        (*runs[:2], record("fast", 0, [0.1, 0.508]), record("fast", 1, [0.1, 0.606])),
    )
    assert headline(near, summarise(near)).endswith(
        "A difference below 0.009 may also come from the rounding of another processor."
    )


def test_a_report_can_be_written_before_any_run_has_finished(tmp_path):
    config = CompareConfig(
        preset("tiny").apply(),
        method_arms(("flow-grpo", "dense-grpo", "tp-grpo")),
        (0,),
        command='flowrl compare --out "<script>"',
    )
    (tmp_path / "config.json").write_text(json.dumps(config.as_dict()))
    page = write_report(tmp_path).read_text()
    assert "No run has been evaluated yet" in page and "<script>" not in page
    folder = tmp_path / "runs" / "flow-grpo-seed0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.jobs()["flow-grpo-seed0"].as_dict()))
    rows = record("flow-grpo", 0, [0.4, 0.5]).rows
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 2, "re'
    )
    assert "3 runs have not finished" in write_report(tmp_path).read_text()


def comparison_folder(folder, names, world="mixture"):
    """Files as `flowrl compare` writes them, with values chosen by hand."""
    run = preset("tiny").apply(world=world, task="direction")
    config = CompareConfig(run, method_arms(("flow-grpo",)), (0, 1), command=f"flowrl {EVIL}")
    values = config.as_dict() | {"arms": method_arms(names), "hardware": EVIL}
    (folder / "config.json").write_text(json.dumps(values))
    for number, (name, seed) in enumerate((n, s) for n in names for s in (0, 1)):
        run = folder / "runs" / run_folder(name, seed)
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({"algorithm": {"method": name}, "seed": seed}))
        rows = record(name, seed, [0.4, 0.5 + number / 100]).rows
        for row in rows:
            row["evaluation"]["heldout"] = {f"mine.py:{EVIL}": 0.3}
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        samples = {
            "prompts": ["towards 0 degrees"] * 2,
            "reward_before": [0.1, 0.2],
            "reward_after": [0.3, 0.1],
        }
        (run / "samples.json").write_text(json.dumps(samples))
        save_file(
            {name: torch.rand(2, 2, 1, 1) for name in ("before", "after")},
            run / "samples.safetensors",
        )
        members = [[0.5, 0.4, 0.3, 0.45, 0.6], [0.5, 0.6, 0.7, 0.55, 0.4]]
        trajectory = {
            "prompt": EVIL,
            "chosen": 0,
            "rewards": members[0],
            "members": members,
            "tweedie": members[1],
        }
        (run / "trajectory.json").write_text(json.dumps(trajectory))
        save_file({"images": torch.rand(5, 2, 1, 1)}, run / "trajectory.safetensors")
        (run / "done.json").write_text("{}")


def test_the_report_marks_runs_that_an_observer_stopped(tmp_path):
    comparison_folder(tmp_path, ["flow-grpo"])
    file = tmp_path / "runs/flow-grpo-seed1/metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[-1]["stopped"] = f"budget: {EVIL}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    assert "An observer stopped 1 of 2 runs early" in page
    assert "<td>stopped by budget: &lt;script&gt;" in page and EVIL not in page


def test_the_report_contains_every_run_and_loads_nothing(tmp_path):
    names = ["flow-grpo", "tp-grpo", "mine.py:Rule"]
    comparison_folder(tmp_path, names)
    page = write_report(tmp_path).read_text()
    assert page.startswith("<!doctype html>") and not REMOTE.search(page)
    for number, (name, seed) in enumerate((n, s) for n in names for s in (0, 1)):
        row = page.split(f"<tr><td>{name}</td><td>{seed}</td>")[1].split("</tr>")[0]
        assert f"<td>{0.5 + number / 100:.3f}</td>" in row and "<td>finished</td>" in row
    for name, cells in table_rows(
        summarise(Comparison(tmp_path, json.loads((tmp_path / "config.json").read_text()), ()))
    ):
        label = escape(name).replace("/", "/<wbr>")
        assert f"<th>{label}</th>" in page and not cells
    figures = ("curves", "strict", "samples", "trajectory", "phases", "proxy")
    assert page.count('src="data:image/png;base64,') == len(figures)
    # the proxy's figure is scaled
    assert page.count('srcset="data:image/png;base64,') == len(figures) - 1
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in figures)
    assert "not finished" not in page and "custom rule" in page and "2505.05470" in page
    algorithm = page.split("<h3>Algorithm</h3>")[1].split("<h3>")[0]
    assert "<span>window</span><span>1:3</span>" in algorithm and "eval_steps" not in algorithm
    assert "noise_level" not in algorithm  # 0: the method's


def test_rules_are_described_and_settings_of_models_left_out(tmp_path):
    comparison_folder(tmp_path, ["flow-grpo", "Mine(a=1)", "Bare"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["descriptions"] = {"Mine(a=1)": f"Gains of {EVIL}", "Bare": ""}
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = write_report(tmp_path).read_text()
    assert (
        f"<b>Mine(a=1)</b>: Gains of {escape(EVIL, quote=False).replace(chr(34), '&#34;')}." in page
    )
    assert "<b>Bare</b>: custom rule." in page and "-seed0" not in page
    assert (
        not set(re.findall("<span>([a-z_]+)</span>", page)) & set(MODEL_ONLY)
        and "<span>num_steps</span>" in page
    )


def test_the_first_lines_of_docstrings_describe_the_methods(tmp_path):
    (tmp_path / "rules.py").write_text(RULES)
    specs = tuple(f"{tmp_path}/rules.py:{name}" for name in ("Own(a=2.0)", "Bare"))
    found = CompareConfig(
        preset("tiny").apply(world="mixture"),
        method_arms(("dense-grpo",)) | credit_arms(specs),
        (0,),
    ).descriptions()
    assert (
        found["Own(a=2.0)"] == "Gains, doubled"
        and found["Bare"] == ""
        and "gains of ODE completions" in found["dense-grpo"]
    )


def test_the_trajectory_is_the_one_that_changes_most_and_flat_ones_have_no_turning_points(tmp_path):
    comparison_folder(tmp_path, ["flow-grpo", "tp-grpo"])
    comparison = load_comparison(tmp_path)
    flat, shaken = [0.999, 0.998, 0.9995, 0.999, 1.0], [0.1, 0.05, 0.9, 0.85, 0.95]

    def drawn(values, name="flow-grpo"):
        for run in comparison.runs:
            own = values if run_label(run.arm, run.seed) == f"{name}, seed 1" else flat
            record = {"prompt": "p", "chosen": 0, "rewards": own, "members": [own], "tweedie": own}
            (run.folder / "trajectory.json").write_text(json.dumps(record))
        return [trajectory(comparison, narrow) for narrow in (False, True)]

    for figure in drawn(shaken):
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        title = " ".join(figure.get_suptitle().split())
        assert (
            "consistent turning point" in labels
            and title == 'Trajectory of flow-grpo, seed 1, after training: "p"'
        )
    for figure in drawn(flat):
        assert not any("turning point" in text.get_text() for text in figure.legends[0].get_texts())
        assert all(np.ptp(axes.get_ylim()) >= 0.0999 for axes in figure.axes)


def test_table_txt_is_one_table_with_a_legend_of_its_symbols():
    config = {
        "arms": {"base": {}, "fast": {}},
        "seeds": [0, 1],
        "run": {"environment": {"world": "shapes"}},
    }
    finals = {("base", 0): 0.5, ("base", 1): 0.6, ("fast", 0): 0.9, ("fast", 1): 0.98}
    runs = tuple(record(name, seed, [0.1, final]) for (name, seed), final in finals.items())
    summaries = summarise(Comparison(Path("."), config, runs))
    lines = table_text(summaries).splitlines()
    assert (
        sum(line.startswith(" fast ") for line in lines) == 1
        and sum(line.startswith(" arm ") for line in lines) == 1
    )
    (row,) = (line for line in lines if line.startswith(" fast "))
    assert all(cells[1] in row for _, cells in table_rows(summaries))
    assert (
        lines[-2] == "▲ above the baseline"
        and "○" not in "".join(lines)
        and lines[-1].startswith("±: half")
    )
    assert collapse_text(summaries) == ""
    fallen = Comparison(
        Path("."),
        config,
        (*runs[:2], record("fast", 0, [0.1, 0.9, 0.2]), record("fast", 1, [0.1, 0.9])),
    )
    assert collapse_text(summarise(fallen)) == "Collapsed: fast 1 of 2 seeds"


def test_many_methods_are_named_in_the_headline():
    names = [f"rule-{i}" for i in range(5)]
    config = {
        "arms": {name: {} for name in names},
        "seeds": [0, 1],
        "run": {"environment": {"world": "shapes"}},
    }
    finals = (0.5, 0.9, 0.1, 0.91, 0.5)
    runs = tuple(
        record(n, s, [0.1, f + s / 100]) for n, f in zip(names, finals, strict=True) for s in (0, 1)
    )
    runs = (*runs[:-2], record("rule-4", 0, [0.1, 0.4]), record("rule-4", 1, [0.1, 0.6]))
    comparison = Comparison(Path("."), config, runs)
    text = headline(comparison, summarise(comparison))
    assert (
        "above it by the 95% intervals: rule-1, rule-3; below it: rule-2; not distinguishable from"
        " it: rule-4. 2 seeds." in text
    )


def test_every_value_of_the_report_is_escaped(tmp_path):
    comparison_folder(tmp_path, ["flow-grpo", EVIL])
    config = json.loads((tmp_path / "config.json").read_text())
    for group in config["run"].values():
        if isinstance(group, dict):
            group.update({name: EVIL for name, value in group.items() if isinstance(value, str)})
    config |= {"preset": EVIL, "versions": {EVIL: EVIL}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = write_report(tmp_path).read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(") > 15


def weight_comparison(channels=3, size=8):
    generator = torch.Generator().manual_seed(0)
    sides = [torch.rand(3, 2, generator=generator) for _ in range(2)]
    shown = [torch.rand(2, channels, size, size, generator=generator) for _ in range(2)]
    base, trained = (
        ScoredImages({EVIL: scores}, images) for scores, images in zip(sides, shown, strict=True)
    )
    facts = {"command": EVIL, "weights": EVIL, "guidance": 1.5, "resolution": None}
    return WeightComparison(
        {EVIL: compare_scores(*sides)},
        base,
        trained,
        ("a fox", EVIL, "a hat"),
        SamplingSettings(steps=3, count=2),
        facts,
    )


@pytest.mark.parametrize("channels", [3, 2])
def test_the_page_of_an_evaluation(channels, tmp_path):
    """Images, and points of the 2-D world: numbers as in evaluation.json, escaped,
    self-contained.
    """
    found = weight_comparison(channels, 8 if channels == 3 else 1)
    write_evaluation(found, tmp_path, html=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.json", "grid.png"]
    write_evaluation(found, tmp_path, html=True)
    page, score = (tmp_path / "report.html").read_text(), found.scores[EVIL]
    assert "<script" not in page and not REMOTE.search(page)
    for value in (
        f"<td>{score.base:.4f}</td>",
        f"<td>{score.difference:+.4f}</td>",
        f"{score.low:+.4f} to {score.high:+.4f}",
    ):
        assert value in page
    assert "<span>guidance</span><span>1.5</span>" in page and "<span>resolution</span>" not in page
    kind = "images" if channels == 3 else "samples"
    assert (
        f"3 prompts, 2 {kind} per prompt" in " ".join(page.split())
        and page.count("data:image/png;base64,") == 1
    )


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.5, 0.5, 0.5], [0.1, 0.9], [0.3]])
@pytest.mark.parametrize("methods", [1, 2, 7])
def test_curves_can_be_drawn_whatever_the_values(rewards, methods):
    names = [f"rule {i}" for i in range(methods)]
    config = {
        "arms": {name: {} for name in names},
        "seeds": [0],
        "run": {"environment": {"reward_form": "soft"}},
    }
    comparison = Comparison(Path("."), config, tuple(record(name, 0, rewards) for name in names))
    for figure in (curves(comparison), curves(comparison, "strict"), phases(comparison)):
        assert figure is not None
        figure.savefig(os.devnull, format="png", dpi=50)
    heights = spread_labels([rewards[-1]] * methods, 0.0, 1.0, 0.075)
    assert min(heights) >= -1e-9 and max(heights) <= 1 + 1e-9
    assert len({round(height, 6) for height in heights}) == methods


def test_files_that_cannot_be_written_are_named(tmp_path):
    from flowrl.core.errors import ConfigError

    grid = image_grid(torch.rand(2, 3, 3, 8, 8), torch.rand(2, 3), ("a", "b"))
    save(grid, tmp_path / "new" / "grid.png")
    assert len(grid.axes) == 6 and (tmp_path / "new" / "grid.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"grid\.xyz cannot be written"):
        save(grid, tmp_path / "grid.xyz")


def test_packages_render_templates_of_their_own(tmp_path, monkeypatch):
    """A package outside flowrl extends the base template."""
    templates = tmp_path / "otherpages" / "templates"
    templates.mkdir(parents=True)
    (templates.parent / "__init__.py").write_text("")
    (templates / "own.html.j2").write_text(
        '{% extends "base.html.j2" %}{% from "macros.html.j2" import figure, table %}{% block title'
        " %}{{ title }}{% endblock %}{% block main %}{{ text|inline }}{{ table(head, rows) }}{{"
        " figure(png, title) }}{% endblock %}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    values = {
        "title": EVIL,
        "text": f"`code` of *stress* {EVIL}",
        "head": [EVIL],
        "rows": [[EVIL], [1]],
        "png": b"png",
    }
    page = render("own.html.j2", "otherpages", **values)
    assert (
        "<script" not in page
        and "--accent" in page
        and "<code>code</code> of <em>stress</em>" in page
    )
    assert 'src="data:image/png;base64,cG5n"' in page and "<td>1</td>" in page
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        render("own.html.j2", "otherpages")


def test_filters():
    assert inline("2 * 3 * 4 and `a<b`") == "2 * 3 * 4 and <code>a&lt;b</code>"
    assert markdown_code("plain") == "`plain`" and markdown_code("a`b\nc``d") == "``` a`b c``d ```"


def test_the_command_line_starts_without_figures():
    """Neither matplotlib nor jinja2 nor the figures are imported before they are used."""
    code = (
        "import sys; import flowrl.cli.main; import flowrl.cli.progress\nprint([name for name in"
        " sys.modules if name.partition('.')[0] == 'matplotlib' or"
        " name.startswith('flowrl.cli.report')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
