"""Forward and training evaluations per second of the shapes world's network at batch 128.

python benchmarks/throughput.py                # one process with a thread per core
python benchmarks/throughput.py --processes 2  # like `flowrl compare`: processes of one thread, sum
of their rates
"""

import argparse
import time

import torch

from flowrl import world
from flowrl.workers import Worker, run_jobs
from flowrl.worlds.base import PolicyOptions

BATCH = 128


def rate(work, seconds: float = 6.0) -> float:
    """Evaluations per second of `work`, one batch a call."""
    for _ in range(3):
        work()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        work()
        calls += 1
    return BATCH * calls / (time.perf_counter() - start)


def measure(worker: Worker | None = None) -> tuple[float, float]:
    """Rates of forward and of training evaluations."""
    shapes = world("shapes")
    policy = shapes.policy(PolicyOptions())
    condition = policy.encode([shapes.parse("three red circles")] * BATCH)
    x, t = torch.randn(BATCH, *policy.latent_shape), torch.rand(BATCH) * 1000
    with policy.frozen():
        forward = rate(lambda: policy.velocity(x, t, condition))
    return forward, rate(lambda: policy.velocity(x, t, condition).square().mean().backward())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        help="processes of one thread each; 0 = one with all threads",
    )
    count = parser.parse_args().processes
    if count:
        rates: dict[int, tuple] = {}
        run_jobs(
            measure, {number: () for number in range(count)}, count, finished=rates.__setitem__
        )
        results, shown = list(rates.values()), f"{count} processes of one thread"
    else:
        results, shown = [measure()], f"{torch.get_num_threads()} threads"
    for number, name in enumerate(("forward", "training (LoRA rank 8)")):
        print(f"{name}, {shown}: {sum(result[number] for result in results):.0f}/s")


if __name__ == "__main__":
    main()
