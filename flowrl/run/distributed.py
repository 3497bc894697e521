"""Several processes as one trainer: distribution of groups, collectives, and failures.

Every process runs the same program with the same random numbers. It rolls out some of the groups,
and all processes receive all rewards. Every process therefore computes the same advantages, the
same mini-batches and, from summed gradients, the same weights. A launcher (`accelerate launch`,
torchrun, srun) starts the processes, monitors them, and ends all of them if one fails. The main
process alone reads and writes files of the run: the others may be on machines without them.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowrl.core.errors import TrainingError, require
from flowrl.core.processes import Processes
from flowrl.core.sharded import is_sharded, is_sharded_network
from flowrl.run.workers import launch_rank

T = TypeVar("T")

TIMEOUT = "FLOWRL_TIMEOUT_MINUTES"
"""The environment variable with the minutes that a process waits for the others in a collective; 10
if it is not set.
"""

_LOG = logging.getLogger(__name__)


class OtherProcessError(TrainingError):
    """Another process failed, or the connection to it broke."""


@dataclass(frozen=True)
class Distributed(Processes):
    """The processes of a run, connected by PyTorch's collectives; `Distributed()` is a single one.

    Use it as a context. A process that leaves the context by an error logs "process R of N failed:
    ..." and disconnects, which ends the others.

    Weights are sharded by FSDP2.
    """

    reshard_after_forward: bool = True
    """Whether a block frees its gathered weights between its forward and its backward pass."""
    replicas: int = 1
    """Number of groups of processes that hold all shards: HSDP shards within a group and replicates
    between groups. The processes of a group have consecutive ranks.
    """

    @staticmethod
    def join() -> "Distributed":
        """Connect to the processes that the launcher's environment variables describe (RANK,
        WORLD_SIZE, ...; see `flowrl.run.workers.launch_rank`).

        Object collectives use gloo. Tensors on GPUs use NCCL, and the GPU number LOCAL_RANK becomes
        the current one. Raises `ConfigError` for a kind of training that is not supported.
        """
        launch_rank()
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size <= 1:
            return Distributed()
        deepspeed, sharded = _flag("ACCELERATE_USE_DEEPSPEED"), _flag("ACCELERATE_USE_FSDP")
        require(not deepspeed, "DeepSpeed", True, "fsdp: zero2.yaml shards as ZeRO-2 does")
        version = os.environ.get("FSDP_VERSION", "2")
        require(not sharded or version == "2", "fsdp_version", version, "2, as in fsdp2.yaml")
        prefix, replicas = "PARALLELISM_CONFIG_DP", 1
        if sharded:
            replicas = int(os.environ.get(f"{prefix}_REPLICATE_SIZE", "1"))
            shards = int(os.environ.get(f"{prefix}_SHARD_SIZE", world_size // replicas))
            allowed = f"a product equal to {world_size}, the number of processes"
            name, given = "dp_replicate_size x dp_shard_size", f"{replicas} x {shards}"
            require(replicas * shards == world_size, name, given, allowed)
        backend = "gloo"
        if torch.cuda.is_available():
            # a launcher may show each process a GPU of its own only
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(minutes=_timeout_minutes()))
        reshard = _flag("FSDP_RESHARD_AFTER_FORWARD", "true")
        return Distributed(dist.get_rank(), world_size, sharded, reshard, replicas)

    def gather(self, value: T) -> list[T]:
        """The `value` of every process, in order of rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._connected():
            dist.all_gather_object(values, value)
        return values

    def in_main(self, call: Callable[[], T]) -> T:
        """The result of `call` in the main process, in all processes; its error ends all."""
        with self.shared_errors():
            results: list[Any] = [call() if self.is_main else None]
        if self.world_size > 1:
            with self._connected():
                dist.broadcast_object_list(results)
        return results[0]

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
                    self.gather(self._failure(error))
            raise
        if failures := "; ".join(filter(None, self.gather(""))):
            raise OtherProcessError(failures)

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
        has_gradient = self.gather([parameter.grad is not None for parameter in parameters])
        for parameter, *used in zip(parameters, *has_gradient, strict=True):
            if parameter.grad is None and True in used:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            with self._connected():
                flat = nn.utils.parameters_to_vector(gradients)
                dist.all_reduce(flat)
                nn.utils.vector_to_parameters(flat, gradients)

    def sum_in_backward(self, network: nn.Module, now: bool) -> None:
        """FSDP2's switch of a sharded network."""
        if is_sharded_network(network):
            cast(Any, network).set_requires_all_reduce(now)

    @torch.no_grad()
    def put(
        self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor], network: Any
    ) -> list[Tensor]:
        """As for a single process; sharded parameters keep their memory, and the values are
        copied.
        """
        if not any(map(is_sharded, parameters)):
            return super().put(parameters, values, network)
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        for module in network.modules():  # its next call gathers the weights again
            if is_sharded_network(module):
                cast(Any, module).reshard()
        return before

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Set `tensors` to the main process's values in all processes."""
        if self.world_size > 1:
            with self._connected():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

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
            calls = self.calls_of_others()
            slow = f" ({calls})" if calls else ""
            raise OtherProcessError(
                f"{self._name} lost another process, whose own message gives the reason. If it was"
                f" only slow{slow}, raise {TIMEOUT} (now {_timeout_minutes():g} minutes):"
                f" {str(error).splitlines()[0]}"
            ) from error

    def publish(self, call: str) -> None:
        """Tell the other processes which call of a part is in progress here ("": none); a time-out
        of theirs names it.
        """
        if self.world_size > 1:
            with suppress(RuntimeError):  # the process with the store may have ended
                _store().set(f"call {self.rank}", call)

    def calls_of_others(self) -> str:
        """The calls of parts in progress in other processes, as in "process 1: MyReward.score"."""
        calls = list[str]()
        with suppress(RuntimeError, ValueError):
            for rank in range(self.world_size):
                key = f"call {rank}"
                if rank != self.rank and _store().check([key]) and (call := _store().get(key)):
                    calls.append(f"process {rank}: {call.decode()}")
        return ", ".join(calls)

    @property
    def _name(self) -> str:
        return f"process {self.rank} of {self.world_size}"

    def _failure(self, error: Exception) -> str:
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
        # after an error NCCL would wait for unfinished operations
        if error is None or dist.get_backend() == "gloo":
            dist.destroy_process_group()


def _store() -> Any:
    """The store of short texts that all processes share."""
    return dist.distributed_c10d._get_default_store()


def _flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true")


def processes_here() -> int:
    """The number of processes of the run on this machine, as its launcher tells."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _timeout_minutes() -> float:
    text = os.environ.get(TIMEOUT, "10")
    fits = text.replace(".", "", 1).isdigit() and float(text) > 0
    require(fits, TIMEOUT, text, "minutes, above 0")
    return float(text)


def shard(
    network: nn.Module, distributed: Distributed, device: torch.device, dtype: torch.dtype
) -> None:
    """Shard the main process's weights of `network` over all processes in place (PyTorch's FSDP2):
    each process keeps a part of every tensor; with `replicas`, each of them has all parts (HSDP).
    Buffers are the main process's too. The other processes' weights may be on meta.

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

    replicas, count = distributed.replicas, distributed.world_size
    mesh = init_device_mesh(
        device.type, (replicas, count // replicas), mesh_dim_names=("replicate", "shard")
    )
    if replicas == 1:
        mesh = mesh["shard"]
    # Autocast converts inputs: time steps need more digits than bfloat16 has.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    values = {name: tensor.data for name, tensor in _tensors(network)}
    blocks = getattr(network, "_no_split_modules", None) or ()
    reshard = distributed.reshard_after_forward
    for module in list(network.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
    fully_shard(network, mesh=mesh, mp_policy=precision)
    network._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    load_full_tensors(dict(_tensors(network)), values, distributed)


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name; buffers that are not saved, too."""
    yield from network.named_parameters()
    yield from network.named_buffers()


@torch.no_grad()
def load_full_tensors(
    tensors: Mapping[str, Tensor], values: Mapping[str, Tensor], distributed: Processes
) -> None:
    """The inverse of `full_tensors`, in place, one tensor after the other.

    Args:
        tensors: the tensors to fill, by name.
        values: full tensors by name; used only in the main process, which sends them to all others.
        distributed: the processes.
    """
    for name, tensor in tensors.items():
        if distributed.is_main:
            complete = values[name].to(tensor.device, tensor.dtype)
        else:
            complete = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if is_sharded(tensor):
            from torch.distributed.tensor import distribute_tensor

            layout = cast(Any, tensor)
            complete = distribute_tensor(complete, layout.device_mesh, layout.placements)
        else:
            distributed.broadcast([complete])
        tensor.copy_(complete)
