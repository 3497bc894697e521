"""What `flowrl train` shows: digits, the time left, lines, the panel, the log file, notifications."""

import json
import logging
import math
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console
from small_run import MIXTURE, error_of, flowrl_, write_rows
from tqdm import tqdm

import flowrl.cli.log
from flowrl.cli.log import library_log
from flowrl.cli.notify import Notifier
from flowrl.cli.panel import RunPanel, fits_terminal, sparkline
from flowrl.cli.progress import Progress, Series, train_line
from flowrl.run.config import RunConfig
from flowrl.run.results import reward_text


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.5, 0.50002), ("0.500000", "0.500020")),
        ((0.25, 0.75), ("0.250", "0.750")),
        ((21.3134, 21.6), ("21.31", "21.60")),  # PickScore
        ((0.2801, 0.2813), ("0.2801", "0.2813")),  # HPSv2.1
        ((-54.21, -43.5), ("-54.21", "-43.50")),  # JPEG kilobytes
        ((1_234_567.0, 1_434_567.8), ("1,234,567", "1,434,568")),
        ((2_000_000.0, 2_000_000.5), ("2,000,000.00", "2,000,000.50")),
        ((0.05408, 0.05408000000001), ("0.0541", "0.0541")),  # rounding is no gain
        ((0.0, 0.0), ("0.000", "0.000")),
        ((3.21e-9, 0.0), ("3.21e-09", "0.00e+00")),
        ((-2.5e12, 1.0), ("-2.500e+12", "1.000e+00")),
        ((math.nan, 1.0), ("nan", "1.000")),
    ],
)
def test_a_reward_has_the_digits_that_fit_its_size_and_its_change(values, texts):
    assert tuple(reward_text(value, values) for value in values) == texts
    assert reward_text(None, values) == "failed"


CONFIG = RunConfig.of(iterations=10, eval_every=3, checkpoint_every=4)


def rows_of(count, gain=1e-5, first=2.0):
    """Rows of iterations of 2 s, the first one of `first` s, and evaluations of 10 s every 3."""
    rows, total = [], 0.0
    for i in range(count + 1):
        evaluation = {"reward": 0.5 + gain * i, "seconds": 10.0, "heldout": {"x.py:Red": i / 9}}
        seconds = 0.0 if not i else first if i == 1 else 2.0
        total += seconds
        row = {"iteration": i, "evaluation": None if i % 3 else evaluation, "seconds_total": total}
        row |= {"nfe_total": 7}
        if i:
            phases = {"rollout": 1.0, "decode": 0.1, "reward": seconds - 1.4, "update": 0.3}
            row |= {"reward_mean": 0.25, "seconds": seconds, "phases": phases, "trajectories": 8}
            row |= {"approx_kl": 1e-3, "clip_fraction": 0.2, "ratio_noise": 1e-6}
        rows.append(row)
    return rows


class Clocked:
    """A run's `Progress` on a clock that the test sets."""

    def __init__(self, folder, rows, config=CONFIG):
        self.folder, self.rows, self.time = folder, rows, 0.0
        self.progress = Progress(folder, config, lambda: self.time)

    def iterate(self, first, last, save=0.0, other=0.0):
        """Iterations, checkpoints of `save` s, and `other` s of observers and writers each."""
        for i in range(first, last + 1):
            self.progress.update({"phase": "rollout"})
            row = self.rows[i]
            self.time += row["seconds"] + other + (row["evaluation"] or {}).get("seconds", 0.0)
            write_rows(self.folder, self.rows[: i + 1])
            self.progress.update({"iteration": i, "reward": 0.25})
            if i % 4 == 0 and save:
                self.progress.update({"phase": "saving"})
                self.time += save


def test_the_time_left_in_closed_form(tmp_path):
    """(iterations left) x (2 s, and 0.5 s beside) + evaluations after 6, 9 and 10 of 10 s each
    + checkpoints after 8 and 10 of 5 s each; the first iteration's compilation is not repeated.
    """
    run = Clocked(tmp_path, rows_of(10, first=100.0))
    write_rows(tmp_path, run.rows[:1])
    assert run.progress.left() is None
    run.iterate(1, 1)
    assert run.progress.left() == pytest.approx(9 * 100 + 4 * 10)  # no better estimate yet
    run.iterate(2, 4, save=5.0)
    assert run.progress.left() == pytest.approx(6 * 2 + 3 * 10)
    run.iterate(5, 5)
    assert run.progress.left() == pytest.approx(5 * 2 + 3 * 10 + 2 * 5)
    run.iterate(6, 10)
    assert run.progress.left() == 0

    slow = Clocked(tmp_path, rows_of(10))
    write_rows(tmp_path, slow.rows[:1])
    slow.iterate(1, 5, other=0.5)
    assert slow.progress.left() == pytest.approx(5 * (2 + 0.5) + 3 * 10)
    slow.progress.rows[-1]["stopped"] = "budget"
    assert slow.progress.left() == 0


def test_a_resume_compiles_again(tmp_path):
    run = Clocked(tmp_path, rows_of(10, first=100.0))
    write_rows(tmp_path, run.rows[:6])
    run.time = 40.0  # loading is neither before nor after
    run.progress.update({"phase": "rollout"})
    assert run.progress.left() == pytest.approx(98 + 5 * 2 + 3 * 10)
    run.iterate(6, 6)
    assert run.progress.left() == pytest.approx(4 * 2 + 2 * 10)


@pytest.mark.parametrize(
    ("iterations", "every", "printed"),
    [
        (100, 0, [*range(1, 101)]),
        (1000, 0, [1, *range(20, 1001, 20)]),
        (1000, 300, [1, 300, 600, 900, 1000]),
        (12, 5, [1, 5, 10, 12]),
    ],
)
def test_one_line_in_so_many_iterations(iterations, every, printed, tmp_path, capsys):
    """With an evaluation after iteration 3 and a warning after 7, which are always printed."""
    show = train_line(tmp_path, RunConfig.of(iterations=iterations), every)
    evaluation = {"reward": 0.5, "seconds": 1.0}
    row = {"reward_mean": 0.5, "seconds": 1.0, "nfe_total": 1}
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for i in range(iterations + 1):
            more = {"evaluation": evaluation if i in (0, 3) else None, "seconds_total": i}
            more |= {"warnings": [{"kind": "kl", "text": "the KL"}]} if i == 7 else {}
            file.write(json.dumps({"iteration": i, **row, **more}) + "\n")
            file.flush()
            if i:
                show({"iteration": i})
    numbers = map(int, re.findall(r"iteration +(\d+)/", capsys.readouterr().out))
    assert [*numbers] == sorted({*printed, 3, 7})


def test_what_a_run_says_is_a_line(tmp_path, capsys):
    show = train_line(tmp_path, CONFIG)
    for state in ({"phase": "loading"}, {"note": "a note"}, {"slow": "reward: X.score"}):
        show(state)
    show({"alive": "two\nlines"})
    show({"warning": "one\ntwo", "kinds": ["a", "b"]})
    expected = ["  a note", "  reward: X.score", "  two", "  lines", "Warning: one", "Warning: two"]
    assert capsys.readouterr().out.splitlines() == expected


# ----- The panel


def panel_text(run, width=80, **state):
    console = Console(width=width, height=40, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    panel = RunPanel(run.progress, "flow-grpo on sd3, seed 0", 1e-4, console)
    panel(state)
    console.print(panel.render())
    return console.export_text().splitlines()


def test_the_panel_has_everything_on_80_columns_and_24_lines(tmp_path):
    run = Clocked(tmp_path, rows_of(6, gain=-0.01))
    write_rows(tmp_path, run.rows[:1])
    loading = panel_text(run, phase="prompts")
    assert any("embedding prompts, 0 s" in line for line in loading)
    run.iterate(1, 6)
    run.progress.update({"warning": "the KL has grown, and much else\nsecond\nthird\nfourth"})
    run.progress.update({"phase": "reward"})
    run.time += 12
    lines = panel_text(run)
    assert len(lines) <= 23 and {len(line) for line in lines} == {80}
    text = "\n".join(lines)
    for words in (
        "flow-grpo on sd3, seed 0",
        "iteration 6/10",
        "0:00:54, left 0:00:16",  # 12 s since the row; 4 x 2 + 2 x 10 s after it
        "training 0.250 0.250 0.250  1 ▁▁▁▁▁▁",
        "held out 0.440 0.500 0.500  0 ██▄▄▄▁",
        "Red 0.000 → 0.667",
        "KL of update 0.001",
        "clipped 20%",
        "ratio noise 1e-06 of clip 0.0001",
        "reward     0.60 s 30%",
        "evaluation 10.0 s",
        "images       4/s",
        "memory",
        "reward, 12 s",
        "! 6: second",
        "! 6: fourth",
    ):
        assert words in text.replace("\u00a0", " "), words
    assert "much else" not in text  # the last three
    slow = panel_text(run, slow="reward: X.score has not returned for 30 s")
    assert any("not returned for 30 s" in line for line in slow)


def test_what_a_run_says_appears_above_the_panel(tmp_path):
    run = Clocked(tmp_path, rows_of(3))
    lines = panel_text(run, note="a note [red]that is no markup")
    assert lines[0].strip() == "a note [red]that is no markup"


@pytest.mark.parametrize(
    ("iterations", "values", "width", "text"),
    [
        ([1, 2, 3, 4], [0.0, 1.0, 2.0, 7.0], 8, "▁▂▃█"),
        ([1, 2, 3, 4], [0.0, 1.0, 2.0, 7.0], 2, "▁█"),
        ([0, 4], [0.0, 1.0], 4, "▁▁▁█"),  # held until the next value
        ([1, 2], [3.0, 3.0], 4, "▁▁▁▁"),
    ],
)
def test_trends(iterations, values, width, text):
    assert sparkline(Series(iterations, values), 1, 4, width) == text


@pytest.mark.parametrize(
    ("variables", "panel"),
    [
        ({}, True),
        ({"TERM": "dumb"}, False),
        ({"LINES": "23"}, False),
        ({"COLUMNS": "69"}, False),
        ({"CI": "true"}, False),
        ({"JPY_PARENT_PID": "1"}, False),
    ],
)
def test_where_the_panel_is_drawn(variables, panel, monkeypatch):
    for name in ("CI", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm", "LINES": "24", "COLUMNS": "70"} | variables).items():
        monkeypatch.setenv(name, value)
    assert not fits_terminal()  # a pipe
    main, terminal = pty.openpty()
    with open(terminal, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert fits_terminal() == panel
    os.close(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "code", "end"),
    [(0, 0, "finished"), (1, 130, "paused"), (2, 130, "stopped")],
)
def test_a_run_on_a_terminal_leaves_it_clean(keys, code, end, tmp_path):
    """The panel appears; at the end, after Ctrl-C and after a second one the cursor is shown and
    the last line is a message.
    """
    (tmp_path / "part.py").write_text(
        "import sys, time, warnings\n"
        "class Mine:\n"
        "    calls = 0\n"
        "    def score(self, images, prompts):\n"
        "        Mine.calls += 1\n"
        f"        time.sleep(100 if {keys} == 2 and Mine.calls > 3 else 0.2)\n"
        "        print('from the reward')\n"
        "        warnings.warn('of a library')\n"
        "        return images.flatten(1).mean(1)\n"
    )
    words = f"train {MIXTURE} --reward part.py:Mine --no-trial --out run"
    words += f" --iterations {(4, 400, 4)[keys]} --eval-every 1000"
    main, terminal = pty.openpty()
    inherited = {k: v for k, v in os.environ.items() if k not in ("CI", "JPY_PARENT_PID")}
    size = {"LINES": "30", "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", *words.split()],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=tmp_path,
        env=inherited | size,
        start_new_session=True,
    )
    os.close(terminal)
    shown, sent, last = "", 0, 0.0
    while True:
        try:
            shown += os.read(main, 65536).decode(errors="replace")
        except OSError:  # the end
            break
        waits = "reward, 1 s" if keys == 2 else "iteration 1/"
        # the terminal must be read all the time: a blocked output is given up after 1 s
        if sent < keys and waits in shown and time.monotonic() - last > 1.5:
            process.send_signal(signal.SIGINT)
            sent, last = sent + 1, time.monotonic()
    assert process.wait() == code
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    before, _, after = shown.rpartition("╯")
    assert end in before and "from the reward" in before and "of a library" not in shown
    words_after = re.sub(r"\x1b\[\??[\d;]*[a-zA-Z]", "", after).split()
    assert words_after[0] in ("Messages", "Stopped.") and "╭" not in after
    assert "UserWarning: of a library" in (tmp_path / "run" / "log.txt").read_text()


# ----- The log file


def test_messages_of_libraries_go_to_the_log(tmp_path, capfd):
    """Also of loggers with handlers of their own that do not propagate, and before the run has a
    folder; flowrl's own are shown too, and everything is as before at the end.
    """
    library, printed = logging.getLogger("transformers.loading"), logging.StreamHandler()
    root = logging.getLogger("transformers")
    before, root.propagate = root.propagate, False
    root.addHandler(printed)
    call, shown = logging.Logger.callHandlers, warnings.showwarning
    try:
        with library_log() as log, warnings.catch_warnings():
            warnings.simplefilter("always")
            library.warning("early")
            log({"phase": "loading"})
            log({"folder": str(tmp_path)})
            library.error("late")
            library.info("no warning")
            logging.getLogger("mine").warning("by %s", "propagation")
            logging.getLogger("flowrl.run").warning("our own")
            warnings.warn("a warning", stacklevel=1)
            warnings.warn_explicit("of flowrl", UserWarning, logging.__file__, 1)
            assert not capfd.readouterr().err.replace("our own\n", "")
            list(tqdm(range(3)))
            assert not capfd.readouterr().err
    finally:
        root.removeHandler(printed)
        root.propagate = before
    text = (tmp_path / "log.txt").read_text()
    words = ("WARNING transformers.loading: early", "ERROR transformers.loading: late")
    words += ("mine: by propagation", "flowrl.run: our own", "UserWarning: a warning")
    assert all(word in text for word in words) and "no warning" not in text and log.count == 5
    assert (logging.Logger.callHandlers, warnings.showwarning) == (call, shown)
    list(tqdm(range(3)))
    assert "3/3" in capfd.readouterr().err


def test_warnings_of_flowrl_are_printed(tmp_path, capfd):
    with library_log() as log:
        log({"folder": str(tmp_path)})
        warnings.showwarning("the prompts", UserWarning, flowrl.cli.log.__file__, 1)
    assert capfd.readouterr().err == "Warning: the prompts\n" and not log.count


# ----- Notifications


@pytest.fixture
def server():
    """A local web server, and what it has received by POST."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, json.loads(body)))
            self.send_response(404 if "missing" in self.path else 200)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    web = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_port}", received
    web.shutdown()
    web.server_close()


def test_notifications_are_posted_and_given_to_commands(server, tmp_path):
    url, received = server
    file, warned = tmp_path / "out", list[str]()
    command = f"(cat; echo; echo $FLOWRL_EVENT $FLOWRL_RUN; echo $FLOWRL_TEXT) >> {file}"
    targets = [f"{url}/hook?secret", command, f"{url}/missing/secret", "exit 3"]
    notifier = Notifier(targets, tmp_path / "my-run", warned.append)
    notifier({"phase": "rollout"})
    notifier({"iteration": 3, "reward": 0.25})
    notifier({"warning": "the KL\nstopped after", "kinds": ["kl", "stopped"]})
    notifier({"ended": "budget: 3 hours"})
    with pytest.raises(ValueError, match="boom"), notifier:
        raise ValueError("boom")
    posted = [body for path, body in received if path == "/hook?secret"]
    texts = [
        "my-run: the KL",
        "my-run: stopped by budget: 3 hours (iteration 3, training reward 0.250)",
        "my-run: failed: ValueError: boom",
    ]
    assert [body["text"] for body in posted] == [body["content"] for body in posted] == texts
    assert [body["event"] for body in posted] == ["warning", "stopped", "failed"]
    assert (posted[0]["iteration"], posted[0]["reward"]) == (3, 0.25)
    lines = file.read_text().splitlines()
    assert json.loads(lines[0]) == posted[0]
    assert lines[1:3] == [f"warning {tmp_path}/my-run", texts[0]]
    assert len(warned) == 2  # each target once, without what may be secret
    assert "http://127.0.0.1/... failed: HTTPError 404 Not Found" in warned[0]
    assert "exit failed: RuntimeError  exit code 3" in warned[1] and "secret" not in str(warned)


@pytest.mark.parametrize(
    ("target", "words"), [("", "''"), ("ftp://x", "ftp:"), ("http://", "http")]
)
def test_what_cannot_be_notified(target, words, capsys):
    error = error_of(f"train {MIXTURE} --notify '{target}'", capsys)
    assert "notify = " in error and words in error and "allowed: a command, or" in error


def test_a_run_notifies_and_does_not_record_it(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("FLOWRL_NOTIFY", f"echo $FLOWRL_EVENT >> {tmp_path}/variable")
    monkeypatch.setattr(sys, "argv", ["flowrl", "train", "--notify", "secret-command"])
    words = f"train {MIXTURE} --iterations 3 --print-every 2 --eval-every 9 --out {tmp_path}/run"
    target = f"echo secret-command $FLOWRL_TEXT >> {tmp_path}/option"
    assert flowrl_(f"{words} --notify '{target}' secret-command") == 0
    assert (tmp_path / "variable").read_text() == "finished\n"
    text = (tmp_path / "option").read_text()
    assert text.startswith("secret-command run: finished (iteration 3, training reward ")
    out = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"iteration +(\d)/3", out)] == [1, 2, 3]
    assert out.count("Warning: the notification to secret-command failed") == 1
    assert sys.argv[-1] == "..." and not (tmp_path / "run" / "log.txt").exists()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5 and not any(b"secret-command" in path.read_bytes() for path in files)
    more = f"train --resume {tmp_path}/run --iterations 4 --print-every 9"
    assert flowrl_(more) == 0 and (tmp_path / "variable").read_text() == "finished\n" * 2
