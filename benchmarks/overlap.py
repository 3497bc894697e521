"""Seconds of an iteration with rewards after sampling, and with rewards computed beside it.

    python benchmarks/overlap.py           # two minutes
    python benchmarks/overlap.py --busy    # the reward computes instead of waiting

The policy is fake: `--seconds` per image of sampling are waited for, as a process waits for its
GPU, and its images have 512 x 512 pixels. The reward takes as long per image in its process. By
default it waits too, so that other programs on the machine do not change the figures; it then
stands for a core of its own.
"""

import argparse
import time
from dataclasses import dataclass
from typing import ClassVar

import torch

from flowrl.training.build import make_trainer
from flowrl.training.config import preset
from flowrl.workers import usable_cores


@dataclass(frozen=True)
class Slow:
    """The mean of an image, `seconds` later."""

    seconds: float = 0.2
    busy: bool = False
    on_cpu: ClassVar[bool] = True

    def score(self, images, prompts):
        """Means [sample]."""
        clock = time.thread_time if self.busy else time.perf_counter
        for _ in images:
            ends = clock() + self.seconds
            while (left := ends - clock()) > 0:
                if not self.busy:
                    time.sleep(left)
        return images.flatten(1).mean(1)


def measure(options: argparse.Namespace, seconds: float, overlap: bool) -> list[dict]:
    """The metrics of the iterations with a reward of `seconds` per image."""
    config = preset("tiny").apply(
        world="mixture",
        groups=options.groups,
        group_size=options.members,
        max_batch=options.members,
        chunk="auto" if overlap else 1,
        overlap_rewards=overlap,
        reward=f"{__file__}:Slow(seconds={seconds}, busy={options.busy})",
    )
    trainer = make_trainer(config)
    policy: object = trainer.policy
    velocity, decode, steps = policy.velocity, policy.decode, config.rollout.num_steps

    def sampled(x, *arguments):
        if not torch.is_grad_enabled():
            time.sleep(options.seconds * len(x) / steps)
        return velocity(x, *arguments)

    def decoded(latents):
        level = decode(latents).flatten(1).mean(1)
        return level.view(-1, 1, 1, 1).expand(-1, 3, 512, 512).contiguous()

    policy.velocity, policy.decode = sampled, decoded
    return [dict(trainer.iteration()) for _ in range(options.iterations)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="per image")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="the reward uses its core")
    options = parser.parse_args()
    print(f"{options.groups} x {options.members} images, {usable_cores()} cores")
    rows, base = {}, 0.0
    for name, seconds, overlap in (
        ("sampling alone", 0.0, False),
        ("rewards after sampling", options.seconds, False),
        ("rewards beside sampling", options.seconds, True),
    ):
        rows[name] = measure(options, seconds, overlap)
        spent = sum(row["seconds"] for row in rows[name]) / options.iterations
        waited = sum(row["phases"]["reward"] for row in rows[name]) / options.iterations
        base = base or spent
        print(f"{name}: {spent:.1f} s, {spent / base - 1:+.1%}; waited for rewards {waited:.1f} s")
    times = ("seconds", "phases")
    numbers = [
        [{n: v for n, v in row.items() if n not in times} for row in r] for r in rows.values()
    ]
    print("the same numbers:", numbers[0] == numbers[1] == numbers[2])


if __name__ == "__main__":
    main()
