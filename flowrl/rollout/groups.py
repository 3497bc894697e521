"""The groups of an iteration: the order of the prompts, and the noise of the samples."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.prompt import Prompt
from flowrl.core.types import Gaussian
from flowrl.flow.gaussian import sample


class PromptStream:
    """Prompts in shuffled passes, reproducible from seed and position.

    In a pass over n prompts with weights w_i, prompt i is drawn n w_i / sum(w) times, rounded up or
    down at random so that this is the mean, and n draws are made: with equal weights each prompt
    once. Prompts of several sources are drawn in turns, each source as often as the weights of its
    prompts say.

    Args:
        prompts: the training prompts.
        seed: seed of the order.

    Raises:
        ConfigError: there are no prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        require(bool(prompts), "prompts", prompts, "a non-empty list")
        self.prompts = list(prompts)
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        while len(self.order) < count:
            self.order += self._pass().tolist()
        chosen, self.order = self.order[:count], self.order[count:]
        return [self.prompts[i] for i in chosen]

    def _pass(self) -> Tensor:
        """The indices of the prompts of one pass; of unequal weights, by systematic sampling."""
        order = torch.randperm(len(self.prompts), generator=self.generator)
        given = [prompt.weight for prompt in self.prompts]
        names = {prompt.source: number for number, prompt in enumerate(self.prompts)}
        if len(names) == len({*given}) == 1:
            return order
        source = torch.tensor([names[prompt.source] for prompt in self.prompts])
        order = order[source[order].argsort(stable=True)]
        weights = torch.tensor(given, dtype=torch.float64)
        # each index is drawn as often as its interval of the cumulative weights has a point of a
        # grid of spacing 1 with a random offset
        ends = (weights / weights.max())[order].cumsum(0)
        offset = torch.rand((), generator=self.generator, dtype=torch.float64)
        points = torch.arange(len(order), dtype=torch.float64) + offset
        drawn = torch.searchsorted(ends, points / len(order) * ends[-1], right=True)
        drawn = order[drawn.clamp(max=len(order) - 1)]
        drawn = drawn[torch.randperm(len(order), generator=self.generator)]
        if len(names) == 1:
            return drawn
        # the k-th of a source's m draws at (k + u) / m of the pass
        place = torch.empty(len(order), dtype=torch.float64)
        for number in names.values():
            rows = source[drawn] == number
            offset = torch.rand((), generator=self.generator, dtype=torch.float64)
            place[rows] = (torch.arange(int(rows.sum())) + offset) / rows.sum()
        return drawn[place.argsort(stable=True)]

    def upcoming(self, count: int) -> list[Prompt]:
        """The distinct prompts among the next `count`, in order; the position does not change."""
        ahead = copy.copy(self)
        ahead.generator, ahead.order = self.generator.clone_state(), list(self.order)
        return list({prompt.key: prompt for prompt in ahead.take(count)}.values())


@dataclass(frozen=True)
class Groups:
    """`prompts` x `members` samples, prompt-major.

    `part` selects some of the groups for a separate rollout. All noise is drawn for all groups and
    sliced, so a group's noise does not depend on which groups share its process or its chunk.

    Args:
        prompts: number of groups.
        members: samples per group.
        shared_noise: share of the variance of z_0 that the members of a group have in common; True:
            they start from the same z_0.
        first: index of the first group within all groups.
        total: number of all groups; 0: there are no others.

    Raises:
        ConfigError: a number is out of range.
    """

    prompts: int
    members: int
    shared_noise: float = False
    first: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        fits = min(self.prompts, self.members) >= 1 and 0 <= self.first <= self.all - self.prompts
        require(fits, "groups", self, "prompts and members 1 or more, within the total")
        share = self.shared_noise
        require(0 <= share <= 1, "shared_noise", share, "within [0, 1]")

    @property
    def all(self) -> int:
        """Number of all groups."""
        return self.total or self.prompts

    @property
    def samples(self) -> int:
        """prompts x members."""
        return self.prompts * self.members

    def part(self, first: int, count: int) -> "Groups":
        """`count` of these groups, from index `first` on."""
        return replace(self, prompts=count, first=self.first + first, total=self.all)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """z_0 of every sample, [sample, *latent], on the generator's device."""
        common = own = None
        if self.shared_noise > 0:
            common = self._drawn(torch.randn, 1, shape, generator)
            common = common.repeat_interleave(self.members, dim=0)
        if self.shared_noise < 1:
            own = self._drawn(torch.randn, self.members, shape, generator)
        if common is None or own is None:
            return cast(Tensor, own if common is None else common)
        return math.sqrt(self.shared_noise) * common + math.sqrt(1 - self.shared_noise) * own

    @property
    def one_start(self) -> bool:
        """Whether the members of a group start from the same z_0."""
        return self.shared_noise == 1

    def rand(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Uniform random numbers [prompt, *shape]."""
        return self._drawn(torch.rand, 1, shape, generator)

    def _drawn(
        self,
        draw: Callable[..., Tensor],
        rows: int,
        shape: tuple[int, ...],
        generator: torch.Generator,
    ) -> Tensor:
        """Random numbers with `rows` rows for each of these groups, drawn for all groups."""
        size = (self.all * rows, *shape)
        numbers = draw(size, generator=generator, device=generator.device)
        return numbers[self.first * rows : (self.first + self.prompts) * rows]

    def draw(self, gaussian: Gaussian, generator: torch.Generator) -> Tensor:
        """A draw per row of `gaussian`, which has equally many rows for every group,
        prompt-major.
        """
        rows = len(gaussian.mean) // self.prompts
        return sample(gaussian, generator, self.first * rows, self.all * rows)

    def normal(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Standard normal noise of the shape of x, whose rows are as those of `draw`."""
        return self.draw(Gaussian(torch.zeros_like(x), x.new_ones(len(x))), generator)
