"""Optimisers by name, and the scaling of a loss whose gradients float16 could not hold."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError, TrainingError, require

OPTIMISERS = ("adamw", "adamw-8bit")
BETAS = (0.9, 0.99)


def make_optimiser(name: str, parameters: Sequence[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) with betas (0.9, 0.99); "adamw-8bit" keeps both moments in 8 bits (arXiv 2110.02861).

    The second needs the package bitsandbytes and quantises only tensors of 4,096 elements or more. Raises `ConfigError` for an
    unknown name, or where bitsandbytes is missing.
    """
    require(name in OPTIMISERS, "optimiser", name, f"one of {', '.join(OPTIMISERS)}")
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=weight_decay)
    try:
        bitsandbytes: Any = import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(
            "optimiser = 'adamw-8bit' needs the package bitsandbytes: pip install bitsandbytes, or adamw"
        ) from error
    return bitsandbytes.optim.AdamW8bit(parameters, lr=lr, betas=BETAS, weight_decay=weight_decay)


class LossScale:
    """The loss times `value`, the gradients divided by it again, so that small ones survive float16 on their way.

    A step whose gradients are not finite is left out and halves the value; `patience` good steps in a row double it. As
    `torch.amp.GradScaler` (Micikevicius et al., arXiv 1710.03740), but it looks at the norm over all processes' shards, so that
    all decide alike. `value` 0: no scaling, and a gradient that is not finite is the caller's to refuse.
    """

    def __init__(self, value: float, patience: int = 2000) -> None:
        require(value == 0 or value >= 1, "loss_scale", value, "1 or more, or 0 for none")
        self.value, self.patience, self.good, self.skipped = float(value), patience, 0, 0

    @property
    def on(self) -> bool:
        """Whether anything is scaled."""
        return self.value > 0

    def scaled(self, loss: Tensor) -> Tensor:
        """What to differentiate."""
        return loss * self.value if self.on else loss

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the gradients by the value."""
        if self.on:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / self.value)

    def accepts(self, norm: Tensor) -> bool:
        """Whether to take a step with gradients of this norm; counts it, and moves the value. Without scaling: always.

        Raises `TrainingError` where gradients are not finite even unscaled: then it is not float16's range.
        """
        if not self.on:
            return True
        if bool(torch.isfinite(norm)):
            self.good += 1
            if self.good >= self.patience:
                self.value, self.good = self.value * 2, 0
            return True
        if self.value <= 1:
            raise TrainingError(
                "the gradient is not finite although the loss scale has come down to 1: lower lr, or use bfloat16"
            )
        self.value, self.good, self.skipped = max(self.value / 2, 1.0), 0, self.skipped + 1
        return False

    def state(self) -> Tensor:
        """Value, good steps in a row and steps left out, [3]."""
        return torch.tensor([self.value, self.good, self.skipped], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Go on from `state`."""
        self.value, self.good, self.skipped = float(state[0]), int(state[1]), int(state[2])
