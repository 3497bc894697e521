"""Bad input made another way than `hostile_cases`: hostile folders, code in foreign files, faulty
objects of users, options without effect, targets that cannot be written, and random mutations of
valid specs, commands, files and calls.

Classes that draw (`specs`, `commands`, `files`, `calls`) depend on a seed and a count. Every other
class is listed in full.
"""

import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import random
import re
import shutil
import string
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from hostile_cases import Case, command, python

from flowrl.cli.main import main
from flowrl.parts.registry import KINDS, options_of

TINY = ["--preset", "tiny", "--world", "mixture"]
PWNED = "open('pwned', 'w').write('x')\n"
"""What a foreign file does when it runs: judges see the new file."""
EVIL = PWNED + "class X:\n    def assign(self, values, decisions):\n        return values\n"


# Folders that a case starts in


@cache
def made() -> Path:
    """A run, a comparison and a results file, made once by the commands themselves."""
    root = Path(tempfile.mkdtemp(prefix="flowrl-hostile-made-"))
    for words in (
        ["train", *TINY, "--out", str(root / "run")],
        ["train", *TINY, "--seed", "1", "--out", str(root / "other")],
        ["compare", *TINY, "--seeds", "0", "--workers", "1", "--out", str(root / "comparison")],
    ):
        # not a fork: that would share the server of its parent's worker processes
        subprocess.run(
            [sys.executable, "-m", "flowrl", *words], check=True, stdout=subprocess.DEVNULL
        )
    return root


def prepared(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    """Copies of the run, the other run and the comparison, a hostile Python file and prompts, with
    further changes.
    """

    def prepare(root: Path) -> None:
        for name in ("run", "other", "comparison"):
            shutil.copytree(made() / name, root / name, symlinks=True)
        (root / "foreign" / "evil.py").write_text(EVIL)
        (root / "p.txt").write_text("a red cube\na dog\n")
        (root / "table.csv").write_text("value_0,value_1,reward\n0,.5,1\n.1,.2,0\n.3,.4,.6\n")
        (root / "arms.yaml").write_text("arms:\n  a: {clip_range: 0.1}\n  b: {}\n")
        (root / "set.yaml").write_text("seed: 3\n")
        for change in changes:
            change(root)

    return prepare


def case(
    family: str,
    words: list[str],
    *named: str,
    label: str = "",
    change: Callable[[Path], None] = lambda root: None,
) -> Case:
    """A command in a prepared folder; without `named` any message will do."""
    tried = command(family, words, *(named or ("",)), prepare=prepared(change))
    return dataclasses.replace(tried, label=label or tried.label)


def settings(file: str, **values: Any) -> Callable[[Path], None]:
    """Change settings, in whatever group they are, in a config.json."""

    def change(root: Path) -> None:
        path = root / file
        config = json.loads(path.read_text())
        for name, value in values.items():
            for group in [config, config.get("run", {}), *config.values()]:
                if isinstance(group, dict) and name in group:
                    group[name] = value
            for group in config.get("run", {}).values():
                if isinstance(group, dict) and name in group:
                    group[name] = value
        path.write_text(json.dumps(config))

    return change


# 1. Code in foreign files

PAYLOADS = {
    "credit": (
        "foreign/evil.py:X",
        "flowrl.methods:named_method(name='x', credit='foreign/evil.py:X')",
        "weighted(rule=foreign/evil.py:X)",
        "gdpo(rule='foreign/evil.py:X')",
        "uniform(probe=foreign/evil.py:X)",
        "flowrl.credit:UniformCredit",
        "flowrl_bench.rules:RandomCredit",
        "os:system",
    ),
    "loss": (
        "flowrl.methods:named_method(name='x', credit='foreign/evil.py:X')",
        "foreign/evil.py:X",
        "clipped(log_prob='foreign/evil.py:X')",
        "flowrl.losses:ClippedLoss",
        "builtins:exec",
    ),
    "sampler": ("foreign/evil.py:X", "flowrl.samplers:FlowSDE", "subprocess:Popen(args='touch x')"),
    "window": (
        "foreign/evil.py:X",
        "flowrl.parts.registry:build(kind='credit', spec='foreign/evil.py:X')",
    ),
    "reward": (
        "foreign/evil.py:X",
        "frame-mean(reward=foreign/evil.py:X)",
        "weighted-sum(models={'foreign/evil.py:X': 1})",
        "remote(url='http://127.0.0.1:9/')",
        "weighted-sum(models={\"remote(url='http://127.0.0.1:9/')\": 1})",
        "pickscore(model='a/b.bin')",
        "flowrl_compare.comparison:load_compare(path='foreign/evil.py', trust=True)",
    ),
    "heldout_rewards": (["foreign/evil.py:X"], ["judge(url='http://127.0.0.1:9/', model='x')"]),
    "diversity": ("foreign/evil.py:X", "flowrl.io:FileLock(lock_file='pwned')", "pathlib:Path"),
    "world": ("foreign/evil.py:X", "flowrl.worlds.mixture:MixtureWorld", "os:mkdir(path='pwned')"),
    "observe": (["foreign/evil.py:X"], ["flowrl.training.observers:Observers"], ["os:abort"]),
    "attention_backend": ("_flash_3_hub", "sage_hub"),
}
"""Values that must not be built from a file without --trust, by setting."""
OPENINGS: dict[str, tuple[list[str], str]] = {
    "train --resume": (["train", "--resume", "run"], "run/config.json"),
    "train --config": (["train", "--config", "run/config.json", "--out", "new"], "run/config.json"),
    "train --config --plan": (
        ["train", "--config", "run/config.json", "--plan"],
        "run/config.json",
    ),
    "evaluate": (["evaluate", "--weights", "run"], "run/config.json"),
    "sample": (["sample", "--weights", "run", "--count", "1"], "run/config.json"),
    "compare --config": (
        ["compare", "--config", "comparison/config.json", "--out", "new"],
        "comparison/config.json",
    ),
    "compare --resume": (["compare", "--resume", "comparison"], "comparison/config.json"),
}


def code_cases() -> Iterator[Case]:
    """Every payload by every opening."""
    family = "code without trust"
    for setting, values in PAYLOADS.items():
        for value in values:
            for opening, (words, file) in OPENINGS.items():
                if setting == "attention_backend" and opening == "sample":
                    continue
                change = settings(file, **{setting: value})
                yield case(
                    family,
                    words,
                    "trust",
                    setting,
                    label=f"{opening}: {setting} = {value}",
                    change=change,
                )
            for words, file, text in (
                (["train", "--preset", "set.yaml", "--out", "new"], "set.yaml", {setting: value}),
                (["train", "--preset", "set.yaml", "--plan"], "set.yaml", {setting: value}),
                (
                    ["compare", *TINY, "--arms", "arms.yaml", "--out", "new"],
                    "arms.yaml",
                    {"arms": {"a": {setting: value}}},
                ),
                (
                    ["bench", "rule", "--arms", "arms.yaml", "--out", "new"],
                    "arms.yaml",
                    {"arms": {"a": {setting: value}}},
                ),
                (
                    ["bench", "tune", "--arms", "arms.yaml", "--out", "new"],
                    "arms.yaml",
                    {"arms": {"a": {setting: value}}},
                ),
            ):
                if file == "set.yaml":
                    text = grouped(text)
                yield case(
                    family,
                    words,
                    "trust",
                    setting,
                    label=f"{' '.join(words[:3])}: {setting} = {value}",
                    change=partial(_dump, file, text),
                )


def _dump(file: str, content: Any, root: Path) -> None:
    (root / file).write_text(yaml.safe_dump(content))


def grouped(values: dict[str, Any]) -> dict[str, Any]:
    """Settings in the groups of a settings file."""
    from flowrl.parts.settings import owners
    from flowrl.training.config import RunConfig

    result: dict[str, Any] = {}
    for name, value in values.items():
        group = owners(RunConfig)[name]
        (result.setdefault(group, {}) if group else result)[name] = value
    return result


# 2. Links, pipes and devices


def replaced(file: str, how: str) -> Callable[[Path], None]:
    """Replace a file or folder by something that is none, or that is elsewhere."""

    def change(root: Path) -> None:
        path = root / file
        kept = root / "foreign" / "kept"
        if path.is_dir() and not path.is_symlink():
            shutil.move(path, kept)
        elif path.exists():
            kept.write_bytes(path.read_bytes())
            path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        if how == "pipe":
            os.mkfifo(path)
        elif how == "folder":
            path.mkdir()
        elif how == "itself":
            path.symlink_to(path.name)
        elif how == "elsewhere":
            path.symlink_to(kept)
        else:
            path.symlink_to(how)

    return change


READ = {
    "run/config.json": (
        ["train", "--resume", "run"],
        ["evaluate", "--weights", "run"],
        ["sample", "--weights", "run"],
    ),
    "run/metrics.jsonl": (["train", "--resume", "run", "--from", "000001"],),
    "run/weights.safetensors": (["evaluate", "--weights", "run"], ["sample", "--weights", "run"]),
    "comparison/config.json": (
        ["compare", "--resume", "comparison"],
        ["compare", "--config", "comparison/config.json", "--out", "new"],
    ),
    "p.txt": (["prompts", "check", "--file", "p.txt"],),
    "table.csv": (["explain", "uniform", "--rewards", "table.csv", "--out", "t.png"],),
    "arms.yaml": (
        ["compare", *TINY, "--arms", "arms.yaml", "--out", "new"],
        ["bench", "rule", "--arms", "arms.yaml", "--out", "new"],
    ),
    "set.yaml": (["train", "--preset", "set.yaml", "--out", "new"],),
    "lines.jsonl": (["bench", "claims", "--judge", "--out", "lines.jsonl"],),
    "tuning.jsonl": (["bench", "tune", "--show", "--out", "tuning.jsonl"],),
}
"""Files that a command reads."""


def link_cases() -> Iterator[Case]:
    """Files that are pipes, devices, folders or links; folders that are links."""
    family = "links, pipes, devices"
    for file, commands in READ.items():
        for words in commands:
            for how in (
                "pipe",
                "/dev/zero",
                "/dev/full",
                "/dev/stdin",
                "folder",
                "itself",
                "nowhere",
            ):
                if file in ("lines.jsonl", "tuning.jsonl") and how == "nowhere":
                    continue
                yield case(
                    family,
                    words,
                    label=f"{' '.join(words[:3])}: {file} is {how}",
                    change=replaced(file, how),
                )
    unfinished = ("done.json", "weights.safetensors")

    def interrupted(root: Path) -> None:
        for name in unfinished:
            (root / "run" / name).unlink()
        (root / "run" / "metrics.jsonl").write_text(
            "\n".join((root / "run" / "metrics.jsonl").read_text().splitlines()[:2]) + "\n"
        )

    def checkpoints_of_the_other(root: Path) -> None:
        interrupted(root)
        shutil.rmtree(root / "run" / "checkpoints")
        (root / "run" / "checkpoints").symlink_to(root / "other" / "checkpoints")

    yield case(
        family, ["train", "--resume", "run"], "link", "checkpoints", change=checkpoints_of_the_other
    )
    for name in (
        "metrics.jsonl",
        "samples.json",
        "samples.safetensors",
        "trajectory.json",
        "done.json",
        "weights.safetensors",
        "config.yaml",
    ):

        def written_elsewhere(root: Path, name: str = name) -> None:
            interrupted(root)
            (root / "run" / name).unlink(missing_ok=True)
            (root / "run" / name).symlink_to(root / "mine.txt")

        yield case(family, ["train", "--resume", "run"], "link", name, change=written_elsewhere)
    for name in ("evaluation", "evaluation/evaluation.json", "evaluation/grid.png"):

        def evaluation(root: Path, name: str = name) -> None:
            if "/" in name:
                (root / "run" / "evaluation").mkdir()
            (root / "run" / name).symlink_to(root / ("mine.txt" if "." in name else "foreign"))

        yield case(
            family, ["evaluate", "--weights", "run"], "link", "evaluation", change=evaluation
        )

    def not_ours(root: Path) -> None:
        (root / "run" / "evaluation").mkdir()
        (root / "run" / "evaluation" / "evaluation.json").write_text('{"mine": 1}')

    yield case(family, ["evaluate", "--weights", "run"], "evaluation", change=not_ours)
    for name in ("runs", "report.html", "table.txt", "summary.json"):

        def comparison(root: Path, name: str = name) -> None:
            path = root / "comparison" / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            path.symlink_to(root / ("foreign" if name == "runs" else "mine.txt"))

        yield case(family, ["compare", "--resume", "comparison"], "link", name, change=comparison)
    for target in ("run", "comparison"):
        for words in (["train", *TINY, "--out", target], ["compare", *TINY, "--out", target]):
            yield case(family, words, "out", target)


# 3. Objects of users with ordinary faults

RULE = """
from flowrl.probes import Completion, NoProbe
import torch, os, time

class X:
    probe = NoProbe()
    def assign(self, values, decisions):
        final = values[..., -1:]
        return (final - final.mean(1, keepdim=True)).expand_as(decisions.mask) * 1.0
"""
REWARD = """
import torch, os
class X:
    def score(self, images, prompts):
        return images.flatten(1).mean(1)
"""
RULES = {
    "probe = None": ("probe = NoProbe()", "probe = None"),
    "probe is a name": ("probe = NoProbe()", "probe = 'completion'"),
    "probe is a class": ("probe = NoProbe()", "probe = Completion"),
    "probe is a number": ("probe = NoProbe()", "probe = 3"),
    "probe raises": (
        "probe = NoProbe()",
        "@property\n    def probe(self):\n        raise OSError('disk')",
    ),
    "assign is a number": (
        "    def assign(self, values, decisions):",
        "    assign = 3\n    def other(self, values, decisions):",
    ),
    "assign takes rewards": ("values, decisions", "rewards, schedule"),
    "assign takes one": ("self, values, decisions", "self, values"),
    "assign raises": ("        final = values[..., -1:]", "        raise KeyError('oops')"),
    "assign exits": ("        final = values[..., -1:]", "        raise SystemExit(0)"),
    "assign asserts": ("        final = values[..., -1:]", "        assert False"),
    "returns None": ("        return (final", "        return None\n        return (final"),
    "returns a list": ("        return (final", "        return [1.0]\n        return (final"),
    "returns a number": ("        return (final", "        return 1.0\n        return (final"),
    "returns another shape": (
        "        return (final",
        "        return final\n        return (final",
    ),
    "returns integers": ("* 1.0", "> 0"),
    "returns NaN": ("* 1.0", "* float('nan')"),
    "alters the mask": (
        "        final = values[..., -1:]",
        "        decisions.mask.zero_(); final = values[..., -1:]",
    ),
    "alters the values": (
        "        final = values[..., -1:]",
        "        values.zero_(); final = values[..., -1:]",
    ),
    "state is a number": (
        "    def assign",
        "    def state_dict(self):\n        return 1.0\n    def load_state_dict(self, s):\n        pass\n    def assign",
    ),
    "state is a list": (
        "    def assign",
        "    def state_dict(self):\n        return [1]\n    def load_state_dict(self, s):\n        pass\n    def assign",
    ),
    "state is None": (
        "    def assign",
        "    def state_dict(self):\n        return None\n    def load_state_dict(self, s):\n        pass\n    def assign",
    ),
    "state holds an object": (
        "    def assign",
        "    def state_dict(self):\n        return {'a': object()}\n    def load_state_dict(self, s):\n        pass\n    def assign",
    ),
    "state without its partner": (
        "    def assign",
        "    def state_dict(self):\n        return {}\n    def assign",
    ),
    "load without its partner": (
        "    def assign",
        "    def load_state_dict(self, s):\n        pass\n    def assign",
    ),
    "state is no function": (
        "    def assign",
        "    state_dict = {}\n    load_state_dict = {}\n    def assign",
    ),
    "state is a number later": (
        "    def assign",
        "    calls = 0\n    def state_dict(self):\n        X.calls += 1\n"
        "        return {} if X.calls < 3 else {'a': 1.0}\n"
        "    def load_state_dict(self, s):\n        pass\n    def assign",
    ),
    "metrics is no function": ("    def assign", "    metrics = {'a': 1}\n    def assign"),
    "metrics are a text": (
        "    def assign",
        "    def metrics(self):\n        return 'a'\n    def assign",
    ),
    "metrics are a number": (
        "    def assign",
        "    def metrics(self):\n        return 0.5\n    def assign",
    ),
    "a metric is a text": (
        "    def assign",
        "    def metrics(self):\n        return {'a': '0.5'}\n    def assign",
    ),
    "a metric is a vector": (
        "    def assign",
        "    def metrics(self):\n        return {'a': torch.ones(2)}\n    def assign",
    ),
    "metrics change their names": (
        "    def assign",
        "    calls = 0\n    def metrics(self):\n        X.calls += 1\n"
        "        return {f'a{X.calls}': 1.0}\n    def assign",
    ),
    "constructor needs values": (
        "    probe = NoProbe()",
        "    probe = NoProbe()\n    def __init__(self, a): pass",
    ),
    "constructor raises": (
        "    probe = NoProbe()",
        "    probe = NoProbe()\n    def __init__(self): raise MemoryError",
    ),
    "changes the default type": (
        "        final = values[..., -1:]",
        "        torch.set_default_dtype(torch.float64); final = values[..., -1:]",
    ),
    "changes the folder": (
        "        final = values[..., -1:]",
        "        os.chdir('/'); final = values[..., -1:]",
    ),
    "turns gradients off": (
        "        final = values[..., -1:]",
        "        torch.set_grad_enabled(False); final = values[..., -1:]",
    ),
    "is a syntax error": ("class X:", "class X"),
    "has no class": ("class X:", "class Y:"),
    "is a function": ("class X:", "def X(): pass\nclass Y:"),
    "import fails": ("class X:", "import nothing_of_this_name\nclass X:"),
}
REWARDS = {
    "score = 3": (
        "    def score(self, images, prompts):",
        "    score = 3\n    def other(self, images, prompts):",
    ),
    "score takes one": ("images, prompts):", "images):"),
    "returns a list": ("return images", "return [1.0] * len(images)\n        return images"),
    "returns a number": ("return images", "return 1.0\n        return images"),
    "returns None": ("return images", "return None\n        return images"),
    "returns one score": ("return images", "return images.mean()\n        return images"),
    "returns infinity": (
        "return images",
        "return torch.full((len(images),), float('inf'))\n        return images",
    ),
    "raises": ("return images", "raise RuntimeError('no model')\n        return images"),
    "exits": ("return images", "raise SystemExit(0)\n        return images"),
    "changes the default type": (
        "return images",
        "torch.set_default_dtype(torch.float64)\n        return images",
    ),
    "forks": (
        "return images",
        "\n        if os.fork() == 0:\n            return images.flatten(1).mean(1)\n        return images",
    ),
    "changes the images": ("return images", "images.zero_()\n        return images"),
    "is an instance": ("class X:", "class Y:"),
    "state without its partner": (
        "    def score",
        "    def state_dict(self):\n        return {}\n    def score",
    ),
}


def object_cases() -> Iterator[Case]:
    """Rules, rewards and observers with one fault each, in `train` and in `compare`."""
    family = "objects of users"
    for kind, text, faults in (("credit", RULE, RULES), ("reward", REWARD, REWARDS)):
        for label, (old, new) in faults.items():
            assert old in text, label
            content = text.replace(old, new, 1)

            def write(root: Path, content: str = content) -> None:
                (root / "my.py").write_text(content)

            ends = ["--out", "new", "--workers", "1", "--seeds", "0"]
            arms = ["--arm", f"a: {kind}=my.py:X", "--arm", "b: method=awm"]
            compared = arms if kind == "credit" else [f"--{kind}", "my.py:X"]
            for words in (
                ["train", *TINY, f"--{kind}", "my.py:X", "--out", "new"],
                ["compare", *TINY, *compared, *ends],
            ):
                run = partial(_main, words)
                name = f"{words[0]}: {kind} {label}"
                yield Case(family, name, ("X", "my.py"), run, prepared(write), begins=True)


def _main(words: list[str], root: Path) -> int:
    return main(words)


# 4. Options without effect

UNREAD = {
    "mixture": {
        "dtype": "bfloat16",
        "lora-rank": "100000000",
        "lora-alpha": "3",
        "loss-scale": "1e308",
        "resolution": "64",
        "width": "64",
        "num-frames": "5",
        "guidance-scale": "2",
        "negative-prompt": "x",
        "guidance-gradient": "conditional",
        "tuning": "full",
        "adapter": "run",
        "frozen-adapters": "run",
        "lora-targets": "to_q",
        "prompt-cache": "3",
        "decode-batch": "2",
        "decode-dtype": "bfloat16",
        "max-sequence-length": "77",
        "gradient-checkpointing": "True",
        "train-guidance-scale": "2",
        "reference-guidance-scale": "2",
        "attention-backend": "native",
        "prompts": "p.txt",
        "heldout-prompts": "p.txt",
        "base-weights": "run/weights.safetensors",
    },
    "shapes": {
        "loss-scale": "1e308",
        "resolution": "64",
        "width": "64",
        "num-frames": "5",
        "negative-prompt": "x",
        "max-sequence-length": "77",
        "prompt-cache": "3",
        "decode-batch": "2",
        "attention-backend": "native",
        "frozen-adapters": "run",
        "prompts": "p.txt",
    },
}


def effect_cases() -> Iterator[Case]:
    """Options that nothing reads."""
    family = "options without effect"
    for world, options in UNREAD.items():
        for name, value in options.items():
            words = ["--preset", "tiny", "--world", world, f"--{name}", *([value] if value else [])]
            yield case(family, ["train", *words, "--out", "new"], name)
            yield case(family, ["compare", *words, "--out", "new", "--seeds", "0"], name)
    loss = ["train", *TINY, "--out", "new"]
    for more, name in (
        (["--method", "awm", "--clip-range", "0.1"], "clip"),
        (["--method", "diffusion-nft", "--window", "1:2"], "window"),
        (["--reward-form", "soft", "--reward", "jpeg-compressibility"], "reward"),
        (["--kl-weight", "0.1", "--loss", "clipped(kl_weight=0.2)"], "kl"),
        (["--clip-range", "0.1", "--loss", "clipped(clip_range=0.2)"], "clip"),
        (["--noise-level", "0.5", "--sampler", "flow-sde(noise_level=0.7)"], "noise"),
        (["--processes", "2"], "processes"),
        (["--from", "000001"], "from"),
    ):
        yield case(family, [*loss, *more], name)
    for words, name in (
        (["bench", "claims", "--redo", ""], "redo"),
        (["bench", "claims", "--look"], "look"),
        (["bench", "claims", "--redo", "x"], "redo"),
        (["bench", "tune", "--show", "--budget", "3"], "budget"),
        (["bench", "rule", "uniform", "--set", "resolution=64", "--out", "new"], "set"),
        (["bench", "rule", "uniform", "--prompts", "p.txt", "--out", "new"], "prompts"),
        (["evaluate", "--weights", "run", "--limit", "0"], "limit"),
        (["evaluate", "--weights", "run", "--guidance-scale", "2"], "guidance"),
        (["evaluate", "--weights", "run", "--resolution", "64"], "resolution"),
        (["evaluate", "--weights", "run", "--dtype", "bfloat16"], "dtype"),
        (["evaluate", "--weights", "run", "--shown", "0"], "shown"),
        (
            ["explain", "uniform", "--rewards", "table.csv", "--sampler", "cps", "--out", "t.png"],
            "sampler",
        ),
        (
            [
                "explain",
                "uniform",
                "--rewards",
                "table.csv",
                "--noise-level",
                "2",
                "--out",
                "t.png",
            ],
            "noise",
        ),
        (["prompts", "check", "--file", "p.txt", "--count", "3"], "count"),
        (["prompts", "check", "--file", "p.txt", "--seed", "3"], "seed"),
        (["presets", "--accelerate", "ddp", "--yaml"], "yaml"),
        (["parts", "uniform", "--kind", "all"], "kind"),
        (["compare", *TINY, "--arm", "a: dtype=bfloat16", "--arm", "b:", "--out", "new"], "dtype"),
        (["compare", "--resume", "comparison", "--seeds", "5"], "seeds"),
        (
            ["compare", "--config", "comparison/config.json", "--seeds", "5", "--out", "new"],
            "seeds",
        ),
        (["train", "--resume", "run", "--out", "new"], "out"),
        (["train", "--config", "run/config.json", "--resume", "run"], "resume"),
    ):
        yield case(family, words, name)


# 5. Targets that cannot be written

TARGETS = (
    "/",
    "/dev/full",
    "/dev/null",
    "",
    "mine.txt/x",
    "/proc/x",
    "a\0b",
    "x" * 300,
    "foreign",
    "/sys/new",
)


def target_cases() -> Iterator[Case]:
    """Every option that names an output, for every target that cannot be written."""
    family = "targets"
    commands: tuple[tuple[list[str], str], ...] = (
        (["train", *TINY], "--out"),
        (["compare", *TINY, "--seeds", "0"], "--out"),
        (["evaluate", "--weights", "run"], "--out"),
        (["sample", "--weights", "run", "--count", "1"], "--out"),
        (["explain", "uniform", "--rewards", "table.csv"], "--out"),
        (["prompts", "text", "--count", "2"], "--file"),
        (["bench", "tune", "flow-grpo"], "--save"),
        (["bench", "tune", "flow-grpo"], "--out"),
        (["bench", "rule", "--arm", "a: clip_range=0.3"], "--out"),
        (["bench", "claims"], "--out"),
        (["bench", "claims"], "--page"),
        (["bench", "microscope"], "--out"),
        (["bench", "microscope"], "--page"),
        (["pretrain"], "--out"),
    )
    for words, option in commands:
        for target in TARGETS:
            folder = option == "--page" or words[0] == "explain"
            if folder and target in ("/", "", "foreign"):
                continue  # files among others in a folder
            yield case(family, [*words, f"{option}={target}"], option.strip("-"), target or "empty")


# 6. Specs by a grammar, each with one error

WORDS = (
    "nope",
    "1e400",
    "-",
    "'",
    "foreign/evil",
    "None",
    "[]",
    "{",
    "x=1",
    "☃",
    "-" * 5000 + "1",
    "1" * 5000,
)


def a_spec(draw: random.Random, kind: str, depth: int = 0) -> str:
    """A valid spec: a built-in name, or one with an option at its default value."""
    name = draw.choice(sorted(KINDS[kind].built_in))
    options = {
        key: value
        for key, value in options_of(kind, name).items()
        if isinstance(value, int | float | bool)
    }
    if not options or depth > 2 or draw.random() < 0.3:
        return name
    key = draw.choice(sorted(options))
    return f"{name}({key}={options[key]})"


def broken_spec(draw: random.Random, kind: str) -> str:
    """A spec with one error that no kind allows."""
    spec = a_spec(draw, kind)
    name = spec.partition("(")[0]
    return draw.choice(
        [
            lambda: spec.replace(name, name[:-1] + draw.choice("xyzq"), 1) + "q",
            lambda: f"{name}({draw.choice(string.ascii_lowercase)}_nope={draw.randint(0, 9)})",
            lambda: f"{name}({draw.choice(WORDS)})",
            lambda: spec + draw.choice("()[]{}=,:"),
            lambda: f"{name}(" + draw.choice("([{") * draw.randint(1, 3000),
            lambda: f"{name}({name}={name}({name}=)",
            lambda: f"{name}(rule={draw.choice(WORDS)}, rule=2)",
            lambda: (
                "".join(draw.choice(string.printable) for _ in range(draw.randint(1, 30))) + "\\"
            ),
            lambda: f"{name}({chr(draw.randint(0x2000, 0x2FFF))}=1)",
            lambda: f"{name}(models={{'a': [{draw.randint(0, 9)}]}})",
        ]
    )()


def spec_cases(seed: int, count: int) -> Iterator[Case]:
    """Broken specs as options, in arms and to build in Python."""
    from flowrl.parts.registry import build

    draw = random.Random(f"specs {seed}")
    kinds = ("credit", "loss", "sampler", "window", "reward", "probe")
    for number in range(count):
        kind = draw.choice(kinds)
        spec = broken_spec(draw, kind)
        if number % 3 == 0 or kind == "probe":
            yield python("specs", f"build {kind} {spec[:60]!r}", partial(build, kind, spec), "")
        elif number % 3 == 1:
            yield case("specs", ["train", *TINY, f"--{kind}={spec}", "--out", "new"])
        else:
            # one comma at the end of an arm is legal, as in a call of Python; two are not
            arm = f"a: {kind}={spec}" + ("," if spec.endswith(",") else "")
            yield case("specs", ["compare", *TINY, "--arm", arm, "--out", "new"])


# 7. Valid commands with one error

VALID: tuple[list[str], ...] = (
    ["train", *TINY, "--seed", "1", "--out", "new"],
    ["train", *TINY, "--learning-rate", "0.01", "--window", "0:2", "--out", "new"],
    ["train", "--resume", "run"],
    ["train", *TINY, "--plan", "--processes", "2"],
    ["compare", *TINY, "--seeds", "0", "1", "--methods", "flow-grpo", "--out", "new"],
    ["compare", *TINY, "--arm", "a: clip_range=0.1", "--arm", "b:", "--out", "new"],
    ["compare", "--resume", "comparison"],
    ["evaluate", "--weights", "run", "--count", "2", "--num-steps", "3"],
    ["sample", "--weights", "run", "--count", "2", "--out", "s.png"],
    ["explain", "uniform", "--rewards", "table.csv", "--out", "t.png"],
    ["parts", "uniform"],
    ["parts", "--kind", "credit"],
    ["presets", "tiny"],
    ["presets", "--accelerate", "ddp"],
    ["prompts", "text", "--count", "3", "--file", "new.txt"],
    ["prompts", "check", "--file", "p.txt"],
    ["bench", "rule", "uniform(clamp=4.0)", "--quick", "--world", "mixture", "--out", "new"],
    ["bench", "tune", "flow-grpo", "--world", "mixture", "--budget", "3", "--out", "new.jsonl"],
    ["bench", "claims", "--judge", "--out", "lines.jsonl"],
    ["bench", "microscope", "--quick", "--world", "mixture", "--out", "new.jsonl"],
    ["pretrain", "--updates", "2", "--out", "w.safetensors"],
    ["serve-reward", "jpeg-compressibility", "--port", "0", "--max-batch", "3"],
)


def broken_command(draw: random.Random) -> tuple[list[str], str]:
    """A valid command with one error, and a word of the message (or "")."""
    words = list(draw.choice(VALID))
    options = [place for place, word in enumerate(words) if word.startswith("--")]
    values = [
        place
        for place in options
        if place + 1 < len(words) and not words[place + 1].startswith("--")
    ]
    kind = draw.choice(
        ["misspell", "unknown", "command", "junk", "type", "huge", "control", "option of another"]
    )
    if kind == "misspell" and options:
        place = draw.choice(options)
        words[place] = words[place] + draw.choice("xzq")
        return words, words[place].strip("-")
    if kind == "command":
        words[0] = words[0] + draw.choice("xzq")
        return words, words[0]
    if kind == "type" and values:
        place = draw.choice(values)
        name = words[place]
        if name in ("--out", "--file", "--weights", "--resume", "--rewards"):
            words[place + 1] = draw.choice(
                ["nowhere/a/b/../../../mine.txt/x", "mine.txt/x", "\0", "y" * 5000]
            )
        else:
            words[place + 1] = draw.choice(
                [
                    "☃",
                    "1e400",
                    "--",
                    "nan",
                    "0x10",
                    "1,5",
                    "\x1b[31mx",
                    "[/]",
                    "[red]",
                    "%s%n",
                    "${HOME}",
                ]
            )
        return words, name.strip("-")
    if kind == "huge" and values:
        numeric = [place for place in values if re.fullmatch(r"[\d.]+", words[place + 1])]
        if numeric:
            place = draw.choice(numeric)
            words[place + 1] = "-" + "9" * draw.randint(1, 400)
            return words, words[place].strip("-")
    if kind == "control":
        words.insert(
            draw.randint(1, len(words)),
            draw.choice(["\x1b]0;x\x07", "[/]", "\u202e", "--" + "x" * 2000]),
        )
        return words, ""
    if kind == "option of another":
        extra = {
            "train": "--seeds=1",
            "compare": "--plan",
            "evaluate": "--learning-rate=1",
            "bench": "--gpu=1",
        }.get(words[0], "--iterations=3")
        return [*words, extra], extra.strip("-").partition("=")[0]
    words.append(draw.choice(["--nope", "--no-nope", "--=3", "--seed=", "---"]))
    return words, ""


def command_cases(seed: int, count: int) -> Iterator[Case]:
    """Valid commands with one error each."""
    draw, seen = random.Random(f"commands {seed}"), set[str]()
    while len(seen) < count:
        words, named = broken_command(draw)
        if str(words) not in seen:
            seen.add(str(words))
            yield case("commands", words, named.replace("-", "_"), named)


# 8. Valid files with one error

FILES = {
    "run/config.json": READ["run/config.json"],
    "run/metrics.jsonl": (["train", "--resume", "run", "--from", "000001"],),
    "comparison/config.json": READ["comparison/config.json"],
    "run/weights.safetensors": READ["run/weights.safetensors"],
    "arms.yaml": READ["arms.yaml"][:1],
    "table.csv": READ["table.csv"],
}


def broken_file(draw: random.Random, name: str, data: bytes) -> bytes:
    """Content with one error."""
    if name.endswith(".json"):
        config = json.loads(data)
        notes = ("versions", "parts", "descriptions")
        places = [
            (group, key)
            for group in (config, config.get("run", {}))
            for key in group
            if isinstance(group[key], dict) and key not in notes
        ]
        group, key = draw.choice(places)
        inner = draw.choice(sorted(group[key])) if group[key] else None
        kind = draw.choice(["lost", "type", "value", "unknown", "deep", "twice", "cut"])
        if kind == "lost" and key != "run":
            del group[key]
        elif kind == "unknown":
            group[key] = (
                {**group[key], "nope": 1}
                if key not in ("versions", "parts", "descriptions", "arms")
                else 3
            )
        elif kind == "deep":
            return data.replace(b"{", b'{"a":' * 4000 + b"{", 1)
        elif kind == "twice":
            return data.replace(b'"format"', b'"format": "x", "format"', 1)
        elif kind == "cut":
            return data[: draw.randint(1, len(data) - 5)]
        elif kind == "value" and inner and key not in ("versions", "parts", "descriptions"):
            group[key][inner] = draw.choice([{"a": {}}, [[[]]], "\0", float("nan"), -1e308])
        else:
            group[key] = draw.choice([[], 3, "x", None])
        return json.dumps(config).encode()
    if name.endswith((".yaml", ".csv")):
        return draw.choice(
            [
                b"",
                b"\xff\xfe\x00",
                b"[" * 5000,
                b"a: b: c",
                b"\x00",
                b"1\n",
                b"- 1\n- 2\n",
                b"arms: {a: {nope: 1}}",
                b"arms: {a: 3}",
                b"value_0,reward\n1\n",
                b"value_0,reward\n1,x\n",
                b"value_0,reward\n1,1e400\n2,3\n",
                b"reward\n1\n2\n",
                b"value_0,value_0\n1,2\n3,4\n",
            ]
        )
    place = draw.randint(0, len(data) - 1)
    if name.endswith(".safetensors"):
        header = int.from_bytes(data[:8], "little")
        return draw.choice(
            [
                b"",
                data[:place],
                data[:7],
                (2**60).to_bytes(8, "little") + data[8:],
                data[:8] + b"{" * header + data[8 + header :],
                data + b"more" * draw.randint(1, 99),
            ]
        )
    lines = data.splitlines(keepends=True)
    row = draw.choice(
        [
            b"{}\n",
            b"3\n",
            b"[]\n",
            b'{"iteration": "x"}\n',
            b"\xff\n",
            b"{\n",
            b"null\n",
            b"[" * 3000 + b"\n",
        ]
    )
    return b"".join([*lines[:1], row, *lines[1:]])


def file_cases(seed: int, count: int) -> Iterator[Case]:
    """Valid files with one error each."""
    draw = random.Random(f"files {seed}")
    for number in range(count):
        name = draw.choice(sorted(FILES))
        words = draw.choice(FILES[name])
        own = random.Random(draw.random())

        def change(root: Path, name: str = name, own: random.Random = own) -> None:
            path, state = root / name, own.getstate()
            path.write_bytes(broken_file(own, name, path.read_bytes()))
            own.setstate(state)

        yield case("files", words, label=f"{' '.join(words[:3])}: {name} {number}", change=change)


# 9. Calls in Python

PACKAGES = (
    "core",
    "credit",
    "flow",
    "losses",
    "probes",
    "rewards",
    "rollout",
    "samplers",
    "policies",
    "worlds",
    "methods",
    "training",
    "parts",
)
WRONG = (
    object(),
    "☃",
    b"x",
    -1,
    float("nan"),
    [object()],
    {"a": object()},
    torch.ones(1, 2, 3, 4, 5),
    None,
    10**30,
)


@cache
def public() -> list[tuple[str, Callable[..., Any]]]:
    """The public functions and classes with annotated parameters, by name."""
    calls: dict[str, Callable[..., Any]] = {}
    for package in PACKAGES:
        room = importlib.import_module(f"flowrl.{package}")
        names = [
            m.name for m in pkgutil.iter_modules(getattr(room, "__path__", []), f"{room.__name__}.")
        ]
        for module in [room, *map(importlib.import_module, names)]:
            exported = getattr(module, "__all__", None)
            if exported is None and hasattr(room, "__all__"):
                continue
            for name in exported if exported is not None else vars(module):
                value = getattr(module, name, None)
                own = getattr(value, "__module__", "").startswith("flowrl") and not name.startswith(
                    "_"
                )
                if own and callable(value) and not inspect.isabstract(value):
                    calls[f"{value.__module__}.{name}"] = value
    return sorted(calls.items())


def wrong_for(annotation: Any, draw: random.Random) -> Any:
    """A value that an annotation does not allow; `inspect.Parameter.empty` if none is certain."""
    kind = typing.get_origin(annotation) or annotation
    if kind is typing.Annotated:
        return wrong_for(typing.get_args(annotation)[0], draw)
    if kind in (int, float):
        return draw.choice([object(), "☃", [1], None])
    if kind in (str, Path):
        return draw.choice([object(), 3.5, ["x"]])
    if kind is bool:
        return draw.choice(["yes", object()])
    if kind is typing.Literal:
        return draw.choice(["nope", 3, None])
    if hasattr(kind, "dtypes") or kind is torch.Tensor:
        return draw.choice([object(), "x", 3, [1.0]])
    if isinstance(kind, type) and kind.__module__.startswith("flowrl"):
        return draw.choice([object(), "x", 3])
    return inspect.Parameter.empty


def call_cases(seed: int, count: int) -> Iterator[Case]:
    """Public calls in which one argument, the first required one or a random one, is of a wrong
    type; the arguments after it are wrong too.
    """
    draw, cases = random.Random(f"calls {seed}"), 0
    calls = public()
    while cases < count:
        name, function = draw.choice(calls)
        try:
            parameters = inspect.signature(function).parameters
            hints = typing.get_type_hints(
                function.__init__ if isinstance(function, type) else function, include_extras=True
            )
        except (NameError, TypeError, ValueError, AttributeError):
            continue
        needed = [
            p
            for p in parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        optional = [p for p in parameters.values() if p.default is not p.empty]
        chosen = needed or ([draw.choice(optional)] if optional else [])
        values = {p.name: wrong_for(hints.get(p.name, Any), draw) for p in chosen}
        if not values or any(value is inspect.Parameter.empty for value in values.values()):
            continue
        cases += 1
        yield python(
            "Python calls",
            f"{name}({', '.join(f'{k}={v!r:.20}' for k, v in values.items())})",
            partial(function, **values),
            *values,
        )


# 10. Sizes, prompts and texts


def further_cases() -> Iterator[Case]:
    """Sizes without end, prompts with numbers, terminal codes, markup."""
    family = "sizes and texts"
    for prompt in (
        "towards 1e400 degrees",
        "towards nan degrees",
        "towards -1e309 degrees",
        "towards " + "9" * 400 + " degrees",
        "towards ½ degrees",
        "",
        " ",
        "\0",
        "[/]",
        "\x1b[31mred",
        "three red circles",
    ):
        yield case(
            family,
            ["sample", "--world", "mixture", "--prompts", prompt, "--out", "s.png"],
            "prompt",
            "direction",
            "NUL",
        )
    for prompt in (
        "",
        " ",
        "\0",
        "towards 30 degrees",
        "9" * 5000 + " red circles",
        "minus " * 5000,
        'text "' + "A" * 500 + '"',
        'text ""',
    ):
        yield case(
            family,
            ["sample", "--world", "shapes", "--prompts", prompt, "--out", "s.png"],
            "prompt",
            "NUL",
        )
    for words in (
        ["sample", "--world", "mixture", "--count", "99999999", "--out", "s.png"],
        ["sample", "--world", "mixture", "--num-steps", "99999999", "--out", "s.png"],
        ["evaluate", "--weights", "run", "--count", "99999999"],
        ["evaluate", "--weights", "run", "--num-steps", "99999999"],
        ["train", *TINY, "--group-size", "999999999", "--out", "new"],
        ["train", *TINY, "--groups", "999999999", "--out", "new"],
        ["train", *TINY, "--num-steps", "999999999", "--out", "new"],
        ["train", *TINY, "--eval-samples", "999999999", "--out", "new"],
        ["prompts", "text", "--count", "99999999999", "--file", "new.txt"],
        ["bench", "microscope", "--looks", "99999999", "--out", "new.jsonl"],
        ["bench", "rule", "uniform", "--seeds", "99999999", "--out", "new"],
        ["bench", "tune", "flow-grpo", "--budget", "99999999", "--out", "new.jsonl"],
        ["compare", *TINY, "--seeds", *map(str, range(20000)), "--out", "new"],
        ["pretrain", "--updates", "99999999999", "--out", "w.safetensors"],
    ):
        yield case(family, words)

    def wide(root: Path) -> None:
        head = ",".join(f"value_{k}" for k in range(5000))
        rows = "\n".join(",".join(str((k * 7 + m) % 11) for k in range(5001)) for m in range(4))
        (root / "table.csv").write_text(f"{head},reward\n{rows}\n")

    yield case(
        family,
        ["explain", "uniform", "--rewards", "table.csv", "--out", "t.png"],
        "columns",
        "decisions",
        change=wide,
    )
    for name in ("\x1b[31m", "a\nb", "a" * 300, "CON:\0"):
        yield case(
            family,
            ["compare", *TINY, "--arm", f"{name}: clip_range=0.1", "--out", "new", "--seeds", "0"],
            "arm",
            "NUL",
        )


def mutants(
    seed: int = 0, specs: int = 200, commands: int = 250, files: int = 200, calls: int = 300
) -> list[Case]:
    """All listed cases, and drawn ones."""
    return [
        *code_cases(),
        *link_cases(),
        *object_cases(),
        *effect_cases(),
        *target_cases(),
        *further_cases(),
        *drawn(seed, specs, commands, files, calls),
    ]


def drawn(seed: int, specs: int, commands: int, files: int, calls: int) -> list[Case]:
    """Cases of the classes that draw."""
    return [
        *spec_cases(seed, specs),
        *command_cases(seed, commands),
        *file_cases(seed, files),
        *call_cases(seed, calls),
    ]
