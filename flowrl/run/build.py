"""From settings to parts: worlds, methods, rewards, policies and trainers."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from flowrl.core.errors import require
from flowrl.core.experience import needs_of
from flowrl.core.policy_options import PolicyOptions
from flowrl.core.processes import Processes
from flowrl.core.protocols import (
    AnyReward,
    FlowPolicy,
    GroupReward,
    MultistepSolver,
    RewardModel,
    Stateful,
    TimeDraw,
    World,
)
from flowrl.core.types import Prompt
from flowrl.flow import uniform_schedule
from flowrl.methods import METHODS, Method, check_one_advantage, try_credit, with_options
from flowrl.probes import NoProbe
from flowrl.rewards import NoisyReward
from flowrl.rewards.contract import is_remote, load_reward
from flowrl.rollout.ascent import reward_slopes
from flowrl.rollout.groups import PromptStream
from flowrl.run.config import RunConfig
from flowrl.run.distributed import Distributed
from flowrl.run.evaluation import make_heldout_metrics
from flowrl.run.optim import learning_rate_of, make_optimizer, prepare_policy, reference_weights
from flowrl.run.parts.registry import KINDS, build, check_spec
from flowrl.run.parts.specs import parse_slice, parse_spec
from flowrl.run.reward_guard import RewardGuard
from flowrl.run.reward_pool import pooled
from flowrl.run.saved import find_weights
from flowrl.run.worlds import ModelWorld, check_hash, check_policy, prompts_of, world
from flowrl.samplers import ODE, FixedWindow, RandomSteps, trained_steps, transition_stds, windowed
from flowrl.trainer import Trainer, Updates

Made = TypeVar("Made", bound=Trainer)


def make_world(config: RunConfig, distributed: Distributed = Distributed()) -> World:
    """The world that `world` names or is, or the world of a model, its prompts and its reward. Of
    all processes the main one alone reads the prompts, and a model's weights if they are sharded.

    Raises `ConfigError` for a task or a form that the world does not have.
    """
    environment, model = config.environment, config.policy.model
    if model:
        device = environment.reward_device or config.policy.device
        places = [place for place, _ in config.evaluation.measured if place]
        given = environment.sources, device, distributed, environment.hold_out, places
        chosen = ModelWorld(model, *given)
    else:
        chosen = world(environment.world)
    for name, value, known in (
        (f"task of world {chosen.name}", environment.task, chosen.tasks),
        ("reward_form", environment.reward_form, chosen.forms),
    ):
        require(value in known, name, value, f"one of {', '.join(known)}")
    return chosen


def named_method(name: str, credit: str | None = None) -> Method:
    """A method by name, as published, or with the credit rule of the spec `credit`, whose
    `Needs.shared_noise` replaces the method's unless it is None. With `credit`, a further name is a
    label of Flow-GRPO with this rule. Raises `ConfigError` for an unknown name.
    """
    known = f"{', '.join(METHODS)}; any name with --credit"
    require(name in METHODS or bool(credit), "method", name, known)
    method = METHODS.get(name, METHODS["flow-grpo"])()
    if not credit:
        return method
    rule = build("credit", credit)
    shared = needs_of(rule).shared_noise
    shared = method.shared_noise if shared is None else shared
    return replace(method, name=name or credit, credit=rule, shared_noise=shared)


def run_method(config: RunConfig) -> Method:
    """The method by name, as published, with the run's credit rule, kernel, window, loss and
    numbers in place of its own.

    Settings that are None are the method's, the clip that for the elements of the world's latents
    (`Method.for_elements`). An option in the spec of a part wins over the setting of its name.
    Raises `ConfigError` for an unknown part, or for a policy loss with a method that needs a
    forward-process loss.
    """
    chosen, named = config.algorithm, config.environment.world
    method = named_method(chosen.method, chosen.credit)
    elements = 0 if config.policy.model else world(named).elements
    noise = {} if chosen.noise_level is None else {"noise_level": chosen.noise_level}
    clip = chosen.clip_range or method.clip_for(elements or method.elements)
    options = {"kl_weight": chosen.kl_weight, **({"clip_range": clip} if clip > 0 else {})}
    sampler, loss = with_options(method.sampler, **noise), with_options(method.loss, **options)
    if chosen.sampler:
        sampler = build("sampler", chosen.sampler, **noise)
    if chosen.loss:
        loss = build("loss", chosen.loss, **options)
    fits = replace(method, loss=loss).objective.draws_times or not method.objective.draws_times
    require(fits, "loss", chosen.loss, f"a forward-process loss with {chosen.method}")
    shared = {None: method.shared_noise, "shared": True, "independent": False}
    credit = method.credit
    if getattr(credit, "seed", 0) is None:  # a rule that draws; None is the run's seed
        credit = with_options(credit, seed=config.seed)
    window = method.window
    if chosen.window:
        window = build("window", chosen.window)
    return replace(
        method,
        sampler=sampler,
        window=window,
        loss=loss,
        credit=credit,
        shared_noise=shared[chosen.initial_noise],
    )


def make_method(config: RunConfig) -> Method:
    """The method of a run (`run_method`); its rule is applied to a random table as a check.

    Raises `ConfigError` if no step is stochastic or none is trained, or for an unknown part;
    `CreditError` if the rule breaks its contract.
    """
    method, stds, steps = run_method(config), trial_stds(config), config.rollout.num_steps
    if method.objective.draws_times:
        times: TimeDraw = cast(Any, method.loss).times
        times.draw(uniform_schedule(steps), 1, torch.Generator().manual_seed(0))
        spec = config.algorithm.trained_steps
        require(spec == ":", "trained_steps", spec, "':': this loss draws training times")
        config.loss_guidance()  # raises for a scale that is not allowed
        trained = None
    else:
        need = "left out: log-probabilities are those of the velocities that sample"
        for name in ("train_guidance_scale", "reference_guidance_scale"):
            scale = getattr(config.policy, name)
            require(scale is None, name, scale, need)
        trained = first_trained_steps(config)
    several = len(config.environment.sources.train) > 1
    fits = not (
        several
        and isinstance(method.credit, Stateful)
        and "prompts" not in needs_of(method.credit).fields
    )
    allowed = (
        "one without a memory, or with a memory by prompt: there are several sources of prompts"
    )
    require(fits, "credit", type(method.credit).__name__, allowed)
    # if the sampler draws no transition, the initial noise is the only decision
    fits = bool((stds > 0).any()) or isinstance(method.credit.probe, NoProbe)
    sampler = part_text("sampler", method.sampler)
    allowed = f"one that credits the image, such as uniform: {sampler} draws no transition"
    require(fits, "credit", type(method.credit).__name__, allowed)
    experience, credit = try_credit(method, stds, config.rollout.group_size, trained)
    check_one_advantage(method.loss, method.credit, credit.advantages, experience.decisions.mask)
    return method


def prompts_to_embed(
    config: RunConfig, world: World, stream: PromptStream, done: int = 0
) -> list[Prompt]:
    """The held-out prompts of a run's evaluations, and those of all iterations after `done`."""
    evaluation, task = config.evaluation, config.environment.task
    count = max(evaluation.eval_samples, evaluation.diversity_prompts)
    coming = stream.upcoming((config.iterations - done) * config.rollout.groups)
    others = [prompt for found in getattr(world, "others", {}).values() for prompt in found[:count]]
    return [*prompts_of(world, task, "heldout")[:count], *others, *coming]


def make_reward(config: RunConfig) -> AnyReward:
    """The training reward: `reward`, or the task's reward in `reward_form`, with the run's noise
    and bias.
    """
    environment = config.environment
    if spec := environment.sources.reward:
        device = environment.reward_device or config.policy.device
        model: AnyReward = build("reward", spec, device=device)
    else:
        model = make_world(config).reward(environment.reward_form)
    errors = environment.reward_noise, environment.reward_bias
    if errors == (0, 0):
        return model
    allowed = f"0 with {type(model).__name__}, which compares samples"
    require(not isinstance(model, GroupReward), "reward_noise, reward_bias", errors, allowed)
    return NoisyReward(cast(RewardModel, model), *errors, config.seed)


def check(config: RunConfig) -> World:
    """The world. Raises an error if the world, the method or a name of a reward in `config` is not
    allowed; builds no network. `flowrl.run.checks` checks the files, devices and packages, too.
    """
    world = make_world(config)
    make_method(config)
    if spec := config.environment.sources.reward:
        check_spec("reward", spec)
    RewardGuard.of(config)
    make_heldout_metrics(config, world)
    for spec in config.logging.observe:
        check_spec("observer", spec)
    if reference := config.policy.reference:
        find_weights(reference, option="reference")
    if config.policy.base_weights and config.environment.world in KINDS["world"].built_in:
        check_hash(Path(config.policy.base_weights))
    return world


def make_policy(config: RunConfig) -> FlowPolicy:
    """The untrained policy."""
    return make_world(config).policy(policy_options(config))


def make_trainer(
    config: RunConfig,
    distributed: Distributed = Distributed(),
    world: World | None = None,
    policy: FlowPolicy | None = None,
    guard: RewardGuard | None = None,
    report: Callable[[dict[str, Any]], None] = lambda state: None,
    **given: Any,
) -> Trainer:
    """A trainer of `config`; `world`, `policy` and the `guard` of its reward are those of `config`
    if they are already made, and `given` further arguments of `Trainer`. Sizes that are auto have
    their defaults (`run.sizes.find_sizes`). `report` is called while prompts are embedded.

    Raises `ConfigError` if a setting is not allowed, the policy or the prompts do not fit, or the
    trajectories do not fit into main memory.
    """
    world = make_world(config, distributed) if world is None else world
    method = make_method(config)
    # before the policy: errors, as of a missing file of weights, should not wait for a large model
    reward = make_reward(config)
    if overlaps_rewards(config, reward):
        reward = pooled(reward)
    reward = (guard or RewardGuard.of(config)).around(reward)
    load_reward(reward)
    prompts = prompts_of(world, config.environment.task, "train")
    prompts_of(world, config.environment.task, "heldout")
    if policy is None:
        options = policy_options(config, distributed)
        if isinstance(world, ModelWorld):
            every = prompts_to_embed(config, world, PromptStream(prompts, config.seed))
            world.embed(options, every, distributed, report)
        policy = world.policy(options)
        check_policy(world, policy)
    require_room(config, policy, distributed.world_size)
    return build_trainer(config, policy, method, reward, prompts, distributed, **given)


def build_trainer(
    config: RunConfig,
    policy: FlowPolicy,
    method: Method,
    reward: AnyReward,
    prompts: Sequence[Prompt],
    distributed: Distributed = Distributed(),
    kind: type[Made] = Trainer,
    **given: Any,
) -> Made:
    """A trainer of these parts with the numbers of `config`; `given` are further arguments of
    `Trainer`.
    """
    rollout, optim, batches = config.rollout, config.optim, config.batches
    prepare_policy(policy, distributed, batches.compile)
    if getattr(method.loss, "ascends", None) in ("image", "estimate"):
        # an error of a reward without a gradient should not wait for the first rollout
        clean = torch.zeros(1, *policy.latent_shape, device=policy.device)
        reward_slopes(policy, reward, clean, prompts[:1])
    updates = Updates(
        optim.minibatches,
        batches.micro_batch,
        optim.max_grad_norm,
        optim.ema_decay,
        optim.loss_scale if config.policy.dtype == "float16" else 0.0,
        steps_of(config.algorithm.trained_steps),
        config.algorithm.drop_zero_advantages,
        config.loss_guidance(),
        learning_rate_of(optim, config.iterations),
    )
    return kind(
        policy,
        method,
        reward,
        prompts,
        groups=rollout.groups,
        members=rollout.group_size,
        steps=rollout.num_steps,
        optimizer=partial(make_optimizer, optim),
        updates=updates,
        seed=config.seed,
        max_batch=batches.max_batch,
        chunk=rollout.chunk,
        overlap=overlaps_rewards(config, reward),
        offload=rollout.offload,
        reference=reference_weights(config.policy.reference, policy, distributed),
        processes=distributed if distributed.world_size > 1 else Processes(),
        **given,
    )


def overlaps_rewards(config: RunConfig, reward: AnyReward) -> bool:
    """Whether a chunk is scored during the rollout of the next one; auto: if there are chunks, and
    the policy is on a GPU or a server computes the reward. Others would share the policy's cores.
    """
    rollout, elsewhere = config.rollout, config.policy.device != "cpu" or is_remote(reward)
    return (
        rollout.chunk != 0 and elsewhere
        if rollout.overlap_rewards is None
        else rollout.overlap_rewards
    )


def steps_of(text: str) -> slice | RandomSteps:
    """The setting `trained_steps` as an object. Raises `ConfigError` for another text."""
    fixed = parse_slice(text)
    if fixed is not None:
        return fixed
    parsed = parse_spec(text, "trained_steps")
    fraction: Any = parsed.options.get("fraction")
    fits = parsed.name == "random" and parsed.options.keys() == {"fraction"}
    fits = fits and type(fraction) in (int, float) and 0 < fraction <= 1
    allowed = "a slice START:STOP as in : or :-1, or random(fraction=...) in (0, 1]"
    require(fits, "trained_steps", text, allowed)
    return RandomSteps(fraction)


def require_room(config: RunConfig, policy: FlowPolicy, processes: int) -> None:
    """Raise `ConfigError` if the trajectories (nodes and velocities in float32) of this process do
    not fit into main memory, if the `processes` on this machine share it.
    """
    rollout, shapes = config.rollout, getattr(policy, "latent_shapes", [policy.latent_shape])
    latent_shape = max(shapes, key=math.prod)
    latents = rollout.groups * rollout.group_size * (2 * rollout.num_steps + 1)
    needed = 4 * math.prod(latent_shape) * latents // processes
    if hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        size = f"{memory / 1e9:.3g} GB; its trajectories take {needed / 1e9:.3g} GB"
        require(needed <= memory, "groups", rollout.groups, f"what fits into {size}")


def policy_options(config: RunConfig, distributed: Distributed = Distributed()) -> PolicyOptions:
    """The run's group `policy` with sizes in place of auto, and what follows from other settings:
    the seed, the rows of a call, whether a loss compares with the base model, and where the weights
    are loaded.
    """
    policy, sizes = config.policy, vars(config.batches)
    settings = {name: value for name, value in sizes.items() if hasattr(policy, name)}
    load_to = ("cpu" if distributed.is_main else "meta") if distributed.sharded else "device"
    keep = run_method(config).loss.needs_reference and not policy.reference
    own: dict[str, Any] = {"seed": config.seed, "keep_reference": keep, "load_to": load_to}
    return replace(policy, **settings, **own)


def trial_stds(config: RunConfig) -> torch.Tensor:
    """The sampler's standard deviations on an even grid [step], for checks before anything is
    built.

    Raises `ConfigError` without a stochastic step, unless the loss needs none.
    """
    method, count = run_method(config), config.rollout.num_steps
    first = windowed(method.sampler, method.window, count, torch.Generator().manual_seed(0))
    stds = transition_stds(first, uniform_schedule(count))
    if not method.objective.draws_times:
        kernel, stochastic = part_text("sampler", method.sampler), bool((stds > 0).any())
        fits = not isinstance(method.sampler, ODE | MultistepSolver)
        require(fits, "sampler", kernel, "a stochastic sampler: the loss needs log-probabilities")
        require(stochastic, "window", config.algorithm.window or "", "at least one stochastic step")
    return stds


def first_trained_steps(config: RunConfig) -> torch.Tensor:
    """The steps of the first iteration's loss; every iteration has equally many.

    Raises `ConfigError` if there are none, or if a later iteration may have none.
    """
    chosen = config.algorithm.trained_steps
    fixed = isinstance(run_method(config).window, FixedWindow)
    fits = fixed or parse_slice(chosen) in (None, slice(None))
    need = "':' or random(fraction=...) with a window that changes between iterations"
    require(fits, "trained_steps", chosen, need)
    return trained_steps(steps_of(chosen), trial_stds(config), torch.Generator())


def method_parts(config: RunConfig) -> dict[str, str]:
    """What the run's method consists of, by setting: the parts as specifications, the numbers, and
    the initial noise.
    """
    method, chosen = run_method(config), config.algorithm
    parts = {
        kind: getattr(chosen, kind) or part_text(kind, getattr(method, kind))
        for kind in ("sampler", "window", "credit", "loss")
    }
    share = method.shared_noise
    names = "independent", "shared"
    whole = share in (0, 1)
    parts["initial_noise"] = names[int(share)] if whole else f"{share:.4g} of its variance shared"
    clip = getattr(method.loss, "clip_range", None)
    if clip is not None:
        parts["clip_range"] = f"{clip:.3g}"
    return {**parts, "kl_weight": f"{chosen.kl_weight:g}"}


METHOD_FILE = "method.json"
"""The `method_parts` of a run, in its folder: to compute them again may need the user's code."""


def method_text(config: RunConfig) -> str:
    """`method_parts` on one line; "[method]" marks parts that no setting replaces."""
    texts = []
    for name, text in method_parts(config).items():
        is_own = getattr(config.algorithm, name) is None
        texts.append(f"{name} {text}" + " [method]" * is_own)
    return ", ".join(texts)


def part_text(kind: str, part: object) -> str:
    """A `part` of some `kind` as its specification, as in "flow-sde(noise_level=0.7)"; the class of
    a part without a name.
    """
    if isinstance(part, FixedWindow):
        return ":".join("" if end is None else str(end) for end in (part.start, part.stop))
    class_name, options = type(part).__name__, []
    known = {maker.partition(":")[2]: name for name, maker in KINDS[kind].built_in.items()}
    for item in fields(part) if is_dataclass(part) else ():
        # clip and KL weight are settings of their own
        if item.init and item.name not in ("clip_range", "kl_weight"):
            value = getattr(part, item.name)
            if value != item.default or item.name == "noise_level":
                text = f"{value:.3g}" if isinstance(value, float) else str(value)
                options.append(f"{item.name}={text}")
    name = known.get(class_name, class_name)
    return f"{name}({', '.join(options)})" if options else name
