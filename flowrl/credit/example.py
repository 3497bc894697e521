"""Examples of the record that a rule receives, for tests and analyses without a rollout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.experience import Decisions, Experience, ValueTable
from flowrl.core.prompt import Prompt
from flowrl.core.tree import Tree, plain_tree
from flowrl.core.types import Condition, Schedule, Trajectories
from flowrl.probes import Branching, Probe


def probed(values: ValueTable, probe: Probe) -> ValueTable:
    """A copy of a full table as a rollout with `probe` fills it: NaN in the columns without
    estimate, except the last.

    Args:
        values: a full value table [prompt, member, decision+1].
        probe: the probe whose columns are kept.

    Returns:
        The table [prompt, member, decision+1] with NaN in the other columns.
    """
    filled, table = [*probe.fills(values.shape[-1] - 1), -1], torch.full_like(values, torch.nan)
    table[..., filled] = values[..., filled]
    return table


@dataclass(frozen=True)
class Example:
    """A value table as a rollout with some probe could fill it, and its decisions.

    Args:
        values: value table [prompt, member, decision+1].
        decisions: the decisions, with the tree of a branching probe.
    """

    values: ValueTable
    decisions: Decisions

    def experience(
        self, seed: int = 0, parts: Mapping[str, ValueTable] | None = None
    ) -> Experience:
        """A record with this table, for rules with a method `credit`.

        Log-probabilities, states, velocities and embeddings are random numbers drawn from `seed`;
        states are 2x2, and the prompts are "prompt 0", "prompt 1", ...

        Args:
            seed: seed of the draws.
            parts: value tables of components.
        """
        generator = torch.Generator().manual_seed(seed)
        decisions, (prompts, members, _) = self.decisions, self.values.shape
        steps = [step for step in decisions.step.tolist() if step >= 0]
        tree = decisions.tree or plain_tree(members, max(steps, default=0) + 1, tuple(steps))
        counts = (tree.units, tree.at(tree.steps).start)  # the leaves have no velocity
        states, outputs = (torch.randn(prompts, n, 1, 2, 2, generator=generator) for n in counts)
        log_probs = torch.randn(prompts, tree.units, generator=generator)
        log_probs = log_probs[:, tree.paths[:, (decisions.step + 1).tolist()]]
        # ODE steps divide the time between the drawn ones evenly
        times, stds = {0: 1.0, tree.steps: 0.0}, torch.zeros(tree.steps)
        for k, step in enumerate(steps):
            start, length = float(decisions.time[k]), float(decisions.delta[k])
            times |= {step: start, step + 1: start - length}
            stds[step] = decisions.std[k]
        known = sorted(times)
        grid = np.interp(range(tree.steps + 1), known, [times[node] for node in known])
        schedule = Schedule(torch.tensor(grid).float())
        return Experience(
            prompts=[Prompt(f"prompt {row}") for row in range(prompts)],
            values=self.values,
            decisions=decisions,
            valid=decisions.mask.any(-1),
            parts=parts or {},
            trajectories=Trajectories(states, outputs, schedule, tree, stds),
            log_probs=log_probs.masked_fill(~decisions.drawn | (decisions.step < 0), torch.nan),
            condition=Condition({"embedding": torch.randn(prompts, 4, generator=generator)}),
        )


def example(
    values: ValueTable, probe: Probe, decisions: Decisions | None = None, seed: int = 0
) -> Example:
    """The value table that a rollout with `probe` would give, for testing a rule without a rollout.

    For a branching probe, a tree is drawn from `seed`. The rewards of finished images are kept; the
    other entries become the values of the tree's units. A probe that draws some of the decisions
    only leaves out the others' columns.

    Args:
        values: a full value table [prompt, member, decision+1].
        probe: the probe whose columns are kept.
        decisions: the decisions of the rollout; None for `Decisions.like(values)`.
        seed: seed of the tree.

    Returns:
        The table and its decisions.

    Raises:
        ConfigError: the decisions do not fit the table, or the number of members does not fit the
            branching probe.
    """
    decisions = Decisions.like(values) if decisions is None else decisions
    shape, wanted = tuple(values.shape), (*decisions.mask.shape[:2], len(decisions) + 1)
    require(shape == wanted, "values", shape, f"[prompt, member, decision+1] = {wanted}")
    if not isinstance(probe, Branching):
        return Example(probed(values, probe), decisions)
    steps, generator = decisions.step.tolist(), torch.Generator().manual_seed(seed)
    tree = probe.tree(steps[-1] + 1, steps, shape[1], False, generator)
    return on_tree(values[..., -1], decisions, tree)


def on_tree(final: Float[Tensor, "prompt member"], decisions: Decisions, tree: Tree) -> Example:
    """The value table of a tree from the final rewards of its leaves, of which invalid ones are
    NaN.

    Args:
        final: final rewards.
        decisions: decisions that include those of the tree.
        tree: the tree.
    """
    kept = torch.isin(decisions.step, torch.tensor(tree.drawn_steps))
    names = ("step", "time", "delta", "std", "trained")
    axis = {name: getattr(decisions, name)[kept] for name in names}
    drawn = tree.decisions[:, tree.drawn_steps]
    mask = final.isfinite()[..., None] & drawn & axis["trained"]
    decisions = replace(decisions, **axis, drawn=drawn, mask=mask, tree=tree)
    return Example(tree.value_table(tree.values(final)), decisions)
