"""Variants of the 2-D world: further coordinates without a reward, and modes within modes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, get_args

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn.functional import pad

from flowrl.core.options import checked_options
from flowrl.core.protocols import FlowPolicy, PolicyOptions, RewardModel
from flowrl.core.types import Prompt
from flowrl.flow.mixture import GaussianMixture
from flowrl.policies import MixturePolicy
from flowrl.training.presets import WORLD_DEFAULTS
from flowrl.worlds import mixture

CENTRES = GaussianMixture.ring(modes=4, radius=mixture.RADIUS).means
"""The centres of the rings of the nested mixture [mode, 2]."""
SCALE = 0.25
"""The size of these rings, relative to the ring on which their centres are."""


def data(dimension: int, nested: bool) -> GaussianMixture:
    """The mixture of `Points`."""
    ring = mixture.ring()
    if nested:
        inner = (CENTRES[:, None] + SCALE * CENTRES).flatten(0, 1)
        ring = GaussianMixture(inner, SCALE * ring.std, torch.full((len(inner),), 1 / len(inner)))
    return GaussianMixture(pad(ring.means, (0, dimension - 2)), ring.std, ring.weights)


@dataclass(frozen=True)
class PlaneReward:
    """The 2-D world's reward of the first two coordinates; with `nested` the mean of two parts.

    The first part is the 2-D world's reward. The second is the same reward at the size of a ring
    and relative to the centre of the nearest one: closeness to the point of that ring in the
    prompt's direction.
    """

    form: mixture.Form = "soft"
    nested: bool = False

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Points [sample, dimension, 1, 1] and as many prompts -> [sample]."""
        points, model = images[:, :2], mixture.DirectionReward(self.form)
        coarse = model.score(points, prompts)
        if not self.nested:
            return coarse
        centres = CENTRES.to(points.device)[:, :, None, None]
        # every form falls with the distance, so the nearest ring has the largest score
        fine = [model.score((points - centre) / SCALE, prompts) for centre in centres]
        return (coarse + torch.stack(fine).amax(0)) / 2


@dataclass(frozen=True)
class LogDensity:
    """log p(point) under the data, in nats."""

    data: GaussianMixture

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Points [sample, dimension, 1, 1] -> [sample]."""
        points = images.flatten(1).float().cpu()
        return self.data.log_marginal(points, torch.zeros(len(points))).to(images.device)


@checked_options
@dataclass(frozen=True)
class Points:
    """The 2-D world with further coordinates, or with modes within modes.

    The data are a Gaussian mixture in closed form. Its modes differ in the first two coordinates
    only, which the reward reads; the other coordinates are independent of them under the base flow.

    Args:
        dimension: number of coordinates, 2 or more.
        nested: four rings of four narrow modes in place of eight modes, and a reward of two parts:
            on which side of the plane the point is, which the flow decides early, and where on its
            ring, which the flow decides late.

    Raises:
        ConfigError: an option is out of range.
    """

    dimension: Annotated[int, Ge(2), Le(1024)] = 2
    nested: bool = False

    name = "points"
    tasks = mixture.TASKS
    forms = get_args(mixture.Form)
    points = True
    defaults: ClassVar[Mapping[str, Any]] = {**WORLD_DEFAULTS["mixture"], "reward_form": "soft"}
    reads = ("device", "compile")

    @property
    def elements(self) -> int:
        """The number of coordinates."""
        return self.dimension

    @property
    def qualities(self) -> Mapping[str, Callable[[], RewardModel]]:
        """The density of the data."""
        return {"density": partial(LogDensity, data(self.dimension, self.nested))}

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """Those of the 2-D world."""
        return mixture.split(task)[part]

    def parse(self, text: str) -> Prompt:
        """A direction in words. Raises `ConfigError` for other words."""
        return Prompt(text, {"angle": mixture.angle_of(text)})

    def reward(self, form: Any) -> RewardModel:
        """Closeness to the direction's target in the first two coordinates."""
        return PlaneReward(form, self.nested)

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """The exact velocity plus a small network."""
        modes = data(self.dimension, self.nested)
        return MixturePolicy(modes, mixture.angle_of, seed=options.seed, device=options.device)
