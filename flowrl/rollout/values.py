"""From finished and estimated images to the value table [prompt, member, decision+1]."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.core.errors import RewardContractError, require
from flowrl.core.protocols import AnyReward, FlowPolicy, GroupReward, RewardModel
from flowrl.core.types import Prompt, inputs_unchanged
from flowrl.probes import Estimate, Key, Scored
from flowrl.rewards.contract import (
    ComponentScores,
    check_scores,
    component_methods,
    marks_invalid,
)
from flowrl.rollout.groups import Groups
from flowrl.rollout.rollout import Rollout
from flowrl.rollout.solvers import Usage

Inspect = Callable[[Tensor, Sequence[Prompt], Tensor], None]
"""A function of images, their prompts and their scores."""


def score(
    reward: RewardModel,
    images: Tensor,
    prompts: Sequence[Prompt],
    usage: Usage | None = None,
    invalid: bool = False,
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
        RewardContractError: type or shape is wrong, a score is not finite, or the reward changed
            `images` in place.
    """
    allowed = invalid and marks_invalid(reward)
    name = f"{type(reward).__name__}.score"
    with torch.no_grad(), inputs_unchanged(name, RewardContractError, images):
        scores = check_scores(reward.score(images, prompts), prompts, name, allowed)
    if usage is not None:
        usage.reward_calls += len(prompts)
    return scores.detach().float()


@dataclass(frozen=True)
class Values:
    """A value table, and the same for every component of a composite reward
    (`flowrl.core.experience`).

    Args:
        total: [prompt, member, decision+1]; NaN in columns that were not estimated, and for invalid
            samples.
        parts: a table [prompt, member, decision+1] per component; empty for other rewards.
        valid: False where the reward marked the sample invalid in any column [prompt, member].
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    valid: Bool[Tensor, "prompt member"]

    @staticmethod
    def cat(tables: Sequence["Values"]) -> "Values":
        """Concatenate along the prompts."""
        parts = {
            name: torch.cat([table.parts[name] for table in tables]) for name in tables[0].parts
        }
        total, valid = (
            torch.cat([getattr(t, name) for t in tables]) for name in ("total", "valid")
        )
        return Values(total, parts, valid)


def score_rollout(
    policy: FlowPolicy,
    reward: AnyReward,
    result: Rollout,
    prompts: Sequence[Prompt],
    usage: Usage | None = None,
    max_batch: int = 512,
    inspect: Inspect | None = None,
) -> Values:
    """The value table of a rollout, in total and for each component of a composite reward.

    Column D is the score of the finished trajectory, column k < D that of the estimate from the
    state at which decision k starts, averaged over its copies, or the value that the probe computes
    from such scores. Columns without an estimate are NaN. On a branched tree, column k is the value
    of this state (`flowrl.core.tree.Tree.values`).

    A `GroupReward` compares the members of a group: their finished images, and at a probed node
    their estimates of that node (copy k is compared with copy k). A state that a group shares
    counts as one image per member. A batch has whole groups, even if a group is larger than
    `max_batch`.

    Args:
        policy: the policy, which decodes latents.
        reward: the reward model.
        result: the rollout.
        prompts: one prompt per group.
        usage: counters of scored images, which are updated; None for new ones.
        max_batch: largest number of images per call of the reward.
        inspect: called with the images, prompts and total scores of the first batch.

    Returns:
        The tables.

    Raises:
        ConfigError: a group reward is combined with a probe that leaves out members.
        RewardError: the reward breaks its contract.
    """
    compared, name = isinstance(reward, GroupReward), type(reward).__name__
    allowed = f"a probe that scores all members of a group: {name} compares them with each other"
    whole = all(one.members is None for one in result.estimates.values())
    require(whole or not compared, "probe", result.probe, allowed)
    groups, path = result.groups, result.trajectories
    keys = sorted(result.estimates, key=lambda key: ("", key) if isinstance(key, int) else key)
    scored = [Estimate(path.images_latent), *(result.estimates[key] for key in keys)]
    latents = [_by_copy(one, groups) if compared else one.latents for one in scored]
    owners = [
        prompt for rows in latents for prompt in prompts for _ in range(len(rows) // groups.prompts)
    ]
    flat, finished = torch.cat(latents), len(latents[0])
    # Finished images have batches of their own, so that no probe changes the last bit of their
    # rewards.
    size = max(max_batch // groups.members, 1) * groups.members if compared else max_batch
    pieces = [*torch.arange(finished).split(size), *torch.arange(finished, len(flat)).split(size)]
    columns: dict[str, list[Tensor]] = {}
    for piece in (piece for piece in pieces if len(piece)):
        images = policy.decode(flat[piece.to(flat.device)])
        texts = [owners[i] for i in piece.tolist()]
        if isinstance(reward, GroupReward):
            scores = score_group_components(reward, images, texts[:: groups.members], usage)
        else:
            scores = score_components(reward, images, texts, usage)
        for name, column in {_TOTAL: scores.total, **scores.parts}.items():
            columns.setdefault(name, []).append(column.cpu())
        if inspect is not None:
            inspect(images, texts, scores.total)
            inspect = None
    tables, filled = {}, [-1]
    for name, column in columns.items():
        each = torch.cat(column).split([len(rows) for rows in latents])
        final, *rewards = (
            _mean(*pair, groups, compared) for pair in zip(each, scored, strict=True)
        )
        tables[name], filled = _table(result, dict(zip(keys, rewards, strict=True)), final)
    valid = torch.stack([~table[..., filled].isnan().any(-1) for table in tables.values()]).all(0)
    for table in tables.values():
        table[~valid] = float("nan")
    return Values(tables.pop(_TOTAL), tables, valid)


def _mean(scores: Tensor, estimate: Estimate, groups: Groups, compared: bool) -> Tensor:
    """The rewards of an estimate [prompt, row], means over its copies."""
    if compared:
        return scores.view(groups.prompts, estimate.copies, groups.members).mean(1)
    return scores.view(-1, estimate.copies).mean(1).view(groups.prompts, -1)


def _by_copy(estimate: Estimate, groups: Groups) -> Tensor:
    """Latents [prompt x member x copy] as [prompt x copy x member], so that latents to compare are
    adjacent; a state that a group shares is repeated for every member.
    """
    found = estimate.latents.unflatten(0, (groups.prompts, -1, estimate.copies)).transpose(1, 2)
    return found.expand(-1, -1, groups.members, *found.shape[3:]).flatten(0, 2)


def _table(
    result: Rollout, rewards: Mapping[Key, Tensor], final: Tensor
) -> tuple[Tensor, list[int]]:
    """The value table from the rewards [prompt, row] of the estimates and of the finished images,
    and its filled columns.
    """
    groups, tree = result.groups, result.trajectories.tree
    final = final.expand(-1, groups.members)
    if tree.branched:
        return tree.value_table(tree.values(final)), [-1]
    steps = tree.drawn_steps or [-1]  # without decisions, the initial noise is the only one
    members = {key: one.members for key, one in result.estimates.items() if one.members is not None}
    nodes = result.probe.rewards(Scored(rewards, final, result.nodes, members))
    table = torch.full((groups.prompts, groups.members, len(steps) + 1), float("nan"))
    table[..., -1] = final
    filled = [steps.index(node) for node in nodes]
    for column, values in zip(filled, nodes.values(), strict=True):
        table[..., column] = values
    return table, [*filled, -1]


_TOTAL = ""
"""The key of the total among the component names."""


def score_components(
    reward: RewardModel, images: Tensor, prompts: Sequence[Prompt], usage: Usage | None = None
) -> ComponentScores:
    """The total score and every component, each checked as by `score`. NaN is allowed only from a
    reward with `marks_invalid`. A composite reward is evaluated once; other rewards have no
    components.

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
    methods = component_methods(reward)
    if methods is None:
        return ComponentScores(score(reward, images, prompts, usage, invalid=True))
    name, allowed = type(reward).__name__, marks_invalid(reward)
    with torch.no_grad(), inputs_unchanged(f"{name}.parts", RewardContractError, images):
        parts = dict(methods[0](images, prompts))
        for key, values in parts.items():
            check_scores(values, prompts, f"{name}.parts()[{key!r}]", allowed)
        total = check_scores(methods[1](parts), prompts, f"{name}.total", allowed)
    if usage is not None:
        usage.reward_calls += len(prompts)
    return ComponentScores(
        total.detach().float(), {key: values.detach().float() for key, values in parts.items()}
    )


def score_group_components(
    reward: GroupReward, images: Tensor, prompts: Sequence[Prompt], usage: Usage | None = None
) -> ComponentScores:
    """As `score_components`, for a reward that compares the members of groups.

    `images` [sample, ...] are of whole groups, one group after the other, with one prompt per
    group; scores are [sample].
    """
    name, allowed, members = (
        type(reward).__name__,
        marks_invalid(reward),
        len(images) // len(prompts),
    )
    together, parts = images.unflatten(0, (len(prompts), members)), {}
    with torch.no_grad(), inputs_unchanged(f"{name}.score_groups", RewardContractError, images):
        if (methods := component_methods(reward)) is not None:
            for key, values in methods[0](together, prompts).items():
                origin = f"{name}.group_parts()[{key!r}]"
                parts[key] = check_scores(values, prompts, origin, allowed, members)
            total = check_scores(methods[1](parts), prompts, f"{name}.total", allowed, members)
        else:
            found = reward.score_groups(together, prompts)
            total = check_scores(found, prompts, f"{name}.score_groups", allowed, members)
    if usage is not None:
        usage.reward_calls += len(images)
    flat = {key: values.detach().float().flatten() for key, values in parts.items()}
    return ComponentScores(total.detach().float().flatten(), flat)
