"""`flowrl explain`: reading tables, what is shown, what is refused."""

import re
from pathlib import Path

import pytest
import torch
from flowrl_bench.explain import explain, parse_rewards
from flowrl_bench.explain_figure import explanation

from flowrl.cli import main
from flowrl.credit import StepwiseGain, TurningPoint, Uniform
from flowrl.errors import ConfigError


def test_the_example_shows_the_rule_at_work() -> None:
    shown = explain(TurningPoint())
    assert shown.selected is not None
    assert shown.selected.nonzero().tolist() == [[0, 0, 2], [0, 1, 2]]
    assert shown.consistent.nonzero().tolist() == [[0, 0, 2], [0, 1, 2], [0, 2, 0]]
    torch.testing.assert_close(shown.advantages, TurningPoint().assign(shown.rewards))
    text = str(shown)
    assert re.search(r"a +reward R +0\.500 +0\.400 +0\.300 +0\.450 +0\.600", text)
    assert "[x]+0.150" in text
    assert "(x)+0.050" in text
    assert "~+0.130" in text
    assert shown._repr_html_().startswith("<pre>")


def test_tables_as_tensors_and_rules_of_the_last_node() -> None:
    rewards = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0))
    shown = explain(Uniform(), rewards)
    assert shown.selected is None
    torch.testing.assert_close(shown.advantages, Uniform().assign(rewards))
    assert "prompt 1" in str(shown)
    assert len(explanation(shown, 1).axes) == 3


def test_a_table_without_header_is_one_group() -> None:
    read = parse_rewards("0.1, 0.2, 0.3\n\n0.3,0.2,0.1\n")
    assert read.rewards.shape == (1, 2, 3)
    assert read.members == (("0", "1"),)


def test_columns_may_come_in_any_order() -> None:
    read = parse_rewards("R0,prompt,R1\n1,p,2\n3,q,4\n5,p,6\n7,q,8\n")
    assert read.prompts == ("p", "q")
    assert read.rewards.tolist() == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rows"),
        ("R0,R1\n", "a header but no rows"),
        ("1,2\n1,2,3\n", "line 2: 3 columns, but the first line has 2"),
        ("R0,R1\n1,x\n", "line 2: 'x' is not a finite number"),
        ("1,2\n1,nan\n", "line 2: 'nan' is not a finite number|not a finite"),
        ("1,2\n", "1 members and 2 nodes"),
        ("1\n2\n", "2 members and 1 nodes"),
        ("prompt,R0,R1\na,1,2\na,1,2\nb,1,2\n", "as many members"),
    ],
)
def test_bad_tables_name_the_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_rewards(text)


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rewards.csv"
    file.write_text("prompt,member,R0,R1,R2\ncat,x,0,1,2\ncat,y,0,2,1\ndog,x,1,1,0\ndog,y,1,0,1\n")
    out = tmp_path / "figure.png"
    rules = ["stepwise-gain(normalise=step)", "weighted(weights=noise)"]
    assert main(["explain", *rules, "--rewards", str(file), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "cat: stepwise-gain(normalise=step)" in printed
    assert [(tmp_path / f"figure-{n}.png").stat().st_size > 5000 for n in (1, 2, 3, 4)] == [True] * 4
    rewards = parse_rewards(file.read_text()).rewards
    first = StepwiseGain(normalise="step").assign(rewards)[0, 0, 0]
    assert f"{float(first):+.3f}" in printed
    assert main(["explain", "uniform", "--rewards", str(tmp_path / "none.csv")]) == 2
    assert "does not exist" in capsys.readouterr().err
