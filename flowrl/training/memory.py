"""GPU memory, measured at two small batches before training begins."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flowrl.errors import TrainingError
from flowrl.training.guards import Notice, Peak, memory
from flowrl.training.trainer import Trainer
from flowrl.types import Condition

SHARE = 0.95
"""Of the free memory; the rest is lost to fragmentation."""


def cuda_peak(work: Callable[[], None]) -> int:
    """The most bytes that PyTorch had in use on the GPU during `work`."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


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
            "decode_batch (pictures), checkpointing, chunk 1 or offload; to go on from a checkpoint, write them into the run's "
            "config.json before --resume"
        ) from error


def memory_notices(
    trainer: Trainer, peak: Callable[[Callable[[], None]], int] = cuda_peak, room: Callable[[], float] = cuda_room
) -> list[Notice]:
    """Whether `micro_batch` (velocities with a gradient) and `max_batch` (without) will fit; costs four small network calls.

    Draws from its own generator and leaves no gradient, so that no number of the run changes. Image decoding is not measured.
    """
    config = trainer.config
    groups = 0 if config.offload else trainer.team.share(config.prompts).count
    kept = 4.0 * groups * config.members * (2 * config.steps + 1) * _numbers(trainer)  # nodes and velocities, float32
    each = 8.0 if config.optimiser == "adamw" else 2.0
    moments = 0.0 if trainer.optimiser.state else each * sum(p.numel() for p in trainer.parameters)
    found = []
    for setting, chosen, train in (("micro_batch", config.micro_batch, True), ("max_batch", config.max_batch, False)):
        if chosen > 1:
            small, large = (1, 2) if chosen < 4 else (2, 4)
            try:
                _velocities(trainer, 1, train)  # what is allocated once and for all: handles, workspaces
                peaks = [
                    Peak(batch, peak(lambda batch=batch, train=train: _velocities(trainer, batch, train)))
                    for batch in (small, large)
                ]
            except torch.OutOfMemoryError:
                for parameter in trainer.parameters:
                    parameter.grad = None
                less = "Use 1, checkpointing or a smaller model"
                text = f"{setting} {chosen} will not fit: a batch of {large} is too much already. {less}"
                found.append(Notice("memory", text))
                continue
            notice = memory(setting, chosen, peaks[0], peaks[1], room(), kept + moments)
            found += [notice] if notice else []
    if trainer.policy.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _numbers(trainer: Trainer) -> int:
    return torch.Size(trainer.policy.latent_shape).numel()


def _velocities(trainer: Trainer, batch: int, train: bool) -> None:
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
    for parameter in trainer.parameters:
        parameter.grad = None
