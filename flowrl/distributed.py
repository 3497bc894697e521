"""Several processes as one trainer: distribution of groups, collectives, and failures.

Every process runs the same program with the same random numbers. It rolls out some of the groups,
and all processes receive all rewards. Every process therefore computes the same advantages, the
same mini-batches and, from summed gradients, the same weights. A launcher (`accelerate launch` or
torchrun) starts the processes, monitors them, and ends all of them if one fails.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, TrainingError, require

T = TypeVar("T")

TIMEOUT = "FLOWRL_TIMEOUT_MINUTES"
"""The environment variable with the minutes that a process waits for the others in a collective; 10
if it is not set.
"""
GRACE = 20.0
"""Seconds that a process waits for the others after it has received a signal to stop."""
POLL = 0.002
"""Seconds between two checks whether a collective has finished."""

_LOG = logging.getLogger(__name__)


class OtherProcessError(TrainingError):
    """Another process failed, or the connection to it broke."""


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
        return range(
            max(self.own.start, first),
            max(self.own.start, first, min(self.own.stop, first + count)),
        )


def assignment(rank: int, world_size: int, total: int) -> Assignment:
    """The groups of one process: ceil(total / world_size); the last processes may own fewer.

    Args:
        rank: index of the process.
        world_size: number of processes.
        total: number of groups.

    Returns:
        The groups to roll out.
    """
    count = -(-total // world_size)
    start, stop = min(rank * count, total), min((rank + 1) * count, total)
    return Assignment(min(start, total - count), count, range(start, stop))


@dataclass(frozen=True)
class Distributed:
    """The processes of a run. `Distributed()` is a single process, for which every method returns
    immediately.

    Use it as a context. A process that leaves the context by an error logs "process R of N failed:
    ..." and disconnects, which ends the others.

    Args:
        rank: index of this process.
        world_size: number of processes.
    """

    rank: int = 0
    world_size: int = 1
    sharded: bool = False
    """Whether weights, gradients and the optimizer's state are sharded over the processes (FSDP2).
    """
    reshard_after_forward: bool = True
    """Whether a block frees its gathered weights between its forward and its backward pass."""
    stopping: Callable[[], bool] = lambda: False
    """Whether this process has received a signal to stop; it then waits up to `GRACE` seconds for
    the others.
    """

    @staticmethod
    def join(device: str, stopping: Callable[[], bool] = lambda: False) -> "Distributed":
        """Connect to the processes that the launcher's environment variables describe (RANK,
        WORLD_SIZE, ...).

        Object collectives and waiting use gloo. Tensors on GPUs use NCCL, and the GPU number
        LOCAL_RANK becomes the current one. Raises `ConfigError` for a kind of training that is not
        supported.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return Distributed()
        if _flag("ACCELERATE_USE_DEEPSPEED"):
            raise ConfigError(
                "DeepSpeed is not supported: the config file zero2.yaml shards what its ZeRO-2 does"
            )
        sharded, reshard = _flag("ACCELERATE_USE_FSDP"), _flag("FSDP_RESHARD_AFTER_FORWARD", "true")
        if sharded and os.environ.get("FSDP_VERSION", "2") != "2":
            raise ConfigError("fsdp_version: only 2 is supported; see fsdp2.yaml")
        backend, limit = "gloo", timedelta(minutes=_timeout_minutes())
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        torch.distributed.init_process_group(backend, timeout=limit)
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return Distributed(rank, world_size, sharded, reshard, stopping)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints messages."""
        return self.rank == 0

    def assign(self, total: int, rank: int | None = None) -> Assignment:
        """The groups of this process (or of process `rank`) among `total`."""
        return assignment(self.rank if rank is None else rank, self.world_size, total)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true in at least one process. All processes synchronise here."""
        if self.world_size == 1:
            return flag
        found = torch.tensor(int(flag))
        with self._connected():
            work: Any = torch.distributed.all_reduce(
                found, torch.distributed.ReduceOp.MAX, async_op=True
            )
            waiting_since = time.monotonic()
            while not work.is_completed():  # in Python, so that signal handlers run
                if not self.stopping():
                    waiting_since = time.monotonic()
                elif time.monotonic() - waiting_since > GRACE:
                    raise SystemExit(
                        f"flowrl: {self._name} was asked to stop and has waited {GRACE:g} s for the"
                        " others; it ends"
                    )
                time.sleep(POLL)
            work.wait()
        return bool(found)

    def gather(self, value: T) -> list[T]:
        """The `value` of every process, in order of rank."""
        if self.world_size == 1:
            return [value]
        self.any(False)
        values: list[Any] = [None] * self.world_size
        with self._connected():
            torch.distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """If the block raises in one process, all others raise an `OtherProcessError` that names
        it.

        With sharded weights the error is raised immediately, because the other processes may be
        inside a network call that needs this process. They end when it disconnects.
        """
        try:
            yield
        except Exception as error:
            if self.world_size > 1 and not self.sharded:
                with suppress(OtherProcessError):
                    self.any(True)
                    self.gather(self._failure(error))
            raise
        if self.any(False):
            raise OtherProcessError("; ".join(filter(None, self.gather(""))))

    def all_reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes; it remains None if no process has
        one. Call it once per step.

        Replicated gradients are summed by one all-reduce. FSDP2 has averaged sharded gradients in
        the backward pass.
        """
        if self.world_size == 1:
            return
        if self.sharded:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.world_size)
            return
        used = torch.tensor(
            [p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device
        )
        with self._connected():
            torch.distributed.all_reduce(used)
            gradients: list[Tensor] = []
            for parameter, count in zip(parameters, used.tolist(), strict=True):
                if count and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients += [parameter.grad] if parameter.grad is not None else []
            if gradients:
                flat = nn.utils.parameters_to_vector(gradients)
                torch.distributed.all_reduce(flat)
                nn.utils.vector_to_parameters(flat, gradients)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Set `tensors` to the main process's values in all processes."""
        if self.world_size > 1:
            with self._connected():
                for tensor in tensors:
                    torch.distributed.broadcast(tensor, 0)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """A context for a collective; a broken connection or a time-out becomes an
        `OtherProcessError`.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise OtherProcessError(
                f"{self._name} lost another process; the reason is in its own message or in the"
                f" launcher's report. If it was only slow, {TIMEOUT} (now {_timeout_minutes():g})"
                f" allows more time ({str(error).splitlines()[0]})"
            ) from error

    @property
    def _name(self) -> str:
        return f"process {self.rank} of {self.world_size}"

    def _failure(self, error: BaseException) -> str:
        return f"{self._name} failed: {type(error).__name__}: {error}"

    def __enter__(self) -> "Distributed":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.world_size == 1:
            return
        if error is None:
            self.any(False)  # the others need this process until then
        elif isinstance(error, Exception) and not isinstance(error, OtherProcessError):
            _LOG.error(self._failure(error))
        # NCCL would wait for unfinished operations
        if error is None or torch.distributed.get_backend() == "gloo":
            torch.distributed.destroy_process_group()


def _flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true")


def _timeout_minutes() -> float:
    text = os.environ.get(TIMEOUT, "10")
    fits = text.replace(".", "", 1).isdigit() and float(text) > 0
    require(fits, TIMEOUT, text, "minutes, above 0")
    return float(text)


def shard(
    network: nn.Module, distributed: Distributed, device: torch.device, dtype: torch.dtype
) -> None:
    """Shard `network`'s weights over all processes in place (PyTorch's FSDP2): each process keeps a
    part of every tensor.

    A block (a module whose class the network names in `_no_split_modules`, as diffusers'
    transformers do) is gathered while it computes. Gathered weights have `dtype`, in which the
    network computes under autocast; shards keep their own dtype, and gradients are averaged over
    the processes in float32. Afterwards all processes must call the network equally often.

    Args:
        network: the module.
        distributed: the processes.
        device: the device of this process.
        dtype: type of the gathered weights.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (distributed.world_size,))
    # Autocast converts inputs: time steps need more digits than bfloat16 has.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    blocks = tuple(getattr(network, "_no_split_modules", None) or ())
    for module in list(network.modules()):
        if type(module).__name__ in blocks:
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=distributed.reshard_after_forward,
                mp_policy=precision,
            )
    fully_shard(network, mesh=mesh, mp_policy=precision)


def free_gathered_weights(network: nn.Module) -> None:
    """Make the next call of a sharded `network` gather its weights again; needed after they were
    changed outside a step.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process has a part of `tensor`."""
    return hasattr(tensor, "full_tensor")


def is_sharded_network(network: nn.Module) -> bool:
    """Whether `shard` was applied to `network`. Between two calls its parameters may be
    gathered.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(network, FSDPModule)


def full(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, in every process; all processes must call it. Other tensors
    are returned unchanged.
    """
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors in main memory in the main process; an empty dictionary in all others.

    Sharded tensors are gathered one after the other, so a device has at most one of them; all
    processes must call it.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: Any = get_model_state_dict(as_module(tensors.values()), options=options)
    return {name: found[str(i)] for i, name in enumerate(tensors)} if found else {}


def load_full_tensors(
    tensors: Mapping[str, Tensor], values: Mapping[str, Tensor], distributed: Distributed
) -> None:
    """The inverse of `full_tensors`, in place, one tensor after the other.

    Args:
        tensors: the tensors to fill, by name.
        values: full tensors by name; used only in the main process, which sends them to all others.
        distributed: the processes.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    numbered: dict[str, Any] = (
        {str(i): values[name] for i, name in enumerate(tensors)} if distributed.is_main else {}
    )
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=distributed.world_size > 1
    )
    set_model_state_dict(as_module(tensors.values()), numbered, options=options)


def as_module(tensors: Iterable[Tensor]) -> nn.ParameterList:
    """A module that holds `tensors` under the names "0", "1", ..., as PyTorch's functions on states
    require.
    """
    return nn.ParameterList(
        t if isinstance(t, nn.Parameter) else nn.Parameter(t, requires_grad=False) for t in tensors
    )
