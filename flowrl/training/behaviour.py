"""Copies of the trained weights that follow them slowly: the old policy and the averages of a
forward-process loss.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from flowrl.core.forward import WeightCopy
from flowrl.core.protocols import FlowPolicy, ForwardLoss, PolicyLoss
from flowrl.distributed import Distributed
from flowrl.training.checkpoint import (
    Checkpoint,
    full_state,
    load_matching,
    load_weights,
    prefixed,
)
from flowrl.training.optim import update_average, weights_replaced


class Behaviour:
    """A copy of a policy's trained `parameters` that follows them as the loss declares in `copy`.

    `is_current`: the copy equals the policy's weights, because it is new, or its decay was 0 and no
    step has followed. Its velocity is then the current one without gradient and needs no
    evaluation.
    """

    def __init__(
        self, copy: WeightCopy, policy: FlowPolicy, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.copy, self.policy = copy, policy
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
        with weights_replaced(self.policy, self.parameters, self.values):
            yield


def reference_weights(
    folder: str,
    policy: FlowPolicy,
    parameters: Mapping[str, nn.Parameter],
    distributed: Distributed,
) -> Callable[[], AbstractContextManager[None]]:
    """A function whose contexts give the policy the weights of the reference: its base model, or
    the averaged weights of the finished run in `folder`. Raises `ConfigError` if these do not fit.
    """
    if not folder:
        return policy.reference
    teacher = Behaviour(WeightCopy(), policy, parameters)
    teacher.is_current = False
    tensors = load_weights(Path(folder) / "weights.safetensors") if distributed.is_main else {}
    load_matching(dict(zip(teacher.names, teacher.values, strict=True)), tensors, distributed)
    return teacher.weights


class Copies:
    """All copies that a loss declares, by name. `steps` counts the optimizer's steps."""

    def __init__(
        self,
        loss: PolicyLoss | ForwardLoss,
        policy: FlowPolicy,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        declared = loss.copies if isinstance(loss, ForwardLoss) else {}
        self.by_name = {
            name: Behaviour(copy, policy, parameters) for name, copy in declared.items()
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

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, copy in self.by_name.items():
            tensors |= prefixed(f"copy.{name}.", dict(zip(copy.names, copy.values, strict=True)))
        return tensors

    def state(self) -> Checkpoint:
        """The state of all copies. The main process has full tensors, gathered from all processes
        if they are sharded.
        """
        current = {f"copy.{name}.current": copy.is_current for name, copy in self.by_name.items()}
        return full_state(self._tensors(), {"optimizer_steps": self.steps, **current})

    def restore(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], distributed: Distributed
    ) -> None:
        """Continue from `state()`, in place, with the main process's `tensors`. Raises
        `ConfigError` if they do not contain these copies.
        """
        load_matching(self._tensors(), tensors, distributed)
        for name, copy in self.by_name.items():
            copy.is_current = values[f"copy.{name}.current"]
        self.steps = values["optimizer_steps"]
