"""Prompts: files with their faults by line, GenEval's requests, generators, and datasets (all of
them local).
"""

import json
import os
import sys
from dataclasses import replace

import pytest

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.core.prompt import Prompt
from flowrl.rewards.geneval_requests import OBJECTS, TAGS
from flowrl.rewards.ocr import quoted_text
from flowrl.run.build import make_world
from flowrl.run.config import RunConfig
from flowrl.run.parts import prompts as module
from flowrl.run.parts.prompt_lists import plural
from flowrl.run.parts.prompts import (
    Clause,
    compositional_prompts,
    held_out,
    image_prompts,
    prompt_places,
    prompts_digest,
    read_prompts,
    request_of,
    text_prompts,
    write_prompts,
)
from flowrl.run.reading import read_input


def written(tmp_path, name, *lines):
    lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / name


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_text_file_with_blank_and_repeated_lines(tmp_path):
    path = written(
        tmp_path, "p.txt", "# b", "a fox", "", "a car", "  a fox ", " ", "a fox", "#", "## c"
    )
    with pytest.warns(UserWarning, match=r"p\.txt: line 5 repeats line 2; line 7 repeats line 2$"):
        assert texts(read_prompts(path)) == ["a fox", "a car", "a fox", "a fox"]


def test_lines_end_at_line_feeds_only(tmp_path):
    odd = "a fox\u2028beside\u0085a \x0c car"
    prompts = read_prompts(written(tmp_path, "p.txt", odd, "", "third"))
    assert texts(prompts) == [odd, "third"]
    write_prompts(tmp_path / "p.jsonl", prompts)
    assert read_prompts(tmp_path / "p.jsonl") == prompts
    (tmp_path / "dos.txt").write_bytes("a fox\r\na cat\r\n".encode("utf-8-sig"))
    assert texts(read_prompts(tmp_path / "dos.txt")) == ["a fox", "a cat"]


def test_same_text_with_other_metadata_is_no_repetition(tmp_path):
    lines = [{"prompt": "a", "n": 1}, {"prompt": "a", "n": 2}, {"n": 1, "prompt": "a"}]
    with pytest.warns(UserWarning, match=": line 3 repeats line 1$"):
        read_prompts(written(tmp_path, "p.jsonl", *lines))


def test_every_bad_line_is_named(tmp_path):
    bad = ["{oops", '{"prompt": "b", "n": NaN}', "", {"prompt": 3}, {"prompt": " "}, "null", '"x"']
    with pytest.raises(ConfigError, match=r"line 3 .*\(NaN is not a number in JSON\)") as caught:
        read_prompts(written(tmp_path, "p.jsonl", {"prompt": "a"}, *bad))
    message = str(caught.value)
    assert all(f"line {n} is not a JSON object" in message for n in (2, 3, 5, 6, 7))
    assert message.endswith("and 1 more")


@pytest.mark.parametrize(
    ("name", "lines", "problem"),
    [
        (
            "p.txt",
            ["a fox", "#1 fan"],
            r'line 2 starts with "#": .*for a comment, or \\#1 fan for a prompt',
        ),
        ("p.txt", ['{"prompt": "a fox"}'], "line 1 is JSON, which is read from a .jsonl file"),
        ("p", ["[photo] of a fox", '["a fox"]'], r"p, line 2 is JSON"),
        (
            "p.json",
            ['{"prompt": "a fox"}'],
            r"'.*p\.json' .*one prompt per line.*hf\(name=.*p\.json\)",
        ),
        ("p.yaml", ["- a fox"], r"p\.yaml' is not allowed"),
        (
            "p.CSV",
            ["a fox", "a car"],
            r"header of .*p\.CSV = 'a fox' .* one of prompt, text, caption",
        ),
        (
            "p.csv",
            ["prompt,tag", "a fox, red,x"],
            "row 2 has 3 cells and the header 2; .*quotation",
        ),
        ("p.csv", ["prompt,prompt", "a fox,x"], "header of .* different names"),
        ("p.csv", ["prompt,tag", '"a fox,x'], "p.csv, line 2: unexpected end of data"),
        ("p.tsv", ["prompt\ttag", '"OPEN" sign\tx'], "line 2: .*begins with a quotation mark"),
        ("p.csv", ["tag,prompt", "x,"], "row 2 has no prompt in the column prompt"),
        ("p.csv", ["prompt,weight", "x,often"], "row 2 has no prompt .*or a wrong weight .*often"),
        ("p.csv", [""], "header of .*p.csv = ''"),
        ("p.jsonl", [{"prompt": "a", "weight": 0}], "line 1 weight of a prompt = 0 is not allowed"),
        ("p.jsonl", [{"prompt": "a", "weight": "2"}], "line 1 weight of a prompt = '2' is not"),
        ("p.jsonl", [{"prompt": "a"}, {"text": "b"}], 'line 2 is not a JSON .* entry "prompt"'),
        ("p.jsonl", [{"promt": "a", "text": "b"}], "line 1 .*did you mean 'prompt' by 'promt'"),
        ("p.ndjson", ['{"promt": "a fox"}'], "line 1 is not .*did you mean 'prompt' by 'promt'"),
    ],
)
def test_lines_of_another_form_are_no_prompts(tmp_path, name, lines, problem):
    with pytest.raises(ConfigError, match=problem):
        read_prompts(written(tmp_path, name, *lines))


def test_entries_that_nothing_reads_are_named(tmp_path, capsys):
    entries = {"negative": "blurry", "includes": [], "tag": "x", "text": "y", "promt": "z"}
    lines = {"prompt": "a fox", "negative": ""}, {"prompt": "a car", **entries}
    path = written(tmp_path, "p.jsonl", *lines)
    unread = (
        "'includes' (1 of 2 prompts, did you mean 'include'?), 'negative' (2 of 2 prompts),"
        " 'promt' (1 of 2 prompts, did you mean 'prompt'?): they are metadata, which only a reward"
    )
    assert main(["prompts", "check", "--file", str(path)]) == 0
    assert f"Warning: {path}: flowrl does not read the fields {unread}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("negative_prompt", "blurry", "--negative-prompt"),
        ("seed", 0, "--seed"),
        ("resolution", 512, "--sizes"),
        ("width", "512", "--width"),
        ("height", 512, "--width"),
    ],
)
def test_fields_that_promise_an_effect_are_refused(tmp_path, field, value, instead):
    """By name and once; an empty one asks for nothing."""
    lines = [
        {"prompt": "a", field: None},
        {"prompt": "b", field: value},
        {"prompt": "c", field: ""},
    ]
    problem = (
        f"p.jsonl.*: 1 of 3 prompts have a field '{field}' .*{instead} .*Remove .*or rename it"
    )
    with pytest.raises(ConfigError, match=problem):
        read_prompts(written(tmp_path, "p.jsonl", *lines))
    with pytest.raises(ConfigError, match=problem.replace("1 of 3", "1 of 1")):
        read_prompts(written(tmp_path, "p.jsonl.csv", f"prompt,{field}", f"a,{value}"))
    with pytest.warns(UserWarning, match=f"the fields '{field}'"):
        assert len(read_prompts(written(tmp_path, "p.jsonl", lines[0], lines[2]))) == 2


def test_tables(tmp_path):
    """Commas, quotes and lines within cells, a byte order mark, other separators, empty cells."""
    rows = ["prompt,tag,weight", '"a ""red"" fox, two', 'lines",x,2.5', "", ",,", "a car,,"]
    data = "\r\n".join(rows).encode("utf-8-sig")
    (tmp_path / "p.csv").write_bytes(data)
    fox, car = read_prompts(tmp_path / "p.csv")
    assert (fox.text, fox.metadata, fox.weight) == ('a "red" fox, two\r\nlines', {"tag": "x"}, 2.5)
    assert (car.text, car.metadata, car.weight) == ("a car", {}, 1)
    assert prompt_places(tmp_path / "p.csv") == ["row 2", "row 5"]
    for name, between in (("p.tsv", "\t"), ("q.csv", ";")):
        file = written(tmp_path, name, f"n{between} caption", f"1{between}a fox, red")
        with pytest.warns(UserWarning, match=r"the fields 'n' \(1 of 1 prompts\)"):
            (prompt,) = read_prompts(file)
        assert (prompt.text, prompt.metadata) == ("a fox, red", {"n": "1"})


def test_prompts_that_start_with_a_hash_and_other_names_of_the_prompt(tmp_path):
    text = written(tmp_path, "p.txt", "\\#1 fan", "#", "# no", "\\# a", "C\\#")
    assert texts(read_prompts(text)) == ["#1 fan", "# a", "C\\#"]
    lines = written(tmp_path, "p.jsonl", {"prompt": "# no comment"}, {"prompt": "#1", "text": "x"})
    assert texts(read_prompts(lines)) == ["# no comment", "#1"]
    lines = written(tmp_path, "q.jsonl", {"text": "a fox", "tag": "prompt"}, {"text": "a car"})
    first, second = read_prompts(lines)
    assert (first.text, first.metadata, second.text) == ("a fox", {"tag": "prompt"}, "a car")
    with pytest.warns(UserWarning, match="1 lines have tabs, .* from a .tsv file with a header"):
        assert texts(read_prompts(written(tmp_path, "t.txt", "a\tb", "c"))) == ["a\tb", "c"]


def test_weights_are_kept(tmp_path):
    lines = {"prompt": "a", "weight": 3}, {"prompt": "b", "weight": None}, {"prompt": "c"}
    prompts = read_prompts(written(tmp_path, "p.jsonl", *lines))
    assert [prompt.weight for prompt in prompts] == [3, 1, 1]
    write_prompts(tmp_path / "again.jsonl", prompts)
    assert read_prompts(tmp_path / "again.jsonl") == prompts
    assert '"weight"' not in (tmp_path / "again.jsonl").read_text().split("\n")[1]
    assert prompts_digest(prompts) != prompts_digest([replace(p, weight=1) for p in prompts])


DOG = {"class": "dog"}


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"include": []}, "include = "),
        ({"include": [{"count": 1}]}, "include.0.class = None "),
        ({"include": [{**DOG, "count": 0}]}, "include.0.count = 0 .*1 or more"),
        ({"include": [{**DOG, "count": True}]}, "include.0.count = True "),
        ({"include": [{**DOG, "color": "mauve"}]}, "include.0.color = 'mauve' .*red"),
        ({"include": [{**DOG, "colour": "red"}]}, "include.0.colour = 'red' "),
        ({"include": [{**DOG, "position": ["left of", 0]}]}, ".*position .*an earlier clause"),
        ({"include": [DOG, {**DOG, "position": ["near", 0]}]}, "include.1.position = .*left of"),
        ({"include": [DOG], "exclude": [{**DOG, "count": -1}]}, "exclude.0.count = -1 "),
    ],
)
def test_bad_requests_are_refused_with_their_line(tmp_path, metadata, problem):
    fine = {"include": [DOG], "exclude": [{**DOG, "count": 3}]}
    path = written(tmp_path, "p.jsonl", *({"prompt": "x", **line} for line in (fine, metadata)))
    message = f"line 2 is not a request in GenEval's format: {problem}"
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)


def test_compositional_prompts_alternate_and_can_be_scored(tmp_path):
    prompts = compositional_prompts(60, seed=1)
    assert [p.metadata["tag"] for p in prompts[:6]] == list(TAGS)
    assert len(set(texts(prompts))) == 60
    assert prompts == compositional_prompts(60, seed=1) != compositional_prompts(60, seed=2)
    for prompt in prompts:
        request = request_of(prompt.metadata)
        for clause in request.include:
            assert clause.name in OBJECTS
            name = plural(clause.name) if clause.count > 1 else clause.name
            for part in (name, clause.colour or "", *(clause.position or ())[:1]):
                assert part in prompt.text
        if request.tag == "position":
            target, subject = request.include
            order = [subject.name, subject.position[0]]
            places = [*map(prompt.text.index, order), prompt.text.rindex(target.name)]
            assert places == sorted(places)
    write_prompts(tmp_path / "p.jsonl", prompts)
    assert read_prompts(tmp_path / "p.jsonl") == prompts


def test_generators_make_as_many_different_prompts_as_there_are(monkeypatch):
    prompts = text_prompts(200, seed=3)
    assert len(set(texts(prompts))) == 200
    assert all(quoted_text(p.text) == p.metadata["text"] for p in prompts)
    monkeypatch.setattr("flowrl.run.parts.prompt_lists.STYLES", ("watercolour",))
    with pytest.raises(ConfigError, match=r"count = 1000000 is .* allowed: 1 to about 8\d{3}: the"):
        image_prompts(10**6)


# --- datasets
# --------------------------------------------------------------------------------------------------

ROWS = {
    "prompt": [" a fox", "a car", "", None],
    "number": [1, 2, 3, 5],
    "tags": [["x"], [], [], []],
}


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


def saved(table, path):
    if path.suffix:
        getattr(table, f"to_{path.suffix[1:].removesuffix('l')}")(path)
    else:
        table.save_to_disk(path)
    return path


@pytest.mark.parametrize("options", ["", ", split=train, column=prompt"])
@pytest.mark.parametrize("file", ["saved", "p.parquet", "p.json", "p.jsonl", "p.csv"])
def test_formats(datasets, tmp_path, file, options):
    rows = {name: column for name, column in ROWS.items() if file != "p.csv" or name != "tags"}
    path = saved(datasets.Dataset.from_dict(rows), tmp_path / file)
    prompts = read_prompts(f"hf(name={path}{options})")
    assert texts(prompts) == ["a fox", "a car"]
    for number, prompt in enumerate(prompts):
        assert prompt.metadata == {name: rows[name][number] for name in rows if name != "prompt"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("both", "b"),
        ("both, split=test", "d"),
        ("both, split=test, column=words", "c"),
        ("both, column=words", "a"),
        ("test", "d"),
        ("several", "split of prompts = '' is not allowed; allowed: one of a, b"),
        ("both, split=dev", "'dev' .*one of train, test"),
        ("both, column=caption", r"column of prompts = 'caption' .*one with text \(words, text\)"),
        ("both, part=text", r"is not allowed; allowed: hf\(name=OWNER/NAME"),
        ("missing", "cannot be read as a dataset"),
        ("numbers", "column of prompts = 'prompt' is not allowed"),
        ("empty", "contains no prompt"),
        ("bad.parquet", r"bad\.parquet\) cannot be read as a dataset"),
    ],
)
def test_splits_and_columns(datasets, tmp_path, spec, expected):
    first, second = (
        datasets.Dataset.from_dict({"words": [word], "text": [text]}) for word, text in ("ab", "cd")
    )
    for name, splits in (
        ("both", {"train": first, "test": second}),
        ("test", {"test": second}),
        ("several", {"a": first, "b": second}),
    ):
        datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
    for name, cells in (("numbers", [1, 2]), ("empty", ["", None])):
        saved(datasets.Dataset.from_dict({"prompt": cells}), tmp_path / name)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    if len(expected) == 1:
        assert texts(read_prompts(f"hf(name={tmp_path}/{spec})")) == [expected]
        return
    with pytest.raises(ConfigError, match=expected):
        read_prompts(f"hf(name={tmp_path}/{spec})")


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

    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    first, second = read_prompts(f"hf(name={saved(table, tmp_path / 'table')})")
    assert first.metadata == {"include": [{"class": "dog", "count": 2}]}
    assert request_of(second.metadata).include == (Clause("cat", colour="red"),)


def test_columns_of_a_table(datasets, tmp_path):
    """Those that promise an effect are refused unless they are left out; a weight is one."""
    rows = {"prompt": ["a", "b"], "width": [512, 64], "tag": ["x", "y"], "weight": [2, None]}
    path = saved(datasets.Dataset.from_dict(rows), tmp_path / "table")
    with pytest.raises(
        ConfigError, match=r"field 'width' \(512\).*hf\(name=..., metadata=\[...\]\)"
    ):
        read_prompts(f"hf(name={path})")
    prompts = read_prompts(f"hf(name={path}, metadata=[tag, weight])")
    assert [(p.metadata, p.weight) for p in prompts] == [({"tag": "x"}, 2), ({"tag": "y"}, 1)]
    assert not read_prompts(f"hf(name={path}, metadata=[])")[0].metadata
    for wrong in ("[size]", "tag"):
        with pytest.raises(
            ConfigError, match=r"metadata of prompts = .* a list of some of prompt, w"
        ):
            read_prompts(f"hf(name={path}, metadata={wrong})")


def test_without_the_package_there_is_one_clear_error(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs the package datasets; install it with: pip"):
        read_prompts("hf(name=user/prompts)")


def test_a_bare_name_reads_no_file_of_the_current_folder(datasets, tmp_path, monkeypatch):
    """`load_dataset("pandas")` reads pickles there. A folder of such a name is a folder."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "train.json", {"prompt": "a fox"})
    for name in ("''", "pandas", "json"):
        with pytest.raises(ConfigError, match=r"is not allowed; allowed: hf\(name=OWNER/NAME"):
            read_prompts(f"hf(name={name})")
    (tmp_path / "json").mkdir()
    written(tmp_path, "json/train.jsonl", {"prompt": "a car"})
    assert texts(read_prompts("hf(name=json)")) == ["a car"]


def test_prompts_from_standard_input_end_in_time(monkeypatch, capsys):
    """Text that ends is checked; text that does not, or of another encoding, is refused."""
    inner, outer = os.pipe()
    with open(inner) as stdin, open(outer, "wb") as pipe:
        monkeypatch.setattr(sys, "stdin", stdin)
        pipe.write(b"a red circle\n# a comment\na dog\n")
        pipe.flush()
        with pytest.raises(ConfigError, match=r"standard input = 'open for 0.1 s'"):
            read_input(0.1)
        pipe.write(b"two dogs\n")
        pipe.close()
        assert main(["prompts", "check", "--file", "-"]) == 0
    assert "1 prompts" in capsys.readouterr().out
    config = RunConfig.of(world="model", model="x", prompts="-", reward="jpeg-compressibility")
    with pytest.raises(ConfigError, match="prompts = '-' is not allowed"):
        make_world(config)


def picture(path, value=0, size=(4, 6)):
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, (value, 0, 0)).save(path)
    return path


def test_images_of_lines_and_of_folders(tmp_path):
    """Relative to the file; a list of them; captions beside images; a metadata.jsonl."""
    first, second = picture(tmp_path / "pics" / "a.png"), picture(tmp_path / "pics" / "b.png", 200)
    lines = [
        {"prompt": "make it blue", "image": "pics/a.png", "tag": "x"},
        {"prompt": "both", "image": ["pics/a.png", str(second)]},
        {"prompt": "a fox"},
        {"prompt": "make it blue", "image": "pics/b.png", "tag": "x"},
    ]
    file = written(tmp_path, "edits.jsonl", *lines)
    prompts = read_prompts(file)  # the same words with another image are no repetition
    assert [[image.path for image in prompt.images] for prompt in prompts] == [
        [first],
        [first, second],
        [],
        [second],
    ]
    assert prompts[0].metadata == {"tag": "x"} and len({p.key for p in prompts}) == 4
    assert prompts[3].images[0].pixels()[:, 0, 0].tolist() == pytest.approx([200 / 255, 0, 0])
    write_prompts(tmp_path / "again.jsonl", prompts)
    assert read_prompts(tmp_path / "again.jsonl") == prompts
    for name, caption in (("a", "make it blue"), ("b", "remove the fox\n")):
        (tmp_path / "pics" / f"{name}.txt").write_text(caption)
    assert [(p.text, p.images[0].path) for p in read_prompts(tmp_path / "pics")] == [
        ("make it blue", first),
        ("remove the fox", second),
    ]
    named = {"file_name": "b.png", "text": "add a hat", "tag": "y"}
    (tmp_path / "pics" / "metadata.jsonl").write_text(json.dumps(named) + "\n")
    (prompt,) = read_prompts(tmp_path / "pics")
    assert (prompt.text, prompt.images[0].path, prompt.metadata) == (
        "add a hat",
        second,
        {"tag": "y"},
    )


def test_images_that_cannot_be_read_are_named_by_line(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    lines = [{"prompt": "p", "image": name} for name in ("none.png", "text.png", 3)]
    with pytest.raises(ConfigError) as error:
        read_prompts(written(tmp_path, "edits.jsonl", *lines))
    for number, text in enumerate(
        ("none.png cannot be read", "text.png cannot be read", "neither"), 1
    ):
        assert f"line {number} " in str(error.value) and text in str(error.value)
    picture(tmp_path / "alone" / "a.png")
    with pytest.raises(ConfigError, match=r"image 1 .*a\.txt"):
        read_prompts(tmp_path / "alone")
    prompt = read_prompts(written(tmp_path, "one.jsonl", {"prompt": "p", "image": "alone/a.png"}))[
        0
    ]
    picture(tmp_path / "alone" / "a.png", 9)
    with pytest.raises(ConfigError, match=r"a\.png = 'changed' is not allowed"):
        prompt.images[0].pixels()


def test_images_of_a_dataset(datasets, tmp_path, monkeypatch):
    """By their column; those inside the table get files in the cache folder."""
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    paths = [picture(tmp_path / "pics" / f"{n}.png", n) for n in (10, 20)]
    cells = [{"bytes": path.read_bytes(), "path": None} for path in paths]
    table = datasets.Dataset.from_dict({"prompt": ["red", "blue"], "before": cells, "after": cells})
    for name in ("before", "after"):
        table = table.cast_column(name, datasets.Image())
    table.to_parquet(tmp_path / "edits.parquet")
    prompts = read_prompts(f"hf(name={tmp_path / 'edits.parquet'}, image=before)")
    assert [prompt.images[0].pixels()[0, 0, 0].item() * 255 for prompt in prompts] == pytest.approx(
        [10, 20]
    )
    assert {prompt.images[0].path.parent for prompt in prompts} == {tmp_path / "cache" / "images"}
    assert not read_prompts(f"hf(name={tmp_path / 'edits.parquet'})")[0].images
    with pytest.raises(
        ConfigError, match=r"image column of prompts = 'x'.*one with images \(before, after\)"
    ):
        read_prompts(f"hf(name={tmp_path / 'edits.parquet'}, image=x)")


@pytest.mark.parametrize(("count", "held"), [(15, 0), (16, 8), (99, 9), (320, 32), (900, 64)])
def test_held_out_prompts_are_chosen_by_their_texts(count, held):
    """A tenth, 8 to 64 of 16 or more; in any order, and repeated ones count once."""
    prompts = [Prompt(f"a fox {number}") for number in range(count)]
    chosen = held_out(prompts)
    assert len({*texts(chosen)}) == len(chosen) == held
    assert held_out([*reversed(prompts), *prompts]) == chosen


def test_a_model_evaluates_on_prompts_held_out_of_training(tmp_path):
    lines = [f"a fox {number}" for number in range(40)]
    file = written(tmp_path, "p.txt", *lines, lines[0])
    kept = RunConfig.of(
        world="model",
        model="x",
        task="prompts",
        reward_form="reward",
        prompts=str(file),
        reward="jpeg-compressibility",
    )
    parts = {part: make_world(kept).prompts("prompts", part) for part in ("train", "heldout")}
    assert len(parts["heldout"]) == 8 and not {*texts(parts["train"])} & {*texts(parts["heldout"])}
    assert {*texts(parts["train"]), *texts(parts["heldout"])} == {*lines}
    assert "8 prompts are held out" in make_world(kept).evaluated_on
    same = make_world(kept.replace(hold_out=False))
    assert same.prompts("prompts", "train") == same.prompts("prompts", "heldout")
    assert same.evaluated_on == ""
    few = written(tmp_path, "few.txt", *lines[:15])
    assert "too few to hold any out" in make_world(kept.replace(prompts=str(few))).evaluated_on
