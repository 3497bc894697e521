"""The exact value of a state in two dimensions, under the current policy: dynamic programming on a
grid.

V(x) is the expected final reward if the stochastic sampler continues from x. Between two stochastic
steps the sampler is a deterministic map, which is followed exactly from every grid point; the last
stretch ends in images, which the reward scores. A stochastic step i draws mean_i(x) + s_i z, so

    V_i(x) = U_i(mean_i(x)),    U_i(m) = E V_{i+1}(m + s_i z).

V_{i+1} is known on the grid. U_i is a convolution with a Gaussian, computed axis by axis with the
exact expectation of the interpolant, without a quadrature over z. U_i is smooth, and is
interpolated at mean_i of the grid points and of the states to be valued. Nothing is sampled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.bench.continuations import MAX_BATCH, TrueAdvantages, walk_of
from flowrl.bench.gradients import Setting
from flowrl.core.errors import ConfigError, require
from flowrl.core.options import Positive, checked_options
from flowrl.core.probe import Call, Cost, Estimates, Probe, Probing, Scored, Shape
from flowrl.core.protocols import MultistepSolver, RewardModel
from flowrl.rollout import ProbeRun, Rollout, Walk, score

Tables = Float[Tensor, "prompt point point"]
Places = Float[Tensor, "prompt row 2"]


@checked_options
@dataclass(frozen=True)
class ValueGrid:
    """The square [-reach, reach]^2 with `points` x `points` points; values outside are those of its
    edge.

    Args:
        points: points per axis, odd, so that every other point is a coarser grid.
        reach: half of the square's side.

    Raises:
        ConfigError: a field is out of range.
    """

    points: int = 57
    reach: Positive = 5.0

    def __post_init__(self) -> None:
        fits = self.points >= 9 and self.points % 2 == 1
        require(fits, "ValueGrid.points", self.points, "an odd number, 9 or more")

    @cached_property
    def spacing(self) -> float:
        """Distance of neighbouring points."""
        return 2 * self.reach / (self.points - 1)

    @cached_property
    def axis(self) -> Float[Tensor, " point"]:
        """Coordinates of the points."""
        return torch.linspace(-self.reach, self.reach, self.points, dtype=torch.float64)

    @property
    def places(self) -> Float[Tensor, "row 2"]:
        """All points."""
        return torch.cartesian_prod(self.axis, self.axis)

    @property
    def coarse(self) -> "ValueGrid":
        """Every other point."""
        return replace(self, points=(self.points + 1) // 2)

    def taps(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The points that enter the interpolation at coordinates `places`, and their weights,
        [..., tap] (cubic convolution of order 3, Keys 1981).
        """
        last = self.points - 1
        units = ((places.double() + self.reach) / self.spacing).clamp(0, last)
        base = units.floor().clamp(max=last - 1)
        f = units - base
        weights = [
            f * (f * (1 - f / 2) - 0.5),
            f * f * (1.5 * f - 2.5) + 1,
            f * (f * (2 - 1.5 * f) + 0.5),
            f * f * (f - 1) / 2,
        ]
        index = base.long()[..., None] + torch.tensor((-1, 0, 1, 2))
        return index.clamp(0, last), torch.stack(weights, -1)

    def at(self, tables: Tables, places: Places) -> Float[Tensor, "prompt row"]:
        """The interpolants of `tables` at `places`."""
        (rows, row_weights), (columns, column_weights) = (
            self.taps(places[..., axis]) for axis in (0, 1)
        )
        index = rows[..., :, None] * self.points + columns[..., None, :]
        weights = row_weights[..., :, None] * column_weights[..., None, :]
        values = tables.flatten(1).gather(1, index.flatten(1)).view(index.shape)
        return (values * weights).flatten(2).sum(-1)

    def smoothed(self, tables: Tables, std: float) -> Tables:
        """E table(x + std z) at every point x, z standard normal: exact for the interpolant."""
        matrix = _smoothing(self, std)
        return matrix @ tables @ matrix.T


@lru_cache(64)
def _smoothing(grid: ValueGrid, std: float) -> Float[Tensor, "point point"]:
    """Weights of a table's values [column] in E table(x + std z) at every point x [row], for one
    axis.
    """
    z = torch.linspace(-8.0, 8.0, 1601, dtype=torch.float64)
    density = torch.exp(-z.square() / 2)
    index, weights = grid.taps(grid.axis[:, None] + std * z)
    weights = weights * (density / density.sum())[:, None]
    matrix = torch.zeros(grid.points, grid.points, dtype=torch.float64)
    return matrix.scatter_add_(1, index.flatten(1), weights.flatten(1))


@dataclass(frozen=True)
class Backup:
    """The sampler on the grid: all that dynamic programming needs except the rewards.

    Args:
        grid: the grid.
        stds: standard deviation of each stochastic step, by step in order.
        landings: mean of stochastic step i from the grid points right after the stochastic step
            before, by step; not for the first step.
        ends: final latents from the grid points after the last stochastic step [row, *latent],
            prompt-major.
    """

    grid: ValueGrid
    stds: Mapping[int, float]
    landings: Mapping[int, Places]
    ends: Tensor

    @staticmethod
    def of(walk: Walk, first: int, grid: ValueGrid) -> "Backup":
        """The sampler's stochastic steps from step `first` on.

        The network is evaluated on the grid at every step after `first`. Raises `ConfigError` for
        latents that do not have two elements, and for a sampler without noise at or after `first`.
        """
        shape, count = tuple(walk.policy.latent_shape), walk.groups.prompts
        allowed = "two elements: exact values are computed in the 2-D world only"
        require(torch.Size(shape).numel() == 2, "latent shape", shape, allowed)
        drawn = [i for i, noisy in enumerate(walk.stochastic) if noisy and i >= first]
        if not drawn:
            raise ConfigError(
                "exact values need a sampler that draws its steps one by one, from the last state"
                " alone; multistep solvers (dpm++, unipc, sa) and the ODE have none"
            )
        landings = dict[int, Tensor]()
        points = grid.places.float().to(walk.policy.device).view(-1, *shape)
        points = points.repeat(count, *(1 for _ in shape))
        x = points
        for step in range(drawn[0] + 1, walk.schedule.steps):
            if step - 1 in drawn:
                x = points
            x = _mean(walk, x, step)
            if step in drawn:
                landings[step] = x.reshape(count, -1, 2).double().cpu()
        ends = points if drawn[-1] == walk.schedule.steps - 1 else x
        return Backup(grid, {i: float(walk.stds[i]) for i in drawn}, landings, ends)

    @property
    def coarse(self) -> "Backup":
        """The backup on every other grid point, without `ends`."""
        landings = {step: _halved(places) for step, places in self.landings.items()}
        return Backup(self.grid.coarse, self.stds, landings, self.ends[:0])

    def tables(self, rewards: Float[Tensor, "prompt row"]) -> dict[int, Tables]:
        """U_i by stochastic step, from the rewards of `ends`."""
        grid, tables = self.grid, dict[int, Tensor]()
        values = _square(rewards.double())
        for step in reversed([*self.stds]):
            tables[step] = grid.smoothed(values, self.stds[step])
            if step in self.landings:
                values = _square(grid.at(tables[step], self.landings[step]))
        return tables

    def values(
        self, rewards: Float[Tensor, "prompt row"], means: Mapping[int, Places]
    ) -> dict[int, Float[Tensor, "prompt row"]]:
        """V of states from which the sampler draws `means` + std z, by step."""
        tables = self.tables(rewards)
        return {step: self.grid.at(tables[step], places) for step, places in means.items()}

    def errors(
        self, rewards: Float[Tensor, "prompt row"], means: Mapping[int, Places]
    ) -> dict[int, Float[Tensor, "prompt row"]]:
        """An estimate of the grid's error of `values`: a third of the difference from those on
        every other point, assuming convergence of order 2.
        """
        fine, coarse_backup = self.values(rewards, means), self.coarse
        coarse = coarse_backup.values(_halved(rewards[..., None])[..., 0], means)
        return {step: (fine[step] - coarse[step]) / 3 for step in fine}


def _square(rows: Float[Tensor, "prompt row *n"]) -> Float[Tensor, "prompt point point *n"]:
    """Rows of all points as tables."""
    return rows.unflatten(1, (math.isqrt(rows.shape[1]), -1))


def _halved(rows: Float[Tensor, "prompt row n"]) -> Float[Tensor, "prompt row n"]:
    """The rows of every other point."""
    return _square(rows)[:, ::2, ::2].flatten(1, 2)


def _mean(walk: Walk, x: Tensor, step: int) -> Tensor:
    """The mean of the sampler's step from the latents x, the same number for every prompt."""
    timestep = walk.schedule.network_timesteps[step].expand(len(x))
    return walk.transition(x, walk.velocity(x, timestep, walk.conditions(x)), step).mean


class _Name(str):
    """The name of a probe's estimates, which carries what `rewards` needs besides their scores."""

    backup: Backup
    means: Mapping[int, Places]


@checked_options
@dataclass(frozen=True)
class Exact(Probe):
    """R_j is the exact value of the state at node j in the 2-D world: an oracle, for comparison
    only.

    The expected final reward under the current policy and its stochastic sampler, on a grid
    (`flowrl.bench.exact`). The network evaluations on the grid are counted. They have no
    counterpart in more than two dimensions, so an arm with this probe is never part of a comparison
    at equal cost.

    For every sampler whose steps are drawn from the last state alone, in any window.
    `estimate` raises `ConfigError` for multistep solvers, and for latents of other than two
    elements.

    Args:
        points: points of the grid per axis, odd.
        reach: half of the side of the grid's square.

    Raises:
        ConfigError: a field is out of range.
    """

    points: int = 57
    reach: Positive = 5.0

    def __post_init__(self) -> None:
        _ = self.grid

    @property
    def grid(self) -> ValueGrid:
        """The grid."""
        return ValueGrid(self.points, self.reach)

    def estimate(self, run: Probing) -> Estimates:
        """The final latents of the grid points after the last stochastic step, as many under each
        key as a group has members.
        """
        assert isinstance(run, ProbeRun), "the probe needs the sampler"
        walk, path = run.walk, run.trajectories
        if not len(run.nodes) and walk.stds.any():
            return {}
        backup = Backup.of(_fast(walk), min(run.nodes, default=0), self.grid)
        means = {node: walk.transition(*run.start(node), node).mean for node in run.nodes}
        ends = backup.ends.unflatten(0, (run.groups, -1)).split(path.tree.members, 1)
        estimates = dict[tuple[str, int], Tensor]()
        for number, rows in enumerate(ends):
            name = _Name(f"{number:06}")
            name.backup = backup
            name.means = {i: x.reshape(run.groups, -1, 2).double().cpu() for i, x in means.items()}
            estimates[name, run.nodes[0]] = rows.flatten(0, 1)
        return estimates

    def rewards(self, scored: Scored) -> Mapping[int, Tensor]:
        """The values of all nodes to be estimated. Raises `ConfigError` if groups that were rolled
        out together are scored apart, as several processes may do.
        """
        if not scored.rewards:
            return {}
        name = next(name for name, _ in scored.rewards)  # pyright: ignore[reportGeneralTypeIssues]
        assert isinstance(name, _Name)
        rewards = torch.cat([*scored.rewards.values()], 1)
        prompts = len(next(iter(name.means.values())))
        require(len(rewards) == prompts, "groups of exact values", len(rewards), f"{prompts}")
        values = name.backup.values(rewards, name.means)
        return {
            step: table.to(scored.final).expand_as(scored.final) for step, table in values.items()
        }

    def cost(self, shape: Shape) -> Cost:
        """The grid at every step after the first node."""
        rows = shape.groups * self.points**2
        steps = range(min(shape.nodes, default=shape.schedule.steps) + 1, shape.schedule.steps)
        return Cost([Call(rows) for _ in steps], rows if len(shape.nodes) else 0)


def _fast(walk: Walk) -> Walk:
    """The walk with as many latents per call as main memory easily holds."""
    return replace(walk, max_batch=max(walk.max_batch, MAX_BATCH))


def exact_advantages(
    setting: Setting,
    trajectories: Rollout,
    rewards: Sequence[RewardModel] = (),
    grid: ValueGrid = ValueGrid(),
) -> list[TrueAdvantages]:
    """A* of every decision of `trajectories` under each of `rewards` (default: the setting's),
    exact up to the error of the grid, which `errors` estimates.

    Not for branched trees. Raises `ConfigError` as `Backup.of` does, and for a `MultistepSolver`.
    """
    require(
        not isinstance(setting.sampler, MultistepSolver), "sampler", setting.sampler, "a kernel"
    )
    path, groups = trajectories.trajectories, trajectories.groups
    steps, walk = path.tree.drawn_steps, walk_of(setting, groups, 0, None)
    results = []
    with setting.policy.frozen(), torch.no_grad():
        backup = Backup.of(walk, steps[0] if steps else 0, grid)
        means = {}
        for step in steps:
            units = path.tree.at(step)
            x, v = (table[:, units].flatten(0, 1) for table in (path.states, path.outputs))
            mean = walk.transition(x, v, step).mean
            means[step] = mean.reshape(groups.prompts, -1, 2).double().cpu()
        ends, last = setting.policy.decode(backup.ends), setting.policy.decode(path.images_latent)
        for reward in rewards or [setting.reward]:
            scores, final = (
                score(
                    reward,
                    images,
                    [p for p in setting.prompts for _ in range(len(images) // groups.prompts)],
                ).total.view(groups.prompts, -1)
                for images in (ends, last)
            )
            columns = [
                [table[step].to(final).expand_as(final) for step in steps]
                for table in (backup.values(scores, means), backup.errors(scores, means))
            ]
            values = torch.stack([*columns[0], final], -1)
            errors = torch.stack([*columns[1], torch.zeros_like(final)], -1)
            bounds = errors.diff(dim=-1).abs()
            advantages = values.diff(dim=-1)
            results.append(TrueAdvantages(advantages, bounds, values, errors.abs(), tuple(steps)))
    return results
