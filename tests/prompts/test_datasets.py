"""Prompts from Hugging Face datasets, all of them local: saved folders, Parquet, JSON, CSV; nothing is downloaded."""

import importlib
import json
from pathlib import Path

import pytest
from tiny_rewards import tiny_clip

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.prompts import files, load_prompts, read_prompts, request_of
from flowrl.training.build import make_world
from flowrl.training.config import preset

ROWS = {"prompt": ["a fox", "a car", "", "a fox", None], "seed": [1, 2, 3, 1, 5], "tags": [["x"], [], [], ["x"], []]}


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    found = pytest.importorskip("datasets")
    monkeypatch.setattr(found.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    files._dataset_rows.cache_clear()
    return found


def check(found):
    assert [(p.text, dict(p.metadata)) for p in found.prompts] == [
        ("a fox", {"seed": 1, "tags": ["x"]}), ("a car", {"seed": 2, "tags": []}), ("a fox", {"seed": 1, "tags": ["x"]}),
    ]  # fmt: skip
    assert (found.lines, found.blank, found.repeated) == ((1, 2, 4), (3, 5), ((4, 1),))
    assert [remark.partition(": ")[2] for remark in found.remarks()] == [
        "blank rows 3, 5", "row 4 repeats row 1; repeated prompts are drawn more often",
    ]  # fmt: skip


def test_a_saved_folder(datasets, tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict(ROWS).save_to_disk(folder)
    for spec in (f"hf:{folder}", folder, f"hf:{folder}:train", f"hf:{folder}:train:prompt"):
        check(load_prompts(spec if isinstance(spec, type(folder)) else type(folder)(spec)))
    with pytest.raises(ConfigError, match="no split 'test'; it is one table"):
        load_prompts(type(folder)(f"hf:{folder}:test"))


def test_parquet_json_and_csv(datasets, tmp_path):
    table = datasets.Dataset.from_dict(ROWS)
    table.to_parquet(tmp_path / "p.parquet")
    check(load_prompts(tmp_path / "p.parquet"))
    check(load_prompts(type(tmp_path)(f"hf:{tmp_path}/p.parquet:train:prompt")))
    table.to_json(tmp_path / "p.json")
    check(load_prompts(tmp_path / "p.json"))
    table.to_json(tmp_path / "p.jsonl")
    check(load_prompts(type(tmp_path)(f"hf:{tmp_path}/p.jsonl")))
    (tmp_path / "p.csv").write_text("caption,n\na fox,1\na car,2\n")
    assert [(p.text, dict(p.metadata)) for p in read_prompts(tmp_path / "p.csv")] == [("a fox", {"n": 1}), ("a car", {"n": 2})]
    (tmp_path / "folder").mkdir()
    table.to_parquet(tmp_path / "folder" / "train.parquet")
    check(load_prompts(tmp_path / "folder"))


def test_splits_and_columns(datasets, tmp_path):
    one, two = (
        datasets.Dataset.from_dict({"words": ["a"], "text": ["b"]}),
        datasets.Dataset.from_dict({"words": ["c"], "text": ["d"]}),
    )
    path = type(tmp_path)
    for name, splits, spec, wanted in (
        ("both", {"train": one, "test": two}, "", "b"),
        ("both", {"train": one, "test": two}, ":test", "d"),
        ("both", {"train": one, "test": two}, ":test:words", "c"),
        ("both", {"train": one, "test": two}, "::words", "a"),
        ("test", {"test": two}, "", "d"),
    ):
        if not (tmp_path / name).exists():
            datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
        assert [p.text for p in load_prompts(path(f"hf:{tmp_path}/{name}{spec}")).prompts] == [wanted]
    datasets.DatasetDict({"a": one, "b": two}).save_to_disk(tmp_path / "several")
    for spec, told in (
        ("several", "has several splits; it has a, b"),
        ("both:dev", "has no split 'dev'; it has train, test"),
        ("both:train:caption", r"has no column 'caption'; it has words, text: choose one as in hf:.*:train:COLUMN"),
        ("both:train:text:x", "is not allowed; allowed: hf:NAME"),
        ("missing", "cannot be read as a dataset.*is the name right"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_prompts(path(f"hf:{tmp_path}/{spec}"))
    datasets.Dataset.from_dict({"prompt": [1, 2]}).save_to_disk(tmp_path / "numbers")
    with pytest.raises(ConfigError, match=r"column 'prompt' contains .*; allowed: text"):
        load_prompts(tmp_path / "numbers")
    datasets.Dataset.from_dict({"prompt": ["", None]}).save_to_disk(tmp_path / "empty")
    with pytest.raises(ConfigError, match="contains no prompt"):
        load_prompts(tmp_path / "empty")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError, match=r"bad\.parquet cannot be read as a dataset"):
        load_prompts(tmp_path / "bad.parquet")


def test_images_are_left_out(datasets, tmp_path):
    """A column of images is neither decoded nor kept; only what JSON has becomes metadata."""
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image(), "raw": datasets.Value("binary")})
    rows = {"prompt": ["a fox"], "image": [{"bytes": b"no image at all", "path": None}], "raw": [b"x"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "images")
    assert dict(load_prompts(tmp_path / "images").prompts[0].metadata) == {}


def test_requests_as_geneval_has_them(datasets, tmp_path):
    """A table gives every clause every entry, most of them empty; a bad request is named by its row."""
    lines = [
        {"prompt": "two dogs", "tag": "counting", "include": [{"class": "dog", "count": 2}]},
        {"prompt": "a red cat", "tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}]},
    ]
    datasets.Dataset.from_list(lines).save_to_disk(tmp_path / "geneval")
    first, second = load_prompts(tmp_path / "geneval").prompts
    assert request_of(first.metadata).include[0].count == 2 and request_of(second.metadata).include[0].colour == "red"
    lines[1]["include"][0]["color"] = "mauve"
    datasets.Dataset.from_list(lines).save_to_disk(tmp_path / "bad")
    with pytest.raises(ConfigError, match=r"row 2 .*'mauve' is not allowed"):
        load_prompts(tmp_path / "bad")


def test_training_and_checking_by_the_command_line(datasets, tmp_path, capsys):
    from flowrl.testing.tiny import tiny_sd3

    tiny_sd3().save_pretrained(tmp_path / "model")
    clip = tiny_clip(tmp_path / "clip", size=16)
    datasets.DatasetDict({"dev": datasets.Dataset.from_dict({"words": ["a fox", "a car"]})}).save_to_disk(tmp_path / "data")
    spec = f"hf:{tmp_path}/data:dev:words"
    assert main(["prompts", "check", "--file", spec]) == 0
    assert f"{spec}: 2 prompts" in capsys.readouterr().out
    options = {
        "model": tmp_path / "model", "prompts": spec, "groups": 2, "out": tmp_path / "run", "heldout-prompts": spec,
        "reward": f"clipscore(model='{clip}')", "resolution": 16, "max-sequence-length": 24, "device": "cpu", "dtype": "float32",
        "lora-rank": 2, "lora-alpha": 8, "preset": "tiny", "iterations": 1,
    }  # fmt: skip
    assert main(["train", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["environment"]["prompts"] == spec
    assert set(json.loads((tmp_path / "run" / "samples.json").read_text())["prompts"]) == {"a fox", "a car"}


def test_without_the_package_there_is_one_clear_error(tmp_path, monkeypatch):
    """Also where it is installed: the import fails as it does where it is not."""
    real = importlib.import_module

    def without(name, *rest):
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return real(name, *rest)

    monkeypatch.setattr(files, "import_module", without)
    files._dataset_rows.cache_clear()
    for spec in ("hf:user/prompts", "hf:user/prompts:test:text"):
        with pytest.raises(ConfigError, match=r"needs the package datasets; install it with: pip install -e '\.\[datasets\]'"):
            make_world(preset("tiny").apply(model="any", prompts=spec, reward="ocr"))
    (tmp_path / "p.txt").write_text("a fox\n")
    assert len(load_prompts(tmp_path / "p.txt").prompts) == 1


def test_a_dataset_without_a_name_is_refused():
    with pytest.raises(ConfigError, match=r"'hf:' is not allowed; allowed: hf:NAME"):
        load_prompts(Path("hf:"))


def test_a_bare_name_reads_no_file_of_the_current_folder(datasets, tmp_path, monkeypatch):
    """`load_dataset("pandas")` reads pickles there. A folder of such a name is a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text('{"prompt": "a fox"}\n')
    for name in ("pandas", "json", "json:train"):
        with pytest.raises(ConfigError, match=rf"'hf:{name}' is not .*allowed: hf:OWNER/NAME"):
            load_prompts(Path(f"hf:{name}"))
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "train.jsonl").write_text('{"prompt": "a car"}\n')
    assert [prompt.text for prompt in load_prompts(Path("hf:json")).prompts] == ["a car"]
