"""The design page agrees with pyproject.toml."""

import re
import tomllib

from loading import ROOT

PAGE = (ROOT / "docs" / "design.md").read_text()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_import_order_is_that_of_the_linter():
    layers = SETTINGS["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = re.findall(r"^\| \d+ \| (.*) \|$", PAGE, re.MULTILINE)
    documented = [
        {name.removeprefix("flowrl.") for name in re.findall(r"`([\w.]+)`", row)} for row in rows
    ]
    assert documented == [
        {name.strip().removeprefix("flowrl.") for name in re.split(r"[|:]", layer)}
        for layer in reversed(layers)
    ]


def test_every_dependency_has_a_reason():
    project = SETTINGS["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[<>=\[]", name)[0].lower().replace("_", "-") for name in wanted} - {
        "flowrl-lab"
    }
    table = PAGE[PAGE.index("## What each dependency is for") :]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    documented = {name.strip().lower().replace("_", "-") for row in rows for name in row.split(",")}
    assert not names - documented
