"""The cost of one iteration, counted before anything is loaded: rows, batches, network
evaluations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from flowrl.core.errors import ConfigError, require
from flowrl.core.experience import Credit, Decisions
from flowrl.core.forward import guidance_passes
from flowrl.core.protocols import ForwardLoss
from flowrl.core.tree import Tree, plain_tree
from flowrl.credit import read_columns
from flowrl.flow import uniform_schedule
from flowrl.methods import Method
from flowrl.policies import Memory, architecture_of, count_memory
from flowrl.probes import Cost, Probe, Shape, whole
from flowrl.rollout.batches import Rows, minibatch_rows
from flowrl.rollout.rollout import Groups, group_tree
from flowrl.rollout.values import transition_weights
from flowrl.training.build import (
    first_trained_steps,
    make_method,
    method_text,
    model_options,
    trial_stds,
)
from flowrl.training.config import RunConfig
from flowrl.training.trainer import loss_guidance


@dataclass(frozen=True)
class Plan:
    """Counts of one iteration.

    Processes roll out whole groups, `groups_per_process` each until all are distributed. The rows
    of an update are drawn at random from all trajectories, and a process differentiates its own. A
    forward-process loss may have another guidance than the samples (`forward.Guidance`): its
    velocities are then fractions or multiples of an evaluation.

    Args:
        trajectories: number of trajectories.
        trained_steps: steps that enter the loss.
        rows: trained transitions of all trajectories, or (image, drawn time) rows.
        evaluations: network evaluations of these rows, one per distinct state.
        updates: optimizer steps.
        trajectories_per_update: trajectories of an optimizer step.
        rows_per_update: rows of an optimizer step.
        processes: number of processes.
        idle: processes without a group, which wait for the others.
        groups_per_process: groups of a process; the last ones may have fewer.
        evaluations_per_update_and_process: mean over updates, for a process with its full number of
            groups.
        micro_batches_per_update: backward passes of an optimizer step in a process.
        rows_per_micro_batch: latents per network call in training.
        nfe: network evaluations of the rollout and its probe (`Probe.cost`), without guidance;
            calls that compute less count fractions.
        sequential_calls: sequential network calls of the rollout.
        calls_of_a_process: network calls of a process, split by `max_batch`.
        rows_per_call: latents per network call in sampling.
        velocities: evaluations of a state in the update: 1, and 1 for the base model if its KL is
            used.
        train_nfe: network evaluations of the update, without guidance.
        gradient_nfe: those of `train_nfe` with a gradient.
        passes_per_evaluation: 2 with classifier-free guidance, else 1.
        passes: forward passes of the iteration, one per latent, with guidance.
        reward_calls: scored images.
        evaluation_nfe: network evaluations of an evaluation.
    """

    trajectories: int
    trained_steps: int
    rows: int
    evaluations: int
    updates: int
    trajectories_per_update: int
    rows_per_update: int
    processes: int
    idle: int
    groups_per_process: int
    evaluations_per_update_and_process: int
    micro_batches_per_update: int
    rows_per_micro_batch: int
    nfe: float
    sequential_calls: int
    calls_of_a_process: int
    rows_per_call: int
    velocities: int
    train_nfe: float
    gradient_nfe: float
    passes_per_evaluation: int
    passes: float
    reward_calls: int
    evaluation_nfe: int


def plan(config: RunConfig, processes: int = 1) -> Plan:
    """The cost of one iteration of a run.

    The batch is that of the whole run: more processes divide it. `nfe`, `train_nfe`,
    `sequential_calls` and `reward_calls` are the numbers that a run records in metrics.jsonl,
    unless a reward marks samples invalid.

    Args:
        config: the run.
        processes: number of processes, 1 or more.

    Returns:
        The counts.

    Raises:
        ConfigError: a setting is not allowed, or the probe's cost is unknown.
    """
    require(processes >= 1, "processes", processes, "1 or more")
    method, rollout, optim, evaluation = (
        make_method(config),
        config.rollout,
        config.optim,
        config.evaluation,
    )
    groups = math.ceil(rollout.groups / processes)
    decisions = _decisions(config, method)
    own, networks = config.policy.guidance_scale, 1
    if isinstance(method.loss, ForwardLoss):
        count = method.loss.times.draws(uniform_schedule(rollout.num_steps))
        networks += sum(copy.evaluated for copy in method.loss.copies.values())
    else:
        count = int(decisions.trained.sum())
    rows = _rows(method, decisions, count)
    samples, evaluations = rollout.groups * rollout.group_size, rollout.groups * rows.evaluations
    minibatches = torch.arange(samples).chunk(optim.minibatches)
    share = max(map(len, minibatches)) / samples
    shape = _shape(config, method)
    calls, reward_calls = _rollout(shape, method.credit.probe)
    own_calls = [
        latents for latents, _ in _rollout(replace(shape, groups=groups), method.credit.probe)[0]
    ]
    nfe = whole(sum(latents * part for latents, part in calls))
    per_process = math.ceil(evaluations * share * groups / rollout.groups)
    guidance, reference, passes = (
        loss_guidance(config),
        method.loss.needs_reference,
        guidance_passes(own),
    )
    unit = {"transition": 1, "trajectory": count, "group": rollout.group_size}[method.loss.unit]
    # the means of units that are spread over micro-batches
    twice = 1 + (unit > config.batches.micro_batch)
    train_nfe = whole(evaluations * guidance.evaluations(networks, reference, own) * twice)
    branches = (
        guidance_passes(guidance.scales(own)[0]) if config.policy.guidance_gradient == "both" else 1
    )
    solver = (
        2 * evaluation.eval_steps - 1 if evaluation.eval_solver == "heun" else evaluation.eval_steps
    )
    return Plan(
        trajectories=samples,
        trained_steps=count,
        rows=rollout.groups * len(rows),
        evaluations=evaluations,
        updates=len(minibatches),
        trajectories_per_update=max(map(len, minibatches)),
        rows_per_update=math.ceil(rollout.groups * len(rows) * share),
        processes=processes,
        idle=processes - math.ceil(rollout.groups / groups),
        groups_per_process=groups,
        evaluations_per_update_and_process=per_process,
        micro_batches_per_update=math.ceil(per_process / config.batches.micro_batch),
        rows_per_micro_batch=min(config.batches.micro_batch, per_process) * branches,
        nfe=nfe,
        sequential_calls=len(calls),
        calls_of_a_process=sum(
            math.ceil(latents / config.batches.max_batch) for latents in own_calls
        ),
        rows_per_call=min(
            config.batches.max_batch, max(*own_calls, evaluation.eval_samples // processes)
        )
        * passes,
        velocities=evaluations * (networks + reference),
        train_nfe=train_nfe,
        gradient_nfe=whole(evaluations * guidance.evaluations(1, False, own)),
        passes_per_evaluation=passes,
        passes=whole((nfe + train_nfe) * passes),
        reward_calls=reward_calls,
        evaluation_nfe=evaluation.eval_samples * solver,
    )


def _tree(config: RunConfig, method: Method) -> Tree:
    """The tree of the first iteration's groups; a tree that changes between iterations is one
    draw.
    """
    rollout = config.rollout
    groups = Groups(rollout.groups, rollout.group_size, method.shared_noise)
    return group_tree(
        trial_stds(config), groups, method.credit.probe, torch.Generator().manual_seed(0)
    )


def _decisions(config: RunConfig, method: Method) -> Decisions:
    """The decisions of one group in the first iteration."""
    grid, tree = uniform_schedule(config.rollout.num_steps), _tree(config, method)
    forward, valid = (
        isinstance(method.loss, ForwardLoss),
        torch.ones(1, tree.members, dtype=torch.bool),
    )
    trained = None if forward else first_trained_steps(config).tolist()
    return Decisions.of(grid, trial_stds(config), tree, valid, trained)


def _rows(method: Method, decisions: Decisions, count: int) -> Rows:
    """The rows of one group in the update, `count` for each of its trajectories."""
    shape = decisions.mask.shape
    members, unit = shape[1], method.loss.unit
    tree = decisions.tree or plain_tree(members, 1, (0,))
    forward = isinstance(method.loss, ForwardLoss)
    weights = torch.ones(members, count)
    if not forward:
        weights = transition_weights(Credit(torch.ones(shape)), decisions)[0]
    return minibatch_rows([torch.arange(members)], weights, tree, unit, not forward)[0]


def _shape(config: RunConfig, method: Method) -> Shape:
    """The quantities that determine the cost of the rollout."""
    tree, grid = _tree(config, method), uniform_schedule(config.rollout.num_steps)
    trained = _decisions(config, method).trained
    asked = read_columns(method.credit, trained).tolist()
    nodes = [step for step, needed in zip(tree.drawn_steps, asked, strict=False) if needed]
    return Shape(config.rollout.groups, grid, tree, nodes)


def _rollout(shape: Shape, probe: Probe) -> tuple[list[tuple[int, float]], int]:
    """Network calls of `rollout.rollout`, each with its rows and their fraction of an evaluation,
    and the number of scored images.
    """
    calls, cost = [(rows, 1.0) for rows in shape.rows[:-1]], _cost(shape, probe)
    for call in cost.calls:
        if call.step is None:
            calls.append((call.rows, call.share))
        else:
            calls[call.step] = (calls[call.step][0] + call.rows, 1.0)
    return calls, cost.images + shape.groups * shape.members


def _cost(shape: Shape, probe: Probe) -> Cost:
    cost = probe.cost(shape)
    if cost is None:
        raise ConfigError(
            f"{type(probe).__name__} has no method `cost`, so the evaluations of its rollouts"
            " cannot be planned"
        )
    return cost


def plan_text(
    found: Plan, config: RunConfig, origins: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The plan as text, as ``flowrl train --plan`` prints it.

    Args:
        found: the counts.
        config: the run.
        origins: where settings come from, by setting (`presets.origins`).

    Returns:
        The lines.
    """
    p, rollout, evaluation = found, config.rollout, config.evaluation
    guidance = f" x {p.passes_per_evaluation} (guidance)" if p.passes_per_evaluation > 1 else ""
    networks = p.velocities // p.evaluations if p.evaluations else 1
    loss = make_method(config).loss
    others = ["base model"] * loss.needs_reference + ["copies of the weights"] * (
        networks > 1 + loss.needs_reference
    )
    kl = f" x {networks} ({', '.join(['network', *others])})" if networks > 1 else ""
    if (config.policy.train_guidance_scale, config.policy.reference_guidance_scale) != (0, 0):
        train, reference = loss_guidance(config).scales(config.policy.guidance_scale)
        kl += f", guidance {train:g}" + (
            f" and {reference:g} of the base model" if reference != train else ""
        )
    shared = f", on {p.evaluations:,} distinct states" if p.evaluations < p.rows else ""
    kind, mean = "states" if shared else "rows", " (on average)" if p.processes > 1 else ""
    whole = p.rows == p.trajectories * p.trained_steps
    counted = (
        f"{p.trajectories:,} trajectories x {p.trained_steps} trained steps of {rollout.num_steps}"
        if whole
        else "decisions"
    )
    micro = _batch(config.optim.micro_batch, config.batches.micro_batch)
    most = _batch(rollout.max_batch, config.batches.max_batch)
    idle = f", {p.idle} of {p.processes} processes have none and wait" if p.idle else ""
    lines = [
        (
            f"{config.algorithm.method}: one iteration of {config.iterations}, {p.processes}"
            f" process{'es' if p.processes > 1 else ''}, {config.policy.dtype} on"
            f" {config.policy.device}"
        ),
        (
            f"  trajectories       {rollout.groups} groups x {rollout.group_size} members ="
            f" {p.trajectories:,}; a process rolls out {p.groups_per_process} whole"
            f" group{'s' if p.groups_per_process > 1 else ''}{idle}"
        ),
        f"  method             {method_text(config, origins)}",
        f"  rows               {counted} = {p.rows:,}{shared}",
        (
            f"  optimizer steps    {p.updates}, each on the mean over {p.trajectories_per_update:,}"
            f" trajectories = {p.rows_per_update:,} rows"
        ),
        (
            f"  backward passes    {p.evaluations_per_update_and_process:,} {kind} a process{mean}"
            f" / micro_batch {micro} = {p.micro_batches_per_update} an optimizer step, of"
            f" {p.rows_per_micro_batch} network rows"
        ),
        (
            f"  rollout            {p.nfe:,} network evaluations ({p.nfe / p.trajectories:.1f} a"
            f" trajectory) in {p.sequential_calls} sequential calls; split by max_batch {most}:"
            f" {p.calls_of_a_process} a process"
        ),
        (
            f"  update             {p.evaluations:,} {kind}{kl} = {p.train_nfe:,} network"
            f" evaluations, {p.gradient_nfe:,} of them with gradients"
        ),
        (
            f"  network in all     ({p.nfe:,} + {p.train_nfe:,}){guidance} = {p.passes:,} forward"
            " passes"
        ),
        (
            f"  reward             {p.reward_calls:,} images scored"
            f" ({p.reward_calls / p.trajectories:.1f} a trajectory)"
        ),
        (
            f"  evaluation         {evaluation.eval_samples} samples every {evaluation.eval_every}"
            f" iterations: {p.evaluation_nfe:,} network evaluations{guidance}"
        ),
        (
            f"  in all             {config.iterations * p.updates:,} optimizer steps,"
            f" {config.iterations * p.trajectories:,} trajectories,"
            f" {config.iterations * p.passes:,} forward passes in training"
        ),
    ]
    return "\n".join(lines)


def _batch(setting: int | str, counted: int) -> str:
    """A batch size, or the counted size in place of one that the run will measure."""
    return (
        str(setting)
        if setting == counted
        else f"{setting} (measured at the start; counted as {counted})"
    )


SCORED_TOGETHER = 512
"""Images that `rollout.score_rollout` decodes before it scores them."""


def memory(found: Plan, config: RunConfig) -> Memory | None:
    """GPU memory of a process, counted (`policies.count_memory`).

    Args:
        found: the counts of the run.
        config: the run.

    Returns:
        The memory; None for a model of unknown architecture.
    """
    policy, rollout = config.policy, config.rollout
    known = architecture_of(policy.model) if policy.model else None
    if known is None:
        return None
    method = make_method(config)
    images = min(
        SCORED_TOGETHER, math.ceil(found.reward_calls * found.groups_per_process / rollout.groups)
    )
    options = model_options(config)
    counted = count_memory(known, options, found.rows_per_micro_batch, found.rows_per_call, images)
    latent = 4 * math.prod(known.latent_shape(options))
    tree = _tree(config, method)
    stored = (
        tree.units + tree.at(tree.steps).start
        if tree.branched
        else rollout.group_size * (2 * rollout.num_steps + 1)
    )
    nodes = 0 if rollout.offload else found.groups_per_process * stored
    return replace(counted, trajectories=nodes * latent)


def memory_text(found: Plan, config: RunConfig) -> str:
    """`memory` as text.

    Args:
        found: the counts of the run.
        config: the run.

    Returns:
        The lines; empty for a model of unknown architecture.
    """
    policy, counted = config.policy, memory(found, config)
    if counted is None:
        return ""
    lines = [
        (
            f"memory of a process, counted on the architecture of {Path(policy.model).name} in"
            f" {policy.dtype}, not measured; GB = 10^9 bytes"
        ),
        (
            f"  always             {_gb(counted.weights)} frozen weights + {_gb(counted.trained)}"
            f" for {counted.trained_parameters:,} trained ones"
        ),
        f"  trajectories       {_gb(counted.trajectories)} (nodes and velocities, float32)",
        (
            f"  and one of         {_gb(counted.update)} micro-batch of"
            f" {found.rows_per_micro_batch} rows, {_gb(counted.rollout)} sampling"
            f" {found.rows_per_call} rows, {_gb(counted.decode)} decoding {policy.decode_batch}"
            f" images at a time, {_gb(counted.encoders)} text encoders"
        ),
        (
            f"  at most            {_gb(counted.peak)}, without the reward's network, CUDA's work"
            " space and the allocator's reserve"
        ),
    ]
    if policy.device != "cpu" and not torch.cuda.is_available():
        lines.append("  counted for a machine with a GPU; this machine has none")
    return "\n".join(lines)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
