"""What benchmarks/gpu.py measures: models at full size and tiny ones, a base setting each, and one change at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flowrl.policies.architectures import architecture
from flowrl.policies.flux import Flux
from flowrl.policies.sd3 import SD3
from flowrl.testing import tiny

METHODS = ("flow-grpo", "stepwise-flow-grpo", "tp-grpo")


@dataclass(frozen=True)
class Setting:
    """What is varied. Sizes per network call are in latents, twice as many with guidance above 1."""

    prompts: int = 1
    members: int = 24
    steps: int = 10
    updates: int = 2
    resolution: int = 512
    rank: int = 32
    dtype: str = "bfloat16"
    max_batch: int = 24
    micro_batch: int = 8
    decode_batch: int = 8
    decode_dtype: str = "float32"
    checkpointing: bool = True
    compile: str = ""
    guidance: float = 1.0
    kl_weight: float = 0.0
    offload: bool = False


@dataclass(frozen=True)
class Model:
    """How a model is built: (device, dtype of the network) -> pipeline, its family, and its base setting."""

    pipeline: Callable[[str, torch.dtype], Any]
    family: SD3 | Flux
    tokens: int
    base: Setting


SMALL = Setting(members=3, steps=4, resolution=16, rank=4, dtype="bfloat16", max_batch=6, micro_batch=4, decode_batch=4)
MODELS = {
    "sd3.5-medium": Model(architecture("sd3.5-medium").pipeline, SD3(), 333, Setting()),
    "sd3.5-large": Model(architecture("sd3.5-large").pipeline, SD3(), 333, Setting(members=12, max_batch=12, micro_batch=4)),
    "flux.1-dev": Model(
        architecture("flux.1-dev").pipeline, Flux(), 512, Setting(members=12, steps=6, max_batch=12, micro_batch=4)
    ),
    "tiny-sd3": Model(lambda device, dtype: tiny.tiny_sd3(), SD3(), 64, SMALL),
    "tiny-flux": Model(lambda device, dtype: tiny.tiny_flux(), Flux(), 24, SMALL),
}


def variants(base: Setting, compiler: str) -> dict[str, dict[str, Any]]:
    """One change of the base each, by name."""
    compiled = "" if base.compile else compiler
    return {
        "base": {},
        f"checkpointing {'off' if base.checkpointing else 'on'}": {"checkpointing": not base.checkpointing},
        f"compile {compiled or 'off'}": {"compile": compiled},
        "micro-batch 1": {"micro_batch": 1},
        f"micro-batch {base.micro_batch * 2}": {"micro_batch": base.micro_batch * 2},
        f"max-batch {max(1, base.max_batch // 4)}": {"max_batch": max(1, base.max_batch // 4)},
        "decode one by one": {"decode_batch": 1},
        "decode bfloat16": {"decode_dtype": "bfloat16"},
        "float32 network": {"dtype": "float32"},
        "guidance 4.5": {"guidance": 4.5},
        "KL to the base": {"kl_weight": 0.04},
        "nodes on the GPU" if base.offload else "nodes offloaded": {"offload": not base.offload},
    }


@dataclass(frozen=True)
class Case:
    """One configuration: a line of the results."""

    model: str
    method: str
    variant: str
    setting: Setting


def cases(models: Sequence[str], methods: Sequence[str], chosen: str, changes: dict[str, Any]) -> Iterator[Case]:
    """For every model the methods with its base, then the first method with every variant ("all", "none" or names)."""
    for model in models:
        base = replace(MODELS[model].base, **changes)
        yield from (Case(model, method, "base", base) for method in methods)
        compiler = "eager" if model.startswith("tiny") else "inductor"  # which takes minutes on a CPU
        for name, change in variants(base, compiler).items():
            wanted = chosen == "all" or name in chosen.split(",")
            if change and wanted:
                yield Case(model, methods[0], name, replace(base, **change))


def parse_changes(words: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs as changes of a `Setting`."""
    defaults, found = asdict(Setting()), {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in defaults:
            raise SystemExit(f"--set {word}: no such setting; allowed: {', '.join(defaults)}")
        kind = type(defaults[name])
        try:
            found[name] = text.lower() in ("1", "true", "on", "yes") if kind is bool else kind(text)
        except ValueError:
            raise SystemExit(f"--set {word}: a {kind.__name__} is needed") from None
    return found
