"""A probe of the laboratory: estimates of some members only, with a control variate."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from flowrl.core.options import Fraction, checked_options
from flowrl.probes import (
    Cost,
    Estimates,
    NetworkUse,
    ODEProbe,
    Probe,
    Probing,
    Scored,
    Shape,
    Substeps,
)

SOME, CONTROL = "some", "control"


@checked_options
@dataclass(frozen=True)
class SomeMembers(Probe):
    """Estimates of another probe for a fraction of the members of every group.

    The first m = round(p G) members of every group of G (at least one) have estimates; members are
    exchangeable, so no draw is needed. R_j is C_j + (G / m) M (R_j - C_j), with M = 1 for these
    members and 0 for the others. Its mean over the members has the expectation of R_j, so expected
    gains are exact, too. R_T is scored for all members. The variance grows by (G / m - 1) E (R_j -
    C_j)^2. Statistics that are linear in the gains, such as the group's mean, are unbiased. Z
    divides by a standard deviation that contains the noise of the choice: advantages are smaller by
    a factor common to the group, with a bias of order 1 / G. Clamps are not linear.

    Args:
        probe: the probe whose estimates are computed.
        fraction: p, in (0, 1].
        control: C, which needs no network evaluation. "tweedie": the reward of z_j - t_j v_j,
            decoded and scored for all members; "uniform": linear over the decisions from the mean
            of the group's R_T to the member's R_T.

    Raises:
        ConfigError: a field is out of range.
    """

    probe: ODEProbe = Substeps()
    fraction: Fraction = 0.5
    control: Literal["tweedie", "uniform"] = "tweedie"

    @property
    def network(self) -> NetworkUse:
        """That of the probe."""
        return self.probe.network

    def _count(self, members: int) -> int:
        """m."""
        return max(1, round(self.fraction * members))

    def estimate(self, run: Probing) -> Estimates:
        """The ends of the ODE of some members, and those of the control."""
        schedule, tree = run.trajectories.schedule, run.trajectories.tree
        grids = self.probe.grids(schedule, run.nodes)
        ends = run.solve(grids, self.probe.solver, self._count(tree.members))
        # a state that all members share has one estimate, for all of them
        shared = {node for node in grids if tree.counts[node] == 1}
        estimates = {node if node in shared else (SOME, node): ends[node] for node in grids}
        for node in grids if self.control == "tweedie" else ():
            x, velocity = run.start(node)
            estimates[CONTROL, node] = x - schedule.times[node] * velocity
        return estimates

    def rewards(self, scored: Scored) -> Mapping[int, Tensor]:
        """The values of all nodes to be estimated."""
        rewards = dict(scored.rewards)
        for place, node in enumerate(scored.nodes):
            if (SOME, node) in rewards:
                estimated, values = rewards[SOME, node], self._control(scored, place).clone()
                chosen = values[:, : estimated.shape[1]]
                chosen += values.shape[1] / estimated.shape[1] * (estimated - chosen)
                rewards[node] = values
        return self.probe.rewards(replace(scored, rewards=rewards))

    def _control(self, scored: Scored, place: int) -> Tensor:
        """C at the node `scored.nodes[place]` [prompt, member]."""
        if self.control == "tweedie":
            return scored.at((CONTROL, scored.nodes[place]))
        mean = scored.final.nanmean(dim=1, keepdim=True)
        return mean + place / len(scored.nodes) * (scored.final - mean)

    def cost(self, shape: Shape) -> Cost:
        """Solutions from all nodes advance together, in separate calls."""
        nodes, chosen = shape.nodes[:: self.probe.every], shape.groups * self._count(shape.members)
        every_member = shape.groups * shape.members
        counts = {node: shape.rows[node] for node in nodes}
        rows = {n: chosen if count == every_member else count for n, count in counts.items()}
        controls = sum(counts.values()) if self.control == "tweedie" else 0
        calls = self.probe.calls(shape.schedule, rows)
        return Cost(calls, sum(rows.values()) + controls)
