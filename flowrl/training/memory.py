"""The memory probe: whether a run's batches will fit on its device, measured on small ones before the first iteration."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.diagnostics.memory import peak_memory_during
from flowrl.errors import TrainingError
from flowrl.training.monitors import Notice
from flowrl.training.trainer import Trainer
from flowrl.types import Condition


@dataclass(frozen=True)
class Peak:
    """The most memory, in bytes, that was in use at once with `batch` latents."""

    batch: int
    bytes: int


def predicted_bytes(small: Peak, large: Peak, batch: int) -> float:
    """Memory at `batch` by a straight line through two measurements; never below the larger one's slope 0."""
    slope = max(0.0, (large.bytes - small.bytes) / (large.batch - small.batch))
    return large.bytes + slope * (batch - large.batch)


def largest_batch(small: Peak, large: Peak, room: float) -> int | None:
    """The largest batch that the line predicts to fit into `room` bytes: 0 where not even one does, None where any does."""
    slope = (large.bytes - small.bytes) / (large.batch - small.batch)
    if slope <= 0:
        return None if large.bytes <= room else 0
    return max(0, int((room - (large.bytes - slope * large.batch)) // slope))


def memory(setting: str, chosen: int, small: Peak, large: Peak, room: float, later: float = 0.0) -> Notice | None:
    """Whether `setting` = `chosen` latents at once will exceed `room` bytes. `later`: what training will hold besides, such as
    the optimizer's state."""
    needed = predicted_bytes(small, large, chosen) + later
    if needed <= room:
        return None
    fits = largest_batch(small, large, room - later)
    advice = (
        f"{setting} {fits} fits"
        if fits
        else "not even 1 fits: use a smaller resolution, rank or dtype, or gradient checkpointing"
    )
    return Notice(
        "memory",
        f"{setting} {chosen} will need about {needed / 1e9:.1f} GB of GPU memory, and {room / 1e9:.1f} GB are there: {advice}",
    )


SHARE = 0.95
"""Of the free memory; the rest is lost to fragmentation."""


def cuda_room() -> float:
    """Bytes that this process may use: what is free, and what PyTorch holds already."""
    free, _ = torch.cuda.mem_get_info()
    return SHARE * (free + torch.cuda.memory_reserved())


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Turns a GPU's "out of memory" into a `TrainingError` that says which settings take less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"GPU memory ran out: {str(error).splitlines()[0]} Take a smaller micro_batch (updates), max_batch (sampling) or "
            "decode_batch (images), gradient_checkpointing, chunk 1 or offload; to go on from a checkpoint, write them into "
            "the run's "
            "config.json before --resume"
        ) from error


def memory_notices(
    trainer: Trainer,
    peak: Callable[[Callable[[], None], torch.device], int] = peak_memory_during,
    room: Callable[[], float] = cuda_room,
) -> list[Notice]:
    """Whether `micro_batch` (velocities with a gradient) and `max_batch` (without) will fit; costs four small network calls.

    Draws from its own generator and leaves no gradient, so that no number of the run changes. Image decoding is not measured. All
    processes call this and get the warnings of all. If memory runs out in one of several processes, all raise a `TrainingError`.
    """
    with trainer.distributed.shared_errors():
        found = _own_memory_notices(trainer, peak, room)
    return list(dict.fromkeys(notice for part in trainer.distributed.gather(found) for notice in part))


def _own_memory_notices(
    trainer: Trainer, peak: Callable[[Callable[[], None], torch.device], int], room: Callable[[], float]
) -> list[Notice]:
    config, later, found = trainer.config, later_bytes(trainer), []
    for setting, chosen, train in (
        ("micro_batch", config.batches.micro_batch, True),
        ("max_batch", config.batches.max_batch, False),
    ):
        if chosen > 1:
            small, large = (1, 2) if chosen < 4 else (2, 4)
            try:
                velocities(trainer, 1, train)  # what is allocated once and for all: handles, workspaces
                peaks = [
                    Peak(batch, peak(lambda batch=batch, train=train: velocities(trainer, batch, train), trainer.policy.device))
                    for batch in (small, large)
                ]
            except torch.OutOfMemoryError as error:
                drop_gradients(trainer)
                less = "Use 1, gradient_checkpointing or a smaller model"
                text = f"{setting} {chosen} will not fit: a batch of {large} is too much already. {less}"
                if trainer.distributed.world_size > 1:  # with sharded weights the others are waiting inside the network
                    raise TrainingError(text) from error
                found.append(Notice("memory", text))
                continue
            notice = memory(setting, chosen, peaks[0], peaks[1], room(), later)
            found += [notice] if notice else []
    if trainer.policy.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def later_bytes(trainer: Trainer) -> float:
    """What training will hold besides: this process's trajectories (nodes and velocities in float32), AdamW's moments."""
    config = trainer.config
    groups = 0 if config.rollout.offload else trainer.distributed.assign(config.rollout.groups).count
    latents = groups * config.rollout.group_size * (2 * config.rollout.num_steps + 1)
    each = 8.0 if config.optim.optimizer == "adamw" else 2.0
    moments = 0.0 if trainer.optimizer.state else each * sum(p.numel() for p in trainer.parameters)
    return 4.0 * latents * math.prod(trainer.policy.latent_shape) + moments


def velocities(trainer: Trainer, batch: int, train: bool) -> None:
    """One network call on noise as the update (`train`) or the rollout makes it."""
    policy = trainer.policy
    generator = torch.Generator(policy.device).manual_seed(0)
    latent = torch.randn(batch, *policy.latent_shape, generator=generator, device=policy.device)
    timestep = trainer.schedule.network_timesteps[:1].to(policy.device).expand(batch)
    rows: Condition = policy.encode(trainer.prompts.prompts[:1]).take(torch.zeros(batch, dtype=torch.long, device=policy.device))
    if not train:
        with policy.frozen():
            policy.velocity(latent, timestep, rows)
        return
    loss: Tensor = policy.velocity(latent, timestep, rows).square().mean()
    loss.backward()
    drop_gradients(trainer)


def drop_gradients(trainer: Trainer) -> None:
    """Free the gradients of the trained weights."""
    for parameter in trainer.parameters:
        parameter.grad = None
