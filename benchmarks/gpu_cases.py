"""What benchmarks/gpu.py measures: models at full size and tiny ones, a base setting each, and one
change at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flowrl.core.policy_options import Precision
from flowrl.policies import SD3, Family, Flux
from flowrl.run.models.memory import ARCHITECTURES, Architecture
from flowrl.testing import tiny

DECODER = ARCHITECTURES["flux.1-dev"].decoder
"""The image decoder of SD3, SD3.5 and FLUX.1, an `AutoencoderKL`."""

METHODS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")


@dataclass(frozen=True)
class Setting:
    """What is varied. Sizes per network call are in latents, twice as many with guidance above
    1.
    """

    prompts: int = 1
    members: int = 24
    steps: int = 10
    updates: int = 2
    resolution: int = 512
    rank: int = 32
    dtype: Precision = "bfloat16"
    max_batch: int = 24
    micro_batch: int = 8
    decode_batch: int = 8
    decode_dtype: Precision = "float32"
    checkpointing: bool = True
    compile: str = ""
    guidance: float = 1.0
    kl_weight: float = 0.0
    offload: bool = False
    attention: str = ""
    fused: bool = True


@dataclass(frozen=True)
class Model:
    """How a model is built: (device, dtype of the network) -> pipeline, its family, and its base
    setting.
    """

    pipeline: Callable[[str, torch.dtype], Any]
    family: SD3 | Flux
    tokens: int
    base: Setting


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within this context new floating-point tensors are `dtype`."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


def random_pipeline(
    name: str, device: str, dtype: torch.dtype, known: Architecture | None = None
) -> Any:
    """The pipeline of an architecture with random weights, without text encoders (see
    `RandomEmbeddings`).

    `known`: a variant of the architecture `name`. The image decoder has the published size. Weights
    are made on `device` in `dtype` at once: FLUX.1 in bfloat16 never takes more than 24 GB.
    """
    diffusers = import_module("diffusers")
    sd3 = name.startswith("sd3")
    scale = (
        {"scaling_factor": 1.5305, "shift_factor": 0.0609}
        if sd3
        else {"scaling_factor": 0.3611, "shift_factor": 0.1159}
    )
    grid = {"use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}
    grid = {"flux.1-dev": grid, "flux.1-schnell": {"shift": 1.0}}.get(name, {"shift": 3.0})
    with torch.device(device):
        decoder = diffusers.AutoencoderKL(**DECODER, **scale).eval()
    with default_dtype(dtype):
        transformer = (known or ARCHITECTURES[name]).build(device)
    pipeline = diffusers.StableDiffusion3Pipeline if sd3 else diffusers.FluxPipeline
    encoders = {
        f"{part}{n}": None
        for part in ("text_encoder", "tokenizer")
        for n in ("", "_2", *("_3",) * sd3)
    }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**grid)
    return pipeline(transformer=transformer, vae=decoder, scheduler=scheduler, **encoders)


class RandomEmbeddings(Family):
    """`family` with noise of the true shape as embeddings: words [tokens, width] and pooled
    [width], float32.

    `tokens` is the length of the whole embedding (SD3: CLIP's and T5's together). Equal texts have
    equal embeddings.
    """

    def __init__(self, family: Family, tokens: int) -> None:
        self.tokens = tokens
        for name in dir(family):
            if not (name.startswith("_") or name == "encode"):
                setattr(self, name, getattr(family, name))

    def encode(
        self, pipe: Any, texts: Sequence[str], tokens: int, device: torch.device
    ) -> list[Mapping[str, Tensor]]:
        """The embeddings of each prompt; `tokens` (of T5 alone) is not used."""
        config, rows = pipe.transformer.config, []
        for text in texts:
            generator = torch.Generator().manual_seed(int.from_bytes(text.encode()[-7:], "big"))
            words = torch.randn(self.tokens, config.joint_attention_dim, generator=generator)
            pooled = torch.randn(config.pooled_projection_dim, generator=generator)
            rows.append({"words": words, "pooled": pooled})
        return rows


SMALL = Setting(
    members=3,
    steps=4,
    resolution=16,
    rank=4,
    dtype="bfloat16",
    max_batch=6,
    micro_batch=4,
    decode_batch=4,
)
MODELS = {
    "sd3.5-medium": Model(partial(random_pipeline, "sd3.5-medium"), SD3(), 333, Setting()),
    "sd3.5-large": Model(
        partial(random_pipeline, "sd3.5-large"),
        SD3(),
        333,
        Setting(members=12, max_batch=12, micro_batch=4),
    ),
    "flux.1-dev": Model(
        partial(random_pipeline, "flux.1-dev"),
        Flux(),
        512,
        Setting(members=12, steps=6, max_batch=12, micro_batch=4),
    ),
    "tiny-sd3": Model(lambda device, dtype: tiny.tiny_sd3(), SD3(), 64, SMALL),
    "tiny-flux": Model(lambda device, dtype: tiny.tiny_flux(), Flux(), 24, SMALL),
}


def variants(base: Setting, compiler: str) -> dict[str, dict[str, Any]]:
    """One change of the base each, by name."""
    compiled = "" if base.compile else compiler
    kernels = (
        ("_native_cudnn", "_native_flash", "_native_math")
        if compiler == "inductor"
        else ("_native_math",)
    )
    return {
        "base": {},
        f"checkpointing {'off' if base.checkpointing else 'on'}": {
            "checkpointing": not base.checkpointing
        },
        f"compile {compiled or 'off'}": {"compile": compiled},
        "micro-batch 1": {"micro_batch": 1},
        f"micro-batch {base.micro_batch * 2}": {"micro_batch": base.micro_batch * 2},
        f"max-batch {max(1, base.max_batch // 4)}": {"max_batch": max(1, base.max_batch // 4)},
        "decode one by one": {"decode_batch": 1},
        f"decode {base.decode_batch * 4}": {"decode_batch": base.decode_batch * 4},
        "decode bfloat16": {"decode_dtype": "bfloat16"},
        "float32 network": {"dtype": "float32"},
        "guidance 4.5": {"guidance": 4.5},
        "KL to the base": {"kl_weight": 0.04},
        **{f"attention {name}": {"attention": name} for name in kernels},
        "optimizer in a loop": {"fused": False},
        "nodes on the GPU" if base.offload else "nodes offloaded": {"offload": not base.offload},
    }


@dataclass(frozen=True)
class Case:
    """One configuration: a line of the results."""

    model: str
    method: str
    variant: str
    setting: Setting


def cases(
    models: Sequence[str], methods: Sequence[str], chosen: str, changes: dict[str, Any]
) -> Iterator[Case]:
    """For every model the methods with its base, then the first method with every variant ("all",
    "none" or names).
    """
    for model in models:
        base = replace(MODELS[model].base, **changes)
        yield from (Case(model, method, "base", base) for method in methods)
        # which takes minutes on a CPU
        compiler = "eager" if model.startswith("tiny") else "inductor"
        for name, change in variants(base, compiler).items():
            wanted = chosen == "all" or name in chosen.split(",")
            if change and wanted:
                yield Case(model, methods[0], name, replace(base, **change))


def parse_changes(words: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs as changes of a `Setting`."""
    defaults, changes = asdict(Setting()), {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in defaults:
            raise SystemExit(f"--set {word}: no such setting; allowed: {', '.join(defaults)}")
        kind = type(defaults[name])
        try:
            changes[name] = (
                text.lower() in ("1", "true", "on", "yes") if kind is bool else kind(text)
            )
        except ValueError:
            raise SystemExit(f"--set {word}: a {kind.__name__} is needed") from None
    return changes
