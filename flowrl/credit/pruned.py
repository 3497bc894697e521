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

    The mask is applied after normalisation: normalising over the rest would be biased.

    Depth: the decisions of `steps` are left out; with `every`, all of them move one step earlier every so many iterations,
    until the first is `stop`. Width, after the last step at which the tree branches: `width` = "best" keeps the share `ratio`
    of the branches of every state that branched there (at least one), "extremes" that share of the prompt's branches, the
    best half and the worst half, by the advantage of the step at which they parted. Of equal branches the earlier member's
    stays. Nothing is left out after iteration `until`, counted from 0 (None: never ends). An iteration is a call of
    `trained`; checkpoints contain the count.

    `released`: width as in BranchGRPO's code, which ranks single decisions, not branches. All those of a branch have the same
    advantage under a depth rule, so "best", taken within each branch, keeps its earliest steps whatever its value, and
    "extremes", taken over all prompts together, may cut a branch in two.

    Source: BranchGRPO (arXiv 2509.06040), code at 19fbb9f: its depths are nodes, `steps` one less; published: depths 15 to 18
    of 20, moved every 30 iterations until depth 9, or width modes 1 ("best") and 2 ("extremes"), ratio 0.5. Raises
    `ConfigError` for a bad field or a rule that reads components or selects by itself, `CreditError` without a branched tree.
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
        """The advantages of `rule`, all of them."""
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
        """Which members' branches stay, [prompt, member, 1]."""
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
        """Which single decisions after step `last` stay, as the released code ranks them, [prompt, member, step after]."""
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
    """The last step at which more than one state is drawn from one."""
    drawn = tree.parent[tree.drawn]
    split = (torch.bincount(drawn, minlength=tree.units) > 1).nonzero().flatten()
    return int(tree.node[split].max()) if len(split) else None


def _extremes(worth: Tensor, ratio: float) -> Tensor:
    """The int(ratio n) of every row's n entries that are largest or smallest, half each."""
    kept = int(ratio * worth.shape[1])
    order = worth.argsort(dim=1, descending=True, stable=True)
    best, worst = order[:, : (kept + 1) // 2], order[:, worth.shape[1] - kept // 2 :]
    return torch.zeros_like(worth, dtype=torch.bool).scatter_(1, torch.cat([best, worst], 1), True)
