"""Several processes as one trainer: who rolls out which groups, what all must know, and what happens when one fails.

Every process runs the same program with the same random numbers and knows the whole iteration; it rolls out whole groups of its
own, and all learn all rewards, so every process computes the same advantages, the same shares and, from the summed gradients, the
same weights. Processes are set up by Accelerate (`accelerate launch`, torchrun, or the same environment variables).
"""

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowrl.errors import ConfigError, FlowrlError, TrainingError
from flowrl.liveness import Liveness

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others at a meeting point: longer than any reward or evaluation should take. That a process
has died is noticed in seconds, see `liveness`."""

BUCKET = 2**26
"""Gradient elements summed in one message (256 MiB in float32)."""


@dataclass(frozen=True)
class Share:
    """Groups `first` .. `first + count - 1` are rolled out by a process; those of them in `own` count as its own.

    All processes roll out equally many, so that they make equally many network calls (engines that gather weights need that);
    where the groups do not go round, the surplus ones repeat a neighbour's and are dropped.
    """

    first: int
    count: int
    own: range

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        """(first, count) of consecutive parts of at most `size` groups; 0: one part."""
        size = size or self.count
        for first in range(self.first, self.first + self.count, size):
            yield first, min(size, self.first + self.count - first)

    def own_within(self, first: int, count: int) -> range:
        """The own groups among `count` ones from `first`."""
        return range(max(self.own.start, first), max(self.own.start, first, min(self.own.stop, first + count)))


def share_of(rank: int, size: int, total: int) -> Share:
    """The share of process `rank` of `size` in `total` things: ceil(total / size) each, the last processes perhaps fewer."""
    count = -(-total // size)
    start, stop = min(rank * count, total), min((rank + 1) * count, total)
    return Share(min(start, total - count), count, range(start, stop))


@dataclass
class Team:
    """The processes of a run. `Team()` is one process alone, for which all of this costs nothing.

    Use it as a context: leaving it by an error tells the others, who stop with a `TrainingError` that names this process.
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False
    """Whether weights, gradients and the optimiser are divided between the processes (FSDP2)."""
    reshard: bool = True
    """Whether a block's weights are given back between its forward and its backward pass."""
    liveness: Liveness | None = field(default=None, repr=False)

    @staticmethod
    def join(device: str) -> "Team":
        """The team that the environment describes: RANK, WORLD_SIZE and the like, as launchers set them; gloo on the CPU, NCCL on
        GPUs, where this process's becomes the current one. Raises `ConfigError` for a kind of training that is not supported."""
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return Team()
        if _flag("ACCELERATE_USE_DEEPSPEED"):
            raise ConfigError("DeepSpeed is not supported: the config file zero2.yaml divides by PyTorch what its ZeRO-2 does")
        from accelerate import PartialState

        threads = torch.get_num_threads()
        state = PartialState(cpu=torch.device(device).type == "cpu", timeout=PATIENCE)
        torch.set_num_threads(threads)
        sharded, reshard = _flag("ACCELERATE_USE_FSDP"), _flag("FSDP_RESHARD_AFTER_FORWARD", "true")
        if sharded and os.environ.get("FSDP_VERSION", "2") != "2":
            raise ConfigError("fsdp_version: only 2 is supported; see fsdp2.yaml")
        rank, size = state.process_index, state.num_processes
        return Team(rank, size, sharded, reshard, Liveness(rank, size))

    @property
    def main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def share(self, total: int, rank: int | None = None) -> Share:
        """This process's share (or that of `rank`) in `total` groups."""
        return share_of(self.rank if rank is None else rank, self.size, total)

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Every process does its `work`; all get all results, in order of rank.

        Where one raises, it raises that, and all others a `TrainingError` that names it. With divided weights it does not wait
        for them: they may be in the middle of a network call, which is the work of all, and are ended by `liveness`.
        """
        if self.size == 1:
            return [work()]
        error: Exception | None = None
        outcome: Any = None
        try:
            outcome = work()
        except Exception as failure:
            if self.sharded:
                raise
            error = failure
        told = (None if error is None else self._named(error), outcome)
        found = self._together(lambda: _gather_object(told))
        if error is not None:
            raise error
        for message, _ in found:
            if message is not None:
                raise TrainingError(message)
        return [result for _, result in found]

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return any(self.gather(lambda: flag))

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Every gradient becomes its sum over the processes; None stays None where no process has one."""
        if self.size > 1:
            self._together(lambda: _sum_gradients(parameters))

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """`tensors` take the main process's values in all processes."""
        if self.size > 1:
            self._together(lambda: [torch.distributed.broadcast(tensor, 0) for tensor in tensors])

    def _together(self, act: Callable[[], T]) -> T:
        """Something that all processes take part in; a lost connection becomes an error that names who was lost."""
        try:
            return act()
        except (RuntimeError, pickle.UnpicklingError) as error:
            if isinstance(error, FlowrlError | torch.OutOfMemoryError) or self.liveness is None:
                raise
            raise TrainingError(f"{self.liveness.blame()}; this is process {self.rank}, which cannot go on alone") from error

    def _named(self, error: BaseException) -> str:
        return f"process {self.rank} of {self.size} failed: {type(error).__name__}: {error}"

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.liveness is None:
            return
        if error is None:
            self.gather(lambda: None)  # nobody leaves while others still need the common store
        self.liveness.leave(None if error is None else self._named(error))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true")


def _gather_object(thing: Any) -> list[Any]:
    from accelerate.utils import gather_object

    return gather_object([thing])


def _sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """In messages of about `BUCKET` elements."""
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    torch.distributed.all_reduce(has)
    bucket: list[torch.nn.Parameter] = []
    for parameter, count in zip(parameters, has.tolist(), strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter)
        if sum(p.numel() for p in bucket) >= BUCKET:
            _sum_bucket(bucket)
            bucket = []
    _sum_bucket(bucket)


def _sum_bucket(bucket: Sequence[torch.nn.Parameter]) -> None:
    gradients = [p.grad for p in bucket if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
