"""What fits on the device, measured before the first iteration: the sizes of settings that are
auto.

Automatic `micro_batch` and `max_batch`: sizes double from 1, or grow to the largest size that is
predicted to fit from the memory of the last two, while a step raises the network evaluations per
second by a factor of `GAIN` or more. A fraction `HEADROOM` of a GPU's memory stays free for image
decoding, the reward's network and fragmentation, which are not measured. On the CPU only the speed
counts. The sizes change results only by float rounding. The run's config.json and config.yaml
contain the sizes, so a resumed or repeated run uses the same.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from flowrl.core.errors import TrainingError, require
from flowrl.core.protocols import extras
from flowrl.training.trainer import Trainer

HEADROOM = 0.1
"""Fraction of the GPU's memory that stays free."""
GAIN = 1.05
"""Smallest ratio of the evaluations per second of a larger batch to those of the smaller one."""
REPEATS = 3
"""Timed calls per size; the fastest one counts."""


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


@dataclass(frozen=True)
class Measured:
    """A network call on `batch` latents: bytes `held` before it, peak `bytes`, and the fastest of
    several durations in `seconds`. Bytes are 0 on the CPU.
    """

    batch: int
    held: int
    bytes: int
    seconds: float = 0.0


def measured(trainer: Trainer, batch: int, train: bool) -> Measured:
    """Memory and time of a network call, as in the update (`train`) or the rollout.

    The gradients of a call that runs out of memory are freed.
    """
    device, durations = trainer.policy.device, []
    on_gpu = device.type == "cuda"
    try:
        if batch == 1:
            velocities(trainer, 1, train)  # allocates permanent memory: handles, workspaces
        held = torch.cuda.memory_allocated(device) if on_gpu else 0
        reset_peak_memory(device)
        velocities(trainer, batch, train)
        peak = peak_memory(device)
        for _ in range(REPEATS):
            start = time.perf_counter()
            velocities(trainer, batch, train)
            if on_gpu:
                torch.cuda.synchronize(device)
            durations.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        drop_gradients(trainer)
        raise
    return Measured(batch, held, peak if on_gpu else 0, min(durations))


def velocities(trainer: Trainer, batch: int, train: bool) -> None:
    """One network call on `batch` latents of noise; with a gradient if `train`. Uses a separate
    generator and leaves no gradient, so that the run's results do not change.
    """
    policy = trainer.policy
    generator = torch.Generator(policy.device).manual_seed(0)
    latent = torch.randn(batch, *policy.latent_shape, generator=generator, device=policy.device)
    timestep = trainer.schedule.network_timesteps[:1].to(policy.device).expand(batch)
    first_prompt = torch.zeros(batch, dtype=torch.long, device=policy.device)
    rows = policy.encode(trainer.prompts.prompts[:1]).take(first_prompt)
    if train:
        policy.velocity(latent, timestep, rows).square().mean().backward()
        drop_gradients(trainer)
    else:
        with policy.frozen():
            policy.velocity(latent, timestep, rows)


def drop_gradients(trainer: Trainer) -> None:
    """Free the gradients of the trained weights."""
    for parameter in trainer.parameters:
        parameter.grad = None


def room(trainer: Trainer) -> float:
    """Bytes that a network call of this process may use; infinite on the CPU.

    Free memory and PyTorch's reserve, less the headroom and what training will need in addition:
    this process's trajectories (nodes and velocities in float32), and the optimizer's moments.
    """
    device, config = trainer.policy.device, trainer.config
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    rollout, latent = config.rollout, 4 * math.prod(trainer.policy.latent_shape)
    groups = 0 if rollout.offload else trainer.distributed.assign(rollout.groups).count
    trajectories = groups * rollout.group_size * (2 * rollout.num_steps + 1) * latent
    bytes_per_weight = 8 if config.optim.optimizer == "adamw" else 2
    weights = 0 if trainer.optimizer.state else sum(p.numel() for p in trainer.parameters)
    usable = free + torch.cuda.memory_reserved(device) - HEADROOM * total
    return usable - trajectories - bytes_per_weight * weights


def largest_batch(small: Measured, large: Measured, room: float) -> float:
    """The largest batch that is predicted to fit into `room` bytes, by a line through two
    measurements; 0 if not even 1 fits, infinite if every batch does.
    """
    slope = (large.bytes - small.bytes) / (large.batch - small.batch)
    if slope <= 0:
        return math.inf if large.bytes <= room else 0
    return max(0, (room - (large.bytes - slope * large.batch)) // slope)


@contextmanager
def out_of_memory() -> Iterator[None]:
    """A context that turns a GPU's "out of memory" into a `TrainingError` with settings that need
    less memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"GPU memory ran out: {str(error).splitlines()[0]} Take a smaller micro_batch"
            " (updates), max_batch (sampling) or decode_batch (images), gradient_checkpointing,"
            " chunk 1 or offload; to go on from a checkpoint, write them into the run's"
            " config.json before --resume"
        ) from error


@dataclass(frozen=True)
class Growth:
    """The result of growing a batch: the last size with a gain in speed (0: not even 1 fits), its
    evaluations per second, and whether memory excluded a larger size.
    """

    batch: int
    rate: float
    full: bool


def grow(trainer: Trainer, train: bool, limit: int) -> Growth:
    """The largest batch up to `limit` at which a step still gains a factor of `GAIN` in speed, the
    same in all processes: that of the slowest, and of the one with the least free memory.
    """
    distributed = trainer.distributed
    best, batch = Growth(0, 0.0, full=True), 1
    before: Measured | None = None
    while True:
        current: tuple[float, float] | None = None
        with distributed.shared_errors():
            try:
                now = measured(trainer, batch, train)
            except torch.OutOfMemoryError:
                # with sharded weights the other processes wait inside the network
                if distributed.sharded and distributed.world_size > 1:
                    raise
            else:
                # the first line goes through the memory in use without a call, which is less than
                # what a call on 0 latents needs: it is too steep rather than too flat
                small, usable = before or Measured(0, 0, now.held), room(trainer)
                if now.bytes <= usable:
                    current = now.seconds, largest_batch(small, now, usable)
                before = now
        known = [part for part in distributed.gather(current) if part is not None]
        if len(known) < distributed.world_size:
            return replace(best, full=True)
        rate = batch / max(seconds for seconds, _ in known)
        if rate < GAIN * best.rate:
            return replace(best, full=False)
        most = int(min(limit, *(max(batch, fits) for _, fits in known)))
        best = Growth(batch, rate, most < limit)
        if most <= batch:
            return best
        batch = min(2 * batch, most)


def find_batches(trainer: Trainer) -> None:
    """Replace the auto sizes in `trainer.config` by measured ones.

    If `micro_batch` is auto and gradient checkpointing is on, it is switched off unless memory
    limits the size without it and the size with it gives more evaluations per second. All processes
    call this. Raises `ConfigError` if not even a batch of 1 fits.
    """
    config, policy = trainer.config, trainer.policy
    rollout, optim, changes = config.rollout, config.optim, {}
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
    samples = trainer.distributed.assign(rollout.groups, 0).count * rollout.group_size
    if optim.micro_batch == "auto":
        limit = math.ceil(samples * rollout.num_steps / optim.minibatches)
        checkpointing = config.policy.gradient_checkpointing
        switch = extras(policy, "checkpoint_gradients") if checkpointing else None
        if switch:
            switch.checkpoint_gradients(False)
        growth = grow(trainer, True, limit)
        if switch:
            plain = growth
            if plain.full:
                switch.checkpoint_gradients(True)
                growth = max(plain, grow(trainer, True, limit), key=lambda found: found.rate)
            changes["gradient_checkpointing"] = growth is not plain
            switch.checkpoint_gradients(growth is not plain)
        changes["micro_batch"] = growth.batch
    if rollout.max_batch == "auto":
        limit = max(samples, config.evaluation.eval_samples)
        changes["max_batch"] = grow(trainer, False, limit).batch
    for setting in ("micro_batch", "max_batch"):
        need = (
            "more GPU memory: a smaller resolution, lora_rank, dtype or model, chunk 1 or offload"
        )
        require(changes.get(setting, 1) > 0, setting, "auto", need)
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
    if changes:
        trainer.use_batches(config.replace(**changes))
