"""The parts that the guides show keep the promises that the guides tell to check."""

import re
import runpy
from pathlib import Path

import pytest

from flowrl.testing import (
    check_credit,
    check_forward_loss,
    check_loss,
    check_reward,
    check_sampler,
    check_solver,
    check_world,
)

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


@pytest.mark.parametrize(
    ("guide", "name", "check"),
    [
        ("credit-rule", "LargestGain", check_credit),
        ("loss", "TanhLoss", check_loss),
        ("forward-loss", "WeightedRegression", check_forward_loss),
        ("sampler", "Jitter", check_sampler),
        ("sampler", "AdamsBashforth", check_solver),
        ("reward", "Sharpness", check_reward),
        ("world", "World", check_world),
    ],
)
def test_a_guides_part_keeps_its_promises(guide: str, name: str, check, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL)
    blocks = [block for block in blocks if f"class {name}" in block[0]]
    assert len(blocks) == 1, "one block to save, which begins with its file's name"
    text, file = blocks[0]
    assert f"{file}:{name}" in (GUIDES / f"{guide}.md").read_text(), "the commands use the file's name"
    (tmp_path / file).write_text(text)
    found = check(runpy.run_path(str(tmp_path / file))[name]())
    assert found.ok, str(found)


def test_the_tree_rule_of_the_page_about_extensions_keeps_its_promises(tmp_path: Path) -> None:
    page = (GUIDES / "extend.md").read_text()
    (text,) = re.findall(r"```python\n(# my_tree_rules\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "my_tree_rules.py").write_text(text)
    found = check_credit(runpy.run_path(str(tmp_path / "my_tree_rules.py"))["DiscountedSiblings"]())
    assert found.ok, str(found)
