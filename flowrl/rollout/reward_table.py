"""From estimated final images to the reward table [prompt, member, node]."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.errors import RewardContractError, require
from flowrl.probes import Key, Scored
from flowrl.protocols import AnyReward, CompositeGroupReward, CompositeReward, FlowPolicy, GroupReward, RewardModel
from flowrl.rewards.contract import ComponentScores, check_group_scores, check_scores, marks_invalid
from flowrl.rollout.groups import Groups
from flowrl.rollout.rollout import Rollout
from flowrl.rollout.solvers import Usage
from flowrl.types import Prompt, inputs_unchanged


def score(
    reward: RewardModel, images: Tensor, prompts: Sequence[Prompt], usage: Usage | None = None, invalid: bool = False
) -> Tensor:
    """Scores in float32 and without gradients, checked to be one finite number per image.

    Args:
        reward: the reward model.
        images: images [sample, channel, height, width] in [0, 1], or videos [sample, frame, ...].
        prompts: one prompt per image.
        usage: counters of scored images, which are updated; None for no count.
        invalid: accept NaN from a reward with `marks_invalid`, as the mark of an invalid sample.

    Returns:
        Scores [sample], float32, detached.

    Raises:
        RewardContractError: type or shape is wrong, a score is not finite, or the reward changed `images` in place.
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
    """The reward table R, and the same for every component of a composite reward.

    Args:
        total: R [prompt, member, node].
        parts: a table [prompt, member, node] per component; empty for other rewards.
        valid: False where the reward marked the sample invalid at any node; its rewards are then NaN. [prompt, member].
        log_probs: log-probabilities of a branched tree's edges [prompt, unit] (`flowrl.tree.Tree`).
        prompts: the prompts, one per row, for rules that use them (`protocols.PromptCreditAssigner`); set by the collector.
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    valid: Bool[Tensor, "prompt member"]
    log_probs: Tensor | None = None
    prompts: Sequence[Prompt] = ()


def reward_tables(
    policy: FlowPolicy,
    reward: AnyReward,
    result: Rollout,
    prompts: Sequence[Prompt],
    usage: Usage | None = None,
    max_batch: int = 512,
) -> RewardTables:
    """The reward table of a rollout, in total and for each component of a composite reward.

    R_j is the score of the estimate at node j, averaged over its copies, or the value that the probe computes from these scores.
    R_j is NaN at nodes without an estimate. On a branched tree, R_j is the value of the state at node j. R_T is the score of the
    finished trajectory.

    A `GroupReward` compares the members of a group: their finished images, and at a probed node their estimates of that node
    (copy k is compared with copy k). A state that a group shares counts as one image per member. A batch has whole groups, even
    if a group is larger than `max_batch`.

    Args:
        policy: the policy, which decodes latents.
        reward: the reward model.
        result: the rollout.
        prompts: one prompt per group.
        usage: counters of scored images, which are updated; None for new ones.
        max_batch: largest number of images per call of the reward.

    Returns:
        The tables [prompt, member, node].

    Raises:
        ConfigError: a group reward is combined with a probe that leaves out members.
        RewardError: the reward breaks its contract.
    """
    compared, name = isinstance(reward, GroupReward), type(reward).__name__
    allowed = f"a probe that scores all members of a group: {name} compares them with each other"
    require(not (compared and result.members), "probe", result.probe, allowed)
    groups, steps = result.groups, result.trajectories.schedule.steps
    probed = sorted(result.estimates.keys() - {steps}, key=lambda key: ("", key) if isinstance(key, int) else key)
    keys = [steps, *probed]
    distinct = {id(result.estimates[key]): result.estimates[key] for key in keys}
    copies = {id(result.estimates[key]): result.copies.get(key, 1) for key in keys}
    latents = [_by_copy(latent, copies[at], groups) if compared else latent for at, latent in distinct.items()]
    owners = [prompt for latent in latents for prompt in prompts for _ in range(len(latent) // groups.prompts)]
    flat, finished = torch.cat(latents), len(latents[0])
    # Finished images have batches of their own, so that no probe changes the last bit of their rewards.
    size = max(max_batch // groups.members, 1) * groups.members if compared else max_batch
    pieces = [*torch.arange(finished).split(size), *torch.arange(finished, len(flat)).split(size)]
    columns: dict[str, list[Tensor]] = {}
    for piece in (piece for piece in pieces if len(piece)):
        images = policy.decode(flat[piece.to(flat.device)])
        texts = [owners[i] for i in piece.tolist()]
        if isinstance(reward, GroupReward):
            scored = score_group_components(reward, images, texts[:: groups.members], usage)
        else:
            scored = score_components(reward, images, texts, usage)
        for name, values in {_TOTAL: scored.total, **scored.parts}.items():
            columns.setdefault(name, []).append(values.cpu())
    tables, filled = {}, [steps]
    for name, found in columns.items():
        scores = dict(zip(distinct, torch.cat(found).split([len(latent) for latent in latents]), strict=True))
        rewards: dict[Key, Tensor] = {}
        for key in keys:
            at = id(result.estimates[key])
            if compared:
                rewards[key] = scores[at].view(groups.prompts, copies[at], groups.members).mean(1)
            else:
                rewards[key] = scores[at].view(-1, copies[at]).mean(1).view(groups.prompts, -1)
        tables[name], filled = _table(result, rewards)
    tree = result.trajectories.tree
    if tree.branched:
        tables = {name: tree.node_table(tree.values(table[..., -1])) for name, table in tables.items()}
    valid = torch.stack([~table[:, :, filled].isnan().any(2) for table in tables.values()]).all(0)
    for table in tables.values():
        table[~valid] = float("nan")
    log_probs = None if result.log_probs is None else result.log_probs.cpu()
    return RewardTables(tables.pop(_TOTAL), tables, valid, log_probs)


def _by_copy(latents: Tensor, copies: int, groups: Groups) -> Tensor:
    """Latents [prompt x member x copy] as [prompt x copy x member], so that latents to compare are adjacent; a state that a group
    shares is repeated for every member.
    """
    found = latents.unflatten(0, (groups.prompts, -1, copies)).transpose(1, 2)
    return found.expand(-1, -1, groups.members, *found.shape[3:]).flatten(0, 2)


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
    reward: AnyReward,
    result: Rollout,
    prompts: Sequence[Prompt],
    usage: Usage | None = None,
    max_batch: int = 512,
) -> Tensor:
    """The reward table of a rollout: `reward_tables` without the components.

    Args:
        policy: the policy, which decodes latents.
        reward: the reward model.
        result: the rollout.
        prompts: one prompt per group.
        usage: counters of scored images, which are updated; None for new ones.
        max_batch: largest number of images per call of the reward.

    Returns:
        Rewards R [prompt, member, node]; NaN at nodes without an estimate.

    Raises:
        ConfigError: a group reward is combined with a probe that leaves out members.
        RewardError: the reward breaks its contract.
    """
    return reward_tables(policy, reward, result, prompts, usage, max_batch).total


_TOTAL = ""
"""The key of the total among the component names."""


def score_components(
    reward: RewardModel, images: Tensor, prompts: Sequence[Prompt], usage: Usage | None = None
) -> ComponentScores:
    """The total score and every component, each checked as by `score`. NaN is allowed only from a reward with `marks_invalid`. A
    composite reward is evaluated once; other rewards have no components.

    Args:
        reward: the reward model.
        images: images [sample, channel, height, width] in [0, 1], or videos [sample, frame, ...].
        prompts: one prompt per image.
        usage: counters of scored images, which are updated; None for no count.

    Returns:
        Total and components [sample], float32.

    Raises:
        RewardContractError: a score breaks the contract of `score`.
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


def score_group_components(
    reward: GroupReward, images: Tensor, prompts: Sequence[Prompt], usage: Usage | None = None
) -> ComponentScores:
    """As `score_components`, for a reward that compares the members of groups.

    `images` [sample, ...] are of whole groups, one group after the other, with one prompt per group; scores are [sample].
    """
    name, allowed, members = type(reward).__name__, marks_invalid(reward), len(images) // len(prompts)
    together, parts = images.unflatten(0, (len(prompts), members)), {}
    with torch.no_grad(), inputs_unchanged(f"{name}.score_groups", RewardContractError, images):
        if isinstance(reward, CompositeGroupReward):
            for key, values in reward.group_parts(together, prompts).items():
                parts[key] = check_group_scores(values, prompts, members, f"{name}.group_parts()[{key!r}]", allowed)
            total = check_group_scores(reward.total(parts), prompts, members, f"{name}.total", allowed)
        else:
            found = reward.score_groups(together, prompts)
            total = check_group_scores(found, prompts, members, f"{name}.score_groups", allowed)
    if usage is not None:
        usage.reward_calls += len(images)
    flat = {key: values.detach().float().flatten() for key, values in parts.items()}
    return ComponentScores(total.detach().float().flatten(), flat)
