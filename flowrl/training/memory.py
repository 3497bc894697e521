"""The memory probe: predicts whether a run's batches fit on its device, from small batches before
the first iteration.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.errors import TrainingError
from flowrl.core.types import Condition
from flowrl.training.monitors import Notice
from flowrl.training.peak_memory import peak_memory_during
from flowrl.training.trainer import Trainer


@dataclass(frozen=True)
class Peak:
    """A measured peak of memory.

    Args:
        batch: number of latents.
        bytes: peak of the bytes in use.
    """

    batch: int
    bytes: int


def predicted_bytes(small: Peak, large: Peak, batch: int) -> float:
    """Memory at `batch` by a line through two measurements; with a negative slope, the larger
    measurement.

    Args:
        small: measurement of a small batch.
        large: measurement of a larger batch.
        batch: number of latents.

    Returns:
        The prediction in bytes.
    """
    slope = max(0.0, (large.bytes - small.bytes) / (large.batch - small.batch))
    return large.bytes + slope * (batch - large.batch)


def largest_batch(small: Peak, large: Peak, room: float) -> int | None:
    """The largest batch that is predicted to fit into `room` bytes.

    Args:
        small: measurement of a small batch.
        large: measurement of a larger batch.
        room: free bytes.

    Returns:
        The batch; 0 if not even 1 fits, None if every batch does.
    """
    slope = (large.bytes - small.bytes) / (large.batch - small.batch)
    if slope <= 0:
        return None if large.bytes <= room else 0
    return max(0, int((room - (large.bytes - slope * large.batch)) // slope))


def memory(
    setting: str, chosen: int, small: Peak, large: Peak, room: float, later: float = 0.0
) -> Notice | None:
    """A warning if a batch size is predicted to exceed the memory.

    Args:
        setting: name of the setting.
        chosen: its value, the number of latents.
        small: measurement of a small batch.
        large: measurement of a larger batch.
        room: free bytes.
        later: bytes that training will need in addition, such as the optimizer's state.

    Returns:
        The warning; None if the batch fits.
    """
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
        f"{setting} {chosen} will need about {needed / 1e9:.1f} GB of GPU memory, and"
        f" {room / 1e9:.1f} GB are there: {advice}",
    )


SHARE = 0.95
"""Usable fraction of the free memory; fragmentation takes the rest."""


def cuda_room() -> float:
    """Bytes that this process may use: free memory and PyTorch's reserve."""
    free, _ = torch.cuda.mem_get_info()
    return SHARE * (free + torch.cuda.memory_reserved())


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


def memory_notices(
    trainer: Trainer,
    peak: Callable[[Callable[[], None], torch.device], int] = peak_memory_during,
    room: Callable[[], float] = cuda_room,
) -> list[Notice]:
    """Warnings if `micro_batch` (velocities with a gradient) or `max_batch` (without) will not fit;
    makes four small network calls.

    Uses a separate generator and leaves no gradient, so the run's results do not change. Image
    decoding is not measured. All processes call this and get the warnings of all.

    Args:
        trainer: the trainer.
        peak: measures the peak memory of a call.
        room: returns the free bytes.

    Returns:
        The warnings.

    Raises:
        TrainingError: memory ran out in one of several processes; raised in all.
    """
    with trainer.distributed.shared_errors():
        found = _own_memory_notices(trainer, peak, room)
    return list(
        dict.fromkeys(notice for part in trainer.distributed.gather(found) for notice in part)
    )


def _own_memory_notices(
    trainer: Trainer,
    peak: Callable[[Callable[[], None], torch.device], int],
    room: Callable[[], float],
) -> list[Notice]:
    config, later, found = trainer.config, later_bytes(trainer), []
    for setting, chosen, train in (
        ("micro_batch", config.batches.micro_batch, True),
        ("max_batch", config.batches.max_batch, False),
    ):
        if chosen > 1:
            small, large = (1, 2) if chosen < 4 else (2, 4)
            try:
                velocities(trainer, 1, train)  # allocates permanent memory: handles, workspaces
                peaks = [
                    Peak(
                        batch,
                        peak(
                            lambda batch=batch, train=train: velocities(trainer, batch, train),
                            trainer.policy.device,
                        ),
                    )
                    for batch in (small, large)
                ]
            except torch.OutOfMemoryError as error:
                drop_gradients(trainer)
                less = "Use 1, gradient_checkpointing or a smaller model"
                text = (
                    f"{setting} {chosen} will not fit: a batch of {large} is too much already."
                    f" {less}"
                )
                # with sharded weights the other processes wait inside the network
                if trainer.distributed.world_size > 1:
                    raise TrainingError(text) from error
                found.append(Notice("memory", text))
                continue
            notice = memory(setting, chosen, peaks[0], peaks[1], room(), later)
            found += [notice] if notice else []
    if trainer.policy.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def later_bytes(trainer: Trainer) -> float:
    """Bytes that training will need in addition: this process's trajectories (nodes and velocities
    in float32), AdamW's moments.
    """
    config = trainer.config
    groups = (
        0 if config.rollout.offload else trainer.distributed.assign(config.rollout.groups).count
    )
    latents = groups * config.rollout.group_size * (2 * config.rollout.num_steps + 1)
    each = 8.0 if config.optim.optimizer == "adamw" else 2.0
    moments = 0.0 if trainer.optimizer.state else each * sum(p.numel() for p in trainer.parameters)
    return 4.0 * latents * math.prod(trainer.policy.latent_shape) + moments


def velocities(trainer: Trainer, batch: int, train: bool) -> None:
    """One network call on noise, as in the update or the rollout.

    Args:
        trainer: the trainer.
        batch: number of latents.
        train: with a gradient, as in the update.
    """
    policy = trainer.policy
    generator = torch.Generator(policy.device).manual_seed(0)
    latent = torch.randn(batch, *policy.latent_shape, generator=generator, device=policy.device)
    timestep = trainer.schedule.network_timesteps[:1].to(policy.device).expand(batch)
    rows: Condition = policy.encode(trainer.prompts.prompts[:1]).take(
        torch.zeros(batch, dtype=torch.long, device=policy.device)
    )
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
