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
