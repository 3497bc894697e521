"""A credit rule applied to one reward table: gains, turning points and advantages side by side."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flowrl.credit import TurningPoint, check_advantages, gains, probed, reward_to_go, turning_points
from flowrl.errors import ConfigError
from flowrl.protocols import CreditAssigner
from flowrl.reading import read_text
from flowrl.types import Schedule

EXAMPLE = """prompt,member,R0,R1,R2,R3,R4
example,a,.50,.40,.30,.45,.60
example,b,.50,.60,.70,.55,.40
example,c,.50,.55,.52,.65,.62
"""
"""The default table: one turn up, one turn down, one nearly steady rise."""


@dataclass(frozen=True)
class RewardFile:
    """A reward table with the names of its rows: rewards [prompt, member, node]."""

    rewards: Tensor
    prompts: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]


def parse_rewards(text: str, origin: str = "rewards") -> RewardFile:
    """A table in CSV form: one row per trajectory, one column per node, noise first and the finished image last.

    With a header, the column "prompt" defines the groups, the column "member" names the rows, and every other column is a node;
    without one, every column is a node and all rows are one group. Raises `ConfigError` with the line number of an unreadable
    value, or if groups differ in size.
    """
    lines = csv.reader(io.StringIO(text), strict=True)
    try:
        rows = [(lines.line_num, cells) for line in lines if any(cells := [cell.strip() for cell in line])]
    except csv.Error as error:
        raise ConfigError(f"{origin}, line {lines.line_num}: {error}") from error
    if not rows:
        raise ConfigError(f"{origin}: no rows; write one line per trajectory, one number per node")
    names = [cell.lower() for cell in rows[0][1]]
    header = not all(map(_is_number, names))
    twice = next((name for name in ("prompt", "member") if names.count(name) > 1), None)
    if twice:
        raise ConfigError(f"{origin}, line {rows[0][0]}: the column {twice} is there twice")
    groups: dict[str, list[tuple[str, list[float]]]] = {}
    for number, row in rows[header:]:
        if len(row) != len(names):
            raise ConfigError(f"{origin}, line {number}: {len(row)} columns, but the first line has {len(names)}")
        labels = {name: cell for name, cell in zip(names, row, strict=True) if name in ("prompt", "member")}
        values = [cell for name, cell in zip(names, row, strict=True) if name not in labels]
        bad = next((cell for cell in values if not _is_number(cell)), None)
        if bad is not None:
            raise ConfigError(f"{origin}, line {number}: {bad!r:.60} is not a finite number")
        members = groups.setdefault(labels.get("prompt", "all rows"), [])
        member = labels.get("member", str(len(members)))
        if any(member == other for other, _ in members):
            raise ConfigError(f"{origin}, line {number}: the member {member!r:.60} of this prompt is there twice")
        members.append((member, [float(cell) for cell in values]))
    if not groups:
        raise ConfigError(f"{origin}: a header but no rows")
    sizes = {prompt: len(members) for prompt, members in groups.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"{origin}: every prompt needs as many members; found {sizes!s:.200}")
    table = torch.tensor([[values for _, values in members] for members in groups.values()])
    if table.shape[1] < 2 or table.shape[2] < 2:
        raise ConfigError(f"{origin}: {table.shape[1]} members and {table.shape[2]} nodes; 2 or more of each are needed")
    return RewardFile(table, tuple(groups), tuple(tuple(name for name, _ in members) for members in groups.values()))


def read_rewards(path: Path) -> RewardFile:
    """`parse_rewards` of a file in UTF-8. Raises `ConfigError` if it does not exist or is no text."""
    if not path.is_file():
        raise ConfigError(f"rewards: the file {path} does not exist")
    return parse_rewards(read_text(path), str(path))


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= torch.finfo(torch.float32).max
    except ValueError:
        return False


@dataclass(frozen=True)
class Explanation:
    """A rule applied to one table. All [prompt, member, step] but `rewards`; `str()` and notebooks show it as tables.

    `gains` d_i = R_{i+1} - R_i; `to_go` R_T - R_i; `plain` and `consistent`: TP-GRPO's turning points under either rule;
    `selected`: the steps that get the long-term reward (None for rules without turning points, whose tables mark none).
    """

    rule: str
    names: RewardFile
    rewards: Tensor
    gains: Tensor
    to_go: Tensor
    plain: Tensor
    consistent: Tensor
    selected: Tensor | None
    advantages: Tensor

    def __str__(self) -> str:
        buffer = io.StringIO()
        console = Console(file=buffer, width=max(80, 14 + 9 * self.rewards.shape[-1]), force_jupyter=False, color_system=None)
        for prompt in range(len(self.rewards)):
            console.print(self._table(prompt))
        if self.selected is not None:
            legend = "turning points: [x] credited with R_T - R_i   (x) consistent   ~ plain"
            console.print(legend, markup=False)
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"

    def _table(self, prompt: int) -> Table:
        nodes = self.rewards.shape[-1]
        table = Table(title=f"{self.names.prompts[prompt]}: {self.rule}", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        table.add_column("")
        for node in range(nodes):
            table.add_column(str(node), justify="right")
        for member, name in enumerate(self.names.members[prompt]):
            here = (prompt, member)
            table.add_row(name, "reward R", *(f"{v:.3f}" for v in self.rewards[here].tolist()))
            marks = [self._mark(prompt, member, step) for step in range(nodes - 1)]
            cells = [f"{mark}{gain:+.3f}" for mark, gain in zip(marks, self.gains[here].tolist(), strict=True)]
            table.add_row("", "gain of step", *cells)
            table.add_row("", "R_T - R_i", *(f"{v:+.3f}" for v in self.to_go[here].tolist()))
            table.add_row("", "advantage", *(f"{v:+.3f}" for v in self.advantages[here].tolist()), style="bold")
            table.add_row()
        return table

    def _mark(self, prompt: int, member: int, step: int) -> str:
        if self.selected is None:
            return ""
        here = (prompt, member, step)
        if bool(self.selected[here]):
            return "\\[x]"
        return "(x)" if bool(self.consistent[here]) else "~" if bool(self.plain[here]) else ""


def explain(
    rule: CreditAssigner, rewards: Tensor | RewardFile | None = None, schedule: Schedule | None = None, name: str = ""
) -> Explanation:
    """`rule` applied to a table [prompt, member, node] (default: an example of three trajectories).

    Rules that score only the finished image get the last node only, although the whole table is shown. Raises `CreditError` if
    the rule refuses the table.
    """
    if rewards is None:
        rewards = parse_rewards(EXAMPLE)
    if isinstance(rewards, Tensor):
        prompts, members, _ = rewards.shape
        numbered = tuple(tuple(str(m) for m in range(members)) for _ in range(prompts))
        rewards = RewardFile(rewards, tuple(f"prompt {p}" for p in range(prompts)), numbered)
    table = rewards.rewards
    advantages = check_advantages(rule.assign(probed(table, rule.probe), schedule), table, type(rule).__name__)
    return Explanation(
        name or repr(rule),
        rewards,
        table,
        gains(table),
        reward_to_go(table),
        turning_points(table, consistent=False),
        turning_points(table, consistent=True),
        rule.selected(table) if isinstance(rule, TurningPoint) else None,
        advantages,
    )
