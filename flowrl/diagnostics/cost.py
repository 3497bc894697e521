"""What a network's evaluations cost in floating-point operations, and what the device could do."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flowrl.policies.adapters import LORA_TARGETS, Adapters
from flowrl.policies.pipeline import PipelinePolicy


@dataclass(frozen=True)
class NetworkCost:
    """Floating-point operations (a multiplication and an addition count as two) of one evaluation of one latent.

    Matrix products, convolutions and attention are counted, as is usual for model FLOP utilisation; norms, activations and the
    image decoder are not. `backward` is what a gradient of the trained parameters needs besides `forward`: with a LoRA no weight
    gradients of frozen layers. Work that is done twice to save memory (gradient checkpointing, attention's own recomputation) is
    not part of either.
    """

    forward: int
    backward: int


def network_cost(policy: PipelinePolicy, rows: Mapping[str, Tensor]) -> NetworkCost:
    """Counted by PyTorch's own counter on a twin of the policy's transformer that has shapes but no memory.

    `rows` are the embeddings of one prompt, [1, ...]. All operations are linear in the number of latents, so one is enough.
    """
    with torch.device("meta"):
        twin: Any = type(policy.transformer).from_config(policy.transformer.config)
    options = policy.options
    twin.requires_grad_(options.train == "full")
    if options.train == "lora":
        Adapters(twin, options.rank, options.alpha, options.targets or LORA_TARGETS, options.seed)
    shaped = {name: torch.empty(row.shape, device="meta") for name, row in rows.items()}
    latent = torch.empty((1, *policy.latent_shape), device="meta")
    with FlopCounterMode(display=False) as counter:
        time_told = torch.empty(1, device="meta")
        velocity = policy.family.velocity(twin, latent, time_told, shaped, policy.latent_size)
        forward = counter.get_total_flops()
        if velocity.requires_grad:
            velocity.sum().backward()
    return NetworkCost(forward, counter.get_total_flops() - forward)


def matrix_product_ceiling(device: torch.device, dtype: torch.dtype, sizes: Sequence[int], seconds: float = 0.5) -> float:
    """Floating-point operations per second of square matrix products of random numbers: the best of `sizes`, each measured for
    about `seconds` after a warm-up. What a network made of such products alone would reach at most."""
    best = 0.0
    for size in sizes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        once = _product_seconds(a, b, 1)
        count = max(3, min(200, int(seconds / 4 / max(once, 1e-6))))
        best = max(best, *(2 * size**3 * count / _product_seconds(a, b, count) for _ in range(4)))
    return best


def _product_seconds(a: Tensor, b: Tensor, count: int) -> float:
    """Seconds that `count` products take, after one that does not count."""
    out = a @ b
    synchronise(a.device)
    start = time.perf_counter()
    for _ in range(count):
        torch.matmul(a, b, out=out)
    synchronise(a.device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
