"""Devices by name, checked before anything is moved to them."""

import torch

from flowrl.errors import ConfigError, require


def device_of(name: str | torch.device) -> torch.device:
    """The device called `name`: cpu, cuda, or cuda:NUMBER. Raises `ConfigError` for another word, or a GPU that is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device = {name!r} is not allowed: cpu, cuda or cuda:NUMBER") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        here = f"cpu: PyTorch {torch.__version__} sees no GPU" if count == 0 else f"cuda:0 to cuda:{count - 1}, or cpu"
        require((device.index or 0) < count, "device", str(name), here)
    return device
