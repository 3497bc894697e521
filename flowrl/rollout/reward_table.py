"""From estimated final images to the reward table [prompt, member, node]."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.errors import RewardContractError
from flowrl.probes import Key, Scored
from flowrl.protocols import CompositeReward, FlowPolicy, RewardModel
from flowrl.rewards.contract import ComponentScores, check_scores, marks_invalid
from flowrl.rollout.rollout import Rollout
from flowrl.rollout.solvers import Usage
from flowrl.types import Prompt, inputs_unchanged


def score(
    reward: RewardModel, images: Tensor, prompts: Sequence[Prompt], usage: Usage | None = None, invalid: bool = False
) -> Tensor:
    """Scores [sample] in float32 and without gradients, checked: one finite number per image, or a `RewardError` that says what
    came instead.

    `invalid`: the caller can deal with samples that a reward with `marks_invalid` marks by NaN; without it they are errors too.
    """
    allowed = invalid and marks_invalid(reward)
    name = f"{type(reward).__name__}.score"
    with torch.no_grad(), inputs_unchanged(name, RewardContractError, images):
        scores = check_scores(reward.score(images, prompts), prompts, name, allowed)
    if usage is not None:
        usage.reward_calls += len(prompts)
    return scores.detach().float()


@dataclass(frozen=True)
class RewardTables:
    """R [prompt, member, node], and the same for every component of a composite reward (`parts`, empty otherwise).

    `valid` [prompt, member] is False where the reward marked the sample invalid at any node; its rewards are then NaN.
    `log_probs` [prompt, unit] are those of a branched tree's edges (`flowrl.tree.Tree`).
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    valid: Bool[Tensor, "prompt member"]
    log_probs: Tensor | None = None


def reward_tables(
    policy: FlowPolicy,
    reward: RewardModel,
    result: Rollout,
    prompts: Sequence[Prompt],
    usage: Usage | None = None,
    max_batch: int = 512,
) -> RewardTables:
    """R_j is what the rollout's probe makes of the scores of its estimates (the mean over their copies): by default that of the
    estimate at node j, NaN where none was made. On a branched tree, R_j is the value of the state at node j. R_T is the score of
    the finished trajectory. `prompts`: one per group."""
    groups, steps = result.groups, result.trajectories.schedule.steps
    probed = sorted(result.estimates.keys() - {steps}, key=lambda key: ("", key) if isinstance(key, int) else key)
    keys = [steps, *probed]
    distinct = {id(result.estimates[key]): result.estimates[key] for key in keys}
    latents = list(distinct.values())
    copies = {id(result.estimates[key]): result.copies.get(key, 1) for key in keys}
    owners = [prompt for latent in latents for prompt in prompts for _ in range(len(latent) // groups.prompts)]
    flat, finished = torch.cat(latents), len(latents[0])
    # Finished images have batches of their own, so that no probe changes the last bit of their rewards.
    pieces = [*torch.arange(finished).split(max_batch), *torch.arange(finished, len(flat)).split(max_batch)]
    columns: dict[str, list[Tensor]] = {}
    for piece in (piece for piece in pieces if len(piece)):
        images = policy.decode(flat[piece.to(flat.device)])
        scored = score_components(reward, images, [owners[i] for i in piece.tolist()], usage)
        for name, values in {_TOTAL: scored.total, **scored.parts}.items():
            columns.setdefault(name, []).append(values.cpu())
    tables, filled = {}, [steps]
    for name, found in columns.items():
        scores = dict(zip(distinct, torch.cat(found).split([len(latent) for latent in latents]), strict=True))
        rewards: dict[Key, Tensor] = {}
        for key in keys:
            at = id(result.estimates[key])
            rewards[key] = scores[at].view(-1, copies[at]).mean(1).view(groups.prompts, -1)
        tables[name], filled = _table(result, rewards)
    tree = result.trajectories.tree
    if tree.branched:
        tables = {name: tree.node_table(tree.values(table[..., -1])) for name, table in tables.items()}
    valid = torch.stack([~table[:, :, filled].isnan().any(2) for table in tables.values()]).all(0)
    for table in tables.values():
        table[~valid] = float("nan")
    return RewardTables(tables.pop(_TOTAL), tables, valid, result.log_probs)


def _table(result: Rollout, rewards: Mapping[Key, Tensor]) -> tuple[Tensor, list[int]]:
    """R [prompt, member, node] from the rewards of the estimates [prompt, row], and the nodes that have values."""
    groups, schedule = result.groups, result.trajectories.schedule
    steps = schedule.steps
    final = rewards[steps].expand(-1, groups.members)
    of_probe = {key: found for key, found in rewards.items() if key != steps}
    nodes = {**result.probe.rewards(Scored(of_probe, final, schedule, result.members)), steps: final}
    table = torch.full((groups.prompts, groups.members, steps + 1), float("nan"))
    for node, found in nodes.items():
        table[:, :, node] = found
    return table, sorted(nodes)


def reward_table(
    policy: FlowPolicy,
    reward: RewardModel,
    result: Rollout,
    prompts: Sequence[Prompt],
    usage: Usage | None = None,
    max_batch: int = 512,
) -> Tensor:
    """`reward_tables` without the components: R [prompt, member, node]."""
    return reward_tables(policy, reward, result, prompts, usage, max_batch).total


_TOTAL = ""
"""The key of the total among the component names."""


def score_components(
    reward: RewardModel, images: Tensor, prompts: Sequence[Prompt], usage: Usage | None = None
) -> ComponentScores:
    """The total and every component [sample] in float32, each checked as by `score`; NaN only from a reward with
    `marks_invalid`. A composite reward is evaluated once; other rewards have no components.
    """
    if not isinstance(reward, CompositeReward):
        return ComponentScores(score(reward, images, prompts, usage, invalid=True))
    name, allowed = type(reward).__name__, marks_invalid(reward)
    with torch.no_grad(), inputs_unchanged(f"{name}.parts", RewardContractError, images):
        parts = dict(reward.parts(images, prompts))
        for key, values in parts.items():
            check_scores(values, prompts, f"{name}.parts()[{key!r}]", allowed)
        total = check_scores(reward.total(parts), prompts, f"{name}.total", allowed)
    if usage is not None:
        usage.reward_calls += len(prompts)
    return ComponentScores(total.detach().float(), {key: values.detach().float() for key, values in parts.items()})
