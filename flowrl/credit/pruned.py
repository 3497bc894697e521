"""Pruned credit: some decisions of a tree are not trained on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.credit.depth_relative import DepthRelative
from flowrl.credit.units import branched_tree
from flowrl.errors import CreditError, require
from flowrl.options import checked_options
from flowrl.probes import Branching, Probe
from flowrl.protocols import CreditAssigner, PartsCreditAssigner, PromptCreditAssigner, SelectiveCredit, Stateful
from flowrl.tree import Tree
from flowrl.types import NodeTable, Schedule, StepTable, checked

Trained = Bool[Tensor, "prompt member step"]


@checked_options
@dataclass
class Pruned:
    """The advantages of `rule`, of which only some decisions enter the loss.

    The mask is applied after normalisation; normalising over the remaining decisions would be biased. Depth pruning leaves out
    the decisions at `steps`. Width pruning leaves out branches after the last step at which the tree branches. Of equal branches
    the earlier member's remains. An iteration is a call of `trained`; checkpoints contain the count.

    `trained` raises `CreditError` without a branched tree. Source: BranchGRPO (arXiv 2509.06040), code at 19fbb9f. Its depths are
    nodes, `steps` one less. Published: depths 15 to 18 of 20, moved every 30 iterations until depth 9, or width modes 1 ("best")
    and 2 ("extremes"), ratio 0.5.

    Args:
        rule: the rule for a branching probe; it may neither read components, use prompts nor select steps.
        steps: the steps whose decisions are left out.
        every: move `steps` one step earlier every so many iterations; None: never.
        stop: the smallest first step that this reaches.
        width: "best" keeps the fraction `ratio` of the branches of every state that branched there, at least one; "extremes"
            keeps this fraction of the prompt's branches, half best and half worst by the advantage of the step at which they
            parted; None: all.
        ratio: fraction of branches that remain, in (0, 1].
        until: the last iteration with pruning, counted from 0; None: no end.
        released: rank single decisions as BranchGRPO's code does. Under a depth rule all decisions of a branch have the same
            advantage, so "best", taken within each branch, keeps its earliest steps whatever its value, and "extremes", taken
            over all prompts, may cut a branch in two.

    Raises:
        ConfigError: a field is out of range, or `rule` is not allowed.
    """

    rule: CreditAssigner = field(default_factory=DepthRelative)
    steps: tuple[int, ...] = ()
    every: int | None = None
    stop: int = 0
    width: Literal["best", "extremes"] | None = None
    ratio: float = 0.5
    until: int | None = None
    released: bool = False
    iteration: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        special = PartsCreditAssigner | PromptCreditAssigner | SelectiveCredit
        plain = isinstance(self.rule, CreditAssigner) and not isinstance(self.rule, special)
        allowed = "a credit rule that reads no components, uses no prompts and selects no steps"
        require(plain, "Pruned.rule", self.rule, allowed)
        require(isinstance(self.rule.probe, Branching), "Pruned.rule.probe", self.rule.probe, "a branching probe: Branch or Comb")
        require(all(step >= 0 for step in self.steps), "Pruned.steps", self.steps, "0 or more each")
        require(self.every is None or self.every >= 1, "Pruned.every", self.every, "1 or more iterations, or None")
        require(0 <= self.stop <= min(self.steps, default=self.stop), "Pruned.stop", self.stop, "from 0 to the first of `steps`")
        require(0 < self.ratio <= 1, "Pruned.ratio", self.ratio, "in (0, 1]")
        require(self.until is None or self.until >= 0, "Pruned.until", self.until, "0 or more, or None")

    @property
    def probe(self) -> Probe:
        """What `rule` needs."""
        return self.rule.probe

    @property
    def shared_noise(self) -> bool:
        """Whether the members of a group start from the same noise under `rule`."""
        return bool(getattr(self.rule, "shared_noise", False))

    def assign(self, rewards: NodeTable, schedule: Schedule | None = None) -> StepTable:
        """All advantages of `rule`."""
        return self.rule.assign(rewards, schedule)

    @checked
    def trained(self, advantages: Float[Tensor, "prompt member step"], schedule: Schedule | None) -> Trained:
        """Which decisions of an iteration are trained on [prompt, member, step]; counts the iteration."""
        tree = branched_tree(torch.cat([advantages[..., :1], advantages], -1), schedule, "Pruned")
        now, self.iteration = self.iteration, self.iteration + 1
        trained = tree.decisions.expand(advantages.shape).clone()
        if self.until is not None and now > self.until:
            return trained
        trained[..., self._left_out(now, tree.steps)] = False
        last = _last_split(tree)
        if self.width is None or last is None:
            return trained
        trained[..., last + 1 :] &= (
            self._edges(advantages, trained, last) if self.released else self._branches(advantages, tree, last)
        )
        return trained

    def _left_out(self, iteration: int, steps: int) -> list[int]:
        """The steps that depth pruning leaves out."""
        moved = 0 if self.every is None else iteration // self.every
        moved = min(moved, min(self.steps, default=0) - self.stop)
        found = [step - moved for step in self.steps]
        if any(step >= steps for step in found):
            raise CreditError(f"Pruned.steps = {self.steps} on a schedule of {steps} steps")
        return found

    def _branches(self, advantages: Tensor, tree: Tree, last: int) -> Tensor:
        """Mask of the members whose branches remain, [prompt, member, 1]."""
        worth = advantages[..., last]
        kept = torch.zeros_like(worth, dtype=torch.bool)
        if self.width == "extremes":
            return _extremes(worth, self.ratio)[..., None]
        at = tree.paths[:, last]
        for unit in at.unique():
            members = (at == unit).nonzero().flatten()
            best = worth[:, members].argsort(dim=1, descending=True, stable=True)[:, : max(1, int(self.ratio * len(members)))]
            kept.scatter_(1, members[best], True)
        return kept[..., None]

    def _edges(self, advantages: Tensor, trained: Tensor, last: int) -> Tensor:
        """Mask of the single decisions after step `last` that remain under the released ranking, [prompt, member, step after]."""
        worth, candidates = advantages[..., last + 1 :], trained[..., last + 1 :]
        kept = torch.zeros_like(candidates)
        if self.width == "extremes":
            kept[candidates] = _extremes(worth[candidates][None], self.ratio)[0]
            return kept
        for place in torch.cartesian_prod(*map(torch.arange, worth.shape[:2])).tolist():
            branch, choice = worth[*place][candidates[*place]], candidates[*place].nonzero().flatten()
            order = branch.argsort(descending=True, stable=True)[: max(1, int(self.ratio * len(branch)))]
            kept[*place, choice[order]] = True
        return kept

    def state_dict(self) -> dict[str, Tensor]:
        """The number of iterations so far, and the memory of `rule`."""
        inner = self.rule.state_dict() if isinstance(self.rule, Stateful) else {}
        return {"iteration": torch.tensor(self.iteration), **{f"rule.{name}": value for name, value in inner.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.iteration = int(state.get("iteration", torch.tensor(0)))
        if isinstance(self.rule, Stateful):
            self.rule.load_state_dict({n.removeprefix("rule."): value for n, value in state.items() if n.startswith("rule.")})


def _last_split(tree: Tree) -> int | None:
    """The last step at which several states are drawn from one."""
    drawn = tree.parent[tree.drawn]
    split = (torch.bincount(drawn, minlength=tree.units) > 1).nonzero().flatten()
    return int(tree.node[split].max()) if len(split) else None


def _extremes(worth: Tensor, ratio: float) -> Tensor:
    """The int(ratio n) largest and smallest of every row's n entries, half each."""
    kept = int(ratio * worth.shape[1])
    order = worth.argsort(dim=1, descending=True, stable=True)
    best, worst = order[:, : (kept + 1) // 2], order[:, worth.shape[1] - kept // 2 :]
    return torch.zeros_like(worth, dtype=torch.bool).scatter_(1, torch.cat([best, worst], 1), True)
