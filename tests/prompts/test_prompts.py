"""Prompts: files with their faults by line, GenEval's requests, generators."""

import json

import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.prompts import Clause, compositional_prompts, load_prompts, read_prompts, request_of, text_prompts, write_prompts
from flowrl.prompts.generate import plural
from flowrl.prompts.geneval import OBJECTS, TAGS
from flowrl.text import quoted_text

GENEVAL = [
    '{"tag": "counting", "include": [{"class": "dog", "count": 2}], '
    '"exclude": [{"class": "dog", "count": 3}], "prompt": "two dogs"}',
    '{"tag": "position", "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}], '
    '"prompt": "a photo of a dog left of a cat"}',
]


def written(tmp_path, name, *lines):
    (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / name


def test_text_file_with_blank_and_repeated_lines(tmp_path):
    path = written(tmp_path, "p.txt", "# comment", "a fox", "", "a car", "  a fox ", " ", "a fox")
    found = load_prompts(path)
    assert [p.text for p in found.prompts] == ["a fox", "a car", "a fox", "a fox"]
    assert (found.lines, found.blank, found.repeated) == ((2, 4, 5, 7), (3, 6), ((5, 2), (7, 2)))
    assert [remark.removeprefix(f"{path}: ") for remark in found.remarks()] == [
        "blank lines 3, 6",
        "line 5 repeats line 2; line 7 repeats line 2; repeated prompts are drawn more often",
    ]
    with pytest.warns(UserWarning, match="line 5 repeats line 2"):
        assert len(read_prompts(path)) == 4


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path):
    (tmp_path / "p.txt").write_bytes("a fox\n".encode("utf-8-sig"))
    assert load_prompts(tmp_path / "p.txt").prompts[0].text == "a fox"


def test_lines_end_at_line_feeds_only(tmp_path):
    odd = "a fox\u2028beside\u0085a \x0c car"
    path = written(tmp_path, "p.txt", odd, "", "third")
    found = load_prompts(path)
    assert [p.text for p in found.prompts] == [odd, "third"] and found.blank == (2,) and found.lines == (1, 3)
    write_prompts(tmp_path / "p.jsonl", found.prompts)
    assert load_prompts(tmp_path / "p.jsonl").prompts == found.prompts
    (tmp_path / "dos.txt").write_bytes(b"a fox\r\na cat\r\n")
    assert [p.text for p in load_prompts(tmp_path / "dos.txt").prompts] == ["a fox", "a cat"]


def test_what_is_wrong_with_the_json_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"line 1 is no JSON object .* \(Expecting ',' delimiter at column 16\)"):
        load_prompts(written(tmp_path, "p.jsonl", '{"prompt": "a" "n": 1}'))
    with pytest.raises(ConfigError, match=r"line 2 is no JSON object .* \(NaN is not a number in JSON\)"):
        load_prompts(written(tmp_path, "p.jsonl", '{"prompt": "a"}', '{"prompt": "b", "n": NaN}'))


def test_geneval_lines(tmp_path):
    first, second = load_prompts(written(tmp_path, "p.jsonl", *GENEVAL)).prompts
    assert first.text == "two dogs" and request_of(first.metadata).exclude == (Clause("dog", 3),)
    assert request_of(second.metadata).include == (Clause("cat"), Clause("dog", 1, "", "left of", 0))
    assert request_of(second.metadata).tag == "position"


def test_same_text_with_other_metadata_is_no_repetition(tmp_path):
    path = written(tmp_path, "p.jsonl", '{"prompt": "a", "n": 1}', '{"prompt": "a", "n": 2}', '{"n": 1, "prompt": "a"}')
    assert load_prompts(path).repeated == ((3, 1),)


def test_every_bad_line_is_named(tmp_path):
    path = written(tmp_path, "p.jsonl", '{"prompt": "a"}', "{oops", "[1]", "", '{"prompt": 3}', '{"prompt": " "}', "null", '"x"')
    with pytest.raises(ConfigError) as caught:
        load_prompts(path)
    told = str(caught.value)
    assert all(f"line {n} is no JSON object" in told for n in (2, 3, 5, 6, 7)) and told.endswith("and 1 more")


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"include": []}, '"include" must be a list of one or more clauses'),
        ({"include": "dog"}, '"include" must be a list of clauses'),
        ({"include": [{"count": 1}]}, 'include[0]: "class" = None is not allowed'),
        ({"include": [{"class": "dog", "count": 0}]}, '"count" = 0 is not allowed; allowed: 1 or more'),
        ({"include": [{"class": "dog", "count": True}]}, '"count" = True'),
        ({"include": [{"class": "dog", "color": "mauve"}]}, "\"color\" = 'mauve' is not allowed; allowed: one of red"),
        ({"include": [{"class": "dog", "colour": "red"}]}, "colour is not allowed: only class, count, color, position"),
        ({"include": [{"class": "dog", "position": ["left of", 0]}]}, "the number of an earlier clause"),
        ({"include": [{"class": "dog"}, {"class": "cat", "position": ["near", 0]}]}, "one of left of, right of"),
        ({"include": [{"class": "dog"}], "exclude": [{"class": "dog", "count": -1}]}, "exclude[0]"),
    ],
)
def test_bad_requests_are_refused_with_their_line(tmp_path, metadata, told):
    path = written(tmp_path, "p.jsonl", GENEVAL[0], json.dumps({"prompt": "x", **metadata}))
    with pytest.raises(ConfigError) as caught:
        load_prompts(path)
    assert told in str(caught.value) and "line 2" in str(caught.value)


def test_compositional_prompts_take_turns_and_can_be_scored(tmp_path):
    prompts = compositional_prompts(60, seed=1)
    assert [p.metadata["tag"] for p in prompts[:6]] == list(TAGS)
    assert len({p.text for p in prompts}) == 60
    assert prompts == compositional_prompts(60, seed=1) != compositional_prompts(60, seed=2)
    for prompt in prompts:
        request = request_of(prompt.metadata)
        for clause in request.include:
            assert clause.name in OBJECTS
            shown = plural(clause.name) if clause.count > 1 else clause.name
            assert shown in prompt.text and clause.colour in prompt.text and clause.position in prompt.text
    positions = [p for p in prompts if p.metadata["tag"] == "position"]
    for prompt in positions:
        target, subject = request_of(prompt.metadata).include
        assert prompt.text.index(subject.name) < prompt.text.index(subject.position) < prompt.text.rindex(target.name)
    write_prompts(tmp_path / "p.jsonl", prompts)
    assert list(load_prompts(tmp_path / "p.jsonl").prompts) == prompts


def test_only_as_many_as_there_are():
    assert len(compositional_prompts(80, tags=["single_object"])) == 80
    with pytest.raises(ConfigError, match="count = 81 is not allowed; allowed: at most about 80"):
        compositional_prompts(81, tags=["single_object"])
    with pytest.raises(ConfigError, match="tags = 'size' is not allowed"):
        compositional_prompts(1, tags=["size"])


def test_too_many_are_refused_soon():
    with pytest.raises(ConfigError, match="at most about"):
        text_prompts(10**9, words=["a"], scenes=["b"])


def test_text_prompts_quote_their_text():
    prompts = text_prompts(200, seed=3)
    assert len({p.text for p in prompts}) == 200
    assert all(quoted_text(p.text) == p.metadata["text"] for p in prompts)


def test_command(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    assert main(["prompts", "compositional", "--count", "12", "--file", str(path)]) == 0
    assert "12 prompts (color_attr, colors, counting, position, single_object, two_object)" in capsys.readouterr().out
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[0] + "\n")
    assert main(["prompts", "check", "--file", str(path)]) == 0
    assert "line 13 repeats line 1" in capsys.readouterr().out
    with path.open("a") as file:
        file.write("{\n")
    assert main(["prompts", "check", "--file", str(path)]) == 2
    assert "line 14 is no JSON object" in capsys.readouterr().err
