"""Bad command lines, settings, files, links, targets and objects of users are refused by name.

`inputs.yaml` is the table. Every tenth case is fast; all run in `nox -s slow`. Refused clearly: one
message that names what was wrong, exit code 2, no traceback, nothing written, less than ten
seconds.
"""

import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest
import yaml

from flowrl.cli.main import main
from flowrl.core.errors import OWN_PACKAGES

LIMIT = 10.0
"""Seconds after which a case hangs, or has started work; on a busy machine more."""


@dataclass(frozen=True)
class Case:
    """A command that must be refused with a message that contains one of the words `named`.

    `begins`: the fault may show after the work has begun, so exit code 1 and new files are allowed.
    """

    words: list[str]
    named: tuple[str, ...] = ("",)
    begins: bool = False


@cache
def preload():
    """Import what commands import when they run, once for all cases."""
    for package in OWN_PACKAGES:
        for module in pkgutil.walk_packages(
            importlib.import_module(package).__path__, f"{package}."
        ):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def problem(case, root, log):
    """Run the command in `root` in a forked process; what is wrong with its refusal, or ""."""
    preload()
    before, given = snapshot(root), (case.words, root, log)
    child = multiprocessing.get_context("fork").Process(target=command, args=given)
    child.start()
    child.join(LIMIT * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
    status = child.exitcode
    if status is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    return judged(case, status, log.read_text(errors="replace"), before, snapshot(root))


def command(words, root, log):
    """Exit with the code of the command; its output is in `log`."""
    os.setsid()
    os.chdir(root)
    # without this, `compare` waits for the fork server of the parent
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_pid = server._forkserver_fd = server._forkserver_alive_fd = None
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))
    sys.exit(main(words))


def snapshot(root):
    """A digest of every file, "-" for everything else, below `root`."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file() and not path.is_symlink()
        else "-"
        for path in sorted(root.rglob("*"))
    }


def judged(case, status, output, before, after):
    """What is wrong with how an input was handled; "" if nothing is."""
    changed = sorted(set(before.items()) ^ set(after.items()))
    errors = output.count("flowrl: error:") + output.count("╭─")
    text = output.lower().replace("_", "-")
    wrong = {
        "hangs or starts work": status is None,
        "traceback": "Traceback" in output or "unexpected error" in output,
        "accepted": status == 0,
        f"exit code {status}": status != 2 and not (case.begins and status == 1),
        f"leaves {changed[:1]}": bool(changed) and not case.begins,
        f"{errors} messages": errors != 1,
        f"does not name {case.named}": not any(
            word.lower().replace("_", "-") in text for word in case.named
        ),
    }
    return next((what for what, is_so in wrong.items() if is_so), "")


TABLE = yaml.safe_load(Path(__file__).with_name("inputs.yaml").read_text(encoding="utf-8"))
TINY = ["--preset", "tiny", "--world", "mixture"]
EVIL = (
    "open('pwned', 'w').write('x')\n"
    "class X:\n    def assign(self, values, decisions):\n        return values\n"
)


def expanded(text):
    """A text of the table: <TEXT * COUNT> is repeated, <NUL> is a zero byte."""
    text = re.sub(r"<([^<>]+) \* (\d+)>", lambda part: part[1] * int(part[2]), text)
    return text.replace("<NUL>", "\0")


def split(line):
    """Words of a command line in the table; TINY stands for the smallest run."""
    words = [expanded(word) for word in shlex.split(line)]
    return [word for each in words for word in (TINY if each == "TINY" else [each])]


def cases():
    """(id, words, named, preparation, begins) of every row of the table."""
    for line, named in TABLE["commands"]:
        yield f"command: {line}", split(line), named, None, False
    for name, values in TABLE["settings"].items():
        for value in values:
            words = ["train", "--out", "new", f"--{name}={expanded(value)}"]
            options = [f"{option} = " for option in re.findall(r"(\w+)=", value)]
            named = [name, *options, *TABLE["known as"].get(name, [])]
            yield f"setting: {name}={value}", words, named, None, False
    for kind, (line, file, named, contents) in TABLE["files"].items():
        for label, text in contents.items():
            change = ("write", file, text)
            yield f"{kind}: {label}", split(line), [*named.split(), file], change, False
    for setting, values in TABLE["code"]["values"].items():
        for number, value in enumerate(values):
            for place, (line, file) in enumerate(TABLE["code"]["openings"].items()):
                if (place - number) % 2:  # half of the openings for each value
                    continue
                words = split(line)
                yield (
                    f"code: {' '.join(words[:2])} {setting}={value}",
                    words,
                    ["trust", setting],
                    ("set", file, {setting: value}),
                    False,
                )
    for file, lines in TABLE["read"].items():
        for line in lines:
            for how in TABLE["replaced by"]:
                yield (
                    f"file: {line}, {file} is {how}",
                    split(line),
                    "",
                    ("replace", file, how),
                    False,
                )
    for line, option in TABLE["outputs"]:
        for target in TABLE["targets"]:
            named = [option, target or "empty"]
            yield (
                f"output: {line} --{option}={target}",
                [*split(line), f"--{option}={expanded(target)}"],
                named,
                None,
                False,
            )
    for kind in ("credit", "reward"):
        part = TABLE["objects"][kind]
        for label, (old, new) in part["faults"].items():
            assert old in part["text"], label
            words = ["train", *TINY, f"--{kind}", "my.py:X", "--out", "new"]
            change = ("write", "my.py", part["text"].replace(old, new, 1))
            yield f"object: {kind} {label}", words, ["X", "my.py"], change, True
    for world, options in TABLE["unread"].items():
        for name, value in options.items():
            words = [
                "train",
                "--preset",
                "tiny",
                "--world",
                world,
                f"--{name}",
                value,
                "--out",
                "new",
            ]
            yield f"unread: {world} --{name}", words, [name], None, False


CASES = list(cases())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, another one and a comparison, made by the commands themselves."""
    root = tmp_path_factory.mktemp("made")
    for words in (
        ["train", *TINY, "--out", str(root / "run")],
        ["compare", *TINY, "--seeds", "0", "--workers", "1", "--out", str(root / "comparison")],
    ):
        # not a fork: that would share the server of its parent's worker processes
        command = [sys.executable, "-m", "flowrl", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return root


def prepared(root, made, change):
    """A folder with a run, a comparison, prompts, tables, files of other people, and one change."""
    root.mkdir()
    for name in ("run", "comparison"):
        shutil.copytree(made / name, root / name)
    (root / "foreign").mkdir()
    texts = {
        "mine.txt": "a file of the user's own\n",
        "foreign/thesis.tex": "years of work\n",
        "foreign/evil.py": EVIL,
        "p.txt": "a red cube\na dog\n",
        "prompts.txt": "three red circles\nblue square left of green triangle\n",
        "table.csv": "value_0,value_1,reward\n0,.5,1\n.1,.2,0\n.3,.4,.6\n",
        "arms.yaml": "arms:\n  a: {clip_range: 0.1}\n  b: {}\n",
        "set.yaml": "seed: 3\n",
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    if change is None:
        return
    how, file, value = change
    path = root / file
    if how == "write":
        data = expanded(value)
        latin = all(ord(letter) < 256 for letter in data)
        path.write_bytes(data.encode("latin-1" if latin else "utf-8"))
    elif how == "set":
        changed(path, value)
    else:
        replaced(path, root / "foreign" / "kept", value)


def changed(path, values):
    """Set settings in the group that has them; in a YAML file of settings or arms."""
    from flowrl.run.config import RunConfig
    from flowrl.run.parts.settings import owners

    (name, value), *_ = values.items()
    group = owners(RunConfig)[name]
    if path.name == "arms.yaml":
        path.write_text(yaml.safe_dump({"arms": {"a": values}}))
    elif path.suffix == ".yaml":
        path.write_text(yaml.safe_dump({group: values} if group else values))
    else:
        config = json.loads(path.read_text())
        run = config.get("run", config)
        (run[group] if group else run)[name] = value
        path.write_text(json.dumps(config))


def replaced(path, kept, how):
    """A file becomes a pipe, a folder, or a link."""
    shutil.move(path, kept)
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if how == "itself" else how)


def some(index):
    return () if index % 10 == 0 else pytest.mark.slow


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("words", "named", "change", "begins"),
    [
        pytest.param(words, named, change, begins, id=f"{index} {label[:70]}", marks=some(index))
        for index, (label, words, named, change, begins) in enumerate(CASES)
    ],
)
def test_a_bad_input_is_refused_by_name(words, named, change, begins, made, tmp_path):
    prepared(tmp_path / "work", made, change)
    named = (named,) if isinstance(named, str) else tuple(named)
    case = Case(words, named, begins)
    found = problem(case, tmp_path / "work", tmp_path / "output")
    assert not found, (tmp_path / "output").read_text(errors="replace")[-2000:]
    assert not (tmp_path / "work" / "pwned").exists()


@pytest.mark.parametrize(
    ("status", "output", "after", "expected"),
    [
        (2, "{clear}", {}, ""),
        (None, "", {}, "hangs or starts work"),
        (0, "", {}, "accepted"),
        (1, "{clear}", {}, "exit code 1"),
        (2, "{clear}Traceback (most recent call last):", {}, "traceback"),
        (2, "{clear}", {"new": "-"}, "leaves [('new', '-')]"),
        (2, "{clear}{clear}", {}, "2 messages"),
        (2, "flowrl: error: no", {}, "does not name ('count',)"),
    ],
)
def test_the_judge_sees_what_is_wrong(status, output, after, expected):
    clear = "flowrl: error: count = 0 is not allowed; allowed: a whole number, 1 or more\n"
    assert judged(Case([], ("count",)), status, output.format(clear=clear), {}, after) == expected
