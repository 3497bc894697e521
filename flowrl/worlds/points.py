"""A variant of the 2-D world: further coordinates without a reward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, get_args

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn.functional import pad

from flowrl.core.options import checked_options
from flowrl.core.policy_options import PolicyOptions
from flowrl.core.protocols import FlowPolicy, RewardModel
from flowrl.core.types import Prompt
from flowrl.flow.mixture import GaussianMixture
from flowrl.policies import MixturePolicy
from flowrl.run.presets import WORLD_DEFAULTS
from flowrl.worlds import mixture


def data(dimension: int) -> GaussianMixture:
    """The mixture of `Points`."""
    ring = mixture.ring()
    return GaussianMixture(pad(ring.means, (0, dimension - 2)), ring.std, ring.weights)


@dataclass(frozen=True)
class PlaneReward:
    """The 2-D world's reward of the first two coordinates."""

    form: mixture.Form = "soft"

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Points [sample, dimension, 1, 1] and as many prompts -> [sample]."""
        return mixture.DirectionReward(self.form).score(images[:, :2], prompts)


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
    """The 2-D world with further coordinates.

    The data are a Gaussian mixture in closed form. Its modes differ in the first two coordinates
    only, which the reward reads; the other coordinates are independent of them under the base flow.

    Args:
        dimension: number of coordinates, 2 or more.

    Raises:
        ConfigError: an option is out of range.
    """

    dimension: Annotated[int, Ge(2), Le(1024)] = 2

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
        return {"density": partial(LogDensity, data(self.dimension))}

    def prompts(self, task: str, part: str) -> list[Prompt]:
        """Those of the 2-D world."""
        return list(mixture.split(task)[part])

    def parse(self, text: str) -> Prompt:
        """A direction in words. Raises `ConfigError` for other words."""
        return Prompt(text, {"angle": mixture.angle_of(text)})

    def reward(self, form: Any) -> RewardModel:
        """Closeness to the direction's target in the first two coordinates."""
        return PlaneReward(form)

    def policy(self, options: PolicyOptions) -> FlowPolicy:
        """The exact velocity plus a small network."""
        modes = data(self.dimension)
        return MixturePolicy(modes, mixture.angle_of, seed=options.seed, device=options.device)
