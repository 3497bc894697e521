"""Forward and training evaluations per second of the shapes world's network at batch 128, on all cores.

python benchmarks/throughput.py
"""

import time

import torch

from flowrl import world
from flowrl.builtin import PolicyOptions

BATCH = 128


def rate(work, seconds: float = 6.0) -> tuple[float, float]:
    """(mean, best of a call) evaluations per second of `work`, one batch a call."""
    for _ in range(3):
        work()
    best, calls, start = 0.0, 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        began = time.perf_counter()
        work()
        best = max(best, BATCH / (time.perf_counter() - began))
        calls += 1
    return BATCH * calls / (time.perf_counter() - start), best


def main() -> None:
    """Measure and print."""
    shapes = world("shapes")
    policy = shapes.policy(PolicyOptions())
    condition = policy.encode([shapes.parse("three red circles")] * BATCH)
    x, t = torch.randn(BATCH, *policy.latent_shape), torch.rand(BATCH) * 1000
    with policy.frozen():
        mean, best = rate(lambda: policy.velocity(x, t, condition))
    print(f"forward, {torch.get_num_threads()} threads: {mean:.0f}/s (best call {best:.0f}/s)")
    mean, best = rate(lambda: policy.velocity(x, t, condition).square().mean().backward())
    print(f"training (LoRA rank 8): {mean:.0f}/s (best call {best:.0f}/s)")


if __name__ == "__main__":
    main()
