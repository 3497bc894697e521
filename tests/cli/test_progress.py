"""Progress of runs: the time left on simulated clocks, the live table and the results table in
terminals of any width.
"""

import heapq
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flowrl.cli.progress import Display
from flowrl.cli.remaining import Remaining, Work, duration, makespan, work_of
from flowrl.cli.report import print_table
from flowrl.io import write_json
from flowrl.training.arms import credit_arms, method_arms
from flowrl.training.compare import CompareConfig
from flowrl.training.config import preset
from flowrl.training.results import ArmSummary, Change, Mean


class Simulation:
    """Runs that take known times: `start` seconds, then `rate` seconds per unit of work, `workers`
    at a time.
    """

    def __init__(self, works, kinds, rates, start, workers):
        self.now, self.works, self.rates = 0.0, works, rates
        self.remaining = Remaining(works, kinds, workers, clock=lambda: self.now)
        self.events = []
        free = [0.0] * workers
        heapq.heapify(free)
        for name, work in works.items():
            at = heapq.heappop(free)
            self.events.append((at, name, 0))
            at += start
            for iteration in range(1, work.iterations + 1):
                at += rates[kinds[name]] * work.between(iteration - 1, iteration)
                self.events.append((at, name, iteration))
            heapq.heappush(free, at)
        self.end = max(at for at, _, _ in self.events)

    def estimates(self):
        """(time, estimated seconds) after every event."""
        for at, name, iteration in sorted(self.events, key=lambda event: (event[0], -event[2])):
            self.now = at
            if iteration == 0:
                self.remaining.began(name)
            else:
                self.remaining.reached(name, iteration)
            if iteration == self.works[name].iterations:
                self.remaining.ended(name)
            yield at, self.remaining.seconds()


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_the_time_left_is_that_of_a_simulation(workers, slow):
    """Two methods, one with six times the work per iteration, evaluations that cost as much as 4
    iterations, slow starts.

    Exact as soon as every method has been timed over a period of evaluations; before that, from the
    planned costs alone, off by no more than the factor between the methods' speeds.
    """
    works = {
        f"{kind}-{seed}": Work(12, cost, 4 * cost, 4)
        for kind, cost in (("slow", 60.0), ("fast", 10.0))
        for seed in range(3)
    }
    kinds = {name: name.partition("-")[0] for name in works}
    simulation = Simulation(works, kinds, {"slow": 0.01 * slow, "fast": 0.01}, 2.0, workers)
    known = 0
    for at, seconds in simulation.estimates():
        actual = simulation.end - at
        if seconds is None:
            assert at < 0.2 * simulation.end or workers == 5
            continue
        known += 1
        assert actual / slow - 8 <= seconds <= actual * slow + 8
        if slow == 1.0 and at > 0.4 * simulation.end:
            assert seconds == pytest.approx(actual, abs=0.02 * simulation.end)
    assert known > 40 and simulation.remaining.seconds() == 0.0


def test_a_continued_run_counts_what_is_left():
    work = Work(100, 1.0, 0.0, 10)
    remaining = Remaining(
        {"a": work, "b": work}, {"a": "x", "b": "x"}, 1, {"a": 90, "b": 95}, clock=lambda: now
    )
    now = 0.0
    remaining.began("a")
    for iteration in (91, 92, 93):
        now += 2.0
        remaining.reached("a", iteration)
    assert remaining.seconds() == pytest.approx(2 * (7 + 5))


def test_evaluations_are_counted_when_they_are_due():
    work = Work(10, 1.0, 5.0, 4)
    # after 4, 8 and the last
    assert [work.between(0, last) for last in (3, 4, 8, 9, 10)] == [3, 9, 18, 19, 25]
    assert (
        work.between(9, 10) == 6
        and work.between(10, 10) == 0
        and Work(8, 1.0, 5.0, 4).between(0, 8) == 18
    )


@given(
    st.lists(st.floats(0, 100), max_size=4),
    st.lists(st.floats(0, 100), max_size=9),
    st.integers(4, 6),
)
def test_workers_share_the_waiting_runs(going, waiting, workers):
    total, longest = sum(going) + sum(waiting), max([0.0, *going, *waiting])
    end = makespan(going, waiting, workers)
    assert max(longest, total / workers) <= end + 1e-6 and end <= total / workers + longest + 1e-6


def test_durations_do_not_pretend_to_seconds():
    assert [duration(s) for s in (None, 3, 38, 50, 58, 290, 5300, 9000)] == [
        "unknown yet",
        "under 10 s",
        "about 40 s",
        "about 50 s",
        "about 1 min",
        "about 5 min",
        "about 88 min",
        "about 2.5 h",
    ]


def test_the_work_of_a_run_is_that_of_its_plan():
    config = preset("default").apply(world="mixture", method="tp-grpo", kl_weight=0.1)
    work = work_of(config)
    assert work.iterations == config.iterations and work.evaluation == 384 * 20
    # rollout, update with a KL, the gradient's backward passes
    assert work.iteration == 16 * 12 * 45 + 2 * 960 + 2 * 960


def display(tmp_path, width, seeds=3):
    methods = (
        "flow-grpo",
        "stepwise-flow-grpo",
        "tp-grpo",
        "dance-grpo",
        "dense-grpo",
        "noise-weighted",
    )
    run = preset("tiny").apply(world="mixture", task="direction")
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    return (
        Display(
            CompareConfig(run, method_arms(methods), tuple(range(seeds))), tmp_path, 2, console
        ),
        file,
    )


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("seeds", [3, 12])
def test_the_live_table_fits_the_terminal(tmp_path, width, seeds):
    shown, file = display(tmp_path, width, seeds)
    states = {name: {"phase": "waiting", "iteration": 0} for name in shown.jobs}
    states["tp-grpo-seed0"] = {
        "phase": "done",
        "iteration": 2,
        "reward": 0.5,
        "heldout": 0.61,
        "nfe_total": 123456789,
    }
    states["tp-grpo-seed1"] = {
        "phase": "rollout",
        "iteration": 1,
        "reward": 0.7,
        "heldout": 0.59,
        "nfe_total": 1,
    }
    shown.console.print(shown.table(states))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    (line,) = (line for line in lines if line.split()[:1] == ["tp-grpo"])
    for cell in ("✓ ▶ ·" if seeds == 3 else "✓1 ·10 ▶1", f"3/{2 * seeds}", "0.600", "123,456,790"):
        assert cell in line
    assert f"3/{12 * seeds} iterations, left: " in file.getvalue() and "✓ done" in file.getvalue()


def summary(method, count):
    mean = Mean(0.512, 0.123)
    heldout = {f"held out: reward {i}": Change(mean, mean) for i in range(count)}
    return ArmSummary(
        method,
        3,
        mean,
        mean,
        mean,
        0.4,
        1,
        mean,
        4.0,
        1e7,
        None,
        45.4,
        14,
        10,
        5,
        0.1,
        0.2,
        0.3,
        heldout,
    )


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("methods", [1, 4, 8])
@pytest.mark.parametrize("heldout", [0, 3])
def test_the_results_fit_the_terminal_in_one_table(width, methods, heldout):
    file = io.StringIO()
    print_table(
        [summary(f"stepwise-method-{i}", heldout) for i in range(methods)],
        Console(file=file, width=width),
    )
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for cell in (" 0.512 ± 0.123", "+0.512 ± 0.123 ▲", "1 of 3", "10,000,000"):
        assert text.count(cell) == methods, cell
    assert (
        text.count(" arm ") == 1
        and text.count("▲ above the baseline") == 1
        and "▼" not in text
        and "○" not in text
    )
    assert text.count("0.400") == methods * (width > 80)


@pytest.mark.parametrize("width", [50, 80])
def test_long_names_take_several_lines_before_the_rewards_are_cut(width):
    name, file = "RelativeGain(temperature=0.5,window=all-but-last)", io.StringIO()
    print_table([summary(name, 0)], Console(file=file, width=width))
    lines = file.getvalue().splitlines()
    assert (
        max(map(len, lines)) <= width
        and "…" not in file.getvalue()
        and "+0.512 ± 0.123 ▲" in file.getvalue()
    )
    assert "".join(line[1:].split("  ")[0].split(" ")[0] for line in lines[4:-2]).startswith(name)


@pytest.mark.parametrize("width", [80, 100])
def test_headings_of_the_live_table_are_whole_whatever_the_names(tmp_path, width):
    rule = tmp_path / "rules.py"
    rule.write_text(
        "from flowrl.probes import NoProbe\nclass RelativeGainOfTheWholeTrajectory:\n    probe ="
        " NoProbe()\n    def __init__(self, temperature=1.0): ...\n    def assign(self, values,"
        " decisions): return values[..., 1:].nan_to_num()\n"
    )
    run, file = (
        preset("tiny").apply(world="mixture", task="direction", iterations=200),
        io.StringIO(),
    )
    specs = tuple(f"{rule}:RelativeGainOfTheWholeTrajectory(temperature={t})" for t in (0.25, 0.75))
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    shown = Display(
        CompareConfig(run, method_arms(("flow-grpo",)) | credit_arms(specs), (0, 1, 2)),
        tmp_path,
        2,
        console,
    )
    state = {
        "phase": "rollout",
        "iteration": 1,
        "reward": 0.5,
        "heldout": 0.6,
        "nfe_total": 123456789,
    }
    console.print(shown.table(dict.fromkeys(shown.jobs, state)))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for word in ("iterations", "training", "held-out", "NFE", "3/600", "370,370,367"):
        assert word in text, word


def test_a_fallen_reward_is_a_mark_and_other_warnings_come_once(tmp_path):
    for terminal in (True, False):
        shown, file = display(tmp_path, 140)
        if not terminal:
            shown.console = Console(file=file, width=80)
        states = {name: {"phase": "waiting", "iteration": 0} for name in shown.jobs}
        run = {"phase": "rollout", "iteration": 1, "reward": 0.5, "nfe_total": 9}
        states["tp-grpo-seed1"] = run | {
            "warning": "fell back\nno update",
            "kinds": ["collapse", "no-update"],
        }
        shown.watch(states)
        states["tp-grpo-seed1"] |= {
            "iteration": 5,
            "warning": "fell again\nno update again",
            "kinds": ["collapse", "no-update"],
        }
        shown.watch(states)
        text = file.getvalue()
        assert "fell " not in text.replace("reward fell back", "") and "again" not in text
        assert text.count("Warning (tp-grpo, seed 1): no update") == 1
        if terminal:
            shown.console.print(shown.table(states))
            assert "· ▶! ·" in file.getvalue() and "! reward fell back" in file.getvalue()
        else:
            assert (
                text.count("reward fell back") == 2
                and "tp-grpo, seed 1 " in text
                and "-seed1" not in text
            )


def test_a_command_is_a_line_that_is_not_broken(tmp_path):
    command = (
        "flowrl compare --resume runs/compare-20260101-000000-with-a-long-name --trust"
        " --changed-code --workers 2"
    )
    shown, file = display(tmp_path, 60)
    shown.say(f"Paused; nothing is lost. Go on with: {command}")
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "Paused; nothing is lost. Go on with:",
        command,
    ]
    shown.console, pipe = Console(file=(pipe := io.StringIO()), width=60), pipe
    shown.say(f"Go on with: {command}")
    assert pipe.getvalue() == f"Go on with: {command}\n"


def test_a_pause_leaves_the_iterations_that_are_done(tmp_path):
    for terminal in (True, False):
        shown, file = display(tmp_path, 80, 1)
        if not terminal:
            shown.console = Console(file=file, width=80)

        def pause(shown=shown):
            states = {name: {"phase": "waiting", "iteration": 0} for name in shown.jobs}
            states["tp-grpo-seed0"] = {
                "phase": "paused",
                "iteration": 1,
                "reward": 0.5,
                "nfe_total": 9,
            }
            shown.watch(states)
            return False

        assert shown.during(pause) is False
        assert file.getvalue().rstrip().splitlines()[-1].endswith("1/12 iterations done")


def test_a_resumed_comparison_shows_what_finished_runs_recorded(tmp_path):
    shown, file = display(tmp_path, 80)
    assert not shown.resumed and set(map(len, shown.recorded.values())) == {0}
    write_json(tmp_path / "config.json", shown.config.as_dict())
    folder = tmp_path / "runs" / "tp-grpo-seed0"
    folder.mkdir(parents=True)
    write_json(folder / "config.json", shown.jobs["tp-grpo-seed0"].as_dict())
    rows = [
        {
            "iteration": i,
            "nfe_total": 1000 * i,
            "seconds_total": i,
            "evaluation": {"reward": 0.3 + i / 10},
        }
        for i in range(3)
    ]
    rows = [row | ({"reward_mean": 0.0} if row["iteration"] else {}) for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # no checkpoint
    assert Display(shown.config, tmp_path).recorded["tp-grpo-seed0"] == {
        "nfe_total": 0,
        "heldout": 0.3,
    }
    (folder / "done.json").write_text("{}")
    again = Display(shown.config, tmp_path, 2, Console(file=file, width=80))
    assert again.resumed and again.recorded["tp-grpo-seed0"] == {
        "nfe_total": 2000,
        "reward": 0.0,
        "heldout": 0.5,
    }
    states = {name: {"phase": "waiting", "iteration": 0} for name in again.jobs}
    states["tp-grpo-seed0"] = states["flow-grpo-seed0"] = {"phase": "done", "iteration": 0}
    again.watch(states)
    text = file.getvalue()
    assert (
        "reward 0.000  NFE     2,000" in text and "nan" not in text and "reward     -  NFE" in text
    )


def test_help_is_broken_at_the_margin_only(capsys, monkeypatch):
    """Not where the source breaks its lines."""
    from flowrl.cli.main import main

    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["prompts", "--help"])
    text = capsys.readouterr().out
    assert (
        "marks, for OCR), images (general prompts) or check (summarise a" in text
        and max(map(len, text.splitlines()[4:])) <= 80
    )


def test_a_list_fits_the_terminal_and_a_part_is_described(capsys, monkeypatch):
    from flowrl.cli.main import main

    monkeypatch.setenv("COLUMNS", "80")
    for words in (["parts"], ["presets"], []):
        assert main(words) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80, words
    assert main(["parts", "clipped"]) == 0
    text = capsys.readouterr().out
    assert "clipped: loss, --loss clipped" in text and "clipped: reward, --reward clipped" in text
    assert "    clip_range = 0.0001  c in (0, 1)" in text and "    reward = (required)" in text
    assert main(["parts", "cliped"]) == 2 and "did you mean 'clipped'?" in capsys.readouterr().err


def test_runs_are_named_by_what_differs():
    from flowrl.cli.options import LONGEST_NAME, run_name
    from flowrl.training.config import RunConfig

    base = RunConfig()
    assert run_name(base, base) == "flow-grpo,compositional,seed=0"
    changed = base.replace(
        method="tp-grpo", task="text", learning_rate=1e-4, seed=3, checkpoint_every=2
    )
    assert run_name(changed, base) == "tp-grpo,text,learning_rate=0.0001,seed=3"
    many = base.replace(
        reward="/a b/my.py:R(x=1)",
        groups=3,
        group_size=5,
        num_steps=20,
        window=":",
        minibatches=2,
        betas=(0.9, 0.999),
        lora_rank=4,
        eval_every=3,
    )
    name = run_name(many, base)
    assert (
        len(name) <= LONGEST_NAME + 10
        and name.endswith("-more,seed=0")
        and "reward=my.py_R_x=1" in name
    )
    assert not set(name) & set("/:() ")


def test_accelerate_configurations_are_in_the_package(capsys):
    from pathlib import Path

    from flowrl.cli.main import main

    for name in ("ddp", "fsdp2", "zero2"):
        assert main(["presets", "--accelerate", name]) == 0
        assert "distributed_type" in Path(capsys.readouterr().out.strip()).read_text()


@pytest.mark.slow
def test_a_plan_counts_in_the_precision_of_a_gpu(capsys):
    from flowrl.cli.main import main

    for words, precision in (([], "float16 on cuda"), (["--dtype", "float32"], "float32 on cuda")):
        assert main(["train", "--preset", "sd3.5-medium,tp-grpo,ocr", "--plan", *words]) == 0
        text = capsys.readouterr().out
        assert (
            text.splitlines()[0].endswith(precision)
            and f"in {precision.split()[0]}, not measured" in text
        )


def test_a_run_that_was_stopped_ends_at_its_last_iteration(tmp_path):
    shown, file = display(tmp_path, 140)
    shown.console = Console(file=file, width=140)
    states = {name: {"phase": "waiting", "iteration": 0} for name in shown.jobs}
    states["tp-grpo-seed1"] = {"phase": "done", "iteration": 1, "reward": 0.5, "nfe_total": 9}
    shown.watch(states)
    assert "done       iteration   1/2 " in file.getvalue()
