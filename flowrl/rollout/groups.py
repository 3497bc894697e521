"""The samples of a rollout, and their noise."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.types import Gaussian
from flowrl.flow.gaussian import sample as draw


@dataclass(frozen=True)
class Groups:
    """`prompts` x `members` samples, prompt-major.

    `part` selects some of the groups for a separate rollout. All noise is drawn for the whole and
    sliced, so a group's noise does not depend on which groups share its process or its chunk.

    Args:
        prompts: number of groups.
        members: samples per group.
        shared_noise: whether the members of a group start from the same x_T.
        first: index of the first group within all groups.
        of: number of all groups; None: there are no others.

    Raises:
        ConfigError: a number is out of range.
    """

    prompts: int
    members: int
    shared_noise: bool = False
    first: int = 0
    of: int | None = None

    def __post_init__(self) -> None:
        require(self.prompts >= 1, "prompts", self.prompts, "1 or more")
        require(self.members >= 1, "members", self.members, "1 or more")
        fits = self.first == 0 if self.of is None else 0 <= self.first <= self.of - self.prompts
        require(
            fits,
            "first",
            self.first,
            f"so that {self.prompts} groups lie within the {self.of or self.prompts} there are",
        )

    def part(self, first: int, count: int) -> "Groups":
        """`count` of these groups, from index `first` on."""
        return replace(self, prompts=count, first=self.first + first, of=self.of or self.prompts)

    @property
    def samples(self) -> int:
        """prompts x members."""
        return self.prompts * self.members

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """x_T of every sample, [sample, *latent], on the generator's device."""
        rows = 1 if self.shared_noise else self.members
        noise = torch.randn(
            ((self.of or self.prompts) * rows, *shape), generator=generator, device=generator.device
        )
        noise = noise[self.first * rows : (self.first + self.prompts) * rows]
        return noise.repeat_interleave(self.members, dim=0) if self.shared_noise else noise

    def rand(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Uniform random numbers [prompt, *shape]."""
        numbers = torch.rand(
            (self.of or self.prompts, *shape), generator=generator, device=generator.device
        )
        return numbers[self.first : self.first + self.prompts]

    def draw(self, gaussian: Gaussian, generator: torch.Generator) -> Tensor:
        """A draw per row of `gaussian`, which has equally many rows for every group,
        prompt-major.
        """
        rows = len(gaussian.mean) // self.prompts
        return draw(gaussian, generator, self.first * rows, (self.of or self.prompts) * rows)

    def normal(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Standard normal noise of the shape of x, whose rows are as those of `draw`."""
        return self.draw(Gaussian(torch.zeros_like(x), x.new_ones(len(x))), generator)
