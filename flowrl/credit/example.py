"""Examples of the record that a rule receives, for tests and analyses without a rollout."""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.core.checks import checked
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


def example(
    values: ValueTable, probe: Probe, decisions: Decisions | None = None, seed: int = 0
) -> Experience:
    """The record that a rollout with `probe` would give, for testing a rule without a rollout.

    For a branching probe, only the rewards of finished images are kept; the other entries become
    the values of the tree's units. A probe that draws some of the decisions only leaves out the
    others' columns.

    Log-probabilities, states, velocities and embeddings are random numbers; states are 2x2, and the
    prompts are "prompt 0", "prompt 1", ...

    Args:
        values: a full value table [prompt, member, decision+1].
        probe: the probe whose columns are kept.
        decisions: the decisions of the rollout; None for `Decisions.like(values)`.
        seed: seed of all draws, also that of the tree if the decisions have none.

    Returns:
        The record.

    Raises:
        ConfigError: the decisions do not fit the table, or the number of members does not fit the
            branching probe.
    """
    decisions = Decisions.like(values) if decisions is None else decisions
    shape, expected = tuple(values.shape), (*decisions.mask.shape[:2], len(decisions) + 1)
    require(shape == expected, "values", shape, f"[prompt, member, decision+1] = {expected}")
    if not isinstance(probe, Branching):
        return _record(probed(values, probe), decisions, seed)
    tree, steps = decisions.tree, decisions.step.tolist()
    if tree is None:
        generator = torch.Generator().manual_seed(seed)
        tree = probe.tree(steps[-1] + 1, steps, shape[1], False, generator)
    return on_tree(values[..., -1], decisions, tree, seed)


@checked
def on_tree(
    final: Float[Tensor, "prompt member"], decisions: Decisions, tree: Tree, seed: int = 0
) -> Experience:
    """The record of a tree from the final rewards of its leaves, of which invalid ones are NaN.

    Args:
        final: final rewards.
        decisions: decisions that include those of the tree.
        tree: the tree.
        seed: seed of the random fields (see `example`).
    """
    kept = torch.isin(decisions.step, torch.tensor(tree.drawn_steps))
    names = ("step", "time", "delta", "std", "trained")
    axis = {name: getattr(decisions, name)[kept] for name in names}
    drawn = tree.decisions[:, tree.drawn_steps]
    mask = final.isfinite()[..., None] & drawn & axis["trained"]
    decisions = replace(decisions, **axis, drawn=drawn, mask=mask, tree=tree)
    return _record(tree.value_table(tree.values(final)), decisions, seed)


def _record(values: ValueTable, decisions: Decisions, seed: int) -> Experience:
    """A record with these tables and random other fields."""
    generator, (prompts, members, _) = torch.Generator().manual_seed(seed), values.shape
    on_schedule = decisions.step >= 0  # -1 is the draw of the initial noise
    steps = decisions.step[on_schedule].tolist()
    tree = decisions.tree or plain_tree(members, max(steps, default=0) + 1, tuple(steps))
    counts = (tree.units, tree.at(tree.steps).start)  # the leaves have no velocity
    states, outputs = (torch.randn(prompts, n, 1, 2, 2, generator=generator) for n in counts)
    log_probs = torch.randn(prompts, tree.units, generator=generator)
    log_probs = log_probs[:, tree.paths[:, (decisions.step + 1).tolist()]]
    stds = torch.zeros(tree.steps)
    stds[steps] = decisions.std[on_schedule]
    # the ODE steps between two drawn ones are equally long
    starts, ends = decisions.time.tolist(), (decisions.time - decisions.delta).tolist()
    times = {0: 1.0, tree.steps: 0.0}
    for step, start, end in zip(decisions.step.tolist(), starts, ends, strict=True):
        times |= {step: start, step + 1: end} if step >= 0 else {}
    nodes = sorted(times)
    grid = np.interp(range(tree.steps + 1), nodes, [times[node] for node in nodes])
    return Experience(
        prompts=[Prompt(f"prompt {row}") for row in range(prompts)],
        values=values,
        decisions=decisions,
        valid=decisions.mask.any(-1),
        trajectories=Trajectories(
            states, outputs, Schedule(torch.tensor(grid).float()), tree, stds
        ),
        log_probs=log_probs.masked_fill(~decisions.drawn | ~on_schedule, torch.nan),
        condition=Condition({"embedding": torch.randn(prompts, 4, generator=generator)}),
    )
