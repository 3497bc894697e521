"""A written file against the run it comes from: the same image, once with the run's policy and once
with a plain pipeline that has loaded the file, or, in a format that diffusers does not load, has
the matrices that flowrl has read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from flowrl.core.errors import CheckpointError
from flowrl.core.prompt import Prompt, ReferenceImage
from flowrl.rollout import initial_noise, sample_images
from flowrl.run.build import make_policy, policy_options
from flowrl.run.config import RunConfig
from flowrl.run.export import first_weights
from flowrl.run.models.load import load_policy
from flowrl.run.models.lora_files import Lora, read_lora
from flowrl.run.models.lora_formats import in_diffusers
from flowrl.run.models.weights import frozen_loras
from flowrl.run.reading import reading
from flowrl.run.saved import SavedWeights
from flowrl.run.trained import put_weights

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}
"""The largest difference of a pixel in [0, 1] that rounding makes, by precision of the network or
of the file.
"""
TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STEPS = 4


def largest_difference(saved: SavedWeights, config: RunConfig, written: Path, form: str) -> str:
    """Compare an image of the run's policy with one of the pipeline with the written LoRA, or of
    the written pipeline; both from the same noise. One line with the result.

    Raises `CheckpointError` if they differ by more than rounding.
    """
    on_gpu = torch.cuda.is_available()
    config = config.replace(device=config.policy.device if on_gpu else "cpu")
    policy: Any = make_policy(config)
    put_weights(policy, saved)
    ran = _image(policy)
    del policy
    bare = replace(policy_options(config), fixed=True, gradient_checkpointing=False)
    bare = replace(bare, adapter=None, frozen_adapters=None)
    plain = load_policy(str(written) if form == "merged" else str(config.policy.model), bare)
    how = "the file was loaded by diffusers"
    if form != "merged":
        if started := first_weights(config):
            plain.transformer.load_state_dict(started)
        if not _load(plain.pipe, written, form, config):
            how = "the file was read by flowrl; diffusers does not load this format"
    difference = float((_image(plain) - ran).abs().max())
    most = max(TOLERANCES[config.policy.dtype], TOLERANCES[_type_of(written)])
    if not difference <= most:
        raise CheckpointError(
            f"{written} gives another image than the run: a pixel differs by {difference:.3g}, at"
            f" most {most:g} is rounding"
        )
    return (
        f"Verified: an image of the run and of the file differ by at most {difference:.2g} ({how})"
    )


def _load(pipe: Any, written: Path, form: str, config: RunConfig) -> bool:
    """Load the `written` LoRA and the run's frozen ones; whether diffusers read the former."""
    kind = type(pipe)
    frozen = frozen_loras(config.policy, kind)
    by_diffusers = in_diffusers(form, kind.__name__)
    if by_diffusers:
        with reading(written, CheckpointError):
            given = {"weight_name": written.name, "adapter_name": "exported"}
            pipe.load_lora_weights(str(written.parent.resolve()), **given)
    loras = frozen if by_diffusers else {"exported": read_lora(written, kind), **frozen}
    for name, lora in loras.items():
        pipe.load_lora_weights(Lora(lora.tensors).named, adapter_name=name)
    pipe.set_adapters(["exported", *frozen])
    return by_diffusers


def _type_of(written: Path) -> str:
    """The type of the matrices in a LoRA, or of the transformer's weights in a merged model."""
    is_file = written.is_file()
    path = written if is_file else next((written / "transformer").glob("*.safetensors"))
    with reading(path, CheckpointError), safe_open(path, "pt") as file:
        parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
        kinds = {part.get_dtype() for part in parts if len(part.get_shape()) > 1}
    return min((TYPES[kind] for kind in kinds if kind in TYPES), default="float32")


def _image(policy: Any) -> torch.Tensor:
    """An image of the current weights, in main memory."""
    noise = initial_noise(policy, 1)
    grey = ReferenceImage.of_pixels(torch.full((3, 64, 64), 0.5))
    prompt = Prompt("a photo of a red cube", images=(grey,) * policy.family.images[0])
    (batch,) = sample_images(policy, [prompt], noise, STEPS)
    return batch.images.float().cpu()
