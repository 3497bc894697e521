"""A credit rule applied to one value table: gains, turning points and advantages side by side."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flowrl.core.errors import ConfigError, require
from flowrl.core.experience import LARGER, CreditTable, Decisions, Experience, ValueTable, needs_of
from flowrl.core.prompt import Prompt
from flowrl.core.protocols import CreditAssigner
from flowrl.credit import (
    TurningPoint,
    credit_of,
    gains,
    probed,
    reward_to_go,
    turning_points,
)
from flowrl.run.reading import read_text

EXAMPLE = """prompt,member,value_0,value_1,value_2,value_3,reward
example,a,.50,.40,.30,.45,.60
example,b,.50,.60,.70,.55,.40
example,c,.50,.55,.52,.65,.62
"""
"""The default table: one turn up, one turn down, one nearly steady rise."""
LABELS = ("prompt", "member")
NODE = re.compile(r"(node_?|r)\d+")
"""Names of columns in tables with one column per node, the form of version 0.1."""


@dataclass(frozen=True)
class RewardFile:
    """A value table with the names of its rows: `values` [prompt, member, decision+1]; `header`:
    the file names its columns.
    """

    values: ValueTable
    prompts: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    header: bool = True


def parse_rewards(text: str, origin: str = "rewards", decisions: Sequence[int] = ()) -> RewardFile:
    """A value table in CSV form: one row per trajectory; values before each decision, then the
    reward of the final image.

    With a header, the columns are value_0, value_1, ..., reward, in any order; the column "prompt"
    defines the groups and the column "member" names the rows. Without one, every column is a value,
    the last one the reward, and all rows are one group.

    Args:
        text: the table.
        origin: name of the table in errors.
        decisions: drawn steps of a table with one column per node (node_0, ...), from noise to the
            image: only the columns of the nodes at which they start and the last one are used.

    Returns:
        The table.

    Raises:
        ConfigError: a value is unreadable, groups differ in size, or the columns are others.
    """
    lines = csv.reader(io.StringIO(text), strict=True)
    try:
        rows = [
            (lines.line_num, cells)
            for line in lines
            if any(cells := [cell.strip() for cell in line])
        ]
    except csv.Error as error:
        raise ConfigError(f"{origin}, line {lines.line_num}: {error}") from error
    widest = max((len(cells) for _, cells in rows), default=0)
    require(widest <= 1000, f"{origin}: columns", widest, "1000 or fewer (decisions and reward)")
    if not rows:
        raise ConfigError(
            f"{origin}: no rows; write one line per trajectory: its values, then its reward"
        )
    names = [cell.lower() for cell in rows[0][1]]
    header = not all(map(_is_number, names))
    chosen = _columns(names, header, f"{origin}, line {rows[0][0]}", decisions)
    groups: dict[str, list[tuple[str, list[float]]]] = {}
    for number, row in rows[header:]:
        if len(row) != len(names):
            raise ConfigError(
                f"{origin}, line {number}: {len(row)} columns, but the first line has {len(names)}"
            )
        labels = {name: cell for name, cell in zip(names, row, strict=True) if name in LABELS}
        cells = [row[column] for column in chosen]
        bad = next((cell for cell in cells if not _is_number(cell)), None)
        if bad is not None:
            raise ConfigError(f"{origin}, line {number}: {bad!r:.60} is not a finite number")
        members = groups.setdefault(labels.get("prompt", "all rows"), [])
        member = labels.get("member", str(len(members)))
        if any(member == other for other, _ in members):
            raise ConfigError(
                f"{origin}, line {number}: the member {member!r:.60} of this prompt appears twice"
            )
        members.append((member, [float(cell) for cell in cells]))
    if not groups:
        raise ConfigError(f"{origin}: a header but no rows")
    sizes = {prompt: len(members) for prompt, members in groups.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"{origin}: all prompts need the same number of members; found {sizes!s:.200}"
        )
    table = torch.tensor([[values for _, values in members] for members in groups.values()])
    if table.shape[1] < 2 or table.shape[2] < 2:
        shape = f"{table.shape[1]} members and {table.shape[2]} columns"
        raise ConfigError(f"{origin}: {shape}; 2 or more of each are needed")
    members = tuple(tuple(name for name, _ in rows) for rows in groups.values())
    return RewardFile(table, tuple(groups), members, header)


def _columns(names: list[str], header: bool, where: str, decisions: Sequence[int]) -> list[int]:
    """The indices of the columns of the value table, in order."""
    twice = next((name for name in LABELS if names.count(name) > 1), None)
    if twice:
        raise ConfigError(f"{where}: the column {twice} appears twice")
    others = [name for name in names if name not in LABELS]
    wanted = [f"value_{k}" for k in range(len(others) - 1)] + ["reward"]
    by_node = not header or all(map(NODE.fullmatch, others))
    if decisions and by_node:
        nodes = [column for column, name in enumerate(names) if name not in LABELS]
        steps = len(nodes) - 1
        fits = (
            list(decisions) == sorted(set(decisions)) and 0 <= decisions[0] <= decisions[-1] < steps
        )
        require(fits, "decisions", tuple(decisions), f"ascending steps from 0 to {steps - 1}")
        return [nodes[step] for step in (*decisions, steps)]
    if not header:
        return list(range(len(names)))
    if sorted(others) == sorted(wanted):
        allowed = "left out: the columns are decisions already"
        require(not decisions, "decisions", tuple(decisions), allowed)
        return [names.index(name) for name in wanted]
    columns = f"{where}: the columns {', '.join(others)!s:.120}"
    if by_node:
        raise ConfigError(
            f"{columns} are nodes, but a value table has one column per decision: name the"
            " stochastic steps with --decisions"
        )
    raise ConfigError(f"{columns} are not allowed; allowed: {', '.join(wanted)!s:.120}")


def read_rewards(path: Path, decisions: Sequence[int] = ()) -> RewardFile:
    """`parse_rewards` of a file in UTF-8. Raises `ConfigError` if it does not exist or is no
    text.
    """
    if not path.is_file():
        raise ConfigError(f"rewards: the file {path} does not exist")
    return parse_rewards(read_text(path), str(path), decisions)


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= torch.finfo(torch.float32).max
    except ValueError:
        return False


@dataclass(frozen=True)
class Explanation:
    """A rule applied to one table. All [prompt, member, decision] but `values`; `str()` and
    notebooks show it as tables.

    `gains` d_k = V_{k+1} - V_k; `to_go` R - V_k; `plain` and `consistent`: TP-GRPO's turning points
    under either rule; `selected`: the decisions that get the long-term reward (None for rules
    without turning points, whose tables mark none).
    """

    rule: str
    names: RewardFile
    values: ValueTable
    gains: CreditTable
    to_go: CreditTable
    plain: Tensor
    consistent: Tensor
    selected: Tensor | None
    advantages: CreditTable

    def __str__(self) -> str:
        buffer = io.StringIO()
        console = Console(
            file=buffer,
            width=max(80, 14 + 9 * self.values.shape[-1]),
            force_jupyter=False,
            color_system=None,
        )
        for prompt in range(len(self.values)):
            console.print(self._table(prompt))
        if self.selected is not None:
            legend = "turning points: [x] credited with R - V   (x) consistent   ~ plain"
            console.print(legend, markup=False)
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"

    def _table(self, prompt: int) -> Table:
        count = self.gains.shape[-1]
        table = Table(
            title=f"{self.names.prompts[prompt]}: {self.rule}",
            title_justify="left",
            box=None,
            pad_edge=False,
        )
        table.add_column("")
        table.add_column("")
        for name in (*range(count), "R"):
            table.add_column(str(name), justify="right")
        for member, name in enumerate(self.names.members[prompt]):
            here = (prompt, member)
            table.add_row(name, "value V", *(f"{v:.3f}" for v in self.values[here].tolist()))
            marks = [self._mark(prompt, member, k) for k in range(count)]
            cells = [
                f"{mark}{gain:+.3f}"
                for mark, gain in zip(marks, self.gains[here].tolist(), strict=True)
            ]
            table.add_row("", "gain", *cells)
            table.add_row("", "R - V", *(f"{v:+.3f}" for v in self.to_go[here].tolist()))
            table.add_row(
                "",
                "advantage",
                *(f"{v:+.3f}" for v in self.advantages[here].tolist()),
                style="bold",
            )
            table.add_row()
        return table

    def _mark(self, prompt: int, member: int, decision: int) -> str:
        if self.selected is None:
            return ""
        here = (prompt, member, decision)
        if bool(self.selected[here]):
            return "\\[x]"
        return "(x)" if bool(self.consistent[here]) else "~" if bool(self.plain[here]) else ""


def explain(
    rule: CreditAssigner,
    values: ValueTable | RewardFile | None = None,
    decisions: Decisions | None = None,
    name: str = "",
) -> Explanation:
    """`rule` applied to a value table [prompt, member, decision+1] (default: an example of three
    trajectories).

    Rules that score only the finished image get the last column only, although the whole table is
    shown.

    Args:
        rule: the credit rule.
        values: the table.
        decisions: its axis; None for `Decisions.like`.
        name: title of the tables; empty for the rule's `repr`.

    Returns:
        The explanation.

    Raises:
        ConfigError: the rule needs states, log-probabilities or embeddings, which no table has.
        CreditError: the rule refuses the table.
    """
    kind = type(rule).__name__
    more = ", ".join(set(needs_of(rule).fields) & set(LARGER))
    require(not more, "rule", name or kind, f"a rule of the value table: {kind} needs {more}")
    if values is None:
        values = parse_rewards(EXAMPLE)
    if isinstance(values, Tensor):
        prompts, members, _ = values.shape
        numbered = tuple(tuple(str(m) for m in range(members)) for _ in range(prompts))
        values = RewardFile(values, tuple(f"prompt {p}" for p in range(prompts)), numbered)
    table = values.values
    valid = torch.ones(table.shape[:2], dtype=torch.bool)
    seen, axis = probed(table, rule.probe), decisions or Decisions.like(table)
    record = Experience([Prompt(text) for text in values.prompts], seen, axis, valid)
    return Explanation(
        name or repr(rule),
        values,
        table,
        gains(table),
        reward_to_go(table),
        turning_points(table, consistent=False),
        turning_points(table, consistent=True),
        rule.selected(table) if isinstance(rule, TurningPoint) else None,
        credit_of(rule, record).advantages,
    )
