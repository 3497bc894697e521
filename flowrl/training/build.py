"""From settings to parts: worlds, methods, rewards, policies, trainers and the policies of finished runs."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flowrl.distributed import Distributed
from flowrl.errors import CheckpointError, ConfigError, require
from flowrl.flow import uniform_schedule
from flowrl.methods import Method, check_one_advantage, make_sampler, method_loss, named_method, try_credit
from flowrl.policies.pipeline import ModelOptions
from flowrl.protocols import AnyReward, FlowPolicy, ForwardLoss, GroupReward, PolicyLoss, RandomSampler, Sampler
from flowrl.registry import build, find_maker
from flowrl.rewards import NoisyReward
from flowrl.samplers import trained_steps, transition_stds
from flowrl.specs import parse_spec
from flowrl.training.batches import find_batches
from flowrl.training.checkpoint import load_weights
from flowrl.training.config import RunConfig, load_config
from flowrl.training.heldout import make_heldout_metrics
from flowrl.training.trainer import Trainer, loss_guidance
from flowrl.types import Schedule
from flowrl.worlds.base import PolicyOptions, World, check_hash, model_world, world


def make_world(config: RunConfig) -> World:
    """The world by name, or the world of a model, its prompts and its reward.

    Raises `ConfigError` for a task or a form that the world does not have.
    """
    environment, model = config.environment, config.policy.model
    chosen = world(environment.world) if not model else model_world(
        model, environment.prompts, environment.heldout_prompts, environment.reward, model_options(config)
    )  # fmt: skip
    tasks, forms = chosen.tasks, chosen.forms
    require(environment.task in tasks, f"task of world {environment.world}", environment.task, f"one of {', '.join(tasks)}")
    require(environment.reward_form in forms, "reward_form", environment.reward_form, f"one of {', '.join(forms)}")
    return chosen


def make_method(config: RunConfig) -> Method:
    """The method by name, with this run's sampler, clip and KL weight; its rule is applied to a random table as a check.

    Raises `ConfigError` if no step is stochastic or none is trained, or for an unknown part; `CreditError` if the rule breaks its
    contract.
    """
    algorithm = config.algorithm
    schedule, loss = trial_schedule(config), make_loss(config)
    if isinstance(loss, ForwardLoss):
        loss.times.draw(schedule, 1, torch.Generator().manual_seed(0))
        require(algorithm.trained_steps == "all", "trained_steps", algorithm.trained_steps, "all: this loss draws training times")
        loss_guidance(config)
    else:
        allowed = "left out: log-probabilities are those of the velocities that sample; a forward-process loss may train others"
        for name in ("train_guidance_scale", "reference_guidance_scale"):
            require(getattr(config.policy, name) == 0, name, getattr(config.policy, name), allowed)
        first_trained_steps(config)
    sampler = run_sampler(config)
    shared = None if algorithm.initial_noise == "auto" else algorithm.initial_noise == "shared"
    method = named_method(algorithm.method, sampler, loss, algorithm.credit, shared)
    advantages = try_credit(method.credit, schedule, config.rollout.group_size)
    if not isinstance(loss, ForwardLoss):
        check_one_advantage(loss, method.credit, advantages.flatten(0, 1), first_trained_steps(config))
    return method


def make_loss(config: RunConfig) -> PolicyLoss | ForwardLoss:
    """The loss by name, with this run's clip and KL weight if it has such options and the spec does not set them.

    For "clipped" with a forward-process method, the method's published loss (`flowrl.methods.method_loss`).
    """
    algorithm = config.algorithm
    return method_loss(algorithm.method, algorithm.loss, clip_range=algorithm.clip_range, kl_weight=algorithm.kl_weight)


def make_reward(config: RunConfig) -> AnyReward:
    """The training reward: `reward`, or the task's reward in `reward_form`, with the run's noise and bias."""
    environment = config.environment
    if environment.reward:
        model: AnyReward = build("reward", environment.reward, device=config.policy.device)
    else:
        model = make_world(config).reward(environment.reward_form)
    if environment.reward_noise == 0 and environment.reward_bias == 0:
        return model
    if isinstance(model, GroupReward):
        noise, name = (environment.reward_noise, environment.reward_bias), type(model).__name__
        raise ConfigError(f"reward_noise, reward_bias = {noise} are not allowed; allowed: 0 with {name}, which compares samples")
    return NoisyReward(model, environment.reward_noise, environment.reward_bias, config.seed)


def check(config: RunConfig) -> None:
    """Raise an error if the world, the method or a name of a reward in `config` is not allowed; builds no network."""
    world = make_world(config)
    make_method(config)
    if config.environment.reward:
        find_maker("reward", parse_spec(config.environment.reward, "reward"))
    make_heldout_metrics(config, world)
    if config.policy.base_weights:
        check_hash(Path(config.policy.base_weights))


def make_policy(config: RunConfig, device: str = "") -> FlowPolicy:
    """The untrained policy.

    Args:
        config: the run.
        device: name of the device; empty for the run's.

    Returns:
        The policy.
    """
    return make_world(config).policy(replace(policy_options(config), device=device or config.policy.device))


def make_trainer(config: RunConfig, distributed: Distributed = Distributed(), world: World | None = None) -> Trainer:
    """A trainer of `config`, in whose own `config` the auto sizes are replaced by measured ones (`training.batches`).

    Args:
        config: the run.
        distributed: the processes.
        world: the world that provides policy, reward and prompts; None for the run's.

    Returns:
        The trainer.

    Raises:
        ConfigError: a setting is not allowed, or the trajectories do not fit into main memory.
    """
    world, method = world or make_world(config), make_method(config)
    reward = make_reward(config)  # before the policy: its errors should not wait for a large model
    prompts = world.prompts(config.environment.task, "train")
    policy = world.policy(policy_options(config))
    require_room(config, policy.latent_shape, distributed.world_size)
    trainer = Trainer(policy, method, reward, prompts, config, distributed)
    find_batches(trainer)
    return trainer


def require_room(config: RunConfig, latent_shape: Sequence[int], processes: int) -> None:
    """Check that the trajectories (nodes and velocities in float32) fit into this machine's main memory.

    Args:
        config: the run.
        latent_shape: shape of one latent.
        processes: number of processes on this machine.

    Raises:
        ConfigError: the trajectories are too large.
    """
    rollout = config.rollout
    needed = 4 * math.prod(latent_shape) * rollout.groups * rollout.group_size * (2 * rollout.num_steps + 1) // processes
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else needed
    sizes = f"{rollout.groups} x {rollout.group_size} samples of {rollout.num_steps} steps"
    found = f"{sizes} take {needed / 1e9:.3g} GB, and the machine has {there / 1e9:.3g} GB"
    require(needed <= there, "groups", rollout.groups, found)


def model_options(config: RunConfig) -> ModelOptions:
    """The policy options of the run's diffusers pipeline."""
    p = config.policy
    return ModelOptions(
        height=p.resolution, width=p.width or p.resolution, num_frames=p.num_frames, guidance_scale=p.guidance_scale,
        tuning=p.tuning, negative_prompt=p.negative_prompt, guidance_gradient=p.guidance_gradient, lora_targets=p.lora_targets,
        prompt_cache=p.prompt_cache, adapter=p.adapter,
        max_sequence_length=p.max_sequence_length, gradient_checkpointing=p.gradient_checkpointing,
        keep_reference=make_loss(config).needs_reference, lora_rank=p.lora_rank, lora_alpha=p.lora_alpha, seed=config.seed,
        device=p.device, dtype=p.dtype, frozen_adapters=tuple(filter(None, p.frozen_adapters.split(","))),
        attention_backend=p.attention_backend,
        compile="inductor" if p.compile else "", decode_batch=p.decode_batch, decode_dtype=p.decode_dtype,
    )  # fmt: skip


def policy_options(config: RunConfig) -> PolicyOptions:
    """The options of the world's policy; the seed draws the adapter's initial matrices."""
    p = config.policy
    return PolicyOptions(p.lora_rank, p.lora_alpha, config.seed, p.device, p.dtype, p.base_weights)


def trial_schedule(config: RunConfig) -> Schedule:
    """An even grid with this run's stds, for checks before anything is built.

    Raises `ConfigError` without a stochastic step, unless the loss needs none.
    """
    algorithm = config.algorithm
    schedule = even_schedule(config.rollout.num_steps, run_sampler(config))
    stds = schedule.stds
    if isinstance(make_loss(config), ForwardLoss):
        return schedule
    need = "a stochastic sampler: the loss needs log-probabilities, and a step of the ODE or of a multistep solver has none"
    kernel = algorithm.sampler.partition("(")[0].strip()
    require(kernel not in ("ode", "multistep"), "sampler", algorithm.sampler, need)
    require(algorithm.noise_level > 0, "noise_level", algorithm.noise_level, f"above 0, with {need}")
    require(stds is not None and bool((stds > 0).any()), "window", algorithm.window, "at least one stochastic step")
    return schedule


def first_trained_steps(config: RunConfig) -> torch.Tensor:
    """The steps of the first iteration's loss; every iteration has equally many.

    Raises `ConfigError` if there are none, or if a later iteration may have none.
    """
    chosen, sampler = config.algorithm.trained_steps, run_sampler(config)
    fits = not isinstance(sampler, RandomSampler) or chosen == "all" or chosen.startswith("random:")
    require(fits, "trained_steps", chosen, "all or random:FRACTION with stochastic steps that are drawn every iteration")
    return trained_steps(chosen, trial_schedule(config), torch.Generator())


def run_sampler(config: RunConfig) -> Sampler | RandomSampler:
    """The run's sampler; for the default "flow-sde", the method's published sampler if it has one
    (`flowrl.methods.OWN_SAMPLERS`).
    """
    algorithm = config.algorithm
    return make_sampler(algorithm.sampler, algorithm.noise_level, algorithm.window, algorithm.method)


def even_schedule(steps: int, sampler: Sampler | RandomSampler) -> Schedule:
    """An even grid with a sampler's stds; for a sampler that changes between iterations, those of its first draw.

    Args:
        steps: number of steps.
        sampler: the sampler.

    Returns:
        The schedule.
    """
    grid = uniform_schedule(steps)
    if isinstance(sampler, RandomSampler):
        sampler = sampler.draw(grid, torch.Generator().manual_seed(0))
    return replace(grid, stds=transition_stds(sampler, grid))


def trained_policy(folder: Path, device: str = "", trust: bool = False) -> tuple[FlowPolicy, RunConfig]:
    """The policy of a finished run with its averaged weights.

    Args:
        folder: the run's folder.
        device: name of the device; empty for the CPU, or for a model for the run's device if CUDA is available.
        trust: allow settings that name code (see `load_config`).

    Returns:
        The policy and the run's settings.

    Raises:
        ConfigError: the settings are not allowed.
        CheckpointError: the weights are missing, damaged or of another model.
    """
    if not (folder / "weights.safetensors").is_file():
        raise CheckpointError(
            f"weights: {folder / 'weights.safetensors'} does not exist; {folder} must be the folder of a finished run"
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
    if {name: parameter.shape for name, parameter in named.items()} != {name: t.shape for name, t in tensors.items()}:
        raise CheckpointError(f"weights: {path} does not hold the weights that {folder / 'config.json'} describes")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(tensors[name])
