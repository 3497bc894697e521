"""`flowrl env`."""

import os
import platform
from dataclasses import dataclass

PACKAGES = (
    "flowrl-lab", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "jaxtyping", "beartype", "tyro",
    "pydantic", "numpy",
)  # fmt: skip


@dataclass(frozen=True)
class Env:
    """Print versions, devices and cores: what a bug report needs."""

    def main(self) -> int:
        """Print one fact per line."""
        print("\n".join(f"{name:14s} {value}" for name, value in environment().items()))
        return 0


def environment() -> dict[str, str]:
    """Packages, system, processors and GPUs."""
    import torch

    from flowrl.training.run import versions

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = versions(PACKAGES)
    found |= {"Python": platform.python_version(), "system": platform.platform(), "CPU cores": f"{cores} of {os.cpu_count()}"}
    found["torch threads"] = str(torch.get_num_threads())
    found["CUDA"] = str(torch.version.cuda) if torch.cuda.is_available() else "no"
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(number)
        found[f"cuda:{number}"] = f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB"
    return found
