"""From settings to parts: worlds, methods, rewards, policies, trainers and the policies of finished
runs.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch

from flowrl.core.errors import CheckpointError, ConfigError, require
from flowrl.core.protocols import (
    AnyReward,
    AnySampler,
    CreditRule,
    FlowPolicy,
    ForwardLoss,
    GroupReward,
    MultistepSolver,
    PolicyLoss,
    PolicyOptions,
    World,
)
from flowrl.distributed import Distributed
from flowrl.flow import uniform_schedule
from flowrl.methods import Method, check_one_advantage, named_method, try_credit, with_options
from flowrl.parts.registry import KINDS, build, find_maker
from flowrl.parts.specs import parse_slice, parse_spec
from flowrl.policies.pipeline import ModelOptions
from flowrl.probes import NoProbe
from flowrl.rewards import NoisyReward
from flowrl.samplers import ODE, FixedWindow, trained_steps, transition_stds, windowed
from flowrl.training.batches import find_batches
from flowrl.training.checkpoint import load_weights
from flowrl.training.config import RunConfig, load_config
from flowrl.training.heldout import make_heldout_metrics
from flowrl.training.trainer import Trainer, loss_guidance
from flowrl.worlds.base import ModelWorld, check_hash, check_policy, prompts_of, world


def make_world(config: RunConfig) -> World:
    """The world that `world` names or is, or the world of a model, its prompts and its reward.

    Raises `ConfigError` for a task or a form that the world does not have.
    """
    config = config.allowed()
    environment, model = config.environment, config.policy.model
    chosen = (
        world(environment.world)
        if not model
        else ModelWorld(
            model,
            environment.prompts,
            environment.heldout_prompts,
            environment.reward,
            model_options(config),
        )
    )
    tasks, forms = chosen.tasks, chosen.forms
    require(
        environment.task in tasks,
        f"task of world {chosen.name}",
        environment.task,
        f"one of {', '.join(tasks)}",
    )
    require(
        environment.reward_form in forms,
        "reward_form",
        environment.reward_form,
        f"one of {', '.join(forms)}",
    )
    return chosen


def run_method(config: RunConfig) -> Method:
    """The method by name, as published, with the run's credit rule, kernel, window, loss and
    numbers in place of its own.

    A `noise_level` or `clip_range` of 0 is the method's, the clip that for the elements of the
    world's latents (`Method.clip_for`). Raises `ConfigError` for an unknown part, or for a policy
    loss with a method that needs a forward-process loss.
    """
    config = config.allowed()
    chosen, known = (
        config.algorithm,
        world(config.environment.world).elements if not config.policy.model else 0,
    )
    method = named_method(chosen.method, chosen.credit)
    noise = {"noise_level": chosen.noise_level} if chosen.noise_level > 0 else {}
    clip = chosen.clip_range or method.clip_for(known or method.elements)
    options = {"kl_weight": chosen.kl_weight, **({"clip_range": clip} if clip > 0 else {})}
    sampler, loss = with_options(method.sampler, **noise), with_options(method.loss, **options)
    if chosen.sampler:
        sampler = build("sampler", chosen.sampler, **noise)
    if chosen.loss:
        loss = build("loss", chosen.loss, **options)
    fits = isinstance(loss, ForwardLoss) or not isinstance(method.loss, ForwardLoss)
    require(
        fits,
        "loss",
        chosen.loss,
        f"a forward-process loss with {chosen.method}, as in {chosen.method}",
    )
    window = build("window", chosen.window) if chosen.window else method.window
    shared = method.shared_noise
    if chosen.initial_noise != "auto":
        shared = chosen.initial_noise == "shared"
    credit = method.credit
    if getattr(credit, "seed", 0) is None:  # a rule that draws; None is the run's seed
        credit = with_options(credit, seed=config.seed)
    return replace(
        method, sampler=sampler, window=window, loss=loss, credit=credit, shared_noise=shared
    )


def make_method(config: RunConfig) -> Method:
    """The method of a run (`run_method`); its rule is applied to a random table as a check.

    Raises `ConfigError` if no step is stochastic or none is trained, or for an unknown part;
    `CreditError` if the rule breaks its contract.
    """
    algorithm, method = config.algorithm, run_method(config)
    stds = trial_stds(config)
    if isinstance(method.loss, ForwardLoss):
        method.loss.times.draw(
            uniform_schedule(config.rollout.num_steps), 1, torch.Generator().manual_seed(0)
        )
        require(
            algorithm.trained_steps == ":",
            "trained_steps",
            algorithm.trained_steps,
            "':': this loss draws training times",
        )
        loss_guidance(config)
    else:
        allowed = (
            "left out: log-probabilities are those of the velocities that sample; a forward-process"
            " loss may train others"
        )
        for name in ("train_guidance_scale", "reference_guidance_scale"):
            require(getattr(config.policy, name) == 0, name, getattr(config.policy, name), allowed)
        first_trained_steps(config)
    check_per_step(method.credit, stds, part_text("sampler", method.sampler))
    trained = None if isinstance(method.loss, ForwardLoss) else first_trained_steps(config)
    tried = try_credit(method, stds, config.rollout.group_size, trained)
    check_one_advantage(
        method.loss, method.credit, tried.credit.advantages, tried.experience.decisions.mask
    )
    return method


def check_per_step(rule: CreditRule, stds: torch.Tensor, sampler: str) -> None:
    """Check that a rule that scores unfinished states has decisions to credit.

    Args:
        rule: the credit rule.
        stds: standard deviations of the sampler's transitions [step].
        sampler: spec of the sampler, for the message.

    Raises:
        ConfigError: the sampler draws no transition, so the initial noise is the only decision.
    """
    one_decision = not bool((stds > 0).any())
    allowed = f"one that credits the image, such as uniform: {sampler} draws no transition"
    fits = not one_decision or isinstance(rule.probe, NoProbe)
    require(fits, "credit", type(rule).__name__, allowed)


def make_loss(config: RunConfig) -> PolicyLoss | ForwardLoss:
    """The run's loss, with its clip and KL weight (`run_method`)."""
    return run_method(config).loss


def make_reward(config: RunConfig) -> AnyReward:
    """The training reward: `reward`, or the task's reward in `reward_form`, with the run's noise
    and bias.
    """
    environment = config.allowed().environment
    if environment.reward:
        model: AnyReward = build("reward", environment.reward, device=config.policy.device)
    else:
        model = make_world(config).reward(environment.reward_form)
    if environment.reward_noise == 0 and environment.reward_bias == 0:
        return model
    if isinstance(model, GroupReward):
        noise, name = (environment.reward_noise, environment.reward_bias), type(model).__name__
        raise ConfigError(
            f"reward_noise, reward_bias = {noise} are not allowed; allowed: 0 with {name}, which"
            " compares samples"
        )
    return NoisyReward(model, environment.reward_noise, environment.reward_bias, config.seed)


def check(config: RunConfig) -> None:
    """Raise an error if the world, the method or a name of a reward in `config` is not allowed;
    builds no network.
    """
    world = make_world(config)
    make_method(config)
    if config.environment.reward:
        find_maker("reward", parse_spec(config.environment.reward, "reward"))
    make_heldout_metrics(config, world)
    for spec in config.logging.observe:
        find_maker("observer", parse_spec(spec, "observe"))
    if config.policy.base_weights and config.environment.world in KINDS["world"].built_in:
        check_hash(Path(config.policy.base_weights))


def make_policy(config: RunConfig, device: str = "") -> FlowPolicy:
    """The untrained policy.

    Args:
        config: the run.
        device: name of the device; empty for the run's.

    Returns:
        The policy.
    """
    return make_world(config).policy(
        replace(policy_options(config), device=device or config.policy.device)
    )


def make_trainer(
    config: RunConfig, distributed: Distributed = Distributed(), world: World | None = None
) -> Trainer:
    """A trainer of `config`, in whose own `config` the auto sizes are replaced by measured ones
    (`training.batches`).

    Args:
        config: the run.
        distributed: the processes.
        world: a world that replaces that of the settings; None for this one.

    Returns:
        The trainer.

    Raises:
        ConfigError: a setting is not allowed, or the trajectories do not fit into main memory.
    """
    config = config if world is None else config.replace(world=world)
    return trainer_in(make_world(config), config, distributed)


def trainer_in(
    world: World, config: RunConfig, distributed: Distributed = Distributed()
) -> Trainer:
    """`make_trainer` in a world that is already made.

    Args:
        world: the run's world.
        config: the run.
        distributed: the processes.

    Returns:
        The trainer.

    Raises:
        ConfigError: a setting is not allowed, the policy or the prompts do not fit, or the
            trajectories do not fit into memory.
    """
    method = make_method(config)
    reward = make_reward(config)  # before the policy: its errors should not wait for a large model
    prompts = prompts_of(world, config.environment.task, "train")
    prompts_of(world, config.environment.task, "heldout")
    policy = world.policy(policy_options(config))
    check_policy(world, policy)
    require_room(config, policy.latent_shape, distributed.world_size)
    trainer = Trainer(policy, method, reward, prompts, config, distributed)
    find_batches(trainer)
    return trainer


def require_room(config: RunConfig, latent_shape: Sequence[int], processes: int) -> None:
    """Check that the trajectories (nodes and velocities in float32) fit into this machine's main
    memory.

    Args:
        config: the run.
        latent_shape: shape of one latent.
        processes: number of processes on this machine.

    Raises:
        ConfigError: the trajectories are too large.
    """
    rollout = config.rollout
    needed = (
        4
        * math.prod(latent_shape)
        * rollout.groups
        * rollout.group_size
        * (2 * rollout.num_steps + 1)
        // processes
    )
    there = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if hasattr(os, "sysconf")
        else needed
    )
    sizes = f"{rollout.groups} x {rollout.group_size} samples of {rollout.num_steps} steps"
    found = f"{sizes} take {needed / 1e9:.3g} GB, and the machine has {there / 1e9:.3g} GB"
    require(needed <= there, "groups", rollout.groups, found)


def model_options(config: RunConfig) -> ModelOptions:
    """The policy options of the run's diffusers pipeline."""
    p = config.policy
    return ModelOptions(
        height=p.resolution,
        width=p.width or p.resolution,
        num_frames=p.num_frames,
        guidance_scale=p.guidance_scale,
        tuning=p.tuning,
        negative_prompt=p.negative_prompt,
        guidance_gradient=p.guidance_gradient,
        lora_targets=p.lora_targets,
        prompt_cache=p.prompt_cache,
        adapter=p.adapter,
        max_sequence_length=p.max_sequence_length,
        gradient_checkpointing=p.gradient_checkpointing,
        keep_reference=make_loss(config).needs_reference,
        lora_rank=p.lora_rank,
        lora_alpha=p.lora_alpha,
        seed=config.seed,
        device=p.device,
        dtype=p.dtype,
        frozen_adapters=tuple(filter(None, p.frozen_adapters.split(","))),
        attention_backend=p.attention_backend,
        compile="inductor" if p.compile else "",
        decode_batch=p.decode_batch,
        decode_dtype=p.decode_dtype,
    )


def policy_options(config: RunConfig) -> PolicyOptions:
    """The options of the world's policy; the seed draws the adapter's initial matrices."""
    p = config.policy
    return PolicyOptions(p.lora_rank, p.lora_alpha, config.seed, p.device, p.dtype, p.base_weights)


def trial_stds(config: RunConfig) -> torch.Tensor:
    """The sampler's standard deviations on an even grid [step], for checks before anything is
    built.

    Raises `ConfigError` without a stochastic step, unless the loss needs none.
    """
    method, count = run_method(config), config.rollout.num_steps
    first = windowed(method.sampler, method.window, count, torch.Generator().manual_seed(0))
    stds = even_stds(count, first)
    if isinstance(method.loss, ForwardLoss):
        return stds
    need = (
        "a stochastic sampler: the loss needs log-probabilities, and a step of the ODE or of a"
        " multistep solver has none"
    )
    fits = not isinstance(method.sampler, ODE | MultistepSolver)
    require(fits, "sampler", part_text("sampler", method.sampler), need)
    require(
        bool((stds > 0).any()), "window", config.algorithm.window, "at least one stochastic step"
    )
    return stds


def first_trained_steps(config: RunConfig) -> torch.Tensor:
    """The steps of the first iteration's loss; every iteration has equally many.

    Raises `ConfigError` if there are none, or if a later iteration may have none.
    """
    chosen = config.algorithm.trained_steps
    fits = isinstance(run_method(config).window, FixedWindow) or parse_slice(chosen) in (
        None,
        slice(None),
    )
    require(
        fits,
        "trained_steps",
        chosen,
        "':' or random(fraction=...) with a window that changes between iterations",
    )
    return trained_steps(chosen, trial_stds(config), torch.Generator())


def window_text(config: RunConfig) -> str:
    """The run's window with its steps, as in "2:7 (steps 2-6 of 10)"."""
    method, count = run_method(config), config.rollout.num_steps
    if isinstance(method.sampler, MultistepSolver):
        return f"none ({count} steps of a multistep solver)"
    steps = method.window.steps(count, torch.Generator().manual_seed(0))
    runs = (
        [step for step in steps if step - 1 not in steps],
        [step for step in steps if step + 1 not in steps],
    )
    listed = ", ".join(
        f"{first}-{last}" if first < last else str(first) for first, last in zip(*runs, strict=True)
    )
    plural = "s" if len(steps) > 1 else ""
    found = f"step{plural} {listed} of {count}"
    if not isinstance(method.window, FixedWindow):
        found = f"{len(steps)} of {count} steps, chosen every iteration"
    return f"{config.algorithm.window or part_text('window', method.window)} ({found})"


def method_parts(config: RunConfig) -> dict[str, str]:
    """What the run's method consists of, by setting: the parts as specifications, the numbers, and
    the initial noise.
    """
    method, chosen = run_method(config), config.algorithm
    clip = getattr(method.loss, "clip_range", None)
    return {
        "sampler": chosen.sampler or part_text("sampler", method.sampler),
        "window": window_text(config),
        "credit": chosen.credit or part_text("credit", method.credit),
        "loss": chosen.loss or part_text("loss", method.loss, ("clip_range", "kl_weight")),
        "initial_noise": "shared" if method.shared_noise else "independent",
        **({} if clip is None else {"clip_range": f"{clip:.3g}"}),
        "kl_weight": f"{chosen.kl_weight:g}",
    }


def method_text(config: RunConfig, origins: Mapping[str, str]) -> str:
    """`method_parts` of the run `config` with the origin of each: that in `origins`, by setting, or
    the method.
    """
    values = {
        "sampler": config.algorithm.sampler,
        "window": config.algorithm.window,
        "credit": config.algorithm.credit,
    }
    values |= {"loss": config.algorithm.loss, "clip_range": config.algorithm.clip_range}
    values |= {"initial_noise": config.algorithm.initial_noise.replace("auto", "")}
    found = []
    for name, text in method_parts(config).items():
        origin = origins.get(name, "default") if values.get(name, True) else "method"
        found.append(f"{name} {text} [{origin}]")
    return ", ".join(found)


def part_text(kind: str, part: object, without: Sequence[str] = ()) -> str:
    """A `part` of some `kind` as its specification `without` some options, as in
    "flow-sde(noise_level=0.7)"; the class of a part without a name.
    """
    if isinstance(part, FixedWindow):
        return (
            f"{'' if part.start is None else part.start}:{'' if part.stop is None else part.stop}"
        )
    named = {made.rpartition(":")[2]: name for name, made in KINDS[kind].built_in.items()}
    name = named.get(type(part).__name__, type(part).__name__)
    values = (
        [item for item in fields(part) if item.init and item.name not in without]
        if is_dataclass(part)
        else []
    )
    changed = [
        item
        for item in values
        if getattr(part, item.name) != item.default or item.name == "noise_level"
    ]
    listed = ", ".join(f"{item.name}={_value(getattr(part, item.name))}" for item in changed)
    return f"{name}({listed})" if listed else name


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def even_stds(steps: int, sampler: AnySampler) -> torch.Tensor:
    """A sampler's standard deviations on an even grid.

    Args:
        steps: number of steps.
        sampler: the sampler.

    Returns:
        Standard deviations [step].
    """
    grid = uniform_schedule(steps)
    return transition_stds(sampler, grid)


def trained_policy(
    folder: Path, device: str = "", trust: bool = False
) -> tuple[FlowPolicy, RunConfig]:
    """The policy of a finished run with its averaged weights.

    Args:
        folder: the run's folder.
        device: name of the device; empty for the CPU, or for a model for the run's device if CUDA
            is available.
        trust: allow settings that name code (see `load_config`).

    Returns:
        The policy and the run's settings.

    Raises:
        ConfigError: the settings are not allowed.
        CheckpointError: the weights are missing, damaged or of another model.
    """
    if not (folder / "weights.safetensors").is_file():
        raise CheckpointError(
            f"weights: {folder / 'weights.safetensors'} does not exist; {folder} must be the folder"
            " of a finished run"
        )
    config = load_config(folder / "config.json", trust)
    own = config.policy.device if config.policy.model and torch.cuda.is_available() else "cpu"
    policy = make_policy(config, device or own)
    load_trained(policy, folder)
    return policy, config


def load_trained(policy: FlowPolicy, folder: Path) -> None:
    """Load the averaged weights of a finished run into its policy.

    Args:
        policy: the policy.
        folder: the run's folder.

    Raises:
        CheckpointError: the weights are missing, damaged or of another model.
    """
    path = folder / "weights.safetensors"
    tensors, named = load_weights(path), policy.trainable()
    if {name: parameter.shape for name, parameter in named.items()} != {
        name: t.shape for name, t in tensors.items()
    }:
        raise CheckpointError(
            f"weights: {path} does not hold the weights that {folder / 'config.json'} describes"
        )
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(tensors[name])
