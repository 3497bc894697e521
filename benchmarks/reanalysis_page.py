"""Reads the published pages of the credit-rule comparison, for ``reanalysis.py``."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from reanalysis_statistics import DEFAULTS, NUMBER, Settings

WORLDS = {"2-D world": "mixture", "image world": "shapes"}


class Row(NamedTuple):
    """A number of the page as printed, and the same number of this analysis with more digits."""

    place: str
    what: str
    page: str
    own: str

    @property
    def agrees(self) -> bool:
        """Equal texts, with numbers that round to the printed ones."""
        pages, owns = re.findall(NUMBER, self.page), re.findall(NUMBER, self.own)
        if re.sub(NUMBER, "", self.page) != re.sub(NUMBER, "", self.own) or len(pages) != len(owns):
            return False
        within = (0.5 * 10.0 ** -len(page.split(".")[1]) + 1e-9 for page in pages)
        return all(
            abs(float(page) - float(own)) <= half
            for page, own, half in zip(pages, owns, within, strict=True)
        )


class Part(NamedTuple):
    """A row of a claim's table: the settings of the claim's arms, and what the page reports."""

    claim: str
    world: str
    arms: Mapping[str, Settings]
    rule: str
    what: str
    seeds: str
    numbers: str
    won: str
    verdict: str


def value(text: str) -> Any:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return text


def page_arms(details: str) -> dict[str, dict[str, Settings]]:
    """Settings by world and arm, from the table *Settings of the arms*."""
    arms: dict[str, dict[str, Settings]] = {"mixture": {}, "shapes": {}}
    table = details.split("## Settings of the arms")[1].split("\n## ")[0]
    for name, fixed, *tuned in re.findall(
        r"^\| (.+?) \| (`.+?) \| (.+?) \| (.+?) \|$", table, re.M
    ):
        given = dict(re.findall(r"`(\w+)` = `(.+?)`(?:; |$)", fixed))
        for world, text in zip(arms, tuned, strict=True):
            if text == "-":
                continue
            numbers = dict(
                pair.rsplit(" ", 1) for pair in text.removesuffix(" (not searched)").split(", ")
            )
            settings: dict[str, Any] = {
                n: value(v) for n, v in numbers.items() if n in DEFAULTS[world]
            }
            named = given.get("method") not in (None, "flow-grpo") or "credit" not in given
            rule = given["method"] if named else given["credit"]
            settings["rule"] = "random" if rule == "random(seed=0)" else rule
            if "loss" in given:
                settings["loss"] = given["loss"].format(**numbers)
            if "group_size" in given:
                sizes = dict(re.findall(r"(mixture|shapes) (\d+)", given["group_size"]))
                settings["group_size"] = int(sizes.get(world) or given["group_size"])
            arms[world][name] = settings
    return arms


def flags(text: str) -> Settings:
    words = shlex.split(text.strip("`"))
    named = {
        n.removeprefix("--").replace("-", "_"): value(v)
        for n, v in zip(words[::2], words[1::2], strict=True)
    }
    return {"rule" if name == "credit" else name: setting for name, setting in named.items()}


def page_parts(details: str) -> Iterator[Part]:
    """All rows that have runs."""
    arms = page_arms(details)
    for section in re.split(r"^### ", details.split("## Claims and questions")[1], flags=re.M)[1:]:
        claim = section.split("\n", 1)[0]
        stated = re.search(r" Arms: (.+)\.$", section, re.M)
        assert stated, f"{claim}: no arms"
        named, _, common = stated[1].partition(". All: ")
        members = re.findall(r"(?:^|; )(.+?) = \*(.+?)\*(?: with `(.+?)`)?(?=;|$)", named)
        for label, block in re.findall(
            r"^(2-D world|Image world): .+\n((?:\n?\|.+\n)+)", section, re.M
        ):
            world = WORLDS[label.replace("Image", "image")]
            chosen = {
                name: {**arms[world][base], **flags(common), **flags(changes)}
                for name, base, changes in members
                if base in arms[world]
            }
            # rows of single tasks have no rule
            rows = (cells for cells in table(block) if cells[0] != "-")
            yield from (Part(claim, world, chosen, *cells) for cells in rows)


def table(text: str) -> list[list[str]]:
    """The cells of the rows of a Markdown table, without its head."""
    rows = [row.strip().strip("|") for row in text.splitlines() if row.startswith("|")]
    return [[cell.strip() for cell in row.split(" | ")] for row in rows[2:]]
