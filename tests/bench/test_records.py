"""What a results file promises: every line is what it says it is, none is lost, and each can be made again by its own command."""

import json
import math
import multiprocessing
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flowrl_bench import lock, records, runner
from flowrl_bench.claims import WORLDS, make_run
from flowrl_bench.lock import held
from flowrl_bench.measure import CURVE, measure
from flowrl_bench.records import Ledger, code_hash, config_hash, make_line
from flowrl_bench.runner import Suite, processes, redo, seeded
from flowrl_bench.time_left import Pace, words

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.training.config import RunConfig

SMALL = {
    "iterations": 1, "groups": 2, "group_size": 3, "eval_every": 1, "eval_samples": 6, "eval_steps": 4,
    "num_steps": 5, "window": "0:3",
}  # fmt: skip
MINE = "from flowrl.credit import Uniform\n\n\nclass Mine(Uniform):\n    pass\n"


def tiny(seed: int = 0, **changes) -> RunConfig:
    return make_run("mixture", "direction", seed, {**SMALL, **changes})


def suite_of(path: Path, *configs: RunConfig, command: str = "a test") -> Suite:
    runs = {config_hash(config): config for config in configs}
    return Suite(runs, Ledger(path), runs, command)


def line_of(seed: int = 0, **changes) -> dict:
    """A line with numbers made up, but one."""
    row = dict.fromkeys(CURVE, 0.5) | {"iteration": 1, "seconds": 9.0}
    found = {
        "curve": [[row[name] for name in CURVE]], "totals": {"nfe": 3.0, "seconds": 9.0},
        "phases": {"rollout": 1.0}, "gains": None,
    }  # fmt: skip
    return make_line(tiny(seed, **changes), found, "-")


EXECUTED = """
import json, sys
from dataclasses import replace
from pathlib import Path
import flowrl
from flowrl_bench.claims import make_run
from flowrl_bench.measure import measure
from flowrl.credit import TurningPoint

root, seen, importing = str(Path(flowrl.__file__).parent), set(), 0

def watch(frame, event, argument):
    global importing
    code = frame.f_code
    if code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib"):
        importing += (event == "call") - (event == "return")
    elif event == "call" and not importing and code.co_filename.startswith(root):
        seen.add(Path(code.co_filename).relative_to(root).as_posix())

small = json.loads(sys.argv[1])
runs = [
    make_run("mixture", "direction", 0, small),
    make_run("mixture", "direction", 0, {**small, "method": "tp-grpo", "reward_noise": 0.1, "window": "random:2", "updates": 1}),
    make_run("mixture", "direction", 0, {**small, "credit": "flowrl_bench.negative_controls:FreshNoiseFault", "sampler": "cps"}),
    *(make_run("shapes", task, 0, {**small, "method": "stepwise-flow-grpo"}) for task in ("compositional", "text", "preference")),
]
sys.setprofile(watch)
for config in runs:
    assert measure(config) is not None
sys.setprofile(None)
print(json.dumps(sorted(seen)))
"""
ONLY_REPORT = {"training/failure.py": "stops a run whose loss or gradient is not finite"}
"""Files outside of the hash that runs pass through, and why they may."""


def test_every_file_that_a_run_executes_is_in_the_code_hash() -> None:
    """One tiny run of each world and task under the interpreter's own profiler."""
    found = subprocess.run([sys.executable, "-c", EXECUTED, json.dumps(SMALL)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    executed = set(json.loads(found.stdout.splitlines()[-1]))
    assert {"training/trainer.py", "policies/adapters.py", "worlds/mixture.py", "bench/measure.py", "bench/faults.py"} <= executed
    assert len(executed) > 40
    missing = {name for name in executed if records.unseen(name) and name not in records.SEEN_ANYWAY}
    assert missing == set(ONLY_REPORT)


def test_lines_say_which_peft_made_them() -> None:
    """It draws and merges the adapters of the image world."""
    import peft

    assert line_of()["versions"]["peft"] == peft.__version__


EDITS_ITSELF = """
from pathlib import Path
from flowrl.credit import Uniform

class Mine(Uniform):
    def assign(self, rewards, schedule=None):
        Path(__file__).write_text(Path(__file__).read_text() + "#")
        return super().assign(rewards, schedule)
"""
DRAWS = """
import random
import numpy
import torch
from flowrl.types import NoProbe

class Mine:
    probe = NoProbe()

    def assign(self, rewards, schedule=None):
        drawn = torch.rand(rewards.shape[0], rewards.shape[1], rewards.shape[2] - 1) - 0.5
        return drawn * (1 + random.random()) * (1 + numpy.random.rand())
"""
DIES = """
import os, pathlib, sys
from flowrl_bench.lock import held

lock = held(pathlib.Path(sys.argv[1]), "x")
lock.__enter__()
os._exit(9)
"""


class TestIdentity:
    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.syspath_prepend(str(tmp_path))
        path = tmp_path / f"mine_{tmp_path.name}.py"
        path.write_text(MINE)
        yield path
        sys.modules.pop(path.stem, None)

    @pytest.mark.parametrize(
        "spec", ["{path}:Mine", "{stem}:Mine", "flowrl_bench.negative_controls:FreshNoiseFault(rule='{path}:Mine')",
                 "flowrl_bench.negative_controls:FreshNoiseFault(rule='{stem}:Mine')"],
    )  # fmt: skip
    def test_files_of_rules_are_part_of_the_id(self, module: Path, spec: str) -> None:
        config = tiny(credit=spec.format(path=module, stem=module.stem))
        before = config_hash(config)
        module.write_text(MINE + "\n    # another rule\n")
        after = config_hash(config)
        assert before != after
        module.write_text(MINE)
        assert config_hash(config) == before

    def test_files_of_the_other_parts_are_part_of_the_id(self, module: Path) -> None:
        module.write_text("from flowrl.losses import ClippedLoss as L\nfrom flowrl.samplers import FlowSDE as S\nR = dict\n")
        for config in (
            tiny(loss=f"{module}:L"),
            tiny(sampler=f"{module}:S"),
            tiny(reward=f"weighted-sum(models={{'a': '{module}:R'}})"),
        ):
            before = config_hash(config)
            module.write_text(module.read_text() + "#\n")
            assert config_hash(config) != before

    def test_a_class_that_a_module_only_passes_on_is_followed_to_its_file(self, module: Path, tmp_path: Path) -> None:
        door = tmp_path / f"door_{tmp_path.name}.py"
        door.write_text(f"from {module.stem} import Mine\n")
        config = tiny(credit=f"{door.stem}:Mine")
        before = config_hash(config)
        module.write_text(MINE + "#\n")
        between = config_hash(config)
        door.write_text(door.read_text() + "#\n")
        assert len({before, between, config_hash(config)}) == 3

    def test_the_ids_of_published_runs_stand(self) -> None:
        """Built-in parts add nothing to an id, nor does a part inside the package that is in the code's hash."""
        path = Path(__file__).parents[2] / "benchmarks" / "results" / "claims.jsonl"
        with open(path) as file:
            lines = [json.loads(text) for text in file if "FreshNoiseFault" in text or '"seed": 0' in text[:200]]
        assert len(lines) > 50
        for line in lines:
            assert config_hash(RunConfig.from_dict(line["config"])) == line["id"]

    def test_code_of_this_package_outside_of_its_hash_counts_as_the_users(self) -> None:
        """Else a rule of the course could change without a trace."""
        assert records._own(tiny(credit="flowrl_bench.negative_controls:FreshNoiseFault")) == []
        assert [path.name for path in records._own(tiny(credit="flowrl_course.runs:Curve"))] == ["runs.py"]

    def test_a_file_that_is_edited_while_its_run_is_made_leaves_no_line(self, tmp_path: Path) -> None:
        """The rule edits its own file when it is first asked: what ran is not what would be hashed afterwards."""
        path = tmp_path / "mine.py"
        path.write_text(EDITS_ITSELF)
        suite = suite_of(tmp_path / "results.jsonl", tiny(credit=f"{path}:Mine"))
        with pytest.raises(ConfigError, match=r"mine\.py changed or went away while the run"):
            suite.execute(1)
        assert not suite.ledger.path.exists()

    def test_code_that_changes_while_a_run_is_made_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = tiny()
        records.require_unchanged(config, config_hash(config), code_hash())
        monkeypatch.setattr(records, "code_hash_now", lambda: "0123456789abcdef")
        with pytest.raises(ConfigError, match=r"the code in .* changed while the run"):
            records.require_unchanged(config, config_hash(config), code_hash())

    def test_a_line_says_what_was_so_before_its_run(self) -> None:
        made = {**records.stamp(), "code": "before"}
        line = make_line(tiny(), {}, "-", "an id", made)
        assert (line["id"], line["code"], line["rules"]) == ("an id", "before", records.rules_hash())


class TestSeeds:
    def test_what_a_rule_draws_from_the_shared_generators_is_the_runs_own(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.py"
        path.write_text(DRAWS)
        config = tiny(credit=f"{path}:Mine")
        found = []
        for other in (1, 2):
            torch.manual_seed(other)
            random.seed(other)
            np.random.seed(other)  # noqa: NPY002
            found.append(seeded(config))
        assert found[0]["curve"][-1][4:] == found[1]["curve"][-1][4:]
        torch.manual_seed(3)
        assert measure(config)["curve"][-1][4:] != found[0]["curve"][-1][4:]

    @pytest.mark.parametrize(("world", "task"), [("mixture", "direction"), ("shapes", "compositional")])
    def test_built_in_parts_do_not_depend_on_the_shared_generators(self, world: str, task: str) -> None:
        """So seeding them changed no number of theirs."""
        config = make_run(world, task, 0, {**SMALL, "credit": "turning-point(where=random)", "reward_noise": 0.1})
        found = []
        for other in (1, 2):
            random.seed(other)
            np.random.seed(other)  # noqa: NPY002
            torch.manual_seed(other)
            found.append(measure(config))
        assert not list(runner._differences(*map(runner._named, found)))


class TestAgain:
    """Lines name a command that makes them again."""

    @pytest.fixture
    def suite(self, tmp_path: Path) -> Suite:
        path = tmp_path / "a rule's file.py"
        path.write_text(MINE)
        suite = suite_of(tmp_path / "with spaces" / "results.jsonl", tiny(credit=f"{path}:Mine"), command="flowrl bench rule X")
        (key, config), *_ = suite.runs.items()
        suite.ledger.append(make_line(config, seeded(config), suite.again(key), key))
        return suite

    def change(self, suite: Suite, change) -> None:
        (line,) = suite.ledger.read().values()
        change(line)
        suite.ledger.path.write_text(json.dumps(line) + "\n")

    def test_the_stored_command_redoes_the_line(self, suite: Suite, capsys) -> None:
        (line,) = suite.ledger.read().values()
        words = shlex.split(line["command"])
        assert words[0] == "flowrl"
        assert main(words[1:]) == 0
        assert f"{line['id']}: the same to the last digit" in capsys.readouterr().out
        self.change(suite, lambda line: line["totals"].update(nfe=1.0))
        assert main(words[1:]) == 1
        assert "differs in 1 numbers (first: totals.nfe), by at most 29" in capsys.readouterr().out

    def test_runs_store_that_command(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        suite = suite_of(tmp_path / "results.jsonl", tiny(), command="flowrl bench rule a b")
        assert suite.execute(1)
        ((key, line),) = suite.ledger.read().items()
        assert shlex.split(line["command"]) == [
            "flowrl",
            "bench",
            "claims",
            "--out",
            str(tmp_path / "results.jsonl"),
            "--redo",
            key,
        ]

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            (lambda line: line["totals"].update(reward_calls=0.0), "totals.reward_calls"),
            (lambda line: line.update(gains=[[0.1]]), "gains"),
            (lambda line: line["curve"][1].__setitem__(CURVE.index("nfe"), 1.0), "curve[1].nfe"),
            (lambda line: line["curve"][1].__setitem__(CURVE.index("soft"), math.nan), "curve[1].soft"),
            (lambda line: line["curve"][1].__setitem__(CURVE.index("quality"), None), "curve[1].quality"),
            (lambda line: line["curve"].pop(), "curve"),
            (lambda line: line["curve"][1].pop(), "curve[1].columns"),
        ],
    )  # fmt: skip
    def test_everything_but_seconds_is_compared(self, suite: Suite, change, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (line,) = suite.ledger.read().values()
        kept = {key: line[key] for key in ("curve", "totals", "phases", "gains")}
        monkeypatch.setattr(runner, "measure", lambda config, stop: json.loads(json.dumps(kept)))
        assert redo(line["id"], suite.ledger).same
        self.change(suite, lambda line: [line["totals"].update(seconds=1e9), line["phases"].update(rollout=1e9)])
        self.change(suite, lambda line: line["curve"][1].__setitem__(CURVE.index("seconds"), 1e9))
        assert redo(line["id"], suite.ledger).same
        self.change(suite, change)
        found = redo(line["id"], suite.ledger)
        assert name in found.differing and found.largest > 0

    def test_nan_is_the_same_as_nan(self) -> None:
        assert not list(runner._differences({"a": [math.nan, 1]}, {"a": [math.nan, 1.0]}))
        assert dict(runner._differences({"a": [math.nan, math.inf]}, {"a": [1.0, math.inf]})) == {"a[0]": math.inf}
        assert dict(runner._differences({"a": 1.0}, {"a": 1.5, "b": None})) == {"a": 0.5, "b": math.inf}


class TestFile:
    @pytest.fixture
    def ledger(self, tmp_path: Path) -> Ledger:
        ledger = Ledger(tmp_path / "results.jsonl")
        for seed in (0, 1):
            ledger.append(line_of(seed))
        return ledger

    def seeds(self, ledger: Ledger) -> list[int]:
        return [line["seed"] for line in ledger.read().values()]

    def test_a_whole_last_line_without_its_line_break_is_kept(self, ledger: Ledger) -> None:
        ledger.path.write_bytes(ledger.path.read_bytes()[:-1])
        assert self.seeds(ledger) == [0, 1]
        ledger.append(line_of(2))
        assert self.seeds(ledger) == [0, 1, 2]

    @pytest.mark.parametrize("tail", [b'{"format": 1, "id"', b"\0\0\0\0", "é".encode()[:1]])
    def test_a_torn_last_line_is_cut_off_and_the_others_stay_where_they_are(
        self, ledger: Ledger, tail: bytes, monkeypatch
    ) -> None:
        whole = ledger.path.read_bytes()
        ledger.path.write_bytes(whole + tail)
        assert self.seeds(ledger) == [0, 1]
        monkeypatch.setattr(Path, "write_bytes", lambda *_: pytest.fail("the whole file is written anew"))
        ledger.append(line_of(2))
        assert ledger.path.read_bytes().startswith(whole) and self.seeds(ledger) == [0, 1, 2]

    def test_a_full_disk_takes_no_line_away(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        whole, write = ledger.path.read_bytes(), os.write

        def full(handle: int, data: bytes) -> int:
            if len(data) < 50:
                raise OSError(28, "No space left on device")
            return write(handle, data[:50] if len(data) > 100 else data[:10])

        ledger.path.write_bytes(whole + b"torn")
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            ledger.append(line_of(2))
        monkeypatch.undo()
        assert ledger.path.read_bytes() == whole

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("3", "is no run but '3'"),
            ("[]", "is no run"),
            ('{"format": 1}', "lacks id, code"),
            ('{"id": "x"}', "has format None"),
            ('{"format": 1, "id"', "is not JSON"),
            ("", "is not JSON"),
        ],
    )
    def test_foreign_lines_are_one_clear_error(self, ledger: Ledger, text: str, message: str) -> None:
        ledger.path.write_text(f"{text}\n" + ledger.path.read_text())
        for any_code in (False, True):
            with pytest.raises(ConfigError, match=rf"line 1 of .*results\.jsonl {message}"):
                ledger.read(any_code=any_code)

    @pytest.mark.parametrize("config", [{"nothing": 1}, {"learning_rate": "x"}, {"iterations": None}])
    def test_settings_that_cannot_be_read_name_their_line(self, ledger: Ledger, config: dict) -> None:
        ledger.append({**line_of(2), "config": config})
        with pytest.raises(ConfigError, match=r"line 3 of .* has settings that cannot be read"):
            ledger.read()

    @pytest.mark.parametrize("system", ["locks of the system", "none"])
    def test_only_one_works_on_a_file(self, tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if system == "none":
            monkeypatch.setattr(lock, "fcntl", None)
        one, other = (suite_of(tmp_path / "results.jsonl", tiny(), command=f"flowrl bench {name}") for name in ("one", "other"))
        with held(one.ledger.path, one.command):
            with pytest.raises(
                ConfigError, match=rf"results\.jsonl is being written by process {os.getpid()} on .* \(`flowrl bench one`"
            ):
                other.execute(1)
            assert other.ledger.read() == {}  # reading needs no lock
        assert not other.execute(1, minutes=0)
        assert not list(tmp_path.glob("*.lock"))
        with pytest.raises(KeyError), held(one.ledger.path, "fails"):
            raise KeyError
        with held(one.ledger.path, "after a failure"):
            pass

    def test_a_lock_dies_with_its_process(self, tmp_path: Path) -> None:
        pytest.importorskip("fcntl")
        path = tmp_path / "results.jsonl"
        assert subprocess.run([sys.executable, "-c", DIES, str(path)]).returncode == 9
        assert (tmp_path / "results.jsonl.lock").exists()
        with held(path, "the next"):
            assert json.loads((tmp_path / "results.jsonl.lock").read_text())["work"] == "the next"

    def test_a_folder_that_cannot_be_written_is_one_clear_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot be locked"), held(tmp_path / "file" / "results.jsonl", "x"):
            pass


INTERRUPTED = """
import multiprocessing, os, signal, sys, threading, time
from pathlib import Path
from flowrl_bench.claims import make_run
from flowrl_bench.records import Ledger, config_hash
from flowrl_bench.runner import Suite

def interrupt():
    while not multiprocessing.active_children():
        time.sleep(0.001)
    time.sleep(0.2)  # the worker is importing: torch takes longer
    os.killpg(0, signal.SIGINT)

if __name__ == "__main__":
    config = make_run("mixture", "direction", 0, {"iterations": 500, "eval_every": 500})
    runs = {config_hash(config): config}
    threading.Thread(target=interrupt, daemon=True).start()
    print("finished:", Suite(runs, Ledger(Path(sys.argv[1])), runs).execute(1))
"""


class TestCalls:
    @pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
    def test_ctrl_c_while_workers_start_is_a_pause(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(INTERRUPTED)
        words = [sys.executable, str(script), str(tmp_path / "results.jsonl")]
        found = subprocess.run(words, capture_output=True, text=True, start_new_session=True, timeout=300)
        assert found.returncode == 0, found.stderr[-2000:]
        assert found.stdout.strip() == "finished: False"
        assert "Traceback" not in found.stderr

    def test_a_count_of_workers_below_none_is_refused(self, tmp_path: Path, capsys) -> None:
        with pytest.raises(ConfigError, match="workers = -1 is not allowed: 1 or more, or 0"):
            suite_of(tmp_path / "results.jsonl", tiny()).execute(-1)
        assert main(["bench", "claims", "--quick", "--workers", "-1", "--out", str(tmp_path / "results.jsonl")]) == 2
        assert "workers = -1 is not allowed" in capsys.readouterr().err
        assert processes(0, 100) == min(multiprocessing.cpu_count(), 16) and processes(3, 2) == 2


class TestPace:
    @pytest.fixture(scope="class")
    def lines(self) -> list[dict]:
        """Every fifth line of the published file and all of the image world's, in the order in which the runs were finished."""
        with open(Path(__file__).parents[2] / "benchmarks" / "results" / "claims.jsonl") as file:
            found = [json.loads(text) for text in file]
        some = [line for number, line in enumerate(found) if number % 5 == 0 or line["config"]["world"] == "shapes"]
        return [{**line, "config": RunConfig.from_dict(line["config"])} for line in some]

    @pytest.mark.parametrize("order", ["as finished", "low seeds first", "dear last"])
    @pytest.mark.parametrize("speed", [1.0, 4.0])
    def test_the_estimate_is_near_from_the_start(self, lines: list[dict], order: str, speed: float) -> None:
        """On the machine that it knows from the first run on, on another one as soon as a few have finished."""
        keys = {"low seeds first": lambda line: line["seed"], "dear last": lambda line: line["totals"]["seconds"]}
        lines = sorted(lines, key=keys[order]) if order in keys else lines
        pace = Pace({line["id"]: line["config"] for line in lines})
        seconds = [speed * line["totals"]["seconds"] for line in lines]
        left, elapsed, shares, plain = sum(seconds), 0.0, [], []
        for number, (line, took) in enumerate(zip(lines, seconds, strict=True)):
            shares.append(pace.left(elapsed) / left)
            plain.append(elapsed / max(1, number) * (len(lines) - number) / left)
            pace.finished({**line, "totals": {"seconds": took}})
            elapsed, left = elapsed + took, left - took
        assert pace.left(elapsed) == 0.0
        known = shares if speed == 1.0 else shares[8:]
        assert min(known) > 0.5 and max(known) < 2.0
        assert min(plain[1:100]) < 0.25  # what a mean over all runs would have said

    def test_words(self) -> None:
        assert [words(x) for x in (40, 600, 7200)] == ["40 seconds", "10 minutes", "2.0 hours"]


def test_worlds_have_a_known_pace() -> None:
    from flowrl_bench.time_left import LENGTH, USUAL

    assert set(USUAL) == set(LENGTH) == set(WORLDS)
