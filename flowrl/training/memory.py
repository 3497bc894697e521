"""What fits on the device, measured before the first iteration: the sizes of settings that are
auto.

Automatic `micro_batch` and `max_batch`: sizes double from 1 while a step raises the network
evaluations per second by a factor of `GAIN` or more, and while twice the memory of the last call
fits. A fraction `HEADROOM` of a GPU's memory stays free for image decoding, the reward's network
and fragmentation, which are not measured. On the CPU only the speed counts. The sizes change
results only by float rounding. The run's config.json and config.yaml contain the sizes, so a
resumed or repeated run uses the same.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

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


class Measured(NamedTuple):
    """A network call: bytes `held` before it (also without a call), its `peak`, and the fastest of
    several durations in `seconds`. Bytes are 0 on the CPU.
    """

    held: int
    peak: int
    seconds: float


def measured(trainer: Trainer, batch: int, train: bool) -> Measured:
    """Memory and time of a network call, as in the update (`train`) or the rollout."""
    device, durations = trainer.policy.device, []
    on_gpu = device.type == "cuda"
    if batch == 1:
        velocities(trainer, 1, train)  # allocates permanent memory: handles, workspaces
    held = torch.cuda.memory_allocated(device) if on_gpu else 0
    reset_peak_memory(device)
    for _ in range(REPEATS):
        start = time.perf_counter()
        velocities(trainer, batch, train)
        if on_gpu:
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    return Measured(held, peak_memory(device) if on_gpu else 0, min(durations))


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
    try:
        with nullcontext() if train else policy.frozen():
            velocity = policy.velocity(latent, timestep, rows)
        if train:
            velocity.square().mean().backward()
    finally:  # also if memory has run out
        trainer.optimizer.zero_grad()


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


def grow(trainer: Trainer, train: bool, limit: int) -> tuple[float, int]:
    """The largest of the batches 1, 2, 4, ... and `limit` at which a step still gains a factor of
    `GAIN` in speed (0: not even 1 fits), after its evaluations per second. It is the same in all
    processes: that of the slowest, and of the one with the least free memory.
    """
    distributed, rate, best, batch, fits = trainer.distributed, 0.0, 0, 1, True
    while fits:
        seconds = math.inf
        with distributed.shared_errors():
            try:
                call, free = measured(trainer, batch, train), room(trainer)
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
        fits = batch < limit and not distributed.any(not fits)
        batch = min(2 * batch, limit)
    return rate, best


def find_batches(trainer: Trainer) -> None:
    """Replace the auto sizes in `trainer.config` by measured ones.

    If `micro_batch` is auto and gradient checkpointing is on, it stays on only if it gives more
    evaluations per second, each with the batch that fits. All processes call this. Raises
    `ConfigError` if not even a batch of 1 fits.
    """
    config, policy, changes = trainer.config, trainer.policy, {}
    rollout, optim = config.rollout, config.optim
    samples = trainer.distributed.assign(rollout.groups, 0).count * rollout.group_size
    if optim.micro_batch == "auto":
        limit = math.ceil(samples * rollout.num_steps / optim.minibatches)
        checkpointing = config.policy.gradient_checkpointing
        switch = extras(policy, "checkpoint_gradients") if checkpointing else None
        if switch is None:
            changes["micro_batch"] = grow(trainer, True, limit)[1]
        else:
            sizes = {}
            for checkpointing in (False, True):
                switch.checkpoint_gradients(checkpointing)
                sizes[checkpointing] = grow(trainer, True, limit)
            fastest = max(sizes, key=sizes.__getitem__)
            switch.checkpoint_gradients(fastest)
            changes |= {"gradient_checkpointing": fastest, "micro_batch": sizes[fastest][1]}
    if rollout.max_batch == "auto":
        limit = max(samples, config.evaluation.eval_samples)
        changes["max_batch"] = grow(trainer, False, limit)[1]
    for setting in ("micro_batch", "max_batch"):
        need = (
            "more GPU memory: a smaller resolution, lora_rank, dtype or model, chunk 1 or offload"
        )
        require(changes.get(setting, 1) > 0, setting, "auto", need)
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
    if changes:
        trainer.config = config.replace(**changes)
        trainer.collector.max_batch = trainer.config.batches.max_batch
