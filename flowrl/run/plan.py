"""The cost of one iteration, counted before anything is loaded: rows, batches, network
evaluations, memory.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from flowrl.core.errors import require
from flowrl.core.experience import Credit, Decisions
from flowrl.core.forward import WeightCopy, guidance_passes
from flowrl.core.tree import plain_tree
from flowrl.core.types import whole
from flowrl.credit import read_columns
from flowrl.flow import uniform_schedule
from flowrl.probes import Probe, Shape
from flowrl.rollout import Groups, group_tree, minibatch_rows, transition_weights
from flowrl.rollout.groups import PromptStream
from flowrl.run.build import (
    first_trained_steps,
    make_method,
    make_world,
    method_text,
    policy_options,
    prompts_to_embed,
    steps_of,
    trial_stds,
)
from flowrl.run.config import SIZES, RunConfig
from flowrl.run.costs import REWARD_FLOPS, Prices
from flowrl.run.models.memory import Architecture, Memory, architecture_of, count_memory
from flowrl.run.parts.specs import parse_spec
from flowrl.run.worlds import prompts_of
from flowrl.trainer import asks_for_all

Launch = Literal["ddp", "fsdp2", "zero2"]


@dataclass(frozen=True)
class Plan:
    """Counts of one iteration.

    Processes roll out whole groups, `groups_per_process` each until all are distributed. The rows
    of an update are drawn at random from all trajectories, and a process differentiates its own. A
    forward-process loss may have another guidance than the samples (`forward.Guidance`): its
    velocities are then fractions or multiples of an evaluation.

    Args:
        processes: number of processes.
        launch: the launcher's config file; fsdp2 and zero2 shard the weights over the processes.
        groups_per_process: groups of a process; the last ones may have fewer.
        trajectories: number of trajectories.
        trained_steps: steps that enter the loss.
        rows: trained transitions of all trajectories, or (image, drawn time) rows.
        evaluations: network evaluations of these rows, one per distinct state.
        updates: optimizer steps.
        evaluations_per_update_and_process: mean over updates, for a process with its full number of
            groups.
        micro_batches_per_update: backward passes of an optimizer step in a process.
        rows_per_micro_batch: latents per network call in training.
        nfe: network evaluations of the rollout and its probe (`Probe.cost`), without guidance;
            calls that compute less count fractions.
        probe_nfe: those of `nfe` for the probe.
        sequential_calls: sequential network calls of the rollout.
        rows_per_call: latents per network call in sampling.
        train_nfe: network evaluations of the update, without guidance.
        gradient_nfe: those of `train_nfe` with a gradient.
        passes_per_evaluation: 2 with classifier-free guidance, else 1.
        passes: forward passes of the iteration, one per latent, with guidance.
        forwards: forward equivalents of the iteration's network evaluations
            (`run.costs.Prices`), without decodes and reward calls.
        reward_calls: scored images.
        evaluation_nfe: network evaluations of an evaluation on held-out prompts.
        evaluation_passes: forward passes of each of them.
    """

    processes: int
    launch: Launch
    groups_per_process: int
    trajectories: int
    trained_steps: int
    rows: int
    evaluations: int
    updates: int
    evaluations_per_update_and_process: int
    micro_batches_per_update: int
    rows_per_micro_batch: int
    nfe: float
    probe_nfe: float
    sequential_calls: int
    rows_per_call: int
    train_nfe: float
    gradient_nfe: float
    passes_per_evaluation: int
    passes: float
    forwards: float
    reward_calls: int
    evaluation_nfe: int
    evaluation_passes: int


def plan(config: RunConfig, processes: int = 1, launch: Launch = "ddp") -> Plan:
    """The cost of one iteration of a run.

    The batch is that of the whole run: more processes divide it. `nfe`, `train_nfe`,
    `sequential_calls` and `reward_calls` are the numbers that a run records in metrics.jsonl,
    unless a reward marks samples invalid or advantages are 0 (`zero_rows` there).

    Args:
        config: the run.
        processes: number of processes, 1 or more.
        launch: the launcher's config file (``flowrl presets --accelerate``).

    Returns:
        The counts.

    Raises:
        ConfigError: a setting is not allowed, or the probe's cost is unknown.
    """
    require(processes >= 1, "processes", processes, "1 or more")
    fits = launch == "ddp" or config.policy.quantize == "none"
    require(fits, "quantize", config.policy.quantize, "none with sharded weights (fsdp2, zero2)")
    method, rollout, evaluation = make_method(config), config.rollout, config.evaluation
    loss, batches, groups = method.loss, config.batches, math.ceil(rollout.groups / processes)

    # One group: its decisions, and the rows of its trajectories in the update.
    generator, grid = torch.Generator().manual_seed(0), uniform_schedule(rollout.num_steps)
    all_groups = Groups(rollout.groups, rollout.group_size, method.shared_noise)
    # a tree that changes between iterations is one draw
    tree = group_tree(trial_stds(config), all_groups, method.credit.probe, generator)
    draws_times, valid = method.objective.draws_times, torch.ones(1, tree.members, dtype=torch.bool)
    trained = None if draws_times else first_trained_steps(config).tolist()
    decisions = Decisions.of(grid, trial_stds(config), tree, valid, trained)
    weights = transition_weights(Credit(torch.ones(decisions.mask.shape)), decisions)[0]
    if draws_times:
        weights = torch.ones(tree.members, cast(Any, loss).times.draws(grid))
    count = weights.shape[1] if draws_times else int(decisions.trained.sum())
    states = decisions.tree or plain_tree(tree.members, 1, (0,))
    whole_group = [torch.arange(tree.members)]
    (group,) = minibatch_rows(whole_group, weights, states, loss.unit, not draws_times)
    copies: Mapping[str, WeightCopy] = getattr(loss, "copies", {})
    networks = 1 + sum(copy.evaluated for copy in copies.values())

    # All groups: the update.
    samples, evaluations = rollout.groups * rollout.group_size, rollout.groups * group.evaluations
    minibatches = torch.arange(samples).chunk(config.optim.minibatches)
    share = max(map(len, minibatches)) / samples
    per_process = math.ceil(evaluations * share * groups / rollout.groups)
    own, guidance = config.policy.guidance_scale, config.loss_guidance()
    unit = {"transition": 1, "trajectory": count, "group": rollout.group_size}[loss.unit]
    # units that are spread over micro-batches need their means first
    twice = 1 + (unit > batches.micro_batch)
    each = guidance.evaluations(networks, loss.needs_reference, own)
    train_nfe = whole(evaluations * each * twice)
    gradient_nfe = whole(evaluations * guidance.evaluations(1, False, own))
    prices = Prices.of_policy(config.as_dict()["policy"])

    # All groups: the rollout and its probe.
    every = asks_for_all(steps_of(config.algorithm.trained_steps), method)
    asked = read_columns(method.credit, decisions.trained).tolist()
    nodes = [step for step, needed in zip(tree.drawn_steps, asked, strict=False) if every or needed]
    shape, probe = Shape(rollout.groups, grid, tree, nodes), method.credit.probe
    calls, images = _rollout(shape, probe)
    nfe = whole(sum(latents * fraction for latents, fraction in calls))
    largest = math.ceil(max(latents for latents, _ in calls) * groups / rollout.groups)
    passes, evaluated = map(guidance_passes, (own, config.as_evaluated().policy.guidance_scale))
    calls_of = (largest, passes), (evaluation.eval_samples // processes, evaluated)
    most_rows = max(min(batches.max_batch, latents) * each for latents, each in calls_of)
    # the last step of Heun's method is one of Euler's
    heun = evaluation.eval_solver == "heun"
    solver_nfe = 2 * evaluation.eval_steps - 1 if heun else evaluation.eval_steps
    return Plan(
        processes=processes,
        launch=launch,
        groups_per_process=groups,
        trajectories=samples,
        trained_steps=count,
        rows=rollout.groups * len(group),
        evaluations=evaluations,
        updates=len(minibatches),
        evaluations_per_update_and_process=per_process,
        micro_batches_per_update=math.ceil(per_process / batches.micro_batch),
        rows_per_micro_batch=batches.rows
        or min(batches.micro_batch, per_process) * config.branches,
        nfe=nfe,
        probe_nfe=whole(nfe - sum(shape.rows[:-1])),
        sequential_calls=len(calls),
        rows_per_call=batches.rows or most_rows,
        train_nfe=train_nfe,
        gradient_nfe=gradient_nfe,
        passes_per_evaluation=passes,
        passes=whole((nfe + train_nfe) * passes),
        forwards=whole(prices.passes * nfe + prices.update(train_nfe, gradient_nfe)),
        reward_calls=images,
        evaluation_nfe=evaluation.eval_samples * solver_nfe,
        evaluation_passes=evaluated,
    )


def _rollout(shape: Shape, probe: Probe) -> tuple[list[tuple[int, float]], int]:
    """Network calls of `rollout.rollout`, each with its rows and their fraction of an evaluation,
    and the number of scored images.
    """
    cost, calls = probe.cost(shape), [(rows, 1.0) for rows in shape.rows[:-1]]
    require(cost is not None, "probe", type(probe).__name__, "one with a method `cost`")
    assert cost is not None
    for call in cost.calls:
        if call.step is None:
            calls.append((call.rows, call.share))
        else:  # part of a step's call
            calls[call.step] = (calls[call.step][0] + call.rows, 1.0)
    return calls, cost.images + shape.groups * shape.members


def plan_text(counts: Plan, config: RunConfig) -> str:
    """The plan as text, as ``flowrl train --plan`` prints it."""
    p, rollout, evaluation = counts, config.rollout, config.evaluation
    guidance, evaluated = (
        f" x {passes} (guidance)" * (passes > 1)
        for passes in (p.passes_per_evaluation, p.evaluation_passes)
    )
    policy, sampled = config.policy, config.as_evaluated().policy
    size = f" of {' x '.join(map(str, sampled.size[::-1]))} pixels" * (policy.size != sampled.size)
    micro, most = (f"{n} {getattr(config.batches, n)}" for n in ("micro_batch", "max_batch"))
    lines = {
        "trajectories": f"{rollout.groups} groups x {rollout.group_size} members ="
        f" {p.trajectories:,}; whole groups per process: {p.groups_per_process}",
        "method": method_text(config),
        "rows": f"{p.trained_steps} trained steps of {rollout.num_steps}: {p.rows:,} rows,"
        f" {p.evaluations:,} distinct states",
        "optimizer steps": f"{p.updates}; {p.evaluations_per_update_and_process:,} states per"
        f" process / {micro} = {p.micro_batches_per_update} backward passes of"
        f" {p.rows_per_micro_batch} network rows",
        "rollout": f"{p.nfe - p.probe_nfe:,} (sampling) + {p.probe_nfe:,} (probes) = {p.nfe:,}"
        f" network evaluations ({p.nfe / p.trajectories:.1f} per trajectory) in"
        f" {p.sequential_calls} sequential calls, split by {most}",
        "update": f"{p.evaluations:,} states x {p.train_nfe / max(p.evaluations, 1):g} ="
        f" {p.train_nfe:,} network evaluations, {p.gradient_nfe:,} of them with gradients",
        "network total": f"({p.nfe:,} + {p.train_nfe:,}){guidance} = {p.passes:,} forward passes;"
        f" with backward passes {p.forwards:,} forward equivalents",
        "reward": f"{p.reward_calls:,} images scored"
        f" ({p.reward_calls / p.trajectories:.1f} per trajectory)",
        "evaluation": f"{evaluation.eval_samples} samples{size} every {evaluation.eval_every}"
        f" iterations: {p.evaluation_nfe:,} network evaluations{evaluated}",
        "in all": f"{config.iterations * p.updates:,} optimizer steps,"
        f" {config.iterations * p.forwards:,} forward equivalents of the network in training",
    }
    title = f"{config.algorithm.method}: one iteration of {config.iterations}, processes:"
    where = f"{p.processes}, {config.policy.dtype} on {config.policy.device}"
    return _table(f"{title} {where}", lines)


def _table(title: str, lines: Mapping[str, str]) -> str:
    return "\n".join([title, *(f"  {name:18s} {text}" for name, text in lines.items())])


SCORED_TOGETHER = 512
"""Images that `rollout.score_rollout` decodes before it scores them."""


def known_architecture(config: RunConfig) -> Architecture | None:
    """The architecture of the run's model, if it is known."""
    model = config.policy.original or config.policy.model
    return architecture_of(model) if model else None


SAMPLED = ("rollout", "decode")
"""The parts of `Memory` that evaluations need too."""


def memory(counts: Plan, config: RunConfig) -> Memory | None:
    """GPU memory of a process, counted (`policies.count_memory`); None for a model of unknown
    architecture. Groups that branch store less. Evaluations may have larger samples than training.
    """
    rollout, groups = config.rollout, counts.groups_per_process
    known = known_architecture(config)
    if known is None:
        return None
    rows = counts.rows_per_micro_batch, counts.rows_per_call
    images = min(SCORED_TOGETHER, math.ceil(counts.reward_calls * groups / rollout.groups))
    nodes_and_velocities = groups * rollout.group_size * (2 * rollout.num_steps + 1)
    stored = 0 if rollout.offload else nodes_and_velocities
    shards, reshard = 1 if counts.launch == "ddp" else counts.processes, counts.launch == "fsdp2"
    height, width = max(config.policy.training_sizes, key=math.prod)
    options = replace(policy_options(config), resolution=height, width=width)
    counted = count_memory(known, options, *rows, images, stored, shards, reshard)
    if config.as_evaluated().policy.size == config.policy.size:
        return counted
    batch = config.batches.max_batch * rollout.groups // groups
    evaluated = memory(replace(counts, reward_calls=batch), config.as_evaluated())
    larger = {name: max(getattr(m, name) for m in (counted, evaluated)) for name in SAMPLED}
    return replace(counted, **larger)


def memory_text(counts: Plan, config: RunConfig) -> str:
    """`memory` as text; empty for a model of unknown architecture."""
    policy, counted = config.policy, memory(counts, config)
    if counted is None:
        return ""
    size = {name: f"{number / 1e9:.1f} GB" for name, number in asdict(counted).items()}
    known, world = known_architecture(config), make_world(config)
    assert known is not None
    stream = PromptStream(prompts_of(world, config.environment.task, "train"), config.seed)
    texts = {prompt.key for prompt in prompts_to_embed(config, world, stream)}
    # a negative prompt, or one for each image to edit
    prompts = 2 * len(texts) if known.family.images[1] else 1 + len(texts)
    each = known.embedding(policy_options(config))
    sharded = (
        f", of which {counts.launch} stores 1 / {counts.processes} in each process, +"
        f" {size['gathered']} gathered"
        if counted.gathered
        else ""
    )
    lines = {
        "always": f"{size['weights']} frozen weights + {size['trained']} for"
        f" {counted.trained_parameters:,} trained weights{sharded}",
        "trajectories": f"{size['trajectories']} (nodes and velocities, float32)",
        "and one of": f"{size['update']} micro-batch of {counts.rows_per_micro_batch} rows,"
        f" {size['rollout']} sampling {counts.rows_per_call} rows, {size['decode']} decoding"
        f" {config.batches.decode_batch} images at a time",
        "before": f"{size['encoders']} with the text encoders on the device",
        "at most": f"{counted.peak / 1e9:.1f} GB, without the reward's network, CUDA's workspace"
        " and the allocator's reserve",
        "on disk": f"{prompts:,} prompts x {each / 1e6:.1f} MB = {prompts * each / 1e9:.1f} GB of"
        " embeddings at most, in flowrl's cache folder",
    }
    name = Path(policy.model or "").name
    title = f"memory per process, computed from the architecture of {name} in"
    return _table(f"{title} {policy.dtype}, not measured; GB = 10^9 bytes", lines)


@dataclass(frozen=True)
class Card:
    """A GPU: memory in bytes, and FLOP/s of matrix products in bfloat16 without sparsity, as its
    maker states them.
    """

    memory: float
    flops: float


CARDS = {
    "B200": Card(180e9, 2250e12),
    "H100": Card(80e9, 989e12),
    "H200": Card(141e9, 989e12),
    "A100": Card(80e9, 312e12),
    "A40": Card(48e9, 150e12),
    "A10": Card(24e9, 125e12),
    "L40S": Card(48e9, 362e12),
    "L40": Card(48e9, 181e12),
    "L4": Card(24e9, 121e12),
    "RTX PRO 6000": Card(96e9, 504e12),
    "RTX 6000 Ada": Card(48e9, 364e12),
    "RTX A6000": Card(48e9, 155e12),
    "RTX 5090": Card(32e9, 209e12),
    "RTX 5080": Card(16e9, 113e12),
    "RTX 5070 Ti": Card(16e9, 88e12),
    "RTX 4090": Card(24e9, 165e12),
    "RTX 4080": Card(16e9, 97e12),
    "RTX 4070 Ti Super": Card(16e9, 88e12),
    "RTX 3090": Card(24e9, 71e12),
    "RTX 3080": Card(10e9, 60e12),
    "RTX 3060": Card(12e9, 25e12),
}
"""Cards that a plan can be made for; the A100 is that of 80 GB, the RTX 3080 that of 10."""


def card_of(text: str) -> Card:
    """A card by its name in `CARDS`, by its memory as in 16GB, or both. Without a known name, the
    FLOP/s are 0. Raises `ConfigError` for an unknown name without a memory.
    """
    size = re.search(r"(\d+(?:\.\d+)?) ?GB$", text)
    known = CARDS.get(text[: size.start()].strip() if size else text)
    allowed = f"one of {', '.join(CARDS)}, or the memory as in 16GB"
    require(bool(known or size), "card", text, allowed)
    memory = 1e9 * float(size[1]) if size else 0.0
    require(not size or memory > 0, "card", text, allowed)
    return Card(memory or known.memory if known else memory, known.flops if known else 0.0)


SUSTAINED = 0.2
"""Assumed share of a card's FLOP/s."""
OPERATION = 5e-6
"""Assumed seconds to dispatch an operation from Python."""
CORES = 8
"""Assumed processor cores of a process for rewards that are computed there."""
USABLE = 0.9
"""Share of a card's memory that a counted profile fills; the rest is for the reward's network,
CUDA's work space and fragmentation.
"""
MOST_ROWS = 32
"""Largest number of network rows of a counted profile."""
REWARD_SECONDS = {"ocr": 0.25}
"""Seconds of a score on one core: RapidOCR, a line of text in 512 x 512 pixels, measured on an AMD
EPYC (``python benchmarks/flops.py --ocr``).
"""


def scored_by(config: RunConfig) -> dict[str, float]:
    """The rewards that score images, those within others included, and how often each scores an
    image, in the mean over the sources of prompts.
    """

    def leaves(spec: str) -> list[str]:
        part = parse_spec(spec, "reward")
        inner = [text for kind, text in part.nested() if kind == "reward"]
        return [name for text in inner for name in leaves(text)] or [part.name]

    sources = config.environment.sources
    given = [(source.weight, source.reward) for source in sources.train] or [(1, sources.reward)]
    total, calls = sum(weight for weight, _ in given), dict[str, float]()
    for weight, spec in given:
        for name in leaves(spec) if spec else ():
            calls[name] = calls.get(name, 0) + weight / total
    return calls


def named_card(name: str) -> str:
    """The name in `CARDS` of a GPU that calls itself `name`; "" for an unknown one."""
    plain = f" {name.upper().replace('-', ' ')} "
    return next((card for card in CARDS if f" {card.upper()} " in plain), "")


def sized(config: RunConfig, card: str, processes: int = 1, launch: Launch = "ddp") -> RunConfig:
    """The run with counted sizes in place of those that are auto: of all that fit into the memory
    of `card`, those with the shortest estimated update. A run measures them instead
    (`run.sizes`).
    """
    values, known = config.flat(), known_architecture(config)
    wanted = [name for name in SIZES if values[name] is None]
    if not wanted or known is None:
        return config
    given = config.replace(**{name: getattr(config.batches, name) for name in wanted})
    given = given.replace(compile=False)
    room = USABLE * card_of(card).memory
    fixed = "micro_batch" not in wanted or "max_batch" not in wanted
    choices = (
        [False, True]
        if "gradient_checkpointing" in wanted
        else [given.batches.gradient_checkpointing]
    )
    found: list[tuple[bool, float, RunConfig]] = []
    for checkpointing in choices:
        tried = given.replace(gradient_checkpointing=checkpointing)
        for rows in [0] if fixed else range(MOST_ROWS, 0, -1):
            if (rows > 2 and rows % 4) or rows % config.branches:
                continue
            if rows:
                tried = tried.replace(micro_batch=rows // config.branches, max_batch=None)
            counts = plan(tried, processes, launch)
            if "decode_batch" in wanted:
                tried = _decoding(tried, counts, room)
            counted = memory(counts, tried)
            assert counted is not None
            fits = counted.peak <= room
            if fits or rows <= config.branches:
                cost = times(counts, tried, counted, card).update if fits else counted.peak
                found.append((not fits, cost, tried))
                break
    return min(found, key=lambda item: item[:2])[2]


def _decoding(config: RunConfig, counts: Plan, room: float) -> RunConfig:
    """The run with the most images per call of the decoder, up to 8, with which the plan fits into
    `room`; with 1 if none does.
    """
    most = max(1, 8 // config.policy.num_frames)
    for count in (count for count in (8, 4, 2, 1) if count <= most):
        config = config.replace(decode_batch=count)
        counted = memory(counts, config)
        if counted is not None and counted.peak <= room:
            break
    return config


@dataclass(frozen=True)
class Times:
    """Estimated seconds of an iteration in a process, and of an evaluation; `scoring` on cores of
    the processor, beside the sampling.
    """

    sampling: float
    decoding: float
    rewards: float
    scoring: float
    update: float
    evaluation: float
    operations: float
    """Dispatched operations of the network in rollout and update, per trained pair."""

    @property
    def iteration(self) -> float:
        """All phases; scores of the processor are computed during the sampling."""
        beside = max(self.sampling + self.decoding + self.rewards, self.scoring)
        return beside + self.update


def times(counts: Plan, config: RunConfig, counted: Memory, card: str) -> Times:
    """The estimated times of a plan on a `card`: of every network call the longer of its FLOPs at a
    share `SUSTAINED` of the card's, and of the dispatch of its operations.
    """
    rate, p, rollout = SUSTAINED * (card_of(card).flops or 1e14), counts, config.rollout
    share = p.groups_per_process / rollout.groups
    most, micro = p.rows_per_call, p.rows_per_micro_batch

    def seconds(rows: float, each: int, flops: float, operations: int) -> float:
        calls = math.ceil(rows / each)
        return max(rows * flops / rate, calls * operations * OPERATION)

    def sampled(rows: float, size: Memory) -> tuple[float, float]:
        calls = max(math.ceil(rows / most), p.sequential_calls)
        operations = calls * size.forward_operations
        return max(rows * size.forward_flops / rate, operations * OPERATION), operations

    run = config.as_evaluated()
    evaluated = counted if run == config else cast(Memory, memory(counts, run))
    sampling, operations = sampled(p.nfe * share * p.passes_per_evaluation, counted)
    gradient = p.evaluations * share * config.branches
    rest = p.train_nfe * share * p.passes_per_evaluation - gradient
    update = seconds(gradient, micro, counted.gradient_flops, counted.gradient_operations)
    update += seconds(rest, micro, counted.forward_flops, counted.forward_operations)
    operations += math.ceil(gradient / micro) * counted.gradient_operations
    operations += math.ceil(rest / micro) * counted.forward_operations
    images = p.reward_calls * share
    priced = scored_by(config)
    narrow = config.policy.decode_dtype != "float32"
    decode, evaluated_decode = (
        size.decode_flops / (rate if narrow else rate / 2)  # TF32
        for size in (counted, evaluated)
    )
    return Times(
        sampling,
        images * decode,
        images * sum(REWARD_FLOPS.get(name, 0) * calls for name, calls in priced.items()) / rate,
        images * sum(REWARD_SECONDS.get(name, 0) * calls for name, calls in priced.items()) / CORES,
        update,
        sampled(p.evaluation_nfe / p.processes * p.evaluation_passes, evaluated)[0]
        + config.evaluation.eval_samples / p.processes * evaluated_decode,
        operations / max(p.evaluations * share, 1),
    )


REMEDIES: dict[str, dict[str, Any]] = {
    "--decode-batch 1": {"decode_batch": 1},
    "--gradient-checkpointing True": {"gradient_checkpointing": True},
    "--micro-batch 1 --max-batch 1": {"micro_batch": 1, "max_batch": 1},
    "--offload": {"offload": True},
    "--quantize nf4": {"quantize": "nf4"},
    "--decode-dtype bfloat16": {"decode_dtype": "bfloat16"},
    "--decode-tiling": {"decode_tiling": True},
}
"""Options that need less memory, those without another effect on the results first."""


def remedy(config: RunConfig, card: str, processes: int, launch: Launch) -> str:
    """The fewest options of `REMEDIES`, in their order, with which a plan fits on a `card`; those
    of the decoder only if its calls need the most memory.
    """

    def need(options: Sequence[str]) -> Memory:
        changes = {name: value for option in options for name, value in REMEDIES[option].items()}
        tried = config.replace(**changes)
        counted = memory(plan(tried, processes, launch), tried)
        assert counted is not None
        return counted

    values, room, chosen = config.flat(), USABLE * card_of(card).memory, list[str]()
    counted, is_lora = need(()), config.policy.tuning == "lora" and launch == "ddp"
    for option, changes in REMEDIES.items():
        others = max(counted.update, counted.rollout)
        fits = (
            counted.decode > others if "decode" in option else is_lora or "quantize" not in option
        )
        if fits and any(values[name] != value for name, value in changes.items()):
            chosen.append(option)
            counted = need(chosen)
        if counted.peak <= room:
            break
    if counted.peak > room:
        size = f"{counted.peak / 1e9:.1f} GB also with {' '.join(chosen)}"
        return f"{size}; take more memory, a smaller --resolution, or --launch fsdp2"
    for option in chosen[:-1]:
        fewer = [name for name in chosen if name != option]
        chosen = fewer if need(fewer).peak <= room else chosen
    return f"with {' '.join(chosen)} it needs {need(chosen).peak / 1e9:.1f} GB"


def times_text(counts: Plan, config: RunConfig, card: str) -> str:
    """`times` as text; empty for a model of unknown architecture."""
    counted = memory(counts, config)
    if counted is None:
        return ""
    t, sizes, room = times(counts, config, counted, card), config.batches, card_of(card).memory
    cards = card if counts.processes == 1 else f"{counts.processes} x {card}"
    used = {
        "sizes": f"{sizes.rows or counts.rows_per_micro_batch} network rows per call, gradient"
        f" checkpointing {'on' if sizes.gradient_checkpointing else 'off'}, {sizes.decode_batch}"
        " images per decoder call",
    }
    if counted.peak > room:
        size = f"{counted.peak / 1e9:.1f} GB of {room / 1e9:.0f}"
        fixed = remedy(config, card, counts.processes, counts.launch)
        return _table(f"memory of {cards}", {"does not fit": size, **used, "remedy": fixed})
    if not card_of(card).flops:
        return _table(f"memory of {cards}, whose speed is unknown", used)
    phases = {
        "sampling": t.sampling,
        "decoding": t.decoding,
        "rewards on the GPU": t.rewards,
        "update": t.update,
    }
    if t.scoring > t.sampling + t.decoding + t.rewards:
        phases = {"rewards on the processor": t.scoring, "update": t.update}
    slowest = max(phases, key=phases.__getitem__)
    evaluations = config.iterations / config.evaluation.eval_every
    hours = (config.iterations * t.iteration + evaluations * t.evaluation) / 3600
    unknown = ", ".join(
        sorted(scored_by(config).keys() - REWARD_FLOPS.keys() - REWARD_SECONDS.keys())
    )
    lines = {
        **used,
        "iteration": " + ".join(f"{name} {value:.1f}" for name, value in phases.items() if value)
        + f" = {t.iteration:.1f} s"
        + (f"; rewards in parallel on {CORES} cores {t.scoring:.1f} s" if t.scoring else "")
        + (f"; without the reward {unknown}" if unknown else ""),
        "bottleneck": f"{slowest}, {phases[slowest] / t.iteration:.0%} of an iteration",
        "operations": f"{t.operations:,.0f} dispatched per trained pair",
        "in all": f"{config.iterations} iterations and {evaluations:.0f} evaluations of"
        f" {t.evaluation:.0f} s: {hours:.1f} hours, {hours * counts.processes:.1f} GPU hours",
    }
    rate = f"{SUSTAINED:.0%} of {card_of(card).flops / 1e12:.0f} TFLOP/s"
    title = f"time on {cards}, estimated from counted FLOPs at"
    return _table(f"{title} {rate}, not measured", lines)


def planned_and_measured(
    config: RunConfig, rows: Sequence[Mapping[str, Any]], card: str, processes: int = 1
) -> str:
    """The estimated seconds of an iteration on a `card` beside those that a run recorded in `rows`
    of metrics.jsonl; empty for a model of unknown architecture.
    """
    phases = [row["phases"] for row in rows if row["iteration"]]
    if known_architecture(config) is None or not phases:
        return ""
    counts = plan(config, processes)
    counted = memory(counts, config)
    assert counted is not None
    t = times(counts, config, counted, card)
    lines = {}
    for planned, *names in (
        (t.iteration - t.update, "rollout", "decode", "reward"),
        (t.update, "update"),
    ):
        measured = sum(part.get(name, 0.0) for part in phases for name in names) / len(phases)
        lines[", ".join(names)] = f"{planned:.2f} s planned, {measured:.2f} s measured"
    return _table(f"an iteration on {card}, mean of {len(phases)}", lines)
