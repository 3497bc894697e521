"""The processes of a trainer: what a method needs of them, and the single process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """The groups of a process.

    All processes roll out equally many groups and so make equally many network calls, which sharded
    weights require. If the groups do not divide evenly, the last processes repeat groups of their
    neighbours and drop the results.

    Args:
        first: index of the first group that the process rolls out.
        count: number of groups that it rolls out.
        own: indices of those whose results it keeps.
    """

    first: int
    count: int
    own: range

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        """(first, count) of consecutive chunks of at most `size` groups; 0: one chunk."""
        size = size or self.count
        for first in range(self.first, self.first + self.count, size):
            yield first, min(size, self.first + self.count - first)

    def own_within(self, first: int, count: int) -> range:
        """The own groups among the `count` groups that begin with `first`."""
        start = max(self.own.start, first)
        return range(start, max(start, min(self.own.stop, first + count)))


@dataclass(frozen=True)
class Processes:
    """A single process, for which every method returns immediately. `flowrl.run.distributed` has
    several; every one of them runs the same program with the same random numbers.

    Args:
        rank: index of this process.
        world_size: number of processes.
        sharded: whether weights, gradients and the optimizer's state are sharded over them.
    """

    rank: int = 0
    world_size: int = 1
    sharded: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints messages."""
        return self.rank == 0

    def assign(self, total: int, rank: int | None = None) -> Assignment:
        """The groups of this process (or of process `rank`) among `total`: ceil(total /
        world_size); the last processes may own fewer.
        """
        rank = self.rank if rank is None else rank
        count = -(-total // self.world_size)
        start, stop = min(rank * count, total), min((rank + 1) * count, total)
        return Assignment(min(start, total - count), count, range(start, stop))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in at least one process. All processes synchronise here."""
        return any(self.gather(flag))

    def gather(self, value: T) -> list[T]:
        """The `value` of every process, in order of rank."""
        return [value]

    def in_main(self, call: Callable[[], T]) -> T:
        """The result of `call` in the main process, in all processes; its error ends all."""
        return call()

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """If the block raises in one process, all others raise an error that names it."""
        yield

    def all_reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes; it remains None if no process has
        one. Call it once per step.
        """

    def sum_in_backward(self, network: nn.Module, now: bool) -> None:
        """Whether the next backward pass of a sharded `network` sums the gradients over replicas,
        those of passes before included; needed once per step.
        """

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Set `tensors` to the main process's values in all processes."""

    def put(
        self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor], network: Any
    ) -> list[Tensor]:
        """Give the `parameters` of `network` these `values`, in the same order; returns their
        tensors before.
        """
        before = [parameter.data for parameter in parameters]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        return before
