"""What fits on the device, measured before the first iteration: the batch sizes that are auto.

The network's rows per call double from 1 while a step raises the trained pairs per second by a
factor of `GAIN` or more, and while twice the memory of the last call fits. The rollout has the same
rows, so that both compute with the same kernels. A fraction `HEADROOM` of a GPU's memory stays free
for fragmentation and what is not measured. On the CPU only the speed counts.

The result, a profile, is kept in the user's cache folder, one per model, device and settings, and
used again. The run's config.json contains it, so that a resumed or repeated run has the same sizes.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flowrl.core.errors import ConfigError, TrainingError, require
from flowrl.core.protocols import extras
from flowrl.policies.pipeline import RESIZABLE
from flowrl.run.build import policy_options
from flowrl.run.config import SIZES, RunConfig
from flowrl.run.io import cache_folder, write_bytes
from flowrl.run.parts.plugins import versions
from flowrl.run.parts.settings import grouped, read_settings, settings_text
from flowrl.trainer import Trainer

HEADROOM = 0.1
"""Fraction of the GPU's memory that stays free."""
GAIN = 1.05
"""Smallest ratio of the evaluations per second of a larger batch to those of the smaller one."""
REPEATS = 3
"""Timed calls per size; the fastest one counts."""
LIMIT = 60.0
"""Seconds after which no further size is tried."""


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of PyTorch's tensors on a GPU since `reset_peak_memory`, of this process on the
    CPU since its start.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak; without effect on the CPU, whose peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class Measured(NamedTuple):
    """A network call: bytes `held` before it (also without a call), its `peak`, and the fastest of
    several durations in `seconds`. Bytes are 0 on the CPU.
    """

    held: int
    peak: int
    seconds: float


def measured(trainer: Trainer, batch: int, work: str) -> Measured:
    """Memory and time of a call for `batch` latents: "update" or "decode"."""
    device, durations = trainer.policy.device, []
    on_gpu = device.type == "cuda"
    call = decoded if work == "decode" else trained
    if batch == 1:
        call(trainer, 1)  # allocates permanent memory: handles, workspaces
    held = torch.cuda.memory_allocated(device) if on_gpu else 0
    reset_peak_memory(device)
    for _ in range(REPEATS):
        start = time.perf_counter()
        call(trainer, batch)
        if on_gpu:
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    return Measured(held, peak_memory(device) if on_gpu else 0, min(durations))


def velocities(trainer: Trainer, batch: int, train: bool = True) -> torch.Tensor:
    """The network's output for `batch` latents of noise, with a gradient if `train`. Uses a
    separate generator, so that the run's results do not change.
    """
    policy = trainer.policy
    generator = torch.Generator(policy.device).manual_seed(0)
    latent = torch.randn(batch, *policy.latent_shape, generator=generator, device=policy.device)
    timestep = trainer.schedule.network_timesteps[:1].to(policy.device).expand(batch)
    first_prompt = torch.zeros(batch, dtype=torch.long, device=policy.device)
    rows = policy.encode(trainer.prompts.prompts[:1]).take(first_prompt)
    with nullcontext() if train else policy.frozen():
        return policy.velocity(latent, timestep, rows)


def trained(trainer: Trainer, batch: int) -> None:
    """A network call with its backward pass; leaves no gradient."""
    try:
        velocities(trainer, batch).square().mean().backward()
    finally:  # also if memory has run out
        trainer.optimizer.zero_grad()


def decoded(trainer: Trainer, batch: int) -> None:
    """A call of the image decoder for `batch` latents."""
    policy = trainer.policy
    extras(policy, "resize").resize(decode_batch=batch)
    policy.decode(torch.zeros(batch, *policy.latent_shape, device=policy.device))


def room(trainer: Trainer, config: RunConfig) -> float:
    """Bytes that a network call of this process may use; infinite on the CPU.

    Free memory and PyTorch's reserve, less the headroom and what training will need in addition:
    this process's trajectories (nodes and velocities in float32), and the optimizer's moments.
    """
    device = trainer.policy.device
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    rollout, latent = config.rollout, 4 * math.prod(trainer.policy.latent_shape)
    groups = 0 if rollout.offload else trainer.processes.assign(rollout.groups).count
    trajectories = groups * rollout.group_size * (2 * rollout.num_steps + 1) * latent
    bytes_per_weight = 8 if config.optim.optimizer == "adamw" else 2
    weights = 0 if trainer.optimizer.state else sum(p.numel() for p in trainer.parameters.values())
    usable = free + torch.cuda.memory_reserved(device) - HEADROOM * total
    return usable - trajectories - bytes_per_weight * weights


@contextmanager
def out_of_memory() -> Iterator[None]:
    """A context that turns a GPU's "out of memory" into a `TrainingError` with settings that need
    less memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"GPU memory ran out: {str(error).splitlines()[0]} Use a smaller micro_batch"
            " (updates), max_batch (sampling) or decode_batch (images), gradient_checkpointing,"
            " chunk 1 or offload. To continue from a checkpoint, give them together with --resume"
        ) from error


def grow(
    trainer: Trainer,
    config: RunConfig,
    work: str,
    limit: int,
    deadline: float = math.inf,
    first: int = 1,
) -> tuple[float, int]:
    """The largest of the batches `first`, 2 `first`, ... and `limit` at which a step still gains a
    factor of `GAIN` in speed (0: not even `first` fits), after its latents per second. It is the
    same in all processes: that of the slowest, and of the one with the least free memory. No batch
    is begun after the `deadline`.
    """
    distributed, rate, best, batch, fits = trainer.processes, 0.0, 0, first, True
    while fits:
        seconds = math.inf
        with distributed.shared_errors():
            try:
                call, free = measured(trainer, batch, work), room(trainer, config)
                seconds = call.seconds if call.peak <= free else math.inf
                fits = 2 * call.peak - call.held <= free
            except torch.OutOfMemoryError:
                # with sharded weights the other processes wait inside the network
                if distributed.sharded and distributed.world_size > 1:
                    raise
        current = batch / max(distributed.gather(seconds))
        if current <= GAIN * rate:
            break
        rate, best = current, batch
        in_time = batch < limit and time.monotonic() < deadline
        fits = not distributed.any(not (fits and in_time))
        batch = min(2 * batch, limit)
    return rate, best


def find_sizes(trainer: Trainer, config: RunConfig) -> tuple[dict[str, Any], str]:
    """The auto sizes of a model, from the profile in the user's cache or measured on `trainer`, and
    a text about them; none for built-in worlds. The trainer's policy gets them; it is then that of
    another trainer with these sizes.

    All processes call this. Raises `ConfigError` if not even a batch of 1 fits.
    """
    wanted = [name for name in SIZES if config.flat()[name] is None]
    if "micro_batch" not in wanted or config.rollout.max_batch is not None:
        # one of the two follows from the other
        wanted = [name for name in wanted if name not in ("micro_batch", "max_batch")]
    resize = extras(trainer.policy, "resize", "velocity_network")
    if not config.policy.model or resize is None or not wanted:
        return {}, ""
    path = profile_path(trainer, config)
    largest = max(config.policy.training_sizes, key=math.prod)
    found = trainer.processes.in_main(lambda: cached_profile(path))
    if found.keys() == {*wanted} - {"max_batch"}:
        profile = f"sizes from {path}"
    else:
        began = time.monotonic()
        sized = extras(trainer.policy, "at_size")
        with sized.at_size(*largest) if config.policy.sizes else nullcontext():
            found = measured_sizes(trainer, config, wanted, began + LIMIT)
        profile = f"sizes measured in {time.monotonic() - began:.0f} s, "
        if trainer.processes.is_main:
            try:
                write_bytes(path, settings_text(grouped(RunConfig, found), SUMMARY).encode())
                profile += f"kept in {path}"
            except OSError as error:  # the next run measures again
                profile += f"not kept in {path} ({error.strerror})"
    options = policy_options(config.replace(**found))
    text = ", ".join(f"{name} {value}" for name, value in found.items())
    profile += f": {text}; {options.rows or 'any number of'} network rows per call"
    resize.resize(**{name: getattr(options, name) for name in RESIZABLE})
    if trainer.policy.device.type == "cuda":
        torch.cuda.empty_cache()
    return found, profile


SUMMARY = "Measured batch sizes; reuse them with: flowrl train --profile FILE"


def measured_sizes(
    trainer: Trainer, config: RunConfig, wanted: list[str], deadline: float
) -> dict[str, Any]:
    """Measured values of the `wanted` sizes."""
    policy = extras(trainer.policy, "resize")
    rollout, sizes = config.rollout, config.batches
    samples = trainer.processes.assign(rollout.groups, 0).count * rollout.group_size
    first = limit = sizes.micro_batch
    if "micro_batch" in wanted:
        first, limit = 1, math.ceil(samples * rollout.num_steps / config.optim.minibatches)
    choices = [sizes.gradient_checkpointing]
    if "gradient_checkpointing" in wanted:
        choices = [False, True]
    policy.resize(rows=0)
    rates = {}
    for checkpointing in choices:
        policy.resize(gradient_checkpointing=checkpointing)
        rates[checkpointing] = grow(trainer, config, "update", limit, deadline, first)
    fastest = max(rates, key=rates.__getitem__)
    rate, batch = rates[fastest]
    need = "more GPU memory: a smaller resolution, lora_rank, dtype or model, chunk 1 or offload"
    require(batch > 0, "micro_batch", config.typed()["micro_batch"], need)
    policy.resize(gradient_checkpointing=fastest)
    found: dict[str, Any] = {"micro_batch": batch, "gradient_checkpointing": fastest}
    if "compile" in wanted:
        found["compile"] = compiling_pays(trainer, config, batch, rate, deadline)
    if "decode_batch" in wanted:
        most = max(1, min(samples, MOST_IMAGES))
        own = config.evaluation.eval_resolution is not None
        sizes = (*config.policy.training_sizes, config.as_evaluated().policy.size)
        with policy.at_size(*max(sizes, key=math.prod)) if own else nullcontext():
            found["decode_batch"] = max(1, grow(trainer, config, "decode", most, deadline)[1])
    return {name: value for name, value in found.items() if name in wanted}


MOST_IMAGES = 64
"""Largest number of images per call of the decoder that is tried."""


def compiling_pays(
    trainer: Trainer, config: RunConfig, batch: int, rate: float, deadline: float
) -> bool:
    """Whether the compiled network is faster than `rate` and computes the same velocities with and
    without gradients; False on the CPU or without time.
    """
    distributed, policy = trainer.processes, extras(trainer.policy, "resize")
    late = trainer.policy.device.type != "cuda" or time.monotonic() > deadline - LIMIT / 2
    if distributed.any(late):
        return False
    policy.resize(compile=True)
    compiled, _ = grow(trainer, config, "update", batch, deadline, batch)
    with torch.no_grad():
        sampled = velocities(trainer, batch, train=False)
    same = torch.equal(sampled, velocities(trainer, batch).detach())
    return not distributed.any(not same) and compiled > GAIN * rate


def profile_path(trainer: Trainer, config: RunConfig) -> Path:
    """The file of the profile for this model, device, number of processes and settings."""
    device, shared = trainer.policy.device, trainer.processes
    network: Any = extras(trainer.policy, "velocity_network").velocity_network
    policy = {n: v for n, v in vars(config.policy).items() if n not in ("model", "prompt_cache")}
    given = {
        "network": [type(network).__name__, dict(getattr(network, "config", {}))],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processes": [shared.world_size, shared.sharded, getattr(shared, "replicas", 1)],
        "policy": policy,
        "evaluated": config.as_evaluated().policy.size,
        "rollout": vars(config.rollout),
        "optim": vars(config.optim),
        "rewards": [config.environment.sources.reward, config.evaluation.heldout_rewards],
        "versions": versions(),
    }
    digest = hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode())
    return cache_folder() / "profiles" / f"{digest.hexdigest()[:16]}.yaml"


def cached_profile(path: Path) -> dict[str, Any]:
    """The sizes in the file; none if it is missing or damaged."""
    with suppress(OSError, ConfigError):
        return profile_of(path)
    return {}


def profile_of(path: Path) -> dict[str, Any]:
    """The sizes in a profile's file. Raises `ConfigError` for a file with other settings."""
    settings = read_settings(path, RunConfig).settings
    others = sorted(settings.keys() - {*SIZES})
    require(not others, str(path), others, f"sizes only: {', '.join(SIZES)}")
    return settings
