"""The trained weights: the scale of the loss, their average, and the copies that follow them
slowly, the old policy and the averages of a forward-process loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from flowrl.core.errors import TrainingError
from flowrl.core.forward import WeightCopy
from flowrl.core.processes import Processes
from flowrl.core.protocols import FlowPolicy, extras


class LossScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, which scales the loss so that small gradients survive float16 (arXiv
    1710.03740), with a clip and a count of skipped steps.

    A step whose gradients are not finite is skipped, counted in `skipped`, and halves the scale;
    2,000 finite steps in a row double it. All processes decide alike: replicated gradients are
    summed before, and PyTorch reduces the flag of sharded ones.

    Args:
        init_scale: initial scale; 0: the loss is not scaled and every step is taken.
        device: the device of the loss.
    """

    def __init__(self, init_scale: float, device: torch.device) -> None:
        super().__init__(device.type, init_scale=init_scale or 1.0, enabled=init_scale > 0)
        # initialised by the first loss, which a process may not have
        self.scale(torch.zeros((), device=device))
        self.skipped = 0

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> float:
        """Undo the scale of the gradients and clip them to the norm `largest`; returns their norm
        before.
        """
        self.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm: Any = nn.utils.clip_grad_norm_(parameters, largest)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the optimizer's step unless scaled gradients are not finite; returns whether it was
        taken.

        Raises `TrainingError` if gradients are not finite at scale 1: float16's range is then not
        the reason.
        """
        before = self.get_scale()
        self.step(optimizer)
        self.update()
        if self.get_scale() >= before:
            return True
        if before <= 1:
            raise TrainingError(
                "the gradient is not finite at loss scale 1: lower learning_rate, or use bfloat16"
            )
        self.skipped += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; none without scaling."""
        return super().state_dict() | ({"skipped": self.skipped} if self.is_enabled() else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the state of a run without scaling has no effect."""
        if self.is_enabled() and state_dict:
            super().load_state_dict(state_dict)
            self.skipped = state_dict["skipped"]


def update_average(
    average: Sequence[Tensor], parameters: Sequence[nn.Parameter], decay: float
) -> None:
    """The exponential moving average of the weights, in place: average <- decay average + (1 -
    decay) weight.

    On CUDA one kernel updates many tensors.

    Args:
        average: the averages.
        parameters: the weights, in the same order.
        decay: the decay per step, in [0, 1].
    """
    get_ema_multi_avg_fn(decay)(tuple(average), tuple(parameters), 0)


@contextmanager
def weights_replaced(
    policy: FlowPolicy,
    parameters: Sequence[nn.Parameter],
    values: Sequence[Tensor],
    processes: Processes = Processes(),
) -> Iterator[None]:
    """A context in which the policy's `parameters` have other `values`, in the same order."""
    network = getattr(extras(policy, "velocity_network"), "velocity_network", None)
    before = processes.put(parameters, values, network)
    try:
        yield
    finally:
        processes.put(parameters, before, network)


class Behaviour:
    """A copy of a policy's trained `parameters` that follows them as the loss declares in `copy`.

    `is_current`: the copy equals the policy's weights, because it is new, or its decay was 0 and no
    step has followed. Its velocity is then the current one without gradient and needs no
    evaluation.
    """

    def __init__(
        self,
        copy: WeightCopy,
        policy: FlowPolicy,
        parameters: Mapping[str, nn.Parameter],
        processes: Processes = Processes(),
    ) -> None:
        self.copy, self.policy, self.processes = copy, policy, processes
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.values = [parameter.detach().clone() for parameter in self.parameters]
        self.is_current = True

    def after(self, event: Literal["update", "iteration"], steps: int) -> None:
        """Update the copy after an update (optimizer step number `steps`), or at the end of an
        iteration, if it follows then.
        """
        if event == "update":
            self.is_current = False
        if self.copy.every == event:
            decay = self.copy.decay.at(steps)
            update_average(self.values, self.parameters, decay)
            self.is_current = self.is_current or decay == 0

    def samples(self, steps: int) -> bool:
        """Whether trajectories are sampled with this copy after `steps` optimizer steps."""
        begin = self.copy.sample_from
        return begin is not None and steps >= begin

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within this context the policy has the copy's weights; nothing is replaced if they are
        current.
        """
        if self.is_current:
            yield
            return
        with weights_replaced(self.policy, self.parameters, self.values, self.processes):
            yield


class Copies:
    """The copies that a loss declares (`copies`), by name. `steps` counts the optimizer's steps."""

    def __init__(
        self,
        declared: Mapping[str, WeightCopy],
        policy: FlowPolicy,
        parameters: Mapping[str, nn.Parameter],
        processes: Processes = Processes(),
    ) -> None:
        self.by_name = {
            name: Behaviour(copy, policy, parameters, processes) for name, copy in declared.items()
        }
        self.steps = 0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Within this context the policy has the weights for sampling: its own, or those of a
        copy.
        """
        chosen = [copy for copy in self.by_name.values() if copy.samples(self.steps)]
        with chosen[0].weights() if chosen else nullcontext():
            yield

    def after(self, event: Literal["update", "iteration"]) -> None:
        """Count an optimizer step if the event is an update, and update the copies."""
        self.steps += event == "update"
        for copy in self.by_name.values():
            copy.after(event, self.steps)

    @torch.no_grad()
    def renew(self) -> None:
        """Set all copies to the current weights."""
        for copy in self.by_name.values():
            for value, parameter in zip(copy.values, copy.parameters, strict=True):
                value.copy_(parameter)

    def tensors(self) -> dict[str, Tensor]:
        """The values of all copies, by "copy.NAME.PARAMETER"."""
        return {
            f"copy.{name}.{parameter}": value
            for name, copy in self.by_name.items()
            for parameter, value in zip(copy.names, copy.values, strict=True)
        }

    @property
    def counters(self) -> dict[str, Any]:
        """The plain values of their state."""
        current = {f"copy.{name}.current": copy.is_current for name, copy in self.by_name.items()}
        return {"optimizer_steps": self.steps, **current}

    @counters.setter
    def counters(self, values: Mapping[str, Any]) -> None:
        for name, copy in self.by_name.items():
            copy.is_current = values[f"copy.{name}.current"]
        self.steps = values["optimizer_steps"]
