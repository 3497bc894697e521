"""Prompts: files with their faults by line, GenEval's requests, generators, and datasets (all of
them local).
"""

import importlib
import json
from pathlib import Path

import pytest
from flowrl_rewards.ocr import quoted_text
from tiny_rewards import tiny_clip

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.parts import prompt_files as files
from flowrl.parts.geneval import OBJECTS, TAGS
from flowrl.parts.prompt_lists import plural
from flowrl.parts.prompts import (
    Clause,
    PromptStream,
    compositional_prompts,
    image_prompts,
    load_prompts,
    read_prompts,
    request_of,
    text_prompts,
    write_prompts,
)
from flowrl.testing.tiny import tiny_sd3

GENEVAL = [
    (
        '{"tag": "counting", "include": [{"class": "dog", "count": 2}], '
        '"exclude": [{"class": "dog", "count": 3}], "prompt": "two dogs"}'
    ),
    (
        '{"tag": "position", "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1,'
        ' "position": ["left of", 0]}], "prompt": "a photo of a dog left of a cat"}'
    ),
]


def written(tmp_path, name, *lines):
    (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / name


def test_text_file_with_blank_and_repeated_lines(tmp_path):
    path = written(tmp_path, "p.txt", "# comment", "a fox", "", "a car", "  a fox ", " ", "a fox")
    found = load_prompts(path)
    assert [p.text for p in found.prompts] == ["a fox", "a car", "a fox", "a fox"]
    assert found.remarks[0].endswith("blank lines 3, 6") and len(found.remarks) == 2
    with pytest.warns(
        UserWarning,
        match="line 5 repeats line 2; line 7 repeats line 2; repeated prompts are drawn more often",
    ):
        assert len(read_prompts(path)) == 4


def test_lines_end_at_line_feeds_only(tmp_path):
    odd = "a fox\u2028beside\u0085a \x0c car"
    found = load_prompts(written(tmp_path, "p.txt", odd, "", "third"))
    assert [p.text for p in found.prompts] == [odd, "third"] and "blank lines 2" in found.remarks[0]
    write_prompts(tmp_path / "p.jsonl", found.prompts)
    assert load_prompts(tmp_path / "p.jsonl").prompts == found.prompts
    (tmp_path / "dos.txt").write_bytes("a fox\r\na cat\r\n".encode("utf-8-sig"))
    assert [p.text for p in load_prompts(tmp_path / "dos.txt").prompts] == ["a fox", "a cat"]


def test_geneval_lines(tmp_path):
    first, second = load_prompts(written(tmp_path, "p.jsonl", *GENEVAL)).prompts
    assert first.text == "two dogs" and request_of(first.metadata).exclude == (Clause("dog", 3),)
    assert request_of(second.metadata).include == (
        Clause("cat"),
        Clause("dog", position=("left of", 0)),
    )
    assert request_of(second.metadata).tag == "position"


def test_same_text_with_other_metadata_is_no_repetition(tmp_path):
    path = written(
        tmp_path,
        "p.jsonl",
        '{"prompt": "a", "n": 1}',
        '{"prompt": "a", "n": 2}',
        '{"n": 1, "prompt": "a"}',
    )
    (remark,) = load_prompts(path).remarks
    assert ": line 3 repeats line 1;" in remark


def test_every_bad_line_is_named(tmp_path):
    bad = [
        "{oops",
        '{"prompt": "b", "n": NaN}',
        "",
        '{"prompt": 3}',
        '{"prompt": " "}',
        "null",
        '"x"',
    ]
    with pytest.raises(ConfigError, match=r"line 3 .*\(NaN is not a number in JSON\)") as caught:
        load_prompts(written(tmp_path, "p.jsonl", '{"prompt": "a"}', *bad))
    told = str(caught.value)
    assert all(f"line {n} is no JSON object" in told for n in (2, 3, 5, 6, 7)) and told.endswith(
        "and 1 more"
    )


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"include": []}, "include: "),
        ({"include": [{"count": 1}]}, "include.0.class: "),
        (
            {"include": [{"class": "dog", "count": 0}]},
            "include.0.count: .*greater than or equal to 1, not 0",
        ),
        ({"include": [{"class": "dog", "count": True}]}, "include.0.count: .*not True"),
        (
            {"include": [{"class": "dog", "color": "mauve"}]},
            "include.0.color: .*'red', .*not 'mauve'",
        ),
        ({"include": [{"class": "dog", "colour": "red"}]}, "include.0.colour: "),
        (
            {"include": [{"class": "dog", "position": ["left of", 0]}]},
            "include.0.position .*an earlier clause",
        ),
        (
            {"include": [{"class": "dog"}, {"class": "cat", "position": ["near", 0]}]},
            "include.1.position.0: .*'left of'",
        ),
        (
            {"include": [{"class": "dog"}], "exclude": [{"class": "dog", "count": -1}]},
            "exclude.0.count: ",
        ),
    ],
)
def test_bad_requests_are_refused_with_their_line(tmp_path, metadata, told):
    path = written(tmp_path, "p.jsonl", GENEVAL[0], json.dumps({"prompt": "x", **metadata}))
    with pytest.raises(ConfigError, match=f"line 2 is no request in GenEval's form: {told}"):
        load_prompts(path)


def test_compositional_prompts_alternate_and_can_be_scored(tmp_path):
    prompts = compositional_prompts(60, seed=1)
    assert [p.metadata["tag"] for p in prompts[:6]] == list(TAGS)
    assert len({p.text for p in prompts}) == 60
    assert prompts == compositional_prompts(60, seed=1) != compositional_prompts(60, seed=2)
    for prompt in prompts:
        request = request_of(prompt.metadata)
        for clause in request.include:
            assert clause.name in OBJECTS
            shown = plural(clause.name) if clause.count > 1 else clause.name
            assert all(
                part in prompt.text
                for part in (shown, clause.colour or "", *(clause.position or ())[:1])
            )
        if request.tag == "position":
            target, subject = request.include
            assert (
                prompt.text.index(subject.name)
                < prompt.text.index(subject.position[0])
                < prompt.text.rindex(target.name)
            )
    write_prompts(tmp_path / "p.jsonl", prompts)
    assert list(load_prompts(tmp_path / "p.jsonl").prompts) == prompts


def test_generators_make_as_many_different_prompts_as_there_are():
    prompts = text_prompts(200, seed=3)
    assert len({p.text for p in prompts}) == 200
    assert all(quoted_text(p.text) == p.metadata["text"] for p in prompts)
    with pytest.raises(ConfigError, match="count = 1000000 is not allowed; allowed: 1 to about 12"):
        image_prompts(10**6)


def test_looking_ahead_does_not_move_the_stream():
    stream, other = (PromptStream(text_prompts(6), seed=3) for _ in range(2))
    assert len(stream.upcoming(20)) == 6
    assert stream.take(20) == other.take(20)


def test_command(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    assert main(["prompts", "compositional", "--count", "12", "--file", str(path)]) == 0
    assert (
        "12 prompts (color_attr, colors, counting, position, single_object, two_object)"
        in capsys.readouterr().out
    )
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[0] + "\n")
    assert main(["prompts", "check", "--file", str(path)]) == 0
    assert "line 13 repeats line 1" in capsys.readouterr().out


# --- datasets
# --------------------------------------------------------------------------------------------------

ROWS = {
    "prompt": [" a fox", "a car", "", "a fox", None],
    "seed": [1, 2, 3, 1, 5],
    "tags": [["x"], [], [], ["x"], []],
}


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return module


def saved(table, path):
    if path.suffix:
        getattr(table, f"to_{path.suffix[1:].removesuffix('l')}")(path)
    else:
        table.save_to_disk(path)


@pytest.mark.parametrize(
    ("file", "spec"),
    [
        ("saved", "{}"),
        ("saved", "hf(name={})"),
        ("saved", "hf(name={}, split=train, column=prompt)"),
        ("p.parquet", "{}"),
        ("p.json", "{}"),
        ("p.parquet", "hf(name={}, split=train, column=prompt)"),
        ("p.jsonl", "hf(name={})"),
        ("p.csv", "{}"),
    ],
)
def test_formats(datasets, tmp_path, file, spec):
    rows = {name: column for name, column in ROWS.items() if file != "p.csv" or name != "tags"}
    saved(datasets.Dataset.from_dict(rows), tmp_path / file)
    found = load_prompts(Path(spec.format(tmp_path / file)))
    wanted = [
        ("a fox", {"seed": 1, "tags": ["x"]}),
        ("a car", {"seed": 2, "tags": []}),
        ("a fox", {"seed": 1, "tags": ["x"]}),
    ]
    assert [(p.text, dict(p.metadata)) for p in found.prompts] == [
        (text, {name: value for name, value in metadata.items() if name in rows})
        for text, metadata in wanted
    ]
    assert "blank rows 3, 5" in found.remarks[0] and "row 4 repeats row 1" in found.remarks[1]


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("both", "b"),
        ("both, split=test", "d"),
        ("both, split=test, column=words", "c"),
        ("both, column=words", "a"),
        ("test", "d"),
        ("several", "split of prompts = '' is not allowed; allowed: one of a, b"),
        ("both, split=dev", "'dev' .*one of train, test"),
        (
            "both, column=caption",
            "column of prompts = 'caption' .*one with text .words, text., as in hf.*column=COLUMN",
        ),
        ("both, part=text", r"is not allowed; allowed: hf\(name=OWNER/NAME"),
        ("missing", "cannot be read as a dataset"),
        ("numbers", "column of prompts = 'prompt' is not allowed"),
        ("empty", "contains no prompt"),
        ("bad.parquet", r"bad\.parquet\) cannot be read as a dataset"),
    ],
)
def test_splits_and_columns(datasets, tmp_path, spec, wanted):
    one, two = (
        datasets.Dataset.from_dict({"words": [words], "text": [text]})
        for words, text in ("ab", "cd")
    )
    for name, splits in (
        ("both", {"train": one, "test": two}),
        ("test", {"test": two}),
        ("several", {"a": one, "b": two}),
    ):
        datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
    for name, cells in (("numbers", [1, 2]), ("empty", ["", None])):
        saved(datasets.Dataset.from_dict({"prompt": cells}), tmp_path / name)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    if len(wanted) == 1:
        assert [p.text for p in load_prompts(Path(f"hf(name={tmp_path}/{spec})")).prompts] == [
            wanted
        ]
        return
    with pytest.raises(ConfigError, match=wanted):
        load_prompts(Path(f"hf(name={tmp_path}/{spec})"))


def test_metadata_of_a_table(datasets, tmp_path):
    """Images are not decoded; every clause has the entries of all clauses, most of them empty."""
    value = datasets.Value
    clause = {"class": value("string"), "count": value("int32"), "color": value("string")}
    features = {
        "prompt": value("string"),
        "image": datasets.Image(),
        "raw": value("binary"),
        "include": datasets.List(clause),
    }
    rows = {
        "prompt": ["two dogs", "a red cat"],
        "image": [{"bytes": b"no image", "path": None}] * 2,
        "raw": [b"x"] * 2,
        "include": [
            [{"class": "dog", "count": 2, "color": None}],
            [{"class": "cat", "count": None, "color": "red"}],
        ],
    }
    saved(
        datasets.Dataset.from_dict(rows, features=datasets.Features(features)), tmp_path / "table"
    )
    first, second = load_prompts(tmp_path / "table").prompts
    assert first.metadata == {"include": [{"class": "dog", "count": 2}]}
    assert request_of(second.metadata).include == (Clause("cat", colour="red"),)
    rows["include"][1][0]["color"] = "mauve"
    saved(datasets.Dataset.from_dict(rows, features=datasets.Features(features)), tmp_path / "bad")
    with pytest.raises(ConfigError, match=r"row 2 .*not 'mauve'"):
        load_prompts(tmp_path / "bad")


def test_training_on_a_dataset(datasets, tmp_path):
    tiny_sd3().save_pretrained(tmp_path / "model")
    clip, spec = (
        tiny_clip(tmp_path / "clip", size=16),
        f"hf(name={tmp_path}/data, split=dev, column=words)",
    )
    datasets.DatasetDict(
        {"dev": datasets.Dataset.from_dict({"words": ["a fox", "a car"]})}
    ).save_to_disk(tmp_path / "data")
    options = {
        "model": tmp_path / "model",
        "prompts": spec,
        "groups": 2,
        "out": tmp_path / "run",
        "heldout-prompts": spec,
        "reward": f"clipscore(model='{clip}')",
        "resolution": 16,
        "max-sequence-length": 24,
        "device": "cpu",
        "dtype": "float32",
        "lora-rank": 2,
        "lora-alpha": 8,
        "preset": "tiny",
        "iterations": 1,
    }
    assert (
        main(
            [
                "train",
                *(part for name, value in options.items() for part in (f"--{name}", str(value))),
            ]
        )
        == 0
    )
    assert (
        json.loads((tmp_path / "run" / "config.json").read_text())["environment"]["prompts"] == spec
    )
    assert set(json.loads((tmp_path / "run" / "samples.json").read_text())["prompts"]) == {
        "a fox",
        "a car",
    }


def test_without_the_package_there_is_one_clear_error(monkeypatch):
    real = importlib.import_module

    def without(name, *rest):
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return real(name, *rest)

    monkeypatch.setattr(files, "import_module", without)
    with pytest.raises(
        ConfigError,
        match=r"needs the package datasets; install it with: pip install -e '\.\[datasets\]'",
    ):
        load_prompts(Path("hf(name=user/prompts)"))


def test_a_bare_name_reads_no_file_of_the_current_folder(datasets, tmp_path, monkeypatch):
    """`load_dataset("pandas")` reads pickles there. A folder of such a name is a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text('{"prompt": "a fox"}\n')
    for name in ("''", "pandas", "json"):
        with pytest.raises(ConfigError, match=r"is not allowed; allowed: hf\(name=OWNER/NAME"):
            load_prompts(Path(f"hf(name={name})"))
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "train.jsonl").write_text('{"prompt": "a car"}\n')
    assert [prompt.text for prompt in load_prompts(Path("hf(name=json)")).prompts] == ["a car"]
