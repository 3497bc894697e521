"""Damaged and hostile files are read or refused by name; files with one fault are refused for that
fault.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from server_requests import damaged

from flowrl.bench.explain import EXAMPLE, read_rewards
from flowrl.core.errors import CheckpointError, ConfigError, FlowrlError
from flowrl.run.build import check
from flowrl.run.checkpoint import load_checkpoint
from flowrl.run.config import RunConfig, load_config, preset
from flowrl.run.job import Run
from flowrl.run.parts.prompts import read_prompts
from flowrl.run.reading import (
    DEPTH,
    NODES,
    load_document,
    parse_json,
    read_json,
    read_tensors,
    reading,
)
from flowrl.run.records import load_run
from flowrl.run.trained import trained_policy
from flowrl.testing.tiny import tiny_sd3

SETTINGS = {
    **{"world": "mixture", "task": "direction", "iterations": 2, "groups": 2, "group_size": 3},
    **{"num_steps": 4, "window": "0:3", "eval_every": 1, "eval_samples": 4, "eval_steps": 2},
    "checkpoint_every": 1,
}
PROMPTS = (
    '{"prompt": "two dogs", "tag": "counting", "include": [{"class": "dog", "count": 2}]}\n'
    '{"prompt": "ein Haus über dem Fluß", "number": 1.5, "flags": [true, null]}\n'
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of the 2-D world, with prompts and a table of rewards beside its files."""
    folder = tmp_path_factory.mktemp("files") / "run"
    Run(RunConfig.of(**SETTINGS), folder).execute()
    (folder / "prompts.jsonl").write_text(PROMPTS, encoding="utf-8")
    (folder / "rewards.csv").write_text(EXAMPLE, encoding="utf-8")
    source = Path(preset.__code__.co_filename).parents[1] / "presets/methods/tp-grpo.yaml"
    shutil.copy(source, folder / "preset.yaml")
    return folder


def read_config(path):
    config = load_config(path)
    numbers = [value for value in config.flat().values() if isinstance(value, int | float)]
    if max(map(abs, numbers)) < 1e4 and config.rollout.num_steps < 100:
        check(config)


READERS = {
    "config.json": read_config,
    "config.yaml": read_config,
    "preset.yaml": lambda path: preset(str(path)).apply(),
    "metrics.jsonl": lambda path: load_run(path.parent),
    "weights.safetensors": lambda path: trained_policy(path.parent),
    "checkpoints/000002.safetensors": load_checkpoint,
    "prompts.jsonl": read_prompts,
    "rewards.csv": read_rewards,
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_by_name(name, run, tmp_path, data):
    """Bytes flipped, cut out, put in or cut off; names of settings and values exchanged."""
    content = (run / name).read_bytes()
    broken = data.draw(damaged(content))
    path = tmp_path / name
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    path.write_bytes(broken)
    message = path.name
    try:
        READERS[name](path)
    except FlowrlError as error:
        message = str(error)
    settings_do_not_fit = name.startswith("config") or name == "preset.yaml"
    assert path.name in message or settings_do_not_fit, message
    assert len(message) <= 2000


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 2}', "a is set twice"),
        ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), "nested deeper than 50"),
        ("[" * 100_000, "nested deeper than 50"),
        ("9" * 400, "more than 64 bits"),
        ('"\\ud800"', "surrogates not allowed"),
        (b"\xff\xfe{}", "codec can't decode"),
        ("", "Expecting value"),
    ],
)
def test_json_that_python_would_read_or_crash_on_is_refused(text, reason, tmp_path):
    path = written(tmp_path / "a.json", text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_json(path)
    assert "a.json" in str(caught.value)


def test_json_keeps_what_python_writes(tmp_path):
    values = {"a": [1.5, float("inf"), None, True, 2**63, "ü"], "b": {"c": "x"}}
    assert read_json(written(tmp_path / "a.json", "\ufeff" + json.dumps(values))) == values
    with pytest.raises(ValueError, match="Infinity is not a number"):
        parse_json(json.dumps(values), finite=True)


def bomb(levels):
    rest = (f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels))
    return "\n".join(["a0: &a0 [1]", *rest])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (bomb(30), f"line 5 is not YAML: .*{NODES:,} values including those of aliases"),
        pytest.param("a: &a [*a]", "line 1 is not YAML", id="endless"),
        ("a: " + "[" * 60 + "]" * 60, "more than 50 levels"),
        ("a: !!int ''", "is not YAML"),
        ("a: !!bool maybe", "is not YAML"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine"),
        ("a: [{b: 1, b: 2}]", "b is set twice"),
        ("#" * 100_001, "100,001 characters"),
    ],
)
def test_yaml_of_any_kind_is_refused_with_its_line(text, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        load_document(written(tmp_path / "a.yaml", text))


def test_yaml_with_a_few_aliases_is_read(tmp_path):
    values, node = load_document(written(tmp_path / "a.yaml", bomb(3)))
    assert values["a2"] == [[[1]] * 9] * 9 and isinstance(node, yaml.MappingNode)


def test_errors_of_a_file_name_it_once():
    with (
        pytest.raises(CheckpointError, match=r"^file\.x cannot be read: KeyError: 'a'$"),
        reading("file.x", CheckpointError),
    ):
        raise KeyError("a")
    with pytest.raises(ConfigError, match=r"^file\.x: bad$"), reading("file.x", CheckpointError):
        raise ConfigError("bad")
    with pytest.raises(ConfigError, match=r"^bad file\.x$"), reading("file.x"):
        raise ConfigError("bad file.x")


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 3), torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(1, 3, 4)],
    ids=["dims", "type", "size"],
)
def test_tensors_of_another_shape_or_type_are_refused(tensor, tmp_path):
    path = written(tmp_path / "a.safetensors", save({"images": tensor}))
    words = r"a\.safetensors: tensor 'images' is torch.*allowed: .* \[2, any, any\]"
    with pytest.raises(CheckpointError, match=words):
        read_tensors(path, {"images": (2, None, None)})


def test_a_table_from_a_spreadsheet_is_read(tmp_path):
    rewards = read_rewards(
        written(tmp_path / "r.csv", b"\xef\xbb\xbfprompt,Value_0,Reward\r\na,1,2\r\na,3,4\r\n")
    )
    assert rewards.values.tolist() == [[[1.0, 2.0], [3.0, 4.0]]] and rewards.prompts == ("a",)


def test_a_torn_last_line_is_ignored_and_another_bad_line_is_refused(run, tmp_path):
    written(tmp_path / "config.json", (run / "config.json").read_bytes())
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    path = written(tmp_path / "metrics.jsonl", b"".join(lines)[:-9])
    assert len(load_run(tmp_path).rows) == len(lines) - 1
    written(path, lines[0] + lines[1][:50] + b"\n" + lines[2])
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 "):
        load_run(tmp_path)


def test_a_pipeline_with_missing_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    from flowrl.run.models.load import load_policy
    from flowrl.testing.tiny import TINY

    tiny_sd3().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(ConfigError, match=rf"missing weights of the transformer in .*{name}"):
        load_policy(str(tmp_path / "model"), TINY)
