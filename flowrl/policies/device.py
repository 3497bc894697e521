"""Names of devices."""

import re

import torch

from flowrl.core.errors import require


def device_of(name: str | torch.device) -> torch.device:
    """The device `name`: cpu, cuda, or cuda:NUMBER. Raises `ConfigError` for any other name, or a
    GPU that does not exist.
    """
    form, count = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", str(name)), torch.cuda.device_count()
    allowed = f"cpu, cuda or cuda:NUMBER; PyTorch {torch.__version__} sees {count} GPUs"
    fits = form is not None and (form[0] == "cpu" or int(form[1] or 0) < count)
    require(fits, "device", str(name), allowed)
    return torch.device(name)
