"""The two sides of `golden.py`: the reference, and the working tree in the reference's terms.

Fill this file in when the working tree renames something (`in_current_terms` and the tables below
it), records an iteration in another form (`observe_current`), or changes numbers on purpose
(`MEANT`). The reference's half and `golden_cases.py` stay as they are.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from golden_cases import Job
from torch import Tensor

REFERENCE = "ddc999b"
Tables = dict[str, Tensor]
Save = Callable[[int, Tables], None]
"""Receives the number of an iteration, from 1, and its tables."""

# --- the working tree -----------------------------------------------------------------------------

SETTINGS: dict[str, str] = {}
"""Settings (options without dashes, `_` for `-`): the reference's name -> the working tree's."""
METRICS: dict[str, str] = {}
"""Keys of metrics.jsonl and other JSON files: "evaluation/reward", or a part of such a key."""
TENSORS: dict[str, str] = {}
"""Names of tensors: regular expression -> replacement."""
FILES: dict[str, str] = {}
"""Paths below a run's folder: regular expression -> replacement."""
MEANT: dict[str, str] = {}
"""Intended differences: pattern of a key as the report prints it (`*`: anything) -> reason."""


def in_current_terms(job: Job) -> Job:
    """The job as the working tree's command line describes it.

    Other values belong here too, such as a window 2:3 (START:SIZE) that becomes a slice 2:5.
    """
    return replace(job, settings={SETTINGS.get(name, name): v for name, v in job.settings.items()})


def observe_current(save: Save) -> None:
    """As `observe_reference`, for the working tree's trainer, with the same tables.

    What the working tree records by decision belongs in the columns of the decisions' steps.
    """
    observe_reference(save)


# --- the reference --------------------------------------------------------------------------------


def observe_reference(save: Save) -> None:
    """From now on, the trainer calls `save` in every iteration, before the update.

    The tables are, with the axes of `flowrl.types`:

    - prompts [prompt], checksums of the texts;
    - states [prompt, member, node, *latent] and velocities [prompt, member, step, *latent];
    - times [node], std [step], drawn [member, step], and the branched tree, if there is one;
    - log_probs [prompt, member, step], NaN where nothing was drawn;
    - rewards [prompt, member] of the final images, valid [prompt, member], values [prompt, member,
      node], NaN without an estimate, and values of the reward's components;
    - weights [prompt, member, step] in the mean of the mini-batch and advantages of the same shape,
      0 where the weight is 0; for a forward-process loss [prompt, member, draw], with row_times.
    """
    from flowrl.training import trainer

    made: dict[str, Any] = {}

    def remembered(make: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            made["pairs"] = make(*arguments)  # before those with advantage 0 are left out
            return made["pairs"]

        return wrapped

    trainer.minibatch_pairs = remembered(trainer.minibatch_pairs)
    trainer.forward_pairs = remembered(trainer.forward_pairs)
    loss_batches = trainer.Trainer.loss_batches

    def observed(self: Any, sampler: Any, collected: Any, advantages: Tensor, used: Tensor) -> Any:
        found = loss_batches(self, sampler, collected, advantages, used)
        tables = {**recorded(sampler, collected), **credited(found[0], made["pairs"], used)}
        save(self.done + 1, tables)
        return found

    trainer.Trainer.loss_batches = observed


def recorded(sampler: Any, collected: Any) -> Tables:
    """The trajectories and rewards of an iteration."""
    from flowrl.flow.gaussian import log_prob

    path, rewards = collected.rollout.trajectories, collected.rewards
    schedule, tree, nodes, velocities = path.schedule, path.tree, path.nodes, path.velocities
    log_probs = torch.full((len(nodes), schedule.steps), torch.nan)
    for step in schedule.decisions:
        at = torch.full((len(nodes),), step)
        gaussian = sampler.transition(nodes[:, step], velocities[:, step], schedule, at)
        log_probs[:, step] = log_prob(gaussian, nodes[:, step + 1])
    by_group = (len(path.states), tree.members)
    log_probs = log_probs.unflatten(0, by_group)
    names = ("parent", "node", "drawn", "paths", "strides") if tree.branched else ()
    branches = {f"tree.{name}": getattr(tree, name) for name in names}
    return {
        "states": nodes.unflatten(0, by_group),
        "velocities": velocities.unflatten(0, by_group),
        "times": schedule.times,
        "std": schedule.stds,
        "drawn": tree.decisions,
        **{name: tensor for name, tensor in branches.items() if tensor is not None},
        "log_probs": log_probs.where(tree.decisions, torch.nan),
        "prompts": torch.tensor([zlib.crc32(prompt.text.encode()) for prompt in rewards.prompts]),
        "rewards": rewards.total[..., -1],
        "valid": rewards.valid,
        "values": rewards.total,
        **{f"values.{name}": table for name, table in rewards.parts.items()},
    }


def credited(batches: Any, pairs: Any, used: Tensor) -> Tables:
    """The weights and advantages of the transitions, or of the drawn times, that are trained."""
    advantages, times = batches.advantages, getattr(batches, "times", None)
    if times is not None:
        advantages = advantages.gather(1, batches.steps)
    weights = torch.zeros_like(advantages)
    for one in pairs:
        weights[one.sample, one.step] = 1 / max(len(one), 1)
    tables = {"weights": weights, "advantages": advantages.where(weights > 0, 0.0)}
    if times is not None:
        tables["row_times"] = times
    return {name: table.unflatten(0, used.shape) for name, table in tables.items()}


@dataclass(frozen=True)
class Terms:
    """How to describe a job to a side, and how to observe its trainer."""

    translate: Callable[[Job], Job]
    observe: Callable[[Save], None]


SIDES = {
    "reference": Terms(lambda job: job, observe_reference),
    "working tree": Terms(in_current_terms, observe_current),
}
