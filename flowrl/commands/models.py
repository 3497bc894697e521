"""`flowrl sample`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.errors import require
from flowrl.options import Count, Seed

if TYPE_CHECKING:
    from flowrl.protocols import FlowPolicy
    from flowrl.types import Prompt
    from flowrl.worlds.base import World


@dataclass(frozen=True)
class Sample:
    """Draw images for prompts from the base model, or from a finished run, as one PNG grid.

    Example: flowrl sample --prompts "three red circles" 'text "K72"' --weights runs/mine/runs/flow-grpo-seed0
    """

    prompts: tuple[str, ...] = (
        "three red circles",
        "blue square left of green triangle",
        'text "K72"',
        "lively red and blue pattern",
    )
    """Prompts in the world's language."""
    weights: Path | None = None
    """Folder of a finished run; without it, the base model."""
    out: Path = Path("samples.png")
    """The PNG file to write."""
    world: str = "shapes"
    """The world of the base model."""
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

        from flowrl.plots.image_grids import image_grid
        from flowrl.plots.style import require_figure, save
        from flowrl.rewards import stills
        from flowrl.rollout import initial_noise, sample_images, score

        require(len(self.prompts) >= 1, "prompts", self.prompts, "one or more prompts")
        require_figure(self.out)
        world, policy, prompts, max_batch = self._load()
        repeated = [prompt for prompt in prompts for _ in range(self.count)]
        noise, reward = initial_noise(policy, len(repeated), self.seed), world.reward("soft")
        images, scores = [], []
        for batch in sample_images(policy, repeated, noise, self.num_steps, max_batch=max_batch):
            images.append(stills(batch.images).cpu())
            scores.append(score(reward, batch.images, batch.prompts).cpu())
        shape = (len(prompts), self.count)
        save(image_grid(torch.cat(images).unflatten(0, shape), torch.cat(scores).view(shape), self.prompts), self.out)
        print(f"Wrote {self.out}: {len(self.prompts)} prompts x {self.count} images")
        return 0

    def _load(self) -> "tuple[World, FlowPolicy, list[Prompt], int]":
        """The world, its base model or the run's, the parsed prompts, and the largest batch; `ConfigError` for unknown words."""
        from flowrl.training.build import make_world, trained_policy
        from flowrl.worlds.base import PolicyOptions, world

        if self.weights is None:
            chosen = world(self.world)
            prompts = [chosen.parse(text) for text in self.prompts]
            return chosen, chosen.policy(PolicyOptions()), prompts, 1024
        policy, config = trained_policy(self.weights, trust=self.trust)
        chosen = make_world(config.replace(device=str(policy.device)))  # the device of the training may not exist here
        return chosen, policy, [chosen.parse(text) for text in self.prompts], config.batches.max_batch
