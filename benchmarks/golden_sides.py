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
MEANT: dict[str, str] = {
    "*/metrics.jsonl:*/abs_advantage": "a mean over another order of the same numbers: rounding",
    "*/metrics.jsonl:*/mean_abs_gain*": "by decision",
    "*/trajectory.*": "values of the states before each decision, and the image",
    "rules-*/metrics.jsonl:*calls*": "only states from which decisions start are estimated",
    "rules-*/metrics.jsonl:*nfe*": "only states from which decisions start are estimated",
    "rules-*/summary.json:*nfe*": "only states from which decisions start are estimated",
}
"""Intended differences: pattern of a key as the report prints it (`*`: anything) -> reason."""
CHANGED = {
    "invalid": "invalid samples are left out by a mask, not by tables split by count: rounding",
    "edges": "an edge that n members share counts 1/n for each, which changes the mini-batches",
    "pruned": "mini-batches of about equally many transitions of weight above 0",
    "random-credit": "drawn by decision",
    "noise-weighted": "the mean of the weights is over decisions: rounding",
    "tempflow-grpo": "noise weights have mean 1 over the decisions of the iteration",
    "stepwise-*": "the joint Z is over decisions",
    "flux-stepwise": "the joint Z is over decisions",
    "moving-*": "the joint Z is over decisions; the average is kept by time",
    "turning-later": "TP-GRPO's first step is the first decision",
}
"""Runs with other credit -> reason."""
for run, reason in CHANGED.items():
    for case in ("mixture", "shapes", "models", "resume"):
        MEANT[f"*-{case}/{run}/*"] = reason
    MEANT[f"*/tables/{run}/000001.safetensors:[aw]*"] = reason
    MEANT[f"*/tables/{run}/00000[2-9].safetensors:*"] = reason


STEPS = {
    "all": ":",
    "all-but-last": ":-1",
    "0:2": "0:2",
    "0:3": "0:3",
    "0:5": "0:5",
    "1:4": "1:5",
    "2:3": "2:5",
    "random:3": "random(size=3)",
    "random:3:0.5": "random(size=3, geometric=0.5)",
    "random:0.6": "random(fraction=0.6)",
    "sliding:2:1:1": "sliding(size=2, stride=1, every=1)",
}
"""Windows and trained steps: START:SIZE and words in the reference -> slices and specs."""


def in_current_terms(job: Job) -> Job:
    """The job as the working tree's command line describes it."""
    settings = {SETTINGS.get(name, name): value for name, value in job.settings.items()}
    for name in settings.keys() & {"window", "trained_steps"}:
        settings[name] = STEPS[settings[name]]
    return replace(job, settings=settings)


def tables_in_current_terms(tables: Tables) -> Tables:
    """The reference's tables of an iteration as the working tree records them, by decision.

    If nothing was drawn, the only decision is the initial noise.
    """
    steps = tables["drawn"].any(0).nonzero().flatten().tolist() or [0]
    found = dict(tables)
    for name, table in tables.items():
        if name.partition(".")[0] == "values":
            found[name] = table[..., [*steps, -1]]
        elif name == "log_probs" or (name in OF_STEPS and "row_times" not in tables):
            found[name] = table[..., steps]
    return found


OF_STEPS = ("weights", "advantages")
"""Tables of transitions, or of drawn times in a forward-process loss."""


def observe_current(save: Save) -> None:
    """As `observe_reference`, for the working tree's trainer.

    The axis of values is decision+1 instead of node, that of log_probs, weights and advantages
    decision instead of step.
    """
    from flowrl.rollout import log_probs
    from flowrl.training import trainer as module

    trainer: Any = module
    rows = remembered(trainer, "minibatch_rows")
    loss_batches = trainer.Trainer.loss_batches

    def observed(self: Any, sampler: Any, collected: Any, experience: Any, *credit: Any) -> Any:
        found = loss_batches(self, sampler, collected, experience, *credit)
        path = collected.rollout.trajectories
        tables = trajectories(path, path.stds)
        tables |= outcome(experience.prompts, collected.values, experience.valid)
        tables |= {"log_probs": log_probs(sampler, path), **trained(found[0], rows(), experience)}
        save(self.done + 1, tables)
        return found

    trainer.Trainer.loss_batches = observed


def trained(batches: Any, rows: Any, experience: Any) -> Tables:
    """The weights and advantages of the decisions, or of the drawn times, that are trained."""
    advantages, times = batches.advantages, getattr(batches, "times", None)
    if times is not None:
        advantages = advantages.gather(1, batches.columns)
    weights = torch.zeros_like(advantages)
    for one in rows:
        weights[one.sample, one.column] = (one.weight.double() / max(one.total, 1.0)).float()
    tables = {"weights": weights, "advantages": advantages.where(weights > 0, 0.0)}
    if times is not None:
        tables["row_times"] = times
    shape = experience.valid.shape
    return {name: table.unflatten(0, shape) for name, table in tables.items()}


# --- both -----------------------------------------------------------------------------------------


def remembered(module: Any, *names: str) -> Callable[[], Any]:
    """What the last call of one of these functions returned, before the trainer changes it."""
    made: list[Any] = [None]

    def wrapping(make: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            made[0] = make(*arguments, **options)
            return made[0]

        return wrapped

    for name in names:
        setattr(module, name, wrapping(getattr(module, name)))
    return lambda: made[0]


def trajectories(path: Any, stds: Tensor) -> Tables:
    """States, velocities, times, stds and what was drawn, and the branched tree."""
    tree, by_group = path.tree, (len(path.states), path.tree.members)
    names = ("parent", "node", "drawn", "paths", "strides") if tree.branched else ()
    branches = {f"tree.{name}": getattr(tree, name) for name in names}
    return {
        "states": path.nodes.unflatten(0, by_group),
        "velocities": path.velocities.unflatten(0, by_group),
        "times": path.schedule.times,
        "std": stds,
        "drawn": tree.decisions,
        **{name: tensor for name, tensor in branches.items() if tensor is not None},
    }


def outcome(prompts: Any, values: Any, valid: Tensor) -> Tables:
    """Prompts, rewards and values."""
    return {
        "prompts": torch.tensor([zlib.crc32(prompt.text.encode()) for prompt in prompts]),
        "rewards": values.total[..., -1],
        "valid": valid,
        "values": values.total,
        **{f"values.{name}": table for name, table in values.parts.items()},
    }


# --- the reference --------------------------------------------------------------------------------


def observe_reference(save: Save) -> None:
    """From now on, the trainer calls `save` in every iteration, before the update.

    The tables are, with the axes of `flowrl.core.types`:

    - prompts [prompt], checksums of the texts;
    - states [prompt, member, node, *latent] and velocities [prompt, member, step, *latent];
    - times [node], std [step], drawn [member, step], and the branched tree, if there is one;
    - log_probs [prompt, member, step], NaN where nothing was drawn;
    - rewards [prompt, member] of the final images, valid [prompt, member], values [prompt, member,
      node], NaN without an estimate, and values of the reward's components;
    - weights [prompt, member, step] in the mean of the mini-batch and advantages of the same shape,
      0 where the weight is 0; for a forward-process loss [prompt, member, draw], with row_times.
    """
    from flowrl.training import trainer as module

    trainer: Any = module
    pairs = remembered(trainer, "minibatch_pairs", "forward_pairs")
    loss_batches = trainer.Trainer.loss_batches

    def observed(self: Any, sampler: Any, collected: Any, advantages: Tensor, used: Tensor) -> Any:
        found = loss_batches(self, sampler, collected, advantages, used)
        path, rewards = collected.rollout.trajectories, collected.rewards
        tables = trajectories(path, path.schedule.stds)
        tables |= outcome(rewards.prompts, rewards, rewards.valid)
        tables |= {"log_probs": densities(sampler, path), **credited(found[0], pairs(), used)}
        save(self.done + 1, tables)
        return found

    trainer.Trainer.loss_batches = observed


def densities(sampler: Any, path: Any) -> Tensor:
    """The log-probabilities of the transitions [prompt, member, step]."""
    from flowrl.flow.gaussian import log_prob

    schedule, nodes, velocities = path.schedule, path.nodes, path.velocities
    log_probs = torch.full((len(nodes), schedule.steps), torch.nan)
    for step in schedule.decisions:
        at = torch.full((len(nodes),), step)
        gaussian = sampler.transition(nodes[:, step], velocities[:, step], schedule, at)
        log_probs[:, step] = log_prob(gaussian, nodes[:, step + 1])
    log_probs = log_probs.unflatten(0, (len(path.states), path.tree.members))
    return log_probs.where(path.tree.decisions, torch.nan)


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
