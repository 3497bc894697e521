"""The 2-D world: eight modes on a circle, prompts that name a direction, rewards in closed form. An
experiment takes seconds.

Its images are points: [sample, 2, 1, 1], not restricted to [0, 1].
"""

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, RewardError, require
from flowrl.core.options import checked_options
from flowrl.core.types import Prompt
from flowrl.flow.mixture import GaussianMixture

TASKS = ("direction",)
Form = Literal["strict", "graded", "soft"]
RADIUS = 2.0
WIDTH = 1.0
"""Standard deviation of the soft reward's bump."""
ANGLES = tuple(range(0, 360, 15))


@cache
def split(task: str) -> Mapping[str, Sequence[Prompt]]:
    """18 training directions and 6 held-out ones, the same in every run."""
    require(task in TASKS, "task", task, f"one of {', '.join(TASKS)}")
    angles = list(ANGLES)
    random.Random("flowrl mixture").shuffle(angles)
    prompts = [Prompt(f"towards {angle} degrees", {"angle": angle}) for angle in angles]
    return {"heldout": tuple(prompts[:6]), "train": tuple(prompts[6:])}


def ring() -> GaussianMixture:
    """The data, and the distribution of the untrained policy."""
    return GaussianMixture.ring(radius=RADIUS)


def angle_of(text: str) -> float:
    """The direction, in degrees, of a prompt such as 'towards 45 degrees'. Raises `ConfigError` for
    other words.
    """
    match = re.fullmatch(r"\s*towards\s+(\S+)\s+degrees\s*", text)
    with suppress(ValueError):
        if match and math.isfinite(float(match[1])):
            return float(match[1])
    raise ConfigError(f"prompt {text!r} is not understood; write for example 'towards 45 degrees'")


def target(prompt: Prompt) -> tuple[float, float]:
    """The point on the circle in a prompt's direction."""
    angle = math.radians(angle_of(prompt.text))
    return RADIUS * math.cos(angle), RADIUS * math.sin(angle)


def targets(texts: Iterable[str]) -> dict[str, tuple[float, float]]:
    """The `target` of every text that is a direction, by text; those of other worlds have none."""
    points = dict[str, tuple[float, float]]()
    for text in texts:
        with suppress(ConfigError):
            points[text] = target(Prompt(text))
    return points


@checked_options
@dataclass(frozen=True)
class DirectionReward:
    """Closeness to the target point. soft: exp(-d^2 / (2 WIDTH^2)); strict: d < 0.8; graded: 1, 0.5
    (d < 1.6) or 0.
    """

    form: Form = "soft"

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Points [sample, 2, 1, 1] and as many prompts -> [sample]."""
        _require_points(images, prompts)
        # the target of each distinct text once: many samples have the same prompt
        known = {prompt.text: prompt for prompt in prompts}
        place = {text: number for number, text in enumerate(known)}
        points = torch.tensor([target(prompt) for prompt in known.values()], device=images.device)
        targets = points[[place[prompt.text] for prompt in prompts]]
        distance = (images.flatten(1) - targets).norm(dim=1)
        if self.form == "soft":
            return torch.exp(-distance.square() / (2 * WIDTH**2))
        near, middling = (distance < 0.8).float(), (distance < 1.6).float()
        return near if self.form == "strict" else (near + middling) / 2


@dataclass(frozen=True)
class DensityReward:
    """log p(point) under the world's data, in nats: how typical a point is of the data, independent
    of the prompt.

    -1.1 at a mode's centre, -5.3 on the circle halfway between two modes. Maximising closeness to a
    prompt's direction lowers the density if no mode has that direction.
    """

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Points [sample, 2, 1, 1] -> [sample]."""
        _require_points(images, prompts)
        data, points = ring(), images.flatten(1).float().cpu()
        return data.log_marginal(points, torch.zeros(len(points))).to(images.device)


def _require_points(images: Tensor, prompts: Sequence[Prompt]) -> None:
    if images.shape != (len(prompts), 2, 1, 1):
        shape = tuple(images.shape)
        raise RewardError(
            f"points [{len(prompts)}, 2, 1, 1] are needed, one per prompt; got {shape}"
        )
