"""Somebody else's folders and files: what they name is not run, called, imported, sent or unpickled
without the user's word.
"""

import json
import pickle
import shutil
import sys
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import MIXTURE, TINY_RUN, error_of, flowrl_
from tiny_rewards import tiny_clip

from flowrl.bench.results_file import ResultsFile, make_line
from flowrl.compare.comparison import CompareConfig, load_compare
from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.rewards.clip import PickScore
from flowrl.run import build as training_build
from flowrl.run.build import (
    make_method,
)
from flowrl.run.config import RunConfig, load_config, preset
from flowrl.run.io import write_json
from flowrl.run.job import Run
from flowrl.run.models.load import load_policy
from flowrl.run.parts import registry, trust
from flowrl.run.parts.registry import KINDS, available, build, options_of
from flowrl.run.parts.specs import NESTED
from flowrl.run.parts.trust import PARTS, require_trust, trust_option, untrusted
from flowrl.testing.tiny import TINY, tiny_sd3

PROMPTS = ("prompts", "heldout_prompts")


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The file that hostile code would write: the file evil.py in the current folder and the module
    evil_module write it when they are imported.
    """
    path = tmp_path / "canary"
    code = (
        f"from pathlib import Path\nPath({str(path)!r}).write_text('ran')\nclass Evil:\n    pass\n"
    )
    (tmp_path / "evil.py").write_text(code)
    (tmp_path / "evil_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison of one finished run, of the 2-D world."""
    out = tmp_path_factory.mktemp("finished") / "out"
    compared = CompareConfig(TINY_RUN, {"flow-grpo": {"method": "flow-grpo"}}, (0,))
    assert Run(TINY_RUN, out / "runs" / "flow-grpo-seed0").execute()
    write_json(out / "config.json", compared.as_dict())
    return out


SPECS = {
    "file": ("{folder}/evil.py:Evil", "evil.py:Evil"),
    "module": ("evil_module:Evil", "evil_module:Evil"),
    "command": ("os:system(command='touch {folder}/canary')", "os:system"),
    "process": ("subprocess:run(args=['touch', '{folder}/canary'])", "subprocess:run"),
    "nested": ('weighted(rule="{folder}/evil.py:Evil")', "evil.py:Evil"),
    "in a sum": (
        "weighted-sum(models={{'a': '{folder}/evil.py:Evil'}}, weights={{'a': 1}})",
        "evil.py:Evil",
    ),
    "deep": (
        "clipped(reward=\"clipped(reward='{folder}/evil.py:Evil', low=0, high=1)\", low=0, high=1)",
        "evil.py:Evil",
    ),
    "own function": (
        "flowrl.methods:named_method(name='x', credit='{folder}/evil.py:Evil')",
        "named_method",
    ),
    "own class": ("flowrl.run.io:FileLock(lock_file='{folder}/canary')", "flowrl.run.io:FileLock"),
    "own reward": ("win-rate(reward='flowrl.worlds.mixture:DirectionReward')", "DirectionReward"),
    "key of a dictionary": ("weighted-sum(models={{'{folder}/evil.py:Evil': 1}})", "evil.py:Evil"),
    "other option": ("ocr(confidence='{folder}/evil.pyc:Evil')", "evil.pyc:Evil"),
    "address": ("judge(url='http://127.0.0.1:9/v1', model='m')", "judge: an address"),
    "key": ("judge(model='m', key='AWS_SECRET_ACCESS_KEY')", "judge: a part that sends data"),
    "server": ("remote(url='http://127.0.0.1:9')", "remote: an address"),
    "token": ("remote(token_file='/etc/passwd')", "remote: a part that sends data"),
    "pickle": ("aesthetic(head='evil.pth')", "aesthetic: a pickled file (head="),
}
"""Specs that need the user's own word, and what the message must contain."""


def write_hostile(finished, folder, setting, spec):
    """A copy of the comparison, with the setting in every settings file; a list of specs for a
    setting that is a list.
    """
    shutil.copytree(finished, folder)
    run = folder / "runs" / "flow-grpo-seed0"
    value: Any = [spec] if setting in ("heldout_rewards", "observe") else spec
    value = [f"p.txt @ {spec}"] if setting in PROMPTS else value
    group = dict.fromkeys(("reward", "world", *PROMPTS), "environment") | {"observe": "logging"}
    group |= dict.fromkeys(("credit", "sampler", "loss", "window"), "algorithm")
    group = group.get(setting, "evaluation")
    for path in (folder / "config.json", run / "config.json"):
        values = json.loads(path.read_text())
        values.get("run", values)[group][setting] = value
        write_json(path, values)
    (folder / "mine.yaml").write_text(json.dumps({group: {setting: value}}))
    (run / "done.json").unlink()
    return run


def openings(out, run, new):
    """The commands that read somebody else's settings, of a folder of `write_hostile`."""
    return [
        f"train --resume {run}",
        f"train --config {run}/config.json --out {new}",
        f"train --preset {out}/mine.yaml --plan",
        f"train --preset {out}/mine.yaml,tiny --out {new}",
        f"compare --resume {out}",
        f"compare --config {out}/config.json --out {new}",
        f"compare --preset {out}/mine.yaml --out {new}",
        f"sample --weights {run} --out {new}.png",
        f"evaluate --weights {run} --out {new}",
    ]


OF_OTHERS = {"own function": "loss", "own class": "diversity"}
"""The settings of specs that are none of a reward."""
HOSTILE_SETTINGS = [(OF_OTHERS.get(name, "reward"), name) for name in SPECS]
HOSTILE_SETTINGS += [(setting, "file") for setting in PARTS]


@pytest.mark.parametrize(("setting", "name"), HOSTILE_SETTINGS)
def test_a_hostile_run_executes_nothing(setting, name, finished, canary, tmp_path, capsys):
    """Every command that reads somebody else's settings: one error that names the setting, the
    value, the file and --trust.
    """
    out, (spec, word) = tmp_path / "hostile", SPECS[name]
    run = write_hostile(finished, out, setting, spec.format(folder=tmp_path))
    before = sorted(tmp_path.rglob("*"))
    for command in openings(out, run, tmp_path / "new"):
        # preset tiny sets the window, a comparison the rule
        unused = ("window", "credit") if command.startswith("compare") else ("window",)
        if "--preset" in command and setting in unused:
            continue
        error = error_of(command, capsys)
        assert error.count("\n") == 1 and error.startswith("flowrl: error: "), error
        assert all(part in error for part in (setting, word, "--trust", str(out))), error
    assert not canary.exists() and sorted(tmp_path.rglob("*")) == before


class Plugin:
    """An entry point of an installed package."""

    value, module, dist, name = "somebody:Part", "somebody", None, "part"

    def __init__(self, **members):
        self.part = type("Part", (), members)

    def load(self):
        return self.part


@pytest.mark.parametrize(
    "setting", [name for name in PARTS if name not in ("heldout_rewards", *PROMPTS)]
)
def test_parts_of_packages_that_may_connect_need_trust(setting, monkeypatch):
    """All of some kinds, and others that say so; their class is not called."""
    kind = PARTS[setting]
    for connects, package in product((True, False), ("somebody", "flowrl.bench")):
        plugin = Plugin(connects=connects)
        plugin.module = f"{package}.parts"
        monkeypatch.setattr(registry, "plugin", lambda *_, plugin=plugin: plugin)
        monkeypatch.setattr(trust, "plugin", lambda *_, plugin=plugin: plugin)
        needs = connects or (kind in ("observer", "world") and package == "somebody")
        assert bool(trust_option({setting: "part"})) == needs
    assert not trust_option({"observe": ("budget(nfe=9)",), "world": "shapes"})
    assert trust_option({"prompts": ["p.txt", "q.txt @ remote(url='http://there')"]})
    assert not trust_option({"prompts": ["p.txt", "q.txt @ ocr"], "heldout_prompts": ""})
    assert trust_option({"tracker": "trackio"}) and not trust_option({"tracker": "tensorboard"})


def test_braces_of_an_arm_name_no_code(canary, capsys):
    """`flowrl bench` fills in its knobs after the file was judged, and leaves other braces."""
    colon = f"{{learning_rate.join.__doc__[{str.join.__doc__.index(':')}]}}"
    for text, named in ((f"evil.py{colon}Evil", "unknown credit rule"), ("a{nope}", "{nope}")):
        arms = {"arms": {"evil": {"credit": text, "method": "mine"}}}
        Path("arms.yaml").write_text(json.dumps(arms))
        command = "bench rule --arms arms.yaml --quick --out new"
        assert named in error_of(command, capsys) and not canary.exists()


def test_evaluating_with_another_reward_needs_no_trust_in_the_runs_own(
    finished, canary, tmp_path, monkeypatch
):
    """It is not built then. All other settings are judged as always."""
    run = write_hostile(finished, tmp_path / "hostile", "reward", f"{tmp_path}/evil.py:Evil")
    options = "--reward flowrl.worlds.mixture:DirectionReward --limit 1 --num-steps 1"
    options += f" --out {tmp_path}/new"
    built, make_world = [], training_build.make_world

    def recorded(config):
        built.append(config.environment.reward)
        return make_world(config)

    monkeypatch.setattr(training_build, "make_world", recorded)
    assert flowrl_(f"evaluate --weights {run} {options}") == 0
    assert set(built) == {"flowrl.worlds.mixture:DirectionReward"} and not canary.exists()
    other = write_hostile(finished, tmp_path / "other", "loss", f"{tmp_path}/evil.py:Evil")
    assert flowrl_(f"evaluate --weights {other} {options}") == 2
    assert not canary.exists()


def test_a_hostile_comparison_executes_nothing(finished, canary, tmp_path):
    """The entries that only a comparison has."""
    values = json.loads((finished / "config.json").read_text())
    for arms in (
        {"flow-grpo": {}, "evil": {"loss": "evil.py:Evil"}},
        {"evil": {"credit": "flowrl.methods:named_method(credit='evil.py:Evil')"}},
    ):
        write_json(tmp_path / "config.json", values | {"arms": arms})
        with pytest.raises(ConfigError, match=r"names .*(evil\.py:Evil|named_method): it is code"):
            load_compare(tmp_path / "config.json")
        assert load_compare(tmp_path / "config.json", trust=True).run == TINY_RUN
    assert not canary.exists()


@pytest.mark.parametrize(
    ("setting", "name", "word"),
    [
        ("credit", "module", "evil_module:Evil"),
        ("loss", "own function", "flowrl.methods:named_method"),
        ("diversity", "own class", "flowrl.run.io:FileLock"),
    ],
)
def test_results_of_somebody_else_execute_nothing(setting, name, word, canary, tmp_path, capsys):
    """A line of `flowrl bench` that could be read otherwise: of this code, and with the id of its
    settings.
    """
    spec = SPECS[name][0].format(folder=tmp_path)
    config = preset("tiny").apply(world="mixture", task="direction", **{setting: spec})
    entries = {"curve": [], "totals": {}, "phases": {}, "gains": None}
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(make_line(config, entries, "x", key="0" * 16)) + "\n")
    with pytest.raises(ConfigError, match="it is code that would run"):
        ResultsFile(path).settings(json.loads(path.read_text()))
    error = error_of(f"bench redo {'0' * 16} --out {path}", capsys)
    assert f"{setting} names " in error and f"{word}: it is code that would run" in error
    assert not canary.exists()


TEXTS_OF_CODE = (
    "evil.py:Evil",
    " evil.py:Evil ",
    "evil.py:Evil()",
    "evil_module:Evil",
    "evil_module :Evil",
    "evil_module:1 (x=1)",
    "a'evil_module:1'(x=1)",
    "flowrl.methods:named_method(name='x', credit='evil.py:Evil')",
    "greedy(x='evil.py:Evil')",
    "greedy ( x = ['evil_module:Evil'] )",
    "weighted(rule='gdpo(rule=\"evil.py:Evil\")')",
)


@pytest.mark.parametrize("kind", sorted({*PARTS.values()}))
def test_no_option_of_a_part_in_a_file_names_code(kind):
    """Under every name that an option of a registered part has, and under one that none has."""
    setting = {k: name for name, k in PARTS.items() if name not in PROMPTS}[kind]
    for name in available(kind):
        for option, text in product({*options_of(kind, name), "nothing"}, TEXTS_OF_CODE):
            spec = f"{name}({option}={text!r})"
            refused = bool(trust_option({setting: [spec] if kind == "observer" else spec}))
            assert refused, spec


TEXTS = [name for name, value in RunConfig().flat().items() if isinstance(value, str | tuple)]


@pytest.mark.parametrize("setting", TEXTS)
def test_no_setting_of_a_file_runs_code(setting, canary, tmp_path):
    """Every setting that is a text, or a list of texts: most are refused as what they are."""
    values = TINY_RUN.as_dict()
    group = next(group for group in values.values() if isinstance(group, dict) and setting in group)
    for spec in (f"{tmp_path}/evil.py:Evil", "evil_module:Evil"):
        group[setting] = [spec] if isinstance(group[setting], list) else spec
        write_json(tmp_path / "config.json", values)
        flowrl_("train --config config.json --plan")
        assert not canary.exists()


def nested(texts):
    """Literals with a text at some depth."""
    return st.recursive(
        texts,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=2)
            | st.tuples(inner, st.integers(0, 9))
            | st.dictionaries(st.text("ab"), inner, min_size=1, max_size=2)
            | st.dictionaries(texts, st.integers(0, 9), min_size=1, max_size=2)
            | st.builds(lambda name, value: f"greedy({name}={value!r})", NAMES, inner)
        ),
        max_leaves=4,
    )


NAMES = st.sampled_from((*NESTED, *PARTS, "url_of", "x"))


HARMLESS = st.sampled_from(("uniform", "5", "gain(probe=none)", ["a", 1]))


@pytest.mark.satellite
@given(NAMES, nested(st.sampled_from(TEXTS_OF_CODE)), HARMLESS)
@settings(max_examples=200, deadline=None)
def test_code_is_found_at_any_depth(option, hostile, harmless):
    """Whatever an installed plug-in does with its options, and however the option is called."""
    for value in (hostile, [harmless, hostile], {"a": harmless, "b": (hostile,)}):
        with suppress(ConfigError):  # no text of a part
            assert any(untrusted({"credit": f"greedy({option}={value!r})"})), value
    with suppress(ConfigError):
        assert not any(untrusted({"credit": f"greedy({option}={harmless!r})"}))


@pytest.mark.parametrize("backend", ["flash_hub", "_native_cudnn", ""])
def test_kernels_from_the_hub_need_trust(backend):
    refused = pytest.raises(ConfigError, match="attention_backend names flash_hub")
    with refused if backend == "flash_hub" else nullcontext():
        require_trust({"attention_backend": backend}, "mine")


@pytest.mark.parametrize(
    "spec",
    [
        "os:system(command='touch canary')",
        "subprocess:run(args=['touch', 'canary'])",
        "shutil:rmtree(path='.')",
        "pathlib:Path",
        'builtins:exec(source=\'open("canary", "w")\')',
        "functools:partial",
        "time:sleep(seconds=99)",
        "flowrl.cli.main:entry",
        "flowrl.run.io:write_bytes(path='canary', data=b'')",
        "sys:exit",
        "sys:modules",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_called_that_is_not_a_part(kind, spec, tmp_path, monkeypatch):
    """Even the user's own word calls no function that does not promise to build a part."""
    monkeypatch.chdir(tmp_path)
    refusals = r"is not a .*; it needs .*annotated to return one|has no (option|class)"
    with pytest.raises(ConfigError, match=rf"{refusals}|functools:partial failed|cannot be read"):
        build(kind, spec)
    assert list(tmp_path.iterdir()) == []


RULE = """
from flowrl.credit import Uniform

class Mine(Uniform):
    pass
"""


def test_the_users_own_rule_needs_one_word_to_go_on(tmp_path, capsys):
    """A run that was started with a file on the command line goes on with --trust, and its messages
    say so.
    """
    (tmp_path / "rules.py").write_text(RULE)
    out, again = tmp_path / "run", tmp_path / "again"
    assert flowrl_(f"train {MIXTURE} --credit {tmp_path}/rules.py:Mine --out {out}") == 0
    assert f"flowrl sample --weights {out} --trust" in capsys.readouterr().out
    assert flowrl_(f"train --resume {out}") == 2
    assert flowrl_(f"train --resume {out} --trust") == 0
    assert flowrl_(f"train --config {out}/config.yaml --out {again} --trust") == 0
    first, second = ((folder / "weights.safetensors").read_bytes() for folder in (out, again))
    assert first == second
    read = load_config(out / "config.json", trust=True)
    for again in (
        lambda: load_config(out / "config.json"),
        lambda: RunConfig.from_dict(read.as_dict()),
        lambda: preset(str(out / "config.yaml")),
    ):
        with pytest.raises(ConfigError, match=r"credit names .*--trust"):
            again()
    assert load_config(out / "config.json", credit="uniform").algorithm.credit == "uniform"
    assert type(make_method(load_config(out / "config.json", trust=True)).credit).__name__ == "Mine"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline") / "model"
    tiny_sd3().save_pretrained(folder)
    return folder


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def code_in_a_component(folder):
    (folder / "vae" / "evil_part.py").write_text((folder.parent / "evil.py").read_text())
    set_component(folder, "vae", ["evil_part", "Evil"])


def set_component(folder, name, value):
    index = folder / "model_index.json"
    write_json(index, json.loads(index.read_text()) | {name: value})


def pickle_weights(weights, pickled):
    bomb = Bomb(
        next(folder for folder in weights.parents if folder.name == "model").parent / "canary"
    )
    weights.unlink()
    weights.with_name(pickled).write_bytes(pickle.dumps(bomb))


def auto_map(folder):
    config = folder / "text_encoder" / "config.json"
    classes = {"auto_map": {"AutoModel": "evil_part.Evil"}, "model_type": "evil"}
    write_json(config, json.loads(config.read_text()) | classes)
    (folder / "text_encoder" / "evil_part.py").write_text((folder.parent / "evil.py").read_text())


@pytest.mark.parametrize(
    "change",
    [
        code_in_a_component,
        lambda folder: pickle_weights(
            folder / "transformer" / "diffusion_pytorch_model.safetensors",
            "diffusion_pytorch_model.bin",
        ),
        lambda folder: pickle_weights(
            folder / "text_encoder" / "model.safetensors", "pytorch_model.bin"
        ),
        auto_map,
        *[
            partial(set_component, name=name, value=value)
            for name, value in (
                ("vae", ["evil_module", "Evil"]),
                ("scheduler", ["os", "system"]),
                ("extra", ["evil_module", "Evil"]),
                ("vae", ["diffusers", "DiffusionPipeline"]),
                ("vae", ["transformers", "pipeline"]),
                ("vae", ["diffusers.utils.nothing", "x"]),
                ("_class_name", ["evil_module", "Evil"]),
                ("_class_name", "evil_module.Evil"),
            )
        ],
    ],
)
def test_a_hostile_pipeline_executes_nothing(change, model, canary, tmp_path):
    change(shutil.copytree(model, tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"^model: "):
        load_policy(str(tmp_path / "model"), TINY)
    assert not canary.exists()


def reward_of(folder):
    return PickScore(str(folder), tokenizer="").score(torch.rand(1, 3, 40, 40), [Prompt("a fox")])


def test_a_hostile_reward_model_executes_nothing(canary, tmp_path, monkeypatch):
    """A pickle alone is refused, and code in the folder is neither run nor asked about."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    whole = tiny_clip(tmp_path / "clip")
    pickled = shutil.copytree(whole, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(canary)))
    with pytest.raises(ConfigError, match="safetensors"):
        reward_of(pickled)
    mapped = shutil.copytree(whole, tmp_path / "mapped")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((mapped / name).read_text())
        classes = dict.fromkeys(("AutoConfig", "AutoModel"), "evil.Evil")
        classes |= {"AutoTokenizer": ["evil.Evil", None]}
        unknown = {"model_type": "evil", "tokenizer_class": "EvilTokenizer"}
        write_json(mapped / name, {**values, **unknown, "auto_map": classes})
    shutil.copy("evil.py", mapped)
    with suppress(ConfigError):  # it may also be read as what it is without the code
        reward_of(mapped)
    assert not canary.exists()
