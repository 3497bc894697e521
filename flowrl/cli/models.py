"""`flowrl sample`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.core.errors import require
from flowrl.core.options import Count, Seed

if TYPE_CHECKING:
    from flowrl.core.protocols import FlowPolicy, RewardModel
    from flowrl.core.types import Prompt


SHAPES_PROMPTS = (
    "three red circles",
    "blue square left of green triangle",
    'text "K72"',
    "lively red and blue pattern",
)


@dataclass(frozen=True)
class Sample:
    """Draw images for prompts from the base model, or from a finished run, as one PNG grid.

    Example: flowrl sample --prompts "three red circles" 'text "K72"' --weights
    runs/mine/runs/flow-grpo-seed0
    """

    prompts: tuple[str, ...] | None = None
    """Prompts in the world's language; default: four of the world's held-out prompts, or for shapes
    one of every kind.
    """
    weights: Path | None = None
    """Folder of a finished run; without it, the base model."""
    out: Path = Path("samples.png")
    """The PNG file to write."""
    world: str = "shapes"
    """The world of the base model: shapes, mixture, a plug-in or path/to/file.py:Class."""
    count: Count = 8
    """Images per prompt."""
    num_steps: Count = 20
    """ODE steps."""
    seed: Seed = 0
    """Draws the noise; the same seed gives every model the same noise."""
    trust: bool = False
    """Run code that the settings in `weights` name, and use their addresses and keys."""

    def main(self) -> int:
        """Sample, score and write the grid."""
        import torch

        from flowrl.cli.image_grids import image_grid
        from flowrl.cli.style import require_figure, save
        from flowrl.rewards import stills
        from flowrl.rollout import initial_noise, sample_images, score

        require(
            self.prompts is None or len(self.prompts) >= 1,
            "prompts",
            self.prompts,
            "one or more prompts",
        )
        require_figure(self.out)
        policy, reward, prompts, max_batch = self._load()
        repeated = [prompt for prompt in prompts for _ in range(self.count)]
        noise = initial_noise(policy, len(repeated), self.seed)
        images, scores = [], []
        for batch in sample_images(policy, repeated, noise, self.num_steps, max_batch=max_batch):
            images.append(stills(batch.images).cpu())
            scores.append(score(reward, batch.images, batch.prompts).cpu())
        shape = (len(prompts), self.count)
        texts = [prompt.text for prompt in prompts]
        save(
            image_grid(torch.cat(images).unflatten(0, shape), torch.cat(scores).view(shape), texts),
            self.out,
        )
        print(f"Wrote {self.out}: {len(prompts)} prompts x {self.count} images")
        return 0

    def _load(self) -> "tuple[FlowPolicy, RewardModel, list[Prompt], int]":
        """The base model or the run's, the reward, the prompts, and the largest batch;
        `ConfigError` for unknown words.
        """
        from flowrl.core.protocols import PolicyOptions
        from flowrl.training.build import make_world, trained_policy
        from flowrl.worlds.base import check_policy, prompts_of, world

        if self.weights is None:
            chosen, max_batch = world(self.world), 1024
            task, policy = chosen.tasks[0], chosen.policy(PolicyOptions())
            check_policy(chosen, policy)
        else:
            policy, config = trained_policy(self.weights, trust=self.trust)
            # the device of the training may not exist here
            chosen = make_world(config.replace(device=str(policy.device)))
            task, max_batch = config.environment.task, config.batches.max_batch
        texts = SHAPES_PROMPTS if self.prompts is None and chosen.name == "shapes" else self.prompts
        heldout = prompts_of(chosen, task, "heldout")[:4] if texts is None else []
        prompts = heldout or [chosen.parse(text) for text in texts or ()]
        return (
            policy,
            chosen.reward("soft" if "soft" in chosen.forms else chosen.forms[0]),
            prompts,
            max_batch,
        )
