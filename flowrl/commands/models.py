"""`flowrl pretrain` and `flowrl sample`."""

from dataclasses import dataclass
from pathlib import Path

from flowrl.commands.settings import typed_command
from flowrl.errors import require


@dataclass(frozen=True)
class Pretrain:
    """Make the built-in weights of the shapes world again (about 50 minutes; one core is enough)."""

    out: Path = Path("shapes.safetensors")
    """Where to write the weights; a card with their hash is written beside them."""
    updates: int | None = None
    """Optimiser steps of the base model [default: those of the weights that ship]."""
    seed: int = 0
    threads: int = 1
    """Threads; the weights depend on it in the last digits, and the ones that ship were made with one."""

    def main(self) -> int:
        """Train the autoencoder and the base model; write weights and card."""
        from flowrl.worlds.shapes.pretrain import PretrainConfig, pretrain_to_file

        changes = {} if self.updates is None else {"updates": self.updates}
        config = PretrainConfig(seed=self.seed, **changes)
        require(self.threads >= 1, "threads", self.threads, "1 or more")
        from flowrl.commands.progress import pretrain_progress

        pretrain_to_file(config, self.out, self.threads, pretrain_progress(), typed_command())
        print(f"Wrote {self.out} and {self.out.with_suffix('.json')}; use them with --base-weights {self.out}")
        return 0


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
    count: int = 8
    """Images per prompt."""
    num_steps: int = 20
    """ODE steps."""
    seed: int = 0

    def main(self) -> int:
        """Sample and draw."""
        from flowrl.training.evaluation import sample_grid

        require(self.count >= 1, "count", self.count, "1 or more")
        require(self.num_steps >= 1, "num_steps", self.num_steps, "1 or more")
        require(len(self.prompts) >= 1, "prompts", self.prompts, "one or more prompts")
        grid = sample_grid(self.prompts, self.weights, self.world, self.count, self.num_steps, self.seed)
        from flowrl.plots.images import image_grid
        from flowrl.plots.style import save

        save(image_grid(grid.images, grid.scores, grid.prompts), self.out)
        print(f"Wrote {self.out}: {len(self.prompts)} prompts x {self.count} images")
        return 0
