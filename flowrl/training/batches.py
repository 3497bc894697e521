"""`micro_batch` and `max_batch` found by trying, at the start of a run that leaves them to it (auto).

Sizes grow by doubling from 1, or to the largest that the memory of the last two sizes predicts to fit, while one more step
raises the network evaluations per second by `GAIN` or more. `HEADROOM` of a GPU's memory stays free for what is not measured:
image decoding, the reward's network, fragmentation. On the CPU the speed alone decides. The sizes change no number beyond float
rounding; the run's config.json and config.yaml hold what was found, so that a resumed or repeated run has the same.
"""

import math
import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from flowrl.diagnostics.memory import peak_memory_during
from flowrl.errors import TrainingError
from flowrl.training.memory import Peak, drop_gradients, largest_batch, later_bytes, velocities
from flowrl.training.trainer import Trainer

HEADROOM = 0.1
"""Share of the GPU's memory that stays free."""
GAIN = 1.05
"""A larger batch must give this many times the evaluations per second of the smaller one."""
REPEATS = 3
"""Timed calls of a size, of which the fastest counts."""


@runtime_checkable
class Checkpointed(Protocol):
    """A policy whose gradient checkpointing can be switched."""

    def checkpoint_gradients(self, on: bool) -> None:
        """Recompute activations in the backward pass, or not."""
        ...


@dataclass(frozen=True)
class Measured:
    """A call on one batch: bytes in use before it, most bytes in use at once, seconds."""

    held: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Trial:
    """A batch that fits in all processes: evaluations per second of the slowest, and the largest batch that is predicted to fit
    in all of them (None: any)."""

    batch: int
    rate: float
    fits: int | None


@dataclass(frozen=True)
class Growth:
    """The size that growing ended with (None: not even 1 fits), and whether a larger one was left out for want of memory."""

    best: Trial | None
    full: bool

    @property
    def rate(self) -> float:
        """Evaluations per second; 0 if nothing fits."""
        return self.best.rate if self.best else 0.0


def find_batches(trainer: Trainer) -> None:
    """Replace the sizes of `trainer.config` that are auto by the ones that are found, and let the trainer use them.

    With `micro_batch` auto, gradient checkpointing that is on is switched off unless memory limits the size without it and the
    size with it gives more evaluations per second. All processes call this and find the same sizes, for which the slowest and
    fullest of them counts. Draws from its own generator and leaves no gradient. Raises `TrainingError` if not even a batch of 1
    fits.
    """
    config, policy = trainer.config, trainer.policy
    if "auto" not in (config.optim.micro_batch, config.rollout.max_batch):
        return
    samples = trainer.distributed.assign(config.rollout.groups, 0).count * config.rollout.group_size
    changes: dict[str, object] = {}
    if config.optim.micro_batch == "auto":
        limit = math.ceil(samples * config.rollout.num_steps / config.optim.minibatches)
        found, switch = None, policy if config.policy.gradient_checkpointing and isinstance(policy, Checkpointed) else None
        for on in (False, True) if switch else (config.policy.gradient_checkpointing,):
            if found is None or found.full:
                if switch:
                    switch.checkpoint_gradients(on)
                grown = grow(trainer, True, limit)
                if found is None or grown.rate > found.rate:
                    found, changes["gradient_checkpointing"] = grown, on
        assert found is not None
        if switch:
            switch.checkpoint_gradients(bool(changes["gradient_checkpointing"]))
        changes["micro_batch"] = _size("micro_batch", found)
    if config.rollout.max_batch == "auto":
        changes["max_batch"] = _size("max_batch", grow(trainer, False, max(samples, config.evaluation.eval_samples)))
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
    trainer.use_batches(config.replace(**changes))


def _size(setting: str, found: Growth) -> int:
    if found.best is None:
        raise TrainingError(
            f"{setting} auto: not even 1 fits into the GPU's memory, of which {HEADROOM:.0%} stay free. Use "
            "gradient_checkpointing, a smaller resolution, lora_rank or dtype, chunk 1 or offload, or a smaller model"
        )
    return found.best.batch


def grow(trainer: Trainer, train: bool, limit: int) -> Growth:
    """The batch up to `limit` beyond which a step brings less than `GAIN`, with a gradient (`train`) or without."""
    best: Trial | None = None
    before: Peak | None = None
    batch = 1
    if trainer.policy.device.type == "cuda":
        torch.cuda.empty_cache()
    while True:
        trial, before = _together(trainer, batch, train, before)
        if trial is None:
            return Growth(best, True)
        if best is not None and trial.rate < GAIN * best.rate:
            return Growth(best, False)
        best, most = trial, limit if trial.fits is None else min(limit, trial.fits)
        if most <= batch:
            return Growth(best, most < limit)
        batch = min(2 * batch, most)


def _together(trainer: Trainer, batch: int, train: bool, before: Peak | None) -> tuple[Trial | None, Peak | None]:
    """The trial of `batch` in all processes (None if it does not fit in one), and this process's peak. `before` is that of the
    batch before; the first line goes through what is in use without a call, and so predicts too much rather than too little."""
    distributed = trainer.distributed
    own: tuple[float, int | None] | None = None
    with distributed.shared_errors():
        try:
            now, there = measured(trainer, batch, train), room(trainer.policy.device) - later_bytes(trainer)
        except torch.OutOfMemoryError as error:
            drop_gradients(trainer)
            if distributed.sharded and distributed.world_size > 1:  # the others are waiting inside the network
                setting = "micro_batch" if train else "max_batch"
                text = f"{setting} auto: memory ran out at {batch}; choose a smaller {setting}, or gradient_checkpointing"
                raise TrainingError(text) from error
        else:
            peak = Peak(batch, now.bytes)
            if now.bytes <= there:
                own = now.seconds, largest_batch(before or Peak(0, now.held), peak, there)
            before = peak
    parts = distributed.gather(own)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None, before
    fits = [batch if most < batch else most for _, most in known if most is not None]
    return Trial(batch, batch / max(seconds for seconds, _ in known), min(fits, default=None)), before


def room(device: torch.device) -> float:
    """Bytes that this process may use: what is free and what PyTorch holds already, less the headroom. Unlimited on the CPU."""
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - HEADROOM * total


def measured(trainer: Trainer, batch: int, train: bool) -> Measured:
    """Network calls on `batch` latents: their peak memory (0 on the CPU, whose peak cannot be reset), and the fastest's time."""
    device = trainer.policy.device
    if batch == 1:
        velocities(trainer, 1, train)  # what is allocated once and for all: handles, workspaces, prompts
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    peak = peak_memory_during(lambda: velocities(trainer, batch, train), device) if device.type == "cuda" else 0
    return Measured(held, peak, min(_seconds(trainer, batch, train) for _ in range(REPEATS)))


def _seconds(trainer: Trainer, batch: int, train: bool) -> float:
    start = time.perf_counter()
    velocities(trainer, batch, train)
    if trainer.policy.device.type == "cuda":
        torch.cuda.synchronize(trainer.policy.device)
    return time.perf_counter() - start
