"""Measurements of a policy's network while the code around it runs unchanged: operations, time by
phase, memory.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.flop_counter import FlopCounterMode

from flowrl.policies import LORA_TARGETS, Adapters, Family, PipelinePolicy
from flowrl.run.sizes import peak_memory, reset_peak_memory


@dataclass(frozen=True)
class NetworkCost:
    """Floating-point operations (a multiplication and an addition count as two) of one evaluation
    of one latent.

    Matrix products, convolutions and attention are counted, as is usual for model FLOP utilisation;
    norms, activations and the image decoder are not. `backward` is the additional work for a
    gradient of the trained parameters: with a LoRA it has no weight gradients of frozen layers.
    Recomputation that saves memory (gradient checkpointing, attention) is not part of either.
    """

    forward: int
    backward: int


def network_cost(policy: PipelinePolicy, rows: Mapping[str, Tensor]) -> NetworkCost:
    """Counted by PyTorch's counter on a copy of the policy's transformer on the "meta" device.

    `rows` are the embeddings of one prompt, [1, ...]. All operations are linear in the number of
    latents, so one is enough.
    """
    with torch.device("meta"):
        twin: Any = type(policy.transformer).from_config(policy.transformer.config)
    options = policy.options
    twin.requires_grad_(options.trained == "full")
    if options.trained == "lora":
        targets = options.lora_targets or LORA_TARGETS
        Adapters(twin).add(options.lora_rank, options.lora_alpha, targets, options.seed)
    shaped = {name: torch.empty(row.shape, device="meta") for name, row in rows.items()}
    latent = torch.empty((1, *policy.latent_shape), device="meta")
    with FlopCounterMode(display=False) as counter:
        timestep = torch.empty(1, device="meta")
        velocity = policy.family.velocity(twin, latent, timestep, shaped, policy.latent_size)
        forward = counter.get_total_flops()
        if velocity.requires_grad:
            velocity.sum().backward()
    return NetworkCost(forward, counter.get_total_flops() - forward)


LARGE = 2048
"""Side of a matrix that keeps all threads or the whole GPU busy; smaller products alone underrate
the device.
"""


def matrix_product_ceiling(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int], seconds: float = 0.5
) -> float:
    """Floating-point operations per second of square matrix products of random numbers: the best of
    `sizes`, each measured for about `seconds` after a warm-up: the upper bound for a network of
    such products alone, on as many threads as PyTorch has now. A processor without instructions for
    `dtype` multiplies in it up to fifty times slower than in float32, whose ceiling is then
    returned. Raises `ValueError` unless one size is `LARGE` or more.
    """
    if max(sizes) < LARGE:
        raise ValueError(
            f"sizes {tuple(sizes)}: one must be {LARGE:,} or more, or the ceiling is too low"
        )
    if device.type == "cpu" and _small_product_seconds(dtype) > _small_product_seconds(
        torch.float32
    ):
        dtype = torch.float32
    best = 0.0
    for size in sizes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        once = _product_seconds(a, b, 1)
        count = max(3, min(200, int(seconds / 4 / max(once, 1e-6))))
        best = max(best, *(2 * size**3 * count / _product_seconds(a, b, count) for _ in range(4)))
    return best


def share_of_ceiling(operations: float, seconds: float, ceiling: float) -> float:
    """The share of the ceiling that work of so many operations reached. Raises `ValueError` for one
    above 1, which is impossible:
    something else slowed the ceiling's measurement down, or it ran on fewer threads.
    """
    share = operations / seconds / ceiling if seconds else 0.0
    if share > 1:
        raise ValueError(
            f"use of {share:.0%} is impossible: the work did {operations / seconds / 1e9:.0f}"
            f" GFLOP/s, its ceiling was measured at {ceiling / 1e9:.0f} ({torch.get_num_threads()}"
            " threads); measure again while nothing else runs"
        )
    return share


def _small_product_seconds(dtype: torch.dtype) -> float:
    """Seconds for a small product on the CPU, the best of three."""
    a = torch.ones(256, 256, dtype=dtype)
    return min(_product_seconds(a, a, 1) for _ in range(3))


def _product_seconds(a: Tensor, b: Tensor, count: int) -> float:
    """Seconds for `count` products, after a warm-up."""
    out = a @ b
    synchronise(a.device)
    start = time.perf_counter()
    for _ in range(count):
        torch.matmul(a, b, out=out)
    synchronise(a.device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class PhaseWork:
    """The work of one phase: wall-clock `seconds`, those in which the network worked, latents
    evaluated without a gradient (`sampled`) and with one (`trained`), and the peak memory in bytes
    (`peak_memory`).
    """

    seconds: float = 0.0
    network_seconds: float = 0.0
    sampled: int = 0
    trained: int = 0
    peak_bytes: int = 0

    def operations(self, cost: NetworkCost) -> int:
        """Useful floating-point operations of the network, without recomputation."""
        return (self.sampled + self.trained) * cost.forward + self.trained * cost.backward


@dataclass
class Meter:
    """A stopwatch around a family's network, by phases; call `phase(name)` at the start of each and
    `phase("")` at the end.

    On a GPU the network's time is taken between events in its own queue, so that measuring does not
    slow it down; only the start and the end of a phase synchronise. A backward pass counts from the
    gradient of the network's output to the last of the watched parameters' gradients.
    """

    device: torch.device
    work: dict[str, PhaseWork] = field(default_factory=dict)
    _name: str = ""
    _start: float = 0.0
    _spans: list[tuple[Any, Any]] = field(default_factory=list)
    _open: Any = None

    def phase(self, name: str) -> None:
        """End the current phase and start `name`, or continue it if it was there before."""
        synchronise(self.device)
        now = time.perf_counter()
        if self._name:
            current = self.work.setdefault(self._name, PhaseWork())
            current.seconds += now - self._start
            current.network_seconds += sum(_between(a, b) for a, b in self._spans)
            current.peak_bytes = max(current.peak_bytes, peak_memory(self.device))
        self._spans.clear()
        reset_peak_memory(self.device)
        self._name, self._start = name, time.perf_counter()

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Set the parameters whose gradients end a backward pass."""
        if parameters:
            register_multi_grad_hook(list(parameters), lambda gradients: self._ended(), mode="all")

    def evaluated(self, start: Any, velocity: Tensor) -> None:
        """Record a forward pass from `start` until now with the result `velocity`."""
        self._spans.append((start, self.mark()))
        current = self.work.setdefault(self._name, PhaseWork())
        if velocity.requires_grad:
            current.trained += len(velocity)
            velocity.register_hook(self._began)
        else:
            current.sampled += len(velocity)

    def _began(self, gradient: Tensor) -> None:
        if self._open is None:
            self._open = self.mark()

    def _ended(self) -> None:
        if self._open is not None:
            self._spans.append((self._open, self.mark()))
        self._open = None

    def mark(self) -> Any:
        """The present time in the device's own queue."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class MeteredFamily:
    """`family` with a meter around its network."""

    def __init__(self, family: Family, meter: Meter) -> None:
        self.family, self.meter = family, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)

    def velocity(
        self,
        transformer: Any,
        latent: Tensor,
        timestep: Tensor,
        rows: Mapping[str, Tensor],
        size: tuple[int, int],
    ) -> Tensor:
        """The family's own."""
        start = self.meter.mark()
        velocity = self.family.velocity(transformer, latent, timestep, rows, size)
        self.meter.evaluated(start, velocity)
        return velocity


def _between(start: Any, end: Any) -> float:
    """Seconds."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
