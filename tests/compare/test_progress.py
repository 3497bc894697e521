"""Progress of comparisons on a simulated clock, on terminals of any width and in pipes; the results
table.
"""

import io

import pytest
from rich.console import Console
from small_run import TINY_RUN, write_rows

from flowrl.cli.progress import clock
from flowrl.compare.arms import method_arms
from flowrl.compare.comparison import CompareConfig
from flowrl.compare.progress import Display
from flowrl.compare.report import print_table
from flowrl.compare.results import ArmSummary, Change, Mean, Reached
from flowrl.compare.target import CostRatio
from flowrl.run.io import write_json

ARMS = method_arms(("flow-grpo", "tp-grpo"))
LONG = {"RelativeGain(temperature=0.25,window=all-but-last)": {"clip_range": 0.1}}


class Clocked:
    """A display and its output, and a clock that the test moves."""

    def __init__(self, folder, terminal, width=80, config=CompareConfig(TINY_RUN, ARMS, (0, 1))):
        self.file, self.now = io.StringIO(), 0.0
        options = dict(width=width, force_terminal=terminal, get_time=lambda: self.now)
        self.display = Display(config, folder, Console(file=self.file, **options))

    def watch(self, **states):
        """Show runs by the names of their folders, the others waiting; returns all output."""
        named = {name.replace("__", "-seed").replace("_", "-"): s for name, s in states.items()}
        waiting = {"phase": "waiting", "iteration": 0}
        self.display.watch(dict.fromkeys(self.display.jobs, waiting) | named)
        return self.file.getvalue()


def running(iteration, **more):
    return {"phase": "rollout", "iteration": iteration, "reward": 0.5, "nfe_total": 9, **more}


def test_the_time_left_counts_forward_equivalents(tmp_path):
    """Iterations of the second arm cost more; exact from the second iteration on."""
    config = CompareConfig(TINY_RUN.replace(iterations=40), ARMS, (0,))
    shown = Clocked(tmp_path, False, config=config)
    flow, tp = shown.display.forwards.values()
    for iteration in range(1, 5):
        shown.now = 0.1 * tp * iteration
        text = shown.watch(tp_grpo__0=running(iteration))
    assert "left: unknown" in text and flow != tp
    left = 0.1 * (36 * tp + 40 * flow)
    assert shown.display.bars.tasks[-1].time_remaining == pytest.approx(left, abs=1)
    assert clock(None) == "unknown" and clock(3725.9) == "1:02:05"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_fallen_reward_is_a_mark_and_other_warnings_come_once(tmp_path, terminal):
    shown, kinds = Clocked(tmp_path, terminal), ["collapse", "zero-spread"]
    shown.watch(tp_grpo__1=running(1, warning="fell\nno update", kinds=kinds))
    text = shown.watch(tp_grpo__1=running(5, warning="fell again\nno update again", kinds=kinds))
    assert "fell\n" not in text and "again" not in text
    assert text.count("Warning (tp-grpo, seed 1): no update") == 1
    assert "1 fell back" in shown.display.bars.tasks[1].fields["text"]
    assert ("1 fell back" in text) == (not terminal)


def test_changes_since_the_start_of_a_run_come_once(tmp_path):
    shown, changed = Clocked(tmp_path, False), "changed settings: iterations 2 -> 4"
    for iteration in (1, 5):
        text = shown.watch(tp_grpo__1=running(iteration, changed=changed))
    assert text.count(f"tp-grpo, seed 1: {changed}\n") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_commands_are_whole_and_a_pause_leaves_the_iterations_that_are_done(tmp_path, terminal):
    command = f"flowrl compare --resume runs/{'long-name-' * 9} --trust"
    shown = Clocked(tmp_path, terminal)

    def pause():
        shown.watch(tp_grpo__0=running(1, phase="paused"))
        return False

    assert shown.display.during(pause) is False
    shown.display.say(f"Continue with: {command}")
    assert shown.file.getvalue().endswith(f"1/8 iterations done\nContinue with: {command}\n")
    assert "\x1b" not in shown.file.getvalue() or terminal


def test_a_resumed_comparison_shows_what_finished_runs_recorded(tmp_path):
    assert not Clocked(tmp_path, False).display.resumed
    write_json(tmp_path / "config.json", {})
    folder = tmp_path / "runs" / "tp-grpo-seed0"
    folder.mkdir(parents=True)
    write_json(folder / "config.json", TINY_RUN.replace(method="tp-grpo").as_dict())
    rows = [
        {"iteration": i, "nfe_total": 1000 * i, "seconds_total": i, "reward_mean": i / 4}
        | {"evaluation": {"reward": 0.3 + i / 10}}
        for i in range(3)
    ]
    write_rows(folder, rows)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "000001.safetensors").write_text("")
    # iterations after the checkpoint will be computed again
    state = Clocked(tmp_path, False).display.states["tp-grpo-seed0"]
    assert (state["iteration"], state["nfe_total"], state["heldout"]) == (1, 1000, 0.4)
    (folder / "done.json").write_text("{}")
    again, done = Clocked(tmp_path, False), {"phase": "done", "iteration": 0}
    stopped = {"phase": "done", "iteration": 1}  # by an observer
    text = again.watch(tp_grpo__0=done, flow_grpo__0=stopped)
    assert again.display.resumed and "4/8 iterations" in text
    assert "2/2  reward 0.500, held out 0.500, rollout NFE 2,000" in text
    assert "1/2  rollout NFE 0" in text


def summary(arm):
    mean = Mean(0.512, 0.123)
    heldout = {"held out: ocr": Change(mean, mean)}
    reached = {"forwards": Reached(1e7, CostRatio(1.24, 0.76, 2.02))}
    costs = (reached, 45.4, 14, 10, 5, 0.1, 0.2, 0.3)
    return ArmSummary(arm, 3, mean, mean, mean, 0.4, 1, mean, *costs, heldout)


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("count", [1, 8])
def test_the_results_fit_the_terminal_and_rewards_are_never_cut(width, count):
    file, (name,) = io.StringIO(), LONG
    print_table([summary(f"{name}{i}") for i in range(count)], Console(file=file, width=width))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for cell in (" 0.512 ± 0.123", "+0.512 ± 0.123 ▲", "1.24 [0.76, 2.02]"):
        assert text.count(cell) == count, cell
    assert text.count("1 of 3") == count * (width > 90)
    assert text.count("▲ above the baseline") == 1 and "▼" not in text and "○" not in text
