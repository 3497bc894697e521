"""Automatic `micro_batch` and `max_batch`: sizes measured at the start of a run whose settings are
auto.

Sizes double from 1, or grow to the largest size that is predicted to fit from the memory of the
last two, while a step raises the network evaluations per second by a factor of `GAIN` or more. A
fraction `HEADROOM` of a GPU's memory stays free for image decoding, the reward's network and
fragmentation, which are not measured. On the CPU only the speed counts. The sizes change results
only by float rounding. The run's config.json and config.yaml contain the sizes, so a resumed or
repeated run uses the same.
"""

import math
import time
from dataclasses import dataclass

import torch

from flowrl.core.errors import TrainingError
from flowrl.core.protocols import extras
from flowrl.training.memory import Peak, drop_gradients, largest_batch, later_bytes, velocities
from flowrl.training.peak_memory import peak_memory_during
from flowrl.training.trainer import Trainer

HEADROOM = 0.1
"""Fraction of the GPU's memory that stays free."""
GAIN = 1.05
"""Smallest ratio of the evaluations per second of a larger batch to those of the smaller one."""
REPEATS = 3
"""Timed calls per size; the fastest one counts."""


@dataclass(frozen=True)
class Measured:
    """A measured call on one batch.

    Args:
        held: bytes in use before the call.
        bytes: peak of the bytes in use.
        seconds: duration.
    """

    held: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Trial:
    """A batch that fits in all processes.

    Args:
        batch: number of latents.
        rate: evaluations per second of the slowest process.
        fits: the largest batch that is predicted to fit in all processes; None: any.
    """

    batch: int
    rate: float
    fits: int | None


@dataclass(frozen=True)
class Growth:
    """The result of growing a batch.

    Args:
        best: the last size with a gain in speed; None: not even 1 fits.
        full: whether memory excluded a larger size.
    """

    best: Trial | None
    full: bool

    @property
    def rate(self) -> float:
        """Evaluations per second; 0 if nothing fits."""
        return self.best.rate if self.best else 0.0


def find_batches(trainer: Trainer) -> None:
    """Replace the auto sizes in `trainer.config` by measured ones.

    If `micro_batch` is auto and gradient checkpointing is on, it is switched off unless memory
    limits the size without it and the size with it gives more evaluations per second. All processes
    call this and get the same sizes, determined by the slowest process and the one with the least
    free memory. Uses a separate generator and leaves no gradient. Raises `TrainingError` if not
    even a batch of 1 fits.
    """
    config, policy = trainer.config, trainer.policy
    if "auto" not in (config.optim.micro_batch, config.rollout.max_batch):
        return
    samples = trainer.distributed.assign(config.rollout.groups, 0).count * config.rollout.group_size
    changes: dict[str, object] = {}
    if config.optim.micro_batch == "auto":
        limit = math.ceil(samples * config.rollout.num_steps / config.optim.minibatches)
        found = None
        switch = (
            extras(policy, "checkpoint_gradients") if config.policy.gradient_checkpointing else None
        )
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
        changes["max_batch"] = _size(
            "max_batch", grow(trainer, False, max(samples, config.evaluation.eval_samples))
        )
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
    trainer.use_batches(config.replace(**changes))


def _size(setting: str, found: Growth) -> int:
    if found.best is None:
        raise TrainingError(
            f"{setting} auto: not even a batch of 1 fits into {1 - HEADROOM:.0%} of the GPU's"
            " memory. Use gradient_checkpointing, a smaller resolution, lora_rank or dtype, chunk"
            " 1 or offload, or a smaller model"
        )
    return found.best.batch


def grow(trainer: Trainer, train: bool, limit: int) -> Growth:
    """The largest batch up to `limit` at which a step still gains a factor of `GAIN` in speed.

    Args:
        trainer: the trainer.
        train: measure calls with a gradient.
        limit: largest batch.

    Returns:
        The batch, and whether memory excluded a larger one.
    """
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


def _together(
    trainer: Trainer, batch: int, train: bool, before: Peak | None
) -> tuple[Trial | None, Peak | None]:
    """The trial of `batch` in all processes (None if it does not fit in one), and this process's
    peak.

    `before` is the peak of the previous batch. The first prediction is a line through the memory in
    use without a call, and therefore too large rather than too small.
    """
    distributed = trainer.distributed
    own: tuple[float, int | None] | None = None
    with distributed.shared_errors():
        try:
            now, there = (
                measured(trainer, batch, train),
                room(trainer.policy.device) - later_bytes(trainer),
            )
        except torch.OutOfMemoryError as error:
            drop_gradients(trainer)
            # the other processes wait inside the network
            if distributed.sharded and distributed.world_size > 1:
                setting = "micro_batch" if train else "max_batch"
                text = (
                    f"{setting} auto: memory ran out at {batch}; choose a smaller {setting}, or"
                    " gradient_checkpointing"
                )
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
    return (
        Trial(batch, batch / max(seconds for seconds, _ in known), min(fits, default=None)),
        before,
    )


def room(device: torch.device) -> float:
    """Bytes that this process may use: free memory and PyTorch's reserve, less the headroom.
    Infinite on the CPU.
    """
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - HEADROOM * total


def measured(trainer: Trainer, batch: int, train: bool) -> Measured:
    """Peak memory (0 on the CPU, whose peak cannot be reset) and time of the fastest of several
    network calls.

    Args:
        trainer: the trainer.
        batch: number of latents.
        train: measure calls with a gradient.

    Returns:
        Memory and time.
    """
    device = trainer.policy.device
    if batch == 1:
        velocities(trainer, 1, train)  # allocates permanent memory: handles, workspaces, prompts
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    peak = (
        peak_memory_during(lambda: velocities(trainer, batch, train), device)
        if device.type == "cuda"
        else 0
    )
    return Measured(held, peak, min(_seconds(trainer, batch, train) for _ in range(REPEATS)))


def _seconds(trainer: Trainer, batch: int, train: bool) -> float:
    start = time.perf_counter()
    velocities(trainer, batch, train)
    if trainer.policy.device.type == "cuda":
        torch.cuda.synchronize(trainer.policy.device)
    return time.perf_counter() - start
