"""ImageReward-v1.0 as a reward, for an environment of its own: its package requires older versions
of transformers.

In the environment of the reward (--no-deps, because serving does not need the versions of
transformers that flowrl requires):

    python3.11 -m venv ~/image-reward && . ~/image-reward/bin/activate
    pip install image-reward==1.5 'transformers<4.48'
    pip install --no-deps -e .    # in the clone of flowrl
    pip install torch numpy scipy einops jaxtyping beartype safetensors tyro rich pyyaml pillow
    pip install fastapi uvicorn python-multipart prometheus-client jinja2
    flowrl serve-reward "docs/recipes/image_reward.py:ImageRewardScore(device='cuda')" --port 8000

In the environment of the run:

    flowrl train --reward "remote(url='http://127.0.0.1:8000')"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import Prompt
from flowrl.rewards.images import to_pillow


@dataclass(frozen=True)
class ImageRewardScore:
    """Human preference, standardised over its training data: about -2 to 2, higher is better.

    Source: ImageReward (arXiv 2304.05977) and its public code, which resizes images to 224 pixels
    and cuts prompts after 35 tokens. Weights (Apache-2.0, 1.8 GB) are downloaded at the first
    score. `model`: a name that the package knows, or a file.
    """

    model: str = "ImageReward-v1.0"
    device: str = "cpu"

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[sample, channel, height, width] in [0, 1] and as many prompts -> [sample]."""
        network = _load(self.model, self.device)
        pairs = zip(to_pillow(images), prompts, strict=True)
        return torch.tensor([float(network.score(prompt.text, image)) for image, prompt in pairs])


@lru_cache(maxsize=1)
def _load(model: str, device: str) -> Any:
    try:
        package = import_module("ImageReward")
    except ImportError as error:
        raise ConfigError(
            f"image_reward: the package image-reward cannot be imported ({error}); see the head of"
            " its file"
        ) from error
    return package.load(model, device=device)
