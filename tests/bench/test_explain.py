"""`flowrl explain`: reading tables, what is shown, what is refused."""

import re

import pytest
import torch
from small_run import error_of, flowrl_

from flowrl.bench.explain import explain, parse_rewards
from flowrl.core.errors import ConfigError
from flowrl.core.experience import Decisions
from flowrl.credit import StepwiseGain, TurningPoint


def test_the_example_shows_the_rule_at_work():
    example = explain(TurningPoint())
    assert example.selected.nonzero().tolist() == [[0, 0, 2], [0, 1, 2]]
    assert example.consistent.nonzero().tolist() == [[0, 0, 2], [0, 1, 2], [0, 2, 0]]
    torch.testing.assert_close(
        example.advantages, TurningPoint().assign(example.values, Decisions.like(example.values))
    )
    text = str(example)
    assert re.search(r"a +value V +0\.500 +0\.400 +0\.300 +0\.450 +0\.600", text)
    assert "[x]+0.150" in text
    assert "(x)+0.050" in text
    assert "~+0.130" in text
    assert example._repr_html_().startswith("<pre>")


def test_columns_may_come_in_any_order():
    read = parse_rewards("reward,prompt,Value_0\n2,p,1\n4,q,3\n6,p,5\n8,q,7\n")
    assert read.prompts == ("p", "q") and read.header
    assert read.values.tolist() == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]


NODES = "prompt,node_0,node_1,node_2,node_3,node_4\na,0,1,2,3,4\na,5,6,7,8,9\n"


@pytest.mark.parametrize("text", [NODES, NODES.replace("node_", "R"), "0,1,2,3,4\n5,6,7,8,9\n"])
def test_drawn_steps_choose_the_columns_of_a_table_with_nodes(text):
    assert parse_rewards(text, decisions=(1, 2)).values.tolist() == [[[1, 2, 4], [6, 7, 9]]]


@pytest.mark.parametrize("decisions", [(2, 1), (1, 1), (3, 4), (-1, 2)])
def test_drawn_steps_are_ascending_and_on_the_grid(decisions):
    with pytest.raises(ConfigError, match=r"decisions = .*; allowed: ascending steps from 0 to 3"):
        parse_rewards(NODES, decisions=decisions)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rows"),
        ("1,2\n1,2,3\n", "line 2: 3 columns, but the first line has 2"),
        ("value_0,reward\n1,x\n", "line 2: 'x' is not a finite number"),
        ("1,2\n1,nan\n", "line 2: 'nan' is not a finite number|not a finite"),
        ("1,2\n", "1 members and 2 columns"),
        (NODES, "line 1: the columns node_0, .* are nodes.*--decisions"),
        ("value_0,value_2,reward\n1,2,3\n", "allowed: value_0, value_1, reward"),
        ("prompt,value_0,reward\na,1,2\na,1,2\nb,1,2\n", "the same number of members"),
    ],
)
def test_bad_tables_name_the_line(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_rewards(text)


def test_the_command_prints_and_draws(tmp_path, capsys):
    table, out = tmp_path / "rewards.csv", tmp_path / "figure.png"
    table.write_text("cat,x,0,1,2\ncat,y,0,2,1\ndog,x,1,1,0\ndog,y,1,0,1\n")
    table.write_text("prompt,member,value_0,value_1,reward\n" + table.read_text())
    options = f"--rewards {table} --out {out}"
    assert flowrl_(f"explain 'stepwise-gain(normalise=step)' uniform {options}") == 0
    assert all((tmp_path / f"figure-{n}.png").stat().st_size > 5000 for n in (1, 2, 3, 4))
    values, printed = parse_rewards(table.read_text()).values, capsys.readouterr().out
    first = StepwiseGain(normalise="step").assign(values, Decisions.like(values))[0, 0, 0]
    assert f"{float(first):+.3f}" in printed and "columns read as" not in printed
    table.write_text("0,1,2\n1,0,1\n")
    for more, named in (("", True), ("--decisions 1", False)):
        assert flowrl_(f"explain uniform {options} {more}") == 0
        assert ("3 columns read as 2 decisions" in capsys.readouterr().out) == named
    assert "does not exist" in error_of(f"explain uniform --rewards {tmp_path}/none.csv", capsys)
