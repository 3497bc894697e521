"""Somebody else's folders and files: what they name is not run, called, imported, sent or unpickled without the user's word."""

import json
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_rewards import tiny_clip

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.policies.load import load_policy
from flowrl.registry import KINDS, build
from flowrl.rewards import Aesthetic, PickScore
from flowrl.testing.tiny import TINY, tiny_sd3
from flowrl.training.compare import CompareConfig, load_compare
from flowrl.training.config import RunConfig, load_config, preset
from flowrl.training.run import Run
from flowrl.trust import PARTS
from flowrl.types import Prompt

TINY_MIXTURE = ["--preset", "tiny", "--world", "mixture", "--task", "direction"]


@pytest.fixture
def canary(tmp_path: Path, monkeypatch) -> Path:
    """The file that hostile code would write: the file evil.py and the module evil_module write it when they are imported."""
    path = tmp_path / "canary"
    code = f"from pathlib import Path\nPath({str(path)!r}).write_text('ran')\nclass Evil:\n    pass\n"
    (tmp_path / "evil.py").write_text(code)
    (tmp_path / "evil_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A comparison of one finished run, of the 2-D world."""
    out = tmp_path_factory.mktemp("finished") / "out"
    assert main(["compare", *TINY_MIXTURE, "--methods", "flow-grpo", "--seeds", "0", "--workers", "1", "--out", str(out)]) == 0
    return out


SPECS = {
    "file": ("{folder}/evil.py:Evil", "evil.py:Evil"),
    "module": ("evil_module:Evil", "evil_module:Evil"),
    "command": ("os:system(command='touch {folder}/canary')", "os:system"),
    "process": ("subprocess:run(args=['touch', '{folder}/canary'])", "subprocess:run"),
    "nested": ('weighted(rule="{folder}/evil.py:Evil")', "evil.py:Evil"),
    "in a sum": ("weighted-sum(models={{'a': '{folder}/evil.py:Evil'}}, weights={{'a': 1}})", "evil.py:Evil"),
    "deep": ("clipped(reward=\"clipped(reward='{folder}/evil.py:Evil', low=0, high=1)\", low=0, high=1)", "evil.py:Evil"),
    "address": ("judge(url='http://127.0.0.1:9/v1', model='m')", "judge(url="),
    "key": ("judge(model='m', key='AWS_SECRET_ACCESS_KEY')", "judge(key="),
    "server": ("remote(url='http://127.0.0.1:9')", "remote(url="),
    "token": ("remote(token_file='/etc/passwd')", "remote(token_file="),
    "pickle": ("aesthetic(head='evil.pth')", "aesthetic(head="),
}
"""Specs that need the user's own word, and what the message must contain."""


def write_hostile(finished: Path, folder: Path, setting: str, spec: str) -> Path:
    """A copy of the comparison, with the setting in every settings file; a list of specs for a setting that is a list."""
    shutil.copytree(finished, folder)
    run = folder / "runs" / "flow-grpo-seed0"
    value: Any = [spec] if setting == "heldout_rewards" else spec
    group = {"credit": "algorithm", "sampler": "algorithm", "loss": "algorithm", "reward": "environment"}.get(
        setting, "evaluation"
    )
    for path in (folder / "config.json", run / "config.json"):
        values = json.loads(path.read_text())
        values.get("run", values)[group][setting] = value
        path.write_text(json.dumps(values))
    (folder / "mine.yaml").write_text(json.dumps({group: {setting: value}}))
    (run / "done.json").unlink()
    return run


@pytest.mark.parametrize(("setting", "name"), [("reward", name) for name in SPECS] + [(setting, "file") for setting in PARTS])
def test_a_hostile_run_executes_nothing(setting: str, name: str, finished: Path, canary: Path, tmp_path: Path, capsys) -> None:
    """Every command that reads somebody else's settings: one error that names the setting, the value, the file and --trust."""
    out, new, (spec, word) = tmp_path / "hostile", str(tmp_path / "new"), SPECS[name]
    run = write_hostile(finished, out, setting, spec.format(folder=tmp_path))
    before = sorted(out.rglob("*"))
    for command in (
        ["train", "--resume", str(run)],
        ["train", "--config", str(run / "config.json"), "--out", new],
        ["train", "--preset", str(out / "mine.yaml"), "--plan"],
        ["train", "--preset", f"{out}/mine.yaml,tiny", "--out", new],
        ["compare", "--resume", str(out)],
        ["compare", "--config", str(out / "config.json"), "--out", new],
        ["compare", "--preset", str(out / "mine.yaml"), "--out", new],
        ["sample", "--weights", str(run), "--out", f"{new}.png"],
        ["evaluate", "--weights", str(run), "--out", new],
    ):
        if "--preset" in command and command[0] == "compare" and setting == "credit":
            continue  # a comparison sets the rule itself
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("flowrl: error: "), error
        assert all(found in error for found in (setting, word, "--trust", str(out))), error
    assert not canary.exists() and not list(tmp_path.glob("new*")) and sorted(out.rglob("*")) == before


def test_evaluating_with_another_reward_needs_no_trust_in_the_runs_own(finished: Path, canary: Path, tmp_path: Path) -> None:
    """It is not built then. All other settings are judged as always."""
    run = write_hostile(finished, tmp_path / "hostile", "reward", f"{tmp_path}/evil.py:Evil")
    options = [
        "--reward",
        "flowrl.worlds.mixture:DirectionReward",
        "--limit",
        "1",
        "--num-steps",
        "1",
        "--out",
        str(tmp_path / "new"),
    ]
    assert main(["evaluate", "--weights", str(run), *options]) == 0
    assert not canary.exists()
    other = write_hostile(finished, tmp_path / "other", "loss", f"{tmp_path}/evil.py:Evil")
    assert main(["evaluate", "--weights", str(other), *options]) == 2
    assert not canary.exists()


def test_a_hostile_comparison_executes_nothing(finished: Path, canary: Path, tmp_path: Path) -> None:
    """The entries that only a comparison has."""
    values = json.loads((finished / "config.json").read_text())
    spec = f"{tmp_path}/evil.py:Evil"
    for change in (
        {"credit": [spec], "methods": ["flow-grpo", "Evil"]},
        {"method_settings": {"flow-grpo": {"loss": spec}}},
    ):
        with pytest.raises(ConfigError, match=r"names .*evil\.py:Evil: code, which would run"):
            CompareConfig.from_dict({**values, **change})
        (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
        with pytest.raises(ConfigError, match=r"trust=True in Python"):
            load_compare(tmp_path / "config.json")
        assert load_compare(tmp_path / "config.json", trust=True).run.algorithm.method == "flow-grpo"
    assert not canary.exists()


def test_results_of_somebody_else_execute_nothing(canary: Path, tmp_path: Path, capsys) -> None:
    """A line of `flowrl bench` that could be read otherwise: of this code, and with the id of its settings."""
    from flowrl_bench.results_file import ResultsFile, make_line

    config = preset("tiny").apply(world="mixture", task="direction", credit="evil_module:Evil")
    entries = {"curve": [], "totals": {}, "phases": {}, "gains": None}
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(make_line(config, entries, "x", key="0" * 16)) + "\n")
    with pytest.raises(ConfigError, match="code, which would run"):
        ResultsFile(path).settings(json.loads(path.read_text()))
    for arguments in (["--judge"], ["--redo", "0" * 16]):
        assert main(["bench", "claims", "--quick", "--out", str(path), *arguments]) == 2
        assert "credit names evil_module:Evil: code, which would run" in capsys.readouterr().err
    assert not canary.exists()


@pytest.mark.parametrize(
    "spec", ["os:system(command='touch canary')", "subprocess:run(args=['touch', 'canary'])", "shutil:rmtree(path='.')",
             "pathlib:Path", "builtins:exec(source='open(\"canary\", \"w\")')", "functools:partial", "time:sleep(seconds=99)",
             "flowrl.cli:entry", "flowrl.io:write_bytes(path='canary', data=b'')", "sys:exit", "sys:modules"],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_called_that_is_not_a_part(kind: str, spec: str, tmp_path: Path, monkeypatch) -> None:
    """Even the user's own word calls no function that does not promise to build a part."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"is not a .*; it needs .*annotated to return one|has no option|has no class|building functools:partial failed",
    ):
        build(kind, spec)
    assert list(tmp_path.iterdir()) == []


RULE = """
import torch
from flowrl.credit import Uniform
from flowrl.protocols import CreditAssigner

class Mine(Uniform):
    pass

def made(scale: float = 1.0) -> CreditAssigner:
    return Mine()

def unsaid():
    return Mine()
"""


def test_the_users_own_rule_needs_one_word_to_go_on(tmp_path: Path, capsys) -> None:
    """A run that was started with a file on the command line goes on with --trust, and its messages say so."""
    (tmp_path / "rules.py").write_text(RULE)
    out, again = tmp_path / "run", tmp_path / "again"
    assert main(["train", *TINY_MIXTURE, "--credit", f"{tmp_path}/rules.py:Mine", "--out", str(out)]) == 0
    assert f"flowrl sample --weights {out} --trust" in capsys.readouterr().out
    assert main(["train", "--resume", str(out)]) == 2
    assert main(["train", "--resume", str(out), "--trust"]) == 0
    assert main(["train", "--config", str(out / "config.yaml"), "--out", str(again), "--trust"]) == 0
    with pytest.raises(ConfigError, match="credit names"):
        load_config(out / "config.json")
    assert load_config(out / "config.json", trust=True).algorithm.credit.endswith(":Mine")
    with pytest.raises(ConfigError, match="credit names"):
        RunConfig.from_dict(load_config(out / "config.json", trust=True).as_dict())
    with pytest.raises(ConfigError, match="credit names"):
        preset(str(out / "config.yaml"))
    capsys.readouterr()
    chosen = ["--preset", f"{out / 'config.yaml'}", "--credit", "uniform", "--out", str(tmp_path / "other")]
    assert main(["train", *chosen]) == 0  # the option replaces what the file names


def test_functions_that_promise_a_part_may_build_it(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULE)
    assert type(build("credit", f"{tmp_path}/rules.py:made(scale=2)")).__name__ == "Mine"
    with pytest.raises(ConfigError, match=r"unsaid is not a credit rule; .*annotated to return one"):
        build("credit", f"{tmp_path}/rules.py:unsaid")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "model"
    tiny_sd3().save_pretrained(folder)
    return folder


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def code_in_a_component(folder: Path) -> None:
    (folder / "vae" / "evil_part.py").write_text((folder.parent / "evil.py").read_text())
    set_component(folder, "vae", ["evil_part", "Evil"])


def set_component(folder: Path, name: str, value: Any) -> None:
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), name: value}))


def pickled_transformer(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder.parent / "canary")))


def pickled_encoder(folder: Path) -> None:
    (folder / "text_encoder" / "model.safetensors").unlink()
    (folder / "text_encoder" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder.parent / "canary")))


def auto_map(folder: Path) -> None:
    config = folder / "text_encoder" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "auto_map": {"AutoModel": "evil_part.Evil"}, "model_type": "evil"}))
    (folder / "text_encoder" / "evil_part.py").write_text((folder.parent / "evil.py").read_text())


@pytest.mark.parametrize(
    "change",
    [
        code_in_a_component,
        pickled_transformer,
        pickled_encoder,
        auto_map,
        lambda folder: set_component(folder, "vae", ["evil_module", "Evil"]),
        lambda folder: set_component(folder, "scheduler", ["os", "system"]),
        lambda folder: set_component(folder, "extra", ["evil_module", "Evil"]),
        lambda folder: set_component(folder, "vae", ["diffusers", "DiffusionPipeline"]),
        lambda folder: set_component(folder, "vae", ["transformers", "pipeline"]),
        lambda folder: set_component(folder, "vae", ["diffusers.utils.nothing", "x"]),
        lambda folder: set_component(folder, "_class_name", ["evil_module", "Evil"]),
        lambda folder: set_component(folder, "_class_name", "evil_module.Evil"),
    ],
)
def test_a_hostile_pipeline_executes_nothing(change: Any, model: Path, canary: Path, tmp_path: Path) -> None:
    change(shutil.copytree(model, tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"^model: "):
        load_policy(str(tmp_path / "model"), TINY)
    assert not canary.exists()


def reward_of(folder: Path) -> Any:
    return PickScore(str(folder), tokenizer="").score(torch.rand(1, 3, 40, 40), [Prompt("a fox")])


def test_a_hostile_reward_model_executes_nothing(canary: Path, tmp_path: Path, monkeypatch) -> None:
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
        classes = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
        unknown = {"model_type": "evil"} if name == "config.json" else {"tokenizer_class": "EvilTokenizer"}
        (mapped / name).write_text(json.dumps({**values, **unknown, "auto_map": classes}))
    shutil.copy(tmp_path / "evil.py", mapped / "evil.py")
    with suppress(ConfigError):  # it may also be read as what it is without the code
        reward_of(mapped)
    assert not canary.exists()


def test_a_pickled_head_executes_nothing(canary: Path, tmp_path: Path) -> None:
    """Single files in PyTorch's format may be named by the user; what they may contain is tensors."""
    whole = tiny_clip(tmp_path / "clip")
    (tmp_path / "head.pth").write_bytes(pickle.dumps(Bomb(canary)))
    with pytest.raises(ConfigError, match="is no file of tensors"):
        Aesthetic(str(whole), head=str(tmp_path / "head.pth")).score(torch.rand(1, 3, 40, 40), [Prompt("a fox")])
    assert not canary.exists()


def test_a_run_in_python_is_the_users_own_word(canary: Path, tmp_path: Path) -> None:
    config = preset("tiny").apply(world="mixture", task="direction", credit=f"{tmp_path}/evil.py:Evil")
    with pytest.raises(ConfigError, match="Evil is not a credit rule"):
        Run(config, tmp_path / "run").execute()
    assert canary.exists() and not (tmp_path / "run").exists()
