"""From finished and estimated images to the value table [prompt, member, decision+1], and from
credit to the weights in the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.errors import ProbeError, RewardError, TrainingError, part_call, require
from flowrl.core.experience import Credit, CreditTable, Decisions, Experience
from flowrl.core.protocols import AnyReward, FlowPolicy, GroupReward
from flowrl.core.tree import Tree
from flowrl.core.types import Prompt
from flowrl.probes import Key, NoProbe, Probe, Scored, ValueProbe
from flowrl.rewards.contract import (
    ComponentScores,
    check_scores,
    component_methods,
    marks_invalid,
)
from flowrl.rollout.walk import Rollout, Usage

OnImages = Callable[[Tensor, Tensor, Sequence[Prompt], Tensor], None]
"""A function of finished images, their latents, their prompts and their scores."""


def decoded(policy: FlowPolicy, latents: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """`policy.decode(latents)`. Raises `TrainingError` if a latent or an image is not finite; the
    message names what is: embeddings, latents, or images of the decoder.
    """
    images = policy.decode(latents)
    if bool(latents.isfinite().all() & images.isfinite().all()):
        return images
    finite = latents.isfinite().flatten(1).all(1)
    what, advice = (
        "sampled latents",
        "use bfloat16 or float32, or in training a smaller noise_level",
    )
    if bool(finite.all()):
        finite = images.isfinite().flatten(1).all(1)
        what, advice = "decoder's images", "use decode_dtype float32, or check its weights"
    for tensor in policy.encode(prompts).tensors.values():
        if not bool(tensor.isfinite().all()):
            finite = tensor.isfinite().flatten(1).all(1)
            what, advice = "embeddings of the prompts", "check the text encoder's weights and dtype"
    bad = (~finite).nonzero().flatten().tolist()
    raise TrainingError(
        f"the {what} have values that are not finite in {len(bad)} of {len(finite)} samples, first"
        f" for the prompt {prompts[bad[0]].text!r}; {advice}"
    )


def score(
    reward: AnyReward,
    images: Tensor,
    prompts: Sequence[Prompt],
    usage: Usage | None = None,
    invalid: bool = True,
) -> ComponentScores:
    """The total score and every component in float32 and without gradients, each checked to be one
    finite number per image. A composite reward is evaluated once; others have no components.

    Args:
        reward: the reward model.
        images: images [sample, channel, height, width] in [0, 1], or videos [sample, frame, ...];
            for a `GroupReward` those of whole groups, one group after the other.
        prompts: one prompt per image; for a `GroupReward` one per group.
        usage: counters of scored images, which are updated; None for no count.
        invalid: accept NaN from a reward with `marks_invalid`, as the mark of an invalid sample.

    Returns:
        Total and components [sample], float32, detached.

    Raises:
        RewardContractError: type or shape is wrong, or a score is not finite.
    """
    name, methods = type(reward).__name__, component_methods(reward)
    allowed = invalid and marks_invalid(reward)
    members, given, call = None, images, "score"
    if isinstance(reward, GroupReward):
        members, call = len(images) // len(prompts), "score_groups"
        given = images.unflatten(0, (len(prompts), members))
    parts: dict[str, Tensor] = {}
    with torch.no_grad(), part_call(f"{name}.{call}"):
        if methods is None:
            total = getattr(reward, call)(given, prompts)
        else:
            parts, call = dict(methods[0](given, prompts)), "total"
            for key, scores in parts.items():
                check_scores(scores, prompts, f"{name}, component {key!r},", allowed, members)
            total = methods[1](parts)
        check_scores(total, prompts, f"{name}.{call}", allowed, members)
    if usage is not None:
        usage.reward_calls += len(images)
    flat = {key: scores.detach().float().flatten() for key, scores in parts.items()}
    return ComponentScores(total.detach().float().flatten(), flat)


def score_rollout(
    policy: FlowPolicy,
    reward: AnyReward,
    result: Rollout,
    prompts: Sequence[Prompt],
    usage: Usage | None = None,
    max_batch: int = 512,
    on_images: OnImages | None = None,
    enter: Callable[[str], None] = lambda phase: None,
) -> Experience:
    """The record of a rollout: its value table, also for each component of a composite reward, and
    its decisions.

    Column D is the score of the finished trajectory, column k < D that of the estimate from the
    state at which decision k starts, or the value that the probe computes from such scores. Columns
    without an estimate are NaN. On a branched tree, column k is the value of this state
    (`flowrl.core.tree.Tree.values`).

    A `GroupReward` compares the members of a group: their finished images, and the estimates of one
    key. A state that a group shares counts as one image per member. A batch has whole groups, even
    if a group is larger than `max_batch`.

    Args:
        policy: the policy, which decodes latents.
        reward: the reward model.
        result: the rollout.
        prompts: one prompt per group.
        usage: counters of decoded and scored images, which are updated; None for no count.
        max_batch: largest number of images per call of the reward.
        on_images: called with every batch of finished images, in order; the scores are the total.
        enter: called with "decode" and "reward" when these phases of a batch begin.

    Returns:
        The record without its larger fields; all drawn decisions are trained.

    Raises:
        ConfigError: a group reward is combined with a probe that leaves out members.
        RewardError: the reward breaks its contract.
        TrainingError: a latent or an image is not finite.
    """
    compared, groups = isinstance(reward, GroupReward), result.groups
    keys = sorted(result.estimates, key=lambda key: ("", key) if isinstance(key, int) else key)
    latents = [result.trajectories.images_latent, *(result.estimates[key] for key in keys)]
    if compared:
        complete = all(len(rows) in (groups.prompts, groups.samples) for rows in latents)
        allowed = f"a probe that scores all members: {type(reward).__name__} compares them"
        require(complete, "probe", result.probe, allowed)
        # a state that a group shares is repeated for every member
        latents = [rows.repeat_interleave(groups.samples // len(rows), 0) for rows in latents]
    lengths, flat = [len(rows) for rows in latents], torch.cat(latents)
    owners = [p for count in lengths for p in prompts for _ in range(count // groups.prompts)]
    # Batches of a reward that compares members have whole groups. Finished images have batches of
    # their own, so that no probe changes the last bit of their rewards.
    size = max(max_batch // groups.members, 1) * groups.members if compared else max_batch
    columns: dict[str, list[Tensor]] = {}
    finished = flat[: lengths[0]].split(size)
    for number, rows in enumerate([*finished, *flat[lengths[0] :].split(size)]):
        if len(rows):
            texts, owners = owners[: len(rows)], owners[len(rows) :]
            enter("decode")
            images = decoded(policy, rows, texts)
            enter("reward")
            scores = score(reward, images, texts[:: groups.members] if compared else texts, usage)
            if usage is not None:
                usage.decodes += len(rows)
            for name, column in {_TOTAL: scores.total, **scores.parts}.items():
                columns.setdefault(name, []).append(column.cpu())
            if on_images is not None and number < len(finished):
                on_images(images, rows, texts, scores.total)
    tables, valid = {}, torch.ones(groups.prompts, groups.members, dtype=torch.bool)
    for name, column in columns.items():
        rows = [scores.view(groups.prompts, -1) for scores in torch.cat(column).split(lengths)]
        tables[name], judged = _table(result, dict(zip(keys, rows[1:], strict=True)), rows[0])
        valid &= judged
    for table in tables.values():
        table[~valid] = float("nan")
    total = tables.pop(_TOTAL)
    path = result.trajectories
    decisions = Decisions.of(path.schedule, path.stds, path.tree, usable(valid))
    features = _features(result, total)
    return Experience(prompts, total, decisions, valid, tables, features=features)


_TOTAL = ""
"""The key of the total among the component names."""


def _features(result: Rollout, total: Tensor) -> Tensor | None:
    """The features of a `ValueProbe` in the columns of the value table `total` but the last."""
    if result.features is None:
        return None
    steps = result.trajectories.tree.drawn_steps
    shape = (*total.shape[:2], total.shape[-1] - 1, result.features.shape[-1])
    columns = torch.tensor([steps.index(node) for node in result.nodes])
    return torch.full(shape, float("nan")).index_copy_(2, columns, result.features)


def _table(
    result: Rollout, rewards: Mapping[Key, Tensor], final: Tensor
) -> tuple[Tensor, Bool[Tensor, "prompt member"]]:
    """The value table from the rewards [prompt, row] of the estimates and of the finished images,
    and whether the reward could judge a sample in all of them.
    """
    tree = result.trajectories.tree
    if isinstance(tree, Tree):
        return tree.value_table(tree.values(final)), ~final.isnan()
    steps = tree.drawn_steps or [-1]  # without decisions, the initial noise is the only one
    values = {tree.steps: final}
    if not isinstance(result.probe, NoProbe):
        values = {**result.probe.rewards(Scored(rewards, final, result.nodes)), **values}
    filled = torch.stack([*values.values()], -1)
    table = torch.full((*final.shape, len(steps) + 1), float("nan"))
    table[..., [[*steps, tree.steps].index(node) for node in values]] = filled
    return table, ~filled.isnan().any(-1)


def predicted(probe: Probe, experience: Experience) -> Tensor:
    """The value table [prompt, member, decision+1] of a probe: that of the record, with the
    predictions of a `ValueProbe`.

    Args:
        probe: the probe.
        experience: the record of its rollout (`score_rollout`).

    Returns:
        The table; NaN in columns that were not asked for, and for invalid samples.

    Raises:
        ProbeError: the predictions are not finite numbers of the table's shape.
    """
    if not isinstance(probe, ValueProbe) or experience.features is None:
        return experience.values
    table, features = experience.values.clone(), experience.features
    asked = features.isfinite().all(-1) & experience.valid[..., None]
    name, estimates = f"{type(probe).__name__}.predict", table[..., :-1]
    with part_call(name):
        result: Any = probe.predict(features, estimates)
    fits = isinstance(result, Tensor) and result.shape == asked.shape and result.is_floating_point()
    if not fits or not bool(result[asked].isfinite().all()):
        allowed = f"finite numbers [prompt, member, decision] = {tuple(asked.shape)}"
        raise ProbeError(f"{name} did not return {allowed}")
    table[..., :-1] = torch.where(asked, result.detach(), torch.nan)
    return table


@checked
def usable(valid: Bool[Tensor, "prompt member"]) -> Bool[Tensor, "prompt member"]:
    """The valid samples of groups that have two or more of them, so that they can be compared.

    Args:
        valid: False for samples that the reward could not judge [prompt, member].

    Returns:
        A mask [prompt, member].
    """
    return valid & (valid.sum(1) >= 2)[:, None]


def require_usable(valid: Tensor) -> None:
    """Raise `RewardError` if no sample is `usable`."""
    if not bool(usable(valid).any()):
        marked = f"the reward marked {int((~valid).sum())} of {valid.numel()} samples invalid"
        raise RewardError(f"{marked}; no prompt has two valid samples left to compare")


def transition_weights(
    credit: Credit, decisions: Decisions, drop_zero: bool = False
) -> CreditTable:
    """mask x convention x the rule's factor: the weight of each transition in the loss, which is a
    weighted mean.

    Conventions: in a tree that counts edges (`flowrl.core.tree.Tree.weight`) a transition that n
    members share counts 1 / n for each of them; if it counts steps, these weights are divided by
    their sum over the step, relative to its mean over steps. With `drop_zero` a member whose
    advantages are 0 at every trained decision has weight 0, its KL included, as in Flow-GRPO's
    public code (arXiv 2505.05470).

    Args:
        credit: advantages and the rule's factors.
        decisions: the axis of credit.
        drop_zero: the method's convention for advantages of 0.

    Returns:
        Weights [prompt, member, decision], 0 or more.
    """
    mask, tree = decisions.mask, decisions.tree
    weights = mask.to(credit.advantages.dtype)
    if credit.weights is not None:
        weights = torch.where(mask, credit.weights.to(weights), 0.0)
    if tree is not None and tree.weight != "leaf":
        # the unmasked members that share each transition
        arrived, drawn = tree.paths[:, decisions.step + 1], decisions.drawn
        same = (arrived[:, None] == arrived[None]) & drawn[:, None] & drawn[None]
        weights = weights / (same[None] & mask[:, None]).sum(2).clamp(min=1)
    if tree is not None and tree.weight == "step":
        per_step = weights.sum((0, 1))
        weights = weights * per_step[per_step > 0].mean() / per_step.clamp(min=1e-12)
    if drop_zero:
        credited = (credit.advantages != 0) & mask
        weights = weights * credited.any(-1, keepdim=True)
    return weights
