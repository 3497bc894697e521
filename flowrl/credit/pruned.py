"""Pruned credit: some decisions of a tree are not trained on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.core.errors import CreditError, require
from flowrl.core.experience import Credit, CreditTable, Decisions, Experience, ValueTable
from flowrl.core.options import checked_options
from flowrl.core.protocols import CreditAssigner, CreditRule, ExperienceCredit, Stateful
from flowrl.core.tree import Tree
from flowrl.credit.depth_relative import DepthRelative
from flowrl.credit.table import credit_of, read_columns
from flowrl.credit.units import branched_tree
from flowrl.probes import Branching, Probe


@checked_options
@dataclass
class Pruned:
    """The credit of `rule`, of which only some decisions enter the loss: the others have weight 0.

    The weights apply after normalisation; normalising over the remaining decisions would be biased.
    Depth pruning leaves out the decisions at `steps` of the schedule. Width pruning leaves out
    branches after the last step at which the tree branches, ranked among the members in the mask.
    Of equal branches the earlier member's remains. An iteration is a call of `credit`; checkpoints
    contain the count.

    `credit` raises `CreditError` without a branched tree. Source: BranchGRPO (arXiv 2509.06040),
    code at 19fbb9f. Its depths are nodes, `steps` one less. Published: depths 15 to 18 of 20, moved
    every 30 iterations until depth 9, or width modes 1 ("best") and 2 ("extremes"), ratio 0.5.

    Args:
        rule: the rule for a branching probe.
        steps: the steps whose decisions are left out.
        every: move `steps` one step earlier every so many iterations; None: never.
        stop: the smallest first step that this reaches.
        width: "best" keeps the fraction `ratio` of the branches of every state that branched there,
            at least one; "extremes" keeps this fraction of the prompt's branches, half best and
            half worst by the advantage of the decision at which they parted; None: all.
        ratio: fraction of branches that remain, in (0, 1].
        until: the last iteration with pruning, counted from 0; None: no end.
        released: rank single decisions as BranchGRPO's code does. Under a depth rule all decisions
            of a branch have the same advantage, so "best", taken within each branch, keeps its
            earliest decisions whatever its value, and "extremes", taken over all prompts, may cut a
            branch in two.

    Raises:
        ConfigError: a field is out of range, or `rule` is not allowed.
    """

    rule: CreditRule = field(default_factory=DepthRelative)
    steps: tuple[int, ...] = ()
    every: int | None = None
    stop: int = 0
    width: Literal["best", "extremes"] | None = None
    ratio: float = 0.5
    until: int | None = None
    released: bool = False
    iteration: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        require(
            isinstance(self.rule, CreditAssigner | ExperienceCredit),
            "Pruned.rule",
            self.rule,
            "a credit rule",
        )
        branching = isinstance(self.rule.probe, Branching)
        require(
            branching, "Pruned.rule.probe", self.rule.probe, "a branching probe: Branch or Comb"
        )
        require(all(step >= 0 for step in self.steps), "Pruned.steps", self.steps, "0 or more each")
        require(
            self.every is None or self.every >= 1,
            "Pruned.every",
            self.every,
            "1 or more iterations, or None",
        )
        require(
            0 <= self.stop <= min(self.steps, default=self.stop),
            "Pruned.stop",
            self.stop,
            "from 0 to the first of `steps`",
        )
        require(0 < self.ratio <= 1, "Pruned.ratio", self.ratio, "in (0, 1]")
        require(
            self.until is None or self.until >= 0, "Pruned.until", self.until, "0 or more, or None"
        )

    @property
    def probe(self) -> Probe:
        """What `rule` needs."""
        return self.rule.probe

    @property
    def shared_noise(self) -> bool:
        """Whether the members of a group start from the same noise under `rule`."""
        return bool(getattr(self.rule, "shared_noise", False))

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """The fields of the record that `rule` needs."""
        return getattr(self.rule, "reads_fields", ())

    def reads(self, trained: Tensor) -> Tensor:
        """The columns that `rule` reads."""
        return read_columns(self.rule, trained)

    def assign(self, values: ValueTable, decisions: Decisions) -> CreditTable:
        """All advantages of `rule`. Raises `CreditError` if it has only `credit`."""
        if not isinstance(self.rule, CreditAssigner):
            name = type(self.rule).__name__
            raise CreditError(f"{name} needs the record of an iteration: call credit(experience)")
        return self.rule.assign(values, decisions)

    def credit(self, experience: Experience) -> Credit:
        """The credit of `rule`, with weight 0 for pruned decisions; counts the iteration."""
        found = credit_of(self.rule, experience)
        assert found.weights is not None
        return Credit(
            found.advantages, found.weights * self._kept(found.advantages, experience.decisions)
        )

    def _kept(
        self, advantages: CreditTable, decisions: Decisions
    ) -> Bool[Tensor, "prompt member decision"]:
        """Which decisions of an iteration are trained on; counts the iteration."""
        tree = branched_tree(decisions, "Pruned")
        now, self.iteration = self.iteration, self.iteration + 1
        kept = decisions.mask.clone()
        if self.until is not None and now > self.until:
            return kept
        kept &= ~torch.isin(decisions.step, torch.tensor(self._left_out(now, tree.steps)))
        split = _last_split(tree)
        if self.width is None or split is None:
            return kept
        last = tree.drawn_steps.index(split)
        if self.released:
            kept[..., last + 1 :] = self._decisions(
                advantages[..., last + 1 :], kept[..., last + 1 :]
            )
        else:
            worth = advantages[..., last].masked_fill(~decisions.mask.any(-1), -torch.inf)
            kept[..., last + 1 :] &= self._branches(worth, tree.paths[:, split])[..., None]
        return kept

    def _left_out(self, iteration: int, steps: int) -> list[int]:
        """The steps that depth pruning leaves out."""
        moved = 0 if self.every is None else iteration // self.every
        moved = min(moved, min(self.steps, default=0) - self.stop)
        found = [step - moved for step in self.steps]
        if any(step >= steps for step in found):
            raise CreditError(f"Pruned.steps = {self.steps} on a schedule of {steps} steps")
        return found

    def _branches(self, worth: Tensor, parents: Tensor) -> Tensor:
        """Mask of the members whose branches remain [prompt, member]; those with -inf do not count.

        `parents`: the state from which each member's branch started [member]."""
        if self.width == "extremes":
            return torch.stack([_extremes(row, self.ratio) for row in worth])
        kept = torch.zeros_like(worth, dtype=torch.bool)
        for unit in parents.unique():
            members = (parents == unit).nonzero().flatten()
            ranks = worth[:, members].argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            count = (worth[:, members] > -torch.inf).sum(1, keepdim=True)
            kept[:, members] = ranks < (self.ratio * count.double()).long().clamp(min=1)
        return kept

    def _decisions(self, worth: Tensor, candidates: Tensor) -> Tensor:
        """Mask of the single decisions that remain under the released ranking [prompt, member,
        decision].
        """
        kept = torch.zeros_like(candidates)
        if self.width == "extremes":
            kept[candidates] = _extremes(worth[candidates], self.ratio)
            return kept
        for place in torch.cartesian_prod(*map(torch.arange, worth.shape[:2])).tolist():
            branch, choice = (
                worth[*place][candidates[*place]],
                candidates[*place].nonzero().flatten(),
            )
            order = branch.argsort(descending=True, stable=True)[
                : max(1, int(self.ratio * len(branch)))
            ]
            kept[*place, choice[order]] = True
        return kept

    def state_dict(self) -> dict[str, Tensor]:
        """The number of iterations so far, and the memory of `rule`."""
        inner = self.rule.state_dict() if isinstance(self.rule, Stateful) else {}
        return {
            "iteration": torch.tensor(self.iteration),
            **{f"rule.{name}": value for name, value in inner.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.iteration = int(state.get("iteration", torch.tensor(0)))
        if isinstance(self.rule, Stateful):
            self.rule.load_state_dict(
                {
                    n.removeprefix("rule."): value
                    for n, value in state.items()
                    if n.startswith("rule.")
                }
            )


def _last_split(tree: Tree) -> int | None:
    """The last step at which several states are drawn from one."""
    drawn = tree.parent[tree.drawn]
    split = (torch.bincount(drawn, minlength=tree.units) > 1).nonzero().flatten()
    return int(tree.node[split].max()) if len(split) else None


def _extremes(worth: Tensor, ratio: float) -> Tensor:
    """The int(ratio n) largest and smallest of the n entries above -inf, half each."""
    number = int((worth > -torch.inf).sum())
    kept = int(ratio * number)
    order = worth.argsort(descending=True, stable=True)[:number]
    chosen = torch.cat([order[: (kept + 1) // 2], order[number - kept // 2 :]])
    return torch.zeros_like(worth, dtype=torch.bool).scatter_(0, chosen, True)
