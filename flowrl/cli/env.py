"""`flowrl env`."""

import os
import platform
from dataclasses import dataclass

from flowrl.parts.plugins import versions
from flowrl.workers import usable_cores

PACKAGES = (
    "flowrl-lab",
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "jaxtyping",
    "beartype",
    "tyro",
    "pydantic",
    "numpy",
)


@dataclass(frozen=True)
class Env:
    """Print versions and cores, and with --devices the GPUs: what a bug report needs."""

    devices: bool = False
    """Ask torch for its threads and GPUs as well; importing it takes a second or more."""

    def main(self) -> int:
        """Print one fact per line."""
        found = environment() | (devices() if self.devices else {})
        print("\n".join(f"{name:14s} {value}" for name, value in found.items()))
        return 0


def environment() -> dict[str, str]:
    """Packages, system and processors."""
    cores = f"{usable_cores()} of {os.cpu_count()}"
    return versions(PACKAGES) | {
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CPU cores": cores,
    }


def devices() -> dict[str, str]:
    """What torch uses: threads, CUDA and its GPUs."""
    import torch

    found = {"torch threads": str(torch.get_num_threads())}
    found["CUDA"] = str(torch.version.cuda) if torch.cuda.is_available() else "no"
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(number)
        found[f"cuda:{number}"] = f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB"
    return found
