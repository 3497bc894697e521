"""A written file against the run it comes from: the same image, once with the run's policy and once
with the file's weights in a plain pipeline.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowrl.core.errors import CheckpointError
from flowrl.core.types import Prompt
from flowrl.rollout import initial_noise, sample_images
from flowrl.run.build import make_policy, policy_options
from flowrl.run.config import RunConfig
from flowrl.run.export import first_weights
from flowrl.run.models.load import load_policy
from flowrl.run.models.lora_files import Lora, read_lora
from flowrl.run.models.weights import frozen_loras
from flowrl.run.saved import SavedWeights

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}
"""The largest difference of a pixel in [0, 1] that rounding makes, by precision of the network."""
STEPS = 4


def largest_difference(saved: SavedWeights, config: RunConfig, written: Path, form: str) -> str:
    """Compare an image of the run's policy with one of the pipeline with the written LoRA, or of
    the written pipeline; both from the same noise. One line with the result.

    Raises `CheckpointError` if they differ by more than rounding.
    """
    on_gpu = torch.cuda.is_available()
    config = config.replace(device=config.policy.device if on_gpu else "cpu")
    policy: Any = make_policy(config)
    tensors = saved.tensors()
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            parameter.copy_(tensors[name])
    ran = _image(policy)
    del policy
    bare = replace(policy_options(config), fixed=True, gradient_checkpointing=False)
    bare = replace(bare, adapter=None, frozen_adapters=None)
    plain = load_policy(str(written) if form == "merged" else str(config.policy.model), bare)
    if form != "merged":
        kind = type(plain.pipe)
        if started := first_weights(config):
            plain.transformer.load_state_dict(started)
        loras = {"exported": read_lora(written, kind), **frozen_loras(config.policy, kind)}
        for name, lora in loras.items():
            plain.pipe.load_lora_weights(Lora(lora.tensors).named, adapter_name=name)
        plain.pipe.set_adapters([*loras])
    difference = float((_image(plain) - ran).abs().max())
    most = TOLERANCES[config.policy.dtype]
    if not difference <= most:
        raise CheckpointError(
            f"{written} gives another image than the run: a pixel differs by {difference:.3g}, at"
            f" most {most:g} is rounding"
        )
    return f"Verified: an image of the run and of the file differ by at most {difference:.2g}"


def _image(policy: Any) -> torch.Tensor:
    """An image of the current weights, in main memory."""
    noise = initial_noise(policy, 1)
    (batch,) = sample_images(policy, [Prompt("a photo of a red cube")], noise, STEPS)
    return batch.images.float().cpu()
