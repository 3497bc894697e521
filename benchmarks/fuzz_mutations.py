"""Mutations of files: bytes, JSON values, YAML, tables and safetensors. All draw from a seeded
generator alone.
"""

import contextlib
import csv
import io
import json
import math
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import yaml
from safetensors.torch import load, save

CANARY = "flowrl_canary"
"""The name of a module, and of a part in it, that leaves a file behind when it runs."""


class Touch:
    """Unpickled, it runs a shell command that leaves the file of the canary."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (f"touch {self.place}",)


TOKENS = (
    b"\0",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xe9",
    b"\xed\xa0\x80",
    b"\r",
    b"\r\n",
    b"\t",
    b"\x1b[31m",
    b'"',
    b"'",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-1",
    b"9" * 5000,
    b"[" * 100,
    b"[" * 100_000,
    b'{"a":' * 3000,
    b"\\ud800",
    b"\\u0000",
    b"null",
    b"true",
    b"# ",
    b"\n",
    b"\xe2\x80\xa8",
    b"x" * 200_000,
    b"../../",
    b"0x10",
    b"1_0",
    b"[/red]",
)
YAML_TOKENS = (
    b"!!python/object/apply:os.system ['touch CANARY']\n",
    b"!!python/name:os.system\n",
    b"!!int ''\n",
    b"!!bool maybe\n",
    b"!!timestamp x\n",
    b"!!binary '%'\n",
    b"!!float ''\n",
    b"!!set {a, b}\n",
    b"!!omap [a]\n",
    b"!unknown x\n",
    b"? [a]\n: b\n",
    b"? {a: b}\n: c\n",
    b"&a [*a, *a]\n",
    b"*missing\n",
    b"<<: {a: 1}\n",
    b"a: &a [1, 1]\nb: [*a, *a]\n",
    b"---\n",
    b"...\n",
    b"%YAML 9.9\n",
    b"- " * 500 + b"\n",
    b"2001-99-99\n",
    b"190:20:30.15\n",
    b"1:60" * 100 + b"\n",
    b"0b_\n",
    b"+_\n",
    b".\n",
    b"a: &x0 [lol]\n"
    + b"".join(
        b"a%d: &x%d [%s]\n" % (i, i, b", ".join([b"*x%d" % (i - 1)] * 9)) for i in range(1, 30)
    ),
)


def hostile(draw: random.Random) -> Any:
    """A value that a file's writer did not foresee."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: draw.choice(
            (None, True, False, 0, 1, -1, 2, 1.5, -0.0, "", [], {}, "yes", "1e-3", "nan")
        ),
        lambda: draw.choice(
            (
                math.nan,
                math.inf,
                -math.inf,
                1e308,
                5e-324,
                2**63,
                2**64,
                10**30,
                -(10**400),
                10**4000,
            )
        ),
        lambda: draw.choice(
            (
                "\ud800",
                "\0",
                "a\0b",
                "../../x",
                "/dev/null",
                "~",
                "[bold]x[/bold]",
                "\x1b[31m",
                "a\nb",
                "x" * 100_000,
            )
        ),
        lambda: draw.choice(
            (
                f"{CANARY}.py:Part",
                f"{CANARY}:Part",
                "os:system",
                "os:system(command='touch CANARY')",
                "a(b)+(c)",
            )
        ),
        lambda: draw.choice(
            (
                "judge(url='http://127.0.0.1:9/', key='HOME')",
                "remote(url='http://127.0.0.1:9/')",
                "a" * 300 + "(",
            )
        ),
        lambda: nested(draw.choice((3, 60, 250))),
        lambda: {f"name {i}": i for i in range(draw.choice((1, 2000)))},
        lambda: [draw.choice((0, 0.5, "a", None))] * draw.choice((1, 2, 20_000)),
        lambda: {"__class__": "os.system", "$ref": "#", "prompt": {"text": 1}},
    )
    return draw.choice(kinds)()


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def changed_value(value: Any, draw: random.Random) -> Any:
    """`value` with one to three of its parts, at any depth, replaced, removed, repeated, renamed or
    added.
    """
    root = [json.loads(json.dumps(value))]
    for _ in range(draw.randint(1, 3)):
        places = list(places_in(root))
        owner, key = draw.choice(places)
        kind = draw.choice(("replace", "replace", "replace", "remove", "rename", "copy", "add"))
        if kind == "remove" and owner is not root:
            del owner[key]
        elif kind == "copy":
            other, place = draw.choice(places)
            owner[key] = json.loads(json.dumps(other[place]))
        elif kind == "rename" and isinstance(owner, dict):
            owner[draw.choice((key + "x", key[:-1], key.upper(), "__init__", "format", ""))] = (
                owner.pop(key)
            )
        elif kind == "add" and isinstance(owner[key], dict):
            owner[key][draw.choice(("x", "format", "prompt", "seed", "id"))] = hostile(draw)
        else:
            owner[key] = hostile(draw)
        if len(json.dumps(root)) > 300_000:
            break
    return root[0]


def places_in(owner: Any) -> Any:
    for key in list(owner) if isinstance(owner, dict) else range(len(owner)):
        yield owner, key
        if isinstance(owner[key], dict | list):
            yield from places_in(owner[key])


def bytes_changed(data: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, put in or cut off; another encoding; another kind of file."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place, length = draw.randint(0, len(changed)), draw.choice((1, 2, 8, 100, 1000))
        kind = draw.choice(
            ("flip", "flip", "cut", "double", "token", "token", "truncate", "noise", "whole")
        )
        if kind == "flip" and place < len(changed):
            changed[place] ^= draw.randint(1, 255)
        elif kind == "cut":
            del changed[place : place + length]
        elif kind == "double":
            changed[place:place] = changed[place : place + length]
        elif kind == "token":
            changed[place:place] = draw.choice(TOKENS)
        elif kind == "truncate":
            del changed[place:]
        elif kind == "noise":
            changed[place : place + 8] = draw.randbytes(8)
        elif draw.random() < 0.3:
            changed = bytearray(whole(bytes(changed), draw))
    return bytes(changed)


def whole(data: bytes, draw: random.Random) -> bytes:
    """Another encoding of the file, or another file."""
    text = data.decode("utf-8", "replace")
    return draw.choice(
        (
            b"",
            b"\n",
            b"\xef\xbb\xbf" + data,
            text.encode("utf-16"),
            text.encode("utf-32"),
            text.encode("latin-1", "replace") + b"\xe9",
            b"\x1f\x8b" + data,
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\r"),
            data + data,
            data[::-1],
            draw.randbytes(500),
            b"PK\x03\x04" + data,
            pickle.dumps(Touch("CANARY")),
            b"\x89PNG\r\n\x1a\n" + data,
            b"\0" * 1000,
        )
    )


def json_changed(data: bytes, draw: random.Random) -> bytes:
    """A value of the JSON document changed, or a name given twice."""
    text = json.dumps(changed_value(json.loads(data), draw), indent=draw.choice((None, 1)))
    if draw.random() < 0.1 and text.startswith("{"):
        name = json.dumps(draw.choice(list(json.loads(data))))
        text = "{" + f"{name}: 1, {name}: 2" + (", " if len(text) > 2 else "") + text[1:]
    return text.encode()


def lines_changed(data: bytes, draw: random.Random) -> bytes:
    """One line of JSON lines changed, dropped, repeated or torn."""
    lines = data.splitlines()
    number = draw.randrange(len(lines))
    kind = draw.choice(("value", "value", "value", "drop", "repeat", "tear", "swap"))
    if kind == "drop":
        del lines[number]
    elif kind == "repeat":
        lines.insert(number, lines[number])
    elif kind == "tear":
        lines[number] = lines[number][: draw.randint(0, len(lines[number]))]
    elif kind == "swap":
        lines.reverse()
    else:
        lines[number] = json.dumps(changed_value(json.loads(lines[number]), draw)).encode()
    return b"\n".join(lines) + draw.choice((b"\n", b""))


def yaml_changed(data: bytes, draw: random.Random) -> bytes:
    """A value changed, or YAML's tags, anchors, aliases and odd scalars in place of one."""
    if draw.random() < 0.5:
        values = changed_value(yaml.safe_load(data), draw)
        if len(json.dumps(values)) < 60_000:
            with contextlib.suppress(RecursionError):
                return yaml.safe_dump(values, allow_unicode=draw.random() < 0.5).encode(
                    "utf-8", "surrogatepass"
                )
            return json.dumps(values).encode()  # JSON is YAML
    lines = data.splitlines(keepends=True)
    number, token = draw.randrange(len(lines)), draw.choice(YAML_TOKENS)
    name, colon, _ = lines[number].partition(b":")
    lines[number] = name + b": " + token if colon and draw.random() < 0.6 else lines[number] + token
    return b"".join(lines)


def table_changed(data: bytes, draw: random.Random) -> bytes:
    """Cells, rows and columns of a CSV changed; another separator or quoting."""
    rows = list(csv.reader(io.StringIO(data.decode())))
    for _ in range(draw.randint(1, 3)):
        row = draw.choice(rows)
        kind = draw.choice(("cell", "cell", "cell", "row", "column", "drop", "longer", "name"))
        if kind == "cell" and row:
            values = (
                "",
                "nan",
                "inf",
                "1e39",
                "1e999",
                "-0",
                "1_0",
                "\u0661",
                "0x1",
                "x" * 200_000,
                "\0",
                "a\nb",
                '"',
                "é",
                "9" * 5000,
            )
            row[draw.randrange(len(row))] = draw.choice(values)
        elif kind == "row":
            rows.insert(draw.randint(0, len(rows)), list(row))
        elif kind == "column":
            copies = draw.choice((1, 1, 3000))
            rows = [[*some, *[some[-1] if some else "0"] * copies] for some in rows]
        elif kind == "drop" and len(rows) > 1:
            rows.remove(row)
        elif kind == "longer":
            row.append("1")
        elif row and rows[0]:
            rows[0][draw.randrange(len(rows[0]))] = draw.choice(
                ("prompt", "member", "", "R0", "value_0", "1")
            )
    file = io.StringIO()
    csv.writer(
        file,
        delimiter=draw.choice(",,,;\t"),
        quoting=draw.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)),
    ).writerows(rows)
    return file.getvalue().encode(
        draw.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1")), "replace"
    )


DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.int8,
)


def tensors_changed(
    tensors: dict[str, torch.Tensor], draw: random.Random
) -> dict[str, torch.Tensor]:
    """Tensors of another type or shape, not finite, missing, renamed or too many."""
    changed = dict(tensors)
    for _ in range(draw.randint(1, 2)):
        if not changed:
            break
        name = draw.choice(sorted(changed))
        tensor = changed[name]
        kind = draw.choice(("dtype", "shape", "values", "drop", "rename", "more", "empty"))
        if kind == "dtype":
            changed[name] = tensor.to(draw.choice(DTYPES))
        elif kind == "shape":
            changed[name] = draw.choice(
                (
                    tensor.flatten(),
                    tensor[None],
                    tensor.flatten()[:1],
                    torch.zeros(()),
                    tensor.repeat(2, *[1] * (tensor.dim() - 1)) if tensor.dim() else tensor,
                )
            ).contiguous()
        elif kind == "values" and tensor.is_floating_point():
            changed[name] = torch.full_like(tensor, draw.choice((math.nan, math.inf, -1e38, 0.0)))
        elif kind == "drop":
            del changed[name]
        elif kind == "rename":
            changed[draw.choice((name + "x", "", "__metadata", "../x", "\0", name.upper()))] = (
                changed.pop(name)
            )
        elif kind == "more":
            changed["another"] = torch.zeros(3)
        else:
            changed[name] = torch.zeros(0, dtype=tensor.dtype)
    return changed


def safetensors_changed(data: bytes, draw: random.Random) -> bytes:
    """The length of the header, the header's JSON or the tensors changed."""
    length = int.from_bytes(data[:8], "little")
    head, body = data[8 : 8 + length], data[8 + length :]
    kind = draw.choice(("length", "header", "header", "tensors", "tensors", "offsets"))
    if kind == "length":
        lengths = (
            0,
            1,
            length - 1,
            length + 1,
            len(data),
            2**31,
            2**60,
            2**63,
            2**64 - 1,
            100_000_001,
        )
        return draw.choice(lengths).to_bytes(8, "little") + head + body
    if kind == "tensors":
        return save(tensors_changed(load(data), draw), json.loads(head).get("__metadata__"))
    values = json.loads(head)
    if kind == "header":
        values = changed_value(values, draw)
    else:
        entry = values[draw.choice([name for name in values if name != "__metadata__"])]
        ends = (0, 1, -1, 4, len(body), len(body) + 1, 2**31, 2**63, 2**64)
        entry["data_offsets"] = [draw.choice(ends), draw.choice(ends)]
    new = json.dumps(values).encode()
    return len(new).to_bytes(8, "little") + new + body


Mutation = Callable[[bytes, random.Random], bytes]


def mixed(*mutations: Mutation) -> Mutation:
    """`mutations` of a kind of file in two of three cases, changes of bytes in the others and
    sometimes afterwards.
    """

    def change(data: bytes, draw: random.Random) -> bytes:
        mutation = draw.choice(mutations) if mutations and draw.random() < 0.67 else bytes_changed
        changed = mutation(data, draw)
        return bytes_changed(changed, draw) if draw.random() < 0.1 else changed

    return change


def spliced(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """The beginning of one file and the end of another."""
    other = draw.choice(others)
    return data[: draw.randint(0, len(data))] + other[draw.randint(0, len(other)) :]
