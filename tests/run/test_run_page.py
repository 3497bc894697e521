"""The page of a run: what is on it, while the run goes on, after an error, and after a kill; and
the writers around it.
"""

import csv
import json
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest
from small_run import SMALL, error_of, flowrl_, rows_of, words

from flowrl.cli.main import main
from flowrl.core.errors import PartError
from flowrl.run.config import load_config, preset
from flowrl.run.job import Run
from flowrl.run.records import load_run
from flowrl.run.report import run_page as pages
from flowrl.run.report.run_curves import MOST_POINTS, _ticks, panels_of
from flowrl.run.strips import MOST_ROWS
from flowrl.run.table import scalars

REWARD = (
    "weighted-sum(models={'small': 'jpeg-compressibility', 'large': 'jpeg-incompressibility'},"
    " weights={'large': 0.5})"
)
HELD_OUT = ("palette", "clarity")
IMAGES = {
    "preset": "tiny",
    "reward": REWARD,
    "iterations": 3,
    "kl_weight": 0.01,
    "save_experience": 1,
    "checkpoint_every": 1,
    "keep_checkpoints": 9,
}
SHORT = SMALL.replace(iterations=3, eval_every=1, keep_checkpoints=9)


class Page(HTMLParser):
    """What the tests read on a page: the panels by metric with their number of lines, samples by
    iteration, best and worst images, facts, cells of tables, and the refresh.
    """

    def __init__(self, path):
        super().__init__()
        self.text = path.read_text()
        self.panels, self.samples, self.cards = {}, {}, {"best": [], "worst": []}
        self.facts, self.rows, self.refresh, self.changes = {}, [], None, 0
        self.place, self.label, self.group, self.cell = "", "", None, None
        self.feed(self.text)
        assert self.text.startswith("<!doctype html>") and self.text.endswith("</html>\n")
        assert "<script" not in self.text and "http://" not in self.text

    def handle_starttag(self, tag, attrs):
        given, kind = dict(attrs), dict(attrs).get("class", "")
        if tag == "meta" and given.get("http-equiv") == "refresh":
            self.refresh = int(given["content"])
        if kind == "panel":
            self.panel = self.panels[given["data-metric"]] = []
        if tag == "polyline":
            self.panel.append(len(given["points"].split()))
        self.changes += kind == "change"
        if kind == "sample":
            kinds = self.cards[given["data-kind"]] if "data-kind" in given else None
            at = self.samples.setdefault(int(given.get("data-iteration", -1)), [])
            self.group = at if kinds is None else kinds
        if tag == "img" and self.group is not None:
            self.group.append([given["alt"], given["src"]])
        if tag == "tr":
            self.rows.append([])
        self.place = kind or tag

    def handle_data(self, data):
        data = data.strip()
        if self.place == "reward":
            self.group[-1].append(data)
        if self.place == "p" and data.startswith("advantage "):
            self.group[-1].append(data.removeprefix("advantage "))
        if self.place == "dt":
            self.label = data
        if self.place in ("dd", "code") and self.label:
            self.facts.setdefault(self.label, data)
        if self.place in ("td", "th"):
            self.rows[-1].append(data)

    def handle_endtag(self, tag):
        self.place = ""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A finished run of the built-in image world with a combined reward."""
    folder = tmp_path_factory.mktemp("page") / "run"
    assert main(["train", *words(**IMAGES, out=folder), "--heldout-rewards", *HELD_OUT]) == 0
    return folder


def test_every_reward_and_every_part_has_a_panel(images):
    page, rows = Page(images / "report.html"), load_run(images).rows
    expected = {"reward_mean", "evaluation/reward", "kl", "clip_fraction", "images/brightness"}
    expected |= {f"evaluation/heldout/{name}" for name in HELD_OUT}
    expected |= {f"parts/{name}" for name in rows[-1]["parts"]}
    assert expected <= page.panels.keys() and len(rows[-1]["parts"]) == 2
    assert rows[0]["evaluation"]["spread"]  # standard deviations are no rewards
    assert not any("spread" in name for name in page.panels)
    assert page.panels["reward_mean"] == [3] and page.panels["evaluation/reward"] == [4]
    assert page.refresh is None and page.facts["state"] == "finished"
    assert page.facts["iteration"] == "3 of 3" and page.facts["device"] == "cpu"
    assert page.facts["images"].startswith("18 for training")


def test_prompts_and_rewards_are_with_the_images_of_every_evaluation(images):
    """All as the files have them; the last are the samples at the end."""
    page = Page(images / "report.html")
    page.samples.pop(-1, None)
    assert [*page.samples] == [0, 1, 2, 3]
    for iteration, shown in page.samples.items():
        stored = json.loads((images / "samples" / f"iteration-{iteration:06d}.json").read_text())
        assert len(shown) == len(stored["samples"]) == 4
        for (alt, image, reward), sample in zip(shown, stored["samples"], strict=True):
            assert alt == f"{sample['prompt']}, iteration {iteration}"
            digits = len(reward.partition(".")[2])
            assert digits >= 2 and reward == f"{sample['reward']:.{digits}f}"
            assert image.startswith("data:image/") and len(image) > 200
    at_end = json.loads((images / "samples.json").read_text())
    assert [one["reward"] for one in stored["samples"]] == at_end["reward_after"]
    assert len({image for _, image, _ in page.samples[3]}) > 1  # a piece of the strip each


def test_best_and_worst_images_have_reward_and_advantage(images):
    """Those of the table of the iteration."""
    with open(images / "experience" / "000003.csv") as file:
        table = list(csv.DictReader(file))
    samples = sorted(
        (
            float(row["reward"]),
            fmean(float(row[k]) for k in row if k.startswith("advantage_")),
            row["text"],
        )
        for row in table
    )
    cards = Page(images / "report.html").cards
    for kind, expected in (("worst", samples[:3]), ("best", samples[:-4:-1])):
        shown = [(float(one[2]), float(one[3]), one[0]) for one in cards[kind]]
        assert len(shown) == 3
        for (reward, advantage, text), (r, a, prompt) in zip(shown, expected, strict=True):
            assert abs(reward - r) < 0.006 and abs(advantage - a) < 0.006 and text == prompt
    assert samples[0][0] < samples[-1][0]


def test_settings_have_their_origin(images):
    rows = Page(images / "report.html").rows
    shown = [row for row in rows if len(row) == 3 and row[0] != "setting"]
    origins = {row[0]: row[2] for row in shown}
    order = [row[0] for row in shown]
    assert origins["iterations"] == origins["reward"] == "option"
    assert origins["groups"] == "preset tiny" and origins["world"] == "default"
    assert origins["clip_range"] == "default of world shapes"
    assert order.index("groups") < order.index("clip_range")  # what was chosen comes first
    values = {row[0]: row[1] for row in shown}
    assert values["heldout_rewards"] == "palette, clarity" and values["learning_rate"] == "0.004"


@pytest.mark.parametrize(
    ("line", "setting", "origin"),
    [
        ("--preset tiny --method branch-grpo", "group_size", "method branch-grpo"),
        ("--preset tiny --method branch-grpo", "method", "option"),
        ("--preset tiny --stop-on collapse", "observe", "option"),
        ("--preset {root}/own.yaml,tiny", "learning_rate", "file {root}/own.yaml"),
        ("--config {root}/first/config.yaml", "groups", "preset tiny"),
        ("--config {root}/other/config.json", "group_size", "file {root}/other/config.json"),
    ],
)
def test_origins_of_options_presets_methods_and_files(line, setting, origin, tmp_path):
    (tmp_path / "own.yaml").write_text("optim: {learning_rate: 1e-3}\n")
    short = "--world mixture --task direction --iterations 1"
    assert flowrl_(f"train --preset tiny {short} --out {tmp_path}/first") == 0
    Run(SHORT.replace(iterations=1), tmp_path / "other").execute()
    (tmp_path / "other" / "origins.json").unlink()  # as of an earlier version
    line = line.format(root=tmp_path) + ("" if "--config" in line else f" {short}")
    assert flowrl_(f"train {line} --out {tmp_path}/run") == 0
    origins = json.loads((tmp_path / "run" / "origins.json").read_text())
    assert origins[setting] == origin.format(root=tmp_path)
    assert "keep_checkpoints" not in origins or origin.startswith("file")


def test_a_resume_keeps_the_origins_and_adds_its_own(tmp_path):
    """The page has a line where the settings have changed."""
    run = tmp_path / "run"
    line = "--preset tiny --world mixture --task direction --iterations 3 --checkpoint-every 1"
    assert flowrl_(f"train {line} --keep-checkpoints 9 --out {run}") == 0
    again = f"train --resume {run} --from 2 --iterations 4 --learning-rate 1e-3 --change"
    assert flowrl_(f"{again} --eval-every 2") == 0
    origins = json.loads((run / "origins.json").read_text())
    changed = "changed by a resume after iteration 2"
    assert origins["groups"] == "preset tiny" and origins["task"] == "option"
    assert {origins[n] for n in ("learning_rate", "iterations", "eval_every")} == {changed}
    page = Page(run / "report.html")
    assert page.changes == len(page.panels) and ["learning_rate", "0.001", changed] in page.rows
    assert ["3", "learning_rate 0.02 -> 0.001"] in page.rows


def test_settings_of_python_are_given(tmp_path):
    """And those that a run has measured or that are the default are not."""
    Run(SHORT, tmp_path / "run", page=True).execute()
    origins = json.loads((tmp_path / "run" / "origins.json").read_text())
    assert origins["groups"] == "given" and "seed" not in origins and "method" not in origins


class Watch:
    """A user's writer, which reads the page after the built-in ones have written it."""

    def __init__(self, folder):
        self.folder, self.pages, self.rows, self.evaluated, self.ended = folder, [], [], [], 0

    def row(self, row, evaluation):
        self.rows.append(row["iteration"])
        self.evaluated.append(evaluation is not None)
        self.pages.append(Page(self.folder / "report.html"))

    def finish(self):
        self.ended += 1
        self.pages.append(Page(self.folder / "report.html"))


def test_the_page_of_a_run_in_progress_is_loaded_again(tmp_path, monkeypatch):
    """It is complete at every time, and of the row before: writers of the user come last. A user's
    writer is called after a pause, too.
    """
    monkeypatch.setattr("flowrl.run.writers.SHARE", 1e9)
    watch, config = Watch(tmp_path / "run"), SHORT.replace(eval_every=2)
    run = Run(
        config, tmp_path / "run", page=True, writers=[watch], stop=lambda: len(watch.rows) == 3
    )
    assert not run.execute()
    assert watch.rows == [0, 1, 2] and watch.evaluated == [True, False, True]
    *going, paused = watch.pages
    assert all(page.refresh == pages.REFRESH for page in going) and paused.refresh is None
    assert [page.facts["iteration"] for page in going] == ["0 of 3", "0 of 3", "2 of 3"]
    assert {page.facts["state"] for page in going} == {"running"}
    assert paused.facts["state"] == "not running: paused, or killed" and watch.ended == 1
    assert Run(config, tmp_path / "run", page=True, writers=[watch]).execute(resume=True)
    assert watch.pages[-2].facts["state"] == "running"  # the first row of a resume
    assert watch.pages[-1].facts["state"] == "finished" and watch.ended == 2


@pytest.mark.parametrize(("share", "written"), [(1e9, 5), (0.0, 2)])
def test_the_page_takes_a_small_share_of_the_time(share, written, tmp_path, monkeypatch):
    """It is always written at the first row and at the end."""
    monkeypatch.setattr("flowrl.run.writers.SHARE", share)
    calls, page = [], pages.run_page
    monkeypatch.setattr(pages, "run_page", lambda *given: calls.append(1) or page(*given))
    Run(SHORT, tmp_path / "run", page=True).execute()
    assert len(calls) == written


class Breaks:
    fields = ("metrics",)

    def observe(self, record):
        if record.iteration == 2:
            raise ValueError("the <cause>")


def test_after_an_error_the_page_says_so_until_the_run_goes_on(tmp_path):
    run = tmp_path / "run"
    config = SHORT.replace(strict=True)
    with pytest.raises(PartError, match="the <cause>"):
        Run(config, run, page=True, observers=[Breaks()]).execute()
    page = Page(run / "report.html")
    assert page.facts["state"].startswith("stopped by an error: observer Breaks: Breaks.observe")
    assert "the <cause>" in page.facts["state"] and page.refresh is None
    assert page.facts["iteration"] == "1 of 3"
    assert flowrl_(f"report {run}") == 0  # the error is in the folder
    assert Page(run / "report.html").facts["state"] == page.facts["state"]
    assert Run(config, run, page=True).execute(resume=True)
    assert Page(run / "report.html").facts["state"] == "finished"
    assert not (run / "error.json").exists()


def test_a_start_that_fails_leaves_no_page(tmp_path):
    class AtOnce(Breaks):
        def observe(self, record):
            raise ValueError

    with pytest.raises(PartError):
        Run(SHORT.replace(strict=True), tmp_path / "run", page=True, observers=[AtOnce()]).execute()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_page_of_a_killed_run(tmp_path):
    """The last one is complete; `flowrl report` says that the run is not in progress; a resume
    writes it again, and deletes images of iterations that are computed again.
    """
    run = tmp_path / "run"
    line = words(preset="tiny", iterations=2000, eval_every=2, checkpoint_every=5, out=run)
    process = subprocess.Popen([sys.executable, "-m", "flowrl", "train", *line])
    until = time.monotonic() + 100
    strips = lambda: sorted((run / "samples").glob("iteration-*.json"))  # noqa: E731
    while len(strips()) < 8 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    page = Page(run / "report.html")
    assert page.facts["state"] == "running" and page.refresh
    done = len(rows_of(run)) - 1
    assert flowrl_(f"report {run} --out {tmp_path}/page.html") == 0
    now = Page(tmp_path / "page.html")
    assert now.facts["state"] == "not running: paused, or killed" and now.refresh is None
    assert now.facts["iteration"] == f"{done} of 2000"
    (run / "samples" / "iteration-001000.json").write_text("{}")  # of an iteration after it
    (run / "samples" / "iteration-001000.png").write_bytes(b"")
    assert flowrl_(f"train --resume {run} --iterations {done + 3}") == 0
    page = Page(run / "report.html")
    assert page.facts["state"] == "finished" and page.panels["reward_mean"] == [done + 3]
    assert 0 < len(page.samples) <= MOST_ROWS and strips()[-1].stem < "iteration-001000"
    assert_table(run)


def assert_table(run):
    """metrics.csv has every number of metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with open(run / "metrics.csv") as file:
        lines = list(csv.DictReader(file))
    found = [{name: float(text) for name, text in line.items() if text} for line in lines]
    assert found == [scalars(row) for row in rows] and None not in lines[0]


def test_the_table_is_complete_after_evaluations_and_at_the_end(tmp_path):
    """Also of a run without a page, which goes back to a checkpoint."""
    run, checked = tmp_path / "run", []

    class Check:
        def row(self, row, evaluation):
            if evaluation is not None:
                assert_table(run)
                checked.append(row["iteration"])

        def finish(self):
            assert_table(run)
            checked.append("end")

    config = SHORT.replace(iterations=5, eval_every=2, strict=True)
    assert Run(config, run, writers=[Check()]).execute()
    assert Run(config, run, writers=[Check()]).execute(resume=True, start="000003")
    assert checked == [0, 2, 4, 5, "end", 4, 5, "end"]
    assert not (run / "report.html").exists() and not (run / "samples").exists()


class Fails:
    def __init__(self, method):
        self.method, self.calls = method, 0

    def row(self, row, evaluation):
        self._fail("row")

    def finish(self):
        self._fail("finish")

    def _fail(self, method):
        if method == self.method:
            self.calls += 1
            raise KeyError("no")


@pytest.mark.parametrize("method", ["row", "finish"])
def test_a_writer_that_fails_is_reported_once(method, tmp_path):
    """The others write; with `strict` the run ends with an error."""
    states, fails, run = [], Fails(method), tmp_path / "run"
    given = dict(page=True, trial=False)
    assert Run(SHORT, run, states.append, writers=[fails, fails], **given).execute()
    texts = [state["warning"] for state in states if "warning" in state]
    assert len(texts) == 2 and all("writer Fails" in text and "no" in text for text in texts)
    assert fails.calls == (8 if method == "row" else 2)
    assert Page(run / "report.html").facts["state"] == "finished"
    strict = Run(SHORT.replace(strict=True), tmp_path / "strict", writers=[Fails(method)], **given)
    with pytest.raises(PartError, match="writer Fails"):
        strict.execute()


def test_a_page_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    """And the last one remains as it was."""
    states, run, render = [], tmp_path / "run", pages.render

    def once(*given, **values):
        if run.joinpath("report.html").exists():
            raise RuntimeError("of the page")
        return render(*given, **values)

    monkeypatch.setattr("flowrl.run.writers.SHARE", 1e9)
    monkeypatch.setattr(pages, "render", once)
    assert Run(SHORT, run, states.append, page=True).execute()
    (text,) = [state["warning"] for state in states if "writer Page" in state.get("warning", "")]
    assert "of the page (shown once)" in text
    assert Page(run / "report.html").facts["iteration"] == "0 of 3"


def test_points_of_the_mixture_world_are_no_images(tmp_path):
    Run(SHORT, tmp_path / "run", page=True).execute()
    page = Page(tmp_path / "run" / "report.html")
    assert not page.samples and page.panels["evaluation/reward"] == [4]
    assert not any(name.startswith("images/") for name in page.panels)


def test_runs_side_by_side_are_lines_of_one_panel(tmp_path):
    """With the settings in which they differ, and the state of each."""
    first, second = tmp_path / "first", tmp_path / "second"
    Run(SHORT, first).execute()
    Run(SHORT.replace(seed=1, learning_rate=1e-3), second, stop=lambda: True).execute()
    assert flowrl_(f"report {first} {second} --out {tmp_path}/both.html") == 0
    page = Page(tmp_path / "both.html")
    assert page.panels["reward_mean"] == [3, 1] and page.panels["evaluation/reward"] == [4, 2]
    assert ["learning_rate", "0.02", "0.001"] in page.rows and ["seed", "0", "1"] in page.rows
    assert (
        "<dd>finished</dd>" in page.text and "<dd>not running: paused, or killed</dd>" in page.text
    )


def test_failed_calls_of_rewards_are_among_the_costs(tmp_path):
    run = tmp_path / "run"
    Run(SHORT, run).execute()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1] |= {"reward_errors": {"mine": 2}, "skipped": 1}
    rows[3] |= {"reward_errors": {"mine": 1, "other": 4}, "skipped": 3}
    rows[0]["evaluation"] |= {"reward_errors": {"mine": 5}, "skipped": 2}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert flowrl_(f"report {run}") == 0
    facts = Page(run / "report.html").facts
    assert facts["failed reward calls"] == "mine 8, other 4" and facts["skipped samples"] == "6"
    assert "evaluation/skipped" not in Page(run / "report.html").panels


def test_many_iterations_are_drawn_as_means(tmp_path):
    run = tmp_path / "run"
    Run(SHORT, run).execute()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    count = 3 * MOST_POINTS
    many = [
        {**rows[1], "iteration": i, "reward_mean": float(i % 3), "kl": float("nan")}
        for i in range(1, count + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [rows[0], *many]))
    panels = {p.metric: p for p in panels_of([load_run(run)])["Rewards"]}
    (line,) = panels["reward_mean"].lines
    heights = {point.partition(",")[2] for point in line.path.split()}
    assert len(line.path.split()) == MOST_POINTS and len(heights) == 1  # means of 0, 1, 2
    assert all(p.metric != "kl" for found in panels_of([load_run(run)]).values() for p in found)


def test_the_noise_scale_is_that_of_the_last_iterations(tmp_path):
    """2 groups in 2 mini-batches: 1 prompt per update, times mean noise over mean signal."""
    run = tmp_path / "run"
    Run(SHORT, run).execute()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    noise = [(9.0, 9.0)] * 10 + [(3.0, 6.0), (-1.0, 4.0)] * 10
    many = [
        {**rows[1], "iteration": i, "gradient_signal": signal, "gradient_noise": own}
        for i, (signal, own) in enumerate(noise, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [rows[0], *many]))
    assert flowrl_(f"report {run}") == 0
    scale = "5 prompts, an update has 1 (the last 20 iterations)"
    assert Page(run / "report.html").facts["noise scale"] == scale
    write = [rows[0], *many[:9]]  # too few to tell
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in write))
    assert flowrl_(f"report {run}") == 0 and "noise scale" not in Page(run / "report.html").facts


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (20.9, 23.1, ["21.0", "21.5", "22.0", "22.5", "23.0"]),
        (0.515618, 0.516422, ["0.5158", "0.5160", "0.5162", "0.5164"]),
        (1.2e-6, 1.9e-6, ["1.2e-06", "1.4e-06", "1.6e-06", "1.8e-06"]),
        (-4.02, -3.98, ["-4.02", "-4.01", "-4.00", "-3.99", "-3.98"]),
        (0.0, 4e6, ["0", "1e+06", "2e+06", "3e+06", "4e+06"]),
    ],
)
def test_ticks_are_round_numbers(low, high, texts):
    assert [text for _, text in _ticks(low, high, 5)] == texts


def test_a_page_names_commands_that_work(images, capsys):
    """Those of a run with code of its own have --trust."""
    page = Page(images / "report.html")
    assert page.facts["export"] == f"flowrl export {images}@best"
    assert page.facts["continue"] == f"flowrl train --resume {images}"
    assert page.facts["sample"].startswith(f"flowrl sample --weights {images}@best")
    capsys.readouterr()
    assert "is no run" in error_of(f"report {images.parent}/nowhere", capsys)


def test_the_runs_of_python_and_comparisons_have_no_page_unless_asked(tmp_path):
    run = Run(preset("tiny").apply(), tmp_path / "run")
    run.execute()
    assert not (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "samples").exists()
    assert load_config(tmp_path / "run" / "config.json") and Path(tmp_path / "run/metrics.csv")
