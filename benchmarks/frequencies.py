"""Which spatial frequencies each step of the sampler decides, in the image world.

The image that the ODE finishes from x_k shows what is decided before step k. Its change by the step,
the image from x_{k+1} minus that from x_k, has a power spectrum; a band's power is the mean over
images of the squared change in it. The table has each step's share of a band's power over all steps,
and the bands' shares of a step's power. Means over prompts and members; the spread is the standard
error over prompts.

    python benchmarks/frequencies.py
    python benchmarks/frequencies.py --task text --seed 1 --prompts 24 --members 16
"""

import argparse
from itertools import pairwise

import torch
from flowrl_bench.measurements import reproducible
from torch import Tensor

from flowrl.probes import Completion
from flowrl.rollout import Groups, rollout
from flowrl.training.build import make_trainer, make_world
from flowrl.training.config import preset

BANDS = {"mean": (0, 0.5), "coarse": (0.5, 2.5), "middle": (2.5, 8.5), "fine": (8.5, 64)}
"""Bands of the radial frequency in cycles per image."""


def band_power(images: Tensor) -> Tensor:
    """[image, band] of [image, channel, height, width]: mean squares of the parts in `BANDS`, whose
    sum is the mean square of the image (Parseval).
    """
    height, width = images.shape[-2:]
    power = torch.fft.fft2(images).abs().square().mean(1) / (height * width) ** 2
    rows, columns = torch.fft.fftfreq(height) * height, torch.fft.fftfreq(width) * width
    radius = (rows[:, None].square() + columns.square()).sqrt()
    masks = [(radius >= low) & (radius < high) for low, high in BANDS.values()]
    return torch.stack([(power * mask).sum((-2, -1)) for mask in masks], -1)


def changes(task: str, seed: int, prompts: int, members: int) -> Tensor:
    """[prompt, step, band]: the power of each step's change."""
    config = preset("default").apply(world="shapes", task=task, window=":-1")
    with reproducible("frequencies", seed):
        trainer, chosen = make_trainer(config), make_world(config).prompts(task, "train")[:prompts]
        policy, groups = trainer.policy, Groups(len(chosen), members)
        generator = torch.Generator().manual_seed(seed)
        condition, noise = policy.encode(chosen), groups.noise(policy.latent_shape, generator)
        result = rollout(
            policy,
            trainer.draw_sampler(),
            trainer.schedule,
            condition,
            noise,
            generator,
            groups,
            Completion(),
            max_batch=config.rollout.max_batch,
        )
        ends = [result.estimates[node] for node in result.nodes]
        images = [policy.decode(end) for end in (*ends, result.trajectories.images_latent)]
    steps = [band_power(after - before) for before, after in pairwise(images)]
    return torch.stack(steps, 1).unflatten(0, (len(chosen), members)).mean(1)


def table(power: Tensor) -> str:
    """The shares as text, with the standard error over prompts."""

    def cells(shares: Tensor) -> list[str]:
        mean, error = shares.mean(0), shares.std(0) / len(shares) ** 0.5
        pairs = zip(mean.tolist(), error.tolist(), strict=True)
        return [f"{100 * value:5.1f} ± {100 * spread:3.1f}" for value, spread in pairs]

    by_band, by_step = power / power.sum(1, keepdim=True), power / power.sum(2, keepdim=True)
    head = ["step", *(f"{name}, of all steps" for name in BANDS), *(f"{n}, of step" for n in BANDS)]
    lines = [head, ["---"] * len(head)]
    for step in range(power.shape[1]):
        lines.append([str(step), *cells(by_band[:, step]), *cells(by_step[:, step])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--task", default="compositional")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--members", type=int, default=12)
    chosen = vars(parser.parse_args())
    print(table(changes(**chosen)))


if __name__ == "__main__":
    main()
