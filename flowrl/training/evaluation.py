"""Evaluation: ODE samples of the current weights for fixed held-out prompts and noise, and the
trajectory record of a run.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from flowrl.core.errors import RewardError
from flowrl.core.protocols import FlowPolicy, RewardModel, World
from flowrl.core.types import Prompt
from flowrl.distributed import Distributed
from flowrl.io import write_bytes, write_json
from flowrl.probes import Completion, Tweedie
from flowrl.rewards import stills
from flowrl.rollout import (
    EVALUATION_SEED,
    Groups,
    ImageBatch,
    Usage,
    initial_noise,
    rollout,
    sample_images,
    score,
    score_rollout,
)
from flowrl.training.heldout import HeldoutMetrics
from flowrl.training.trainer import Trainer

CUSTOM = "custom reward"
"""The key of a training reward that is not one of the world's forms."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Args:
        scores: mean scores by form.
        seconds: duration.
        images: images of the first samples; of videos, `stills`.
        image_scores: their scores, by the custom reward if there is one.
        prompts: their prompts.
        custom_reward: mean of a training reward that is not the task's; None without one.
        heldout: the entries of `training.heldout.HeldoutMetrics.measure`.
    """

    scores: dict[str, float]
    seconds: float
    images: Tensor
    image_scores: Tensor
    prompts: list[Prompt]
    custom_reward: float | None = None
    heldout: dict[str, Any] = field(default_factory=dict)

    @property
    def incomplete(self) -> bool:
        """Whether a held-out metric could not be measured."""
        return None in (
            *self.heldout.get("heldout", {}).values(),
            self.heldout.get("diversity", 0.0),
        )

    def row(self, form: str) -> dict[str, Any]:
        """The entries of a metrics line; "reward" is the trained score: that of the form, or the
        custom reward.
        """
        reward = self.scores[form] if self.custom_reward is None else self.custom_reward
        return {"reward": reward, **self.scores, "seconds": self.seconds, **self.heldout}


def evaluate(
    policy: FlowPolicy,
    world: World,
    task: str,
    form: str,
    count: int,
    steps: int,
    max_batch: int = 256,
    keep: int = 8,
    reward: RewardModel | None = None,
    solver: str = "euler",
    heldout_metrics: HeldoutMetrics | None = None,
    distributed: Distributed = Distributed(),
) -> Evaluation:
    """Sample images of the held-out prompts with the current weights and score them.

    At most `max_batch` samples are on the device at a time: each batch is encoded, sampled, decoded
    and scored before the next. The noise is the same in every evaluation. The processes divide the
    samples; all get the full result. Means are over the samples that the reward has not marked
    invalid.

    Args:
        policy: the policy.
        world: the world with prompts and rewards.
        task: name of the task.
        form: form of the score for `image_scores`.
        count: number of samples; prompts are repeated if there are fewer.
        steps: number of ODE steps.
        max_batch: largest number of samples per batch.
        keep: number of images in the result.
        reward: a further reward to measure; None for the task's forms only.
        solver: name of the solver (see `rollout.solve`).
        heldout_metrics: held-out rewards and diversity; None: not measured.
        distributed: the processes.

    Returns:
        Scores and the first images.

    Raises:
        RewardError: a reward has marked all samples invalid.
    """
    started = time.perf_counter()
    heldout = world.prompts(task, "heldout")
    prompts = [heldout[i % len(heldout)] for i in range(count)]
    share = distributed.assign(count)
    models = {name: world.reward(name) for name in world.forms}
    if reward is not None:
        models[CUSTOM] = reward
    training = form if reward is None else CUSTOM
    measured: dict[str, list[Tensor]] = {name: [torch.empty(0)] for name in models}
    shown = [torch.empty(0)]
    columns = None if heldout_metrics is None else heldout_metrics.columns()

    def sample(prompts: Sequence[Prompt], seed: int, rows: range, own: int) -> Iterator[ImageBatch]:
        some = slice(rows.start, rows.stop)
        noise = initial_noise(policy, len(prompts), seed)[some]
        batches = sample_images(policy, prompts[some], noise, steps, solver, max_batch)
        return map(
            lambda batch, first: batch[max(0, own - first) :],
            batches,
            itertools.count(rows.start, max_batch),
        )

    def measure(batch: ImageBatch) -> None:
        """Score a batch, and keep its images that are among the first `keep`; nothing of it stays
        on the device.
        """
        if not batch.prompts:
            return
        for name, model in models.items():
            measured[name].append(score(model, batch.images, batch.prompts, invalid=True).cpu())
        if columns is not None:
            columns.add(batch, measured[training][-1])
        missing = keep - share.own.start - sum(map(len, shown))
        if missing > 0:
            shown.append(stills(batch.images[:missing]).cpu().clone())

    with distributed.shared_errors():
        rows = range(share.first, share.first + share.count)
        for batch in sample(prompts, EVALUATION_SEED, rows, share.own.start):
            measure(batch)
            del batch  # before the next one is sampled
    parts = distributed.gather(
        ({name: torch.cat(found) for name, found in measured.items()}, torch.cat(shown))
    )
    scores = {name: torch.cat([some[name] for some, _ in parts]) for name in models}
    images = torch.cat([some for _, some in parts if len(some)])
    means = {name: _mean(scores[name], name) for name in world.forms}
    custom = None if reward is None else _mean(scores[CUSTOM], type(reward).__name__)
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {}
    if heldout_metrics is not None and columns is not None:
        found = heldout_metrics.measure(columns, heldout, sample, distributed)
    return Evaluation(
        means, seconds, images, scores[training][:keep], prompts[:keep], custom, found
    )


def _mean(scores: Tensor, name: str) -> float:
    """The mean over valid samples."""
    if bool(scores.isnan().all()):
        raise RewardError(f"evaluation: the reward {name} marked all {len(scores)} samples invalid")
    return float(scores.nanmean())


def write_trajectory(folder: Path, trainer: Trainer, world: World, members: int = 12) -> None:
    """Write trajectory.json: values along the trajectories of one group, by ODE completion from the
    start of every decision.

    The member with the largest changes of reward is "chosen". The file also contains its rewards by
    one-step (Tweedie) estimates, and trajectory.safetensors contains the images of its completions.

    Args:
        folder: the folder for the files.
        trainer: the trainer.
        world: the world with the prompt.
        members: size of the group.
    """
    policy, prompt = trainer.policy, world.prompts(trainer.config.environment.task, "heldout")[0]
    generator = torch.Generator(policy.device).manual_seed(7)
    groups = Groups(1, members)
    noise = groups.noise(policy.latent_shape, generator)
    start = generator.get_state()
    sampler = trainer.draw_sampler()
    tables, latents = [], []
    for probe in (Completion(), Tweedie()):
        generator.set_state(start)
        result = rollout(
            policy,
            sampler,
            trainer.schedule,
            policy.encode([prompt]),
            noise,
            generator,
            groups,
            probe,
            Usage(),
            trainer.config.batches.max_batch,
        )
        table = score_rollout(policy, trainer.reward, result, [prompt]).total[0]
        # without decisions the ODE leads to the image
        tables.append(torch.where(table.isnan(), table[:, -1:], table))
        starts = [result.estimates[node].latents for node in result.nodes] or [
            result.trajectories.images_latent
        ]
        latents = latents or [*starts, result.trajectories.images_latent]
    chosen = int(tables[0].diff(dim=1).abs().sum(1).nan_to_num(-1.0).argmax())
    record = {
        "prompt": prompt.text,
        "chosen": chosen,
        "rewards": tables[0][chosen].tolist(),
        "members": tables[0].tolist(),
        "tweedie": tables[1][chosen].tolist(),
    }
    write_json(folder / "trajectory.json", record)
    images = torch.cat([stills(policy.decode(one[chosen : chosen + 1])) for one in latents])
    write_bytes(folder / "trajectory.safetensors", save({"images": images.cpu().contiguous()}))
